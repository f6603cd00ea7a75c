"""Sparse files with the structure of a collection, to be filled later."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from td_core._collection import Core, show_path
from td_core.errors import FormatError

from . import _fs, _names
from ._errors import FileTakenError
from ._fs import Tree
from ._load import Loading, read_levels
from ._plan import Plan, make_plan
from ._save import Options, finish, save_directory
from ._tensor import MemoryMappedTensor, map_file

__all__ = ["like_directory"]


def like_directory(tree: Core, prefix: str, options: Options) -> Callable[[], Any]:
    """Return the function that creates the files, or maps those of a save of the same structure.

    Raises:
        FileTakenError: a save of another structure is at ``prefix``.
    """
    prefix = os.path.abspath(prefix)
    if not options.existsok or _fs.status(os.path.join(prefix, _names.META)) is None:
        return save_directory(tree, prefix, options)
    plan = make_plan(tree, robust_key=options.robust_key, allow_pickle=options.allow_pickle, content=False)
    return lambda: _map_existing(tree, plan, prefix, options)


def _map_existing(tree: Core, plan: Plan, prefix: str, options: Options) -> Any:
    with Tree.at_path(prefix) as files:
        _check_same(files, plan, prefix, options)
        mapped: dict[int, Tensor] = {}
        for file in plan.leaves:
            if file.leaf is None:
                continue
            path = os.path.join(prefix, *file.path)
            if not file.nbytes:
                mapped[id(file.leaf)] = MemoryMappedTensor.from_filename(path, file.tensor.dtype, file.shape)
                continue
            fd, _ = files.open(file.parts, file.name, writable=True)
            try:
                mapped[id(file.leaf)] = map_file(fd, path, file.tensor.dtype, file.shape, None, shared=True)
            finally:
                _fs.close(fd)
    return finish(tree, plan, mapped, prefix, options)


def _check_same(files: Tree, plan: Plan, prefix: str, options: Options) -> None:
    found = {}
    try:
        nodes = read_levels(files, Loading(robust_key=options.robust_key))
    except FormatError as error:
        raise FileTakenError(f"cannot create files at {prefix}: what is there is damaged: {error}") from error
    for node in nodes:
        for entry in node.leaves.values():
            shape = None if entry.nested else entry.shape
            path = (*node.parts, entry.files[0] + ".memmap")
            found[path] = (shape, entry.dtype)
    for file in plan.leaves:
        if file.leaf is None:
            continue
        shape = None if file.leaf.is_nested else file.shape
        there = found.pop(file.path, None)
        if there != (shape, file.tensor.dtype):
            shown = "nothing" if there is None else f"shape {there[0] and list(there[0])} of {there[1]}"
            raise FileTakenError(
                f"cannot create files at {prefix}: {show_path(file.key)} is {shown} in the save that is there, and shape "
                f"{shape and list(shape)} of {file.tensor.dtype} here; remove it first, or save() over it"
            )
    if found:
        raise FileTakenError(
            f"cannot create files at {prefix}: the save that is there has other leaves too, "
            f"{['/'.join(path) for path in list(found)[:5]]}; remove it first, or save() over it"
        )
