"""Read saves: find the tensors of a file or of shards, and build the collection that a header describes."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core import Encoded, NestedKey, TensorDict
from td_core.array_formats import build_collection, compute_check, list_names
from td_core.errors import FormatError
from td_core.spi import Progress, check_table, load_table, make_reporter, select_keys

from ._files import is_on_network, map_file, open_for_reading, read_into, run_parallel
from ._format import DTYPES, Array, Header, parse_json, read_header
from ._reference import build_foreign_table, read_reference
from ._shards import SINGLE, check_weight_map, find_index

__all__ = ["Save", "load", "open_save"]

#: Tensors below this size are read together where they are neighbours.
_SMALL = 1 << 18
_GROUP = 1 << 20


class File:
    """An open file with its header, which maps and reads its tensors."""

    def __init__(self, path: str, fd: int, header: Header, *, shared: bool = False) -> None:
        self.path, self.fd, self.header, self.shared = path, fd, header, shared
        self._mapped: torch.UntypedStorage | None = None

    def map(self, name: str, array: Array) -> Tensor:
        """Return a tensor of the file, mapped; raise FormatError if this torch lacks its dtype."""
        if array.dtype not in DTYPES:
            raise FormatError(
                f"the tensor {name!r} has the dtype {array.dtype!r}, which this torch does not have"
            )
        if self._mapped is None:
            self._mapped = map_file(self.fd, shared=self.shared)
        begin = self.header.start + array.begin
        if self.shared and begin % DTYPES[array.dtype].itemsize:
            raise FormatError(f"{self.path}: {name!r} is not aligned, so it cannot be written in place")
        return view_storage(self._mapped, array, begin)


def view_storage(storage: torch.UntypedStorage, array: Array, begin: int) -> Tensor:
    """Return the tensor at a position of a storage; it is copied if its elements are not aligned there."""
    dtype = DTYPES[array.dtype]
    if array.begin == array.end:
        return torch.empty(array.shape, dtype=dtype)
    part = storage[begin : begin + array.nbytes]
    if begin % dtype.itemsize:
        part = part.clone()
    return torch.empty(0, dtype=dtype).set_(part, 0, array.shape)  # type: ignore[call-overload, no-any-return]


class Save:
    """An open save: its files, the tensors in them by name, and the header that describes the collection.

    Attributes:
        path: path of the file, or of the index of shards.
        arrays: file and position of each tensor.
        table: the table of nodes, with places as leaves.
        hashes: the hashes of the tensors as in the ``td`` header, or None.
    """

    def __init__(
        self, path: str, arrays: dict[str, tuple[File, Array]], table: Encoded, hashes: Any = None
    ) -> None:
        self.path, self.arrays, self.table, self.hashes = path, arrays, table, hashes

    def map(self, name: str) -> Tensor:
        """Return a tensor of the save, mapped from its file."""
        file, array = self.arrays[name]
        return file.map(name, array)


@contextlib.contextmanager
def open_save(path: str | os.PathLike[str]) -> Iterator[Save]:
    """Open a file, an index, or a directory with one of them, and read its headers.

    Raises:
        FileNotFoundError: there is no save at ``path``.
        FormatError: a header is damaged, or headers contradict each other.
    """
    place = os.fspath(path)
    if os.path.isdir(place):
        index = find_index(place)
        place = os.path.join(place, SINGLE) if index is None else index
    with contextlib.ExitStack() as stack:
        fd = stack.enter_context(open_for_reading(place))
        if is_index(os.pread(fd, 9, 0)) or place.endswith(".json"):
            yield _open_shards(place, stack)
        else:
            file = File(place, fd, read_header(fd, place))
            arrays = {name: (file, array) for name, array in file.header.arrays.items()}
            yield _describe(place, arrays, file.header.metadata)


def is_index(head: bytes) -> bool:
    """Return True if a file begins like JSON, and not like a safetensors file, whose header begins at byte 8."""
    return head[:1] == b"{" and head[8:9] != b"{"


def _open_shards(path: str, stack: contextlib.ExitStack) -> Save:
    """Open the shards of an index. Start again if another process replaces the index meanwhile."""
    while True:
        with open_for_reading(path) as fd, contextlib.ExitStack() as opened:
            before = os.fstat(fd)
            with open(fd, "rb", closefd=False) as file:
                index = parse_json(file.read(), path)
            try:
                arrays = _open_weight_map(path, check_weight_map(index, path), opened)
            except FileNotFoundError as error:
                now = os.stat(path)
                if (now.st_ino, now.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
                    continue
                raise FormatError(f"{path}: a shard that it names is missing: {error.filename}") from error
            stack.push(opened.pop_all())
        metadata = {"td": json.dumps(index["td"])} if "td" in index else {}
        return _describe(path, arrays, metadata)


def _open_weight_map(
    path: str, weights: Mapping[str, str], stack: contextlib.ExitStack
) -> dict[str, tuple[File, Array]]:
    files: dict[str, File] = {}
    arrays = {}
    for name, relative in weights.items():
        if relative not in files:
            place = os.path.join(os.path.dirname(path), relative)
            fd = stack.enter_context(open_for_reading(place))
            files[relative] = File(place, fd, read_header(fd, place))
        file = files[relative]
        # A tensor of a shard that the index assigns to another file, or to none, is not read.
        if name not in file.header.arrays:
            raise FormatError(
                f"{path}: the tensor {name!r} is not in {file.path}, which the index names for it"
            )
        arrays[name] = (file, file.header.arrays[name])
    return arrays


def _describe(path: str, arrays: dict[str, tuple[File, Array]], metadata: Mapping[str, str]) -> Save:
    """Choose the header that describes the collection: ours, that of tensordict, or the names of the tensors."""
    hashes = None
    if "td" in metadata:
        header = _read_header(metadata, path)
        table, hashes = load_table(header, path), header.get("hashes")
        check = compute_check((name, array.shape) for name, (_, array) in arrays.items())
        if header.get("check") != check:
            raise FormatError(
                f"{path}: the td header does not describe the tensors of the file; another program changed names or shapes"
            )
    elif "tensordict" in metadata:
        table = read_reference(parse_json(metadata["tensordict"], f"{path}: the tensordict header"), path)
        check_table(table, path)
    else:
        return Save(path, arrays, build_foreign_table({name: array for name, (_, array) in arrays.items()}))
    named = set()
    for place in table.leaves:
        named.update(list_names(place))
    if named != arrays.keys():
        missing, extra = sorted(named - arrays.keys()), sorted(arrays.keys() - named)
        raise FormatError(
            f"{path}: its header and its tensors differ; missing: {missing!r:.300}, not in the header: {extra!r:.300}"
        )
    return Save(path, arrays, table, hashes)


def _read_header(metadata: Mapping[str, str], path: str) -> Any:
    header = parse_json(metadata["td"], f"{path}: the td header")
    beside = metadata.get("tensordict")
    if (
        isinstance(header, dict)
        and beside is not None
        and header.get("beside") != zlib.crc32(beside.encode())
    ):
        raise FormatError(
            f"{path}: the headers td and tensordict differ; another program changed one of them"
        )
    return header


def load(
    path: str | os.PathLike[str],
    *,
    device: Any = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: Any = None,
    strategy: str = "auto",
    strict: bool = True,
    num_threads: int = 0,
    progress: Progress = False,
) -> Any:
    """Load a collection from a safetensors file, or from a directory of shards.

    Files of tensordict and of other programs load too. Without a header of a collection, names are split at dots.

    Args:
        path: the file, the index of shards, or their directory.
        device: device of the leaves; ``"meta"`` reads no leaf.
        keys: keys or key paths to load, with all that is below them. Nothing else is read.
        rows: index of the first batch dim: an int, a slice or positions.
        strategy: ``"mmap"`` maps the file, so that elements are read when they are used, and writes stay in memory.
            ``"read"`` reads at once. ``"auto"`` reads from network file systems and maps other files.
        strict: False loads a tensorclass that is not defined as a TensorDict.
        num_threads: number of threads that read; 0 reads in this thread.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Raises:
        FileNotFoundError: there is no save at ``path``.
        FormatError: the save is damaged; the message has the path and the key.
        KeyPathError: the save has no such key.

    >>> from td_safetensors import save
    >>> _ = save(TensorDict({"a": torch.arange(3), "n": {"b": torch.zeros(3)}}, [3]), "data.safetensors")
    >>> load("data.safetensors", keys="a", rows=slice(1, None))["a"]
    tensor([1, 2])
    """
    return _load(path, None, device, keys, rows, strategy, strict, num_threads, progress)


def load_into(
    data: Any,
    path: str | os.PathLike[str],
    *,
    device: Any = None,
    keys: Any = None,
    rows: Any = None,
    strategy: str = "auto",
    strict: bool = True,
    num_threads: int = 0,
    progress: Progress = False,
) -> Any:
    """Load a save into the leaves of ``data``; large ones are read into their memory, without a copy in between."""
    into = data if device is None and rows is None else None
    loaded = _load(path, into, device, keys, rows, strategy, strict, num_threads, progress)
    with torch.no_grad():  # loaded tensors have no autograd graph
        return data.update(loaded, inplace=True)


def _load(
    path: str | os.PathLike[str],
    into: Any,
    device: Any,
    keys: Any,
    rows: Any,
    strategy: str,
    strict: bool,
    num_threads: int,
    progress: Progress,
) -> Any:
    if strategy not in ("auto", "mmap", "read"):
        raise ValueError(f"strategy is 'auto', 'mmap' or 'read'; got {strategy!r}")
    target = None if device is None else TensorDict(device=device).device  # td-core adds the index of a GPU
    with open_save(path) as save:
        table = select_keys(save.table, keys, save.path)
        names = dict.fromkeys(name for place in table.leaves for name in list_names(place))
        early = target if rows is None or (target is not None and target.type == "meta") else None
        targets = {} if into is None else _find_targets(save, table, into)
        read = _make_reader(save, list(names), targets, early, strategy, num_threads, progress)
        result = build_collection(table, save.path, read, early, strict=strict)
        if rows is not None:
            result = result[rows]
            if target is not None and early is None:
                result = result.to(target)
    return result


def _find_targets(save: Save, table: Encoded, data: Any) -> dict[str, Tensor]:
    """Return the leaves of a collection into whose memory a tensor of the save can be read, by the name of the tensor."""
    leaves: dict[Any, Any] = dict(data.items(True, True))
    users = Counter(name for place in table.leaves for name in list_names(place))
    targets: dict[str, Tensor] = {}
    for name, path in zip(table.leaves, table.leaf_paths(members=False), strict=True):
        leaf: Any = leaves.get(path[0] if len(path) == 1 else path)
        if not isinstance(name, str) or users[name] > 1 or type(leaf) not in (Tensor, torch.nn.Parameter):
            continue
        array = save.arrays[name][1]
        # Any other leaf is copied to, which converts it or raises the error of copy_().
        fits = leaf.dtype == DTYPES.get(array.dtype) and tuple(leaf.shape) == array.shape
        if fits and leaf.is_cpu and leaf.is_contiguous() and not (leaf.is_conj() or leaf.is_neg()):
            targets[name] = leaf.detach()
    return targets


def _make_reader(
    save: Save,
    names: list[str],
    targets: Mapping[str, Tensor],
    device: torch.device | None,
    strategy: str,
    num_threads: int,
    progress: Progress,
) -> Callable[[str], Tensor]:
    """Return a function from the name of a tensor to the tensor, for the given names."""
    total = sum(save.arrays[name][1].nbytes for name in names if name in save.arrays)
    report = make_reporter(progress, total, "load")
    known: dict[str, Tensor] = {}
    meta = device is not None and device.type == "meta"
    reads = strategy == "read" or (strategy == "auto" and is_on_network(save.path))
    if reads and not meta:
        known = _read_all(save, names, targets, num_threads, report)

    def read(name: str) -> Tensor:
        if name in known:
            return known[name]
        file, array = save.arrays[name]
        if meta and array.dtype in DTYPES:
            known[name] = torch.empty(array.shape, dtype=DTYPES[array.dtype], device="meta")
        else:
            known[name] = file.map(name, array)
            report(array.nbytes)
        return known[name]

    if device is None or meta:
        return read
    moved: dict[str, Tensor] = {}

    def read_and_move(name: str) -> Tensor:
        if name not in moved:
            moved[name] = read(name).to(device)
        return moved[name]

    return read_and_move


def _read_all(
    save: Save,
    names: list[str],
    targets: Mapping[str, Tensor],
    num_threads: int,
    report: Callable[[int], None],
) -> dict[str, Tensor]:
    """Read tensors into memory: small neighbours into one storage, others each into its own or into their target."""
    result: dict[str, Tensor] = {}
    work: list[Callable[[], None]] = []
    present = [(save.arrays[name], name) for name in names if name in save.arrays]
    present = [item for item in present if item[0][1].dtype in DTYPES]
    present.sort(key=lambda item: (item[0][0].path, item[0][1].begin))
    group: list[tuple[str, Array]] = []
    owner: File | None = None

    def flush() -> None:
        nonlocal group
        if group and owner is not None:
            work.append(partial(_read_group, owner, group, targets, result, report))
        group = []

    for (file, array), name in present:
        small = array.nbytes < _SMALL
        joins = group and owner is file and group[-1][1].end == array.begin and small
        if not joins or array.end - group[0][1].begin > _GROUP:
            flush()
        owner = file
        group.append((name, array))
        if not small:
            flush()
    flush()
    run_parallel(work, num_threads)
    return result


def _read_group(
    file: File,
    group: list[tuple[str, Array]],
    targets: Mapping[str, Tensor],
    result: dict[str, Tensor],
    report: Callable[[int], None],
) -> None:
    begin, end = group[0][1].begin, group[-1][1].end
    target = targets.get(group[0][0]) if len(group) == 1 and end > begin else None
    buffer = (
        torch.empty(end - begin, dtype=torch.uint8) if target is None else target.view(-1).view(torch.uint8)
    )
    try:
        read_into(file.fd, buffer, file.header.start + begin, report)
    except FormatError as error:
        raise FormatError(f"{file.path}: {group[0][0]!r}: {error}") from error
    if target is not None:
        result[group[0][0]] = target
        return
    storage = buffer.untyped_storage()
    for name, array in group:
        result[name] = view_storage(storage, array, array.begin - begin)
