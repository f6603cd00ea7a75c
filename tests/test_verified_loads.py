"""``verify=True`` of load: one flipped bit of an element is an error in every format that has checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import td_core
from td_core import TensorDict
from td_core._formats.serializers import SERIALIZERS
from td_core.errors import FormatError, UnsupportedOperationError
from td_core.spi import Serializer


class Form(NamedTuple):
    """How a format is saved, and whether a load without ``verify`` finds a flipped bit, too."""

    package: str
    name: str
    options: dict[str, Any]
    is_always_found: bool = False


FORMS = {
    "memmap": Form("td_memmap", "save", {}),
    "archive": Form("td_memmap", "save.tdz", {"format": "memmap"}),
    "safetensors": Form("td_safetensors", "save.safetensors", {}),
    "shards": Form("td_safetensors", "shards", {"format": "safetensors", "max_shard_size": 600}),
    "hdf5": Form("td_hdf5", "save.h5", {}),
    "zarr": Form("td_zarr", "save.zarr", {"compressors": None}, is_always_found=True),
    "consolidated": Form("td_distributed", "save", {}),
    "parquet": Form("td_arrow", "save.parquet", {"compression": "none"}),
    "arrow": Form("td_arrow", "save.arrow", {}),
}
CHECKPOINTS = ["memmap", "archive", "safetensors", "hdf5", "zarr"]

#: Elements that are found in a file.
ELEMENTS = torch.linspace(1.5, 7.5, 128).sin()


def save_form(form: str, data: Any, folder: Path, **options: Any) -> Path:
    package, name, more, _ = FORMS[form]
    pytest.importorskip(package)
    if package == "td_arrow":
        pytest.importorskip("pyarrow")
    td_core.save(data, folder / name, **{"format": form, **more}, **options)
    return folder / name


def flip_bit(path: Path) -> None:
    """Change the last bit of one element."""
    part = ELEMENTS.numpy().tobytes()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        content = bytearray(file.read_bytes()) if file.is_file() else bytearray()
        position = content.find(part)
        if position >= 0:
            content[position + 64] ^= 1
            file.write_bytes(content)
            return
    raise AssertionError(f"no file of {path} has the elements")


@pytest.mark.parametrize("form", FORMS)
def test_verified_load_finds_a_flipped_bit(form: str, tmp_path: Path) -> None:
    data = TensorDict({"x": torch.zeros(128), "w": ELEMENTS}, [128])
    path = save_form(form, data, tmp_path, checksums=True)
    assert td_core.load(path, verify=True)["w"].equal(ELEMENTS)
    flip_bit(path)
    target = TensorDict({"x": torch.ones(128), "w": torch.ones(128)}, [128])
    for call in (td_core.load, TensorDict.load, target.load_):
        with pytest.raises(FormatError, match="storage" if form == "consolidated" else r"\bw\b") as caught:
            call(path, verify=True)
        assert path.name in str(caught.value)
    assert all(leaf.eq(1).all() for leaf in target.values())
    if FORMS[form].is_always_found:
        with pytest.raises(FormatError):
            td_core.load(path)
    elif form != "parquet":
        assert not td_core.load(path, verify=False)["w"].equal(ELEMENTS)


@pytest.mark.parametrize("form", FORMS)
def test_verified_load_without_checksums_checks_the_rest(form: str, tmp_path: Path) -> None:
    path = save_form(form, TensorDict({"w": ELEMENTS}, [128]), tmp_path)
    assert td_core.load(path, verify=True)["w"].equal(ELEMENTS)
    with pytest.raises(TypeError, match="has no option 'verifyy'|unexpected keyword"):
        td_core.load(path, verifyy=True)


@pytest.mark.parametrize("form", ["safetensors", "hdf5", "zarr", "memmap"])
def test_verified_open_finds_a_flipped_bit(form: str, tmp_path: Path) -> None:
    path = save_form(form, TensorDict({"w": ELEMENTS}, [128]), tmp_path, checksums=True)
    assert td_core.open(path, verify=True)["w"][3] == ELEMENTS[3]
    flip_bit(path)
    with pytest.raises(FormatError):
        td_core.open(path, verify=True)


@pytest.mark.parametrize("form", CHECKPOINTS)
def test_verified_load_into_a_module_leaves_it_as_it_was(form: str, tmp_path: Path) -> None:
    model, other = nn.Linear(128, 1), nn.Linear(128, 1)
    with torch.no_grad():
        model.weight.copy_(ELEMENTS[None])
    path = save_form(form, {"model": model, "epoch": 3}, tmp_path, checksums=True)
    assert td_core.load(path, into={"model": other}, verify=True) == {"epoch": 3}
    assert other.weight.equal(model.weight)
    nn.init.zeros_(other.weight)
    flip_bit(path)
    with pytest.raises(FormatError, match="weight"):
        td_core.load(path, into={"model": other}, verify=True)
    assert not other.weight.any()


def test_verified_load_needs_a_format_with_a_check(tmp_path: Path) -> None:
    class Pair(Serializer):
        name = "pair"

        def save(self, data: Any, location: Any) -> Any:
            return location.write_text("pair") and data

        def load(self, location: Any) -> Any:
            return TensorDict({"a": 1})

        def detect(self, location: Any, head: bytes) -> bool:
            return head == b"pair"

    SERIALIZERS.add(Pair())
    try:
        td_core.save(TensorDict(), tmp_path / "p", format="pair")
        assert td_core.load(tmp_path / "p", verify=False)["a"] == 1
        with pytest.raises(UnsupportedOperationError, match=r"'pair' does not implement verify\(\)"):
            td_core.load(tmp_path / "p", verify=True)
    finally:
        SERIALIZERS.remove("pair")
