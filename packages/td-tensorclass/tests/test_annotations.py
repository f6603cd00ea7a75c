"""Annotations with names that are defined later."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

MAKERS = {
    "decorator": ("@tensorclass(autocast=True)", ""),
    "base class": ("", '(TensorClass["autocast"])'),
    "dataclass": ("@partial(from_dataclass, autocast=True)\n@dataclass", ""),
}
SOURCE = """
from dataclasses import dataclass
from functools import partial
from torch import Tensor
from td_tensorclass import TensorClass, TypedTensorDict, from_dataclass, tensorclass

{decorator}
class Holder{bases}:
    value: Tensor
    again: {again} = None
    later: {later} = None

@tensorclass
class LaterDefined:
    value: Tensor

class Keys(TypedTensorDict):
    value: Tensor
    later: {nowhere}
"""


def written(annotation: str) -> str:
    """Quote an annotation for versions of Python that evaluate it immediately."""
    return annotation if sys.version_info >= (3, 14) else repr(annotation)


@pytest.fixture(params=MAKERS)
def defined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Execute a module that defines a class per maker, without ``from __future__ import annotations``."""
    decorator, bases = MAKERS[request.param]
    module = types.ModuleType("module_of_later_names")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = SOURCE.format(
        decorator=decorator,
        bases=bases,
        again=written("Holder | None"),
        later=written("LaterDefined | None"),
        nowhere=written("NowhereDefined"),
    )
    exec(compile(source, module.__name__, "exec", dont_inherit=True), vars(module))
    return module


def test_declare_annotation_defined_later_is_resolved(defined: Any) -> None:
    given = {"value": torch.arange(3)}
    holder = defined.Holder(value=torch.zeros(3), again=given, later=given, batch_size=[3])
    assert type(holder.again) is defined.Holder
    assert type(holder[1].later) is defined.LaterDefined
    assert holder[1].later.value == 1


def test_typed_tensordict_undefined_annotation_declares_key(defined: Any) -> None:
    assert defined.Keys.__required_keys__ == {"value", "later"}
    assert defined.Keys(value=torch.zeros(3), later=torch.ones(3), batch_size=[3])[1].later == 1
