"""Saves converted between all formats, and values of collections that are opened for writing in each format."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import td_core
from td_core import LockedError, TensorDict
from td_core.__main__ import main
from td_core.testing import assert_same
from td_core.testing._collection_samples import make_samples, make_value_samples

pytestmark = pytest.mark.once


class Place(NamedTuple):
    """A format, and the name of a save in it; formats whose library is not installed are skipped."""

    format: str
    name: str
    package: str


PLACES = {
    "directory": Place("memmap", "x", "td_memmap"),
    "archive": Place("memmap", "x.tdz", "td_memmap"),
    "safetensors": Place("safetensors", "x.safetensors", "td_safetensors"),
    "hdf5": Place("hdf5", "x.h5", "td_hdf5"),
    "zarr": Place("zarr", "x.zarr", "td_zarr"),
    "zip": Place("zarr", "x.zarr.zip", "td_zarr"),
    "parquet": Place("parquet", "x.parquet", "td_arrow"),
    "arrow": Place("arrow", "x.arrow", "td_arrow"),
}


def find_place(name: str) -> Place:
    """Return a place; skip the test if its package is not installed."""
    pytest.importorskip(PLACES[name].package)
    if PLACES[name].package == "td_arrow":
        pytest.importorskip("pyarrow")
    return PLACES[name]


@pytest.mark.parametrize("name", [name for name in PLACES if name != "directory"])
def test_suffix_selects_format(name: str, tmp_path: Path) -> None:
    place, folder = find_place(name), tmp_path / "save"
    data = TensorDict({"x": torch.arange(3)}, [3])
    data.memmap(folder)
    assert main(["convert", str(folder), str(tmp_path / f"b{place.name}")]) == 0
    td_core.save(data, tmp_path / place.name)
    for path in (tmp_path / place.name, tmp_path / f"b{place.name}"):
        assert td_core.load(path, format=place.format)["x"].tolist() == [0, 1, 2]
    assert main(["convert", str(folder), str(tmp_path / f"d{place.name}"), "--format", "memmap"]) == 0
    assert (tmp_path / f"d{place.name}").is_dir() == (name != "archive")
    assert td_core.load(tmp_path / f"d{place.name}", format="memmap")["x"].tolist() == [0, 1, 2]


@pytest.fixture(scope="module", params=PLACES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save all kinds of collections in each format; return the save and the collection."""
    place = find_place(request.param)
    data = TensorDict({**make_samples(), **make_value_samples()})
    path = tmp_path_factory.mktemp("source") / place.name
    td_core.save(data, path, format=place.format)
    return path, data


@pytest.mark.parametrize("target", PLACES)
def test_convert_keeps_everything(target: str, source: tuple[Path, Any], tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    (path, data), place = source, find_place(target)
    into = tmp_path / place.name
    assert main(["convert", str(path), str(into), "--format", place.format]) == 0
    found = td_core.load(into)
    for key in data.keys():
        one, other = found.get(key), data.get(key)
        if key == "params" and type(one) is TensorDict:  # td-memmap saves parameters as tensors
            assert not {path.suffix, into.suffix}.isdisjoint({"", ".tdz"})
            other = other.data
        assert_same(one.clone(), other.clone(), (key,))
    assert td_core.verify(into).ok


#: Writes of values in place, and the key that they would change.
WRITES: dict[str, Callable[[Any], Any]] = {
    "set_": lambda td: td.set_("s", "new"),
    "update_": lambda td: td.update_({"s": "new"}),
    "update in place": lambda td: td.update({"s": "new"}, inplace=True),
    "set in place": lambda td: td.set("s", "new", inplace=True),
    "nested": lambda td: td["n"].set_("t", "w"),
    "rows": lambda td: td.__setitem__(0, td[1]),
    "copy_": lambda td: td.copy_(td.clone().set("s", "new")),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)).set_("s", "new"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("format", ["safetensors", "hdf5", "zarr"])
def test_write_of_value_into_opened_save_raises(format: str, write: str, tmp_path: Path) -> None:
    pytest.importorskip("td_tensorclass")
    path = tmp_path / find_place(format).name
    td = TensorDict({"a": torch.arange(2), "s": "old", "n": {"t": "v"}}, [2])
    td_core.save(td, path, format=format)
    opened = td_core.open(path, mode="r+")
    if write == "rows":  # the values of all rows are equal, so nothing is written
        WRITES[write](opened)
    else:
        with pytest.raises(
            LockedError, match="cannot write values into .*only its leaves are opened for writing"
        ):
            WRITES[write](opened)
    assert (opened["s"], opened["n", "t"]) == ("old", "v")
    assert (td_core.load(path)["s"], td_core.load(path)["n", "t"]) == ("old", "v")
    assert opened.clone().set_("s", "new")["s"] == "new"


@pytest.mark.parametrize("format", ["safetensors", "hdf5", "zarr"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inspect_shows_dtype_of_elements_of_nested_leaf(
    format: str, layout: torch.layout, tmp_path: Path
) -> None:
    path = tmp_path / find_place(format).name
    parts = [torch.ones(2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)]
    td = TensorDict(
        {"a": torch.nested.nested_tensor(parts, layout=layout)}, [2] if layout is torch.jagged else []
    )
    td_core.save(td, path, format=format)
    leaf = td_core.inspect(path).children["a"]
    assert (leaf.kind, leaf.dtype) == ("nested leaf", "torch.bfloat16")
