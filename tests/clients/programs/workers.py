"""Collectors of TorchRL with two worker processes, and environments in processes."""

from __future__ import annotations

import sys

import torch
from models import make_actor
from point_env import STEPS, make_env
from report import report
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import ParallelEnv, SerialEnv


def main() -> None:
    """Collect with each kind of collector; print shapes and counts."""
    torch.manual_seed(0)
    for cls in (MultiSyncCollector, MultiAsyncCollector):
        actor = make_actor()
        collector = cls([make_env, make_env], actor, frames_per_batch=80, total_frames=240)
        frames, shapes = 0, set()
        for data in collector:
            frames += data.numel()
            shapes.add(tuple(data.batch_size))
            with torch.no_grad():
                for parameter in actor.parameters():
                    parameter.mul_(0.5)
            collector.update_policy_weights_()
        report(cls.__name__, frames, sorted(shapes), sorted(map(str, data.keys(True, True))), data.names)
        collector.shutdown()
    for kind in (SerialEnv, ParallelEnv):
        env = kind(2, make_env)
        data = env.rollout(STEPS + 5, break_when_any_done=False)
        report(kind.__name__, list(data.batch_size), int(data["next", "done"].sum()), data.names)
        env.close()


if __name__ == "__main__":
    main()
    sys.exit(0)
