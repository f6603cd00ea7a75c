"""Read and write the chunks of one array: with tensorstore, which is faster, where it is installed, or else with zarr-python.

tensorstore reads and writes arrays of version 3 in local directories. zarr-python can do everything else, and
reads and writes columns of text: the dtype ``string`` of Zarr, with the codec ``vlen-utf8``.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
import zarr.storage

from td_core.errors import FormatError, LockedError, TensorDictError
from td_store.arrays import StoredText, TextColumn, check_text

from ._array_documents import NATIVE, ArrayInfo, allow_strings
from ._local_objects import LocalObjects
from ._zarr_objects import Objects, gather, name_object, run

if TYPE_CHECKING:
    import numpy.typing as npt
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

try:
    import tensorstore
except ImportError:
    tensorstore = None

#: The parts of the metadata of an array that tensorstore needs.
_METADATA = (
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
)
#: The process that uses tensorstore: after a fork, its threads do not exist in the child.
_owner: int | None = None


@contextlib.contextmanager
def _name_array(objects: Objects, info: ArrayInfo) -> Iterator[None]:
    """Turn errors of the libraries into a FormatError that names the array."""
    try:
        yield
    except LockedError:
        raise
    except (TensorDictError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(objects, LocalObjects):
            raise  # such as of a network
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what = f"cannot write the array {info.name!r}: {os.strerror(error.errno)}"
            raise OSError(error.errno, what, objects.where) from error
        raise FormatError(f"{objects.where}: the array {info.name!r}: {error}") from error
    except Exception as error:  # codecs raise errors of all kinds for damaged chunks
        raise FormatError(f"{objects.where}: the array {info.name!r} is damaged: {error}") from error


def open_array(objects: Objects, info: ArrayInfo, *, strict: bool) -> FastArray | SlowArray:
    """Open an array; with ``strict``, a read of a chunk that is missing raises FormatError.

    The array must not be used by another process, and cannot be opened on the event loop.
    """
    if isinstance(objects, LocalObjects):
        objects.check_files(info.name)
    fast = _open_fast(objects, info, strict)
    if fast is not None:
        return FastArray(objects, info, fast)
    place = objects.store / info.name
    place = zarr.storage.StorePath((_StrictStore if strict else _CheckedStore)(place.store), place.path)
    quiet = allow_strings() if info.dtype is None else contextlib.nullcontext()
    with _name_array(objects, info), quiet:
        array = zarr.AsyncArray(info.document, place, {"write_empty_chunks": True})
    return SlowArray(objects, info, array)


def _open_fast(objects: Objects, info: ArrayInfo, strict: bool) -> object:
    """Open an array with tensorstore, by the metadata in the root of the group; return None if that cannot be done."""
    global _owner
    if tensorstore is None or info.dtype is None or not isinstance(objects, LocalObjects):
        return None
    if _owner not in (None, os.getpid()):
        return None
    _owner = os.getpid()
    spec = {
        "driver": "zarr3",
        "metadata": {key: value for key, value in info.document.items() if key in _METADATA},
        "kvstore": {"driver": "file", "path": f"{objects.locate(info.name)}/", "file_io_sync": False},
        "fill_missing_data_reads": not strict,
        "store_data_equal_to_fill_value": True,
    }
    try:
        # The root describes the array; its own metadata can be older, after a process that appended was killed.
        array = tensorstore.open(spec, open=True, assume_metadata=True).result()
    except (
        ValueError,
        OverflowError,
    ):  # the metadata is of another version, or has a codec that tensorstore lacks
        return None
    return array if array.dtype.name == NATIVE.get(info.dtype) else None


class FastArray:
    """An array that tensorstore reads and writes."""

    def __init__(self, objects: Objects, info: ArrayInfo, array: Any) -> None:
        self._objects, self._info, self._array = objects, info, array

    def read(self, index: Any = ...) -> Callable[[], Any]:
        """Start to read a part of the array, and return a function that waits for it."""
        return partial(self._wait, self._array.oindex[index].read())

    def write_all(self, value: npt.NDArray[np.generic]) -> Callable[[], Any]:
        """Start to write the whole array, and return a function that waits for it."""
        return partial(self._wait, self._array.write(value))

    def write(self, index: Any, value: npt.NDArray[np.generic]) -> None:
        """Write a part of the array."""
        self._wait(self._array.oindex[index].write(value))

    def _wait(self, future: Any) -> Any:
        with _name_array(self._objects, self._info):
            try:
                return future.result()
            except ValueError as error:
                if str(error).startswith("NOT_FOUND"):
                    raise FormatError(str(error)) from error
                if number := re.search(r"os_error_code='(\d+)'", str(error)):
                    raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
                raise


class SlowArray:
    """An array that zarr-python reads and writes."""

    def __init__(self, objects: Objects, info: ArrayInfo, array: zarr.AsyncArray[Any]) -> None:
        self._objects, self._info, self._array = objects, info, array

    async def read(self, index: Any = ...) -> npt.NDArray[np.generic]:
        """Return a part of the array; the index has slices, and at most one vector of positions."""
        is_basic = index is ... or all(isinstance(item, slice) for item in index)
        read = self._array.getitem if is_basic else self._array.get_orthogonal_selection
        with _name_array(self._objects, self._info):
            return np.asarray(await read(index))

    async def write_all(self, value: npt.NDArray[np.generic]) -> None:
        """Write the whole array."""
        with _name_array(self._objects, self._info):
            await self._array.setitem(..., value)

    def write(self, index: object, value: npt.NDArray[np.generic]) -> None:
        """Write a part of the array."""
        with _name_array(self._objects, self._info):
            try:
                zarr.Array(self._array).set_orthogonal_selection(index, value)
            except PermissionError as error:
                raise LockedError(f"{self._objects.where} is read-only: {error}") from error


def wait_for_all(work: Sequence[Any]) -> list[Any]:
    """Return the results of reads or writes of several arrays, which run at the same time."""
    coroutines = [item for item in work if inspect.iscoroutine(item)]
    results = iter(run(gather(coroutines)) if coroutines else ())
    return [next(results) if inspect.iscoroutine(item) else item() for item in work]


class _CheckedStore(zarr.storage.WrapperStore[Any]):  # type: ignore[misc]
    """A store whose errors are OSErrors: a network that fails does not look like a damaged chunk."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        with name_object(key):
            return await self._store.get(key, prototype, byte_range)


class _StrictStore(_CheckedStore):
    """A store in which every chunk of an array must exist, where zarr would fill a missing or empty one with zeros."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        found = await super().get(key, prototype, byte_range)
        if found is None:
            raise FormatError(f"the chunk {key!r} is missing")
        if not len(found):
            raise FormatError(f"the chunk {key!r} is empty, or ends too early")
        return found


def list_chunks(info: ArrayInfo, index: Sequence[Any] | None = None) -> list[str]:
    """Return the keys of the chunks, or shards, of an array that td writes: all, or those with elements at an index."""
    document = info.document
    sizes = document["chunk_grid"]["configuration"]["chunk_shape"]
    separator = document["chunk_key_encoding"].get("configuration", {}).get("separator", "/")
    whole = [slice(0, size, 1) for size in info.shape]
    counts = [
        _list_positions(item, chunk)
        for item, chunk in zip(whole if index is None else index, sizes, strict=True)
    ]
    return [f"{info.name}/{separator.join(['c', *map(str, place)])}" for place in itertools.product(*counts)]


def _list_positions(item: Any, chunk: int) -> list[int]:
    """Return the chunks along one dim that have elements at a slice, or at a vector of positions."""
    if not isinstance(item, slice):
        return sorted(set((item // chunk).tolist()))
    if item.step <= chunk:
        return list(range(item.start // chunk, -(-item.stop // chunk)))
    return [position // chunk for position in range(item.start, item.stop, item.step)]


def is_read_whole(info: ArrayInfo) -> bool:
    """Return True if the objects of an array are its chunks in a regular grid; of a shard, parts are read."""
    document = info.document
    codecs = [codec.get("name") for codec in document.get("codecs", ()) if isinstance(codec, dict)]
    grid, encoding = document.get("chunk_grid", {}), document.get("chunk_key_encoding", {})
    is_regular = grid.get("name") == "regular" and encoding.get("name") == "default"
    return document.get("zarr_format") == 3 and is_regular and "sharding_indexed" not in codecs


def encode_zeros(info: ArrayInfo) -> bytes:
    """Return the content of a chunk, or shard, of zeros."""
    sizes = tuple(info.document["chunk_grid"]["configuration"]["chunk_shape"])
    found: dict[str, Any] = {}
    store = zarr.storage.MemoryStore(found)
    document = {**info.document, "shape": sizes}
    array = zarr.AsyncArray(document, zarr.storage.StorePath(store), {"write_empty_chunks": True})
    run(array.setitem(..., np.zeros(sizes, array.dtype)))
    (content,) = found.values()
    return bytes(content.to_bytes())


def read_now(objects: Objects, info: ArrayInfo) -> npt.NDArray[np.generic]:
    """Read a whole array."""
    result: npt.NDArray[np.generic]
    (result,) = wait_for_all([open_array(objects, info, strict=False).read()])
    return result


def write_texts(objects: Objects, texts: Iterable[tuple[ArrayInfo, TextColumn]]) -> None:
    """Write text columns as whole arrays, several at the same time."""
    opened = [(open_array(objects, info, strict=False), column) for info, column in texts]
    wait_for_all([array.write_all(_as_array(column)) for array, column in opened])


def write_text_rows(objects: Objects, info: ArrayInfo, column: TextColumn, begin: int, end: int) -> None:
    """Write some rows of a text column into its array."""
    if begin < end:
        index = slice(begin, end), *(slice(0, size) for size in column.shape[1:])
        open_array(objects, info, strict=False).write(index, _as_array(column)[index])


def write_changed_rows(objects: Objects, info: ArrayInfo, column: TextColumn) -> None:
    """Write the rows of a text column that differ from those of its array, and those between them."""
    text = StoredText(info.name, column.shape)
    old = read_text(objects, {info.name: info}, text, strict=False)
    changed = [i for i, (left, right) in enumerate(zip(old, column.strings, strict=True)) if left != right]
    row = len(column.strings) // column.shape[0]
    if changed:
        write_text_rows(objects, info, column, changed[0] // row, changed[-1] // row + 1)


def read_text(
    objects: Objects, arrays: Mapping[str, ArrayInfo], text: StoredText, *, strict: bool
) -> list[str]:
    """Return the strings of a text column, one after the other; FormatError if its array is damaged, or has no strings."""
    info = arrays[text.name]
    check_text(text, info.shape, objects.where)
    if info.document.get("data_type") != "string":
        raise FormatError(
            f"{objects.where}: the array {text.name!r} has the dtype {info.document.get('data_type')!r:.100}; its header "
            "has strings"
        )
    (found,) = wait_for_all([open_array(objects, info, strict=strict).read()])
    strings: list[str] = found.reshape(-1).tolist()
    return strings


def _as_array(column: TextColumn) -> npt.NDArray[np.generic]:
    array = np.empty(len(column.strings), dtype=object)
    array[:] = column.strings
    return array.reshape(column.shape)
