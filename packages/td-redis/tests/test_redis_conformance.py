"""The suites of sources and of opened collections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from td_core import TensorDict
from td_core.typing import Source
from td_store.testing import OpenTests, SourceTests


def skip_processes(request: pytest.FixtureRequest, location: dict[str, Any]) -> None:
    """Skip a test whose pickle or process would need the server in this process."""
    if "client" in location and ("pickle" in request.node.name or "process" in request.node.name):
        pytest.skip("the server is in this process")


class TestRedisSource(SourceTests):
    is_shared = False

    @pytest.fixture(autouse=True)
    def find_server(self, request: pytest.FixtureRequest, location: dict[str, Any]) -> None:
        skip_processes(request, location)
        self.location = location
        self.is_shared = "port" in location  # type: ignore[misc]

    def make(self, array: Tensor, folder: Path) -> Source:
        source: Source = TensorDict({"a": array}).to_store(**self.location)["a"].source
        return source


class TestOpenStore(OpenTests):
    @pytest.fixture(autouse=True)
    def find_server(self, request: pytest.FixtureRequest, location: dict[str, Any]) -> None:
        skip_processes(request, location)
        self.location = location

    def open(self, data: TensorDict, folder: Path) -> Any:
        return data.to_store(**self.location)
