"""Print the files of a directory as a tree."""

from __future__ import annotations

import os
from pathlib import Path

from td_core._inspection import make_printable, show_size

from . import _fs
from ._fs import DirectoryTree


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
    total = 0
    with DirectoryTree.at_path(place) as tree:
        todo: list[tuple[tuple[str, ...], bool]] = [((), True)]
        while todo:
            parts, is_directory = todo.pop()
            name = parts[-1] if parts else os.path.basename(place)
            lines.append(f"{indent}{'    ' * len(parts)}{make_printable(name)}{'/' if is_directory else ''}")
            if is_directory:
                below = sorted(
                    tree.entries(parts).items(), key=lambda item: (not item[1], item[0]), reverse=True
                )
                todo.extend(((*parts, child), kind) for child, kind in below)
            else:
                result = tree.stat_path(parts)
                total += 0 if result is None else result.st_size
    if display_metadata:
        lines.insert(0, f"{indent}Directory size: {show_size(total)}")
    text = "\n".join(lines)
    print(text)
    return text
