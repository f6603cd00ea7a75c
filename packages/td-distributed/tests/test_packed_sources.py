"""Which collections are packed: consolidated, loaded and unpickled ones, their clones, and parameters of modules."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from td_core import TensorDict, TensorDictParams
from td_distributed import from_buffer, from_consolidated, storage_of


def make() -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(6.0).view(2, 3),
            "n": {"b": torch.ones(2, dtype=torch.int16), "c": torch.rand(2, 4)},
        },
        [2],
    )


def save(td: TensorDict) -> Any:
    td.consolidate("td.bin")
    return from_consolidated("td.bin")


SOURCES: dict[str, Callable[[TensorDict], Any]] = {
    "consolidate": lambda td: td.consolidate(),
    "threads": lambda td: td.consolidate(num_threads=2),
    "in place": lambda td: td.consolidate(inplace=True),
    "with metadata": lambda td: td.consolidate(metadata=True),
    "shared": lambda td: td.consolidate(share_memory=True),
    "file": lambda td: td.consolidate("td.bin"),
    "loaded": save,
    "buffer": lambda td: from_buffer(storage_of(td.consolidate(metadata=True))),
    "pickle": lambda td: pickle.loads(pickle.dumps(td.consolidate())),
    "unlocked": lambda td: td.consolidate().unlock_(),
    "clone": lambda td: td.consolidate().clone(),
    "clone of clone": lambda td: td.consolidate().clone().clone(),
    "data": lambda td: td.consolidate().data,
    "parameters": lambda td: TensorDictParams(TensorDict({"a": td["a"]})).consolidate(inplace=True),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_source_is_packed_and_writes_all_leaves(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packed = SOURCES[source](make())
    assert packed.is_packed
    assert not make().is_packed
    with torch.no_grad():
        assert packed.mul_(2) is packed
        for key, leaf in packed.items(True, True):
            assert leaf.dtype is make()[key].dtype
        assert torch.equal(packed["a"], torch.arange(6.0).view(2, 3) * 2)
        packed.zero_()
    assert not packed["a"].any() and packed.is_packed


def test_loaded_by_torch_is_packed() -> None:
    file = io.BytesIO()
    torch.save(make().consolidate(), file)
    file.seek(0)
    assert torch.load(file, weights_only=False).is_packed


def test_gaps_of_consolidated_are_not_reduced() -> None:
    td = TensorDict({"a": torch.ones(3), "b": torch.ones(1), "c": torch.ones(5)}).consolidate()
    td.fill_(2)
    assert td.sum(reduce=True) == 18 and td.mean(reduce=True) == 2
    assert td.norm(reduce=True) == torch.full((9,), 2.0).norm()


def test_storage_with_trailer_keeps_it() -> None:
    td = make().consolidate(metadata=True)
    td.fill_(1)
    assert torch.equal(from_buffer(storage_of(td))["n", "b"], torch.ones(2, dtype=torch.int16))


def test_consolidate_parameters_in_place_keeps_those_of_module() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    held = dict(module.named_parameters())
    expected = {name: parameter.detach().clone() for name, parameter in held.items()}
    weights = TensorDict.from_module(module)
    weights.consolidate(inplace=True)
    assert weights.is_packed and weights.is_consolidated()
    for name, parameter in module.named_parameters():
        assert parameter is held[name] and parameter.requires_grad
        assert torch.equal(parameter, expected[name])
    with torch.no_grad():
        weights.mul_(0)
    assert not any(parameter.any() for parameter in module.parameters())


def test_tied_parameters_stay_tied_in_place() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    weights = TensorDict.from_module(module)
    weights.consolidate(inplace=True)
    with torch.no_grad():
        weights.add_(1)
    assert module[0].weight is module[1].weight and weights.is_packed


def train(module: nn.Module, average: Any, weights: Any) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.rand(4, 2)).square().sum().backward()
        optimizer.step()
        average.lerp_(weights.data, 0.1)


def build(is_packed: bool, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> tuple[Any, Any]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    weights = TensorDict.from_module(module)
    if is_packed:
        weights.consolidate(inplace=True)
    average = weights.data.clone()
    assert average.is_packed is is_packed
    train(wrap(module), average, weights)
    return weights.data, average


def test_averaged_model_equals_unpacked_training() -> None:
    for packed, plain in zip(build(True), build(False)):
        for key, leaf in plain.items(True, True):
            assert torch.equal(packed[key], leaf)


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_packed_parameters_in_ddp_equal_unpacked_training(
    tmp_path: Path, gradient_as_bucket_view: bool
) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:

        def wrap(module: nn.Module) -> nn.Module:
            return nn.parallel.DistributedDataParallel(
                module, gradient_as_bucket_view=gradient_as_bucket_view
            )

        pairs = [*zip(build(True, wrap), build(False))]
    finally:
        torch.distributed.destroy_process_group()
    for packed, plain in pairs:
        assert packed.is_packed
        for key, leaf in plain.items(True, True):
            torch.testing.assert_close(packed[key], leaf)


def test_half_module_of_consolidated_parameters_is_not_packed() -> None:
    module = nn.Linear(2, 3)
    weights = TensorDict.from_module(module)
    weights.consolidate(inplace=True)
    module.half()
    assert not weights.is_packed and not weights.is_consolidated()
    with torch.no_grad():
        weights.fill_(1)
    assert module.weight.dtype is torch.float16 and module.weight.all()
