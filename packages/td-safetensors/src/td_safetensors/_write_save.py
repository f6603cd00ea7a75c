"""Plan a save, and write it to one file, or to shards with an index as model hubs have them."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core.spi import (
    Serializer,
    add_check_line,
    as_bytes,
    check_same_format,
    make_reporter,
    run_in_background,
    run_parallel,
)
from td_core.typing import ObjectStore, Progress
from td_store.arrays import NewTree, PlannedArray, make_array_plan, refuse_objects
from td_store.files import Checksum, NewFile

from ._format import NAMES, Array, build_header
from ._reference import describe
from ._shards import INDEX, SINGLE, UNFINISHED, choose_names, list_shards, parse_size, split_shards

#: The longest piece that is written in one call, so that progress is reported and threads share the work.
_PIECE = 1 << 24
#: Small tensors are written together, in groups of at least this many bytes.
_GROUP = 1 << 20
#: Tensors below this size are joined before they are written.
_SMALL = 1 << 16
_JOINED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
           torch.uint8, torch.bool}  # fmt: skip


def save(
    data: Any,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    checksums: bool = False,
    durable: bool = False,
    num_threads: int = 0,
    return_early: bool = False,
    progress: Progress = False,
    overwrite: bool = False,
    storage_options: Mapping[str, object] | None = None,
) -> Any:
    """Save a collection as a safetensors file.

    The file has its complete size and content under its name, or the old file remains, whenever the process is killed.

    Args:
        data: the collection.
        path: the file to write; with ``max_shard_size`` a directory. A path, a URL or an object store.
        max_shard_size: split the tensors into files of at most this many bytes, such as ``"5GB"``, and write
            ``model.safetensors.index.json`` beside them. A tensor is never split.
        checksums: store a hash of each tensor, which ``verify`` compares.
        durable: return after the data has reached the disk.
        num_threads: number of threads that write; 0 writes in this thread.
        return_early: write in the background and return a :class:`TensorDictFuture`. The leaves must not change before
            its ``result()`` returns.
        progress: show a progress bar, or call a function of (bytes done, total bytes).
        overwrite: replace shards at a URL, where readers find no save for a moment; other saves are replaced without it.
        storage_options: options of the store of a URL.

    Returns:
        ``data``, or a future of it.

    Raises:
        CodecError: a value or leaf cannot be stored; nothing is written.
        FileExistsError: there are shards at the URL, and ``overwrite`` is False.
        IsADirectoryError: ``path`` is a directory, and ``max_shard_size`` is None.
        NotADirectoryError: ``path`` is a file, and ``max_shard_size`` is not None.

    >>> td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(3)}})
    >>> save(td, "data.safetensors") is td
    True
    """
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    objects = Serializer.find_objects(path, storage_options)
    plan = make_plan(data)
    if objects is not None:
        run = partial(save_objects, plan, objects.store, limit, checksums=checksums, overwrite=overwrite)
    else:
        run = partial(
            _choose_writer(os.fspath(path), limit, plan),
            checksums=checksums,
            durable=durable,
            num_threads=num_threads,
        )
    total = sum(item.nbytes for item in plan.stored.values())
    report = make_reporter(progress, total, "save")
    write = partial(run, report=report)
    if not return_early:
        write()
        return data
    return run_in_background(write, "td-safetensors-save", data)


def _choose_writer(place: str, limit: int | None, plan: Plan) -> Callable[..., None]:
    """Return the function that writes a file, or shards of at most ``limit`` bytes, after a check of what is there."""
    if limit is None:
        if os.path.isdir(place):
            raise IsADirectoryError(
                f"cannot save to {place!r}, which is a directory: pass the path of a file, or max_shard_size"
            )
        return partial(_save_file, plan, place)
    if os.path.lexists(place) and not os.path.isdir(place):
        raise NotADirectoryError(f"max_shard_size writes a directory of files; {place!r} is not a directory")
    check_same_format(place, "safetensors")
    if os.path.lexists(os.path.join(place, SINGLE)):
        raise FileExistsError(
            f"{os.path.join(place, SINGLE)!r} exists, which other programs read instead of the shards: remove it"
        )
    return partial(_save_shards, plan, place, limit)


def create_file(like: object, path: str | os.PathLike[str], *, durable: bool = False) -> None:
    """Write a file of zeros with the structure, shapes and dtypes of a collection; FileExistsError if the path is taken."""
    refuse_objects(path, "create a file to fill at", "save() the collection when it is complete")
    place = os.fspath(path)
    if os.path.lexists(place):
        raise FileExistsError(f"cannot create {place!r}: it exists")
    plan = make_plan(like, blank=True)
    placed = _place(plan.stored)
    header = build_header(((name, array) for name, array, _ in placed), plan.make_metadata())
    with NewFile(place) as file:
        file.write([header])
        file.extend(len(header) + max((array.end for _, array, _ in placed), default=0))
        file.commit(durable=durable)


def _hash(stored: dict[str, PlannedArray]) -> dict[str, object]:
    digests = {name: Checksum(content=item.read()).hexdigest() for name, item in stored.items()}
    return {"algorithm": Checksum().algorithm, "tensors": digests}


def _save_file(
    plan: Plan, path: str, *, checksums: bool, durable: bool, num_threads: int, report: Callable[[int], None]
) -> None:
    metadata = plan.make_metadata(_hash(plan.stored) if checksums else None)
    _write_file(path, plan.stored, metadata, durable, num_threads, report)


def _write_file(
    path: str,
    stored: dict[str, PlannedArray],
    metadata: dict[str, str],
    durable: bool,
    num_threads: int,
    report: Callable[[int], None],
) -> None:
    placed = _place(stored)
    header = build_header(((name, array) for name, array, _ in placed), metadata)
    with NewFile(path) as file:
        file.write([header])
        run_parallel(_plan_writes(file, placed, len(header), report), num_threads)
        file.commit(durable=durable)


def _place(stored: dict[str, PlannedArray]) -> list[tuple[str, Array, PlannedArray]]:
    """Return the tensors with their positions in the file, those of wide dtypes first, so that all are aligned."""
    ordered = sorted(stored.items(), key=lambda item: -(item[1].logical or item[1].dtype).itemsize)
    position, result = 0, []
    for name, item in ordered:
        size = item.nbytes
        result.append((name, Array(NAMES[item.dtype], item.shape, position, position + size), item))
        position += size
    return result


def _plan_writes(
    file: NewFile, placed: list[tuple[str, Array, PlannedArray]], start: int, report: Callable[[int], None]
) -> list[Callable[[], None]]:
    """Return functions that write the tensors: large ones piece by piece, small ones in groups."""
    writes: list[Callable[[], None]] = []
    group: list[PlannedArray] = []
    begin = size = 0
    for _, array, item in placed:
        if not group:
            begin, size = start + array.begin, 0
        group.append(item)
        size += array.nbytes
        if size >= _GROUP:
            writes.append(partial(_write_group, file, group, begin, report))
            group = []
    if group:
        writes.append(partial(_write_group, file, group, begin, report))
    return writes


def _write_group(file: NewFile, group: list[PlannedArray], begin: int, report: Callable[[int], None]) -> None:
    buffers = [
        buffer[i : i + _PIECE] for buffer in _list_buffers(group) for i in range(0, len(buffer), _PIECE)
    ]
    while buffers:
        size = count = 0
        while count < len(buffers) and size < _PIECE:
            size, count = size + len(buffers[count]), count + 1
        file.write(buffers[:count], begin, report)
        begin, buffers = begin + size, buffers[count:]


@torch.no_grad()
def _list_buffers(group: list[PlannedArray]) -> Iterator[Any]:
    """Yield the bytes of tensors as buffers. Small ones of one dtype are copied together, which is faster than one by one."""
    small: list[Tensor] = []
    for item in group:
        first = item.parts[0]
        if small and (first.dtype != small[0].dtype or not _is_small(item)):
            yield as_bytes(torch.cat(small)).numpy()
            small = []
        if _is_small(item):
            small += [part.reshape(-1) for part in item.parts]
        else:
            yield from (as_bytes(piece).numpy() for piece in item.read())
    if small:
        yield as_bytes(torch.cat(small)).numpy()


def _is_small(item: PlannedArray) -> bool:
    """Return True if plain tensors on the CPU have few elements of a dtype that every release of torch can join."""
    first = item.parts[0]
    return (
        item.nbytes < _SMALL
        and not item.dim
        and type(first) in (Tensor, torch.nn.Parameter)
        and first.dtype in _JOINED
        and first.is_cpu
    )


def _save_shards(
    plan: Plan,
    folder: str,
    limit: int,
    *,
    checksums: bool,
    durable: bool,
    num_threads: int,
    report: Callable[[int], None],
) -> None:
    """Write the shards under new names, then the index, which makes them the save, then remove those of the old index."""
    os.makedirs(folder, exist_ok=True)
    index = os.path.join(folder, INDEX)
    shards = split_shards(plan.stored, limit)
    with NewFile(index, beside=(".safetensors", ".safetensors.index.json")) as file:
        old = list_shards(os.listdir(folder))
        names = choose_names(len(shards), old)
        try:
            for name, shard in zip(names, shards, strict=True):
                _write_file(os.path.join(folder, name), shard, {"format": "pt"}, durable, num_threads, report)
            file.write([_make_index(plan, names, shards, checksums)])
            file.commit(durable=durable)
        except BaseException:
            if file.is_pending:  # with the index in place, an error leaves the new save
                for name in names:
                    _remove(os.path.join(folder, name))
            raise
        for name in old - set(names):
            _remove(os.path.join(folder, name))


def _make_index(
    plan: Plan, names: list[str], shards: list[dict[str, PlannedArray]], checksums: bool
) -> bytes:
    """Return the index of shards with some names."""
    content = {
        "metadata": {"total_size": sum(item.nbytes for item in plan.stored.values())},
        "weight_map": {name: names[i] for i, shard in enumerate(shards) for name in shard},
        "td": json.loads(plan.make_metadata(_hash(plan.stored) if checksums else None)["td"]),
    }
    return add_check_line(json.dumps(content, indent=2).encode())


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def save_objects(
    plan: Plan,
    store: ObjectStore,
    limit: int | None,
    *,
    checksums: bool,
    overwrite: bool,
    report: Callable[[int], None],
) -> None:
    """Write one object at the location of a store, or shards and their index, which is last and makes them the save."""
    if limit is None:
        metadata = plan.make_metadata(_hash(plan.stored) if checksums else None)
        store.write("", _produce(plan.stored, metadata, report))
        return
    if store.stat([SINGLE]) != [None]:
        raise FileExistsError(
            f"{store.where}: {SINGLE!r} exists, which other programs read instead of the shards: remove it"
        )
    shards = split_shards(plan.stored, limit)
    marker = json.dumps({"weight_map": {}, UNFINISHED: True}).encode()
    tree = NewTree(store, INDEX, marker, overwrite=overwrite, marks_old=False)
    old = list_shards(info.name for info in store.list("model-")) if overwrite else set()
    names = choose_names(len(shards), old)
    for name, shard in zip(names, shards, strict=True):
        tree.write(name, _produce(shard, {"format": "pt"}, report))
    tree.commit([_make_index(plan, names, shards, checksums)], old)


def _produce(
    stored: dict[str, PlannedArray], metadata: dict[str, str], report: Callable[[int], None]
) -> Iterator[Any]:
    """Yield the content of a file in buffers."""
    placed = _place(stored)
    yield build_header(((name, array) for name, array, _ in placed), metadata)
    for buffer in _list_buffers([item for _, _, item in placed]):
        for start in range(0, len(buffer), _PIECE):
            yield buffer[start : start + _PIECE]
        report(len(buffer))


@dataclass(slots=True)
class Plan:
    """What a save writes.

    Attributes:
        stored: the tensors by name, in the order of the tree; their positions in a file are not yet set.
        header: the ``td`` header.
        reference: the ``tensordict`` header, or None if it cannot describe the collection.
    """

    stored: dict[str, PlannedArray]
    header: dict[str, Any]
    reference: dict[str, object] | None

    def make_metadata(self, hashes: dict[str, object] | None = None) -> dict[str, str]:
        """Return the metadata of a file: both headers as JSON."""
        header = {**self.header, **({"hashes": hashes} if hashes else {})}
        metadata = {"format": "pt"}
        if self.reference is not None:
            metadata["tensordict"] = json.dumps(self.reference)
            header["beside"] = zlib.crc32(metadata["tensordict"].encode())
        metadata["td"] = json.dumps(header, separators=(",", ":"))
        return metadata


def make_plan(data: object, *, blank: bool = False) -> Plan:
    """Plan a save, if ``blank`` without elements, and read no leaf; CodecError if a value or leaf cannot be stored."""
    # The format reserves the name __metadata__.
    plan = make_array_plan(data, NAMES, ".".join, blank=blank, reserved=["__metadata__"])
    return Plan(plan.arrays, plan.header, describe(plan.header, plan.leaves, plan.stacks))
