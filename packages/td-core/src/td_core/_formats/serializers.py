"""The formats of whole collections: the class that a format derives from, and the registry of formats.

Core defines no format. A plugin registers a :class:`Serializer`. Saving selects it by name or by the suffix of the location;
loading calls ``detect`` of each one that accepts the location. td-memmap registers the default, ``"memmap"``.
"""

from __future__ import annotations

import errno
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from .._encode.node_kinds import as_named
from .._tree.node import Core
from ..errors import FormatError, MissingPluginError, PluginError, TensorDictError, UnsupportedOperationError
from ..typing import ObjectLocation
from .locations import Location, can_use_location, find_reader, has_suffix, read_head, show_location
from .object_locations import STORES, find_objects

if TYPE_CHECKING:
    from .._encode.inspection import Report, Tree

DEFAULT_FORMAT = "memmap"
_DEFAULT_PROVIDER = "td-memmap"
#: The package and the suffixes of each format of the project, except the default format.
FIRST_PARTY_FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "safetensors": ("td-safetensors", (".safetensors", ".safetensors.index.json")),
    "hdf5": ("td-hdf5", (".h5", ".hdf5")),
    "zarr": ("td-zarr", (".zarr", ".zarr.zip")),
    "parquet": ("td-arrow", (".parquet", ".pq")),
    "arrow": ("td-arrow", (".arrow", ".feather", ".ipc")),
}


class Serializer(ABC):
    """A format for whole collections.

    ``save``, ``load`` and ``detect`` are required. The other operations raise :class:`~td_core.UnsupportedOperationError` in a
    format that does not define them. An operation declares its options as keyword parameters: any other option raises
    TypeError before the operation is called.

    A location is a ``Path``, a ``str`` with one of the schemes of the format, or an instance of one of its types. td-core
    converts other paths (``str`` without a scheme, ``os.PathLike``, ``file:`` URLs) to a ``Path``. A format that reads objects
    receives a :class:`~td_core.typing.ObjectLocation` in place of a URL or a store, and need not declare ``storage_options``.

    Attributes:
        name: the name of the format for ``save(format=...)``.
        needs_path: False for a format that can save without a location.
        suffixes: suffixes of its files, such as ``(".npz",)``. Without ``format=``, a location with one of them is saved in
            this format.
        schemes: schemes of the URLs that it accepts, such as ``("s3",)``.
        reads_objects: True for a format that accepts each URL for which a plugin has a store, and each
            :class:`~td_core.typing.ObjectStore`.
        locations: types of the objects that it accepts in place of a path. A string is the name of a class, such as
            ``"zarr.Group"``, whose library need not be imported.
        stores_kinds: True if ``save`` stores nodes of every kind with their values, as :func:`~td_core.spi.encode` lists them.
            Only such a format can hold a checkpoint, which is a mapping with modules, optimizers and values.
        reads_stored_tensors: True if ``save`` reads each :class:`~td_core.StoredTensor` itself, for example in parts. Otherwise
            it receives a collection in memory.

    >>> class TorchFile(Serializer):
    ...     name = "torch-file"
    ...     suffixes = (".pt",)
    ...
    ...     def save(self, data, location, *, legacy=False):
    ...         torch.save(data.to_dict(), location, _use_new_zipfile_serialization=not legacy)
    ...         return data
    ...
    ...     def load(self, location):
    ...         return TensorDict(torch.load(location))
    ...
    ...     def detect(self, location, head):
    ...         return head.startswith(b"PK")
    >>> TorchFile().detect(Path("a.pt"), b"PK")
    True
    """

    name: ClassVar[str]
    needs_path: ClassVar[bool] = True
    suffixes: ClassVar[tuple[str, ...]] = ()
    schemes: ClassVar[tuple[str, ...]] = ()
    reads_objects: ClassVar[bool] = False
    locations: ClassVar[tuple[type | str, ...]] = ()
    stores_kinds: ClassVar[bool] = False
    reads_stored_tensors: ClassVar[bool] = False

    @abstractmethod
    def save(self, data: Core, location: Location, *args: object, **options: object) -> Any:
        """Write ``data`` to ``location``; return ``data``, a mapped copy or a future."""

    @abstractmethod
    def load(self, location: Location, *args: object, **options: object) -> Any:
        """Load the collection at ``location``."""

    @abstractmethod
    def detect(self, location: Location, head: bytes) -> bool:
        """Return True if ``location`` holds a save of this format; do not raise for other formats.

        ``head`` is the first 512 bytes of a local file, or the first 64 kB of an object in a store, which td-core reads once for
        all formats. It is empty for a directory and an object of a library. A location of objects is not asked for more: if
        no format recognises the head, ``detect`` is called with an empty one, and ``location.marks`` has the names of trees.
        """

    @staticmethod
    def find_objects(
        location: Location, storage_options: Mapping[str, object] | None = None
    ) -> ObjectLocation | None:
        """Return a URL, or an object store, as a location of objects; None for a path or an object of a library.

        For the functions of a format that users call with a URL.

        Raises:
            MissingPluginError: no plugin opens the store of the URL.
            TypeError: ``storage_options`` are not a mapping.
            ValueError: ``storage_options`` are given, and the location is not a URL.

        >>> Serializer.find_objects("a.safetensors") is None
        True
        """
        return find_objects(location, storage_options)

    def load_as(self, cls: type, location: Location, **options: object) -> Any:
        """Load the collection at ``location`` as an instance of ``cls``, if that class has declared entries.

        Raises:
            StructureError: the entries do not match the declarations of the class.
        """
        return as_named(cls, self.load(location, **options), f"what is saved at {show_location(location)}")

    def load_(self, data: Any, location: Location, **options: Any) -> Any:
        """Copy the save at ``location`` into ``data``, in place, add missing entries, and return ``data``."""
        with torch.no_grad():  # loaded tensors have no autograd graph
            return data.update(self.load(location, **options), inplace=True)

    def open(self, location: Location, *, mode: str = "r", **options: Any) -> Any:
        """Return a collection whose elements stay in the store until they are used.

        Args:
            location: the save.
            mode: ``"r"`` never changes the store, ``"r+"`` writes into it, ``"c"`` keeps writes in memory.
            **options: options of the format. ``keys`` are the nested keys, or prefixes of them, to open.
        """
        self._refuse("open", "load() reads it completely")

    def create(self, like: Core, location: Location, **options: object) -> Any:
        """Create a save of zeros with the structure, shapes and dtypes of ``like``, and return it opened for writing.

        ``like`` may hold expanded or meta tensors: its elements are not read.

        Raises:
            FileExistsError: something is at ``location``.
        """
        self._refuse("create", "save() a collection of zeros")

    def append(self, rows: Core, location: Location, **options: Any) -> None:
        """Add the rows of a collection to the save, along the first batch dim."""
        self._refuse("append", "load() it, torch.cat() the rows and save() the result")

    def inspect(self, location: Location, **options: object) -> Tree:
        """Return the tree of the save from its header alone: keys, kinds, shapes, dtypes, sizes."""
        self._refuse("inspect", "load() it and print the result")

    def verify(self, location: Location, **options: object) -> Report:
        """Check the save for missing and damaged parts, and return a report."""
        self._refuse("verify", "load() raises FormatError for damage that it finds")

    def _refuse(self, operation: str, instead: str) -> NoReturn:
        raise UnsupportedOperationError(
            f"the format {self.name!r} does not implement {operation}(); {instead}"
        )


#: The number of arguments that each operation takes by position: data or rows, and the location.
_POSITIONAL = {"save": 2, "load_": 2, "create": 2, "append": 2}


class Serializers:
    """Registry of formats by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Serializer] = {}

    def add(self, serializer: Serializer) -> None:
        """Register a format, or raise PluginError if its name is taken or missing, or a declaration is malformed."""
        name = getattr(serializer, "name", None)
        if not isinstance(name, str) or not name:
            raise PluginError(
                f"the serializer {serializer!r} has no name: set the class attribute 'name'; got {name!r}"
            )
        if name in self._by_name:
            raise PluginError(f"the format {name!r} is taken by {self._by_name[name]!r}")
        _check_declarations(serializer)
        self._by_name[name] = serializer

    def remove(self, name: str) -> None:
        """Unregister a format."""
        del self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Serializer]:
        return iter(self._by_name.values())

    def get(self, name: str | None) -> Serializer:
        """Return the format ``name`` (None: the default), or raise MissingPluginError if it is not registered."""
        name = DEFAULT_FORMAT if name is None else name
        if name in self._by_name:
            return self._by_name[name]
        names = self._names()
        if name == DEFAULT_FORMAT:
            hint = f"; registered formats, to be named by format=: {names}" if names != "none" else ""
            raise MissingPluginError(f"{_describe_provider(name)}{hint}")
        if name in FIRST_PARTY_FORMATS:
            raise MissingPluginError(f"{_describe_provider(name)}; registered formats: {names}")
        raise MissingPluginError(
            f"no installed package provides the format {name!r}; registered formats: {names}"
        )

    def for_saving(self, location: Location, name: str | None) -> Serializer:
        """Return the format ``name``, or with None the only one that has the suffix of a location, or else the default."""
        if name is None:
            name = self._find_by_suffix(location)
            if name is None and DEFAULT_FORMAT in self:
                self._refuse_foreign_name(location)
        serializer = self.get(name)
        if location is None:
            if serializer.needs_path:
                raise TypeError(f"the serializer {serializer.name!r} needs a path to save to; got None")
        else:
            self._check_location(serializer, location)
        return serializer

    def for_loading(self, location: Location, name: str | None) -> Serializer:
        """Return the format ``name``, or with None the only format whose ``detect`` accepts ``location``.

        Raises FileNotFoundError, MissingPluginError, FormatError if no or several formats match, PluginError if ``detect``
        fails, TypeError if no format can use the location.
        """
        if name is not None or not self._by_name:
            serializer = self.get(name)
            self._check_location(serializer, location)
            return serializer
        shown = show_location(location)
        if isinstance(location, Path) and not location.exists():
            raise FileNotFoundError(f"cannot load: there is nothing at {shown}")
        results = _recognise(self._list_candidates(location), location)
        if len(results) == 1:
            return results[0]
        if results:
            names = ", ".join(repr(serializer.name) for serializer in results)
            raise FormatError(f"more than one format recognises {shown}: pass format=, one of {names}")
        message = f"no registered format recognises {shown}; registered formats: {self._names()}"
        missing = [DEFAULT_FORMAT] if DEFAULT_FORMAT not in self else []
        missing += [name for name in _list_formats_of_suffix(location) if name not in self]
        if missing:
            raise MissingPluginError("; ".join([message, *map(_describe_provider, dict.fromkeys(missing))]))
        raise FormatError(message + self._explain_name(location))

    def _explain_name(self, location: Location) -> str:
        """Say what the name of something that no format recognises suggests."""
        named = [item.name for item in self if item.suffixes and has_suffix(location, item.suffixes)]
        if named:
            return f"; by its name it is a save of the format {named[0]!r}, which is empty or damaged"
        reader = find_reader(location)
        if reader is not None:
            return f"; by its name it is a file that {reader} reads"
        if isinstance(location, Path) and location.is_dir():
            what = (
                "is empty"
                if not any(location.iterdir())
                else "has no metadata of a save, such as a meta.json"
            )
            return f"; the directory {what}: it is no save, or a damaged one"
        return ""

    def _refuse_foreign_name(self, location: Location) -> None:
        """Raise FormatError if a save of the default format would be a directory with the name of a file of another library."""
        reader = find_reader(location)
        if reader is not None:
            suffixes = ", ".join(suffix for item in self for suffix in item.suffixes)
            raise FormatError(
                f"{show_location(location)} has the name of a file that {reader} reads, and no registered format writes "
                f"those: pass format={DEFAULT_FORMAT!r} for a directory of that name, or choose a suffix of a format, of "
                f"{suffixes}"
            )

    def _list_candidates(self, location: Location) -> list[Serializer]:
        """Return the formats that accept a location, or raise MissingPluginError or TypeError."""
        found = [serializer for serializer in self if _accepts(serializer, location)]
        if not found:
            if isinstance(location, str) and any(serializer.reads_objects for serializer in self):
                STORES.check_scheme(location)
            raise self._location_error("no registered format accepts", location)
        return found

    def _find_by_suffix(self, location: Location) -> str | None:
        """Return the name of the format that has the suffix of a location, or None; FormatError if several formats have it."""
        named = [item.name for item in self if item.suffixes and has_suffix(location, item.suffixes)]
        if len(named) > 1:
            raise FormatError(
                f"more than one format has the suffix of {show_location(location)}: pass format=, one of "
                f"{', '.join(map(repr, named))}"
            )
        missing = [name for name in _list_formats_of_suffix(location) if name not in self]
        return next(iter([*named, *missing]), None)

    def _check_location(self, serializer: Serializer, location: Location) -> None:
        if not _accepts(serializer, location):
            if isinstance(location, str) and serializer.reads_objects:
                STORES.check_scheme(location)
            raise self._location_error(f"the format {serializer.name!r} does not accept", location)

    def _location_error(self, problem: str, location: Location) -> TypeError:
        accepting = ", ".join(repr(serializer.name) for serializer in self if _accepts(serializer, location))
        hint = f"formats that do: {accepting}" if accepting else "pass a local path"
        return TypeError(f"{problem} {show_location(location)} as a location; {hint}")

    def _names(self) -> str:
        """Format the names of the registered formats and of inactive packages for a message."""
        idle = ", ".join(repr(name) for name in MissingPluginError.unavailable if name != _DEFAULT_PROVIDER)
        return (", ".join(map(repr, self._by_name)) or "none") + (
            f"; installed but not active: {idle} (python -m td_core plugins says why)" if idle else ""
        )


SERIALIZERS = Serializers()


def check_same_format(path: str, name: str) -> None:
    """Raise FileExistsError if a directory has a save of another format than ``name``: both would remain in it.

    Each format that saves to a directory calls this before it writes.

    >>> check_same_format(".", "memmap")
    """
    location = Path(path)
    if not location.is_dir():
        return
    for serializer in SERIALIZERS:
        if serializer.name != name and _is_recognised(serializer, location, b""):
            raise FileExistsError(
                errno.EEXIST,
                f"cannot save in the format {name!r} over a save of the format {serializer.name!r}, remove it first",
                path,
            )


def _check_declarations(serializer: Serializer) -> None:
    """Raise PluginError if class attributes of a format, or the parameters of its ``detect``, are malformed."""
    for name, types in (("suffixes", str), ("schemes", str), ("locations", (str, type))):
        declared = getattr(serializer, name)
        if not isinstance(declared, tuple) or not all(isinstance(item, types) for item in declared):
            raise PluginError(f"the {name} of the format {serializer.name!r} are not a tuple: {declared!r}")
    try:
        inspect.signature(serializer.detect).bind(None, b"")
    except TypeError:
        raise PluginError(
            f"detect() of the format {serializer.name!r} takes a location and the first bytes of a file: "
            "detect(self, location, head)"
        ) from None


def _accepts(serializer: Serializer, location: Location) -> bool:
    if isinstance(location, ObjectLocation):
        if serializer.reads_objects:
            return True
        location = location.url
    return can_use_location(location, serializer.schemes, serializer.locations)


def pass_location(
    serializer: Serializer, location: Location, options: Mapping[str, object]
) -> tuple[Location, dict[str, Any]]:
    """Return a location, and the options of an operation, as a format takes them."""
    if not isinstance(location, ObjectLocation):
        return location, dict(options)
    if serializer.reads_objects:
        return location, {name: value for name, value in options.items() if name != "storage_options"}
    return location.url, dict(options)


def _recognise(candidates: list[Serializer], location: Location) -> list[Serializer]:
    """Return the formats that recognise a location; FileNotFoundError if a store has nothing there."""
    if not isinstance(location, ObjectLocation):
        head = read_head(location)
        return [item for item in candidates if _is_recognised(item, location, head)]
    heads = [location.head, b""] if location.head else [b""]
    for head in heads:
        results = [
            item for item in candidates if _is_recognised(item, pass_location(item, location, {})[0], head)
        ]
        if results:
            return results
    if location.first is None and not location.marks:
        raise FileNotFoundError(f"cannot load: there is nothing at {show_location(location)}")
    return []


def _list_formats_of_suffix(location: Location) -> list[str]:
    return [name for name, (_, suffixes) in FIRST_PARTY_FORMATS.items() if has_suffix(location, suffixes)]


def _describe_provider(name: str) -> str:
    package = _DEFAULT_PROVIDER if name == DEFAULT_FORMAT else FIRST_PARTY_FORMATS[name][0]
    return f"the format {name!r} is provided by {MissingPluginError.describe(package)}"


def _is_recognised(serializer: Serializer, location: Location, head: bytes) -> bool:
    try:
        return bool(serializer.detect(location, head))
    except (OSError, TensorDictError):
        raise
    except Exception as error:
        # A faulty plugin breaks every load, and the traceback alone does not show how to avoid it.
        raise PluginError(
            f"the format {serializer.name!r} failed to tell whether it recognises {show_location(location)}: "
            f"{type(error).__name__}: {error}; pass format= to leave it out"
        ) from error


def list_options(serializer: Serializer, operation: str) -> tuple[str, ...] | None:
    """Return the options that an operation of a format declares; None if it accepts any."""
    return _read_signature(getattr(serializer, operation), _POSITIONAL.get(operation, 1))


@functools.lru_cache(maxsize=256)
def _read_signature(method: Callable[..., object], positional: int) -> tuple[str, ...] | None:
    parameters = list(inspect.signature(method).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = parameters[positional:]
    return tuple(parameter.name for parameter in named if parameter.kind is not parameter.VAR_POSITIONAL)


def check_options(
    serializer: Serializer, operation: str, options: Mapping[str, object], instead: str | None = None
) -> None:
    """Raise TypeError for an option that an operation does not declare; if it declares ``**options``, check ``instead``."""
    known = list_options(serializer, operation)
    if known is None:
        if instead is not None:
            check_options(serializer, instead, options)
        return
    unknown = [name for name in options if name not in known]
    if unknown:
        lazily = operation == "load" and not {*unknown} - {*(list_options(serializer, "open") or ())}
        raise TypeError(
            f"the serializer {serializer.name!r} has no option {', '.join(map(repr, unknown))} for "
            f"{operation}(); its options: {', '.join(map(repr, known)) or 'none'}"
            f"{'; open() has it, and reads elements when they are used' if lazily else ''}"
        )
