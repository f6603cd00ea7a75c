"""verify, inspect, the command line, and progress reports."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import td_memmap
from td_core import TensorDict
from td_core.errors import FormatError
from td_memmap import inspect, print_directory_tree, verify
from td_memmap.__main__ import main


@pytest.fixture(params=["xxh3_128", "crc32"])
def hashed_save(
    request: pytest.FixtureRequest, nest: Any, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    if request.param == "crc32":
        monkeypatch.setattr("td_store._checksums.xxh3_128", None)
    else:
        pytest.importorskip("xxhash")
    nest.memmap(prefix, checksums=True)
    assert json.loads((prefix / "%manifest.json").read_text())["algorithm"] == request.param
    return prefix


def damage(file: Path, *, when: int | None = None) -> None:
    status = os.stat(file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    stamp = status.st_mtime_ns if when is None else when
    os.utime(file, ns=(stamp, stamp))


def test_verify_unchanged_save_is_ok(hashed_save: Path) -> None:
    report = verify(hashed_save)
    assert report.ok
    assert report.problems == []
    assert report.files == report.hashed == 12
    TensorDict.load_memmap(hashed_save, verify=True)


def test_verify_tied_leaves_checks_hashes(prefix: Path) -> None:
    tied = torch.ones(3)
    TensorDict({"a": tied, "b": tied}).memmap(prefix, checksums=True)
    assert os.stat(prefix / "a.memmap").st_nlink == 2
    report = verify(prefix)
    assert (report.files, report.hashed) == (3, 3)


def test_verify_reports_every_bad_file(hashed_save: Path) -> None:
    damage(hashed_save / "a.memmap")
    damage(hashed_save / "n" / "i.memmap", when=time.time_ns() + 10**9)
    (hashed_save / "n" / "deep" / "b.memmap").unlink()
    os.truncate(hashed_save / "lazy" / "2" / "x.memmap", 3)
    report = verify(hashed_save)
    assert {problem.file: problem.kind for problem in report.problems} == {
        "a.memmap": "damaged",
        "n/i.memmap": "changed",
        "n/deep/b.memmap": "missing",
        "lazy/2/x.memmap": "damaged",
    }
    assert not report.ok
    with pytest.raises(
        FormatError, match=r"(?s)a.memmap is damaged: its hash is .*n/deep/b.memmap is missing"
    ):
        TensorDict.load_memmap(hashed_save, verify=True)


def test_verify_leaf_written_in_place_reports_changed(hashed_save: Path) -> None:
    loaded = TensorDict.load_memmap(hashed_save)
    time.sleep(0.05)
    loaded["a"].fill_(5)
    del loaded
    os.sync()
    report = verify(hashed_save)
    assert [(problem.file, problem.kind) for problem in report.problems] == [("a.memmap", "changed")]
    assert not report.ok
    with pytest.raises(FormatError, match=r"a\.memmap is changed: its hash is"):
        TensorDict.load_memmap(hashed_save, verify=True)


@pytest.mark.parametrize("key", ["new", ("n", "new"), ("new", "below")], ids=str)
def test_verify_entry_added_after_save_reports_modified(nest: Any, prefix: Path, key: Any) -> None:
    for attempt in range(5):
        save = prefix / str(attempt)
        nest.memmap(save, checksums=True).make_memmap(key, nest.batch_size)
        assert {problem.kind for problem in verify(save).problems} == {"modified"}


def test_verify_without_hashes_checks_sizes(nest: Any, prefix: Path) -> None:
    nest.memmap(prefix)
    assert verify(prefix).hashed == 0
    damage(prefix / "a.memmap")
    assert verify(prefix).problems == []
    os.truncate(prefix / "a.memmap", 3)
    assert [str(problem) for problem in verify(prefix).problems] == [
        "a.memmap is damaged: 3 bytes, 24 were saved"
    ]
    (prefix / "%manifest.json").unlink()
    assert "the size is 3" in str(verify(prefix).problems)
    with pytest.raises(FormatError, match="the size is 3"):
        TensorDict.load_memmap(prefix, verify=True)
    (prefix / "%manifest.json").write_text("[]")
    with pytest.raises(FormatError, match="files is None, expected the size of every file"):
        verify(prefix)


def test_verify_without_manifest_ignores_classes_and_pickles(nest: Any, prefix: Path) -> None:
    nest.memmap(prefix)
    (prefix / "%manifest.json").unlink()
    files = verify(prefix).files
    (prefix / "n" / "meta.json").write_text(
        (prefix / "n" / "meta.json").read_text().strip().replace("tensordict._td.TensorDict", "my.Own")
    )
    (prefix / "n" / "other.pickle").write_bytes(b"what")
    assert str(verify(prefix)) == f"{prefix}: {files} files, 0 hashes, 0 problems"
    (prefix / "a.memmap").unlink()
    (prefix / "n" / "i.memmap").write_bytes(b"x")
    problems = [(each.file, each.kind) for each in verify(prefix).problems]
    assert problems == [("a.memmap", "missing"), ("n/i.memmap", "damaged")]


def test_memmap_to_same_prefix_records_hashes_of_leaves(hashed_save: Path) -> None:
    TensorDict.load_memmap(hashed_save).memmap(hashed_save, checksums=True)
    report = verify(hashed_save)
    assert report.problems == []
    assert report.hashed == 12


def test_inspect_returns_tree_without_reading_leaves(nest: Any, prefix: Path) -> None:
    nest.memmap(prefix)
    for file in prefix.rglob("*.memmap"):
        file.chmod(0)
    assert str(inspect(prefix)) == (
        "save: TensorDict [3], 147 bytes\n"
        "    a: leaf [3, 2] torch.float32, 24 bytes\n"
        "    n: TensorDict [3], 99 bytes\n"
        "        i: leaf [3, 4] torch.int64, 96 bytes\n"
        "        empty: leaf [3, 0] torch.float32, 0 bytes\n"
        "        deep: TensorDict [3], 3 bytes\n"
        "            b: leaf [3] torch.bool, 3 bytes\n"
        "    lazy: LazyStackedTensorDict, 24 bytes\n"
        "        0: TensorDict [], 0 bytes\n"
        "            x: leaf [0] torch.int64, 0 bytes\n"
        "        1: TensorDict [], 8 bytes\n"
        "            x: leaf [1] torch.int64, 8 bytes\n"
        "        2: TensorDict [], 16 bytes\n"
        "            x: leaf [2] torch.int64, 16 bytes"
    )
    nest.memmap(prefix.with_name("save.tdz"))
    lines = str(inspect(prefix.with_name("save.tdz"))).splitlines()
    assert lines[1:] == str(inspect(prefix)).splitlines()[1:]
    assert inspect(prefix / "n").children["deep"].children["b"].shape == [3]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_inspect_nested_leaves_shows_sizes(layout: torch.layout, tmp_path: Path) -> None:
    leaf = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(1, 2)], layout=layout)
    for name in "save", "save.tdz":
        TensorDict({"leaf": leaf}).memmap(tmp_path / name)
        assert str(inspect(tmp_path / name)) == (
            f"{name}: TensorDict [], 24 bytes\n    leaf: nested leaf torch.float32, 24 bytes"
        )


def test_inspect_unknown_kind_shows_provider(prefix: Path) -> None:
    TensorDict({"shape": torch.ones(2), "n": {"a": 1}}).memmap(prefix)
    meta = json.loads((prefix / "n" / "meta.json").read_text())
    (prefix / "n" / "meta.json").write_text(
        json.dumps(
            {
                "_type": "td:images.Image",
                "_format_version": 2,
                "kind": "images.Image",
                "provider": "td-images==1.2",
                "meta": {"batch_size": []},
                "entries": [["a", {**meta["a"], "file": "a"}]],
            }
        )
    )
    (prefix / "n" / "other.pickle").write_bytes(b"anything")
    assert str(inspect(prefix)).splitlines()[2] == (
        "    n: images.Image [], 8 bytes, by td-images==1.2, PICKLED: other.pickle"
    )
    assert inspect(prefix).children["shape"].shape == [2]


def test_print_directory_tree_returns_printed_text(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict({"a": torch.ones(2), "n": {"b": 1}}).memmap(prefix)
    text = print_directory_tree(prefix, indent="  ")
    assert capsys.readouterr().out == text + "\n"
    assert text.splitlines()[0].startswith("  Directory size: ")
    assert text.splitlines()[1:] == [
        "  save/", "      n/", "          b.memmap", "          meta.json", "      %manifest.json", "      a.memmap",
        "      meta.json",
    ]  # fmt: skip


def test_main_commands_print_results_and_exit_codes(
    nest: Any, prefix: Path, capsys: pytest.CaptureFixture[str], same: Any
) -> None:
    nest.memmap(prefix, checksums=True)
    archive = str(prefix) + ".tdz"
    assert main(["inspect", str(prefix)]) == 0
    assert capsys.readouterr().out.startswith("save: TensorDict [3]")
    assert main(["inspect", str(prefix / "n"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["children"]["i"]["shape"] == [3, 4]
    assert main(["pack", str(prefix), archive, "--compression", "deflate"]) == 0
    assert capsys.readouterr().out == archive + "\n"
    assert main(["unpack", archive, str(prefix) + "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prefix": str(prefix) + "2"}
    same(TensorDict.load_memmap(str(prefix) + "2"), nest)
    assert main(["verify", str(prefix)]) == 0
    assert main(["verify", archive]) == 0
    capsys.readouterr()
    damage(prefix / "a.memmap")
    assert main(["verify", str(prefix), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0]["file"] == "a.memmap"
    (prefix / "%manifest.json").unlink()
    (prefix / "a.memmap").unlink()
    assert main(["verify", str(prefix)]) == 1
    assert "the file of key 'a' is missing" in capsys.readouterr().out
    (prefix / "meta.json").write_text("{")
    assert main(["verify", str(prefix)]) == 1
    assert "is not valid metadata" in capsys.readouterr().err
    assert main(["verify", str(prefix) + "3"]) == 2
    assert "FileNotFoundError" in capsys.readouterr().err
    assert main(["pack", str(prefix), archive, "--compression", "zz"]) == 2
    assert "unknown compression 'zz'" in capsys.readouterr().err
    assert main(["pack", str(prefix), str(prefix)]) == 2
    assert "it is a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.once
def test_run_module_td_memmap_prints_report(nest: Any, prefix: Path) -> None:
    nest.memmap(prefix)
    command = [sys.executable, "-m", "td_memmap"]
    done = subprocess.run(
        [*command, "verify", prefix, "--progress"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{prefix}: 12 files, 0 hashes, 0 problems\n"


def test_main_closed_pipe_exits_without_error(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(2)}).memmap(tmp_path / "save")
    command = [sys.executable, "-m", "td_memmap", "inspect", str(tmp_path / "save")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


class Bar:
    """Replacement of a tqdm progress bar that records its calls."""

    def __init__(self) -> None:
        self.n = 0
        self.steps: list[Any] = []

    def update(self, amount: int) -> None:
        self.n += amount
        self.steps.append(amount)

    def close(self) -> None:
        self.steps.append("closed")


def test_progress_calls_function_with_bytes_done(
    prefix: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    td = TensorDict({str(i): torch.zeros(1000, dtype=torch.uint8) for i in range(3)})
    steps: list[tuple[int, int]] = []
    td.memmap(prefix, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1000, 3000), (2000, 3000), (3000, 3000)]
    steps.clear()
    TensorDict.load_memmap(prefix, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1000, 3000), (2000, 3000), (3000, 3000)]
    td.memmap(prefix, progress=True)
    assert "save" in (bar := capsys.readouterr().err) and bar.endswith("\n")
    bars: list[Any] = []
    make_bar = lambda **given: bars.append(Bar()) or bars[0]  # noqa: E731
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=make_bar))
    td.memmap(prefix, progress=True)
    assert bars[0].steps == [1000, 1000, 1000, "closed"]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    td.memmap(prefix, progress=True)
    assert capsys.readouterr().err.endswith("save: 2000 of 3000 bytes\rsave: 3000 of 3000 bytes\n")


def test_progress_last_call_has_total_bytes(prefix: Path) -> None:
    tied = torch.ones(3)
    last: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        last[:] = [(done, total)]

    archive = prefix.with_name("save.tdz")
    nbytes = {}
    for name, work in {
        "tied": lambda: TensorDict({"a": tied, "b": tied, "c": torch.ones(2)}).memmap(prefix, progress=note),
        "linked": lambda: TensorDict.load_memmap(prefix).memmap(prefix, progress=note),
        "anonymous": lambda: TensorDict({"a": tied}).memmap(progress=note),
        "in place": lambda: TensorDict({"a": tied}).memmap_(progress=note),
        "like": lambda: TensorDict({"a": tied}).memmap_like(prefix.with_name("like"), progress=note),
        "verify": lambda: verify(prefix, progress=note),
        "pack": lambda: td_memmap.pack_memmap(prefix, archive, progress=note),
        "unpack": lambda: td_memmap.unpack_memmap(archive, prefix, progress=note),
    }.items():
        last.clear()
        work()
        assert last[0][0] == last[0][1], name
        nbytes[name] = last[0][1]
    assert nbytes["tied"] == nbytes["linked"] == 32
    assert nbytes["pack"] == nbytes["unpack"]


def test_main_key_with_control_characters_is_escaped(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "\x1b[2J\x9b2J\n\u202ea"
    TensorDict({key: torch.ones(1)}).memmap(prefix)
    manifest = json.loads((prefix / "%manifest.json").read_text())
    manifest["files"][key] = [1, None]
    (prefix / "%manifest.json").write_text(json.dumps(manifest))
    (prefix / key).touch()
    assert main(["inspect", str(prefix)]) == 0
    assert main(["verify", str(prefix)]) == 1
    assert main(["inspect", str(prefix / key)]) == 1
    td_memmap.print_directory_tree(prefix)
    shown = capsys.readouterr()
    assert all(line.isprintable() for line in (shown.out + shown.err).split("\n"))
    assert (shown.out + shown.err).count("\\x1b[2J\\x9b2J\\n\\u202ea") == 3


def test_main_json_of_deep_tree_prints_tree_or_error(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    td = TensorDict()
    for _ in range(1000):
        td = TensorDict({"n": td})
    td.memmap(f"{prefix}.tdz")
    code = main(["inspect", f"{prefix}.tdz", "--json"])
    shown = capsys.readouterr()
    # The limit on nesting differs between releases of Python.
    assert (code, shown.out[:1], shown.err[:14]) in [(2, "", "RecursionError"), (0, "{", "")]


def test_main_unprintable_keys_are_escaped(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TensorDict({"\ud800": torch.ones(1), "é": torch.ones(1)}).memmap(prefix)
    assert main(["inspect", str(prefix)]) == 0
    assert "\\ud800: leaf" in capsys.readouterr().out
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert main(["inspect", str(prefix)]) == 0
    ascii_only.flush()
    assert b"\\xe9: leaf" in ascii_only.buffer.getvalue()  # type: ignore[attr-defined]


def test_memmap_more_leaves_than_mappings_raises_before_write(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    td = TensorDict({str(i): torch.zeros(1) for i in range(50)})
    td.memmap(prefix)
    monkeypatch.setattr("td_memmap._mapped_memory._FEW", 10)
    monkeypatch.setattr("td_memmap._mapped_memory._SPARE", 1 << 40)
    for call in (lambda: TensorDict.load_memmap(prefix), lambda: td.memmap(prefix.with_name("other"))):
        with pytest.raises(
            OSError, match=r"50 leaves are as many mappings, .*use an archive \(.tdz\), which is one mapping"
        ):
            call()
    assert os.listdir(prefix.parent) == ["save"]
    td.memmap(prefix.with_name("save.tdz"))


def test_load_renamed_directory_returns_values(nest: Any, prefix: Path) -> None:
    nest.memmap(prefix)
    assert not [file for file in prefix.rglob("*") if file.suffix in (".pickle", ".pkl", ".pt")]
    moved = prefix.with_name("moved")
    shutil.move(prefix, moved)
    assert (td_memmap.load(moved)["a"] == nest["a"]).all()
