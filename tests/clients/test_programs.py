"""Public programs written for tensordict print the same with td in its place: in one process the same numbers.

With worker processes, whose order differs from run to run, the programs print shapes and counts.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

#: The module that a program needs. Left out are prioritized replay of TorchRL, whose compiled extension does not load here, and
#: what does not run with these releases under either: BenchMARL 1.5.2 (cannot import SyncDataCollector from torchrl.collectors),
#: xdrl 0.2.0 (cannot import CompatibilityDecision from tdhook.workflow), torchrl-agents 0.4.12 (names and arguments that TorchRL
#: removed in 0.11), and robotdataset 0.2.4, whose data are elsewhere.
NEEDS = {
    "ppo": "torchrl",
    "sac": "torchrl",
    "replay": "torchrl",
    "store_replay": "fakeredis",
    "losses_vmap": "torchrl",
    "multi_agent": "torchrl",
    "workers": "torchrl",
    "ray_workers": "ray",
    "rl4co_tsp": "rl4co",
    "llm_chat": "torchrl",
    "attribution": "tdhook",
    "embedding_cache": "tensordict_cache",
    "rsl_ppo": "rsl_rl",
    "gflownet": "gfn",
    "verl_grpo": "verl",
    "kv_queue": "transfer_queue",
}


@pytest.mark.parametrize("name", NEEDS)
def test_program_with_td_prints_the_same(name, run):
    if find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    expected = run(f"{name}.py")
    assert expected
    assert run("-m", "td", "run", f"{name}.py") == expected
