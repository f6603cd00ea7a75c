"""Register the plugin if it is not installed, and fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core.testing import assert_same, installed
from td_hdf5 import PersistentTensorDict, plugin


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    with installed(plugin, id="hdf5", distribution="td-hdf5", if_missing=True):
        yield


@pytest.fixture
def same() -> Callable[..., None]:
    """Return the function that asserts that two collections are equal."""

    def check(found: Any, wanted: Any) -> None:
        stored = isinstance(found, PersistentTensorDict)
        assert_same(found.clone() if stored else found, wanted)

    return check


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
