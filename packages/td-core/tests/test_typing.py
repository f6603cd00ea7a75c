"""The sentinel, the class of keys and the protocol of sources, as annotations and at run time."""

from __future__ import annotations

import copy
import pickle
from typing import Any, get_args

import pytest
import torch

from td_core import NO_DEFAULT, NestedKey
from td_core import typing as td_typing


def test_no_default_is_one_object() -> None:
    assert repr(NO_DEFAULT) == "NO_DEFAULT" and NO_DEFAULT is td_typing.NoDefault.NO_DEFAULT
    for again in (copy.copy(NO_DEFAULT), copy.deepcopy(NO_DEFAULT), pickle.loads(pickle.dumps(NO_DEFAULT))):
        assert again is NO_DEFAULT


@pytest.mark.parametrize(
    ("cls", "expected"), [(str, True), (tuple, True), (NestedKey, True), (list, False), (int, False)]
)
def test_issubclass_nested_key_of_strings_and_tuples(cls: type, expected: bool) -> None:
    assert issubclass(cls, NestedKey) is expected  # type: ignore[misc]


def test_isinstance_nested_key_is_traced_by_compile() -> None:
    def read(x: torch.Tensor, key: Any) -> torch.Tensor:
        return x + 1 if isinstance(key, NestedKey) else x

    compiled = torch.compile(read, backend="eager", fullgraph=True)
    assert [compiled(torch.zeros(1), key).item() for key in ("a", ("a", "b"), 3)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("alias", "values"),
    [
        (td_typing.DeviceType, [torch.device("cpu"), "cpu", 0]),
        (td_typing.BatchSize, [torch.Size([2]), [2], 2]),
        (td_typing.DtypeLike, [torch.float32]),
    ],
)
def test_alias_lists_types_of_accepted_values(alias: Any, values: list[Any]) -> None:
    accepted = [getattr(part, "__origin__", part) for part in get_args(alias)]
    assert all(
        any(isinstance(value, part) for part in accepted if isinstance(part, type)) for value in values
    )


def test_exported_names_exist() -> None:
    assert all(getattr(td_typing, name) is not None for name in td_typing.__all__)
