"""Consolidation: make every leaf of a collection a view of one storage.

``consolidate`` locks its result and attaches the storage to it. A collection that is read from a file or unpickled is
locked only if its source was. Every use of the storage first checks that all leaves are still views of it. Writing a
leaf in place writes the storage.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from td_core import decode, encode
from td_core._collection import ATTACHED
from td_core._device_labels import set_device_labels
from td_core._devices import as_device, wait_for
from td_core._locking import check_unlocked_below
from td_core._ops.device_moves import write_moved_back
from td_core.errors import StructureError
from td_core.typing import DeviceType

from . import _consolidated_file, _storage
from ._consolidated_backend import ConsolidatedBackend, attach_backend, get_backend
from ._memory import allocate, make_vector


def consolidate(
    self: Any,
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
) -> Any:
    """Copy the collection into one storage: return a locked collection whose leaves are views of that storage.

    A collection that is already consolidated is returned itself if all options have their defaults.

    Args:
        self: the collection.
        filename: also write the storage and the structure to a file, and memory-map the result on it.
        num_threads: number of threads that copy; 0 copies in the calling thread.
        device: device of the storage; by default that of the leaves, if they share one, else the CPU.
        non_blocking: as in :meth:`torch.Tensor.to`.
        inplace: put the views into this collection, lock it and return it.
        return_early: consolidate in a background thread and return a :class:`concurrent.futures.Future` of the
            result. Do not write to leaves before it is done nor, with ``inplace``, change entries.
        use_buffer: with ``filename``, gather in memory first, write once, and keep the result in memory.
        share_memory: put the storage in shared memory.
        pin_memory: put the storage in page-locked memory.
        metadata: append the structure to the storage in memory, in the format of the file, so that the storage alone
            can be sent; :func:`from_buffer` reads it.
        durable: with ``filename``, sync the file and its directory, so that a power loss leaves either the old file
            or the new one.

    Raises:
        ValueError: ``durable`` without ``filename``.
        StructureError: a leaf cannot be stored as bytes (sparse, strided nested, quantized, on the meta device), or
            ``filename`` is given and ``device`` is the meta device; nothing was written.
        LockedError: with ``inplace``, this collection or one in it is locked; nothing was changed.
        CodecError: with ``filename`` or ``metadata``, no registered serializer can store a value; the message names
            its key.

    >>> td = consolidate(TensorDict({"a": torch.ones(2), "n": {"b": torch.zeros(3)}}))
    >>> td["a"].untyped_storage().data_ptr() == td["n", "b"].untyped_storage().data_ptr()
    True
    """
    options = {name: provided for name, provided in locals().items() if name not in _NO_OPTIONS}
    if durable and filename is None:
        raise ValueError("durable=True needs a filename: without one nothing is saved")
    if return_early:
        wait_for({leaf.device for leaf in self._leaves()})
        pool = ThreadPoolExecutor(1)
        tree = self if inplace or is_consolidated(self) else decode(encode(self))
        future: Future[Any] = pool.submit(consolidate, tree, filename, inplace=inplace, **options)
        pool.shutdown(wait=False)
        return future
    if not any(options.values()) and filename is None and is_consolidated(self):
        return self
    if inplace:
        check_unlocked_below(self, "consolidate it in place")
    encoded = encode(self)
    layout = _storage.plan(encoded)
    trailer = (
        _consolidated_file.make_trailer(self, encoded, layout) if filename is not None or metadata else b""
    )
    devices = {leaf.device for leaf in encoded.leaves}
    shared = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
    where = shared if device is None else as_device(device)
    path = None if filename is None else Path(filename)
    if path is not None and where.type == "meta":
        raise StructureError("what lies on the meta device has no data to write into a file")
    size = layout.nbytes + (len(trailer) if metadata else 0)
    if num_threads > 1:
        wait_for(devices)
    if path is not None and where.type == "cpu" and not (use_buffer or share_memory or pin_memory):
        parts = _storage.payload(layout, encoded.leaves)
        storage = _consolidated_file.write(path, layout.nbytes, parts, trailer, num_threads, durable)[:size]
        pieces = _storage.Views(storage).pieces(layout)
    else:
        storage = _allocate(size, where, share_memory, pin_memory)
        pieces = _storage.Views(storage).pieces(layout)
        body = storage[: layout.nbytes]
        if len(devices) == 1 and where != shared and layout.nbytes <= _storage.SMALL * len(encoded.leaves):
            # Gather first, so that small leaves cross devices in one copy.
            body.copy_(_storage.gather_leaves(layout, encoded.leaves), non_blocking=non_blocking)
        else:
            _storage.fill(body, layout, pieces, encoded.leaves, num_threads, non_blocking)
        if num_threads > 1 or (non_blocking and path is not None):
            for item in {where, *devices}:
                if item.type == "cuda":
                    torch.cuda.synchronize(item)  # each copying thread has its own CUDA stream
        if metadata:
            storage[layout.nbytes :] = make_vector(trailer)
        if path is not None:
            _consolidated_file.write(path, layout.nbytes, [(0, body)], trailer, durable=durable)
    result = decode(replace(encoded, leaves=_storage.join_pieces(layout, pieces, encoded.leaves)))
    if device is not None:
        set_device_labels(result, where)
    if inplace:
        write_moved_back(self, result)
        result = self
    return attach_backend(result, ConsolidatedBackend(storage, path), ATTACHED)


_NO_OPTIONS = ("self", "filename", "inplace", "return_early")


def is_consolidated(self: Any) -> bool:
    """Return True if all leaves are still views of the storage that consolidation made.

    Args:
        self: the collection.

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


def from_consolidated(filename: str | Path) -> Any:
    """Load a collection from a consolidated file, written by td or by any release of tensordict.

    The leaves are views of a private memory map of the file: writing them does not change the file.

    Raises:
        FormatError: the file is damaged.
        FileNotFoundError: the file does not exist.

    >>> _ = consolidate(TensorDict({"a": torch.arange(3)}), "td.bin")
    >>> from_consolidated("td.bin")["a"]
    tensor([0, 1, 2])
    """
    return read_as(None, filename)


def read_as(cls: type | None, filename: str | Path) -> Any:
    """Load a consolidated file as an instance of ``cls``, if that is a class with declared entries."""
    tree, storage = _consolidated_file.read(filename, cls)
    return attach_backend(tree, ConsolidatedBackend(storage, Path(filename)))


def from_buffer(buffer: Tensor) -> Any:
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
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1:
        raise TypeError(f"a vector of bytes is needed; got {buffer.dtype} of shape {list(buffer.shape)}")
    buffer = buffer.contiguous()
    tree, _ = _consolidated_file.parse(buffer, "the buffer")
    return attach_backend(tree, ConsolidatedBackend(buffer))
