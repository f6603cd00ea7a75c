"""``import td`` provides every public name of the packages that it requires."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

import td

#: The packages that td-all requires; those of extras, which have a marker, and those with a name in td keep theirs to themselves.
PACKAGES = [
    wanted.name.replace("-", "_")
    for wanted in map(Requirement, requires("td-all"))
    if wanted.marker is None and wanted.name not in ("td-data", "td-remote")
]


@pytest.mark.parametrize("package", PACKAGES)
def test_td_has_every_public_name(package):
    module = import_module(package)
    missing = [name for name in module.__all__ if not hasattr(td, name)]
    assert missing == []


def test_module_in_td_is_the_package():
    assert td.data is import_module("td_data")
    assert td.remote is import_module("td_remote")


@pytest.mark.parametrize(("path", "name"), [("td.data", "Loader"), ("td.remote", "Remote")])
@pytest.mark.parametrize("before", ["", "import td; "])
def test_module_in_td_can_be_imported_from(path, name, before):
    package = path.replace(".", "_")
    code = f"{before}from {path} import {name}; import td, {package}; print({path} is {package}, {name} is {package}.{name})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_name_of_td_data_is_named_by_the_error():
    with pytest.raises(ImportError, match="cannot import name 'Loader' from 'td': it is in td_data"):
        from td import Loader  # noqa: F401


def test_name_in_two_packages_is_that_of_core():
    import td_core

    assert td.save is td_core.save and td.load is td_core.load


def test_getattr_unknown_name_raises():
    with pytest.raises(AttributeError, match="module 'td' has no attribute 'nope'"):
        td.nope  # noqa: B018


def test_import_td_does_not_import_memmap_tensors():
    loaded = "print('td_memmap._tensor' in sys.modules)"
    code = f"import td, sys; {loaded}; td.MemoryMappedTensor; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
