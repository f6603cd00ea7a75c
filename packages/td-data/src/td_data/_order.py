"""Orders of rows as pure functions: mixed seeds, permutations without memory, pages of positions, draws by weight."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
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


def check_count(value: int, name: str, least: int = 1) -> int:
    """Return an integer, or raise ValueError if it is below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is an integer of {least} or more; got {value!r}")
    return value


def check_seed(seed: int) -> int:
    """Return a seed, or raise TypeError if it is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is an integer; got {seed!r}")
    return seed


def as_positions(values: object, what: str, ndim: int | None = 1) -> Tensor:
    """Return integers as a tensor of int64 of the CPU, or raise TypeError for others."""
    try:
        found = torch.as_tensor(values).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} of int64; got {type(values).__name__}") from None
    found = found if found.numel() else found.long()
    if found.dtype != torch.int64 or ndim not in (None, found.ndim):
        raise TypeError(f"{what} of int64; got {tuple(found.shape)} of {found.dtype}")
    return found


def make_generator(seed: int) -> torch.Generator:
    """Return a generator of the CPU with a seed."""
    return torch.Generator().manual_seed(seed)


def draw_uniform(seed: int, count: int) -> Tensor:
    """Return numbers of float64 from 0 up to 1."""
    return torch.rand(count, dtype=torch.float64, generator=make_generator(seed))


def make_keys(seed: int) -> list[int]:
    """Return the keys of the rounds of a permutation."""
    return [mix(seed, i) & 0x7FFFFFFF for i in range(_ROUNDS)]


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


def permute_passes(numbers: Tensor, count: int, seed: int) -> Tensor:
    """Return row ``number % count`` of the permutation of pass ``number // count`` through the rows."""
    passes = numbers // count
    keys = [_hash(_hash(passes & 0x7FFFFFFF, key), key ^ 0x5BD1E995) for key in make_keys(seed)]
    return permute(numbers - passes * count, count, keys)


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
        pages = range(start // self.page, (max(stop, start + 1) - 1) // self.page + 1)
        parts = [self._get(n)[max(start - n * self.page, 0) : stop - n * self.page] for n in pages]
        return torch.cat(parts)

    def _get(self, number: int) -> Tensor:
        held = self.held
        if held is None or held[0] != number:
            start = number * self.page
            held = self.held = number, self.compute(start, min(start + self.page, self.length))
        return held[1]


class Draws:
    """Draws of categories by weight, in float64: any number of them, and never one of weight zero."""

    def __init__(self, weights: object) -> None:
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach().flatten()
        wrong = (~(values.isfinite() & (values >= 0))).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise ValueError(f"weights are finite and not negative; got {values[place]} at position {place}")
        #: The sums of the weights up to and including each one.
        self.sums = values.cumsum(0)
        if not len(values) or not 0 < self.sums[-1] < float("inf"):
            raise ValueError(
                f"weights: one of them must be above zero, and their sum finite; got {len(values)} weights"
            )
        self._last = int(values.nonzero()[-1])
        #: A number that differs for other weights.
        self.checksum = zlib.crc32(values.contiguous().numpy().tobytes())

    def find(self, uniform: Tensor) -> Tensor:
        """Return the category of each number from 0 up to 1."""
        found = torch.searchsorted(self.sums, uniform * self.sums[-1], right=True)
        # A product that is rounded up to the total has no category: take the last one that has a weight.
        return found.clamp_(max=self._last)
