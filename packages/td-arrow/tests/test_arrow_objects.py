"""Tables in object stores: one file or several, how many turns of requests they take, and what is refused."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")

import td_core  # noqa: E402
from td_arrow.plugin import ArrowFormat, ParquetFormat  # noqa: E402
from td_core import FormatError, TensorDict, UnsupportedOperationError  # noqa: E402
from td_core.spi import Serializer  # noqa: E402
from td_core.testing import SerializerTests  # noqa: E402
from td_core.typing import ObjectLocation, Range  # noqa: E402
from td_store.testing import MemorySource, MemoryStore, OpenTests, SourceTests  # noqa: E402

SAVES: dict[str, tuple[str, dict[str, Any]]] = {
    "parquet": ("parquet", {"row_group_size": 500}),
    "parquet parts": ("parquet", {"max_rows_per_file": 1000}),
    "arrow": ("arrow", {}),
    "arrow batches": ("arrow", {"batch_rows": 500, "compression": "lz4"}),
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


def test_arrow_opens_in_one_turn_and_reads_rows_as_ranges() -> None:
    data, store = make_data(), save("arrow")
    opened = td_core.open(store)
    assert store.log == [("peek", ("",))]
    store.log.clear()
    assert (opened[[2499, 3]] == data[[2499, 3]]).all()
    assert store.log == [("read", ("",) * len(store.log[0][1]))]
    assert type(opened["n", "b"].source).__name__ == "RangeSource"


def test_arrow_batches_open_with_heads_and_read_rows_in_one_turn() -> None:
    data, store = torch.cat([make_data()] * 3), MemoryStore({}, "s3://bucket/data.arrow")
    td_core.save(data, store, format="arrow", batch_rows=500, compression="lz4")
    turns = {
        "open": (lambda: td_core.open(store, format="arrow"), ["peek", "read"]),
        "rows": (lambda: opened[[7499, 3, 3200]], ["read"]),
        "load": (
            lambda: td_core.load(store, format="arrow", keys="a", rows=[3200]),
            ["peek", "read", "read"],
        ),
        "inspect": (lambda: td_core.inspect(store, format="arrow"), ["peek", "read"]),
    }
    opened, found = td_core.open(store, format="arrow"), {}
    for name, (call, expected) in turns.items():
        store.log.clear()
        found[name] = call()
        assert [operation for operation, _ in store.log] == expected, name
    assert (found["rows"] == data[[7499, 3, 3200]]).all()
    assert found["load"]["a"].tolist() == data["a"][[3200]].tolist()


def make_types(count: int = 4000) -> Any:
    """Return a table with a column of each kind of buffers."""
    rows = range(count)
    strings = pa.array([f"t{k % 7}" * (k % 5) for k in rows])
    points = pa.array([[float(k)] * 4 for k in rows], pa.list_(pa.float32(), 4))
    columns = {
        "none": pa.nulls(count), "bool": pa.array([k % 3 == 0 for k in rows]), "words": strings,
        "missing": pa.array([k if k % 7 else None for k in rows]), "large": strings.cast(pa.large_string()),
        "coded": strings.dictionary_encode(), "lists": pa.array([[k] * (k % 4) for k in rows]),
        "pairs": pa.array([[k, -k] for k in rows], pa.list_(pa.int16(), 2)),
        "struct": pa.array([{"x": k, "y": f"q{k}", "z": {"w": k / 2}} for k in rows]),
        "map": pa.array([[("a", k)] for k in rows], pa.map_(pa.string(), pa.int64())),
        "tensor": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [2, 2]), points),
        "decimal": pa.array(rows, pa.decimal128(10, 0)), "last": pa.array(rows),
    }  # fmt: skip
    return pa.table(columns)


@pytest.mark.parametrize("odd", ["none", "view", "union", "runs"])
@pytest.mark.parametrize(("compression", "rows"), [(None, None), ("zstd", 900)])
def test_column_of_any_type_is_read_in_one_turn(odd: str, compression: str | None, rows: int | None) -> None:
    from td_arrow._table_files import ObjectArrow, open_tables

    table = make_types()
    whole = pa.array([k // 100 for k in range(len(table))], pa.int16())
    more = {
        "none": None,
        "view": pa.array(table["words"].to_pylist(), pa.string_view()),
        "union": pa.UnionArray.from_sparse(pa.array([0] * len(table), pa.int8()), [whole]),
        "runs": pc.run_end_encode(whole),
    }[odd]
    if more is not None:
        table = table.add_column(3, "odd", more)
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    store = MemoryStore({"": sink.getvalue()}, "s3://bucket/x.arrow")
    location = td_core.spi.Serializer.find_objects(store)
    with open_tables(location, "arrow") as opened:
        assert isinstance(opened, ObjectArrow)
        store.log.clear()
        for name in table.schema.names:
            ((_, found),) = opened.read([(name,)])
            assert found.to_pylist() == table[name].to_pylist(), name
            assert len(store.log) <= 1, name
            store.log.clear()
        ((_, found),) = opened.read([("struct", "z", "w")], [0])
        assert found.to_pylist() == [k / 2 for k in range(rows or len(table))]


def test_stream_of_arrow_is_read_at_once() -> None:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema({"x": pa.int64()})) as writer:
        writer.write_table(pa.table({"x": range(5)}))
    store = MemoryStore({"": sink.getvalue()}, "s3://bucket/x.arrow")
    assert td_core.load(store, format="arrow")["x"].tolist() == [0, 1, 2, 3, 4]
    assert td_core.open(store, format="arrow")["x"][[4, 0]].tolist() == [4, 0]


#: Whole programs that use a damaged file in a store.
USES = {
    "load": "load(store, format=name)",
    "open": "open(store, format=name)[[0, 1]].clone()",
    "filter": "load(store, format=name, filter=[('x', '>', 0.5)])",
    "inspect": "inspect(store, format=name)",
}


@pytest.mark.once
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_damaged_footer_is_an_error_and_the_process_lives(name: str, use: str) -> None:
    code = f"""
import torch
from td_core import TensorDict, inspect, load, open, save
from td_core.errors import FormatError, MissingPluginError
from td_store.testing import MemoryStore
name, store = {name!r}, MemoryStore({{}}, "s3://bucket/x.{name}")
lists = torch.nested.nested_tensor([torch.arange(2), torch.arange(0)], layout=torch.jagged)
save(TensorDict({{"j": lists, "x": torch.rand(2), "n": {{"y": torch.arange(2)}}}}, [2]), store, format=name)
(raw, stamp), seen = store._objects[""], set()
for place in [*range(len(raw) - 200, 200, -31), *range(len(raw) - 1, len(raw) - 200, -3)]:
    for bit in (2, 64):
        content = raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1:]
        store._objects[""] = content, stamp
        try:
            {USES[use]}
            seen.add("fine")
        except FormatError:
            seen.add("damaged")
        except (KeyError, ValueError, MissingPluginError):  # text needs td-tensorclass
            seen.add("of another schema")
assert "damaged" in seen
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


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
def test_parts_are_recognised_by_their_first_one(name: str) -> None:
    store = save(name, MemoryStore({}, "s3://bucket/some/table"))
    assert (td_core.load(store) == make_data()).all()
    assert ("stat", ObjectLocation.MARKS) in store.log


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


class InStore(SerializerTests):
    """The suite of formats, in a store for each name."""

    name: ClassVar[str]
    modes = ("r", "c")
    refused = ("create", "append")

    def serializer(self) -> Serializer:
        return ParquetFormat() if self.name == "parquet" else ArrowFormat()

    def location(self, folder: Path, name: str = "x") -> Any:
        stores = self.__dict__.setdefault("stores", {})
        return stores.setdefault((folder, name), MemoryStore({}, f"s3://bucket/{name}.{self.name}"))

    def damage(self, path: Any) -> Iterator[str]:
        """Truncate the object."""
        content, stamp = path._objects[""]
        for size in sorted({0, 1, len(content) // 2, len(content) - 1}):
            path._objects[""] = content[:size], stamp
            yield f"truncated to {size} of {len(content)} bytes"
        path._objects[""] = content, stamp


@pytest.mark.filterwarnings("ignore:.* are gone:UserWarning")
class TestParquetInStore(InStore):
    name = "parquet"


@pytest.mark.filterwarnings("ignore:.* are gone:UserWarning")
class TestArrowInStore(InStore):
    name = "arrow"


class _Opened(OpenTests):
    """The suite of opened collections, in a store."""

    options: ClassVar[dict[str, Any]]
    name: ClassVar[str] = "arrow"

    def open(self, data: TensorDict, folder: Path) -> Any:
        store = MemoryStore({}, f"s3://bucket/x.{self.name}")
        td_core.save(data, store, format=self.name, **self.options)
        return td_core.open(store, mode="c").unlock_()


class TestOpenParquetInStore(_Opened):
    name, options = "parquet", {"row_group_size": 2}


class TestOpenRangesInStore(_Opened):
    options: ClassVar = {}


class TestOpenBatchesInStore(_Opened):
    options: ClassVar = {"batch_rows": 2, "compression": "zstd"}


class TestRangesInStore(SourceTests):
    """The suite of sources, of a leaf whose rows are ranges."""

    is_shared = False
    dtypes: ClassVar = [
        dtype for dtype in SourceTests.dtypes if dtype != torch.bool
    ]  # bools are bits in Arrow

    def make(self, array: torch.Tensor, folder: Path) -> Any:
        if not array.ndim or not array.numel():  # these are in the header
            return MemorySource(array)
        store = MemoryStore({}, "s3://bucket/x.arrow")
        td_core.save(TensorDict({"a": array}, [len(array)]), store, format="arrow")
        leaf: Any = td_core.open(store, mode="c")["a"]
        return leaf.source
