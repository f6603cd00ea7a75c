"""Blocks of rows in random order, shuffled in windows: each block is read once, as a whole."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._order import Order, check_count, check_seed, make_keys, mix, permute
from ._position import Step, join
from ._samplers import CountedSampler


class BlockSampler(CountedSampler):
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
        super().__init__(0, 0, window=check_count(window, "window"), shuffle=shuffle)
        self.window, self.shuffle, self.seed = window, shuffle, check_seed(seed)
        self.lanes = None if lanes is None else check_count(lanes, "lanes")
        self._rows_per_block = check_count(blocks, "blocks") if isinstance(blocks, int) else None
        if self._rows_per_block is None:
            ranges = blocks.row_blocks() if hasattr(blocks, "row_blocks") else list(blocks)
            if not all(isinstance(block, range) and block.step == 1 and block.start >= 0 for block in ranges):
                raise TypeError("blocks are ranges of rows, a view with row_blocks(), or the rows of a block")
            self._set_blocks(ranges)

    def _set_blocks(self, ranges: Sequence[range]) -> None:
        ranges = [block for block in ranges if len(block)]
        self._starts = torch.tensor([block.start for block in ranges], dtype=torch.int64)
        self._sizes = torch.tensor([len(block) for block in ranges], dtype=torch.int64)
        self._reach = max((block.stop for block in ranges), default=0)
        self.num_samples = sum(map(len, ranges))
        self._facts["blocks"] = mix(0, len(ranges), *self._starts[:64].tolist(), *self._sizes[:64].tolist())

    def _bind(self, data: Sized) -> None:
        if self._rows_per_block is not None:
            count, size = len(data), self._rows_per_block
            if "blocks" in self._facts and count != self.num_samples:
                raise ValueError(
                    f"this BlockSampler is of data of {self.num_samples} rows, and the loader has {count}: make another one"
                )
            self._set_blocks([range(start, min(start + size, count)) for start in range(0, count, size)])

    def __len__(self) -> int:
        """Return the number of rows in all blocks."""
        if "blocks" not in self._facts:
            raise TypeError(
                f"BlockSampler({self._rows_per_block}) gets the number of rows from a Loader; without one, pass a "
                "list of ranges"
            )
        return self.num_samples

    def order(self, epoch: int) -> BlockOrder:
        """Return the function that finds the rows of blocks, with the lanes taking turns."""
        return BlockOrder(self, len(self), mix(self.seed, epoch, "blocks"))

    def _set_ranks(self, batch_size: int, world: int) -> None:
        lanes, rows = self.lanes or world, batch_size * world
        if lanes % world:
            fit = [count for count in range(1, lanes + 1) if lanes % count == 0]
            raise ValueError(
                f"{lanes} lanes cannot be shared by {world} ranks: the numbers of ranks that fit are {fit}"
            )
        if rows % lanes:
            raise ValueError(
                f"a batch of all ranks has {rows} rows, which {lanes} lanes cannot share: with {world} ranks, the batch "
                f"size is a multiple of {lanes // world}"
            )
        self.lanes = lanes

    def _share(self, start: int, stop: int, rank: int, world: int, even: bool) -> tuple[range, ...]:
        count, found = self.lanes or 1, []
        for lane in range(rank * count // world, (rank + 1) * count // world):
            rows = -(-(stop - start - (0 if even else lane)) // count)
            if rows > 0:
                found.append(range(start + lane, start + lane + rows * count, count))
        return tuple(found)

    def _take(self, order: Order, rows: range, limit: int | None = None) -> Tensor:
        assert isinstance(order, BlockOrder)
        return join([window.positions[places] for window, places in order.locate(rows)])

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "lanes": self.lanes}

    def _adopt(self, state: dict[str, Any]) -> None:
        self.lanes = self.lanes or state["sampler"]["lanes"]


class Window(NamedTuple):
    """The rows that are in memory together: their positions as they are read, and the order in which they are given out."""

    #: Number of the lane, and number in the lane.
    key: tuple[int, int]
    start: int
    stop: int
    positions: Tensor
    places: Tensor


class BlockOrder:
    """The order of one epoch: row ``p`` is row ``p // lanes`` of lane ``p % lanes``, a part of the stream of shuffled blocks."""

    def __init__(self, sampler: BlockSampler, length: int, seed: int) -> None:
        self.length, self.seed, self.shuffle, self.window = length, seed, sampler.shuffle, sampler.window
        self.count = sampler.lanes or 1
        self.starts, sizes, blocks = sampler._starts, sampler._sizes, len(sampler._sizes)
        if self.shuffle and blocks:
            turned = permute(torch.arange(blocks), blocks, make_keys(seed))
            self.starts, sizes = self.starts[turned], sizes[turned]
        #: Where each block ends and starts in the stream of all rows.
        self.ends = sizes.cumsum(0)
        self.begins = self.ends - sizes
        #: Where each window of a lane starts in the stream, and where the last one ends.
        self._bounds: dict[int, Tensor] = {}
        self._windows: dict[tuple[int, int], Window] = {}

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the positions from ``start`` to ``stop``."""
        result = torch.empty(max(stop - start, 0), dtype=torch.int64)
        for offset in range(min(self.count, len(result))):
            found = self.locate(range(start + offset, stop, self.count))
            torch.cat(
                [window.positions[places] for window, places in found], out=result[offset :: self.count]
            )
        return result

    def _find_blocks(self, start: int, stop: int) -> slice:
        """Return the blocks of rows of the stream."""
        first, last = torch.searchsorted(self.ends, torch.tensor([start, stop - 1]), right=True).tolist()
        return slice(first, last + 1)

    def _get_bounds(self, lane: int) -> Tensor:
        if lane not in self._bounds:
            whole, rest = divmod(self.length, self.count)
            start = lane * whole + min(lane, rest)
            stop = start + whole + (lane < rest)
            begins = self.begins[self._find_blocks(start, stop)][:: self.window].clamp(min=start)
            self._bounds[lane] = torch.cat([begins, torch.tensor([stop])])
        return self._bounds[lane]

    def get_window(self, lane: int, number: int) -> Window | None:
        """Return a window of a lane, or None after the last one; the two that were used last are kept."""
        bounds = self._get_bounds(lane)
        if number >= len(bounds) - 1:
            return None
        key = lane, number
        if key not in self._windows:
            self._windows = {
                k: w for k, w in self._windows.items() if k[0] != lane or abs(k[1] - number) <= 1
            }
            self._windows[key] = self._make_window(key, *bounds[number : number + 2].tolist())
        return self._windows[key]

    def _make_window(self, key: tuple[int, int], start: int, stop: int) -> Window:
        chosen = self._find_blocks(start, stop)
        firsts, shifts = self.begins[chosen].clamp(min=start), self.starts[chosen] - self.begins[chosen]
        parts = torch.stack([firsts + shifts, self.ends[chosen].clamp(max=stop) + shifts], 1).tolist()
        positions = torch.cat([torch.arange(*part) for part in (sorted(parts) if self.shuffle else parts)])
        places = torch.arange(stop - start)
        if self.shuffle:
            places = permute(places, stop - start, make_keys(mix(self.seed, start)))
        return Window(key, start, stop, positions, places)

    def locate(self, rows: range) -> list[tuple[Window, Tensor]]:
        """Return windows, and places in them, of rows of one lane; the row after its end is its first."""
        lane = rows.start % self.count
        lane = lane if lane < self.length else 0
        bounds, first, found = self._get_bounds(lane), rows.start // self.count, []
        begin, last = int(bounds[0]), first + len(rows)
        size = int(bounds[-1]) - begin
        while first < last:
            row = begin + first % size
            window = self.get_window(lane, int(torch.searchsorted(bounds, row, right=True)) - 1)
            assert window is not None
            stop = min(row + last - first, window.stop)
            found.append((window, window.places[row - window.start : stop - window.start]))
            first += stop - row
        return found


def list_windows(order: BlockOrder, step: Step) -> list[tuple[Window, Tensor]]:
    """Return the windows of a batch, and the places of its rows in what is read for them."""
    return [item for rows in step.rows for item in order.locate(rows)]
