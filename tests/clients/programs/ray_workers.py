"""Workers of Ray import the same implementation as the program that starts them, and exchange collections with it."""

from __future__ import annotations

import ray
import torch
from report import report
from tensordict import TensorDict

HERE = TensorDict.__module__


@ray.remote(num_cpus=0)
def double(batch: TensorDict) -> tuple[str, TensorDict]:
    """Return the implementation in a worker, and twice the batch."""
    import tensordict

    return tensordict.TensorDict.__module__, batch * 2


@ray.remote(num_cpus=0)
class Buffer:
    """An actor that keeps batches."""

    def __init__(self) -> None:
        self.batches: list[TensorDict] = []

    def add(self, batch: TensorDict) -> str:
        """Keep a batch."""
        self.batches.append(batch)
        return type(batch).__module__

    def stack(self) -> TensorDict:
        """Return all batches in one."""
        return torch.stack(self.batches)


ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
batch = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(3, 2)}, "s": "text"}, batch_size=[3])
there, result = ray.get(double.remote(batch))
report(
    "task", there == HERE, result["a"], result["n", "b"].sum(), result["s"], type(result).__module__ == HERE
)
buffer = Buffer.remote()
report("actor", [ray.get(buffer.add.remote(batch + step)) == HERE for step in range(2)])
report("stack", list(ray.get(buffer.stack.remote()).batch_size), ray.get(buffer.stack.remote())["a"])
ray.shutdown()
