"""The methods of siblings without their packages: the error of a missing package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from td_core import MissingPluginError, TensorDict
from td_core.errors import FIRST_PARTY
from td_core.plugins.methods import DeclaredMethods
from td_core.plugins.siblings import METHODS, PROPERTIES, Placeholder, SiblingMethods

pytestmark = pytest.mark.usefixtures("no_sibling")


def test_call_missing_method_compiling_raises_attribute_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(
        AttributeError,
        match=r"^TensorDict.memmap\(\) is .* pip install ./packages/td-store ./packages/td-memmap in a checkout of td$",
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
            placeholder = vars(DeclaredMethods).get(name)
            if isinstance(placeholder, Placeholder):
                return placeholder.__get__(self, type(self))
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


@pytest.mark.parametrize(("name", "package"), METHODS.items())
def test_call_missing_method_error_names_package(name: str, package: str) -> None:
    call = "" if name in PROPERTIES else "()"
    for cls in iter_subclasses(SiblingMethods):
        with pytest.raises(MissingPluginError) as caught:
            getattr(cls, name)
        folders = " ".join(f"./packages/{each}" for each in (*FIRST_PARTY[package], package))
        assert str(caught.value) == (
            f"{cls.__name__}.{name}{call} is provided by the package '{package}', "
            f"which is not installed: pip install {folders} in a checkout of td"
        )
        assert not hasattr(cls, name)
    assert not hasattr(TensorDict(), name)


def test_placeholder_names_package_of_method() -> None:
    class Collection:
        """Class with a placeholder."""

    shine = Placeholder(Collection, "shine", "td-example")
    Collection.shine = shine  # type: ignore[attr-defined]
    assert (shine.distribution, shine.__name__) == ("td-example", "shine")
    assert getattr(Collection, "shine") is shine  # noqa: B009
    with pytest.raises(MissingPluginError, match=r"^Child.shine\(\) is provided by the package 'td-example'"):
        type("Child", (Collection,), {})().shine()
