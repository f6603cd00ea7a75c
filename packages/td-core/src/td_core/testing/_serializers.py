"""Conformance suite for serializers, the formats of whole collections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from .._encode.decode import decode
from .._encode.node_kinds import NodeKind, encode
from .._encode.records import Record
from .._encode.value_types import LeafSerializer
from .._formats.locations import MODES, read_head
from .._formats.object_locations import find_objects
from .._formats.saving import append, create, inspect, verify
from .._formats.saving import open as open_save
from .._formats.serializers import SERIALIZERS, Serializer, list_options
from .._kinds.checkpoint import load, save
from .._kinds.tensordict import TensorDict
from .._methods.collection import TensorDictBase
from .._tree.node import Child, Core
from ..errors import CodecError, FormatError, TensorDictError
from ..plugins.hookspecs import hookimpl
from ..plugins.manager import installed
from ..typing import NO_DEFAULT, Names, NoDefault
from ._collection_samples import assert_same, make_samples, make_value_samples
from ._killed_processes import count_calls, kill_at_call, kill_at_size, run_in_child

__all__ = ["SerializerTests"]


class _Holder(TensorDictBase):
    """A kind of node with an additional Python value."""

    def __init__(
        self,
        entries: Mapping[str, Child],
        value: object,
        batch_size: Sequence[int],
        device: torch.device | None = None,
        names: Names | None = None,
    ) -> None:
        self._entries, self.value = dict(entries), value
        self._size, self._label, self._names = torch.Size(batch_size), device, names

    @property
    def batch_size(self) -> torch.Size:
        return self._size

    @property
    def device(self) -> torch.device | None:
        return self._label

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self._size = batch_size

    def _set_device(self, device: torch.device | None) -> None:
        self._label = device

    def _children(self) -> dict[str, Child]:
        return self._entries

    def _set_child(self, key: str, value: Child) -> None:
        self._entries[key] = value

    def _del_child(self, key: str) -> None:
        del self._entries[key]

    def _with_children(
        self,
        children: Mapping[str, Child],
        *,
        batch_size: torch.Size | None = None,
        device: torch.device | NoDefault | None = NO_DEFAULT,
        names: Names | NoDefault | None = NO_DEFAULT,
    ) -> _Holder:
        return type(self)(
            children,
            self.value,
            self._size if batch_size is None else batch_size,
            self._label if device is NO_DEFAULT else device,
            self._names if names is NO_DEFAULT else names,
        )


class _Version(tuple[int, ...]):
    """A type that is storable only with the serializer of a plugin."""

    def __repr__(self) -> str:
        return ".".join(map(str, self))


class _Plugin:
    @hookimpl
    def td_node_kinds(self) -> Iterable[NodeKind]:
        def flatten(node: _Holder) -> Record:
            return Record(
                {"batch_size": list(node.batch_size)}, node._children(), values={"value": node.value}
            )

        def unflatten(record: Record) -> _Holder:
            return _Holder(record.entries, record.values["value"], record.meta["batch_size"])

        return [NodeKind("td_core.testing.Holder", _Holder, flatten, unflatten)]

    @hookimpl
    def td_serializers(self) -> Iterable[Serializer | LeafSerializer]:
        return [LeafSerializer("td_core.testing.Version", _Version, dump=list, load=_Version)]


class SerializerTests:
    """Conformance suite of a file format. A subclass defines :meth:`serializer`.

    The format must be registered while the tests run, by an installed package or by :func:`installed` in a fixture. Tests of
    operations and options that the format does not have are skipped.

    The suite also tests the format in object stores, if a subclass returns one from :meth:`location`.

    Attributes:
        suffix: suffix of file names of this format.
        most_kills: number of file-system calls of a save at which the suite kills the process, spread over all of them.
        modes: modes in which a save at the location can be opened.
        refused: operations that the format refuses at the location.
        replacing: options of a save over another one.

    >>> SerializerTests().collections()["flat"]["a"]
    tensor([0., 1., 2.])
    """

    suffix: ClassVar[str] = ""
    most_kills: ClassVar[int] = 40
    modes: ClassVar[tuple[str, ...]] = MODES
    refused: ClassVar[tuple[str, ...]] = ()
    replacing: ClassVar[Mapping[str, object]] = {}

    def serializer(self) -> Serializer:
        """Return the serializer under test."""
        raise NotImplementedError(f"{type(self).__name__} must define serializer()")

    def location(self, folder: Path, name: str = "x") -> Any:
        """Return where a save of a name is, for a test with a folder of its own."""
        return folder / (name + self.suffix)

    def collections(self) -> dict[str, Any]:
        """Return the collections to save and load, by name. Override it to add other kinds."""
        return {**make_samples(), **make_value_samples()}

    def check(self, result: object, expected: object) -> None:
        """Assert that two collections are equal: kinds, keys in order, leaves, batch sizes, names, values."""
        assert_same(result, expected)

    def damage(self, path: Any) -> Iterator[str]:
        """Damage the save at ``path`` in one way after the other, and yield a description of each.

        After each of them, loading must raise FormatError, or FileNotFoundError for a missing file. The default truncates every
        file of the save, and deletes each file of a directory. Override it if some files are optional.
        """
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            content = file.read_bytes()
            for size in sorted({0, 1, len(content) // 2, len(content) - 1}):
                file.write_bytes(content[:size])
                yield f"{file.name} is truncated to {size} of {len(content)} bytes"
            if file != path:
                file.unlink()
                yield f"{file.name} is deleted"
            file.write_bytes(content)

    def old_files(self) -> dict[Path, TensorDict]:
        """Return the files of earlier versions that must load, with the expected collections. The default has none."""
        return {}

    def _save(
        self, folder: Path, data: Core | Mapping[Any, object], name: str = "x", **options: object
    ) -> Any:
        path = self.location(folder, name)
        save(data, path, format=self.serializer().name, **{**self.replacing, **options})
        return path

    def _load(self, path: Any, **options: Any) -> Any:
        return load(path, format=self.serializer().name, **options)

    def _require(self, operation: str, option: str | None = None) -> None:
        """Skip the test if the format lacks an operation, or an option of it."""
        serializer = self.serializer()
        if operation in self.refused:
            pytest.skip(f"the format refuses {operation}() at this location")
        if getattr(type(serializer), operation) is getattr(Serializer, operation):
            pytest.skip(f"the format does not implement {operation}()")
        if option is not None and option not in (list_options(serializer, operation) or ()):
            pytest.skip(f"{operation}() of the format has no option {option!r}")

    def _require_files(self, folder: Path) -> None:
        """Skip the test if saves are not in the file system."""
        if not isinstance(self.location(folder), Path):
            pytest.skip("the save is not in the file system")

    def test_the_format_is_registered(self) -> None:
        """The format is registered, so that ``save(format=...)`` selects it."""
        serializer = self.serializer()
        assert serializer.name in SERIALIZERS
        assert type(SERIALIZERS.get(serializer.name)) is type(serializer)

    def test_round_trip(self, tmp_path: Path) -> None:
        """Loading returns an equal collection, and saving does not change the collection."""
        for number, collection in enumerate(self.collections().values()):
            before = decode(encode(collection))
            path = self._save(tmp_path, collection, str(number))
            self.check(collection, before)
            self.check(self._load(path), before)

    def test_kinds_and_values_that_it_has_never_seen(self, tmp_path: Path) -> None:
        """Kinds and values of plugins keep their types; saving a value without a serializer raises CodecError."""
        holder = _Holder({"a": torch.ones(2)}, None, [2])
        with installed(_Plugin(), id="td_core.testing"):
            for i, value in enumerate(["text", None, (1, [2.5]), {"k": b"\x00"}, [_Version((1, 2))]]):
                holder.value = value
                path = self._save(tmp_path, TensorDict({"x": holder}, [2]), str(i))
                result = self._load(path).get("x")
                assert type(result) is _Holder
                assert (result.value, repr(result.value)) == (value, repr(value))
            holder.value = object()
            with pytest.raises(CodecError, match="no serializer is registered for its type"):
                self._save(tmp_path, TensorDict({"x": holder}, [2]))

    def test_checkpoint_comes_back(self, tmp_path: Path) -> None:
        """A mapping is loaded as it was, with its values, and with the state dicts of its objects; a pickle is refused."""
        if not self.serializer().stores_kinds:
            pytest.skip("the format does not store all kinds")
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        rest = {"step": 3, 1: (None, True, 0.5), "td": TensorDict({"a": torch.ones(2)}, [2])}
        path = self._save(tmp_path, {"model": model, "optimizer": optimizer, **rest})
        found = self._load(path)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        assert_same(found.pop("td"), rest.pop("td"))
        torch.testing.assert_close(found, {**states, **rest}, rtol=0, atol=0)
        other = torch.nn.Linear(2, 2)
        assert self._load(path, into={"model": other}).keys() == {"optimizer", "td", *rest}
        assert torch.equal(other.weight, model.weight)
        with pytest.raises(CodecError, match=r"cannot save \['a'\]\[0\]: only a pickle could hold"):
            self._save(tmp_path, {"a": [object()]}, "refused")

    def test_a_save_is_recognised(self, tmp_path: Path) -> None:
        """``detect`` recognises a save, so that ``load`` needs no argument ``format``."""
        collection = self.collections()["flat"]
        path = self._save(tmp_path, collection)
        place = find_objects(path)
        assert self.serializer().detect(place or path, read_head(path) if place is None else place.head)
        self.check(load(path), collection)
        self.check(type(collection).load(path), collection)

    def test_nothing_else_is_recognised(self, tmp_path: Path) -> None:
        """``detect`` returns False for other files and directories."""
        serializer = self.serializer()
        for name, content in [("empty", b""), ("text", b"hello"), ("binary", bytes(range(256)))]:
            (tmp_path / name).write_bytes(content)
            assert not serializer.detect(tmp_path / name, content), name
        (tmp_path / "folder").mkdir()
        assert not serializer.detect(tmp_path / "folder", b"")

    def test_saving_again_replaces(self, tmp_path: Path) -> None:
        """Saving to an existing path replaces the old save completely."""
        collections = self.collections()
        for name in ("nested", "flat"):
            path = self._save(tmp_path, collections[name])
        self.check(load(path), collections["flat"])

    def test_loading_in_place(self, tmp_path: Path) -> None:
        """``load_`` writes into the existing leaves."""
        collection = self.collections()["flat"]
        path = self._save(tmp_path, collection)
        target = collection.clone().zero_()
        leaf = target.get("a")
        assert target.load_(path) is target
        assert target.get("a") is leaf
        self.check(target, collection)

    def test_an_unknown_option_is_refused(self, tmp_path: Path) -> None:
        """An unknown option raises TypeError that names the format, and writes no file."""
        serializer = self.serializer()
        path = self.location(tmp_path)
        with pytest.raises(TypeError, match=serializer.name):
            self._save(tmp_path, self.collections()["flat"], no_such_option=1)
        assert [*tmp_path.iterdir()] == []
        self._save(tmp_path, self.collections()["flat"])
        with pytest.raises(TypeError, match=serializer.name):
            self._load(path, no_such_option=1)

    def test_missing_path_is_an_error(self, tmp_path: Path) -> None:
        """Loading a path where nothing is raises FileNotFoundError."""
        for load_path in (load, self._load):
            with pytest.raises(FileNotFoundError):
                load_path(self.location(tmp_path, "missing"))

    def test_a_damaged_save_is_an_error(self, tmp_path: Path) -> None:
        """Loading a damaged save raises FormatError, or FileNotFoundError for a missing file, and never returns wrong data."""
        path = self._save(tmp_path, self.collections()["nested"])
        for damage in self.damage(path):
            try:
                self._load(path)
            except (FormatError, FileNotFoundError):
                continue
            pytest.fail(f"{damage}: DID NOT RAISE FormatError")
        self.check(self._load(path), self.collections()["nested"])

    def test_flipped_bits_raise_only_documented_errors(self, tmp_path: Path) -> None:
        """Loading a save with a flipped bit returns a collection, or raises an error of td-core or FileNotFoundError."""
        self._require_files(tmp_path)
        path = self._save(tmp_path, self.collections()["nested"])
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            content = file.read_bytes()
            for position in range(0, len(content), max(1, len(content) // 50)):
                damaged = bytearray(content)
                damaged[position] ^= 1 << (position % 8)
                file.write_bytes(damaged)
                with contextlib.suppress(TensorDictError, FileNotFoundError):  # a bit of the name of a file
                    self._load(path)
            file.write_bytes(content)

    def test_killed_save_leaves_old_or_new(self, tmp_path: Path) -> None:
        """A save that is killed, at a file-system call or in a write, leaves old or new content; the next save cleans up."""
        self._require_files(tmp_path)
        old, new = self.collections()["flat"], self.collections()["nested"]

        def save_new() -> None:
            self._save(tmp_path, new)

        def check_killed(kill: Callable[[Callable[[], object], int], None], at: int) -> None:
            self._save(tmp_path, old)
            kill(save_new, at)
            found = self._load(path)
            self.check(found, old if list(found.keys()) == list(old.keys()) else new)

        path = self._save(tmp_path, new)
        clean = sorted(item.name for item in tmp_path.iterdir())
        largest = max(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
        for size in sorted({0, largest // 4, largest // 2, largest - 1}):
            check_killed(kill_at_size, size)
        self._save(tmp_path, old)
        count = count_calls(save_new)
        for number in range(0, count, max(1, count // self.most_kills)):
            check_killed(kill_at_call, number)
        self._save(tmp_path, new)
        assert sorted(item.name for item in tmp_path.iterdir()) == clean

    def test_load_during_saves_returns_old_or_new(self, tmp_path: Path) -> None:
        """A process that loads while another one saves sees one of the two saves."""
        self._require_files(tmp_path)
        old, new = self.collections()["flat"], self.collections()["nested"]
        path = self._save(tmp_path, old)

        def save_often() -> None:
            for _ in range(10):
                self._save(tmp_path, new)
                self._save(tmp_path, old)

        with run_in_child(save_often) as is_running:
            while is_running():
                found = self._load(path)
                self.check(found, old if list(found.keys()) == list(old.keys()) else new)

    def test_load_to_device_meta_reads_shapes(self, tmp_path: Path) -> None:
        """``device="meta"`` returns the structure, shapes and dtypes."""
        self._require("load", "device")
        collection = self.collections()["nested"]
        loaded = self._load(self._save(tmp_path, collection), device="meta")
        expected = {key: (leaf.shape, leaf.dtype) for key, leaf in collection.items(True, True)}
        assert {key: (leaf.shape, leaf.dtype) for key, leaf in loaded.items(True, True)} == expected
        assert all(leaf.is_meta for leaf in loaded.values(True, True))

    def test_load_keys_reads_only_those(self, tmp_path: Path) -> None:
        """``keys=`` reads the named entries; a key that is not there raises KeyError."""
        self._require("load", "keys")
        self._check_keys(lambda path, keys: self._load(path, keys=keys), tmp_path)

    def _check_keys(self, load_keys: Callable[[Any, object], object], folder: Path) -> None:
        collection = self.collections()["nested"]
        path = self._save(folder, collection)
        for keys in (["a"], [("a", "d")], [("a", "b")], [("a", "b", "c"), ("a", "d")]):
            self.check(load_keys(path, keys), collection.select(*keys))
        with pytest.raises(KeyError):
            load_keys(path, ["missing"])

    def test_load_rows_reads_only_those(self, tmp_path: Path) -> None:
        """``rows=`` indexes the first batch dim."""
        self._require("load", "rows")
        collection = TensorDict(
            {"a": torch.arange(5.0), "n": {"b": torch.arange(10).view(5, 2)}}, batch_size=[5]
        )
        path = self._save(tmp_path, collection)
        rows: list[object] = [0, -1, slice(1, 4), slice(None, None, 2), slice(5, 5), [2], [1, 3], [4, 0, 0]]
        for index in rows:
            self.check(self._load(path, rows=index), collection[index])
        with pytest.raises(IndexError):
            self._load(path, rows=5)

    def test_load_old_files_returns_their_content(self) -> None:
        """Files of earlier versions load."""
        for path, expected in self.old_files().items():
            self.check(self._load(path), expected)

    def test_open_returns_saved_collection(self, tmp_path: Path) -> None:
        """``open`` returns an equal collection in every mode, and ``keys`` selects."""
        self._require("open")
        collection = self.collections()["nested"]
        path = self._save(tmp_path, collection)
        for mode in self.modes:
            self.check(self._open(path, mode=mode), collection)
        if "keys" in (list_options(self.serializer(), "open") or ()):
            self._check_keys(lambda path, keys: self._open(path, keys=keys), tmp_path)

    def _open(self, path: Any, **options: Any) -> Any:
        return open_save(path, format=self.serializer().name, **options)

    def test_open_mode_decides_where_writes_go(self, tmp_path: Path) -> None:
        """Writes reach the save with mode ``"r+"`` alone; with ``"c"`` they succeed, with ``"r"`` they may raise."""
        self._require("open")
        collection = self.collections()["flat"]
        for mode in self.modes:
            path = self._save(tmp_path, collection)
            opened = self._open(path, mode=mode)
            try:
                opened["a"][0] = 7.0
            except (TensorDictError, RuntimeError):
                assert mode == "r"
            else:
                assert opened["a"][0] == 7.0
            del opened
            assert self._load(path)["a"][0] == (7.0 if mode == "r+" else 0.0), mode

    def test_create_returns_zeros_to_fill(self, tmp_path: Path) -> None:
        """``create`` writes zeros of the shapes of a meta collection, and refuses a path that is taken."""
        self._require("create")
        collection = self.collections()["nested"]
        path = self.location(tmp_path)
        created = create(collection.to("meta"), path, format=self.serializer().name)
        for key, leaf in collection.items(True, True):
            assert torch.equal(created.get(key), torch.zeros_like(leaf))
        created.get(("a", "d"))[1] = 5.0
        del created
        assert self._load(path).get(("a", "d")).tolist() == [0.0, 5.0]
        with pytest.raises(FileExistsError):
            create(collection, path, format=self.serializer().name)

    def test_append_adds_rows(self, tmp_path: Path) -> None:
        """``append`` adds rows; rows of another structure are refused and change nothing."""
        self._require("append")
        collection = self.collections()["flat"]
        path = self._save(tmp_path, collection)
        append(collection[:2], path, format=self.serializer().name)
        expected = torch.cat([collection, collection[:2]])
        self.check(self._load(path), expected)
        for rows in (collection.select("a"), collection.apply(lambda leaf: leaf.to(torch.int8))):
            with pytest.raises(TensorDictError):
                append(rows, path, format=self.serializer().name)
        self.check(self._load(path), expected)

    def test_inspect_lists_leaves(self, tmp_path: Path) -> None:
        """``inspect`` returns key path, shape, dtype and size of every leaf."""
        self._require("inspect")
        collection = self.collections()["nested"]
        tree = inspect(self._save(tmp_path, collection), format=self.serializer().name)
        leaves = {path: node for path, node in tree.walk() if node.kind == "leaf"}
        expected = dict(collection.items(True, True))
        assert set(leaves) == set(expected)
        for key, leaf in expected.items():
            node = leaves[key]
            assert (node.shape, node.dtype, node.nbytes) == (list(leaf.shape), str(leaf.dtype), leaf.nbytes)
            assert str(node) in str(tree)

    def test_verify_reports_damage(self, tmp_path: Path) -> None:
        """``verify`` reports no problem of an intact save, and a problem, or FormatError, for each damage."""
        self._require("verify")
        path = self._save(tmp_path, self.collections()["nested"])
        assert verify(path, format=self.serializer().name).ok
        for damage in self.damage(path):
            with contextlib.suppress(FormatError, FileNotFoundError):
                assert not verify(path, format=self.serializer().name).ok, damage
            with pytest.raises((TensorDictError, FileNotFoundError)):
                load(path, format=self.serializer().name, verify=True)
        assert verify(path, format=self.serializer().name).ok
