"""Plan a save: encode the tree, choose file names and check everything before the first write.

A node is written in one of two forms. The *plain form* is the format of tensordict; the kind's ``"memmap/1"`` layout
defines its content. The *general form* (``_format_version`` 2, which tensordict refuses with a clear message)
stores what the plain form cannot: keys that equal its field names, names that are too long, values that JSON cannot
express, and kinds without such a layout.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from td_core._buffers import is_stored
from td_core._collection import Core, show_path
from td_core._nodes import KINDS, NodeKind, Record, get_class_name
from td_core._torch_private import get_ragged_dim
from td_core._value_codec import is_readable, split
from td_core._value_types import CONTAINERS
from td_core.errors import CodecError

from . import _file_names
from ._chunks import check_storable
from ._fs import Parts
from ._shapes import component_shapes, element_count

#: Name of the layouts of this file format in a node kind.
FORMAT = "memmap/1"
VERSION = 2

#: Type tag of the value codec for a value that is a container class.
_CLASS = "type"

KeyPath = tuple[str, ...]

#: A node to plan: the node, its directory, its key path, and batch size and dim names of its parent.
_Below = tuple[Core, Parts, KeyPath, torch.Size, "list[str | None] | None"]


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
    shape: Any
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
        jagged: jagged leaves, with their files by role and their ragged dim.
    """

    directories: list[Parts] = field(default_factory=list)
    leaves: list[LeafFile] = field(default_factory=list)
    texts: list[tuple[Parts, str, bytes]] = field(default_factory=list)
    nodes: list[tuple[Core, Parts]] = field(default_factory=list)
    jagged: list[tuple[Tensor, dict[str, LeafFile], int]] = field(default_factory=list)

    def files(self) -> list[Parts]:
        """Return the paths of all planned files that have content."""
        leaves = [leaf.path for leaf in self.leaves if leaf.nbytes]
        return [*leaves, *((*parts, name) for parts, name, _ in self.texts)]


def make_plan(
    tree: Core, *, robust_key: bool = True, allow_pickle: bool = False, content: bool = True
) -> Plan:
    """Plan the files of a tree; raise CodecError if a leaf or, with ``content=True``, its elements cannot be stored."""
    planner = _Planner(robust_key, allow_pickle, content)
    todo: list[_Below] = [(tree, (), (), torch.Size(), None)]
    while todo:
        # Metadata is collected parents first and written in reverse order, so the root's metadata is the last file.
        todo.extend(reversed(planner.level(todo.pop())))
    planner.plan.texts.reverse()
    return planner.plan


def encode_node(node: Core, path: KeyPath = ()) -> Record:
    """Encode a node as a record with the layout of this file format."""
    return KINDS.of(node).record_of(node, FORMAT, path)


def plan_anonymous(tree: Core, *, content: bool) -> Plan:
    """Plan the leaves and nodes of a tree for an anonymous file, without file names."""
    planner = _Planner(True, False, content)
    todo: list[tuple[Core, KeyPath]] = [(tree, ())]
    while todo:
        node, path = todo.pop()
        planner.plan.nodes.append((node, ()))
        record = encode_node(node, path)
        todo.extend((child, (*path, key)) for key, child in record.members.items())
        for key, child in record.entries.items():
            if isinstance(child, Tensor):
                planner.leaf(child, (), key, (*path, key))
            else:
                todo.append((child, (*path, key)))
    return planner.plan


def plan_values(node: Core, above: torch.Size, *, allow_pickle: bool) -> dict[str, bytes]:
    """Return the small files of a value node by name; ``above`` is the batch size of its parent."""
    planner = _Planner(True, allow_pickle, True)
    planner.level((node, (), (), above, None))
    return {name: text for _, name, text in planner.plan.texts}


def _extend_names(names: list[str | None], count: int) -> list[str | None]:
    """Pad dim names with None to ``count`` dims."""
    return [*names, *[None] * (count - len(names))]


class _Planner:
    def __init__(self, robust_key: bool, allow_pickle: bool, content: bool) -> None:
        self.plan = Plan()
        self.robust_key = robust_key
        self.allow_pickle = allow_pickle
        self.content = content
        self.seen: dict[Any, LeafFile] = {}

    def level(self, this: _Below) -> list[_Below]:
        """Plan a node, and return its child nodes and members, which are planned next."""
        node, parts, key, _, names = this
        if parts:
            self.plan.directories.append(parts)
        self.plan.nodes.append((node, parts))
        kind = KINDS.of(node)
        if FORMAT in kind.layouts:
            record = encode_node(node, key)
            values = self._values(record, key)
            if self._plain(node, record, values, names):
                return self._as_reference(this, kind, record, values)
        record = kind.record_of(node, path=key)
        return self._general(this, kind, record, self._values(record, key))

    def _as_reference(
        self, this: _Below, kind: NodeKind, record: Record, values: dict[str, _Value]
    ) -> list[_Below]:
        node, parts, key, above, names = this
        meta = dict(record.meta)
        if "_type" not in meta:
            meta["_type"] = kind.layouts[FORMAT].names[0]
        if type(node) is not kind.type and "_class" in meta:
            meta["_type"] = str(type(node))
            meta["_class"] = get_class_name(type(node))
        stems = {name: self._stem(name, (*key, name)) for name in record.entries}
        level, below = self._entries(this, record, stems, above, meta.get("_names"))
        types: dict[str, Any] = {}
        pickled: dict[str, Any] = {}
        classes: dict[str, str] = {}
        for name, value in values.items():
            if value.pickled:
                pickled[name] = value.plain
            elif value.types == _CLASS:
                classes[name] = value.plain
                pickled[name] = CONTAINERS[value.plain]
            else:
                level[name] = value.plain
                if value.types is not None:
                    types[name] = {"plain": value.plain, "types": value.types}
        if not self.robust_key and any(_file_names.encode_key(name) != name for name in record.entries):
            # Record that keys are not encoded: without files, a reader could not infer it.
            meta[_file_names.ROBUST_KEY] = False
        for name, item in meta.items():
            level.setdefault(name, item)
        sidecar: dict[str, Any] = {"values": types} if types else {}
        size = node.batch_size
        if "shape" not in meta and not record.members:
            # In the plain form such a node has the batch size and dim names of its parent, so store them if they differ.
            if size != above:
                sidecar["batch_size"] = list(size)
            if node._names is not None and [*node._names] != _extend_names(names or [], len(size)):
                sidecar["names"] = [*node._names]
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
        return below

    def _general(
        self, this: _Below, kind: NodeKind, record: Record, values: dict[str, _Value]
    ) -> list[_Below]:
        node, parts, key, *_ = this
        level: dict[str, Any] = {"_type": f"td:{kind.tag}", "_format_version": VERSION, "kind": kind.tag}
        if type(node) is not kind.type:
            level["class"] = get_class_name(type(node))
        if kind.tag in KINDS.providers:
            level["provider"] = KINDS.providers[kind.tag]
        level["meta"] = record.meta
        taken = set(_file_names.RESERVED_STEMS)
        stems = {
            name: self._free_stem(name, position, child, taken)
            for position, (name, child) in enumerate(record.entries.items())
        }
        entries, below = self._entries(this, record, stems, node.batch_size, None)
        level["entries"] = [[name, {**entry, "file": stems[name]}] for name, entry in entries.items()]
        level["members"] = list(record.members)
        pickled = {name: value.plain for name, value in values.items() if value.pickled}
        level["values"] = {
            name: {"pickled": True} if value.pickled else {"plain": value.plain, "types": value.types}
            for name, value in values.items()
        }
        self._text(parts, _file_names.META, level, key)
        self._pickle(parts, _file_names.PICKLE, pickled, key)
        return below

    def _entries(
        self, this: _Below, record: Record, stems: dict[str, str], above: torch.Size, names: Any
    ) -> tuple[dict[str, Any], list[_Below]]:
        """Plan entries and members of a node. Return the metadata of each entry, and the child nodes to plan."""
        node, parts, key, *_ = this
        entries: dict[str, Any] = {}
        below: list[_Below] = []
        for name, child in record.entries.items():
            position, stem = (*key, name), stems[name]
            if isinstance(child, Tensor):
                entries[name] = self.leaf(child, parts, stem, position)
            else:
                entries[name] = {"type": type(child).__name__}
                below.append((child, (*parts, stem), position, node.batch_size, names))
        for name, child in record.members.items():
            below.append((child, (*parts, name), (*key, name), above, None))
        return entries, below

    def _plain(self, node: Core, record: Record, values: Mapping[str, _Value], names: Any) -> bool:
        """Return True if the plain form can store a node so that tensordict reads it correctly."""
        if any(
            value.types not in (None, _CLASS) and not is_readable(value.types) for value in values.values()
        ):
            return False
        if "stack_dim" in record.meta and "data" in values:
            # tensordict infers the batch size from the nesting of the lists, which empty lists do not show.
            size = node.batch_size
            if count_list_dims(values["data"].plain) != len(size) or 0 in size[1:]:
                return False
        own = {"shape", "device", "_type", *record.meta} - {"_class", "_format_version"}
        if not own.isdisjoint(record.entries) or (names is not None and "_names" in record.entries):
            return False
        files = list(_file_names.RESERVED_STEMS)
        for key, child in record.entries.items():
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

    def _free_stem(self, key: str, position: int, child: Any, taken: set[str]) -> str:
        stem = _file_names.encode_key(key)
        wanted = list_file_names(child, stem)
        jagged = isinstance(child, Tensor) and child.layout == torch.jagged
        if jagged or not all(map(_file_names.is_valid_name, wanted)) or not taken.isdisjoint(wanted):
            return f"%k{position}"  # No encoded key starts with "%k".
        taken.update(wanted)
        return stem

    def leaf(self, leaf: Tensor, parts: Parts, stem: str, key: KeyPath) -> dict[str, Any]:
        """Add the files of a leaf to the plan, and return its metadata."""
        check_storable(leaf, key, content=self.content)
        device = "cpu" if leaf.is_cpu else str(leaf.device)
        entry: dict[str, Any] = {"device": device, "shape": [], "dtype": str(leaf.dtype)}
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
        self, leaf: Any, entry: dict[str, Any], parts: Parts, stem: str, key: KeyPath
    ) -> dict[str, Any]:
        values, offsets, lengths = leaf.values(), leaf.offsets(), leaf.lengths()
        check_storable(offsets, key)
        entry.update(
            layout="jagged",
            shape=list(values.shape),
            components=len(offsets) - 1,
            ragged=get_ragged_dim(leaf),
        )
        entry["offsets_dtype"] = str(offsets.dtype)
        entry["lengths"] = lengths is not None
        files = {
            "values": self.file(parts, stem + ".memmap", key, values, values.shape, leaf),
            "offsets": self.file(parts, stem + ".offsets.memmap", key, offsets, offsets.shape, None),
        }
        if lengths is not None:
            files["lengths"] = self.file(parts, stem + ".lengths.memmap", key, lengths, lengths.shape, None)
        self.plan.jagged.append((leaf, files, get_ragged_dim(leaf)))
        return entry

    def file(
        self, parts: Parts, name: str, key: KeyPath, tensor: Tensor, shape: Any, leaf: Tensor | None
    ) -> LeafFile:
        """Add a file of elements to the plan; link it to an earlier file with the same elements."""
        file = LeafFile(parts, name, key, tensor, element_count(shape) * tensor.dtype.itemsize, shape, leaf)
        if file.nbytes and (self.content or leaf is not None):
            # Link leaves that have the same elements: one tensor under two keys, or tensors on the same memory with
            # the same strides.
            place: Any = id(leaf)
            if self.content and not tensor.is_nested and not is_stored(tensor):
                place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            first = self.seen.setdefault(place, file)
            if (
                first is not file
                and first.tensor.is_conj() == tensor.is_conj()
                and first.tensor.is_neg() == tensor.is_neg()
            ):
                file.same_as = first
        self.plan.leaves.append(file)
        return file

    def _values(self, record: Record, key: KeyPath) -> dict[str, _Value]:
        return {name: self._value(value, name, key) for name, value in record.values.items()}

    def _value(self, value: Any, name: str, key: KeyPath) -> _Value:
        try:
            plain, types = split(value)
        except CodecError as error:
            if not self.allow_pickle:
                raise CodecError(
                    f"cannot store the value {name!r} of {show_path(key)}: {error}; allow_pickle=True pickles it"
                ) from error
            return _Value(value, pickled=True)
        return _Value(plain, types)

    def _text(self, parts: Parts, name: str, content: Any, key: KeyPath) -> None:
        try:
            text = json.dumps(content)
        except (TypeError, ValueError, RecursionError) as error:
            raise CodecError(f"cannot store the metadata of {show_path(key)}: {error}") from error
        self.plan.texts.append((parts, name, text.encode()))

    def _pickle(self, parts: Parts, name: str, content: Any, key: KeyPath) -> bytes:
        if not content:
            return b""
        try:
            text = pickle.dumps(content)
        except Exception as error:
            # __reduce__ of a user's class may raise any exception.
            raise CodecError(f"cannot pickle a value of {show_path(key)}: {error}") from error
        self.plan.texts.append((parts, name, text))
        return text


def list_file_names(child: Any, stem: str) -> list[str]:
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


@dataclass(slots=True)
class _Value:
    plain: Any
    types: Any = None
    pickled: bool = False
