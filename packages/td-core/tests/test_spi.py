"""The interface for authors of kinds and siblings: what it lists exists, and what a kind must provide is complete."""

from __future__ import annotations

from typing import Any

import pytest

from td_core import TensorCollection, TensorDict, TensorDictBase, spi
from td_core._encode.node_kinds import KINDS
from td_core._tree.node import REQUIRED, list_missing
from td_core.errors import PluginError
from td_core.spi import NodeKind, Record

MEMBERS = {**spi.REQUIRED, **spi.PROVIDED, **spi.OVERRIDABLE}


def test_members_are_few_and_listed_once() -> None:
    assert len(spi.REQUIRED) <= 15
    assert len(MEMBERS) == len(spi.REQUIRED) + len(spi.PROVIDED) + len(spi.OVERRIDABLE) <= 60


def test_exported_names_are_few() -> None:
    assert len(spi.__all__) == len({*spi.__all__}) <= 105


@pytest.mark.parametrize("name", MEMBERS)
def test_member_exists_and_has_one_sentence(name: str) -> None:
    assert hasattr(TensorDict, name)
    sentence = MEMBERS[name]
    assert sentence.endswith(".")
    assert ". " not in sentence


def test_required_members_are_those_that_a_class_must_define() -> None:
    assert set(REQUIRED) == spi.REQUIRED.keys() - {"_names"}  # an attribute
    assert list_missing(TensorDictBase) == list(REQUIRED)
    assert list_missing(TensorDict) == []


@pytest.mark.parametrize("name", REQUIRED)
def test_class_without_required_member_is_refused(name: str) -> None:
    members = {other: getattr(TensorDict, other) for other in REQUIRED if other != name}
    incomplete: Any = type("Incomplete", (TensorDictBase,), members)
    with pytest.raises(
        PluginError, match=f"Incomplete of the node kind 'incomplete' does not define {name}, as"
    ):
        KINDS.add(NodeKind("incomplete", incomplete, Record.of, lambda record: None))
    value = getattr(TensorDictBase, name)
    read = value.fget if isinstance(value, property) else value
    with pytest.raises(NotImplementedError, match=f"Incomplete does not define {name}, as every kind must"):
        read(incomplete(), *([{}] if name == "_with_children" else ["a", 1][: read.__code__.co_argcount - 1]))


@pytest.mark.parametrize("name", [*spi.PROVIDED, *spi.OVERRIDABLE])
def test_other_member_has_default(name: str) -> None:
    assert name not in REQUIRED
    assert hasattr(TensorCollection, name)


@pytest.mark.parametrize("name", spi.__all__)
def test_exported_name_exists(name: str) -> None:
    assert getattr(spi, name) is not None


def test_all_lists_every_public_name() -> None:
    public = {name for name in vars(spi) if not name.startswith("_")}
    assert public - {"annotations", "TYPE_CHECKING"} <= set(spi.__all__)
