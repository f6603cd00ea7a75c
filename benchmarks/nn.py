"""Measure the overhead of modules over the call of the module that they wrap, with td and with tensordict.

The wrapped module is an identity on one tensor. The rows alternate on one thread, and the time is the CPU time of that
thread; each figure is the fastest of many rounds. ``above`` is the time of a call minus the time of the wrapped modules;
``ref / ours`` compares total times. No result makes the script fail. Without tensordict, its columns are empty.

A second table compares modules with equivalent hand-written torch calls; ``ours / hand`` should not exceed 1.25.

    python benchmarks/nn.py [--rounds 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributions as dist
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import td_core
import td_nn

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensordict
        import tensordict.nn as reference
except ModuleNotFoundError:
    tensordict = reference = None

#: Maximum overhead of each row in microseconds; None if only the comparison matters.
LIMITS = {
    "collection": 4.0,
    "keyword": 8.0,
    "position": None,
    "nested keys": None,
    "sequence of 3": 15.0,
    "function": None,
}
CALLS = 500
#: Layers of the networks whose ensembles are measured.
DEPTHS = (2, 4)


def rows(lib: Any, modules: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the calls of one library, each with the number of identity modules that it runs."""
    x, inner = torch.ones(3), nn.Identity()
    data = lib.TensorDict({"x": x}, batch_size=[])
    deep = lib.TensorDict({"n": {"x": x}}, batch_size=[])
    one = modules.TensorDictModule(inner, ["x"], ["y"])
    nested = modules.TensorDictModule(inner, [("n", "x")], [("n", "y")])
    keys = ["x", "a", "b", "c"]
    chain = modules.TensorDictSequential(
        *[modules.TensorDictModule(inner, [read], [write]) for read, write in itertools.pairwise(keys)]
    )
    function = modules.WrapModule(lambda td: td)
    return {
        "collection": (lambda: one(data), 1),
        "keyword": (lambda: one(x=x), 1),
        "position": (lambda: one(x), 1),
        "nested keys": (lambda: nested(deep), 1),
        "sequence of 3": (lambda: chain(data), 3),
        "function": (lambda: function(data), 0),
    }


def network(depth: int) -> nn.Sequential:
    """Build ``depth`` linear layers with an activation after each."""
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.ReLU())])


def rows_beside_torch(lib: Any, modules: Any) -> dict[str, Callable[[], Any]]:
    """Return the calls of one library that are compared with hand-written torch calls."""
    data = lib.TensorDict({"x": torch.ones(32, 8)}, batch_size=[32])
    many = lib.TensorDict({"x": torch.ones(4, 32, 8)}, batch_size=[4, 32])
    calls: dict[str, Callable[[], Any]] = {}
    for depth in DEPTHS:
        module = modules.TensorDictModule(network(depth), ["x"], ["y"])
        same, each = modules.EnsembleModule(module, 4), modules.EnsembleModule(module, 4, expand_input=False)
        calls[f"ensemble, {depth} layers"] = partial(same, data)
        calls[f"ensemble, {depth} layers, an input each"] = partial(each, many)
    return calls | rows_of_distributions(lib, modules)


def rows_of_distributions(lib: Any, modules: Any) -> dict[str, Callable[[], Any]]:
    """Return the calls of one library that build distributions, draw samples and compute log-probabilities."""
    loc, scale, logits = torch.zeros(256, 8), torch.ones(256, 8), torch.zeros(256, 8)
    prob, sequence = modules.ProbabilisticTensorDictModule, modules.ProbabilisticTensorDictSequential
    data = lib.TensorDict({"x": torch.ones(256, 32), "loc": loc, "scale": scale, "y": loc}, batch_size=[256])
    normal = prob(
        ["loc", "scale"], ["y"], distribution_class=dist.Normal, default_interaction_type="random",
        return_log_prob=True,
    )  # fmt: skip
    policy = sequence(
        modules.TensorDictModule(policy_network(), ["x"], ["mu", "sigma"]),
        prob(
            {"loc": "mu", "scale": "sigma"}, ["y"], distribution_class=dist.Normal,
            default_interaction_type="random", return_log_prob=True,
        ),
    )  # fmt: skip
    params = lib.TensorDict({"a": {"loc": loc, "scale": scale}, "b": {"logits": logits}}, batch_size=[256])
    components = {"a": dist.Normal, "b": dist.Categorical}
    composite = modules.CompositeDistribution

    def compose() -> Any:
        both = composite(params, components)
        return both.log_prob(both.sample())

    def draw_one_hot() -> Any:
        choice = modules.OneHotCategorical(logits=logits)
        return choice.log_prob(choice.sample())

    def draw_truncated() -> Any:
        return modules.TruncatedNormal(loc, scale, -1.0, 1.0).rsample()

    extract = modules.NormalParamExtractor()
    # Copy the collection, so that results are freed after each call, as in the hand-written calls.
    return {
        "normal: draw and score": lambda: normal(data),
        "normal: score": lambda: normal.log_prob(data),
        "policy: network, draw and score": lambda: policy(data.copy()),
        "policy: network and score": lambda: policy.log_prob(data.copy()),
        "composite: build, draw and score": compose,
        "one-hot: build, draw and score": draw_one_hot,
        "truncated normal: build and draw": draw_truncated,
        "one-hot draws": lambda: modules.rand_one_hot(logits),
        "extractor": lambda: extract(data["x"]),
    }


def policy_network() -> nn.Module:
    """Build a network that returns a location and a scale."""
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)]
    return nn.Sequential(*layers, td_nn.NormalParamExtractor())


def distributions_by_hand() -> dict[str, Callable[[], Any]]:
    """Return the equivalent hand-written calls of torch distributions."""
    x, loc, scale, logits = torch.ones(256, 32), torch.zeros(256, 8), torch.ones(256, 8), torch.zeros(256, 8)
    network = policy_network()
    bias = td_nn.inv_softplus(0.99)

    def draw_and_score(loc: Any, scale: Any) -> Any:
        made = dist.Normal(loc, scale)
        drawn = made.rsample()
        return drawn, made.log_prob(drawn)

    def compose() -> Any:
        one, other = dist.Normal(loc, scale), dist.Categorical(logits=logits)
        return one.log_prob(one.sample()), other.log_prob(other.sample())

    def draw_one_hot() -> Any:
        made = dist.OneHotCategorical(logits=logits)
        return made.log_prob(made.sample())

    def draw_truncated() -> Any:
        made = dist.Normal(loc, scale)
        low, high = made.cdf(torch.full_like(loc, -1.0)), made.cdf(torch.full_like(loc, 1.0))
        return made.icdf(low + torch.rand_like(loc) * (high - low)).clamp(-1.0, 1.0)

    def extract() -> Any:
        loc, raw = x.chunk(2, -1)
        return loc, (nn.functional.softplus(raw + bias) + 0.01).clamp_min(1e-4)

    return {
        "normal: draw and score": lambda: draw_and_score(loc, scale),
        "normal: score": lambda: dist.Normal(loc, scale).log_prob(loc),
        "policy: network, draw and score": lambda: draw_and_score(*network(x)),
        "policy: network and score": lambda: dist.Normal(*network(x)).log_prob(loc),
        "composite: build, draw and score": compose,
        "one-hot: build, draw and score": draw_one_hot,
        "truncated normal: build and draw": draw_truncated,
        "one-hot draws": lambda: nn.functional.one_hot(logits.softmax(-1).multinomial(1).squeeze(-1), 8),
        "extractor": extract,
    }


def rows_by_hand() -> dict[str, Callable[[], Any]]:
    """Return the equivalent hand-written torch calls."""
    calls: dict[str, Callable[[], Any]] = {}
    for depth in DEPTHS:
        skeleton = network(depth).to("meta")
        state = stack_module_state([network(depth) for _ in range(4)])

        def call(params: Any, buffers: Any, x: Any, skeleton: nn.Module = skeleton) -> Any:
            return functional_call(skeleton, (params, buffers), (x,))

        calls[f"ensemble, {depth} layers"] = partial(vmap(call, (0, 0, None)), *state, torch.ones(32, 8))
        calls[f"ensemble, {depth} layers, an input each"] = partial(vmap(call), *state, torch.ones(4, 32, 8))
    return calls | distributions_by_hand()


def measure(calls: dict[Any, Callable[[], Any]], rounds: int, count: int = CALLS) -> dict[Any, float]:
    """Run the calls alternately; return the microseconds of each one in its fastest round."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for key, call in calls.items():
            start = time.thread_time()
            for _ in range(count):
                call()
            best[key] = min(best[key], (time.thread_time() - start) / count * 1e6)
    return best


def main() -> None:
    """Print the tables, and write them as JSON if ``--json`` is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="how often each row is measured (100)")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    sides = {"ours": rows(td_core, td_nn)}
    if tensordict is not None:
        sides["ref"] = rows(tensordict, reference)
    x, inner = torch.ones(3), nn.Identity()
    calls: dict[Any, Callable[[], Any]] = {"inner": lambda: inner(x)}
    calls |= {(side, name): call for side, table in sides.items() for name, (call, _) in table.items()}
    took = measure(calls, options.rounds)
    base = took["inner"]
    print(f"call of an identity module: {base:.2f} us\n")
    print(f"{'row':14}{'above us':>10}{'limit':>8}{'ref above':>11}{'ref / ours':>12}")
    found, ratios = {}, []
    for name, limit in LIMITS.items():
        count = sides["ours"][name][1]
        above = took["ours", name] - count * base
        found[name] = {"above": above, "limit": limit}
        line = f"{name:14}{above:10.2f}{'' if limit is None else format(limit, '.0f'):>8}"
        if "ref" in sides:
            ratio = took["ref", name] / took["ours", name]
            ratios.append(ratio)
            found[name] |= {"ref_above": took["ref", name] - count * base, "ratio": ratio}
            line += f"{took['ref', name] - count * base:11.2f}{ratio:12.2f}"
        print(line)
    if ratios:
        print(f"\ngeometric mean of ref / ours: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
    calls = {("hand", name): call for name, call in rows_by_hand().items()}
    for side, libraries in {"ours": (td_core, td_nn), "ref": (tensordict, reference)}.items():
        if libraries[0] is not None:
            calls |= {(side, name): call for name, call in rows_beside_torch(*libraries).items()}
    took = measure(calls, max(options.rounds // 2, 5), CALLS // 10)
    print(f"\n{'row':34}{'hand us':>10}{'ours us':>10}{'ours / hand':>13}{'ref / ours':>12}")
    for name in (name for side, name in calls if side == "hand"):
        hand, ours = took["hand", name], took["ours", name]
        found[name] = {"hand": hand, "ours": ours}
        line = f"{name:34}{hand:10.1f}{ours:10.1f}{ours / hand:13.2f}"
        if ("ref", name) in took:
            found[name]["ratio"] = took["ref", name] / ours
            line += f"{took['ref', name] / ours:12.2f}"
        print(line)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
