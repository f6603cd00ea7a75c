"""Consolidation in memory and in files: values, identity of leaves, and no stale results after changes."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn import Parameter

from td_core import Buffer, LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.errors import CodecError, LockedError, StructureError
from td_distributed import (
    _consolidate,
    _consolidated_file,
    _storage,
    from_buffer,
    from_consolidated,
    storage_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex")

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def jagged(**options: Any) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.full((4, 3), 2.0)], layout=torch.jagged, **options
    )


def with_lengths() -> torch.Tensor:
    values, offsets = torch.arange(10.0).view(5, 2), torch.tensor([0, 2, 5])
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([1, 3]))


def tied() -> Any:
    weight = torch.arange(4.0)
    return TensorDict({"a": weight, "n": {"b": weight}, "c": weight.clone()})


def looks(vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors that start at the address of a vector, with other sizes, strides, dtypes or a neg bit."""
    square = vector.view(2, 2)
    negative = torch._neg_view(vector)
    return {
        "a": vector,
        "b": vector[:2],
        "c": vector.view(torch.int32),
        "d": square,
        "e": square.t(),
        "f": negative,
    }


class OwnDict(TensorDict):
    """A user-defined class."""


TREES: dict[str, Callable[[], Any]] = {
    "flat": lambda: TensorDict({"b": torch.arange(6).view(2, 3), "a": torch.ones(2)}, batch_size=[2]),
    "named": lambda: TensorDict(
        {"a": torch.ones(2, 3), "n": {"b": torch.ones(2)}}, batch_size=[2], names=["t"]
    ),
    "device": lambda: TensorDict({"a": torch.ones(2)}, device="cpu"),
    "level first": lambda: TensorDict({"n": {"b": torch.ones(1)}, "a": torch.ones(2), "e": {}}),
    "deeper batch": lambda: TensorDict({"n": TensorDict({"b": torch.ones(2, 3)}, [2, 3])}, [2]),
    "lazy": lambda: TensorDict.lazy_stack([TensorDict({"a": torch.full((3,), i)}) for i in range(3)], 0),
    "lazy below": lambda: TensorDict({"l": TREES["ragged"](), "a": torch.ones(3)}, [3]),
    "ragged": lambda: TensorDict.lazy_stack(
        [TensorDict({"a": torch.ones(i + 1), str(i): torch.ones(1)}) for i in range(3)]
    ),
    "jagged": lambda: TensorDict({"n": jagged(), "a": torch.ones(2)}, [2]),
    "jagged, of vectors": lambda: TensorDict(
        {
            "a": torch.ones(3),
            "n": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
            "b": torch.ones(3),
        }
    ),
    "jagged with lengths": lambda: TensorDict({"n": with_lengths(), "m": jagged()}, [2]),
    "dtypes": lambda: TensorDict({str(d): torch.ones(3).to(d) for d in DTYPES}),
    "empty": lambda: TensorDict(
        {"e": {"f": {}}, "z": torch.zeros(0, 3), "y": torch.zeros(2, 0, dtype=torch.int8)}
    ),
    "nothing": lambda: TensorDict({}, [3]),
    "no members": lambda: LazyStackedTensorDict(batch_size=[2, 0], stack_dim=1, device="cpu"),
    "params": lambda: TensorDictParams(TensorDict({"w": torch.ones(3), "n": {"b": torch.ones(2)}})),
    "roles": lambda: TensorDictParams(
        TensorDict(
            {
                "frozen": Parameter(torch.ones(2), requires_grad=False),
                "n": {"w": Parameter(torch.ones(2)), "buffer": Buffer(torch.ones(2), persistent=False)},
                "plain": torch.ones(2),
                "kept": Buffer(torch.ones(2)),
            }
        ),
        no_convert=True,
    ),
    "strided": lambda: TensorDict({"t": torch.arange(6).view(2, 3).t(), "e": torch.ones(1).expand(4)}),
    "conjugate": lambda: TensorDict(
        {"c": torch.tensor([1 + 2j]).conj(), "n": torch.tensor([1 + 2j]).conj().imag}
    ),
    "tied": tied,
    "other looks of one tensor": lambda: TensorDict(looks(torch.arange(4.0))),
    "large and odd places": lambda: TensorDict(
        {
            "x": torch.ones(1, dtype=torch.float64),
            "b": torch.arange(1 << 16).to(torch.uint8),
            "y": torch.ones(3, dtype=torch.uint8),
            "c": torch.tensor([1 + 2j], dtype=torch.complex128),
            "t": torch.arange(60_000).view(300, 200).t(),
        }
    ),
    "reserved": lambda: TensorDict(
        {
            "cls": {"a": torch.ones(1)},
            "leaves": {},
            "non_tensors": torch.ones(1),
            "size": {"b": torch.ones(1)},
        }
    ),
    "odd keys": lambda: TensorDict(
        {"": torch.ones(1), "a.b/c~d": {"é": torch.ones(1)}, "<NJT>x": torch.ones(1), "0": {}}
    ),
    "float8": lambda: TensorDict({"a": torch.ones(1, dtype=torch.float8_e5m2)}),
    "a mark in a key": lambda: TensorDict({"n": {"<NJT_x": torch.ones(1)}}),
    "reserved cls_metadata": lambda: TensorDict({"n": {"cls_metadata": {}}}),
    "reserved size": lambda: TensorDict({"size": {"b": torch.ones(1)}}),
    "subclass": lambda: OwnDict({"a": torch.ones(1)}),
    "locked": lambda: TensorDict({"a": torch.ones(1), "n": {"b": torch.ones(1)}}).lock_(),
    "locked below": lambda: TensorDict({"n": TensorDict({"b": torch.ones(1)}).lock_()}),
}
if HAS_TENSORCLASS:
    from td_tensorclass import MetaData, NonTensorData, NonTensorStack, UnbatchedTensor, tensorclass

    @tensorclass
    class Sample:
        x: torch.Tensor
        y: str = "none"
        z: Any = None

    def samples() -> Any:
        return torch.stack([Sample(x=torch.ones(2), y="a"), Sample(x=torch.zeros(2), y="b")])

    TREES |= {
        "named values": lambda: TensorDict(
            {"s": "x", "l": NonTensorStack("x", "y"), "n": {"m": MetaData(1)}}, [2], names=["t"]
        ),
        "values": lambda: TensorDict(
            {"s": "text", "a": torch.ones(2), "j": NonTensorData({"k": [1, None, 2.5]})}, [2]
        ),
        "rich values": lambda: TensorDict(
            {"t": NonTensorData((1, "a")), "d": NonTensorData({1: {2, 3}}), "b": b"\xff"}
        ),
        "stack": lambda: TensorDict({"l": NonTensorStack("x", "y"), "a": torch.ones(2)}, [2]),
        "stack of tuples": lambda: TensorDict({"l": NonTensorStack(("x", 1), ("y", 2))}, [2]),
        "deep stack": lambda: TensorDict(
            {"l": NonTensorStack.from_list([["x", "y", "w"], ["z", "u", "v"]], 2)}, [2]
        ),
        "named deep stack": lambda: TensorDict(
            {
                "l": NonTensorStack.from_list([["x", "y", "w"], ["z", "u", "v"]], 2),
                "n": TensorDict({"l": NonTensorStack.from_list([["x"], ["y"]], 2)}, [2, 1], names=["t", "v"]),
            },
            [2],
            names=["t"],
        ),
        "metadata": lambda: TensorDict({"m": MetaData("x"), "a": torch.ones(2)}, [2]),
        "unbatched": lambda: TensorDict(
            {"u": UnbatchedTensor(torch.ones(3)), "n": {"a": torch.ones(2)}}, [2]
        ),
        "tensorclass": lambda: Sample(x=torch.ones(2), y="text", batch_size=[2]),
        "tensorclass below": lambda: TensorDict(
            {"c": Sample(x=torch.ones(2), batch_size=[2]), "a": torch.ones(2)}, [2]
        ),
        "stacked tensorclass": samples,
        "lazy tensorclass": lambda: TensorDict.lazy_stack(
            [Sample(x=torch.ones(i + 1), y=str(i)) for i in range(2)]
        ),
        "value": lambda: NonTensorData("x", batch_size=[2]),
    }


def same(found: Any, wanted: Any, where: str = "") -> None:
    """Assert that two collections are equal in everything except locks."""
    assert type(found) is type(wanted), where
    assert found.batch_size == wanted.batch_size, where
    assert found.names == wanted.names, where
    assert found.device == wanted.device, where
    if getattr(wanted, "_is_value", False):
        assert found.tolist() == wanted.tolist(), where
        assert list(map(type, found.tolist() or ())) == list(map(type, wanted.tolist() or ())), where
        return
    stacked = wanted._members_and_dim()
    if stacked is not None:
        mine = found._members_and_dim()
        assert mine[1] == stacked[1], where
        for i, (one, other) in enumerate(zip(mine[0], stacked[0], strict=True)):
            same(one, other, f"{where}/{i}")
        return
    one, other = found._children(), wanted._children()
    assert list(one) == list(other), where
    for key in other:
        if isinstance(other[key], torch.Tensor):
            same_leaf(one[key], other[key], f"{where}/{key}")
            if isinstance(wanted, TensorDictParams):
                assert type(one[key]) is type(other[key]), where
                assert one[key].requires_grad == other[key].requires_grad, where
        else:
            same(one[key], other[key], f"{where}/{key}")


def same_leaf(found: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    assert found.dtype == wanted.dtype, where
    assert found.is_nested == wanted.is_nested, where
    if wanted.is_nested:
        assert found._ragged_idx == wanted._ragged_idx, where
        for one, other in zip(found.unbind(), wanted.unbind(), strict=True):
            same_leaf(one, other, where)
        return
    assert found.shape == wanted.shape, where
    assert raw(found) == raw(wanted), where


def raw(leaf: torch.Tensor) -> bytes:
    plain = torch.empty(leaf.shape, dtype=leaf.dtype).copy_(leaf.detach())
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def storages(collection: Any) -> set[int]:
    pieces = [_storage.pieces_of(leaf)[0] for leaf in collection._leaves()]
    return {piece.untyped_storage().data_ptr() for each in pieces for piece in each if piece.numel()}


@pytest.mark.parametrize("name", TREES)
def test_consolidate_in_memory_keeps_content(name: str) -> None:
    tree = TREES[name]()
    locked = tree.is_locked
    result = tree.consolidate()
    same(result, tree)
    assert tree.is_locked == locked and not tree.is_consolidated()
    assert result.is_locked and result.is_consolidated()
    assert len(storages(result)) <= 1
    assert not storages(result) & storages(tree)


@pytest.mark.parametrize("name", TREES)
def test_consolidate_to_file_and_read_keeps_content(name: str, tmp_path: Path) -> None:
    tree = TREES[name]()
    mapped = tree.consolidate(tmp_path / "td")
    same(mapped, tree)
    assert mapped.is_consolidated()
    loaded = TensorDict.from_consolidated(tmp_path / "td")
    same(loaded, tree)
    assert loaded.is_locked == tree.is_locked
    assert loaded.is_consolidated()
    assert [path.name for path in tmp_path.iterdir()] == ["td"]


@pytest.mark.parametrize("name", TREES)
def test_from_buffer_of_storage_keeps_content(name: str) -> None:
    tree = TREES[name]()
    result = tree.consolidate(metadata=True)
    same(result, tree)
    same(from_buffer(storage_of(result)), tree)


#: Trees that the plain form cannot represent.
UNSAYABLE = {
    "a mark in a key", "dtypes", "float8", "odd keys", "params", "reserved", "reserved cls_metadata", "reserved size",
    "rich values", "roles", "subclass", "unbatched", "value",
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_consolidate_uses_plain_form_if_representable(name: str) -> None:
    structure = written(TREES[name]())
    assert (structure["cls"] == "td:general") == (name in UNSAYABLE)
    # The root key "size" holds what the plain form cannot represent: orders of keys, types of values.
    assert "size" not in structure or name not in ("flat", "named", "lazy", "deep stack")


def written(tree: Any) -> Any:
    """Consolidate a collection to a file, and return the structure in it."""
    data = bytes(storage_of(tree.consolidate(metadata=True)).numpy())
    return json.loads(data[-8 - int.from_bytes(data[-8:], "little") : -8])


#: Functions that load or map a collection whose leaves share one storage.
CONSOLIDATED: dict[str, Callable[[Any, Path], Any]] = {
    "in memory": lambda tree, path: tree.consolidate(),
    "with its structure": lambda tree, path: tree.consolidate(metadata=True),
    "mapped": lambda tree, path: tree.consolidate(path),
    "buffered": lambda tree, path: tree.consolidate(path, use_buffer=True),
    "loaded": lambda tree, path: [tree.consolidate(path), from_consolidated(path)][1],
    "loaded, of another writer": lambda tree, path: from_consolidated(unpadded(tree.consolidate(path), path)),
}


def unpadded(tree: Any, path: Path) -> Path:
    """Rewrite a consolidated file without padding, as other writers do, so that its size is odd."""
    storage, text = storage_of(tree), path.read_bytes()[len(storage_of(tree)) : -8].rstrip()
    text += b" " * (len(text) % 2 == 0)
    path.write_bytes(bytes(storage.tolist()) + text + len(text).to_bytes(8, "little"))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("way", CONSOLIDATED)
def test_torch_save_leaves_of_storage_loads(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tree = TensorDict({"a": torch.arange(3).to(dtype), "b": torch.ones(1, dtype=torch.uint8)}, lock=True)
    found = CONSOLIDATED[way](tree, tmp_path / "td")
    for each in (found["a"], found):
        torch.save(each, tmp_path / "saved")
        back = torch.load(tmp_path / "saved")
        assert torch.equal(back if isinstance(back, torch.Tensor) else back["a"], tree["a"])


def test_torch_save_views_of_several_dtypes_loads(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    source = {"a": torch.ones(2), "b": torch.arange(3), "n": {"c": torch.arange(2)}, "p": parameter}
    tree = TensorDict({**source, "tied": source["a"]})
    tree.consolidate(tmp_path / "td")
    for each in (from_consolidated(tmp_path / "td"), tree.consolidate().unlock_()):
        torch.save(each, tmp_path / "saved")
        back = torch.load(tmp_path / "saved")
        same(back, each)
        assert back["a"] is back["tied"] and back["b"].dtype is torch.int64
    storage = torch.zeros(4, dtype=torch.int32)
    mixed = TensorDict(
        {"a": storage, "p": torch.nn.Parameter(storage.view(torch.float32), requires_grad=False)}
    )
    mixed["g"] = storage.view(torch.float32)[1:3].requires_grad_()
    torch.save(mixed, tmp_path / "saved")
    back = torch.load(tmp_path / "saved")
    assert [type(leaf) for leaf in back.values()] == [torch.Tensor, torch.nn.Parameter, torch.Tensor]
    assert [leaf.requires_grad for leaf in back.values()] == [False, False, True]


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda tree: tree.unlock_(), lambda tree: tree.clone(False)]
)
def test_torch_save_jagged_leaves_on_shared_storage_loads(change: Any, tmp_path: Path) -> None:
    rows, turned, holes = jagged(), jagged().transpose(1, 2), with_lengths()
    tree = change(TensorDict({"a": torch.ones(2), "r": rows, "t": turned, "h": holes}, [2]).consolidate())
    torch.save(tree, tmp_path / "saved")
    back = torch.load(tmp_path / "saved", weights_only=False)
    assert torch.equal(back["a"], tree["a"])
    for key, leaf in {"r": rows, "t": turned, "h": holes}.items():
        assert [part.tolist() for part in back[key].unbind()] == [part.tolist() for part in leaf.unbind()]


def test_write_to_loaded_collection_keeps_file(tmp_path: Path) -> None:
    TREES["flat"]().consolidate(tmp_path / "td")
    from_consolidated(tmp_path / "td")["a"].zero_()
    assert from_consolidated(tmp_path / "td")["a"].tolist() == [1, 1]


def test_consolidate_over_mapped_file_works(tmp_path: Path) -> None:
    loaded = TREES["flat"]().consolidate(tmp_path / "td")
    (loaded + 1).consolidate(tmp_path / "td")
    assert loaded["a"].tolist() == [1, 1]
    assert from_consolidated(tmp_path / "td")["a"].tolist() == [2, 2]
    loaded.consolidate(tmp_path / "td")
    assert from_consolidated(tmp_path / "td")["a"].tolist() == [1, 1]


def test_consolidate_to_file_with_longest_name_works(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    TREES["flat"]().consolidate(path)
    same(from_consolidated(path), TREES["flat"]())


def test_consolidate_over_file_keeps_mode_and_symlinks(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real/td")
    for _ in range(2):
        TREES["flat"]().consolidate(tmp_path / "link")
        (tmp_path / "real" / "td").chmod(0o640)
    assert os.readlink(tmp_path / "link") == "real/td"
    TREES["flat"]().consolidate(tmp_path / "link", use_buffer=True)
    assert (tmp_path / "real" / "td").stat().st_mode & 0o777 == 0o640
    same(from_consolidated(tmp_path / "link"), TREES["flat"]())
    assert os.listdir(tmp_path / "real") == ["td"]


def test_consolidate_threads_to_one_path_write_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Barrier(2)
    put = _consolidated_file._write_part

    def put_together(*args: Any) -> None:
        meeting.wait(10)
        put(*args)

    def replace_together(*args: Any) -> None:
        replace(*args)
        meeting.wait(10)

    replace = os.replace
    monkeypatch.setattr(_consolidated_file, "_write_part", put_together)
    monkeypatch.setattr(_consolidated_file.os, "replace", replace_together)
    trees = [TensorDict({"a": torch.full((1000,), i)}) for i in range(2)]
    writing = [tree.consolidate(tmp_path / "td", return_early=True) for tree in trees]
    for tree, each in zip(trees, writing, strict=True):
        same(each.result(), tree)
    assert from_consolidated(tmp_path / "td")["a"].unique().numel() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["td"]


@pytest.mark.skipif(not hasattr(os, "pwrite"), reason="the parts are written one by one")
def test_consolidate_num_threads_opens_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_small_steps(fd: int, data: Any, start: int) -> int:
        meeting.wait(10)
        opened.add(fd)
        return int(pwrite(fd, data[:3001], start))

    meeting, pwrite, opened = Barrier(2), os.pwrite, set()
    monkeypatch.setattr(_consolidated_file.os, "pwrite", in_small_steps)
    one, other = torch.randint(256, (2, 6000), dtype=torch.uint8)
    end = other.numpy().tobytes()
    _consolidated_file.write(tmp_path / "td", 6000, [(0, one)], end, num_threads=2)
    assert (tmp_path / "td").read_bytes() == one.numpy().tobytes() + end and len(opened) == 1


def test_consolidate_failed_write_keeps_old_file(tmp_path: Path) -> None:
    if not HAS_TENSORCLASS:
        pytest.skip("needs td-tensorclass")
    TREES["flat"]().consolidate(tmp_path / "td")
    with pytest.raises(CodecError, match="key 'bad': cannot store"):
        TensorDict({"bad": object()}).consolidate(tmp_path / "td")
    assert from_consolidated(tmp_path / "td")["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["td"]


def test_consolidate_hooks_kept_in_memory_raise_for_file(tmp_path: Path) -> None:
    stack = LazyStackedTensorDict(*[TensorDict({"a": torch.ones(2)})] * 2, hook_out=torch.exp)
    held = stack.consolidate()
    assert held.hook_out is pickle.loads(pickle.dumps(held)).hook_out is torch.exp
    with pytest.raises(
        CodecError, match=r"key 's': cannot store .* no serializer is registered for its type"
    ):
        TensorDict({"s": stack}).consolidate(tmp_path / "file")


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), r"key \('n', 'bad'\): a tensor of layout torch.sparse_coo"),
        (
            lambda: torch.zeros(3, device="meta"),
            r"key \('n', 'bad'\): a tensor on the meta device has no data",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            r"key \('n', 'bad'\): a quantized tensor cannot be consolidated; call dequantize\(\)",
        ),
        (
            lambda: masked_tensor(torch.zeros(3), torch.ones(3) > 0),
            r"key \('n', 'bad'\): a MaskedTensor has no bytes of its own",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of MaskedTensors")
def test_consolidate_leaf_without_dense_form_raises(leaf: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(StructureError, match=message):
        TensorDict({"a": torch.ones(1), "n": {"bad": leaf()}}).consolidate(tmp_path / "td")
    assert not list(tmp_path.iterdir())


def test_consolidate_meta_device_to_file_raises(tmp_path: Path) -> None:
    with pytest.raises(StructureError, match="on the meta device has no data to write into a file"):
        TREES["flat"]().consolidate(tmp_path / "td", device="meta")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_consolidate_fake_leaves_get_separate_spans() -> None:
    with FakeTensorMode():
        tree = TensorDict({key: torch.ones(3) for key in "abc"}).consolidate()
        assert len(storage_of(tree)) == 3 * 16
        assert tree["a"] is not tree["b"]


def test_consolidate_threads_inherit_inference_mode() -> None:
    with torch.inference_mode():
        assert (
            TensorDict({"a": torch.ones(3), "b": torch.ones(2)}).consolidate(num_threads=2)["a"].tolist()
            == [1] * 3
        )


def test_consolidate_jagged_shared_offsets_stay_shared() -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=torch.jagged)
    tree = TensorDict({"x": rows, "y": rows * 2}, [2]).consolidate()
    assert (tree["x"] + tree["y"]).values().tolist() == [3] * 6


@pytest.mark.parametrize(
    "change", [lambda td: td, torch.clone, copy.deepcopy, lambda td: pickle.loads(pickle.dumps(td))]
)
@pytest.mark.parametrize("way", CONSOLIDATED)
def test_consolidate_jagged_pads_to_max_length(way: str, change: Any, tmp_path: Path) -> None:
    tree = TensorDict({"n": jagged(), "t": jagged().transpose(1, 2), "a": torch.ones(2)}, [2])
    found = change(CONSOLIDATED[way](tree, tmp_path / "td"))
    assert {key: found[key].to_padded_tensor(0).shape[1:] for key in ("n", "t")} == {"n": (4, 3), "t": (3, 4)}


def test_plan_orders_and_pads_leaves() -> None:
    tree = TensorDict({"a": torch.ones(3, dtype=torch.uint8), "n": {"b": torch.ones(1)}, "c": torch.ones(1)})
    data = storage_of(tree.consolidate())
    one = torch.ones(1).view(torch.uint8).tolist()
    assert data.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, *one, 0, 0, 0, 0, *one, 0, 0, 0, 0]


def test_consolidate_zeroes_gaps_between_large_leaves() -> None:
    leaves = [torch.full((size,), size % 7, dtype=torch.uint8) for size in (20_001, 20_002, 20_008, 20_003)]
    layout = _storage.plan_leaves(leaves)
    storage = torch.full((layout.nbytes + 24,), 255, dtype=torch.uint8)
    _storage.fill(storage, layout, _storage.Views(storage).pieces(layout), leaves)
    wanted = [torch.cat([leaf, torch.zeros(-len(leaf) % 8, dtype=torch.uint8)]) for leaf in leaves]
    assert torch.equal(storage, torch.cat([*wanted, torch.zeros(24, dtype=torch.uint8)]))


def test_consolidate_tied_leaves_stay_tied(tmp_path: Path) -> None:
    tree = tied()
    result = tree.consolidate(tmp_path / "td")
    assert len(storage_of(result)) == 32
    for one in (result, from_consolidated(tmp_path / "td")):
        one["a"].zero_()
        assert one["n", "b"].tolist() == [0, 0, 0, 0]
        assert one["c"].tolist() == [0, 1, 2, 3]


def test_write_leaf_inplace_changes_storage() -> None:
    result = TREES["flat"]().consolidate()
    result.set_("a", torch.tensor([5.0, 6.0]))
    result["b"].zero_()
    assert result.is_consolidated()
    assert storage_of(result).view(torch.int64)[:6].tolist() == [0] * 6
    assert storage_of(result)[48:].view(torch.float32).tolist() == [5, 6]


def test_is_consolidated_after_structural_change_is_false() -> None:
    result = TREES["flat"]().consolidate()
    with pytest.raises(LockedError, match="unlock_"):
        result["new"] = torch.ones(2)
    result.unlock_()
    assert not result.is_consolidated()
    result["new"] = torch.ones(2)
    again = result.consolidate()
    assert sorted(again.keys()) == ["a", "b", "new"]


def test_is_consolidated_of_derived_collection_is_false() -> None:
    result = TREES["flat"]().consolidate()
    assert not result[0].is_consolidated()
    assert not (result + 1).is_consolidated()
    assert not result.select("a").is_consolidated()


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_consolidate_num_threads_equals_single_thread(num_threads: int) -> None:
    tree = TREES["dtypes"]()
    same(tree.consolidate(num_threads=num_threads), tree)


@pytest.mark.parametrize("name", ["large and odd places", "dtypes", "nothing"])
def test_consolidate_num_threads_writes_same_file(name: str, tmp_path: Path) -> None:
    tree = TREES[name]()
    tree.consolidate(tmp_path / "one")
    same(tree.consolidate(tmp_path / "many", num_threads=2), tree)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()


def test_consolidate_return_early_returns_future(tmp_path: Path) -> None:
    tree = TREES["flat"]()
    future = tree.consolidate(tmp_path / "td", return_early=True)
    same(future.result(), tree)
    same(from_consolidated(tmp_path / "td"), tree)


def test_consolidate_return_early_inplace_returns_self() -> None:
    tree = TREES["flat"]()
    assert tree.consolidate(return_early=True, inplace=True).result() is tree
    assert tree.is_consolidated()


def test_consolidate_again_with_options_makes_new_storage(tmp_path: Path) -> None:
    tree = TREES["flat"]().consolidate()
    assert tree.consolidate() is tree
    same(from_buffer(storage_of(tree.consolidate(metadata=True))), tree)
    assert not tree.is_shared() and tree.consolidate(share_memory=True).is_shared()
    tree.consolidate(tmp_path / "td")
    same(from_consolidated(tmp_path / "td"), tree)
    assert tree.consolidate(tmp_path / "shared", share_memory=True).is_shared()
    same(from_consolidated(tmp_path / "shared"), tree)


def test_consolidate_return_early_ignores_later_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    late = SimpleNamespace(
        submit=lambda function, *args, **options: SimpleNamespace(result=partial(function, *args, **options)),
        shutdown=lambda wait: None,
    )
    monkeypatch.setattr(_consolidate, "ThreadPoolExecutor", lambda threads: late)
    tree = TREES["flat"]()
    future = tree.consolidate(return_early=True)
    tree["c"] = tree.pop("a")
    same(future.result(), TREES["flat"]())
    consolidated = tree.consolidate()
    assert consolidated.consolidate(return_early=True).result() is consolidated


@pytest.mark.parametrize("skipped", [0, 1, 8, 16])
@pytest.mark.parametrize("memory", ["a tensor", "foreign"])
def test_from_buffer_aligned_returns_views(skipped: int, memory: str) -> None:
    buffer = storage_of(TREES["locked"]().consolidate(metadata=True))
    data = torch.cat([buffer[:skipped], buffer])
    part = data[skipped:]
    back = from_buffer(part if memory == "a tensor" else torch.from_numpy(part.numpy()))
    same(back, TREES["locked"]())
    assert back.is_locked and back.is_consolidated() == (not skipped % 16)


def test_from_buffer_strided_returns_copies() -> None:
    buffer = storage_of(TREES["locked"]().consolidate(metadata=True))
    same(from_buffer(buffer.repeat_interleave(2)[::2]), TREES["locked"]())


@pytest.mark.parametrize("name", [name for name in TREES if not name.startswith("locked")])
def test_consolidate_inplace_replaces_leaves(name: str) -> None:
    tree = TREES[name]()
    if tree.is_locked:
        pytest.skip("a frozen one stays as it is")
    before = storages(tree)
    assert tree.consolidate(inplace=True) is tree
    same(tree, TREES[name]())
    assert len(storages(tree)) <= 1 and not storages(tree) & before
    assert tree.is_locked and tree.is_consolidated()
    assert tree.consolidate(inplace=True) is tree


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("locked")])
def test_consolidate_inplace_locked_raises(name: str, tmp_path: Path) -> None:
    tree = TREES[name]()
    before, locked = storages(tree), tree.is_locked
    with pytest.raises(LockedError, match="cannot consolidate it in place: the TensorDict is locked"):
        tree.consolidate(tmp_path / "td", inplace=True)
    assert storages(tree) == before
    assert tree.is_locked == locked and not (tmp_path / "td").exists()


def test_consolidate_nesting_beyond_json_limit_reads_back(tmp_path: Path) -> None:
    tree = TensorDict({"a": torch.ones(1)})
    for _ in range(2000):
        tree = TensorDict({"n": tree})
    tree.consolidate(tmp_path / "td")
    found = from_consolidated(tmp_path / "td")
    for _ in range(2000):
        found = found["n"]
    assert found["a"].item() == 1


def test_consolidate_use_buffer_keeps_result_in_memory(tmp_path: Path) -> None:
    tree = TREES["flat"]()
    result = tree.consolidate(tmp_path / "td", use_buffer=True)
    same(result, tree)
    same(from_consolidated(tmp_path / "td"), tree)
    (tmp_path / "td").write_bytes(bytes((tmp_path / "td").stat().st_size))
    same(result, tree)


def test_consolidate_share_memory_is_shared() -> None:
    result = TREES["flat"]().consolidate(share_memory=True)
    assert result.is_shared()
    same(result, TREES["flat"]())


def test_consolidate_device_sets_device_label() -> None:
    result = TREES["flat"]().consolidate(device="cpu")
    assert result.device == torch.device("cpu")
    for option in ("share_memory", "pin_memory"):
        with pytest.raises(StructureError, match="need a storage on the CPU; it would be on meta"):
            TREES["flat"]().consolidate(device="meta", **{option: True})


def test_consolidate_keeps_gradients_on_original() -> None:
    tree = TensorDict({"a": torch.ones(2, requires_grad=True)})
    assert not tree.consolidate()["a"].requires_grad


def test_consolidate_plain_tree_writes_plain_form(tmp_path: Path) -> None:
    TREES["named"]().consolidate(tmp_path / "td")
    data = (tmp_path / "td").read_bytes()
    length = int.from_bytes(data[-8:], "little")
    meta = {"device": None, "names": ["t"], "batch_size": [2], "is_locked": False}
    assert json.loads(data[-8 - length : -8]) == {
        "cls": "TensorDict",
        "non_tensors": {},
        "leaves": {"a": ["torch.float32", [2, 3], 0, 24, 0]},
        "cls_metadata": meta,
        "n": {
            "cls": "TensorDict",
            "non_tensors": {},
            "leaves": {"b": ["torch.float32", [2], 24, 32, 0]},
            "cls_metadata": meta,
        },
    }


shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.sampled_from(DTYPES),
    shapes,
    st.integers(0, 9),
)
structures = st.recursive(
    tensors, lambda below: st.dictionaries(st.text(max_size=4), below, max_size=4), max_leaves=12
).filter(lambda tree: isinstance(tree, dict))


@given(structures, st.booleans())
def test_consolidate_random_tree_reads_back_equal(structure: dict[str, Any], locked: bool) -> None:
    tree = TensorDict(structure, lock=locked)
    result = tree.consolidate(metadata=True)
    same(result, tree)
    back = from_buffer(storage_of(result))
    same(back, tree)
    assert back.is_locked == locked


def test_pickle_classes_of_same_name_keep_their_class() -> None:
    one, other = (type("Twice", (TensorDict,), {"__module__": __name__}) for _ in range(2))
    td = TensorDict({"a": one({"x": torch.ones(2)}), "b": other({"x": torch.ones(2)})})
    consolidated = td.consolidate()
    rebuild, arguments = consolidated.__reduce_ex__(4)[:2]
    saved, given = consolidated.__reduce_ex__(2)[:2]
    for each in (consolidated, rebuild(*arguments), saved(*given), consolidated.to("meta")):
        assert [type(each["a"]), type(each["b"])] == [one, other]
