"""The package as a third party would build it: public names of td-core only, and nothing imported before it is needed."""

from __future__ import annotations

import pytest

import td_zarr


def test_public_names_are_those_of_all() -> None:
    assert sorted(td_zarr.__all__) == [name for name in dir(td_zarr) if not name.startswith("_")]
    for name in (*td_zarr.__all__, "open"):
        assert callable(getattr(td_zarr, name))
    with pytest.raises(AttributeError, match="'td_zarr' has no attribute 'other'"):
        td_zarr.other  # noqa: B018
