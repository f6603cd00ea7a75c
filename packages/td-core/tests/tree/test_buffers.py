"""Pickled tensors: values, shared storages, and the number of out-of-band buffers."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core._tree.buffers import SMALL, Leaves

BASE = torch.arange(40_000.0)
KINDS: dict[str, Callable[[int], Tensor]] = {
    "vector": lambda i: torch.arange(float(i % 5)),
    "matrix": lambda i: torch.full((2, i % 4), i),
    "number": lambda i: torch.tensor(i, dtype=torch.int16),
    "empty": lambda i: torch.zeros(i % 3, 0, 2),
    "bool": lambda i: torch.tensor([True, False, i % 2 == 0]),
    "transposed": lambda i: torch.arange(6.0).view(2, 3).t() + i,
    "one of a step": lambda i: torch.arange(8)[i % 4 :: 5][:1],
    "expanded": lambda i: torch.ones(1).expand(i % 7),
    "large": lambda i: torch.arange(SMALL).view(2, -1) + i,
    "large and transposed": lambda i: (torch.arange(SMALL).view(2, -1) + i).t(),
    "row of a large one": lambda i: BASE[i * 100 : i * 100 + 3],
    "half of a large one": lambda i: BASE[: 20_000 + i],
    "complex": lambda i: torch.tensor([i + 2j]),
    "conjugate": lambda i: torch.tensor([i + 2j, 3j]).conj(),
    "negative": lambda i: torch.tensor([i + 2j, 3j]).conj().imag,
    "large conjugate": lambda i: torch.full((SMALL,), i + 2j).conj(),
    "large negative": lambda i: torch.full((SMALL,), i + 2j).conj().imag,
    "float8": lambda i: torch.full((3,), float(i)).to(torch.float8_e5m2),
    "gradient": lambda i: torch.full((3,), float(i), requires_grad=True),
    "parameter": lambda i: torch.nn.Parameter(torch.full((3,), float(i))),
    "sparse": lambda i: torch.eye(3).to_sparse(),
    "meta": lambda i: torch.empty(i, device="meta"),
    "jagged": lambda i: torch.nested.nested_tensor([torch.ones(2), torch.ones(i)], layout=torch.jagged),
}


def round_trip(tensors: list[Tensor], protocol: int = 5) -> tuple[list[Tensor], list[Any]]:
    buffers: list[Any] = []
    data = pickle.dumps(Leaves(tensors), protocol, buffer_callback=buffers.append if protocol == 5 else None)
    return pickle.loads(data, buffers=buffers).tensors, buffers


def assert_same_tensor(found: Tensor, wanted: Tensor) -> None:
    assert type(found) is type(wanted) and found.dtype == wanted.dtype and found.layout == wanted.layout
    assert found.requires_grad == wanted.requires_grad and found.device == wanted.device
    if wanted.is_nested:
        for one, other in zip(found.unbind(), wanted.unbind(), strict=True):
            assert_same_tensor(one, other)
    else:
        assert found.shape == wanted.shape
        if not wanted.is_meta:
            one, other = (
                each.detach().to_dense() if each.is_sparse else each.detach() for each in (found, wanted)
            )
            assert torch.equal(one.to(torch.complex128), other.to(torch.complex128))


@pytest.mark.parametrize("protocol", [3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_pickle_random_tensors_keeps_values_and_identity(seed: int, protocol: int) -> None:
    choose = random.Random(seed)
    tensors = [KINDS[choose.choice(list(KINDS))](i) for i in range(30)]
    tensors += [choose.choice(tensors) for _ in range(seed % 3)]
    found, _ = round_trip(tensors, protocol)
    for one, other in zip(found, tensors, strict=True):
        assert_same_tensor(one, other)
    assert [[a is b for b in found] for a in found] == [[a is b for b in tensors] for a in tensors]


@pytest.mark.parametrize("kind", KINDS)
def test_pickle_single_tensor_keeps_value(kind: str) -> None:
    tensor = KINDS[kind](3)
    (found,), _ = round_trip([tensor])
    assert_same_tensor(found, tensor)


def test_pickle_small_tensors_uses_one_buffer_per_dtype() -> None:
    tensors = [torch.full((i % 3 + 1, 2), i) for i in range(50)] + [torch.ones(i) for i in range(50)]
    assert len(round_trip(tensors)[1]) == 2
    (buffer,) = round_trip([BASE[i * 800 : i * 800 + 3] for i in range(50)])[1]
    assert len(buffer.raw()) == 50 * 3 * BASE.itemsize  # the views, without the elements between them


def test_pickle_large_or_shared_tensors_copies_nothing() -> None:
    large, base = torch.ones(SMALL), torch.arange(10.0)
    found, buffers = round_trip([large, base[:6], base[2:]])
    assert len(buffers) == 2 and found[0].data_ptr() == large.data_ptr()
    found[1][2] = 100
    assert found[2][0] == 100 and base[2] == 100


def test_pickle_conj_and_neg_views_keeps_values() -> None:
    base = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j])
    tensors = [base[:2].conj(), base[1:], base.conj().imag]
    for found, wanted in zip(round_trip(tensors)[0], tensors, strict=True):
        assert_same_tensor(found, wanted)


def test_torch_save_of_unpickled_tensors_round_trips() -> None:
    storage = torch.zeros(80_000, dtype=torch.uint8)
    sharing = [storage[:64_000].view(torch.float64), storage[64_000:70_003]]
    back = pickle.loads(pickle.dumps(Leaves(sharing))).tensors
    for tensor in back:
        torch.save(tensor, file := io.BytesIO())
        file.seek(0)
        assert torch.equal(torch.load(file), tensor)


@pytest.mark.parametrize("protocol", [2, 3, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize(
    "place",
    [
        "meta",
        torch.device("meta"),
        {"cpu": "meta"},
        lambda storage, where: torch.empty(len(storage), dtype=torch.uint8, device="meta").untyped_storage(),
    ],
)
def test_torch_load_map_location_sets_device(place: Any, protocol: int) -> None:
    base = torch.arange(9.0)
    td = TensorDict({"small": torch.ones(2), "one": base[:6], "other": base[2:]})
    torch.save(td.to("cpu"), file := io.BytesIO(), pickle_protocol=protocol)
    for given, device in ((place, "meta"), ({"cuda": "meta"}, "cpu"), (lambda storage, where: None, "cpu")):
        file.seek(0)
        found = torch.load(file, map_location=given, weights_only=False)
        assert {leaf.device.type for leaf in found.values()} == {found.device.type} == {device}
        for key, leaf in td.items():
            assert_same_tensor(found[key], leaf.to(device))
    file.seek(0)
    assert torch.load(file, weights_only=False)["one"].is_cpu


def test_unpickled_small_tensors_are_independent() -> None:
    tensors = [torch.zeros(2), torch.zeros(2, 2), torch.ones(2, requires_grad=True)]
    found, _ = round_trip(tensors)
    found[0].add_(1)
    found[1].mul_(found[2])  # fails if both are views of one buffer: a view cannot record this gradient
    assert found[1].requires_grad and not found[0].requires_grad
    assert all(tensor.eq(0).all() for tensor in tensors[:2])
