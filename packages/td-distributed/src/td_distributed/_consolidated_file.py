"""The consolidated file: the storage, the structure as JSON, and the JSON's length as a little-endian int64.

The structure has one of two forms. The *plain form* is that of the reference implementation: nested objects, one for
each level, written by the ``"consolidated/1"`` layouts of the kinds. What it cannot say (types of values that JSON
simplifies, names of classes) is under the root key ``size``, which the reference skips. The *general form* holds what
the plain one cannot: the flat table of ``td_core.encode`` under the root key ``td``. Its ``cls`` is no class of the
reference, which therefore refuses it clearly.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import get_ident
from typing import Any, BinaryIO

import torch
from torch import Tensor

from td_core import Record
from td_core._collection import show_path
from td_core._device_labels import fix_decoded_devices, fix_device_metadata
from td_core._nodes import KINDS, Encoded, as_named, decode_all, user_class
from td_core._value_codec import is_readable, join_at, parse_json, split_at
from td_core.errors import (
    BatchSizeError,
    CodecError,
    DimNamesError,
    FormatError,
    MissingPluginError,
    StructureError,
)

from . import _key_paths, _storage
from ._memory import WHOLE, get_bytes, make_vector
from ._storage import Layout, Leaf, Span, Views

FORMAT = "consolidated/1"
GENERAL = "td:general"
FIELDS = frozenset(("cls", "non_tensors", "leaves", "cls_metadata"))
RESERVED = FIELDS | {"size"}
#: The reference leaves these in the structure of what it has sent, and writes them with it.
SENT = frozenset(("_total_bytes", "_storage_device", "_tensorclass_type"))
#: Kinds that a level lists with its values.
VALUES = ("NonTensorData", "MetaData")
JAGGED = ("<NJT_VALUES>", "<NJT_OFFSETS>", "<NJT_LENGTHS>")
MARKS = (*JAGGED, "<NJT>")
# The order in which the reference expects the pieces of a jagged tensor, by number of pieces.
JAGGED_ORDER = {2: (0, 1), 3: (0, 2, 1)}
LARGEST_JSON = 1 << 30
#: What stumbling over JSON of another shape than expected raises.
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError)


class NotRepresentableError(Exception):
    """The plain form cannot hold this tree."""


def make_trailer(tree: Any, encoded: Encoded, layout: Layout) -> bytes:
    """Return the structure as it stands at the end of a file, the length included.

    Raises:
        CodecError: a value that no registered serializer stores; names its key.
    """
    try:
        text = json.dumps(_plain(tree, encoded, layout)).encode()
    except (NotRepresentableError, RecursionError, TypeError):
        text = as_json({"cls": GENERAL, "td": describe(encoded, layout)}, encoded.nodes).encode()
    text += b" " * (-(layout.nbytes + len(text) + 8) % WHOLE)  # as room() says
    check_length(text, LARGEST_JSON)
    return text + len(text).to_bytes(8, "little", signed=True)


def as_json(table: Any, nodes: list[dict[str, Any]]) -> str:
    """Return a table with encoded nodes as JSON.

    Raises:
        CodecError: the header of a node is none; names its key and kind.
    """
    try:
        return json.dumps(table, separators=(",", ":"))
    except TypeError:
        for path, node in _key_paths.walk(nodes):
            try:
                json.dumps(node)
            except TypeError as error:
                kind = node["kind"]  # type: ignore[index]  # a leaf is a number
                raise CodecError(
                    f"cannot store the metadata of {show_path(path)}, of the kind {kind!r}: {error}"
                ) from error
        raise


def check_length(text: bytes, largest: int) -> None:
    """Raise StructureError where structure and values are more than a reader takes."""
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
    """Write a file next to its place, then move it there: the old one stays whole until the new one is.

    With ``durable`` its content is on the disk before, and its name after that.

    It has a storage of so many bytes, zeros where no part (first byte, bytes) is, and then ``end``, and the permissions of
    the old one. What was written is returned as :func:`map_file` gives it; another writer may have replaced the file since.
    """
    path = Path(os.path.realpath(path))  # a link goes on leading there
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not longer than the longest name, and not that of another thread that writes the same file.
    temporary = path.with_name(f".{os.getpid()}.{get_ident()}.td-tmp")
    whole = [*parts, (nbytes, make_vector(end))]
    try:
        with open(temporary, "wb") as file:
            if num_threads > 1 and hasattr(os, "pwrite"):
                with ThreadPoolExecutor(num_threads) as pool:
                    list(pool.map(partial(_write_part_at, file.fileno()), whole))
            else:
                for part in whole:
                    _write_part(file, part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        mapped = map_file(temporary)
        with suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
        if durable:
            _sync_directory(path.parent)
        return mapped
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    """Make the names in a directory durable; where a directory cannot be opened, the system does so itself."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_part(file: BinaryIO, part: tuple[int, Tensor]) -> None:
    start, data = part
    file.seek(start)
    file.write(get_bytes(data))


def _write_part_at(fd: int, part: tuple[int, Tensor]) -> None:
    """Write a part as threads can that share one open file, of which a process may not have many."""
    start, data = part
    view = get_bytes(data)
    while len(view):
        done = os.pwrite(fd, view, start)
        view, start = view[done:], start + done


def map_file(path: Path) -> Tensor:
    """Return a file as a private mapping: writes to it never reach the file."""
    # torch.from_file() gives what torch takes for shared memory: share_memory_() would do nothing, and a queue fail.
    with open(path, "rb", buffering=0) as file:
        try:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            why = f"cannot map it: {os.strerror(error.errno or 0)}"
            raise OSError(error.errno, why, str(path)) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def read(path: str | Path, cls: type | None = None) -> tuple[Any, Tensor]:
    """Return (collection, storage) of a file, checked before anything is built; of the class that is named for it.

    Raises:
        FormatError: the file is damaged or no consolidated file; the message says where.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        raise FileNotFoundError(f"no consolidated file at {path}")
    if not path.is_file():
        raise FormatError(f"{path} is not a regular file")
    if path.stat().st_size < 8:
        raise FormatError(f"{path} is too short for a consolidated file: {path.stat().st_size} bytes")
    return parse(map_file(path), str(path), cls)


def parse(data: Tensor, name: str, cls: type | None = None) -> tuple[Any, Tensor]:
    """Return what :func:`read` does, from the bytes of a file."""
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
    with convert_damage(name):
        if structure.get("cls") == GENERAL:
            layout, nodes, values = from_description(structure["td"])
            tree = assemble_table(nodes, layout, join_values(values, nodes), storage, named=cls)
        else:
            tree = _Reader(Views(storage), structure, cls).node(structure)
            _check_shapes(tree)
            fix_device_metadata(tree)
    return as_named(cls, tree, f"what is saved at {name}"), storage


@contextmanager
def convert_damage(name: str) -> Iterator[None]:
    """Turn what reading something damaged raises into a FormatError that says what was damaged."""
    try:
        yield
    except MissingPluginError as error:
        raise MissingPluginError(f"{name}: {error}") from error
    except (FormatError, BatchSizeError, DimNamesError) as error:
        raise FormatError(f"{name} is damaged: {error}") from error
    except DAMAGE as error:
        raise FormatError(f"{name} is damaged: {type(error).__name__}: {error}") from error


def _align_bytes(data: Tensor) -> Tensor:
    """Return bytes that are a memory of their own, in which no element is cut off: see :func:`._memory.room`."""
    if (
        not data.untyped_storage().nbytes() % WHOLE
        or len(data) < WHOLE
        or not data.is_cpu
        or data.is_shared()
    ):
        return data
    return torch.frombuffer(get_bytes(data), dtype=torch.uint8, count=len(data) - len(data) % WHOLE)


def assemble_table(
    nodes: list[dict[str, Any]],
    layout: Layout,
    values: list[Any],
    storage: Tensor,
    classes: Mapping[int, type] | None = None,
    attributes: dict[int, dict[str, Any]] | None = None,
    named: type | None = None,
) -> Any:
    """Return the collection of a table that came from outside and is a tree.

    Raises:
        FormatError: leaves lie outside of the storage, or a node cannot be put together.
        BatchSizeError: a leaf or a level contradicts the batch size of the level that it is in.
    """
    _storage.check(layout, len(storage))
    leaves = Views(storage).leaves(layout)
    encoded = Encoded(nodes, leaves, values, classes or {}, attributes or {})
    tree = fix_decoded_devices(decode_all(encoded, named=user_class(named))[0], nodes, leaves)
    _check_shapes(tree)
    return tree


def _check_shapes(tree: Any) -> None:
    """Raise BatchSizeError where a leaf or a level contradicts the batch size of the level that it is in."""
    todo = [tree]
    while todo:
        node = todo.pop()
        size, below = node.batch_size, list(node._iter_nested())
        todo.extend(below)
        if not size or -1 in size:
            continue  # of uneven members, each of which is checked
        node._check_batch_size(size)
        for child in below if node._members_and_dim() is None else ():
            if child.batch_size[: len(size)] != size:
                raise BatchSizeError(
                    f"the batch size {list(size)} does not fit: a level in it has {list(child.batch_size)}"
                )


def describe(encoded: Encoded, layout: Layout) -> dict[str, Any]:
    """Return an encoded tree as JSON: its nodes, where each leaf lies, its values.

    Raises:
        CodecError: a value that no registered serializer stores; names its key.
    """
    nodes = encoded.nodes
    values = [
        split_at(value, partial(_key_paths.format_value_path, nodes, i))
        for i, value in enumerate(encoded.values)
    ]
    return {"nodes": nodes, "leaves": _storage.to_columns(layout), "values": values}


def from_description(table: Any) -> tuple[Layout, list[dict[str, Any]], list[Any]]:
    """Return (where each leaf lies, nodes, what :func:`join_values` takes) of what :func:`describe` gave."""
    layout = _storage.from_columns(table["leaves"])
    _key_paths.check_tree(table["nodes"], len(layout.leaves), len(table["values"]))
    return layout, table["nodes"], table["values"]


def join_values(values: list[tuple[Any, Any]], nodes: list[dict[str, Any]]) -> list[Any]:
    """Return the values of a tree that :func:`describe` took apart.

    Raises:
        MissingPluginError: one is of a type of a plugin that is not installed; names its key.
    """
    return [join_at(value, partial(_key_paths.format_value_path, nodes, i)) for i, value in enumerate(values)]


def _span(dtype: Any, shape: Any, start: Any, stop: Any, pad: Any) -> Span:
    if not isinstance(shape, list) or {*map(type, (*shape, start, stop, pad))} != {int}:
        raise FormatError(f"shape {shape!r} at bytes {start!r} to {stop!r}, {pad!r} of padding: not all ints")
    return Span._make((_storage.parse_dtype(str(dtype)), tuple(shape), start, stop, pad))


def _plain(tree: Any, encoded: Encoded, layout: Layout) -> dict[str, Any]:
    """Return the structure in the form of the reference implementation."""
    places = {id(leaf): place for leaf, place in zip(encoded.leaves, layout.leaves)}
    kept: dict[str, Any] = {}
    orders: dict[str, list[str]] = {}
    absent: dict[str, list[str]] = {}
    root: dict[str, Any] = {}
    todo: list[tuple[Any, dict[str, Any], tuple[str, ...], str]] = [(tree, root, (), "")]
    while todo:
        node, level, path, pointer = todo.pop()
        name, record = _record(node)
        if any(value is not None for value in record.values.values()):
            raise NotRepresentableError
        if record.values:
            absent[pointer] = list(record.values)
        level.update({"cls": name, "non_tensors": {}, "leaves": {}, "cls_metadata": record.meta})
        ranks = []
        for key, child in [*record.entries.items(), *record.members.items()]:
            if isinstance(child, Tensor):
                if key.startswith("<NJT") or id(child) not in places:
                    raise NotRepresentableError
                level["leaves"].update(_plain_leaf(key, places[id(child)]))
                ranks.append(1)
                continue
            below_name, below = _record(child)
            if not (below.entries or below.members) and below.values:
                if set(below.values) != {"data"} or below_name not in VALUES:
                    raise NotRepresentableError
                value, types = split_at(below.values["data"], partial(show_path, (*path, key)))
                if types is not None and not is_readable(types):
                    raise NotRepresentableError
                ranks.append(0)
                device = None if child.device is None else str(child.device)
                level["non_tensors"][key] = [value, list(child.batch_size), device]
                if types is not None or below_name != "NonTensorData":
                    kept[pointer + _step(key)] = [below_name, types]
            elif key in RESERVED:
                raise NotRepresentableError
            else:
                level[key] = {}
                ranks.append(2)
                todo.append((child, level[key], (*path, key), pointer + _step(key)))
        if ranks != sorted(ranks):
            # Readers of this form list values first, then tensors, then levels.
            orders[pointer] = [*record.entries, *record.members]
    if kept or orders or absent:
        root["size"] = {"td": {"values": kept, "order": orders, **({"absent": absent} if absent else {})}}
    return root


def _step(key: str) -> str:
    """Return what a key adds to a JSON pointer (RFC 6901)."""
    return "/" + key.replace("~", "~0").replace("/", "~1")


def _record(node: Any) -> tuple[str, Record]:
    kind = KINDS.of(node)
    layout = kind.layouts.get(FORMAT)
    if layout is None or type(node) is not kind.type:
        raise NotRepresentableError
    return layout.names[0], kind.record_of(node, FORMAT)


def _plain_leaf(key: str, leaf: Leaf) -> dict[str, Any]:
    entries = [[str(s.dtype), list(s.shape), s.start, s.stop, s.pad] for s in leaf.spans]
    if any(span.dtype.itemsize == 1 and span.dtype.is_floating_point for span in leaf.spans):
        raise NotRepresentableError
    if leaf.ragged_idx is None:
        return {key: entries[0]}
    entries[1].append(leaf.ragged_idx)
    return {JAGGED[i] + key: entries[i] for i in JAGGED_ORDER[len(entries)]}


class _Reader:
    """Builds the tree of the plain form."""

    def __init__(self, views: Views, root: dict[str, Any], named: type | None = None) -> None:
        self.views = views
        self.root = root
        self.named = user_class(named)
        beside = root.get("size")
        self.leaves: list[Leaf] = []
        ours = {"values": {}, "order": {}} if beside is None or "cls" in beside else beside["td"]
        self.kept: dict[str, Any] = {**ours["values"]}
        self.orders: dict[str, list[str]] = {**ours["order"]}
        self.absent: dict[str, list[str]] = {**ours.get("absent", {})}

    def node(self, level: dict[str, Any]) -> Any:
        """Return the node of the root level; built from the deepest up."""
        order: list[tuple[dict[str, Any], tuple[str, ...], str, list[tuple[str, dict[str, Any]]]]] = []
        todo: list[tuple[dict[str, Any], tuple[str, ...], str]] = [(level, (), "")]
        while todo:
            current, path, pointer = todo.pop()
            below = _levels(current)
            order.append((current, path, pointer, below))
            todo += [(child, (*path, key), pointer + _step(key)) for key, child in below]
        built: dict[int, Any] = {}
        keys = [self._leaves(current, path) for current, path, *_ in order]
        layout = Layout(self.leaves, len(self.views.storage))
        _storage.check(layout, layout.nbytes)
        made = iter(self.views.leaves(layout))
        leaves = [dict(zip(names, islice(made, len(names)))) for names in keys]
        for (current, path, pointer, below), here in reversed(list(zip(order, leaves))):
            levels = {key: built[id(child)] for key, child in below}
            built[id(current)] = self._build(current, path, pointer, here, levels)
        return built[id(level)]

    def _leaves(self, level: dict[str, Any], path: tuple[str, ...]) -> list[str]:
        result: dict[str, Leaf] = {}
        parts: dict[str, dict[str, Any]] = {}
        for key, entry in level["leaves"].items():
            mark = next((mark for mark in MARKS if key.startswith(mark)), None) if key[:1] == "<" else None
            name = key if mark is None else key[len(mark) :]
            role = "<NJT_VALUES>" if mark == "<NJT>" else mark
            if name in result and (name not in parts or role is None or role in parts[name]):
                raise FormatError(f"{show_path((*path, name))} stands there twice")
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
        level: dict[str, Any],
        path: tuple[str, ...],
        pointer: str,
        leaves: dict[str, Tensor],
        levels: dict[str, Any],
    ) -> Any:
        name = level["cls"]
        kind = KINDS.find_by_name(FORMAT, name) or _by_last_name(name) or self._find_moved_kind(path)
        if kind is None:
            raise FormatError(
                f"{show_path(path)} is of the class {name!r}, which no installed package provides; if it is a tensorclass, "
                "import the module that defines it first, or load it by the class that it is now, as in "
                "Record.from_consolidated(path), and non-tensor data needs td-tensorclass: pip install td-tensorclass"
            )
        meta = dict(level["cls_metadata"])
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
                raise FormatError(f"{order!r} is no order of the keys {list(children)}")
            children = {key: children[key] for key in order}
        absent = dict.fromkeys(self.absent.get(pointer, ()))
        record = Record(meta, children, children, absent, size)
        return kind.layouts[FORMAT].unflatten(record)

    def _find_moved_kind(self, path: tuple[str, ...]) -> Any:
        """Return the kind of the class that is named for the root, or that the class above declares, if it is a tensorclass."""
        level, cls, owner = self.root, self.named, None
        for key in path:
            kind = KINDS.find_by_name(FORMAT, level["cls"])
            owner = (None if kind is None else user_class(kind.type)) or owner or cls
            # The members of a stack are what it is.
            if "stack_dim" not in level["cls_metadata"]:
                cls, owner = None if owner is None else owner._class_at(key), None  # type: ignore[attr-defined]
            level = level[key]
        kind = None if cls is None else KINDS.of(cls)
        return kind if kind is not None and kind.with_class else None

    def _value(self, entry: Any, path: tuple[str, ...], pointer: str) -> Any:
        # Releases 0.5 and 0.6 wrote no device.
        data, size, device = entry if len(entry) == 3 else (*entry, None)
        name, types = self.kept.get(pointer, ("NonTensorData", None))
        kind = KINDS.find_by_name(FORMAT, name) if name in VALUES else None
        if kind is None:
            raise FormatError(
                f"key {path} is non-tensor data, which needs td-tensorclass: pip install td-tensorclass"
            )
        meta = {"batch_size": size, "device": device}
        value = join_at((data, types), partial(show_path, path))
        return kind.layouts[FORMAT].unflatten(Record(meta, values={"data": value}))


def _levels(level: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return what stands below a level; under ``size`` that is what the plain form cannot say, unless it is a level."""
    return [
        (key, below)
        for key, below in level.items()
        if key not in FIELDS
        and (key != "size" or "cls" in below)
        and (key not in SENT or isinstance(below, dict))
    ]


def _by_last_name(name: Any) -> Any:
    """Return the kind of a class that releases 0.5 and 0.6 named without its module, if only one fits."""
    fits = [
        kind
        for kind in KINDS
        for known in (kind.layouts[FORMAT].names if FORMAT in kind.layouts else ())
        if known.rstrip("'>").endswith(f".{name}")
    ]
    return fits[0] if len(fits) == 1 else None
