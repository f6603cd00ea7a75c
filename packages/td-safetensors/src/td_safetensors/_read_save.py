"""Load a save: read or map its tensors, and build the collection that its header describes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core import NestedKey, TensorCollection, TensorDict
from td_core.errors import FormatError
from td_core.spi import Encoded, make_reporter, run_parallel, select_keys
from td_core.typing import Progress
from td_store.arrays import build_collection, build_leaves, list_names, open_place, read_into, read_stored

from ._find_save import File, Save, is_on_network, open_save, view_storage
from ._format import DTYPES, Array

#: Tensors below this size are read together where they are neighbours.
_SMALL = 1 << 18
_GROUP = 1 << 20


def load(
    path: str | os.PathLike[str],
    *,
    device: object = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    rows: object = None,
    strategy: str = "auto",
    strict: bool = True,
    num_threads: int = 0,
    progress: Progress = False,
    storage_options: Mapping[str, object] | None = None,
) -> Any:
    """Load a collection from a safetensors file, or from a directory of shards.

    Files of tensordict and of other programs load too. Without a header of a collection, names are split at dots.

    Args:
        path: the file, the index of shards, or their directory; a path or a URL of fsspec.
        device: device of the leaves; ``"meta"`` reads no leaf.
        keys: keys or key paths to load, with all that is below them. Nothing else is read.
        rows: index of the first batch dim: an int, a slice or positions.
        strategy: ``"mmap"`` maps the file, so that elements are read when they are used, and writes stay in memory.
            ``"read"`` reads at once. ``"auto"`` reads URLs and files on network file systems, and maps other files.
        strict: False loads a tensorclass that is not defined as a TensorDict.
        num_threads: number of threads that read a local file; 0 reads in this thread.
        progress: show a progress bar, or call a function of (bytes done, total bytes).
        storage_options: arguments of the file system of fsspec, for a URL.

    Raises:
        FileNotFoundError: there is no save at ``path``.
        FormatError: the save is damaged; the message has the path and the key.
        KeyPathError: the save has no such key.

    >>> from td_safetensors import save
    >>> _ = save(TensorDict({"a": torch.arange(3), "n": {"b": torch.zeros(3)}}, [3]), "data.safetensors")
    >>> load("data.safetensors", keys="a", rows=slice(1, None))["a"]
    tensor([1, 2])
    """
    return _load(path, None, device, keys, rows, strategy, strict, num_threads, progress, storage_options)


def load_into(data: TensorCollection, path: str | os.PathLike[str], **options: Any) -> TensorCollection:
    """Load a save into the leaves of ``data``; large ones are read into their memory, without a copy in between."""
    into = data if options.get("device") is None and options.get("rows") is None else None
    loaded = _load(path, into, **options)
    with torch.no_grad():  # loaded tensors have no autograd graph
        return data.update(loaded, inplace=True)


def _load(
    path: str | os.PathLike[str],
    into: Any,
    device: Any = None,
    keys: Iterable[NestedKey] | None = None,
    rows: Any = None,
    strategy: str = "auto",
    strict: bool = True,
    num_threads: int = 0,
    progress: Progress = False,
    storage_options: Mapping[str, object] | None = None,
) -> Any:
    if strategy not in ("auto", "mmap", "read"):
        raise ValueError(f"strategy is 'auto', 'mmap' or 'read'; got {strategy!r}")
    target = None if device is None else TensorDict(device=device).device  # td-core adds the index of a GPU
    meta = target is not None and target.type == "meta"
    with open_save(path, storage_options) as save:
        if save.is_remote and strategy == "mmap":
            raise ValueError(f"{save.path} is a URL, which cannot be mapped: leave out strategy")
        table = select_keys(save.table, keys, save.path)
        reads = strategy == "read" or save.is_remote or (strategy == "auto" and is_on_network(save.path))
        if reads and not meta and (save.is_remote or rows is not None):
            result = _read_ranges(save, table, rows, strict, num_threads, progress)
            return result if target is None else result.to(target)
        names = dict.fromkeys(name for place in table.leaves for name in list_names(place))
        early = target if rows is None or meta else None
        targets = {} if into is None else _find_targets(save, table, into)
        read = _make_reader(save, list(names), targets, early, reads, num_threads, progress)
        result = build_collection(table, save.path, read, early, strict=strict)
        if rows is not None:
            result = result[rows]
            if target is not None and early is None:
                result = result.to(target)
    return result


def _read_ranges(
    save: Save, table: Encoded, rows: object, strict: bool, num_threads: int, progress: Progress
) -> Any:
    """Load the leaves of a table, or only some rows of them, as ranges of bytes."""
    open_array = save.make_opener(num_threads)
    lazy = build_leaves(table, save.path, lambda place: open_place(place, open_array), strict=strict)
    return read_stored(lazy, rows, progress)


def _find_targets(save: Save, table: Encoded, data: TensorCollection) -> dict[str, Tensor]:
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
    reads: bool,
    num_threads: int,
    progress: Progress,
) -> Callable[[str], Tensor]:
    """Return a function from the name of a tensor to the tensor, for the given names."""
    total = sum(save.arrays[name][1].nbytes for name in names if name in save.arrays)
    report = make_reporter(progress, total, "load")
    known: dict[str, Tensor] = {}
    meta = device is not None and device.type == "meta"
    if reads and not meta:
        known = _read_all(save, names, targets, num_threads, report)

    def read(name: str) -> Tensor:
        if name in known:
            return known[name]
        array = save.arrays[name][1]
        if meta and array.dtype in DTYPES:
            known[name] = torch.empty(array.shape, dtype=DTYPES[array.dtype], device="meta")
        else:
            known[name] = save.map(name)
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
        assert isinstance(file, File)  # URLs are read as ranges
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
