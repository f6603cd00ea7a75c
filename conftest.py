"""Fixtures and settings for the tests of every package and for those that cross packages."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# A slow machine is no reason to fail.
settings.register_profile("td", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("td")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device under test: ``TD_TEST_DEVICE``, or the CPU."""
    return torch.device(os.environ.get("TD_TEST_DEVICE", "cpu"))
