"""Fixtures and settings for the tests of every package and for those that cross packages."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from td_core import TensorDict

# A slow machine is no reason to fail.
settings.register_profile("td", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("td")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device under test: ``TD_TEST_DEVICE``, or the CPU."""
    return torch.device(os.environ.get("TD_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True, scope="session")
def names_in_examples(doctest_namespace: dict[str, Any]) -> None:
    """Let the examples in docstrings use the names that every program imports."""
    doctest_namespace.update(torch=torch, TensorDict=TensorDict)


@pytest.fixture(autouse=True)
def folder_of_an_example(request: pytest.FixtureRequest) -> None:
    """Let examples write files where they are: each runs in a folder of its own."""
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
