"""Load what old releases of tensordict saved: pickled metadata, and views as a source and an operation.

Releases 0.0.2 to 0.2 wrote a ``meta.pt`` per node and a ``<key>.meta.pt`` per leaf. These are read with
``torch.load(weights_only=True)``, which executes no code. File names are the raw keys. Classes and dim names were not
stored. The stack dim of a nested lazy stack was overwritten by its parent; it is inferred from the batch sizes.

They saved a view as its source and an operation or index. It is loaded as a dense collection.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorCollection
from td_core.errors import FormatError
from td_core.spi import STORABLE, make_dense, visit

from .. import _file_names
from .._fs import DirectoryTree, Parts
from .._meta import FileTree, Location, check_shape
from .._tensor import as_plain

_LEAF_META = ".meta.pt"
_LIMIT = 1 << 20
_CPU = torch.device("cpu")
#: Operations that a saved view may have, and their argument names.
_OPERATIONS = {
    "squeeze": {"dim"},
    "unsqueeze": {"dim"},
    "view": {"size"},
    "transpose": {"dim0", "dim1"},
    "permute": {"dims"},
}
_DAMAGE = (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError, TypeError, AttributeError)


@dataclass(slots=True)
class _Level:
    parts: Parts
    place: dict[str, Any]  # The parent's dict receives the loaded collection.
    name: str
    meta: dict[str, Any]
    leaves: dict[str, Tensor] = field(default_factory=dict)
    below: dict[str, Any] = field(default_factory=dict)


def load(reader: Any) -> Any:
    """Load a save with pickled metadata; ``reader`` maps the files."""
    tree: DirectoryTree = reader.tree
    levels: list[_Level] = []

    def read_level(parts: Parts, place: dict[str, object], name: str) -> Iterator[tuple[object, ...]]:
        level = _Level(parts, place, name, _read(tree, parts, _file_names.OLD_META, parts)[1])
        levels.append(level)
        for name, is_directory in sorted(tree.entries(parts).items()):
            if is_directory and tree.stat((*parts, name), _file_names.OLD_META) is not None:
                yield (*parts, name), level.below, name
            elif name.endswith(_LEAF_META):
                key = name[: -len(_LEAF_META)]
                level.leaves[key] = _leaf(reader, parts, key)

    visit(read_level, (), {}, "")
    # Build children before their parents.
    for level in reversed(levels):
        level.place[level.name] = _build(tree, level, reader.device)
    return levels[0].place[""]


def add_old_files(tree: FileTree, result: Any) -> None:
    """Add the files of a save with pickled metadata to a :class:`SaveFiles`."""

    def add(parts: Parts) -> Iterator[tuple[Parts]]:
        if not _is_old_level(tree, parts):
            return
        listing = tree.entries(parts)
        result.add((*parts, _file_names.OLD_META))
        for name, is_directory in listing.items():
            if is_directory:
                yield ((*parts, name),)
            elif name.endswith(_LEAF_META):
                result.add((*parts, name))
                leaf = name.removesuffix(_LEAF_META) + ".memmap"
                if listing.get(leaf) is False:
                    result.add((*parts, leaf))

    visit(add, ())


def _is_old_level(tree: FileTree, parts: Parts) -> bool:
    """Return True if a directory has a ``meta.pt`` that tensordict 0.0.2 to 0.2 wrote, not another program."""
    if tree.stat(parts, _file_names.OLD_META) is None:
        return False
    try:
        _, meta = _read(tree, parts, _file_names.OLD_META, parts)
    except (FormatError, OSError):
        return False
    return isinstance(meta.get("batch_size"), torch.Size) or (
        type(meta.get("stack_dim")) is int and len(meta) == 1
    )


def _read(
    tree: FileTree, parts: Parts, name: str, key: tuple[str, ...]
) -> tuple[Location, dict[str, object]]:
    location = Location(tree.show(parts, name), key)
    try:
        meta = torch.load(io.BytesIO(tree.read(parts, name, _LIMIT)), weights_only=True)
    except FileNotFoundError:
        raise FormatError(f"{location.file} is missing") from None
    except _DAMAGE as error:
        raise FormatError(f"{location.file} is not valid metadata: {error}") from error
    if not isinstance(meta, dict):
        raise location.error("the content", meta, "a dict")
    return location, meta


def _leaf(reader: Any, parts: Parts, key: str) -> Tensor:
    location, meta = _read(reader.tree, parts, key + _LEAF_META, (*parts, key))
    dtype, shape = meta.get("dtype"), meta.get("shape")
    if not isinstance(dtype, torch.dtype) or str(dtype) not in STORABLE:
        raise location.error("dtype", dtype, "a dtype that a file can hold")
    shape = check_shape(list(shape) if isinstance(shape, tuple) else shape, location, "shape", dtype.itemsize)
    if reader.imagine:
        return torch.empty(shape, dtype=dtype, device=reader.device)
    leaf: Tensor = reader.map_file(parts, key + ".memmap", dtype, shape)
    return leaf if reader.device == _CPU else as_plain(leaf).to(reader.device)


def _build(tree: DirectoryTree, level: _Level, device: torch.device) -> object:
    location = Location(tree.show(level.parts, _file_names.OLD_META), level.parts)
    meta = level.meta
    children = dict(sorted(level.below.items()))
    try:
        if "stack_dim" in meta and "batch_size" not in meta:
            return _stack(location, level, children, meta["stack_dim"])
        size = torch.Size(meta["batch_size"])
        dim = None if level.leaves else _infer_stack_dim(children, size)
        if dim is not None:
            return _stack(location, level, children, dim)
        for key, child in (*level.leaves.items(), *children.items()):
            shape = child.shape if isinstance(child, Tensor) else child.batch_size
            if shape[: len(size)] != size:
                raise location.error("the shape", list(shape), f"one that starts with {list(size)}", key)
        kept = None if meta.get("device") is None else device
        source = make_dense({**level.leaves, **children}, size, kept, None)
        return _apply_view(source, meta) if "custom_op" in meta else source
    except FormatError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise FormatError(f"{location.file} cannot be put together: {error}") from error


def _stack(location: Location, level: _Level, children: dict[str, object], dim: int) -> LazyStackedTensorDict:
    members = [children[str(i)] for i in range(len(children)) if str(i) in children]
    if len(members) != len(children) or level.leaves or not isinstance(dim, int):
        raise location.error("the members", [*children, *level.leaves], "0, 1, 2... and nothing else")
    return LazyStackedTensorDict(*members, stack_dim=dim)


def _infer_stack_dim(children: dict[str, Any], size: torch.Size) -> int | None:
    """Return the dim along which children named 0, 1, 2... stack to the batch size ``size``, or None."""
    if not children or set(children) != {str(i) for i in range(len(children))}:
        return None
    for dim in range(len(size)):
        if size[dim] == len(children):
            rest = size[:dim] + size[dim + 1 :]
            if all(child.batch_size == rest for child in children.values()):
                return dim
    return None


def rebuild_view(meta: Mapping[str, object], members: Mapping[str, TensorCollection]) -> object:
    """Apply the operation or index of a saved view to its source."""
    source = members[_file_names.SOURCE]
    if "custom_op" not in meta:
        return source[_decode_index(meta["index"], top=True)]
    return _apply_view(source, meta)


def _apply_view(source: TensorCollection, meta: Mapping[str, object]) -> object:
    """Apply the operation of a saved view to its source; raise FormatError if it is not allowed."""
    name, arguments = meta["custom_op"], meta.get("custom_op_kwargs")
    if (
        name not in _OPERATIONS
        or not isinstance(arguments, dict)
        or not arguments.keys() <= _OPERATIONS[name]
    ):
        raise FormatError(f"a saved view cannot be made by {name!r} with {arguments!r}")
    return getattr(source, name)(**arguments)


def _decode_index(code: object, *, top: bool = False) -> object:
    """Decode an index from tagged lists; raise FormatError if it is invalid."""
    match code:
        case None | bool() | int():
            return code
        case ["ellipsis"]:
            return ...
        case ["tuple" | "list" as tag, list(items)]:
            return (tuple if tag == "tuple" else list)(map(_decode_index, items))
        case ["slice" | "range" as tag, dict(bounds)]:
            limits: list[Any] = [bounds.get(name) for name in ("start", "stop", "step")]
            return slice(*limits) if tag == "slice" else range(*limits)
        case ["tensor", values, *_]:
            return torch.tensor(values, device="cpu")
        case list() if top and not (code and isinstance(code[0], str)):
            return tuple(map(_decode_index, code))
    raise FormatError(f"a saved view has an index that cannot be one: {code!r}")
