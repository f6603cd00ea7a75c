"""Register the plugin if it is not installed, and fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import td_core
from td_core import TensorDict
from td_core.testing import installed
from td_hdf5 import plugin


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    if any(record.id == "hdf5" for record in td_core.plugins()):
        yield
        return
    with installed(plugin, id="hdf5", distribution="td-hdf5"):
        yield


def assert_same(found: Any, wanted: Any, where: str = "root") -> None:
    """Check that two collections have equal kinds, keys in order, batch sizes, names, dtypes and bytes."""
    if isinstance(wanted, Tensor):
        assert (found.dtype, found.shape, found.is_nested) == (
            wanted.dtype,
            wanted.shape,
            wanted.is_nested,
        ), where
        for one, other in (
            zip(found.unbind(), wanted.unbind(), strict=True) if wanted.is_nested else [(found, wanted)]
        ):
            assert read_bytes(one) == read_bytes(other), where
        return
    kinds = {type(found), type(wanted)} - {TensorDict}
    assert len(kinds) < 2, f"{where}: {kinds}"
    assert (found.batch_size, list(found.names)) == (wanted.batch_size, list(wanted.names)), where
    if hasattr(wanted, "tensordicts"):
        assert found.stack_dim == wanted.stack_dim, where
        for i, (one, other) in enumerate(zip(found.tensordicts, wanted.tensordicts, strict=True)):
            assert_same(one, other, f"{where}/{i}")
        return
    assert list(found.keys()) == list(wanted.keys()), where
    for key in wanted.keys():
        assert_same(found.get(key), wanted.get(key), f"{where}/{key!r}")


def read_bytes(leaf: Tensor) -> bytes:
    """Return the elements of a dense tensor as bytes, for dtypes that torch cannot compare."""
    leaf = leaf.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    flat = leaf.reshape(-1)
    return flat.clone().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def same() -> Callable[..., None]:
    """Return the function that asserts that two collections are equal."""
    return assert_same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file that does not exist yet, alone in its directory."""
    return tmp_path / "data.h5"


@pytest.fixture
def td() -> TensorDict:
    """Return a small collection with two levels, and leaves of two dtypes."""
    return TensorDict(
        {"a": torch.arange(12.0).view(4, 3), "n": {"b": torch.arange(4), "c": torch.ones(4, 2)}},
        batch_size=[4],
    )
