"""Arrays and tables of other libraries: the package that converts each class, and the protocols that td-core reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._python.type_names import NamedTypes, has_name
from .._torch.arrays import as_tensor
from ..errors import MissingPluginError
from .defaults import show_path

if TYPE_CHECKING:
    import numpy.typing as npt

#: The package of the project that converts each class. None of the libraries is imported.
PACKAGES: NamedTypes[str] = NamedTypes()
for _package, _classes in {
    "td-arrow": (
        "pandas.Series", "pandas.Index", "pandas.DataFrame", "pandas.api.extensions.ExtensionArray",
        "polars.Series", "polars.DataFrame", "polars.LazyFrame",
        "pyarrow.Array", "pyarrow.ChunkedArray", "pyarrow.Tensor", "pyarrow.Table", "pyarrow.RecordBatch",
        "pyarrow.RecordBatchReader", "pyarrow.dataset.Dataset",
        "datasets.arrow_dataset.Dataset", "datasets.arrow_dataset.Column",
        "xarray.DataArray", "xarray.Variable", "xarray.Dataset",
    ),
    "td-hdf5": ("h5py.Dataset", "h5py.Group"),
    "td-zarr": ("zarr.Array", "zarr.Group"),
}.items():  # fmt: skip
    for _class in _classes:
        PACKAGES[_class] = _package

#: Classes with DLPack whose arrays can be written, so that a leaf shares their memory.
_MUTABLE = ("cupy.ndarray",)

#: Formats of the buffer protocol that are one number.
_NUMBER = re.compile(r"[@=<>!]?(Z[fd]|[?bBhHiIlLqQnNefd])")

#: Classes of values with the buffer protocol, and arrays that td-core converts itself.
_NO_BUFFERS = (str, bytes, bytearray, np.ndarray, np.generic)


def find_package(cls: type) -> str | None:
    """Return the package of the project that converts values of a class of another library, or None."""
    return next(filter(None, map(PACKAGES.find, cls.__mro__[:-1])), None)


def missing_coercer_error(package: str, value: object, path: tuple[str, ...]) -> MissingPluginError:
    """Return the error for a value whose coercer is in a package that is not installed."""
    cls = type(value)
    return MissingPluginError(
        f"{show_path(path)}: a {cls.__name__} of {cls.__module__.partition('.')[0]} becomes an entry with "
        f"{MissingPluginError.describe(package)}; wrap it in NonTensorData(...) to store the object as one value"
    )


def read_array(value: object, path: tuple[str, ...]) -> Tensor | None:
    """Convert an object with DLPack, or with numbers in a buffer or an array interface; return None for any other."""
    if isinstance(value, _NO_BUFFERS):
        return None
    if hasattr(type(value), "__dlpack__"):
        try:
            shared = torch.utils.dlpack.from_dlpack(value)
        except (RuntimeError, TypeError, ValueError, BufferError, AttributeError) as error:
            raise TypeError(
                f"{show_path(path)}: torch cannot read a {type(value).__name__} by DLPack: {error}; convert it to an array, or "
                "wrap it in NonTensorData(...) to store the object as one value"
            ) from error
        # The library may not expect that its array changes: those of JAX never do.
        is_mutable = any(has_name(base, name) for base in type(value).__mro__ for name in _MUTABLE)
        return shared if is_mutable else shared.clone()
    array = _view_buffer(value)
    return None if array is None else as_tensor(array)


def has_array(value: object) -> bool:
    """Return True if :func:`read_array` converts a value."""
    if isinstance(value, _NO_BUFFERS):
        return False
    return hasattr(type(value), "__dlpack__") or _view_buffer(value) is not None


def _view_buffer(value: Any) -> npt.NDArray[np.generic] | None:
    """Return an array on the numbers of a buffer or an array interface, or None."""
    if hasattr(type(value), "__array_interface__") or "__array_interface__" in getattr(value, "__dict__", ()):
        array = np.asarray(value)
        return array if array.dtype.kind in "biufc" else None
    try:
        view = memoryview(value)
    except TypeError:
        return None
    return np.asarray(view) if _NUMBER.fullmatch(view.format) else None


def check_mask(value: object, path: tuple[str, ...]) -> None:
    """Raise ValueError for an array of numpy with masked elements, whose values are arbitrary."""
    if (
        type(value) is np.ndarray
        or not isinstance(value, np.ndarray)
        or not isinstance(value, np.ma.MaskedArray)
    ):
        return
    if count := int(np.ma.getmaskarray(value).sum()):
        shown = f"{count} masked element{'s' if count > 1 else ''}"
        raise ValueError(f"{show_path(path)} has {shown}: .filled(value) them first")
