"""Run a function on chunks of a collection in worker processes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from .._python.workers import run, run_task
from .._tree.defaults import clone_detached
from .._tree.node import Core


def batch_dim(td: Core, dim: int) -> int:
    ndim = len(td.batch_size)
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is not a batch dim of a collection of batch size {list(td.batch_size)}")
    return dim % ndim


def count_workers(num_workers: int | None, pool: object) -> int:
    if pool is not None:
        if num_workers is not None:
            raise ValueError(
                f"a pool has its own workers: give pool or num_workers, not both; got {num_workers}"
            )
        return getattr(pool, "_processes", None) or os.cpu_count() or 1
    if num_workers is None:
        return os.cpu_count() or 1
    if num_workers < 0:
        raise ValueError(f"num_workers is a number of processes, or 0 for none; got {num_workers}")
    return num_workers


def get_generator_device(generator: torch.Generator | None) -> torch.device | str:
    """Return the device of a generator, or "cpu" for None instead of torch's default device."""
    return "cpu" if generator is None else generator.device


def compute_chunks(size: int, chunksize: int | None, num_chunks: int | None, workers: int) -> list[Any]:
    """Return the indices of the chunks along their dim: slices, or ints for ``chunksize=0``."""
    if chunksize is not None and num_chunks is not None:
        raise ValueError(f"give chunksize or num_chunks, not both; got {chunksize} and {num_chunks}")
    if chunksize == 0:
        return list(range(size))
    if chunksize is None:
        count = max(workers, 1) if num_chunks is None else num_chunks
        if count < 1:
            raise ValueError(f"num_chunks is 1 or more; got {num_chunks}")
        chunksize = max(-(-size // count), 1)
    if chunksize < 0:
        raise ValueError(f"chunksize is 0 or more; got {chunksize}")
    return [slice(start, min(start + chunksize, size)) for start in range(0, max(size, 1), chunksize)]


def iter_chunks(td: Core, dim: int, positions: list[Any], one_by_one: bool) -> Any:
    """Index a collection at each position along ``dim``, lazily if ``one_by_one``."""
    parts = (td._index(index_at(dim, position)) for position in positions)
    return parts if one_by_one else list(parts)


def index_at(dim: int, position: object) -> tuple[object, ...]:
    return (slice(None),) * dim + (position,)


class Options(NamedTuple):
    """The arguments of ``map`` and ``map_iter`` that state how tasks are run."""

    pool: Any
    generator: torch.Generator | None
    max_tasks_per_child: int | None
    worker_threads: int
    pbar: bool
    start_method: str | None


def run_chunks(
    fn: Callable[[object], object],
    chunks: Iterable[object],
    outs: list[object],
    workers: int,
    options: Options,
) -> Iterator[Any]:
    pool, generator, max_tasks_per_child, worker_threads, pbar, start_method = options
    drawn = torch.empty((), dtype=torch.int64, device=get_generator_device(generator))
    seed = int(drawn.random_(generator=generator))
    results: Iterator[object]
    call, tasks = partial(_call_task, fn, seed), enumerate(zip(chunks, outs))
    if pool is not None:
        results = pool.imap(call, tasks)
    elif workers == 0:
        results = _run_locally(call, tasks)
    else:
        results = run(
            fn,
            ((_detach_chunk(chunk), out) for _, (chunk, out) in tasks),
            num_workers=min(workers, max(len(outs), 1)),
            seed=seed,
            max_tasks_per_child=max_tasks_per_child,
            worker_threads=worker_threads,
            start_method=start_method,
        )
    return iter(_import_tqdm()(results, total=len(outs))) if pbar else results


def _run_locally(call: Callable[[object], object], tasks: Iterable[object]) -> Iterator[object]:
    for task in tasks:
        with torch.random.fork_rng(devices=[]):
            result = call(task)
        # Yield outside of fork_rng, so that the caller draws from its own random state between results.
        yield result


def _call_task(fn: Callable[[object], object], seed: int, task: tuple[int, tuple[object, object]]) -> object:
    """Seed torch, run a function on one chunk and write the result into ``out``. Picklable, for use with a pool."""
    i, (chunk, out) = task
    return run_task(fn, (seed + i) % 2**63, chunk, out)


def _detach_chunk(chunk: Any) -> object:
    """Clone a chunk unless it is shared: sending it would move the caller's storage to shared memory."""
    return chunk if is_shared(chunk) else chunk._map(clone_detached)


def is_shared(td: Any) -> bool:
    """Return True if all leaves are in shared memory or memory-mapped, so that other processes see writes."""
    return td.is_shared() or (hasattr(td, "is_memmap") and td.is_memmap())


def _import_tqdm() -> Any:
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError:
        raise ImportError(
            "pbar=True needs the package 'tqdm', which is not installed: pip install tqdm"
        ) from None
