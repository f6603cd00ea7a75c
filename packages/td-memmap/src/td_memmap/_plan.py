"""Plan a save: encode the tree, choose file names and check everything before the first write.

A node is written in one of two forms. The *plain form* is the format of tensordict; the kind's ``"memmap/1"`` layout
defines its content. The *general form* (``_format_version`` 2, which tensordict refuses with a clear message)
stores what the plain form cannot: keys that equal its field names, names that are too long, values that JSON cannot
express, and kinds without such a layout. A stack of values has the general form of version 3, with its values by rows
(:mod:`._value_rows`), unless tensordict must read the save.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from td_core import kinds
from td_core.errors import CodecError
from td_core.spi import (
    JaggedParts,
    Node,
    Record,
    add_check_line,
    encode,
    expand,
    identify_view,
    is_readable,
    is_stored,
    join_value,
    show_path,
    split_value,
)

from . import _file_names
from ._chunks import check_storable
from ._directory_layouts import FORMAT, OUTER
from ._fs import Parts
from ._shapes import Shape, component_shapes, element_count
from ._value_rows import RowEncoder, describe_rows, list_row_files

VERSION = 2
#: Version of a node in the general form with values by rows.
ROWS_VERSION = 3
GENERAL = (VERSION, ROWS_VERSION)

#: Types of a value that is a class of containers; see :func:`td_core.spi.split_value`.
CLASS = "type"

KeyPath = tuple[str, ...]
#: A parsed object of JSON.
JsonObject = dict[str, Any]


@dataclass(slots=True, eq=False)
class LeafFile:
    """File of elements in a plan.

    Attributes:
        parts: path of its directory.
        name: file name.
        key: key path, for messages.
        tensor: the elements to write.
        nbytes: size of the file in bytes.
        shape: shape of the tensor; for a nested tensor, the table of its component shapes.
        leaf: the leaf whose elements the file stores; None for offsets, lengths and component shapes, which are
            written even if elements are not.
        same_as: an earlier file with the same elements, to hard-link to; None otherwise.
    """

    parts: Parts
    name: str
    key: KeyPath
    tensor: Tensor
    nbytes: int
    shape: Shape
    leaf: Tensor | None
    same_as: LeafFile | None = None

    @property
    def path(self) -> Parts:
        """Path below the root of the save."""
        return (*self.parts, self.name)


@dataclass(slots=True)
class Plan:
    """All files of a save, in the order of writing: directories, leaves, then texts.

    Attributes:
        directories: paths of the directories, parents first.
        leaves: files of elements.
        texts: files of metadata and values as directory, name and content; the last is the root's ``meta.json``.
        nodes: every node with its directory.
        places: the directory of each node by key path.
        jagged: jagged leaves, with their files by role and their ragged dim.
    """

    directories: list[Parts] = field(default_factory=list)
    leaves: list[LeafFile] = field(default_factory=list)
    texts: list[tuple[Parts, str, bytes]] = field(default_factory=list)
    nodes: list[tuple[Node, Parts]] = field(default_factory=list)
    places: dict[KeyPath, Parts] = field(default_factory=dict)
    jagged: list[tuple[Tensor, dict[str, LeafFile], int]] = field(default_factory=list)

    def files(self) -> list[Parts]:
        """Return the paths of all planned files that have content."""
        leaves = [leaf.path for leaf in self.leaves if leaf.nbytes]
        return [*leaves, *((*parts, name) for parts, name, _ in self.texts)]


def make_plan(
    tree: Node,
    *,
    robust_key: bool = True,
    allow_pickle: bool = False,
    content: bool = True,
    rows: int | None = None,
) -> Plan:
    """Plan the files of a tree; raise CodecError if a leaf or, with ``content=True``, its elements cannot be stored."""
    plan = _Planner(robust_key, allow_pickle, content, rows).run(tree)
    # Metadata is collected parents first and written in reverse order, so the root's metadata is the last file.
    plan.texts.reverse()
    return plan


def encode_node(node: Node, path: KeyPath = ()) -> Record:
    """Encode a node as a record with the layout of this file format."""
    return kinds.of(node).record_of(node, FORMAT, path)


def plan_anonymous(tree: Node, *, content: bool) -> Plan:
    """Plan the leaves and nodes of a tree for an anonymous file, without file names."""
    planner = _Planner(True, False, content)
    encoded = encode(tree, format_name=FORMAT)
    planner.plan.nodes += [(node, ()) for node in encoded.objects]
    for leaf, path in zip(encoded.leaves, encoded.leaf_paths()):
        planner.leaf(leaf, (), path[-1], path)
    return planner.plan


def plan_values(
    node: Node, above: torch.Size, *, allow_pickle: bool, rows: int | None = None
) -> dict[str, bytes]:
    """Return the files of a value node by name; ``above`` is the batch size of its parent."""
    plan = _Planner(True, allow_pickle, True, rows).run(node, above)
    return {name: text for _, name, text in plan.texts}


def _extend_names(names: list[str | None], count: int) -> list[str | None]:
    """Pad dim names with None to ``count`` dims."""
    return [*names, *[None] * (count - len(names))]


@dataclass(slots=True)
class _Level:
    """A node to plan: its directory and key path, its row, and the batch size and dim names of its parent."""

    node: Node
    row: JsonObject
    key: KeyPath
    parts: Parts = ()
    above: torch.Size = torch.Size()
    names: list[str | None] | None = None

    def list_own_dims(self) -> dict[str, list[object]]:
        """Return the batch size and dim names of the node that differ from those of its parent."""
        own: dict[str, list[object]] = {}
        size, names = self.node.batch_size, self.node._names
        if size != self.above:
            own["batch_size"] = list(size)
        if names is not None and [*names] != _extend_names(self.names or [], len(size)):
            own["names"] = [*names]
        return own


class _Planner:
    # ``rows`` is the number of the files of values by rows, None to store stacks of values so that tensordict reads them.
    def __init__(self, robust_key: bool, allow_pickle: bool, content: bool, rows: int | None = None) -> None:
        self.plan = Plan()
        self.rows = rows
        #: Slots and heap of each node with values by rows, by ``id``.
        self.stacks: dict[int, tuple[bytes, bytes]] = {}
        self.robust_key = robust_key
        self.allow_pickle = allow_pickle
        self.content = content
        self.seen: dict[object, LeafFile] = {}

    def run(self, tree: Node, above: torch.Size = torch.Size()) -> Plan:
        """Plan all nodes of a tree, parents first."""
        self.encoded = encoded = encode(tree, format_name=FORMAT, convert=self._convert)
        self.paths = encoded.leaf_paths()
        self.levels = list(map(_Level, encoded.objects, encoded.nodes, encoded.node_paths()))
        self.levels[0].above = above
        for position in expand([0], self._list_nested):
            level = self.levels[position]
            if position:
                self.plan.directories.append(level.parts)
            self.plan.nodes.append((level.node, level.parts))
            self.plan.places[level.key] = level.parts
            if id(level.node) in self.stacks:
                self._write_rows(level)
                continue
            values = {
                name: self._value(encoded.values[i], name, level.key) for name, i in level.row["values"]
            }
            (self._write_plain if "format" in level.row else self._write_general)(level, values)
        return self.plan

    def _list_nested(self, position: int) -> list[int]:
        """Return the positions of the nodes directly below a node, the last one first."""
        row = self.encoded.nodes[position]
        return [ref for _, ref in reversed([*row["entries"], *row["members"]]) if isinstance(ref, int)]

    def _write_plain(self, this: _Level, values: dict[str, _Value]) -> None:
        node, row, parts, key = this.node, this.row, this.parts, this.key
        meta, keys = self._make_header(node, row), [name for name, _ in row["entries"]]
        stems = {name: self._stem(name, (*key, name)) for name in keys}
        level = self._entries(this, stems, this.above, meta.get("_names"))
        plain, types, classes, pickled = _sort_values(values)
        level.update(plain)
        for name, item in meta.items():
            level.setdefault(name, item)
        sidecar: dict[str, object] = {"values": types} if types else {}
        if "shape" not in meta and not row["members"]:
            sidecar.update(this.list_own_dims())
        file, content = _file_names.PICKLE, pickled
        if pickled and "stack_dim" in level:
            # tensordict pickles all values of a stack of values as one list.
            file, content = _file_names.STACK_PICKLE, pickled["data"]
            level["data"] = file
        self._text(parts, _file_names.META, level, key)
        text = self._pickle(parts, file, content, key)
        if classes and len(classes) == len(pickled):
            # With these names, readers find the classes without unpickling.
            note = {"types": classes, "pickle_sha256": hashlib.sha256(text).hexdigest()}
            self._text(parts, _file_names.JSON_TYPES, note, key)
        if sidecar:
            self._text(parts, _file_names.VALUES, sidecar, key)

    def _make_header(self, node: Node, row: JsonObject) -> JsonObject:
        """Return the fields of a node in the plain form, without its entries and values."""
        kind, meta = kinds.of(node), dict(row["meta"])
        if "_type" not in meta:
            meta["_type"] = kind.layouts[FORMAT].names[0]
        if type(node) is not kind.type and OUTER in meta:
            meta[OUTER][0]["class"] = kinds.name_class(type(node))
        elif type(node) is not kind.type and "_class" in meta:
            meta["_type"] = str(type(node))
            meta["_class"] = kinds.name_class(type(node))
        if self.rows is not None and self._has_one_values(row):
            meta[_file_names.MAY_HAVE_ROWS] = True
        if not self.robust_key and any(_file_names.encode_key(name) != name for name, _ in row["entries"]):
            # Record that keys are not encoded: without files, a reader could not infer it.
            meta[_file_names.ROBUST_KEY] = False
        return meta

    def _start_general(self, this: _Level, version: int) -> JsonObject:
        """Return the fields of a node in the general form, without its entries, members and values."""
        node, row, kind = this.node, this.row, kinds.of(this.node)
        level: JsonObject = {"_type": f"td:{kind.tag}", "_format_version": version, "kind": kind.tag}
        if type(node) is not kind.type:
            level["class"] = kinds.name_class(type(node))
        if "from" in row:
            level["provider"] = row["from"]
        level["meta"] = row["meta"]
        return level

    def _has_one_values(self, row: JsonObject) -> bool:
        """Return True if a child is one value for a batch; it becomes a stack when a part of the batch is written."""
        nodes = ((self.encoded.objects[ref], ref) for _, ref in row["entries"] if isinstance(ref, int))
        return any(
            self.encoded.nodes[ref]["values"] and node.batch_size and id(node) not in self.stacks
            for node, ref in nodes
        )

    def _write_rows(self, this: _Level) -> None:
        """Plan the files of a stack of values by rows; the slots have the part of its header that is one per value."""
        assert self.rows is not None
        level = self._start_general(this, ROWS_VERSION)
        if "joints" in level["meta"]:
            level["meta"]["joints"] = {**level["meta"]["joints"], "ones": None}
        files = self.stacks[id(this.node)]
        level.update(entries=[], members=[], values={"data": describe_rows(self.rows, len(files[1]))})
        self._text(this.parts, _file_names.META, level, this.key)
        for name, content in zip(list_row_files(self.rows), files, strict=True):
            self.plan.texts.append((this.parts, name, content))

    def _write_general(self, this: _Level, values: dict[str, _Value]) -> None:
        node, row, parts, key = this.node, this.row, this.parts, this.key
        level = self._start_general(this, VERSION)
        taken = set(_file_names.RESERVED_STEMS)
        stems = {
            name: self._free_stem(name, position, self._get_child(ref), taken)
            for position, (name, ref) in enumerate(row["entries"])
        }
        entries = self._entries(this, stems, node.batch_size, None)
        level["entries"] = [[name, {**entry, "file": stems[name]}] for name, entry in entries.items()]
        level["members"] = [name for name, _ in row["members"]]
        pickled = {name: value.plain for name, value in values.items() if value.error is not None}
        level["values"] = {
            name: {"pickled": True}
            if value.error is not None
            else {"plain": value.plain, "types": value.types}
            for name, value in values.items()
        }
        self._text(parts, _file_names.META, level, key)
        self._pickle(parts, _file_names.PICKLE, pickled, key)

    def _get_child(self, ref: int | list[int]) -> object:
        return self.encoded.leaves[ref[0]] if isinstance(ref, list) else self.encoded.objects[ref]

    def _entries(
        self, this: _Level, stems: dict[str, str], above: torch.Size, names: list[str | None] | None
    ) -> JsonObject:
        """Plan the leaves of a node and the directories of its child nodes. Return the metadata of each entry."""
        entries: dict[str, object] = {}
        for name, ref in this.row["entries"]:
            if isinstance(ref, list):
                (i,) = ref
                entries[name] = self.leaf(self.encoded.leaves[i], this.parts, stems[name], self.paths[i])
            else:
                below = self.levels[ref]
                entries[name] = {"type": type(below.node).__name__}
                below.parts, below.above, below.names = (
                    (*this.parts, stems[name]),
                    this.node.batch_size,
                    names,
                )
        for name, ref in this.row["members"]:
            below = self.levels[ref]
            below.parts, below.above = (*this.parts, name), above
        return entries

    def _convert(self, node: Node, record: Record, above: JsonObject) -> Record | None:
        """Split the values of a node; return None if the plain form cannot store it so that tensordict reads it correctly."""
        if self._encode_rows(node, record):
            return None
        values = {name: _split(value) for name, value in record.values.items()}
        if OUTER in values or any(
            value.types not in (None, CLASS) and not is_readable(value.types) for value in values.values()
        ):
            return None
        if "stack_dim" in record.meta and "data" in values and _hides_size(node.batch_size, values["data"]):
            return None
        own = {"shape", "device", "_type", *record.meta} - {"_class", "_format_version"}
        if not own.isdisjoint(record.entries) or (
            "_names" in record.entries and "format" in above and above["meta"].get("_names") is not None
        ):
            return None
        if not self._has_plain_files(record.entries):
            return None
        return Record(record.meta, record.entries, record.members, values) if values else record

    def _encode_rows(self, node: Node, record: Record) -> bool:
        """Encode the values of a stack by rows; return False if it is not a stack, or if only a pickle can store a value."""
        if self.rows is None or "stack_dim" not in record.meta or "data" not in record.values:
            return False
        with suppress(CodecError):
            self.stacks[id(node)] = _encode_rows(node)
        return id(node) in self.stacks

    def _has_plain_files(self, entries: Mapping[str, object]) -> bool:
        """Return True if the plain form has files for all entries, with different names."""
        files = list(_file_names.RESERVED_STEMS)
        for key, child in entries.items():
            if isinstance(child, Tensor) and child.layout == torch.jagged:
                return False
            files.extend(list_file_names(child, _file_names.get_stem(key, self.robust_key)))
        return len(set(files)) == len(files) and all(map(_file_names.is_valid_name, files))

    def _stem(self, key: str, path: KeyPath) -> str:
        if not self.robust_key and _file_names.get_raw_name(key) is None:
            raise CodecError(
                f"robust_key=False cannot store {show_path(path)}: it is not a file name; leave robust_key at its default"
            )
        return _file_names.get_stem(key, self.robust_key)

    def _free_stem(self, key: str, position: int, child: object, taken: set[str]) -> str:
        stem = _file_names.encode_key(key)
        wanted = list_file_names(child, stem)
        jagged = isinstance(child, Tensor) and child.layout == torch.jagged
        if jagged or not all(map(_file_names.is_valid_name, wanted)) or not taken.isdisjoint(wanted):
            return f"%k{position}"  # No encoded key starts with "%k".
        taken.update(wanted)
        return stem

    def leaf(self, leaf: Tensor, parts: Parts, stem: str, key: KeyPath) -> JsonObject:
        """Add the files of a leaf to the plan, and return its metadata."""
        check_storable(leaf, key, content=self.content)
        device = "cpu" if leaf.is_cpu else str(leaf.device)
        entry: dict[str, object] = {"device": device, "shape": [], "dtype": str(leaf.dtype)}
        entry["is_nested"] = leaf.is_nested
        if not leaf.is_nested:
            entry["shape"] = list(leaf.shape)
            self.file(parts, stem + ".memmap", key, leaf, leaf.shape, leaf)
            return entry
        if leaf.layout == torch.jagged:
            return self._plan_jagged(leaf, entry, parts, stem, key)
        table = component_shapes(leaf)
        entry["shape"] = list(table.shape)
        self.file(parts, stem + ".shape.memmap", key, table, table.shape, None)
        self.file(parts, stem + ".memmap", key, leaf, table, leaf)
        return entry

    def _plan_jagged(
        self, leaf: Tensor, entry: dict[str, object], parts: Parts, stem: str, key: KeyPath
    ) -> dict[str, object]:
        ragged, values, offsets, lengths, _ = JaggedParts.of(leaf)
        check_storable(offsets, key)
        entry.update(
            layout="jagged",
            shape=list(values.shape),
            components=len(offsets) - 1,
            ragged=ragged,
        )
        entry["offsets_dtype"] = str(offsets.dtype)
        entry["lengths"] = lengths is not None
        files = {
            "values": self.file(parts, stem + ".memmap", key, values, values.shape, leaf),
            "offsets": self.file(parts, stem + ".offsets.memmap", key, offsets, offsets.shape, None),
        }
        if lengths is not None:
            files["lengths"] = self.file(parts, stem + ".lengths.memmap", key, lengths, lengths.shape, None)
        self.plan.jagged.append((leaf, files, ragged))
        return entry

    def file(
        self, parts: Parts, name: str, key: KeyPath, tensor: Tensor, shape: Shape, leaf: Tensor | None
    ) -> LeafFile:
        """Add a file of elements to the plan; link it to an earlier file with the same elements."""
        file = LeafFile(parts, name, key, tensor, element_count(shape) * tensor.dtype.itemsize, shape, leaf)
        if file.nbytes and (self.content or leaf is not None):
            # Link leaves that have the same elements: one tensor under two keys, or tensors on the same memory with
            # the same strides.
            dense = self.content and not (tensor.is_nested or is_stored(tensor))
            first = self.seen.setdefault(tensor.data_ptr() if dense else -id(leaf), file)
            if dense and first is not file:
                self.seen.setdefault(identify_view(first.tensor), first)
                first = self.seen.setdefault(identify_view(tensor), file)
            if first is not file:
                file.same_as = first
        self.plan.leaves.append(file)
        return file

    def _value(self, value: object, name: str, key: KeyPath) -> _Value:
        result = value if isinstance(value, _Value) else _split(value)
        if result.error is not None and not self.allow_pickle:
            raise CodecError(
                f"cannot store the value {name!r} of {show_path(key)}: {result.error}; allow_pickle=True pickles it"
            ) from result.error
        return result

    def _text(self, parts: Parts, name: str, content: object, key: KeyPath) -> None:
        try:
            text = json.dumps(content)
        except (TypeError, ValueError, RecursionError) as error:
            raise CodecError(f"cannot store the metadata of {show_path(key)}: {error}") from error
        self.plan.texts.append((parts, name, add_check_line(text.encode())))

    def _pickle(self, parts: Parts, name: str, content: object, key: KeyPath) -> bytes:
        if not content:
            return b""
        try:
            text = add_check_line(pickle.dumps(content))
        except Exception as error:
            # __reduce__ of a user's class may raise any exception.
            raise CodecError(f"cannot pickle a value of {show_path(key)}: {error}") from error
        self.plan.texts.append((parts, name, text))
        return text


def _encode_rows(node: Node) -> tuple[bytes, bytes]:
    """Return the slots and the heap of a stack of values; raise CodecError if only a pickle could store one."""
    record, encoder = kinds.of(node).record_of(node), RowEncoder()
    ones = record.meta["joints"]["ones"] if "joints" in record.meta else None
    slots = encoder.add(record.values["data"], None if ones is None else [not one for one in ones])
    return slots.tobytes(), bytes(encoder.records)


def list_file_names(child: object, stem: str) -> list[str]:
    """Return the names of the files of an entry that is not a jagged tensor."""
    if not isinstance(child, Tensor):
        return [stem]
    return [stem + ".memmap", stem + ".shape.memmap"] if child.is_nested else [stem + ".memmap"]


def count_list_dims(values: Any) -> int:
    """Return the number of batch dims that tensordict infers from the nested lists of a stack of values."""
    depth = 0
    level = [values]
    while level and all(isinstance(item, list) and len(item) == len(level[0]) for item in level):
        depth += 1
        level = [value for item in level for value in item]
    return depth


def _hides_size(size: torch.Size, value: _Value) -> bool:
    """Return True if tensordict would infer another batch size from nested lists, as it does from empty ones."""
    return count_list_dims(value.plain) != len(size) or 0 in size[1:]


@dataclass(slots=True)
class _Value:
    """A value as JSON and its types, or the value itself and the reason why it must be pickled."""

    plain: Any
    types: Any = None
    error: CodecError | None = None

    @property
    def is_class(self) -> bool:
        """Whether the value is a class of containers, which readers of the plain form unpickle."""
        return self.error is None and bool(self.types == CLASS)

    @property
    def is_json(self) -> bool:
        """Whether the metadata of the plain form stores the value."""
        return self.error is None and bool(self.types != CLASS)


def _sort_values(values: Mapping[str, _Value]) -> tuple[JsonObject, ...]:
    """Return the JSON values of the plain form, those that need types to be read back, the classes, and what it pickles."""
    plain, types, classes, pickled = {}, {}, {}, {}
    for name, value in values.items():
        if not value.is_json:
            pickled[name] = join_value(value.plain, value.types) if value.is_class else value.plain
            if value.is_class:
                classes[name] = value.plain
            continue
        plain[name] = value.plain
        if value.types is not None:
            types[name] = {"plain": value.plain, "types": value.types}
    return plain, types, classes, pickled


def _split(value: object) -> _Value:
    try:
        return _Value(*split_value(value))
    except CodecError as error:
        return _Value(value, None, error.with_traceback(None))
