"""``Sampler``, the order of the rows of an epoch; its split into batches of ranks; and a position that is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler as TorchSampler

from ._order import VERSION, Order, check_count


@dataclass(frozen=True, slots=True)
class Split:
    """How an epoch is split into batches: sizes, and the part of this rank."""

    batch_size: int
    drop_last: bool = False
    even: bool = True
    rank: int | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        check_count(self.batch_size, "batch_size")
        rank, world = self.rank, self.world_size
        if rank is None or world is None:
            if rank is not world:
                raise ValueError(f"rank and world_size are given together; got {rank=}, world_size={world}")
        elif not 0 <= rank < world:
            raise ValueError(f"rank is from 0 to world_size - 1; got {rank} of {world}")

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

    #: Number of rows that the positions are of, as far as the sampler has it.
    _reach = 0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows of one epoch."""

    @abstractmethod
    def order(self, epoch: int) -> Order:
        """Return a function of the first row and the row after the last one, which returns their positions, of int64."""

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

        The arguments are those of a :class:`Loader`, whose ``state_dict``, ``load_state_dict`` and ``set_epoch`` it has. It
        counts a batch when the ``DataLoader`` draws its positions. With ``num_workers`` that is ahead of the consumer: a resume
        from its state leaves out the batches that were under way. Write ``Loader(data, n, sampler=sampler,
        num_workers=2)``, or :meth:`Loader.as_dataloader`, which count the batches that the consumer got; ``StatefulDataLoader``
        of torchdata saves a position of its own, which is exact.

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

    def _take(self, order: Order, rows: range, limit: int | None = None) -> Tensor:
        """Return the positions of rows, which may be past the end of the epoch; check those of a user's sampler."""
        length, start, parts = len(self), rows.start, []
        while start < rows.stop:
            first = start % length
            last = min(first + rows.stop - start, length)
            parts.append(order(first, last))
            if not type(self).__module__.startswith(f"{__package__}."):
                _check_positions(type(self).__name__, parts[-1], first, last, limit)
            start += last - first
        return join(parts)

    def _find(self, order: Order, step: Step, limit: int | None = None) -> Tensor:
        """Return the positions of a batch."""
        return join([self._take(order, rows, limit) for rows in step.rows])

    def _set_ranks(self, batch_size: int, world: int) -> None:  # noqa: B027  most samplers need none
        """Raise ValueError if the order cannot be split in this way."""

    def _bind(self, data: Sized) -> None:  # noqa: B027  most samplers need none
        """Take from the data what the constructor was not given."""

    def _describe(self) -> dict[str, Any]:
        """Return what a saved position must have in common with this sampler, as JSON; None for what it may decide."""
        seed = getattr(self, "seed", None)
        return {"name": type(self).__name__, **({} if seed is None else {"seed": seed})}

    def _get_counts(self, epoch: int, row: int) -> dict[str, Any]:
        """Return what makes the start at a row fast."""
        return {}

    def _adopt(self, state: dict[str, Any]) -> None:  # noqa: B027  most samplers need none
        """Take from a state what the constructor was not given, and what ``_get_counts`` has returned."""


def join(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_positions(name: str, found: object, first: int, last: int, limit: int | None) -> None:
    if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.shape != (last - first,):
        shown = (
            f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        )
        raise TypeError(
            f"{name}.order returned {shown} from row {first} on; it must be a vector of {last - first} positions of int64"
        )
    wrong = ((found < 0) | (found >= (1 << 62 if limit is None else limit))).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise IndexError(
            f"{name}.order returned position {found[place]} for row {first + place}; the data has {limit} rows"
        )


@dataclass(slots=True)
class Position:
    """How many rows of which epoch the consumer got."""

    epoch: int = 0
    rows: int = 0
    #: True from a load or an error to the next batch: an iteration that begins goes on in the middle.
    is_kept: bool = False

    def move(self, epoch: int, rows: int, is_kept: bool = False) -> None:
        """Set the position."""
        self.epoch, self.rows, self.is_kept = epoch, rows, is_kept

    def advance(self, step: Step) -> None:
        """Note that the consumer got a batch; after the last one of an epoch, the next epoch begins."""
        self.move(step.epoch + step.is_last, 0 if step.is_last else step.stop)


class Epochs:
    """The epochs of a sampler in batches, with a position that is saved and loaded."""

    def __init__(self, sampler: Sampler, split: Split, position: Position | None = None) -> None:
        self._sampler, self._split = sampler, split
        self._position = Position() if position is None else position

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._position.epoch

    @property
    def rows(self) -> int:
        """Rows of that epoch that were given out, on all ranks together."""
        return self._position.rows

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        rank, size, end = self._find_sizes()
        rest, split = end % size, self._split
        world = size // split.batch_size
        has_more = (
            rest and not split.drop_last and self._sampler._share(end - rest, end, rank, world, split.even)
        )
        return end // size + bool(has_more)

    def _find_sizes(self) -> tuple[int, int, int]:
        """Return the rank, the rows of a batch of all ranks, and those of an epoch."""
        rank, world = self._split.find_ranks()
        self._sampler._set_ranks(self._split.batch_size, world)
        return rank, self._split.batch_size * world, len(self._sampler)

    def _begin(self) -> Iterator[Step]:
        """Begin an epoch, or go on in the middle of a loaded one; iterate over the batches of this rank."""
        position = self._position
        if position.rows and not position.is_kept:
            position.move(position.epoch + 1, 0)
        steps = self._list_steps(position.epoch, position.rows, *self._find_sizes())
        first = next(steps, None)
        if first is None:
            position.move(position.epoch + 1, 0)
            return iter(())
        return chain([first], steps)

    def _list_steps(self, epoch: int, start: int, rank: int, size: int, end: int) -> Iterator[Step]:
        split, before = self._split, None
        end -= (end - start) % size if split.drop_last else 0
        for first in range(start, end, size):
            stop = min(first + size, end)
            rows = self._sampler._share(first, stop, rank, size // split.batch_size, split.even)
            if rows:
                if before is not None:
                    yield before
                before = Step(epoch, first, stop, first // size, rank, rows)
        if before is not None:
            yield replace(before, is_last=True)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration begin an epoch; the position in that epoch, if it was loaded, remains.

        Raises:
            ValueError: the epoch is below 0.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more; got {epoch}")
        if not (self._position.is_kept and epoch == self.epoch):
            self._position.move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was given out, as numbers and strings; all ranks have the same."""
        sampler, epoch, rows = self._sampler, self.epoch, self.rows
        own = {"version": VERSION, "epoch": epoch, "rows": rows, "length": len(sampler)}
        return {**own, "sampler": sampler._describe(), **sampler._get_counts(epoch, rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position: the next iteration goes on there.

        Raises:
            ValueError: the state is one of data of another length, or of another sampler or seed.
        """
        saved, own = state_dict, self.state_dict()
        if missing := own.keys() - saved.keys() - {"counts"}:
            raise ValueError(f"the state of a loader has no {sorted(missing)}; its keys are {sorted(saved)}")
        facts = [(name, saved[name], own[name]) for name in ("version", "length")]
        for name in {**own["sampler"], **saved["sampler"]}:
            facts.append(
                (f"{name} of the sampler", *(each["sampler"].get(name, "") for each in (saved, own)))
            )
        for name, theirs, mine in facts:
            if theirs != mine and None not in (theirs, mine):
                raise ValueError(
                    f"the state is of other data or of another order: its {name} is {theirs!r}, here it is {mine!r}"
                )
        if saved["epoch"] < 0 or not 0 <= saved["rows"] <= saved["length"]:
            raise ValueError(f"no such position: row {saved['rows']} of epoch {saved['epoch']}")
        self._sampler._adopt(saved)
        self._position.move(saved["epoch"], saved["rows"], is_kept=True)


class Batches(Epochs, TorchSampler[list[int]]):
    """The order of a sampler as lists of positions, each with its :class:`Step`."""

    #: Where the next iteration notes its steps, for a consumer that counts them; None counts a batch when it is drawn.
    _noted: deque[Step] | None = None

    def __init__(self, sampler: Sampler, split: Split, position: Position | None = None) -> None:
        super().__init__(sampler, split, position)
        self.batch_size, self.drop_last = split.batch_size, split.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the positions of each batch of an epoch."""
        # torch calls this twice before it draws the first batch.
        noted, self._noted = self._noted, None
        note = self._position.advance if noted is None else noted.append
        order = None
        for step in self._begin():
            order = order or self._sampler.order(step.epoch)
            batch = Numbered(self._sampler._find(order, step).tolist())
            batch.step = step
            note(step)
            yield batch


class Numbered(list[int]):
    """The positions of a batch, and the step that they are of."""

    step: Step
