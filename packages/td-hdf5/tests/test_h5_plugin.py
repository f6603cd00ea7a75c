"""The package as a third party would build it: public names of td-core only, and nothing imported before it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import td_core
import td_hdf5
from td_core import MissingPluginError, TensorDict, load, save


def test_public_names_are_those_of_all() -> None:
    assert sorted(td_hdf5.__all__) == [name for name in dir(td_hdf5) if not name.startswith("_")]
    for name in [*td_hdf5.__all__, "open"]:
        assert callable(getattr(td_hdf5, name))
    with pytest.raises(AttributeError, match="'td_hdf5' has no attribute 'other'"):
        td_hdf5.other  # noqa: B018


def test_suffix_without_format_raises(path: Path, td: TensorDict) -> None:
    if not any(record.id == "memmap" for record in td_core.plugins()):
        with pytest.raises(MissingPluginError):
            save(td, path)
        return
    with pytest.raises(ValueError, match="has the suffix of the format 'hdf5': pass format='hdf5'"):
        save(td, path)


def test_methods_save_and_open(path: Path, td: TensorDict, same: object) -> None:
    td.to_h5(path)
    assert TensorDict.from_h5(path)["n", "b"].tolist() == [0, 1, 2, 3]
    assert load(path)["n", "b"].tolist() == [0, 1, 2, 3]
