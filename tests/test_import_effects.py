"""Importing the packages changes only the global state that the page ``docs/guide/imports.md`` lists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # starts interpreters, which take seconds

PAGE = Path(__file__).parents[1] / "docs/guide/imports.md"

#: Program that prints, for each table, the entries that importing the given modules adds, and everything else it changes.
READ = """
import copyreg, gc, importlib, json, sys, threading, warnings
from multiprocessing.reduction import ForkingPickler
from types import BuiltinFunctionType, FunctionType, ModuleType
import torch, torch._functorch.apis, torch.multiprocessing, torch.utils.data
from torch.utils.data._utils.collate import default_collate_fn_map

def names(items):
    items = (item[0] if isinstance(item, tuple) else item for item in items)
    return {getattr(item, "__qualname__", repr(item)) for item in items}

def tables():
    return {
        "torch.utils.data.default_collate": names(default_collate_fn_map),
        "torch.serialization.add_safe_globals": names(torch.serialization.get_safe_globals()),
        "multiprocessing.reduction.ForkingPickler": names(ForkingPickler._extra_reducers),
        "copyreg": names(copyreg.dispatch_table),
        "torch.utils._pytree": names(torch.utils._pytree.SUPPORTED_NODES),
    }

def settings():
    return [
        map(repr, warnings.filters), names(sys.meta_path), (thread.name for thread in threading.enumerate()), [gc.isenabled()],
        [torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.initial_seed()],
        torch.get_rng_state().tolist(),
    ]

def attributes():
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    kinds = FunctionType, BuiltinFunctionType, type
    return {
        (module.__name__, name): value
        for module in modules if module.__name__.partition(".")[0] in ("torch", "numpy", "builtins", "pickle", "copy")
        for name, value in vars(module).items() if isinstance(value, kinds)
    }

before, settings_before, attributes_before = tables(), json.dumps([*map(list, settings())], default=str), attributes()
for module in sys.argv[1:]:
    importlib.import_module(module)
after, attributes_after = tables(), attributes()
assert json.dumps([*map(list, settings())], default=str) == settings_before
assert all(before[name] <= after[name] for name in before)
added = {name: sorted(after[name] - before[name]) for name in before}
added["functions of torch.func"] = sorted({
    name for (module, name), value in attributes_before.items() if attributes_after.get((module, name)) is not value
})
print(json.dumps({"added": added, "modules": sorted(sys.modules)}))
"""

#: The packages of formats, and the libraries that they import when they are first used.
FORMATS = ("td_arrow", "td_hdf5", "td_redis", "td_safetensors", "td_zarr")
LIBRARIES = ("fsspec", "h5py", "pandas", "polars", "pyarrow", "redis", "safetensors", "tensorstore", "zarr")


def read_page() -> dict[str, list[str]]:
    """Return the table of the page: the entries of each row, by its first column."""
    rows = re.findall(r"^\| (.+?) \| (`.+?`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {table.replace("`", ""): sorted(re.findall(r"`(.+?)`", entries)) for table, entries in rows}


@pytest.mark.parametrize("package", ["td_core", "td_nn", "td"])
def test_import_adds_only_entries_of_page(package):
    pytest.importorskip(package)
    result = subprocess.run(
        [sys.executable, "-c", READ, package], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    page = read_page()
    found = json.loads(result.stdout)
    for table, names in found["added"].items():
        assert not {*names} - {*page[table]}, table
    if package == "td_core":
        loaded = {name for name in found["modules"] if name.partition(".")[0] in (*FORMATS, *LIBRARIES)}
        assert loaded <= {name for format in FORMATS for name in (format, f"{format}.plugin")}


def test_import_everything_adds_all_entries_of_page():
    for package in ("td_memmap", "td_tensorclass", "td_distributed"):
        pytest.importorskip(package)
    command = [sys.executable, "-c", READ, "td_core", "td_memmap._tensor", "td_memmap._anonymous"]
    assert json.loads(subprocess.check_output(command, text=True))["added"] == read_page()
