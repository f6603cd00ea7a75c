"""Stored tensors in all kinds of collections, and in the operations of the siblings of td-core."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import td_core
from td_core import TensorDict, TensorDictParams, lazy_stack, load, save
from td_core.spi import Serializer
from td_core.testing import installed

pytest.importorskip("td_store")

from td_store import StoredTensor
from td_store.testing import LoggedSource, MemorySource, RawFile


def make_leaves() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(4)}


def make_stored(log: list[Any]) -> dict[str, Any]:
    return {
        key: StoredTensor(LoggedSource(MemorySource(leaf), key, log)) for key, leaf in make_leaves().items()
    }


def read_all_elements(collection: Any) -> dict[Any, Any]:
    return {
        key: leaf.tolist() for key, leaf in collection.items(True, True) if isinstance(leaf, torch.Tensor)
    }


def make_tensorclass(leaves: dict[str, Any]) -> Any:
    tensorclass = pytest.importorskip("td_tensorclass")

    class Pair(tensorclass.TensorClass):  # type: ignore[misc]
        a: torch.Tensor
        b: torch.Tensor
        name: str = "x"

    return Pair(**leaves, batch_size=[4])


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dense": lambda leaves: TensorDict(leaves, batch_size=[4]),
    "nested": lambda leaves: TensorDict({"n": TensorDict(leaves, batch_size=[4])}, batch_size=[4]),
    "lazy_stack": lambda leaves: lazy_stack(
        [TensorDict(leaves, batch_size=[4]), TensorDict(leaves, batch_size=[4])], 1
    ),
    "params": lambda leaves: TensorDictParams(TensorDict(leaves, batch_size=[4]), no_convert=True),
    "tensorclass": make_tensorclass,
}

READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda td: td.clone(),
    "rows": lambda td: td[[2, 0]],
    "mask": lambda td: td[torch.tensor([True, False, True, True])],
    "row": lambda td: td[1],
    "slice": lambda td: td[1:3],
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "add": lambda td: td + 1,
    "memmap": lambda td: td.memmap(),
    "memmap_folder": lambda td: td.memmap("folder"),
    "archive": lambda td: load(save(td, "x.tdz") and "x.tdz"),
    "save": lambda td: load(save(td, "saved") and "saved"),
    "consolidate": lambda td: td.consolidate(),
    "consolidated_file": lambda td: td.consolidate("file"),
    "share_memory": lambda td: copy.copy(td).share_memory_(),
    "deepcopy": copy.deepcopy,
    "vmap": lambda td: torch.vmap(lambda row: row + 1)(td),
    "compile": lambda td: torch.compile(lambda rows: rows * 2 + 1, backend="eager")(td),
    "to_dtype": lambda td: td.to(torch.float64),
    "torch_save": lambda td: _load_again(td),
}


def _load_again(td: Any) -> Any:
    file = io.BytesIO()
    torch.save(td.clone().to_dict(), file)
    file.seek(0)
    return TensorDict(torch.load(file))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READS)
def test_read_stored_kind_returns_its_elements(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name in ("memmap", "memmap_folder", "archive", "save"):
        pytest.importorskip("td_memmap")
    if "consolidate" in name:
        pytest.importorskip("td_distributed")
    log: list[Any] = []
    with torch.no_grad():
        expected = KINDS[kind](make_leaves())
        stored = KINDS[kind](make_stored(log))
        try:
            wanted = read_all_elements(READS[name](expected))
        except Exception as error:
            with pytest.raises(type(error)):
                READS[name](stored)
            return
        (tmp_path / "again").mkdir()
        monkeypatch.chdir(tmp_path / "again")
        assert read_all_elements(READS[name](stored)) == wanted


WRITES: dict[str, Callable[[Any], Any]] = {
    "row": lambda td: td.__setitem__(1, td[0].clone()),
    "number": lambda td: td.__setitem__([3, 1], 0),
    "zero": lambda td: td.zero_(),
    "add": lambda td: td.add_(1),
    "update": lambda td: td.update_(td.clone() * 2),
    "copy": lambda td: td.copy_(td.clone() * 2),
    "state_dict": lambda td: td.load_state_dict(td.clone().zero_().state_dict()),
    "part": lambda td: td.split(2)[1].zero_(),
    "rows": lambda td: [row.zero_() for row in td],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITES)
def test_write_stored_kind_reaches_the_store(kind: str, name: str) -> None:
    leaves, stored = make_leaves(), make_stored([])
    with torch.no_grad():
        WRITES[name](KINDS[kind](leaves))
        WRITES[name](KINDS[kind](stored))
    for key, leaf in leaves.items():
        assert stored[key].tolist() == leaf.tolist()


@pytest.mark.parametrize("save_to", ["folder", "x.tdz"])
def test_save_large_leaf_reads_it_in_parts(save_to: str, tmp_path: Path) -> None:
    pytest.importorskip("td_memmap")
    log: list[Any] = []
    leaf = torch.arange(3 << 20)
    td = TensorDict({"a": StoredTensor(LoggedSource(MemorySource(leaf), "a", log))})
    save(td, tmp_path / save_to)
    assert torch.equal(load(tmp_path / save_to)["a"], leaf)
    assert [index[0].start for _, _, index in log] == [0, 1 << 20, 2 << 20]


@pytest.mark.once
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_load_batches_in_workers_returns_rows(method: str, tmp_path: Path) -> None:
    array = torch.arange(24).view(12, 2)
    td = TensorDict({"a": StoredTensor(RawFile.create(tmp_path / "a.bin", array))}, batch_size=[12])
    loader = DataLoader(
        td, batch_size=5, num_workers=2, collate_fn=td_core.collate, multiprocessing_context=method
    )
    assert torch.equal(torch.cat([batch["a"] for batch in loader]), array)


def test_reduce_stored_leaf_raises() -> None:
    reduce = pytest.importorskip("td_distributed._reduce")
    with pytest.raises(td_core.StructureError, match="key 'a' is in a store; clone"):
        reduce._describe_structure(TensorDict(make_stored([]), batch_size=[4]))


class Pickled(Serializer):
    """A format that pickles its leaves."""

    name = "pickled"

    def save(self, data: Any, location: Any) -> Any:
        encoded = td_core.spi.encode(data)
        location.write_bytes(pickle.dumps((encoded.nodes, encoded.leaves)))
        return data

    def load(self, location: Any) -> Any:
        return td_core.spi.decode(td_core.spi.Encoded(*pickle.loads(location.read_bytes()), []))

    def detect(self, location: Any, head: bytes) -> bool:
        return False


class Plugin:
    @td_core.spi.hookimpl
    def td_serializers(self) -> list[Serializer]:
        return [Pickled()]


def test_save_in_format_that_pickles_leaves_saves_their_elements(tmp_path: Path) -> None:
    log: list[Any] = []
    td = TensorDict({**make_stored(log), "c": torch.zeros(4)}, batch_size=[4])
    with installed(Plugin()):
        assert save(td, tmp_path / "x", format="pickled") is td
        loaded = load(tmp_path / "x", format="pickled")
    assert [(request, key) for request, key, _ in log] == [("read", "a"), ("read", "b")]
    assert all(type(leaf) is torch.Tensor for leaf in loaded.values())
    assert read_all_elements(loaded) == read_all_elements(td)


def test_assert_close_compares_saves_with_parameters(tmp_path: Path, installed: set[str]) -> None:
    plain = TensorDict({"w": torch.arange(6.0).view(3, 2), "n": {"b": torch.ones(3)}}, batch_size=[3])
    kinds: list[Any] = [plain, TensorDictParams(plain.clone())]
    if "td-memmap" in installed:
        kinds.append(plain.memmap(tmp_path / "save"))
    if "td-hdf5" in installed:
        kinds.append(plain.to_h5(tmp_path / "save.h5"))
    if "td-zarr" in installed:
        kinds.append(plain.to_zarr(tmp_path / "save.zarr"))
    for first in kinds:
        for second in kinds:
            assert td_core.assert_close(first, second)
            with pytest.raises(AssertionError, match="key 'w' differs"):
                td_core.assert_close(first, second + 1)
