"""Register the plugin if it is not installed, and fixtures that several test files share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core.testing import assert_same, copy_at_os_calls, installed, kill_at_os_call, watch_os
from td_safetensors import _find_save, _write_save, plugin
from td_store import _temporary_files

#: The modules that write files.
MODULES = (_find_save, _temporary_files, _write_save)


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugins for the tests, unless their entry points are installed."""
    with installed(plugin, id="safetensors", distribution="td-safetensors", if_missing=True):
        yield


@pytest.fixture(scope="session")
def urls(registered: None) -> Iterator[None]:
    """Register the stores of URLs for a test; skip it without td-remote."""
    stores = pytest.importorskip("td_remote.plugin")
    with installed(stores, id="remote", distribution="td-remote", if_missing=True):
        yield


@pytest.fixture
def same() -> Callable[..., None]:
    """Return the function that asserts that two collections are equal."""

    def check(found: Any, wanted: Any) -> None:
        assert_same(found, wanted)
        if not isinstance(wanted, torch.Tensor):
            assert found.is_locked == wanted.is_locked

    return check


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file that does not exist yet, alone in its directory."""
    return tmp_path / "data.safetensors"


@pytest.fixture
def td() -> TensorDict:
    """Return a small collection with two levels, and leaves of two dtypes."""
    return TensorDict(
        {"a": torch.arange(12.0).view(4, 3), "n": {"b": torch.arange(4), "c": torch.ones(4, 2)}},
        batch_size=[4],
    )


def read_file_header(path: Path) -> dict[str, Any]:
    """Return the JSON header of a file."""
    content = path.read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


def edit_file_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the JSON header of a file after ``change`` edited it, or with what it returned."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.fixture(name="read_header")
def provide_read_header() -> Any:
    return read_file_header


@pytest.fixture(name="edit_header")
def provide_edit_header() -> Any:
    return edit_file_header


@pytest.fixture(name="kill_at_call")
def provide_kill_at_call() -> Any:
    """Return a function that kills a save before a file-system call of the package; False if it ended before."""
    return lambda number, work: kill_at_os_call(work, number, *MODULES)


@pytest.fixture(name="copy_at_calls")
def provide_copy_at_calls() -> Any:
    """Return a function that copies a folder before each file-system call of the package in a save."""
    return lambda work, folder, into: copy_at_os_calls(work, folder, into, *MODULES)


@pytest.fixture(name="watch_calls")
def provide_watch_calls() -> Any:
    """Return a function that calls another one before each file-system call of the package."""
    return lambda see, patch: watch_os(patch, see, *MODULES)
