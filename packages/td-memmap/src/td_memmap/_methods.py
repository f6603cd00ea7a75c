"""The methods that every collection gets: memory mapping, saving, loading.

This module is imported with td-core, so it imports nothing itself: the first call brings in the rest of the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from td_core.typing import NestedKey

__all__ = ["Methods"]


def _api() -> Any:
    return importlib.import_module("td_memmap._api")


class Methods:
    """Members that td-core attaches to every collection."""

    def memmap(
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
        durable: bool = False,
        checksums: bool = False,
        progress: bool = False,
        allow_pickle: bool = False,
    ) -> Any:
        """Write every leaf to a file under ``prefix`` and return a locked collection that maps those files.

        The save is complete or not there: it is built beside ``prefix`` and takes its place in one step. What was
        mapped from an earlier save there stays as it was.

        Args:
            prefix: directory of the save; None uses an anonymous file that vanishes with the result.
            copy_existing: copy leaves that are mapped from another place, instead of raising.
            num_threads: how many threads write; 0 writes in the calling thread.
            return_early: with threads, return a :class:`TensorDictFuture` at once, and write in the background.
            share_non_tensor: read each non-tensor value from its file whenever that was replaced, so that a value that
                one process writes in place is seen by all that were given the result, however they were started.
                Without it they see it after :meth:`memmap_refresh_`. It needs a ``prefix`` that is a directory.
            existsok: False raises where a save is already there.
            robust_key: encode keys that are not safe file names; None means True.
            archive: write one archive file instead of a directory; None decides by the suffix of ``prefix``.
            compression: how the archive is compressed: ``"deflate"``, ``"bzip2"``, ``"lzma"``; None stores.
            atomic: accepted for compatibility; every save is atomic.
            durable: also sync the save to the disk before returning.
            checksums: record a hash for each file, for ``td_memmap.verify``.
            progress: show a progress bar, or call a function of (bytes done, bytes in all).
            allow_pickle: pickle the values that nothing else can store, instead of raising.

        Raises:
            CodecError: a leaf or value cannot be stored; nothing was written.
            FileTakenError: a leaf is stored in another place, or something is in the way at ``prefix``.
            OSError: there is no room, for instance; the message names key and file, and the old save is untouched.

        >>> import tempfile, torch
        >>> from td_core import TensorDict
        >>> folder = tempfile.TemporaryDirectory()
        >>> saved = TensorDict({"a": torch.arange(3)}).memmap(folder.name + "/save")
        >>> saved["a"]
        MemoryMappedTensor([0, 1, 2])
        >>> folder.cleanup()
        """
        return _api().memmap(
            self,
            prefix,
            copy_existing=copy_existing,
            num_threads=num_threads,
            return_early=return_early,
            share_non_tensor=share_non_tensor,
            existsok=existsok,
            robust_key=robust_key,
            archive=archive,
            compression=compression,
            atomic=atomic,
            durable=durable,
            checksums=checksums,
            progress=progress,
            allow_pickle=allow_pickle,
        )

    def memmap_(
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        atomic: bool = False,
        durable: bool = False,
        checksums: bool = False,
        progress: bool = False,
        allow_pickle: bool = False,
    ) -> Any:
        """Write every leaf to a file under ``prefix``, map it in place, and lock the collection.

        The arguments are those of :meth:`memmap`.

        >>> import torch
        >>> from td_core import TensorDict
        >>> td = TensorDict({"a": torch.arange(3)})
        >>> td.memmap_() is td, td.is_memmap(), td["a"]
        (True, True, MemoryMappedTensor([0, 1, 2]))
        """
        return _api().memmap(
            self,
            prefix,
            copy_existing=copy_existing,
            num_threads=num_threads,
            return_early=return_early,
            share_non_tensor=share_non_tensor,
            existsok=existsok,
            robust_key=robust_key,
            archive=False,
            atomic=atomic,
            durable=durable,
            checksums=checksums,
            progress=progress,
            allow_pickle=allow_pickle,
            inplace=True,
        )

    def memmap_like(
        self,
        prefix: str | Path | None = None,
        copy_existing: bool = False,
        *,
        existsok: bool = True,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        durable: bool = False,
        progress: bool = False,
        allow_pickle: bool = False,
    ) -> Any:
        """Return a mapped, locked collection of the same structure whose files are sparse zeros, to be filled.

        The files take no space until they are written to; filling them on a full disk is an error of the operating
        system that Python cannot catch. Content of a save of the same structure at ``prefix`` is kept. The arguments
        are those of :meth:`memmap`.

        Raises:
            FileTakenError: a save of another structure is at ``prefix``.

        >>> import torch
        >>> from td_core import TensorDict
        >>> datum = TensorDict({"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "label": 0})
        >>> datum.expand(1_000_000).memmap_like()["image"].shape
        torch.Size([1000000, 3, 64, 64])
        """
        return _api().memmap_like(
            self,
            prefix,
            copy_existing=copy_existing,
            num_threads=num_threads,
            return_early=return_early,
            share_non_tensor=share_non_tensor,
            existsok=existsok,
            robust_key=robust_key,
            archive=archive,
            durable=durable,
            progress=progress,
            allow_pickle=allow_pickle,
        )

    @classmethod
    def load_memmap(
        cls,
        prefix: str | Path,
        device: torch.device | None = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        robust_key: bool | None = True,
        subpath: NestedKey | None = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
        verify: bool = False,
        strict: bool = True,
        progress: bool = False,
    ) -> Any:
        """Return the collection saved at ``prefix``, mapped from its files.

        Everything is checked before anything is mapped. Nothing is written, unpickled or imported.

        Args:
            prefix: directory or archive of the save.
            device: move every leaf there; None keeps them mapped; ``"meta"`` reads no leaf at all.
            non_blocking: as in ``Tensor.to``.
            out: a collection to load into.
            robust_key: whether keys were encoded as file names; None means True.
            subpath: load the sub-collection under this key alone: a nested key, or ``"a/b"``.
            mode: None maps shared and writable where the file is; ``"r"`` copies on write; ``"r+"`` is shared or raises.
            num_threads: how many threads read; 0 reads in the calling thread.
            allow_pickle: unpickle values of the save that were pickled; None means False.
            verify: compare every file with its recorded size and hash first.
            strict: False leaves out what this installation cannot read, instead of raising.
            progress: show a progress bar, or call a function of (bytes done, bytes in all).

        Raises:
            FileNotFoundError: nothing is saved there.
            FormatError: what is there is damaged, or no save.
            MissingPluginError: a package that is not installed wrote a part of it.
            PermissionError: mode ``"r+"``, and a file is not writable.

        >>> import tempfile, torch
        >>> from td_core import TensorDict
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = TensorDict({"a": torch.arange(3)}).memmap(folder.name + "/save")
        >>> TensorDict.load_memmap(folder.name + "/save")["a"]
        MemoryMappedTensor([0, 1, 2])
        >>> folder.cleanup()
        """
        return _api().load_memmap(
            prefix,
            device,
            non_blocking,
            out=out,
            robust_key=robust_key,
            subpath=subpath,
            mode=mode,
            num_threads=num_threads,
            allow_pickle=allow_pickle,
            verify=verify,
            strict=strict,
            progress=progress,
        )

    def load_memmap_(
        self,
        prefix: str | Path,
        robust_key: bool | None = True,
        *,
        allow_pickle: bool | None = None,
        mode: str | None = None,
        verify: bool = False,
        strict: bool = True,
        progress: bool = False,
    ) -> Any:
        """Copy the content of the save at ``prefix`` into this collection, in place.

        The arguments are those of :meth:`load_memmap`.

        >>> import tempfile, torch
        >>> from td_core import TensorDict
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = TensorDict({"a": torch.arange(3)}).memmap(folder.name + "/save")
        >>> TensorDict({"a": torch.zeros(3)}).load_memmap_(folder.name + "/save")["a"]
        tensor([0., 1., 2.])
        >>> folder.cleanup()
        """
        loaded = _api().load_memmap(
            prefix,
            robust_key=robust_key,
            allow_pickle=allow_pickle,
            mode=mode,
            verify=verify,
            strict=strict,
            progress=progress,
        )
        return self.update_(loaded)  # type: ignore[attr-defined]

    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Any:
        """Read again what another process changed in the save that this collection maps.

        Raises:
            RuntimeError: the collection maps no save.

        >>> import tempfile, torch
        >>> from td_core import TensorDict
        >>> folder = tempfile.TemporaryDirectory()
        >>> td = TensorDict({"a": torch.arange(3)}).memmap(folder.name + "/save")
        >>> _ = TensorDict({"b": torch.ones(2)}).memmap(folder.name + "/save")
        >>> td.memmap_refresh_()["b"]
        MemoryMappedTensor([1., 1.])
        >>> folder.cleanup()
        """
        return _api().refresh(self, allow_pickle=bool(allow_pickle))

    def make_memmap(
        self,
        key: NestedKey,
        shape: torch.Size | Tensor,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry of zeros to the save that this collection maps, and return its mapped tensor.

        Raises:
            KeyPathError: the key is there already.
            RuntimeError: the collection is not mapped.

        >>> from td_core import TensorDict
        >>> td = TensorDict().memmap()
        >>> td.make_memmap("a", (2,))
        MemoryMappedTensor([0., 0.])
        """
        leaf: Tensor = _api().make(self, key, shape, dtype, None, robust_key)
        return leaf

    def make_memmap_from_storage(
        self,
        key: NestedKey,
        storage: torch.UntypedStorage,
        shape: torch.Size | Tensor,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry with the elements of ``storage`` to the save, and return its mapped tensor.

        >>> import torch
        >>> from td_core import TensorDict
        >>> td = TensorDict().memmap()
        >>> td.make_memmap_from_storage("a", torch.ones(2).untyped_storage(), (2,))
        MemoryMappedTensor([1., 1.])
        """
        leaf: Tensor = _api().make(self, key, shape, dtype, storage, robust_key)
        return leaf

    def make_memmap_from_tensor(
        self,
        key: NestedKey,
        tensor: Tensor,
        *,
        copy_data: bool = True,
        existsok: bool = True,
        robust_key: bool | None = True,
    ) -> Tensor:
        """Add an entry like ``tensor`` to the save that this collection maps, and return its mapped tensor.

        Args:
            key: the new key.
            tensor: shape, dtype and elements of the entry.
            copy_data: False leaves zeros.
            existsok: False raises where a file of that name is already there.
            robust_key: encode the key as a file name; None means True.

        >>> import torch
        >>> from td_core import TensorDict
        >>> td = TensorDict().memmap()
        >>> td.make_memmap_from_tensor("a", torch.ones(2))
        MemoryMappedTensor([1., 1.])
        """
        content = tensor if copy_data else None
        leaf: Tensor = _api().make(
            self, key, tensor.shape, tensor.dtype, content, robust_key, existsok=existsok
        )
        return leaf

    def is_memmap(self) -> bool:
        """Tell whether the collection was mapped to files, and has been locked since.

        >>> from td_core import TensorDict
        >>> TensorDict().is_memmap(), TensorDict().memmap().is_memmap()
        (False, True)
        """
        return _api().saved_at(self) is not None

    @property
    def saved_path(self) -> Path | None:
        """Directory that this collection maps; None for one that is mapped to anonymous files.

        Raises:
            AttributeError: the collection is not mapped.
        """
        path: Path | None = _api().saved_path(self)
        return path
