"""The metadata documents of arrays and groups: write those of our arrays, and read those of every program."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import zarr
from zarr.core.buffer import default_buffer_prototype

from td_core.errors import FormatError
from td_core.spi import parse_json as parse_unique
from td_core.spi import set_module, unravel_key_to_tuple
from td_store.arrays import PlannedArray, TextColumn, read_shape

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: The dtypes of torch that Zarr has, by their name there.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
        "complex64", "complex128",
    )
}  # fmt: skip
#: Their names by dtype.
NATIVE = {dtype: name for name, dtype in DTYPES.items()}
#: Dtypes that zarr-python cannot read: other programs write them, and we store integers of the same width.
EXTENSIONS = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}  # fmt: skip
#: The attribute of a root whose group is not written completely.
INCOMPLETE = "td_incomplete"
#: ``chunks="auto"`` aims at chunks of this many bytes.
_AUTO_BYTES = 1 << 20
#: The attribute by which tensordict reads an array as a stack of values, with the shape of the batch.
STACK = "__tensordict_stack__"
#: The bytes of a string, for this number of rows.
_STRING_BYTES = 32
#: The longest name of a file that file systems support, less what temporary names add.
_LONGEST_NAME = 200


class Named(TypedDict):
    """A codec, a grid of chunks or an encoding of their names, with its options."""

    name: str
    configuration: NotRequired[dict[str, Any]]


class Consolidated(TypedDict):
    """The metadata of what is below a root, by name."""

    kind: str
    must_understand: bool
    metadata: dict[str, Document]


class Document(TypedDict, total=False):
    """The metadata of an array or a group; of version 2, only what is read of it, with attributes and type of the node."""

    zarr_format: int
    node_type: str
    attributes: dict[str, Any]
    shape: list[int]
    data_type: str
    chunk_grid: Named
    chunk_key_encoding: Named
    fill_value: object
    codecs: list[Named]
    dimension_names: list[str]
    storage_transformers: list[object]
    dimension_separator: str
    consolidated_metadata: Consolidated


@set_module("td_zarr.zarr_pickles")
@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array of a group.

    Attributes:
        name: path below the group.
        document: the metadata that zarr-python accepts.
        shape: shape.
        dtype: dtype of what a read returns; None for one that is not a dtype of torch, such as strings.
        logical: name of the dtype that the elements stand for, or None.
        raw: key of the only chunk, if that has the elements as they are in memory.
    """

    name: str
    document: Document
    shape: torch.Size
    dtype: torch.dtype | None
    logical: str | None = None
    raw: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return 0 if self.dtype is None else self.shape.numel() * self.dtype.itemsize


def join_names(path: tuple[str, ...]) -> str:
    """Return the path of an array or group below its root for some keys; characters that names cannot have are escaped."""
    return "/".join(map(_escape, path)) or "data"


def _escape(key: str) -> str:
    """Escape a key as a name of a node, which is also a name of a file."""
    name = "".join(
        char
        if char.isprintable() and char not in '%/\\:*?"<>|'
        else "".join(f"%{byte:02X}" for byte in _encode(char))
        for char in key
    )
    if not name or name[0] == "." or name.startswith("__") or name == "zarr.json" or name[-1] in " .":
        name = f"%{name}"
    if len(_encode(name)) > _LONGEST_NAME:
        name = _encode(name)[:_LONGEST_NAME].decode("utf-8", "ignore")
    return name


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def check_name(name: object, where: str) -> str:
    """Return the name of an array that a document gives, or raise FormatError if it could leave the group."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if (
        not isinstance(name, str)
        or not {"", ".", ".."}.isdisjoint(parts)
        or not {"\\", "\0"}.isdisjoint(name)
    ):
        raise FormatError(f"{where}: {name!r:.200} is not the name of an array")
    return name


def parse_json(content: bytes | str, where: str) -> Any:
    """Parse a JSON object, or raise FormatError if it is another value, malformed or repeats a key."""
    document = parse_unique(content, where)
    if not isinstance(document, dict):
        raise FormatError(f"{where} is not a JSON object; got {type(document).__name__}")
    return document


@dataclass(frozen=True)
class ChunkOptions:
    """The options of a save that decide on the chunks and codecs of arrays; :func:`td_zarr.save` describes them.

    Each but ``checksums`` is one value for all arrays, or a mapping from keys, or prefixes of keys, to values; the key None has
    the default.
    """

    chunks: object = None
    shards: object = None
    filters: object = None
    compressors: object = None
    serializer: object = None
    checksums: bool = False

    @cached_property
    def _tables(self) -> dict[str, dict[tuple[str, ...], object]]:
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "checksums"}
        tables = {
            name: value if isinstance(value, Mapping) else {None: value} for name, value in values.items()
        }
        return {
            name: {() if key is None else unravel_key_to_tuple(key): item for key, item in table.items()}
            for name, table in tables.items()
        }

    def find(self, path: tuple[str, ...]) -> dict[str, Any]:
        """Return the options of the array with a key path; those that are None are left out."""
        prefixes = [path[:length] for length in range(len(path), -1, -1)]
        found = {
            name: next((table[prefix] for prefix in prefixes if prefix in table), None)
            for name, table in self._tables.items()
        }
        return {name: value for name, value in found.items() if value is not None}


def make_group_document(attributes: Mapping[str, object]) -> Document:
    """Return the metadata of a group."""
    return {"attributes": dict(attributes), "zarr_format": 3, "node_type": "group"}


def make_array_document(array: PlannedArray, dims: list[str], options: ChunkOptions) -> Document:
    """Return the metadata of an array to write."""
    chosen = options.find(array.path)
    chunks = _spread_rows(chosen.pop("chunks", None), array.shape, array.dtype.itemsize)
    shards = _spread_rows(chosen.pop("shards", None), array.shape, array.dtype.itemsize)
    attributes = {} if array.logical is None else {"td_dtype": str(array.logical).removeprefix("torch.")}
    if chosen or shards is not None:
        kind = array.shape, NATIVE[array.dtype], 0
        return _make_with_zarr(kind, chunks, shards, dims, attributes, options.checksums, chosen)
    return make_plain_document(array.dtype, array.shape, dims, attributes, chunks, options.checksums)


def make_text_document(column: TextColumn, dims: list[str], options: ChunkOptions) -> Document:
    """Return the metadata of an array of strings to write; filters and serializers are those of numbers."""
    chosen = options.find(column.path)
    chunks = _spread_rows(chosen.get("chunks"), column.shape, _STRING_BYTES)
    shards = _spread_rows(chosen.get("shards"), column.shape, _STRING_BYTES)
    codecs = {"compressors": chosen.get("compressors")}
    attributes = {STACK: list(column.shape)}
    kind = column.shape, "str", ""
    with allow_strings():
        return _make_with_zarr(kind, chunks, shards, dims, attributes, options.checksums, codecs)


def make_plain_document(
    dtype: torch.dtype,
    shape: Sequence[int],
    dims: list[str],
    attributes: Mapping[str, object],
    chunks: list[int] | None = None,
    checksums: bool = False,
) -> Document:
    """Return the metadata of an array without compression, by default of one chunk."""
    codecs: list[Named] = [{"name": "bytes"}]
    if dtype.itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if checksums:
        codecs.append({"name": "crc32c"})
    fill = False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
    return {
        "shape": list(shape),
        "data_type": NATIVE[dtype],
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": chunks or [max(1, size) for size in shape]},
        },
        # A single chunk needs no directories of its own.
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": "." if chunks is None else "/"},
        },
        "fill_value": [0.0, 0.0] if dtype.is_complex else fill,
        "codecs": codecs,
        "attributes": dict(attributes),
        "dimension_names": dims,
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _spread_rows(rows: Any, sizes_of_array: Sequence[int], itemsize: int) -> list[int] | None:
    """Return the shape of chunks for numbers of rows, which count along the leading dims of an array."""
    shape = [max(1, size) for size in sizes_of_array]
    if rows is None or not shape:
        return None
    if rows == "auto":
        row = math.prod(shape[1:]) * itemsize
        rows = min(shape[0], max(1, _AUTO_BYTES // row))
    sizes: Sequence[object] = [rows] if isinstance(rows, int) else rows
    if not isinstance(sizes, (list, tuple)) or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"chunks and shards are a number of rows, a tuple of sizes of the leading dims, or 'auto'; got {rows!r}"
        )
    return [*sizes[: len(shape)], *shape[len(sizes) :]]


def _make_with_zarr(
    kind: tuple[Sequence[int], str, object],
    chunks: list[int] | None,
    shards: list[int] | None,
    dims: list[str],
    attributes: dict[str, Any],
    checksums: bool,
    codecs: dict[str, Any],
) -> Document:
    """Return the metadata that zarr-python makes of codecs, and of the shape, dtype and fill value of an array."""
    shape, dtype, fill = kind
    if chunks is None:
        chunks = [max(1, size) for size in shape] if shards is None else shards
    compressors = codecs.pop("compressors", None)
    if checksums:
        given = (
            []
            if compressors is None
            else compressors
            if isinstance(compressors, (list, tuple))
            else [compressors]
        )
        compressors = [*given, zarr.codecs.Crc32cCodec()]
    made = zarr.create_array(
        {},
        shape=tuple(shape),
        dtype=dtype,
        chunks=tuple(chunks),
        shards=None if shards is None else tuple(shards),
        compressors=compressors,
        fill_value=fill,
        dimension_names=dims,
        attributes=attributes,
        **codecs,
    )
    content = made.metadata.to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes()
    document: Document = json.loads(content)
    return document


def get_attributes(document: Document, where: str) -> dict[str, Any]:
    """Return the attributes of metadata, or raise FormatError if they are not an object."""
    attributes = document.get("attributes")
    if attributes is None:
        return {}
    if not isinstance(attributes, dict):
        raise FormatError(
            f"{where}: the attributes of the {document.get('node_type', 'group')} are not an object"
        )
    return attributes


def read_array_document(name: str, document: Document, where: str) -> ArrayInfo:
    """Return the array that metadata describes; FormatError if it is malformed."""
    try:
        shape = read_shape(document["shape"])
        _check_separator(document)
        kind = document.get("data_type")
        if not isinstance(kind, str):
            kind = None
        logical = get_attributes(document, where).get("td_dtype")
        if logical is not None and not isinstance(logical, str):
            raise TypeError(f"td_dtype is {logical!r:.100}")
        if kind in EXTENSIONS:
            logical, stand_in = kind, f"uint{8 * EXTENSIONS[kind].itemsize}"
            document = {**document, "data_type": stand_in, "fill_value": 0}
            kind = stand_in
        if kind in DTYPES and document["zarr_format"] == 3:
            return ArrayInfo(name, document, shape, DTYPES[kind], logical, _find_raw_chunk(document, shape))
        return ArrayInfo(name, document, shape, _find_dtype(document), logical)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise FormatError(f"{where}: the metadata of the array {name!r} is damaged: {error!r}") from error


def _check_separator(document: Document) -> None:
    """Raise ValueError if the names of chunks are not parts of the path of the array, so that they could leave the group."""
    if document["zarr_format"] == 3:
        encoding = document["chunk_key_encoding"]
        if encoding["name"] not in ("default", "v2"):
            raise ValueError(f"the encoding of the names of its chunks is {encoding['name']!r:.100}")
        separator = (encoding.get("configuration") or {}).get("separator", "/")
    else:
        separator = document.get("dimension_separator") or "."
    if separator not in (".", "/"):
        raise ValueError(
            f"the separator in the names of its chunks is {separator!r:.100}; expected '.' or '/'"
        )


def _find_raw_chunk(document: Document, shape: torch.Size) -> str | None:
    """Return the key of the only chunk of an array, below its name, if it has the elements as they are in memory."""
    codecs, grid = document["codecs"], document["chunk_grid"]
    plain = len(codecs) == 1 and codecs[0]["name"] == "bytes"
    order = codecs[0].get("configuration", {}).get("endian", "little") if plain else None
    if order != "little" or grid["name"] != "regular" or document.get("storage_transformers"):
        return None
    encoding = document["chunk_key_encoding"]
    if list(grid["configuration"]["chunk_shape"]) != list(shape) or encoding["name"] != "default":
        return None
    separator = encoding.get("configuration", {}).get("separator", "/")
    return str(separator).join(["c", *["0"] * len(shape)])


@contextlib.contextmanager
def allow_strings() -> Iterator[None]:
    """Ignore what early releases of zarr 3.1 say of arrays of strings, whose codec was specified later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The codec `vlen-utf8`")
        yield


def _find_dtype(document: Document) -> torch.dtype | None:
    """Return the dtype of torch in which zarr-python reads an array, or None if it has none."""
    try:
        with allow_strings():
            array = zarr.Array(zarr.AsyncArray(document, zarr.storage.StorePath(zarr.storage.MemoryStore())))
    except Exception as error:  # zarr and its codecs raise errors of all kinds
        raise ValueError(str(error)) from error
    if array.dtype.kind in "mM":  # times are integers with a unit
        return torch.int64
    return DTYPES.get(array.dtype.newbyteorder("=").name) if array.dtype.kind in "biufc" else None
