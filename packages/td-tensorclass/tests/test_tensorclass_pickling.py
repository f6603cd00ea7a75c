"""Tensorclasses that a pickle contains by value, and classes with equal names."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core._encode.node_kinds import KINDS
from td_core.errors import FormatError
from td_core.spi import decode, encode
from td_tensorclass import (
    TensorClass,
)


class ByValue(TensorClass):
    x: Tensor
    label: str = "none"


def make_bare_class(cls: Any) -> Any:
    """Build the class without fields that cloudpickle creates first when it loads a class by value."""
    return type(cls)(
        cls.__name__, (TensorClass,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )


class TestClassesByValue:
    kept = ByValue(x=torch.ones(2), label="a", batch_size=[2])

    def test_class_without_fields_keeps_registered_class(self) -> None:
        make_bare_class(ByValue)
        assert type(decode(replace(encode(self.kept), classes={}))) is ByValue
        assert type(ByValue.from_dict(self.kept.to_dict(), batch_size=[2]).clone()) is ByValue

    def test_class_by_value_is_registered_at_first_decode(self) -> None:
        made = make_bare_class(ByValue)
        for name, value in vars(ByValue).items():
            if name not in {"__dict__", "__weakref__"}:
                setattr(made, name, value)
        try:
            encoded = encode(self.kept)
            assert type(decode(encoded)) is ByValue  # the encoded class has priority over its name
            first = decode(replace(encoded, classes={0: made}))
            assert type(first) is made and first.label == "a"
            assert type(decode(replace(encoded, classes={}))) is made
        finally:
            KINDS.add(KINDS.of(ByValue), replace=True)

    def test_decode_prefers_encoded_class_over_its_name(self) -> None:
        class Local(TensorClass):
            x: Tensor

        node = Local(x=torch.ones(2), batch_size=[2])
        encoded = encode(TensorDict({"a": node}))
        # cloudpickle omits the function from the name, and another process has no such kind.
        for row in encoded.nodes:
            row["kind"] = row["kind"].replace("<locals>.Local", "gone")
        assert type(decode(encoded)["a"]) is Local
        with pytest.raises(FormatError, match="gone', which no installed package provides"):
            decode(replace(encoded, classes={}))

    def test_pickle_class_by_value_resolves_annotations(self) -> None:
        class Early(TensorClass):
            below: DefinedLater  # type: ignore[name-defined]  # noqa: F821

        try:
            globals()["DefinedLater"] = ByValue
            state = Early._schema.__reduce_ex__(4)[2]
        finally:
            del globals()["DefinedLater"]
        schema = type(Early._schema)(Early, Early._schema.options, {})
        assert schema.hint("below") is Any
        for name, value in state[1].items():
            setattr(schema, name, value)
        assert schema.hint("below") is ByValue

    def test_copy_two_classes_of_one_name_keeps_each(self) -> None:
        made = [define_again() for _ in range(2)]
        td = TensorDict({str(i): cls(x=torch.ones(2), batch_size=[2]) for i, cls in enumerate(made)})
        for copied in (deepcopy(td), rebuild_like_pickle(td), decode(encode(td))):
            assert [type(copied["0"]), type(copied["1"])] == made


def define_again() -> Any:
    class Again(TensorClass):
        x: Tensor

    return Again


def rebuild_like_pickle(td: Any) -> Any:
    rebuild, arguments = td.__reduce_ex__(4)[:2]
    return rebuild(*arguments)
