"""What a save contains: the groups, datasets and attributes that other programs see, and what comes back."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from td_core import CodecError, LazyStackedTensorDict, TensorDict, load
from td_core import save as save_any
from td_hdf5 import save


def list_links(path: Path) -> dict[str, Any]:
    """Return the shape of each dataset, and None for each group."""
    found: dict[str, Any] = {}

    def walk(group: h5py.Group) -> None:
        for key in group:
            item = group[key]
            found[item.name] = item.shape if isinstance(item, h5py.Dataset) else None
            if isinstance(item, h5py.Group):
                walk(item)

    with h5py.File(path) as file:
        walk(file)
    return found


def test_save_keeps_order_of_keys_for_other_programs(path: Path) -> None:
    td = TensorDict({"z": torch.ones(2), "n": {"y": torch.ones(2), "b": {}}, "a": torch.ones(2, 3)}, [2])
    save(td, path)
    assert list_links(path) == {"/z": (2,), "/n": None, "/n/y": (2,), "/n/b": None, "/a": (2, 3)}


@pytest.mark.parametrize("dtype", [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.int32, torch.uint32, torch.float32,
    torch.int64, torch.uint64, torch.float64, torch.complex64, torch.complex128,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"chunks": 1}], ids=str)
def test_native_dtype_is_that_of_numpy(dtype: torch.dtype, options: Any, path: Path) -> None:
    leaf = torch.tensor([[0, 1], [1, 0]], dtype=torch.int64).to(dtype)
    save(TensorDict({"a": leaf}), path, **options)
    with h5py.File(path) as file:
        assert file["a"].dtype == np.dtype(str(dtype).removeprefix("torch."))
        assert file["a"][()].tolist() == leaf.tolist()
    assert load(path)["a"].tolist() == leaf.tolist()


@pytest.mark.parametrize(
    ("dtype", "stored", "shape"),
    [
        (torch.bfloat16, "uint16", (3,)),
        (torch.float8_e5m2, "uint8", (3,)),
        (torch.float8_e4m3fn, "uint8", (3,)),
        (torch.complex32, "float16", (3, 2)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_missing_dtype_is_stored_with_its_name(
    dtype: Any, stored: str, shape: Any, path: Path, same: Any
) -> None:
    td = TensorDict({"a": torch.tensor([1.0, 0.5, 2.0]).to(dtype)}, [3])
    save(td, path)
    same(load(path), td)
    with h5py.File(path) as file:
        assert (file["a"].dtype, file["a"].shape) == (np.dtype(stored), shape)
        assert file["a"].attrs["td_dtype"].decode() == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("a/b", "a%2Fb"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("...", "..."),
        ("", "%"),
        ("a\0b", "a%00b"),
        ("é中", "é中"),
        ("\ud800", "\\ud800"),
        ("td.0", "td.0"),
        ("a.b", "a.b"),
    ],
)
def test_key_is_escaped_and_comes_back(key: str, name: str, path: Path) -> None:
    save(TensorDict({key: torch.ones(1), "n": {key: torch.zeros(1)}}), path)
    assert {*list_links(path)} == {f"/{name}", "/n", f"/n/{name}"}
    assert [*load(path).keys(True, True)] == [key, ("n", key)]


def test_keys_with_equal_names_are_numbered(path: Path) -> None:
    td = TensorDict({"a/b": torch.tensor(1), "a%2Fb": torch.tensor(2), "a": {"b": torch.tensor(3)}})
    save(td, path)
    assert {*list_links(path)} == {"/a%2Fb", "/a%2Fb#1", "/a", "/a/b"}
    found = load(path)
    assert [found["a/b"].item(), found["a%2Fb"].item(), found["a", "b"].item()] == [1, 2, 3]


def test_dim_names_are_labels_and_attributes(path: Path) -> None:
    save(
        TensorDict({"a": torch.ones(2, 3, 4), "n": {"b": torch.ones(2, 3)}}, [2, 3], names=["x", None]), path
    )
    with h5py.File(path) as file:
        assert [dim.label for dim in file["a"].dims] == ["x", "", ""]
        assert [dim.label for dim in file["n/b"].dims] == ["x", ""]
        assert (file.attrs["td_batch_size"], file["n"].attrs["td_names"]) == (b"[2, 3]", b'["x", null]')
    assert load(path).names == ["x", None]


def member(i: int, size: int = 2) -> TensorDict:
    return TensorDict({"a": torch.full((size, 3), i), "n": {"b": torch.full((size,), float(i))}}, [size])


@pytest.mark.parametrize("dim", [0, 1])
def test_even_lazy_stack_is_one_dataset_per_key(dim: int, path: Path, same: Any) -> None:
    td = TensorDict({"s": LazyStackedTensorDict(*(member(i) for i in range(3)), stack_dim=dim)})
    save(td, path)
    lead = (3, 2) if dim == 0 else (2, 3)
    assert list_links(path) == {"/s": None, "/s/a": (*lead, 3), "/s/n": None, "/s/n/b": lead}
    same(load(path), td)
    with h5py.File(path) as file:
        assert file["s/a"][()].tolist() == torch.stack([member(i)["a"] for i in range(3)], dim).tolist()


def test_uneven_lazy_stack_is_a_group_per_member(path: Path, same: Any) -> None:
    stack = LazyStackedTensorDict(*(TensorDict({"a": torch.ones(i)}) for i in (2, 3)))
    save(stack, path)
    assert list_links(path) == {"/0": None, "/0/a": (2,), "/1": None, "/1/a": (3,)}
    same(load(path), stack)


def test_tied_leaf_is_stored_once_and_tied_again(path: Path) -> None:
    leaf = torch.arange(3.0)
    save(TensorDict({"a": leaf, "n": {"b": leaf}, "c": leaf.clone()}), path)
    assert {*list_links(path)} == {"/a", "/n", "/c"}
    found = load(path)
    assert found["a"] is found["n", "b"]
    assert found["c"] is not found["a"]


@pytest.mark.parametrize("size", [3, 10_000])
def test_expanded_leaf_is_stored_once_if_that_is_worth_it(size: int, path: Path, same: Any) -> None:
    td = TensorDict({"a": torch.tensor([[2.0]]).expand(size, 2)})
    save(td, path)
    assert list_links(path)["/a"] == ((3, 2) if size == 3 else (1, 1))
    same(load(path), td)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensor_comes_back(layout: Any, path: Path, same: Any) -> None:
    leaf = torch.nested.nested_tensor([torch.ones(2, 2), torch.zeros(3, 2)], layout=layout)
    save(TensorDict({"a": leaf}), path)
    found = load(path)["a"]
    assert found.layout is leaf.layout
    assert [part.tolist() for part in found.unbind()] == [part.tolist() for part in leaf.unbind()]


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize(
    "make", [torch.Tensor.to_sparse, lambda leaf: torch.quantize_per_tensor(leaf, 1.0, 0, torch.qint8)]
)
def test_save_unsupported_leaf_raises_and_writes_nothing(make: Any, path: Path) -> None:
    with pytest.raises(
        CodecError, match=r"cannot save key \('n', 'a'\): a (tensor with the layout|quantized)"
    ):
        save(TensorDict({"n": {"a": make(torch.ones(2))}}), path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("td_tensorclass") is None, reason="needs td-tensorclass")
@pytest.mark.parametrize(
    "value",
    ["text", b"bytes", None, 3, 2.5, True, float("inf"), (1, "a"), {"k": [1, {"x": None}]}, {1, 2}, [1, 2]],
    ids=repr,
)
def test_value_keeps_type_and_batch_size(value: Any, path: Path) -> None:
    package = importlib.import_module("td_tensorclass")
    td = TensorDict({"a": torch.ones(3), "v": package.NonTensorData(value, batch_size=[3])}, [3])
    save(td, path)
    found = load(path)
    assert (found["v"], type(found["v"])) == (value, type(value))
    assert found.batch_size == found.get("v").batch_size == (3,)


@pytest.mark.skipif(importlib.util.find_spec("td_tensorclass") is None, reason="needs td-tensorclass")
def test_value_without_serializer_raises(path: Path) -> None:
    package = importlib.import_module("td_tensorclass")
    td = TensorDict({"n": {"v": package.NonTensorData(object())}})
    with pytest.raises(CodecError, match=r"\('n', 'v'"):
        save(td, path)
    assert not path.exists()


def test_large_header_is_split_into_attributes(path: Path, same: Any) -> None:
    td = TensorDict({f"key number {i}" * 20: torch.tensor(i) for i in range(1200)})
    save(td, path)
    with h5py.File(path) as file:
        names = [name for name in file.attrs if name.startswith("td.")]
        assert sorted(names)[:3] == ["td.0", "td.1", "td.10"]
        assert all(len(file.attrs[name]) <= 60_000 for name in names)
    same(load(path), td)


@pytest.mark.parametrize(
    ("options", "chunks", "compression"),
    [
        ({}, None, None),
        ({"chunks": 2}, (2, 3, 4), None),
        ({"chunks": (2, 2)}, (2, 2, 4), None),
        ({"chunks": (50, 50, 50, 50)}, (10, 3, 4), None),
        ({"chunks": True}, (10, 3, 4), None),
        ({"compression": "gzip"}, (10, 3, 4), "gzip"),
        ({"compression": "gzip", "compression_opts": 9, "chunks": 5}, (5, 3, 4), "gzip"),
        ({"compression": "lzf", "shuffle": True}, (10, 3, 4), "lzf"),
        ({"fletcher32": True, "chunks": 1}, (1, 3, 4), None),
    ],
    ids=str,
)
def test_options_of_datasets(options: Any, chunks: Any, compression: Any, path: Path, same: Any) -> None:
    td = TensorDict(
        {"a": torch.arange(120).view(10, 3, 4), "n": {"b": torch.tensor(1), "c": torch.zeros(0, 3)}}
    )
    save_any(td, path, format="hdf5", **options)
    with h5py.File(path) as file:
        assert (file["a"].chunks, file["a"].compression) == (chunks, compression)
        assert file["a"].compression_opts == options.get(
            "compression_opts", 4 if compression == "gzip" else None
        )
        assert file["a"].shuffle is options.get("shuffle", False)
        assert file["n/b"].chunks is None
    same(load(path), td)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compression": "zip"},
            r"cannot store key 'a' as a dataset: Compression filter \"zip\" is unavailable",
        ),
        (
            {"compression": "gzip", "compression_opts": 12},
            "cannot store key 'a' as a dataset: GZIP setting must be",
        ),
        ({"chunks": 0}, r"chunks are True, or positive sizes of the first dims; got 0"),
        ({"chunks": "big"}, "chunks are True"),
    ],
)
def test_invalid_option_raises_and_keeps_old_file(
    options: Any, message: str, path: Path, td: TensorDict, same: Any
) -> None:
    save(td, path)
    with pytest.raises(ValueError, match=message):
        save(td + 1, path, **options)
    assert [item.name for item in path.parent.iterdir()] == ["data.h5"]
    same(load(path), td)


def test_save_to_directory_raises(tmp_path: Path, td: TensorDict) -> None:
    with pytest.raises(IsADirectoryError, match="which is a directory: pass the path of a file"):
        save(td, tmp_path)


def test_save_in_background_returns_future(path: Path, td: TensorDict, same: Any) -> None:
    assert save(td, path, return_early=True).result() is td
    same(load(path), td)


def test_progress_counts_bytes(path: Path, td: TensorDict) -> None:
    seen: list[tuple[int, int]] = []
    save(td, path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (td.bytes(), td.bytes())
    seen.clear()
    load(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (td.bytes(), td.bytes())


def test_requires_grad_saves_values(path: Path) -> None:
    save(TensorDict({"a": torch.ones(2, requires_grad=True)}), path)
    assert load(path)["a"].requires_grad is False


def test_stored_leaf_of_another_file_is_copied_in_parts(path: Path, tmp_path: Path, same: Any) -> None:
    td = TensorDict({"a": torch.arange(3_000_000).view(-1, 3), "c": torch.ones(5, dtype=torch.bfloat16)})
    save(td, path, chunks=True)
    save(TensorDict.open(path), tmp_path / "copy.h5")
    same(load(tmp_path / "copy.h5"), td)


@pytest.mark.parametrize("strategy", ["auto", "mmap", "read"])
@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("options", [{}, {"chunks": 2, "compression": "gzip"}], ids=str)
def test_load_strategy_returns_same(
    strategy: str, threads: int, options: Any, path: Path, td: TensorDict, same: Any
) -> None:
    save(td, path, **options)
    found = load(path, strategy=strategy, num_threads=threads)
    found["a"].zero_()  # private
    same(load(path, strategy=strategy, num_threads=threads), td)


def test_load_unknown_strategy_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    with pytest.raises(ValueError, match="strategy is 'auto', 'mmap' or 'read'; got 'fast'"):
        load(path, strategy="fast")
