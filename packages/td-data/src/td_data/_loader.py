"""``Loader``: iterate over batches of whole rows, read ahead in threads or processes, with a position that is saved."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from td_core import is_tensor_collection
from td_core.spi import make_reporter
from td_core.typing import DeviceType, Progress

from ._blocks import BlockOrder, BlockSampler
from ._device_buffers import DeviceCopies
from ._order import check_count, check_seed
from ._position import Batches, Epochs, Position, Sampler, Split, Step
from ._process_engine import ProcessEngine, keep
from ._reading import Reader, Task, WindowReader
from ._samplers import RandomSampler, SequentialSampler
from ._threads import ThreadEngine
from ._views import Selected, as_view


class Loader(Epochs):
    """Iterate over the batches of a view: each iteration is one epoch, of batches that are read ahead.

    The order of the rows depends on the sampler, its seed and the epoch only, not on threads, workers or ranks. The state is
    the position after the last batch that was given out; from it, the loader gives exactly the batches that are left,
    also with another number of ranks, threads or workers, or another batch size.

    Args:
        data: a view: a collection, ``Concat``, ``Slices``, ``Packed``, or any object with ``len()`` and
            ``view[positions]``, which takes a vector of int64 and returns a batch. A ``Subset`` or ``ConcatDataset`` of torch
            is read as the rows of the view that it is made of.
        batch_size: rows of a batch on each rank.
        sampler: the order of the rows; by default their own order.
        shuffle: True for the order of ``RandomSampler(data, seed=seed)``.
        seed: seed of the order, and of the generators of the transform.
        drop_last: leave out the rows after the last whole batch of all ranks.
        even: fill the last batch with first rows of the epoch, so that all ranks get the same number of rows. False gives
            no row twice, so that ranks get fewer rows, or one batch less.
        transform: function of a batch, called where it is read. If it has a parameter ``generator``, it gets one whose seed
            depends on the seed, the epoch, the batch and the rank only.
        device: device to which batches are copied; from pinned memory and beside the computation for a CUDA device.
        prefetch: batches that are ready or under way ahead of the consumer; 0 reads in the thread of the consumer.
        num_threads: batches that are read at the same time; more than one are faster for stores with latency or codecs.
        num_workers: worker processes in place of threads, for transforms in Python that take long.
        multiprocessing_context: how workers start: ``"fork"``, ``"spawn"``, ``"forkserver"`` or a context.
        timeout: seconds without a batch after which TimeoutError is raised.
        rank: number of this rank; by default that of ``torch.distributed``, if it is initialised.
        world_size: number of ranks; by default that of ``torch.distributed``.
        progress: True for a progress bar of the rows of an epoch, or a function of (rows done, rows).

    >>> from td_data import Loader
    >>> data = TensorDict({"x": torch.arange(6.0), "y": torch.arange(6)}, batch_size=[6])
    >>> loader = Loader(data, batch_size=4, shuffle=True, seed=1)
    >>> first = next(iter(loader))
    >>> state = loader.state_dict()
    >>> again = Loader(data, batch_size=4, shuffle=True, seed=1)
    >>> again.load_state_dict(state)
    >>> [rest] = again
    >>> sorted([*first["y"].tolist(), *rest["y"].tolist()])
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        sampler: Sampler | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        even: bool = True,
        transform: Callable[..., Any] | None = None,
        device: DeviceType | None = None,
        prefetch: int = 2,
        num_threads: int = 1,
        num_workers: int = 0,
        multiprocessing_context: Any = None,
        timeout: float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        progress: Progress = False,
    ) -> None:
        split, data = Split(batch_size, drop_last, even, rank, world_size), as_view(data)
        self._limit, self._seed = _check_view(data), check_seed(seed)
        super().__init__(_choose_sampler(data, sampler, shuffle, seed, self._limit), split)
        self._data, self._transform, self._timeout, self._progress = data, transform, timeout, progress
        self._prefetch = check_count(prefetch, "prefetch", 0)
        self._num_threads = check_count(num_threads, "num_threads")
        self._num_workers = check_count(num_workers, "num_workers", 0)
        self._context = multiprocessing_context
        self._check_reading()
        self._copies = None if device is None else DeviceCopies(torch.device(device))
        self._current: weakref.ref[_Iteration] | None = None

    def _check_reading(self) -> None:
        threads, workers = self._num_threads, self._num_workers
        if self._transform is not None and not callable(self._transform):
            raise TypeError(f"transform is a function of a batch; got {type(self._transform).__name__}")
        if self._timeout is not None and not self._timeout > 0:
            raise ValueError(f"timeout is a number of seconds above 0; got {self._timeout!r}")
        if not self._prefetch and (workers or threads > 1 or self._timeout is not None):
            raise ValueError(
                "prefetch=0 reads in the thread of the consumer; num_threads, num_workers and timeout need prefetch >= 1"
            )
        if workers and threads > 1:
            raise ValueError("num_workers and num_threads exclude each other: workers read one batch each")
        if self._context is not None and not workers:
            raise ValueError("multiprocessing_context needs num_workers >= 1")
        if workers and isinstance(self._sampler, BlockSampler):
            raise ValueError(
                "a BlockSampler keeps its windows in the memory of this process, where worker processes do not see them: "
                "use num_threads= in place of num_workers="
            )

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on after ``load_state_dict`` or an error; ends an iteration that runs."""
        return self._iterate(lambda: _Batches(self))

    def _iterate(self, make: Callable[[], _Iteration]) -> _Iteration:
        """Begin an iteration in place of the one that runs."""
        self.close("another iteration of this loader has begun")
        try:
            batches = make()
        except BaseException:
            self._position.is_kept = True
            raise
        self._current = weakref.ref(batches)
        return batches

    def __repr__(self) -> str:
        """Return the number of rows, what they are, the batch size and the sampler."""
        rows = "rows" if self._limit is None else f"{self._limit} rows"
        data = self._data
        while isinstance(data, Selected):
            data = data.data
        sizes = f"batch_size={self._split.batch_size}, sampler={type(self._sampler).__name__}"
        return f"{type(self).__name__}({rows} of {type(data).__name__}, {sizes})"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position: the next iteration goes on there.

        Raises:
            ValueError: the state is one of data of another length, or of another sampler or seed.
        """
        self.close("another position was loaded")
        super().load_state_dict(state_dict)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration begin an epoch; the position in that epoch, if it was loaded, remains.

        An iteration that has given out no batch yet begins again: Lightning sets the epoch after ``iter()``.

        Raises:
            ValueError: the epoch is below 0.
        """
        before = self.epoch
        super().set_epoch(epoch)
        current = self._get_current()
        if current is not None and epoch != before:
            current.restart()

    @property
    def batch_sampler(self) -> _TrainerView:
        """What trainers read of a ``DataLoader``: Lightning calls ``set_epoch`` of its ``sampler`` before each epoch."""
        return _TrainerView(self)

    def as_dataloader(self, **options: Any) -> DataLoader[Any]:
        """Return a ``DataLoader`` of torch with the same order and position, for programs that accept no other loader.

        ``state_dict`` of this loader is the position after the last batch that the consumer of the ``DataLoader`` got. A program
        that makes another ``DataLoader`` from its parts, as Accelerate does, counts as :meth:`Sampler.batches` does.

        Args:
            **options: further arguments of ``DataLoader``, such as ``num_workers``.

        Raises:
            ValueError: ``in_order=False``: without an order there is no position.

        >>> from td_data import Loader
        >>> data = TensorDict({"x": torch.arange(6)}, batch_size=[6])
        >>> [batch["x"].tolist() for batch in Loader(data, 4).as_dataloader()]
        [[0, 1, 2, 3], [4, 5]]
        """
        if not options.get("in_order", True):
            raise ValueError("in_order=False gives batches in any order, which has no position: leave it out")
        data = Reader(self._data, self._transform, self._seed)
        return _CountedLoader(data, batch_sampler=_LoaderBatches(self), collate_fn=keep, **options)

    def close(self, _why: str = "its loader was closed") -> None:
        """End threads and workers now; a later iteration begins new ones."""
        current = self._get_current()
        if current is not None:
            current.end(_why)

    def _get_current(self) -> _Iteration | None:
        return self._current() if self._current is not None else None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_view(data: Any) -> int | None:
    """Return the length of a view, or None if it has none; TypeError if the object cannot be indexed."""
    if isinstance(data, Selected):
        _check_view(data.data)
    if isinstance(data, (str, os.PathLike)):
        raise TypeError(
            f"a view is indexed by positions; a {type(data).__name__} is not: td_core.open() gives the collection of a path"
        )
    if isinstance(data, (list, tuple, Mapping, bytes, range)) and not is_tensor_collection(data):
        raise TypeError(
            f"a view is indexed by positions; a {type(data).__name__} is not: make it a collection or a tensor"
        )
    # An IterableDataset of torch inherits a __getitem__ that raises an error.
    if isinstance(data, IterableDataset) or not hasattr(type(data), "__getitem__"):
        raise TypeError(
            f"a view has len() and view[positions]; {type(data).__name__} cannot be indexed: prefetch() runs an iterator, "
            "and a Loader takes a collection, a tensor or such a view"
        )
    try:
        return len(data)
    except TypeError:
        if is_tensor_collection(data):
            raise TypeError(
                "a collection without batch dims has no rows: give it a batch size first"
            ) from None
        if isinstance(data, Tensor):
            raise TypeError("a tensor without dims has no rows: unsqueeze(0) makes it one row") from None
        return None


def _choose_sampler(
    data: Any, sampler: Sampler | None, shuffle: bool, seed: int, limit: int | None
) -> Sampler:
    if sampler is not None and shuffle:
        raise ValueError("sampler and shuffle exclude each other: the sampler decides the order")
    if sampler is None:
        if limit is None:
            raise TypeError(f"{type(data).__name__} has no length: give a sampler, which has one")
        return RandomSampler(data, seed=seed) if shuffle else SequentialSampler(data)
    if not isinstance(sampler, Sampler):
        kind = type(sampler)
        raise TypeError(
            f"sampler is a td_data.Sampler; got {kind.__name__} of {kind.__module__}: pass one, such as RandomSampler(data)"
        )
    sampler._bind(data)
    if limit is not None and sampler._reach > limit:
        raise ValueError(
            f"the {type(sampler).__name__} is for {sampler._reach} rows, but the data has {limit}"
        )
    return sampler


class _Iteration(Iterator[Any]):
    """One iteration of a loader; its position is that after the last batch that the consumer got."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._why: str | None = None
        self._has_given = False
        self._start()

    def __next__(self) -> Any:
        if self._why is not None:
            if self._why:
                raise RuntimeError(f"this iteration is over: {self._why}")
            raise StopIteration
        try:
            found = self._get()
        except BaseException:
            self._position.is_kept = True
            self.end("it had an error; iterate over the loader again to go on")
            raise
        if found is None:
            self.end("")
            raise StopIteration
        step, batch = found
        self._has_given = True
        self._position.advance(step)
        return batch

    def restart(self) -> None:
        """Begin again at the position of the loader, unless a batch was given out."""
        if self._why is None and not self._has_given:
            self._close()
            self._start()

    @abstractmethod
    def _start(self) -> None:
        """Begin to read at the position of the loader."""

    @abstractmethod
    def _get(self) -> tuple[Step, Any] | None:
        """Return the next batch, or None after the last one; raise its error."""

    def end(self, why: str) -> None:
        """End the iteration: the iterator cannot be used further."""
        if self._why is None:
            self._why = why
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """End threads and workers."""


class _Batches(_Iteration):
    """One iteration over the batches that a loader reads itself."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._copies = loader, loader._copies
        super().__init__(loader._position)

    def _start(self) -> None:
        loader = self._loader
        steps, position = loader._begin(), loader._position
        reader, sampler = Reader(loader._data, loader._transform, loader._seed), loader._sampler
        order, depth = sampler.order(position.epoch), loader._prefetch + loader._num_threads - 1
        threads = loader._num_threads if loader._prefetch else 0
        self._windows: WindowReader | None = None
        if isinstance(order, BlockOrder):
            self._windows = WindowReader(reader.get_view(position.epoch), order, threads)
            tasks: Iterator[Task] = map(self._windows.make_task, steps)
        else:
            limit = loader._limit
            tasks = (Task(step, sampler._find(order, step, limit)) for step in steps)
        #: Batches under way: the first one is the next to be given out.
        self._tasks: deque[Task] = deque()
        tasks = _note_tasks(tasks, self._tasks)
        self._engine: ThreadEngine[Any] | ProcessEngine
        if loader._num_workers:
            pins = self._copies is not None and self._copies.stream is not None
            self._engine = ProcessEngine(
                tasks, reader, loader._num_workers, loader._prefetch, loader._context, loader._timeout, pins
            )
        else:
            reader.copies = None if self._copies is None else self._copies.prepare(depth + 1)
            self._engine = ThreadEngine(
                (partial(reader, task) for task in tasks), threads, depth, loader._timeout
            )
        self._report = make_reporter(loader._progress, len(sampler), "epoch", "rows")
        if position.rows:
            self._report(position.rows)
        self._ahead: tuple[Step, Any] | None = None

    def _get(self) -> tuple[Step, Any] | None:
        held = self._ahead or self._fetch()
        if held is None:
            return None
        step, batch = held
        if self._copies is not None:
            self._ahead = self._fetch() if self._engine.is_ready() else None
            batch = self._copies.finish(batch)
        self._report(step.stop - step.start)
        return step, batch

    def _fetch(self) -> tuple[Step, Any] | None:
        """Return the next batch, whose copy to the device has begun, or None after the last one; raise its error."""
        found = self._engine.get_next()
        if found is None:
            return None
        batch, error = found
        if error is not None:
            if self._tasks:
                _add_note(error, self._tasks[0])
            if isinstance(error, StopIteration):
                raise RuntimeError("reading a batch raised StopIteration") from error
            raise error
        return self._tasks.popleft().step, batch if self._copies is None else self._copies.start(batch)

    def _close(self) -> None:
        self._engine.close()
        if self._windows is not None:
            self._windows.close()


class _Received(_Iteration):
    """One iteration over the batches that a ``DataLoader`` of torch reads for a loader."""

    def __init__(self, batches: _LoaderBatches, begin: Callable[[], Iterator[Any]]) -> None:
        self._sampler, self._begin = batches, begin
        super().__init__(batches.loader._position)

    def _start(self) -> None:
        #: Batches under way: the first one is the next to be given out.
        self._steps: deque[Step] = deque()
        self._sampler._noted = self._steps
        self._batches = self._begin()

    def _get(self) -> tuple[Step, Any] | None:
        for batch in self._batches:
            return self._steps.popleft(), batch
        return None

    def _close(self) -> None:
        self._batches = iter(())  # torch ends its workers when nothing refers to its iterator


class _LoaderBatches(Batches):
    """The order of a loader as the batch sampler of a ``DataLoader`` of torch."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader._sampler, loader._split, loader._position)
        self.loader = loader


class _TrainerView:
    """What trainers read of the batch sampler of a ``DataLoader``."""

    def __init__(self, loader: Loader) -> None:
        self.sampler, self._loader = self, loader
        self.batch_size, self.drop_last = loader._split.batch_size, loader._split.drop_last

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless a checkpoint was loaded that is in the middle of one."""
        position = self._loader._position
        if not (position.is_kept and position.rows):
            self._loader.set_epoch(epoch)


class _CountedLoader(DataLoader[Any]):
    """A ``DataLoader`` of torch whose batches are counted when the consumer gets them."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches, begin = self.batch_sampler, super().__iter__
        # A trainer may have put another batch sampler in its place.
        if not isinstance(batches, _LoaderBatches):
            return begin()
        return batches.loader._iterate(lambda: _Received(batches, begin))


def _note_tasks(tasks: Iterator[Task], under_way: deque[Task]) -> Iterator[Task]:
    for task in tasks:
        under_way.append(task)
        yield task


def _add_note(error: BaseException, task: Task) -> None:
    shown = ", ".join(map(str, task.positions[:4].tolist()))
    note = f"in epoch {task.step.epoch}, batch {task.step.number}, with the positions {shown}, ..."
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
