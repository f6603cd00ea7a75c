"""Functions of the module ``dataclasses`` on tensorclasses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from td_core.errors import BatchSizeError, DimNamesError
from td_tensorclass import TensorClass, tensorclass


@tensorclass
class Step:
    obs: torch.Tensor
    label: str = "x"


class Late(Step):
    reward: torch.Tensor = None


class Frozen(TensorClass, frozen=True):
    obs: torch.Tensor
    texts: list[str] = None


class Own(TensorClass):
    obs: torch.Tensor

    def __init__(self, obs: torch.Tensor) -> None:
        self.obs = obs


class Argument(TensorClass):
    obs: torch.Tensor
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale: int) -> None:
        self.obs = self.obs * scale


def make_late() -> Late:
    return Late(obs=torch.zeros(3, 2), reward=torch.ones(3), batch_size=[3], names=["time"], device="cpu")


INSTANCES = {
    "plain": lambda: Step(torch.zeros(3, 2), batch_size=[3]),
    "derived": make_late,
    "frozen": lambda: Frozen(torch.zeros(3, 2), ["a", "b", "c"], batch_size=[3]),
    "own init": lambda: Own(torch.zeros(3, 2), batch_size=[3]),
    "lazy stack": lambda: Step.lazy_stack([Step(torch.zeros(2)) for _ in range(3)]),
    "two dims": lambda: Step(torch.zeros(3, 2), batch_size=[3, 2]),
    "no dims": lambda: Step(torch.zeros(3, 2)),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_replace_keeps_all_but_changes(name: str) -> None:
    step: Any = INSTANCES[name]()
    new = dataclasses.replace(step, obs=torch.ones(3, 2))
    assert type(new) is type(step)
    assert new.obs.tolist() == torch.ones(3, 2).tolist()
    assert (new.batch_size, new.device, new.names) == (step.batch_size, step.device, step.names)
    for field in dataclasses.fields(step):
        if field.name == "reward":
            assert new.reward is step.reward
        elif field.name != "obs":
            assert getattr(new, field.name) == getattr(step, field.name)
    assert step.obs.tolist() == torch.zeros(3, 2).tolist()


def test_replace_takes_another_batch_size() -> None:
    step = Step(torch.zeros(3, 2), batch_size=[3])
    new = dataclasses.replace(step, obs=torch.ones(2), batch_size=[])
    assert (new.batch_size, new.obs.tolist()) == ((), [1.0, 1.0])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"obs": torch.zeros(4, 2)}, BatchSizeError),
        ({"batch_size": []}, DimNamesError),
        ({"other": 1}, TypeError),
    ],
)
def test_replace_with_changes_that_do_not_fit_raises(changes: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        dataclasses.replace(make_late(), **changes)


def test_replace_without_init_argument_raises() -> None:
    step = Argument(torch.ones(3), 2, batch_size=[3])
    with pytest.raises((ValueError, TypeError), match="scale"):  # a TypeError since Python 3.13
        dataclasses.replace(step, obs=torch.zeros(3))
    assert dataclasses.replace(step, scale=2).batch_size == (3,)


@pytest.mark.parametrize("name", INSTANCES)
def test_fields_of_instance_are_those_of_class(name: str) -> None:
    step: Any = INSTANCES[name]()
    assert dataclasses.is_dataclass(step)
    assert dataclasses.fields(step) == dataclasses.fields(type(step)) == step.fields()
    assert list(dataclasses.asdict(step)) == [field.name for field in dataclasses.fields(step)]
