"""Register the plugin if it is not installed, and fixtures that several test files share."""

from __future__ import annotations

import functools
import http.server
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core.testing import installed
from td_zarr import plugin

if importlib.util.find_spec("zarr") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugins for the tests, unless their entry points are installed."""
    with installed(plugin, id="zarr", distribution="td-zarr", if_missing=True):
        yield


@pytest.fixture(scope="session")
def urls(registered: None) -> Iterator[None]:
    """Register the stores of URLs for a test; skip it without td-remote."""
    stores = pytest.importorskip("td_remote.plugin")
    with installed(stores, id="remote", distribution="td-remote", if_missing=True):
        yield


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def handler() -> type[http.server.SimpleHTTPRequestHandler]:
    """Return the class that answers requests; a test file overrides it."""
    return QuietHandler


@pytest.fixture
def server(urls: None, handler: type[http.server.SimpleHTTPRequestHandler], tmp_path: Path) -> Iterator[str]:
    """Serve a directory, and return its URL."""
    answer = functools.partial(handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a group that does not exist yet, alone in its directory."""
    return tmp_path / "data.zarr"


@pytest.fixture
def td() -> TensorDict:
    """Return a small collection with two levels, and leaves of two dtypes."""
    return TensorDict(
        {"a": torch.arange(12.0).view(4, 3), "n": {"b": torch.arange(4), "c": torch.ones(4, 2)}},
        batch_size=[4],
    )


@pytest.fixture(params=["zarr-python", "tensorstore"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read and write with each of the libraries in turn."""
    name: str = request.param
    engines = importlib.import_module("td_zarr._array_engines")
    if name == "zarr-python":
        monkeypatch.setattr(engines, "tensorstore", None)
    elif engines.tensorstore is None:
        pytest.skip("tensorstore is not installed")
    return name
