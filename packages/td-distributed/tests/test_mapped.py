"""Memory-mapped collections sent as a path below a root, and paths that must be refused."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from td_core import TensorDict
from td_core.errors import FormatError
from td_core.spi import encode
from td_distributed import _group, _p2p, _remote, _send_paths, _wire

HAS_MEMMAP = importlib.util.find_spec("td_memmap") is not None
HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None
needs_memmap = pytest.mark.skipif(not HAS_MEMMAP, reason="needs td-memmap")

TREES: dict[str, Callable[[], Any]] = {
    "nested": lambda: TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(2), "z": torch.zeros(0, 2)}}),
    "lazy": lambda: TensorDict.lazy_stack([TensorDict({"a": torch.full((i + 1,), i)}) for i in range(3)]),
}
if HAS_TENSORCLASS:
    from td_tensorclass import NonTensorStack, tensorclass

    @tensorclass
    class Sample:
        x: torch.Tensor
        y: str = "none"

    TREES |= {
        "values": lambda: TensorDict({"s": "text", "l": NonTensorStack("x", "y"), "a": torch.ones(2)}, [2]),
        "tensorclass": lambda: Sample(x=torch.ones(2), y="text", batch_size=[2]),
    }


def send_and_record(rank: int, name: str, folder: str, root: Any, how: str) -> Any:
    """Send a collection, and return the messages that were sent."""
    tree = TREES[name]()
    if rank == 1:
        target = tree.clone().zero_()
        if how == "irecv":
            for work in target.irecv(0, return_premature=True, root=root):
                work.wait()
        else:
            target.recv(0, root=root)
        assert repr(target.to_dict()) == repr(tree.to_dict())
        assert not target.is_memmap()
        return None
    sent: list[str] = []
    original = _p2p.Channel.isend

    def isend(peer: Any, tensor: torch.Tensor) -> Any:
        text = bytes(tensor.numpy())
        sent.append(
            "path" if b'{"path": "deep/save"}' in text else "bytes" if b'"nodes"' in text else "question"
        )
        return original(peer, tensor)

    _p2p.Channel.isend = isend
    saved = tree.memmap(folder)
    try:
        if how == "isend":
            for work in saved.isend(1, return_early=True):
                work.wait()
        else:
            saved.send(1)
    finally:
        _p2p.Channel.isend = original
    return sent


@needs_memmap
@pytest.mark.parametrize("how", ["recv", "irecv"])
@pytest.mark.parametrize("name", TREES)
def test_send_memmap_below_root_sends_only_path(two: Any, name: str, how: str, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "save"
    sent, _ = two.run(send_and_record, name, str(folder), str(tmp_path), how)
    assert sent == ["question", "path"]


@needs_memmap
def test_send_memmap_root_with_non_utf8_name_sends_path(two: Any, tmp_path: Path) -> None:
    root = tmp_path / "\udcff"
    sent, _ = two.run(send_and_record, "nested", str(root / "deep" / "save"), str(root), "recv")
    assert sent == ["question", "path"]


@needs_memmap
@pytest.mark.parametrize("how", ["no root", "another root", "isend"])
def test_send_memmap_outside_root_sends_bytes(two: Any, how: str, tmp_path: Path) -> None:
    roots = {"no root": None, "another root": str(tmp_path / "other"), "isend": str(tmp_path)}
    sent, _ = two.run(send_and_record, "nested", str(tmp_path / "save"), roots[how], how)
    assert sent == (["bytes"] if how == "isend" else ["question", "bytes"])


def move_to_memory(tree: Any, folder: Path) -> None:
    tree["n", "b"].data = torch.full((2,), 5.0)


def save_over(tree: Any, folder: Path) -> None:
    TREES["nested"]().apply(lambda leaf: leaf + 1).memmap(folder)


def move_files(tree: Any, folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


@needs_memmap
@pytest.mark.parametrize("change", [move_to_memory, save_over, move_files])
def test_send_memmap_replaced_files_sends_bytes(change: Any, tmp_path: Path) -> None:
    saved = TREES["nested"]().memmap(tmp_path / "save")
    assert _send_paths.get_folder(saved) == str(tmp_path / "save")
    assert _send_paths.get_folder(saved["n"]) == str(tmp_path / "save" / "n")
    saved["a"].fill_(7)  # the write also changes the file
    assert _send_paths.get_folder(saved) == str(tmp_path / "save")
    change(saved, tmp_path / "save")
    assert _send_paths.get_folder(saved) is None
    assert _send_paths.get_folder(TREES["nested"]().memmap()) is None


def change_batch_size(tree: Any, folder: Path) -> None:
    tree.batch_size = []


def change_batch_size_of_node(tree: Any, folder: Path) -> None:
    tree["n"].batch_size = [3, 2]


def set_names(tree: Any, folder: Path) -> None:
    tree.names = ["x"]


def save_node_elsewhere(tree: Any, folder: Path) -> None:
    tree["n"].memmap_(folder.with_name("save elsewhere"), copy_existing=True)


@needs_memmap
@pytest.mark.parametrize(
    "change",
    [change_batch_size, change_batch_size_of_node, set_names, save_node_elsewhere],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_send_memmap_changed_structure_sends_bytes(change: Any, loaded: bool, tmp_path: Path) -> None:
    saved = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3, 2)}}, [3]).memmap(tmp_path / "save")
    if loaded:
        saved = TensorDict.load_memmap(tmp_path / "save").memmap_(tmp_path / "save")
    change(saved, tmp_path / "save")
    for each in (saved, pickle.loads(pickle.dumps(saved)), saved.memmap()):
        assert _send_paths.get_folder(each) is None
        assert each.batch_size == saved.batch_size and each.names == saved.names
    again = saved.memmap(tmp_path / "save", copy_existing=True)
    assert _send_paths.get_folder(again) == str(tmp_path / "save")
    assert _send_paths.get_folder(again["n"]) == str(tmp_path / "save" / "n")


@needs_memmap
@pytest.mark.parametrize("name", TREES)
def test_send_memmap_every_kind_unchanged_sends_path(name: str, tmp_path: Path) -> None:
    saved = TREES[name]().memmap(tmp_path / "save")
    for each in (saved, pickle.loads(pickle.dumps(saved)), saved.memmap()):
        assert _send_paths.get_folder(each) == str(tmp_path / "save")


def list_content(tree: Any) -> Any:
    encoded = encode(tree)
    return type(tree), encoded.values, [(leaf.dtype, leaf.tolist()) for leaf in encoded.leaves]


def is_on_files(tree: Any) -> bool:
    return any(type(leaf).__name__ == "MemoryMappedTensor" for leaf in tree._leaves())


def receive_remote(rank: int, name: str, folder: str, root: Any) -> Any:
    """Return whether ``from_remote_init`` returns a memory-mapped collection."""
    if rank == 0:
        TREES[name]().memmap(folder).init_remote(1)
        TREES[name]().init_remote(1)
        return None
    wanted = list_content(TREES[name]())
    found, plain = (TensorDict.from_remote_init(0, root=root) for _ in range(2))
    assert list_content(found) == list_content(plain) == wanted
    assert not is_on_files(plain)
    for leaf in found._leaves():
        leaf.zero_()
    assert list_content(TensorDict.load_memmap(folder)) == wanted
    return is_on_files(found)


@needs_memmap
@pytest.mark.parametrize("name", TREES)
def test_from_remote_init_below_root_maps_files(two: Any, name: str, tmp_path: Path) -> None:
    assert two.run(receive_remote, name, str(tmp_path / "deep" / "save"), str(tmp_path)) == [None, True]


@needs_memmap
@pytest.mark.parametrize("root", [None, "other"])
def test_from_remote_init_outside_root_receives_bytes(two: Any, root: Any, tmp_path: Path) -> None:
    root = None if root is None else str(tmp_path / root)
    assert two.run(receive_remote, "nested", str(tmp_path / "save"), root) == [None, False]


def send_hostile_path(rank: int, path: Any, root: Any, announced: int | None) -> Any:
    """Send a path like a hostile peer; return the error of the receiver."""
    if rank == 0:
        link = _remote._Link(None, 1, False, 0)
        header = json.dumps({"path": path}).encode()
        link.send(link.group.numbers(_send_paths.ASKS, 0, 0))
        length = int(link.recv(link.group.numbers(0)).item())
        if length:
            link.recv(link.group.bytes(length))
        link.send(link.group.numbers(_send_paths.ASKS, len(header) if announced is None else announced, 0))
        if announced is None:
            link.send(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        return None
    try:
        TensorDict.from_remote_init(0, root=root)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("path", "rooted", "announced", "message"),
    [
        (
            "../outside",
            True,
            None,
            "FormatError: the message names files at '../outside', outside of the root",
        ),
        ("/etc", True, None, "FormatError: the message names files at '/etc', outside of the root"),
        (None, True, None, "which is not a path"),
        ("save", False, None, "but this process gave no root= to look below"),
        *(
            ("save", True, length, f"FormatError: rank 0 announced a path of {length} bytes")
            for length in (1 << 40, (1 << 16) + 1, 0, -1)
        ),
    ],
)
def test_from_remote_init_refused_path_raises(
    two: Any, path: Any, rooted: bool, announced: int | None, message: str, tmp_path: Path
) -> None:
    assert message in two.run(send_hostile_path, path, str(tmp_path) if rooted else None, announced)[1]


@pytest.mark.parametrize("length", [-1, (1 << 16) + 1, 1 << 62])
def test_make_path_header_invalid_root_length_raises(length: int) -> None:
    peer = SimpleNamespace(device=lambda: torch.device("cpu"), recv=lambda room: room.fill_(length))
    with pytest.raises(FormatError, match=f"the peer answered with a root of {length} bytes"):
        _send_paths.make_path_header("save", peer)


def test_from_remote_init_broadcast_with_root_raises() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="so it has no use for root"):
            TensorDict.from_remote_init(0, use_broadcast=True, root=".")
    finally:
        dist.destroy_process_group()


def send_unrequested_path(rank: int, path: Any, root: Any) -> Any:
    """Send a path that was not requested; return the error of the receiver and its collection afterwards."""
    if rank == 0:
        header = json.dumps({"path": path}).encode()
        dist.send(_wire.pack_message(_group.MARK, header, [])[0], 1)
        TensorDict({"a": torch.ones(2)}).send(1)
        return None
    target = TensorDict({"a": torch.zeros(2)})
    try:
        target.recv(0, root=root)
        message = ""
    except (ValueError, RuntimeError, OSError, AttributeError) as error:
        message = f"{type(error).__name__}: {error}"
    assert not target["a"].any()
    target.recv(0)
    assert target["a"].tolist() == [1, 1]
    return message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../outside", "FormatError: the message names files at '../outside', outside of the root"),
        ("in/../../outside", "outside of the root"),
        ("{folder}/outside", "outside of the root"),
        ("link", "outside of the root"),
        ("/etc", "outside of the root"),
        ("a\0b", "which is not a path"),
        (["x"], "which is not a path"),
        (7, "which is not a path"),
        ("nothing", "FileNotFoundError" if HAS_MEMMAP else "MissingPluginError"),
    ],
)
def test_load_received_path_outside_root_raises(two: Any, path: Any, message: str, tmp_path: Path) -> None:
    for name in ("root", "outside"):
        (tmp_path / name).mkdir()
    if HAS_MEMMAP:
        TensorDict({"a": torch.full((2,), 7.0)}).memmap(tmp_path / "outside")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    path = path.format(folder=tmp_path) if isinstance(path, str) else path
    assert message in two.run(send_unrequested_path, path, str(tmp_path / "root"))[1]


def test_recv_path_without_root_raises(two: Any, tmp_path: Path) -> None:
    message = (
        f"FormatError: the message names files at '{tmp_path}', but this process gave no root= to look below"
    )
    assert two.run(send_unrequested_path, str(tmp_path), None)[1] == message


@pytest.mark.skipif(HAS_MEMMAP, reason="td-memmap is installed")
def test_recv_path_without_td_memmap_raises(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="pip install ./packages/td-store ./packages/td-memmap"):
        _send_paths.load(tmp_path, "save")


def receive_other_structure(rank: int, folder: str) -> Any:
    if rank == 0:
        saved = TREES["nested"]().memmap(folder + "/save")
        saved.send(1)
        saved.send(1)
        return None
    target = TREES["nested"]().zero_().set(("n", "b"), torch.zeros(3))
    before = target.clone()
    try:
        target.recv(0, root=folder)
    except RuntimeError as error:
        message = str(error)
    assert bool((target == before).all())
    TREES["nested"]().recv(0)
    return message


@needs_memmap
def test_recv_path_other_structure_raises(two: Any, tmp_path: Path) -> None:
    assert two.run(receive_other_structure, str(tmp_path))[1] == (
        "cannot receive: key ('n', 'b') is torch.float32 of shape [3] here, torch.float32 of shape [2] in the message; "
        "nothing was changed"
    )
