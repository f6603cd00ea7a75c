"""Every name of the public surface is where ``surface.json`` says, with matching parameters.

Extra keyword-only parameters are welcome. A parameter may be left out where the docstring says so, naming it
in double backticks: then leaving it out is a documented decision and not an oversight.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SURFACE = json.loads((Path(__file__).parent / "surface.json").read_text())
P = inspect.Parameter
BY_KEYWORD = (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY)


class Name(NamedTuple):
    """One name of the surface."""

    package: str
    on: str
    name: str
    kind: str
    parameters: list[str] | None


def surface(*owners: str) -> list[Any]:
    """Return a test parameter for each name on ``owners``, or on a class where none is given."""
    found = []
    for group in SURFACE:
        on = group["on"]
        if on in owners if owners else on not in ("collection", "module"):
            for name, facts in group["names"].items():
                entry = Name(group["package"], on, name, facts["kind"], facts.get("parameters"))
                place = group["package"] if on in ("collection", "module") else on
                found.append(pytest.param(entry, id=f"{place}-{name}"))
    return found


def module_of(package: str) -> Any:
    """Import the module of a distribution; the test is skipped where it is not installed."""
    try:
        distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return import_module("td" if package == "td-all" else package.replace("-", "_"))


def kinds() -> list[type]:
    """Return every kind of collection of the installed packages."""
    core = import_module("td_core")
    found = [core.TensorCollection, core.TensorDict, core.LazyStackedTensorDict, core.TensorDictParams]
    try:
        tensorclass = import_module("td_tensorclass")
    except ModuleNotFoundError:
        return found
    sample = tensorclass.tensorclass(type("Sample", (), {"__annotations__": {"x": "torch.Tensor"}}))
    return [*found, tensorclass.NonTensorData, tensorclass.NonTensorStack, sample]


def function_of(found: Any) -> Callable[..., Any]:
    """Return the function behind a class attribute."""
    return getattr(found, "__func__", found)


def parsed(texts: list[str]) -> list[inspect.Parameter]:
    """Read the parameters of ``surface.json``, defaults as text."""
    read, kind = [], P.POSITIONAL_OR_KEYWORD
    for text in texts:
        name, has_default, default = text.partition("=")
        if name == "*":
            kind = P.KEYWORD_ONLY
        elif name.startswith("**"):
            read.append(P(name[2:], P.VAR_KEYWORD))
        elif name.startswith("*"):
            read.append(P(name[1:], P.VAR_POSITIONAL))
            kind = P.KEYWORD_ONLY
        else:
            read.append(P(name, kind, default=default if has_default else P.empty))
    return read


def same_default(expected: Any, actual: Any) -> bool:
    """Return whether a default is the one whose text was published."""
    if expected is P.empty:
        return True  # a default where none was published only allows more calls
    if actual is P.empty:
        return False
    if isinstance(actual, tuple) and all(isinstance(part, str) for part in actual):
        actual = f"({', '.join(actual)})"
    return expected in (str(actual), repr(actual))


def differences(expected: list[inspect.Parameter], function: Callable[..., Any], bound: bool) -> list[str]:
    """Return what keeps ``function`` from taking every call that the published parameters allow."""
    actual = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    by_name = {parameter.name: parameter for parameter in actual}
    of_kind = {parameter.kind for parameter in actual}
    positional = [p for p in actual if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    said = inspect.getdoc(function) or ""
    known = {wanted.name for wanted in expected}
    problems = []
    place = 0
    for wanted in expected:
        if wanted.kind is P.VAR_POSITIONAL:
            # Published as *args where the real parameters were hidden: naming them is an improvement.
            if P.VAR_POSITIONAL not in of_kind and len(positional) <= place:
                problems.append(f"takes no *{wanted.name}")
            place = len(positional)
            continue
        if wanted.kind is P.VAR_KEYWORD:
            # The same goes for **kwargs.
            if P.VAR_KEYWORD not in of_kind and not any(
                p.kind in BY_KEYWORD for p in actual if p.name not in known
            ):
                problems.append(f"takes no **{wanted.name}")
            continue
        found = by_name.get(wanted.name)
        if found is None:
            if f"``{wanted.name}``" not in said and not wanted.name.startswith("_"):
                problems.append(f"lacks the parameter {wanted.name}")
            continue
        if wanted.kind is P.POSITIONAL_OR_KEYWORD:
            if found not in positional or positional.index(found) > place:
                problems.append(f"{wanted.name} is not positional number {place}")
            place += 1
        if not same_default(wanted.default, found.default):
            problems.append(f"{wanted.name} defaults to {found.default!r}, not {wanted.default}")
    hidden = {wanted.kind for wanted in expected} & {P.VAR_POSITIONAL, P.VAR_KEYWORD}
    for extra in actual:
        required = extra.default is P.empty and extra.kind not in (P.VAR_POSITIONAL, P.VAR_KEYWORD)
        if extra.name not in known and required and not hidden:
            problems.append(f"requires the unpublished parameter {extra.name}")
    return problems


def check(entry: Name, found: Any, bound: bool) -> None:
    """Fail unless ``found`` is of the published kind and takes the published parameters."""
    if entry.kind == "property":
        assert not callable(found), f"{entry.name} is not a property"
        return
    if entry.kind == "value":
        return
    target = found if bound is False else function_of(found)
    assert callable(target), f"{entry.name} is not callable"
    if bound:
        assert (entry.kind == "classmethod") == isinstance(found, classmethod), f"not a {entry.kind}"
    if entry.parameters is not None:
        assert differences(parsed(entry.parameters), target, bound) == []


@pytest.mark.parametrize("entry", surface("collection"))
def test_a_collection_has(entry: Name) -> None:
    module_of(entry.package)
    lacking = [kind.__name__ for kind in kinds() if inspect.getattr_static(kind, entry.name, None) is None]
    assert lacking == []
    check(entry, inspect.getattr_static(kinds()[0], entry.name), bound=True)


@pytest.mark.parametrize("entry", surface("module"))
def test_a_module_has(entry: Name) -> None:
    module = module_of(entry.package)
    assert hasattr(module, entry.name)
    assert entry.name in module.__all__
    check(entry, getattr(module, entry.name), bound=False)


@pytest.mark.parametrize("entry", surface())
def test_a_class_has(entry: Name) -> None:
    cls = getattr(module_of(entry.package), entry.on)
    if entry.kind == "constructor":
        assert differences(parsed(entry.parameters or []), cls, bound=False) == []
    elif entry.kind == "property":
        # A field of a dataclass with no default is an attribute of the instances alone.
        known = {*inspect.signature(cls).parameters, *cls.__annotations__}
        assert hasattr(cls, entry.name) or entry.name in known
    else:
        check(entry, inspect.getattr_static(cls, entry.name), bound=True)


@pytest.mark.parametrize("entry", surface("module"))
def test_the_facade_re_exports(entry: Name) -> None:
    facade = module_of("td-all")
    # save and load of core dispatch to every format, so they count before those of td-memmap.
    home = module_of("td-core" if entry.name in ("save", "load") else entry.package)
    assert entry.name in facade.__all__
    assert getattr(facade, entry.name) is getattr(home, entry.name)
