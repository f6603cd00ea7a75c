"""Orders of rows as pure functions: seeds that are mixed, permutations without memory, and pages of positions."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Union

import torch
from torch import Tensor

#: Version of the algorithms of this file: a change gives other orders, and so a new number.
VERSION = 1
#: How many positions are computed at a time.
PAGE = 1 << 16
_ROUNDS = 8
_MASK = (1 << 64) - 1
#: Multipliers of 31 bits: their product with a number of 31 bits fits into an int64.
_FIRST, _SECOND = 0x2C1B3C6D, 0x297A2D39

Order = Callable[[int, int], Tensor]
"""Function that returns the positions of the rows from ``start`` to ``stop`` of an epoch."""

Keys = Sequence[Union[int, Tensor]]  # noqa: UP007


def mix(seed: int, *parts: int | str) -> int:
    """Mix numbers and names of uses into a seed of 63 bits, with the function splitmix64."""
    state = seed & _MASK
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        state = (_splitmix(state) ^ (number & _MASK)) & _MASK
    return _splitmix(state) >> 1


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def make_generator(seed: int) -> torch.Generator:
    """Return a generator of the CPU with a seed."""
    return torch.Generator().manual_seed(seed)


def make_keys(seed: int) -> list[int]:
    """Return the keys of the rounds of a permutation."""
    return [mix(seed, i) & 0x7FFFFFFF for i in range(_ROUNDS)]


def make_keys_of_passes(seed: int, passes: Tensor) -> list[Tensor]:
    """Return the keys of a permutation for each pass through the same rows, one for each element of ``passes``."""
    return [_hash(_hash(passes & 0x7FFFFFFF, key), key ^ 0x5BD1E995) for key in make_keys(seed)]


def permute(index: Tensor, count: int, keys: Keys) -> Tensor:
    """Map positions below ``count`` one to one to others, by a balanced Feistel network."""
    half = max(((count - 1).bit_length() + 1) // 2, 1)
    result = _apply_rounds(index, half, keys)
    todo = (result >= count).nonzero().flatten()
    while len(todo):
        keys_left = [key[todo] if isinstance(key, Tensor) else key for key in keys]
        result[todo] = again = _apply_rounds(result[todo], half, keys_left)
        todo = todo[again >= count]
    return result


def _apply_rounds(index: Tensor, half: int, keys: Keys) -> Tensor:
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for key in keys:
        left, right = right, left ^ (_hash(right, key) & mask)
    return (left << half) | right


def _hash(value: Tensor, key: int | Tensor) -> Tensor:
    """Mix a number of 31 bits with a key of 31 bits."""
    mixed = ((value + key) & 0x7FFFFFFF).mul_(_FIRST)
    mixed.bitwise_xor_(mixed >> 29).bitwise_and_(0x7FFFFFFF).mul_(_SECOND)
    return mixed.bitwise_xor_(mixed >> 31).bitwise_and_(0x7FFFFFFF)


class PagedOrder:
    """Order that computes pages of positions, and keeps the one that was used last."""

    def __init__(self, compute: Order, length: int, page: int = PAGE) -> None:
        self.compute, self.length, self.page = compute, length, page
        self.held: tuple[int, Tensor] | None = None

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the positions from ``start`` to ``stop``."""
        first, last = start // self.page, (max(stop, start + 1) - 1) // self.page
        if first == last:
            return self._get(first)[start - first * self.page : stop - first * self.page].clone()
        parts = [self._get(number) for number in range(first, last + 1)]
        return torch.cat(parts)[start - first * self.page : stop - first * self.page]

    def _get(self, number: int) -> Tensor:
        held = self.held
        if held is None or held[0] != number:
            start = number * self.page
            held = self.held = number, self.compute(start, min(start + self.page, self.length))
        return held[1]


class Draws:
    """Draw categories by weight, in float64: any number of them, and never one of weight zero."""

    def __init__(self, weights: object, what: str = "weights") -> None:
        self.weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu").flatten()
        check = self.weights.isfinite() & (self.weights >= 0)
        if not bool(check.all()):
            place = int((~check).nonzero()[0])
            raise ValueError(
                f"{what} are finite and not negative; got {float(self.weights[place])} at position {place}"
            )
        if not bool((self.weights > 0).any()):
            raise ValueError(f"{what}: one of them must be above zero; got {len(self.weights)} weights")

    @cached_property
    def sums(self) -> Tensor:
        """The sums of the weights up to and including each one."""
        return self.weights.cumsum(0)

    def find(self, uniform: Tensor) -> Tensor:
        """Return the category of each number from 0 up to 1."""
        found = torch.searchsorted(self.sums, uniform * self.sums[-1], right=True)
        # A product that is rounded up to the total has no category: take the last one that has a weight.
        return found.clamp_(max=int(self.weights.nonzero()[-1]))

    def get_checksum(self) -> int:
        """Return a number that differs for other weights."""
        return zlib.crc32(self.weights.contiguous().numpy().tobytes())


def draw_uniform(seed: int, count: int) -> Tensor:
    """Return numbers of float64 from 0 up to 1."""
    return torch.rand(count, dtype=torch.float64, generator=make_generator(seed))
