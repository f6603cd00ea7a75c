"""Saving and loading by format: the selected serializer, and the errors if none matches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import MissingPluginError, TensorDict
from td_core._formats.serializers import SERIALIZERS, Serializers
from td_core.errors import FormatError, PluginError
from td_core.spi import Serializer


class Recorder(Serializer):
    """A format that records its calls."""

    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def save(self, data: Any, path: Path, *, level: int = 0, num_threads: int = 0) -> Any:
        self.calls.append(("save", path, {"level": level, "num_threads": num_threads}))
        path.write_text("recorded")
        return data

    def load(self, path: Path, *, device: str | None = None, non_blocking: bool = False) -> Any:
        self.calls.append(("load", path, {"device": device, "non_blocking": non_blocking}))
        return TensorDict({"a": torch.arange(3)}, batch_size=[3])

    def detect(self, path: Path, head: bytes) -> bool:
        return path.is_file() and path.read_text() == "recorded"


class Default(Recorder):
    name = "memmap"
    needs_path = False

    def save(self, data: Any, path: Path | None, **options: Any) -> Any:
        self.calls.append(("save", path, options))
        return data

    def load_(self, data: Any, path: Path, *, robust_key: bool = True) -> Any:
        self.calls.append(("load_", path, {"robust_key": robust_key}))
        return data

    def detect(self, path: Path, head: bytes) -> bool:
        return path.is_dir()


@pytest.fixture(autouse=True)
def _no_format(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove all registered formats and reasons for missing packages."""
    monkeypatch.setattr(SERIALIZERS, "_by_name", {})
    monkeypatch.delitem(MissingPluginError.unavailable, "td-memmap", raising=False)
    return


@pytest.fixture
def recorder() -> Recorder:
    SERIALIZERS.add(Recorder())
    return next(iter(SERIALIZERS))  # type: ignore[return-value]


@pytest.fixture
def default() -> Default:
    SERIALIZERS.add(Default())
    return next(each for each in SERIALIZERS if isinstance(each, Default))


@pytest.fixture
def data() -> TensorDict:
    return TensorDict({"a": torch.zeros(3, dtype=torch.int64)}, batch_size=[3])


def test_save_by_name_and_load_by_detection(recorder: Recorder, data: TensorDict, tmp_path: Path) -> None:
    saved = td_core.save(data, tmp_path / "x", format="recorder", level=2)
    assert saved is data
    assert td_core.load(str(tmp_path / "x"), device="cpu")["a"].tolist() == [0, 1, 2]
    assert recorder.calls == [
        ("save", tmp_path / "x", {"level": 2, "num_threads": 0}),
        ("load", tmp_path / "x", {"device": "cpu", "non_blocking": False}),
    ]


def test_save_and_load_methods_dispatch_like_functions(
    recorder: Recorder, data: TensorDict, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    assert isinstance(data.save(path, format="recorder", num_threads=2, level=1), TensorDict)
    assert TensorDict.load(path, "cpu", True)["a"].tolist() == [0, 1, 2]
    assert data.load_(path) is data
    assert data["a"].tolist() == [0, 1, 2]
    assert recorder.calls == [
        ("save", path, {"level": 1, "num_threads": 2}),
        ("load", path, {"device": "cpu", "non_blocking": True}),
        ("load", path, {"device": None, "non_blocking": False}),
    ]
    assert TensorDict.dumps is TensorDict.save


def test_save_default_format_passes_only_changed_options(
    default: Default, data: TensorDict, tmp_path: Path
) -> None:
    data.save(tmp_path, robust_key=None)
    data.save(None, copy_existing=True, robust_key=False, archive=False, durable=True)
    data.dumps(
        tmp_path, True, num_threads=2, return_early=True, share_non_tensor=True, compression=3, atomic=True
    )
    assert default.calls == [
        ("save", tmp_path, {}),
        ("save", None, {"copy_existing": True, "robust_key": False, "archive": False, "durable": True}),
        (
            "save",
            tmp_path,
            {
                "copy_existing": True,
                "num_threads": 2,
                "return_early": True,
                "share_non_tensor": True,
                "compression": 3,
                "atomic": True,
            },
        ),
    ]


def test_load_inplace_calls_serializer(default: Default, data: TensorDict, tmp_path: Path) -> None:
    assert data.load_(tmp_path, False) is data
    assert default.calls == [("load_", tmp_path, {"robust_key": False})]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            lambda data, path: data.save(path, format="recorder", copy_existing=True),
            (
                "the serializer 'recorder' has no option 'copy_existing' for save(); "
                "its options: 'level', 'num_threads'"
            ),
        ),
        (
            lambda data, path: td_core.save(data, path, format="recorder", depth=1, width=2),
            (
                "the serializer 'recorder' has no option 'depth', 'width' for save(); "
                "its options: 'level', 'num_threads'"
            ),
        ),
        (
            lambda data, path: TensorDict.load(path, format="recorder", mode="r"),
            (
                "the serializer 'recorder' has no option 'mode' for load(); "
                "its options: 'device', 'non_blocking'"
            ),
        ),
        (
            lambda data, path: data.load_(path, format="recorder", mode="r"),
            (
                "the serializer 'recorder' has no option 'mode' for load(); "
                "its options: 'device', 'non_blocking'"
            ),
        ),
        (
            lambda data, path: data.save(format="recorder"),
            "the serializer 'recorder' needs a path to save to; got None",
        ),
        (
            lambda data, path: TensorDict.load(path, "cpu", True, 3),
            "at most 2 options by position, device, non_blocking; got 3",
        ),
        (
            lambda data, path: TensorDict.load(path, "cpu", device="cpu"),
            "the option 'device' is given by position and by name",
        ),
    ],
)
def test_save_and_load_wrong_options_raise(
    action: Any, message: str, recorder: Recorder, data: TensorDict, tmp_path: Path
) -> None:
    with pytest.raises(TypeError) as caught:
        action(data, tmp_path / "x")
    assert str(caught.value) == message
    assert recorder.calls == []


MISSING = (
    "the package 'td-memmap', which is not installed: "
    "pip install ./packages/td-store ./packages/td-memmap in a checkout of td"
)


def test_save_without_formats_raises(data: TensorDict, tmp_path: Path) -> None:
    for action in (
        lambda: data.save(tmp_path),
        lambda: td_core.save(data, tmp_path),
        lambda: TensorDict.load(tmp_path),
        lambda: td_core.load(tmp_path),
        lambda: data.load_(tmp_path / "nowhere"),
    ):
        with pytest.raises(MissingPluginError) as caught:
            action()
        assert str(caught.value) == f"the format 'memmap' is provided by {MISSING}"


def test_save_without_default_format_raises(recorder: Recorder, data: TensorDict, tmp_path: Path) -> None:
    with pytest.raises(MissingPluginError) as caught:
        data.save(tmp_path)
    assert str(caught.value) == (
        f"the format 'memmap' is provided by {MISSING}; "
        "registered formats, to be named by format=: 'recorder'"
    )
    with pytest.raises(MissingPluginError) as caught:
        td_core.load(tmp_path)
    assert str(caught.value) == (
        f"no registered format recognises {str(tmp_path)!r}; registered formats: 'recorder'; "
        f"the format 'memmap' is provided by {MISSING}"
    )


def test_save_unknown_format_raises(
    recorder: Recorder, default: Default, data: TensorDict, tmp_path: Path
) -> None:
    with pytest.raises(MissingPluginError) as caught:
        data.save(tmp_path, format="zip")
    assert str(caught.value) == (
        "no installed package provides the format 'zip'; registered formats: 'recorder', 'memmap'"
    )


def test_save_unknown_format_error_names_inactive_packages(
    default: Default, data: TensorDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        MissingPluginError.unavailable, "td-zip", "installed but not active: TD_PLUGINS leaves it out"
    )
    (tmp_path / "x.zip").write_text("")
    idle = "registered formats: 'memmap'; installed but not active: 'td-zip' (python -m td_core plugins says why)"
    for action in (lambda: data.save(tmp_path, format="zip"), lambda: td_core.load(tmp_path / "x.zip")):
        with pytest.raises((MissingPluginError, FormatError)) as caught:
            action()
        assert str(caught.value).endswith(idle)


def test_load_detect_failure_raises_with_format_name(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(error: Exception) -> None:
        def detect(self: Recorder, path: Path, head: bytes) -> bool:
            raise error

        monkeypatch.setattr(Recorder, "detect", detect)

    raises(UnicodeDecodeError("utf-8", b"x", 0, 1, "no text"))
    with pytest.raises(
        PluginError, match=r"^the format 'recorder' failed to tell .*: UnicodeDecodeError: .* pass format="
    ):
        td_core.load(tmp_path)
    raises(PermissionError(str(tmp_path)))
    with pytest.raises(PermissionError):
        td_core.load(tmp_path)


def test_load_missing_or_unrecognised_path_raises(
    recorder: Recorder, default: Default, tmp_path: Path
) -> None:
    path = tmp_path / "gone"
    with pytest.raises(FileNotFoundError) as caught:
        td_core.load(path)
    assert str(caught.value) == f"cannot load: there is nothing at {str(path)!r}"
    path.write_text("something else")
    with pytest.raises(FormatError) as failed:
        td_core.load(path)
    assert str(failed.value) == (
        f"no registered format recognises {str(path)!r}; registered formats: 'recorder', 'memmap'"
    )


def test_load_ambiguous_path_raises(default: Default, tmp_path: Path) -> None:
    class Twin(Default):
        name = "twin"

    SERIALIZERS.add(Twin())
    with pytest.raises(FormatError) as caught:
        td_core.load(tmp_path)
    assert str(caught.value) == (
        f"more than one format recognises {str(tmp_path)!r}: pass format=, one of 'memmap', 'twin'"
    )
    assert td_core.load(tmp_path, format="twin")["a"].tolist() == [0, 1, 2]


def test_add_format_without_unique_name_raises() -> None:
    class Nameless(Recorder):
        name = ""

    table = Serializers()
    table.add(Recorder())
    with pytest.raises(PluginError, match="the format 'recorder' is taken by <"):
        table.add(Recorder())
    with pytest.raises(PluginError, match="has no name: set the class attribute 'name'; got ''"):
        table.add(Nameless())
    table.remove("recorder")
    assert "recorder" not in table
