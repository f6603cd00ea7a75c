"""Tensorclasses as users declare them. mypy and pyright check this file; no test runs it."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, Generic, Optional, TypeVar

import torch
from torch import Tensor
from typing_extensions import assert_type

from td_core import TensorDict
from td_tensorclass import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TypedTensorDict,
    UnbatchedTensor,
    is_tensorclass,
    set_list_to_stack,
    tensorclass,
)

V = TypeVar("V")


class Sample(TensorClass):
    """Fields with and without defaults."""

    image: Tensor
    caption: str = ""
    boxes: Optional[Tensor] = None  # noqa: UP045  test Optional too
    tags: list[str] = field(default_factory=list)

    @classmethod
    def blank(cls, count: int) -> Sample:
        """Return blank images."""
        return cls(torch.zeros(count, 3), batch_size=[count], device="cpu")

    @property
    def brightness(self) -> Tensor:
        """Return the mean over the pixels."""
        return self.image.mean(-1)


class Labelled(Sample, kw_only=True):
    """Inherited fields, options as class arguments."""

    label: Tensor


class Box(TensorClass, Generic[V]):
    """A generic class."""

    x: Tensor
    value: V


class Nested(TensorClass, nocast=True, frozen=True):
    """A field of another tensorclass."""

    sample: Sample
    count: int = 0


@tensorclass
class Decorated:
    """The decorator form."""

    x: Tensor
    name: str = "a"


@tensorclass(autocast=True)
class Cast:
    """The decorator form with options."""

    x: Tensor
    n: int = 1


class Data(TypedTensorDict):
    """Declared keys."""

    obs: Tensor
    reward: Tensor


def operations(sample: Sample) -> Tensor:
    """Check that methods keep the class and that fields have their types."""
    assert_type(sample.image, Tensor)
    assert_type(sample.caption, str)
    assert_type(sample.boxes, Optional[Tensor])  # noqa: UP045
    assert_type(sample.tags, list[str])
    assert_type(sample.brightness, Tensor)
    assert_type(sample.batch_size, torch.Size)
    assert_type(sample.device, Optional[torch.device])  # noqa: UP045
    assert_type(sample[0], Sample)
    assert_type(sample[:2, None], Sample)
    assert_type(sample + 1, Sample)
    assert_type(sample.reshape(-1).unsqueeze(0), Sample)
    assert_type(sample.clone().to("cpu", torch.float64), Sample)
    assert_type(sample.replace(caption="b"), Sample)
    assert_type(dataclasses.replace(sample, caption="c"), Sample)
    assert_type(Sample.from_tensordict(TensorDict({"image": torch.zeros(2)})), Sample)
    assert_type(Sample.blank(3), Sample)
    for part in sample.unbind(0):
        assert_type(part, Sample)
    sample.caption = "new"
    sample.boxes = torch.zeros(2, 4)
    sample.batch_size = [2]
    sample[0] = sample[1]
    return sample.image


def construction() -> None:
    """Call constructors with valid and invalid arguments."""
    Sample(torch.zeros(3), "text", torch.zeros(4), ["a"], batch_size=[], names=[], lock=True)
    labelled = Labelled(torch.zeros(2), label=torch.zeros(2), batch_size=[2])
    assert_type(labelled.label, Tensor)
    assert_type(labelled.caption, str)
    assert_type(Box(torch.zeros(2), "text").value, str)
    assert_type(Nested(Sample.blank(2)).sample.caption, str)
    Sample()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Sample(torch.zeros(1), nothing=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Labelled(torch.zeros(2))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Sample(torch.zeros(1), caption=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nested = Nested(Sample.blank(2))
    nested.count = 1  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    blank = Sample.blank(1)
    print(blank.nothing)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    blank.nothing = 1  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def decorated() -> None:
    """Use a decorated class: checkers see its fields and constructor, but not the methods of collections."""
    point = Decorated(torch.zeros(2), name="b")
    assert_type(point, Decorated)
    assert_type(point.x, Tensor)
    assert_type(Cast(torch.zeros(2), 3).n, int)
    assert is_tensorclass(point)


def values(td: TensorDict, config: dict[str, Any]) -> None:
    """Non-tensor data."""
    node = NonTensorData("a", batch_size=[2])
    assert_type(node[0], NonTensorData)
    stack = NonTensorStack("a", "b")
    stack.extend(["c"])
    td["config"] = MetaData(config)
    td["scale"] = UnbatchedTensor([1.0])
    assert_type(td.get_non_tensor("config"), Any)
    with set_list_to_stack(False):
        td["names"] = ["a", "b"]


def typed(data: Data) -> Tensor:
    """Declared keys are attributes."""
    assert_type(data.obs, Tensor)
    assert_type(data[0], Data)
    Data(obs=torch.zeros(2), reward=torch.zeros(2), batch_size=[2])
    Data(obs=torch.zeros(2))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    return data.reward
