"""Data sets of mosaicml-streaming: round trips, what is in the files, options, damage, and what is refused."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("td_tensorclass")  # columns of text become values

from td_core import KeyPathError, TensorDict
from td_core.errors import CodecError, FormatError
from td_core.testing._collection_samples import assert_same, make_samples, make_value_samples

_DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip
SAMPLES: dict[str, Any] = {
    **make_samples(),
    **make_value_samples(),
    "dtypes": TensorDict({str(dtype)[6:]: torch.tensor([0, 1, 2]).to(dtype) for dtype in _DTYPES}, [3]),
    "cells of dtypes": TensorDict(
        {str(dtype)[6:]: torch.arange(6).view(3, 2).to(dtype) for dtype in _DTYPES}, [3]
    ),
    "rows of values": TensorDict(
        {
            "text": ["a", "", "é"],
            "bytes": [b"a", b"", b"\xff"],
            "day": [datetime.date(2020, 1, 2)] * 3,
            "none": ["a", None, "b"],
            "mixed": [1, "a", 2.5],
            "dict": [{"a": 1}, {}, None],
            "lists": [[1], [], [2, 3]],
            "integers": [1, 2, 3],
        },
        [3],
    ),
    "jagged": TensorDict(
        {"x": torch.nested.nested_tensor([torch.arange(n).float() for n in (1, 2, 3)], layout=torch.jagged)},
        [3],
    ),
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the path of a directory that does not exist yet."""
    return tmp_path / "samples"


def read_index(out: Path) -> Any:
    return json.loads((out / "index.json").read_text())


def remove_header(out: Path) -> None:
    """Remove the header of td, so that the data set is one of another program."""
    (out / "index.json").write_text(json.dumps({**read_index(out), "td": None}))


@pytest.mark.parametrize(
    "options", [{}, {"compression": "zstd", "hashes": ["sha1"], "size_limit": 300}], ids=["plain", "shards"]
)
@pytest.mark.parametrize("name", SAMPLES)
def test_round_trip_is_exact(name: str, options: dict[str, Any], out: Path) -> None:
    SAMPLES[name].to_mds(out=out, **options)
    assert_same(TensorDict.from_mds(out), SAMPLES[name])


#: Entries of three rows, and the encoding of their column.
ENCODINGS: dict[str, tuple[Any, str]] = {
    "int8": (torch.tensor([1, 2, 3], dtype=torch.int8), "int8"),
    "int64": (torch.tensor([1, 2, 3]), "int64"),
    "bool": (torch.tensor([True, False, True]), "uint8"),
    "float16": (torch.tensor([1, 2, 3]).half(), "float16"),
    "bfloat16": (torch.tensor([1, 2, 3]).bfloat16(), "uint16"),
    "cells": (torch.zeros(3, 2, 4), "ndarray:float32:2,4"),
    "bool cells": (torch.zeros(3, 2, dtype=torch.bool), "ndarray:uint8:2"),
    "jagged": (
        torch.nested.nested_tensor([torch.zeros(n) for n in (1, 2, 3)], layout=torch.jagged),
        "ndarray:float32",
    ),
    "text": (["a", "b", "c"], "str"),
    "bytes": ([b"a", b"b", b"c"], "bytes"),
    "values": ([{"a": 1}, 2, None], "json"),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_encoding_of_column(name: str, out: Path) -> None:
    entry, encoding = ENCODINGS[name]
    TensorDict({"x": entry}, [3]).to_mds(out=out)
    (shard,) = read_index(out)["shards"]
    assert (shard["column_names"], shard["column_encodings"]) == (["x"], [encoding])
    assert (shard["samples"], shard["version"], shard["format"], shard["zip_data"]) == (3, 2, "mds", None)


def test_samples_are_those_of_the_format(out: Path) -> None:
    entries = {"b": torch.tensor([1, 2], dtype=torch.int16), "a": ["x", "yz"], "n": {"c": torch.zeros(2, 1)}}
    TensorDict(entries, [2]).to_mds(out=out)
    (shard,) = read_index(out)["shards"]
    assert shard["column_names"] == ["b", "a", "n.c"]
    assert shard["column_sizes"] == [2, None, 4]
    content = (out / "shard.00000.mds").read_bytes()
    assert np.frombuffer(content[:4], "<u4").tolist() == [2]
    start, middle, end = np.frombuffer(content[4:16], "<u4").tolist()
    assert json.loads(content[16:start])["column_names"] == ["b", "a", "n.c"]
    assert content[start:middle] == b"\1\0\0\0" + b"\1\0" + b"x" + b"\0\0\0\0"
    assert content[middle:] == b"\2\0\0\0" + b"\2\0" + b"yz" + b"\0\0\0\0" and end == len(content)
    assert shard["raw_data"] == {"basename": "shard.00000.mds", "bytes": len(content), "hashes": {}}


@pytest.mark.parametrize("compression", ["zstd", "zstd:7", "gz", "gz:1", "bz2", "br", "br:1", "snappy"])
def test_compressions_and_hashes(compression: str, out: Path) -> None:
    td = TensorDict({"x": torch.arange(100)}, [100])
    td.to_mds(out=out, compression=compression, hashes=["md5", "sha256"])
    (shard,) = read_index(out)["shards"]
    packed = shard["zip_data"]
    content = (out / packed["basename"]).read_bytes()
    assert packed["basename"] == f"shard.00000.mds.{compression.partition(':')[0]}"
    assert packed["hashes"] == {name: hashlib.new(name, content).hexdigest() for name in ("md5", "sha256")}
    assert_same(TensorDict.from_mds(out), td)


@pytest.mark.parametrize(("limit", "counts"), [(None, [10]), ("100kb", [10]), (1, [1] * 10)])
def test_size_limit_cuts_shards(limit: Any, counts: list[int], out: Path) -> None:
    td = TensorDict({"x": torch.arange(10), "s": [str(i) for i in range(10)]}, [10])
    td.to_mds(out=out, size_limit=limit)
    assert [shard["samples"] for shard in read_index(out)["shards"]] == counts
    assert_same(TensorDict.from_mds(out), td)


@pytest.mark.parametrize(
    "rows", [slice(2, 9, 3), [7, 0, 7], torch.tensor([9, 1]), slice(0, 0), 4, -1], ids=str
)
@pytest.mark.parametrize("is_ours", [True, False])
def test_rows_read_their_shards_only(rows: Any, is_ours: bool, out: Path) -> None:
    td = TensorDict({"x": torch.arange(20).view(10, 2), "s": [str(i) for i in range(10)]}, [10])
    td.to_mds(out=out, size_limit=300)
    if not is_ours:
        remove_header(out)
    wanted = {
        int(i) for i in np.atleast_1d(np.arange(10)[rows.numpy() if isinstance(rows, torch.Tensor) else rows])
    }
    first = 0
    for shard in read_index(out)["shards"]:
        if not wanted & {*range(first, first + shard["samples"])}:
            (out / shard["raw_data"]["basename"]).unlink()
        first += shard["samples"]
    found = TensorDict.from_mds(out, rows=rows)
    assert found.batch_size == td[rows].batch_size
    assert torch.equal(found["x"], td[rows]["x"]) if wanted else not len(found)
    assert not wanted or found["s"] == td[rows]["s"]


@pytest.mark.parametrize("is_ours", [True, False])
def test_keys_device_and_split(is_ours: bool, out: Path) -> None:
    TensorDict({"x": torch.arange(3), "s": ["a", "b", "c"]}, [3]).to_mds(out=out / "train")
    if not is_ours:
        remove_header(out / "train")
    found = TensorDict.from_mds(out, split="train", keys="s", device="cpu")
    assert [*found.keys()] == ["s"] and found.device == torch.device("cpu")
    with pytest.raises(KeyPathError, match="z"):
        TensorDict.from_mds(out, split="train", keys=["z"])


def encode_array(array: Any) -> bytes:
    """Return the bytes of a float32 array in the encoding ``ndarray``, as the library makes them."""
    return bytes([34, len(array.shape) << 2, *array.shape]) + array.astype("<f4").tobytes()


#: The shapes of the arrays of two samples, and the kind of the entry: dense, jagged, or a lazy stack.
SHAPES: dict[str, tuple[list[tuple[int, ...]], str]] = {
    "dense": ([(2, 3), (2, 3)], "Tensor"),
    "jagged": ([(2, 3), (1, 3)], "NestedTensor"),
    "several dims": ([(2, 3), (1, 2)], "LazyStackedTensorDict"),
    "numbers of dims": ([(2,), (1, 3)], "LazyStackedTensorDict"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_foreign_arrays_are_dense_jagged_or_a_lazy_stack(name: str, out: Path) -> None:
    shapes, kind = SHAPES[name]
    arrays = [np.arange(np.prod(shape), dtype="f4").reshape(shape) for shape in shapes]
    TensorDict({"x": [encode_array(array) for array in arrays]}, [2]).to_mds(out=out)
    change_index(lambda index: index["shards"][0].update(column_encodings=["ndarray"]))(out)
    remove_header(out)
    found = TensorDict.from_mds(out).get("x")
    assert type(found).__name__ == kind
    rows = [found[i]["data"] for i in range(2)] if kind.startswith("Lazy") else found.unbind()
    assert all(torch.equal(row, torch.from_numpy(array)) for row, array in zip(rows, arrays, strict=True))


#: Encodings of a column that the caller chooses, and what another program reads.
CHOSEN: dict[str, tuple[Any, Any]] = {
    "int": (torch.tensor([1, 2], dtype=torch.int8), [1, 2]),
    "float64": (torch.tensor([1.5, 2.5]), [1.5, 2.5]),
    "str_int": (torch.tensor([1, 2]), [1, 2]),
    "str_float": (torch.tensor([1.5, 2.5]), [1.5, 2.5]),
    "json": (torch.tensor([[1], [2]]), [[1], [2]]),
    "ndarray": (torch.tensor([[1], [2]]), [[1], [2]]),
    "ndarray:int64": (torch.tensor([[1], [2]]), [[1], [2]]),
    "ndarray:int64:1": (torch.tensor([[1], [2]]), [[1], [2]]),
    "jpeg": ([b"\xff\xd8", b"\xff\xd9"], [b"\xff\xd8", b"\xff\xd9"]),
}


@pytest.mark.parametrize("encoding", CHOSEN)
def test_columns_choose_encodings(encoding: str, out: Path) -> None:
    entry, expected = CHOSEN[encoding]
    TensorDict({"x": entry}, [2]).to_mds(out=out, columns={"x": encoding})
    assert read_index(out)["shards"][0]["column_encodings"] == [encoding]
    remove_header(out)
    found = TensorDict.from_mds(out)["x"]
    assert (found.tolist() if isinstance(found, torch.Tensor) else list(found)) == expected


#: Options of ``to_mds`` for a collection with the entries ``x`` and ``s``, and the error.
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "entry left out": ({"columns": {"x": "int64"}}, ValueError, "columns lacks the entries 's'"),
    "unknown entry": ({"columns": {"x": "int64", "s": "str", "z": "int"}}, ValueError, "the collection lacks the columns 'z'"),
    "pickle": ({"columns": {"x": "pkl", "s": "str"}}, ValueError, "'x' has the encoding 'pkl', which is a pickle"),
    "unknown encoding": ({"columns": {"x": "int63", "s": "str"}}, ValueError, "'x' has the encoding 'int63', which is unknown"),
    "wrong encoding": ({"columns": {"x": "bytes", "s": "str"}}, CodecError, "cannot save key 'x' as 'bytes': it has no bytes"),
    "wrong shape": ({"columns": {"x": "ndarray:int64:3", "s": "str"}}, CodecError, "cannot save key 'x' with the encoding"),
    "compression": ({"compression": "lzma"}, ValueError, "compression is one of 'gz'"),
    "level": ({"compression": "zstd:99"}, ValueError, "compression is one of"),
    "hash": ({"hashes": ["crc"]}, ValueError, "no hash is called 'crc'"),
    "order of hashes": ({"hashes": ["sha1", "md5"]}, ValueError, "hashes are unique and sorted"),
    "size": ({"size_limit": "big"}, ValueError, "size_limit is a number of bytes"),
    "no size": ({"size_limit": 0}, ValueError, "size_limit is a number of bytes"),
    "option": ({"exist_ok": True}, TypeError, r"to_mds\(\) has no option 'exist_ok'"),
    "no place": ({"out": None}, TypeError, "takes out= or writer="),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_to_mds_refuses_and_writes_nothing(name: str, out: Path) -> None:
    options, error, message = REFUSED[name]
    td = TensorDict({"x": torch.arange(2), "s": ["a", "b"]}, [2])
    with pytest.raises(error, match=message):
        td.to_mds(**{"out": out, **options})
    assert not out.exists() and not [*out.parent.iterdir()]


def test_cell_without_elements_raises(out: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(0)], layout=torch.jagged)
    with pytest.raises(CodecError, match="cannot save key 'j', row 1: its cell has no elements"):
        TensorDict({"j": jagged}, [2]).to_mds(out=out)
    assert not out.exists()


def test_directory_with_files_raises(out: Path) -> None:
    out.mkdir()
    td = TensorDict({"x": torch.arange(2)}, [2])
    td.to_mds(out=out)  # an empty directory is free
    with pytest.raises(FileExistsError, match="has files: choose a new directory"):
        td.to_mds(out=out)
    assert_same(TensorDict.from_mds(out), td)


def test_remote_location_without_library_names_it() -> None:
    with contextlib.suppress(ImportError):
        import streaming  # noqa: F401

        pytest.skip("the library is installed")
    with pytest.raises(ImportError, match="needs mosaicml-streaming: pip install mosaicml-streaming"):
        TensorDict({"x": torch.arange(2)}, [2]).to_mds(out="s3://bucket/samples")


class Writer:
    """Collects samples, as an ``MDSWriter`` does."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.is_finished = False

    def write(self, sample: Any) -> None:
        self.samples.append(sample)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_finished = True


@pytest.mark.parametrize(
    ("td", "finish", "is_finished", "count"),
    [
        (TensorDict({"x": torch.arange(2), "s": ["a", "b"]}, [2]), None, True, 2),
        (TensorDict({"x": torch.arange(2), "s": ["a", "b"]}, [2]), False, False, 2),
        (TensorDict({"x": torch.tensor(0), "s": "a"}), None, False, 1),
        (TensorDict({"x": torch.tensor(0), "s": "a"}), True, True, 1),
    ],
    ids=["rows", "rows, open", "one sample", "one sample, finished"],
)
def test_writer_of_the_caller(td: Any, finish: bool | None, is_finished: bool, count: int) -> None:
    writer = Writer()
    td.to_mds(writer=writer, finish_writer=finish)
    assert writer.samples == [{"x": 0, "s": "a"}, {"x": 1, "s": "b"}][:count]
    assert writer.is_finished is is_finished and type(writer.samples[0]["x"]) is int


def change_index(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        index = read_index(out)
        change(index)
        (out / "index.json").write_text(json.dumps(index))

    return damage


def change_shard(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        path = out / "shard.00000.mds"
        path.write_bytes(change(path.read_bytes()))

    return damage


#: A change of a data set, and what the error says.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut shard": (change_shard(lambda content: content[:-1]), "shard.00000.mds is damaged: it has .* bytes"),
    "empty shard": (change_shard(lambda content: b""), "is damaged: it has 0 bytes"),
    "number of samples": (change_shard(lambda content: b"\7" + content[1:]), "it has 7 samples; expected 2"),
    "offsets": (change_shard(lambda content: content[:4] + b"\xff" * 12 + content[16:]), "its offsets leave the file"),
    "sizes of cells": (
        lambda out: change_shard(lambda content: content.replace(b"\1\0\0\0", b"\xff\0\0\0"))(out),
        "the cells of a sample are not those of its columns",
    ),
    "no JSON": (lambda out: (out / "index.json").write_text("{") and None, "index.json is damaged"),
    "no shards": (change_index(lambda index: index.pop("shards")), "index.json is damaged"),
    "version": (change_index(lambda index: index.update(version=3)), "has the version 3; expected 2"),
    "format": (change_index(lambda index: index["shards"][0].update(format="csv")), "has the format 'csv'"),
    "pickle": (change_index(lambda index: index["shards"][0].update(column_encodings=["int64", "pkl"])), "'s' is a pickle"),
    "unknown": (change_index(lambda index: index["shards"][0].update(column_encodings=["int64", "x"])), "'x', which is unknown"),
    "two names": (change_index(lambda index: index["shards"][0].update(column_names=["x", "x"])), "two columns have one name"),
    "path of a shard": (
        change_index(lambda index: index["shards"][0]["raw_data"].update(basename="../secret")),
        "which is not the name of a file",
    ),
    "samples": (change_index(lambda index: index["shards"][0].update(samples=-1)), "index.json is damaged"),
    "header": (change_index(lambda index: index.update(td={"version": 1, "schema": "AAAA"})), "the td header of the index is"),
    "later header": (change_index(lambda index: index.update(td={"version": 2})), "has the version 2; upgrade td-arrow"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_raises(name: str, out: Path) -> None:
    damage, message = DAMAGE[name]
    TensorDict({"x": torch.tensor([5, 6]), "s": ["a", "b"]}, [2]).to_mds(out=out)
    damage(out)
    with pytest.raises(FormatError, match=message):
        TensorDict.from_mds(out)


@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
def test_hash_finds_a_changed_byte(compression: str | None, out: Path) -> None:
    TensorDict({"x": torch.arange(4)}, [4]).to_mds(out=out, hashes=["sha256"], compression=compression)
    (path,) = out.glob("shard*")
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match="is damaged: its sha256 is not that of the index"):
        TensorDict.from_mds(out)


def test_pickle_is_never_loaded(out: Path) -> None:
    TensorDict({"x": [b"cos\nsystem\n(S'touch pwned'\ntR."]}, [1]).to_mds(out=out)
    change_index(lambda index: index["shards"][0].update(column_encodings=["pkl"]))(out)
    with pytest.raises(FormatError, match="'x' is a pickle, which can run any code: td never loads it"):
        TensorDict.from_mds(out)
    assert "pwned" not in os.listdir()


def test_absent_data_set_raises(out: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TensorDict.from_mds(out)


def test_url_is_read(out: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    td = TensorDict({"x": torch.arange(3)}, [3])
    td.to_mds(out=out)
    for path in out.iterdir():
        files.pipe(f"memory://mds/samples/{path.name}", path.read_bytes())
    assert_same(TensorDict.from_mds("memory://mds/samples"), td)
