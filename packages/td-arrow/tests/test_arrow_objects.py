"""Tables in object stores: one file or several, how many turns of requests they take, and what is refused."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

pa = pytest.importorskip("pyarrow")

import td_core  # noqa: E402
from td_core import FormatError, TensorDict, UnsupportedOperationError  # noqa: E402
from td_core.typing import Range  # noqa: E402
from td_store.testing import MemoryStore  # noqa: E402

SAVES: dict[str, tuple[str, dict[str, Any]]] = {
    "parquet": ("parquet", {"row_group_size": 500}),
    "parquet parts": ("parquet", {"max_rows_per_file": 1000}),
    "arrow": ("arrow", {}),
    "arrow parts": ("arrow", {"max_rows_per_file": 1000, "compression": "zstd"}),
}


def make_data() -> TensorDict:
    """Return a collection whose file is longer than what is read first."""
    generator = torch.Generator().manual_seed(0)
    return TensorDict(
        {
            "a": torch.randn(2500, 8, generator=generator),
            "n": {"b": torch.randint(1 << 60, (2500, 2), generator=generator), "c": torch.arange(2500)},
        },
        [2500],
    )


def save(name: str, store: MemoryStore | None = None) -> MemoryStore:
    """Save to a store, and forget the requests."""
    form, options = SAVES[name]
    store = MemoryStore({}, f"s3://bucket/data.{form}") if store is None else store
    td_core.save(make_data(), store, format=form, **options)
    store.log.clear()
    return store


@pytest.mark.parametrize("name", SAVES)
def test_every_operation_reads_store(name: str) -> None:
    data, store = make_data(), save(name)
    assert (td_core.load(store) == data).all()
    assert (td_core.load(store, rows=[2499, 7]) == data[[2499, 7]]).all()
    assert set(td_core.load(store, keys=[("n", "c")]).keys(True, True)) == {("n", "c")}
    opened = td_core.open(store)
    for rows in ([2000, 3], slice(990, 1010), 5, torch.arange(2500) % 700 == 1):
        assert (opened[rows].clone() == data[rows]).all()
    again = pickle.loads(pickle.dumps(opened))
    assert (again[[2400, 1]] == data[[2400, 1]]).all()
    assert td_core.inspect(store).nbytes == data.bytes()
    assert td_core.verify(store).ok


def test_parquet_opens_in_one_turn_and_reads_rows_in_one() -> None:
    data, store = make_data(), save("parquet")
    opened = td_core.open(store)
    assert store.log == [("peek", ("",))]
    store.log.clear()
    assert (opened[[2499, 3, 1200]] == data[[2499, 3, 1200]]).all()
    assert [operation for operation, _ in store.log] == ["read"]
    store.log.clear()
    assert td_core.load(store, keys="n", rows=[1200])["n", "c"].item() == 1200
    (peek, _), (read, parts) = store.log
    assert (peek, read) == ("peek", "read")
    assert len(parts) < 5  # of one row group


def test_parts_open_with_ends_of_all_files() -> None:
    store = save("parquet parts")
    assert sorted(store._objects) == [f"part-0000{i}.parquet" for i in range(3)]
    td_core.open(store, format="parquet")
    assert [(operation, len(names)) for operation, names in store.log] == [
        ("peek", 1),
        ("list", 1),
        ("read", 3),
    ]


@pytest.mark.parametrize("name", ["parquet parts", "arrow parts"])
def test_append_adds_one_part(name: str) -> None:
    data, store = make_data(), save(name)
    td_core.append(data[:3], store)
    assert len(store._objects) == 4
    assert (td_core.load(store) == torch.cat([data, data[:3]])).all()
    with pytest.raises(td_core.StructureError):
        td_core.append(data[:3].exclude("a"), store)
    assert len(store._objects) == 4


@pytest.mark.parametrize("name", ["parquet parts", "arrow parts"])
def test_killed_save_of_parts_is_refused(name: str) -> None:
    class Full(MemoryStore):
        left = 0

        def write(self, name: str, content: Any, *, create: bool = False) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError("the bucket is full")
            return super().write(name, content, create=create)

    for left in range(3):
        store = Full({}, f"s3://bucket/data.{SAVES[name][0]}")
        store.left = left
        with pytest.raises(OSError, match="the bucket is full"):
            save(name, store)
        with pytest.raises((FormatError, FileNotFoundError), match="has not ended|no table"):
            td_core.load(store)
    store.left = 10
    with pytest.raises(FileExistsError, match="it has objects; save to another location"):
        save(name, store)


def test_files_of_other_programs_are_read() -> None:
    import pyarrow.parquet as pq

    contents = {}
    for year in (2024, 2025):
        sink = io.BytesIO()
        pq.write_table(pa.table({"x": [float(year), 1.0]}), sink)
        contents[f"year={year}/some.parquet"] = sink.getvalue()
    found = td_core.load(MemoryStore({**contents, "_SUCCESS": b""}, "s3://bucket/table.parquet"))
    assert found["x"].tolist() == [2024.0, 1.0, 2025.0, 1.0]
    assert found["year"].tolist() == [2024, 2024, 2025, 2025]


@pytest.mark.parametrize("name", SAVES)
def test_damaged_object_is_an_error(name: str) -> None:
    store = save(name)
    key, (content, stamp) = max(store._objects.items())
    for size in (0, 5, len(content) // 2, len(content) - 1):
        store._objects[key] = content[:size], stamp
        with pytest.raises(FormatError):
            td_core.load(store, format=SAVES[name][0])


def test_replaced_object_is_an_error() -> None:
    store = save("parquet")
    opened = td_core.open(store)
    store.write("", [bytes(store.read([Range("", 0)])[0])])
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        opened["a"].clone()


REFUSED: dict[str, tuple[Callable[[MemoryStore], Any], str]] = {
    "r+": (lambda store: td_core.open(store, mode="r+", format="parquet"), r"mode='c', and save\(\)"),
    "create": (
        lambda store: td_core.create(make_data(), store, format="arrow"),
        r"save\(\) the collection when",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_operation_sends_no_request(call: Any, message: str) -> None:
    store = MemoryStore()
    with pytest.raises(UnsupportedOperationError, match=message):
        call(store)
    assert store.log == []


def test_append_to_one_object_is_refused() -> None:
    with pytest.raises(UnsupportedOperationError, match="which is one file: save with max_rows_per_file"):
        td_core.append(make_data(), save("parquet"))
