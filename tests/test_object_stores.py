"""All formats in object stores: the suites of formats and of opened collections, turns of requests, and killed savers."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

import td_core
from td_core import FormatError, TensorDict
from td_core.spi import Serializer
from td_core.testing import SerializerTests, assert_same

MemoryStore: Any = pytest.importorskip("td_store.testing").MemoryStore
OpenTests: Any = pytest.importorskip("td_store.testing").OpenTests
SourceTests: Any = pytest.importorskip("td_store.testing").SourceTests
MemorySource: Any = pytest.importorskip("td_store.testing").MemorySource

pytestmark = pytest.mark.once


class Case(NamedTuple):
    """A format in a store: its package, its name, the end of the location, options of a save, and turns of requests.

    ``opening`` are the turns of an open whose caller names the format, of a save that is larger than what is read first.
    """

    package: str
    format: str
    suffix: str
    options: dict[str, Any] = {}  # noqa: RUF012
    opening: int = 1


CASES = {
    "safetensors": Case("td_safetensors", "safetensors", ".safetensors"),
    "shards": Case("td_safetensors", "safetensors", "", {"max_shard_size": 1 << 20, "overwrite": True}, 5),
    "tree": Case("td_memmap", "memmap", "", {"overwrite": True}, 2),
    "archive": Case("td_memmap", "memmap", ".tdz", {}, 2),
    "hdf5": Case("td_hdf5", "hdf5", ".h5", {}, 2),
    "hdf5 chunks": Case("td_hdf5", "hdf5", ".h5", {"chunks": 100, "compression": "gzip"}, 2),
    "zarr": Case("td_zarr", "zarr", ".zarr"),
    "zarr chunks": Case("td_zarr", "zarr", ".zarr", {"chunks": 100}),
}
TREES = ("shards", "tree", "zarr", "zarr chunks")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Return each case whose package is installed."""
    return get_case(request.param)


def get_case(name: str) -> Case:
    """Return a case, or skip the test."""
    pytest.importorskip(CASES[name].package)
    return CASES[name]


def make_store(case: Case, cls: Any = MemoryStore) -> Any:
    """Return an empty store."""
    return cls({}, f"s3://bucket/data{case.suffix}")


def save(case: Case, data: Any, store: Any) -> None:
    """Save in the format of a case, and forget the requests."""
    td_core.save(data, store, format=case.format, **case.options)
    store.log.clear()


def count_turns(store: Any) -> int:
    """Return how many requests wait for others, and forget them; zarr reads the two names of a root at the same time."""
    names = [names for _, names in store.log]
    store.log.clear()
    return len(names) - ((".zgroup",) in names)


def make_large() -> TensorDict:
    """Return a collection of 5 MB in several nodes."""
    big = torch.arange(40_000)
    leaves = {"a": big.view(2500, 16), "n": {"b": -big.view(2500, 16), "m": {"c": big[:2500].float()}}}
    return TensorDict({**leaves, "z": {"d": big.view(2500, 4, 4) * 7}}, [2500])


def test_open_and_rows_take_few_turns(case: Case) -> None:
    data, store = make_large(), make_store(case)
    save(case, data, store)
    opened = td_core.open(store, format=case.format)
    assert count_turns(store) <= case.opening
    for rows in ([2499, 3, 1000], torch.arange(2500) % 900 == 7, torch.tensor([[5], [1200]]), [8]):
        found = opened[rows]
        assert count_turns(store) <= 1
        assert (found == data[rows]).all()
    assert (opened[3:2000:7].clone() == data[3:2000:7]).all()
    assert count_turns(store) <= 1
    assert (td_core.load(store) == data).all()


def test_pickle_of_opened_collection_reads_store(case: Case) -> None:
    data, store = make_large(), make_store(case)
    save(case, data, store)
    opened = pickle.loads(pickle.dumps(td_core.open(store)))
    assert (opened[[2000, 4]] == data[[2000, 4]]).all()


@pytest.mark.parametrize("target", CASES)
def test_convert_between_stores(case: Case, target: str) -> None:
    data, source, copy = make_large()[:10], make_store(case), make_store(get_case(target))
    data["z"].names = ["rows"]
    save(case, data, source)
    save(CASES[target], td_core.open(source), copy)
    found = td_core.load(copy)
    assert (found == data).all()
    assert found["z"].names == ["rows"]
    assert td_core.verify(copy).ok
    assert td_core.inspect(copy).nbytes == data.bytes()


REFUSED: dict[str, Callable[[Any, Case], object]] = {
    "open r+": lambda store, case: td_core.open(store, mode="r+", format=case.format),
    "append": lambda store, case: td_core.append(make_large(), store, format=case.format),
    "create": lambda store, case: td_core.create(make_large(), store, format=case.format),
}


@pytest.mark.parametrize("name", REFUSED)
def test_write_in_part_is_refused_before_any_request(name: str, case: Case) -> None:
    if case.format == "zarr":
        pytest.skip("a group is written in place")
    store = make_store(case)
    with pytest.raises(td_core.UnsupportedOperationError) as caught:
        REFUSED[name](store, case)
    assert store.log == []
    assert (
        "save()" in str(caught.value) or "save again" in str(caught.value) or "load() it" in str(caught.value)
    )


def test_replaced_save_is_noticed(case: Case) -> None:
    data, store = make_large(), make_store(case)
    save(case, data, store)
    opened = td_core.open(store)
    save(case, data + 1, store)
    try:
        found = opened["a"].clone()
    except (FormatError, FileNotFoundError):
        return
    assert case is CASES["hdf5 chunks"]  # the object file has read them already
    assert torch.equal(found, data["a"])


class Killed(BaseException):
    """The end of the process."""


class Mortal(MemoryStore):  # type: ignore[misc]
    """A store whose process dies at a request, before or after the store has done it."""

    left, is_done_first = 10**9, False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("peek", "peek_ends", "stat", "read", "write", "list", "delete"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == -1 and self.is_done_first:
                result = found(*args, **options)
                list(result) if name == "list" else None
            if self.left < 0:
                raise Killed
            return found(*args, **options)

        return call


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("is_done_first", [False, True])
def test_killed_saver_leaves_old_not_ended_or_new(name: str, is_done_first: bool, monkeypatch: Any) -> None:
    case = get_case(name)
    if case.options.get("max_shard_size"):
        case = case._replace(options={**case.options, "max_shard_size": 60})
    for module, attribute in (
        ("td_memmap._object_saves", "_TOGETHER"),
        ("td_zarr._remote_objects", "_TOGETHER"),
    ):
        if module.startswith(case.package):
            monkeypatch.setattr(import_module(module), attribute, 1)
    old = TensorDict({"a": torch.arange(8.0), "n": {"b": torch.ones(8)}}, [8])
    new = TensorDict({"a": torch.arange(8.0) + 1, "n": {"c": torch.zeros(8)}, "d": torch.ones(8)}, [8])
    seen = set()
    for left in range(200):
        store = make_store(case, Mortal)
        save(case, old, store)
        store.left, store.is_done_first = left, is_done_first
        try:
            save(case, new, store)
        except Killed:
            store.left = 10**9
            seen.add(find_state(store, case, old, new))
            save(case, new, store)
            assert_same(td_core.load(store), td_core.load(reload(case, new)))
        else:
            break
    assert left > 5
    assert {"old", "new"} >= seen - {"not ended"}
    assert "old" in seen


def reload(case: Case, data: Any) -> Any:
    """Return a new store with a save."""
    store = make_store(case)
    save(case, data, store)
    return store


def find_state(store: Any, case: Case, old: Any, new: Any) -> str:
    """Return which save a reader finds, or that it has not ended; any mix is an error."""
    try:
        found = td_core.load(store, format=case.format)
    except (FormatError, FileNotFoundError) as error:
        assert "has not ended" in str(error), error
        return "not ended"
    expected = new if "d" in found.keys() else old
    assert (found == expected).all()
    return "new" if expected is new else "old"


class InStore(SerializerTests):
    """The suite of formats, in a store for each name."""

    case: ClassVar[Case]
    modes = ("r", "c")
    refused = ("create", "append")

    @pytest.fixture(autouse=True)
    def require(self) -> None:
        """Skip the tests of a package that is not installed."""
        pytest.importorskip(self.case.package)

    def serializer(self) -> Serializer:
        found: Serializer
        (found,) = import_module(f"{self.case.package}.plugin").td_serializers()
        return found

    def location(self, folder: Path, name: str = "x") -> Any:
        stores = self.__dict__.setdefault("stores", {})
        return stores.setdefault((folder, name), MemoryStore({}, f"s3://bucket/{name}{self.case.suffix}"))

    def damage(self, path: Any) -> Iterator[str]:
        """Truncate and delete each object."""
        for name, (content, stamp) in list(path._objects.items()):
            if self.is_optional(name):
                continue
            for size in sorted({0, 1, len(content) // 2, len(content) - 1}):
                path._objects[name] = content[:size], stamp
                yield f"{name} is truncated to {size} of {len(content)} bytes"
            del path._objects[name]
            if name:
                yield f"{name} is deleted"
            path._objects[name] = content, stamp

    def is_optional(self, name: str) -> bool:
        """Return True for an object that td does not need."""
        return False


class TestSafetensorsInStore(InStore):
    case = CASES["safetensors"]


class TestArchiveInStore(InStore):
    case = CASES["archive"]


class TestTreeInStore(InStore):
    case = CASES["tree"]
    replacing: ClassVar = {"overwrite": True}

    def is_optional(self, name: str) -> bool:
        return name == "%manifest.json"


class TestHdf5InStore(InStore):
    case = CASES["hdf5"]


class TestZarrInStore(InStore):
    case = CASES["zarr"]
    modes = ("r", "r+", "c")
    refused = ()

    def is_optional(self, name: str) -> bool:
        return name.endswith("/zarr.json")  # the root has copies


class _Opened(OpenTests):  # type: ignore[misc]
    """The suite of opened collections, in a store."""

    case: ClassVar[Case]
    mode: ClassVar[str] = "c"

    def open(self, data: TensorDict, folder: Path) -> Any:
        pytest.importorskip(self.case.package)
        store = make_store(self.case)
        save(self.case, data, store)
        return td_core.open(store, mode=self.mode)


class TestOpenSafetensorsInStore(_Opened):
    case = CASES["safetensors"]


class TestOpenTreeInStore(_Opened):
    case = CASES["tree"]


class TestOpenArchiveInStore(_Opened):
    case = CASES["archive"]


class TestOpenHdf5InStore(_Opened):
    case = CASES["hdf5 chunks"]._replace(options={"chunks": 2})


class TestOpenZarrInStore(_Opened):
    case = CASES["zarr chunks"]._replace(options={"chunks": 2})
    mode = "r+"


class _Sources(SourceTests):  # type: ignore[misc]
    """The suite of sources, of leaves in a store; writes stay in memory."""

    case: ClassVar[Case]
    is_shared = False

    def make(self, array: torch.Tensor, folder: Path) -> Any:
        pytest.importorskip(self.case.package)
        store = make_store(self.case)
        save(self.case, TensorDict({"a": array}), store)
        leaf: Any = td_core.open(store, mode="c")["a"]
        return leaf.source if array.numel() else MemorySource(array)  # nothing of it is in the store


class TestSafetensorsSourceInStore(_Sources):
    case = CASES["safetensors"]


class TestHdf5SourceInStore(_Sources):
    case = CASES["hdf5 chunks"]._replace(options={"chunks": 2})


class TestZarrSourceInStore(_Sources):
    case = CASES["zarr chunks"]._replace(options={"chunks": 2})


def test_interrupted_delete_is_a_warning() -> None:
    case = get_case("tree")

    class Kept(MemoryStore):  # type: ignore[misc]
        def delete(self, names: Any) -> None:
            raise PermissionError("deletes are not allowed")

    store = make_store(case, Kept)
    save(case, make_large(), store)
    with pytest.warns(UserWarning, match="the save is complete, but 2 objects of the old one are left"):
        save(case, make_large().exclude("z"), store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(td_core.load(store).keys()) == {"a", "n"}
