"""Switches of a thread: permanent, in a block, as decorators of functions, generators and coroutines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import (
    TensorDict,
    get_defaults_to_none,
    lazy_legacy,
    set_get_defaults_to_none,
    set_lazy_legacy,
)
from td_core.errors import KeyPathError


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3]
    )


class TestSettings:
    def test_get_defaults_to_none_false_get_raises(self) -> None:
        td = make_dense_td()
        assert td.get("zz") is None
        with set_get_defaults_to_none(False):
            assert not get_defaults_to_none()
            with pytest.raises(KeyPathError, match="key 'zz' not found"):
                td.get("zz")
            with pytest.raises(KeyPathError, match="key 'zz' not found"):
                td.get_at("zz", 0)
            assert td.get("zz", None) is None
        assert get_defaults_to_none()
        assert td.get("zz") is None

    def test_set_get_defaults_to_none_acts_on_call(self) -> None:
        set_get_defaults_to_none(False)
        try:
            with pytest.raises(KeyPathError):
                TensorDict().get("a")
        finally:
            set_get_defaults_to_none(True)

    def test_set_get_defaults_to_none_decorates_function(self) -> None:
        @set_get_defaults_to_none(False)
        def read() -> Any:
            return TensorDict().get("a")

        assert get_defaults_to_none()
        for _ in range(2):
            with pytest.raises(KeyPathError):
                read()
        assert get_defaults_to_none()

    def test_set_lazy_legacy_true_raises(self) -> None:
        assert lazy_legacy() is False
        assert lazy_legacy(allow_none=True) is None
        with set_lazy_legacy(False):
            pass
        set_lazy_legacy(False).set()
        assert set_lazy_legacy(False)(len) is len
        with pytest.raises(NotImplementedError, match="lazy views do not exist here"):
            set_lazy_legacy(True)
