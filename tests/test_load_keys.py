"""``keys=`` of load and open means the same in every format: a key, a key path, or several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict
from td_core.errors import UnsupportedOperationError
from td_core.testing import assert_same

FORMS = {
    "memmap": ("td_memmap", "save", {}),
    "archive": ("td_memmap", "save.tdz", {"format": "memmap"}),
    "consolidated": ("td_distributed", "save", {}),
    "safetensors": ("td_safetensors", "save.safetensors", {}),
    "shards": ("td_safetensors", "shards", {"format": "safetensors", "max_shard_size": 20}),
    "hdf5": ("td_hdf5", "save.h5", {}),
    "zarr": ("td_zarr", "save.zarr", {}),
    "parquet": ("td_arrow", "save.parquet", {}),
    "arrow": ("td_arrow", "save.arrow", {}),
}


def make_data() -> Any:
    inner = TensorDict({"b": torch.arange(3), "c": torch.zeros(3, 2)}, [3])
    return TensorDict({"a": torch.arange(3.0), "n": inner, "last": torch.ones(3, 1)}, [3])


@pytest.fixture(params=FORMS)
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    package, name, options = FORMS[request.param]
    pytest.importorskip(package)
    if package == "td_arrow":
        pytest.importorskip("pyarrow")
    td_core.save(make_data(), tmp_path / name, **{"format": request.param, **options})
    return tmp_path / name


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        ("a", ["a"]),
        (("n", "b"), [("n", "b")]),
        (["n"], ["n"]),
        ([("n", "c"), "last"], [("n", "c"), "last"]),
    ],
    ids=["key", "path", "node", "several"],
)
def test_load_and_open_keys_select_as_select(keys: Any, selected: list[Any], save: Path) -> None:
    expected = make_data().select(*selected)
    assert_same(td_core.load(save, keys=keys).to_tensordict(), expected)
    try:
        opened = td_core.open(save, keys=keys)
    except UnsupportedOperationError:
        return
    assert_same(opened.to_tensordict(), expected)


def test_load_missing_key_raises_error_with_the_key(save: Path) -> None:
    with pytest.raises(KeyError, match="missing"):
        td_core.load(save, keys=["a", "missing"])


@pytest.mark.parametrize("name", ["hdf5", "zarr", "safetensors"])
@pytest.mark.parametrize("rows", [0, [0, 2], slice(0, 2)], ids=["int", "list", "slice"])
def test_load_rows_of_a_level_below_the_root_names_the_way(name: str, rows: Any, tmp_path: Path) -> None:
    package, file, _ = FORMS[name]
    pytest.importorskip(package)
    td_core.save(TensorDict({"n": TensorDict({"a": torch.arange(3)}, [3])}), tmp_path / file)
    with pytest.raises(
        IndexError, match=r"save\S* rows=.* of the whole save: too many indices: .* If a level below has them"
    ):
        td_core.load(tmp_path / file, keys=["n"], rows=rows)
    level = td_core.load(tmp_path / file, keys=["n"])["n"]
    assert level[rows]["a"].tolist() == torch.arange(3)[rows].tolist()


#: Formats that save a mapping with modules, and not collections alone.
CHECKPOINTS = [name for name in FORMS if name not in ("consolidated", "parquet", "arrow")]


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    package, name, options = FORMS[request.param]
    pytest.importorskip(package)
    options = {"format": request.param, **options}
    options["format"] = {"archive": "memmap", "shards": "safetensors"}.get(request.param, options["format"])
    td_core.save(make_mapping(), tmp_path / name, **options)
    return tmp_path / name


def make_mapping() -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 3.0)
    mapping = {
        "model": model,
        "tied": model.weight,
        "buffer": torch.arange(9),
        "step": 3,
        7: (torch.ones(2), torch.zeros(1)),
    }
    return {**mapping, "rows": TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3)}}, [3])}


WEIGHT, BIAS = torch.full((1, 2), 3.0), torch.full((1,), 3.0)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("model", {"model": {"weight": WEIGHT, "bias": BIAS}}),
        (["model", "tied"], {"model": {"weight": WEIGHT, "bias": BIAS}, "tied": WEIGHT}),
        ([("model", "weight")], {"model": {"weight": WEIGHT}}),
        (["model.bias", "model.weight"], {"model": {"weight": WEIGHT, "bias": BIAS}}),
        (["tied"], {"tied": WEIGHT}),
        ([(7,)], {7: (torch.ones(2), torch.zeros(1))}),
        ([(7, 0)], {7: (torch.ones(2),)}),
        ([("rows", "b")], {"rows": {"b": {"c": torch.ones(3)}}}),
        (["model", (7, 0)], {"model": {"weight": WEIGHT, "bias": BIAS}, 7: (torch.ones(2),)}),
    ],
)
def test_load_keys_of_checkpoint_select_of_its_mapping(keys: Any, expected: Any, checkpoint: Path) -> None:
    found = td_core.load(checkpoint, keys=keys)
    if "rows" in found:
        found["rows"] = found["rows"].to_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_load_keys_of_checkpoint_take_an_iterator_and_values(checkpoint: Path) -> None:
    assert td_core.load(checkpoint, keys=iter(["step"])) == {"step": 3}
    assert td_core.load(checkpoint, keys=[]) == {}


def test_load_missing_key_of_checkpoint_lists_its_keys(checkpoint: Path) -> None:
    with pytest.raises(
        KeyError, match=r"checkpoint .* has no 'missing'; its keys: 'model', 'tied', 'buffer', 'step'"
    ):
        td_core.load(checkpoint, keys=["step", "missing"])


def test_load_missing_key_of_checkpoint_is_left_out_unless_strict(checkpoint: Path) -> None:
    assert td_core.load(checkpoint, keys=["step", "missing"], strict=False) == {"step": 3}


def test_load_keys_of_checkpoint_into_objects_returns_rest(checkpoint: Path) -> None:
    model = torch.nn.Linear(2, 1)
    assert td_core.load(checkpoint, into={"model": model}, keys=["model", "step"]) == {"step": 3}
    assert model.weight.equal(WEIGHT)
