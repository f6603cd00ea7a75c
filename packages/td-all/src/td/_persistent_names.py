"""``PersistentTensorDict`` for programs of tensordict: one name for the collections of HDF5 files and of Zarr groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

import td
import td_hdf5
from td_core import TensorCollection
from td_core.typing import BatchSize, DeviceType, NestedKey

__all__ = ["PersistentTensorDict"]

_BACKENDS = ("h5", "zarr")

_KINDS: list[type] = [td_hdf5.PersistentTensorDict]
with suppress(ModuleNotFoundError):  # then no collection is a group
    from td_zarr import ZarrTensorDict

    _KINDS.append(ZarrTensorDict)


for _kind, _backend in zip(_KINDS, _BACKENDS, strict=False):
    type.__setattr__(_kind, "backend", _backend)  # only tensordict's programs read this attribute


class _AnyBackend(type):
    """The class of ``PersistentTensorDict``, whose instances are the collections of both packages."""

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is PersistentTensorDict:
            return issubclass(subclass, tuple(_KINDS))
        return super().__subclasscheck__(subclass)

    def __call__(cls, *, backend: str = "h5", **options: Any) -> Any:
        if cls is not PersistentTensorDict:
            return super().__call__(backend=backend, **options)
        _check_backend(backend)
        return _open_group(**options) if backend == "zarr" else td_hdf5.PersistentTensorDict(**options)


class PersistentTensorDict(td_hdf5.PersistentTensorDict, metaclass=_AnyBackend):
    """An HDF5 file or a Zarr group as a collection, see :class:`td_hdf5.PersistentTensorDict`; ``backend`` chooses."""


def _save(
    cls: type[TensorCollection],
    /,
    input_dict: TensorCollection | Mapping[NestedKey, object],
    filename: str | os.PathLike[str],
    *,
    backend: str = "h5",
    **options: Any,
) -> Any:
    """Save a dict or collection as an HDF5 file or Zarr group, and return it opened for writing."""
    _check_backend(backend)
    if backend == "h5":
        return td_hdf5.PersistentTensorDict.from_dict(input_dict, filename, **options)
    return _save_group(input_dict, filename, **options)


_named: Any = PersistentTensorDict
_named.from_dict = classmethod(_save)


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise NotImplementedError(f"backend is one of {', '.join(map(repr, _BACKENDS))}; got {backend!r}")


def _open_group(
    *,
    batch_size: BatchSize | None = None,
    filename: str | os.PathLike[str] | None = None,
    group: Any = None,
    mode: str = "r",
    device: DeviceType | None = None,
    validate_batch_size: bool = True,
    **options: Any,
) -> Any:
    """Open a Zarr group, or create it as a mode of h5py requires; the other options are those of ``from_zarr``."""
    if (filename is None) == (group is None):
        raise TypeError("a PersistentTensorDict takes a filename or a group, and not both")
    _check_device(device)
    place = group if filename is None else filename
    if filename is not None:
        exists = os.path.lexists(filename)
        if mode in ("w-", "x") and exists:
            raise FileExistsError(f"cannot create {filename!r}: it exists")
        if mode in ("r", "r+") and not exists:
            raise FileNotFoundError(f"there is no Zarr group at {filename!r}: create it with mode='w'")
        if mode == "w" or not exists:
            td.TensorDict(batch_size=batch_size or ()).to_zarr(filename)
    opened = td.TensorDict.from_zarr(place, mode="r" if mode == "r" else "r+", **options)
    if batch_size is not None and opened.batch_size != td.TensorDict(batch_size=batch_size).batch_size:
        opened.batch_size = batch_size
    return opened


def _save_group(
    input_dict: TensorCollection | Mapping[NestedKey, object],
    filename: str | os.PathLike[str],
    *,
    auto_batch_size: bool = False,
    batch_size: BatchSize | None = None,
    batch_dims: int | None = None,
    device: DeviceType | None = None,
    **options: Any,
) -> Any:
    _check_device(device)
    has_size = isinstance(input_dict, TensorCollection)
    data = input_dict if isinstance(input_dict, TensorCollection) else td.TensorDict(input_dict)
    if batch_size is not None:
        data = td.TensorDict(data, batch_size=batch_size)
    elif auto_batch_size or not has_size:
        data = data.copy().auto_batch_size_(batch_dims)
    return data.to_zarr(filename, **options)


def _check_device(device: DeviceType | None) -> None:
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(
            f"the leaves of a Zarr group are read on the CPU; got the device {device!r}: move what is read"
        )
