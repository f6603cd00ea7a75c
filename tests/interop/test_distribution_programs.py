"""Random distribution modules give the same keys, samples, log-probabilities and types of error with td and tensordict.

Excluded, because td differs on purpose:

- samples that exist before a chain runs: td conditions on them;
- out keys that a composite does not write, and samples without a key: td raises or does not store them;
- a composite with reparametrised components: td returns equal samples, but with gradients;
- several aggregated distributions in one sequence: in tensordict each one overwrites the sum of the previous one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributions as dist

EXAMPLES = int(os.environ.get("TD_INTEROP_EXAMPLES", "300"))
Draw = Callable[..., Any]
KEYS: list[Any] = ["a", "b", ("n", "a"), ("m", "k", "b")]
CLASSES: list[tuple[Any, dict[str, Callable[[Any], torch.Tensor]]]] = [
    (dist.Normal, {"loc": torch.zeros, "scale": torch.ones}),
    (dist.Laplace, {"loc": torch.zeros, "scale": torch.ones}),
    (dist.Exponential, {"rate": torch.ones}),
    (dist.Bernoulli, {"logits": torch.zeros}),
    (dist.Categorical, {"logits": lambda shape: torch.arange(3.0).expand(*shape, 3)}),
]


class Component(NamedTuple):
    """One distribution: its sample key, its class by number, and the shape of its parameters."""

    key: Any
    cls: int
    tail: tuple[int, ...]

    def values(self, batch: tuple[int, ...]) -> dict[str, torch.Tensor]:
        shape = (*batch, *self.tail)
        return {name: make(shape) for name, make in CLASSES[self.cls][1].items()}


class Program(NamedTuple):
    """A specification of a module and of one call of it."""

    components: list[Component]
    kind: str
    options: dict[str, Any]
    switch: bool
    type: str | None
    batch: tuple[int, ...]
    method: str


@st.composite
def programs(draw: Draw) -> Program:
    """Draw a module of one distribution, a composite, or a chain of several."""
    kind = draw(st.sampled_from(["one", "one", "composite", "composite", "chain"]))
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=1 if kind == "one" else 3, unique=True))
    components = [Component(key, draw(st.integers(0, 4)), draw(st.sampled_from([(), (2,)]))) for key in keys]
    options: dict[str, Any] = {"return_log_prob": draw(st.booleans())}
    options["default_interaction_type"] = draw(st.sampled_from(["random", "mode", "deterministic"]))
    if kind != "chain" and draw(st.integers(0, 3)) == 0:
        options["log_prob_keys"] = [("l", f"p{place}") for place in range(len(keys))]
    elif kind != "chain" and draw(st.integers(0, 3)) == 0:
        options["log_prob_key"] = draw(st.sampled_from(["p", ("n", "p")]))
    if kind != "chain" and draw(st.integers(0, 3)) == 0:
        options["num_samples"] = draw(st.sampled_from([2, (2, 3)]))
    return Program(
        components,
        kind,
        options,
        kind != "chain" and draw(st.booleans()),
        draw(st.sampled_from([None, None, "random", "mode"])),
        draw(st.sampled_from([(), (3,), (3, 2)])),
        draw(st.sampled_from(["call", "call", "log_prob", "get_dist"])),
    )


def build(lib: Any, nn: Any, program: Program) -> tuple[Any, Any]:
    """Build the module and a collection with the parameters of its distributions."""
    if program.kind == "composite":
        entries = {
            each.key: lib.TensorDict(each.values(program.batch), program.batch) for each in program.components
        }
        module = nn.ProbabilisticTensorDictModule(
            ["params"],
            distribution_class=nn.CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {each.key: CLASSES[each.cls][0] for each in program.components}
            },
            **program.options,
        )
        return module, lib.TensorDict({"params": lib.TensorDict(entries, program.batch)}, program.batch)
    modules, data = [], lib.TensorDict({}, program.batch)
    for place, each in enumerate(program.components):
        values = each.values(program.batch)
        for name, value in values.items():
            data.set(f"{name}{place}", value)
        modules.append(
            nn.ProbabilisticTensorDictModule(
                {name: f"{name}{place}" for name in values},
                [each.key],
                distribution_class=CLASSES[each.cls][0],
                **program.options,
            )
        )
    return modules[0] if program.kind == "one" else nn.ProbabilisticTensorDictSequential(*modules), data


def describe(found: Any) -> Any:
    """Convert a distribution to comparable values; return other objects unchanged."""
    if hasattr(found, "dists"):
        return [[key, describe(each)] for key, each in found.dists.items()]
    if isinstance(found, dist.Distribution):
        return [type(found).__name__, found.batch_shape, found.event_shape]
    return found


def detach(found: Any) -> Any:
    """Detach a collection or tensor, and remove the empty nodes that a renamed key leaves in tensordict."""
    if not hasattr(found, "detach"):
        return found
    found = found.detach()
    return found.filter_empty_() if hasattr(found, "filter_empty_") else found


def run(lib: Any, nn: Any, program: Program) -> Any:
    """Run a program with one library and return its keys, result and input."""
    torch.manual_seed(0)
    with nn.set_composite_lp_aggregate(program.switch), nn.set_interaction_type(program.type):
        module, data = build(lib, nn, program)
        keys = [list(module.in_keys), list(module.out_keys), module.dist_sample_keys, module.log_prob_keys]
        if program.method == "get_dist":
            return [keys, describe(module.get_dist(data)), data]
        result = module(data)
        if program.method == "call":
            return [keys, detach(result), data]
        for key in module.log_prob_keys:
            if key in result.keys(True):
                result = result.exclude(key)
        return [keys, detach(module.log_prob(result)), detach(result)]


@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    deadline=None,
)
@given(program=programs())
def test_random_distribution_equals_tensordict(
    program: Program, both: list[tuple[Any, Any]], same: Callable[..., None], attempt: Callable[..., Any]
) -> None:
    ours, theirs = (attempt(lambda lib=lib, nn=nn: run(lib, nn, program)) for lib, nn in both)
    if "Failed while executing module" in repr(
        theirs
    ):  # a sequence of tensordict hides the type of the error
        assert "Error" in repr(ours), f"{ours!r}, the reference gives {theirs!r}"
        return
    same(ours, theirs, exact=False)
