"""The consolidated file: the storage, the structure as JSON, and the length of the JSON as a little-endian int64.

The JSON ends with its check line.
The structure has one of two forms. The *plain form* is that of tensordict: nested JSON objects, one per node, written
by the ``"consolidated/1"`` layouts of the kinds. What this form cannot represent (value types that JSON simplifies, names
of classes) is under the root key ``size``, which tensordict skips. The *general form* is used for trees that the plain
form cannot hold: the flat table of ``td_core.spi.encode`` under the root key ``td``. Its ``cls`` is not a tensordict class,
so tensordict raises when it reads such a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorCollection, TensorDict, kinds
from td_core.errors import (
    BatchSizeError,
    CodecError,
    DimNamesError,
    FormatError,
    MissingPluginError,
    StructureError,
)
from td_core.spi import (
    Encoded,
    Node,
    NodeKind,
    Record,
    add_check_line,
    as_device,
    as_named,
    decode,
    encode,
    expand,
    is_readable,
    join_value,
    name_nodes_below,
    parse_json,
    run_parallel,
    show_path,
    split_value,
    user_class,
    walk,
)
from td_core.spi import Layout as NodeLayout
from td_store import files

from . import _key_paths, _storage
from ._memory import WHOLE, get_bytes, make_vector
from ._storage import Layout, Leaf, Span, Views

FORMAT = "consolidated/1"

#: The JSON object of a node in the plain form.
Level = dict[str, Any]
GENERAL = "td:general"
FIELDS = frozenset(("cls", "non_tensors", "leaves", "cls_metadata"))
RESERVED = FIELDS | {"size"}
#: Keys that tensordict adds to the structure when it sends a collection, and also writes to files.
SENT = frozenset(("_total_bytes", "_storage_device", "_tensorclass_type"))
JAGGED = ("<NJT_VALUES>", "<NJT_OFFSETS>", "<NJT_LENGTHS>")
MARKS = (*JAGGED, "<NJT>")
# tensordict's order of the pieces (values, offsets, lengths) of a jagged tensor, by number of pieces.
JAGGED_ORDER = {2: (0, 1), 3: (0, 2, 1)}
LARGEST_JSON = 1 << 30
_CHECK_LINE = len(add_check_line(b""))
#: Exceptions that decoding raises on JSON of an unexpected form.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError)


class NotRepresentableError(Exception):
    """The file format of tensordict cannot represent a tree, so the general form is used."""


def make_trailer(
    tree: TensorCollection, encoded: Encoded, layout: Layout, checksum: dict[str, str] | None = None
) -> bytes:
    """Encode the structure as the end of a file: JSON, in the plain form if possible, its check line, and its length."""
    ours: dict[str, object] = {} if checksum is None else {"hash": checksum}
    try:
        plain = _plain(tree, encoded, layout)
        if ours:
            plain.setdefault("size", {"td": {"values": {}, "order": {}}})["td"].update(ours)
        text = json.dumps(plain).encode()
    except (NotRepresentableError, RecursionError, TypeError):
        table = {"cls": GENERAL, "td": {**describe(encoded, layout), **ours}}
        text = as_json(table, encoded.nodes).encode()
    # Pad the file to whole 16-byte elements, see _align_bytes().
    text += b" " * (-(layout.nbytes + len(text) + _CHECK_LINE + 8) % WHOLE)
    text = add_check_line(text)
    check_length(text, LARGEST_JSON)
    return text + len(text).to_bytes(8, "little", signed=True)


def describe_plainly(tree: Node, encoded: Encoded, layout: Layout) -> Level | None:
    """Return the structure in the plain form, which tensordict reads; None if that is impossible."""
    try:
        return _plain(tree, encoded, layout)
    except NotRepresentableError:
        return None


def as_json(table: object, nodes: list[_key_paths.Row]) -> str:
    """Encode a table of nodes as JSON; raise CodecError with the key path if the header of a node is not JSON."""
    try:
        return json.dumps(table, separators=(",", ":"))
    except TypeError:
        for path, node in _key_paths.walk(nodes):
            if isinstance(node, int):  # a leaf
                continue
            try:
                json.dumps(node)
            except TypeError as error:
                kind = node["kind"]
                raise CodecError(
                    f"cannot store the metadata of {show_path(path)}, of the kind {kind!r}: {error}"
                ) from error
        raise


def check_length(text: bytes, largest: int) -> None:
    """Raise StructureError if the encoded structure is longer than readers accept."""
    if len(text) > largest:
        raise StructureError(f"structure and values take {len(text)} bytes as JSON; a reader takes {largest}")


def write(
    path: Path,
    nbytes: int,
    parts: list[tuple[int, Tensor]],
    end: bytes,
    num_threads: int = 0,
    durable: bool = False,
) -> Tensor:
    """Write storage and trailer to a temporary file, then rename it over ``path``. Return a private map of the new file."""
    # ``parts`` are (first byte, bytes) in the storage, with zeros between them.
    whole = [*parts, (nbytes, make_vector(end))]
    with files.NewFile(path) as file:
        run_parallel([partial(file.write, [get_bytes(data)], start) for start, data in whole], num_threads)
        # Map before the rename: another writer may replace the file right after it.
        mapped = _map_fd(file.fd, str(path))
        file.commit(durable=durable)
    return mapped


def hash_parts(nbytes: int, parts: list[tuple[int, Tensor]]) -> dict[str, str]:
    """Return the hash of a storage of ``nbytes`` bytes that consists of parts, with zeros between them."""
    checksum, position = files.Checksum(), 0
    for start, data in sorted(parts, key=itemgetter(0)):
        checksum.update(bytes(start - position))
        checksum.update(get_bytes(data))
        position = start + len(data)
    checksum.update(bytes(nbytes - position))
    return {"algorithm": checksum.algorithm, "storage": checksum.hexdigest()}


def map_file(path: Path) -> Tensor:
    """Memory-map a file privately (copy-on-write) as a uint8 tensor: writes do not change the file."""
    with open(path, "rb", buffering=0) as file:
        return _map_fd(file.fileno(), str(path))


def _map_fd(fd: int, path: str) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(files.map_file(fd, path=path))


def read(path: str | Path, cls: type | None = None, *, verify: bool = False) -> tuple[Any, Tensor]:
    """Read (collection, storage) from a consolidated file, as an instance of ``cls`` if given; ``verify`` its hash first."""
    return parse(_map_checked(Path(path)), str(path), cls, verify=verify)


def _map_checked(path: Path) -> Tensor:
    """Map a file that can be a consolidated one."""
    if path.is_dir() or not path.exists():
        raise FileNotFoundError(f"no consolidated file at {path}")
    if not path.is_file():
        raise FormatError(f"{path} is not a regular file")
    if path.stat().st_size < 8:
        raise FormatError(f"{path} is too short for a consolidated file: {path.stat().st_size} bytes")
    return map_file(path)


def parse(
    data: Tensor, name: str, cls: type | None = None, *, verify: bool = False
) -> tuple[TensorCollection, Tensor]:
    """Parse (collection, storage) from the bytes of a consolidated file; see :func:`read`."""
    structure, storage = _split(data, name)
    with convert_damage(name):
        if verify:
            _compare_hash(structure, storage)
        if structure.get("cls") == GENERAL:
            layout, nodes, values = from_description(structure["td"])
            tree = assemble_table(nodes, layout, join_values(values, nodes), storage, named=cls)
            end = layout.nbytes
        else:
            reader = _Reader(Views(storage), structure, cls)
            tree = reader.node(structure)
            _check_shapes(tree)
            end = max((span.stop for leaf in reader.leaves for span in leaf.spans), default=0)
        # With a byte more or less, all elements would be shifted.
        if len(storage) != end:
            raise FormatError(f"its storage has {len(storage)} bytes, its structure describes {end}")
    return as_named(cls, tree, f"what is saved at {name}"), storage


def _split(data: Tensor, name: str) -> tuple[Level, Tensor]:
    """Split the bytes of a file into the structure and the storage."""
    length = int.from_bytes(bytes(data[-8:].tolist()), "little", signed=True)
    if not 0 < length <= min(len(data) - 8, LARGEST_JSON):
        raise FormatError(
            f"{name} is damaged: its last 8 bytes say that {length} bytes of {len(data)} are structure"
        )
    storage = _align_bytes(data)[: len(data) - 8 - length]
    text = bytes(get_bytes(data[len(data) - 8 - length : -8]))
    try:
        structure = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is damaged: its structure is no JSON: {error}") from error
    if not isinstance(structure, dict):
        raise FormatError(f"{name} is damaged: its structure is {type(structure).__name__}, not an object")
    return structure, storage


def _get_hash(structure: Level) -> Any:
    """Return the hash of the storage that a structure records, or None."""
    beside = structure["td"] if structure.get("cls") == GENERAL else (structure.get("size") or {}).get("td")
    return (beside or {}).get("hash")


def _compare_hash(structure: Level, storage: Tensor) -> None:
    """Compare a storage with its hash, if the structure records one."""
    recorded = _get_hash(structure)
    if recorded is not None:
        digest = files.Checksum(str(recorded["algorithm"]), [storage]).hexdigest()
        if digest != recorded["storage"]:
            raise FormatError(f"the hash of its storage is {digest}, {recorded['storage']} was saved")


def count_hashes(path: Path) -> int:
    """Return the number of hashes that a file records: one for its storage, or none."""
    return count_hashes_in(_map_checked(path), str(path))


def count_hashes_in(data: Tensor, name: str) -> int:
    """Return the number of hashes that the bytes of a file record."""
    structure, _ = _split(data, name)
    with convert_damage(name):
        return int(_get_hash(structure) is not None)


def has_structure(path: Path) -> bool:
    """Return True if a file ends with a structure and its length."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(os.pread(file.fileno(), 8, max(size - 8, 0)), "little", signed=True)
        return (
            0 < length <= min(size - 8, LARGEST_JSON)
            and os.pread(file.fileno(), 1, size - 8 - length) == b"{"
        )


@contextmanager
def convert_damage(name: str) -> Iterator[None]:
    """Convert exceptions raised by decoding damaged data into a FormatError that names the damaged object."""
    try:
        yield
    except MissingPluginError as error:
        raise MissingPluginError(f"{name}: {error}") from error
    except (FormatError, BatchSizeError, DimNamesError) as error:
        raise FormatError(f"{name} is damaged: {error}") from error
    except DAMAGE as error:
        raise FormatError(f"{name} is damaged: {type(error).__name__}: {error}") from error


def _align_bytes(data: Tensor) -> Tensor:
    """Rewrap ``data`` on a storage of whole 16-byte elements, unless it has one; see :func:`._memory.allocate`."""
    if (
        not data.untyped_storage().nbytes() % WHOLE
        or len(data) < WHOLE
        or not data.is_cpu
        or data.is_shared()
    ):
        return data
    return torch.frombuffer(get_bytes(data), dtype=torch.uint8, count=len(data) - len(data) % WHOLE)


def assemble_table(
    nodes: list[_key_paths.Row],
    layout: Layout,
    values: list[object],
    storage: Tensor,
    classes: Mapping[int, type] | None = None,
    attributes: dict[int, dict[str, object]] | None = None,
    named: type | None = None,
) -> Any:
    """Decode an untrusted table, already checked to be a tree, into a collection; raise if its spans or shapes do not match."""
    _storage.check(layout, len(storage))
    leaves = Views(storage).leaves(layout)
    encoded = Encoded(nodes, leaves, values, classes or {}, attributes or {})
    tree = decode(encoded, named=named, fix_devices=True)
    _check_shapes(tree)
    return tree


def _check_shapes(tree: Node) -> None:
    """Raise BatchSizeError if a leaf or node contradicts the batch size of its parent."""
    for node in walk(tree):
        size = node.batch_size
        if not size or -1 in size:
            continue  # a lazy stack of uneven members: each member is checked separately
        node._check_batch_size(size)
        for (holder,) in node._zip_members():
            size = holder.batch_size
            for child in holder._tree_children():
                if not isinstance(child, Tensor) and child.batch_size[: len(size)] != size:
                    raise BatchSizeError(
                        f"the batch size {list(size)} does not fit: a level in it has {list(child.batch_size)}"
                    )


def describe(encoded: Encoded, layout: Layout) -> dict[str, Any]:
    """Convert an encoded tree to JSON objects: its nodes, the spans of its leaves, and its values."""
    nodes = encoded.nodes
    values = [
        split_value(value, partial(_key_paths.format_value_path, nodes, i))
        for i, value in enumerate(encoded.values)
    ]
    return {"nodes": nodes, "leaves": _storage.to_columns(layout), "values": values}


def from_description(table: Any) -> tuple[Layout, list[_key_paths.Row], list[Any]]:
    """Parse the result of :func:`describe` into (layout, nodes, values for :func:`join_values`)."""
    layout = _storage.from_columns(table["leaves"])
    _key_paths.check_tree(table["nodes"], len(layout.leaves), len(table["values"]))
    return layout, table["nodes"], table["values"]


def join_values(values: list[tuple[Any, object]], nodes: list[_key_paths.Row]) -> list[Any]:
    """Decode the values that :func:`describe` encoded; raise MissingPluginError with the key path if a plugin is missing."""
    return [
        join_value(plain, types, partial(_key_paths.format_value_path, nodes, i))
        for i, (plain, types) in enumerate(values)
    ]


def _span(dtype: object, shape: object, start: Any, stop: Any, pad: Any) -> Span:
    if not isinstance(shape, list) or {*map(type, (*shape, start, stop, pad))} != {int}:
        raise FormatError(f"shape {shape!r} at bytes {start!r} to {stop!r}, {pad!r} of padding: not all ints")
    return Span(_storage.parse_dtype(str(dtype)), tuple(shape), start, stop, pad)


def _plain(tree: Node, encoded: Encoded, layout: Layout) -> Level:
    """Build the structure in the plain form, which tensordict reads. Raise NotRepresentableError if that is impossible."""
    places = {id(leaf): place for leaf, place in zip(encoded.leaves, layout.leaves)}
    return _Writer(encode(tree, format_name=FORMAT), places).run()


class _Writer:
    """Builder of a structure in the plain form from an encoded tree and the places of its leaves, by id."""

    def __init__(self, encoded: Encoded, places: dict[int, Leaf]) -> None:
        self.encoded, self.places = encoded, places
        self.levels = [_plain_level(row, node) for row, node in zip(encoded.nodes, encoded.objects)]
        self.pointers = [""] * len(encoded.nodes)
        self.kept: dict[str, Any] = {}
        self.orders: dict[str, list[str]] = {}
        self.absent: dict[str, list[str]] = {}

    def run(self) -> Level:
        """Return the JSON object of the root."""
        for _ in expand([0], self._write_node):
            pass
        if self.kept or self.orders or self.absent:
            ours = {"values": self.kept, "order": self.orders}
            self.levels[0]["size"] = {"td": {**ours, **({"absent": self.absent} if self.absent else {})}}
        return self.levels[0]

    def _write_node(self, position: int) -> list[int]:
        """Complete the JSON object of a node. Return the positions of the nodes below it."""
        row, pointer = self.encoded.nodes[position], self.pointers[position]
        if any(self.encoded.values[i] is not None for _, i in row["values"]):
            raise NotRepresentableError
        if row["values"]:
            self.absent[pointer] = [name for name, _ in row["values"]]
        children = [*row["entries"], *row["members"]]
        below: list[int] = []
        ranks = [self._write_child(position, key, ref, below) for key, ref in children]
        if ranks != sorted(ranks):
            # Readers of this form list values first, then tensors, then nodes, so store any other order.
            self.orders[pointer] = [key for key, _ in children]
        return below

    def _write_child(self, position: int, key: str, ref: int | list[int], below: list[int]) -> int:
        """Write a leaf, value or node into the object of its parent; add a node to ``below``. Return its rank in the order."""
        level = self.levels[position]
        if isinstance(ref, list):
            place = self.places.get(id(self.encoded.leaves[ref[0]]))
            if key.startswith("<NJT") or place is None:
                raise NotRepresentableError
            level["leaves"].update(_plain_leaf(key, place))
            return 1
        row, pointer = self.encoded.nodes[ref], self.pointers[position] + _step(key)
        if row["values"] and not (row["entries"] or row["members"]):
            level["non_tensors"][key] = self._make_value(ref, pointer)
            return 0
        if key in RESERVED:
            raise NotRepresentableError
        level[key], self.pointers[ref] = self.levels[ref], pointer
        below.append(ref)
        return 2

    def _make_value(self, position: int, pointer: str) -> list[object]:
        """Return the row of a value in the object of its parent."""
        row, cls = self.encoded.nodes[position], self.levels[position]["cls"]
        (name, i), *more = row["values"]
        if name != "data" or more or _get_inline_layout(cls) is None:
            raise NotRepresentableError
        show = partial(_key_paths.format_value_path, self.encoded.nodes, i)
        value, types = split_value(self.encoded.values[i], show)
        if types is not None and not is_readable(types):
            raise NotRepresentableError
        if types is not None or cls != "NonTensorData":
            self.kept[pointer] = [cls, types]
        return [value, row["meta"]["batch_size"], row["meta"].get("device")]


def _plain_level(row: _key_paths.Row, node: Node) -> Level:
    if "format" not in row or "class" in row:
        raise NotRepresentableError
    cls = kinds.of(node).layouts[FORMAT].names[0]
    return {"cls": cls, "non_tensors": {}, "leaves": {}, "cls_metadata": row["meta"]}


def _step(key: str) -> str:
    """Escape a key as one step of a JSON pointer (RFC 6901)."""
    return "/" + key.replace("~", "~0").replace("/", "~1")


def _plain_leaf(key: str, leaf: Leaf) -> dict[str, object]:
    entries = [[str(s.dtype), list(s.shape), s.start, s.stop, s.pad] for s in leaf.spans]
    if any(span.dtype.itemsize == 1 and span.dtype.is_floating_point for span in leaf.spans):
        raise NotRepresentableError
    if leaf.ragged_idx is None:
        return {key: entries[0]}
    entries[1].append(leaf.ragged_idx)
    return {JAGGED[i] + key: entries[i] for i in JAGGED_ORDER[len(entries)]}


class _Reader:
    """Builder of a tree from a structure in the plain form, the JSON of tensordict."""

    def __init__(self, views: Views, root: Level, named: type | None = None) -> None:
        self.views = views
        self.root = root
        self.named = user_class(named)
        beside = root.get("size")
        self.leaves: list[Leaf] = []
        ours = {"values": {}, "order": {}} if beside is None or "cls" in beside else beside["td"]
        self.kept: dict[str, Any] = {**ours["values"]}
        self.orders: dict[str, list[str]] = {**ours["order"]}
        self.absent: dict[str, list[str]] = {**ours.get("absent", {})}

    def node(self, level: Level) -> Any:
        """Build the root node from its JSON object, children before parents."""
        root: tuple[Level, tuple[str, ...], str] = (level, (), "")
        order = list(expand([root], _list_levels))
        built: dict[int, object] = {}
        keys = [self._leaves(current, path) for current, path, _ in order]
        layout = Layout(self.leaves, len(self.views.storage))
        _storage.check(layout, layout.nbytes)
        made = iter(self.views.leaves(layout))
        leaves = [dict(zip(names, islice(made, len(names)))) for names in keys]
        for (current, path, pointer), here in reversed(list(zip(order, leaves))):
            levels = {key: built[id(child)] for key, child in _levels(current)}
            built[id(current)] = self._build(current, path, pointer, here, levels)
        return built[id(level)]

    def _leaves(self, level: Level, path: tuple[str, ...]) -> list[str]:
        result: dict[str, Leaf] = {}
        parts: dict[str, dict[str, list[Any]]] = {}
        for key, entry in level["leaves"].items():
            name, role = _split_role(key)
            if name in result and (name not in parts or role is None or role in parts[name]):
                raise FormatError(f"duplicate {show_path((*path, name))}")
            if role is None:
                result[key] = Leaf((_span(*entry[:5]),))
            else:
                result.setdefault(name, Leaf(()))
                parts.setdefault(name, {})[role] = entry
        for name, marks in parts.items():
            if not {"<NJT_VALUES>", "<NJT_OFFSETS>"} <= marks.keys():
                raise FormatError(f"the jagged tensor {(*path, name)} lacks its values or offsets")
            spans = tuple(_span(*marks[mark][:5]) for mark in JAGGED if mark in marks)
            ragged = marks["<NJT_OFFSETS>"][5:] or [1]
            if type(ragged[0]) is not int:
                raise FormatError(f"the ragged dim of {(*path, name)} is {ragged[0]!r}")
            result[name] = Leaf(spans, ragged[0])
        self.leaves.extend(result.values())
        return list(result)

    def _build(
        self,
        level: Level,
        path: tuple[str, ...],
        pointer: str,
        leaves: dict[str, Tensor],
        levels: dict[str, object],
    ) -> Any:
        name = level["cls"]
        kind = kinds.named(name, FORMAT) or _by_last_name(name) or self._find_moved_kind(path)
        if kind is None:
            raise FormatError(
                f"{show_path(path)} is of the class {name!r}, which no installed package provides; if it is a tensorclass, "
                "import the module that defines it first, or load it by the class that it is now, as in "
                f"Record.from_consolidated(path), and non-tensor data needs {MissingPluginError.describe('td-tensorclass')}"
            )
        meta = dict(level["cls_metadata"])
        if "device" in meta:
            meta["device"] = self._get_device(meta["device"])
        size = torch.Size(meta.get("batch_size", ()))
        values = {
            key: self._value(entry, (*path, key), pointer + _step(key))
            for key, entry in level.get("non_tensors", {}).items()
        }
        children = {**values, **leaves, **levels}
        if len(children) < len(values) + len(leaves) + len(levels):
            raise FormatError(f"{show_path(path)} says a key twice: {[*values, *leaves, *levels]}")
        if pointer in self.orders:
            order = self.orders[pointer]
            if sorted(order) != sorted(children):
                raise FormatError(f"{order!r} is not an order of the keys {list(children)}")
            children = {key: children[key] for key in order}
        absent = dict.fromkeys(self.absent.get(pointer, ()))
        record = Record(meta, children, children, absent, size)
        return kind.layouts[FORMAT].unflatten(record)

    def _get_device(self, saved: str | None) -> str | None:
        """Return the device of the storage, to which the file may have been moved, if the node was saved with a device."""
        if saved is None:
            return None
        as_device(saved)  # raises for a damaged name
        return str(self.views.storage.device)

    def _find_moved_kind(self, path: tuple[str, ...]) -> NodeKind | None:
        """Return the kind of a tensorclass with an unknown saved name: that requested for the root, or declared by its parent."""
        level, cls, owner = self.root, self.named, None
        for key in path:
            kind = kinds.named(level["cls"], FORMAT)
            owner = (None if kind is None else user_class(kind.type)) or owner or cls
            # The members of a lazy stack are instances of the class of the stack.
            if "stack_dim" not in level["cls_metadata"]:
                cls, owner = None if owner is None else owner._schema.find_class(key), None  # type: ignore[attr-defined]
            level = level[key]
        kind = None if cls is None else kinds.of(cls)
        return kind if kind is not None and kind.with_class else None

    def _value(self, entry: Any, path: tuple[str, ...], pointer: str) -> Any:
        # tensordict 0.5 and 0.6 did not store the device.
        data, size, device = entry if len(entry) == 3 else (*entry, None)
        name, types = self.kept.get(pointer, ("NonTensorData", None))
        form = _get_inline_layout(name)
        if form is None:
            raise FormatError(
                f"key {path} is non-tensor data, which needs {MissingPluginError.describe('td-tensorclass')}"
            )
        meta = {"batch_size": size, "device": self._get_device(device)}
        value = join_value(data, types, partial(show_path, path))
        return form.unflatten(Record(meta, values={"data": value}))


def _split_role(key: str) -> tuple[str, str | None]:
    """Split the key of a tensor in the plain form into the key of its leaf and its role in a jagged tensor, or None."""
    mark = next((mark for mark in MARKS if key.startswith(mark)), None) if key[:1] == "<" else None
    if mark is None:
        return key, None
    return key[len(mark) :], "<NJT_VALUES>" if mark == "<NJT>" else mark


def _get_inline_layout(name: str) -> NodeLayout | None:
    """Return the layout of a kind whose nodes the plain form lists under ``non_tensors`` of their parent, or None."""
    kind = kinds.named(name, FORMAT)
    form = None if kind is None else kind.layouts[FORMAT]
    return form if form is not None and form.is_inline else None


def _levels(level: Level) -> list[tuple[str, Level]]:
    """Return the child nodes of a JSON object. ``size`` is one only if it has a ``cls``; else it holds td's additions."""
    return [
        (key, below)
        for key, below in level.items()
        if key not in FIELDS
        and (key != "size" or "cls" in below)
        and (key not in SENT or isinstance(below, dict))
    ]


def _list_levels(
    item: tuple[Level, tuple[str, ...], str],
) -> list[tuple[Level, tuple[str, ...], str]]:
    """Return the child nodes of a JSON object, each with its key path and JSON pointer."""
    level, path, pointer = item
    return [(child, (*path, key), pointer + _step(key)) for key, child in _levels(level)]


def _by_last_name(name: str) -> NodeKind | None:
    """Find the kind of a class by its unqualified name, as tensordict 0.5 and 0.6 wrote it; None if not unique."""
    fits = [
        kind
        for kind in kinds.list_kinds()
        for known in (kind.layouts[FORMAT].names if FORMAT in kind.layouts else ())
        if known.rstrip("'>").endswith(f".{name}")
    ]
    return fits[0] if len(fits) == 1 else None


def _flatten_dense(td: TensorCollection) -> Record:
    device = None if td.device is None else str(td.device)
    meta = {
        "device": device,
        "names": td.names,
        "batch_size": list(td.batch_size),
        "is_locked": td._locked is True,
    }
    return Record(meta, dict(td._children()))


def _unflatten_dense(record: Record) -> TensorDict:
    td: TensorDict = kinds.of(TensorDict).unflatten(Record(record.meta, record.entries))
    name_nodes_below(td)
    return td.lock_() if record.read_field("is_locked", bool, type(None)) else td


def _flatten_stack(stack: LazyStackedTensorDict) -> Record:
    record = kinds.record_of(stack)  # only stacks without hooks, which the format cannot store
    locked = record.meta.pop("locked", False)
    record.meta = {"stack_dim_name": None, **record.meta, "is_locked": locked}
    return record


def _unflatten_stack(record: Record) -> LazyStackedTensorDict:
    meta = {**record.meta, "locked": record.meta.get("is_locked")}
    stack: LazyStackedTensorDict = kinds.of(LazyStackedTensorDict).unflatten(
        Record(meta, members=record.members)
    )
    return stack


kinds.add_layout(TensorDict, FORMAT, NodeLayout(_flatten_dense, _unflatten_dense, ("TensorDict",)))
kinds.add_layout(
    LazyStackedTensorDict, FORMAT, NodeLayout(_flatten_stack, _unflatten_stack, ("LazyStackedTensorDict",))
)
