"""Consolidation: make every leaf of a collection a view of one storage.

``consolidate`` locks its result and attaches the storage to it. A collection that is read from a file or unpickled is
locked only if its source was. Every use of the storage first checks that all leaves are still views of it. Writing a
leaf in place writes the storage.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import td_core
from td_core import Encoded, TensorCollection, TensorDictFuture, decode, encode
from td_core.errors import FormatError, StructureError
from td_core.plugins.declarations import implements, implements_classmethod
from td_core.plugins.distributed_methods import ConsolidateOptions, DistributedMethods
from td_core.spi import as_device, check_in_memory, check_unlocked, lock, run_in_background, wait_for

from . import _consolidated_file, _storage
from ._consolidated_backend import ConsolidatedBackend, attach_backend, get_backend, set_devices
from ._memory import allocate, make_vector

#: Options with which a consolidated collection remains as it is.
_NO_CHANGE = (ConsolidateOptions(), ConsolidateOptions(inplace=True))


@implements(DistributedMethods.consolidate)
def consolidate(self: TensorCollection, options: ConsolidateOptions) -> TensorCollection | TensorDictFuture:
    filename, inplace = options.filename, options.inplace
    if inplace:
        check_in_memory(self, "consolidate")
    for name in ("durable", "checksums"):
        if getattr(options, name) and filename is None:
            raise ValueError(f"{name}=True needs a filename: without one nothing is saved")
    if options.return_early:
        wait_for({leaf.device for leaf in self._leaves()})
        tree = self if inplace or is_consolidated(self) else decode(encode(self))
        work = partial(_consolidate, tree, replace(options, return_early=False))
        return run_in_background(work, "td-distributed-consolidate")
    return _consolidate(self, options)


def _consolidate(self: TensorCollection, options: ConsolidateOptions) -> TensorCollection:
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
    result: TensorCollection = decode(
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
    """Store leaves in the nodes that were encoded."""
    for node, row in zip(encoded.objects, encoded.nodes):
        for key, ref in row["entries"]:
            if isinstance(ref, list):
                node._set_child(key, leaves[ref[0]])


@implements(DistributedMethods.is_consolidated)
def is_consolidated(self):
    state = get_backend(self)
    return state is not None and state.is_valid_for(self)


def _allocate(nbytes: int, device: torch.device, share_memory: bool, pin_memory: bool) -> Tensor:
    if (share_memory or pin_memory) and device.type != "cpu":
        raise StructureError(
            f"share_memory and pin_memory need a storage on the CPU; it would be on {device}"
        )
    storage = allocate(nbytes, device, pin_memory=pin_memory)
    return storage.share_memory_() if share_memory else storage


@implements_classmethod(DistributedMethods.from_consolidated)
def from_consolidated(cls, filename, *, verify):
    tree, storage = _consolidated_file.read(filename, cls, verify=verify)
    return attach_backend(tree, ConsolidatedBackend(storage, Path(filename)))


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
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1:
        raise TypeError(f"a vector of bytes is needed; got {buffer.dtype} of shape {list(buffer.shape)}")
    buffer = buffer.contiguous()
    tree, _ = _consolidated_file.parse(buffer, "the buffer")
    return attach_backend(tree, ConsolidatedBackend(buffer))


def save_file(
    data: TensorCollection,
    location: Path,
    *,
    num_threads: int = 0,
    durable: bool = False,
    checksums: bool = False,
) -> TensorCollection:
    """Save a collection to a consolidated file; the options are those of ``consolidate``."""
    options = ConsolidateOptions(location, num_threads=num_threads, durable=durable, checksums=checksums)
    _consolidate(data, options)
    return data


def load_file(location: Path, *, verify: bool = False) -> Any:
    """Load a consolidated file; see ``from_consolidated``."""
    return from_consolidated(location, verify=verify)


def verify_file(location: Path) -> td_core.Report:
    """Check the structure of a consolidated file, and the hash of its storage if that was recorded (``checksums=True``)."""
    hashed, problems = 0, []
    try:
        hashed = _consolidated_file.count_hashes(location)
        _consolidated_file.read(location, verify=True)
    except FormatError as error:
        problems.append(td_core.Problem(location.name, "damaged", str(error)))
    return td_core.Report(str(location), 1, hashed, problems)
