"""How other programs store tensors in tables: Hugging Face, Ray, Lance, and the extension types of Arrow that pyarrow lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import torch

from td_core.errors import FormatError
from td_core.spi import parse_json

from ._arrow_types import Dense, find_dense
from ._nulls import Path

_NAME, _METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"
_RAY = ("ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_VARIABLE = ("arrow.variable_shape_tensor", "ray.data.arrow_variable_shaped_tensor")
#: The shape of cells; None for a first dim that differs.
Shape = tuple[int | None, ...]
#: Classes of Hugging Face whose cells have a shape: lists of lists in Arrow.
_ARRAYS = ("Array2D", "Array3D", "Array4D", "Array5D")


def _describe(column: pa.Field) -> tuple[str, bytes]:
    """Return the name of the extension type of a field, and its metadata; empty for other fields."""
    kind = column.type
    if isinstance(kind, pa.ExtensionType):
        name: str = kind.extension_name
        return name, kind.__arrow_ext_serialize__() if hasattr(kind, "__arrow_ext_serialize__") else b""
    metadata = column.metadata or {}
    return metadata.get(_NAME, b"").decode(errors="replace"), metadata.get(_METADATA, b"")


def has_extension(column: pa.Field) -> bool:
    """Return True for a field of an extension type, which pyarrow may not have."""
    metadata = column.metadata
    return isinstance(column.type, pa.BaseExtensionType) or (metadata is not None and _NAME in metadata)


def find_shape(column: pa.Field) -> Shape | None:
    """Return the shape of the cells of a field whose extension type says it in JSON; None for others. A pickle is refused."""
    name, metadata = _describe(column)
    if name in _RAY:
        content: Any = _parse(metadata, name)
    elif name.endswith("DExtensionType") and name.startswith("datasets."):
        content = _parse(metadata, name)
        content = content[0] if isinstance(content, list) and len(content) == 2 else None
    else:
        return None
    return _check_shape(content, name)


def _parse(metadata: bytes, name: str) -> Any:
    try:
        return parse_json(metadata)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"the shape of its type {name!r} is not JSON but a pickle, which td never loads: write it with the older type "
            "of Ray, or leave it out with keys="
        ) from error


def _check_shape(content: Any, name: str) -> Shape:
    sizes = content if isinstance(content, list) else [-1]
    if not all((size is None and not i) or (type(size) is int and size >= 0) for i, size in enumerate(sizes)):
        raise FormatError(f"its type {name!r} has the shape {content!r:.100}")
    return tuple(sizes)


def find_features(metadata: Mapping[bytes, bytes] | None) -> dict[Path, Shape]:
    """Return the shapes of cells that the metadata of Hugging Face say, by key path."""
    try:
        features = parse_json((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return dict(_walk_features(features, ()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _walk_features(features: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Shape]]:
    for name, item in features.items():
        kind = item.get("_type") if isinstance(item, dict) else None
        if kind in _ARRAYS:
            yield (*path, name), _check_shape(item["shape"], kind)
        elif kind in ("List", "Sequence", "LargeList"):
            shape = []
            while isinstance(item, dict) and item.get("_type") in ("List", "Sequence"):
                shape.append(item.get("length", -1))
                item = item["feature"]
            if shape and all(type(size) is int and size >= 0 for size in shape):
                yield (*path, name), tuple(shape)
        elif isinstance(item, dict) and kind is None:
            yield from _walk_features(item, (*path, name))


def get_extension(array: pa.Array, column: pa.Field) -> pa.Array:
    """Return the storage of an extension array whose type is not that of a tensor, and the array itself otherwise."""
    name, _ = _describe(column)
    if name in _VARIABLE:
        return read_variable(array.storage if isinstance(array, pa.ExtensionArray) else array)
    if isinstance(array, pa.ExtensionArray) and not isinstance(array.type, pa.FixedShapeTensorType):
        return array if name == "arrow.uuid" else array.storage
    return array


def read_lance(column: pa.Field) -> Dense | None:
    """Return the form of a column of bfloat16 of Lance, or None."""
    if _describe(column)[0] != "lance.bfloat16":
        return None
    return Dense(torch.bfloat16, (), torch.uint16, ())


def read_variable(storage: pa.StructArray) -> pa.Array:
    """Return tensors of several shapes as lists of their items along the first dim, or as lists of lists."""
    names = [item.name for item in storage.type]
    if not {"data", "shape"} <= {*names}:
        raise FormatError(f"a tensor of several shapes has data and shape; it has the fields {names}")
    data, shapes = storage.field("data"), storage.field("shape").to_pylist()
    inner = {None if shape is None else tuple(shape[1:]) for shape in shapes} - {None}
    if len(inner) > 1 or find_dense(data.type.value_type, {}) is None:
        return pa.array([_nest(row, shape) for row, shape in zip(data.to_pylist(), shapes, strict=True)])
    (sizes,) = inner or {()}
    items = data.flatten()
    for size in reversed(sizes or ()):
        items = pa.FixedSizeListArray.from_arrays(items, size)
    offsets, total = [0], 0
    for shape in shapes:
        total += shape[0] if shape else 0
        offsets.append(total)
    if total != len(items):
        raise FormatError("the shapes of a tensor of several shapes do not fit its elements")
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), items)


def _nest(row: list[Any] | None, shape: list[int] | None) -> Any:
    if row is None or shape is None:
        return None
    result: Any = row
    for size in reversed(shape[1:]):
        result = [result[i : i + size] for i in range(0, len(result), size)] if size else []
    return result
