"""Saves in object stores: trees and archives, how many turns of requests they take, and what interrupted saves leave."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

import td_core
from td_core import FormatError, TensorDict, TensorDictParams, UnsupportedOperationError, lazy_stack
from td_core.testing import assert_same
from td_store.testing import MemoryStore

ARCHIVES: dict[str, dict[str, Any]] = {
    "stored": {"archive": True},
    "packed": {"archive": True, "compression": "deflate"},
}
LAYOUTS: dict[str, dict[str, Any]] = {"tree": {}, **ARCHIVES}


def make_data() -> TensorDict:
    """Return a collection with leaves of several dtypes in several nodes."""
    leaves = {
        "a": torch.arange(18.0).view(6, 3),
        "n": {"b": torch.arange(24).view(6, 2, 2), "empty": torch.zeros(6, 0)},
    }
    return TensorDict({**leaves, "m": {"c": torch.arange(6).bfloat16()}}, [6], names=["rows"])


def save(data: Any, store: MemoryStore | None = None, **options: Any) -> MemoryStore:
    """Save to a store, and forget the requests."""
    store = MemoryStore({}, "s3://bucket/data") if store is None else store
    td_core.save(data, store, format="memmap", **options)
    store.log.clear()
    return store


COLLECTIONS: dict[str, Callable[[], Any]] = {
    "leaves": make_data,
    "scalars": lambda: TensorDict({"a": 1, "b": 2.5, "c": True}),
    "nothing": lambda: TensorDict({}, [3]),
    "stack": lambda: lazy_stack([make_data()[:2], make_data()[1:3].exclude("a")], 1),
    "params": lambda: TensorDictParams(TensorDict({"w": torch.ones(2, 2), "n": {"v": torch.zeros(3)}})),
    "odd keys": lambda: TensorDict(
        {"a/b": torch.ones(2), "shape": torch.zeros(1), "ü": {"%": torch.arange(2)}}
    ),
    "jagged": lambda: TensorDict(
        {"j": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)}, [2]
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", COLLECTIONS)
def test_save_comes_back(name: str, layout: Any) -> None:
    data = COLLECTIONS[name]()
    store = save(data, **layout)
    for loaded in (
        td_core.load(store),
        td_core.open(store).clone(),
        td_core.open(store, format="memmap").clone(),
    ):
        assert type(loaded) is type(data)
        assert loaded.batch_size == data.batch_size
        for key, leaf in data.items(True, True):
            found = loaded.get(key)
            pairs = zip(found.unbind(), leaf.unbind(), strict=True) if leaf.is_nested else [(found, leaf)]
            assert all(torch.equal(one, other) and one.dtype is other.dtype for one, other in pairs)
    assert td_core.load(store, device="meta").batch_size == data.batch_size or name == "jagged"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_operation_reads_store(layout: Any) -> None:
    data = make_data()
    store = save(data, **layout)
    assert_same(TensorDict.load_memmap(store, subpath="n").clone(), td_core.load(store)["n"])
    assert (data.clone().zero_().load_(store) == data).all()
    assert set(td_core.open(store, keys=["a", ("n", "b")]).keys(True, True)) == {"a", ("n", "b")}
    assert set(td_core.load(store, keys=["a", ("n", "b")]).keys(True, True)) == {"a", ("n", "b")}
    tree = td_core.inspect(store)
    assert tree.nbytes == data.bytes()
    assert {path for path, node in tree.walk() if node.kind == "leaf"} == set(
        map(_as_path, data.keys(True, True))
    )
    assert td_core.verify(store).ok
    copied = td_core.open(store, mode="c")
    copied["a"].zero_()
    assert (td_core.load(store) == data).all()


def _as_path(key: Any) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def test_tree_opens_in_two_turns_and_reads_rows_in_one() -> None:
    data = make_data()
    store = save(data)
    opened = td_core.open(store, format="memmap")
    assert [operation for operation, _ in store.log] == ["list", "read"]
    store.log.clear()
    assert_same(opened[[4, 1]].clone(), td_core.load(store)[[4, 1]])
    store.log.clear()
    rows = opened[[4, 1]]
    assert [operation for operation, _ in store.log] == ["read"]
    assert rows["n", "b"].tolist() == data["n", "b"][[4, 1]].tolist()


def make_large() -> TensorDict:
    """Return a collection whose archive has its directory and metadata far from its ends."""
    big = torch.arange(40_000)
    return TensorDict({"a": big, "n": {"b": big * 2, "m": {"c": big * 3}}, "z": {"d": big * 4}}, [40_000])


def test_archive_opens_in_two_turns_and_reads_rows_in_one() -> None:
    data = make_large()
    store = save(data, MemoryStore({}, "s3://bucket/data.tdz"))
    assert [info.name for info in store.list()] == [""]
    for options in ({}, {"format": "memmap"}):
        store.log.clear()
        opened = td_core.open(store, **options)
        assert store.log[0] == ("peek", ("",))
        assert [operation for operation, _ in store.log[1:]] == ["read"]
        assert len(store.log[1][1]) < 10
    store.log.clear()
    rows = opened[[39_999, 5, 20_000]]
    assert [operation for operation, _ in store.log] == ["read"]
    assert rows["z", "d"].tolist() == [4 * 39_999, 20, 80_000]


def test_archive_of_other_program_is_read() -> None:
    data = make_large()
    source = save(data, MemoryStore({}, "s3://bucket/data.tdz"))
    content = io.BytesIO()
    with (
        zipfile.ZipFile(content, "w") as target,
        zipfile.ZipFile(io.BytesIO(source._objects[""][0])) as archive,
    ):
        for name in reversed(archive.namelist()):
            target.writestr(name, archive.read(name))
    store = MemoryStore({"": content.getvalue()}, "s3://bucket/other.tdz")
    assert (td_core.load(store) == data).all()
    with pytest.raises(FormatError, match="no registered format recognises"):
        td_core.load(MemoryStore({"": content.getvalue()}, "s3://bucket/other.bin"))


def test_verify_finds_damage_in_store() -> None:
    store = save(make_data(), checksums=True)
    content, stamp = store._objects["n/b.memmap"]
    store._objects["n/b.memmap"] = content[:-1] + b"\xff", stamp
    (problem,) = td_core.verify(store).problems
    assert (problem.file, problem.kind) == ("n/b.memmap", "damaged")
    with pytest.raises(FormatError, match="n/b.memmap"):
        td_core.load(store, verify=True)
    packed = save(make_data(), archive=True)
    content, stamp = packed._objects[""]
    at = content.index(make_data()["a"].numpy().tobytes())
    packed._objects[""] = content[:at] + b"\xff" + content[at + 1 :], stamp
    assert [problem.file for problem in td_core.verify(packed).problems] == ["a.memmap"]


class Killed(BaseException):
    """The end of the process."""


class Mortal(MemoryStore):
    """A store whose process dies at a request."""

    left = 10**9

    def _live(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def stat(self, names: Any) -> Any:
        self._live()
        return super().stat(names)

    def read(self, ranges: Any) -> Any:
        self._live()
        return super().read(ranges)

    def write(self, name: str, content: Any, *, create: bool = False) -> Any:
        self._live()
        return super().write(name, content, create=create)

    def list(self, prefix: str = "") -> Any:
        self._live()
        return super().list(prefix)

    def delete(self, names: Any) -> None:
        self._live()
        super().delete(names)


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("at_once", [1, 16])
def test_killed_save_of_tree_leaves_old_not_ended_or_new(
    is_new: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("td_memmap._object_saves._TOGETHER", at_once)
    old, new = make_data(), make_data().apply(lambda leaf: leaf + 1).exclude("m").set("x", torch.ones(6))
    seen = set()
    for left in range(100):
        store = Mortal()
        if not is_new:
            save(old, store)
        store.left = left
        try:
            save(new, store, overwrite=True)
            store.left = 10**9
        except Killed:
            store.left = 10**9
            try:
                found = td_core.load(store, format="memmap")
            except (FileNotFoundError, FormatError) as error:
                seen.add(type(error))
                assert isinstance(error, FileNotFoundError) or "has not ended: save it again" in str(error)
            else:
                expected = old if "m" in found.keys() else new
                seen.add("old" if expected is old else "new")
                assert (found == expected).all()
            save(new, store, overwrite=True)
        found = td_core.load(store)
        assert (found == new).all()
        assert "m/c.memmap" not in store._objects
        if left >= 30:
            break
    assert seen == ({FileNotFoundError, FormatError} if is_new else {"old", FormatError, "new"})


def test_second_saver_of_new_location_is_refused() -> None:
    store = MemoryStore()

    class Racing(MemoryStore):
        def write(self, name: str, content: Any, *, create: bool = False) -> Any:
            if name == "a.memmap":
                with pytest.raises(
                    FileExistsError, match="another process is saving here: pass overwrite=True"
                ):
                    save(make_data(), self)
            return super().write(name, content, create=create)

    store = save(make_data(), Racing())
    assert (td_core.load(store) == make_data()).all()


def test_two_savers_over_old_save_are_never_mixed() -> None:
    first, second = make_data(), make_data().apply(lambda leaf: -leaf)
    outcomes = set()
    for at in ("meta.json", "a.memmap", "n/b.memmap", "m/meta.json", "%manifest.json"):
        for nth in (1, 2):

            class Racing(MemoryStore):
                place, count = at, nth

                def write(self, name: str, content: Any, *, create: bool = False) -> Any:
                    if name == self.place:
                        self.count -= 1
                        if self.count == 0:
                            self.place = ""
                            save(second, self, overwrite=True)
                    return super().write(name, content, create=create)

            store = Racing()
            store.count = 100
            save(make_data(), store)
            store.count = nth
            save(first, store, overwrite=True)
            try:
                found = td_core.load(store)
            except FormatError as error:
                outcomes.add("refused")
                assert "is not of the save that the manifest lists" in str(error)
            else:
                outcomes.add("whole")
                assert (found == first).all() or (found == second).all()
    assert outcomes == {"refused", "whole"}


def test_objects_that_were_copied_elsewhere_load() -> None:
    store = save(make_data())
    copied = MemoryStore(
        {name: content for name, (content, _) in reversed(store._objects.items())}, "s3://other/data"
    )
    assert (td_core.load(copied) == make_data()).all()


def test_directory_that_was_uploaded_loads(tmp_path: Any) -> None:
    make_data().memmap(tmp_path / "x")
    files = {
        str(file.relative_to(tmp_path / "x")): file for file in (tmp_path / "x").rglob("*") if file.is_file()
    }
    store = MemoryStore({name: file.read_bytes() for name, file in files.items()})
    assert (td_core.load(store) == make_data()).all()
    assert td_core.verify(store).ok


def test_downloaded_tree_loads_and_verifies(tmp_path: Any) -> None:
    store = save(make_data(), checksums=True)
    for name, (content, _) in store._objects.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(content)
    assert (td_core.load(tmp_path) == make_data()).all()
    assert td_core.verify(tmp_path).ok
    (tmp_path / "meta.json").write_bytes(b'{"_unfinished": ["a.memmap"]}')
    with pytest.raises(FormatError):
        td_core.load(tmp_path)


class Unlisted(MemoryStore):
    """A web server, which does not list."""

    def list(self, prefix: str = "") -> Any:
        raise OSError("the server lists no objects")


def test_tree_of_server_without_lists_loads_by_manifest() -> None:
    store = save(make_data())
    served = Unlisted({name: content for name, (content, _) in store._objects.items()}, "https://host/data")
    assert (td_core.load(served) == make_data()).all()
    served.delete(["%manifest.json"])
    with pytest.raises(
        FileNotFoundError, match=r"cannot be listed, and has no meta.json with %manifest.json"
    ):
        td_core.load(served, format="memmap")


def test_replaced_leaf_is_an_error() -> None:
    store = save(make_data())
    opened = td_core.open(store)
    save(make_data(), store, overwrite=True)
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        opened["a"].clone()


REFUSED: dict[str, tuple[Callable[[MemoryStore], Any], type[Exception], str]] = {
    "r+": (
        lambda store: td_core.open(store, mode="r+", format="memmap"),
        UnsupportedOperationError,
        "mode='c'",
    ),
    "load r+": (
        lambda store: TensorDict.load_memmap(store, mode="r+"),
        UnsupportedOperationError,
        "another mode",
    ),
    "append": (
        lambda store: td_core.append(make_data(), store, format="memmap"),
        UnsupportedOperationError,
        "save\\(\\) the rows to another location",
    ),
    "create": (
        lambda store: td_core.create(make_data(), store, format="memmap"),
        UnsupportedOperationError,
        r"td_core.save\(\) saves it there",
    ),
    "memmap": (lambda store: make_data().memmap(store), UnsupportedOperationError, r"td_core.save\(\) saves"),
    "memmap_": (
        lambda store: make_data().memmap_(store),
        UnsupportedOperationError,
        r"td_core.save\(\) saves",
    ),
    "share": (
        lambda store: save(make_data(), store, share_non_tensor=True),
        ValueError,
        "needs a local directory",
    ),
    "option": (
        lambda store: save(make_data(), store, nonsense=1),
        TypeError,
        "'memmap' has no option 'nonsense'",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_operation_sends_no_request(call: Any, error: Any, message: str) -> None:
    store = MemoryStore()
    with pytest.raises(error, match=message):
        call(store)
    assert store.log == []


def test_overwrite_of_local_save_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="overwrite=True is for trees in object stores"):
        td_core.save(make_data(), tmp_path / "x", format="memmap", overwrite=True)
    assert not (tmp_path / "x").exists()


def test_save_beside_one_object_is_refused() -> None:
    with pytest.raises(FileExistsError, match="there is one object, beside which a tree would not be found"):
        save(make_data(), MemoryStore({"": b"PK"}))
    with pytest.raises(FileExistsError):
        save(make_data(), MemoryStore({"": b"PK"}), archive=True, existsok=False)


def test_save_reports_progress_and_returns_early() -> None:
    for layout in LAYOUTS.values():
        seen: list[tuple[int, int]] = []
        store = MemoryStore()
        options = {"progress": lambda *counts, seen=seen: seen.append(counts), "return_early": True, **layout}
        future: Any = td_core.save(make_data(), store, format="memmap", num_threads=1, **options)
        future.result()
        size = make_data().bytes()
        assert seen[-1] == (size, size) or "compression" in layout
        assert (td_core.load(store) == make_data()).all()
