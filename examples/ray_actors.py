"""Collections in Ray: an actor stores batches, and tasks read them from the object store without a copy.

    pip install ray
    python examples/ray_actors.py

A consolidated collection is one buffer, which Ray stores in shared memory; ``ray.get`` returns views on this buffer. Do not
write to the views: ``clone()`` them first. Ray pickles objects and trusts all processes of its cluster, so this example does
too.
"""

from __future__ import annotations

import sys

import torch

from td_core import TensorDict

try:
    import ray
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install ray")


@ray.remote(num_cpus=0)
class Buffer:
    """Actor that stores batches by number."""

    def __init__(self) -> None:
        self.batches: list[TensorDict] = []

    def add(self, batch: TensorDict) -> int:
        """Store a batch and return its number."""
        self.batches.append(batch)
        return len(self.batches) - 1

    def get(self, number: int) -> TensorDict:
        """Return the batch with a number."""
        return self.batches[number]


@ray.remote(num_cpus=0)
def mean_of(batch: TensorDict) -> float:
    """Return the mean reward of a batch."""
    return batch["reward"].mean().item()


def main() -> int:
    """Pass a batch through an actor, the object store and a task; return the exit status."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    batch = TensorDict(
        {"observation": torch.randn(1000, 84, 84), "reward": torch.arange(1000.0)}, batch_size=[1000]
    )
    buffer = Buffer.remote()
    number = ray.get(buffer.add.remote(batch.consolidate()))
    back = ray.get(buffer.get.remote(number))
    same = bool((back == batch).all())

    reference = ray.put(batch.consolidate())
    first, second = ray.get(reference), ray.get(reference)
    # Both collections must be views on the same copy in the object store.
    shared = first["observation"].data_ptr() == second["observation"].data_ptr()
    mean = ray.get(mean_of.remote(reference))
    ray.shutdown()
    print(f"Read back the same: {same}; without a copy: {shared}; a task saw the mean {mean}.")
    return 0 if same and shared and mean == 499.5 else 1


if __name__ == "__main__":
    sys.exit(main())
