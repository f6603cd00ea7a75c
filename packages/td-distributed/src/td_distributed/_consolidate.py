"""Consolidation: make every leaf of a collection a view of one storage.

``consolidate`` locks its result and attaches the storage to it. A collection that is read from a file or unpickled is
locked only if its source was. Every use of the storage first checks that all leaves are still views of it. Writing a
leaf in place writes the storage.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from td_core import TensorCollection
from td_core.errors import StructureError
from td_core.spi import (
    Encoded,
    as_device,
    check_in_memory,
    check_unlocked,
    decode,
    encode,
    lock,
    run_in_background,
    wait_for,
)
from td_core.typing import DeviceType

from . import _consolidated_file, _storage
from ._consolidated_backend import CollectionT, ConsolidatedBackend, attach_backend, get_backend, set_devices
from ._memory import allocate, make_vector


@dataclass(frozen=True)
class ConsolidateOptions:
    """Options of :func:`consolidate`, which describes them."""

    filename: Path | str | None = None
    _: KW_ONLY
    num_threads: int = 0
    device: DeviceType | None = None
    non_blocking: bool = False
    inplace: bool = False
    use_buffer: bool = False
    share_memory: bool = False
    pin_memory: bool = False
    metadata: bool = False
    durable: bool = False
    checksums: bool = False


#: Options with which a consolidated collection remains as it is.
_NO_CHANGE = (ConsolidateOptions(), ConsolidateOptions(inplace=True))


def consolidate(
    self: CollectionT,
    filename: Path | str | None = None,
    *,
    num_threads: int = 0,
    device: DeviceType | None = None,
    non_blocking: bool = False,
    inplace: bool = False,
    return_early: bool = False,
    use_buffer: bool = False,
    share_memory: bool = False,
    pin_memory: bool = False,
    metadata: bool = False,
    durable: bool = False,
    checksums: bool = False,
) -> CollectionT:
    """Copy the collection into one storage: return a locked collection whose leaves are views of that storage.

    A collection that is already consolidated is returned itself if all options have their defaults.

    Args:
        filename: also write the storage and the structure to a file, and memory-map the result on it.
        num_threads: number of threads that copy; 0 copies in the calling thread.
        device: device of the storage; by default that of the leaves, if they share one, else the CPU.
        non_blocking: as in :meth:`torch.Tensor.to`.
        inplace: put the views into this collection, lock it and return it.
        return_early: consolidate in a background thread and return a :class:`TensorDictFuture` of the result. Do
            not write to leaves before it is done nor, with ``inplace``, change entries.
        use_buffer: with ``filename``, gather in memory first, write once, and keep the result in memory.
        share_memory: put the storage in shared memory.
        pin_memory: put the storage in page-locked memory.
        metadata: append the structure to the storage in memory, in the format of the file, so that the storage alone
            can be sent; :func:`from_buffer` reads it.
        durable: with ``filename``, sync the file and its directory, so that a power loss leaves either the old file
            or the new one.
        checksums: with ``filename``, record a hash of the storage, which ``from_consolidated(verify=True)`` and
            :func:`td_core.verify` compare. The structure has a checksum in every file.

    Raises:
        ValueError: ``durable`` or ``checksums`` without ``filename``.
        StructureError: a leaf cannot be stored as bytes (sparse, strided nested, quantized, on the meta device), or
            ``filename`` is given and ``device`` is the meta device; nothing was written.
        LockedError: with ``inplace``, this collection or one in it is locked; nothing was changed.
        CodecError: with ``filename`` or ``metadata``, no registered serializer can store a value; the message names
            its key.

    >>> td = consolidate(TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(3)}}))
    >>> td["a"].untyped_storage().data_ptr() == td["n", "b"].untyped_storage().data_ptr()
    True
    """
    options = ConsolidateOptions(
        filename,
        num_threads=num_threads,
        device=device,
        non_blocking=non_blocking,
        inplace=inplace,
        use_buffer=use_buffer,
        share_memory=share_memory,
        pin_memory=pin_memory,
        metadata=metadata,
        durable=durable,
        checksums=checksums,
    )
    if inplace:
        check_in_memory(self, "consolidate")
    for name, is_wanted in (("durable", durable), ("checksums", checksums)):
        if is_wanted and filename is None:
            raise ValueError(f"{name}=True needs a filename: without one nothing is saved")
    if return_early:
        wait_for({leaf.device for leaf in self._leaves()})
        tree = self if inplace or is_consolidated(self) else decode(encode(self))
        future = run_in_background(partial(_consolidate, tree, options), "td-distributed-consolidate")
        return cast(CollectionT, future)  # Only return_early=True has another result.
    return _consolidate(self, options)


def _consolidate(self: CollectionT, options: ConsolidateOptions) -> CollectionT:
    if options in _NO_CHANGE and is_consolidated(self):
        return self
    encoded = encode(self, in_memory=True)
    if options.inplace:
        for node, row in zip(encoded.objects, encoded.nodes):
            if node is self or row["entries"]:
                check_unlocked(node, "consolidate it in place")
    layout = _storage.plan(encoded)
    path = None if options.filename is None else Path(options.filename)
    trailer = b""
    if path is not None or options.metadata:
        checksum = None
        if options.checksums:
            checksum = _consolidated_file.hash_parts(layout.nbytes, _storage.payload(layout, encoded.leaves))
        trailer = _consolidated_file.make_trailer(self, encoded, layout, checksum)
    storage, pieces = _make_storage(encoded.leaves, layout, trailer, path, options)
    result: CollectionT = decode(
        replace(encoded, leaves=_storage.join_pieces(layout, pieces, encoded.leaves))
    )
    if options.device is not None:
        set_devices(result, as_device(options.device))
    if options.inplace:
        _set_leaves(
            encoded, encode(result).leaves
        )  # decoding makes parameters of those of a TensorDictParams
        result = self
    lock(result, by_user=False)
    return attach_backend(result, ConsolidatedBackend(storage, path))


def _make_storage(
    leaves: list[Tensor],
    layout: _storage.Layout,
    trailer: bytes,
    path: Path | None,
    options: ConsolidateOptions,
) -> tuple[Tensor, list[_storage.Pieces]]:
    """Copy leaves into a new storage and into a file at ``path``, which the storage maps unless options exclude that."""
    devices = {leaf.device for leaf in leaves}
    shared = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
    where = shared if options.device is None else as_device(options.device)
    if path is not None and where.type == "meta":
        raise StructureError("what lies on the meta device has no data to write into a file")
    if options.num_threads > 1:
        wait_for(devices)
    size = layout.nbytes + (len(trailer) if options.metadata else 0)
    in_memory = options.use_buffer or options.share_memory or options.pin_memory
    if path is not None and where.type == "cpu" and not in_memory:
        parts = _storage.payload(layout, leaves)
        written = _consolidated_file.write(
            path, layout.nbytes, parts, trailer, options.num_threads, options.durable
        )
        return written[:size], _storage.Views(written[:size]).pieces(layout)
    storage = _allocate(size, where, options.share_memory, options.pin_memory)
    pieces, body = _storage.Views(storage).pieces(layout), storage[: layout.nbytes]
    _fill(body, layout, pieces, leaves, options, wait=path is not None)
    if options.metadata:
        storage[layout.nbytes :] = make_vector(trailer)
    if path is not None:
        _consolidated_file.write(path, layout.nbytes, [(0, body)], trailer, durable=options.durable)
    return storage, pieces


def _fill(
    body: Tensor,
    layout: _storage.Layout,
    pieces: list[_storage.Pieces],
    leaves: list[Tensor],
    options: ConsolidateOptions,
    *,
    wait: bool,
) -> None:
    """Copy leaves into their pieces of a storage; ``wait`` until they are there, also with ``non_blocking``."""
    devices = {leaf.device for leaf in leaves}
    if len(devices) == 1 and body.device not in devices and layout.nbytes <= _storage.SMALL * len(leaves):
        # Gather first, so that small leaves cross devices in one copy.
        body.copy_(_storage.gather_leaves(layout, leaves), non_blocking=options.non_blocking)
    else:
        _storage.fill(body, layout, pieces, leaves, options.num_threads, options.non_blocking)
    if options.num_threads > 1 or (options.non_blocking and wait):
        for item in {body.device, *devices}:
            if item.type == "cuda":
                torch.cuda.synchronize(item)  # each copying thread has its own CUDA stream


def _set_leaves(encoded: Encoded, leaves: list[Tensor]) -> None:
    """Store leaves in the nodes that were encoded. A parameter stays the one of its module, and moves."""
    leaves = [
        _move(old, new) if type(old) is Parameter else new
        for old, new in zip(encoded.leaves, leaves, strict=True)
    ]
    for node, row in zip(encoded.objects, encoded.nodes):
        for key, ref in row["entries"]:
            if isinstance(ref, list):
                node._set_child(key, leaves[ref[0]])


def _move(parameter: Tensor, leaf: Tensor) -> Tensor:
    """Let a parameter refer to the memory of a leaf; return the parameter."""
    parameter.data = leaf.detach()
    return parameter


def is_consolidated(self: TensorCollection) -> bool:
    """Return True if all leaves are still views of the storage that consolidation made.

    >>> td = TensorDict({"a": 1})
    >>> is_consolidated(td), is_consolidated(consolidate(td))
    (False, True)
    """
    state = get_backend(self)
    return state is not None and state.is_valid_for(self)


def _allocate(nbytes: int, device: torch.device, share_memory: bool, pin_memory: bool) -> Tensor:
    if (share_memory or pin_memory) and device.type != "cpu":
        raise StructureError(
            f"share_memory and pin_memory need a storage on the CPU; it would be on {device}"
        )
    storage = allocate(nbytes, device, pin_memory=pin_memory)
    return storage.share_memory_() if share_memory else storage


def from_consolidated(filename: str | Path, *, verify: bool = False) -> TensorCollection:
    """Load a collection from a consolidated file, written by td or by any release of tensordict.

    The leaves are views of a private memory map of the file: writing them does not change the file.

    Args:
        filename: the file.
        verify: compare the storage with its recorded hash first, if the file was written with ``checksums=True``.

    Raises:
        FormatError: the file is damaged.
        FileNotFoundError: the file does not exist.

    >>> _ = consolidate(TensorDict({"a": torch.arange(3)}), "td.bin")
    >>> from_consolidated("td.bin")["a"]
    tensor([0, 1, 2])
    """
    return load_as(None, filename, verify=verify)


def load_as(cls: type | None, filename: str | Path, *, verify: bool = False) -> TensorCollection:
    """Load a consolidated file, as an instance of ``cls`` if that has declared entries."""
    tree, storage = _consolidated_file.read(filename, cls, verify=verify)
    loaded: TensorCollection = attach_backend(tree, ConsolidatedBackend(storage, Path(filename)))
    return loaded


def from_buffer(buffer: Tensor) -> TensorCollection:
    """Decode the collection in a storage that was consolidated with ``metadata=True``.

    Args:
        buffer: 1-D uint8 tensor. The leaves are views of it if it is contiguous and aligned to 16 bytes; else copies.

    Raises:
        TypeError: ``buffer`` is not a 1-D uint8 tensor.
        FormatError: the buffer does not hold a collection, or it is damaged.

    >>> from td_distributed import storage_of
    >>> td = TensorDict({"a": torch.arange(3)}).consolidate(metadata=True)
    >>> from_buffer(storage_of(td))["a"]
    tensor([0, 1, 2])
    """
    if not isinstance(buffer, Tensor):
        raise TypeError(f"a tensor of bytes is needed; got {type(buffer).__name__}")
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1:
        raise TypeError(f"a vector of bytes is needed; got {buffer.dtype} of shape {list(buffer.shape)}")
    buffer = buffer.contiguous()
    tree, _ = _consolidated_file.parse(buffer, "the buffer")
    return attach_backend(tree, ConsolidatedBackend(buffer))
