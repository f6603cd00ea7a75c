"""``ReplayBuffer``: a ring of rows on any storage, which is written in order and sampled at random."""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from td_core import NO_DEFAULT, StructureError, TensorDict, is_tensor_collection, load, save
from td_core import open as open_collection
from td_core.spi import check_rows, is_stored, parse_json
from td_core.typing import DeviceType

from ._order import as_positions, check_count, check_seed, make_generator, mix
from ._ring_counters import RingCounters
from ._ring_samplers import RingSampler
from ._shared_values import read_values
from ._views import set_entry

#: How other processes get values.
_OTHER_STORAGE = "use rows.memmap_like(directory), which they open with td_core.open(directory), or numbers in place of values"
#: The sampler of a state without its name: by whether the sampler has a state.
_GUESSES = {False: "RingSampler", True: "PrioritizedSampler"}


class ReplayBuffer:
    """A ring of rows on any storage: new rows replace the oldest ones, and batches are drawn from those that are there.

    A row has the *number* of its write: the first row that was ever written is number 0. ``extend`` returns numbers, the
    entry ``"index"`` of a batch has them, and ``buffer[numbers]`` reads them. So a priority for a row that was overwritten
    since is left out, and not given to the row that replaced it.

    Args:
        storage: a collection whose first batch dim is the capacity: in memory, shared, memory-mapped or stored. An integer
            is a capacity, for memory that is allocated like the first rows.
        sampler: ``PrioritizedSampler`` or ``SliceSampler``; by default any rows, with replacement.
        batch_size: rows, or slices, of a batch.
        seed: seed of the draws.
        path: file of counters for other processes: one writer and any number of readers, each with a buffer of its own on the
            same storage and path. A row is whole for all of them, also if the writer is killed at any time. Values, such as
            strings, reach readers of a memory-mapped storage; of other storages they raise an error.

    >>> from td_data import ReplayBuffer
    >>> buffer = ReplayBuffer(3, batch_size=2)
    >>> buffer.extend(TensorDict({"reward": torch.arange(5.0)}, batch_size=[5]))
    tensor([0, 1, 2, 3, 4])
    >>> len(buffer), buffer[4]["reward"]
    (3, tensor(4.))
    >>> sorted(buffer.sample().keys())
    ['index', 'reward']
    """

    def __init__(
        self,
        storage: Any,
        *,
        sampler: RingSampler | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.rows: Any = None if isinstance(storage, int) else storage
        if self.rows is not None and not (is_tensor_collection(storage) and storage.batch_size):
            raise TypeError(
                f"storage is a capacity, or a collection with batch dims; got {type(storage).__name__}"
            )
        capacity = storage if self.rows is None else storage.batch_size[0]
        self.capacity: int = check_count(capacity, "the capacity")
        self.batch_size = None if batch_size is None else check_count(batch_size, "batch_size")
        if sampler is not None and not isinstance(sampler, RingSampler):
            raise TypeError(
                f"sampler is a PrioritizedSampler or SliceSampler; got {type(sampler).__name__}, which is for a Loader"
            )
        self._sampler = RingSampler() if sampler is None else sampler
        self._sampler.start(self.capacity)
        self._generator = make_generator(mix(check_seed(seed), "replay"))
        if self.rows is None and path is not None:
            raise ValueError("path needs a storage that other processes can open; got a capacity")
        self._set_rows(self.rows)
        is_shared = self.rows is not None and bool(self.rows.is_shared())
        path = None if path is None else os.path.abspath(path)
        self._counters = RingCounters(self.capacity, path, is_shared, not self._stored)
        #: Whether a state was taken that fits the rows of the storage only until more are written.
        self._is_noted = False
        #: Number after the newest row whose values this process has.
        self._seen = self.write_count
        unread = None if self._counters.is_private else read_values(self.rows)
        if unread is not None and path is not None and is_shared:
            raise ValueError(
                f"path= is for other processes, which do not get the values of {unread!r} from this storage: {_OTHER_STORAGE}"
            )

    def _set_rows(self, rows: Any) -> None:
        """Take a storage, if batches of it can have the entries of the sampler and ``"index"``."""
        self._stored = [] if rows is None else [leaf for leaf in rows._leaves() if is_stored(leaf)]
        if rows is not None:
            if "index" in rows.keys():  # noqa: SIM118
                raise ValueError(
                    "the storage has an entry 'index', which batches have for the numbers of their rows"
                )
            if self._sampler.key is not None:
                rows.get(self._sampler.key, NO_DEFAULT)
            try:
                set_entry(rows[:0], "index", torch.empty(0, dtype=torch.int64))
            except (KeyError, AttributeError, StructureError):
                raise ValueError(
                    f"batches get an entry 'index', for which {type(rows).__name__} has no field: declare one that may be "
                    "None, or store rows.to_tensordict()"
                ) from None
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of rows that are there."""
        low, high = self._counters.read()
        return max(high - low, 0)

    def __repr__(self) -> str:
        """Return the number of rows, the capacity, the class of the storage, the batch size and the sampler."""
        rows = "" if self.rows is None else f" of {type(self.rows).__name__}"
        sampler = type(self._sampler)
        drawn = "" if sampler is RingSampler else f", sampler={sampler.__name__}"
        return f"{type(self).__name__}({len(self)} of {self.capacity} rows{rows}, batch_size={self.batch_size}{drawn})"

    @property
    def write_count(self) -> int:
        """Rows that were written since the start."""
        return self._counters.read()[1]

    def add(self, row: Any) -> int:
        """Write one row, a collection or a dict of its entries, and return its number.

        Raises:
            StructureError: there are several rows, or the keys, dtypes or shapes differ from those of the storage.
        """
        row = self._as_row(row)
        if self.rows is not None and row.batch_dims != self.rows.batch_dims - 1:
            raise StructureError(
                f"add() takes one row; extend() takes several: a row of this buffer has the batch size "
                f"{list(self.rows.batch_size[1:])}, this collection has {list(row.batch_size)}"
            )
        return int(self.extend(row.unsqueeze(0))[0])

    def _as_row(self, row: Any) -> Any:
        if isinstance(row, Mapping) and not is_tensor_collection(row):
            return TensorDict(row, [] if self.rows is None else self.rows.batch_size[1:])
        if not is_tensor_collection(row):
            raise TypeError(f"a row is a collection, or a dict of its entries; got {type(row).__name__}")
        return row

    def _as_rows(self, rows: Any) -> Any:
        if isinstance(rows, Mapping) and not is_tensor_collection(rows):
            ndim = 1 if self.rows is None else self.rows.batch_dims
            made: Any = TensorDict.from_dict(rows, auto_batch_size=True, batch_dims=ndim)
        elif isinstance(rows, (list, tuple)) and rows:
            made = torch.stack([self._as_row(row) for row in rows])
        else:
            made = rows
        if not is_tensor_collection(made) or not made.batch_size:
            raise TypeError(
                f"rows are a collection with batch dims, a dict of columns, or a list of rows; got {type(rows).__name__}: "
                "add() writes one row"
            )
        return made

    def extend(self, rows: Any) -> Tensor:
        """Write rows, and return their numbers; of more rows than the capacity, the last ones are written.

        Args:
            rows: a collection whose first batch dim counts rows, a dict of its columns, or a list of rows.

        Raises:
            StructureError: keys, dtypes or shapes differ from those of the storage; nothing is written then.
            RuntimeError: another process writes.
        """
        rows = self._as_rows(rows)
        if self._is_noted:
            warnings.warn(
                "the state or save of this buffer that was taken before has no rows of its own, and those of the storage change "
                "now: another process would load them under wrong numbers. Give the buffer path=, or save again",
                stacklevel=2,
            )
            self._is_noted = False
        counters, sampler, count = self._counters, self._sampler, len(rows)
        if self.rows is None:
            if not count:
                return torch.empty(0, dtype=torch.int64)
            self._set_rows(rows[0].expand(self.capacity, *rows.batch_size[1:]).clone())
        check_rows(self.rows, rows)
        counters.claim()
        first = counters.read()[1]
        stop = first + count
        with counters.guard(exclusive=True):
            counters.reserve(stop)
            self._write(rows if count <= self.capacity else rows[-self.capacity :], stop)
            for leaf in self._stored:
                leaf.flush()
            counters.publish(stop)
        if self._seen == first:
            self._seen = stop
        if sampler.seen == first and count:
            sampler.add(first, stop, None if sampler.key is None else rows.get(sampler.key))
        return torch.arange(first, stop)

    def _write(self, rows: Any, stop: int) -> None:
        """Write rows, of which the last one has the number ``stop - 1``."""
        place = (stop - len(rows)) % self.capacity
        fit = self.capacity - place
        if len(rows) <= fit:
            self.rows[place : place + len(rows)] = rows
        else:
            self.rows[place:] = rows[:fit]
            self.rows[: len(rows) - fit] = rows[fit:]

    def sample(self, batch_size: int | None = None) -> Any:
        """Return a batch of the rows that are there, with the entry ``"index"`` and those of the sampler.

        Raises:
            ValueError: the buffer is empty, no episode is long enough, or there is no batch size.
        """
        size = self.batch_size if batch_size is None else check_count(batch_size, "batch_size")
        if size is None:
            raise ValueError("sample needs a batch size: pass it here, or to the buffer")
        counters = self._counters
        while True:
            low, high = counters.read()
            if high <= low:
                raise ValueError("the buffer is empty: extend() it first")
            self._read_values(high)
            if self._sampler.seen < high:
                self._catch_up(low, high)
            with counters.guard(exclusive=False):
                numbers, extra = self._sampler.draw(low, high, size, self._generator)
                batch = self._gather(numbers, low)
            # Another process may have overwritten rows while they were read; then the whole batch is drawn again.
            oldest = counters.read()[0]
            if oldest <= low or int(numbers.min()) >= oldest:
                break
        for key, value in {"index": numbers, **extra}.items():
            set_entry(batch, key, value)
        return batch

    def _gather(self, numbers: Tensor, low: int) -> Any:
        """Read rows; until the first one is overwritten, their numbers are their places."""
        places = numbers % self.capacity if low else numbers
        return (
            self.rows[places] if places.ndim == 1 else self.rows[places.flatten()].unflatten(0, places.shape)
        )

    def _read_values(self, high: int) -> None:
        """Read the values of rows that another process has written since the last call.

        Raises:
            RuntimeError: the storage cannot do so.
        """
        if self._seen >= high or self._counters.is_private:
            return
        with self._counters.guard(exclusive=False):
            unread = read_values(self.rows)
        if unread is not None:
            raise RuntimeError(
                f"another process has written rows, whose values of {unread!r} this storage does not get: {_OTHER_STORAGE}"
            )
        self._seen = high

    def _catch_up(self, low: int, high: int) -> None:
        """Show the sampler rows that another process has written, or that were there before it."""
        sampler = self._sampler
        first, values = max(sampler.seen, low), None
        if sampler.key is not None:
            values = self.rows.get(sampler.key)[torch.arange(first, high) % self.capacity]
        sampler.add(first, high, values)

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set the priorities of rows by number, and return how many of them are still there.

        Raises:
            ValueError: a priority is negative or not finite, or there are not as many as numbers.
        """
        numbers = as_positions(index, "index has numbers of rows", None).flatten()
        values = torch.as_tensor(priority).detach().to("cpu", torch.float64)
        values = values.expand(numbers.shape) if values.ndim == 0 else values.flatten()
        if values.shape != numbers.shape:
            raise ValueError(f"there is one priority for each number; got {len(values)} for {len(numbers)}")
        low, high = self._counters.read()
        if self._sampler.seen < high:
            self._catch_up(low, high)
        return self._sampler.update(numbers, values, low, high)

    def __getitem__(self, index: Any) -> Any:
        """Return rows by number; IndexError if one was overwritten, or not yet written.

        A slice is one of numbers, too: ``buffer[:]`` are the rows that are there, from the oldest.
        """
        if isinstance(index, slice):
            index = self._list_numbers(index)
        numbers = as_positions(index, "index has numbers of rows", None)
        high = self.write_count
        self._read_values(high)
        with self._counters.guard(exclusive=False):
            rows = None if self.rows is None else self.rows[numbers.flatten() % self.capacity]
        # Rows that are written meanwhile may have been read before, and those that are overwritten after.
        low = self._counters.read()[0]
        wrong = numbers[(numbers < low) | (numbers >= high)]
        if len(wrong):
            raise _find_reason(int(wrong[0]), low, high)
        if rows is None:
            raise IndexError("the buffer is empty: extend() it first")
        return rows.unflatten(0, numbers.shape) if numbers.ndim else rows[0]

    def _list_numbers(self, index: slice) -> Tensor:
        """Return the numbers in a slice; a bound that is omitted is the oldest or the newest row."""
        low, high = self._counters.read()
        start = low if index.start is None else operator.index(index.start)
        stop = high if index.stop is None else operator.index(index.stop)
        step = check_count(1 if index.step is None else index.step, "the step of a slice")
        # A slice of a list leaves out what is not there, but whoever asks for the first rows must hear that they are gone.
        is_gone = low > 0 and index.start is None and stop == low and index.stop is not None
        for number in (start, stop - 1) if start != stop or is_gone else ():
            if not low <= number < high:
                raise _find_reason(number, low, high)
        return torch.arange(start, max(start, stop), step)

    # Without these, Python would ask for the numbers from 0 on, and end silently at one that was overwritten.
    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rows that are there now, from the oldest; IndexError if one is overwritten meanwhile."""
        return map(self.__getitem__, range(*self._counters.read()))

    def __reversed__(self) -> Iterator[Any]:
        """Iterate over the rows that are there now, from the newest; IndexError if one is overwritten meanwhile."""
        return map(self.__getitem__, reversed(range(*self._counters.read())))

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the state of the draws, with the rows if they are in the memory of this process.

        Rows of a stored collection that are written later belong to the state too if the buffer has ``path=``. Without it, a
        warning says that the state is out of date.
        """
        state = {
            "write_count": self.write_count,
            "reserved": self._counters.reserved,
            "capacity": self.capacity,
            "generator": self._generator.get_state(),
            "sampler": self._sampler.state_dict(),
            "sampler_name": type(self._sampler).__name__,
        }
        own = self.rows is not None and not self._stored and not self.rows.is_shared()
        on_disk = bool(self._stored) or getattr(self.rows, "saved_path", None) is not None
        self._is_noted = on_disk and self._counters.path is None
        return {**state, "rows": self.rows.clone()} if own else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue as the buffer whose state it is; rows that were written to its storage since are kept.

        Raises:
            ValueError: the state is of another capacity or sampler, or its rows would replace newer ones that are shared.
        """
        counters, rows, written = self._counters, state_dict.get("rows"), state_dict["write_count"]
        if state_dict["capacity"] != self.capacity:
            raise ValueError(
                f"the state is of a buffer of {state_dict['capacity']} rows; this one has {self.capacity}"
            )
        self._check_sampler(state_dict)
        if rows is not None and not counters.is_private and written < self.write_count:
            raise ValueError(
                f"the storage has {self.write_count} rows written, which the {written} rows of the state would replace"
            )
        if rows is not None and self.rows is not None:
            check_rows(self.rows, rows)
        counters.claim()
        if rows is None:
            written = max(written, self.write_count)
        elif counters.is_private:
            counters.reset()
        counters.reserve(state_dict["reserved"])
        if rows is not None and self.rows is None:
            self._set_rows(rows.clone())
        elif rows is not None:
            self.rows[:] = rows
        counters.publish(written)
        self._seen = written
        self._generator.set_state(state_dict["generator"])
        self._sampler.start(self.capacity)
        self._sampler.load_state_dict(state_dict["sampler"], state_dict["write_count"])

    def _check_sampler(self, state: dict[str, Any]) -> None:
        """Refuse the state of a buffer with a sampler of another class."""
        own, saved = type(self._sampler).__name__, state["sampler"]
        # A state of an earlier version has no name.
        guess = own if saved.keys() == self._sampler.state_dict().keys() else _GUESSES[bool(saved)]
        theirs = state.get("sampler_name", guess)
        if theirs != own:
            what = "leave out sampler=" if theirs == "RingSampler" else f"pass sampler={theirs}(...)"
            raise ValueError(f"the state is of a buffer with a {theirs}, this one has a {own}: {what}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the state in one file or directory, which is the old one or complete at any time.

        Rows in memory are in it. Of a memory-mapped storage it has the location; another storage is passed to ``load``. See
        :meth:`state_dict` for rows that are written later.
        """
        state = self.state_dict()
        place = None if "rows" in state else getattr(self.rows, "saved_path", None)
        header = {name: state.pop(name) for name in ("write_count", "reserved", "capacity", "sampler_name")}
        header["storage"] = None if place is None else os.path.abspath(place)
        header["counters"] = self._counters.path
        state["header"] = torch.tensor(list(json.dumps(header).encode()), dtype=torch.uint8)
        save(TensorDict(state), path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        storage: Any = None,
        *,
        sampler: RingSampler | None = None,
        batch_size: int | None = None,
        device: DeviceType | None = None,
    ) -> ReplayBuffer:
        """Return a buffer that continues as the one that was saved: with the same draws.

        Args:
            path: what ``save`` has written.
            storage: the storage of the rows, if the save has neither them nor their location.
            sampler: a sampler with the arguments of the one that the buffer had; the save has its priorities only.
            batch_size: rows, or slices, of a batch.
            device: device of rows that are in memory.

        Raises:
            ValueError: the save has neither the rows nor their location, and ``storage`` is missing; or the buffer had a
                sampler of another class.
        """
        saved = load(path)
        header, rows = parse_json(bytes(saved["header"].tolist())), saved.get("rows", None)
        if storage is None and rows is not None:
            storage, rows = rows.clone() if device is None else rows.clone().to(device), None
        elif storage is None:
            if header["storage"] is None:
                raise ValueError("the save has neither the rows nor their location: pass storage=")
            storage = open_collection(header["storage"], mode="r+")
        buffer = cls(storage, sampler=sampler, batch_size=batch_size, path=header["counters"])
        state = {**header, "generator": saved["generator"].clone(), "sampler": dict(saved["sampler"].items())}
        buffer.load_state_dict({**state, "rows": rows})
        return buffer


def _find_reason(number: int, low: int, high: int) -> IndexError:
    """Return the error for a row that is not there."""
    if high <= low:
        return IndexError(f"row {number} was not written: the buffer is empty, extend() it first")
    why = "was overwritten" if 0 <= number < low else "was not written"
    return IndexError(
        f"row {number} {why}: the buffer has the numbers from {low} to {high - 1}, and buffer[:] gives their rows"
    )
