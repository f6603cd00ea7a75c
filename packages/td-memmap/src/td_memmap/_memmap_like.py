"""Create sparse files with the structure of a collection, to be filled later."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from td_core import TensorCollection
from td_core.errors import FormatError
from td_core.spi import show_path

from . import _file_names, _fs
from ._errors import FileTakenError
from ._fs import DirectoryTree
from ._load import LoadOptions, Reader
from ._meta import read_if_there
from ._options import MemmapOptions
from ._plan import Plan
from ._save import finish, plan_save, put_leaves, save_directory
from ._shapes import shape_of, show_shape
from ._tensor import MemoryMappedTensor


def like_directory(
    tree: TensorCollection, prefix: str, options: MemmapOptions
) -> Callable[[], TensorCollection]:
    """Return a function that creates the files, or maps the files of an existing save of the same structure."""
    if not options.existsok or _fs.get_status(os.path.join(prefix, _file_names.META)) is None:
        return save_directory(tree, prefix, options)
    plan, tree = plan_save(tree, options)
    return lambda: _map_existing(tree, plan, prefix, options)


def _map_existing(
    tree: TensorCollection, plan: Plan, prefix: str, options: MemmapOptions
) -> TensorCollection:
    """Map the leaves of the save at ``prefix``, and replace its metadata if that differs."""
    with DirectoryTree.at_path(prefix) as files:
        mapped, same = map_same_structure(Reader(files, make_load_options(options)), plan, prefix)
    if same:
        return finish(tree, plan, mapped, prefix, options)
    return save_directory(put_leaves(tree, mapped), prefix, replace(options, like=False, sparse=False))()


def make_load_options(options: MemmapOptions) -> LoadOptions:
    """Return the load options for files that will be filled: mapped for writing."""
    return LoadOptions(robust_key=options.robust_key, allow_pickle=options.allow_pickle, mode="r+")


def map_same_structure(reader: Reader, plan: Plan, prefix: str) -> tuple[dict[int, Tensor], bool]:
    """Map the leaves of an existing save; return them by ``id``, and True if the metadata is as planned."""
    mapped: dict[int, Tensor] = {}
    try:
        reader.read()
        result = {
            (*node.parts, entry.files[0] + ".memmap"): reader.map_leaf(node, key, entry)
            for node in reader.nodes
            for key, entry in node.leaves.items()
        }
        same = _has_same_texts(reader.tree, plan)
    except FormatError as error:
        raise FileTakenError(f"cannot create files at {prefix}: what is there is damaged: {error}") from error
    for file in plan.leaves:
        if file.leaf is None:
            continue
        there, shape = result.pop(file.path, None), show_shape(shape_of(file.leaf))
        if there is None or show_shape(shape_of(there)) != shape or there.dtype != file.leaf.dtype:
            shown = "nothing" if there is None else f"shape {show_shape(shape_of(there))} of {there.dtype}"
            raise FileTakenError(
                f"cannot create files at {prefix}: {show_path(file.key)} is {shown} in the save that is there, and shape "
                f"{shape} of {file.leaf.dtype} here; remove it first, or save() over it"
            )
        first = mapped.setdefault(id(file.leaf), there)
        if first is not there and _get_identity(first) != _get_identity(there):
            raise FileTakenError(
                f"cannot create files at {prefix}: {show_path(file.key)} is the same tensor as another leaf here, and has a "
                "file of its own in the save that is there; remove it first, or save() over it"
            )
    if result:
        raise FileTakenError(
            f"cannot create files at {prefix}: the save that is there has other leaves too, "
            f"{['/'.join(path) for path in list(result)[:5]]}; remove it first, or save() over it"
        )
    return mapped, same


def _get_identity(leaf: Tensor) -> tuple[int, int] | None:
    return leaf._place.identity if isinstance(leaf, MemoryMappedTensor) else None


def _has_same_texts(files: DirectoryTree, plan: Plan) -> bool:
    """Return True if the saved files of metadata and values have exactly the planned content."""
    texts = {(*parts, name): text for parts, name, text in plan.texts}
    row_files = {path[-1] for path in texts if _file_names.is_row_file(path[-1])}
    for parts in ((), *plan.directories):
        for name in (_file_names.META, *_file_names.SIDECARS, *row_files):
            if read_if_there(files, parts, name) != texts.get((*parts, name)):
                return False
    return True
