"""The messages of td for other transports: a collection as bytes that describe it, and one tensor with its elements.

A transport sends both by its own means, such as a socket, shared memory, UCX or NIXL, and the other process unpacks them. The
names here keep their meaning as long as :data:`VERSION` stays the same. ``examples/td-example-transport`` is a transport.

>>> import torch
>>> from td_core import TensorDict
>>> header, payload = pack(TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(2)}}, device="cpu"))
>>> payload.dtype, payload.ndim
(torch.uint8, 1)
>>> unpack(header, payload)["n", "b"]
tensor([1., 1.])
"""

from __future__ import annotations

import struct
from typing import Any, cast

import torch
from torch import Tensor

from td_core import TensorCollection
from td_core.errors import FormatError, StructureError

from . import _consolidated_file, _wire
from ._consolidated_backend import ConsolidatedBackend, get_backend, storage_of

__all__ = ["VERSION", "describe_storage", "pack", "payload_size", "unpack"]

#: Version of this interface, and of the headers, which begin with it.
VERSION = 1
#: Mark, version, size of the payload, digest of the description that follows.
_FRONT = struct.Struct("<4sIQ16s")
_MARK = b"td m"


def pack(data: TensorCollection) -> tuple[bytes, Tensor]:
    """Return a header and a payload, a vector of bytes on the device of the leaves.

    The header is the same for collections with the same structure and values, so a transport can send it once. The payload of a
    consolidated collection is its storage: do not write into the collection before the payload is sent.

    Raises:
        StructureError: a leaf cannot be sent.
        CodecError: no registered serializer can store a value.
    """
    message, storage = _wire.make_whole(data)
    digest = _wire.compute_digest(message.header)
    return _FRONT.pack(_MARK, VERSION, len(storage), digest) + message.header, storage


def payload_size(header: bytes) -> int:
    """Return the size of the payload of a header, by which a receiver allocates memory, or refuses.

    Raises:
        FormatError: the header is damaged, or of another version.

    >>> payload_size(pack(TensorDict({"a": torch.zeros(4)}))[0])
    16
    """
    return _read_front(header)[0]


def unpack(header: bytes, payload: Tensor) -> Any:
    """Return the collection of a message, consolidated: its leaves are views of the payload.

    Nothing is executed or imported. Leaves are on the device of the payload.

    Raises:
        FormatError: header or payload are damaged, shorter than they were, or of another version.
        TypeError: the payload is not a vector of bytes.
    """
    if payload.dtype is not torch.uint8 or payload.ndim != 1:
        raise TypeError(f"a payload is a vector of bytes; got {payload.dtype} of shape {list(payload.shape)}")
    size, described = _read_front(header)
    if len(payload) != size:
        raise FormatError(f"the payload of a message has {len(payload)} bytes; its header says {size}")
    message = _wire.parse_message(described)
    if message.layout.nbytes != size:
        raise FormatError(
            f"the header of a message is damaged: its leaves take {message.layout.nbytes} bytes, not {size}"
        )
    return _wire.assemble(message, payload.contiguous())


def describe_storage(data: TensorCollection) -> dict[str, Any]:
    """Return the structure of a consolidated collection, with the place of each leaf in its storage.

    It has the form that consolidated files share with tensordict: an object per node, in which ``"leaves"`` lists the dtype,
    shape, first byte, end and padding of each leaf.

    Raises:
        StructureError: the collection is not consolidated, or that form cannot describe it.

    >>> describe_storage(TensorDict({"a": torch.zeros(3)}).consolidate())["leaves"]
    {'a': ['torch.float32', [3], 0, 12, 0]}
    """
    storage_of(data)  # raises the error of a collection that is not consolidated
    taken = cast(ConsolidatedBackend, get_backend(data)).encode_cached(data)
    if taken.layout is None:
        raise StructureError("leaves on the meta device have no place in a storage")
    structure = _consolidated_file.describe_plainly(data, taken.encoded, taken.layout)
    if structure is None:
        raise StructureError(
            "this collection has keys, values or leaves that the plain form of consolidated files cannot hold: pack() can send it"
        )
    return structure


def _read_front(header: bytes) -> tuple[int, bytes]:
    """Return the size of the payload and the description, whose digest must fit."""
    if len(header) < _FRONT.size or not header.startswith(_MARK):
        raise FormatError("this is not a header of td_distributed.spi.pack()")
    _, version, size, digest = _FRONT.unpack_from(header)
    if version != VERSION:
        raise FormatError(
            f"the header of a message has the version {version}; expected {VERSION}: use one release of td at both ends"
        )
    described = bytes(header[_FRONT.size :])
    if _wire.compute_digest(described) != digest:
        raise FormatError("the header of a message is damaged: its digest differs")
    return size, described
