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
    check_count,
    check_seed,
    draw_uniform,
    make_keys,
    mix,
    permute,
    permute_passes,
)
from ._position import Sampler

DataSource = Union[Sized, int]  # noqa: UP007
"""A view, or its number of rows."""


def count_rows(data_source: DataSource, what: str = "data_source") -> int:
    """Return the number of rows of a view, or the number itself."""
    if isinstance(data_source, bool) or not isinstance(data_source, (int, Sized)):
        raise TypeError(f"{what} is a view or a number of rows; got {type(data_source).__name__}")
    return check_count(data_source if isinstance(data_source, int) else len(data_source), what, 0)


class CountedSampler(Sampler):
    """A sampler with a number of rows in an epoch, and facts that a saved position must have in common with it."""

    def __init__(self, num_samples: int, reach: int, **facts: object) -> None:
        self.num_samples, self._reach, self._facts = num_samples, reach, facts

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return self.num_samples

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), **self._facts}


class SequentialSampler(CountedSampler):
    """All rows in order, in every epoch.

    Args:
        data_source: a view, or a number of rows.

    >>> from td_data import SequentialSampler
    >>> SequentialSampler(10).order(epoch=0)(3, 6)
    tensor([3, 4, 5])
    """

    def __init__(self, data_source: DataSource) -> None:
        count = count_rows(data_source)
        super().__init__(count, count)

    def order(self, epoch: int) -> Order:
        """Return the function of the rows themselves."""
        return torch.arange


class RandomSampler(CountedSampler):
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
        self.replacement, self.seed, count = replacement, check_seed(seed), count_rows(data_source)
        drawn = count if num_samples is None else check_count(num_samples, "num_samples")
        if num_samples and not count:
            raise ValueError(f"num_samples={num_samples}, but there are no rows to draw from")
        super().__init__(drawn, count, rows=count, replacement=replacement)

    def order(self, epoch: int) -> Order:
        """Return the function that computes pages of the order."""
        seed, count = mix(self.seed, epoch, "random"), self._reach
        keys = make_keys(seed)

        def compute(start: int, stop: int) -> Tensor:
            if self.replacement:
                return (draw_uniform(mix(seed, start), stop - start) * count).long()
            numbers = torch.arange(start, stop)
            whole = self.num_samples <= count
            return permute(numbers, count, keys) if whole else permute_passes(numbers, count, seed)

        return PagedOrder(compute, len(self))


class WeightedRandomSampler(CountedSampler):
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
        facts = {"replacement": replacement, "weights": self._draws.checksum}
        super().__init__(check_count(num_samples, "num_samples"), len(self._draws.sums), **facts)
        if not replacement:
            weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach().flatten()
            self._rows = weights.nonzero().flatten()
            self._weights = weights[self._rows]
            if num_samples > len(self._rows):
                raise ValueError(
                    f"num_samples is {num_samples}, but only {len(self._rows)} rows have a weight above zero; "
                    "replacement=True draws rows several times"
                )

    def order(self, epoch: int) -> Order:
        """Return the function that draws pages of rows."""
        seed, draws = mix(self.seed, epoch, "weighted"), self._draws
        if self.replacement:
            return PagedOrder(
                lambda start, stop: draws.find(draw_uniform(mix(seed, start), stop - start)), len(self)
            )
        scores = draw_uniform(seed, len(self._rows)).log_() / self._weights
        drawn = self._rows[scores.topk(self.num_samples).indices]
        return lambda start, stop: drawn[start:stop].clone()


class MixtureSampler(CountedSampler):
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
        self.lengths = [count_rows(each, "a length") for each in getattr(lengths, "lengths", lengths)]
        self._draws, self.run, self.seed = Draws(weights), check_count(run, "run"), check_seed(seed)
        shares = self._draws.sums.diff(prepend=torch.zeros(1, dtype=torch.float64)).tolist()
        if len(shares) != len(self.lengths):
            raise ValueError(
                f"there is one weight for each part; got {len(shares)} weights for {len(self.lengths)} parts"
            )
        for number, (length, weight) in enumerate(zip(self.lengths, shares)):
            if weight and not length:
                raise ValueError(f"part {number} has the weight {weight}, but no rows")
        total = sum(self.lengths)
        facts = {"run": run, "lengths": mix(0, *self.lengths), "weights": self._draws.checksum}
        num_samples = check_count(total if num_samples is None else num_samples, "num_samples")
        super().__init__(num_samples, total, **facts)
        self._starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self._page = max(PAGE // run, 1) * run
        #: How many rows of each part came before a page of an epoch.
        self._before: dict[tuple[int, int], Tensor] = {}

    def order(self, epoch: int) -> Order:
        """Return the function that draws pages of rows."""
        return PagedOrder(lambda start, stop: self._draw_page(epoch, start, stop), len(self), self._page)

    def _draw_page(self, epoch: int, start: int, stop: int) -> Tensor:
        number = start // self._page
        parts, before = self._draw_parts(epoch, number), self._count_before(epoch, number)
        result = torch.empty(len(parts), dtype=torch.int64)
        for part, length in enumerate(self.lengths):
            places = (parts == part).nonzero().flatten()
            if len(places):
                rows = torch.arange(len(places)) + before[part]
                result[places] = permute_passes(rows, length, mix(self.seed, epoch, "part", part))
                result[places] += self._starts[part]
        self._before[epoch, number + 1] = before + torch.bincount(parts, minlength=len(before))
        return result[: stop - start]

    def _draw_parts(self, epoch: int, number: int) -> Tensor:
        """Return the part of each row of a page."""
        uniform = draw_uniform(mix(self.seed, epoch, "mixture", number), self._page // self.run)
        return self._draws.find(uniform).repeat_interleave(self.run)

    def _count_before(self, epoch: int, number: int) -> Tensor:
        """Return how many rows of each part came before a page: counted from the last page that is known."""
        known = max((page for of, page in self._before if of == epoch and page <= number), default=0)
        counts = self._before.get((epoch, known), torch.zeros(len(self.lengths), dtype=torch.int64))
        for page in range(known, number):
            counts = counts + torch.bincount(self._draw_parts(epoch, page), minlength=len(counts))
        self._before = {key: value for key, value in self._before.items() if key[0] >= epoch - 1}
        self._before[epoch, number] = counts
        return counts

    def _get_counts(self, epoch: int, row: int) -> dict[str, Any]:
        return {"counts": self._count_before(epoch, row // self._page).tolist()}

    def _adopt(self, state: dict[str, Any]) -> None:
        if len(state.get("counts", ())) == len(self.lengths):
            self._before[state["epoch"], state["rows"] // self._page] = torch.tensor(state["counts"])
