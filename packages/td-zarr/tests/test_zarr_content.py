"""Every kind of node, dtype, leaf, key and value of a collection comes back, from every kind of store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import Tensor

import td_core
from td_core import TensorDict, TensorDictParams, lazy_stack
from td_zarr import load, save
from td_zarr import open as open_group

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and not value.is_complex}
    - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    - {getattr(torch, f"{sign}int{bits}", None) for sign in ("", "u") for bits in range(1, 8)}
    - {getattr(torch, f"bits{size}", None) for size in ("1x8", "2x4", "4x2", "8", "16")},
    key=str,
)
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]


def read_bytes(leaf: Tensor) -> bytes:
    """Return the elements of a dense tensor as bytes, for dtypes that torch cannot compare."""
    leaf = leaf.detach().clone().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return leaf.view(torch.uint8).numpy().tobytes()


def make_leaf(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a leaf whose bytes count up."""
    count = torch.Size(shape).numel() * dtype.itemsize
    content = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    return content.view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"chunks": (2, 2), "checksums": True}], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=str)
def test_leaf_of_every_dtype_comes_back(dtype: torch.dtype, options: Any, path: Path) -> None:
    leaf = make_leaf(dtype, 3, 4)
    td = TensorDict({"a": leaf, "s": make_leaf(dtype), "e": make_leaf(dtype, 0, 2)})
    save(td, path, **options)
    for found in (load(path), open_group(path), open_group(path, mode="c"), open_group(path, mode="r+")):
        for key, wanted in td.items():
            assert (found[key].dtype, found[key].shape) == (dtype, wanted.shape)
            assert read_bytes(found[key]) == read_bytes(wanted)


@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.int16], ids=str)
def test_write_in_place_keeps_every_dtype(dtype: torch.dtype, options: Any, path: Path) -> None:
    leaf = make_leaf(dtype, 3, 4)
    save(TensorDict({"a": leaf}, [3]), path, **options)
    opened = open_group(path, mode="r+")
    opened[1] = TensorDict({"a": leaf[2]})
    assert read_bytes(load(path)["a"]) == read_bytes(leaf[[0, 2, 2]])


def make_nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(i + 1, 2) * i for i in range(3)], layout=layout)


TIED = torch.arange(6.0).view(3, 2)
#: Leaves of a collection with the batch size [3].
LEAVES: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "step": lambda: torch.arange(12.0)[::4],
    "reversed": lambda: torch.arange(3.0).flip(0),
    "conjugate": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "negative": lambda: torch.complex(torch.arange(3.0), torch.ones(3)).conj().imag,
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 2000),
    "expanded scalar": lambda: torch.tensor(2.0).expand(3, 2000),
    "expanded bfloat16": lambda: torch.tensor(2.0).bfloat16().expand(3, 2000),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "jagged": lambda: make_nested(torch.jagged),
}


@pytest.mark.parametrize("options", [{}, {"chunks": 2, "checksums": True}], ids=str)
@pytest.mark.parametrize("name", LEAVES)
def test_leaf_of_every_layout_comes_back(name: str, options: Any, path: Path) -> None:
    wanted = LEAVES[name]()
    save(TensorDict({"a": wanted}, [3]), path, **options)
    for found in (load(path)["a"], open_group(path)["a"]):
        assert found.is_nested == wanted.is_nested
        pairs = zip(found.unbind(), wanted.unbind(), strict=True) if wanted.is_nested else [(found, wanted)]
        for one, other in pairs:
            assert one.shape == other.shape
            assert torch.equal(one.detach().clone(), other.detach().resolve_conj().resolve_neg())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_save_sparse_leaf_raises_with_key(layout: Any, path: Path) -> None:
    leaf = torch.eye(3).to_sparse(layout=layout)
    with pytest.raises(td_core.CodecError, match=r"cannot save .*'n', 'a'.*to_dense"):
        save(TensorDict({"n": {"a": leaf}}), path)
    assert not path.exists()


def test_tied_leaves_are_stored_once_and_tied_again(path: Path) -> None:
    save(TensorDict({"a": TIED, "n": {"b": TIED}, "c": TIED.t()}), path)
    assert not (path / "n" / "b").exists()
    found = load(path)
    assert found["a"] is found["n", "b"]
    assert torch.equal(found["c"], TIED.t())


#: Keys that the names of nodes, or of files, cannot have, with the name that each gets.
KEYS = {
    "a/b": "a%2Fb",
    "": "%",
    ".": "%.",
    "..": "%..",
    ".hidden": "%.hidden",
    "__reserved": "%__reserved",
    "zarr.json": "%zarr.json",
    "back\\slash": "back%5Cslash",
    "per%cent": "per%25cent",
    "line\nend": "line%0Aend",
    "end ": "%end ",
    "é": "é",
    "c": "c",
    "\ud800": "%ED%A0%80",
    "x" * 300: "x" * 200,
    "x" * 301: "x" * 200 + "#1",
    "data": "data",
}


def test_every_key_comes_back_under_name_that_files_can_have(path: Path) -> None:
    td = TensorDict({key: torch.tensor(float(i)) for i, key in enumerate(KEYS)})
    save(td, path)
    assert {child.name for child in path.iterdir()} - {"zarr.json"} == set(KEYS.values())
    found = load(path)
    assert list(found.keys()) == list(KEYS)
    assert [leaf.item() for leaf in found.values()] == list(range(len(KEYS)))
    assert load(path, keys="a/b")["a/b"] == 0
    assert len(dict(zarr.open_group(path, mode="r").arrays())) == len(KEYS)


def test_key_of_leaf_and_of_member_do_not_clash(path: Path) -> None:
    members = [TensorDict({"a": torch.full((1 + i,), i)}) for i in range(2)]
    td = TensorDict({"s": lazy_stack(members), "s#1": torch.ones(1), "t": {"a": torch.ones(1)}})
    save(td, path)
    found = load(path)
    assert [member["a"].tolist() for member in found["s"].tensordicts] == [[0], [1, 1]]
    assert found["t", "a"] == found["s#1"] == 1


def make_member(i: int) -> TensorDict:
    return TensorDict({"x": torch.full((2, 3), i), "n": {"y": torch.full((2,), float(i))}}, [2])


@pytest.mark.parametrize("options", [{}, {"chunks": 1}], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_equal_members_are_one_array(dim: int, options: Any, path: Path) -> None:
    td = TensorDict({"s": lazy_stack([make_member(i) for i in range(3)], dim)})
    save(td, path, **options)
    group = zarr.open_group(path, mode="r")
    assert np.array_equal(
        group["s/x"][...], torch.stack([make_member(i)["x"] for i in range(3)], dim).numpy()
    )
    for found in (load(path)["s"], open_group(path)["s"], open_group(path, mode="r+")["s"]):
        assert type(found) is type(td["s"])
        assert found.stack_dim == dim
        assert all(
            (one == other).all() for one, other in zip(found.tensordicts, td["s"].tensordicts, strict=True)
        )


def test_uneven_members_are_groups(path: Path) -> None:
    td = lazy_stack([TensorDict({"a": torch.full((i,), i)}) for i in range(3)])
    save(td, path)
    assert [member["a"].tolist() for member in load(path).tensordicts] == [[], [1], [2, 2]]


def test_names_batch_size_order_and_device_come_back(path: Path) -> None:
    inner = TensorDict({"y": torch.zeros(2, 3, 4)}, [2, 3], names=["t", "u"])
    td = TensorDict({"z": torch.zeros(2), "n": inner, "a": torch.zeros(2)}, [2], names=["t"], device="cpu")
    save(td, path)
    found = load(path)
    assert (list(found.keys()), found.names, found["n"].names) == (["z", "n", "a"], ["t"], ["t", "u"])
    assert (found.batch_size, found["n"].batch_size, found.device) == ((2,), (2, 3), torch.device("cpu"))


def test_params_come_back_as_params(path: Path) -> None:
    save(TensorDict({"p": TensorDictParams(TensorDict({"w": torch.ones(2, 2)}))}), path)
    found = load(path)["p"]
    assert type(found) is TensorDictParams
    assert isinstance(found["w"], torch.nn.Parameter)


VALUES = [
    "text",
    3,
    2.5,
    None,
    True,
    (1, [2, {"k": b"\x00"}]),
    {"k": [1, None]},
    float("inf"),
    {1, 2},
    "\ud800",
]


@pytest.mark.parametrize("value", VALUES, ids=ascii)
def test_value_comes_back_with_its_type(value: Any, path: Path) -> None:
    values = pytest.importorskip("td_tensorclass")
    td = TensorDict({"v": values.NonTensorData(value), "a": torch.ones(2)})
    save(td, path)
    for found in (load(path), open_group(path)):
        assert repr(found["v"]) == repr(value)


def test_value_without_serializer_raises_before_anything_is_written(path: Path) -> None:
    values = pytest.importorskip("td_tensorclass")
    td = TensorDict({"a": torch.ones(2), "n": {"v": values.NonTensorData(object())}})
    with pytest.raises(td_core.CodecError, match=r"cannot save .*'n', 'v'.*no serializer is registered"):
        save(td, path)
    assert not list(path.parent.iterdir())


def test_deep_collection_comes_back(path: Path) -> None:
    td = TensorDict({"a": torch.ones(2)})
    for _ in range(200):
        td = TensorDict({"n": td})
    with zarr.config.set({"async.concurrency": 4}):
        save(td, zarr.storage.MemoryStore())
    if len(str(path)) + 2 * 200 < 4000:
        save(td, path)
        assert load(path).depth == 200


def test_save_meta_leaf_raises_with_key(path: Path) -> None:
    with pytest.raises(td_core.CodecError, match="cannot save .*'a'.*'meta'"):
        save(TensorDict({"a": torch.ones(2, device="meta")}), path)
