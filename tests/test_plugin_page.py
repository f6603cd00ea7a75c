"""The page about plugins: its hooks have their exact signatures, its serializer passes the tests that it tells of."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from td_core.plugins import hookspecs
from td_core.testing import SerializerTests, installed

PAGE = (Path(__file__).parent.parent / "docs" / "plugins.md").read_text(encoding="utf-8")


def test_every_hook_is_documented_with_its_exact_signature():
    hooks = {
        f"{name}{str(inspect.signature(hook)).replace(chr(39), '')}"
        for name, hook in vars(hookspecs).items()
        if name.startswith("td_")
    }
    assert set(re.findall(r"^td_\w+\(.*$", PAGE, re.MULTILINE)) == hooks


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Run the examples of the page as far as its first plugin, and return what they define."""
    space: dict[str, Any] = {}
    examples = iter(doctest.DocTestParser().get_examples(PAGE))
    while "Plugin" not in space:
        exec(compile(next(examples).source, "plugins.md", "exec"), space)
    return space


class TestTheSerializerOfThePage(SerializerTests):
    suffix = ".tdpt"

    @pytest.fixture(autouse=True)
    def registered(self, page: dict[str, Any]) -> Iterator[None]:
        type(self).serializer = lambda self: page["TorchFile"]()
        with installed(page["Plugin"]()):
            yield
