"""The package as a third party would build it: public names of td-core only, and nothing imported before it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import td_hdf5
from td_core import TensorDict, load, save


def test_public_names_are_those_of_all() -> None:
    assert sorted(td_hdf5.__all__) == [name for name in dir(td_hdf5) if not name.startswith("_")]
    for name in [*td_hdf5.__all__, "open"]:
        assert callable(getattr(td_hdf5, name))
    with pytest.raises(AttributeError, match="'td_hdf5' has no attribute 'other'"):
        td_hdf5.other  # noqa: B018


@pytest.mark.parametrize("suffix", [".h5", ".hdf5", ".H5"])
def test_save_suffix_selects_format(suffix: str, path: Path, td: TensorDict) -> None:
    place = path.with_suffix(suffix)
    save(td, place)
    assert place.read_bytes()[:4] == b"\x89HDF"
    assert load(place)["n", "b"].tolist() == td["n", "b"].tolist()


def test_methods_save_and_open(path: Path, td: TensorDict, same: object) -> None:
    td.to_h5(path)
    assert TensorDict.from_h5(path)["n", "b"].tolist() == [0, 1, 2, 3]
    assert load(path)["n", "b"].tolist() == [0, 1, 2, 3]
