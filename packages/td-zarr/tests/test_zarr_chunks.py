"""Chunks, shards and codecs: what is written, that other options are refused, and that parts read only their chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec

from td_core import TensorDict
from td_core.errors import StructureError, UnsupportedOperationError
from td_zarr import append, load, save, verify
from td_zarr import open as open_group
from td_zarr._array_documents import NATIVE, make_plain_document
from td_zarr.plugin import ZarrFormat

pytestmark = pytest.mark.usefixtures("engine")


def make_data(rows: int = 10) -> TensorDict:
    leaves = {
        "a": torch.arange(rows * 6.0).view(rows, 2, 3),
        "n": {"b": torch.arange(rows), "c": torch.arange(rows * 4).view(rows, 4).bfloat16()},
    }
    return TensorDict(leaves, [rows])


#: Options, and the chunks and shards of the arrays ``a`` and ``n/b`` that they give.
LAYOUTS: list[tuple[dict[str, Any], Any, Any]] = [
    ({}, ((10, 2, 3), None), ((10,), None)),
    ({"chunks": 4}, ((4, 2, 3), None), ((4,), None)),
    ({"chunks": 100}, ((100, 2, 3), None), ((100,), None)),
    ({"chunks": (4, 1)}, ((4, 1, 3), None), ((4,), None)),
    ({"chunks": "auto"}, ((10, 2, 3), None), ((10,), None)),
    ({"chunks": 2, "shards": 4}, ((2, 2, 3), (4, 2, 3)), ((2,), (4,))),
    ({"shards": 4}, ((4, 2, 3), (4, 2, 3)), ((4,), (4,))),
    ({"chunks": {"a": 3, None: 5}}, ((3, 2, 3), None), ((5,), None)),
    ({"chunks": {"n": 3}}, ((10, 2, 3), None), ((3,), None)),
    ({"chunks": {("n", "b"): 2, "n": 3}}, ((10, 2, 3), None), ((2,), None)),
]


@pytest.mark.parametrize(("options", "first", "second"), LAYOUTS, ids=[str(row[0]) for row in LAYOUTS])
def test_save_makes_chunks_of_rows(options: Any, first: Any, second: Any, path: Path) -> None:
    td = make_data()
    save(td, path, **options)
    group = zarr.open_group(path, mode="r")
    assert [(group[name].chunks, group[name].shards) for name in ("a", "n/b")] == [first, second]
    assert np.array_equal(group["a"][...], td["a"].numpy())
    assert (load(path) == td).all()
    assert load(path)["n", "c"].dtype is torch.bfloat16


def test_auto_chunks_have_about_a_megabyte(path: Path) -> None:
    save(TensorDict({"a": torch.zeros(5000, 300), "b": torch.zeros(3)}), path, chunks="auto")
    assert zarr.open_group(path, mode="r")["a"].chunks == (2**20 // 1200, 300)


@pytest.mark.parametrize("value", [0, -1, 2.5, "rows", (2, 0), [None]], ids=repr)
@pytest.mark.parametrize("option", ["chunks", "shards"])
def test_invalid_chunks_raise(option: str, value: Any, path: Path) -> None:
    with pytest.raises(ValueError, match=r"chunks and shards are a number of rows.*got"):
        save(make_data(), path, **{option: value})
    assert not path.exists()


CODECS: list[dict[str, Any]] = [
    {"compressors": ZstdCodec(level=3)},
    {"compressors": [GzipCodec(level=1)]},
    {"compressors": BloscCodec(cname="lz4"), "chunks": 4},
    {"compressors": {"a": ZstdCodec()}},
    {"serializer": BytesCodec(endian="big")},
    {"compressors": ZstdCodec(), "checksums": True, "chunks": 3},
    {"compressors": ZstdCodec(), "chunks": 1, "shards": 5},
    {"checksums": True},
    {"checksums": True, "chunks": 3, "shards": 6},
]


@pytest.mark.parametrize("options", CODECS, ids=range(len(CODECS)))
def test_every_codec_round_trips(options: Any, path: Path) -> None:
    td = make_data()
    save(td, path, **options)
    assert (load(path) == td).all()
    assert np.array_equal(zarr.open_group(path, mode="r")["n/b"][...], td["n", "b"].numpy())
    opened = open_group(path, mode="r+")
    opened[3:5] = td[:2]
    assert (load(path) == td[[0, 1, 2, 0, 1, *range(5, 10)]]).all()
    assert verify(path).ok


def test_compressed_group_is_smaller(path: Path) -> None:
    td = TensorDict({"a": torch.zeros(10_000)})
    save(td, path, compressors=ZstdCodec())
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 10_000


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_plain_metadata_is_that_of_zarr(dtype: torch.dtype) -> None:
    made = zarr.create_array(
        {},
        shape=(3, 2),
        dtype=NATIVE[dtype],
        chunks=(2, 2),
        compressors=None,
        filters=None,
        dimension_names=["x", "y"],
    )
    ours = make_plain_document(dtype, [3, 2], ["x", "y"], {}, [2, 2])
    parsed = zarr.Array(zarr.AsyncArray(ours, made.store_path)).metadata
    assert parsed.to_dict() == made.metadata.to_dict()


class CountingStore(zarr.storage.WrapperStore):  # type: ignore[type-arg]
    """A store that lists the chunks that are read and written."""

    log: list[tuple[str, str]]

    async def get(self, key: str, *args: Any, **options: Any) -> Any:
        if "/c/" in key:
            self.log.append(("get", key))
        return await super().get(key, *args, **options)

    async def set(self, key: str, *args: Any, **options: Any) -> None:
        if "/c/" in key:
            self.log.append(("set", key))
        await super().set(key, *args, **options)


@pytest.fixture
def store() -> CountingStore:
    """Return a store with a group in chunks of 2 rows."""
    store = CountingStore(zarr.storage.MemoryStore())
    store.log = []
    save(make_data(), store, chunks=2)
    store.log.clear()
    return store


PARTS: list[tuple[Any, list[int]]] = [
    (slice(2, 4), [1]),
    (slice(3, 5), [1, 2]),
    ([9, 0], [0, 4]),
    (torch.tensor([5]), [2]),
    (7, [3]),
    (torch.arange(10) == 3, [1]),
]


@pytest.mark.parametrize(("rows", "chunks"), PARTS, ids=str)
def test_read_of_rows_reads_only_their_chunks(rows: Any, chunks: list[int], store: CountingStore) -> None:
    if not isinstance(rows, torch.Tensor) or rows.dtype is not torch.bool:
        loaded = load(store, rows=rows, keys="a")
        assert (loaded == make_data().select("a")[rows]).all()
        assert sorted(store.log) == [("get", f"a/c/{chunk}/0/0") for chunk in chunks]
        store.log.clear()
    opened = open_group(store)
    assert store.log == []
    assert (opened[rows].clone() == make_data()[rows]).all()
    names = [("a", "/0/0"), ("n/b", ""), ("n/c", "/0")]
    assert sorted(store.log) == sorted(
        ("get", f"{name}/c/{chunk}{end}") for name, end in names for chunk in chunks
    )


def test_write_of_whole_chunks_reads_nothing(store: CountingStore) -> None:
    opened = open_group(store, mode="r+")
    opened["a"][2:6] = 0.0
    assert sorted(store.log) == [("set", "a/c/1/0/0"), ("set", "a/c/2/0/0")]
    store.log.clear()
    opened["n", "b"][3] = 0
    assert store.log == [("get", "n/b/c/1"), ("set", "n/b/c/1")]


def test_append_writes_only_new_chunks(store: CountingStore) -> None:
    append(make_data(4), store)
    assert {key for operation, key in store.log if operation == "set" and not key.endswith(".json")} == {
        f"{name}/c/{chunk}{end}"
        for name, end in [("a", "/0/0"), ("n/b", ""), ("n/c", "/0")]
        for chunk in (5, 6)
    }
    assert (load(store) == torch.cat([make_data(), make_data(4)])).all()


@pytest.mark.parametrize(
    "options", [{}, {"chunks": 4}, {"chunks": 1, "shards": 8}, {"checksums": True}], ids=str
)
def test_append_again_and_again_adds_all_rows(options: Any, path: Path) -> None:
    save(make_data(3), path, **options)
    wanted = make_data(3)
    for rows in (1, 5, 2):
        append(make_data(rows), path)
        wanted = torch.cat([wanted, make_data(rows)])
        assert (load(path) == wanted).all()
        assert (open_group(path)[-2:].clone() == wanted[-2:]).all()
    assert verify(path).ok
    assert zarr.open_group(path, mode="r", use_consolidated=False)["a"].shape == (11, 2, 3)


def test_append_rows_with_values_of_the_group_keeps_them_for_the_batch(path: Path) -> None:
    package = pytest.importorskip("td_tensorclass")

    def make(rows: int, value: object = 1) -> TensorDict:
        nodes = {
            "m": package.MetaData({"k": 1}),
            "n": package.MetaData(value),
            "v": package.NonTensorData([2]),
        }
        return TensorDict({"a": torch.zeros(rows), **nodes, "below": nodes}, [rows])

    save(make(3), path)
    append(make(2), path)
    loaded = load(path)
    assert loaded["m"] == loaded["below", "m"] == {"k": 1} and loaded["n"] == 1 and loaded["v"] == [2]
    append(make(1, value=2), path)
    assert load(path)["n"] == [1, 1, 1, 1, 1, 2] and load(path)["m"] == {"k": 1}


def test_append_to_empty_group_makes_chunks_of_the_rows(path: Path) -> None:
    save(make_data(0), path)
    append(make_data(5), path)
    assert (load(path) == make_data(5)).all()
    assert zarr.open_group(path, mode="r")["a"].chunks == (5, 2, 3)


WRONG: dict[str, Any] = {
    "key": make_data(2).select("a"),
    "new key": make_data(2).set("z", torch.ones(2)),
    "dtype": make_data(2).apply(lambda leaf: leaf.to(torch.float64)),
    "narrow dtype": make_data(2).apply(lambda leaf: leaf.to(torch.int8)),
    "shape": make_data(2).set("a", torch.ones(2, 2, 4)),
}


@pytest.mark.parametrize("name", WRONG)
def test_append_of_other_rows_raises_and_changes_nothing(name: str, path: Path) -> None:
    save(make_data(), path, chunks=2)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises((StructureError, KeyError, RuntimeError)):
        append(WRONG[name], path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_append_nested_tensor_raises_with_key(path: Path) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    td = TensorDict({"a": ragged}, [2])
    save(td, path)
    with pytest.raises(UnsupportedOperationError, match=r"'a'.*nested"):
        append(td, path)


@pytest.mark.parametrize("options", [{}, {"chunks": 3}], ids=str)
def test_create_makes_group_to_be_filled(options: Any, path: Path) -> None:
    like = make_data(7).to("meta")
    created = ZarrFormat().create(like, path, **options)
    assert created["a"].sum() == 0
    created[2:4] = make_data(2)
    found = load(path)
    assert (found[2:4] == make_data(2)).all()
    assert found["a"][:2].sum() == found["a"][4:].sum() == 0
    assert verify(path).ok


def test_create_in_zip_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a zip file cannot be written in place"):
        ZarrFormat().create(make_data(), tmp_path / "x.zip")
    with pytest.raises(FileExistsError, match="it exists"):
        ZarrFormat().create(make_data(), tmp_path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_append_to_a_strided_nested_tensor_names_it(path: Path) -> None:
    uneven = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.strided)
    data = TensorDict({"x": torch.arange(2.0), "n": {"boxes": uneven}}, [2])
    save(data, path)
    with pytest.raises(
        UnsupportedOperationError, match="\\('n', 'boxes'\\) is a nested tensor with the layout torch.strided"
    ):
        append(data, path)
    assert load(path).batch_size == (2,)
