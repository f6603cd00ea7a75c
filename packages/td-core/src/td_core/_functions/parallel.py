"""Run a function on chunks of a collection in worker processes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from .._python.settings import RULES
from .._python.workers import run, run_task
from .._tree.defaults import clone_detached
from .._tree.dim_names import find_dims
from .._tree.node import Core
from .._tree.views import is_leaf_or_value
from .joining import cat, stack
from .metadata import has_shared_leaves
from .operands import write_result


class Options(NamedTuple):
    """The arguments of ``map`` and ``map_iter`` that state what the tasks are, and how they are run."""

    num_workers: int | None
    chunksize: int | None
    num_chunks: int | None
    pool: Any
    generator: torch.Generator | None
    max_tasks_per_child: int | None
    worker_threads: int
    index_with_generator: bool
    pbar: bool
    start_method: str | None


def map_chunks(node: Core, fn: Callable[[Any], Any], dim: int | str, out: Any, options: Options) -> Any:
    """Call a function on chunks along a batch dim, see ``map``, and join or write the results."""
    place, workers, positions = _plan_chunks(node, dim, options)
    # Value nodes are not in shared memory, so workers cannot write to them.
    has_targets = out is not None and not out.is_empty()
    in_workers = (
        has_targets
        and _is_visible_to_workers(out)
        and all(isinstance(entry, torch.Tensor) for entry in out.values(True, True, is_leaf_or_value))
    )
    results = _run_chunks(
        fn,
        _iter_chunks(node, place, positions, options.index_with_generator),
        _iter_chunks(out, place, positions, False) if in_workers else [None] * len(positions),
        workers,
        options,
    )
    if has_targets:
        for position, result in zip(positions, results, strict=True):
            if not in_workers and result is not None:
                out.update_at_(result, _index_dim(place, position))
        return out
    matches = [result for result in results if result is not None]
    if not matches:
        return out
    joined = stack(matches, place) if options.chunksize == 0 else cat(matches, place)
    return joined if out is None else write_result(out, joined.batch_size, joined)


def iter_results(
    node: Core, fn: Callable[[Any], Any], dim: int | str, shuffle: bool, options: Options
) -> Iterator[Any]:
    """Iterate over the results of a function on chunks along a batch dim, see ``map_iter``."""
    place, workers, positions = _plan_chunks(node, dim, options)
    if shuffle:
        generator = None if RULES.follows_tensordict else options.generator
        order = torch.randperm(
            node.batch_size[place], generator=generator, device=_get_generator_device(generator)
        )
        positions = [order[position] for position in positions]
    chunks = _iter_chunks(node, place, positions, options.index_with_generator)
    return _run_chunks(fn, chunks, [None] * len(positions), workers, options)


def _plan_chunks(node: Core, dim: int | str, options: Options) -> tuple[int, int, list[Any]]:
    """Return a batch dim, counted from the first, the number of workers, and the indices of the chunks."""
    place = _wrap_batch_dim(node, dim)
    workers = _count_workers(options.num_workers, options.pool)
    size = node.batch_size[place]
    return place, workers, _compute_chunks(size, options.chunksize, options.num_chunks, workers)


def _wrap_batch_dim(td: Core, dim: int | str) -> int:
    """Return a batch dim, counted from the first; IndexError if it is out of range."""
    place, ndim = find_dims(td, "map", dim), len(td.batch_size)
    if not -ndim <= place < ndim:
        raise IndexError(f"dim {dim} is not a batch dim of a collection of batch size {list(td.batch_size)}")
    return int(place % ndim)


def _count_workers(num_workers: int | None, pool: object) -> int:
    """Return the number of worker processes: that of the pool, the given one, or the number of CPUs."""
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


def _get_generator_device(generator: torch.Generator | None) -> torch.device | str:
    """Return the device of a generator, or "cpu" for None instead of torch's default device."""
    return "cpu" if generator is None else generator.device


def _compute_chunks(size: int, chunksize: int | None, num_chunks: int | None, workers: int) -> list[Any]:
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


def _iter_chunks(td: Core, dim: int, positions: list[Any], one_by_one: bool) -> Any:
    """Index a collection at each position along ``dim``, lazily if ``one_by_one``."""
    parts = (td._index(_index_dim(dim, position)) for position in positions)
    return parts if one_by_one else list(parts)


def _index_dim(dim: int, position: object) -> tuple[object, ...]:
    """Return the index of a position along a batch dim."""
    return (slice(None),) * dim + (position,)


def _run_chunks(
    fn: Callable[[object], object],
    chunks: Iterable[object],
    outs: list[object],
    workers: int,
    options: Options,
) -> Iterator[Any]:
    """Call a function on each chunk, in the pool, in this process or in new workers; iterate over the results."""
    generator = options.generator
    if generator is None and RULES.follows_tensordict:
        # tensordict seeds every call alike, and keeps the caller's random numbers.
        generator = torch.Generator()
    drawn = torch.empty((), dtype=torch.int64, device=_get_generator_device(generator))
    seed = int(drawn.random_(generator=generator))
    results: Iterator[object]
    call, tasks = partial(_call_task, fn, seed), enumerate(zip(chunks, outs))
    if options.pool is not None:
        results = options.pool.imap(call, tasks)
    elif workers == 0:
        results = _run_locally(call, tasks)
    else:
        results = run(
            fn,
            ((_detach_chunk(chunk), out) for _, (chunk, out) in tasks),
            num_workers=min(workers, max(len(outs), 1)),
            seed=seed,
            max_tasks_per_child=options.max_tasks_per_child,
            worker_threads=options.worker_threads,
            start_method=options.start_method,
        )
    return iter(_import_tqdm()(results, total=len(outs))) if options.pbar else results


def _run_locally(call: Callable[[object], object], tasks: Iterable[object]) -> Iterator[object]:
    """Call a function on each task in this process, without a change of its random state."""
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
    return chunk if _is_visible_to_workers(chunk) else chunk._map(clone_detached)


def _is_visible_to_workers(td: Core) -> bool:
    """Return True if all leaves are in shared memory or memory-mapped, so that other processes see writes."""
    return has_shared_leaves(td) or (hasattr(td, "is_memmap") and td.is_memmap())


def _import_tqdm() -> Any:
    """Return the class of progress bars; ImportError if its package is not installed."""
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError:
        raise ImportError(
            "pbar=True needs the package 'tqdm', which is not installed: pip install tqdm"
        ) from None
