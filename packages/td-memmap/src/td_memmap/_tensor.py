"""MemoryMappedTensor: a tensor whose elements are the content of a file.

Operations treat it as a plain ``torch.Tensor``: their results are plain tensors, and in-place operations write to
the file. In addition it keeps the Place where it is stored: a view by indexing is another MemoryMappedTensor on the
same file, and pickling sends the path, not the elements.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_storage

from td_core.errors import FormatError
from td_core.spi import as_dtype, as_tensor, open_regular, set_module
from td_core.typing import DeviceType, DtypeLike
from td_store import StoredTensor, files

from . import _fs
from ._anonymous import AnonymousFile, remap_anonymous_storage
from ._chunks import check_dtype, check_storable, iter_chunks, write_chunks
from ._errors import FileTakenError, NoFileError
from ._mapped_memory import FileStorage, check_device, check_mode, map_elements_of
from ._shapes import Shape, as_shape, element_count, make_empty, reshape_flat, shape_of, show_shape


@dataclass(slots=True, eq=False)
class Place:
    """File and offset where the elements of a tensor are stored.

    Attributes:
        shape: shape of the full tensor in the file; for a nested tensor, the table of component shapes.
        filename: absolute path; None for an anonymous file.
        file: the anonymous file; None for a named file.
        offset: start of the tensor in the file, in bytes.
        mode: mode with which the file was mapped.
        shared: whether stores reach the file.
        identity: device and inode of the mapped file, to detect that the path names another file now.
    """

    shape: Shape
    filename: str | None = None
    file: AnonymousFile | None = None
    offset: int = 0
    mode: str | None = None
    shared: bool = True
    identity: tuple[int, int] | None = None


class MemoryMappedTensor(Tensor):
    """A tensor whose elements are stored in a file.

    Indexing with integers, slices, ``None`` and ``...``, and splitting along a dim, return views, which are
    ``MemoryMappedTensor`` on the same file. All other operations return plain tensors. Pickling sends the path. A
    tensor without a path is stored in an anonymous file, which is freed with it: ``multiprocessing`` sends the file
    descriptor, and a plain pickle contains the elements.

    Args:
        source: a tensor, numpy array or list of numbers, whose elements are copied; a ``torch.Size``, for zeros;
            or an ``UntypedStorage``, which is wrapped.
        dtype: dtype of the result, for sources without one.
        shape: shape of the result.
        index: index of the view to return; None returns the full tensor.
        device: only the CPU is possible.
        handler: an anonymous file to map instead of creating one.
        filename: path of the file; None uses an anonymous file.

    Raises:
        FileTakenError: ``filename`` exists.

    >>> tensor = MemoryMappedTensor(torch.tensor([[1, 2], [3, 4]]), filename="t")
    >>> tensor[1].add_(10)
    MemoryMappedTensor([13, 14])
    >>> MemoryMappedTensor.from_filename("t", torch.int64, (2, 2))
    MemoryMappedTensor([[ 1,  2],
                        [13, 14]])
    """

    # Operations return plain tensors, and torch.compile traces a plain tensor.
    __torch_function__ = nn.Parameter.__torch_function__

    _place: Place

    def __new__(
        cls,
        source: object,
        *,
        dtype: DtypeLike | None = None,
        shape: Shape | None = None,
        index: object = None,
        device: DeviceType | None = None,
        handler: AnonymousFile | None = None,
        filename: str | Path | None = None,
    ) -> Any:
        """Create a memory-mapped tensor; see the class for the arguments."""
        check_device(device)
        wanted: torch.dtype | None = as_dtype(dtype)
        if handler is not None:
            return cls.from_handler(handler, wanted or torch.get_default_dtype(), shape, index)
        if isinstance(source, torch.UntypedStorage):
            return cls.from_storage(source, shape=shape, dtype=wanted, index=index, filename=filename)
        if isinstance(source, torch.Size):
            result = cls.zeros(source, dtype=wanted, filename=filename)
        else:
            values = source if isinstance(source, Tensor) else as_tensor(source, dtype=wanted, device="cpu")
            result = cls.from_tensor(
                values if wanted is None else values.to(wanted), filename=filename, shape=shape
            )
        return result if index is None else result[index]

    @classmethod
    def _on(cls, data: Tensor, place: Place) -> MemoryMappedTensor:
        """Convert a mapped tensor in place to a MemoryMappedTensor at ``place``."""
        # Faster than as_subclass(), which creates a second tensor object; no other code holds this tensor.
        data.__class__ = cls
        data._place = place  # type: ignore[attr-defined]
        return data  # type: ignore[return-value]

    @classmethod
    def from_tensor(
        cls,
        input: Tensor,
        *,
        filename: str | Path | None = None,
        existsok: bool = False,
        copy_existing: bool = False,
        copy_data: bool = True,
        shape: Shape | None = None,
    ) -> MemoryMappedTensor:
        """Copy a tensor into a file.

        Args:
            input: a tensor on any device that does not require gradients.
            filename: path of the file; None uses an anonymous file.
            existsok: whether to replace an existing file. Tensors that map the old file keep their elements: the new
                elements are written to a new file of that name.
            copy_existing: whether to copy a tensor that is already stored in another file, instead of raising.
            copy_data: False leaves zeros, or the content of an existing file.
            shape: shape of the result, to which ``input`` is expanded.

        Raises:
            FileTakenError: the file exists, or ``input`` is stored in another file.
            OSError: the disk is full.

        >>> MemoryMappedTensor.from_tensor(torch.arange(3))
        MemoryMappedTensor([0, 1, 2])
        """
        if not isinstance(input, Tensor):
            raise TypeError(
                f"from_tensor takes a tensor; convert the {type(input).__name__} with torch.as_tensor() first"
            )
        if input.requires_grad:
            raise RuntimeError("a memory-mapped tensor cannot require gradients; pass tensor.detach()")
        path = _make_absolute(filename)
        if isinstance(input, MemoryMappedTensor) and input._is_stored_at(path, shape, copy_existing):
            return input
        check_storable(input, f"{path or 'an anonymous file'}", content=copy_data)
        if shape is not None and not input.is_nested:
            input = input.expand(torch.Size(shape))
        content = input if copy_data else None
        return cls._create(
            shape_of(input), input.dtype, path, existsok=existsok, content=content, keep=not copy_data
        )

    def _is_stored_at(self, path: str | None, shape: Shape | None, copy_existing: bool) -> bool:
        """Return True if the tensor is the content of a file at ``path``; raise FileTakenError if it is that of another one."""
        here = self._place.filename
        if is_whole(self) and here == path and (shape is None or torch.Size(shape) == self.shape):
            return path is not None or self._place.file is not None
        if path is not None and here is not None and not copy_existing:
            raise FileTakenError(
                f"the tensor is stored in {here}; pass copy_existing=True to copy it to {path}"
            )
        return False

    @classmethod
    def _create(
        cls,
        shape: Shape,
        dtype: torch.dtype,
        path: str | None,
        *,
        existsok: bool = False,
        content: Tensor | None = None,
        keep: bool = False,
    ) -> MemoryMappedTensor:
        """Create a file with the elements of ``content``, or zeros, and map it; ``keep`` maps an existing file instead."""
        check_dtype(dtype, path or "an anonymous file")
        count = element_count(shape)
        nbytes = count * dtype.itemsize
        if path is None:
            file = AnonymousFile.of_size(nbytes)
            if content is not None:
                write_chunks(file.fd, content, 0)
            return cls._on(reshape_flat(file.elements(dtype, count), shape), Place(shape, file=file))
        if not count:
            return cls._on(make_empty(dtype, shape), Place(shape, path))
        if existsok and keep and _fs.get_status(path) is not None:
            with _fs.closing(open_regular(path, write=True)) as fd:
                if _fs.get_open_status(fd).st_size < nbytes:
                    _fs.reserve(fd, nbytes)
                return map_file(fd, path, dtype, shape, None, shared=True)
        try:
            with files.NewFile(path, replace=existsok) as new:
                if content is None:
                    _fs.reserve(new.fd, nbytes)
                else:
                    for piece in iter_chunks(content):
                        _fs.write_all(new.fd, piece)
                result = map_file(new.fd, path, dtype, shape, None, shared=True)
                new.commit()
        except FileExistsError as error:
            raise FileTakenError(f"the file {path} exists; pass existsok=True to replace it") from error
        return result

    @classmethod
    def from_filename(
        cls,
        filename: str | Path,
        dtype: DtypeLike,
        shape: Shape,
        index: object = None,
        mode: str | None = None,
    ) -> Any:
        """Map an existing file.

        Args:
            filename: path of a file of C-contiguous elements from byte 0; it may be longer.
            dtype: dtype of the elements.
            shape: shape of the full tensor; for a nested tensor, the table of its component shapes.
            index: index of the view to return; None returns the full tensor.
            mode: ``"r+"`` writes to the file; ``"r"`` copies on write; None writes to the file if it is writable.

        Raises:
            FileNotFoundError: the file does not exist.
            PermissionError: ``mode`` is ``"r+"`` and the file is not writable.
            FormatError: the file is too short.

        >>> MemoryMappedTensor.from_filename("nowhere", torch.int8, (2,))
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: '...nowhere'
        """
        check_mode(mode)
        path = _fs.make_absolute(filename)
        shape, element = as_shape(shape), as_dtype(dtype)
        if not element_count(shape):
            result = cls._on(make_empty(element, shape), Place(shape, path, mode=mode))
        else:
            fd, shared = _fs.open_in_mode(mode, open_regular, path)
            with _fs.closing(fd):
                result = map_file(fd, path, element, shape, mode, shared=shared)
        return result if index is None else result[index]

    @classmethod
    def from_handler(
        cls, handler: AnonymousFile, dtype: DtypeLike, shape: Any, index: object = None
    ) -> Tensor:
        """Map an anonymous file, for instance the file of another tensor.

        >>> tensor = MemoryMappedTensor.zeros(2)
        >>> other = MemoryMappedTensor.from_handler(tensor.handler, torch.float32, (2,))
        >>> other.fill_(1)
        MemoryMappedTensor([1., 1.])
        >>> tensor
        MemoryMappedTensor([1., 1.])
        """
        result = _on_anonymous(cls, handler, 0, as_dtype(dtype), as_shape(shape))
        return result if index is None else result[index]

    @classmethod
    def from_storage(
        cls,
        storage: torch.UntypedStorage,
        *,
        shape: Shape | None = None,
        dtype: DtypeLike | None = None,
        device: DeviceType | None = None,
        index: object = None,
        filename: Path | str | None = None,
        handler: AnonymousFile | None = None,
    ) -> Any:
        """Wrap a storage that is already mapped.

        Args:
            storage: the storage.
            shape: shape of the result; None for a 1-d tensor of all elements.
            dtype: dtype of the elements; None for torch's default dtype.
            device: only the CPU is possible.
            index: index of the view to return; None returns the full tensor.
            filename: path of the file that the storage maps, if it has one.
            handler: the anonymous file that the storage maps, if any.

        >>> base = MemoryMappedTensor.zeros(4)
        >>> MemoryMappedTensor.from_storage(base.untyped_storage(), shape=(2, 2)).shape
        torch.Size([2, 2])
        """
        check_device(device)
        dtype = as_dtype(dtype) or torch.get_default_dtype()
        flat = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
        whole = flat.shape if shape is None else as_shape(shape)
        count = element_count(whole)
        if count > flat.numel():
            raise FormatError(
                f"the storage is too small: shape {show_shape(whole)} of {dtype} needs {count * dtype.itemsize} "
                f"bytes, it has {storage.nbytes()}"
            )
        result = cls._on(reshape_flat(flat[:count], whole), Place(whole, _make_absolute(filename), handler))
        return result if index is None else result[index]

    @classmethod
    def empty(cls, *args: object, **kwargs: object) -> MemoryMappedTensor:
        """Create a tensor of zeros without writing them; disk space is reserved. Arguments as for :meth:`zeros`.

        >>> MemoryMappedTensor.empty(3, dtype=torch.bool).shape
        torch.Size([3])
        """
        return _create_zeros(cls, "empty", args, kwargs)[0]

    @classmethod
    def zeros(cls, *args: object, **kwargs: object) -> MemoryMappedTensor:
        """Create a tensor of zeros.

        Args:
            *args: the shape, as a tuple or as ints; for a nested tensor, the int64 table of component shapes.
            **kwargs: ``shape`` instead of the positional one, ``dtype``, ``device`` (only the CPU), ``filename`` and
                ``existsok``.

        Raises:
            FileTakenError: the file exists.

        >>> MemoryMappedTensor.zeros(2, 2)
        MemoryMappedTensor([[0., 0.],
                            [0., 0.]])
        """
        return _create_zeros(cls, "zeros", args, kwargs)[0]

    @classmethod
    def ones(cls, *args: object, **kwargs: object) -> MemoryMappedTensor:
        """Create a tensor of ones. Arguments as for :meth:`zeros`.

        >>> MemoryMappedTensor.ones((2,), dtype=torch.int)
        MemoryMappedTensor([1, 1], dtype=torch.int32)
        """
        return _fill(_create_zeros(cls, "ones", args, kwargs)[0], 1)

    @classmethod
    def full(cls, *args: object, **kwargs: object) -> MemoryMappedTensor:
        """Create a tensor filled with one value. Arguments as for :meth:`zeros`, and ``fill_value``.

        >>> MemoryMappedTensor.full((2,), 7)
        MemoryMappedTensor([7., 7.])
        """
        return _fill(*_create_zeros(cls, "full", args, kwargs))

    @classmethod
    def empty_like(cls, input: Tensor, *, filename: str | Path | None = None) -> MemoryMappedTensor:
        """Create a tensor of zeros with the shape and dtype of ``input``, without writing them.

        >>> MemoryMappedTensor.empty_like(torch.ones(2)).shape
        torch.Size([2])
        """
        return cls.from_tensor(input.detach(), filename=filename, copy_data=False, copy_existing=True)

    @classmethod
    def zeros_like(cls, input: Tensor, *, filename: str | Path | None = None) -> MemoryMappedTensor:
        """Create a tensor of zeros with the shape and dtype of ``input``.

        >>> MemoryMappedTensor.zeros_like(torch.ones(2))
        MemoryMappedTensor([0., 0.])
        """
        return cls._create(shape_of(input), input.dtype, _make_absolute(filename))

    @classmethod
    def ones_like(cls, input: Tensor, *, filename: str | Path | None = None) -> MemoryMappedTensor:
        """Create a tensor of ones with the shape and dtype of ``input``.

        >>> MemoryMappedTensor.ones_like(torch.zeros(2))
        MemoryMappedTensor([1., 1.])
        """
        return cls.full_like(input, 1, filename=filename)

    @classmethod
    def full_like(
        cls, input: Tensor, fill_value: object, *, filename: str | Path | None = None
    ) -> MemoryMappedTensor:
        """Create a tensor filled with one value, with the shape and dtype of ``input``.

        >>> MemoryMappedTensor.full_like(torch.zeros(2), 5)
        MemoryMappedTensor([5., 5.])
        """
        return _fill(cls._create(shape_of(input), input.dtype, _make_absolute(filename)), fill_value)

    @property
    def filename(self) -> str:
        """Absolute path of the file.

        Raises:
            NoFileError: the tensor is stored in an anonymous file.
        """
        if self._place.filename is None:
            raise NoFileError("this MemoryMappedTensor is in an anonymous file: it has no filename")
        return self._place.filename

    @property
    def handler(self) -> AnonymousFile:
        """Anonymous file that stores the tensor.

        Raises:
            NoFileError: the tensor is stored in a named file.
        """
        if self._place.file is None:
            raise NoFileError("this MemoryMappedTensor is not in an anonymous file")
        return self._place.file

    @property
    def parent_shape(self) -> Any:
        """Shape of the full tensor in the file, of which this tensor may be a view."""
        return self._place.shape

    def __getitem__(self, index: Any) -> Tensor:
        """Return a view on the same file if the index gives a view, else a plain tensor."""
        compiling = torch.compiler.is_compiling()
        kind = type(index)
        if kind is Tensor and index.dtype is torch.int64 and index.ndim == 1 <= self.ndim and not compiling:
            # index_select() takes less time than indexing with a tensor.
            with contextlib.suppress(IndexError, RuntimeError):
                if index.is_cpu and self.is_contiguous():
                    return self.index_select(0, index)
        result = Tensor.__getitem__(self, index)
        # Fast path: the type of the index decides without comparing storages.
        if compiling or (kind is Tensor and index.ndim):
            return result
        if kind is int or kind is slice:
            return self._on(result, self._place)
        try:
            shares = result.untyped_storage().data_ptr() == self.untyped_storage().data_ptr()
        except NotImplementedError:
            shares = False  # A batched tensor under vmap has no storage.
        return self._on(result, self._place) if shares else result

    # torch formats the element of a tensor without dims only if its class is exactly Tensor.
    __format__ = StoredTensor.__format__

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0) if self.ndim else self.detach())

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """Split along a dim into slices without that dim, each a view on the same file."""
        return self._locate_parts(Tensor.unbind(self, dim))

    def split_with_sizes(self, split_sizes: Sequence[Any], dim: int = 0) -> tuple[Tensor, ...]:
        """Split along a dim into parts of the given sizes, each a view on the same file."""
        return self._locate_parts(Tensor.split_with_sizes(self, split_sizes, dim))

    def split(self, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Split along a dim into parts of one size or of given sizes, each a view on the same file."""
        return self._locate_parts(torch.split(self.detach(), split_size, dim))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """Split along a dim into ``chunks`` parts, each a view on the same file."""
        return self._locate_parts(Tensor.chunk(self, chunks, dim))

    def _locate_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return tuple(parts)
        return tuple(self._on(part, self._place) for part in parts)

    def __copy__(self) -> Tensor:
        return self._on(self.detach(), self._place).requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        # A deep copy must not share elements with the original, so it cannot map the same file.
        copy = self.detach().clone().requires_grad_() if self.requires_grad and self.is_leaf else self.clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        place = self._place
        # If the path names another file now, unpickling it would return wrong elements.
        moved = place.identity is not None and not _fs.is_path_of(place.filename, place.identity)
        if place.filename is None or moved or not is_at_its_place(self):
            return map_elements, (Tensor.clone(self),)
        stamp = None if place.identity is None else _fs.find_stamp(place.filename)
        return remap_tensor, (place.filename, self.dtype, place.shape, place.mode, _get_view(self), stamp)


# Tensors that torch creates, such as a Parameter of a mapped tensor, have no instance attribute ``_place``.
MemoryMappedTensor._place = Place(torch.Size())


def _reduce_for_process(tensor: MemoryMappedTensor) -> Any:
    """Return the pickle reduction of a tensor for another process on this machine."""
    place = tensor._place
    if place.file is None or not is_at_its_place(tensor):
        return tensor.__reduce_ex__(4)
    return remap_anonymous_tensor, (place.file, place.offset, tensor.dtype, place.shape, _get_view(tensor))


ForkingPickler.register(MemoryMappedTensor, _reduce_for_process)


def _reduce_storage(storage: FileStorage) -> Any:
    """Reduce the mapped storage of a plain tensor for another process on this machine, to its file or a copy."""
    source = storage.source
    if isinstance(source, Place):
        if source.shared and _fs.is_path_of(source.filename, source.identity):
            stamp = _fs.find_stamp(str(source.filename))
            return remap_storage, (source.filename, storage.nbytes(), storage.start, stamp)
    elif source is not None and (file := source()) is not None:
        return remap_anonymous_storage, (file, storage.start, storage.nbytes())
    copy = storage.clone()
    if (starting := get_spawning_popen()) is not None:
        # A spawned process receives the copy's file descriptor later, so the file must remain open until then.
        _COPIES.setdefault(starting, []).append(copy)
    return reduce_storage(copy)


_COPIES: WeakKeyDictionary[object, list[torch.UntypedStorage]] = WeakKeyDictionary()


@set_module("td_memmap.memmap_pickles")
def remap_storage(
    filename: str, nbytes: int, start: int = 0, stamp: _fs.Stamp | None = None
) -> torch.UntypedStorage:
    """Map the first ``nbytes`` bytes of a file after ``start`` as a storage."""
    _fs.check_stamp(filename, stamp)
    memory = MemoryMappedTensor.from_filename(filename, torch.uint8, (start + nbytes,)).untyped_storage()
    part: torch.UntypedStorage = memory[start:] if start else memory
    return part


ForkingPickler.register(FileStorage, _reduce_storage)


#: Size, strides and storage offset of a view on the elements at its Place; None for the full tensor in C order.
_View = tuple[torch.Size, tuple[int, ...], Any] | None


def _get_view(tensor: MemoryMappedTensor) -> _View:
    return None if is_whole(tensor) else (tensor.shape, tensor.stride(), tensor.storage_offset())


def is_at_its_place(tensor: MemoryMappedTensor) -> bool:
    """Return True if a tensor still shows the memory at its Place, which assigning ``tensor.data`` changes."""
    place = tensor._place
    if place.file is None and place.identity is None:
        return True
    source = getattr(tensor.untyped_storage(), "source", None)
    if isinstance(source, Place):
        # Compare the objects, not the inodes: the inode of a deleted file can be reused.
        return source.identity is place.identity
    return source is not None and source() is place.file


def is_whole(tensor: MemoryMappedTensor) -> bool:
    """Return True if a tensor shows all elements at its Place in their order, unlike a view or after ``t_()``."""
    place = tensor._place
    if not is_at_its_place(tensor):
        return False
    if tensor.is_nested or isinstance(place.shape, Tensor):
        return tensor.is_nested
    # A full tensor starts at the start of its storage.
    return tensor.shape == place.shape and tensor.is_contiguous() and tensor.storage_offset() == 0


def is_backed_by_path(tensor: MemoryMappedTensor) -> bool:
    """Return True if mapping the tensor's path now would give the same elements."""
    place = tensor._place
    if not is_whole(tensor):
        return False
    return place.identity is None or (place.shared and _fs.is_path_of(place.filename, place.identity))


@set_module("td_memmap.memmap_pickles")
def remap_tensor(
    filename: str,
    dtype: torch.dtype,
    shape: Shape,
    mode: str | None,
    look: _View,
    stamp: _fs.Stamp | None = None,
) -> MemoryMappedTensor:
    """Map a pickled tensor from the file at its path."""
    _fs.check_stamp(filename, stamp)
    return _open_view(
        lambda form: MemoryMappedTensor.from_filename(filename, dtype, form, mode=mode), shape, look
    )


@set_module("td_memmap.memmap_pickles")
def remap_anonymous_tensor(
    file: AnonymousFile, offset: int, dtype: torch.dtype, shape: Shape, look: _View
) -> MemoryMappedTensor:
    """Map a tensor on an anonymous file that another process sent."""
    return _open_view(lambda form: _on_anonymous(MemoryMappedTensor, file, offset, dtype, form), shape, look)


@set_module("td_memmap.memmap_pickles")
def map_elements(values: Tensor) -> Tensor:
    """Map elements from a pickle on a new anonymous file."""
    # With torch.load(map_location="meta") the tensor has no elements.
    return values if values.is_meta else MemoryMappedTensor.from_tensor(values)


def _open_view(
    opener: Callable[[Shape], MemoryMappedTensor], shape: Shape, look: _View
) -> MemoryMappedTensor:
    if look is None:
        return opener(shape)
    flat = opener(torch.Size([element_count(shape)]))
    return MemoryMappedTensor._on(flat.as_strided(*look), replace(flat._place, shape=shape))


def _on_anonymous(
    cls: type[MemoryMappedTensor], file: AnonymousFile, offset: int, dtype: torch.dtype, shape: Shape
) -> MemoryMappedTensor:
    data = file.elements(dtype, element_count(shape), offset)
    return cls._on(reshape_flat(data, shape), Place(shape, file=file, offset=offset))


def map_file(
    fd: int,
    path: str,
    dtype: torch.dtype,
    shape: Shape,
    mode: str | None,
    shared: bool,
    status: os.stat_result | None = None,
    nbytes: int | None = None,
    linked: dict[tuple[int, int], torch.UntypedStorage] | None = None,
) -> MemoryMappedTensor:
    """Map the tensor in an open file; ``linked`` caches the storages of files with several hard links."""
    if nbytes is None:
        nbytes = element_count(shape) * dtype.itemsize
    if status is None:
        status = _fs.get_open_status(fd)
    if status.st_size < nbytes:
        raise FormatError(
            f"{path} is too short for shape {show_shape(shape)} of {dtype}: it has {status.st_size} bytes, "
            f"{nbytes} are needed"
        )
    place = Place(shape, path, None, 0, mode, shared, (status.st_dev, status.st_ino))
    data = map_elements_of(fd, dtype, nbytes, place, linked if status.st_nlink > 1 else None)
    return MemoryMappedTensor._on(reshape_flat(data, shape), place)


def as_plain(tensor: Tensor) -> Tensor:
    """Return a plain tensor on the same elements."""
    return tensor.detach() if isinstance(tensor, MemoryMappedTensor) else tensor


def _fill(tensor: MemoryMappedTensor, value: Any) -> MemoryMappedTensor:
    tensor.fill_(value)
    return tensor


def _make_absolute(filename: str | Path | None) -> str | None:
    return None if filename is None else _fs.make_absolute(filename)


_REQUIRED: object = object()


def _create_zeros(
    cls: type[MemoryMappedTensor], name: str, args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[MemoryMappedTensor, object]:
    """Create the tensor of zeros for the arguments of a creation function; return it and the fill value."""
    dtype = as_dtype(kwargs.pop("dtype", None)) or torch.get_default_dtype()
    path = _make_absolute(kwargs.pop("filename", None))
    existsok = kwargs.pop("existsok", False)
    check_device(kwargs.pop("device", None))
    value = kwargs.pop("fill_value", _REQUIRED) if name == "full" else None
    if value is _REQUIRED:
        if len(args) < 2:
            raise TypeError("full() takes a shape and a fill_value")
        *args, value = args  # type: ignore[assignment]
    shape = kwargs.pop("shape", _REQUIRED)
    if kwargs:
        raise TypeError(f"{name}() got unexpected arguments {sorted(kwargs)}")
    if shape is _REQUIRED:
        if not args:
            raise TypeError(f"{name}() takes a shape: numbers, one tuple, or shape=")
        shape = args[0] if len(args) == 1 else args
    elif args:
        raise TypeError(f"{name}() takes its shape once; got {args} and shape={shape}")
    return cls._create(as_shape(shape), dtype, path, existsok=existsok), value


_from_path, _from_elements = remap_tensor, map_elements  # in pickles of earlier releases
