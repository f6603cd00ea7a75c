"""Save, load, open, create, append, inspect and verify collections in any registered format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._encode.inspection import Report, Tree
from .._tree.node import Core, CoreT
from .._tree.stored_leaves import as_memory, is_stored
from ..errors import UnsupportedOperationError
from ..typing import NestedKey
from .checkpoints import load_into, make_checkpoint
from .locations import Location, as_location, check_mode, show_location
from .serializers import SERIALIZERS, Serializer, check_options
from .shards import save_together


def save(
    data: Core | Mapping[Any, object], path: Location | None, *, format: str | None = None, **options: object
) -> Any:
    """Save a collection, or a checkpoint: a mapping with modules, optimizers, collections, tensors and values.

    Args:
        data: the collection or the mapping. Of objects with a ``state_dict()``, such as modules, optimizers and schedulers, this
            is saved. Dicts, lists, tuples, numbers and other values that need no pickle are kept as they are, and tensors
            that are tied are saved once.
        path: a local path, or a URL or object that the format accepts; None only for formats that need none.
        format: name of a registered format. None selects the format of the suffix of ``path``, as of ``"x.h5"``, and
            ``"memmap"``, which is a directory, if no format has it.
        **options: options of the format.

    Returns:
        The result of the format: ``data``, a collection mapped from the files, or a future. For a mapping ``data``, or a future.

    Raises:
        CodecError: a value of a mapping cannot be stored without a pickle; the message has its key path, and nothing is written.
        FormatError: several formats have the suffix of ``path``, and ``format`` is None.
        MissingPluginError: the format is not registered.
        TypeError: ``data`` is neither a collection nor a mapping, the format has no such option, or does not accept the location.
        UnsupportedOperationError: ``data`` is a mapping, and the format stores collections only.

    >>> save(TensorDict(), "a.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    if not isinstance(data, (Core, Mapping)):
        raise _type_error("save", data, "a collection, such as a TensorDict, or a mapping")
    location = as_location(path)
    serializer = SERIALIZERS.for_saving(location, format)
    if isinstance(data, Core):
        return _save(data, location, serializer, options)
    return _save_checkpoint(data, location, serializer, options)


def _save_checkpoint(
    data: Mapping[Any, object], location: Location, serializer: Serializer, options: dict[str, object]
) -> Any:
    if not serializer.stores_kinds:
        raise UnsupportedOperationError(
            f"the format {serializer.name!r} stores collections, and has no place for a mapping with modules "
            "and values; from_dict() converts a nested dict of tensors"
        )
    node = make_checkpoint(data)
    if options.get("return_early"):
        # The next step of an optimizer writes into the tensors.
        node = node._unflatten([leaf.clone() for leaf in node._leaves()])
    result = _save(node, location, serializer, options)
    return data if isinstance(result, Core) else result


def _save(data: Core, location: Location, serializer: Serializer, options: dict[str, object]) -> Any:
    check_options(serializer, "save", options)

    def write(whole: Core) -> Any:
        leaves = whole._leaves()
        if not serializer.reads_stored_tensors and any(map(is_stored, leaves)):
            # A format that pickles its leaves would write the location of their elements instead of the elements.
            whole = whole._unflatten(as_memory(leaves))
        result = serializer.save(whole, location, **options)
        return data if result is whole else result

    return save_together(data, write, lambda: data, options.get("return_early"))


def _check_collection(operation: str, data: object) -> None:
    """Raise TypeError for data that is not a collection."""
    if not isinstance(data, Core):
        hint = "; from_dict() and from_pytree() convert nested dicts" if isinstance(data, Mapping) else ""
        raise _type_error(operation, data, "a collection, such as a TensorDict", hint)


def _type_error(operation: str, data: object, wanted: str, hint: str = "") -> TypeError:
    return TypeError(f"{operation}() takes {wanted}; got {type(data).__name__}{hint}")


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
    saved: CoreT = save(data, path, format=format, **given)
    return saved


def load(
    path: Location,
    *,
    into: Mapping[Any, object] | None = None,
    format: str | None = None,
    **options: object,
) -> Any:
    """Load a collection, or a checkpoint: the mapping that was saved, with state dicts in place of the objects.

    Args:
        path: location of the save: a local path, or a URL or object that a format accepts.
        into: for a checkpoint: objects by key, or mappings of them, whose ``load_state_dict`` is called with what was saved at
            their keys. All keys and shapes are checked before the first call.
        format: name of a registered format; None selects the format that recognises ``path``.
        **options: options of the format.

    Returns:
        The collection; or the mapping, in memory, without what was loaded ``into`` objects. Tensors that were tied are tied.

    Raises:
        CodecError: the parameters of an object in ``into`` are sharded.
        FileNotFoundError: ``path`` does not exist.
        KeyMismatchError: a key of ``into``, or of the state of an object in it, is missing, or its state has an unexpected key.
        MissingPluginError: the format is not registered.
        FormatError: no registered format, or more than one, recognises ``path``.
        StructureError: a shape differs from that of an object in ``into``, or the save is not a checkpoint.
        TypeError: the format has no such option, no format accepts the location, or ``into`` has an object without
            ``load_state_dict``.

    >>> load("missing.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    loaded = load_as_class(None, path, format, options)
    result = loaded._as_loaded() if isinstance(loaded, Core) else loaded
    return result if into is None else load_into(result, into, show_location(as_location(path)))


def load_in_place(data: Core, path: Location, name: str | None, options: dict[str, object]) -> None:
    """Copy a save into a collection."""
    place = as_location(path)
    serializer = SERIALIZERS.for_loading(place, name)
    # A load_() with **options passes them to load(), so the signature of load() defines the valid options.
    check_options(serializer, "load_", options, "load")
    serializer.load_(data, place, **options)


def load_as_class(cls: type | None, path: Location, name: str | None, options: dict[str, object]) -> Any:
    """Load a collection, as an instance of ``cls`` if that is not None."""
    serializer, location = _find(path, name, "load", options)
    return (
        serializer.load(location, **options) if cls is None else serializer.load_as(cls, location, **options)
    )


def _find(
    path: Location, name: str | None, operation: str, options: dict[str, object]
) -> tuple[Serializer, Location]:
    """Return the format of an existing save and its location; check the options of an operation on it."""
    location = as_location(path)
    serializer = SERIALIZERS.for_loading(location, name)
    check_options(serializer, operation, options)
    return serializer, location


def open(
    path: Location,
    *,
    mode: str = "r",
    keys: Iterable[NestedKey] | None = None,
    format: str | None = None,
    **options: Any,
) -> Any:
    """Open a saved collection without reading its leaves; their elements are read when they are used.

    Args:
        path: location of the save, as for :func:`load`.
        mode: ``"r"`` never changes the store: a write raises, or, if the leaf is mapped memory, stays in this process.
            ``"r+"`` writes into the store. ``"c"`` keeps writes in the memory of this process.
        keys: nested keys, or prefixes of them, to open; None opens all.
        format: as for :func:`load`.
        **options: options of the format.

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
        options["keys"] = [keys] if isinstance(keys, str) else list(keys)
    serializer, place = _find(path, format, "open", options)
    return serializer.open(place, **options)


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
    _check_collection("create", like)
    place = as_location(path)
    serializer = SERIALIZERS.for_saving(place, format)
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
    _check_collection("append", rows)
    serializer, place = _find(path, format, "append", options)
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
    serializer, place = _find(path, format, "inspect", options)
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
    serializer, place = _find(path, format, "verify", options)
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
