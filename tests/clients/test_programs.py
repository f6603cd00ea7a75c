"""Public programs written for tensordict print the same with td in its place: in one process the same numbers.

With worker processes, whose order differs from run to run, the programs print shapes and counts.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

#: The module that a program needs. Left out are prioritized replay of TorchRL, whose compiled extension does not load here, and
#: programs that do not run with these releases under either: BenchMARL and torchrl-agents use names and arguments that TorchRL
#: removed in 0.11, xdrl a name that tdhook lacks.
NEEDS = {
    "ppo": "torchrl",
    "sac": "torchrl",
    "replay": "torchrl",
    "losses_vmap": "torchrl",
    "multi_agent": "torchrl",
    "workers": "torchrl",
    "ray_workers": "ray",
    "rl4co_tsp": "rl4co",
    "attribution": "tdhook",
    "embedding_cache": "tensordict_cache",
    "rsl_ppo": "rsl_rl",
    "verl_grpo": "verl",
}


@pytest.mark.parametrize("name", NEEDS)
def test_program_with_td_prints_the_same(name, run):
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    expected = run(f"{name}.py")
    assert expected
    assert run("-m", "td", "run", f"{name}.py") == expected
