"""The cache of tensordict-cache: entries in memory-mapped files, found again by another object, and evicted by size."""

from __future__ import annotations

import tempfile

import torch
from report import report
from tensordict import TensorDict
from tensordict_cache import TensorCache

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    cache = TensorCache(folder)
    for number in range(3):
        entry = {"embedding": torch.randn(4), "tokens": {"ids": torch.arange(number + 1)}}
        cache[f"prompt {number}"] = TensorDict(entry, batch_size=[])
    cache[42] = TensorDict({"embedding": torch.ones(4)}, batch_size=[])
    report("written", len(cache), "prompt 1" in cache, 43 in cache, cache["prompt 1"]["embedding"])
    again = TensorCache(folder)
    report(
        "again", len(again), again["prompt 2"]["tokens", "ids"], again[42]["embedding"], again.get("absent")
    )
    report("keys", sorted(again.keys()) == sorted(cache.keys()))
    cache["prompt 1"] = TensorDict({"embedding": torch.zeros(2)}, batch_size=[])
    report("replaced", cache["prompt 1"]["embedding"], TensorCache(folder)["prompt 1"]["embedding"])
    del again["prompt 0"]
    report("deleted", len(again), len(TensorCache(folder)))
    try:
        again["prompt 0"]
    except KeyError:
        report("missing", "KeyError")
    cache.clear()
    report("cleared", len(cache), len(TensorCache(folder)))
