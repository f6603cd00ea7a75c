"""mosaicml-streaming reads what td writes, and td reads what it writes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("td_tensorclass")  # columns of text become values
if importlib.util.find_spec("streaming") and not importlib.util.find_spec("torchvision"):
    # The library imports three names of it at once, and its release must be that of torch.
    for name in (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    ):
        sys.modules[name] = importlib.util.module_from_spec(
            importlib.machinery.ModuleSpec(name, None, is_package=True)
        )
        for attribute in ("CIFAR10", "VisionDataset", "to_tensor"):
            setattr(sys.modules[name], attribute, type(attribute, (), {}))
streaming = pytest.importorskip("streaming")

from td_core import TensorDict  # noqa: E402
from td_core.testing import assert_same  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the library

PACKINGS: list[dict[str, Any]] = [
    {},
    {"size_limit": 300, "hashes": ["sha1", "xxh64"]},
    *({"compression": name} for name in ("br", "bz2:3", "gz", "snappy", "zstd:7")),
]


@pytest.fixture
def td() -> TensorDict:
    """Return a collection of all kinds of columns."""
    return TensorDict(
        {
            "x": torch.tensor([2**53 + 1, -1, 0, 1]),
            "h": torch.tensor([0.5, -1.5, 2.0, 65504.0], dtype=torch.float16),
            "b": torch.tensor([True, False, False, True]),
            "v": torch.arange(24, dtype=torch.int16).view(4, 2, 3),
            "s": ["a", "", 'b"', "é"],
            "y": [b"a", b"", b"\xff", b"\0"],
            "d": [{"a": 1}, None, [1.5], "t"],
            "j": torch.nested.nested_tensor(
                [torch.arange(n).float() for n in (2, 1, 3, 1)], layout=torch.jagged
            ),
            "n": {"z": torch.arange(4, dtype=torch.uint8)},
        },
        [4],
    )


def list_samples(td: TensorDict) -> list[dict[str, Any]]:
    """Return what the library has for each row."""
    flat = td.flatten_keys(".")
    rows: list[dict[str, Any]] = []
    for i in range(len(td)):
        found = {key: flat[key][i] for key in ("x", "h", "b", "v", "n.z")}
        values = {key: list(td[key])[i] for key in ("s", "y", "d")}
        rows.append({**found, **values, "j": td["j"].unbind()[i]})
    return rows


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_library_reads_what_td_writes(td: TensorDict, options: dict[str, Any], tmp_path: Path) -> None:
    td.to_mds(out=tmp_path / "samples", **options)
    data = streaming.StreamingDataset(local=str(tmp_path / "samples"), shuffle=False, batch_size=1)
    assert len(data) == len(td)
    for sample, wanted in zip((data[i] for i in range(len(td))), list_samples(td), strict=True):
        assert {*sample} == {*wanted}
        for key, item in wanted.items():
            if isinstance(item, torch.Tensor):
                numbers = item.to(torch.uint8) if item.dtype == torch.bool else item
                assert np.asarray(sample[key]).dtype == numbers.numpy().dtype, key
                np.testing.assert_array_equal(sample[key], numbers.numpy(), key)
            else:
                assert sample[key] == item, key


@pytest.mark.parametrize("options", PACKINGS, ids=str)
def test_td_reads_what_the_library_writes(options: dict[str, Any], tmp_path: Path) -> None:
    out, random = str(tmp_path / "samples"), np.random.default_rng(0)
    columns = {
        "i": "int", "u": "uint16", "f": "float32", "s": "str", "y": "bytes", "o": "json", "t": "str_int",
        "v": "ndarray:float32:2,3", "j": "ndarray:int64", "w": "ndarray",
    }  # fmt: skip
    samples = [
        {
            "i": -n, "u": np.uint16(n), "f": np.float32(n / 4), "s": f"é{n}", "y": bytes([n]), "o": {"a": [n]}, "t": n**9,
            "v": random.random((2, 3), np.float32), "j": np.arange(n + 1), "w": np.full((n + 1, 2), n, np.int8),
        }
        for n in range(9)
    ]  # fmt: skip
    with streaming.MDSWriter(out=out, columns=columns, **options) as writer:
        for sample in samples:
            writer.write(sample)
    td = TensorDict.from_mds(out)
    assert td.batch_size == torch.Size([9])
    for key, dtype in {
        "i": torch.int64,
        "u": torch.uint16,
        "f": torch.float32,
        "v": torch.float32,
        "t": torch.int64,
    }.items():
        assert td[key].dtype == dtype
        assert td[key].tolist() == [np.asarray(sample[key]).tolist() for sample in samples]
    for key in ("s", "y", "o"):
        assert list(td[key]) == [sample[key] for sample in samples]
    for key in ("j", "w"):
        assert [part.tolist() for part in td[key].unbind()] == [sample[key].tolist() for sample in samples]
    assert_same(TensorDict.from_mds(out, rows=[7, 2], keys=["v", "f"]), td.select("v", "f")[[7, 2]])


def test_td_writes_to_a_writer_of_the_library(tmp_path: Path) -> None:
    out = str(tmp_path / "samples")
    td = TensorDict({"x": torch.arange(3), "v": torch.rand(3, 2), "s": ["a", "b", "c"]}, [3])
    columns = {"x": "int64", "v": "ndarray:float32:2", "s": "str"}
    td.to_mds(writer=streaming.MDSWriter(out=out, columns=columns))
    assert_same(TensorDict.from_mds(out).select(*td.keys()), td)  # the library sorts columns


def test_library_merges_indexes_of_td(tmp_path: Path) -> None:
    for part in ("a", "b"):
        TensorDict({"x": torch.arange(3), "s": [part] * 3}, [3]).to_mds(out=tmp_path / part)
    streaming.base.util.merge_index(str(tmp_path), keep_local=True)
    data = streaming.StreamingDataset(local=str(tmp_path), shuffle=False, batch_size=1)
    assert [(int(row["x"]), row["s"]) for row in data] == [(i, part) for part in "ab" for i in range(3)]
