"""The names that pickles of stored tensors refer to: those of today, and those before the package td-store."""

from __future__ import annotations

import os
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
import td_core.testing
from td_core import FormatError, pickles
from td_core.spi import hookimpl
from td_core.testing import installed
from td_core.typing import Range
from td_store import StoredTensor, store_pickles, testing
from td_store.testing import MemoryStore, RawFile


def list_names(content: bytes) -> set[str]:
    """Return the names in td_store that a pickle refers to."""
    strings: list[str] = []
    names = set()
    for code, argument, _ in pickletools.genops(content):
        if code.name == "STACK_GLOBAL":
            names.add(".".join(strings[-2:]))
        elif code.name == "GLOBAL":
            names.add(str(argument).replace(" ", "."))
        elif isinstance(argument, str):
            strings.append(argument)
    return {name for name in names if name.startswith("td_store")}


@pytest.mark.parametrize("name", store_pickles.__all__)
def test_name_is_pickled_as_one_of_this_module(name: str) -> None:
    value = getattr(store_pickles, name)
    content = pickle.dumps(value)
    assert list_names(content) == {f"td_store.store_pickles.{name}"}
    assert pickle.loads(content) is value


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (pickles, store_pickles, ["PrivateSource", "ReadOnlySource", "rebuild_stored_tensor"]),
        (td_core, sys.modules["td_store"], ["StoredTensor"]),
        (td_core.testing, testing, ["LoggedSource", "MemorySource", "RawFile"]),
    ],
    ids=["td_core.pickles", "td_core", "td_core.testing"],
)
def test_name_of_earlier_pickles_is_found(old: object, new: object, names: list[str]) -> None:
    for name in names:
        assert getattr(old, name) is getattr(new, name)


def test_name_in_td_core_without_td_store_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['td_store'] = None\n"
        "import td_core\n"
        "td_core.MissingPluginError.unavailable.clear()\n"
        "try: from td_core import StoredTensor\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TD_PLUGINS": "none"},
    )
    assert run.stdout.strip() == (
        "td_core.StoredTensor is in the package 'td-store', which is not installed: "
        "pip install ./packages/td-store in a checkout of td"
    )


def test_pickle_of_stored_tensor_names_this_module(tmp_path: Path) -> None:
    leaf = StoredTensor(RawFile.create(tmp_path / "a.bin", torch.arange(3.0)))
    content = pickle.dumps(leaf)
    assert "td_store.store_pickles.rebuild_stored_tensor" in list_names(content)
    assert pickle.loads(content)[:].tolist() == [0, 1, 2]


@pytest.mark.once
def test_import_loads_no_stored_tensors() -> None:
    code = (
        "import sys; import td_core.pickles as p; assert 'td_store._stored_tensor' not in sys.modules; "
        "p.rebuild_stored_tensor; assert 'td_store._stored_tensor' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_store_of_earlier_pickle_opens_url_or_says_what_to_do() -> None:
    class Plugin:
        @hookimpl
        def td_stores(self) -> dict[str, Callable[..., Any]]:
            return {"shelf": lambda url, options: MemoryStore({"a": options["content"]}, url)}

    with installed(Plugin()):
        store = store_pickles.FsspecStore("shelf://x", {"content": b"12"})
        assert bytes(store.read([Range("a", 0)])[0]) == b"12"
        with pytest.raises(
            FormatError, match="does not contain the storage options 'content': open the save"
        ):
            store_pickles.FsspecStore("shelf://x", {}, ["content"])
