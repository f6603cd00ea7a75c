"""Rows are appended in place where datasets can grow, else the file is replaced; what does not fit changes nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from td_core import (
    FormatError,
    KeyMismatchError,
    LazyStackedTensorDict,
    StructureError,
    TensorDict,
    TensorDictParams,
    UnsupportedOperationError,
    append,
    load,
)
from td_hdf5 import open as open_h5
from td_hdf5 import save

HAS_VALUES = importlib.util.find_spec("td_tensorclass") is not None


def make_values() -> TensorDict:
    package = importlib.import_module("td_tensorclass")
    return TensorDict(
        {"a": torch.arange(2.0), "s": package.NonTensorStack("x", "y"), "m": package.MetaData({"k": 1})}, [2]
    )


#: Collections to which the first two rows of themselves are appended.
COLLECTIONS: dict[str, Any] = {
    "nested": lambda: TensorDict({"a": torch.arange(12.0).view(4, 3), "n": {"b": torch.arange(4)}}, [4]),
    "two batch dims": lambda: TensorDict({"a": torch.arange(12.0).view(4, 3, 1)}, [4, 3], names=["x", None]),
    "lacking dtypes": lambda: TensorDict(
        {"a": torch.ones(4).bfloat16(), "c": torch.ones(4, 2).to(torch.float8_e5m2)}, [4]
    ),
    "no rows": lambda: TensorDict({"a": torch.ones(0, 3)}, [0]),
    "no elements": lambda: TensorDict({"a": torch.ones(4, 0)}, [4]),
    "empty level": lambda: TensorDict({"a": torch.ones(4), "n": {}}, [4]),
    "tied": lambda: (lambda leaf: TensorDict({"a": leaf, "b": leaf}, [4]))(torch.arange(4)),
    "stack": lambda: TensorDict(
        {"s": LazyStackedTensorDict(*(TensorDict({"x": torch.tensor(i)}) for i in range(4)))}, [4]
    ),
    "params": lambda: TensorDictParams(TensorDict({"w": torch.ones(4, 2)}, [4]), no_convert=True),
}
if HAS_VALUES:
    COLLECTIONS["values"] = make_values


@pytest.mark.parametrize(
    "options", [{}, {"chunks": 2, "compression": "gzip", "shuffle": True}], ids=["contiguous", "chunks"]
)
@pytest.mark.parametrize("name", COLLECTIONS)
def test_append_equals_cat(name: str, options: Any, path: Path, same: Any) -> None:
    data = COLLECTIONS[name]()
    save(data, path, **options)
    for _ in range(2):
        append(data[:2], path)
    expected = torch.cat([data, data[:2], data[:2]])
    same(load(path).to_tensordict(), expected.to_tensordict())
    with h5py.File(path) as file:
        chunked = [item for item in list_datasets(file) if item.size]
        assert all(item.chunks for item in chunked)
        numbers = [item for item in chunked if h5py.check_string_dtype(item.dtype) is None]
        assert {item.compression for item in numbers} <= ({"gzip"} if options else {None})


def list_datasets(file: h5py.File) -> list[h5py.Dataset]:
    found: list[h5py.Dataset] = []
    file.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
    return found


def test_append_to_chunks_is_in_place(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=2)
    before = os.stat(path).st_ino
    opened = open_h5(path)
    assert opened["a"].sum() == 66
    append(td[1:], path)
    assert os.stat(path).st_ino == before
    assert opened["a"].sum() == 66  # the rows that it was opened with
    assert open_h5(path)[[6, 0]]["n", "b"].tolist() == [3, 0]


def test_append_below_level_without_batch_dims_adds_its_rows(path: Path) -> None:
    data = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.arange(3)}}, [3])
    live = data.to_h5(path, chunks=True)
    live["n"].batch_size = []
    live.close()
    append(data[:1], path)
    assert load(path).to_dict()["n"]["b"].tolist() == [0, 1, 2, 0]
    assert load(path).batch_size == (4,)


def test_append_to_contiguous_replaces_the_file_once(path: Path, td: TensorDict) -> None:
    save(td, path)
    first = os.stat(path).st_ino
    append(td, path)
    second = os.stat(path).st_ino
    append(td, path)
    assert first != second == os.stat(path).st_ino
    assert load(path).batch_size == (12,)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "missing key": (lambda td: td.select("a"), KeyMismatchError, r"the rows lack the keys \[\('n', 'b'\), \('n', 'c'\)\]"),
    "other key": (lambda td: td.clone().set("z", torch.ones(4)), KeyMismatchError, r"have the other keys \['z'\]"),
    "dtype": (lambda td: td.clone().set("a", td["a"].int()), StructureError, "key 'a' has the dtype torch.int32"),
    "shape": (lambda td: td.clone().set("a", td["a"][:, :2]), StructureError, r"rows of the shape \[2\]; the save has"),
    "no batch dim": (lambda td: TensorDict(td, batch_size=[]), StructureError, r"have the batch size \[\], the save \[4\]"),
    "more batch dims": (lambda td: td.unsqueeze(0), StructureError, r"the rows have the batch size \[1, 4\]"),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_append_rows_that_do_not_fit_raises(
    name: str, options: Any, path: Path, td: TensorDict, same: Any
) -> None:
    save(td, path, **options)
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        append(make(td), path)
    same(load(path), td)


def test_append_to_save_without_batch_dim_raises(path: Path) -> None:
    save(TensorDict({"a": torch.ones(3)}), path)
    with pytest.raises(UnsupportedOperationError, match="has no batch dim along which rows can be added"):
        append(TensorDict({"a": torch.ones(3)}), path)


def test_append_to_save_with_checksums_raises(path: Path, td: TensorDict) -> None:
    save(td, path, checksums=True)
    with pytest.raises(UnsupportedOperationError, match="has checksums, which new rows would contradict"):
        append(td, path)


@pytest.mark.parametrize("content", ["plain", "fields", "group"])
def test_append_to_a_file_of_another_program_raises_and_keeps_it(content: str, path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["t/x"] = torch.arange(4.0).numpy()
        file["t/x"].attrs["unit"] = "uV"
        if content == "fields":
            file["t/c"] = np.array([(1, 0.5)] * 4, dtype=[("a", "i2"), ("b", "f8")])
    before = path.read_bytes()
    with h5py.File(path, "r+") as file:
        place = file["t"] if content == "group" else path
        with pytest.raises(
            UnsupportedOperationError, match="cannot append rows to .*: td has not written it; save"
        ):
            append(load(place), place)
    assert path.read_bytes() == before


def test_append_to_missing_file_raises(path: Path, td: TensorDict) -> None:
    with pytest.raises(FileNotFoundError):
        append(td, path, format="hdf5")


def test_rows_of_unfinished_append_are_ignored_and_overwritten(path: Path, td: TensorDict, same: Any) -> None:
    save(td, path, chunks=2)
    with h5py.File(path, "r+") as file:  # as an append that was killed before it wrote the header
        file["a"].resize(9, axis=0)
        file["a"][4:] = 7
    same(load(path), td)
    same(load(path, strategy="read"), td)
    same(open_h5(path).clone(), td)
    append(td[:1], path)
    same(load(path), torch.cat([td, td[:1]]))


def test_dataset_with_too_few_rows_is_an_error(path: Path, td: TensorDict) -> None:
    save(td, path, chunks=2)
    with h5py.File(path, "r+") as file:
        file["a"].resize(3, axis=0)
    with pytest.raises(FormatError, match=r"the dataset 'a' has .* the shape \[3, 3\]"):
        load(path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"chunks": 1}], ids=str)
def test_append_to_a_strided_nested_tensor_names_it(options: dict[str, Any], path: Path) -> None:
    uneven = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.strided)
    data = TensorDict({"x": torch.arange(2.0), "n": {"boxes": uneven}}, [2])
    save(data, path, **options)
    before = path.read_bytes()
    with pytest.raises(
        UnsupportedOperationError, match="\\('n', 'boxes'\\) is a nested tensor with the layout torch.strided"
    ):
        append(data, path)
    assert path.read_bytes() == before
    save(TensorDict({"x": torch.arange(2.0), "n": {"boxes": torch.ones(2, 2)}}, [2]), path, **options)
    with pytest.raises(
        StructureError,
        match="\\('n', 'boxes'\\) has the layout torch.strided \\(nested\\), in the save torch.strided",
    ):
        append(data, path)


def test_append_in_place_corrects_the_facts_for_other_programs(path: Path) -> None:
    save(TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2]), path, chunks=1)
    append(TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3]), path)
    with h5py.File(path) as file:
        facts = [file.attrs["td_batch_size"], file["n"].attrs["td_batch_size"]]
    assert facts == [b"[5]", b"[5]"] or facts == ["[5]", "[5]"]
