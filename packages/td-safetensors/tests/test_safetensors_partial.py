"""Loading a part of a save: keys, rows, devices, strategies; and writing into existing leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import KeyPathError, LazyStackedTensorDict, TensorDict, load
from td_safetensors import _find_save, _read_save, save
from td_store.arrays import map_file


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the sizes of all tensors that are mapped or read."""
    sizes: list[int] = []
    view = _read_save.view_storage

    def view_storage(storage: Any, array: Any, begin: int) -> Any:
        sizes.append(array.end - array.begin)
        return view(storage, array, begin)

    for module in (_find_save, _read_save):
        monkeypatch.setattr(module, "view_storage", view_storage)
    return sizes


@pytest.mark.parametrize("strategy", ["mmap", "read"])
@pytest.mark.parametrize(
    ("keys", "expected", "sizes"),
    [
        ("a", ["a"], [48]),
        (("n", "b"), [("n", "b")], [32]),
        ([("n", "b"), "a"], ["a", ("n", "b")], [32, 48]),
        ("n", [("n", "b"), ("n", "c")], [32, 32]),
        (["n", ("n", "b")], [("n", "b"), ("n", "c")], [32, 32]),
        ([], [], []),
    ],
    ids=["leaf", "nested", "both", "node", "twice", "none"],
)
def test_load_keys_reads_only_these(
    keys: Any,
    expected: list[Any],
    sizes: list[int],
    strategy: str,
    path: Path,
    td: TensorDict,
    same: Any,
    seen: list[int],
) -> None:
    save(td, path)
    result = load(path, keys=keys, strategy=strategy)
    assert sorted(map(str, result.keys(True, True))) == sorted(map(str, expected))
    for key in expected:
        same(result[key], td[key])
    assert result.batch_size == td.batch_size
    assert sorted(seen) == sizes


@pytest.mark.parametrize("keys", ["z", [("n", "z")], [("a", "x")], ["a", "z"]])
def test_load_missing_key_raises_with_path(keys: Any, path: Path, td: TensorDict) -> None:
    save(td, path)
    with pytest.raises(KeyPathError, match=rf"{path.name}: the save has no .*[xz]"):
        load(path, keys=keys)


def test_load_keys_of_lazy_stack_selects_in_all_members(path: Path, same: Any) -> None:
    def make(keys: str) -> Any:
        members = [TensorDict({key: torch.full((2,), i) for key in keys}) for i in range(3)]
        return TensorDict(
            {
                "s": LazyStackedTensorDict(*members),
                "uneven": LazyStackedTensorDict(
                    *(TensorDict({key: torch.ones(i) for key in keys}) for i in range(3))
                ),
            }
        )

    save(make("xy"), path)
    same(load(path, keys=[("s", "x"), ("uneven", "x")]), make("x"))


INDICES = [
    1,
    -1,
    slice(1, 3),
    slice(None, None, 2),
    [3, 0],
    torch.tensor([2, 2]),
    torch.tensor([True, False, True, False]),
    range(1, 3),
]


@pytest.mark.parametrize("strategy", ["mmap", "read"])
@pytest.mark.parametrize("rows", INDICES, ids=str)
def test_load_rows_equals_indexed_collection(
    rows: Any, strategy: str, path: Path, td: TensorDict, same: Any
) -> None:
    save(td, path)
    same(load(path, rows=rows, strategy=strategy), td[rows])
    meta = load(path, rows=rows, device="meta")
    assert meta["a"].device.type == "meta"
    assert (meta.batch_size, meta["a"].shape) == (
        td[rows].batch_size,
        td[rows]["a"].shape,
    )


def test_load_rows_beyond_end_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    with pytest.raises(IndexError):
        load(path, rows=4)


def test_load_device_meta_reads_no_leaf(path: Path, td: TensorDict, seen: list[int]) -> None:
    save(td, path)
    result = load(path, device="meta")
    assert {leaf.device.type for leaf in result.values(True, True)} == {"meta"}
    assert [leaf.shape for leaf in result.values(True, True)] == [
        leaf.shape for leaf in td.values(True, True)
    ]
    assert (result.device, seen) == (torch.device("meta"), [])


def test_load_device_sets_leaves_and_labels(path: Path, td: TensorDict, device: torch.device) -> None:
    save(td.to(device), path)
    assert load(path).device == (None if td.to(device).device is None else torch.device("cpu"))
    result = load(path, device=device)
    assert result.device == result["n"].device == torch.empty(0, device=device).device
    assert {leaf.device for leaf in result.values(True, True)} == {result["a"].device}


def test_load_without_device_of_save_returns_cpu_leaves(path: Path, td: TensorDict, edit_header: Any) -> None:
    save(td.to("cpu"), path)

    def use_cuda(header: Any) -> None:
        header["__metadata__"]["td"] = header["__metadata__"]["td"].replace('"cpu"', '"cuda:3"')

    edit_header(path, use_cuda)
    result = load(path)
    assert (result.device, result["n"].device, result["a"].device) == (torch.device("cpu"),) * 3


@pytest.mark.parametrize(("network", "maps"), [(False, True), (True, False)])
def test_load_auto_strategy_reads_from_network(
    network: bool, maps: bool, path: Path, td: TensorDict, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(td, path)
    mapped = []
    monkeypatch.setattr(_read_save, "is_on_network", lambda path: network)
    monkeypatch.setattr(_find_save, "map_file", lambda fd, shared: mapped.append(fd) or map_file(fd))
    same(load(path), td)
    assert bool(mapped) is maps


def test_load_unknown_strategy_raises(path: Path, td: TensorDict) -> None:
    save(td, path)
    with pytest.raises(ValueError, match="'auto', 'mmap' or 'read'; got 'fast'"):
        load(path, strategy="fast")


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("strategy", ["mmap", "read"])
def test_load_reports_progress(num_threads: int, strategy: str, path: Path, same: Any) -> None:
    td = TensorDict({str(i): torch.full((1000 * i,), i) for i in range(60)})
    total = sum(leaf.numel() * 8 for leaf in td.values())
    reports: list[tuple[int, int]] = []
    save(td, path, num_threads=num_threads, progress=lambda *report: reports.append(report))
    assert reports[-1] == (total, total)
    reports.clear()
    same(
        load(
            path, strategy=strategy, num_threads=num_threads, progress=lambda *report: reports.append(report)
        ),
        td,
    )
    assert reports[-1] == (total, total)
    assert reports == sorted(reports)


def test_load_inplace_writes_into_leaves(path: Path, td: TensorDict, same: Any) -> None:
    save(td, path)
    for strategy in ("mmap", "read"):
        target = td.clone().zero_()
        before = {key: leaf.data_ptr() for key, leaf in target.items(True, True)}
        target.load_(path, strategy=strategy)
        same(target, td)
        assert {key: leaf.data_ptr() for key, leaf in target.items(True, True)} == before


def test_load_inplace_reads_into_memory_of_leaves(
    path: Path, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = torch.arange(1 << 16)
    td = TensorDict(
        {
            "a": torch.arange(1 << 16),
            "n": {"b": torch.ones(1 << 16).double(), "t": torch.ones(300, 300)},
            "c": tied,
            "d": tied,
            "new": torch.ones(2),
        }
    )
    save(td, path)
    target = td.exclude("new").clone().zero_()
    target["n", "t"] = torch.zeros(300, 300).t()
    target["n", "b"] = target["n", "b"].float()  # of another dtype: converted, not read into
    read = []
    into = _read_save.read_into
    monkeypatch.setattr(
        _read_save,
        "read_into",
        lambda fd, buffer, *rest: (read.append(buffer.data_ptr()), into(fd, buffer, *rest)),
    )
    leaves = dict(target.items(True, True))
    target.load_(path, strategy="read")
    assert {key: leaf for key, leaf in target.items(True, True) if key != "new"}.keys() == leaves.keys()
    assert all(target[key] is leaf for key, leaf in leaves.items())
    td["n", "b"] = td["n", "b"].float()
    same(target.select(*td.keys()), td)
    assert leaves["a"].data_ptr() in read
    assert not {leaves[key].data_ptr() for key in (("n", "b"), ("n", "t"), "c", "d")} & set(read)


def test_from_safetensors_is_method_of_class(path: Path, td: TensorDict, same: Any) -> None:
    assert td.to_safetensors(path, checksums=True) is td
    same(TensorDict.from_safetensors(path, keys=["a"], rows=0), td.select("a")[0])
