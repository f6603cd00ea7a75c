"""Consolidated files: write, read, replace, and torch.save of leaves that share a storage."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from consolidation_trees import HAS_TENSORCLASS, TREES, assert_same, make_jagged, make_jagged_with_lengths
from torch.masked import masked_tensor

from td_core import LazyStackedTensorDict, TensorDict, kinds, lazy_stack, load, save, verify
from td_core.errors import CodecError, FormatError, StructureError
from td_core.spi import Layout, NodeKind, Record, hookimpl
from td_core.testing import installed
from td_distributed import (
    _consolidated_file,
    from_consolidated,
    storage_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex")


@pytest.mark.parametrize("name", TREES)
def test_consolidate_to_file_and_read_keeps_content(name: str, tmp_path: Path) -> None:
    tree = TREES[name]()
    mapped = tree.consolidate(tmp_path / "td")
    assert_same(mapped, tree)
    assert mapped.is_consolidated()
    loaded = TensorDict.from_consolidated(tmp_path / "td")
    assert_same(loaded, tree)
    assert loaded.is_locked == tree.is_locked
    assert loaded.is_consolidated()
    assert [path.name for path in tmp_path.iterdir()] == ["td"]


#: Trees that the plain form cannot represent.
UNSAYABLE = {
    "a mark in a key", "dtypes", "float8", "odd keys", "params", "reserved", "reserved cls_metadata", "reserved size",
    "rich values", "roles", "subclass", "unbatched", "value",
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_consolidated_file_uses_tensordict_format_if_possible(name: str) -> None:
    structure = read_structure(TREES[name]())
    assert (structure["cls"] == "td:general") == (name in UNSAYABLE)
    # The root key "size" holds what the plain form cannot represent: orders of keys, types of values.
    assert "size" not in structure or name not in ("flat", "named", "lazy", "deep stack")


NODES: dict[str, Callable[[], Any]] = {
    "dense": lambda: TensorDict({"a": torch.zeros(2, 3)}, [2], names=["row"]).lock_(),
    "lazy stack": lambda: lazy_stack([TensorDict({"a": 1}), TensorDict({"b": 2})]).lock_(),
    "named lazy stack": lambda: LazyStackedTensorDict(TensorDict({"a": 1}), stack_dim_name="row"),
    "empty lazy stack": lambda: LazyStackedTensorDict(batch_size=[3, 0], stack_dim=1),
}


@pytest.mark.parametrize("name", NODES)
def test_layout_of_tensordict_keeps_the_node(name: str) -> None:
    node = NODES[name]()
    layout = kinds.of(node).layouts["consolidated/1"]
    again = layout.unflatten(layout.flatten(node))
    assert (type(again), again.batch_size, again.names) == (type(node), node.batch_size, node.names)
    assert again.is_locked == node.is_locked
    assert len(again._leaves()) == len(node._leaves())
    assert all(map(torch.equal, again._leaves(), node._leaves()))


def read_structure(tree: Any) -> Any:
    """Consolidate a collection to a file, and return the structure in it."""
    data = bytes(storage_of(tree.consolidate(metadata=True)).numpy())
    return json.loads(data[-8 - int.from_bytes(data[-8:], "little") : -8])


#: Functions that load or map a collection whose leaves share one storage.
CONSOLIDATED: dict[str, Callable[[Any, Path], Any]] = {
    "in memory": lambda tree, path: tree.consolidate(),
    "with its structure": lambda tree, path: tree.consolidate(metadata=True),
    "mapped": lambda tree, path: tree.consolidate(path),
    "buffered": lambda tree, path: tree.consolidate(path, use_buffer=True),
    "loaded": lambda tree, path: [tree.consolidate(path), from_consolidated(path)][1],
    "loaded, of another writer": lambda tree, path: from_consolidated(
        remove_padding(tree.consolidate(path), path)
    ),
}


def remove_padding(tree: Any, path: Path) -> Path:
    """Rewrite a consolidated file without padding, as other writers do, so that its size is odd."""
    storage, text = storage_of(tree), path.read_bytes()[len(storage_of(tree)) : -8].rstrip()
    text += b" " * (len(text) % 2 == 0)
    path.write_bytes(bytes(storage.tolist()) + text + len(text).to_bytes(8, "little"))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("way", CONSOLIDATED)
def test_torch_save_consolidated_leaves_loads_back(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tree = TensorDict({"a": torch.arange(3).to(dtype), "b": torch.ones(1, dtype=torch.uint8)}, lock=True)
    found = CONSOLIDATED[way](tree, tmp_path / "td")
    for each in (found["a"], found):
        torch.save(each, tmp_path / "saved")
        back = torch.load(tmp_path / "saved")
        assert torch.equal(back if isinstance(back, torch.Tensor) else back["a"], tree["a"])


def test_torch_save_views_of_several_dtypes_loads_back(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    source = {"a": torch.ones(2), "b": torch.arange(3), "n": {"c": torch.arange(2)}, "p": parameter}
    tree = TensorDict({**source, "tied": source["a"]})
    tree.consolidate(tmp_path / "td")
    for each in (from_consolidated(tmp_path / "td"), tree.consolidate().unlock_()):
        torch.save(each, tmp_path / "saved")
        back = torch.load(tmp_path / "saved")
        assert_same(back, each)
        assert back["a"] is back["tied"] and back["b"].dtype is torch.int64
    storage = torch.zeros(4, dtype=torch.int32)
    mixed = TensorDict(
        {"a": storage, "p": torch.nn.Parameter(storage.view(torch.float32), requires_grad=False)}
    )
    mixed["g"] = storage.view(torch.float32)[1:3].requires_grad_()
    torch.save(mixed, tmp_path / "saved")
    back = torch.load(tmp_path / "saved")
    assert [type(leaf) for leaf in back.values()] == [torch.Tensor, torch.nn.Parameter, torch.Tensor]
    assert [leaf.requires_grad for leaf in back.values()] == [False, False, True]


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda tree: tree.unlock_(), lambda tree: tree.clone(False)]
)
def test_torch_save_jagged_on_shared_storage_loads_back(change: Any, tmp_path: Path) -> None:
    rows, turned, holes = make_jagged(), make_jagged().transpose(1, 2), make_jagged_with_lengths()
    tree = change(TensorDict({"a": torch.ones(2), "r": rows, "t": turned, "h": holes}, [2]).consolidate())
    torch.save(tree, tmp_path / "saved")
    back = torch.load(tmp_path / "saved", weights_only=False)
    assert torch.equal(back["a"], tree["a"])
    for key, leaf in {"r": rows, "t": turned, "h": holes}.items():
        assert [part.tolist() for part in back[key].unbind()] == [part.tolist() for part in leaf.unbind()]


def test_write_to_loaded_collection_does_not_change_file(tmp_path: Path) -> None:
    TREES["flat"]().consolidate(tmp_path / "td")
    from_consolidated(tmp_path / "td")["a"].zero_()
    assert from_consolidated(tmp_path / "td")["a"].tolist() == [1, 1]


def test_consolidate_over_file_keeps_mapped_collection(tmp_path: Path) -> None:
    loaded = TREES["flat"]().consolidate(tmp_path / "td")
    (loaded + 1).consolidate(tmp_path / "td")
    assert loaded["a"].tolist() == [1, 1]
    assert from_consolidated(tmp_path / "td")["a"].tolist() == [2, 2]
    loaded.consolidate(tmp_path / "td")
    assert from_consolidated(tmp_path / "td")["a"].tolist() == [1, 1]


def test_consolidate_to_longest_file_name_reads_back(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    TREES["flat"]().consolidate(path)
    assert_same(from_consolidated(path), TREES["flat"]())


def test_consolidate_over_file_keeps_mode_and_symlinks(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real/td")
    for _ in range(2):
        TREES["flat"]().consolidate(tmp_path / "link")
        (tmp_path / "real" / "td").chmod(0o640)
    assert os.readlink(tmp_path / "link") == "real/td"
    TREES["flat"]().consolidate(tmp_path / "link", use_buffer=True)
    assert (tmp_path / "real" / "td").stat().st_mode & 0o777 == 0o640
    assert_same(from_consolidated(tmp_path / "link"), TREES["flat"]())
    assert os.listdir(tmp_path / "real") == ["td"]


def test_consolidate_concurrently_to_path_keeps_one_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Barrier(2)
    put, commit = _consolidated_file.files.NewFile.write, _consolidated_file.files.NewFile.commit

    def put_together(*args: Any) -> None:
        meeting.wait(10)
        put(*args)

    def commit_together(*args: Any, **options: Any) -> None:
        commit(*args, **options)
        meeting.wait(10)

    monkeypatch.setattr(_consolidated_file.files.NewFile, "write", put_together)
    monkeypatch.setattr(_consolidated_file.files.NewFile, "commit", commit_together)
    trees = [TensorDict({"a": torch.full((1000,), i)}) for i in range(2)]
    writing = [tree.consolidate(tmp_path / "td", return_early=True) for tree in trees]
    for tree, each in zip(trees, writing, strict=True):
        assert_same(each.result(), tree)
    assert from_consolidated(tmp_path / "td")["a"].unique().numel() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["td"]


@pytest.mark.skipif(not hasattr(os, "pwritev"), reason="the parts are written one by one")
def test_consolidate_num_threads_opens_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_small_steps(fd: int, data: Any, start: int) -> int:
        meeting.wait(10)
        opened.add(fd)
        return int(pwritev(fd, [data[0][:3001]], start))

    meeting, pwritev, opened = Barrier(2), os.pwritev, set()
    monkeypatch.setattr(_consolidated_file.os, "pwritev", in_small_steps)
    one, other = torch.randint(256, (2, 6000), dtype=torch.uint8)
    end = other.numpy().tobytes()
    _consolidated_file.write(tmp_path / "td", 6000, [(0, one)], end, num_threads=2)
    assert (tmp_path / "td").read_bytes() == one.numpy().tobytes() + end and len(opened) == 1


def test_consolidate_failed_write_keeps_old_file(tmp_path: Path) -> None:
    if not HAS_TENSORCLASS:
        pytest.skip("needs td-tensorclass")
    TREES["flat"]().consolidate(tmp_path / "td")
    with pytest.raises(CodecError, match="key 'bad': cannot store"):
        TensorDict({"bad": object()}).consolidate(tmp_path / "td")
    assert from_consolidated(tmp_path / "td")["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["td"]


def test_consolidate_hook_of_lazy_stack_to_file_raises(tmp_path: Path) -> None:
    stack = LazyStackedTensorDict(*[TensorDict({"a": torch.ones(2)})] * 2, hook_out=torch.exp)
    held = stack.consolidate()
    assert held.hook_out is pickle.loads(pickle.dumps(held)).hook_out is torch.exp
    with pytest.raises(
        CodecError, match=r"key 's': cannot store .* no serializer is registered for its type"
    ):
        TensorDict({"s": stack}).consolidate(tmp_path / "file")


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), r"key \('n', 'bad'\): a tensor of layout torch.sparse_coo"),
        (
            lambda: torch.zeros(3, device="meta"),
            r"key \('n', 'bad'\): a tensor on the meta device has no data",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            r"key \('n', 'bad'\): a quantized tensor cannot be consolidated; call dequantize\(\)",
        ),
        (
            lambda: masked_tensor(torch.zeros(3), torch.ones(3) > 0),
            r"key \('n', 'bad'\): a MaskedTensor has no bytes of its own",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of MaskedTensors")
def test_consolidate_sparse_meta_or_quantized_leaf_raises(leaf: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(StructureError, match=message):
        TensorDict({"a": torch.ones(1), "n": {"bad": leaf()}}).consolidate(tmp_path / "td")
    assert not list(tmp_path.iterdir())


def test_consolidate_meta_device_to_file_raises(tmp_path: Path) -> None:
    with pytest.raises(StructureError, match="on the meta device has no data to write into a file"):
        TREES["flat"]().consolidate(tmp_path / "td", device="meta")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change", [lambda td: td, torch.clone, copy.deepcopy, lambda td: pickle.loads(pickle.dumps(td))]
)
@pytest.mark.parametrize("way", CONSOLIDATED)
def test_consolidate_jagged_keeps_padded_shape(way: str, change: Any, tmp_path: Path) -> None:
    tree = TensorDict({"n": make_jagged(), "t": make_jagged().transpose(1, 2), "a": torch.ones(2)}, [2])
    found = change(CONSOLIDATED[way](tree, tmp_path / "td"))
    assert {key: found[key].to_padded_tensor(0).shape[1:] for key in ("n", "t")} == {"n": (4, 3), "t": (3, 4)}


@pytest.mark.parametrize("name", ["large and odd places", "dtypes", "nothing"])
def test_consolidate_num_threads_writes_same_file(name: str, tmp_path: Path) -> None:
    tree = TREES[name]()
    tree.consolidate(tmp_path / "one")
    assert_same(tree.consolidate(tmp_path / "many", num_threads=2), tree)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()


def test_consolidate_nesting_beyond_json_limit_reads_back(tmp_path: Path) -> None:
    tree = TensorDict({"a": torch.ones(1)})
    for _ in range(2000):
        tree = TensorDict({"n": tree})
    tree.consolidate(tmp_path / "td")
    found = from_consolidated(tmp_path / "td")
    for _ in range(2000):
        found = found["n"]
    assert found["a"].item() == 1


def test_consolidate_use_buffer_keeps_result_in_memory(tmp_path: Path) -> None:
    tree = TREES["flat"]()
    result = tree.consolidate(tmp_path / "td", use_buffer=True)
    assert_same(result, tree)
    assert_same(from_consolidated(tmp_path / "td"), tree)
    (tmp_path / "td").write_bytes(bytes((tmp_path / "td").stat().st_size))
    assert_same(result, tree)


def test_consolidate_simple_tree_writes_tensordict_format(tmp_path: Path) -> None:
    TREES["named"]().consolidate(tmp_path / "td")
    data = (tmp_path / "td").read_bytes()
    length = int.from_bytes(data[-8:], "little")
    meta = {"device": None, "names": ["t"], "batch_size": [2], "is_locked": False}
    assert json.loads(data[-8 - length : -8]) == {
        "cls": "TensorDict",
        "non_tensors": {},
        "leaves": {"a": ["torch.float32", [2, 3], 0, 24, 0]},
        "cls_metadata": meta,
        "n": {
            "cls": "TensorDict",
            "non_tensors": {},
            "leaves": {"b": ["torch.float32", [2], 24, 32, 0]},
            "cls_metadata": meta,
        },
    }


@pytest.mark.skipif(not HAS_TENSORCLASS, reason="values need td-tensorclass")
@pytest.mark.parametrize("is_inline", [True, False])
def test_consolidate_kind_with_inline_layout_uses_tensordict_format(is_inline: bool, tmp_path: Path) -> None:
    from td_tensorclass import NonTensorData

    class Tag(NonTensorData):
        __slots__ = ()

    def flatten(node: Tag) -> Record:
        return Record({"batch_size": list(node.batch_size)}, values={"data": node.data})

    def unflatten(record: Record) -> Tag:
        return Tag(record.values["data"], batch_size=record.meta["batch_size"])

    class Plugin:
        @hookimpl
        def td_node_kinds(self) -> list[NodeKind]:
            layout = Layout(flatten, unflatten, ("Tag",), is_inline=is_inline)
            return [NodeKind("test.Tag", Tag, flatten, unflatten, {"consolidated/1": layout})]

    with installed(Plugin()):
        tree = TensorDict({"t": Tag("x"), "a": torch.zeros(2)}, [2])
        assert (read_structure(tree)["cls"] == "td:general") != is_inline
        tree.consolidate(tmp_path / "td")
        tag = TensorDict.from_consolidated(tmp_path / "td").get("t")
        assert (type(tag), tag.data, tag.batch_size) == (Tag, "x", (2,))


SIZED: dict[str, Any] = {
    "plain": {"a": torch.arange(6.0), "n": {"b": torch.ones(3)}},
    "general": {"a": torch.ones(5).to(torch.float8_e4m3fn)},
    "eight bytes": {"a": torch.ones(2)},
    "empty": {},
}


@pytest.mark.parametrize("tree", SIZED)
@pytest.mark.parametrize("place", [0, 4, 30, -60])
def test_read_file_with_byte_too_many_raises(tree: str, place: int, tmp_path: Path) -> None:
    path = tmp_path / "td"
    TensorDict(SIZED[tree]).consolidate(path)
    content = path.read_bytes()
    for changed in (
        content[:place] + b"\x01" + content[place:],
        content[:place] + content[place:][1:],
        content + b"\x00",
    ):
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=r"damaged|too short"):
            TensorDict.from_consolidated(path)


@pytest.mark.parametrize("tree", SIZED)
@pytest.mark.parametrize("checksums", [False, True])
def test_verify_changed_byte_of_file_reports_it(tree: str, checksums: bool, tmp_path: Path) -> None:
    path = tmp_path / "td"
    TensorDict(SIZED[tree]).consolidate(path, checksums=checksums)
    report = verify(path)
    assert (report.ok, report.hashed) == (True, int(checksums))
    content = path.read_bytes()
    start = 0 if checksums else len(content) - 8 - int.from_bytes(content[-8:], "little")
    for position in range(start, len(content), 3):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        assert not verify(path, format="consolidated").ok, position
        with pytest.raises(FormatError):
            TensorDict.from_consolidated(path, verify=True)


def test_consolidate_checksums_without_filename_raises() -> None:
    with pytest.raises(ValueError, match="checksums=True needs a filename"):
        TensorDict({"a": 1}).consolidate(checksums=True)


def test_save_consolidated_format_loads_as_saved(tmp_path: Path) -> None:
    tree = TensorDict(SIZED["plain"])
    assert save(tree, tmp_path / "td", format="consolidated", checksums=True, num_threads=2) is tree
    assert_same(load(tmp_path / "td"), tree)
    assert_same(load(tmp_path / "td", verify=True), tree)


def test_consolidate_after_killed_one_removes_its_file(tmp_path: Path) -> None:
    tree = TensorDict({f"k{i}": torch.full((1 << 16,), float(i)) for i in range(4)})
    pid = os.fork()
    if not pid:
        _consolidated_file.files.NewFile.commit = lambda *args, **options: os.kill(
            os.getpid(), signal.SIGKILL
        )
        with contextlib.suppress(BaseException):
            tree.consolidate(tmp_path / "td")
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1 and os.listdir(tmp_path) != ["td"]
    tree.consolidate(tmp_path / "td")
    assert os.listdir(tmp_path) == ["td"]
