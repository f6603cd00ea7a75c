"""The example of a store in an SQLite file passes the suite of stores, and all formats work on it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict

ObjectStoreTests: Any = pytest.importorskip("td_store.testing").ObjectStoreTests

PROGRAM = Path(__file__).parents[1] / "examples" / "sqlite_store.py"
pytestmark = pytest.mark.once


@pytest.fixture(scope="module", name="module")
def load_module() -> Any:
    """Return the example as a module that pickles find."""
    spec = importlib.util.spec_from_file_location("sqlite_store", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sqlite_store"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sqlite_store"]


class TestSqliteStore(ObjectStoreTests):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def prepare(self, tmp_path: Path, module: Any) -> None:
        self.path, self.module = tmp_path / "objects.sqlite", module

    def make(self, contents: Mapping[str, bytes]) -> Any:
        store = self.module.SqliteStore(str(self.path), "some/folder")
        self.module.SqliteStore(str(self.path)).write("some/other", [b"beside"])
        for name, content in contents.items():
            store.write(name, [content])
        return store


def test_store_has_at_most_sixty_lines() -> None:
    lines = PROGRAM.read_text().splitlines()
    begin, end = lines.index("class SqliteStore:"), lines.index("def main() -> None:")
    assert sum(1 for line in lines[begin:end] if line.strip()) <= 60


@pytest.mark.parametrize(
    ("package", "name", "options"),
    [
        ("td_safetensors", "safetensors", {}),
        ("td_safetensors", "safetensors", {"max_shard_size": 100}),
        ("td_memmap", "memmap", {}),
        ("td_memmap", "memmap", {"archive": True}),
        ("td_hdf5", "hdf5", {}),
        ("td_zarr", "zarr", {"chunks": 2}),
        ("td_arrow", "parquet", {"row_group_size": 4}),
        ("td_arrow", "parquet", {"max_rows_per_file": 4}),
        ("td_arrow", "arrow", {}),
        ("td_arrow", "arrow", {"batch_rows": 4}),
    ],
    ids=str,
)
def test_every_format_works_on_store(
    package: str, name: str, options: Any, module: Any, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    data = TensorDict({"a": torch.arange(12.0).view(6, 2), "n": {"b": torch.arange(6)}}, [6])
    store = module.SqliteStore(str(tmp_path / "objects.sqlite"), "data")
    td_core.save(data, store, format=name, **options)
    assert (td_core.load(store) == data).all()
    assert (td_core.open(store)[[4, 1]] == data[[4, 1]]).all()
    assert td_core.inspect(store).nbytes == data.bytes()
    assert td_core.verify(store).ok


def test_example_prints_rows_of_each_format() -> None:
    for package in ("td_safetensors", "td_memmap", "td_hdf5", "td_zarr", "td_arrow"):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        f"{name} [4, 1]" for name in ("safetensors", "memmap", "hdf5", "zarr", "parquet", "arrow")
    ]
