"""Declarations: options of TypedTensorDict, joining fields that are None, setters, declared numbers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from td_core import TensorDict, collate, lazy_stack, maybe_dense_stack
from td_core.errors import KeyMismatchError, LockedError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass, TypedTensorDict, tensorclass


class ByKeyword(TypedTensorDict, frozen=True, shadow=True):
    clone: torch.Tensor


class InBrackets(TypedTensorDict["frozen", "shadow"]):  # type: ignore[misc]
    clone: torch.Tensor


class Inherited(InBrackets):
    x: torch.Tensor = None


@pytest.mark.parametrize("cls", [ByKeyword, InBrackets, Inherited])
def test_typed_tensordict_options_apply_in_each_form(cls: Any) -> None:
    data = cls(clone=torch.zeros(3), batch_size=[3])
    assert data.is_locked and data.clone.shape == (3,)
    with pytest.raises(FrozenInstanceError, match="cannot unlock"):
        data.unlock_()
    with pytest.raises(FrozenInstanceError, match="cannot assign to 'clone'"):
        data.clone = torch.ones(3)
    with pytest.raises(LockedError):
        data["other"] = torch.ones(3)
    assert cls.from_tensordict(TensorDict({"clone": torch.zeros(3)}, [3])).is_locked
    assert not (data + 1).is_locked


@pytest.mark.parametrize("name", ["frozzen", "autocast", "nocast", "tensor_only", "kw_only"])
def test_typed_tensordict_unknown_option_raises(name: str) -> None:
    message = rf"a TypedTensorDict has no option '{name}'; options: \['frozen', 'shadow'\]"
    with pytest.raises(TypeError, match=message):
        TypedTensorDict[name]
    with pytest.raises(TypeError, match=message):
        type("Wrong", (TypedTensorDict,), {}, **{name: True})


def test_typed_tensordict_brackets_return_cached_class() -> None:
    assert TypedTensorDict["frozen"] is TypedTensorDict["frozen"]
    assert TypedTensorDict[int].__origin__ is TypedTensorDict


@pytest.mark.parametrize("name", ["batch_size", "names", "device", "lock", "_dict"])
def test_typed_tensordict_reserved_key_with_shadow_raises(name: str) -> None:
    with pytest.raises(AttributeError, match="would hide"):
        type("Wrong", (TypedTensorDict,), {"__annotations__": {name: torch.Tensor}}, shadow=True)


class Sample(TensorClass):
    x: torch.Tensor
    note: str | None = None
    mask: torch.Tensor | None = None


def make_sample(note: str | None = None, size: tuple[int, ...] = ()) -> Sample:
    return Sample(x=torch.zeros(size), note=note, batch_size=size)


def nest_sample(item: Sample) -> TensorDict:
    return TensorDict({"s": item}, item.batch_size)


JOINS = {
    "stack": lambda: torch.stack([make_sample(), make_sample("a")]),
    "stack, the other first": lambda: torch.stack([make_sample("a"), make_sample()]).flip(0),
    "Sample.stack": lambda: Sample.stack([make_sample(), make_sample("a")]),
    "cat": lambda: torch.cat([make_sample(None, (1,)), make_sample("a", (1,))]),
    "maybe_dense_stack": lambda: maybe_dense_stack([make_sample(), make_sample("a")]),
    "lazy_stack": lambda: lazy_stack([make_sample(), make_sample("a")]),
    "default_collate": lambda: torch.utils.data.default_collate([make_sample(), make_sample("a")]),
    "collate": lambda: collate([make_sample(), make_sample("a")]),
    "below": lambda: torch.stack([nest_sample(make_sample()), nest_sample(make_sample("a"))])["s"],
    "where": lambda: make_sample(None, (2,)).where(torch.tensor([True, False]), make_sample("a", (2,))),
    "out": lambda: torch.stack(
        [make_sample(), make_sample("a")], out=torch.stack([make_sample("b"), make_sample("c")])
    ),
}


@pytest.mark.parametrize("join", JOINS)
def test_join_none_and_non_tensor_field_keeps_both(join: str) -> None:
    result = JOINS[join]()
    assert list(result.note) == [None, "a"]
    assert [each.note for each in result.unbind(0)] == [None, "a"]


def test_join_none_and_non_tensor_stack_field_keeps_all() -> None:
    each = Sample(x=torch.zeros(2), note=NonTensorStack("a", "b"), batch_size=[2])
    assert list(torch.cat([make_sample(None, (2,)), each]).note) == [None, None, "a", "b"]
    assert [part.note for part in torch.stack([make_sample(None, (2,)), make_sample("a", (2,))])] == [
        None,
        "a",
    ]
    first = make_sample()
    torch.stack([first, make_sample("a")])
    assert "note" not in first._tensordict.keys()


def test_stack_none_and_tensor_raises_naming_key() -> None:
    other = Sample(x=torch.zeros(()), mask=torch.zeros(()))
    with pytest.raises(KeyMismatchError, match=r"extra keys \['mask'\]"):
        torch.stack([make_sample(), other])


class Doubling(TensorClass):
    x: torch.Tensor
    name: str = "a"

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "x":
            value = value * 2
        super().__setattr__(name, value.upper() if isinstance(value, str) else value)


def test_init_calls_overridden_setattr() -> None:
    made = Doubling(torch.ones(2), batch_size=[2])
    assert made.x.tolist() == [2, 2]
    assert made.name == "A"
    assert (made + 1).x.tolist() == [3, 3]
    assert made[0].x == made.clone()[1].x == 2
    made.x = torch.ones(2)
    assert made.x.tolist() == [2, 2]


@tensorclass(autocast=True)
class Step:
    x: torch.Tensor = None
    count: int = None
    rate: float = None
    inner: Step = None


@tensorclass(nocast=True)
class Kept:
    count: int = None


def test_from_dict_declared_numbers_keep_types() -> None:
    data = TensorDict(
        {"step": Step(x=torch.zeros(()), count=1, inner=Step(count=2, rate=0.5)), "kept": Kept(count=3)}
    )
    for options in ({"auto_batch_size": True}, {}):
        back = data.from_dict_instance(data.to_dict(), **options)
        step = back["step"]
        assert [type(step.count), type(step.inner.count), type(step.inner.rate)] == [int, int, float]
        assert (step.count, step.inner.count, step.inner.rate, back["kept"].count) == (1, 2, 0.5, 3)
    other = data["step"].from_dict_instance({"x": torch.ones(()), "rate": 2.0, "inner": {"count": 4}})
    assert (type(other.rate), type(other.inner.count), other.x) == (float, int, torch.ones(()))


def test_from_dict_of_to_dict_keeps_non_tensor() -> None:
    data = TensorDict(
        {
            "v": NonTensorData(3),
            "s": NonTensorStack(1, 2),
            "n": {"w": NonTensorData(1.5)},
            "x": torch.zeros(2),
        },
        [2],
    )
    back = data.from_dict_instance(data.to_dict(), auto_batch_size=True)
    assert back.batch_size == (2,)
    assert (back["v"], list(back["s"]), back["n", "w"]) == (3, [1, 2], 1.5)
    assert back.from_dict_instance({"v": torch.zeros(2), "s": "a"}, batch_size=[2])["v"].shape == (2,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorDict({"x": 1}),
        lambda: lazy_stack([TensorDict({"x": 1})]),
        lambda: NonTensorStack("a"),
        lambda: ByKeyword(clone=torch.zeros(())),
    ],
)
def test_read_unknown_attribute_raises_attribute_error(make: Any) -> None:
    node = make()
    with pytest.raises(
        AttributeError, match=f"'{type(node).__name__}' object has no attribute 'attr'"
    ) as caught:
        node.attr  # noqa: B018
    assert caught.value.name == "attr" and caught.value.obj is node
    assert not hasattr(node, "attr") and getattr(node, "attr", 1) == 1
    assert "__getattr__" not in dir(node)  # defining __getattr__ would slow down every attribute read
