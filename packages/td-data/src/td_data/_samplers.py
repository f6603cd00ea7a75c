"""Samplers: the order of the rows of an epoch, as a function of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Union

import torch
from torch import Tensor

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
from ._position import Sampler

DataSource = Union[Sized, int]  # noqa: UP007
"""A view, or its number of rows."""


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
