"""The public suites notice a kind or a format that breaks a promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import Serializer, TensorDict, hookimpl
from td_core.testing import CollectionTests, SerializerTests, installed


class Lossy(TensorDict):
    """Forgets its last entry whenever it is rebuilt."""

    def _with_children(self, children: Any, **kwargs: Any) -> Any:
        return super()._with_children(dict(list(children.items())[:-1]), **kwargs)


class LossyTests(CollectionTests):
    def make(self) -> Lossy:
        return Lossy({"a": torch.ones(3, 2), "b": torch.ones(3, 2)}, batch_size=[3, 2])


def test_a_kind_that_loses_an_entry_is_noticed() -> None:
    with pytest.raises(AssertionError):
        LossyTests().test_children_make_the_same_node_again()


def test_a_suite_without_make_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"^CollectionTests must define make\(\)$"):
        CollectionTests().make()
    with pytest.raises(NotImplementedError, match=r"^SerializerTests must define serializer\(\)$"):
        SerializerTests().serializer()


class Everything(Serializer):
    """Claims every path, and gives the same collection for all of them."""

    name = "everything"

    def save(self, data: Any, path: Path) -> Any:
        path.write_text("x")
        return data

    def load(self, path: Path) -> Any:
        return TensorDict({"a": torch.arange(3.0), "b": torch.ones(3, 2)}, batch_size=[3])

    def detect(self, path: Path) -> bool:
        return True


class EverythingTests(SerializerTests):
    def serializer(self) -> Serializer:
        return Everything()


class Plugin:
    @hookimpl
    def td_serializers(self) -> list[Serializer]:
        return [Everything()]


@pytest.mark.parametrize(
    "test",
    [
        lambda suite, path: suite.test_round_trip(path),
        lambda suite, path: suite.test_kinds_and_values_that_it_has_never_seen(path),
        lambda suite, path: suite.test_nothing_else_is_recognised(path),
    ],
)
def test_a_format_that_claims_everything_is_noticed(test: Any, tmp_path: Path) -> None:
    with installed(Plugin()), pytest.raises(AssertionError):
        test(EverythingTests(), tmp_path)


def test_a_damage_that_goes_unnoticed_is_noticed(tmp_path: Path) -> None:
    with installed(Plugin()), pytest.raises(pytest.fail.Exception, match="DID NOT RAISE FormatError"):
        EverythingTests().test_a_damaged_save_is_an_error(tmp_path)
