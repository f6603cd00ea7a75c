"""Every name in ``surface.json`` exists and accepts the parameters listed there, and every public name is listed.

Extra keyword-only parameters are allowed. A function may lack a parameter if its said mentions it in double
backticks: then the difference is documented and deliberate.
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
#: Packages that only extras of td-all install, and those that are modules of td.
NOT_IN_TD = {"td-arrow", "td-safetensors", "td-zarr", "td-hdf5", "td-data", "td-remote", "td-redis"}
P = inspect.Parameter
BY_KEYWORD = (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY)


class Name(NamedTuple):
    """One public name, from ``surface.json``."""

    package: str
    on: str
    name: str
    kind: str
    parameters: list[str] | None
    #: Whether it is for programs of tensordict alone: it can be imported, and nothing lists it.
    hidden: bool = False


def list_names(*owners: str) -> list[Any]:
    """Return a test parameter for each name of the given owners, or of all classes if there are none."""
    found = []
    for group in SURFACE:
        on = group["on"]
        if on in owners if owners else on not in ("collection", "module", "spi"):
            for name, facts in group["names"].items():
                entry = Name(
                    group["package"],
                    on,
                    name,
                    facts["kind"],
                    facts.get("parameters"),
                    facts.get("hidden", False),
                )
                place = group["package"] if on in ("collection", "module") else on
                found.append(pytest.param(entry, id=f"{place}-{name}"))
    return found


def import_package(package: str) -> Any:
    """Import the module of a distribution. Skip the test if it is not installed."""
    try:
        distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return import_module("td" if package == "td-all" else package.replace("-", "_"))


def list_kinds() -> list[type]:
    """Return every kind of collection of the installed packages."""
    core = import_module("td_core")
    found = [core.TensorCollection, core.TensorDict, core.LazyStackedTensorDict, core.TensorDictParams]
    try:
        tensorclass = import_module("td_tensorclass")
    except ModuleNotFoundError:
        return found
    sample = tensorclass.tensorclass(type("Sample", (), {"__annotations__": {"x": "torch.Tensor"}}))
    return [*found, tensorclass.NonTensorData, tensorclass.NonTensorStack, sample]


def unwrap_function(found: Any) -> Callable[..., Any]:
    """Return the function that a method or classmethod wraps."""
    return getattr(found, "__func__", found)


def parse(texts: list[str]) -> list[inspect.Parameter]:
    """Parse parameters from ``surface.json``; defaults stay text."""
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


def is_same_default(expected: Any, actual: Any) -> bool:
    """Return True if a default equals the text in ``surface.json``."""
    if expected is P.empty:
        return True  # an additional default only allows more calls
    if actual is P.empty:
        return False
    if isinstance(actual, tuple) and all(isinstance(part, str) for part in actual):
        actual = f"({', '.join(actual)})"
    return expected in (str(actual), repr(actual))


def list_differences(
    expected: list[inspect.Parameter], function: Callable[..., Any], bound: bool
) -> list[str]:
    """Return the reasons why ``function`` rejects calls that the listed parameters allow."""
    actual = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    by_name = {parameter.name: parameter for parameter in actual}
    of_kind = {parameter.kind for parameter in actual}
    positional = [p for p in actual if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    docstring = inspect.getdoc(function) or ""
    listed = {wanted.name for wanted in expected}
    problems = []
    place = 0
    for wanted in expected:
        if wanted.kind is P.VAR_POSITIONAL:
            # Listed as *args if tensordict hides the real parameters; named parameters are as good.
            if P.VAR_POSITIONAL not in of_kind and len(positional) <= place:
                problems.append(f"takes no *{wanted.name}")
            place = len(positional)
            continue
        if wanted.kind is P.VAR_KEYWORD:
            # Named keyword parameters can replace **kwargs too.
            if P.VAR_KEYWORD not in of_kind and not any(
                p.kind in BY_KEYWORD for p in actual if p.name not in listed
            ):
                problems.append(f"takes no **{wanted.name}")
            continue
        found = by_name.get(wanted.name)
        if found is None:
            if f"``{wanted.name}``" not in docstring and not wanted.name.startswith("_"):
                problems.append(f"lacks the parameter {wanted.name}")
            continue
        if wanted.kind is P.POSITIONAL_OR_KEYWORD:
            if found not in positional or positional.index(found) > place:
                problems.append(f"{wanted.name} is not positional number {place}")
            place += 1
        if not is_same_default(wanted.default, found.default):
            problems.append(f"{wanted.name} defaults to {found.default!r}, not {wanted.default}")
    hidden = {wanted.kind for wanted in expected} & {P.VAR_POSITIONAL, P.VAR_KEYWORD}
    for extra in actual:
        required = extra.default is P.empty and extra.kind not in (P.VAR_POSITIONAL, P.VAR_KEYWORD)
        if extra.name not in listed and required and not hidden:
            problems.append(f"requires the unpublished parameter {extra.name}")
    return problems


def assert_matches(entry: Name, found: Any, bound: bool) -> None:
    """Fail unless ``found`` has the listed kind and accepts the listed parameters."""
    if entry.kind == "property":
        assert not callable(found), f"{entry.name} is not a property"
        return
    if entry.kind == "value":
        return
    target = found if bound is False else unwrap_function(found)
    assert callable(target), f"{entry.name} is not callable"
    if bound:
        assert (entry.kind == "classmethod") == isinstance(found, classmethod), f"not a {entry.kind}"
    if entry.parameters is not None:
        assert list_differences(parse(entry.parameters), target, bound) == []


@pytest.mark.parametrize("entry", list_names("collection"))
def test_collection_has_public_name(entry: Name) -> None:
    import_package(entry.package)
    lacking = [
        kind.__name__ for kind in list_kinds() if inspect.getattr_static(kind, entry.name, None) is None
    ]
    assert lacking == []
    assert_matches(entry, inspect.getattr_static(list_kinds()[0], entry.name), bound=True)


@pytest.mark.parametrize("entry", list_names("module"))
def test_module_has_public_name(entry: Name) -> None:
    module = import_package(entry.package)
    assert hasattr(module, entry.name)
    assert (entry.name in module.__all__) is (entry.name in dir(module)) is not entry.hidden
    assert_matches(entry, getattr(module, entry.name), bound=False)


@pytest.mark.parametrize("entry", list_names("spi"))
def test_spi_has_name_for_authors(entry: Name) -> None:
    core, spi = import_package(entry.package), import_module("td_core.spi")
    assert entry.name in spi.__all__
    assert entry.name not in core.__all__ and entry.name not in dir(core)
    assert_matches(entry, getattr(spi, entry.name), bound=False)


@pytest.mark.parametrize("entry", list_names())
def test_class_has_public_name(entry: Name) -> None:
    cls = getattr(import_package(entry.package), entry.on)
    if entry.kind == "constructor":
        assert list_differences(parse(entry.parameters or []), cls, bound=False) == []
    elif entry.kind == "property":
        # A dataclass field without a default is an attribute of instances only.
        listed = {*inspect.signature(cls).parameters, *cls.__annotations__}
        assert hasattr(cls, entry.name) or entry.name in listed
    else:
        assert_matches(entry, inspect.getattr_static(cls, entry.name), bound=True)


@pytest.mark.parametrize("package", sorted({group["package"] for group in SURFACE}))
def test_surface_lists_every_name_of_module(package: str) -> None:
    listed = {entry.values[0].name for entry in list_names("module") if entry.values[0].package == package}
    if package == "td-all":  # which has the names of the other packages, too
        listed = {entry.values[0].name for entry in list_names("module")}
    public = {name for name in import_package(package).__all__ if not name.startswith("_")}
    assert public - listed == set()


def test_surface_lists_every_method_of_collections() -> None:
    listed = {entry.values[0].name for entry in list_names("collection")}
    base = import_module("td_core").TensorDictBase
    assert {name for name in dir(base) if not name.startswith("_")} - listed == set()


@pytest.mark.parametrize(
    "entry", [each for each in list_names("module") if each.values[0].package not in NOT_IN_TD]
)
def test_td_reexports_public_name(entry: Name) -> None:
    facade = import_package("td-all")
    # td re-exports the functions of td-core, which dispatch to every format, not those of td-memmap.
    general = entry.name in ("save", "load", "inspect", "verify")
    home = import_package("td-core" if general else entry.package)
    assert (entry.name in facade.__all__) is (entry.name in dir(facade)) is not entry.hidden
    assert getattr(facade, entry.name) is getattr(home, entry.name)
