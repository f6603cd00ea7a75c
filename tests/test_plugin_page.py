"""The documentation pages on plugins: signatures are exact, and the examples pass the conformance suites."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils import _pytree as pytree

from td_core import NodeKind, TensorDict, decode, encode, hookimpl
from td_core.plugins import hookspecs
from td_core.testing import CollectionTests, SerializerTests, SourceTests, installed

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    name: (DOCS / name).read_text(encoding="utf-8")
    for name in ("plugins.md", "plugins_stores.md", "reference/hooks.md")
}


def test_page_contains_signature_of_every_hook():
    hooks = {
        f"{name}{str(inspect.signature(hook)).replace(chr(39), '')}"
        for name, hook in vars(hookspecs).items()
        if name.startswith("td_")
    }
    assert set(re.findall(r"^td_\w+\(.*$", PAGES["reference/hooks.md"], re.MULTILINE)) == hooks


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Run the examples of the pages, compare their output, and return the names that they define."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    names: dict[str, Any] = {}
    for name, text in PAGES.items():
        test = doctest.DocTestParser().get_doctest(text, {"__name__": "page"}, name, None, 0)
        assert runner.run(test, clear_globs=False).failed == 0
        names.update(test.globs)
    return names


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


class TestTable(SourceTests):
    """The source of the page; its class has no module, so it cannot be pickled."""

    dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float64, torch.int64, torch.uint8]
    test_pickle_reads_and_writes = None  # type: ignore[assignment]
    test_other_process_reads_and_writes = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _use_page(self, page: dict[str, Any]) -> None:
        self.page = page

    def make(self, array: torch.Tensor, folder: Path) -> Any:
        if not array.ndim:
            pytest.skip("the table has one row for each row of the array")
        return self.page["create_table"](folder / "data.db", array)
