"""Load a save: check all metadata, then check and map each file, then build the nodes.

Each file is opened once, and the checks apply to the open file. No part of a save is returned, or copied to a
device, before all its files are checked.

The directory is opened once. A save that is replaced during a load remains readable as long as its files exist; if
a file is missing because the save was replaced, loading starts over with the new save.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from td_core import TensorCollection, kinds
from td_core.errors import FormatError, MissingPluginError
from td_core.spi import (
    JaggedParts,
    Record,
    as_named,
    compare_check_line,
    join_value,
    make_reporter,
    show_path,
    user_class,
    visit,
)
from td_core.typing import NestedKey

from . import _file_names, _fs
from ._directory_layouts import FORMAT
from ._errors import PickleRefusedError
from ._fs import DirectoryTree, Parts
from ._mapped_memory import check_mappings
from ._meta import (
    LIMIT,
    FileTree,
    LeafEntry,
    Level,
    Location,
    check_shape,
    find_directory,
    list_members,
    list_subdirectories,
    read_cached_level,
    read_json,
    read_level,
    read_node,
)
from ._options import LoadMemmapOptions
from ._plan import CLASS, KeyPath
from ._shapes import Shape, element_count, make_empty
from ._tensor import MemoryMappedTensor, Place, as_plain, map_file
from ._value_rows import decode_rows, list_row_files, list_separate, read_row_file, read_slots

T = TypeVar("T")

_CPU = torch.device("cpu")
_ATTEMPTS = 1000
#: So many missing members of a stack are looked for one by one, to name the first; more are an impossible number.
_MANY = 1000
# Exceptions that can be raised when a node is built from valid but inconsistent metadata.
_MISFITS = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(LoadMemmapOptions):
    """Options of a load, with those of internal callers."""

    prefix: str | Path = ""
    #: The class on which the load was called, and whether declared fields that the save lacks get their defaults.
    named: type | None = None
    complete: bool = True
    #: Factories of keepers: of values that are written to a node's directory, and of those that stay in memory.
    keeper: Callable[..., Any] | None = None
    copier: Callable[..., Any] | None = None
    #: Whether values by rows are read.
    reads_rows: bool = True


@dataclass(slots=True)
class Node:
    """Node of a save while it is loaded.

    Attributes:
        parts: path of its directory.
        key: key path.
        above: batch size of the parent.
        place: dict of the parent that receives the built node.
        name: its key in ``place``.
        level: its checked metadata.
        leaves: leaves by key; once the files were checked, only those with a file.
        entries: leaves and child nodes by key, each None until it is loaded.
        members: members by name, each None until it is loaded; None if the node has no members.
        values: Python values; None if the node has no values.
        parent: parent node.
        outer: batch size of the parent, if the node stores a separate batch size; else None.
    """

    parts: Parts
    key: tuple[str, ...]
    above: torch.Size
    place: dict[str, Any]
    name: str
    level: Level = field(init=False)
    leaves: dict[str, LeafEntry] = field(init=False)
    entries: dict[str, Any] = field(init=False)
    members: dict[str, Any] | None = None
    values: dict[str, Any] | None = None
    parent: Node | None = None

    def find_named_class(self, root: type | None) -> type | None:
        """Return the class declared for this node by its parent's class, or for the root the class of the call."""
        chain = [self]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        cls: type | None = user_class(root)
        owner: Any = None
        for above, below in zip(chain[:0:-1], chain[-2::-1], strict=True):
            kind = above.level.kind
            owner = (user_class(above.level.cls or kind.type) if kind is not None else None) or owner or cls
            if below.place is above.members:
                # Members of a stack have the class that is declared for the stack.
                cls = cls if kind is not None and not kind.with_class else None
            else:
                cls, owner = None if owner is None else owner._schema.find_class(below.name), None
        return cls

    outer: torch.Size | None = None


def load_directory(prefix: str, options: LoadOptions, subpath: NestedKey | None = None) -> Any:
    """Load the collection saved at ``prefix``, or only the node under ``subpath``."""

    def load(tree: DirectoryTree) -> tuple[Any, bool]:
        reader = Reader(tree, options)
        if tree.stat((), _file_names.META) is None and tree.stat((), _file_names.OLD_META) is not None:
            from .compat import _old_saves

            return as_named(options.named, _old_saves.load(reader), f"what is saved at {tree.path}"), True
        # Optional files may be missing because another process replaced the save; then the load is repeated.
        return reader.load(), not reader.guessed

    if subpath is None:
        return retry_on_replace(prefix, load)
    find = partial(find_directory, subpath=subpath, robust_key=options.is_robust)
    return retry_on_replace(prefix, load, find)


def retry_on_replace(
    path: str,
    work: Callable[[DirectoryTree], tuple[T, bool]],
    place: Callable[[DirectoryTree], Parts] | None = None,
) -> T:
    """Call ``work`` on an open directory; repeat after an error or uncertain result if the directory was replaced."""
    for _ in range(_ATTEMPTS):
        trees = [DirectoryTree.at_path(path)]
        try:
            if place is not None:
                trees.append(trees[0].open_below(place(trees[0])))
            result, right = work(trees[-1])
            if right or not any(tree.is_replaced() for tree in trees):
                return result
        except (OSError, ValueError):
            if not any(tree.is_replaced() for tree in trees):
                raise
        finally:
            for tree in trees:
                tree.close()
    raise FormatError(f"cannot load {path}: other processes keep replacing it")


def check_target(out: TensorCollection) -> None:
    """Raise TypeError unless ``out`` is a collection or None."""
    if not (out is None or isinstance(out, TensorCollection)):
        raise TypeError(f"out is a collection to load into, or None; got a {type(out).__name__}")


def drop_missing(out: TensorCollection, loaded: object) -> None:
    """Delete the entries of ``out`` that ``loaded`` does not have."""

    def drop(node: TensorCollection, wanted: object) -> Iterator[tuple[object, object]]:
        # A stack does not list entries that only some members have, so visit each member.
        for holder, part in node._zip_members(wanted):
            kept = set(part.keys())
            for key in list(holder.keys()):
                if key not in kept:
                    holder.del_(key)
                elif isinstance(child := holder._get_child(key), TensorCollection):
                    yield child, part._get_child(key)

    visit(drop, out, loaded)


class Reader:
    """Reader of a directory or archive, for one attempt to load it."""

    def __init__(self, tree: Any, options: LoadOptions) -> None:
        self.tree = tree  # This is a DirectoryTree or an ArchiveTree.
        self.options = options
        self.nodes: list[Node] = []
        self.linked: dict[tuple[int, int], torch.UntypedStorage] = {}
        self.guessed = False
        self.keeps: Any = None
        self.device = _CPU if options.device is None else torch.device(options.device)
        self._device_name = str(self.device)
        # In FakeTensorMode, torch.empty() returns a subclass; then no files are mapped.
        self.imagine = self.device.type == "meta" or type(torch.empty(0, device="cpu")) is not Tensor

    def load(self) -> Any:
        """Load the collection in the directory or archive."""
        self.read(sizes=self.imagine or not self.options.strict)
        if not self.imagine:
            self._check_mappings(sum(len(node.leaves) for node in self.nodes))
        leaf = self._make_meta_leaf if self.imagine else self.map_leaf
        for node in self.nodes:
            for key, entry in node.leaves.items():
                node.entries[key] = leaf(node, key, entry)
        if not self.imagine and (self.device != _CPU or self.options.progress is not False):
            self._move()
        self.keeps = None if self.imagine or self.device != _CPU else self._choose_keeper()
        # Build children before their parents.
        for node in reversed(self.nodes):
            try:
                node.place[node.name] = self.build(node)
            except (FormatError, MissingPluginError):
                if not self._skip_damaged(node.place, node.name):
                    raise
        return as_named(self.options.named, self.nodes[0].place[""], f"what is saved at {self.tree.path}")

    def read(self, *, sizes: bool = True) -> None:
        """Read all metadata; with ``sizes=True`` also check the file of every leaf, which mapping checks anyway."""

        def read_below(node: Node) -> Iterator[tuple[Node]]:
            try:
                self._read_one(node, sizes)
            except (FormatError, MissingPluginError):
                if not self._skip_damaged(node.place, node.name):
                    raise
                return
            self.nodes.append(node)
            if node.level.nodes or node.members:
                yield from zip(reversed(self._list_children(node)))

        visit(read_below, Node((), (), torch.Size(), {}, ""))

    def _skip_damaged(self, place: dict[str, object], name: str) -> bool:
        """Drop an unreadable node or leaf from its parent. Return False in strict mode and for the root."""
        if self.options.strict or name not in place:
            return False
        del place[name]
        return True

    def _list_children(self, node: Node) -> list[Node]:
        """Return the child nodes and members of a node that are still to be read."""
        level, below, there = node.level, [], partial(self.tree.stat, node.parts)
        for key, files in level.nodes.items():
            # Skip the check for a single possible name: reading that directory later detects if it is missing.
            path, file = (*node.key, key), files[0] if len(files) == 1 else next(filter(there, files), None)
            if file is not None:
                place = (*node.parts, file)
                below.append(Node(place, path, level.batch_size, node.entries, key, parent=node))
            elif not self._skip_damaged(node.entries, key):
                what = f"the directory of {show_path(path)} is missing: none of {list(files)} is there"
                raise FormatError(f"{self.tree.show(node.parts)}: {what}")
        if node.members is not None:
            for name in node.members:
                parts, path = (*node.parts, name), (*node.key, name)
                below.append(Node(parts, path, level.batch_size, node.members, name, parent=node))
        return below

    def _locate(self, node: Node, name: str = _file_names.META) -> Location:
        """Return the location of a file of a node, for error messages."""
        return Location(self.tree.show(node.parts, name), node.key)

    def _read_one(self, node: Node, sizes: bool) -> None:
        """Read the metadata of a node and the files next to it."""
        parts = node.parts
        try:
            content = self.tree.read(parts, _file_names.META, LIMIT)
        except FileNotFoundError:
            if not parts:
                raise
            what = "has no metadata"
            if self.tree.stat_path(parts) is None:
                what = f"is missing: the directory {parts[-1]!r} is not there"
            raise FormatError(f"{self._locate(node)} {what}") from None
        how = {"robust_key": self.options.is_robust, "strict": self.options.strict}
        level = read_cached_level(content, **how)
        if level is None:
            named = partial(node.find_named_class, self.options.named)
            level = read_level(content, self._locate(node), node.above, named=named, **how)
        node.level = level = self._as_named(node, level)
        node.leaves = level.leaves
        if level.general:
            try:
                self._general_values(node)
            except FormatError:
                if self.tree.read(parts, _file_names.META, LIMIT) == content:
                    raise
                # Another process has replaced the files of the values since their metadata was read.
                self._read_one(node, sizes)
                return
        elif not level.sized:
            self._sidecars(node)
        elif level.version == 0 and not level.nodes:
            # Release 0.3 did not list the child nodes in the metadata, so take the directories that hold nodes.
            self.guessed = True
            for name in list_subdirectories(self.tree, parts):
                level.nodes[name] = (name,)
                level.keys.append(name)
        node.entries = dict.fromkeys(level.keys)
        if level.members:
            node.members = dict.fromkeys(level.members)
        if sizes:
            self._find_leaves(node)

    def _as_named(self, node: Node, level: Level) -> Level:
        """Replace the class in the root's metadata by the class of the call if both have the same name."""
        named, kind = None if node.parent is not None else user_class(self.options.named), level.kind
        if named is None or kind is None or not kind.with_class or issubclass(kind.type, named):
            return level
        alike = kinds.of(named).with_class and named.__name__ == kind.type.__name__
        return replace(level, kind=kinds.of(named)) if alike else level

    def _sidecars(self, node: Node) -> None:
        """Read the files next to the metadata of a node without entries: its members and values."""
        level, tree = node.level, self.tree
        self.guessed = True
        listing = tree.entries(node.parts)
        if level.members is None:
            level.members = list_members(listing, self._locate(node))
        elif len(level.members) > len(listing) + _MANY:  # few bytes can announce many members
            raise self._locate(node).error(
                "_members", len(level.members), f"not many more than the {len(listing)} files and directories"
            )
        values = node.values = dict(level.values)
        if _file_names.VALUES in listing:
            self._apply_types(node, values, read_json(tree, node.parts, _file_names.VALUES))
        if _file_names.STACK_PICKLE in listing and values.get("data") == _file_names.STACK_PICKLE:
            values["data"] = self._unpickle(node, _file_names.STACK_PICKLE)
        if _file_names.PICKLE in listing:
            values.update(self._load_pickled(node, listing))

    def _apply_types(self, node: Node, values: dict[str, object], sidecar: Any) -> None:
        """Restore batch size, dim names and, for values that still equal the recorded values, types from ``%values.json``."""
        level, location = node.level, self._locate(node, _file_names.VALUES)
        typed = sidecar.get("values", {}) if isinstance(sidecar, dict) else None
        if not isinstance(typed, dict) or not all(isinstance(value, dict) for value in typed.values()):
            raise location.error("the content", sidecar, "an object of values")
        for name, value in typed.items():
            if name in values and values[name] == value.get("plain"):
                values[name] = join_value(value["plain"], value.get("types"), partial(str, location))
        if "batch_size" in sidecar:
            level.batch_size = check_shape(sidecar["batch_size"], location, "batch_size")
            node.outer, node.above = node.above, level.batch_size
            level.meta = {**level.meta, "batch_size": sidecar["batch_size"]}
        # The dim names belong to the parent's batch size, which an entry that is loaded alone does not have.
        if "names" in sidecar and (node.key or "batch_size" in sidecar):
            level.meta = {**level.meta, "_names": sidecar["names"]}

    def _general_values(self, node: Node) -> None:
        location = self._locate(node)
        values = node.values = {}
        pickled: dict[str, object] | None = None
        for name, value in node.level.values.items():
            if value.get("pickled"):
                if pickled is None:
                    pickled = self._unpickle(node, _file_names.PICKLE)
                if not isinstance(pickled, dict) or name not in pickled:
                    raise location.error(name, pickled, f"a value in {_file_names.PICKLE}")
                values[name] = pickled[name]
            elif "rows" in value:
                if self.options.reads_rows:
                    values[name] = self.read_rows(node, value["rows"])
            elif "plain" in value:
                values[name] = join_value(value["plain"], value.get("types"), partial(str, location))
            else:
                raise location.error(name, value, "a value")

    def read_rows(self, node: Node, number: int) -> list[object]:
        """Return the values in the files of slots and of the heap."""
        (slots_name, heap_name), level = list_row_files(number), node.level
        # The slots are read first: what they point to is in the heap by then.
        slots = read_slots(self.tree, node.parts, slots_name, level.batch_size.numel())
        where = self._locate(node, slots_name)
        values = decode_rows(slots, read_row_file(self.tree, node.parts, heap_name), str(where))
        if separate := list_separate(slots):
            joints = level.meta.get("joints")
            if not isinstance(joints, dict):
                raise where.error(
                    "a slot", hex(int(slots[separate.index(True)])), "one without the highest bit"
                )
            level.meta = {**level.meta, "joints": {**joints, "ones": [not item for item in separate]}}
        return values

    def _load_pickled(self, node: Node, listing: dict[str, bool]) -> dict[str, object]:
        """Return the values in ``other.pickle``; container types are looked up by name without unpickling."""
        if _file_names.JSON_TYPES in listing:
            note = read_json(self.tree, node.parts, _file_names.JSON_TYPES)
            digest = hashlib.sha256(self.tree.read(node.parts, _file_names.PICKLE, LIMIT)).hexdigest()
            known = isinstance(note, dict) and note.get("pickle_sha256") == digest
            types = note.get("types") if known else None
            if isinstance(types, dict):
                with suppress(FormatError):
                    return {key: join_value(name, CLASS) for key, name in types.items()}
        values = self._unpickle(node, _file_names.PICKLE)
        if not isinstance(values, dict):
            raise self._locate(node, _file_names.PICKLE).error("the content", values, "a dict of values")
        return values

    def _unpickle(self, node: Node, name: str) -> Any:
        where = self.tree.show(node.parts, name)
        if not self.options.allow_pickle:
            raise PickleRefusedError(
                f"{where} holds a pickled value of {show_path(node.key)}: unpickling runs whatever code it names; "
                "pass allow_pickle=True if you trust the save"
            )
        try:
            content = self.tree.read(node.parts, name, LIMIT)
            compare_check_line(content)
            return pickle.loads(content)
        except FileNotFoundError:
            raise FormatError(f"{where} is missing") from None
        except (pickle.UnpicklingError, EOFError, ImportError, *_MISFITS) as error:
            raise FormatError(f"{where} cannot be unpickled: {error}") from error

    def _find_leaves(self, node: Node) -> None:
        """Check the file of every leaf; unless in strict mode, drop leaves without a file."""
        node.leaves = {}
        for key, entry in node.level.leaves.items():
            try:
                node.leaves[key] = self.find_leaf(node, key, entry)
            except FormatError:
                if not self._skip_damaged(node.entries, key):
                    raise

    def find_leaf(self, node: Node, key: str, entry: LeafEntry) -> LeafEntry:
        """Check that the files of a leaf exist and have the right size; return its entry with the file name found."""
        if self.device.type == "meta":
            return entry
        for ending, dtype, shape in entry.parts():
            if nbytes := shape.numel() * dtype.itemsize:
                stem = self._check_file(node, (*node.key, key), entry, ending, nbytes)
                if entry.files != (stem,):
                    entry = replace(entry, files=(stem,))
        return entry

    def _check_file(
        self, node: Node, key: tuple[str, ...], entry: LeafEntry, ending: str, nbytes: int
    ) -> str:
        """Return the stem of a leaf's file; raise FormatError if it is missing or too short."""
        for stem in entry.files:
            result = self.tree.stat(node.parts, stem + ending)
            if result is not None:
                break
        else:
            raise FormatError(
                f"{self.tree.show(node.parts)}: the file of {show_path(key)} is missing: none of "
                f"{[stem + ending for stem in entry.files]} is there, {nbytes} bytes are expected"
            )
        if result.st_size < nbytes and not _fs.is_link(result):
            location = Location(self.tree.show(node.parts, stem + ending), key)
            raise location.error("the size", result.st_size, f"at least {nbytes} bytes")
        return stem

    def _move(self) -> None:
        """Copy the leaves to the device, in threads if the caller requested them."""
        options, moves = self.options, self.device != _CPU
        todo = [
            (node.entries, key, entry.nbytes) for node in self.nodes for key, entry in node.leaves.items()
        ]
        report = make_reporter(options.progress, sum(nbytes for _, _, nbytes in todo), "load")

        def move(item: tuple[dict[str, Tensor], str, int]) -> None:
            place, key, nbytes = item
            if moves:
                place[key] = as_plain(place[key]).to(self.device, non_blocking=options.non_blocking)
            report(nbytes)

        if options.num_threads > 0 and moves:
            with ThreadPoolExecutor(options.num_threads, "td-memmap") as pool:
                list(pool.map(move, todo))
        else:
            list(map(move, todo))

    def _make_meta_leaf(self, node: Node, key: str, entry: LeafEntry) -> Tensor:
        """Return a meta or fake tensor for a leaf, without reading its file."""
        device = self.device
        try:
            if entry.nested:
                raise RuntimeError("it knows no strided nested tensors without content")
            values = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            if entry.jagged is None:
                return values
            offsets = torch.empty(entry.jagged["components"] + 1, dtype=torch.int64, device=device)
            return JaggedParts(entry.jagged["ragged"], values, offsets).join()
        except (RuntimeError, AssertionError) as error:
            where, position = self.tree.show(node.parts, _file_names.META), show_path((*node.key, key))
            raise FormatError(
                f"{where}: torch cannot make {position} on {device} without its content: {error}"
            ) from error

    def map_leaf(self, node: Node, key: str, entry: LeafEntry) -> Tensor:
        """Map the files of a leaf to a tensor."""
        parts, name = node.parts, entry.files[0] + ".memmap"
        if entry.jagged is None and not entry.nested:
            try:
                return self.map_file(parts, name, entry.dtype, entry.shape, entry.nbytes)
            except FormatError:
                # Search the file under its other possible names, or raise an error with details.
                entry = self.find_leaf(node, key, entry)
                name = entry.files[0] + ".memmap"
                return self.map_file(parts, name, entry.dtype, entry.shape, entry.nbytes)
        entry, table = self.check_leaf(node, key, entry)
        if entry.jagged is not None:
            return self._map_jagged(node, entry)
        return self.map_file(parts, entry.files[0] + ".memmap", entry.dtype, table)

    def check_leaf(self, node: Node, key: str, entry: LeafEntry) -> tuple[LeafEntry, Shape]:
        """Check all files of a leaf; return its entry, and its shape or table of component shapes."""
        entry = self.find_leaf(node, key, entry)
        if not entry.nested:
            return entry, entry.shape
        table = self._read_shapes(node, key, entry)
        nbytes = element_count(table) * entry.dtype.itemsize
        if nbytes:
            self._check_file(node, (*node.key, key), entry, ".memmap", nbytes)
        return entry, table

    def _read_shapes(self, node: Node, key: str, entry: LeafEntry) -> Tensor:
        """Return the table of component shapes of a strided nested leaf."""
        count = element_count(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=torch.int64, device="cpu")
        name = entry.files[0] + ".shape.memmap"
        location, content = self._locate(node, name), self.tree.read(node.parts, name, LIMIT)
        if len(content) < count * 8:
            raise location.error("the size", len(content), f"at least {count * 8} bytes", key)
        table = torch.frombuffer(bytearray(content), dtype=torch.int64, count=count).view(entry.shape)
        inner = entry.inner
        for row in table.tolist():
            shape = check_shape(row, location, "the shape of a component", entry.dtype.itemsize, key)
            if shape[: len(inner)] != inner:
                wanted = f"a shape that starts with {list(inner)}, as the batch size says"
                raise location.error("the shape of a component", row, wanted, key)
        return table

    def _check_mappings(self, count: int) -> None:
        check_mappings(count, f"load {self.tree.path}")

    def map_file(
        self, parts: Parts, name: str, dtype: torch.dtype, shape: Shape, nbytes: int | None = None
    ) -> Tensor:
        """Map one file as a tensor."""
        mode, path = self.options.mode, self.tree.show(parts, name)
        if nbytes is None:
            nbytes = element_count(shape) * dtype.itemsize
        if not nbytes:
            data = make_empty(dtype, shape)
            return MemoryMappedTensor._on(data, Place(shape, path, None, 0, mode))
        try:
            (fd, status), shared = _fs.open_in_mode(mode, self.tree.open, parts, name)
        except FileNotFoundError:
            raise FormatError(f"{path} is missing") from None
        try:
            return map_file(fd, path, dtype, shape, mode, shared, status, nbytes, self.linked)
        finally:
            _fs.close(fd)

    def _map_jagged(self, node: Node, entry: LeafEntry) -> Tensor:
        assert entry.jagged is not None
        stem, ragged = entry.files[0], entry.jagged["ragged"]
        parts = [
            as_plain(self.map_file(node.parts, stem + ending, dtype, shape))
            for ending, dtype, shape in entry.parts()
        ]
        try:
            return JaggedParts.of_tensors(ragged, parts).check().join()
        except ValueError:
            size = entry.shape[ragged - 1] if 0 < ragged <= len(entry.shape) else -1
            what, wanted = ("offsets", "increasing") if len(parts) == 2 else ("lengths", "from the offsets")
            location = self._locate(node, f"{stem}.{what}.memmap")
            raise location.error(f"the {what}", parts[-1].tolist()[:10], f"{wanted}, within {size}") from None

    def build(self, node: Node) -> object:
        """Build a node from its metadata and its loaded children."""
        level, members = node.level, node.members or {}
        meta = self._correct_device(node)
        if level.sized:
            self._check_nested(node)
        values, complete = node.values or {}, self.options.complete
        record = Record(meta, node.entries, members, values, node.above, level.cls, complete)
        if len(members) < len(level.members or ()):
            # A stack that lacks a member has fewer rows than were saved, so it counts as damaged.
            raise self._locate(node).error(
                "the members", list(members)[:20], f"all {len(level.members or ())}"
            )
        try:
            if level.kind is None:
                from .compat import _old_saves

                return _old_saves.rebuild_view(meta, members)
            built = level.kind.node_of(record, "" if level.general else FORMAT)
            if (outer := level.outer) is not None:
                built = outer.kind.node_of(Record(outer.meta, members={outer.member: built}, cls=outer.cls))
            if self.keeps is not None and built._is_value:
                built._keeper = self.keeper(node)
            return built
        except MissingPluginError:
            raise
        except _MISFITS as error:
            what = f"{error} is missing" if type(error) is KeyError else error
            raise FormatError(f"{self._locate(node)} cannot be put together: {what}") from error

    def _correct_device(self, node: Node) -> dict[str, object]:
        """Return the header of a node with the device of its leaves, which its values get, too."""
        level, meta = node.level, dict(node.level.meta)
        if meta.get("device") not in (None, "None") or (level.sized and self.options.device is not None):
            meta["device"] = self._device_name
            for key in level.nodes:
                # A value is stored without a device, so set it here.
                below = node.entries.get(key)
                if below is not None and below.device is None:
                    below._set_device(self.device)
        return meta

    def _choose_keeper(self) -> Callable[..., Any] | None:
        """Return the factory of keepers: in-place writes to values reach the save if writes to leaves do."""
        leaves = (leaf for node in self.nodes for leaf in node.entries.values())
        shared = [leaf._place.shared for leaf in leaves if isinstance(leaf, MemoryMappedTensor)]
        reaches = self.options.mode != "r" and (not shared or any(shared))
        return self.options.keeper if reaches else self.options.copier

    def keeper(self, node: Node) -> Any:
        """Return the keeper of the values of a node, which has their directory."""
        above, tree = node.above if node.outer is None else node.outer, self.tree
        folder = _fs.identify_open(tree.fd(node.parts))
        parent = None if node.parent is None else node.parent.level
        rows = parent is not None and (parent.general or parent.meta.get(_file_names.MAY_HAVE_ROWS) is True)
        return self.keeps(
            tree.show(node.parts), above, bool(self.options.allow_pickle), folder=folder, rows=rows
        )

    def _check_nested(self, node: Node) -> None:
        size = node.level.batch_size
        for key in node.level.nodes:
            entry = node.entries.get(key)
            if entry is None or entry.batch_size[: len(size)] == size:
                continue
            if not self._skip_damaged(node.entries, key):
                wanted = f"one that starts with {list(size)}"
                raise self._locate(node).error("the batch size", list(entry.batch_size), wanted, key)


def check_metadata(tree: FileTree) -> tuple[int, list[tuple[Parts, LeafEntry, FormatError]]]:
    """Check a save by its metadata alone. Return the number of files, and the damaged leaves with their errors."""
    reader = Reader(tree, LoadOptions())
    result: list[tuple[Parts, LeafEntry, FormatError]] = []
    counts: list[int] = []

    def check(parts: Parts, path: KeyPath, above: torch.Size) -> Iterator[tuple[Parts, KeyPath, torch.Size]]:
        _, level, _, below = read_node(tree, parts)
        size = level.batch_size if level.sized else above
        if size[: len(above)] != above:
            location = Location(tree.show(parts, _file_names.META), path)
            raise location.error("the batch size", list(size), f"one that starts with {list(above)}")
        for key, place in below.items():
            # The batch size of members is checked when the stack is built.
            inner = size if level.sized or key == _file_names.INNER else torch.Size()
            yield place, (*path, key), inner
        counts.append(1 + len(level.leaves))
        node = Node(parts, path, size, {}, "")
        for value in level.values.values() if level.general else ():
            if "rows" in value:
                node.level = level
                counts.append(2)
                entry = LeafEntry(size, torch.int64, (f"{_file_names.SLOTS}{value['rows']}",))
                try:
                    reader.read_rows(node, value["rows"])
                except FormatError as error:
                    result.append((parts, entry, error))
        for key, entry in level.leaves.items():
            try:
                reader.check_leaf(node, key, entry)
            except FormatError as error:
                result.append((parts, entry, error))

    visit(check, (), (), torch.Size())
    return sum(counts), result
