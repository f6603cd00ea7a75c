"""Declarations of the methods that td-memmap provides, and the options of saving and loading."""
# The bodies are empty, since td-memmap implements the methods.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..typing import DeviceType, DtypeLike, NestedKey, Progress
from .declarations import provided_by, takes

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor
    from typing_extensions import Self

__all__ = [
    "LoadMemmapInplaceOptions", "LoadMemmapOptions", "MemmapInplaceOptions", "MemmapLikeOptions", "MemmapMethods",
    "MemmapOptions",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class MemmapOptions:
    """Options of a save; :meth:`MemmapMethods.memmap` describes them."""

    prefix: str | Path | None = None
    copy_existing: bool = False
    _: KW_ONLY
    num_threads: int = 0
    return_early: bool = False
    share_non_tensor: bool = False
    existsok: bool = True
    robust_key: bool | None = True
    archive: bool | None = None
    compression: str | int | None = None
    atomic: bool = False
    durable: bool = False
    checksums: bool = False
    progress: Progress = False
    allow_pickle: bool = False

    #: True if the collection itself is mapped, and True if the files are created empty.
    inplace: ClassVar[bool] = False
    like: ClassVar[bool] = False
    sparse: ClassVar[bool] = False

    @property
    def is_robust(self) -> bool:
        """True if keys that are not safe file names are encoded."""
        return self.robust_key is not False


@dataclass(frozen=True, eq=False)
class MemmapInplaceOptions(MemmapOptions):
    """Options of :meth:`MemmapMethods.memmap_`, which writes no archive."""

    archive: bool | None = field(default=False, init=False)
    compression: str | int | None = field(default=None, init=False)
    inplace: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class MemmapLikeOptions(MemmapOptions):
    """Options of :meth:`MemmapMethods.memmap_like`, which writes no elements."""

    compression: str | int | None = field(default=None, init=False)
    atomic: bool = field(default=False, init=False)
    checksums: bool = field(default=False, init=False)
    like: ClassVar[bool] = True
    sparse: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class LoadMemmapOptions:
    """Options of a load; :meth:`MemmapMethods.load_memmap` describes them."""

    prefix: str | Path
    device: DeviceType | None = None
    non_blocking: bool = False
    _: KW_ONLY
    out: Any = None
    robust_key: bool | None = True
    subpath: NestedKey | None = None
    mode: str | None = None
    num_threads: int = 0
    allow_pickle: bool | None = None
    verify: bool = False
    strict: bool = True
    progress: Progress = False

    @property
    def is_robust(self) -> bool:
        """True if keys that are not safe file names are encoded."""
        return self.robust_key is not False


@dataclass(frozen=True, eq=False)
class LoadMemmapInplaceOptions(LoadMemmapOptions):
    """Options of :meth:`MemmapMethods.load_memmap_`, which copies the whole save to where the leaves are."""

    device: DeviceType | None = field(default=None, init=False)
    non_blocking: bool = field(default=False, init=False)
    out: Any = field(default=None, init=False)
    robust_key: bool | None = True
    subpath: NestedKey | None = field(default=None, init=False)
    num_threads: int = field(default=0, init=False)


class MemmapMethods:
    """The methods of mapped collections: memory mapping, saving, loading."""

    __slots__ = ()

    @provided_by("td-memmap")
    @takes(MemmapOptions)
    def memmap(self, options: MemmapOptions) -> Self:
        """Write every leaf to a file under ``prefix`` and return a locked collection that maps those files.

        The save is atomic: it is built next to ``prefix`` and replaces it in one step. Collections that map an earlier
        save at ``prefix`` keep their elements. Leaves of type ``DTensor`` are saved whole: all ranks of their mesh call this with
        the same ``prefix``, and the first rank writes.

        Args:
            prefix: directory of the save; None uses an anonymous file, which is freed with the result. A loaded
                collection whose leaves and values are still those of its save remains mapped to that save.
            copy_existing: copy leaves that are mapped from another file, instead of raising.
            num_threads: number of threads that write; 0 writes in the calling thread.
            return_early: with threads, return a :class:`TensorDictFuture` immediately, and write the current collection
                in the background; do not write to its elements until the future is done.
            share_non_tensor: reload a non-tensor value whenever its file was replaced, so that all processes that
                have the result see a value that any of them writes in place. Without it they see the value after
                :meth:`memmap_refresh_`. Requires a ``prefix`` that is a directory.
            existsok: False raises if ``prefix`` already has a save.
            robust_key: encode keys that are not safe file names; None means True.
            archive: write one archive file instead of a directory; None decides by the suffix of ``prefix``.
            compression: compression of the archive: ``"deflate"``, ``"bzip2"``, ``"lzma"``; None for no compression.
            atomic: accepted for compatibility; every save is atomic.
            durable: sync the save to disk before returning.
            checksums: record a hash for each file, for ``td_memmap.verify``.
            progress: show a progress bar, or call a function of (bytes done, total bytes).
            allow_pickle: pickle values that cannot be stored otherwise, instead of raising.

        Raises:
            CodecError: a leaf or value cannot be stored; nothing was written.
            FileTakenError: a leaf is mapped from another file, or ``prefix`` has a file that belongs to no save and
                whose name the save needs.
            OSError: a file cannot be written, for instance because the disk is full. The message has key and file;
                the old save is unchanged.

        >>> saved = TensorDict({"a": torch.arange(3)}).memmap("save")
        >>> saved["a"]
        MemoryMappedTensor([0, 1, 2])
        """

    @provided_by("td-memmap")
    @takes(MemmapInplaceOptions)
    def memmap_(self, options: MemmapInplaceOptions) -> Self:
        """Write every leaf to a file under ``prefix``, map it in place, and lock the collection.

        The arguments are those of :meth:`memmap`. A node or value under two keys becomes a separate object under each,
        as in the save. The leaves of a :class:`TensorDictParams` remain the same objects, with their elements in the
        files.

        >>> td = TensorDict({"a": torch.arange(3)})
        >>> td.memmap_() is td, td.is_memmap(), td["a"]
        (True, True, MemoryMappedTensor([0, 1, 2]))
        """

    @provided_by("td-memmap")
    @takes(MemmapLikeOptions)
    def memmap_like(self, options: MemmapLikeOptions) -> Self:
        """Return a mapped, locked collection of the same structure whose files are sparse zeros, to be filled.

        The files take no space until they are written to. Filling them on a full disk kills the process; Python cannot
        catch that error. If ``prefix`` has a save of the same structure, its content is kept. The arguments are those
        of :meth:`memmap`; ``copy_existing`` has no effect, since no element is copied.

        Raises:
            FileTakenError: a save of another structure is at ``prefix``.

        >>> datum = TensorDict({"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "label": 0})
        >>> datum.expand(1_000_000).memmap_like()["image"].shape
        torch.Size([1000000, 3, 64, 64])
        """

    @provided_by("td-memmap")
    @classmethod
    @takes(LoadMemmapOptions)
    def load_memmap(cls, options: LoadMemmapOptions) -> Self:
        """Return the collection saved at ``prefix``, mapped from its files.

        All metadata is checked before any file is mapped. Nothing is written or imported, and values are unpickled only
        with ``allow_pickle=True``. Called on a class with declared fields, as in ``Record.load_memmap(path)``, it
        returns an instance of that class. This works also if the save is a plain collection with those entries, and if
        the class was defined in ``__main__``, renamed or moved since.

        Args:
            prefix: directory or archive of the save.
            device: copy every leaf to this device; None keeps them mapped; ``"meta"`` reads no leaf.
            non_blocking: as in ``Tensor.to``.
            out: a collection to load into: it gets the entries of the save, and its other entries are deleted.
            robust_key: whether keys were encoded as file names; None means True.
            subpath: load only the collection under this key: a nested key, or ``"a/b"``.
            mode: ``"r+"`` maps files shared, so that writes reach them, or raises if they are not writable; ``"r"``
                copies on write; None is as ``"r+"`` for writable files of a directory, else as ``"r"``. Values
                written in place reach the save whenever leaves do.
            num_threads: number of threads that copy to ``device``; 0 copies in the calling thread, which also maps
                the files.
            allow_pickle: unpickle pickled values of the save; None means False.
            verify: compare every file with its recorded size and hash first.
            strict: False skips entries that cannot be read, instead of raising.
            progress: show a progress bar, or call a function of (bytes done, total bytes).

        Raises:
            FileNotFoundError: ``prefix`` has no save.
            FormatError: the save is damaged, or ``prefix`` is not a save.
            StructureError: the save does not have the fields of the class on which this is called.
            ValueError: the save has no collection under ``subpath``, ``mode`` is unknown, or it is ``"r+"`` with
                another ``device`` than the CPU.
            MissingPluginError: a part of the save was written by a package that is not installed.
            PermissionError: ``mode`` is ``"r+"`` and a file is not writable, or is compressed in an archive.

        >>> _ = TensorDict({"a": torch.arange(3)}).memmap("save")
        >>> TensorDict.load_memmap("save")["a"]
        MemoryMappedTensor([0, 1, 2])
        """

    @provided_by("td-memmap")
    @takes(LoadMemmapInplaceOptions)
    def load_memmap_(self, options: LoadMemmapInplaceOptions) -> Self:
        """Copy the content of the save at ``prefix`` into this collection, in place; add entries that it lacks.

        The arguments are those of :meth:`load_memmap`.

        >>> _ = TensorDict({"a": torch.arange(3)}).memmap("save")
        >>> TensorDict({"a": torch.zeros(3)}).load_memmap_("save")["a"]
        tensor([0., 1., 2.])
        """

    @provided_by("td-memmap")
    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Reload this collection from its save, with the changes of other processes.

        Raises:
            StructureError: the collection does not map a save.

        >>> td = TensorDict({"a": torch.arange(3)}).memmap("save")
        >>> _ = TensorDict({"b": torch.ones(2)}).memmap("save")
        >>> td.memmap_refresh_()["b"]
        MemoryMappedTensor([1., 1.])
        """

    @provided_by("td-memmap")
    def make_memmap(
        self,
        key: NestedKey,
        shape: Sequence[int] | Tensor,
        *,
        dtype: DtypeLike | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry of zeros to the save that this collection maps, and return its mapped tensor.

        Raises:
            StructureError: the key already exists, or the collection is not mapped.
            KeyPathError: a live save cannot hold the key; save the collection again with it.

        >>> td = TensorDict().memmap()
        >>> td.make_memmap("a", (2,))
        MemoryMappedTensor([0., 0.])
        """

    @provided_by("td-memmap")
    def make_memmap_from_storage(
        self,
        key: NestedKey,
        storage: torch.UntypedStorage,
        shape: Sequence[int] | Tensor,
        *,
        dtype: DtypeLike | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the elements of ``storage`` to the save that this collection maps; return its tensor.

        >>> td = TensorDict().memmap()
        >>> td.make_memmap_from_storage("a", torch.ones(2).untyped_storage(), (2,))
        MemoryMappedTensor([1., 1.])
        """

    @provided_by("td-memmap")
    def make_memmap_from_tensor(
        self,
        key: NestedKey,
        tensor: Tensor,
        *,
        copy_data: bool = True,
        existsok: bool = True,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the elements of ``tensor`` to the save that this collection maps; return its tensor.

        Args:
            key: the new key.
            tensor: the tensor to copy.
            copy_data: False creates zeros with the shape and dtype of ``tensor``.
            existsok: False raises if the file of the entry already exists.
            robust_key: encode the key as a file name; None means True.

        >>> td = TensorDict().memmap()
        >>> td.make_memmap_from_tensor("a", torch.ones(2))
        MemoryMappedTensor([1., 1.])
        """

    @provided_by("td-memmap")
    def is_memmap(self) -> bool:
        """Return True if the collection was mapped to files, and has been locked since: then it has a ``saved_path``.

        Views of a save and loaded collections are none; :meth:`is_shared` is True for them, too.

        >>> TensorDict().is_memmap(), TensorDict().memmap().is_memmap()
        (False, True)
        """

    @provided_by("td-memmap")  # type: ignore[prop-decorator]
    @property
    def saved_path(self) -> Path | None:
        """Directory that this collection maps, or None if it is mapped to anonymous files.

        Raises:
            AttributeError: the collection is not mapped.
        """
