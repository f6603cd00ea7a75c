"""Read metadata: parse one ``meta.json`` into a checked :class:`Level`, or raise a FormatError with the cause."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch

from td_core import TensorDict, kinds, spi
from td_core.errors import FormatError, MissingPluginError
from td_core.spi import STORABLE, NodeKind, show_path, unravel_key_to_tuple
from td_core.typing import NestedKey

from . import _file_names
from ._directory_layouts import FORMAT, OUTER
from ._fs import Parts
from ._plan import GENERAL, ROWS_VERSION, JsonObject
from ._value_rows import SLOT

#: Longest ``meta.json`` that is read, in bytes. A node with a million leaves needs about 100 MB.
LIMIT = 1 << 29

_TOO_LARGE = 1 << 63
_MOST_DIMS = 64
_MOST_MEMBERS = 1 << 20

_CLASS = re.compile(r"<class '[^']+'>")
_DEFINED = (
    "a class that this process has defined: import the module that defines it first; if it has moved, load it by the class "
    "that it is now, as in Record.load_memmap(path)"
)
_DENSE = re.compile(r"<class '[^']*\.TensorDict'>")
#: Fields that mark the metadata of a class without a shape, unless the class wraps a collection.
_MARKS = frozenset({"stack_dim", "_is_non_tensor", "_format_version", "index", "custom_op"})
#: Fields that describe a node with a shape, or a saved view. Later releases may add fields that start with an
#: underscore.
_LEVEL = frozenset({"shape", "device", "custom_op", "inv_op", "custom_op_kwargs", "inv_op_kwargs"})
_BELONGS_TO_LEVEL = ("_type", "_format_version", "_class")


class FileTree(Protocol):
    """The files of a save to read: those of a directory or of an archive."""

    path: str

    def show(self, parts: Parts, name: str = "") -> str:
        """Format a path for error messages."""

    def entries(self, parts: Parts = ()) -> dict[str, bool]:
        """Return the names in a directory, mapped to True for subdirectories and to False for files."""

    def stat(self, parts: Parts, name: str) -> os.stat_result | SimpleNamespace | None:
        """Return an object with the size and mode of a file or directory, or None if it does not exist."""

    def stat_path(self, path: Parts) -> os.stat_result | SimpleNamespace | None:
        """Return an object with the size and mode at a path, or None if nothing exists there."""

    def read(self, parts: Parts, name: str, limit: int) -> bytes:
        """Return the content of a small file."""


@dataclass(slots=True)
class LeafEntry:
    """Metadata of a leaf.

    Attributes:
        shape: shape of the leaf; for a strided nested tensor, of the table of component shapes; for a jagged
            tensor, of its values.
        dtype: dtype of the elements.
        files: possible names of its file, without suffix, the likeliest first.
        nbytes: size of the elements in bytes; for a strided nested tensor, of the table.
        nested: whether the leaf is a strided nested tensor.
        inner: leading dims that all components of a strided nested tensor share, from the batch size.
        jagged: metadata of a jagged tensor; None for other tensors.
    """

    shape: torch.Size
    dtype: torch.dtype
    files: tuple[str, ...]
    nbytes: int = 0
    nested: bool = False
    inner: torch.Size = torch.Size()
    jagged: JsonObject | None = None

    def parts(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Return the suffix, dtype and shape of each file whose size follows from the metadata."""
        if self.nested:
            return [(".shape.memmap", torch.int64, self.shape)]
        results = [(".memmap", self.dtype, self.shape)]
        if self.jagged is not None:
            dtype, count = STORABLE[self.jagged["offsets_dtype"]], self.jagged["components"]
            results.append((".offsets.memmap", dtype, torch.Size([count + 1])))
            if self.jagged["lengths"]:
                results.append((".lengths.memmap", dtype, torch.Size([count])))
        return results


class Outer(NamedTuple):
    """A node around another one: its kind, its stored subclass, its header, and the name of its member."""

    kind: NodeKind
    cls: type | None
    meta: dict[str, Any]
    member: str


@dataclass(slots=True)
class Level:
    """Checked metadata of a node; nodes with equal metadata may share a Level.

    Attributes:
        kind: the kind that builds the node; None for views of old releases, and if it was not looked up.
        cls: the stored subclass of the kind's type; None if it is the type itself.
        meta: fields that describe the node itself.
        keys: keys of leaves and child nodes, in order.
        leaves: metadata of the leaves by key.
        nodes: possible directory names of the child nodes by key.
        members: directory names of the members; None if they must be listed from the directory.
        values: JSON values in the metadata.
        sized: whether the metadata has a batch size; if not, ``batch_size`` is the batch size of the parent.
        batch_size: batch size of the node, as far as the metadata has it.
        version: ``_format_version``, or 0 if it is missing.
        outer: the node around this one that the same metadata describes, such as a TensorDictParams; None without one.
    """

    kind: NodeKind | None = None
    cls: type | None = None
    meta: JsonObject = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    leaves: dict[str, LeafEntry] = field(default_factory=dict)
    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    members: list[str] | None = None
    values: JsonObject = field(default_factory=dict)
    sized: bool = False
    batch_size: torch.Size = torch.Size()
    version: int = 0
    outer: Outer | None = None

    @property
    def general(self) -> bool:
        """Whether the metadata is in the general form."""
        return self.version in GENERAL


# Cache checked metadata: layers of a model or episodes of a data set have equal metadata, and checking it takes half
# of the load time, apart from mapping the files.
_KNOWN: dict[tuple[bytes, bool, bool], Level] = {}
_MOST_KNOWN = 128
_SHORT = 1 << 15


class Location(NamedTuple):
    """File and key path of an error, for error messages."""

    file: str
    key: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {show_path(self.key)}"

    def error(self, fieldname: str, found: object, expected: str, *below: str) -> FormatError:
        """Return the FormatError for a wrong field of this node or of an entry below it."""
        shown = repr(found)
        shown = shown if len(shown) < 200 else shown[:200] + "..."
        return FormatError(
            f"{Location(self.file, self.key + below)}: {fieldname} is {shown}, expected {expected}"
        )


def parse_json(content: bytes, where: str) -> Any:
    """Parse a JSON file; raise FormatError if it is invalid, nested too deep or repeats a key."""
    try:
        return spi.parse_json(content)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not valid metadata: {error}") from error


def read_json(tree: FileTree, parts: Parts, name: str) -> Any:
    """Parse a JSON file in a directory or an archive."""
    return parse_json(tree.read(parts, name, LIMIT), tree.show(parts, name))


def read_if_there(tree: FileTree, parts: Parts, name: str) -> bytes | None:
    """Return the content of a small file in a directory or an archive, or None if it is missing."""
    try:
        return tree.read(parts, name, LIMIT)
    except FileNotFoundError:
        return None


def read_cached_level(content: bytes, *, robust_key: bool, strict: bool) -> Level | None:
    """Return the cached result of :func:`read_level` for this content, if its kind is still registered."""
    level = _KNOWN.get((content, robust_key, strict))
    if level is None or level.kind is not kinds.named(level.meta["_type"], FORMAT):
        return None
    return level


def read_level(
    content: bytes,
    location: Location,
    above: torch.Size,
    *,
    robust_key: bool,
    strict: bool,
    named: Callable[[], type | None] = lambda: None,
) -> Level:
    """Check the ``meta.json`` of a node; ``named()`` returns the class to use if the stored class is not found."""
    known = _KNOWN.get((content, robust_key, strict))
    obj = parse_json(content, location.file) if known is None else known.meta
    # Report a missing kind first: the checks below do not apply to the metadata of unknown kinds.
    resolve = _general_kind if _version(obj, location) in GENERAL else _kind
    kind, cls = resolve(obj, location, strict, named)
    level = known or parse_level(obj, location, above, robust_key=robust_key, strict=strict)
    if kind is kinds.of(TensorDict) and not (level.sized or level.general):
        # Raise here: otherwise the node's entries would be read as values and lost.
        check_shape(obj.get("shape"), location, "shape")
        raise location.error("custom_op", obj["custom_op"], "none, or an entry of that name")
    outer = _read_outer(obj, location, strict, named)
    if level.kind is not kind or level.cls is not cls or outer is not None:
        level = replace(level, kind=kind, cls=cls, outer=outer)
    if outer is None and _depends_on_itself(level) and len(content) < _SHORT:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[content, robust_key, strict] = level
    return level


def _depends_on_itself(level: Level) -> bool:
    """Return True if the check of metadata depends neither on the parent nor on other files, so that it can be cached."""
    return level.sized and not level.general and level.version > 0


def _version(obj: object, location: Location) -> int:
    if not isinstance(obj, dict):
        raise location.error("the metadata", obj, "an object")
    version = obj.get("_format_version", 0)
    if type(version) is dict and isinstance(obj.get("shape"), list):
        return 0  # This is an entry with the key "_format_version".
    if type(version) is not int or version < 0:
        raise location.error("_format_version", version, "a number")
    if version > ROWS_VERSION:
        raise location.error("_format_version", version, f"at most {ROWS_VERSION}: upgrade td-memmap")
    return version


def parse_level(obj: Any, location: Location, above: torch.Size, *, robust_key: bool, strict: bool) -> Level:
    """Check the content of one ``meta.json`` without looking up its class; arguments as for :func:`read_level`."""
    version = _version(obj, location)
    if version in GENERAL:
        return _general(obj, location, version)
    level = Level(batch_size=above, version=version)
    if isinstance(obj.get("shape"), list) and not is_view(obj):
        _mapping(level, obj, location, robust_key, strict)
    else:
        level.meta = obj
        level.values = {name: value for name, value in obj.items() if name not in _BELONGS_TO_LEVEL}
        if is_outer(level.values.get(OUTER)):
            del level.values[OUTER]
        count = obj.get("_members")
        if count is not None:
            if type(count) is not int or not 0 <= count <= _MOST_MEMBERS:
                raise location.error("_members", count, f"a number of members, at most {_MOST_MEMBERS}")
            level.members = [str(i) for i in range(count)]
    return level


def is_view(obj: dict[str, object]) -> bool:
    """Return True if metadata describes a saved view, not a node with a key such as ``"index"``."""
    return isinstance(obj.get("custom_op"), str) if isinstance(obj.get("shape"), list) else "index" in obj


def is_written(meta: object, beside: Collection[str]) -> bool:
    """Return True if a save wrote this metadata, not another program."""
    if not isinstance(meta, dict):
        return False
    if meta.get("_format_version") in GENERAL:
        return isinstance(meta.get("kind"), str) and isinstance(meta.get("entries"), list)
    name = meta.get("_type")
    if not isinstance(name, str) or _CLASS.fullmatch(name) is None:
        return False
    # Recognize metadata of a user's class by the fields that every save of such a class has.
    known = name.startswith("<class 'tensordict.") or kinds.named(name, FORMAT) is not None
    return (
        known
        or isinstance(meta.get("shape"), list)
        or not _MARKS.isdisjoint(meta)
        or _file_names.INNER in beside
    )


def has_level(tree: FileTree, parts: Parts = ()) -> bool:
    """Return True if a directory has metadata that a save wrote."""
    try:
        meta = read_json(tree, parts, _file_names.META)
    except (FormatError, OSError):
        return False
    return is_written(meta, tree.entries(parts))


def _kind(
    obj: JsonObject, location: Location, strict: bool, named: Callable[[], type | None]
) -> tuple[NodeKind | None, type | None]:
    name = obj.get("_type")
    if not isinstance(name, str):
        raise location.error("_type", name, "the name of a class")
    kind = kinds.named(name, FORMAT)
    if kind is not None:
        return kind, None
    if is_view(obj):
        return None, None
    cls = _find_class(obj.get("_class", name))
    if cls is not None:
        return kinds.of(cls), cls
    if _DENSE.fullmatch(name) or (not strict and isinstance(obj.get("shape"), list)):
        return kinds.of(TensorDict), None
    if name.startswith("<class 'tensordict.tensorclass."):
        return _find_generic_kind(name, location)
    moved = named()
    if moved is not None and isinstance(obj.get("shape"), list):
        # Load the node as a TensorDict; it is converted to the class after its entries are loaded.
        return kinds.of(TensorDict), moved if issubclass(moved, TensorDict) else None
    if moved is not None and kinds.of(moved).with_class:
        return kinds.of(moved), None
    raise location.error("_type", name, _DEFINED)


def _read_outer(
    obj: dict[str, object], location: Location, strict: bool, named: Callable[[], type | None]
) -> Outer | None:
    """Return the node around the one that metadata in the plain form describes, which tensordict does not have."""
    rows = obj.get(OUTER)
    if not is_outer(rows) or spi.RULES.follows_tensordict:
        return None
    (row,) = rows
    kind, cls = _general_kind(row, location, strict, named)
    meta, members = row.get("meta"), row.get("members")
    if kind is None or not isinstance(meta, dict):
        raise location.error("meta", meta, "an object")
    if not isinstance(members, list) or len(members) != 1 or not isinstance(members[0], str):
        raise location.error("members", members, "one name")
    return Outer(kind, cls, meta, members[0])


def is_outer(rows: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return True if a field of the plain form describes the node around its own: a list, since entries are objects."""
    return isinstance(rows, list) and len(rows) == 1 and isinstance(rows[0], dict) and "kind" in rows[0]


def _find_class(name: str) -> type | None:
    """Return the class with a saved name, of any kind that this format has a layout for, or None."""
    formatted = (kind for kind in kinds.list_kinds() if FORMAT in kind.layouts)
    found = (kinds.find_class(kind, name) for kind in formatted)
    return next((cls for cls in found if cls is not None), None)


def _find_generic_kind(name: str, location: Location) -> tuple[NodeKind, type | None]:
    """Return the kind and class of a generic value class such as ``MetaData[str]``, which exists only after its first use."""
    generic = kinds.named(name.partition("[")[0] + "'>", FORMAT)
    if "[" in name and generic is not None:
        title = name[:-2].rpartition(".")[2]
        made: list[type] = generic.type.__subclasses__()
        return generic, next((cls for cls in made if cls.__qualname__ == title), None)
    raise MissingPluginError(
        f"{location} is of the {name[1:-1]}, which is provided by {MissingPluginError.describe('td-tensorclass')}"
    )


def _mapping(
    level: Level, obj: dict[str, object], location: Location, robust_key: bool, strict: bool
) -> None:
    """Read metadata in the plain form, a JSON object of entries and fields, into ``level``."""
    level.batch_size = check_shape(obj["shape"], location, "shape")
    level.sized = True
    meta, leaves, nodes = level.meta, level.leaves, level.nodes
    likeliest = -1 if obj.get(_file_names.ROBUST_KEY) is False else 1
    for name, entry in obj.items():
        if type(entry) is not dict:
            # Fields of a value node are checked when the node is built.
            if strict and name not in _LEVEL and name[:1] != "_" and "_is_non_tensor" not in obj:
                raise location.error("the entry", entry, "a leaf (shape, dtype) or a collection (type)", name)
            meta[name] = entry
        elif entry.get("type") is not None:
            nodes[name] = list_possible_names(name, robust_key)[::likeliest]
            level.keys.append(name)
        elif "dtype" in entry and "shape" in entry:
            files = list_possible_names(name, robust_key)[::likeliest]
            leaves[name] = _leaf(entry, location, name, files, level.batch_size)
            level.keys.append(name)
        elif strict:
            raise location.error("the entry", entry, "a leaf (shape, dtype) or a collection (type)", name)
    device = meta.get("device", "cpu")
    if device != "cpu" and device != "None":
        check_device(device, location)


def _general_kind(
    obj: JsonObject, location: Location, strict: bool, named: Callable[[], type | None]
) -> tuple[NodeKind, type | None]:
    tag = obj.get("kind")
    if not isinstance(tag, str):
        raise location.error("kind", tag, "the tag of a node kind")
    kind, cls = kinds.find(tag), None
    if kind is None:
        moved = None if "provider" in obj else named()
        if moved is not None and kinds.of(moved).with_class:
            return kinds.of(moved), None
        missing = MissingPluginError.of_writer(f"{location}, of the kind {tag!r},", obj.get("provider"))
        raise missing or location.error("kind", tag, "a node kind that an installed package provides")
    if "class" in obj:
        cls = kinds.find_class(kind, obj["class"])
        if cls is None and (moved := named()) is not None and issubclass(moved, kind.type):
            cls = moved
        if cls is None and strict:
            wanted = f"a subclass of {kind.type.__name__} that this process has defined"
            raise location.error("class", obj["class"], wanted)
    return kind, cls


def _general(obj: dict[str, object], location: Location, version: int) -> Level:
    """Read metadata in the general form."""
    meta, members, values = obj.get("meta"), obj.get("members", []), obj.get("values", {})
    if not isinstance(meta, dict):
        raise location.error("meta", meta, "an object")
    if not isinstance(members, list) or not all(
        isinstance(name, str) and _file_names.split_relative(name) == (name,) for name in members
    ):
        raise location.error("members", members, "names of directories")
    if not isinstance(values, dict) or not all(isinstance(value, dict) for value in values.values()):
        raise location.error("values", values, "an object of values")
    level = Level(meta=meta, members=members, values=values, version=version)
    if isinstance(meta.get("batch_size"), list):
        level.batch_size = check_shape(meta["batch_size"], location, "batch_size")
        level.sized = True
    for name, value in values.items():
        if "rows" in value:
            _check_rows(level, name, value, location)
    if isinstance(meta.get("device"), str):
        check_device(meta["device"], location)
    _general_entries(level, obj.get("entries", []), location)
    return level


def _check_rows(level: Level, name: str, value: dict[str, object], location: Location) -> None:
    """Raise FormatError for wrong fields of values by rows."""
    for field_name in ("rows", "heap"):
        number = value.get(field_name)
        if type(number) is not int or not 0 <= number < _TOO_LARGE:
            raise location.error(f"{field_name} of {name!r}", number, "a number")
    if not level.sized:
        raise location.error("batch_size", level.meta.get("batch_size"), "a list of sizes")
    check_shape(list(level.batch_size), location, "batch_size", SLOT)


def _general_entries(level: Level, rows: object, location: Location) -> None:
    if not isinstance(rows, list):
        raise location.error("entries", rows, "a list")
    for row in rows:
        if not (
            isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], dict)
        ):
            raise location.error("an entry", row, "a key and an object")
        name, entry = row
        file = entry.get("file")
        if not isinstance(file, str) or _file_names.split_relative(file) != (file,):
            raise location.error("file", file, "a file name", name)
        if name in level.leaves or name in level.nodes:
            raise location.error("the key", name, "each key once", name)
        if entry.get("type") is not None:
            level.nodes[name] = (file,)
        else:
            level.leaves[name] = _leaf(entry, location, name, (file,), level.batch_size)
        level.keys.append(name)


def _leaf(
    entry: dict[str, object], location: Location, key: str, files: tuple[str, ...], batch_size: torch.Size
) -> LeafEntry:
    name = entry.get("dtype")
    dtype = STORABLE.get(name) if type(name) is str else None
    if dtype is None:
        raise location.error("dtype", name, "a dtype that this torch knows and a file can hold", key)
    shape = check_shape(entry.get("shape"), location, "shape", dtype.itemsize, key)
    nested = entry.get("is_nested")
    if nested is not None and type(nested) is not bool:
        raise location.error("is_nested", nested, "true or false", key)
    if entry.get("layout") == "jagged":
        nbytes = shape.numel() * dtype.itemsize
        return LeafEntry(shape, dtype, files, nbytes, jagged=_read_jagged(entry, location, key))
    if not nested:
        if batch_size and shape[: len(batch_size)] != batch_size:
            raise location.error(
                "shape", list(shape), f"a shape that starts with the batch size {list(batch_size)}", key
            )
        return LeafEntry(shape, dtype, files, shape.numel() * dtype.itemsize)
    if len(shape) != 2:
        raise location.error(
            "shape", list(shape), "the shape of a table of component shapes, [rows, dims]", key
        )
    inner = batch_size[1:]
    if batch_size and (shape[0] != batch_size[0] or shape[1] < len(inner)):
        wanted = f"as many components as the batch size {list(batch_size)} says, with its other dims in each"
        raise location.error("shape", list(shape), wanted, key)
    return LeafEntry(shape, dtype, files, shape.numel() * 8, nested=True, inner=inner)


def _read_jagged(entry: dict[str, object], location: Location, key: str) -> dict[str, object]:
    for name in ("components", "ragged"):
        value = entry.get(name)
        if type(value) is not int or not 0 <= value < 1 << 48:
            raise location.error(name, value, "a number", key)
    if entry.get("offsets_dtype") not in ("torch.int32", "torch.int64"):
        raise location.error("offsets_dtype", entry.get("offsets_dtype"), "an integer dtype", key)
    if not isinstance(entry.get("lengths"), bool):
        raise location.error("lengths", entry.get("lengths"), "true or false", key)
    return entry


def list_possible_names(key: str, robust_key: bool) -> tuple[str, ...]:
    """Return the possible names of the file or directory of a key, the likeliest first."""
    encoded = _file_names.encode_key(key)
    if robust_key and encoded == key:
        return (key,)
    raw = _file_names.get_raw_name(key)
    if raw is None:
        return (encoded,)
    return (encoded, raw) if robust_key else (raw,)


def check_shape(value: object, location: Location, name: str, itemsize: int = 1, *below: str) -> torch.Size:
    """Return a shape; raise FormatError if it is invalid or has more elements than memory can hold."""
    if type(value) is not list:
        raise location.error(name, value, "a list of sizes", *below)
    nbytes = itemsize
    for size in value:
        if type(size) is not int or not 0 <= size < _TOO_LARGE:
            raise location.error(name, value, "a list of sizes", *below)
        # Skip sizes of 0, which would hide that the other sizes are impossible.
        nbytes *= size or 1
    if len(value) > _MOST_DIMS or (nbytes >= _TOO_LARGE and not _is_possible(value)):
        raise location.error(name, value, "a shape that a tensor can have", *below)
    return torch.Size(value)


def _is_possible(shape: list[int]) -> bool:
    """Return True if torch accepts a shape with huge sizes, which it does only for tensors without elements."""
    if 0 not in shape:
        return False
    try:
        torch.empty(shape, device="meta")
    except RuntimeError:
        return False
    return True


def check_device(value: object, location: Location) -> torch.device:
    """Return a device; raise FormatError if torch does not support it."""
    try:
        if isinstance(value, str):
            return torch.device(value)
    except RuntimeError:
        pass
    raise location.error("device", value, "the name of a device")


def format_manifest(
    sizes: dict[Parts, list[object]],
    algorithm: str | None,
    hashes: dict[Parts, str],
    texts: dict[Parts, str],
    **more: object,
) -> bytes:
    """Return the content of a manifest: size and time of each file, its hash if there is an algorithm, CRC-32 of ``texts``."""
    content: dict[str, object] = {"format": 1, "files": {"/".join(path): row for path, row in sizes.items()}}
    content.update(more)
    content["texts"] = {"/".join(path): value for path, value in texts.items()}
    if algorithm is not None:
        content["algorithm"] = algorithm
        content["hashes"] = {"/".join(path): value for path, value in hashes.items()}
    return spi.add_check_line(json.dumps(content).encode())


def find_directory(tree: FileTree, subpath: NestedKey, *, robust_key: bool) -> Parts:
    """Return the directory of the node under a key; raise ValueError if the save has no such node."""
    parts: Parts = ()
    for key in subpath.split("/") if isinstance(subpath, str) else unravel_key_to_tuple(subpath):
        below = _names_below(tree, parts, key, robust_key)
        # A tensorclass keeps its entries in a subdirectory; an entry with that name takes precedence.
        if below is None and tree.stat((*parts, _file_names.INNER), _file_names.META) is not None:
            parts = (*parts, _file_names.INNER)
            below = _names_below(tree, parts, key, robust_key)
        # Members of a stack are not entries, so use the key as a directory name.
        for name in (key,) if below is None else below:
            if _file_names.split_relative(name) == (name,) and any(
                tree.stat((*parts, name), meta) is not None
                for meta in (_file_names.META, _file_names.OLD_META)
            ):
                parts = (*parts, name)
                break
        else:
            raise ValueError(
                f"no collection is saved under the subpath {subpath!r} of {tree.path}: stopped at {key!r}"
            )
    return parts


def _names_below(tree: FileTree, parts: Parts, key: str, robust_key: bool) -> tuple[str, ...] | None:
    content, location = (
        read_if_there(tree, parts, _file_names.META),
        Location(tree.show(parts, _file_names.META), parts),
    )
    if content is None:
        return None
    meta = parse_json(content, location.file)
    return parse_level(meta, location, torch.Size(), robust_key=robust_key, strict=False).nodes.get(key)


def list_subdirectories(tree: FileTree, parts: Parts) -> list[str]:
    """Return the sorted names of the subdirectories that have a ``meta.json``."""
    return [
        name
        for name, is_directory in sorted(tree.entries(parts).items())
        if is_directory and tree.stat((*parts, name), _file_names.META) is not None
    ]


def list_members(listing: dict[str, bool], location: Location) -> list[str]:
    """Return the directories of members: ``_tensordict``, ``_source``, or 0, 1, 2... without a gap."""
    named = [name for name in (_file_names.INNER, _file_names.SOURCE) if listing.get(name)]
    numbers = sorted(
        int(name)
        for name, is_directory in listing.items()
        if is_directory and name.isascii() and name.isdigit() and len(name) < 10
    )
    for expected, number in enumerate(numbers):
        if number != expected:
            raise location.error(
                "the members", numbers[:20], f"a member {expected}: its directory is missing"
            )
    return [*named, *map(str, numbers)]


def read_node(files: FileTree, parts: Parts) -> tuple[JsonObject, Level, dict[str, bool], dict[str, Parts]]:
    """Return a node's raw metadata, its checked metadata, its directory listing, and its child directories by key."""
    location = Location(files.show(parts, _file_names.META), parts)
    try:
        meta = read_json(files, parts, _file_names.META)
    except FileNotFoundError:
        if files.stat(parts, _file_names.OLD_META) is not None:
            raise FormatError(
                f"{files.path} was written by a release before 0.3, whose metadata is pickled; load it and save it again"
            ) from None
        if not parts:
            raise
        raise FormatError(f"{location.file} is missing") from None
    level = parse_level(meta, location, torch.Size(), robust_key=True, strict=False)
    listing = files.entries(parts)
    if not level.sized and not level.general:
        level.members = level.members or list_members(listing, location)
    below = {}
    for name, names in level.nodes.items():
        below[name] = (*parts, next((item for item in names if item in listing), names[0]))
    below.update({name: (*parts, name) for name in level.members or ()})
    if level.sized and level.version == 0 and not level.nodes:
        for name in list_subdirectories(files, parts):
            below[name] = (*parts, name)
    return meta, level, listing, below
