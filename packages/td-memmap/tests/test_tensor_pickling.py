"""Copying, pickling and sending a MemoryMappedTensor."""

from __future__ import annotations

import copy
import io
import multiprocessing
import operator
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core import TensorDict
from td_core.errors import FormatError
from td_memmap import MemoryMappedTensor


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pickle_view_of_view_keeps_elements(data: st.DataObject) -> None:
    source = torch.arange(60).view(3, 4, 5)
    tensor: Any = MemoryMappedTensor.from_tensor(source)
    plain = source
    for _ in range(data.draw(st.integers(1, 3))):
        parts: list[Any] = []
        for size in plain.shape:
            choices = [st.just(slice(None)), st.builds(slice, st.integers(-5, 5), st.integers(-5, 5))]
            if size:
                choices.append(st.integers(-size, size - 1))
            parts.append(data.draw(st.one_of(choices)))
            if data.draw(st.booleans()):
                parts.insert(0, None)
        tensor, plain = tensor[tuple(parts)], plain[tuple(parts)]
    assert torch.equal(tensor, plain)
    assert torch.equal(pickle.loads(pickle.dumps(tensor)), plain)


def test_send_tensors_of_one_anonymous_file_keeps_values() -> None:
    saved = TensorDict({"a": torch.arange(3), "b": torch.arange(6.0).view(2, 3)}).memmap()
    for tensor in (saved["a"], saved["b"], saved["b"][1], saved["b"][:, 1:]):
        other = pickle.loads(ForkingPickler.dumps(tensor))
        assert torch.equal(other, tensor)
        other.neg_()
        assert torch.equal(other, tensor)


def test_memmap_anonymous_leaves_have_separate_storages() -> None:
    source = {
        "a": torch.arange(1000),
        "n": {"b": torch.ones(3)},
        "c": torch.arange(6, dtype=torch.uint8).view(2, 3),
    }
    saved = TensorDict(source).memmap()
    assert saved["a"].handler is saved["c"].handler
    # torch.save rejects two dtypes on one storage, and writes complete storages.
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert [read[key].tolist() for key in ("a", "n.b", "c")] == [
        saved[key].tolist() for key in ("a", ("n", "b"), "c")
    ]
    file = io.BytesIO()
    torch.save(saved["n", "b"].detach(), file)
    assert len(file.getvalue()) < 4000


def test_torch_load_meta_map_location_reads_no_elements() -> None:
    file = io.BytesIO()
    torch.save(TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(3, 2)}}).memmap(), file)
    file.seek(0)
    read = torch.load(file, weights_only=False, map_location="meta")
    assert [(leaf.is_meta, leaf.shape) for leaf in (read["a"], read["n", "b"])] == [
        (True, (3,)),
        (True, (3, 2)),
    ]


@pytest.mark.parametrize(
    "shown", [lambda leaf: leaf, lambda leaf: leaf[1:], lambda leaf: leaf.detach()[:, 1]]
)
def test_send_anonymous_leaves_shares_memory(
    shown: Callable[[Any], Tensor],
) -> None:
    saved = TensorDict({"a": torch.arange(100), "c": torch.arange(6).view(2, 3)}).memmap()
    other = ForkingPickler.loads(ForkingPickler.dumps({"c": shown(saved["c"]), "a": saved["a"]}))
    assert other["c"].equal(shown(saved["c"])) and other["a"].equal(saved["a"])
    other["c"].fill_(7)
    assert (shown(saved["c"]) == 7).all() and saved["a"].equal(torch.arange(100))


def test_pickle_anonymous_tensor_contains_elements() -> None:
    tensor = MemoryMappedTensor.from_tensor(torch.arange(5))
    other = pickle.loads(pickle.dumps(tensor[1:]))
    assert other.tolist() == [1, 2, 3, 4]
    other.zero_()
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_deepcopy_returns_plain_tensor(mapped: MemoryMappedTensor) -> None:
    deep = copy.deepcopy([mapped, mapped])
    assert type(deep[0]) is Tensor
    assert deep[0] is deep[1]
    deep[0].zero_()
    assert mapped[0, 1] == 1


def test_copy_shares_file_and_deepcopy_is_autograd_leaf(mapped: MemoryMappedTensor) -> None:
    shallow = copy.copy(mapped)
    assert type(shallow) is MemoryMappedTensor
    assert shallow.filename == mapped.filename
    assert shallow.data_ptr() == mapped.data_ptr()
    floats = MemoryMappedTensor.zeros(2).requires_grad_()
    for each in copy.copy(floats), copy.deepcopy(floats):
        assert (each.is_leaf, each.requires_grad) == (True, True)


@pytest.mark.once
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_send_tensor_to_process_shares_file(method: str, mapped: MemoryMappedTensor, source: Tensor) -> None:
    anonymous = MemoryMappedTensor.from_tensor(source)
    with multiprocessing.get_context(method).Pool(1) as pool:
        for tensor in (mapped, mapped[1], anonymous, anonymous[1]):
            back = pool.apply(operator.iadd, (tensor, 1))
            assert type(back) is MemoryMappedTensor
            assert torch.equal(back, tensor)
    expected = source + 1
    expected[1] += 1
    assert torch.equal(mapped, expected)
    assert torch.equal(anonymous, expected)


def test_pickle_parameter_on_mapped_tensor_has_elements(
    mapped: MemoryMappedTensor, source: Tensor, tmp_path: Path
) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(mapped.detach())
    (model.weight * 2).sum().backward()  # type: ignore[operator]
    torch.save(model.state_dict(), tmp_path / "state.pt")
    with torch.no_grad():
        model.weight.zero_()  # type: ignore[operator]
    assert (mapped == 0).all()
    os.unlink(mapped.filename)
    assert torch.equal(torch.load(tmp_path / "state.pt")["weight"], source)


@pytest.mark.parametrize("named", [True, False])
def test_share_memory_mapped_tensor_stays_on_file(named: bool, source: Tensor, tmp_path: Path) -> None:
    mapped = MemoryMappedTensor.from_tensor(source, filename=tmp_path / "t" if named else None)
    plain = mapped.view(-1)
    assert type(plain) is Tensor
    for tensor in (mapped, plain):
        assert tensor.is_shared()
        place = tensor.data_ptr()
        assert tensor.share_memory_().data_ptr() == place
        assert tensor.untyped_storage().share_memory_().data_ptr() == mapped.data_ptr()
    with pytest.raises(RuntimeError, match=r"pickle a tensor that shows it, or a clone\(\)"):
        pickle.dumps(plain.untyped_storage())
    plain.fill_(7)
    if named:
        assert torch.equal(torch.from_file(str(tmp_path / "t"), size=12), torch.full((12,), 7.0))


@pytest.mark.parametrize("named", [True, False])
def test_pickle_after_data_assignment_sends_new_elements(named: bool, source: Tensor, tmp_path: Path) -> None:
    saved = TensorDict({"a": source}).memmap(tmp_path / "save" if named else None)
    leaf, wanted = saved["a"], -source
    leaf.data = wanted.clone()
    for other in (
        pickle.loads(pickle.dumps(leaf)),
        send_and_receive(leaf),
        send_and_receive(leaf[1:]),
        saved.memmap(tmp_path / "save")["a"],
    ):
        assert torch.equal(other, wanted[-len(other) :])
    assert torch.equal(TensorDict.load_memmap(tmp_path / "save")["a"], wanted)
    other = MemoryMappedTensor.from_tensor(source, filename=tmp_path / "other")
    leaf.data = other
    other[0] = 5
    assert torch.equal(pickle.loads(pickle.dumps(leaf)), other)


def send_and_receive(tensor: Tensor) -> Any:
    return pickle.loads(ForkingPickler.dumps(tensor))


@pytest.mark.parametrize("named", [True, False])
def test_send_plain_view_shares_mapped_memory(named: bool, source: Tensor, tmp_path: Path) -> None:
    mapped = MemoryMappedTensor.from_tensor(source, filename=tmp_path / "t" if named else None)
    turned = mapped[1:].t()
    received = send_and_receive(turned)
    assert type(received) is Tensor
    assert received.stride() == turned.stride()
    received.neg_()
    assert torch.equal(mapped[1:], -source[1:])
    assert torch.equal(mapped[:1], source[:1])
    del mapped
    assert torch.equal(send_and_receive(received), turned)


@pytest.mark.parametrize("change", ["replaced", "removed", "private", "archive"])
def test_send_memory_not_in_file_sends_copy(change: str, source: Tensor, tmp_path: Path) -> None:
    mapped = MemoryMappedTensor.from_tensor(source, filename=tmp_path / "t")
    if change == "replaced":
        MemoryMappedTensor.from_tensor(-source, filename=tmp_path / "t", existsok=True)
    elif change == "removed":
        os.unlink(tmp_path / "t")
    elif change == "private":
        mapped = MemoryMappedTensor.from_filename(tmp_path / "t", torch.float32, source.shape, mode="r")
    else:
        saved = TensorDict({"a": source}).memmap(tmp_path / "t.tdz")
        torch.save(saved, tmp_path / "saved.pt")
        assert torch.equal(torch.load(tmp_path / "saved.pt")["a"], source)
        mapped = saved["a"]
    mapped[0] = 7
    received = send_and_receive(mapped.view(-1))
    assert torch.equal(received, mapped.view(-1))
    received.zero_()
    assert (mapped[0] == 7).all()


def test_clone_storage_returns_ordinary_memory(mapped: MemoryMappedTensor) -> None:
    storage = mapped.untyped_storage()
    for copied in (storage.clone(), copy.deepcopy(storage)):
        assert type(copied) is torch.UntypedStorage
        assert not copied.is_shared()
        assert copied.tolist() == storage.tolist()


@pytest.mark.parametrize("saves", [1, 2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_unpickle_after_next_save_raises(saves: int, view: bool, tmp_path: Path) -> None:
    data = TensorDict({"a": torch.arange(6.0)}, batch_size=[6]).memmap(tmp_path / "save")
    pickled = pickle.dumps(data["a"][2:] if view else data)
    assert len(pickle.loads(pickled)) == (4 if view else 6)
    data["a"].zero_()
    assert pickle.loads(pickled)[0] == 0 if view else (pickle.loads(pickled)["a"] == 0).all()
    del data
    for number in range(saves):  # a file system can use an inode again
        TensorDict({"a": torch.full((6,), float(number))}, batch_size=[6]).memmap(tmp_path / "save")
    with pytest.raises(FormatError, match="was replaced since the tensor was pickled"):
        pickle.loads(pickled)
