"""The documentation pages on plugins: every hook is documented, and the examples pass the conformance suites."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from td_core import TensorDict
from td_core.plugins import hookspecs
from td_core.spi import NodeKind, decode, encode, hookimpl
from td_core.testing import CollectionTests, SerializerTests, installed

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "plugins.md").read_text(encoding="utf-8")


def test_reference_has_docstring_of_every_hook():
    hooks = [name for name in vars(hookspecs) if name.startswith("td_")]
    text = (DOCS / "reference" / "hooks.md").read_text(encoding="utf-8")
    assert f"members: [{', '.join(hooks)}]" in text
    assert all(getattr(hookspecs, name).__doc__ for name in hooks)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Run the examples of the page, compare their output, and return the names that they define."""
    pytest.importorskip("td_store")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    test = doctest.DocTestParser().get_doctest(PAGE, {"__name__": "page"}, "plugins.md", None, 0)
    assert runner.run(test, clear_globs=False).failed == 0
    return test.globs


def test_tree_spec_of_kind_contains_its_state(page: dict[str, Any]):
    def quantity(unit: str, size: int) -> TensorDict:
        data = page["Quantity"]({"data": torch.ones(size)}, unit, [size])
        return TensorDict({"x": data}, batch_size=[size])

    with installed(page["Units"]()):
        total = pytree.tree_map(torch.add, quantity("m", 3), quantity("m", 3))
        assert (total["x"].unit, total["x"]["data"].tolist()) == ("m", [2.0, 2.0, 2.0])
        assert pytree.tree_structure(quantity("m", 3)) == pytree.tree_structure(quantity("m", 4))
        assert pytree.tree_structure(quantity("m", 3)) != pytree.tree_structure(quantity("kg", 3))


def test_subclass_of_kind_is_pytree_at_any_time_of_definition(page: dict[str, Any]):
    class Base(page["Quantity"]):  # not Quantity itself: torch cannot unregister a pytree class
        pass

    class Early(Base):
        pass

    kind = next(iter(page["Units"]().td_node_kinds()))

    class Plugin:
        @hookimpl
        def td_node_kinds(self) -> list[NodeKind]:
            return [replace(kind, tag="page.Base", type=Base)]

    with installed(Plugin()):

        class Late(Base):
            pass

        for cls in (Base, Early, Late):
            node = cls({"data": torch.ones(3)}, "m", [3])
            assert len(pytree.tree_leaves(node)) == 1
            doubled = pytree.tree_map(lambda leaf: leaf * 2, node)
            assert (type(doubled), doubled.unit, doubled["data"].tolist()) == (cls, "m", [2, 2, 2])


def test_decode_subclass_of_kind_returns_subclass(page: dict[str, Any]):
    class Own(page["Quantity"]):
        pass

    with installed(page["Units"]()):
        again = decode(encode(Own({"data": torch.ones(3)}, "m", [3])))
        assert (type(again), again.unit) == (Own, "m")


@pytest.mark.once
class TestTheKindOfThePage(CollectionTests):
    @pytest.fixture(autouse=True)
    def registered(self, page: dict[str, Any]) -> Iterator[None]:
        type(self).make = lambda self: page["Quantity"]({"data": torch.randn(3, 2, 4)}, "m", [3, 2])
        with installed(page["Units"]()):
            yield


class TestTheSerializerOfThePage(SerializerTests):
    suffix = ".tdpt"

    @pytest.fixture(autouse=True)
    def registered(self, page: dict[str, Any]) -> Iterator[None]:
        type(self).serializer = lambda self: page["TorchFile"]()
        with installed(page["Plugin"]()):
            yield
