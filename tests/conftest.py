"""What the tests that cross packages know about the installation."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import pytest

MODULES = {
    "td-core": "td_core",
    "td-memmap": "td_memmap",
    "td-tensorclass": "td_tensorclass",
    "td-distributed": "td_distributed",
    "td-nn": "td_nn",
    "td-all": "td",
}


def is_installed(name: str) -> bool:
    """Return whether a distribution is installed."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="session")
def installed() -> set[str]:
    """Return the distributions of the project that are installed."""
    return {name for name in MODULES if is_installed(name)}


@pytest.fixture(params=MODULES)
def present(request: pytest.FixtureRequest) -> str:
    """Return the import name of each package in turn; the test is skipped for those not installed."""
    if not is_installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return MODULES[request.param]


@pytest.fixture
def without(request: pytest.FixtureRequest) -> str:
    """Return a distribution named by the test's parameters; the test is skipped where it is installed."""
    if is_installed(request.param):
        pytest.skip(f"{request.param} is installed")
    return str(request.param)
