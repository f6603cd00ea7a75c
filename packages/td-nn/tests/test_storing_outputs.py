"""How modules store their outputs: all or none, and read by key from a dict or collection."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as dist

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_nn import (
    CompositeDistribution,
    EnsembleModule,
    OutputError,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    as_tensordict_module,
    set_composite_lp_aggregate,
)


class Wide(dist.Normal):
    """A distribution whose log-probability does not have the batch size of its sample."""

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.zeros(5)


def entries() -> dict[str, Any]:
    return {"x": torch.zeros(3), "s": torch.ones(3), "n": {"y": torch.zeros(3)}}


TARGETS: dict[str, Callable[[], Any]] = {
    "dense": lambda: TensorDict(entries(), [3]),
    "with a device": lambda: TensorDict(entries(), [3], device="cpu"),
    "lazy stack": lambda: lazy_stack([TensorDict(entries(), [3])[i].clone() for i in range(3)]),
    "parameters": lambda: TensorDictParams(TensorDict(entries(), [3]), no_convert=True),
}


def unfit(*keys: Any, **options: Any) -> TensorDictModule[Any]:
    """Return a module whose last output does not have the batch size."""
    return TensorDictModule(
        lambda x: (*[x + 1 for _ in keys[1:]], torch.ones(5)), ["x"], list(keys), **options
    )


def draw(keys: list[Any], cls: Any, **options: Any) -> ProbabilisticTensorDictModule[Any]:
    options = {"default_interaction_type": "mean", **options}
    return ProbabilisticTensorDictModule({"loc": "x", "scale": "s"}, keys, distribution_class=cls, **options)


def draw_two(loc: Tensor, scale: Tensor) -> Any:
    class Two(dist.Normal):
        @property
        def mean(self) -> Any:
            return loc + 1, torch.ones(5)

    return Two(loc, scale)


def composite(loc: Tensor, scale: Tensor) -> Any:
    dists = {"x": dist.Normal(loc + 1, scale), "w": Wide(loc, scale)}
    return CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), dists)


UNFIT: dict[str, Callable[[Any], Any]] = {
    "module": lambda td: unfit("x", "loss")(td),
    "nested keys": lambda td: unfit(("n", "y"), ("new", "a"), ("new", "b"))(td),
    "one new level": lambda td: unfit(("new", "level", "a"))(td),
    "key below a leaf": lambda td: TensorDictModule(lambda x: (x + 1, x), ["x"], ["x", ("s", "a")])(td),
    "a collection as output": lambda td: TensorDictModule(
        lambda x: (TensorDict(y=x + 1), torch.ones(5)), ["x"], ["n", "loss"]
    )(td),
    "a dict by key": lambda td: TensorDictModule(
        lambda x: {"x": x + 1, "loss": torch.ones(5)}, ["x"], ["x", "loss"]
    )(td),
    "tensordict_out": lambda td: unfit("x", "loss", inplace=False)(
        TensorDict(x=torch.zeros(3)), tensordict_out=td
    ),
    "decorated function": lambda td: as_tensordict_module(in_keys=["x"], out_keys=["x", "loss"])(
        lambda x: (x + 1, torch.ones(5))
    )(td),
    "selected outputs": lambda td: unfit("x", "loss").select_out_keys("x")(td),
    "sequence": lambda td: TensorDictSequential(unfit("x", "loss"), inplace=True)(td),
    "sequence with tensordict_out": lambda td: TensorDictSequential(unfit("x", "loss"))(
        TensorDict(x=torch.zeros(3)), tensordict_out=td
    ),
    "sample and log-probability": lambda td: draw(["x"], Wide, return_log_prob=True)(td),
    "two samples": lambda td: draw(["x", "loss"], draw_two)(td),
    "composite": lambda td: draw(["x", "w"], composite, return_log_prob=True)(td),
    "log_prob of a composite": lambda td: composite(td["x"], td["s"]).log_prob_composite(
        td.set("w", td["x"])
    ),
    "get_dist with tensordict_out": lambda td: ProbabilisticTensorDictSequential(
        unfit("x", "loss"), draw(["y"], dist.Normal)
    ).get_dist(TensorDict(x=torch.zeros(3), s=torch.ones(3)), tensordict_out=td),
}


@pytest.mark.parametrize("call", UNFIT)
@pytest.mark.parametrize("target", TARGETS)
def test_call_whose_last_output_does_not_fit_stores_none(target: str, call: str) -> None:
    td = TARGETS[target]()
    sums = call.startswith("log_prob")
    with set_composite_lp_aggregate(sums), pytest.raises((ValueError, RuntimeError, KeyError)):
        UNFIT[call](td)
    assert list(td.keys()) == ["x", "s", "n", *["w"] * sums] and list(td["n"].keys()) == ["y"]
    assert (td["x"] == 0).all() and (td["s"] == 1).all() and (td["n", "y"] == 0).all()


def test_call_that_stores_nothing_keeps_the_seed() -> None:
    td = TensorDict({"x": torch.zeros(3), "s": torch.ones(3), "seed": torch.tensor(1)})
    module = draw(["x"], Wide, return_log_prob=True, default_interaction_type="random", generator="seed")
    with pytest.raises(ValueError, match="batch size"):
        module(td, tensordict_out=TensorDict(batch_size=[3]))
    assert td["seed"] == 1
    assert module(td)["seed"] != 1


OUTPUTS = {"a": 1.0, ("n", "a"): 2.0, ("n", "m", "a"): 3.0}


def tensors(x: Tensor) -> dict[str, Any]:
    return {"a": x + 1, "n": {"a": x + 2, "m": {"a": x + 3}}, "other": x}


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "dict": tensors,
    "flat dict": lambda x: {key: x + value for key, value in OUTPUTS.items()},
    "collection": lambda x: TensorDict(tensors(x)),
    "batched collection": lambda x: TensorDict(tensors(x), [3]),
    "dict of collections": lambda x: {"a": x + 1, "n": TensorDict(tensors(x)["n"])},
    "lazy stack": lambda x: lazy_stack(list(TensorDict(tensors(x), [3]).unbind(0))),
    "parameters": lambda x: TensorDictParams(TensorDict(tensors(x)), no_convert=True),
    "tensorclass": lambda x: importlib.import_module("td_tensorclass").from_dataclass(Fields)(
        **tensors(x), batch_size=[]
    ),
}


@dataclasses.dataclass
class Fields:
    a: Tensor
    n: Any
    other: Tensor


MODULES: dict[str, Callable[..., Any]] = {
    "module": TensorDictModule,
    "method": lambda fn, *keys: TensorDictModule(Call(fn), *keys, method="run"),
    "decorator": lambda fn, in_keys, out_keys: as_tensordict_module(in_keys=in_keys, out_keys=out_keys)(fn),
    "sequence": lambda *args: TensorDictSequential(TensorDictModule(*args)),
    "new": functools.partial(TensorDictModule, inplace=False),
}


class Call:
    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        self.run = fn


@pytest.mark.parametrize("keys", [[key] for key in OUTPUTS] + [[*OUTPUTS], ["_", ("n", "a")]], ids=str)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("made", MODULES)
def test_call_reads_nested_outputs_of_a_result_by_key(made: str, result: str, keys: list[Any]) -> None:
    if result == "tensorclass":
        pytest.importorskip("td_tensorclass")
    module = MODULES[made](RESULTS[result], ["x"], keys)
    td = module(TensorDict({"x": torch.zeros(3)}, [3]))
    wanted = [key for key in keys if key != "_"]
    assert {*td.exclude("x").keys(True, True)} == {*wanted}
    for key in wanted:
        assert isinstance(td[key], Tensor) and (td[key] == OUTPUTS[key]).all()
    tensors = module(torch.zeros(3))
    for key, value in zip(wanted, tensors if len(wanted) > 1 else [tensors]):
        assert (value == OUTPUTS[key]).all()


def test_call_stores_a_result_without_the_nested_key_as_one_value() -> None:
    td = TensorDictModule(lambda x: TensorDict(other=x), ["x"], [("n", "a")])(TensorDict(x=torch.zeros(3)))
    assert list(td["n", "a"].keys()) == ["other"]
    with pytest.raises(OutputError, match=r"without \('n', 'b'\)"):
        TensorDictModule(lambda x: {"n": {"a": x}}, ["x"], [("n", "a"), ("n", "b")])(x=torch.zeros(3))


def test_call_stores_collections_of_a_tuple_as_one_value_each() -> None:
    td = TensorDict({"x": torch.zeros(3), "b": {"old": torch.zeros(3)}})
    TensorDictModule(lambda x: (TensorDict(a=x), {"b": x}), ["x"], [("n", "a"), "b"])(td)
    assert list(td["n", "a"].keys()) == ["a"] and list(td["b"].keys()) == ["b"]


def test_ensemble_reads_nested_outputs_of_a_collection() -> None:
    layer = torch.nn.Linear(2, 1)

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> TensorDict:
            return TensorDict(n=TensorDict(a=self.layer(x)))

    ensemble = EnsembleModule(TensorDictModule(Nested(), ["x"], [("n", "a")]), 2)
    assert ensemble(TensorDict(x=torch.ones(3, 2)))["n", "a"].shape == (2, 3, 1)


@pytest.mark.parametrize("keys", [["a", "b"], [("n", "a"), ("n", "b")], ["a", "_", ("n", "b")]], ids=str)
def test_compile_of_several_outputs_is_one_graph(keys: list[Any]) -> None:
    torch._dynamo.reset()
    module = TensorDictModule(lambda x: tuple([x + place for place, _ in enumerate(keys)]), ["x"], keys)
    td = torch.compile(module, fullgraph=True, backend="eager")(TensorDict({"x": torch.zeros(3)}, [3]))
    for place, key in enumerate(keys):
        assert key == "_" or (td[key] == place).all()


@pytest.mark.parametrize(
    "keys", [["n", ("n", "b")], [("n", "b"), "n"], [("n", "m"), ("n", "m", "b")]], ids=str
)
def test_call_stores_a_collection_and_a_key_below_it_in_their_order(keys: list[Any]) -> None:
    def run(x: Tensor) -> tuple[Any, ...]:
        return tuple([TensorDict(own=x) if key != max(keys, key=len) or key == "n" else x for key in keys])

    td, expected = TensorDict(x=torch.zeros(3)), TensorDict(x=torch.zeros(3))
    TensorDictModule(run, ["x"], keys)(td)
    for key, value in zip(keys, run(td["x"])):
        expected.set(key, value)
    assert {*td.keys(True)} == {*expected.keys(True)}


@pytest.mark.parametrize("keys", [["n", ("n", "b")], ["x", "n", ("n", "b")], ["x", ("x", "b"), "z"]], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_call_stores_neither_a_collection_nor_an_unfit_key_below_it(name: str, keys: list[Any]) -> None:
    made = TensorDict(own=torch.zeros(3))
    td = TARGETS[name]()
    before = {key: value.clone() for key, value in td.items(True, True)}
    module = TensorDictModule(lambda x: (*[made for _ in keys[1:]], torch.ones(5)), ["s"], keys)
    with pytest.raises(Exception, match="batch size"):
        module(td)
    assert list(made.keys()) == ["own"] and {*td.keys(True, True)} == {*before}
    assert all(torch.equal(td[key], value) for key, value in before.items())
