"""Samplers: the order of the rows of an epoch, as a function of seed and epoch alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from typing import Any, Union

import torch
from torch import Tensor
from torch.utils.data import Sampler as TorchSampler

from ._order import (
    PAGE,
    Draws,
    Order,
    PagedOrder,
    draw_uniform,
    make_keys,
    make_keys_of_passes,
    mix,
    permute,
)
from ._position import Position, Split, Step

DataSource = Union[Sized, int]  # noqa: UP007
"""A view, or its number of rows."""


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


def count_rows(data_source: DataSource, what: str = "data_source") -> int:
    """Return the number of rows of a view, or the number itself."""
    if isinstance(data_source, bool) or not isinstance(data_source, (int, Sized)):
        raise TypeError(f"{what} is a view or a number of rows; got {type(data_source).__name__}")
    count = data_source if isinstance(data_source, int) else len(data_source)
    if count < 0:
        raise ValueError(f"{what}: a number of rows is 0 or more; got {count}")
    return count


def check_seed(seed: int) -> int:
    """Return a seed, or raise TypeError if it is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is an integer; got {seed!r}")
    return seed


def check_count(count: int, what: str) -> int:
    """Return a number of rows to draw, or raise ValueError if it is below one."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{what} is an integer of 1 or more; got {count!r}")
    return count


class SequentialSampler(Sampler):
    """All rows in order, in every epoch.

    Args:
        data_source: a view, or a number of rows.

    >>> from td_data import SequentialSampler
    >>> SequentialSampler(10).order(epoch=0)(3, 6)
    tensor([3, 4, 5])
    """

    def __init__(self, data_source: DataSource) -> None:
        self._length = count_rows(data_source)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def _get_reach(self) -> int:
        return self._length

    def order(self, epoch: int) -> Order:
        """Return the function of the rows themselves."""
        return torch.arange


class RandomSampler(Sampler):
    """Rows in random order, which needs no memory and no time at the start of an epoch.

    Args:
        data_source: a view, or a number of rows.
        replacement: draw each row from all, so that some come several times.
        num_samples: rows of an epoch; by default all. If it is more than all, each pass through them has another order.
        seed: seed of the order; the same seed and epoch give the same order.

    >>> from td_data import RandomSampler
    >>> sorted(RandomSampler(1000, seed=1).order(epoch=3)(0, 1000).tolist()) == list(range(1000))
    True
    """

    def __init__(
        self,
        data_source: DataSource,
        *,
        replacement: bool = False,
        num_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        self._count, self.replacement, self.seed = count_rows(data_source), replacement, check_seed(seed)
        self.num_samples = self._count if num_samples is None else check_count(num_samples, "num_samples")
        if num_samples and not self._count:
            raise ValueError(f"num_samples={num_samples}, but there are no rows to draw from")

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return self.num_samples

    def _get_reach(self) -> int:
        return self._count

    def order(self, epoch: int) -> Order:
        """Return the function that computes pages of the order."""
        seed, count = mix(self.seed, epoch, "random"), self._count
        if self.replacement:
            return PagedOrder(
                lambda start, stop: (draw_uniform(mix(seed, start), stop - start) * count).long(), len(self)
            )
        if self.num_samples <= count:
            keys = make_keys(seed)
            return PagedOrder(lambda start, stop: permute(torch.arange(start, stop), count, keys), len(self))
        return PagedOrder(
            lambda start, stop: permute_passes(torch.arange(start, stop), count, seed), len(self)
        )

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "rows": self._count, "replacement": self.replacement}


def permute_passes(numbers: Tensor, count: int, seed: int) -> Tensor:
    """Return row ``number % count`` of the permutation of pass ``number // count`` through the rows."""
    passes = numbers // count
    return permute(numbers - passes * count, count, make_keys_of_passes(seed, passes))


class WeightedRandomSampler(Sampler):
    """Rows drawn with probabilities that are proportional to weights.

    Args:
        weights: a weight for each row; any number of them, as float64 inside.
        num_samples: rows of an epoch.
        replacement: False draws each row at most once an epoch.
        seed: seed of the draws.

    >>> from td_data import WeightedRandomSampler
    >>> set(WeightedRandomSampler([0.0, 1.0, 3.0], 100).order(epoch=0)(0, 100).tolist())
    {1, 2}
    """

    def __init__(self, weights: Any, num_samples: int, replacement: bool = True, *, seed: int = 0) -> None:
        self._draws, self.replacement, self.seed = Draws(weights), replacement, check_seed(seed)
        self.num_samples = check_count(num_samples, "num_samples")
        positive = int((self._draws.weights > 0).sum())
        if not replacement and num_samples > positive:
            raise ValueError(
                f"num_samples is {num_samples}, but only {positive} rows have a weight above zero; "
                "replacement=True draws rows several times"
            )

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return self.num_samples

    def _get_reach(self) -> int:
        return len(self._draws.weights)

    def order(self, epoch: int) -> Order:
        """Return the function that draws pages of rows."""
        seed, draws = mix(self.seed, epoch, "weighted"), self._draws
        if self.replacement:
            return PagedOrder(
                lambda start, stop: draws.find(draw_uniform(mix(seed, start), stop - start)), len(self)
            )
        rows = draws.weights.nonzero().flatten()
        scores = draw_uniform(seed, len(rows)).log_() / draws.weights[rows]
        drawn = rows[scores.topk(self.num_samples).indices]
        return lambda start, stop: drawn[start:stop].clone()

    def _describe(self) -> dict[str, Any]:
        weights = self._draws.get_checksum()
        return {**super()._describe(), "replacement": self.replacement, "weights": weights}


class MixtureSampler(Sampler):
    """Rows of several parts, mixed by weight; each part comes in a random order of its own, again and again.

    Args:
        lengths: a :class:`Concat`, or the number of rows of each part.
        weights: the share of each part, such as ``[3, 1]``.
        num_samples: rows of an epoch; by default those of all parts.
        run: consecutive rows from one part; the batch size gives batches of one part.
        seed: seed of the draws and orders.

    >>> from td_data import MixtureSampler
    >>> rows = MixtureSampler([10, 1000], weights=[1, 1], num_samples=1000).order(epoch=0)(0, 1000)
    >>> 400 < int((rows < 10).sum()) < 600
    True
    """

    def __init__(
        self, lengths: Any, weights: Any, *, num_samples: int | None = None, run: int = 1, seed: int = 0
    ) -> None:
        counts = getattr(lengths, "lengths", lengths)
        self.lengths = [count_rows(length, "a length") for length in counts]
        self._draws, self.run, self.seed = Draws(weights), check_count(run, "run"), check_seed(seed)
        if len(self._draws.weights) != len(self.lengths):
            raise ValueError(
                f"there is one weight for each part; got {len(self._draws.weights)} weights for {len(self.lengths)} parts"
            )
        for number, (length, weight) in enumerate(zip(self.lengths, self._draws.weights.tolist())):
            if weight and not length:
                raise ValueError(f"part {number} has the weight {weight}, but no rows")
        total = sum(self.lengths) if num_samples is None else num_samples
        self.num_samples = check_count(total, "num_samples")
        self._starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self._page = max(PAGE // run, 1) * run
        self._before: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return self.num_samples

    def _get_reach(self) -> int:
        return sum(self.lengths)

    def order(self, epoch: int) -> Order:
        """Return the function that draws pages of rows."""
        return PagedOrder(lambda start, stop: self._draw_page(epoch, start, stop), len(self), self._page)

    def _draw_page(self, epoch: int, start: int, stop: int) -> Tensor:
        number = start // self._page
        parts = self._draw_parts(epoch, number)
        before = self._count_before(epoch, number)
        result = torch.empty(len(parts), dtype=torch.int64)
        for part, length in enumerate(self.lengths):
            places = (parts == part).nonzero().flatten()
            if len(places):
                numbers = torch.arange(len(places)) + before[part]
                rows = permute_passes(numbers, length, mix(self.seed, epoch, "part", part))
                result[places] = rows + self._starts[part]
        self._before[epoch, number + 1] = before + self._count(parts)
        return result[: stop - start]

    def _draw_parts(self, epoch: int, number: int) -> Tensor:
        """Return the part of each row of a page."""
        drawn = self._draws.find(
            draw_uniform(mix(self.seed, epoch, "mixture", number), self._page // self.run)
        )
        return drawn.repeat_interleave(self.run)

    def _count(self, parts: Tensor) -> Tensor:
        return torch.bincount(parts, minlength=len(self.lengths))

    def _count_before(self, epoch: int, number: int) -> Tensor:
        """Return how many rows of each part came before a page: counted from the last page that is known."""
        known = max((page for of, page in self._before if of == epoch and page <= number), default=0)
        counts = self._before.get((epoch, known), torch.zeros(len(self.lengths), dtype=torch.int64))
        for page in range(known, number):
            counts = counts + self._count(self._draw_parts(epoch, page))
        self._before = {key: value for key, value in self._before.items() if key[0] >= epoch - 1}
        self._before[epoch, number] = counts
        return counts

    def _describe(self) -> dict[str, Any]:
        lengths = mix(0, *self.lengths)
        return {
            **super()._describe(),
            "run": self.run,
            "lengths": lengths,
            "weights": self._draws.get_checksum(),
        }

    def _get_counts(self, epoch: int, row: int) -> dict[str, Any]:
        return {"counts": self._count_before(epoch, row // self._page).tolist()}

    def _set_counts(self, state: dict[str, Any]) -> None:
        if len(state.get("counts", ())) == len(self.lengths):
            self._before[state["epoch"], state["rows"] // self._page] = torch.tensor(state["counts"])
