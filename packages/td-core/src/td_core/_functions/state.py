"""Write state dicts in the layout of tensordict 0.12 and later; load these and older layouts.

Flat (the default): dotted keys; the batch size and device of each node are in the ``_metadata`` attribute of the
OrderedDict, under its dotted key. Nested (``flatten=False``): an OrderedDict with a ``_metadata`` per node.
tensordict 0.1 to 0.11 wrote no ``_metadata`` but sentinel entries ``__batch_size`` and ``__device``, and a tensorclass
as the pair ``_tensordict``, ``_non_tensordict``.

A kind that holds values registers the layout ``"state_dict/2"``: its record's ``meta`` and ``values`` are written into
the node's metadata (``values`` under ``_non_tensor``), and its ``entries`` are the node's entries.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch import Tensor

from .._encode.node_kinds import KINDS, NodeKind
from .._encode.records import Record
from .._tree.coerce import WRAPPED, coerce
from .._tree.components import has_same_components
from .._tree.defaults import check_keys, clone_detached, get_lead, show_path, type_error, unwrap_entry
from .._tree.keys import unravel_key_below
from .._tree.locks import check_no_entry, check_unlocked, check_unlocked_below
from .._tree.node import LEAF_KINDS, Child, Core, CoreT, get_all_entries, make_dense, replace_leaves
from .._tree.ragged import get_display_shape
from .._tree.roles import in_role, role
from .._tree.walks import has_entries, visit
from .._writes.check import check_writable
from .._writes.pair import try_copy_leaves
from .._writes.run import Transaction
from .._writes.update import Update
from ..errors import FormatError, KeyPathError, StructureError

FORMAT = "state_dict/2"
_META = {"batch_size", "device"}
_OLD_FIELDS = {"__batch_size", "__device"}
_OLD_TENSORCLASS = {"_tensordict", "_non_tensordict"}

#: An entry of a parsed state dict.
Entry = Union[Tensor, "_Level"]


@dataclass(slots=True)
class _Level:
    """One node of a parsed state dict: its metadata, and its entries (tensors or nodes)."""

    meta: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)


def write_state_dict(
    root: Core, destination: object, prefix: str, keep_vars: bool, flatten: bool
) -> OrderedDict[str, object]:
    """Write the leaves into a mapping, see ``state_dict``."""
    target: Any = OrderedDict() if destination is None else destination
    if destination is not None and not isinstance(destination, MutableMapping):
        raise type_error("state_dict", destination, "a mapping as destination")
    if not isinstance(prefix, str):
        raise type_error("state_dict", prefix, "a string as prefix")
    metadata = getattr(target, "_metadata", None)
    if metadata is None:
        metadata = OrderedDict()
        with suppress(AttributeError):  # A plain dict has no place for metadata; torch leaves it out, too.
            target._metadata = metadata
    entries, out, before = _write_level(root, metadata, prefix.removesuffix(".")), target, prefix
    above: list[Any] = []
    # By hand: the row `state_dict` of benchmarks/ops.py.
    while True:
        for key, child in entries:
            name = before + key
            if not isinstance(child, Tensor) and isinstance(child := unwrap_entry(child), Core):
                above.append((entries, out, before, metadata))
                if flatten:
                    if name in metadata and (not has_entries(child) or child._children()):
                        raise KeyPathError(f"two levels have the dotted key {name!r}; use flatten=False")
                    entries, before = _write_level(child, metadata, name), name + "."
                else:
                    out[name] = nested = OrderedDict()  # type: ignore[var-annotated]
                    metadata = nested._metadata = OrderedDict()  # type: ignore[attr-defined]
                    entries, out, before = _write_level(child, metadata, ""), nested, ""
                break
            if name in out:
                raise KeyPathError(f"two leaves have the dotted key {name!r}; use flatten=False")
            out[name] = child if keep_vars else child.detach()
        else:
            if not above:
                return target  # type: ignore[no-any-return]
            entries, out, before, metadata = above.pop()


def load_state(
    root: CoreT, state_dict: Mapping[str, object], strict: bool, assign: bool, from_flatten: bool | None
) -> CoreT:
    """Copy a state dict into the leaves, see ``load_state_dict``."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping; got {type(state_dict).__name__}")
    if not assign and from_flatten is not False and _try_load_whole(root, state_dict):
        return root
    level = _parse_state(root, state_dict, from_flatten)
    is_value = not has_entries(root)
    if is_value:
        return root.update_(_build_value(root, level, assign))
    load = _Load(root, strict, assign)
    with torch.no_grad():
        load.read(level)
        load.writes.commit()
    return root


def _try_load_whole(root: Core, state_dict: Mapping[str, object]) -> bool:
    """Load a state dict with the keys and metadata of ``root.state_dict()`` in one call. Return False for any other."""
    metadata = getattr(state_dict, "_metadata", None) or {}
    targets: dict[str, Tensor] = {}
    leaves = 0
    levels: list[tuple[Core, str]] = [(root, "")]
    for node, name in levels:
        if not _is_described(node, metadata.get(name)):
            return False
        prefix = f"{name}." if name else ""
        for key, child in dict(node._children()).items():
            if isinstance(child, Tensor):
                targets[prefix + key] = child
                leaves += 1
            else:
                levels.append((child, prefix + key))
    # The counts differ if two leaves or two nodes have one dotted name.
    if not leaves == len(targets) == len(state_dict) or len(levels) != len(metadata):
        return False
    with torch.no_grad():
        return try_copy_leaves(root, list(targets.values()), state_dict, list(map(state_dict.get, targets)))


def _is_described(node: Core, meta: dict[str, object] | None) -> bool:
    """Return True if the metadata of a state dict is that of a node without values."""
    return (
        type(node._children()) is dict
        and meta is not None
        and meta.keys() == _META
        and meta["batch_size"] == node.batch_size
        and meta["device"] == node.device
        and _make_record(node) is None
    )


def _write_level(node: Core, metadata: dict[str, Any], level: str) -> Iterator[tuple[str, Child]]:
    """Write the metadata of a node, and return an iterator over its entries."""
    meta: dict[str, object] = {"batch_size": node.batch_size, "device": node.device}
    metadata[level] = meta
    record = _make_record(node)
    if record is None:
        return iter(dict(get_all_entries(node)).items())
    get_all_entries(node)  # raises for entries that only some members have, which a record does not hold
    meta.update(record.meta)
    if record.values:
        meta["_non_tensor"] = dict(record.values)
    return iter(record.entries.items())


def _make_record(node: Core) -> Record | None:
    """Return the record of a node for a state dict, or None if its entries describe it completely."""
    kind = KINDS.of(node)
    return kind.record_of(node, FORMAT) if FORMAT in kind.layouts or node._is_value else None


def _list_entries(node: Core) -> Mapping[str, Child]:
    """Return the entries of a node in a state dict."""
    record = _make_record(node)
    return dict(node._children()) if record is None else record.entries


def _parse_state(target: Core, state_dict: Mapping[str, object], from_flatten: bool | None) -> _Level:
    """Parse a state dict of any layout into a tree of ``_Level``."""
    _check_names((), state_dict)
    metadata = getattr(state_dict, "_metadata", None)
    if from_flatten is None:
        differ = set(_take_old_fields(state_dict, {})) != set(target._children())
        nested = any(
            not isinstance(value, Tensor) and isinstance(value, Mapping) for value in state_dict.values()
        )
        # Only the flat layout has metadata under the keys of nested nodes.
        from_flatten = any(metadata or ()) or (
            differ and not nested and (metadata is not None or any("." in key for key in state_dict))
        )
    if from_flatten:
        return _parse_flat(target, state_dict, metadata)
    root = _Level()

    def parse(
        source: Mapping[str, object], level: _Level, path: tuple[str, ...]
    ) -> Iterator[tuple[object, ...]]:
        level.meta.update((getattr(source, "_metadata", None) or {}).get("", {}))
        source = _take_old_fields(source, level.meta)
        _check_names(path, source)
        for key, value in source.items():
            if isinstance(value, Mapping):
                level.entries[key] = below = _Level()
                yield value, below, (*path, key)
            else:
                level.entries[key] = _check_tensor(value, (*path, key))

    visit(parse, state_dict, root, ())
    return root


def _parse_flat(target: Core, state_dict: Mapping[str, object], metadata: Any) -> _Level:
    """Parse a state dict with dotted keys."""
    # Keys of the target may contain dots, so match its dotted names before splitting a name at dots.
    known: dict[str, tuple[str, ...]] = {}

    def collect(node: Core, path: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
        known.setdefault(".".join(path), path)
        for key, child in _list_entries(node).items():
            if isinstance(unwrap_entry(child), Tensor):
                known.setdefault(".".join((*path, key)), (*path, key))
            else:
                yield child, (*path, key)

    visit(collect, target, ())
    root = _Level()
    for name, value in _take_old_fields(state_dict, root.meta).items():
        path = known.get(name) or tuple(name.split("."))
        level = _descend(root, path[:-1], name)
        if path[-1] in level.entries:
            raise StructureError(f"the state dict has both a leaf and a level {name!r}")
        level.entries[path[-1]] = _check_tensor(value, path)
    # Metadata comes last, so that the nodes have the order of the leaves.
    for name, meta in (metadata or {}).items():
        level = _descend(root, known.get(name) or tuple(name.split(".")) if name else (), name)
        level.meta.update(meta)
    return root


def _check_names(path: tuple[str, ...], source: Mapping[Any, object]) -> None:
    """Raise KeyPathError if a key of a mapping in a state dict is not a key of a collection."""
    if not {*map(type, source)} <= {str}:
        for key in source:
            unravel_key_below(path, key)


def _take_old_fields(source: Mapping[str, Any], meta: dict[str, object]) -> Mapping[str, object]:
    """Move to ``meta`` what tensordict 0.1 to 0.11 stored next to the entries of a level; return the entries."""
    if source.keys() == _OLD_TENSORCLASS and all(isinstance(part, Mapping) for part in source.values()):
        meta["_non_tensor"] = dict(source["_non_tensordict"])
        source = source["_tensordict"]
    # An entry may have the name of a field.
    old = {key for key in _OLD_FIELDS & source.keys() if not isinstance(source[key], (Tensor, Mapping))}
    meta.update({key.strip("_"): source[key] for key in old})
    return {key: value for key, value in source.items() if key not in old} if old else source


def _descend(level: _Level, path: tuple[str, ...], name: str) -> _Level:
    """Return the level at a path below a level; create the levels that are missing. ``name`` is for messages."""
    for part in path:
        below = level.entries.setdefault(part, _Level())
        if not isinstance(below, _Level):
            raise StructureError(f"the state dict has both a leaf and a level at {part!r} of {name!r}")
        level = below
    return level


def _check_tensor(value: object, path: tuple[str, ...]) -> Tensor:
    """Return a value, or raise FormatError if it is not a tensor."""
    if not isinstance(value, Tensor):
        raise FormatError(f"{show_path(path)} of the state dict is a {type(value).__name__}, not a tensor")
    return value


class _Load:
    """One ``load_state_dict``: :meth:`read` checks a parsed state dict and adds its writes to the transaction."""

    def __init__(self, target: Core, strict: bool, assign: bool) -> None:
        self.target = target
        self.strict = strict
        self.assign = assign
        self.writes = Transaction()
        self.update = Update(self.writes, inplace=True)
        self.levels: list[tuple[Core, dict[str, Any]]] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.grown: list[Core] = []
        self.wrong: list[str] = []

    def read(self, root: _Level) -> None:
        """Check all nodes, and raise one error that lists every problem."""
        visit(self._read_level, self.target, root, (), True)
        keys = {"unexpected": self.unexpected, "missing": self.missing} if self.strict else {}
        problems = [*(f"{what} keys: {names}" for what, names in keys.items() if names), *self.wrong]
        if problems:
            raise StructureError(
                f"cannot load the state dict into the {type(self.target).__name__}: " + "; ".join(problems)
            )
        self._check_locks()
        # Change the deepest nodes first: the batch size of a node must be a prefix of those of its nested nodes.
        for node, meta in reversed(self.levels):
            size = meta.get("batch_size")
            if size is not None and tuple(size) != node.batch_size:
                check_no_entry(node, "change the batch size of")
            if size is not None:
                self.writes.change(_resize, node, torch.Size(size))

    def _read_level(
        self, node: Core, level: _Level, path: tuple[str, ...], grows: bool
    ) -> Iterator[tuple[object, ...]]:
        """Check the entries of one node, and yield the nodes below."""
        grows = grows and node._schema.can_grow
        self.levels.append((node, level.meta))
        self._check_metadata(node, level, path)
        record, entries = _make_record(node), _list_entries(node)
        values = _get_node_values(node, level)
        self._check_batch_sizes(node, level, entries, path, grows)
        for key, child in entries.items():
            child, prefix = unwrap_entry(child), (*path, key)
            provided = level.entries.get(key)
            if provided is None:
                # The key is not missing if the metadata has one value for the batch and the collection one per element.
                is_given = key in values and isinstance(child, Core) and not has_entries(child)
                self.missing.extend(() if is_given else _list_leaf_names(child, prefix))
            elif isinstance(child, Tensor) and isinstance(provided, Tensor):
                self._read_leaf(node, key, child, provided, prefix, grows)
            elif (problem := _find_difference(child, provided)) is not None:
                self.wrong.append(f"{show_path(prefix)} is {problem}")
            elif has_entries(child):
                yield child, provided, prefix, grows
            else:
                self._read_value(node, key, provided)
        self._read_new_entries(node, level, entries, path, grows)
        held = {*entries, *(() if record is None else record.values)}
        for key, value in values.items():
            if grows or key in held:
                self._add(node, key, (value,))

    def _check_locks(self) -> None:
        """Raise LockedError if a node that would get other leaves, or new entries, is locked."""
        what = "load a state dict with assign=True or extra keys"
        if self.assign:
            check_unlocked_below(self.target, what)
        for node in (self.target, *self.grown) if self.unexpected else ():
            check_unlocked(node, what)

    def _check_metadata(self, node: Core, level: _Level, path: tuple[str, ...]) -> None:
        """Add an error if the devices differ."""
        device = level.meta.get("device")
        if device is not None and node.device is not None and torch.device(device) != node.device:
            self.wrong.append(f"{show_path(path)} is on {node.device}, in the state dict on {device}")

    def _check_batch_sizes(
        self, node: Core, level: _Level, entries: Mapping[str, Child], path: tuple[str, ...], grows: bool
    ) -> None:
        """Check the leaves and new entries against the batch size that the node will have."""
        size = tuple(level.meta.get("batch_size", node.batch_size if -1 not in node.batch_size else ()))
        for key, entry in {**entries, **level.entries}.items():
            if (grows and key not in entries) or (
                isinstance(entry, Tensor) and isinstance(entries.get(key), Tensor)
            ):
                self.wrong.extend(_find_mismatch(entry, size, (*path, key)))

    def _read_leaf(
        self, node: Core, key: str, child: Tensor, provided: Tensor, path: tuple[str, ...], grows: bool
    ) -> None:
        """Check the tensor of a leaf, and add its copy; with ``assign``, its store."""
        if self.assign:
            if not grows and role(provided) != role(child):
                provided = in_role(provided.detach(), role(child))
            self.writes.change(_store_entry, node, key, True, provided)
            return
        nested = child.is_nested or provided.is_nested
        if not (has_same_components(child, provided) if nested else child.shape == provided.shape):
            self.wrong.append(
                f"{show_path(path)} has shape {get_display_shape(child)}, given {get_display_shape(provided)}"
            )
        elif (held := _find_leaf(node, key)) is None:
            self.update.add_copy(node, key, provided, path)
        else:
            check_writable(held, path, provided)
            self.writes.copy(held, provided, path)

    def _read_value(self, node: Core, key: str, level: Any) -> None:
        """Add the write of a value node, if the level has values."""
        if "_non_tensor" in level.meta:
            self._add(node, key, level)

    def _read_new_entries(
        self, node: Core, level: _Level, entries: Mapping[str, Child], path: tuple[str, ...], grows: bool
    ) -> None:
        """Add the entries of the state dict that are not entries of the node: values of its record, and new ones."""
        if grows and not self.strict:
            check_keys(node, level.entries)
        record = _make_record(node)
        for key, provided in level.entries.items():
            # Every layout stores values per element as a nested node; the legacy one does so for all values of a tensorclass.
            if record is not None and key in record.values and "data" in _get_values(provided):
                self._add(node, key, provided if _find_kind(provided) else (_get_values(provided)["data"],))
            elif key not in entries:
                names = _list_leaf_names(provided, (*path, key))
                self.unexpected.extend(names if grows or self.strict else ())
                # An empty node is never an unexpected key, but is added unless strict or locked.
                if grows if names else not (self.strict or node._locked):
                    self._add(node, key, provided)

    def _add(self, node: Core, key: str, value: Entry | tuple[object]) -> None:
        """Add the write of a value, or of a new entry."""
        held = node._children().get(key)
        if held is None:
            self.grown.append(node)
            self.writes.change(_store_entry, node, key, self.assign, value)
        elif isinstance(value, tuple) and _is_kept(held):
            made = _make_value(value[0], node, held, self.assign)
            self.update.add_copy(node, key, coerce(made, node.batch_size, node.device, (key,)), (key,))
        elif isinstance(value, _Level) and not self.assign and _is_written_in_place(node, key, held):
            self.update.add_copy(node, key, _build_held(node, held, value, False), (key,))
        else:
            self.writes.put_with(_store_entry, node, key, self.assign, value)


def _get_node_values(node: Core, level: _Level) -> Mapping[str, object]:
    """Return the values in the metadata of a level that are entries of the node."""
    return _get_values(level) if has_entries(node) else {}


def _find_difference(child: Child, provided: Entry) -> str | None:
    """Return how the kinds of an entry in the collection and in the state dict differ; None if they agree."""
    if isinstance(child, Tensor) or isinstance(provided, Tensor):
        return "a leaf on one side and a level on the other"
    if _find_kind(provided) if has_entries(child) else provided.entries:
        return "a value on one side and a collection on the other"
    return None


def _resize(node: Core, size: torch.Size) -> None:
    """Give a node the batch size of the state dict."""
    if tuple(node.batch_size) != tuple(size):
        node._change_batch_size(size)


def _find_mismatch(entry: object, size: tuple[int, ...], path: tuple[str, ...]) -> list[str]:
    """Return an error message per leaf or node of an entry whose leading dims are not the batch size."""
    wrong: list[str] = []

    def check(entry: Any, size: tuple[int, ...], path: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
        if isinstance(entry, Tensor):
            if type(entry) not in WRAPPED and tuple(get_lead(entry, len(size))) != size:
                shape = tuple(get_display_shape(entry))
                wrong.append(f"{show_path(path)} has shape {shape}, the batch size there is {size}")
        elif _find_kind(entry) is None:
            inner = tuple(entry.meta.get("batch_size", size))
            if inner[: len(size)] != size:
                wrong.append(f"{show_path(path)} has batch size {inner}, the level above it {size}")
            yield from ((below, inner, (*path, key)) for key, below in entry.entries.items())

    visit(check, entry, size, path)
    return wrong


def _get_values(provided: object) -> Mapping[str, object]:
    """Return the non-tensor values in the metadata of a parsed node."""
    return (provided.meta.get("_non_tensor") or {}) if isinstance(provided, _Level) else {}


def _find_leaf(node: Core, key: str) -> Tensor | None:
    """Return the leaf that a node stores under ``key``, or None if the kind stores its leaves elsewhere."""
    children = node._children()
    result = unwrap_entry(children[key]) if type(children) is dict and key in children else None
    return result if isinstance(result, Tensor) else None


def _store_entry(node: Core, key: str, assign: bool, value: Entry | tuple[object]) -> None:
    """Store an entry of the state dict: a value (in a tuple), a level, or a leaf."""
    held = node._children().get(key)
    if isinstance(value, tuple):
        _store_value(node, key, held, value[0], assign)
    elif isinstance(value, _Level):
        node._set_child(key, node._schema.adopt(key, _build_held(node, held, value, assign)))
    elif isinstance(held, Core) and type(held) in LEAF_KINDS:
        node._set_child(key, replace_leaves(held, iter((value,))))
    else:
        node._set_child(key, _make_leaf(value, node, assign))


def _store_value(node: Any, key: str, held: object, value: object, assign: bool) -> None:
    """Store a value of the state dict; None, without an old value, removes nothing."""
    if held is not None and node._locked:
        node.set_(key, _make_value(value, node, held, assign))
    elif held is not None or value is not None:
        node._set_path((key,), None if value is None else _make_value(value, node, held, assign))


def _build_held(node: Core, held: Child | None, level: _Level, assign: bool) -> Any:
    """Build the node that takes the place of an entry; it has the dim names of the entry, which a state dict does not contain."""
    built = _build_value(held, level, assign, node)
    if isinstance(held, Core) and len(held.batch_size) == len(built.batch_size):
        built._set_names(held._names)
    return built


def _is_written_in_place(node: Core, key: str, held: Child | None) -> bool:
    """Return True for a value that is kept in files, or that the kind builds when it is read, as a lazy stack does."""
    if not isinstance(held, Core) or has_entries(held):
        return False
    return _is_kept(held) or node._children()[key] is not held


def _is_kept(held: object) -> bool:
    """Return True if an entry's values are also stored in files, which an in-place write updates."""
    return isinstance(held, Core) and held._keeper is not None


def _make_leaf(value: Tensor, node: Core, assign: bool) -> Child:
    """Convert a tensor of the state dict, cloned unless ``assign``, to an entry on the device of ``node``."""
    value = value if assign else clone_detached(value)
    size = node.batch_size if type(value) in WRAPPED else torch.Size()
    return coerce(value, size, node.device, ())


def _make_value(value: object, node: Core, held: object, assign: bool) -> object:
    """Wrap a value in a value node, since a bare number or list would be converted to a tensor."""
    level = _Level({"_type": "NonTensorData", "_non_tensor": {"data": value}})
    if _find_kind(level) is None:
        return value if assign else _copy_value(value)
    return _build_value(held, level, assign, node)


def _copy_value(value: object) -> object:
    """Copy a value deeply; return the value itself if it cannot be copied, such as a lock or an open file."""
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError, copy.Error, pickle.PicklingError):
        return value


def _build_value(held: Any, level: _Level, assign: bool, parent: Any = None) -> Any:
    """Build the node that a parsed node describes; ``held`` is the old value node under the key, or None."""
    above = held if parent is None else parent
    size = torch.Size(level.meta.get("batch_size", above.batch_size))
    kind = _find_kind(level) or (KINDS.of(held) if "_non_tensor" in level.meta and held is not None else None)
    if kind is not None:
        layout = kind.layouts.get(FORMAT)
        unflatten = kind.unflatten if layout is None else layout.unflatten
        cls = type(held) if isinstance(held, kind.type) else None
        values = level.meta["_non_tensor"]
        if not assign:
            values = {key: _copy_value(value) for key, value in values.items()}
        node = unflatten(Record(level.meta, {}, {}, values, size, cls=cls))
        node._set_device(above.device)
        return node
    node = make_dense({}, size, above.device)
    for name, value in level.entries.items():
        node._set_child(
            name,
            _build_value(None, value, assign, node)
            if isinstance(value, _Level)
            else _make_leaf(value, node, assign),
        )
    for name, plain in _get_values(level).items():
        _store_entry(node, name, assign, (plain,))
    return node


def _find_kind(level: Any) -> NodeKind | None:
    """Return the value kind that a parsed node names, or None if it has entries or an unknown kind."""
    name = str(level.meta.get("_type")).partition("[")[0]
    kind = KINDS.find_by_name(FORMAT, name) if "_non_tensor" in level.meta else None
    return None if kind is None or has_entries(kind.type) else kind


def _list_leaf_names(child: object, path: tuple[str, ...]) -> list[str]:
    """Return the dotted names of the leaves of an entry of a collection or of a parsed state dict."""
    names: list[str] = []

    def collect(node: Any, prefix: tuple[str, ...]) -> Iterator[tuple[object, tuple[str, ...]]]:
        level = isinstance(node, _Level)
        if _find_kind(node) is not None if level else not has_entries(node):
            names.append(".".join(prefix))
            return
        entries = node.entries if level else _list_entries(node)
        yield from ((below, (*prefix, key)) for key, below in reversed(list(entries.items())))

    visit(collect, child, path)
    return names
