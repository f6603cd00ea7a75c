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
from .._tree.views import is_leaf_or_value
from .joining import cat, stack
from .operands import write_result


class ParallelMixin(Core):
    """Methods ``map`` and ``map_iter``."""

    __slots__ = ()

    def map(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        out: Any = None,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: object = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = False,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> Any:
        """Call ``fn`` on chunks along a batch dim in worker processes, and concatenate the results.

        The seed of task ``i`` depends only on ``generator`` and ``i``. An exception in a worker is raised in the caller,
        with the worker's traceback as its cause.

        Args:
            fn: takes a chunk and returns a collection or tensor with the same batch dim, or None to drop the chunk. It
                must be importable unless workers are forked.
            dim: a batch dim.
            num_workers: the number of processes; the number of CPUs by default, 0 to run in this process.
            out: a collection that the results are written into; it may be empty. The workers write to it if it is in shared
                memory or memory-mapped.
            chunksize: the number of elements per chunk; 0 for single elements without ``dim``, whose results are
                stacked.
            num_chunks: the number of chunks, instead of ``chunksize``; one per worker by default.
            pool: a ``multiprocessing.Pool`` to run in, instead of starting processes.
            generator: the source of the seeds; torch's default generator if None.
            max_tasks_per_child: the number of chunks after which a worker process is replaced by a new one.
            worker_threads: the number of torch threads per worker.
            index_with_generator: index each chunk when a worker is free for it, instead of all chunks first.
            pbar: show a progress bar (needs tqdm).
            mp_start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``; the platform's default if None.

        Raises:
            WorkerError: a worker was killed.
            IndexError: ``dim`` is not a batch dim.
            KeyPathError: ``out`` lacks an entry of a result.

        >>> td = TensorDict({"a": torch.arange(4)}, batch_size=[4])
        >>> td.map(lambda chunk: chunk + 1, num_workers=0, chunksize=2)["a"]
        tensor([1, 2, 3, 4])
        """
        dim = _batch_dim(self, dim)
        workers = _count_workers(num_workers, pool)
        positions = _compute_chunks(self.batch_size[dim], chunksize, num_chunks, workers)
        # Value nodes are not in shared memory, so workers cannot write to them.
        has_targets = out is not None and not out.is_empty()
        in_workers = (
            has_targets
            and _is_shared(out)
            and all(isinstance(entry, torch.Tensor) for entry in out.values(True, True, is_leaf_or_value))
        )
        results = _run(
            fn,
            _iter_chunks(self, dim, positions, index_with_generator),
            _iter_chunks(out, dim, positions, False) if in_workers else [None] * len(positions),
            workers,
            _Options(pool, generator, max_tasks_per_child, worker_threads, pbar, mp_start_method),
        )
        if has_targets:
            for position, result in zip(positions, results, strict=True):
                if not in_workers and result is not None:
                    out.update_at_(result, _index_at(dim, position))
            return out
        matches = [result for result in results if result is not None]
        if not matches:
            return out
        joined = stack(matches, dim) if chunksize == 0 else cat(matches, dim)
        return joined if out is None else write_result(out, joined.batch_size, joined)

    def map_iter(
        self,
        fn: Callable[[Any], Any],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        shuffle: bool = False,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: object = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = True,
        pbar: bool = False,
        mp_start_method: str | None = None,
    ) -> Iterator[Any]:
        """Yield ``fn(chunk)`` for chunks along a batch dim, in order, computed in worker processes.

        With ``shuffle``, the elements are permuted with ``generator`` first. The other arguments are those of
        :meth:`map`.

        >>> td = TensorDict({"a": torch.arange(3)}, batch_size=[3])
        >>> [int(part["a"]) for part in td.map_iter(lambda part: part * 2, num_workers=0, chunksize=0)]
        [0, 2, 4]
        """
        dim = _batch_dim(self, dim)
        workers = _count_workers(num_workers, pool)
        size = self.batch_size[dim]
        positions = _compute_chunks(size, chunksize, num_chunks, workers)
        if shuffle:
            order = torch.randperm(size, generator=generator, device=_get_generator_device(generator))
            positions = [order[position] for position in positions]
        return _run(
            fn,
            _iter_chunks(self, dim, positions, index_with_generator),
            [None] * len(positions),
            workers,
            _Options(pool, generator, max_tasks_per_child, worker_threads, pbar, mp_start_method),
        )


def _batch_dim(td: Core, dim: int) -> int:
    ndim = len(td.batch_size)
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is not a batch dim of a collection of batch size {list(td.batch_size)}")
    return dim % ndim


def _count_workers(num_workers: int | None, pool: object) -> int:
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
    parts = (td._index(_index_at(dim, position)) for position in positions)
    return parts if one_by_one else list(parts)


def _index_at(dim: int, position: object) -> tuple[object, ...]:
    return (slice(None),) * dim + (position,)


class _Options(NamedTuple):
    """The arguments of ``map`` and ``map_iter`` that state how tasks are run."""

    pool: Any
    generator: torch.Generator | None
    max_tasks_per_child: int | None
    worker_threads: int
    pbar: bool
    start_method: str | None


def _run(
    fn: Callable[[object], object],
    chunks: Iterable[object],
    outs: list[object],
    workers: int,
    options: _Options,
) -> Iterator[Any]:
    pool, generator, max_tasks_per_child, worker_threads, pbar, start_method = options
    drawn = torch.empty((), dtype=torch.int64, device=_get_generator_device(generator))
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
    return chunk if _is_shared(chunk) else chunk._map(clone_detached)


def _is_shared(td: Any) -> bool:
    """Return True if all leaves are in shared memory or memory-mapped, so that other processes see writes."""
    return td.is_shared() or (hasattr(td, "is_memmap") and td.is_memmap())


def _import_tqdm() -> Any:
    try:
        return importlib.import_module("tqdm").tqdm
    except ImportError:
        raise ImportError(
            "pbar=True needs the package 'tqdm', which is not installed: pip install tqdm"
        ) from None
