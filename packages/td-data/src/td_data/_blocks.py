"""Blocks of rows in random order, shuffled in windows: each block is read once, as a whole."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from ._order import Order, make_keys, mix, permute
from ._position import Sampler
from ._samplers import check_count, check_seed


class BlockSampler(Sampler):
    """Blocks of rows in random order; the rows of every ``window`` consecutive blocks are shuffled together.

    A :class:`Loader` reads the blocks of a window at once and keeps them in memory, so that a chunk of a store is read,
    and decoded, once an epoch. The rows that follow each other are less random than those of a :class:`RandomSampler`.

    Args:
        blocks: a view with ``row_blocks()``, a list of ranges, or the rows of a block, for data that a loader gets.
        window: blocks that are in memory together.
        shuffle: False keeps the order of blocks and rows.
        seed: seed of the orders.
        lanes: equal parts of the shuffled list of blocks, from which each batch takes the same number of rows; a rank
            reads the lanes that it owns. By default, there are as many as ranks in the first epoch. The batch size times
            the number of ranks is a multiple of the number of lanes, and that a multiple of the number of ranks.

    >>> from td_data import BlockSampler
    >>> rows = BlockSampler([range(0, 4), range(4, 8), range(8, 12)], window=1).order(epoch=0)(0, 12)
    >>> sorted(rows[:4].tolist()) in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])
    True
    """

    def __init__(
        self, blocks: Any, *, window: int = 8, shuffle: bool = True, seed: int = 0, lanes: int | None = None
    ) -> None:
        self.window, self.shuffle, self.seed = check_count(window, "window"), shuffle, check_seed(seed)
        self.lanes = None if lanes is None else check_count(lanes, "lanes")
        self._starts, self._sizes = torch.empty(0), torch.empty(0)
        self._rows_per_block: int | None = None
        if isinstance(blocks, int):
            self._rows_per_block = check_count(blocks, "blocks")
            return
        ranges = blocks.row_blocks() if hasattr(blocks, "row_blocks") else list(blocks)
        if not all(isinstance(block, range) and block.step == 1 and block.start >= 0 for block in ranges):
            raise TypeError("blocks are ranges of rows, a view with row_blocks(), or the rows of a block")
        self._set_blocks(ranges)

    def _set_blocks(self, ranges: Sequence[range]) -> None:
        ranges = [block for block in ranges if len(block)]
        self._starts = torch.tensor([block.start for block in ranges], dtype=torch.int64)
        self._sizes = torch.tensor([len(block) for block in ranges], dtype=torch.int64)

    def _bind(self, data: Sized) -> None:
        if self._rows_per_block is not None:
            count, size = len(data), self._rows_per_block
            self._set_blocks([range(start, min(start + size, count)) for start in range(0, count, size)])
            self._rows_per_block = None

    def __len__(self) -> int:
        """Return the number of rows in all blocks."""
        if self._rows_per_block is not None:
            raise TypeError(
                f"BlockSampler({self._rows_per_block}) gets the number of rows from a Loader; without one, pass a "
                "list of ranges"
            )
        return int(self._sizes.sum())

    def _get_reach(self) -> int:
        return int((self._starts + self._sizes).max()) if len(self._sizes) else 0

    def order(self, epoch: int) -> BlockOrder:
        """Return the function that finds the rows of blocks, with the lanes taking turns."""
        return BlockOrder(self, len(self), mix(self.seed, epoch, "blocks"))

    def _set_ranks(self, batch_size: int, world: int) -> None:
        lanes = world if self.lanes is None else self.lanes
        if lanes % world:
            fit = [count for count in range(1, lanes + 1) if lanes % count == 0]
            raise ValueError(
                f"{lanes} lanes cannot be shared by {world} ranks: the numbers of ranks that fit are {fit}"
            )
        if batch_size * world % lanes:
            step = lanes // world
            raise ValueError(
                f"a batch of all ranks has {batch_size * world} rows, which {lanes} lanes cannot share: with {world} ranks, "
                f"the batch size is a multiple of {step}"
            )
        self.lanes = lanes

    def _share(self, start: int, stop: int, rank: int, world: int, even: bool) -> tuple[range, ...]:
        count = self.lanes or 1
        found = []
        for lane in range(rank * count // world, (rank + 1) * count // world):
            rows = -(-(stop - start - (0 if even else lane)) // count)
            if rows > 0:
                found.append(range(start + lane, start + lane + rows * count, count))
        return tuple(found)

    def _take(self, order: Order, rows: range) -> Tensor:
        parts = [window.positions[index] for window, index in self._locate(order, rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _locate(self, order: Order, rows: range) -> list[tuple[Window, Tensor]]:
        """Return the windows of rows of one lane, and the places of the rows in what is read for the windows."""
        assert isinstance(order, BlockOrder)
        lane = order.get_lane(rows.start % order.count)
        first = rows.start // order.count
        return lane.locate(first, first + len(rows))

    def _describe(self) -> dict[str, Any]:
        blocks = mix(0, len(self._starts), *self._starts[:64].tolist(), *self._sizes[:64].tolist())
        own = {"window": self.window, "shuffle": self.shuffle, "lanes": self.lanes, "blocks": blocks}
        return {**super()._describe(), **own}

    def _adopt(self, described: dict[str, Any]) -> None:
        if self.lanes is None:
            self.lanes = described.get("lanes")


class BlockOrder:
    """The order of one epoch: row ``p`` is row ``p // lanes`` of lane ``p % lanes``."""

    def __init__(self, sampler: BlockSampler, length: int, seed: int) -> None:
        self.length, self.seed, self.shuffle, self.window = length, seed, sampler.shuffle, sampler.window
        self.count = sampler.lanes or 1
        self.starts, sizes, blocks = sampler._starts, sampler._sizes, len(sampler._sizes)
        if self.shuffle and blocks:
            turned = permute(torch.arange(blocks), blocks, make_keys(seed))
            self.starts, sizes = self.starts[turned], sizes[turned]
        self.ends = sizes.cumsum(0)
        #: Where each block starts in the stream of all rows.
        self.begins = self.ends - sizes
        self._lanes: dict[int, Lane] = {}

    def get_lane(self, number: int) -> Lane:
        """Return a lane; without rows of its own, the first lane."""
        number = number if number < self.length else 0
        if number not in self._lanes:
            self._lanes[number] = Lane(self, number)
        return self._lanes[number]

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the positions from ``start`` to ``stop``."""
        result = torch.empty(max(stop - start, 0), dtype=torch.int64)
        for offset in range(min(self.count, len(result))):
            lane, first = self.get_lane((start + offset) % self.count), (start + offset) // self.count
            places = result[offset :: self.count]
            parts = [window.positions[index] for window, index in lane.locate(first, first + len(places))]
            places.copy_(torch.cat(parts))
        return result


class Lane:
    """Consecutive rows of the stream of shuffled blocks, in windows of whole blocks."""

    def __init__(self, order: BlockOrder, number: int) -> None:
        self.order, self.number = order, number
        whole, rest = divmod(order.length, order.count)
        self.start = number * whole + min(number, rest)
        self.size = whole + (number < rest)
        stop = self.start + self.size
        first = int(torch.searchsorted(order.ends, self.start, right=True))
        last = int(torch.searchsorted(order.ends, stop - 1, right=True))
        begins = order.begins[first : last + 1 : order.window].clamp(min=self.start)
        #: Where each window starts in the stream, and where the last one ends.
        self.bounds = torch.cat([begins, torch.tensor([stop])])
        self._held: dict[int, Window] = {}

    def get_window(self, number: int) -> Window | None:
        """Return a window, or None after the last one; the two that were used last are kept."""
        if number >= len(self.bounds) - 1:
            return None
        if number not in self._held:
            first, last = self.bounds[number : number + 2].tolist()
            self._held[number] = Window((self.number, number), self.order, first, last)
            for other in [held for held in self._held if abs(held - number) > 1]:
                del self._held[other]
        return self._held[number]

    def locate(self, first: int, last: int) -> list[tuple[Window, Tensor]]:
        """Return windows and places in them of the rows from ``first`` to ``last``; the row after the end is the first."""
        found: list[tuple[Window, Tensor]] = []
        while first < last:
            row = self.start + first % self.size
            number = int(torch.searchsorted(self.bounds, row, right=True)) - 1
            window = self.get_window(number)
            assert window is not None
            stop = min(row + last - first, window.stop)
            found.append((window, window.places[row - window.start : stop - window.start]))
            first += stop - row
        return found


class Window:
    """The rows that are in memory together: their positions as they are read, and the order in which they are given out."""

    def __init__(self, key: tuple[int, int], order: BlockOrder, start: int, stop: int) -> None:
        self.key, self.start, self.stop = key, start, stop
        first = int(torch.searchsorted(order.ends, start, right=True))
        last = int(torch.searchsorted(order.ends, stop - 1, right=True))
        parts = []
        for block in range(first, last + 1):
            begin = int(order.begins[block])
            shift = int(order.starts[block]) - begin
            parts.append(range(max(begin, start) + shift, min(int(order.ends[block]), stop) + shift))
        if order.shuffle:
            parts.sort(key=lambda rows: rows.start)
        self.positions = torch.cat([torch.arange(rows.start, rows.stop) for rows in parts])
        places = torch.arange(stop - start)
        self.places = (
            permute(places, stop - start, make_keys(mix(order.seed, start))) if order.shuffle else places
        )
