"""Fixtures that run the same code with td and with tensordict and compare the results."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tensordict
except ModuleNotFoundError:
    collect_ignore_glob = ["test_*.py"]

#: Errors that tensordict raises by accident; td may raise any error instead.
ACCIDENTS = (AttributeError, TypeError, AssertionError, NotImplementedError, NameError)


class Failure:
    """An error that a call raised, used as its result."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"{type(self.error).__name__}: {str(self.error)[:300]}"


def attempt(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the error it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return Failure(error)


def builtins_of(error: Exception) -> tuple[type[BaseException], ...]:
    """Return the built-in classes with which a user can catch an error."""
    bases = [cls for cls in type(error).__mro__ if cls.__module__ == "builtins"]
    return tuple(bases[: bases.index(Exception)])


def is_collection(x: Any) -> bool:
    return hasattr(x, "batch_size") and hasattr(x, "keys") and not isinstance(x, type)


def is_non_tensor(x: Any) -> bool:
    return type(x).__name__ in ("NonTensorData", "NonTensorStack", "MetaData")


def same_tensors(ours: torch.Tensor, theirs: torch.Tensor, path: str) -> None:
    assert isinstance(ours, torch.Tensor), f"{path}: {ours!r} is not a tensor, {theirs!r} is"
    assert ours.is_nested == theirs.is_nested, path
    if theirs.is_nested:
        for i, (one, other) in enumerate(zip(ours.unbind(), theirs.unbind(), strict=True)):
            same_tensors(one, other, f"{path}[{i}]")
        return
    facts = [(t.dtype, tuple(t.shape), t.device, type(t).__name__, t.requires_grad) for t in (ours, theirs)]
    assert facts[0] == facts[1], path
    if theirs.device.type != "meta" and not theirs.is_quantized:
        torch.testing.assert_close(
            ours.detach(), theirs.detach(), equal_nan=True, msg=f"{path}: {ours} {theirs}"
        )


def same_collections(ours: Any, theirs: Any, path: str, exact: bool) -> None:
    kinds = type(ours).__name__, type(theirs).__name__
    assert kinds[0] == kinds[1] or not exact, f"{path}: kinds {kinds}"
    assert ours.batch_size == theirs.batch_size, f"{path}.batch_size"
    if is_non_tensor(theirs):
        assert attempt(ours.tolist) == attempt(theirs.tolist), path
        return
    assert str(ours.device) == str(theirs.device), f"{path}.device"
    for mine, other in zip(ours.names, theirs.names, strict=True):
        # tensordict loses or moves some dim names; random programs do not test them.
        assert mine == other or (None in (mine, other) and not exact), (
            f"{path}.names {ours.names} {theirs.names}"
        )
    stacked = kinds[0] == kinds[1] and hasattr(theirs, "tensordicts")
    if stacked and (exact or ours.stack_dim == theirs.stack_dim):
        assert ours.stack_dim == theirs.stack_dim, f"{path}.stack_dim"
        assert len(ours.tensordicts) == len(theirs.tensordicts), path
        for i, (one, other) in enumerate(zip(ours.tensordicts, theirs.tensordicts, strict=True)):
            same(one, other, f"{path}[{i}]", exact)
        return
    keys = [list(x.keys()) for x in (ours, theirs)]
    assert keys[0] == keys[1] if exact else sorted(keys[0]) == sorted(keys[1]), f"{path}: keys {keys}"
    for key in keys[1]:
        same(ours.get(key), theirs.get(key), f"{path}[{key!r}]", exact)


def same(ours: Any, theirs: Any, path: str = "result", exact: bool = True) -> None:
    """Fail unless two results have equal types, shapes, names, keys and values; ``path`` locates them in messages.

    ``exact`` also requires the same kinds of collections and the same order of keys.
    """
    if isinstance(theirs, Failure):
        accident = isinstance(theirs.error, ACCIDENTS)
        if accident and not exact:
            return
        assert isinstance(ours, Failure), f"{path}: {ours!r}, the reference raises {theirs!r}"
        assert accident or isinstance(ours.error, builtins_of(theirs.error)), f"{ours!r}, not {theirs!r}"
        return
    assert not isinstance(ours, Failure), f"{path}: {ours!r}, the reference gives {theirs!r}"
    if isinstance(theirs, torch.Tensor):
        same_tensors(ours, theirs, path)
    elif is_collection(theirs):
        same_collections(ours, theirs, path, exact)
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray)
        assert ours.dtype == theirs.dtype
        assert (ours == theirs).all(), path
    elif isinstance(theirs, float):
        assert ours == theirs or math.isnan(ours) == math.isnan(theirs), path
    elif isinstance(theirs, type):
        assert ours.__name__ == theirs.__name__, path
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs), path
        for key in theirs:
            same(ours[key], theirs[key], f"{path}[{key!r}]", exact)
        same(getattr(ours, "_metadata", None), getattr(theirs, "_metadata", None), f"{path}._metadata", exact)
    elif isinstance(theirs, str | bytes | torch.Size) or theirs is None:
        assert type(ours) is type(theirs), f"{path}: {ours!r} {theirs!r}"
        assert ours == theirs, path
    elif hasattr(theirs, "__iter__"):
        if isinstance(theirs, list | tuple | set):
            assert type(ours).__name__ == type(theirs).__name__, path
        one, other = list(ours), list(theirs)
        assert len(one) == len(other), f"{path}: {one} {other}"
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}[{i}]", exact)
    elif type(theirs).__module__.startswith("tensordict"):
        assert type(ours).__name__ == type(theirs).__name__, path
    else:
        assert ours == theirs, path


@pytest.fixture(name="same", scope="session")
def _same() -> Callable[..., None]:
    return same


@pytest.fixture(name="attempt", scope="session")
def _attempt() -> Callable[[Callable[[], Any]], Any]:
    return attempt


@pytest.fixture(scope="session")
def libraries() -> tuple[Any, Any]:
    """Return the modules td and tensordict."""
    import td

    return td, tensordict


@pytest.fixture(scope="session")
def both(libraries: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    """Return (root module, module of neural networks) of td and of tensordict."""
    import tensordict.nn

    ours, theirs = libraries
    return [(ours, ours), (theirs, tensordict.nn)]
