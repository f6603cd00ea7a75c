"""Fixtures of td-memmap, for tests that need td-tensorclass too."""

from __future__ import annotations

from importlib import util
from pathlib import Path

try:
    import td_memmap
    import td_tensorclass
except ModuleNotFoundError:
    collect_ignore_glob = ["test_*.py"]
else:
    __all__ = ["td_memmap", "td_tensorclass"]
    place = Path(__file__).parents[2] / "packages" / "td-memmap" / "tests" / "conftest.py"
    spec = util.spec_from_file_location("memmap_fixtures", place)
    assert spec is not None and spec.loader is not None
    fixtures = util.module_from_spec(spec)
    spec.loader.exec_module(fixtures)
    prefix = fixtures.prefix
    provide_list_files = fixtures.provide_list_files
    provide_edit_metadata = fixtures.provide_edit_metadata
    provide_run_in_child = fixtures.provide_run_in_child
    provide_kill_at_call = fixtures.provide_kill_at_call
