"""Tests of the declared methods of siblings while their packages are not installed."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from td_core import MissingPluginError, TensorDict
from td_core.plugins.declarations import DECLARATIONS, Declaration, unwrap_member
from td_core.plugins.memmap_methods import MemmapMethods
from td_core.plugins.siblings import SiblingMethods

STORES = {"td-safetensors", "td-hdf5", "td-zarr"}
DISTRIBUTIONS = {"td-memmap", "td-tensorclass", "td-distributed", *STORES}


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove every provided method during a test, if the siblings are installed."""
    for distribution in DISTRIBUTIONS:
        monkeypatch.delitem(MissingPluginError.unavailable, distribution, raising=False)
    provided = {name: vars(SiblingMethods)[name] for name in DECLARATIONS if name in vars(SiblingMethods)}
    for name in provided:
        delattr(SiblingMethods, name)
    yield
    for name, member in provided.items():
        setattr(SiblingMethods, name, member)


def iter_subclasses(cls: type) -> Iterator[type]:
    yield cls
    for each in cls.__subclasses__():
        if each.__module__.startswith("td_core."):
            yield from iter_subclasses(each)


@pytest.mark.parametrize("name", DECLARATIONS)
def test_call_missing_method_error_names_package(name: str) -> None:
    declaration = DECLARATIONS[name]
    call = "" if isinstance(declaration.declared, property) else "()"
    for cls in iter_subclasses(SiblingMethods):
        with pytest.raises(MissingPluginError) as caught:
            getattr(cls, name)
        assert str(caught.value) == (
            f"{cls.__name__}.{name}{call} is provided by the package '{declaration.distribution}', "
            f"which is not installed: pip install ./packages/{declaration.distribution} in a checkout of td"
        )
        assert not hasattr(cls, name)
    assert not hasattr(TensorDict(), name)


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


def test_sibling_methods_are_all_declarations() -> None:
    public = {
        name: value
        for cls in SiblingMethods.__mro__[:-1]
        for name, value in vars(cls).items()
        if not name.startswith("_")
    }
    assert all(isinstance(value, Declaration) for value in public.values())
    assert public.keys() == DECLARATIONS.keys()


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
