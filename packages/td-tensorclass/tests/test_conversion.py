"""Constructors ``from_...`` of a class, and loading state dicts of old releases."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from td_core import TensorDict, TensorDictParams
from td_core.errors import StructureError
from td_tensorclass import NonTensorData, TensorClass, UnknownFieldError


class Place(NamedTuple):
    x: Any
    y: Any


@dataclass
class Spot:
    x: Any
    y: Any


@pytest.mark.parametrize(
    "make",
    [
        lambda cls, x, y: cls.from_any({"x": x, "y": y}, auto_batch_size=True, batch_dims=1),
        lambda cls, x, y: cls.from_any(Place(x, y), batch_size=[3]),
        lambda cls, x, y: cls.from_any(Spot(x, y), batch_size=[3]),
        lambda cls, x, y: cls.from_any(TensorDict({"x": x, "y": y}, [3]).lock_()),
        lambda cls, x, y: cls.from_namedtuple(Place(x, y), batch_size=[3]),
        lambda cls, x, y: cls.from_dataclass(Spot(x, y), batch_size=[3]),
        lambda cls, x, y: cls.from_dataclass(Spot(x, y), auto_batch_size=True, batch_dims=1),
        lambda cls, x, y: cls.from_dict({"x": x, "y": y}, batch_size=[3]),
    ],
)
def test_from_constructors_on_class_return_instance(make: Any) -> None:
    class Inner(TensorClass):
        a: Tensor

    class Outer(TensorClass):
        x: Tensor
        y: Inner

    entries = TensorDict({"a": torch.zeros(3)}, [3])
    outer = make(Outer, torch.ones(3), entries)
    assert (type(outer), type(outer.y), outer.batch_size) == (Outer, Inner, (3,))
    assert outer.x.equal(torch.ones(3))
    with pytest.raises(UnknownFieldError, match="Inner has no field 'x', 'y'"):
        make(Inner, torch.ones(3), entries)


class Affine(TensorClass):
    weight: Tensor
    bias: Tensor


def test_from_module_called_on_tensorclass_returns_instance() -> None:
    models = [nn.Linear(1, 2), nn.Linear(1, 2)]
    one, two = Affine.from_module(models[0]), Affine.from_modules(*models)
    assert (type(one), type(two), two.batch_size) == (Affine, Affine, (2,))
    assert one.weight is models[0].weight and two.bias[1].equal(models[1].bias)
    with one.data.clone().zero_().to_module(models[0]):
        assert models[0](torch.ones(1)).tolist() == [0.0, 0.0]
    assert models[0].weight is one.weight
    module = Affine.from_module(models[0], as_module=True)
    assert module.weight is one.weight and next(module.parameters()) is one.weight
    with pytest.raises(UnknownFieldError, match="Held has no field 'weight', 'bias'"):
        Held.from_module(models[0])


class Held(TensorClass):
    x: Any


@pytest.mark.parametrize("value", [torch.zeros(3), "s", 3, ["a", "b"]])
def test_from_any_other_value_returns_it_unchanged(value: Any) -> None:
    result = Held.from_any(value)
    assert result is value or result.tolist() == value
    held = Held(1)
    assert Held.from_any(held) is held


class Inner(TensorClass):
    a: Tensor
    word: str = "none"


class Outer(TensorClass):
    x: Tensor
    inner: Inner
    tag: str = "none"
    y: Any = None


def make_legacy_state(entries: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Build the state dict of a tensorclass as tensordict 0.1 to 0.11 wrote it."""
    level = OrderedDict(entries, __batch_size=torch.Size([3]), __device=None)
    return {"_tensordict": level, "_non_tensordict": values}


def make_legacy_value(data: Any, **more: Any) -> dict[str, Any]:
    """Build the state dict entry of a value in a tensorclass as tensordict 0.5 to 0.11 wrote it."""
    return make_legacy_state({}, {"data": data, "_metadata": None, **more})


STATES = {
    "0.1": lambda x: make_legacy_state(
        {"x": x, "inner": make_legacy_state({"a": x}, {"word": "deep"})}, {"tag": "hello", "y": None}
    ),
    "0.5": lambda x: make_legacy_state(
        {
            "x": x,
            "inner": make_legacy_state({"a": x, "word": make_legacy_value("deep")}, {}),
            "tag": make_legacy_value("hello"),
        },
        {"y": None},
    ),
    "0.11": lambda x: make_legacy_state(
        {
            "x": x,
            "inner": make_legacy_state({"a": x, "word": make_legacy_value("deep", _is_non_tensor=True)}, {}),
            "tag": make_legacy_value("hello", _is_non_tensor=True),
        },
        {"y": None},
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("release", STATES)
def test_load_state_dict_of_old_release_sets_fields(
    release: str, nested: bool, assign: bool, strict: bool
) -> None:
    wanted = torch.arange(3.0)
    outer: Any = Outer(torch.zeros(3), Inner(torch.zeros(3), batch_size=[3]), batch_size=[3])
    state: Any = STATES[release](wanted)
    if nested:
        target = TensorDict({"p": outer}, [3])
        target.load_state_dict(OrderedDict(p=state, __batch_size=torch.Size([3])), strict, assign)
        outer = target["p"]
    else:
        outer.load_state_dict(state, strict, assign)
    assert (outer.tag, outer.inner.word, outer.y) == ("hello", "deep", None)
    assert outer.x.equal(wanted) and outer.inner.a.equal(wanted)


class Kept(TensorClass):
    x: Tensor
    v: Any = None


@pytest.mark.parametrize("depth", range(3))
@pytest.mark.parametrize("flatten", [True, False])
def test_load_state_dict_into_empty_adds_non_tensor(flatten: bool, depth: int) -> None:
    source: Any = Kept(torch.ones(2), "word", batch_size=[2])
    for _ in range(depth):
        source = TensorDict({"k": source}, [2])
    added: Any = TensorDict({}, [2]).load_state_dict(source.state_dict(flatten=flatten), strict=False)
    for _ in range(depth):
        added = added["k"]
    assert (added["v"], added["x"].tolist()) == ("word", [1, 1])


@pytest.mark.parametrize("options", [{}, {"nocast": True}, {"autocast": True}], ids=str)
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("held", [5, None, "word"])
@pytest.mark.parametrize("data", [3, 1.5, True, [1, 2], (1, 2), {"a": [1]}, "s", b"b", {1}, None])
def test_state_dict_metadata_round_trips_non_tensor(
    data: Any, held: Any, locked: bool, flatten: bool, options: Any
) -> None:
    class Options(Kept, **options):
        pass

    source = Options(torch.ones(2), NonTensorData(data), batch_size=[2])
    state = source.state_dict(flatten=flatten)
    assert list(state) == ["x"]
    assert state._metadata[""]["_non_tensor"] == {"v": data}
    target = Options(torch.zeros(2), NonTensorData(held), batch_size=[2])
    if locked:
        target.lock_()
    target.load_state_dict(state)
    assert target.x.equal(torch.ones(2))
    assert (target.v, type(target.v)) == (data, type(data))
    assert target[0].v == data


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("given", ["word", None])
def test_load_state_dict_one_value_replaces_non_tensor_stack(given: Any, flatten: bool) -> None:
    target = Kept(torch.zeros(2), ["a", "b"], batch_size=[2])
    target.load_state_dict(Kept(torch.ones(2), given, batch_size=[2]).state_dict(flatten=flatten))
    assert (target.v, target.x.tolist()) == (given, [1, 1])


def test_load_state_dict_non_tensor_for_tensor_raises() -> None:
    target = Kept(torch.zeros(2), torch.zeros(2), batch_size=[2])
    with pytest.raises(StructureError, match=r"missing keys: \['v'\]"):
        target.load_state_dict(Kept(torch.ones(2), "word", batch_size=[2]).state_dict())
    assert target.v.tolist() == target.x.tolist() == [0, 0]


@pytest.mark.parametrize("flatten", [True, False])
def test_load_state_dict_added_node_has_annotated_class(flatten: bool) -> None:
    class Middle(TensorClass):
        x: Tensor
        kept: Kept = None

    class Outer(TensorClass):
        x: Tensor
        middle: Middle = None
        plain: Any = None

    kept = Kept(torch.ones(2), "word", batch_size=[2])
    source = Outer(torch.ones(2), Middle(torch.ones(2), kept, batch_size=[2]), kept, batch_size=[2])
    state = source.state_dict(flatten=flatten)
    target = Outer(torch.zeros(2), batch_size=[2]).load_state_dict(state, strict=False)
    assert (type(target.middle), type(target.middle.kept), type(target.plain)) == (Middle, Kept, TensorDict)
    assert target[0].middle.kept.v == target.plain["v"] == "word"
    stack = Outer.lazy_stack([Outer(torch.zeros(())) for _ in range(2)]).load_state_dict(state, strict=False)
    assert type(stack[1].middle.kept) is Kept


@pytest.mark.parametrize("below", [lambda node: node, lambda node: TensorDict({"n": node}, [3])])
def test_where_with_tensordict_returns_class_of_self(below: Any) -> None:
    class Labelled(TensorClass):
        x: Tensor
        label: str

    mine = Labelled(torch.zeros(3), "a", batch_size=[3])
    theirs = TensorDict({"x": torch.ones(3), "label": "b"}, [3])
    chosen = below(mine).where(torch.tensor([True, False, True]), below(theirs))
    chosen = chosen if isinstance(chosen, Labelled) else chosen["n"]
    assert type(chosen) is Labelled
    assert chosen.x.tolist() == [0, 1, 0] and chosen.label == ["a", "b", "a"]
    swapped = below(theirs).where(torch.tensor([True, False, True]), below(mine))
    swapped = swapped.get("n") if "n" in swapped.keys() else swapped
    assert type(swapped) is TensorDict and swapped["label"] == ["b", "a", "b"]


class Weights(TensorClass):
    w: torch.Tensor
    name: str | None = None


@pytest.mark.parametrize("below", [False, True])
def test_from_and_to_module_keep_tensorclass(below: bool) -> None:
    held: Any = Weights(torch.ones(2), "k", batch_size=[2])
    module = torch.nn.Module()
    module.p = TensorDictParams(TensorDict({"t": held, "s": "hi"}) if below else held)
    key = ("p", "t") if below else "p"
    td = TensorDict.from_module(module)
    assert (type(td.get(key)), td.get(key).name) == (Weights, "k")
    others, dest = td.data.clone().zero_(), td.data.clone()
    swapped = others.to_module(module, swap_dest=dest)
    assert torch.equal(TensorDict.from_module(module).get(key).w, torch.zeros(2))
    for each in swapped, dest:
        assert (type(each.get(key)), each.get(key).name, each.get(key).w.tolist()) == (Weights, "k", [1, 1])
    assert not below or dest["p", "s"] == "hi"
