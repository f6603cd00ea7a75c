"""Memory of received messages: buffers, pieces of large messages, and messages that do not match."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loopback import Done, Loop, assert_same, make_blank, make_tree, replace_entry, send_to

from td_core import TensorDict
from td_core.errors import FormatError, StructureError
from td_distributed import _memory, _p2p, _receive, _wire
from td_distributed._collectives import Payload
from td_distributed._group import MARK

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("part", ["header", "whole"])
@pytest.mark.parametrize("consolidated", [False, True])
def test_send_recv_around_first_message_size_keeps_content(part: str, more: int, consolidated: bool) -> None:
    def trees() -> Iterator[Any]:
        for size in range(_wire.FIRST - 600, _wire.FIRST):
            if part == "header":
                yield TensorDict({"k" * size: torch.ones(3)})
            else:
                leaf = torch.ones(size, dtype=torch.uint8)
                yield from (TensorDict({"k" * length: leaf}) for length in range(1, 9))

    def size(td: Any) -> int:
        message, payload = _wire.make_message(td, consolidated)
        front = _wire.FRONT.size + len(message.header)
        return front if part == "header" else front + sum(map(len, payload))

    source = next(td for td in trees() if size(td) == _wire.FIRST + more)
    source = source.consolidate() if consolidated else source
    target = source.apply(torch.zeros_like)
    target = target.consolidate() if consolidated else target
    for _ in range(3):
        assert_same(send_to(source, target), source)
        target.zero_()


def test_recv_into_sparse_leaf_reads_whole_message() -> None:
    td, loop = make_tree().consolidate(), Loop()
    replace_entry(td, "a", torch.eye(3).to_sparse())
    make_tree().consolidate().send(group=loop, group_dst=0, consolidated=True)
    with pytest.raises(StructureError, match=r"key 'a': a tensor of layout torch.sparse_coo"):
        td.recv(group=loop, group_src=0)
    assert not loop.messages


@pytest.mark.parametrize("less", [0, 8])
def test_recv_header_with_other_sizes_raises(less: int) -> None:
    td, loop = make_tree(), Loop()
    message, (storage,) = _wire.make_message((make_tree() + 1).consolidate(), True)
    payload = [storage[less:]] if less else [storage[:8], storage[8:]]
    for each in _wire.pack_message(MARK, message.header, payload):
        loop.send([each], 0, 0)
    with pytest.raises(
        FormatError, match=rf"announced {len(payload)} parts of {len(storage) - less} bytes, its"
    ):
        td.recv(group=loop, group_src=0)
    assert_same(td, make_tree())


def make_rows(*lengths: int) -> torch.Tensor:
    parts = [torch.full((length, 2), float(length)) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def make_inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            {"a": make_rows(2, 2), "b": torch.zeros(3)},
            "cannot write key 'a' in place: its components and those of the value have different shapes",
        ),
        (
            {"a": make_rows(1, 3), "b": torch.zeros(1).expand(3)},
            "cannot write key 'b' in place: it is expanded",
        ),
        (
            {"a": make_rows(1, 3), "b": make_inference_tensor()},
            r"cannot write key 'b' in place: it was made under torch.inference_mode\(\)",
        ),
    ],
)
def test_recv_into_unwritable_leaf_changes_nothing(
    held: dict[str, torch.Tensor], message: str, consolidated: bool
) -> None:
    td = TensorDict(held)
    source = TensorDict({"a": make_rows(1, 3), "b": torch.ones(3)})
    with pytest.raises(StructureError, match=f"cannot receive: {message}"):
        send_to(source.consolidate() if consolidated else source, td)
    assert not td["b"].any() and td["a"].values().sum() == sum(each.sum() for each in held["a"].unbind())


@pytest.mark.skipif(not HAS_TENSORCLASS, reason="needs td-tensorclass")
@pytest.mark.parametrize("consolidated", [False, True])
def test_send_recv_non_tensor_keeps_values(consolidated: bool) -> None:
    from td_tensorclass import NonTensorStack

    def values(word: str) -> Any:
        stack = NonTensorStack(word, (word, 1))
        td = TensorDict({"s": word, "a": torch.ones(2), "n": {"l": stack, "d": (word, 2)}}, [2])
        return td.consolidate() if consolidated else td

    target = values("old")
    for word in ("new", "newer"):
        found = send_to(values(word), target)
        assert found["s"] == word and found["n", "d"] == (word, 2)
        assert found["n"].get("l").tolist() == [word, (word, 1)]


def stack_along(dim: int) -> Any:
    return TensorDict.lazy_stack([TensorDict({"a": torch.full((3,), float(i))}, [3]) for i in range(3)], dim)


def make_ragged_along(dim: int) -> Any:
    offsets = torch.tensor([0, 1, 4])
    return TensorDict(
        {"a": torch.nested.nested_tensor_from_jagged(torch.ones(4, 4), offsets, jagged_dim=dim)}, [2]
    )


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (stack_along, "the root is a LazyStackedTensorDict along dim 1 here, a LazyStackedTensorDict along dim 0 in"),
        (make_ragged_along, "key 'a' is jagged along dim 2: .* here, jagged along dim 1: .* in"),
    ],
)  # fmt: skip
def test_recv_other_stack_or_ragged_dim_raises(make: Any, message: str, consolidated: bool) -> None:
    dims = (0, 1) if make is stack_along else (1, 2)
    source, target = map(make, dims)
    if consolidated:
        source, target = source.consolidate(), target.consolidate()
    before = target.clone()
    with pytest.raises(StructureError, match=message):
        send_to(source, target)
    assert (
        bool((target == before).all())
        if make is stack_along
        else torch.equal(target["a"].values(), before["a"].values())
    )


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Limit messages to 40,000 bytes; return the list of the sizes of all receive buffers."""
    sizes: list[int] = []
    for module in (_p2p, _memory):
        make = module.allocate
        monkeypatch.setattr(
            module, "allocate", lambda n, *a, make=make, **k: (sizes.append(n), make(n, *a, **k))[1]
        )
    monkeypatch.setattr(_wire, "PIECE", 40_000)
    return sizes


def make_large() -> Any:
    return TensorDict({"a": torch.arange(50_000.0), "b": torch.arange(3), "n": {"c": torch.ones(30_000)}})


@pytest.mark.parametrize("consolidated", [False, True])
def test_send_large_leaves_arrive_in_pieces(
    small_pieces: list[int], consolidated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in (make_large(), make_large().consolidate()):
        loop, target = Loop(), make_blank(make_large())
        source.send(group=loop, group_dst=0, consolidated=consolidated)
        assert {len(message) <= 40_000 for message in loop.messages} == {True}
        target.recv(group=loop, group_src=0)
        assert_same(target, source)
        assert not loop.messages
        monkeypatch.setattr(_wire, "APART", 0)
        parcel = Payload(lambda source=source: source, torch.device("cpu"), apart=True)
        front = bytes(parcel.data[: parcel.front[0]].tolist())
        sizes, _, header = _wire.parts_of(front, parcel.front[1])
        parts = _wire.parse_message(header).parts()
        assert [stop - start for start, stop in parts] == sizes == [*map(len, parcel.parts)]
        assert len(sizes) > 2 and max(sizes) <= 40_000


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("held", [{"a": torch.zeros(3)}, {"a": torch.eye(3).to_sparse()}, {}])
def test_recv_other_structure_discards_in_bounded_memory(
    small_pieces: list[int], held: dict[str, Any], consolidated: bool
) -> None:
    loop, target = Loop(), TensorDict(held)
    make_large().send(group=loop, group_dst=0, consolidated=consolidated)
    small_pieces.clear()
    with pytest.raises(StructureError):
        target.recv(group=loop, group_src=0)
    assert max(small_pieces) <= 40_000
    assert not loop.messages


def test_recv_storage_with_large_gaps_raises(
    small_pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_receive, "SLACK", 0)
    loop, target = Loop(), TensorDict({"a": torch.zeros(3)})
    message = _wire.make_message(TensorDict({"a": torch.ones(3)}), True)[0]
    header = json.loads(message.header)
    header["leaves"][5] = 1 << 17
    for each in _wire.pack_message(
        MARK, json.dumps(header).encode(), torch.ones(1 << 17, dtype=torch.uint8).split(40_000)
    ):
        loop.send([each], 0, 0)
    with pytest.raises(FormatError, match="a storage of 131072 bytes was announced for leaves of 12"):
        target.recv(group=loop, group_src=0)
    assert max(small_pieces) <= 40_000
    assert not loop.messages
    assert target["a"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.skipif(not HAS_TENSORCLASS, reason="needs td-tensorclass")
def test_recv_unknown_value_type_raises_before_writing() -> None:
    loop, target = Loop(), make_large().set("v", ("x",))
    source = make_large().set("v", ("y",))
    source.send(group=loop, group_dst=0)
    first = loop.messages[0]
    data = bytes(first.tolist()).replace(b'"tuple"', b'"other"')
    loop.messages[0] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(FormatError, match="of the unknown type 'other'"):
        target.recv(group=loop, group_src=0)
    assert not loop.messages
    assert target["v"] == ("x",)


def test_recv_cuda_group_does_not_reuse_cpu_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    td = make_tree().consolidate()
    for _ in range(2):
        send_to(make_tree().consolidate(), td)
    offered: list[str] = []

    class Elsewhere(Loop):
        def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Done:
            offered.append(tensors[0].device.type)
            raise RuntimeError("that is all")

    monkeypatch.setattr(_p2p, "device_of", lambda group: torch.device("meta"))
    with pytest.raises(RuntimeError, match="that is all"):
        td.recv(group=Elsewhere(), group_src=0)
    assert offered == ["meta"]


def test_irecv_several_messages_writes_last() -> None:
    td, loop = TensorDict({"a": torch.ones(10_000)}).consolidate(), Loop()
    for step in range(4):
        (td + step).consolidate().send(group=loop, group_dst=0, consolidated=True)
    send_to(td.clone().consolidate(), td)
    for handle in [td.irecv(group=loop, group_src=0, return_premature=True)[0] for _ in range(4)]:
        handle.wait()
    assert td["a"].unique().tolist() == [4.0]
