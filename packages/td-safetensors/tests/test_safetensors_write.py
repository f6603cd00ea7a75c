"""Saves opened for writing: writes reach the file, from every process, and what cannot be written raises."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import (
    CodecError,
    FormatError,
    LazyStackedTensorDict,
    LockedError,
    TensorDict,
    load,
)
from td_core.errors import UnsupportedOperationError
from td_core.spi import STORABLE
from td_safetensors import save
from td_safetensors._open import FileSource
from td_store import StoredTensor, _temporary_files
from td_store.files import identify_file
from td_store.testing import SourceTests


class TestFileSource(SourceTests):
    """The conformance suite of sources."""

    def make(self, array: torch.Tensor, folder: Path) -> Any:
        path = folder / f"{len(os.listdir(folder))}.safetensors"
        save(TensorDict({"pad": torch.ones(3, dtype=torch.int8), "x": array}), path)
        return td_core.open(path, mode="r+", format="safetensors")["x"].source


WRITES = {
    "row": lambda td: td.__setitem__(1, td.to_tensordict()[0]),
    "rows": lambda td: td.__setitem__([3, 0], td[:2].to_tensordict().zero_()),
    "leaf": lambda td: td.set_("a", torch.full((4, 3), 7.0)),
    "element": lambda td: td["a"].__setitem__((2, 1), 9.0),
    "view": lambda td: td[1:3]["n", "b"].zero_(),
    "add": lambda td: td["n", "c"].add_(1),
    "zero": lambda td: td.zero_(),
    "update": lambda td: td.update_({"a": torch.ones(4, 3)}),
    "complex": lambda td: td["z"].mul_(2),
    "stack": lambda td: td["s"].tensordicts[2]["x"].fill_(5),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("sharded", [False, True])
def test_open_for_writing_writes_into_file(
    write: Any, sharded: bool, tmp_path: Path, td: TensorDict, same: Any
) -> None:
    path = tmp_path / "save"
    td["z"] = torch.ones(4, dtype=torch.complex128)
    td["s"] = LazyStackedTensorDict(*(TensorDict({"x": torch.full((2,), i)}) for i in range(4)))
    save(td, path, max_shard_size=50 if sharded else None)
    opened = td_core.open(path, mode="r+")
    assert {type(leaf) for leaf in opened.values(True, True) if leaf.dtype != torch.int64} == {StoredTensor}
    write(opened)
    write(td)
    same(load(path), td)
    opened["a"].flush()


def test_open_for_writing_expanded_leaf_refuses_writes(path: Path) -> None:
    save(TensorDict({"x": torch.ones(1).expand(1000)}), path)
    opened = td_core.open(path, mode="r+")
    assert opened["x"].shape == (1000,)
    with pytest.raises(RuntimeError, match="the stored tensor is expanded"):
        opened["x"].zero_()


def test_open_for_writing_locks_keys(path: Path, td: TensorDict) -> None:
    save(td, path)
    opened = td_core.open(path, mode="r+")
    with pytest.raises(LockedError):
        opened["new"] = torch.ones(4)
    with pytest.raises(LockedError):
        del opened["a"]


@pytest.mark.parametrize(
    ("leaf", "options", "message"),
    [
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
            {},
            "'x' is a nested tensor, which cannot be written in place: leave it out with keys=",
        ),
    ],
    ids=["jagged"],
)
def test_open_for_writing_other_content_raises(leaf: Any, options: Any, message: str, path: Path) -> None:
    save(TensorDict({"x": leaf()}), path, **options)
    with pytest.raises(UnsupportedOperationError, match=message):
        td_core.open(path, mode="r+")


def test_open_for_writing_unaligned_file_raises(path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(9))
    with pytest.raises(FormatError, match="'b' is not aligned for torch.float64, so it cannot be written"):
        td_core.open(path, mode="r+")["b"].zero_()


def test_open_for_writing_pickle_writes_into_same_file(path: Path, td: TensorDict) -> None:
    save(td, path)
    opened = td_core.open(path, mode="r+")
    other = pickle.loads(pickle.dumps(opened[1:]))
    other["n", "b"].fill_(9)
    assert load(path)["n", "b"].tolist() == [0, 9, 9, 9]
    assert opened["n", "b"].tolist() == [0, 9, 9, 9]
    data = pickle.dumps(opened)
    save(td, path)
    with pytest.raises(FormatError, match="was replaced since it was opened"):
        pickle.loads(data)["a"].sum()
    assert isinstance(opened["a"].source, FileSource)


def test_create_preallocates_zeros_to_write(path: Path, same: Any) -> None:
    row = TensorDict({"a": torch.ones(3), "n": {"b": torch.tensor(1, dtype=torch.int8)}})
    rows = td_core.create(row.expand(10_000), path, format="safetensors")
    assert rows.batch_size == (10_000,)
    rows[5] = row
    expected = torch.zeros_like(row.expand(10_000).clone())
    expected[5] = row
    same(load(path), expected)
    with pytest.raises(FileExistsError, match="data.safetensors.*it exists"):
        td_core.create(row, path, format="safetensors")


def test_create_from_meta_reads_nothing(path: Path) -> None:
    like = TensorDict({"a": torch.empty(1 << 20, 3, device="meta"), "b": torch.empty(1 << 20, device="meta")})
    td_core.create(like, path, format="safetensors")
    assert load(path)["a"].shape == (1 << 20, 3)


def test_create_durable_syncs_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(_temporary_files.os, "fsync", synced.append)
    td_core.create(TensorDict({"a": torch.zeros(2)}), path, format="safetensors")
    assert synced == []
    td_core.create(TensorDict({"a": torch.zeros(2)}), path.with_name("b"), format="safetensors", durable=True)
    assert len(synced) == 2  # the file and its directory


def test_create_nested_tensor_raises_with_key(path: Path) -> None:
    leaf = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    with pytest.raises(CodecError, match="cannot create key 'x': the sizes of a nested tensor"):
        td_core.create(TensorDict({"x": leaf}), path, format="safetensors")
    assert not path.exists()


def test_append_raises_with_what_to_do(path: Path, td: TensorDict) -> None:
    save(td, path)
    with pytest.raises(UnsupportedOperationError, match=r"'safetensors' does not implement append\(\)"):
        td_core.append(td, path)


#: The dtypes that torch can view as bytes.
DTYPES = [dtype for dtype in STORABLE.values() if not re.search(r"bits|int[1-7]$", str(dtype))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_leaf_at_any_byte_of_a_file_is_aligned(dtype: torch.dtype, path: Path) -> None:
    content = (torch.arange(4 * dtype.itemsize, dtype=torch.uint8) % 2).view(4, -1)
    save(TensorDict({"x": content.view(dtype)[:, 0]}), path)
    file = path.read_bytes()
    end = 8 + int.from_bytes(file[:8], "little")
    for offset in range(64):
        length = (end - 8 + offset).to_bytes(8, "little")
        path.write_bytes(length + file[8:end] + b" " * offset + file[end:])
        found = [load(path)]
        if offset in (1, 8, 16):
            found += [load(path, strategy="read"), td_core.open(path), td_core.open(path, mode="c")]
            source = td_core.open(path, mode="r+")["x"].source
            if offset % dtype.itemsize == 0:
                assert source.map().data_ptr() % dtype.itemsize == 0
            else:
                with pytest.raises(FormatError, match=f"'x' is not aligned for {dtype}, so it cannot be"):
                    source.map()
        for leaf in (data["x"] for data in found):
            assert leaf.dtype == dtype
            assert leaf.data_ptr() % dtype.itemsize == 0
            assert torch.equal(leaf.view(torch.uint8).view(4, -1), content)


@pytest.mark.parametrize("is_used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize(
    "use",
    [lambda leaf: leaf.clone(), lambda leaf: leaf[torch.tensor([1])], lambda leaf: leaf.fill_(-1)],
    ids=["read", "gather", "write"],
)
def test_use_a_leaf_after_the_file_was_replaced_raises(use: Any, is_used: bool, path: Path) -> None:
    save(TensorDict({"a": torch.zeros(8), "b": torch.ones(8)}), path)
    inode, leaf = os.stat(path).st_ino, td_core.open(path, mode="r+")["b"]
    sent = pickle.dumps(leaf)
    if is_used:
        leaf.fill_(2)
    for _ in range(5):
        save(TensorDict({"b": torch.full((8,), 5.0), "a": torch.full((8,), 3.0)}), path)
        assert os.stat(path).st_ino != inode
    for item in (leaf, pickle.loads(sent)):
        with pytest.raises(FormatError, match="was replaced since it was opened"):
            use(item)
    assert td_core.load(path)["b"].tolist() == [5.0] * 8


def test_unpickle_after_the_inode_was_used_again_raises(path: Path) -> None:
    save(TensorDict({"a": torch.ones(2)}), path)
    birth = identify_file(str(path))[2]
    if birth is None:
        pytest.skip("the file system has no times of birth")
    # The time of a file which was made at another time, and was given the same inode.
    born, earlier = (time.to_bytes(8, "little") for time in (birth, birth - 10**9))
    for mode in ("r", "r+"):
        sent = pickle.dumps(td_core.open(path, mode=mode)["a"])
        assert pickle.loads(sent).sum() == 2
        with pytest.raises(FormatError, match="was replaced since it was opened"):
            pickle.loads(sent.replace(born, earlier)).sum()
