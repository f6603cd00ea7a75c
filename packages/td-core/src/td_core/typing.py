"""Type aliases and sentinels for the signatures of the packages."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Union

import torch
from torch import Tensor

__all__ = [
    "NO_DEFAULT",
    "DeviceType",
    "DtypeLike",
    "Names",
    "NestedKey",
    "NoDefault",
    "ObjectInfo",
    "ObjectLocation",
    "ObjectStore",
    "Progress",
    "Range",
    "Source",
    "SourceIndex",
]


class NoDefault(enum.Enum):
    """Type of the sentinel ``NO_DEFAULT``, the default of arguments for which None is a valid value.

    >>> NO_DEFAULT
    NO_DEFAULT
    """

    NO_DEFAULT = "NO_DEFAULT"

    def __repr__(self) -> str:
        return "NO_DEFAULT"


NO_DEFAULT: Final = NoDefault.NO_DEFAULT

if TYPE_CHECKING:
    NestedKey = Union[str, tuple[Any, ...]]  # noqa: UP007  type checkers can narrow this form
else:

    class _Keys(type):
        """Metaclass that implements ``isinstance(key, NestedKey)``."""

        def __instancecheck__(cls, key: object) -> bool:
            parts = [key]
            for part in parts:
                if isinstance(part, tuple) and part:
                    parts += part
                elif not isinstance(part, str):
                    return False
            return True

        def __subclasscheck__(cls, other: type) -> bool:
            # torch.compile calls this method, not __instancecheck__, for a string or a tuple.
            return issubclass(other, (str, tuple)) or other is cls

    class NestedKey(metaclass=_Keys):
        """A key: a string, or a non-empty, possibly nested tuple of strings.

        For annotations and ``isinstance``; it cannot be instantiated.

        >>> isinstance("a", NestedKey), isinstance(("a", ("b",)), NestedKey), isinstance((), NestedKey)
        (True, True, False)
        """


DeviceType = Union[torch.device, str, int]  # noqa: UP007
"""Device arguments that torch accepts."""

DtypeLike = Union[torch.dtype, type[bool], type[int], type[float], type[complex]]  # noqa: UP007
"""Dtype arguments that torch accepts."""

BatchSize = Union[torch.Size, Sequence[int], int]  # noqa: UP007

Names = tuple["str | None", ...]
"""Names of the batch dims: one name or None for each."""

Progress = Union[bool, Callable[[int, int], Any]]  # noqa: UP007
"""Value of the option ``progress``: False, True for a progress bar, or a function of (bytes done, total bytes)."""

SourceIndex = tuple[Union[slice, Tensor], ...]  # noqa: UP007
"""Index of a :class:`Source`: one slice or tensor of positions per dim."""


class Source(Protocol):
    """An array in a store: a file, a data base, a server. A :class:`~td_core.StoredTensor` reads and writes it.

    An index has one item per dim of the array. It is a slice with ``0 <= start < stop <= size`` and ``step >= 1``, or, for at
    most one dim, an int64 vector of distinct positions in increasing order. No item removes a dim.

    Several threads may call a source at the same time. A pickled source describes its location, and opens the store anew
    when another process first uses it; after a fork, a source must not use what the parent process has opened. The method
    ``read_many(requests)`` is optional. It takes a list of pairs ``(source, index)`` with sources of this class, and returns
    the list of what ``source.read(index)`` returns: one call for all leaves of a collection. The method ``map()`` is optional,
    too: it returns the array as a contiguous CPU tensor on the memory of the store, in which positions are looked up directly,
    or None for an array that cannot be mapped. So is the attribute ``chunks``: the shape of the parts that are read as a
    whole, for ``row_blocks()``, or None; a tuple in place of a size has the size of each part along that dim. So is
    ``hold()``: a context manager that excludes other writers of the array during a block in which elements are read, changed and
    written.

    >>> import torch
    >>> from td_core import StoredTensor, TensorDict
    >>> class Squares:
    ...     shape, dtype = torch.Size([1000]), torch.int64
    ...
    ...     def read(self, index):
    ...         return torch.arange(1000)[index] ** 2
    ...
    ...     def write(self, index, value):
    ...         raise NotImplementedError("the squares cannot be written")
    ...
    ...     def flush(self):
    ...         pass
    >>> TensorDict({"square": StoredTensor(Squares())}, batch_size=[1000])[[3, 1]]["square"]
    tensor([9, 1])
    """

    @property
    def shape(self) -> torch.Size:
        """Shape of the array."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the array."""

    def read(self, index: SourceIndex) -> Tensor:
        """Return a part of the array as a new CPU tensor, which the caller may write."""

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write a contiguous CPU tensor of the array's dtype, of the shape that ``read(index)`` returns.

        A source that is read-only raises :class:`~td_core.LockedError`, which says how to open it for writing.
        """

    def flush(self) -> None:
        """Return when everything that was written is in the store."""


class ObjectInfo(NamedTuple):
    """Name, size and stamp of an object in an :class:`ObjectStore`.

    Attributes:
        name: the name of the object below the location of the store.
        size: its size in bytes.
        stamp: a string that differs after each write of the object, such as its ETag, generation or version.

    >>> ObjectInfo("a/meta.json", 120, "v1").size
    120
    """

    name: str
    size: int
    stamp: str


class Range(NamedTuple):
    """Bytes of an object in an :class:`ObjectStore`, as a slice selects them from its content.

    Attributes:
        name: the name of the object.
        start: the first byte; a negative number counts from the end.
        stop: the end, which is not read; None is the end of the object.
        stamp: the stamp that the object must have, or None for any.

    >>> Range("a.bin", -8).stop is None
    True
    """

    name: str
    start: int
    stop: int | None = None
    stamp: str | None = None


class ObjectStore(Protocol):
    """Objects of bytes by name, below one location: a bucket, a server, a data base.

    A format is given a store in place of a URL. The name ``""`` is the location itself: it is an object if the location is one
    file, and is missing if the location is a tree of objects. Several threads may call a store at the same time. A pickled
    store connects anew; after a fork, a store must not use what the parent process has opened.

    Each error is an OSError or a :class:`~td_core.TensorDictError`. It names the location and the object, and has the error of a
    library as its cause. ``td_store.testing`` has ``ObjectStoreTests``, a suite for a store, and ``MemoryStore``, which is one.

    Five members are optional. ``peek(name, size)`` returns the description of an object and its first bytes, read with one
    request, or None if it is missing. ``peek_ends(name, size)`` returns the last bytes, too, as a third item, in the same time.
    ``reopen(storage_options)`` gives a store its options again, which its pickle does not contain. The attribute ``gap`` is the
    number of bytes between two ranges that cost less than a request, and ``parent`` is the store of the location above.

    Attributes:
        where: the location for messages: a URL without user, password and query.
    """

    where: str

    def stat(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return a description of each object, None for one that is missing."""

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return exactly the bytes of each range; the store decides how many requests it sends at the same time.

        Raises:
            FileNotFoundError: an object is missing.
            FormatError: an object is shorter than a range ("truncated"), or its stamp is another one ("replaced").
        """

    def write(self, name: str, content: Iterable[object], *, create: bool = False) -> ObjectInfo:
        """Write an object from buffers of bytes, one after the other: readers see it complete, or as it was before.

        That includes an error that ``content`` raises, and the death of the process.

        Raises:
            FileExistsError: ``create`` is True, and the object exists.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is missing is not an error."""


#: The user and password in a URL, and what follows the path.
_USER = re.compile(r"://[^/?#]*@")
_QUERY = re.compile(r"\?.*", re.DOTALL)


class ObjectLocation:
    """A location in an object store. A format whose ``reads_objects`` is True receives it in place of a URL or a store.

    What is read to find the format is kept, so that the format need not read it again.

    Args:
        location: a URL, or a store.
        storage_options: options for the store of a URL.
        open_store: opens the store of a URL.

    Attributes:
        url: the URL, or None if the caller has passed a store.
        where: the location for messages.

    >>> from td_core.spi import Serializer
    >>> Serializer.find_objects("a/local/path") is None
    True
    """

    #: Size of the part of an object that ``detect`` of each format receives: most headers are shorter.
    HEAD_SIZE: Final = 1 << 16
    #: Suffixes of files that have their directory at the end, which is read together with the beginning.
    ENDS: Final = (".tdz", ".zip", ".parquet", ".pq", ".arrow", ".feather", ".ipc")
    #: Names of objects that trees have: if the location is not an object, one request looks for all of them.
    MARKS: Final = (
        "meta.json", "zarr.json", ".zgroup", "model.safetensors.index.json", "model.safetensors", "part-00000.parquet",
        "part-00000.arrow",
    )  # fmt: skip

    def __init__(
        self,
        location: str | ObjectStore,
        storage_options: Mapping[str, object] | None = None,
        open_store: Callable[[str, Mapping[str, object]], ObjectStore] | None = None,
    ) -> None:
        self.url = location if isinstance(location, str) else None
        self.where = self.hide_secrets(location) if isinstance(location, str) else location.where
        self._location, self._options, self._open = location, storage_options or {}, open_store

    def __str__(self) -> str:
        return self.where

    @staticmethod
    def hide_secrets(url: str) -> str:
        """Return a URL for messages: without user, password and query.

        >>> ObjectLocation.hide_secrets("https://ann:secret@host/x.zarr?token=secret")
        'https://***@host/x.zarr'
        """
        return _QUERY.sub("", _USER.sub("://***@", url))

    @cached_property
    def store(self) -> ObjectStore:
        """The store, which is opened at its first use."""
        if isinstance(self._location, str):
            assert self._open is not None
            return self._open(self._location, self._options)
        return self._location

    @cached_property
    def _ends(self) -> tuple[ObjectInfo, memoryview, memoryview | None] | None:
        """Description, first bytes, and last bytes if the name says that they are needed."""
        size, at_end = self.HEAD_SIZE, self.where.lower().endswith(self.ENDS)
        peek, peek_ends = getattr(self.store, "peek", None), getattr(self.store, "peek_ends", None)
        if at_end and peek_ends is not None:
            both: tuple[ObjectInfo, memoryview, memoryview] | None = peek_ends("", size)
            return both
        if peek is not None:
            found: tuple[ObjectInfo, memoryview] | None = peek("", size)
            return None if found is None else (*found, None)
        (info,) = self.store.stat([""])
        if info is None:
            return None
        ranges = [Range("", 0, min(info.size, size), info.stamp)]
        if at_end and info.size > size:
            ranges.append(Range("", info.size - size, info.size, info.stamp))
        first, *last = self.store.read(ranges)
        return info, first, last[0] if last else None

    @property
    def first(self) -> tuple[ObjectInfo, memoryview] | None:
        """Description and first bytes of the object at the location; None if it is not an object."""
        return None if self._ends is None else self._ends[:2]

    @cached_property
    def last(self) -> memoryview:
        """The last bytes of the object, as many as of its beginning; empty if there is none."""
        if self._ends is None:
            return memoryview(b"")
        info, first, last = self._ends
        if last is not None or info.size <= self.HEAD_SIZE:
            return first if last is None else last
        return self.store.read([Range("", info.size - self.HEAD_SIZE, info.size, info.stamp)])[0]

    @property
    def head(self) -> bytes:
        """The first bytes of the object; empty if there is none."""
        return b"" if self.first is None else bytes(self.first[1])

    @cached_property
    def marked(self) -> dict[str, ObjectInfo]:
        """The objects whose names mark a tree, and that are below the location, by name."""
        return {info.name: info for info in self.store.stat(self.MARKS) if info is not None}

    @property
    def marks(self) -> frozenset[str]:
        """The names of these objects."""
        return frozenset(self.marked)

    def find_folder(self) -> ObjectLocation:
        """Return the location above a URL, whose objects are beside the one at the URL.

        Raises:
            ValueError: the caller has passed a store, which has nothing above its location.
        """
        if self.url is None and hasattr(self.store, "parent"):
            return ObjectLocation(self.store.parent)
        if self.url is None:
            raise ValueError(f"{self.where} names objects beside it: pass the store of the folder above it")
        path, mark, query = self.url.partition("?")
        return ObjectLocation(f"{path.rpartition('/')[0]}{mark}{query}", self._options, self._open)
