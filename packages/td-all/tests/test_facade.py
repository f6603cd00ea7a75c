"""``import td`` gives every public name of the five packages."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import td

PACKAGES = ("td_core", "td_memmap", "td_tensorclass", "td_distributed", "td_nn")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package):
    module = import_module(package)
    missing = [name for name in module.__all__ if not hasattr(td, name)]
    assert missing == []


def test_core_wins_where_two_packages_have_one_name():
    import td_core

    assert td.save is td_core.save and td.load is td_core.load


def test_an_unknown_name_is_an_error():
    with pytest.raises(AttributeError, match="module 'td' has no attribute 'nope'"):
        td.nope  # noqa: B018


def test_importing_it_leaves_the_memory_mapped_tensors_alone_until_used():
    loaded = "print('td_memmap._tensor' in sys.modules)"
    code = f"import td, sys; {loaded}; td.MemoryMappedTensor; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
