"""Errors for methods, formats and values of a package that is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from td_core import MissingPluginError, TensorCollection, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import FIRST_PARTY
from td_core.plugins.siblings import METHODS as PACKAGES

METHODS = [(package, name) for name, package in PACKAGES.items()]


@pytest.fixture
def data() -> TensorDict:
    return TensorDict({"a": torch.zeros(3, 2), "nested": {"b": torch.ones(3)}}, batch_size=[3])


def list_folders(distribution: str) -> str:
    """Return the folders that an install command for a package names."""
    return " ".join(f"./packages/{name}" for name in (*FIRST_PARTY[distribution], distribution))


@pytest.fixture
def kinds(data: TensorDict, installed: set[str]) -> list[TensorCollection]:
    """Return a collection of every kind that is installed."""
    found = [data, lazy_stack([data, data]), TensorDictParams(data)]
    if "td-tensorclass" in installed:
        import td_tensorclass

        @td_tensorclass.tensorclass
        class Sample:
            a: torch.Tensor

        sample = Sample(a=torch.zeros(3), batch_size=[3])
        found += [sample, td_tensorclass.NonTensorData("x"), td_tensorclass.NonTensorStack("x", "y")]
    return found


@pytest.mark.parametrize(("without", "method"), METHODS, indirect=["without"])
def test_call_method_of_missing_package_names_package(
    kinds: list[TensorCollection], without: str, method: str
) -> None:
    remedy = f"pip install {list_folders(without)} in a checkout of td"
    message = f"is provided by the package '{without}', which is not installed: {remedy}"
    for collection in kinds:
        for owner in (collection, type(collection)):
            with pytest.raises(MissingPluginError) as caught:
                getattr(owner, method)
            shown, _, rest = str(caught.value).partition(" ")
            assert (shown.removesuffix("()"), rest) == (f"{type(collection).__name__}.{method}", message)
            assert not hasattr(owner, method)


@pytest.mark.parametrize("without", ["td-memmap"], indirect=True)
@pytest.mark.parametrize(
    "action",
    [lambda data, path: data.save(path), lambda data, path: TensorDict.load(path)],
    ids=["save", "load"],
)
def test_save_without_td_memmap_names_package(
    data: TensorDict, without: str, tmp_path: Path, action: Callable[[TensorDict, Path], object]
) -> None:
    with pytest.raises(MissingPluginError, match=f"pip install {list_folders(without)} "):
        action(data, tmp_path)


@pytest.mark.parametrize("without", ["td-tensorclass"], indirect=True)
@pytest.mark.parametrize("value", ["text", object()], ids=["str", "object"])
def test_set_value_without_td_tensorclass_names_package(
    data: TensorDict, without: str, value: object
) -> None:
    with pytest.raises(
        MissingPluginError, match=f"'label'.*{type(value).__name__}.*pip install {list_folders(without)} "
    ):
        data["label"] = value
    assert "label" not in data.keys()
