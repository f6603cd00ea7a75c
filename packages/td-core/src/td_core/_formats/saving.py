"""Save, load, open, create, append, inspect and verify collections in any registered format."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._encode.inspection import Report, Tree
from .._tree.defaults import check_collection
from .._tree.node import Core, CoreT
from .._tree.stored_leaves import as_memory, is_stored
from .._tree.walks import walk
from ..errors import CodecError, CollectionIndexError, FormatError, WorkerError
from ..typing import NestedKey
from .locations import Location, check_mode
from .object_locations import find_place
from .serializers import SERIALIZERS, Serializer, check_options, list_options, pass_location


def save_collection(
    data: Core, location: Location, serializer: Serializer, options: dict[str, object]
) -> Any:
    """Save a collection in a format, after a check of the options."""
    location, options = pass_location(serializer, location, options)
    check_options(serializer, "save", options)

    def write(whole: Core) -> Any:
        leaves = whole._leaves()
        if not serializer.reads_stored_tensors and any(map(is_stored, leaves)):
            # A format that pickles its leaves would write the location of their elements instead of the elements.
            whole = whole._unflatten(as_memory(leaves))
        result = serializer.save(whole, location, **options)
        return data if result is whole else result

    return save_together(data, write, lambda: data, options.get("return_early"))


def save_without_defaults(
    data: CoreT,
    path: Location | None,
    format: str | None,
    options: dict[str, object],
    defaults: Mapping[str, object],
) -> CoreT:
    """Save a collection without the options that are None or have one of the ``defaults``: the format may lack them."""
    given = {
        name: value
        for name, value in options.items()
        if name not in defaults or (value is not None and value != defaults[name])
    }
    location = find_place(path, given.get("storage_options"))
    saved: CoreT = save_collection(data, location, SERIALIZERS.for_saving(location, format), given)
    return saved


def load_in_place(data: Core, path: Location, name: str | None, options: dict[str, object]) -> None:
    """Copy a save into a collection."""
    place = find_place(path, options.get("storage_options"))
    serializer = SERIALIZERS.for_loading(place, name)
    place, options = pass_location(serializer, place, options)
    options = _verify_first(serializer, "load_", place, options)
    # A load_() with **options passes them to load(), so the signature of load() defines the valid options.
    check_options(serializer, "load_", options, "load")
    serializer.load_(data, place, **options)


def load_as_class(cls: type | None, path: Location, name: str | None, options: dict[str, object]) -> Any:
    """Load a collection, as an instance of ``cls`` if that is not None."""
    serializer, location, options = _find(path, name, "load", options)
    try:
        return (
            serializer.load(location, **options)
            if cls is None
            else serializer.load_as(cls, location, **options)
        )
    except CollectionIndexError as error:
        if options.get("rows") is None:
            raise
        raise CollectionIndexError(
            f"{path}: rows={options['rows']!r:.100} indexes the batch dims of the whole save: {error}. If a level below has "
            'them, load it alone, as load(h5py_file["level"], rows=...), or open() the save and index the level'
        ) from error


def _find(
    path: Location, name: str | None, operation: str, options: dict[str, Any]
) -> tuple[Serializer, Location, dict[str, Any]]:
    """Return the format of an existing save, and its location and the options as the format takes them, after a check."""
    location = find_place(path, options.get("storage_options"))
    serializer = SERIALIZERS.for_loading(location, name)
    location, options = pass_location(serializer, location, options)
    if operation in ("load", "open"):
        options = _verify_first(serializer, operation, location, options)
    check_options(serializer, operation, options)
    return serializer, location, options


def _verify_first(
    serializer: Serializer, operation: str, location: Location, options: dict[str, Any]
) -> dict[str, Any]:
    """Verify a save if the option ``verify`` is True and the format has no such option; return the others."""
    if "verify" not in options:
        return options
    if "verify" in (list_options(serializer, operation) or list_options(serializer, "load") or ()):
        return options
    rest = {name: value for name, value in options.items() if name != "verify"}
    check_options(serializer, operation, rest, "load")
    if options["verify"]:
        access = {"storage_options": rest["storage_options"]} if "storage_options" in rest else {}
        report = serializer.verify(location, **access)
        if not report.ok:
            raise FormatError(str(report))
    return rest


def open(
    path: Location,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | NestedKey | None = None,
    format: str | None = None,
    **options: Any,
) -> Any:
    """Open a saved collection without reading its leaves; their elements are read when they are used.

    Args:
        path: location of the save, as for :func:`load`.
        mode: ``"r"`` never changes the store: a write raises, or, if the leaf is mapped memory, stays in this process.
            ``"r+"`` writes into the store. ``"c"`` keeps writes in the memory of this process.
        keys: keys or key paths to open, with all that is below them; a tuple is one key path; of a checkpoint, names of its
            tensors. None opens all.
        format: as for :func:`load`.
        **options: options of the format, and ``verify``, as for :func:`load`.

    Raises:
        UnsupportedOperationError: the format can only load complete collections.
        ValueError: ``mode`` is unknown.
        Exception: as :func:`load`.

    >>> open("missing.json", mode="w")
    Traceback (most recent call last):
    ValueError: mode is one of 'r', 'r+', 'c'; got 'w'
    """
    check_mode(mode)
    options["mode"] = mode
    if keys is not None:
        options["keys"] = [keys] if isinstance(keys, (str, tuple)) else list(keys)
    serializer, place, options = _find(path, format, "open", options)
    return serializer.open(place, **options)


def reopen(data: CoreT, *, storage_options: Mapping[str, object]) -> CoreT:
    """Give the leaves of an opened collection the options of their store again, and return the collection.

    A pickle of a collection that was opened with ``storage_options`` does not contain them, since they can be secrets; only
    worker processes that this process starts receive them.

    Args:
        data: an unpickled collection whose leaves are in a store.
        storage_options: the options, as for :func:`open`.

    Raises:
        ValueError: no leaf is in a store that has options.

    >>> reopen(TensorDict({"a": torch.ones(2)}), storage_options={"key": "secret"})
    Traceback (most recent call last):
    ValueError: reopen() gives options to leaves in a store; the collection has none that takes storage_options
    """
    check_collection("reopen", data)
    found = False
    for node in walk(data):
        reopen_store: Any = getattr(node, "reopen_store", None)
        if reopen_store is not None:  # a live collection, which has no entries before
            reopen_store(storage_options)
            found = True
    for leaf in data._leaves():
        source: Any = getattr(leaf, "source", None) if is_stored(leaf) else None
        while source is not None and not hasattr(source, "reopen"):
            source = getattr(source, "source", None)
        if source is not None:
            source.reopen(storage_options)
            found = True
    if not found:
        raise ValueError(
            "reopen() gives options to leaves in a store; the collection has none that takes storage_options"
        )
    return data


def create(like: Core, path: Location | None, *, format: str | None = None, **options: object) -> Any:
    """Create a save of zeros, and return it opened for writing.

    Args:
        like: a collection with the structure, shapes and dtypes of the save. Its elements are not read, so it can be
            expanded, or on the device ``"meta"``.
        path: location of the save, as for :func:`save`.
        format: as for :func:`save`.
        **options: options of the format.

    Raises:
        FileExistsError: something is at ``path``.
        UnsupportedOperationError: the format cannot create a save without its elements.
        Exception: as :func:`save`.

    >>> create(TensorDict(), "a.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    check_collection("create", like)
    place = find_place(path, options.get("storage_options"))
    serializer = SERIALIZERS.for_saving(place, format)
    place, options = pass_location(serializer, place, options)
    check_options(serializer, "create", options)
    return serializer.create(like, place, **options)


def append(rows: Core, path: Location, *, format: str | None = None, **options: Any) -> None:
    """Add rows to a save, along the first batch dim.

    Args:
        rows: a collection with the structure of the save.
        path: location of the save, as for :func:`load`.
        format: as for :func:`load`.
        **options: options of the format.

    Raises:
        UnsupportedOperationError: the saves of the format cannot grow.
        Exception: as :func:`load`.

    >>> append(TensorDict(), "missing.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    check_collection("append", rows)
    serializer, place, options = _find(path, format, "append", options)
    save_together(rows, lambda whole: serializer.append(whole, place, **options), lambda: None)


def inspect(path: Location, *, format: str | None = None, **options: object) -> Tree:
    """Return the tree of a save from its header alone: keys, kinds, shapes, dtypes, sizes. No leaf is read.

    Args:
        path: location of the save, as for :func:`load`.
        format: as for :func:`load`.
        **options: options of the format.

    Raises:
        UnsupportedOperationError: the format cannot read its header alone.
        Exception: as :func:`load`.

    >>> inspect("missing.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    serializer, place, options = _find(path, format, "inspect", options)
    return serializer.inspect(place, **options)


def verify(path: Location, *, format: str | None = None, **options: object) -> Report:
    """Check a save for missing and damaged parts, and return a report.

    Args:
        path: location of the save, as for :func:`load`.
        format: as for :func:`load`.
        **options: options of the format.

    Raises:
        UnsupportedOperationError: the format has no check of its own.
        Exception: as :func:`load`.

    >>> verify("missing.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    serializer, place, options = _find(path, format, "verify", options)
    return serializer.verify(place, **options)


def bind_options(
    args: tuple[object, ...], kwargs: dict[str, object], names: tuple[str, ...]
) -> dict[str, object]:
    """Merge positional and keyword options into one dict."""
    if len(args) > len(names):
        raise TypeError(f"at most {len(names)} options by position, {', '.join(names)}; got {len(args)}")
    options = dict(zip(names, args, strict=False))
    twice = options.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"the option {', '.join(map(repr, sorted(twice)))} is given by position and by name")
    return {**options, **kwargs}


def save_together(
    data: Core, write: Callable[[Any], Any], read: Callable[[], Any] | None, early: object = False
) -> Any:
    """Call ``write(data)``. Gather sharded leaves first: on all ranks of their mesh, of which the first one writes.

    The other ranks call ``read`` once the collection is saved, or raise WorkerError. With ``read=None``, every rank writes.
    ``early``: ``write`` returns before it has written; raise ValueError if leaves are sharded.

    >>> save_together(TensorDict({"a": 1}), print, None)
    TensorDict(batch_size=[], fields={a: i64[]})
    """
    check_collection("save", data)
    leaves = data._leaves()
    shards = list_shards(leaves)
    if not shards:
        return write(data)
    if early:
        raise ValueError("return_early=True: the ranks write sharded leaves together; save without it")
    gathered = {id(shard): shard.full_tensor() for shard in shards}
    whole = data._unflatten([gathered.get(id(leaf), leaf) for leaf in leaves])
    if read is None:
        return write(whole)
    mesh = max((shard.device_mesh for shard in shards), key=lambda mesh: mesh.size())
    writer = int(mesh.mesh.flatten()[0])
    writes = torch.distributed.get_rank() == writer
    failed = torch.ones((), device=mesh.device_type)
    try:
        result = write(whole) if writes else None
        failed.zero_()
    finally:
        # A reduction along each dim of the mesh: no rank continues before the first one has written.
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))
    if failed.item():
        raise WorkerError(f"rank {writer} could not save the sharded leaves; its error says why")
    return result if writes else read()


def check_whole(leaf: Tensor) -> None:
    """Raise CodecError if a leaf is sharded."""
    if list_shards([leaf]):
        raise CodecError(
            "a DTensor lies on several ranks: td_core.save(data, path, format=...), called on all of them, gathers it; or "
            "store its full_tensor()"
        )


def list_shards(leaves: Iterable[Tensor]) -> list[Any]:
    """Return the leaves that are sharded.

    >>> list_shards([torch.ones(2)])
    []
    """
    # It is in the second module before torch 2.5.
    modules = map(sys.modules.get, ("torch.distributed.tensor", "torch.distributed._tensor"))
    cls = next(filter(None, (getattr(module, "DTensor", None) for module in modules)), None)
    return [] if cls is None else [leaf for leaf in leaves if isinstance(leaf, cls)]
