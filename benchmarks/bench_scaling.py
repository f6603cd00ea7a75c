"""Show that the cost of an operation grows linearly with the number of leaves and with the depth.

Each row is one operation, each column one size; a number is the time per leaf (or per level of nesting) in µs. If the
numbers of a row are about equal, the operation is linear. The first row, a loop over the leaves, shows the effect of the
allocator and of CPU caches, which no operation can avoid. A flat key is as long as its path, so the time of flattening per
level grows with the depth; operations that build key paths for messages or results grow slightly.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

import td_core
from td_core import TensorDict

LEAVES = (10, 100, 1000, 10_000)
DEPTHS = (5, 50, 500)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "(loop of clones)": lambda td: [leaf.clone() for leaf in td.values(True, True)],
    "construct": lambda td: TensorDict(td.to_dict(), td.batch_size),
    "index": lambda td: td[0],
    "set item": lambda td: td.__setitem__(0, 0),
    "clone": lambda td: td.clone(),
    "exp": lambda td: td.exp(),
    "add": lambda td: td + td,
    "apply": lambda td: td.apply(torch.neg),
    "stack": lambda td: torch.stack([td, td]),
    "reshape": lambda td: td.reshape(-1),
    "unbind": lambda td: td.unbind(0),
    "leaf keys": lambda td: list(td.keys(True, True)),
    "flatten, unflatten": lambda td: td.flatten_keys("/").unflatten_keys("/"),
    "update": lambda td: td.clone(False).update(td),
    "state_dict": lambda td: td.state_dict(),
    "lock, unlock": lambda td: td.lock_().unlock_(),
    "equal": lambda td: (td == td).all(),
    "repr": repr,
}


def wide(count: int) -> Any:
    """Build a collection with ``count`` leaves in one node."""
    return TensorDict({f"k{i}": torch.rand(4) for i in range(count)}, [4])


def deep(depth: int) -> Any:
    """Build a collection of ``depth`` nested nodes with one leaf each."""
    td = TensorDict({"leaf": torch.rand(4)}, [4])
    for _ in range(depth - 1):
        td = TensorDict({"leaf": torch.rand(4), "below": td}, [4])
    return td


def per_unit(operation: Callable[[Any], Any], td: Any, units: int) -> float:
    """Return the minimum time of a few runs, in µs per leaf or level."""
    best = float("inf")
    for _ in range(5 if units < 5000 else 3):
        count = max(1, 300 // units)
        start = time.thread_time()
        for _ in range(count):
            operation(td)
        best = min(best, (time.thread_time() - start) / count / units)
    return best * 1e6


def table(title: str, sizes: tuple[int, ...], make: Callable[[int], Any]) -> None:
    """Measure all operations on all sizes, and print the table."""
    collections = [make(size) for size in sizes]
    print(f"\n{title:20}" + "".join(f"{size:>10}" for size in sizes))
    for name, operation in OPERATIONS.items():
        numbers = [per_unit(operation, td, size) for td, size in zip(collections, sizes, strict=True)]
        print(f"{name:20}" + "".join(f"{number:10.2f}" for number in numbers), flush=True)


torch.set_num_threads(1)
gc.disable()
print(f"td_core {td_core.__version__}, torch {torch.__version__}: µs per leaf, µs per level")
table("leaves", LEAVES, wide)
table("depth", DEPTHS, deep)
