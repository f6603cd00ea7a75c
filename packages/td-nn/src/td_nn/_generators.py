"""Draw random numbers with a ``torch.Generator`` in functions that use the global random state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

DrawnT = TypeVar("DrawnT")


@contextmanager
def use_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Replace the global random state of a device by that of a generator, which advances.

    Has no effect if the generator is None or while ``torch.compile`` traces.

    Raises:
        RuntimeError: the global state of the generator's device cannot be set.
    """
    if generator is None or torch.compiler.is_compiling():
        yield
        return
    with _swap_state(generator):
        yield


def draw_with(generator: torch.Generator | None, draw: Callable[[], DrawnT]) -> DrawnT:
    """Call a function that draws, with a generator, or with the global random state if the generator is None."""
    if generator is None:
        return draw()
    # torch.compile breaks the graph here, because a graph does not read the state of a generator.
    with _swap_state(generator):
        return draw()


@contextmanager
def _swap_state(generator: torch.Generator) -> Iterator[None]:
    read, write = _find_state_functions(generator.device)
    before = read()
    write(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(read())
        write(before)


def _find_state_functions(device: torch.device) -> tuple[Any, Any]:
    """Return the functions that read and write the global random state of a device."""
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "set_rng_state"):
        raise RuntimeError(
            f"cannot draw with a generator on {device}: torch has no random state to set there"
        )
    if device.type == "mps":
        return module.get_rng_state, module.set_rng_state
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


def as_generator(value: object, key: object) -> tuple[torch.Generator, bool]:
    """Convert an entry of a collection to a generator, and return whether it is a seed; raise for anything else."""
    if isinstance(value, torch.Generator):
        return value, False
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"the seed of a generator is one integer; the tensor at {key!r} has shape {list(value.shape)}"
            )
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            raise TypeError(
                f"the seed of a generator is an integer; the tensor at {key!r} has dtype {value.dtype}"
            )
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.Generator().manual_seed(value), True
    raise TypeError(
        f"the entry {key!r} is a torch.Generator, or the integer that seeds one; got a {type(value).__name__}"
    )


def draw_seed(generator: torch.Generator, like: Any) -> Tensor | int:
    """Draw a seed: a tensor if ``like`` is a tensor, else an int. Seeds are those that tensordict draws."""
    most = torch.iinfo(like.dtype).max if isinstance(like, torch.Tensor) else 2**62
    seed = int(torch.randint(0, min(most, 2**62), (), generator=generator))
    return torch.full_like(like, seed) if isinstance(like, torch.Tensor) else seed
