"""The interface for authors of kinds and siblings: what it lists exists, and what a kind must provide is complete."""

from __future__ import annotations

import pytest

from td_core import TensorCollection, TensorDict, TensorDictBase, spi

MEMBERS = {**spi.REQUIRED, **spi.PROVIDED, **spi.OVERRIDABLE}


def test_members_are_few_and_listed_once() -> None:
    assert len(spi.REQUIRED) <= 15
    assert len(MEMBERS) == len(spi.REQUIRED) + len(spi.PROVIDED) + len(spi.OVERRIDABLE) <= 60


def test_exported_names_are_few() -> None:
    assert len(spi.__all__) == len({*spi.__all__}) <= 80


@pytest.mark.parametrize("name", MEMBERS)
def test_member_exists_and_has_one_sentence(name: str) -> None:
    assert hasattr(TensorDict, name)
    sentence = MEMBERS[name]
    assert sentence.endswith(".")
    assert ". " not in sentence


def test_required_members_are_those_that_a_class_must_define() -> None:
    abstract: frozenset[str] = TensorDictBase.__abstractmethods__
    assert abstract == spi.REQUIRED.keys() - {"_names"}  # an attribute


@pytest.mark.parametrize("name", [*spi.PROVIDED, *spi.OVERRIDABLE])
def test_other_member_has_default(name: str) -> None:
    assert not getattr(getattr(TensorCollection, name), "__isabstractmethod__", False)


@pytest.mark.parametrize("name", spi.__all__)
def test_exported_name_exists(name: str) -> None:
    assert getattr(spi, name) is not None


def test_all_lists_every_public_name() -> None:
    public = {name for name in vars(spi) if not name.startswith("_")}
    assert public - {"annotations", "TYPE_CHECKING"} <= set(spi.__all__)
