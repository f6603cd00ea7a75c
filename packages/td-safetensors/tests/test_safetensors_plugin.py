"""The package as a third party would build it: public names of td-core only, and nothing imported before it is needed."""

from __future__ import annotations

import pytest

import td_safetensors


def test_public_names_are_those_of_all() -> None:
    assert sorted(td_safetensors.__all__) == [
        name for name in dir(td_safetensors) if not name.startswith("_")
    ]
    for name in td_safetensors.__all__:
        assert callable(getattr(td_safetensors, name))
    with pytest.raises(AttributeError, match="'td_safetensors' has no attribute 'other'"):
        td_safetensors.other  # noqa: B018
