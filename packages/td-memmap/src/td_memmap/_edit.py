"""Change a live save: add entries, and reload changes of other processes.

The data is written first, then one rename replaces the ``meta.json`` of the node, so a reader sees the node either
with the new entry or without it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from td_core import TensorCollection, kinds
from td_core.errors import BatchSizeError, FormatError, KeyPathError, StructureError
from td_core.spi import (
    Node,
    add_check_line,
    as_dtype,
    lock,
    make_dense,
    show_path,
    unravel_key_to_tuple,
    visit,
)
from td_core.typing import DtypeLike, NestedKey

from . import _file_names, _fs
from ._chunks import check_dtype, check_storable
from ._errors import FileTakenError
from ._fs import DirectoryTree
from ._load import LoadOptions, load_directory
from ._memmap_backend import CollectionT, MemmapBackend, attach_backend, get_backend, get_directory
from ._meta import LIMIT, Location, has_level, is_written, list_possible_names, parse_level, read_json
from ._origin import find_loaded
from ._plan import GENERAL, encode_node, list_file_names, make_plan
from ._shapes import Shape, as_shape, has_prefix, show_shape
from ._tensor import MemoryMappedTensor


def _require_backend(data: object) -> MemmapBackend:
    saved = get_backend(data)
    if saved is None:
        raise StructureError(
            f"this {type(data).__name__} is not memory-mapped: call memmap() or memmap_() first"
        )
    return saved


def add(
    data: TensorCollection,
    key: NestedKey,
    shape: Shape,
    dtype: DtypeLike,
    content: Tensor | None,
    robust_key: bool | None,
    *,
    existsok: bool = True,
) -> MemoryMappedTensor:
    """Add a leaf to a mapped collection and to its save."""
    path, robust_key = unravel_key_to_tuple(key), robust_key is not False
    element: torch.dtype = as_dtype(dtype)
    check_dtype(element, path)
    if content is not None:
        check_storable(content, path)
    node, depth = _find_nearest(data, path)
    saved, record, name = _require_backend(node), encode_node(node._inner()), path[-1]
    if record.members or record.values:
        raise StructureError(f"cannot add {show_path(path)}: a {type(node).__name__} gets no new entries")
    if path[depth] in record.entries:
        raise StructureError(f"cannot add {show_path(path)}: it is there already; delete it first")
    # Set the key on a copy first: if a tensorclass lacks the field, this raises before any file is written.
    node._shallow_copy()._set_child(path[depth], torch.empty(0, device="cpu"))
    size, shape = node.batch_size, as_shape(shape)
    if not has_prefix(shape, size):
        raise BatchSizeError(
            f"cannot add {show_path(path)}: its shape {show_shape(shape)} does not start with the batch size {list(size)}"
        )
    stem = _file_names.get_stem(name, robust_key)
    files = [stem + ".memmap", *([stem + ".shape.memmap"] if isinstance(shape, Tensor) else [])]
    if saved.path is not None:
        wanted = [
            (new, [_file_names.get_stem(new, saved.robust_key)], saved.robust_key) for new in path[depth:-1]
        ]
        _check_free(path, [*wanted, (name, files, robust_key)], record.entries)
    for new in path[depth:-1]:
        node = _add_level(node, new)
    folder = _require_backend(node).path
    if folder is None:
        leaf = MemoryMappedTensor._create(shape, element, None, content=content)
    else:
        filename = os.path.join(folder, files[0])
        listed = list(shape.shape if isinstance(shape, Tensor) else shape)
        entry: dict[str, object] = {"device": "cpu", "shape": listed, "dtype": str(element)}
        entry["is_nested"] = isinstance(shape, Tensor)
        with _declare_entry(folder, name, stem, entry) as (_, there):
            if there is not None:
                raise _concurrent_add_error(folder, name)
            if isinstance(shape, Tensor):
                sizes = os.path.join(folder, files[1])
                MemoryMappedTensor.from_tensor(shape, filename=sizes, existsok=existsok)
            leaf = MemoryMappedTensor._create(shape, element, filename, existsok=existsok, content=content)
    node._set_child(name, leaf)
    return leaf


def _find_nearest(root: TensorCollection, path: tuple[str, ...]) -> tuple[Any, int]:
    """Return the last existing node on the way to a new entry, and the number of keys that lead to it."""
    node: Any = root
    for depth, key in enumerate(path[:-1]):
        if key not in node._children():
            return node, depth
        node = node._get_writable(key)
        if isinstance(node, Tensor):
            raise KeyPathError(f"cannot add {show_path(path)}: {show_path(path[: depth + 1])} is a tensor")
    return node, len(path) - 1


def _check_free(
    path: tuple[str, ...], levels: list[tuple[str, list[str], bool]], siblings: Mapping[str, object]
) -> None:
    """Raise KeyPathError if a new key, with its files, has no place beside the entries of the save."""
    for key, wanted, robust in levels:
        if not _is_free(key, wanted, siblings, robust):
            raise KeyPathError(
                f"cannot add {show_path(path)}: a live save cannot hold this key; save() again with it"
            )
        siblings = {}  # only the first of the new nodes has siblings


def _is_free(name: str, wanted: list[str], siblings: Mapping[str, object], robust_key: bool) -> bool:
    """Return True if the files ``wanted`` by a new entry differ from the files of its siblings."""
    taken = set(_file_names.RESERVED_STEMS)
    for key, child in siblings.items():
        # A reader tries both the encoded and the raw file name of a key, so neither is free.
        for stem in list_possible_names(key, True):
            taken.update(list_file_names(child, stem))
    safe = robust_key or _file_names.get_raw_name(name) is not None
    return (
        safe
        and name not in _file_names.RESERVED
        and taken.isdisjoint(wanted)
        and all(map(_file_names.is_valid_name, wanted))
    )


def _add_level(node: TensorCollection, name: str) -> object:
    """Add an empty child to a mapped node, or load the child that another process added concurrently."""
    saved = _require_backend(node)
    child = make_dense({}, node.batch_size, node.device, node._names)
    where = None
    if saved.path is not None:
        stem = _file_names.get_stem(name, saved.robust_key)
        where = os.path.join(saved.path, stem)
        with _declare_entry(saved.path, name, stem, {"type": type(child).__name__}) as (tree, there):
            if there is None:
                text = make_plan(child).texts[-1][2]
                try:
                    tree.make((stem,))
                except FileExistsError:
                    # A killed process may have left the directory with nothing but the metadata of an empty node.
                    inside = [
                        entry
                        for entry in tree.entries((stem,))
                        if not entry.startswith(_file_names.TEMPORARY)
                    ]
                    if _file_names.META in inside and (
                        len(inside) > 1 or tree.read((stem,), _file_names.META, LIMIT) != text
                    ):
                        written = has_level(tree, (stem,))
                        raise FileTakenError(
                            f"cannot add {show_path((name,))}: another {'save' if written else 'program has metadata that'} "
                            f"is in the way, {tree.show((stem,))}"
                        ) from None
                tree.replace((stem,), _file_names.META, text)
            elif "type" in there:
                child = load_directory(
                    where, LoadOptions(robust_key=saved.robust_key, allow_pickle=saved.allow_pickle)
                )
            else:
                raise _concurrent_add_error(saved.path, name)
    attach_backend(child, replace(saved, path=where, above=node.batch_size))
    node._inner()._set_child(name, child)
    return node._get_writable(name)


def _concurrent_add_error(directory: str, name: str) -> StructureError:
    return StructureError(
        f"cannot add {show_path((name,))}: another process added it to {directory} meanwhile; call memmap_refresh_() on "
        "the collection first"
    )


@contextlib.contextmanager
def _declare_entry(
    directory: str, name: str, stem: str, entry: dict[str, object]
) -> Iterator[tuple[DirectoryTree, Any]]:
    """Add an entry to a node's metadata, under a lock, after the ``with`` block has written the entry's files."""
    with DirectoryTree.at_path(directory) as tree, _fs.lock_directory(tree.root):
        meta = read_json(tree, (), _file_names.META)
        if not is_written(meta, tree.entries()):
            raise _stale_save_error(name, f"{tree.show((), _file_names.META)} was not written by a save")
        general = meta.get("_format_version") in GENERAL
        there = (dict(meta["entries"]) if general else meta).get(name)
        if there is None:
            if general:
                meta["entries"].append([name, {**entry, "file": stem}])
            else:
                meta[name] = entry
            _check_fits(meta, tree.show((), _file_names.META), name)
        yield tree, there
        if there is None:
            tree.replace((), _file_names.META, add_check_line(json.dumps(meta).encode()))


def _check_fits(meta: object, file: str, name: str) -> None:
    """Raise StructureError if the metadata is invalid with the new entry, since another save replaced the node."""
    try:
        if parse_level(meta, Location(file, ()), torch.Size(), robust_key=True, strict=False).sized:
            return
        what = "it takes no entries"
    except FormatError as error:
        what = str(error)
    raise _stale_save_error(name, what)


def _stale_save_error(name: str, what: str) -> StructureError:
    return StructureError(
        f"cannot add {show_path((name,))}: the save has changed since it was mapped: {what}; load it again, or call "
        "memmap_refresh_() on the collection first"
    )


def refresh(data: CollectionT, *, allow_pickle: bool = False) -> CollectionT:
    """Reload a mapped or loaded collection from its save; raise StructureError if the save is of another kind or missing."""
    saved = get_backend(data)
    if saved is None:
        return _refresh_loaded(data, allow_pickle)
    if saved.path is None:
        raise StructureError(
            "cannot refresh: the collection is mapped to anonymous files, which no save describes"
        )
    node: Any = data._inner()
    _check_has_entries(data, str(get_directory(data, saved)))
    loaded = load_directory(saved.path, LoadOptions(robust_key=saved.robust_key, allow_pickle=allow_pickle))
    _check_same_kind(data, loaded, saved.path)
    above = saved.above
    if loaded.batch_size[: len(above)] != above:
        raise StructureError(
            f"cannot refresh: {saved.path} has the batch size {list(loaded.batch_size)} now, which the collection that holds "
            f"it, of {list(above)}, could not hold; call memmap_refresh_() on that one"
        )
    _take_entries(data, loaded)
    node._locked = False
    return attach_backend(data, replace(saved, path=get_directory(data, saved)))


def _refresh_loaded(data: CollectionT, allow_pickle: bool) -> CollectionT:
    """Reload a collection that was loaded or opened, in the same mode."""
    options = find_loaded(data)
    if options is None:
        raise StructureError(
            f"this {type(data).__name__} is not memory-mapped, or it is a part of a save or has entries of several: load or open "
            "the save again, or call memmap() or memmap_() first"
        )
    path = str(options.prefix)
    _check_has_entries(data, path)
    loaded = load_directory(path, replace(options, allow_pickle=allow_pickle))
    _check_same_kind(data, loaded, path)
    if loaded.batch_size != data.batch_size:
        raise StructureError(
            f"cannot refresh: {path} has the batch size {list(loaded.batch_size)} now, and the collection "
            f"{list(data.batch_size)}; load or open it again"
        )
    node: Any = data._inner()
    held, node._locked = node._locked, False
    _take_entries(data, loaded)
    if held:
        lock(data, by_user=held is True)
    return data


def _check_has_entries(data: TensorCollection, path: str) -> None:
    record = encode_node(data._inner())
    if record.members or record.values:
        raise StructureError(
            f"cannot refresh a {type(data).__name__} as a whole: load_memmap({path!r}), or refresh its members, or the "
            "collection that holds it"
        )


def _check_same_kind(data: TensorCollection, loaded: TensorCollection, path: str) -> None:
    node = data._inner()
    # Saves of tensordict have the collection in a TensorDictParams, not the TensorDictParams.
    if kinds.of(loaded) not in (kinds.of(data), kinds.of(node)):
        raise StructureError(
            f"cannot refresh a {type(node).__name__}: {path} holds a {type(loaded).__name__} now; load_memmap() it"
        )


def _take_entries(data: TensorCollection, loaded: Any) -> None:
    """Replace the entries, batch size and dim names of a collection by those of a loaded one."""
    node: Any = data._inner()
    _keep_parameters(data, loaded)
    for key in list(node._children()):
        node._del_child(key)
    node._set_batch_size(loaded.batch_size)
    node._set_names(loaded._names)
    for key, child in encode_node(loaded._inner()).entries.items():
        data._set_child(key, child)


def _keep_parameters(data: TensorCollection, loaded: Node) -> None:
    """Put the elements of loaded parameters into those of a collection, to which optimizers have references."""

    def keep(node: Node, other: Node) -> Iterator[tuple[Node, Node]]:
        for (holder,), (source,) in zip(node._zip_members(), other._zip_members(), strict=False):
            entries = dict(holder._children())
            for key, child in dict(source._children()).items():
                held = entries.get(key)
                if isinstance(child, Node) and isinstance(held, Node):
                    yield held, child
                elif isinstance(child, nn.Parameter) and isinstance(held, nn.Parameter):
                    held.data = child.data
                    source._inner()._set_child(key, held.requires_grad_(child.requires_grad))

    visit(keep, data, loaded)
