"""Declarations of the methods of siblings: the error of a missing package, signatures and docstrings, and implementations."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from td_core import MissingPluginError, PluginError, TensorDict
from td_core.plugins.declarations import (
    DECLARATIONS,
    Declaration,
    implementations,
    implements,
    implements_classmethod,
    provided_by,
    shows,
    takes,
    unwrap_member,
)
from td_core.plugins.memmap_methods import MemmapMethods
from td_core.plugins.placeholders import METHODS, PROPERTIES
from td_core.plugins.siblings import SiblingMethods

pytestmark = pytest.mark.usefixtures("no_sibling")

DISTRIBUTIONS = {"td-memmap", "td-tensorclass", "td-distributed", "td-safetensors", "td-hdf5", "td-zarr"}


@pytest.mark.parametrize("name", DECLARATIONS)
def test_declaration_has_docstring_and_annotations(name: str) -> None:
    declaration = DECLARATIONS[name]
    function = unwrap_member(declaration.declared)
    assert declaration.distribution in DISTRIBUTIONS
    first, *_ = (declaration.__doc__ or "").splitlines()
    assert first.endswith((".", "``.")), name
    assert function.__annotations__["return"]
    own = list(inspect.signature(function).parameters)[1:]
    assert [each for each in own if each not in function.__annotations__] == []


@pytest.mark.parametrize("name", DECLARATIONS)
def test_declaration_documents_all_arguments_or_refers_to_method(name: str) -> None:
    declaration = DECLARATIONS[name]
    _, *own = inspect.signature(unwrap_member(declaration.declared)).parameters
    text = inspect.getdoc(declaration) or ""
    documented = re.findall(r"^    (\w+): ", text.partition("Args:")[2].partition("Raises:")[0], re.MULTILINE)
    assert set(documented) in (set(), set(own))


def test_help_of_declaration_shows_signature_and_docstring() -> None:
    for shown in (MemmapMethods.memmap, MemmapMethods):
        text = pydoc.render_doc(shown, renderer=pydoc.plaintext)
        assert (
            "memmap(self, prefix: 'str | Path | None' = None, copy_existing: 'bool' = False, *, num_threads"
            in text
        )
        assert "num_threads: number of threads that write; 0 writes in the calling thread." in text


def test_call_missing_method_compiling_raises_attribute_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        AttributeError,
        match=r"^TensorDict.memmap\(\) is provided by .* pip install ./packages/td-memmap in a checkout of td$",
    ) as caught:
        TensorDict().memmap()
    assert type(caught.value) is AttributeError


@pytest.mark.once
def test_compile_hasattr_missing_method_is_false() -> None:
    def double(td: TensorDict) -> torch.Tensor:
        return td["a"] * 2 if hasattr(td, "memmap_") else td["a"] * 3

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert compiled(TensorDict({"a": torch.ones(2)})).tolist() == [3.0, 3.0]


def test_call_missing_method_custom_getattr_names_package() -> None:
    class Wrapper(TensorDict):
        def __getattr__(self, name: str) -> Any:
            declaration = DECLARATIONS.get(name)
            if declaration is not None:
                return declaration.__get__(self, type(self))
            raise AttributeError(f"no field {name!r}")

    with pytest.raises(MissingPluginError, match=r"^Wrapper.memmap\(\) is provided by"):
        Wrapper().memmap()
    with pytest.raises(AttributeError, match="no field 'other'"):
        Wrapper().other  # noqa: B018


def iter_subclasses(cls: type) -> Iterator[type]:
    yield cls
    for each in cls.__subclasses__():
        if each.__module__.startswith("td_core."):
            yield from iter_subclasses(each)


@pytest.mark.parametrize(
    ("name", "package"),
    [*METHODS.items(), *((name, each.distribution) for name, each in DECLARATIONS.items())],
)
def test_call_missing_method_error_names_package(name: str, package: str) -> None:
    call = "" if name in PROPERTIES else "()"
    for cls in iter_subclasses(SiblingMethods):
        with pytest.raises(MissingPluginError) as caught:
            getattr(cls, name)
        assert str(caught.value) == (
            f"{cls.__name__}.{name}{call} is provided by the package '{package}', "
            f"which is not installed: pip install ./packages/{package} in a checkout of td"
        )
        assert not hasattr(cls, name)
    assert not hasattr(TensorDict(), name)


@pytest.fixture
def shine() -> Iterator[Declaration]:
    """Declare a method ``shine`` of the package td-example, for the collections of the test."""

    class Collection:
        @provided_by("td-example")
        def shine(self, colour: str, times: int = 2, *, loud: bool = False) -> str:
            """Shine."""

    yield vars(Collection)["shine"]
    del DECLARATIONS["shine"]


def test_provided_by_declares_method_of_package(shine: Declaration) -> None:
    assert DECLARATIONS["shine"] is shine
    assert (shine.distribution, shine.name, shine.__name__, shine.__doc__) == (
        "td-example", "shine", "shine", "Shine.",
    )  # fmt: skip
    assert getattr(shine.owner, "shine") is shine  # noqa: B009
    with pytest.raises(
        MissingPluginError, match=r"^Collection.shine\(\) is provided by the package 'td-example'"
    ):
        shine(shine.owner.__new__(type("Collection", (shine.owner,), {})))


def test_implement_gives_signature_docstring_and_member(shine: Declaration) -> None:
    @implements(shine)
    def glow(data, colour, times, *, loud):
        return colour * times, loud

    assert glow(None, "ab") == ("abab", False)
    assert (glow.__doc__, glow.__annotations__["colour"]) == ("Shine.", "str")
    assert implementations("td-example") == {"shine": glow}
    assert implementations("td-other") == {}


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda data, colour: None, "(('colour',), ())"),
        (lambda data, times, colour, *, loud: None, "(('times', 'colour'), ('loud',))"),
        (lambda data, colour, times, loud: None, "(('colour', 'times', 'loud'), ())"),
    ],
    ids=["missing", "order", "by position"],
)
def test_implement_other_parameters_raises(function: Any, got: str, shine: Declaration) -> None:
    with pytest.raises(PluginError) as caught:
        shine.implement(function)
    assert str(caught.value) == (
        f"the method 'shine' is declared with the parameters (('colour', 'times'), ('loud',)); got {got}"
    )
    assert shine.implementation is None


@dataclass
class Options:
    colour: str = "white"
    times: int = 1


def test_takes_replaces_argument_by_fields_of_options() -> None:
    @takes(Options)
    def glow(data: object, options: Options) -> Options:
        """Glow."""
        return options

    assert glow(None, "red", times=3) == Options("red", 3)
    assert (
        str(inspect.signature(glow))
        == "(data: 'object', colour: 'str' = 'white', times: 'int' = 1) -> 'Options'"
    )
    assert glow.__doc__ == "Glow."
    with pytest.raises(TypeError, match=r"glow\(\) got an unexpected keyword argument 'size'"):
        glow(None, size=1)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (False, "(path, times=3, colour: 'str' = 'white', *, keys=None)"),
        (True, "(path, times=3, colour: 'str' = 'white', *, keys=None, **options)"),
    ],
)
def test_shows_puts_fields_of_options_into_signature(more: bool, expected: str) -> None:
    @shows(Options, more=more)
    def glow(path, times=3, *, keys=None, **options):
        return path, times, options

    assert str(inspect.signature(glow)) == expected
    assert glow("a", colour="red") == ("a", 3, {"colour": "red"})


def test_implements_classmethod_passes_none_for_class() -> None:
    class Collection:
        made = provided_by("td-example")(classmethod(lambda cls, path: None))

    @implements_classmethod(vars(Collection)["made"])
    def load(cls, path):
        return cls, path

    assert load("x") == (None, "x")
    assert str(inspect.signature(load)) == "(path)"
    assert isinstance(implementations("td-example")["made"], classmethod)
    del DECLARATIONS["made"]
