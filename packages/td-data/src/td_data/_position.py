"""The position of a consumer in the epochs of a sampler: how it advances, is saved and is loaded, and how ranks share it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ._order import VERSION

if TYPE_CHECKING:
    from ._samplers import Sampler


@dataclass(frozen=True, slots=True)
class Split:
    """How an epoch is split into batches: sizes, and the part of this rank.

    Args:
        batch_size: rows of a batch of one rank.
        drop_last: leave out the rows after the last whole global batch.
        even: give all ranks the same number of rows.
        rank: number of this rank; None for that of ``torch.distributed``.
        world_size: number of ranks; None for that of ``torch.distributed``.
    """

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


class Position:
    """How many rows of which epoch the consumer got.

    Args:
        sampler: gives the length of an epoch, and what the state must repeat.
    """

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
