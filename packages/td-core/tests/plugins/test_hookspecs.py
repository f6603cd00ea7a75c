"""The hooks of a plugin: their number, signatures and descriptions, and which functions are calls of them."""

from __future__ import annotations

import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

import pluggy
import pytest

from td_core.plugins import hookspecs

HOOKS = {
    "td_node_kinds": "Iterable[NodeKind]",
    "td_methods": "type | Mapping[str, object]",
    "td_serializers": "Iterable[Serializer | LeafSerializer]",
    "td_coercers": "Iterable[Coercer]",
    "td_stores": "Mapping[str, StoreFactory]",
}


def test_hookspecs_has_documented_hooks() -> None:
    functions = {
        name: value
        for name, value in vars(hookspecs).items()
        if inspect.isfunction(value) and value.__module__ == hookspecs.__name__
    }
    assert set(functions) == set(HOOKS)
    for name, function in functions.items():
        assert function.__annotations__["return"], name
        assert len(function.__doc__ or "") > 200, name


@pytest.fixture
def manager() -> pluggy.PluginManager:
    made = pluggy.PluginManager("td")
    made.add_hookspecs(hookspecs)
    return made


@pytest.mark.parametrize("name", HOOKS)
def test_hook_takes_nothing_and_returns_declared_type(name: str, manager: pluggy.PluginManager) -> None:
    function: FunctionType = getattr(hookspecs, name)
    assert (list(inspect.signature(function).parameters), function.__annotations__["return"]) == (
        [],
        HOOKS[name],
    )
    with pytest.raises(NotImplementedError):
        function()
    spec = getattr(manager.hook, name).spec
    assert (spec.argnames, spec.opts["firstresult"], spec.opts["historic"]) == ((), False, False)


@pytest.mark.parametrize("name", HOOKS)
def test_hookimpl_marks_function_as_implementation(name: str, manager: pluggy.PluginManager) -> None:
    def marked() -> Any:
        return "marked"

    def plain() -> Any:
        return "plain"

    manager.register(SimpleNamespace(**{name: hookspecs.hookimpl(marked)}))
    manager.register(SimpleNamespace(**{name: plain}))
    assert getattr(manager.hook, name)() == ["marked"]
