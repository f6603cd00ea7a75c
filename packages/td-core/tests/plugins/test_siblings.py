"""The methods of siblings: what core declares, and what is attached to every collection and detached again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_core._kinds.checkpoint import Checkpoint
from td_core.errors import PluginError
from td_core.plugins.siblings import METHODS, PROTOCOLS, Placeholder, SiblingMethods, attach, detach

pytestmark = pytest.mark.usefixtures("no_sibling")


def test_sibling_methods_are_all_placeholders() -> None:
    public = {
        name: value
        for cls in SiblingMethods.__mro__[:-1]
        for name, value in vars(cls).items()
        if not name.startswith("_")
    }
    assert all(isinstance(value, Placeholder) for value in public.values())
    assert public.keys() == METHODS.keys()


def shine(self: TensorDict, times: int = 1) -> str:
    return "*" * times


def name_class(cls: type) -> str:
    return cls.__name__


@pytest.fixture
def attached() -> Iterator[list[str]]:
    """Return a list of names, whose members are detached after the test."""
    names: list[str] = []
    yield names
    for name in names:
        detach(name)


@pytest.mark.parametrize(
    ("member", "use", "expected"),
    [
        (shine, lambda td: td.shine(times=2), "**"),
        (classmethod(name_class), lambda td: td.shine(), "TensorDict"),
        (staticmethod(lambda: 3), lambda td: td.shine(), 3),
        (property(lambda self: self.batch_dims), lambda td: td.shine, 1),
    ],
    ids=["function", "classmethod", "staticmethod", "property"],
)
def test_attach_adds_member_to_every_collection(member: Any, use: Any, expected: Any) -> None:
    attach("shine", member, "td-other")
    assert use(TensorDict(batch_size=[2])) == expected
    detach("shine")
    assert not hasattr(TensorDict(), "shine")


@pytest.mark.parametrize(
    ("name", "member", "message"),
    [
        ("_shine", shine, "the method name '_shine' is not a public Python identifier"),
        ("is", shine, "the method name 'is' is not a public Python identifier"),
        ("shine", "text", "the method 'shine' is a str; it must be a function, classmethod, staticmethod or property"),
        ("stack_dim", shine, "the method name 'stack_dim' would shadow LazyStackedTensorDict.stack_dim"),
        ("memmap", shine, "the method 'memmap' is declared for the package 'td-memmap' alone"),
        ("__len__", shine, "the method name '__len__' is not a public Python identifier"),
        ("__arrow_c_stream__", shine, "the method '__arrow_c_stream__' is declared for the package 'td-arrow' alone"),
    ],
)  # fmt: skip
def test_attach_refused_member_raises(name: str, member: Any, message: str) -> None:
    with pytest.raises(PluginError, match=f"^{message}$"):
        attach(name, member, "td-other")
    assert name not in vars(SiblingMethods)


def is_consolidated(td: TensorDict) -> bool:
    return True


def test_attach_declared_method_twice_raises(attached: list[str]) -> None:
    attach("is_consolidated", is_consolidated, "td-distributed")  # the name of the first parameter is free
    attached.append("is_consolidated")
    with pytest.raises(PluginError, match="^the method 'is_consolidated' is already provided$"):
        attach("is_consolidated", is_consolidated, "td-distributed")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_method_of_protocol_exists_with_its_package_alone(name: str, attached: list[str]) -> None:
    kinds = [
        TensorDict({"a": 1}),
        TensorDictParams(TensorDict({"a": 1.0})),
        lazy_stack([TensorDict({"a": 1})]),
        Checkpoint(TensorDict({"a": 1}), None),
    ]
    for kind in kinds:
        assert not hasattr(kind, name)
        assert name not in dir(kind)
        assert inspect.getattr_static(kind, name, None) is None
    attach(name, shine, PROTOCOLS[name])
    attached.append(name)
    assert [getattr(kind, name)(3) for kind in kinds] == ["***"] * len(kinds)
