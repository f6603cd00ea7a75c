"""``Sampler``, the order of the rows of an epoch; a position in it, which is saved and loaded; and its split over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler as TorchSampler

from ._order import VERSION, Order


@dataclass(frozen=True, slots=True)
class Split:
    """How an epoch is split into batches: sizes, and the part of this rank."""

    batch_size: int
    drop_last: bool = False
    even: bool = True
    rank: int | None = None
    world_size: int | None = None

    def check(self) -> None:
        """Raise ValueError for sizes below one, and ranks that do not exist."""
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size is an integer of 1 or more; got {self.batch_size!r}")
        if (self.rank is None) != (self.world_size is None):
            raise ValueError(
                f"rank and world_size are given together; got rank={self.rank}, world_size={self.world_size}"
            )
        if self.rank is not None and self.world_size is not None and not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is from 0 to world_size - 1; got {self.rank} of {self.world_size}")

    def find_ranks(self) -> tuple[int, int]:
        """Return rank and world size: those that were given, or of ``torch.distributed`` if it is initialised."""
        if self.rank is not None and self.world_size is not None:
            return self.rank, self.world_size
        group = torch.distributed
        if group.is_available() and group.is_initialized():
            return group.get_rank(), group.get_world_size()
        return 0, 1


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of one rank: rows ``start`` to ``stop`` of an epoch are the batch of all ranks, ``rows`` those of this one."""

    epoch: int
    start: int
    stop: int
    number: int
    rank: int
    rows: tuple[range, ...]
    is_last: bool = False


class Sampler(ABC):
    """The order of the rows of an epoch, a pure function of the epoch.

    A subclass provides ``order`` and ``__len__``. An attribute ``seed`` is compared when a state is loaded.

    >>> from collections.abc import Callable
    >>> from td_data import Loader, Sampler
    >>> class Backwards(Sampler):
    ...     def __len__(self):
    ...         return 5
    ...
    ...     def order(self, epoch):
    ...         return lambda start, stop: torch.arange(4 - start, 4 - stop, -1)
    >>> [batch["a"].tolist() for batch in Loader(TensorDict({"a": torch.arange(5)}, [5]), 3, sampler=Backwards())]
    [[4, 3, 2], [1, 0]]
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows of one epoch."""

    @abstractmethod
    def order(self, epoch: int) -> Order:
        """Return a function that takes the first and last row, and returns the positions of these rows, of int64."""

    def batches(
        self,
        batch_size: int,
        *,
        drop_last: bool = False,
        even: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Batches:
        """Return the order in batches, for the argument ``batch_sampler`` of a ``DataLoader`` of torch.

        Each iteration is the next epoch. It has ``state_dict``, ``load_state_dict`` and ``set_epoch`` as a
        :class:`Loader`, whose arguments these are.

        >>> from td_data import SequentialSampler
        >>> list(SequentialSampler(5).batches(2))
        [[0, 1], [2, 3], [4]]
        """
        return Batches(self, Split(batch_size, drop_last, even, rank, world_size))

    def _share(self, start: int, stop: int, rank: int, world: int, even: bool) -> tuple[range, ...]:
        """Return the rows of a rank in a batch of all ranks; rows past the end of the epoch are its first rows."""
        size = -(-(stop - start) // world)
        first = start + rank * size
        last = first + size if even else min(first + size, stop)
        return (range(first, last),) if first < last else ()

    def _take(self, order: Order, rows: range) -> Tensor:
        """Return the positions of rows, which may be past the end of the epoch."""
        length, start, parts = len(self), rows.start, []
        while start < rows.stop:
            first = start % length
            last = min(first + rows.stop - start, length)
            parts.append(order(first, last))
            start += last - first
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _set_ranks(self, batch_size: int, world: int) -> None:  # noqa: B027  most samplers need none
        """Raise ValueError if the order cannot be split in this way."""

    def _bind(self, data: Sized) -> None:  # noqa: B027  most samplers need none
        """Take from the data what the constructor was not given."""

    def _get_reach(self) -> int:
        """Return the number of rows that the positions are of, as far as the sampler has it."""
        return 0

    def _describe(self) -> dict[str, Any]:
        """Return what a saved position must have in common with this sampler, as JSON."""
        seed = getattr(self, "seed", None)
        return {"name": type(self).__name__, **({} if seed is None else {"seed": seed})}

    def _adopt(self, described: dict[str, Any]) -> None:  # noqa: B027  most samplers need none
        """Take from a state what the constructor was not given."""

    def _get_counts(self, epoch: int, row: int) -> dict[str, Any]:
        """Return what makes the start at a row fast."""
        return {}

    def _set_counts(self, state: dict[str, Any]) -> None:  # noqa: B027  most samplers need none
        """Take over what ``_get_counts`` has returned."""


class Position:
    """How many rows of which epoch the consumer got."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.epoch = 0
        self.rows = 0
        #: True after a load or an error: the next iteration goes on in the middle.
        self.is_kept = False

    def begin(self, split: Split) -> Iterator[Step]:
        """Begin an epoch, or go on in the middle of a loaded one; iterate over the batches of this rank."""
        if not self.is_kept and self.rows:
            self.move(self.epoch + 1, 0)
        self.is_kept = False
        rank, world = split.find_ranks()
        self.sampler._set_ranks(split.batch_size, world)
        steps = self._list_steps(split, rank, world)
        first = next(steps, None)
        if first is None:
            self.move(self.epoch + 1, 0)
            return iter(())
        return chain([first], steps)

    def _list_steps(self, split: Split, rank: int, world: int) -> Iterator[Step]:
        epoch, start, before = self.epoch, self.rows, None
        size, end = split.batch_size * world, len(self.sampler)
        end -= (end - start) % size if split.drop_last else 0
        while start < end:
            stop = min(start + size, end)
            rows = self.sampler._share(start, stop, rank, world, split.even)
            if rows:
                if before is not None:
                    yield before
                before = Step(epoch, start, stop, start // size, rank, rows)
            start = stop
        if before is not None:
            yield replace(before, is_last=True)

    def count_batches(self, split: Split) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        rank, world = split.find_ranks()
        self.sampler._set_ranks(split.batch_size, world)
        size, end = split.batch_size * world, len(self.sampler)
        rest = end % size
        has_more = (
            rest and not split.drop_last and self.sampler._share(end - rest, end, rank, world, split.even)
        )
        return end // size + bool(has_more)

    def advance(self, step: Step) -> None:
        """Note that the consumer got a batch; after the last one of an epoch, the next epoch begins."""
        if step.is_last:
            self.move(step.epoch + 1, 0)
        else:
            self.move(step.epoch, step.stop)

    def move(self, epoch: int, rows: int) -> None:
        """Set the position."""
        self.epoch, self.rows = epoch, rows

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its first row, unless the position in it was loaded."""
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more; got {epoch}")
        if not (self.is_kept and epoch == self.epoch):
            self.move(epoch, 0)
            self.is_kept = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it is the position of."""
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "rows": self.rows,
            "length": len(self.sampler),
            "sampler": self.sampler._describe(),
            **self.sampler._get_counts(self.epoch, self.rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; ValueError if it is one of other data or another order."""
        missing = {"version", "epoch", "rows", "length", "sampler"} - state.keys()
        if missing:
            raise ValueError(f"the state of a loader has no {sorted(missing)}; its keys are {sorted(state)}")
        self.sampler._adopt(state["sampler"])
        own = self.state_dict()
        for name in ("version", "length"):
            _compare(name, state[name], own[name])
        for name in {**own["sampler"], **state["sampler"]}:
            _compare(f"{name} of the sampler", state["sampler"].get(name), own["sampler"].get(name))
        if state["epoch"] < 0 or not 0 <= state["rows"] <= state["length"]:
            raise ValueError(f"no such position: row {state['rows']} of epoch {state['epoch']}")
        self.sampler._set_counts(state)
        self.move(state["epoch"], state["rows"])
        self.is_kept = True


def _compare(name: str, saved: object, own: object) -> None:
    if saved != own:
        raise ValueError(
            f"the state is of other data or of another order: its {name} is {saved!r}, here it is {own!r}"
        )


class Batches(TorchSampler[list[int]]):
    """The order of a sampler in batches, with a position that is saved and loaded."""

    def __init__(self, sampler: Sampler, split: Split) -> None:
        split.check()
        self._position, self._split = Position(sampler), split
        self.batch_size, self.drop_last = split.batch_size, split.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the positions of each batch of an epoch."""
        sampler = self._position.sampler
        steps = self._position.begin(self._split)
        order = None
        for step in steps:
            order = order or sampler.order(step.epoch)
            batch = [position for rows in step.rows for position in sampler._take(order, rows).tolist()]
            self._position.advance(step)
            yield self._make_batch(step, batch)

    def _make_batch(self, step: Step, positions: list[int]) -> list[int]:
        return positions

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank."""
        return self._position.count_batches(self._split)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, as :meth:`Loader.set_epoch`."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        return self._position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position."""
        self._position.load_state_dict(state_dict)
