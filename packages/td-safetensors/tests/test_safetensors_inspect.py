"""``inspect`` reads headers alone, and ``verify`` finds damage in the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import FormatError, LazyStackedTensorDict, TensorDict
from td_core.__main__ import main
from td_safetensors import _find_save, save
from td_store import _checksums


def test_inspect_lists_nodes_and_leaves(path: Path, td: TensorDict, monkeypatch: pytest.MonkeyPatch) -> None:
    td["c"] = torch.ones(4, dtype=torch.complex128)
    td["s"] = LazyStackedTensorDict(*(TensorDict({"x": torch.zeros(3)}) for _ in range(4)))
    td["j"] = torch.nested.nested_tensor([torch.ones(i) for i in range(1, 5)], layout=torch.jagged)
    save(td, path)
    monkeypatch.setattr(_find_save, "map_file", None)  # no tensor is mapped
    tree = td_core.inspect(path)
    assert (tree.name, tree.kind, tree.shape) == ("data.safetensors", "TensorDict", [4])
    assert list(tree.children) == ["a", "n", "c", "s", "j"]
    found = {
        ".".join(at): (leaf.kind, leaf.shape, leaf.dtype, leaf.nbytes)
        for at, leaf in tree.walk()
        if leaf.place
    }
    assert found == {
        "a": ("leaf", [4, 3], "torch.float32", 48),
        "n.b": ("leaf", [4], "torch.int64", 32),
        "n.c": ("leaf", [4, 2], "torch.float32", 32),
        "c": ("leaf", [4], "torch.complex128", 64),
        **{f"s.{i}.x": ("leaf", [3], "torch.float32", 12) for i in range(4)},
        "j": ("nested leaf", None, "torch.float32", 40 + 40),
    }
    assert tree.nbytes == sum(row[3] for row in found.values())


def test_inspect_place_is_bytes_of_leaf(tmp_path: Path) -> None:
    leaf = torch.arange(5, dtype=torch.int16)
    save(TensorDict({"a": leaf, "b": torch.ones(2)}), tmp_path, max_shard_size=9)
    place = td_core.inspect(tmp_path).children["a"].place
    assert place is not None
    file, _, span = place.partition(":")
    begin, end = map(int, span.split("-"))
    assert (tmp_path / file).read_bytes()[begin:end] == leaf.numpy().tobytes()


def test_inspect_damaged_header_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="truncated"):
        td_core.inspect(path, format="safetensors")


@pytest.mark.parametrize("algorithm", ["xxh3_128", "crc32"])
@pytest.mark.parametrize("sharded", [False, True])
def test_verify_finds_changed_tensor(
    algorithm: str, sharded: bool, tmp_path: Path, td: TensorDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    if algorithm == "crc32":
        monkeypatch.setattr(_checksums, "xxh3_128", None)
    else:
        pytest.importorskip("xxhash")
    td["tied"] = td["n", "b"]
    place = tmp_path / "save"
    save(td, place, checksums=True, max_shard_size=40 if sharded else None)
    report = td_core.verify(place)
    assert (report.ok, report.hashed, report.files) == (True, 3, 4 if sharded else 1)
    for file in place.glob("model-0000*") if sharded else [place]:
        content = file.read_bytes()
        position = content.find(td["n", "b"].numpy().tobytes())
        if position >= 0:
            file.write_bytes(content[:position] + b"\1" + content[position + 1 :])
    report = td_core.verify(place)
    (problem,) = report.problems
    assert not report.ok
    assert problem.file.endswith("n.b") or problem.file.endswith("tied")
    assert "('n', 'b')" in problem.detail
    assert "'tied'" in problem.detail


def test_verify_without_checksums_checks_structure(path: Path, td: TensorDict, edit_header: Any) -> None:
    save(td, path)
    assert td_core.verify(path).hashed == 0
    edit_header(path, lambda header: header["a"].update(shape=[3, 4]))
    report = td_core.verify(path)
    assert not report.ok
    assert "another program changed names or shapes" in str(report)


def test_verify_missing_algorithm_names_extra(
    path: Path, td: TensorDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xxhash")
    save(td, path, checksums=True)
    monkeypatch.setattr(_checksums, "xxh3_128", None)
    assert "pip install xxhash" in str(td_core.verify(path))


def test_verify_missing_shard_is_a_problem(tmp_path: Path, td: TensorDict) -> None:
    save(td, tmp_path, max_shard_size=40)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    report = td_core.verify(tmp_path)
    assert "model-00002-of-00003.safetensors" in str(report)
    assert not report.ok


def test_verify_reports_progress(path: Path, td: TensorDict) -> None:
    save(td, path, checksums=True)
    reports: list[tuple[int, int]] = []
    td_core.verify(path, progress=lambda *report: reports.append(report))
    assert reports[-1] == (112, 112)


def test_main_inspects_verifies_and_converts(
    path: Path, td: TensorDict, same: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    save(td, path, checksums=True)
    assert main(["inspect", str(path)]) == 0
    assert "a: leaf [4, 3] torch.float32" in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0
    copy = path.with_name("copy.safetensors")
    assert main(["convert", str(path), str(copy), "--format", "safetensors"]) == 0
    same(td_core.load(copy), td)
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    assert main(["verify", str(path)]) == 1
