"""Locations of saves, and the operations of a format beside save and load."""

from __future__ import annotations

import inspect
import io
import os
from pathlib import Path
from typing import Any
from zipfile import ZipInfo

import pytest
import torch

import td_core
from td_core import (
    FormatError,
    MissingPluginError,
    PluginError,
    TensorDict,
    UnsupportedOperationError,
    from_schema,
)
from td_core._formats import locations as _locations
from td_core._formats.locations import HEAD_SIZE, as_location
from td_core._formats.serializers import SERIALIZERS
from td_core.spi import Serializer, hookimpl
from td_core.testing import installed

pytestmark = pytest.mark.usefixtures("formats")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("a/b.mem", Path("a/b.mem")),
        (Path("a"), Path("a")),
        (os.fspath("C:\\x"), Path("C:\\x")),
        ("c://x", Path("c://x")),
        ("mem://a/b", "mem://a/b"),
        ("MEM://a", "MEM://a"),
        ("cache::mem://a", "cache::mem://a"),
        ("a::b", Path("a::b")),
        ("file:///a/b%20c", Path("/a/b c")),
        ("file://localhost/a", Path("/a")),
        (None, None),
    ],
)
def test_as_location_returns_path_or_url(location: Any, expected: Any) -> None:
    result = as_location(location)
    assert (type(result), result) == (type(expected), expected)


def test_as_location_path_like_returns_path(tmp_path: Path) -> None:
    with os.scandir(tmp_path.parent) as entries:
        assert as_location(next(entries)).parent == tmp_path.parent


def test_as_location_file_url_of_host_raises() -> None:
    with pytest.raises(ValueError, match="'file://host/a' is not of this machine: write file:///PATH"):
        td_core.load("file://host/a")


@pytest.mark.parametrize(
    "location",
    ["mem://bucket/x", "MEM://bucket/x", "cache::s3://bucket/x", io.BytesIO(), ZipInfo()],
    ids=["URL", "upper-case URL", "chained URL", "BytesIO", "object"],
)
def test_operations_pass_location_unchanged(location: Any, formats: Any, data: TensorDict) -> None:
    assert td_core.save(data, location, format="memory") is data
    assert list(formats.saved) == [location]
    assert td_core.load(location) is data
    assert TensorDict.load(location) is data
    assert td_core.open(location) is data
    assert TensorDict.open(location) is data
    assert data.clone().zero_().load_(location)["a"].tolist() == [0, 1, 2]
    td_core.append(data, location)
    assert td_core.load(location).batch_size == (6,)
    assert str(td_core.inspect(location)).startswith("x: TensorDict [3]")
    assert td_core.verify(location).ok
    assert set(formats.heads) == {b""}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            lambda data: td_core.save(data, "mem://x"),
            "the format 'memmap' does not accept 'mem://x' as a location; formats that do: 'memory'",
        ),
        (
            lambda data: td_core.save(data, "s3://x", format="memory"),
            "the format 'memory' does not accept 's3://x' as a location; pass a local path",
        ),
        (
            lambda data: td_core.load("s3://x"),
            "no registered format accepts 's3://x' as a location; pass a local path",
        ),
        (
            lambda data: td_core.load(ZipInfo(), format="plain"),
            "the format 'plain' does not accept a zipfile.ZipInfo as a location; formats that do: 'memory'",
        ),
        (
            lambda data: td_core.open([1]),
            "no registered format accepts a list as a location; pass a local path",
        ),
        (
            lambda data: td_core.load(None),
            "no registered format accepts a NoneType as a location; pass a local path",
        ),
        (
            lambda data: td_core.create(data, None, format="memory"),
            "the serializer 'memory' needs a path to save to; got None",
        ),
    ],
)
def test_location_of_wrong_type_raises(action: Any, message: str, data: TensorDict) -> None:
    with pytest.raises(TypeError) as caught:
        action(data)
    assert str(caught.value) == message


def test_load_url_without_save_raises(formats: Any) -> None:
    with pytest.raises(FormatError, match="no registered format recognises 'mem://x'"):
        td_core.load("mem://x")


def test_load_reads_head_of_file_once(
    formats: Any, data: TensorDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    td_core.save(data, path, format="memory")
    opened: list[Path] = []
    original = _locations.open_regular
    monkeypatch.setattr(_locations, "open_regular", lambda path: opened.append(path) or original(path))
    assert td_core.load(path) is data
    assert opened == [path]
    assert formats.heads == [b"MEMORY" + bytes(HEAD_SIZE - 6)]


def test_load_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="cannot open .*pipe: it is not a regular file"):
        td_core.load(tmp_path / "pipe")


def save_as_method(data: TensorDict, path: Path, **options: Any) -> None:
    data.save(path, **options)


def create_from(data: TensorDict, path: Path, **options: Any) -> None:
    td_core.create(data, path, **options)


@pytest.mark.parametrize("action", [save_as_method, td_core.save, create_from])
@pytest.mark.parametrize("name", ["x.mem", "X.MEM", "folder/x.mem/"])
def test_save_suffix_selects_format(
    action: Any, name: str, data: TensorDict, tmp_path: Path, formats: Any
) -> None:
    (tmp_path / "folder").mkdir()
    action(data, f"{tmp_path}/{name}")
    assert list(formats.saved) == [tmp_path / name]


@pytest.mark.parametrize("action", [save_as_method, td_core.save, create_from])
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("y.zarr", "td-zarr"),
        ("model.safetensors", "td-safetensors"),
        ("z.h5", "td-hdf5"),
        *((f"t.{suffix}", "td-arrow") for suffix in ("parquet", "pq", "arrow", "feather", "ipc")),
    ],
)
def test_save_suffix_of_missing_format_names_package(
    action: Any, name: str, package: str, data: TensorDict, tmp_path: Path
) -> None:
    with pytest.raises(MissingPluginError, match=f"pip install ./packages/td-store ./packages/{package} "):
        action(data, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_save_url_with_suffix_selects_format(data: TensorDict, formats: Any) -> None:
    td_core.save(data, "mem://a/x.mem")
    assert list(formats.saved) == ["mem://a/x.mem"]


def test_save_format_overrules_suffix(data: TensorDict, tmp_path: Path, formats: Any) -> None:
    data.save(tmp_path / "x.mem", format="memmap")
    assert (tmp_path / "x.mem").read_text() == "plain"
    assert not formats.saved


def test_save_suffix_of_two_formats_raises(data: TensorDict, tmp_path: Path, formats: Any) -> None:
    class Other(type(formats)):
        name = "other"

    SERIALIZERS.add(Other())
    try:
        with pytest.raises(
            FormatError,
            match="more than one format has the suffix of '.*x.mem': pass format=, one of 'memory', 'other'",
        ):
            td_core.save(data, tmp_path / "x.mem")
    finally:
        SERIALIZERS.remove("other")


@pytest.mark.parametrize("source", [{"a": torch.zeros(2)}, None, torch.zeros(2), [TensorDict()]])
@pytest.mark.parametrize("operation", [td_core.save, td_core.create, td_core.append])
def test_save_of_other_object_raises(operation: Any, source: object, tmp_path: Path) -> None:
    error: type[Exception] = TypeError
    message = (
        f"{operation.__name__}\\(\\) takes a collection, such as a TensorDict; got {type(source).__name__}"
    )
    if isinstance(source, dict):
        message += "; from_dict\\(\\) and from_pytree\\(\\) convert nested dicts"
    if operation is td_core.save:
        message = message.replace("TensorDict;", "TensorDict, or a mapping;")
        message += (
            ": save\\({'name': ...}, path\\) saves modules, optimizers, tensors and other values by name"
        )
        if isinstance(source, dict):
            error = UnsupportedOperationError
            message = "the format 'memory' stores collections, and has no place for a mapping with modules"
    with pytest.raises(error, match=message + "$" if error is TypeError else message):
        operation(source, tmp_path / "x.mem")


def test_save_suffix_of_default_format_saves(data: TensorDict, tmp_path: Path) -> None:
    td_core.save(data, tmp_path / "x.tdz")
    assert (tmp_path / "x.tdz").exists()


def test_load_known_suffix_names_missing_package(tmp_path: Path) -> None:
    (tmp_path / "x.zarr").mkdir()
    with pytest.raises(
        MissingPluginError, match="the format 'zarr' is provided by the package 'td-zarr', which is not"
    ):
        td_core.load(tmp_path / "x.zarr")
    with pytest.raises(MissingPluginError, match="the format 'zarr' is provided by the package 'td-zarr'"):
        td_core.load(tmp_path / "x.zarr", format="zarr")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda data, path: td_core.open(path), "open(); load() reads it completely"),
        (
            lambda data, path: td_core.create(data, path, format="plain"),
            "create(); save() a collection of zeros",
        ),
        (
            lambda data, path: td_core.append(data, path),
            "append(); load() it, torch.cat() the rows and save() the result",
        ),
        (lambda data, path: td_core.inspect(path), "inspect(); load() it and print the result"),
        (
            lambda data, path: td_core.verify(path),
            "verify(); load() raises FormatError for damage that it finds",
        ),
    ],
)
def test_operation_that_format_lacks_raises(
    action: Any, message: str, data: TensorDict, tmp_path: Path
) -> None:
    td_core.save(data, tmp_path / "x", format="plain")
    with pytest.raises(UnsupportedOperationError) as caught:
        action(data, tmp_path / "x")
    assert str(caught.value) == f"the format 'plain' does not implement {message}"
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    ("action", "operation", "known"),
    [
        (lambda data: td_core.save(data, "mem://x", format="memory", no=1), "save", "'level'"),
        (lambda data: td_core.open("mem://x", format="memory", no=1), "open", "'mode', 'keys', 'part'"),
        (lambda data: td_core.create(data, "mem://x", format="memory", no=1), "create", "'chunk'"),
        (lambda data: td_core.append(data, "mem://x", format="memory", no=1), "append", "'flush'"),
        (lambda data: td_core.inspect("mem://x", format="memory", no=1), "inspect", "none"),
        (lambda data: td_core.verify("mem://x", format="memory", no=1), "verify", "'progress'"),
    ],
)
def test_operation_unknown_option_raises(
    action: Any, operation: str, known: str, data: TensorDict, formats: Any
) -> None:
    with pytest.raises(TypeError) as caught:
        action(data)
    assert str(caught.value) == (
        f"the serializer 'memory' has no option 'no' for {operation}(); its options: {known}"
    )
    assert (formats.saved, formats.calls) == ({}, [])


def test_open_passes_mode_keys_and_options(formats: Any, data: TensorDict) -> None:
    td_core.save(data, "mem://x", format="memory")
    td_core.open("mem://x", mode="r+", keys=["a", ("b", "c")], part=3)
    TensorDict.open("mem://x", mode="c", keys="a")
    assert formats.calls == [("open", "r+", ["a", ("b", "c")], 3), ("open", "c", ["a"], 0)]
    with pytest.raises(ValueError, match=r"^mode is one of 'r', 'r\+', 'c'; got 'w'$"):
        td_core.open("mem://x", mode="w")


@pytest.mark.parametrize("name", ["location", "prefix", "filename"])
def test_from_schema_creates_save_of_format(name: str, formats: Any) -> None:
    schema = {"a": ([2], torch.float32), ("n", "b"): ([], torch.int64)}
    result = from_schema(schema, batch_size=[3], storage="memory", chunk=4, **{name: "mem://x"})
    assert result is formats.saved["mem://x"]
    assert formats.calls == [("create", 4)]
    assert (result["a"].shape, result["n", "b"].dtype) == ((3, 2), torch.int64)


def test_from_schema_wrong_storage_raises() -> None:
    with pytest.raises(MissingPluginError, match="no installed package provides the format 'disk'"):
        from_schema({"a": ([2], torch.float32)}, storage="disk")
    with pytest.raises(TypeError, match=r"^from_schema\(storage='memory'\) takes one location; got 0$"):
        from_schema({"a": ([2], torch.float32)}, storage="memory")
    with pytest.raises(TypeError, match="takes no prefix with storage=None"):
        from_schema({"a": ([2], torch.float32)}, prefix="x")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"suffixes": ".x"}, "the suffixes of the format 'odd' are not a tuple: '.x'"),
        ({"schemes": (1,)}, r"the schemes of the format 'odd' are not a tuple: \(1,\)"),
        ({"locations": [io.BytesIO]}, "the locations of the format 'odd' are not a tuple"),
        (
            {"detect": lambda self, path: True},
            r"detect\(\) of the format 'odd' takes a location and the first bytes",
        ),
    ],
)
def test_add_malformed_format_raises(declared: dict[str, Any], message: str) -> None:
    odd = type("Odd", (type(SERIALIZERS.get("plain")),), {"name": "odd", **declared})
    with pytest.raises(PluginError, match=message):
        SERIALIZERS.add(odd())
    assert "odd" not in SERIALIZERS


def test_signature_of_operation_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Format(Serializer):
        name = "counted"
        needs_path = False

        def save(self, data: Any, location: Any, *, level: int = 1) -> Any:
            return data

        def load(self, location: Any) -> Any:
            return TensorDict()

        def detect(self, location: Any, head: bytes) -> bool:
            return False

    class Plugin:
        @hookimpl
        def td_serializers(self) -> list[Serializer]:
            return [Format()]

    read: list[Any] = []
    original = inspect.signature
    with installed(Plugin()):
        monkeypatch.setattr(inspect, "signature", lambda method: read.append(method) or original(method))
        for _ in range(3):
            TensorDict().save(None, format="counted", level=2)
            td_core.save(TensorDict(), None, format="counted")
        with pytest.raises(TypeError, match="no option 'depth'"):
            TensorDict().save(None, format="counted", depth=2)
    assert len(read) == 1
