"""Damaged offsets, lengths, shapes and metadata of nested tensors raise FormatError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict
from td_core.errors import FormatError


@pytest.mark.parametrize("offsets", [[-1, 2, 3], [1, 2, 4], [0, 3, 2], [0, -1, 3], [0, 2, 1 << 62]])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_wrong_offsets_raises(offsets: list[int], tmp_path: Path) -> None:
    parts = [torch.ones(2, 2), torch.ones(1, 2)]
    TensorDict({"j": torch.nested.nested_tensor(parts, layout=torch.jagged)}).memmap(tmp_path / "save")
    (file,) = (tmp_path / "save").glob("*.offsets.memmap")
    file.write_bytes(torch.tensor(offsets).numpy().tobytes())
    with pytest.raises(FormatError, match="the offsets is .*, expected increasing, within 3"):
        TensorDict.load_memmap(tmp_path / "save")


@pytest.mark.parametrize("lengths", [[-1, 2], [13, 1], [1, 1 << 62], [1, -(1 << 62)], [3, 6]])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_wrong_lengths_raises(lengths: list[int], tmp_path: Path) -> None:
    leaf = torch.nested.narrow(
        torch.arange(12).view(2, 6), 1, torch.tensor([1, 2]), torch.tensor([3, 2]), layout=torch.jagged
    )
    TensorDict({"j": leaf}).memmap(tmp_path / "save")
    (file,) = (tmp_path / "save").glob("*.lengths.memmap")
    file.write_bytes(torch.tensor(lengths).numpy().tobytes())
    with pytest.raises(FormatError, match="the lengths is .*, expected from the offsets, within 12"):
        TensorDict.load_memmap(tmp_path / "save")


def make_nested_tensors(layout: torch.layout) -> TensorDict:
    parts = [torch.ones(2, 2), torch.ones(1, 2)]
    return TensorDict({"j": torch.nested.nested_tensor(parts, layout=layout), "a": torch.ones(2)}, [2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"components": -1}, "key 'j': components is -1, expected a number"),
        ({"components": "2"}, "key 'j': components is '2', expected a number"),
        ({"components": 1 << 60}, "key 'j': components is 1152921504606846976, expected a number"),
        ({"components": 7}, "offsets.memmap: key 'j': the size is 24, expected at least 64 bytes"),
        ({"ragged": True}, "key 'j': ragged is True, expected a number"),
        ({"ragged": 9}, "key 'j'|offsets"),
        (
            {"offsets_dtype": "torch.float32"},
            "key 'j': offsets_dtype is 'torch.float32', expected an integer dtype",
        ),
        ({"offsets_dtype": ["x"]}, r"key 'j': offsets_dtype is \['x'\], expected an integer dtype"),
        ({"lengths": 1}, "key 'j': lengths is 1, expected true or false"),
        ({"lengths": True}, "the file of key 'j' is missing: none of .*lengths.memmap"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_wrong_jagged_metadata_raises(
    fields: dict[str, Any], message: str, tmp_path: Path, edit_metadata: Any, assert_load_fails: Any
) -> None:
    make_nested_tensors(torch.jagged).memmap(tmp_path / "save")
    edit_metadata(tmp_path / "save" / "meta.json", lambda meta: dict(meta["entries"])["j"].update(fields))
    assert_load_fails(tmp_path / "save", message)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([2, 2, -1, 2], r"key 'j': the shape of a component is \[-1, 2\], expected a list of sizes"),
        (
            [2, 2, 1 << 61, 2],
            "key 'j': the shape of a component is .*, expected a shape that a tensor can have",
        ),
        ([2, 2, 1], "key 'j': the size is 24, expected at least 32 bytes"),
        ([2, 2, 9, 2], "j.memmap: key 'j': the size is 24, expected at least 88 bytes"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_wrong_component_shapes_raises(
    table: list[int], message: str, tmp_path: Path, assert_load_fails: Any
) -> None:
    make_nested_tensors(torch.strided).memmap(tmp_path / "save")
    (tmp_path / "save" / "j.shape.memmap").write_bytes(torch.tensor(table).numpy().tobytes())
    assert_load_fails(tmp_path / "save", message)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_load_wrong_component_count_raises(
    tmp_path: Path, edit_metadata: Any, assert_load_fails: Any
) -> None:
    make_nested_tensors(torch.strided).memmap(tmp_path / "save")
    edit_metadata(tmp_path / "save" / "meta.json", lambda meta: meta["j"].update(shape=[3, 2]))
    assert_load_fails(
        tmp_path / "save",
        r"key 'j': shape is \[3, 2\], expected as many components as the batch size \[2\] says",
    )
