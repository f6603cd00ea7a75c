"""Methods ``map`` and ``map_iter``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._functions.joining import cat, stack
from .._functions.operands import write_result
from .._functions.parallel import (
    Options,
    batch_dim,
    compute_chunks,
    count_workers,
    get_generator_device,
    index_at,
    is_shared,
    iter_chunks,
    run_chunks,
)
from .._tree.node import Core
from .._tree.views import is_leaf_or_value


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
        dim = batch_dim(self, dim)
        workers = count_workers(num_workers, pool)
        positions = compute_chunks(self.batch_size[dim], chunksize, num_chunks, workers)
        # Value nodes are not in shared memory, so workers cannot write to them.
        has_targets = out is not None and not out.is_empty()
        in_workers = (
            has_targets
            and is_shared(out)
            and all(isinstance(entry, torch.Tensor) for entry in out.values(True, True, is_leaf_or_value))
        )
        results = run_chunks(
            fn,
            iter_chunks(self, dim, positions, index_with_generator),
            iter_chunks(out, dim, positions, False) if in_workers else [None] * len(positions),
            workers,
            Options(pool, generator, max_tasks_per_child, worker_threads, pbar, mp_start_method),
        )
        if has_targets:
            for position, result in zip(positions, results, strict=True):
                if not in_workers and result is not None:
                    out.update_at_(result, index_at(dim, position))
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
        dim = batch_dim(self, dim)
        workers = count_workers(num_workers, pool)
        size = self.batch_size[dim]
        positions = compute_chunks(size, chunksize, num_chunks, workers)
        if shuffle:
            order = torch.randperm(size, generator=generator, device=get_generator_device(generator))
            positions = [order[position] for position in positions]
        return run_chunks(
            fn,
            iter_chunks(self, dim, positions, index_with_generator),
            [None] * len(positions),
            workers,
            Options(pool, generator, max_tasks_per_child, worker_threads, pbar, mp_start_method),
        )
