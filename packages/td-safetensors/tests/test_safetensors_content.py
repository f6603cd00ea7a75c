"""What a file holds: every dtype and layout comes back, and other programs find the tensors at their names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import CodecError, LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack, load
from td_core.errors import UnsupportedOperationError
from td_safetensors import save

#: Every dtype of this torch whose elements can be stored.
STORABLE = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.quint"))
    },
    key=str,
)


def make_leaf(dtype: torch.dtype) -> torch.Tensor:
    count = 8 * dtype.itemsize
    if dtype is torch.bool:
        return torch.arange(8).view(2, 4) % 2 == 0
    return torch.arange(count, dtype=torch.uint8).view(2, -1).view(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("strategy", ["mmap", "read"])
@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_save_dtype_returns_same_bytes(dtype: torch.dtype, strategy: str, path: Path, same: Any) -> None:
    td = TensorDict({"x": make_leaf(dtype), "row": make_leaf(dtype)[1], "no": torch.empty(0, 3, dtype=dtype)})
    save(td, path)
    same(load(path, strategy=strategy), td)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("dtype", "name", "shape"),
    [
        ("float32", "F32", [2, 4]),
        ("bfloat16", "BF16", [2, 4]),
        ("uint16", "U16", [2, 4]),
        ("complex64", "C64", [2, 4]),
        ("float8_e5m2", "F8_E5M2", [2, 4]),
        ("float8_e8m0fnu", "F8_E8M0", [2, 4]),
        ("float4_e2m1fn_x2", "F4", [2, 8]),
        ("complex128", "F64", [2, 4, 2]),
        ("complex32", "F16", [2, 4, 2]),
        ("bits8", "U8", [2, 4]),
    ],
)
def test_save_dtype_has_name_and_shape_of_format(
    dtype: str, name: str, shape: list[int], path: Path, read_header: Any
) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    save(TensorDict({"x": make_leaf(getattr(torch, dtype))}), path)
    row = read_header(path)["x"]
    assert (row["dtype"], row["shape"]) == (name, shape)


LEAVES: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "conjugate": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "part of a storage": lambda: torch.arange(100)[10:20:3],
    "small expanded": lambda: torch.zeros(1).expand(3),
    "large expanded": lambda: torch.arange(3.0).view(3, 1, 1).expand(3, 500, 2),
    "scalar expanded": lambda: torch.tensor(7).expand(1000),
    "expanded complex": lambda: torch.ones(1, dtype=torch.complex128).expand(1000),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)).data,
    "no dims": lambda: torch.tensor(3.5),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=torch.jagged),
    "jagged complex": lambda: torch.nested.nested_tensor(
        [torch.ones(2, dtype=torch.complex128), torch.zeros(1, dtype=torch.complex128)], layout=torch.jagged
    ),
    "jagged in dim 2": lambda: torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.zeros(4, 3)], layout=torch.jagged
    ).transpose(1, 2),
    "jagged with gaps": lambda: torch.nested.nested_tensor_from_jagged(
        torch.arange(10.0), torch.tensor([0, 4, 10]), torch.tensor([2, 5])
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 1)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("strategy", ["mmap", "read"])
@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_save_leaf_returns_same_elements(make: Any, strategy: str, path: Path, same: Any) -> None:
    leaf = make()
    td = TensorDict({"x": leaf, "y": torch.ones(1)})
    save(td, path)
    result = load(path, strategy=strategy)
    same(result, td)
    if leaf.layout is torch.jagged:
        # The offsets of a jagged tensor with gaps are its own.
        assert torch.equal(result["x"].offsets(), leaf.offsets())
        assert [type(size) for size in result["x"].shape] == [type(size) for size in leaf.shape]


def test_save_expanded_leaf_is_stored_once(path: Path) -> None:
    td = TensorDict({"x": torch.ones(3, 1).expand(3, 1_000_000)})
    save(td, path)
    assert path.stat().st_size < 2000
    assert load(path)["x"].stride() == (1, 0)


def test_save_jagged_leaves_share_offsets(path: Path) -> None:
    one = torch.nested.nested_tensor([torch.ones(2), torch.zeros(4)], layout=torch.jagged)
    save(TensorDict({"x": one, "y": one + 1}), path)
    result = load(path)
    torch.testing.assert_close((result["x"] + result["y"]).values(), torch.tensor([3.0, 3, 1, 1, 1, 1]))


def test_save_tied_leaves_are_stored_once(path: Path, read_header: Any) -> None:
    leaf = torch.arange(4.0)
    td = TensorDict({"a": leaf, "n": {"b": leaf, "view": leaf.view(4)}, "half": leaf[:2]})
    save(td, path)
    assert [name for name in read_header(path) if name != "__metadata__"] == ["a", "half"]
    result = load(path)
    assert result["a"] is result["n", "b"]
    result["a"][0] = 9
    assert result["n", "view"][0] == 9
    assert result["half"][0] == 0


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), r"'n', 'x'.*sparse.*to_dense\(\)"),
        (lambda: torch.ones(2, device="meta"), r"'n', 'x'.*'meta' has no elements"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            r"'n', 'x'.*quantized.*int_repr\(\)",
        ),
    ],
    ids=["sparse", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_save_unstorable_leaf_raises_with_key(leaf: Any, message: str, path: Path, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match=message):
        save(TensorDict({"n": {"x": leaf()}}), path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["a.b", ("a", "b")], ["a.b", "a.b#1"]),
        ([("a", "b"), "a.b", ("a", "c.d"), ("a.c", "d")], ["a.b", "a.b#1", "a.c.d", "a.c.d#1"]),
        (["a#1", "a"], ["a#1", "a"]),
        ([""], [""]),
        (["__metadata__"], ["__metadata__#1"]),
        (["é/\n", "日本"], ["é/\n", "日本"]),
        (["\ud800"], ["\\ud800"]),
    ],
    ids=["clash", "clashes", "number", "empty", "reserved", "unicode", "surrogate"],
)
def test_save_keys_get_free_names(
    keys: list[Any], names: list[str], path: Path, same: Any, read_header: Any
) -> None:
    td = TensorDict()
    for i, key in enumerate(keys):
        td.set(key, torch.tensor(i))
    save(td, path)
    found = [name for name in read_header(path) if name != "__metadata__"]
    assert sorted(found) == sorted(names)
    same(load(path), td)


def make_member(i: int) -> TensorDict:
    return TensorDict({"x": torch.full((2, 3), i), "n": {"y": torch.full((2,), float(i))}}, batch_size=[2])


STACKS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "dim 0": (lambda: LazyStackedTensorDict(*map(make_member, range(3))), ["s.x", "s.n.y"]),
    "dim 1": (lambda: LazyStackedTensorDict(*map(make_member, range(3)), stack_dim=1), ["s.x", "s.n.y"]),
    "one member": (lambda: LazyStackedTensorDict(make_member(0)), ["s.x", "s.n.y"]),
    "no members": (lambda: LazyStackedTensorDict(stack_dim=0), []),
    "uneven": (
        lambda: LazyStackedTensorDict(*(TensorDict({"x": torch.ones(i)}) for i in range(2))),
        ["s.0.x", "s.1.x"],
    ),
    "other keys": (
        lambda: LazyStackedTensorDict(TensorDict({"x": torch.ones(1)}), TensorDict({"y": torch.ones(1)})),
        ["s.0.x", "s.1.y"],
    ),
    "nested stacks": (
        lambda: LazyStackedTensorDict(
            *(LazyStackedTensorDict(make_member(i), make_member(3)) for i in range(2))
        ),
        ["s.0.x", "s.0.n.y", "s.1.x", "s.1.n.y"],
    ),
    "complex": (
        lambda: LazyStackedTensorDict(
            *(TensorDict({"x": torch.full((2,), i, dtype=torch.complex128)}) for i in range(2))
        ),
        ["s.0.x", "s.1.x"],
    ),
}


@pytest.mark.parametrize("strategy", ["mmap", "read"])
@pytest.mark.parametrize(("make", "names"), STACKS.values(), ids=STACKS)
def test_save_lazy_stack_returns_members(
    make: Any, names: list[str], strategy: str, path: Path, same: Any, read_header: Any
) -> None:
    td = TensorDict({"s": make()})
    save(td, path)
    same(load(path, strategy=strategy), td)
    assert sorted(name for name in read_header(path) if name != "__metadata__") == sorted(names)


def test_save_lazy_stack_of_tied_members_keeps_them_tied(path: Path, same: Any) -> None:
    shared = torch.ones(2)
    stack = LazyStackedTensorDict(*(TensorDict({"x": torch.full((2,), i), "w": shared}) for i in range(2)))
    save(stack, path)
    result = load(path)
    same(result, stack)
    assert result.tensordicts[0]["w"] is result.tensordicts[1]["w"]


def test_save_deep_collection_loads(path: Path) -> None:
    td = TensorDict({"x": torch.ones(1)})
    for _ in range(2000):
        td = TensorDict({"n": td})
    save(td, path)
    result = load(path)
    for _ in range(2000):
        result = result["n"]
    assert result["x"] == 1


def test_save_parameters_keep_their_class(path: Path, same: Any) -> None:
    params = TensorDictParams(TensorDict({"w": torch.ones(2), "n": {"b": torch.zeros(1)}}))
    save(params, path)
    result = load(path)
    assert type(result) is TensorDictParams
    assert [type(leaf) for leaf in result.values(True, True)] == [torch.nn.Parameter] * 2
    assert [leaf.requires_grad for leaf in result.values(True, True)] == [True, True]


def test_save_keeps_lock_names_and_device(path: Path, same: Any) -> None:
    td = TensorDict({"a": torch.ones(2, 3)}, [2, 3], names=["x", None], device="cpu").lock_()
    save(td, path)
    result = load(path)
    same(result, td)
    assert result.device == torch.device("cpu")


def test_save_file_is_read_by_safetensors(path: Path, td: TensorDict) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    td["n", "f8"] = torch.ones(4, 2).to(torch.float8_e4m3fn)
    save(td, path)
    found = safetensors.load_file(path)
    assert sorted(found) == ["a", "n.b", "n.c", "n.f8"]
    for name, leaf in found.items():
        assert torch.equal(leaf.float(), td[tuple(name.split("."))].float())


def test_save_data_is_aligned(path: Path) -> None:
    td = TensorDict(
        {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(1)}
    )
    save(td, path)
    content = path.read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0
    assert all(leaf.data_ptr() % leaf.dtype.itemsize == 0 for leaf in load(path).values())


def test_load_mapped_leaves_are_private_and_apart(path: Path, td: TensorDict) -> None:
    save(td, path)
    before = path.read_bytes()
    result = load(path, strategy="mmap")
    result["a"].zero_()
    assert path.read_bytes() == before
    assert result["n", "b"].untyped_storage().nbytes() == 32
    assert load(path)["a"][1, 0] == 3


def make_nested(layout: torch.layout, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the strided layout
        return torch.nested.nested_tensor(
            [torch.ones(i + 1, 2, dtype=dtype) for i in range(4)], layout=layout
        )


def make_members(*sizes: int) -> Any:
    return lazy_stack([TensorDict({"q": torch.ones(size)}) for size in sizes])


#: Entries of a batch of 4 rows.
ENTRIES: dict[str, Callable[[], Any]] = {
    "complex128": lambda: torch.full((4,), 1 + 2j, dtype=torch.complex128),
    "conjugate": lambda: torch.full((4,), 1 + 2j).conj(),
    "float8": lambda: torch.ones(4).to(torch.float8_e5m2),
    "bool": lambda: torch.arange(4) > 1,
    "empty": lambda: torch.empty(4, 0),
    "expanded": lambda: torch.ones(4, 1).expand(4, 5000),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "jagged": lambda: make_nested(torch.jagged),
    "complex jagged": lambda: make_nested(torch.jagged, torch.complex128),
    "strided nested": lambda: make_nested(torch.strided),
    "level": lambda: {"a": torch.ones(4), "b": {"c": torch.ones(4, 2)}},
    "empty level": lambda: TensorDict({}, [4]),
    "stack": lambda: make_members(2, 2, 2, 2),
    "uneven stack": lambda: make_members(1, 2, 3, 4),
    "empty stack": lambda: LazyStackedTensorDict(batch_size=[4, 0], stack_dim=1),
    "parameters": lambda: TensorDictParams(TensorDict({"w": torch.ones(4)}, [4])),
    **{f"key {key!a}": lambda key=key: {key: torch.ones(4), "a": {key: torch.zeros(4)}} for key in (
        "__metadata__", "a.b", "", "é☃", "a/b", "a#offsets", "td", "x\0y", " ",
    )},
}  # fmt: skip


@pytest.mark.parametrize("batch", [[], [4]], ids=["no batch", "batch"])
@pytest.mark.parametrize("make", ENTRIES.values(), ids=ENTRIES)
def test_saved_entry_is_read_by_every_operation(make: Any, batch: list[int], path: Path, same: Any) -> None:
    data: Any = TensorDict({"e": make(), "z": torch.ones(4)}, batch, names=["time"] if batch else None)
    save(data, path)
    for strategy in ("mmap", "read"):
        same(load(path, strategy=strategy), data)
        if batch:
            same(load(path, strategy=strategy, rows=slice(1, 3)), data[1:3])
    for mode in ("r", "c"):
        opened = td_core.open(path, mode=mode)
        assert "z" in repr(opened)
        same(opened.clone(), data)
    assert "z" in str(td_core.inspect(path))
    assert td_core.verify(path).ok
    with pytest.raises(UnsupportedOperationError, match="does not implement append"):
        td_core.append(data, path, format="safetensors")
    library = pytest.importorskip("safetensors")
    with library.safe_open(path, "pt") as file:
        assert all(file.get_tensor(name) is not None for name in file.keys())


def test_load_strided_nested_tensor_on_meta_raises(path: Path) -> None:
    save(TensorDict({"e": make_nested(torch.strided), "z": torch.ones(4)}), path)
    with pytest.raises(
        UnsupportedOperationError, match="'e': a nested tensor of the strided layout has no form"
    ):
        load(path, device="meta")
    assert load(path, device="meta", keys="z")["z"].is_meta
