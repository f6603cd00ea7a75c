"""Files without a header of a collection: their names are split at dots, except where that would clash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import FormatError, TensorDict, load

FIXTURES = Path(__file__).parent / "fixtures"


def write_file(path: Path, names: list[str], metadata: Any = None) -> None:
    """Write a file of float32 tensors of one element, with the numbers of their names."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    for i, name in enumerate(names):
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
    text = json.dumps(header).encode()
    content = torch.arange(float(len(names))).numpy().tobytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["a", "b.c", "b.d.e"], ["a", ("b", "c"), ("b", "d", "e")]),
        (["a", "a.b"], ["a", "a.b"]),
        (["a.b", "a"], ["a.b", "a"]),
        (["a.b", "a.b.c", "a.d"], [("a", "b"), "a.b.c", ("a", "d")]),
        (["", "a..b", ".c", "d."], ["", "a..b", ".c", "d."]),
        (["0.weight", "0.bias"], [("0", "weight"), ("0", "bias")]),
        ([], []),
    ],
    ids=["nested", "clash", "clash later", "deep clash", "empty parts", "numbers", "no tensors"],
)
def test_load_foreign_file_splits_names(names: list[str], keys: list[Any], path: Path) -> None:
    write_file(path, names)
    result = load(path)
    assert type(result) is TensorDict
    assert result.batch_size == torch.Size()
    paths = [key if isinstance(key, tuple) else (key,) for key in keys]
    found = [key if isinstance(key, tuple) else (key,) for key in result.keys(True, True)]
    assert sorted(found) == sorted(paths)
    for i, key in enumerate(paths):
        assert result.get(key).item() == i, key


def test_load_foreign_metadata_is_ignored(path: Path) -> None:
    write_file(path, ["a"], {"format": "pt", "other": "x"})
    assert load(path)["a"] == 0


def test_load_unaligned_file_copies_elements(path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}}'
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"\7" + torch.tensor([2.5]).double().numpy().tobytes()
    )
    for strategy in ("mmap", "read"):
        result = load(path, strategy=strategy)
        assert (result["a"].item(), result["b"].item()) == (7, 2.5)
        assert result["b"].data_ptr() % 8 == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
         "duplicate key 'a'"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
         "'b' is at 0 to 1"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', "'a' is damaged"),
        (b'{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', "F4.*odd shape"),
        (b'{"a":{"dtype":"U8","shape":[9223372036854775807, 4],"data_offsets":[0,1]}}', "needs 36893488147419103228"),
    ],
    ids=["duplicate", "overlap", "encoding", "nan", "odd", "huge"],
)  # fmt: skip
def test_load_hostile_header_raises(text: bytes, message: str, path: Path) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    with pytest.raises(FormatError, match=message):
        load(path, format="safetensors")


def test_load_golden_foreign_file() -> None:
    result = load(FIXTURES / "foreign.safetensors")
    assert {key: result[key].shape for key in result.keys(True, True)} == {
        ("0", "bias"): (2,),
        ("0", "weight"): (2, 3),
        "top": (1,),
    }
