"""The example plugin, installed with td-core."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from td_example_codec import Masked, NpzSerializer

import td_core
from td_core import MissingPluginError, TensorDict
from td_core.errors import CodecError, FormatError
from td_core.spi import decode, encode
from td_core.testing import CollectionTests, SerializerTests


def masked_array() -> Any:
    return np.ma.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], mask=[[0, 1], [0, 0], [1, 1]], dtype=np.float32)


class TestNpz(SerializerTests):
    suffix = ".npz"

    def serializer(self) -> NpzSerializer:
        return NpzSerializer()

    def collections(self) -> dict[str, Any]:
        masked = TensorDict({"x": masked_array(), "y": {"z": masked_array()}}, batch_size=[3])
        dense = {name: data for name, data in super().collections().items() if name != "jagged"}
        return {**dense, "masked": masked}


class TestMaskedInside(CollectionTests):
    """Conformance suite on collections of plain tensors, with the plugin active."""

    def make(self) -> TensorDict:
        return TensorDict({"x": torch.ones(3, 2), "level": {"y": torch.zeros(3, 2)}}, batch_size=[3, 2])


def test_plugins_lists_active_record_with_hooks() -> None:
    (record,) = [each for each in td_core.plugins() if each.id == "example-codec"]
    assert (record.distribution, record.version, record.state) == ("td-example-codec", "0.1.0", "active")
    assert set(record.hooks) == {"td_node_kinds", "td_coercers", "td_serializers"}


def test_construct_masked_array_stores_masked_node() -> None:
    td = TensorDict({"x": masked_array()}, batch_size=[3])
    assert type(td["x"]) is Masked
    assert td["x"].filled(-1.0).tolist() == [[1.0, -1.0], [3.0, 4.0], [-1.0, -1.0]]
    assert np.ma.allequal(td["x"].to_numpy(), masked_array())


def test_index_and_stack_masked_entry_keeps_kind() -> None:
    td = TensorDict({"x": masked_array()}, batch_size=[3])
    assert type(td[1:]["x"]) is Masked
    assert td[1:]["x"].filled(0.0).tolist() == [[3.0, 4.0], [0.0, 0.0]]
    stacked = torch.stack([td, td])
    assert type(stacked["x"]) is Masked
    assert stacked["x"].batch_size == torch.Size([2, 3])


def test_encode_masked_entry_stores_kind_and_provider() -> None:
    encoded = encode(TensorDict({"x": masked_array()}, batch_size=[3]))
    assert encoded.nodes[1]["kind"] == "td_example_codec.Masked"
    assert encoded.nodes[1]["from"] == "td-example-codec==0.1.0"
    assert json.loads(json.dumps(encoded.nodes)) == encoded.nodes
    assert type(decode(encoded)["x"]) is Masked


@pytest.mark.parametrize("again", [lambda td: decode(encode(td)), lambda td: pickle.loads(pickle.dumps(td))])
def test_round_trip_masked_keeps_device_names_and_lock(again: Any) -> None:
    td = TensorDict({"x": masked_array()}, batch_size=[3], device="cpu", names=["row"]).lock_()
    assert td["x"].names == ["row"]
    masked = again(td["x"])
    assert (type(masked), masked.device, masked.names) == (Masked, torch.device("cpu"), ["row"])
    assert masked.is_locked
    assert not decode(encode(td["x"].clone())).is_locked


class Doubtful(Masked):
    """A subclass without a registered kind."""


@pytest.mark.parametrize("again", [lambda td: decode(encode(td)), lambda td: pickle.loads(pickle.dumps(td))])
def test_round_trip_subclass_returns_subclass(again: Any) -> None:
    td = TensorDict({"x": Doubtful.from_numpy(masked_array(), torch.Size([3]))}, batch_size=[3])
    assert type(again(td)["x"]) is Doubtful


def test_save_and_load_methods_restore_masked_array(tmp_path: Path) -> None:
    td = TensorDict({"x": masked_array()}, batch_size=[3])
    path = tmp_path / "x.npz"
    assert td.save(path, format="npz", compress=True) is td
    again = TensorDict.load(path, "cpu")
    assert np.ma.allequal(again["x"].to_numpy(), masked_array())
    assert again.device == torch.device("cpu")
    assert list(tmp_path.iterdir()) == [path]


def test_save_unknown_option_raises_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        TensorDict().save(tmp_path / "x.npz", format="npz", num_threads=4)
    assert (
        str(caught.value)
        == "the serializer 'npz' has no option 'num_threads' for save(); its options: 'compress'"
    )


def test_save_failure_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npz"
    td = TensorDict({"a": torch.ones(2)})
    td.save(path, format="npz")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="no space left"):
        td.apply(torch.zeros_like).save(path, format="npz")
    assert td_core.load(path)["a"].tolist() == [1.0, 1.0]
    assert list(tmp_path.iterdir()) == [path]


def test_save_jagged_leaf_raises_before_writing(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(CodecError, match=r"cannot store \('n', 'a'\) in an .npz file"):
        TensorDict({"n": {"a": jagged}}).save(tmp_path / "x.npz", format="npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda header: header.update(leaves=[["torch.nn", [2]]]),
            "8 bytes of uint8 for the shape .* of 'torch.nn'",
        ),
        (lambda header: header.update(leaves=[["torch.float32", [1000]]]), "8 bytes of uint8 for the shape"),
        (lambda header: header.update(leaves=[]), "refers to"),
        (lambda header: header["nodes"][0].update(kind="no such kind"), "no such kind"),
        (lambda header: header["nodes"][0].update(entries=[["a", [7]]]), "refers to"),
        (lambda header: header.pop("values"), "values of the td header is not a list"),
        (lambda header: header.update(version=7), "the td header has the version 7"),
    ],
)
def test_load_wrong_header_raises_format_error(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    TensorDict({"a": torch.ones(2)}).save(path, format="npz")
    with np.load(path) as arrays:
        members = dict(arrays)
    header = json.loads(members["td-example-codec.json"].tobytes())
    change(header)
    members["td-example-codec.json"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(path, **members)
    with pytest.raises(FormatError, match=rf"x\.npz('|:).*{message}"):
        td_core.load(path)


def test_load_flipped_byte_raises_format_error(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    TensorDict({"a": torch.zeros(1000)}).save(path, format="npz")
    with zipfile.ZipFile(path) as file:
        offset = file.getinfo("0.npy").header_offset
    content = bytearray(path.read_bytes())
    content[offset + 2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match="Bad CRC-32"):
        td_core.load(path)


@pytest.mark.parametrize("selection", ["none", "-example-codec"])
def test_load_inactive_plugin_raises_with_package_name(selection: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    TensorDict({"x": masked_array()}, batch_size=[3]).save(path, format="npz")
    code = f"""
import td_core, td_example_codec
from pathlib import Path
try:
    td_core.load({str(path)!r})
except td_core.TensorDictError as error:
    print(error)
try:
    td_example_codec.NpzSerializer().load(Path({str(path)!r}))
except td_core.MissingPluginError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TD_PLUGINS": selection, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith(("the format 'memmap' is provided by", "no registered format recognises"))
    # With TD_PLUGINS=none, other installed packages are listed too.
    assert "'td-example-codec'" in first.partition("installed but not active: ")[2]
    assert second == (
        f"{path}: key 'x', of the kind 'td_example_codec.Masked', was written by 'td-example-codec' 0.1.0, "
        "which is installed but not active: TD_PLUGINS leaves it out"
    )


def test_split_value_unknown_type_raises() -> None:
    with pytest.raises((MissingPluginError, CodecError)):
        td_core.spi.split_value({"x": object()})


def test_readme_example_prints_expected_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    assert len(text.splitlines()) <= 40
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out == re.findall(r"# (.*)", code)[0] + "\n"
