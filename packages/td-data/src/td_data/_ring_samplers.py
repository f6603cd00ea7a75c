"""Which rows of a replay buffer a batch has: any, by priority, or slices of episodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from td_core.typing import NestedKey

from ._order import check_count
from ._views import find_episode_ends

_SHIFT = 5
_FAN_OUT = 1 << _SHIFT

Drawn = tuple[Tensor, dict[Any, Tensor]]
"""Numbers of rows, and further entries of the batch."""


class RingSampler:
    """Draws any of the rows, with replacement; the base of the others."""

    #: Key whose values ``add`` gets, or None.
    key: NestedKey | None = None

    def start(self, capacity: int) -> None:
        """Forget all rows."""
        #: Number after the last row that was added.
        self.seen = 0
        self.capacity = capacity

    def add(self, first: int, stop: int, values: Tensor | None) -> None:
        """Take note of rows that were written, with the values of their key."""
        self.seen = stop

    def draw(self, low: int, high: int, count: int, generator: torch.Generator) -> Drawn:
        """Return the numbers of ``count`` items from ``low`` to ``high``, and further entries of the batch."""
        return torch.randint(low, high, (count,), generator=generator), {}

    def update(self, numbers: Tensor, priority: Tensor, low: int, high: int) -> int:
        """Set priorities, and return how many of the rows are still there."""
        raise TypeError("the sampler of this buffer has no priorities: pass sampler=PrioritizedSampler()")

    def state_dict(self) -> dict[str, Tensor]:
        """Return what ``load_state_dict`` needs, as tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor], seen: int) -> None:
        """Take over the state of a sampler that had seen so many rows."""


class PrioritizedSampler(RingSampler):
    """Draw rows in proportion to ``priority ** alpha``, as Schaul et al. 2016, with weights that correct for it.

    A batch gets ``"priority_weight"``: ``(p / smallest p) ** -beta``. New rows get the largest priority seen so far.

    Args:
        alpha: exponent of priorities; 0 draws uniformly.
        beta: exponent of the weights; an attribute that may be changed at any time.
        eps: number added to each priority.

    >>> from td_data import PrioritizedSampler, ReplayBuffer
    >>> buffer = ReplayBuffer(4, sampler=PrioritizedSampler(alpha=1.0, eps=0.0), batch_size=8)
    >>> index = buffer.extend(TensorDict({"a": torch.arange(4)}, [4]))
    >>> buffer.update_priority(index, torch.tensor([0.0, 0.0, 2.0, 0.0]))
    4
    >>> buffer.sample()["a"].unique()
    tensor([2])
    """

    def __init__(self, alpha: float = 0.6, beta: float = 0.4, *, eps: float = 1e-8) -> None:
        for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is a finite number of 0 or more; got {value}")
        self.alpha, self.beta, self.eps = alpha, beta, eps

    def start(self, capacity: int) -> None:
        """Give all rows the priority zero."""
        super().start(capacity)
        self._largest, self._low = 1.0, 0
        #: A tree: priorities in groups of ``_FAN_OUT``, the sum and the least one of each group, and so on up to one number.
        self._sums = [torch.zeros(-(-capacity // _FAN_OUT) * _FAN_OUT, dtype=torch.float64)]
        while len(self._sums[-1]) > 1:
            count = len(self._sums[-1]) // _FAN_OUT
            size = count if count == 1 else -(-count // _FAN_OUT) * _FAN_OUT
            self._sums.append(torch.zeros(size, dtype=torch.float64))
        self._least = [torch.full_like(sums, torch.inf) for sums in self._sums[1:]]

    def add(self, first: int, stop: int, values: Tensor | None) -> None:
        """Give rows that were written the largest priority."""
        super().add(first, stop, values)
        places = torch.arange(max(first, stop - self.capacity), stop) % self.capacity
        self._write(places, self._raise(torch.tensor(self._largest, dtype=torch.float64)))

    def _raise(self, priority: Tensor) -> Tensor:
        return (priority + self.eps) ** self.alpha if self.alpha else torch.ones_like(priority)

    def _write(self, places: Tensor, values: Tensor) -> None:
        """Set priorities; of several for one place, the largest counts."""
        self._sums[0][places] = 0
        self._sums[0].scatter_reduce_(0, places, values.expand(places.shape), "amax")
        for level, least in enumerate(self._least):
            places = places >> _SHIFT
            below = self._sums[level].view(-1, _FAN_OUT)
            smallest = self._least[level - 1].view(-1, _FAN_OUT) if level else below
            is_whole = len(below) <= len(places)
            if not is_whole:
                below = below.index_select(0, places)
                smallest = smallest.index_select(0, places) if level else below
            lowest = smallest.amin(1)
            if not level and bool((zero := lowest <= 0).any()):
                lowest[zero] = below[zero].masked_fill(below[zero] <= 0, torch.inf).amin(1)
            target: Any = slice(0, len(below)) if is_whole else places
            self._sums[level + 1][target] = below.sum(1)
            least[target] = lowest

    def draw(self, low: int, high: int, count: int, generator: torch.Generator) -> Drawn:
        """Return the numbers of rows that were drawn, and their weights."""
        if low > self._low:  # rows that are not valid, and not yet written again
            places = torch.arange(max(self._low, high - self.capacity), low) % self.capacity
            self._low = low
            self._write(places, torch.zeros((), dtype=torch.float64))
        total = float(self._sums[-1])
        if total <= 0:
            return super().draw(low, high, count, generator)[0], {"priority_weight": torch.ones(count)}
        places = self._find(torch.rand(count, dtype=torch.float64, generator=generator) * total)
        weight = (self._sums[0][places] / self._least[-1]) ** -self.beta
        numbers = places + (high - 1 - places) // self.capacity * self.capacity
        return numbers, {"priority_weight": weight.float()}

    def _find(self, target: Tensor) -> Tensor:
        """Return the places that ``searchsorted`` finds in the cumulative sums of the priorities."""
        node = torch.zeros(len(target), dtype=torch.int64)
        for sums in reversed(self._sums[:-1]):
            below = sums.view(-1, _FAN_OUT).index_select(0, node)
            ends = below.cumsum(1)
            child = torch.searchsorted(ends, target[:, None], right=True)
            if int(child.max()) == _FAN_OUT:
                # A sum that was rounded up has no child: take the last one that has a priority.
                child = child.minimum(((below > 0) * torch.arange(_FAN_OUT)).amax(1, True))
            target = target - (ends.gather(1, child) - below.gather(1, child)).flatten()
            node = node * _FAN_OUT + child.flatten()
        return node

    def update(self, numbers: Tensor, priority: Tensor, low: int, high: int) -> int:
        """Set priorities; of several for one row, the largest counts."""
        wrong = ~(priority.isfinite() & (priority >= 0))
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            raise ValueError(
                f"priorities are finite and not negative; got {priority[place]} at position {place}"
            )
        held = (numbers >= low) & (numbers < high)
        if priority.numel():
            self._largest = max(self._largest, float(priority.max()))
        places = numbers[held] % self.capacity
        self._write(places, self._raise(priority[held]))
        return len(places)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the priorities, and the largest one."""
        largest = torch.tensor(self._largest, dtype=torch.float64)
        return {"priorities": self._sums[0][: self.capacity].clone(), "largest": largest}

    def load_state_dict(self, state: dict[str, Tensor], seen: int) -> None:
        """Take over priorities."""
        if len(state["priorities"]) != self.capacity:
            raise ValueError(
                f"the state is of {len(state['priorities'])} rows, the buffer has {self.capacity}"
            )
        self._write(torch.arange(self.capacity), state["priorities"])
        self._largest, self.seen = float(state["largest"]), seen


class SliceSampler(RingSampler):
    """Draw runs of rows within episodes, uniformly over all of them: batches have the batch size ``[n, slice_len]``.

    Args:
        slice_len: rows of a slice.
        traj_key: key whose value changes where an episode begins.
        end_key: key that is True in the last row of an episode.
        pad: also draw slices that reach beyond the end of their episode, filled with its last row.
        pad_key: key that is then True where a row is filled in.

    >>> from td_data import ReplayBuffer, SliceSampler
    >>> buffer = ReplayBuffer(100, sampler=SliceSampler(3, traj_key="episode"), batch_size=2)
    >>> _ = buffer.extend(TensorDict({"episode": torch.tensor([0, 0, 1, 1, 1])}, [5]))
    >>> buffer.sample()["index"]
    tensor([[2, 3, 4],
            [2, 3, 4]])
    """

    def __init__(
        self,
        slice_len: int,
        *,
        traj_key: NestedKey | None = None,
        end_key: NestedKey | None = None,
        pad: bool = False,
        pad_key: NestedKey = "is_pad",
    ) -> None:
        if (traj_key is None) == (end_key is None):
            raise ValueError("episodes come from exactly one of traj_key and end_key")
        self.slice_len, self._pad, self._pad_key = check_count(slice_len, "slice_len"), pad, pad_key
        self._is_end, self.key = end_key is not None, traj_key if end_key is None else end_key
        self._steps = torch.arange(slice_len)

    def start(self, capacity: int) -> None:
        """Forget all episodes."""
        super().start(capacity)
        #: The number of the first row of each episode, how many slices begin before it, and their difference.
        self._begins = torch.zeros(3, 64, dtype=torch.int64)
        #: The first two for the oldest episode and for the last one, which is still open.
        self._oldest = self._open = (0, 0)
        self._count = 0
        self._before: Tensor | None = None

    def add(self, first: int, stop: int, values: Tensor | None) -> None:
        """Find the episodes of rows that were written."""
        assert values is not None
        if first > self.seen or not self._count:
            self._before, self._count = None, 0
            self._append(torch.tensor([first]))
        self._append(find_episode_ends(values, self._is_end, self._before) + first)
        self._before, self.seen = values[-1:].clone(), stop

    def _append(self, begins: Tensor) -> None:
        last, count = self._count, self._count + len(begins)
        if count >= self._begins.shape[1]:
            self._begins = torch.cat([self._begins, torch.zeros(3, 2 * count, dtype=torch.int64)], 1)
        self._begins[0, last:count] = begins
        from_ = max(last - 1, 0)
        sizes = self._begins[0, from_:count].diff()
        slices = sizes if self._pad else (sizes - self.slice_len + 1).clamp(min=0)
        self._begins[1, from_ + 1 : count] = self._begins[1, from_] + slices.cumsum(0)
        self._begins[2, from_:count] = self._begins[0, from_:count] - self._begins[1, from_:count]
        self._count = count
        ends = self._begins[:2, [0, count - 1]].tolist()
        self._oldest, self._open = zip(*ends)

    def draw(self, low: int, high: int, count: int, generator: torch.Generator) -> Drawn:
        """Return the numbers of the rows of slices, in the time of a binary search."""
        begin, bottom = self._oldest
        if low > begin:
            bottom = self._find_bottom(low)
        begin, top = self._open
        top += high - begin if self._pad else max(high - begin - self.slice_len + 1, 0)
        if top <= bottom:
            raise ValueError(f"no episode in the buffer has {self.slice_len} rows yet: pad=True fills slices")
        slices = torch.randint(bottom, top, (count,), generator=generator)
        episode = torch.searchsorted(self._begins[1, : self._count], slices, right=True).sub_(1)
        rows = slices.add_(self._begins[2].index_select(0, episode))[:, None] + self._steps
        if not self._pad:
            return rows, {}
        self._begins[0, self._count] = high
        last = self._begins[0, episode + 1][:, None] - 1
        return rows.minimum(last), {self._pad_key: rows > last}

    def _find_bottom(self, low: int) -> int:
        """Return how many slices begin before a row; forget episodes that are older, when they are many."""
        oldest = int(torch.searchsorted(self._begins[0, : self._count], low, right=True)) - 1
        if oldest > 1024 and 2 * oldest > self._count:
            self._begins, self._count = self._begins[:, oldest:].clone(), self._count - oldest
            oldest = 0
        begin, before = self._oldest = int(self._begins[0, oldest]), int(self._begins[1, oldest])
        bottom = before + low - begin
        return min(bottom, int(self._begins[1, oldest + 1])) if oldest + 1 < self._count else bottom
