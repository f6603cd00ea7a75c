"""The registry of the functions that open the stores of URLs, and URLs in messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from td_core import MissingPluginError
from td_core._formats.object_locations import STORES
from td_core.spi import hookimpl
from td_core.testing import installed
from td_core.typing import ObjectLocation


class Plugin:
    """Opens the stores of two schemes."""

    @hookimpl
    def td_stores(self) -> Any:
        return {
            "test": lambda url, options: SimpleNamespace(where=url, options=options),
            "tests": lambda url, options: SimpleNamespace(where="other", options=options),
        }


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("test://bucket/x", "test://bucket/x"),
        ("TEST://bucket/x", "TEST://bucket/x"),
        ("tests://bucket/x", "other"),
        ("test::tests://bucket/x", "test::tests://bucket/x"),
    ],
)
def test_open_url_calls_function_of_its_scheme(url: str, where: str) -> None:
    with installed(Plugin()):
        store: Any = STORES.open(url, {"region": "x"})
    assert (store.where, store.options) == (where, {"region": "x"})


def test_open_url_of_unknown_scheme_names_the_known_ones() -> None:
    with installed(Plugin()), pytest.raises(MissingPluginError) as caught:
        STORES.open("nowhere://ann:secret@bucket/x?key=secret", {})
    message = str(caught.value)
    assert (
        "no installed package opens 'nowhere://***@bucket/x': none provides the scheme 'nowhere'" in message
    )
    assert "'test', 'tests'" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a.safetensors", "s3://bucket/a.safetensors"),
        ("https://ann@host/x", "https://***@host/x"),
        ("https://ann:a@b@host/x@y", "https://***@host/x@y"),
        ("https://host/x@y", "https://host/x@y"),
        ("https://host/x?token=1&a=u:p@h", "https://host/x"),
        ("filecache::s3://key:secret@bucket/x", "filecache::s3://***@bucket/x"),
        ("https://host?a\nb", "https://host"),
    ],
)
def test_hide_secrets_leaves_host_and_path(url: str, shown: str) -> None:
    assert ObjectLocation.hide_secrets(url) == shown
