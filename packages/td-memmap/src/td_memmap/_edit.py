"""Changes of a live save: new entries, and reading again what others changed.

The data is written first, then the ``meta.json`` of the level by one rename, so that a reader sees the level with or
without the new entry.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from td_core._collection import Core, show_path
from td_core._element_types import as_dtype
from td_core._keys import unravel_key_to_tuple
from td_core._nodes import KINDS
from td_core._tensordict import TensorDict
from td_core.errors import BatchSizeError, FormatError, KeyPathError, StructureError
from td_core.typing import DtypeLike, NestedKey

from . import _fs, _names
from ._dtypes import check_dtype, storable
from ._errors import FileTakenError
from ._fs import Tree
from ._load import Loading, load_directory
from ._meta import LIMIT, At, describe, has_level, is_written, possible_names, read_json
from ._plan import VERSION, make_plan, names_of, take_apart
from ._saved import Saved, attach, directory, saved_of
from ._shapes import as_shape, show_shape, starts_with
from ._tensor import MemoryMappedTensor


def _saved(data: Any) -> Saved:
    saved = saved_of(data)
    if saved is None:
        raise StructureError(
            f"this {type(data).__name__} is not memory-mapped: call memmap() or memmap_() first"
        )
    return saved


def add(
    data: Core,
    key: NestedKey,
    shape: Any,
    dtype: DtypeLike,
    content: Tensor | None,
    robust_key: bool | None,
    *,
    existsok: bool = True,
) -> MemoryMappedTensor:
    """Add a leaf to a mapped collection and to its save.

    Raises:
        StructureError: the collection is not mapped or gets no entries, or the key is there already.
        KeyPathError: the key goes through a tensor, or a live save cannot hold it.
        FileTakenError: another save stands under the name of a level that is to be made.
        BatchSizeError: the shape does not start with the batch size.
        CodecError: the content or its dtype cannot be stored.
    """
    path, robust_key = unravel_key_to_tuple(key), robust_key is not False
    element: torch.dtype = as_dtype(dtype)
    check_dtype(element, path)
    if content is not None:
        storable(content, path)
    node: Any = data
    depth = 0
    while depth < len(path) - 1 and path[depth] in node._children():
        node = node._children()[path[depth]]
        depth += 1
        if isinstance(node, Tensor):
            raise KeyPathError(f"cannot add {show_path(path)}: {show_path(path[:depth])} is a tensor")
    saved, record, name = _saved(node), take_apart(node._inner()), path[-1]
    if record.members or record.values:
        raise StructureError(f"cannot add {show_path(path)}: a {type(node).__name__} gets no new entries")
    if path[depth] in record.entries:
        raise StructureError(f"cannot add {show_path(path)}: it is there already; delete it first")
    # A class may know no such field, which must be found out before anything is written.
    node._shallow()._set_child(path[depth], torch.empty(0, device="cpu"))
    size, shape = node.batch_size, as_shape(shape)
    if not starts_with(shape, size):
        raise BatchSizeError(
            f"cannot add {show_path(path)}: its shape {show_shape(shape)} does not start with the batch size {list(size)}"
        )
    stem, siblings = _names.stem(name, robust_key), record.entries
    files = [stem + ".memmap", *([stem + ".shape.memmap"] if isinstance(shape, Tensor) else [])]
    if saved.path is not None:
        levels = [(new, [_names.stem(new, saved.robust_key)], saved.robust_key) for new in path[depth:-1]]
        for new, wanted, robust in (*levels, (name, files, robust_key)):
            if not _is_free(new, wanted, siblings, robust):
                raise KeyPathError(
                    f"cannot add {show_path(path)}: a live save cannot hold this key; save() again with it"
                )
            siblings = {}
    for new in path[depth:-1]:
        node = _add_level(node, new)
    folder = _saved(node).path
    if folder is None:
        leaf = MemoryMappedTensor._create(shape, element, None, content=content)
    else:
        filename, nested = os.path.join(folder, files[0]), isinstance(shape, Tensor)
        listed = list(shape.shape if nested else shape)
        entry = {"device": "cpu", "shape": listed, "dtype": str(element), "is_nested": nested}
        with _declaring(folder, name, stem, entry) as (_, there):
            if there is not None:
                raise _added_meanwhile(folder, name)
            if nested:
                sizes = os.path.join(folder, files[1])
                MemoryMappedTensor.from_tensor(shape, filename=sizes, existsok=existsok)
            leaf = MemoryMappedTensor._create(shape, element, filename, existsok=existsok, content=content)
    node._inner()._set_child(name, leaf)
    return leaf


def _is_free(name: str, wanted: list[str], siblings: Mapping[str, Any], robust_key: bool) -> bool:
    """Tell whether a level can hold a new entry that takes the file names ``wanted``."""
    taken = set(_names.TAKEN)
    for key, child in siblings.items():
        # Whichever way it was named: a reader tries both.
        for stem in possible_names(key, True):
            taken.update(names_of(child, stem))
    safe = robust_key or _names.raw_name(name) is not None
    return safe and name not in _names.RESERVED and taken.isdisjoint(wanted) and all(map(_names.fits, wanted))


def _add_level(node: Any, name: str) -> Any:
    """Add an empty level below a mapped node, or take the one that another process added meanwhile."""
    saved = _saved(node)
    child: Any = TensorDict._make({}, node.batch_size, node.device, node._names)
    where = None
    if saved.path is not None:
        stem = _names.stem(name, saved.robust_key)
        where = os.path.join(saved.path, stem)
        with _declaring(saved.path, name, stem, {"type": type(child).__name__}) as (tree, there):
            if there is None:
                text = make_plan(child).texts[-1][2]
                try:
                    tree.make((stem,))
                except FileExistsError:
                    # The metadata of an empty level and nothing else was left by a process that was killed.
                    inside = [each for each in tree.entries((stem,)) if not each.startswith(_names.TEMPORARY)]
                    if _names.META in inside and (
                        len(inside) > 1 or tree.read((stem,), _names.META, LIMIT) != text
                    ):
                        written = has_level(tree, (stem,))
                        raise FileTakenError(
                            f"cannot add {show_path((name,))}: another {'save' if written else 'program has metadata that'} "
                            f"is in the way, {tree.show((stem,))}"
                        ) from None
                tree.replace((stem,), _names.META, text)
            elif "type" in there:
                child = load_directory(
                    where, Loading(robust_key=saved.robust_key, allow_pickle=saved.allow_pickle)
                )
            else:
                raise _added_meanwhile(saved.path, name)
    attach(child, replace(saved, path=where, above=node.batch_size))
    node._inner()._set_child(name, child)
    return child


def _added_meanwhile(directory: str, name: str) -> StructureError:
    return StructureError(
        f"cannot add {show_path((name,))}: another process added it to {directory} meanwhile; call memmap_refresh_() on "
        "the collection first"
    )


@contextlib.contextmanager
def _declaring(directory: str, name: str, stem: str, entry: dict[str, Any]) -> Iterator[tuple[Tree, Any]]:
    """Add an entry to the metadata of a level, in one step, after the files that it describes, which the block writes.

    Others add entries too, one at a time: what the metadata says already of the name is given, and then it stays.

    Raises:
        StructureError: the save has changed since it was mapped, so that the entry does not fit there.
    """
    with Tree.at_path(directory) as tree, _fs.held(tree.root):
        meta = read_json(tree, (), _names.META)
        if not is_written(meta, tree.entries()):
            raise _changed_since(name, f"{tree.show((), _names.META)} is none that a save wrote")
        general = meta.get("_format_version") == VERSION
        there = (dict(meta["entries"]) if general else meta).get(name)
        if there is None:
            if general:
                meta["entries"].append([name, {**entry, "file": stem}])
            else:
                meta[name] = entry
            _refuse_misfit(meta, tree.show((), _names.META), name)
        yield tree, there
        if there is None:
            tree.replace((), _names.META, json.dumps(meta).encode())


def _refuse_misfit(meta: Any, file: str, name: str) -> None:
    """Raise StructureError unless the metadata of a level, which may have been saved again, takes its new entry."""
    try:
        if describe(meta, At(file, ()), torch.Size(), robust_key=True, strict=False).sized:
            return
        what = "it takes no entries"
    except FormatError as error:
        what = str(error)
    raise _changed_since(name, what)


def _changed_since(name: str, what: str) -> StructureError:
    return StructureError(
        f"cannot add {show_path((name,))}: the save has changed since it was mapped: {what}; load it again, or call "
        "memmap_refresh_() on the collection first"
    )


def refresh(data: Any, *, allow_pickle: bool = False) -> Any:
    """Read a mapped collection again from its save.

    Raises:
        StructureError: it maps no save, or what is saved there now does not fit.
    """
    saved = _saved(data)
    if saved.path is None:
        raise StructureError(
            "cannot refresh: the collection is mapped to anonymous files, which no save describes"
        )
    node = data._inner()
    record = take_apart(node)
    if record.members or record.values:
        raise StructureError(
            f"cannot refresh a {type(data).__name__} as a whole: load_memmap({directory(data, saved)!r}), or refresh its "
            "members, or the collection that holds it"
        )
    loaded = load_directory(saved.path, Loading(robust_key=saved.robust_key, allow_pickle=allow_pickle))
    if KINDS.of(loaded) is not KINDS.of(node):
        raise StructureError(
            f"cannot refresh a {type(node).__name__}: {saved.path} holds a {type(loaded).__name__} now; load_memmap() it"
        )
    above = saved.above
    if loaded.batch_size[: len(above)] != above:
        raise StructureError(
            f"cannot refresh: {saved.path} has the batch size {list(loaded.batch_size)} now, which the collection that holds "
            f"it, of {list(above)}, could not hold; call memmap_refresh_() on that one"
        )
    for key in list(node._children()):
        node._del_child(key)
    node._set_batch_size(loaded.batch_size)
    node._set_names(loaded._names)
    for key, child in take_apart(loaded._inner()).entries.items():
        node._set_child(key, child)
    node._locked = False
    return attach(data, replace(saved, path=directory(data, saved)))
