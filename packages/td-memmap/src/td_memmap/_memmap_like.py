"""Create sparse files with the structure of a collection, to be filled later."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from td_core import TensorCollection
from td_core.errors import BatchSizeError, FormatError
from td_core.spi import show_path, visit

from . import _file_names, _fs
from ._errors import FileTakenError
from ._fs import DirectoryTree, Parts
from ._load import LoadOptions, Reader
from ._meta import read_if_there
from ._options import MemmapOptions
from ._plan import KeyPath, Plan, encode_node
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
    """Map the leaves of the save at ``prefix``, take its values, and replace its metadata if that differs."""
    with DirectoryTree.at_path(prefix) as files:
        there = map_same_structure(Reader(files, make_load_options(options)), tree, plan, prefix, options)
    if there.is_same:
        return finish(there.tree, there.plan, there.leaves, prefix, options)
    rewritten = put_leaves(there.tree, there.leaves)
    return save_directory(rewritten, prefix, replace(options, like=False, sparse=False))()


def make_load_options(options: MemmapOptions) -> LoadOptions:
    """Return the load options for files that will be filled: mapped for writing."""
    return LoadOptions(robust_key=options.robust_key, allow_pickle=options.allow_pickle, mode="r+")


@dataclass(slots=True)
class ExistingSave:
    """What a save has for a collection of its structure.

    Attributes:
        tree: the collection, with the values of the save.
        plan: the plan of this collection.
        leaves: the mapped leaves of the save, by ``id`` of those of the collection.
        is_same: whether the metadata of the save is as planned, apart from values.
    """

    tree: TensorCollection
    plan: Plan
    leaves: dict[int, Tensor]
    is_same: bool


def map_same_structure(
    reader: Reader, tree: TensorCollection, plan: Plan, prefix: str, options: MemmapOptions
) -> ExistingSave:
    """Map the leaves of an existing save, and read its values; FileTakenError for a save of another structure."""
    mapped: dict[int, Tensor] = {}
    try:
        reader.read()
        result = {
            (*node.parts, entry.files[0] + ".memmap"): reader.map_leaf(node, key, entry)
            for node in reader.nodes
            for key, entry in node.leaves.items()
        }
        values = {node.parts: reader.build(node) for node in reader.nodes if _is_value(node.level.kind)}
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
    tree = _put_values(tree, plan, values, prefix)
    _check_same_nodes(plan, {node.parts: node.key for node in reader.nodes}, values, prefix)
    plan, tree = plan_save(tree, options)
    return ExistingSave(tree, plan, mapped, _has_same_texts(reader.tree, plan))


def _is_value(kind: Any) -> bool:
    return bool(getattr(kind and kind.type, "_is_value", False))


def _put_values(tree: TensorCollection, plan: Plan, values: Mapping[Parts, Any], prefix: str) -> Any:
    """Return a collection with the values of a save in place of its own."""

    def take(child: Any, path: KeyPath) -> Any:
        held = values.get(plan.places[path])
        shown = f"cannot create files at {prefix}: {show_path(path)} is"
        if held is None:
            raise FileTakenError(
                f"{shown} a value here, and not in the save that is there; remove it first, or save() over it"
            )
        sizes = held.batch_size, child.batch_size
        try:
            if not all(one == two for one, two in zip(*sizes)):
                raise BatchSizeError
            result = held if sizes[0] == sizes[1] else held._with_batch_size(child.batch_size)
            result._set_names(child._names)
            return result
        except BatchSizeError:
            raise FileTakenError(
                f"{shown} of batch size {list(sizes[0])} in the save that is there, and {list(sizes[1])} here; remove it "
                "first, or save() over it"
            ) from None

    def put(node: Any, path: KeyPath) -> Iterator[tuple[Any, KeyPath]]:
        record = encode_node(node)
        for key, child in record.entries.items():
            if isinstance(child, TensorCollection) and child._is_value:
                node._set_child(key, take(child, (*path, key)))
            elif isinstance(child, TensorCollection):
                yield child, (*path, key)
        yield from ((member, (*path, name)) for name, member in record.members.items())

    if tree._is_value:
        return take(tree, ())
    visit(put, tree, ())
    return tree


def _check_same_nodes(
    plan: Plan, saved: Mapping[Parts, KeyPath], values: Mapping[Parts, object], prefix: str
) -> None:
    """Raise FileTakenError if a save has other collections or values than those planned."""
    planned = {parts: path for path, parts in plan.places.items()}
    # Some layouts have directories below that of a value.
    inside = {parts for parts in saved if any(parts[:i] in values for i in range(len(parts)))}
    for parts in sorted(planned.keys() ^ (saved.keys() - inside)):
        where, path = "has no" if parts in planned else "also has", {**saved, **planned}[parts]
        raise FileTakenError(
            f"cannot create files at {prefix}: the save that is there {where} {show_path(path)}; remove it first, or save() "
            "over it"
        )
    own = {parts for node, parts in plan.nodes if node._is_value}
    for parts in values.keys() - own - inside:
        raise FileTakenError(
            f"cannot create files at {prefix}: {show_path(saved[parts])} is a value in the save that is there, and not here; "
            "remove it first, or save() over it"
        )


def _get_identity(leaf: Tensor) -> tuple[int, int] | None:
    return leaf._place.identity if isinstance(leaf, MemoryMappedTensor) else None


def _has_same_texts(files: DirectoryTree, plan: Plan) -> bool:
    """Return True if the saved metadata is exactly as planned; values are those of the save."""
    texts = {(*parts, name): text for parts, name, text in plan.texts}
    for parts in {parts for node, parts in plan.nodes if not node._is_value}:
        for name in (_file_names.META, *_file_names.SIDECARS):
            if read_if_there(files, parts, name) != texts.get((*parts, name)):
                return False
    return True
