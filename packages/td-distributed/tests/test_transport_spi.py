"""Headers and payloads for transports of others."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core.errors import FormatError, StructureError
from td_core.testing import assert_same
from td_distributed import spi, storage_of

TREES: dict[str, Any] = {
    "nested": TensorDict({"a": torch.arange(6).view(3, 2), "n": {"b": torch.ones(3)}}, [3], names=["time"]),
    "uneven": lazy_stack([TensorDict({"a": torch.arange(i)}) for i in range(3)]),
    "zero_size": TensorDict({"a": torch.zeros(0, 3), "b": torch.zeros(2, 0)}),
    "no_leaves": TensorDict({"n": {}}),
    "dtypes": TensorDict(
        {"a": torch.ones(3).bfloat16(), "b": torch.ones(1, dtype=torch.complex128), "c": torch.tensor(True)}
    ),
    "expanded": TensorDict({"a": torch.ones(1).expand(4), "b": torch.arange(6).view(2, 3).t()}),
    "consolidated": TensorDict({"a": torch.arange(3), "b": torch.ones(2)}).consolidate(),
}


@pytest.mark.parametrize("name", TREES)
def test_unpack_returns_what_was_packed(name: str) -> None:
    header, payload = spi.pack(TREES[name])
    assert (type(header), payload.dtype, len(payload)) == (bytes, torch.uint8, spi.payload_size(header))
    found = spi.unpack(header, payload.clone())
    assert_same(found, TREES[name])
    assert found.is_consolidated() or not found._leaves()


def test_header_of_same_structure_is_the_same() -> None:
    first, second = TREES["nested"], TREES["nested"].clone().zero_()
    assert spi.pack(first)[0] == spi.pack(second)[0]


def test_payload_of_consolidated_collection_is_its_storage() -> None:
    data = TensorDict({"a": torch.arange(3), "b": torch.ones(2)}).consolidate()
    data["a"].add_(1)
    _, payload = spi.pack(data)
    assert payload.data_ptr() == data["a"].untyped_storage().data_ptr()


def test_writes_into_unpacked_leaves_reach_the_payload() -> None:
    header, payload = spi.pack(TensorDict({"a": torch.zeros(2)}))
    spi.unpack(header, payload)["a"].fill_(1)
    assert spi.unpack(header, payload)["a"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda header: header[:10], "not a header"),
        (lambda header: b"xxxx" + header[4:], "not a header"),
        (
            lambda header: header[:4] + struct.pack("<I", 2) + header[8:],
            "version 2; expected 1: use one release",
        ),
        (lambda header: header[:-1], "its digest differs"),
        (lambda header: header[:50] + bytes([header[50] ^ 1]) + header[51:], "its digest differs"),
        (lambda header: header[:8] + struct.pack("<Q", 99) + header[16:], "has 64 bytes; its header says 99"),
    ],
)
def test_damaged_header_raises(damage: Any, message: str) -> None:
    header, payload = spi.pack(TREES["nested"])
    with pytest.raises(FormatError, match=message):
        spi.unpack(damage(header), payload)


def test_header_with_other_size_than_its_leaves_raises() -> None:
    header, payload = spi.pack(TREES["nested"])
    longer = header[:8] + struct.pack("<Q", 68) + header[16:]
    with pytest.raises(FormatError, match="its leaves take 64 bytes, not 68"):
        spi.unpack(longer, torch.cat([payload, payload[:4]]))


def test_payload_of_another_form_raises() -> None:
    header, payload = spi.pack(TREES["nested"])
    with pytest.raises(FormatError, match="has 63 bytes; its header says 64"):
        spi.unpack(header, payload[1:])
    for other in (payload.view(2, -1), payload.view(torch.int8)):
        with pytest.raises(TypeError, match="a payload is a vector of bytes"):
            spi.unpack(header, other)


def test_pack_refuses_what_no_message_holds() -> None:
    with pytest.raises(StructureError, match="'a'"):
        spi.pack(TensorDict({"a": torch.eye(3).to_sparse()}))


@pytest.mark.parametrize("name", ["nested", "uneven", "zero_size", "dtypes", "expanded", "consolidated"])
def test_describe_storage_locates_each_leaf(name: str) -> None:
    data = TREES[name].consolidate()
    storage = storage_of(data)

    def compare(level: dict[str, Any], node: Any) -> None:
        members = getattr(node, "tensordicts", None)
        entries = dict(node.items()) if members is None else {str(i): item for i, item in enumerate(members)}
        for key, (dtype, shape, start, stop, pad) in level["leaves"].items():
            leaf = entries.pop(key)
            assert (dtype, shape) == (str(leaf.dtype), list(leaf.shape))
            assert stop - pad - start == leaf.numel() * leaf.itemsize
            assert torch.equal(storage[start : stop - pad].view(leaf.dtype).view(shape), leaf)
        for key, child in entries.items():
            compare(level[key], child)

    compare(spi.describe_storage(data), data)


def test_describe_storage_refuses_what_has_no_places() -> None:
    with pytest.raises(StructureError, match="is not consolidated"):
        spi.describe_storage(TensorDict({"a": torch.zeros(2)}))
    with pytest.raises(StructureError, match="meta device"):
        spi.describe_storage(TensorDict({"a": torch.zeros(2, device="meta")}).consolidate())
    with pytest.raises(StructureError, match=r"plain form .* cannot hold: pack\(\) can send it"):
        spi.describe_storage(TensorDict({"leaves": {"a": torch.zeros(2)}}).consolidate())
