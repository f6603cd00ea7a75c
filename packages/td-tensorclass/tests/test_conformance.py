"""The public conformance suite of td-core, run on all kinds of tensorclasses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_core.testing import CollectionTests
from td_tensorclass import NonTensorStack, TensorClass, tensorclass


class Plain(TensorClass):
    a: Tensor
    b: Tensor
    extra: Tensor = None


class Child(Plain):
    c: Tensor = None


class Mixed(TensorClass):
    a: Tensor
    label: str
    column: list


class Outer(TensorClass):
    inner: Plain
    td: TensorDict
    z: Tensor
    extra: Any = None


@tensorclass
class Decorated:
    a: Tensor
    b: Tensor
    extra: Tensor = None


def leaf(*tail: int) -> Tensor:
    return torch.rand(3, 2, *tail, generator=torch.Generator().manual_seed(len(tail)))


class TestPlain(CollectionTests):
    new_key = "extra"

    def make(self) -> Plain:
        return Plain(leaf(), leaf(4), batch_size=[3, 2])


class TestDecorated(CollectionTests):
    new_key = "extra"

    def make(self) -> Any:
        return Decorated(leaf(), leaf(4), batch_size=[3, 2])


class TestChild(CollectionTests):
    new_key = "extra"

    def make(self) -> Child:
        return Child(leaf(), leaf(4), c=leaf(1), batch_size=[3, 2])


class TestMixed(CollectionTests):
    new_key = None

    def leaves(self, collection: Any) -> dict[Any, Tensor]:
        # A comparison returns tensors also for values.
        return {"a": collection.a}

    def make(self) -> Mixed:
        column = NonTensorStack.from_list([["p", "q"], ["r", "s"], ["t", "u"]], 2)
        return Mixed(leaf(), "label", column, batch_size=[3, 2])


class TestOuter(CollectionTests):
    new_key = "extra"

    def make(self) -> Outer:
        inner = Plain(leaf(), leaf(4), batch_size=[3, 2])
        return Outer(inner, TensorDict({"x": {"y": leaf(5)}}, batch_size=[3, 2]), leaf(3), batch_size=[3, 2])


class TestNamed(CollectionTests):
    new_key = "extra"

    def make(self) -> Plain:
        return Plain(leaf(), leaf(4), batch_size=[3, 2], names=["time", None])


class TestOverALazyStack(CollectionTests):
    new_key = "extra"

    def make(self) -> Plain:
        members = [
            TensorDict({"a": leaf()[i].clone(), "b": leaf(4)[i].clone()}, batch_size=[2]) for i in range(3)
        ]
        return Plain.from_tensordict(LazyStackedTensorDict(*members))
