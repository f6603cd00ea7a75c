"""Print the files of a directory as a tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from td_core.spi import show_size, visit

from . import _fs
from ._fs import DirectoryTree, Parts


def print_directory_tree(path: str | Path, indent: str = "", display_metadata: bool = True) -> str:
    """Print the tree of files of a directory, and return the printed text.

    Args:
        path: the directory.
        indent: prefix of each line.
        display_metadata: whether to print the total size of the files first.

    >>> _ = TensorDict({"a": 1, "n": {"b": 2.5}}).memmap("save")
    >>> text = print_directory_tree("save", display_metadata=False)
    save/
        n/
            b.memmap
            meta.json
        %manifest.json
        a.memmap
        meta.json
    """
    place = _fs.make_absolute(path)
    lines: list[str] = []
    sizes: list[int] = []
    with DirectoryTree.at_path(place) as tree:

        def add(parts: Parts, is_directory: bool) -> Iterator[tuple[Parts, bool]]:
            name = parts[-1] if parts else os.path.basename(place)
            name = name if name.isprintable() else repr(name)[1:-1]
            lines.append(f"{indent}{'    ' * len(parts)}{name}{'/' if is_directory else ''}")
            if is_directory:
                below = sorted(
                    tree.entries(parts).items(), key=lambda item: (not item[1], item[0]), reverse=True
                )
                yield from (((*parts, child), kind) for child, kind in below)
            elif (result := tree.stat_path(parts)) is not None:
                sizes.append(result.st_size)

        visit(add, (), True)
    if display_metadata:
        lines.insert(0, f"{indent}Directory size: {show_size(sum(sizes))}")
    text = "\n".join(lines)
    print(text)
    return text
