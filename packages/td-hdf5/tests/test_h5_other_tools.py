"""Other programs open the files: h5py, h5netcdf and xarray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from td_core import TensorDict, load
from td_hdf5 import save

OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"chunks": 2, "compression": "gzip"}], ids=["contiguous", "chunks"]
)


@OPTIONS
def test_h5py_reads_and_writes(options: Any, path: Path, td: TensorDict) -> None:
    save(td, path, **options)
    with h5py.File(path, "r+") as file:
        for key, leaf in td.items(True, True):
            assert file["/".join(key) if isinstance(key, tuple) else key][()].tolist() == leaf.tolist()
        file["n/b"][2] = 9
    assert load(path)["n", "b"].tolist() == [0, 1, 9, 3]


@OPTIONS
def test_h5py_copy_of_a_file_loads(
    options: Any, path: Path, tmp_path: Path, td: TensorDict, same: Any
) -> None:
    save(td, path, **options)
    with h5py.File(path) as file, h5py.File(tmp_path / "copy.h5", "w", track_order=True) as other:
        for key in file:
            file.copy(key, other)
        for key, value in file.attrs.items():
            other.attrs[key] = value
    same(load(tmp_path / "copy.h5"), td)


@OPTIONS
def test_xarray_opens_groups(options: Any, path: Path, td: TensorDict) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    save(td, path, **options)
    for group, part in (("/", td.select("a")), ("/n", td["n"])):
        with xarray.open_dataset(path, engine="h5netcdf", phony_dims="sort", group=group) as found:
            assert {key: found[key].values.tolist() for key in found} == {
                key: leaf.tolist() for key, leaf in part.items()
            }


def test_h5netcdf_reads_a_file(path: Path, td: TensorDict) -> None:
    h5netcdf = pytest.importorskip("h5netcdf")
    save(td, path)
    with h5netcdf.File(path, "r", phony_dims="sort") as file:
        assert file["n/b"][...].tolist() == [0, 1, 2, 3]


def test_file_of_netcdf_loads(path: Path) -> None:
    h5netcdf = pytest.importorskip("h5netcdf")
    with h5netcdf.File(path, "w") as file:
        file.dimensions = {"time": 3}
        file.create_variable("x", ("time",), float)[...] = [1.0, 2.0, 3.0]
    found = load(path, strict=False)
    assert (found["x"].tolist(), found["x"].dtype) == ([1, 2, 3], torch.float64)
