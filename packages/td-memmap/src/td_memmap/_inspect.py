"""Look at a save by its metadata alone, or at its files: no leaf is opened, no class is required, nothing is unpickled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from td_core import Tree
from td_core.spi import Serializer, show_size, visit

from . import _file_names, _fs
from ._archive import ArchiveTree
from ._directory_layouts import OUTER
from ._fs import DirectoryTree, Parts
from ._load import retry_on_replace
from ._meta import FileTree, is_outer, read_node
from ._object_trees import open_tree
from ._plan import GENERAL


def inspect(path: Any) -> Tree:
    """Return the tree of a save: names, kinds, shapes, dtypes, sizes and the plugins that wrote the nodes.

    Args:
        path: directory or archive of a save, or the directory of a node in a save; also a URL or an object store.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        FormatError: the metadata is damaged.

    >>> _ = TensorDict({"a": torch.zeros(3, 2), "n": {"b": 1}}).memmap("save")
    >>> print(inspect("save"))
    save: TensorDict [], 32 bytes
        a: leaf [3, 2] torch.float32, 24 bytes
        n: TensorDict [], 8 bytes
            b: leaf [] torch.int64, 8 bytes
    """
    objects = Serializer.find_objects(path)
    if objects is not None:
        with open_tree(objects) as remote:
            return _inspect(remote, objects.where)
    place = _fs.make_absolute(path)
    name = os.path.basename(place)
    if _fs.is_file(place):
        with ArchiveTree(place) as files:
            return _inspect(files, name)
    tree: Tree = retry_on_replace(place, lambda files: (_inspect(files, name), False))
    return tree


def _inspect(files: FileTree, name: str) -> Tree:
    nodes: list[tuple[Tree, Tree | None]] = []

    def add(parts: Parts, key: str, above: Tree | None) -> Iterator[tuple[Parts, str, Tree | None]]:
        node, below = _inspect_node(files, parts, key)
        nodes.append((node, above))
        if above is not None:
            above.children[key] = node
        return ((place, child, node) for child, place in reversed(below.items()))

    visit(add, (), name, None)
    for node, above in reversed(nodes):
        if above is not None:
            above.nbytes += node.nbytes
    return nodes[0][0]


def _inspect_node(files: FileTree, parts: Parts, key: str) -> tuple[Tree, dict[str, Parts]]:
    meta, level, listing, below = read_node(files, parts)
    provider = meta.get("provider")
    node = Tree(key, _get_kind(meta), provider=None if provider is None else str(provider))
    node.pickled = [name for name in (_file_names.PICKLE, _file_names.STACK_PICKLE) if name in listing]
    if level.sized:
        node.shape = list(level.batch_size)
    elif not level.general:
        node.values = {name: value for name, value in meta.items() if not name.startswith("_")}
    for name in filter(_file_names.is_row_file, listing):
        status = files.stat(parts, name)
        node.nbytes += 0 if status is None else status.st_size
    for name, entry in level.leaves.items():
        place = "/".join((*parts, entry.files[0] + ".memmap"))
        node.children[name] = leaf = Tree(
            name, "leaf", list(entry.shape), str(entry.dtype), entry.nbytes, place=place
        )
        if entry.nested or entry.jagged is not None:
            sizes = (files.stat(parts, file + ".memmap") for file in entry.files)
            leaf.kind, leaf.shape = "nested leaf", None
            leaf.nbytes = next((size.st_size for size in sizes if size is not None), 0)
        node.nbytes += leaf.nbytes
    return node, below


def _get_kind(meta: dict[str, object]) -> str:
    if isinstance(meta.get("kind"), str) and meta.get("_format_version") in GENERAL:
        return str(meta.get("class") or meta["kind"])
    if is_outer(rows := meta.get(OUTER)):
        return str(rows[0].get("class") or rows[0]["kind"])
    name = str(meta.get("_type", "unknown"))
    return name.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]


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
