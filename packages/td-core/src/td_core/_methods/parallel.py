"""Methods ``map`` and ``map_iter``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._functions.parallel import Options, iter_results, map_chunks
from .._tree.node import Core


class ParallelMixin(Core):
    """Methods ``map`` and ``map_iter``."""

    __slots__ = ()

    def map(
        self,
        fn: Callable[[Any], Any],
        dim: int | str = 0,
        num_workers: int | None = None,
        *,
        out: Core | None = None,
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
        options = Options(
            num_workers,
            chunksize,
            num_chunks,
            pool,
            generator,
            max_tasks_per_child,
            worker_threads,
            index_with_generator,
            pbar,
            mp_start_method,
        )
        return map_chunks(self, fn, dim, out, options)

    def map_iter(
        self,
        fn: Callable[[Any], object],
        dim: int | str = 0,
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
        options = Options(
            num_workers,
            chunksize,
            num_chunks,
            pool,
            generator,
            max_tasks_per_child,
            worker_threads,
            index_with_generator,
            pbar,
            mp_start_method,
        )
        return iter_results(self, fn, dim, shuffle, options)
