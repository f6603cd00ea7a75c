"""What a user sees of a package that is not installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from td_core import MissingPluginError, TensorDict

METHODS = [
    ("td-memmap", "memmap_"),
    ("td-memmap", "memmap"),
    ("td-memmap", "memmap_like"),
    ("td-memmap", "load_memmap"),
    ("td-distributed", "consolidate"),
    ("td-distributed", "send"),
    ("td-distributed", "recv"),
    ("td-distributed", "isend"),
    ("td-distributed", "irecv"),
]


@pytest.fixture
def data() -> TensorDict:
    return TensorDict({"a": torch.zeros(3, 2), "nested": {"b": torch.ones(3)}}, batch_size=[3])


@pytest.mark.parametrize(("without", "method"), METHODS, indirect=["without"])
def test_a_method_of_an_absent_package_says_what_to_install(
    data: TensorDict, without: str, method: str
) -> None:
    message = (
        f"TensorDict.{method}() is provided by the package '{without}', "
        f"which is not installed: pip install {without}"
    )
    with pytest.raises(MissingPluginError, match=re.escape(message)):
        getattr(data, method)
    with pytest.raises(MissingPluginError, match=re.escape(message)):
        getattr(TensorDict, method)


@pytest.mark.parametrize(("without", "method"), METHODS, indirect=["without"])
def test_an_object_has_no_method_of_an_absent_package(data: TensorDict, without: str, method: str) -> None:
    assert not hasattr(data, method)
    assert not hasattr(TensorDict, method)


@pytest.mark.parametrize("without", ["td-memmap"], indirect=True)
@pytest.mark.parametrize(
    "action",
    [lambda data, path: data.save(path), lambda data, path: TensorDict.load(path)],
    ids=["save", "load"],
)
def test_saving_without_a_format_says_what_to_install(
    data: TensorDict, without: str, tmp_path: Path, action: Callable[[TensorDict, Path], object]
) -> None:
    with pytest.raises(MissingPluginError, match=f"pip install {without}"):
        action(data, tmp_path)


@pytest.mark.parametrize("without", ["td-tensorclass"], indirect=True)
@pytest.mark.parametrize("value", ["text", object()], ids=["str", "object"])
def test_a_value_that_is_no_tensor_says_what_to_install(
    data: TensorDict, without: str, value: object
) -> None:
    with pytest.raises(MissingPluginError, match=f"'label'.*{type(value).__name__}.*pip install {without}"):
        data["label"] = value
    assert "label" not in data.keys()
