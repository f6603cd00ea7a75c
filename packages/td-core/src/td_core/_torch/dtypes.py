"""The table of dtypes, Python types that torch accepts as dtypes, and type promotion with 0-d tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Dtype(NamedTuple):
    """A dtype with casting methods, or one that torch treats in its own way. Other dtypes need no row.

    Attributes:
        name: its name in torch.
        methods: the methods of collections that cast to it.
        fast: the method of tensors that casts to it, which parses its arguments faster than ``to``.
        python: the Python type that torch converts to it, whatever the default dtype is.
        indexing: what an index of this dtype lists: "positions", "mask", or "" if torch refuses it.
        array: True if positions in a NumPy array can have it; they are converted to int64.
        stand_in: True if bytes of any dtype of its width are copied as this one, since torch cannot copy some dtypes.
        cannot: "cast" if torch raises or warns, "store" if its parameters have no place in a file, "scatter" if some
            releases of torch cannot write at an index tensor or a mask.
    """

    name: str
    methods: tuple[str, ...]
    fast: str = ""
    python: type | None = None
    indexing: str = ""
    array: bool = False
    stand_in: bool = False
    cannot: tuple[str, ...] = ()


DTYPES = (
    Dtype("float64", ("float64", "double"), "double", float),
    Dtype("float32", ("float32", "float"), "float"),
    Dtype("float16", ("float16", "half"), "half"),
    Dtype("bfloat16", ("bfloat16",), "bfloat16"),
    Dtype("complex128", ("complex128",), python=complex),
    Dtype("complex64", ("complex64",)),
    Dtype("complex32", ("complex32",), cannot=("cast",)),
    Dtype("int64", ("int64",), "long", int, "positions", stand_in=True),
    Dtype("int32", ("int32", "int"), "int", None, "positions", array=True, stand_in=True),
    Dtype("int16", ("int16",), "short", array=True, stand_in=True),
    Dtype("int8", ("int8",), "char", array=True),
    Dtype("uint64", ("uint64",), array=True, cannot=("scatter",)),
    Dtype("uint32", ("uint32",), array=True, cannot=("scatter",)),
    Dtype("uint16", ("uint16",), array=True, cannot=("scatter",)),
    Dtype("uint8", ("uint8",), "byte", None, "mask", stand_in=True),
    Dtype("bool", ("bool",), "bool", bool, "mask"),
    Dtype("qint32", ("qint32",), cannot=("cast", "store")),
    Dtype("qint8", ("qint8",), cannot=("cast", "store")),
    Dtype("quint8", ("quint8",), cannot=("cast", "store")),
    Dtype("quint4x2", ("quint4x2",), cannot=("cast", "store")),
    Dtype("quint2x4", (), cannot=("cast", "store")),
)

#: The dtypes of this torch by name, such as ``torch.float32``, and by older names, such as ``torch.float``.
NAMES = {f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
#: The rows of the dtypes that this torch has.
ROWS = {NAMES[name]: row for row in DTYPES if (name := f"torch.{row.name}") in NAMES}
#: The rows by casting method.
METHODS = {method: row for row in DTYPES for method in row.methods}
#: The dtypes that a file can hold, by the name that is written.
STORABLE = {
    str(dtype): dtype for dtype in NAMES.values() if dtype not in ROWS or "store" not in ROWS[dtype].cannot
}
#: The dtypes of positions in an index, and of the offsets of nested tensors; a tuple, which torch.compile can search.
POSITIONS = tuple(dtype for dtype, row in ROWS.items() if row.indexing == "positions")
#: Integer dtypes by width in bytes, to copy elements of other dtypes.
STAND_INS = {dtype.itemsize: dtype for dtype, row in ROWS.items() if row.stand_in}
#: The dtypes to which torch converts Python types, whatever its default dtype is.
PYTHON_DTYPES: dict[object, torch.dtype] = {row.python: dtype for dtype, row in ROWS.items() if row.python}


def _shorten(name: str) -> str:
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if long in name:
            return name.replace(long, short, 1)
    return name


#: The names in the compact form of collections, such as ``bf16`` and ``u8``.
SHORT_NAMES: dict[torch.dtype | None, str] = {
    dtype: _shorten(str(dtype).removeprefix("torch.")) for dtype in NAMES.values()
}

#: A function (leaf, 0-d operand) -> operand with the dtype that promotes correctly with the leaf.
ScalarBeside = Callable[[Tensor, Tensor], Tensor]


def as_dtype(dtype: object) -> Any:
    """Convert a Python number type to a dtype; return any other value unchanged.

    >>> as_dtype(float), as_dtype(torch.int8)
    (torch.float64, torch.int8)
    """
    return PYTHON_DTYPES.get(dtype, dtype) if isinstance(dtype, type) else dtype


def dtype_beside(dtype: torch.dtype, scalar: torch.dtype) -> torch.dtype:
    """Return the result dtype of a tensor with dims and a 0-d tensor of dtype ``scalar``, as ``torch.result_type`` does."""
    # A graph cannot call torch.result_type. Only a higher category (bool, int, float, complex) promotes.
    if _category(scalar) <= _category(dtype):
        return dtype
    if dtype.is_floating_point:  # the lowest precision, so that the tensor with dims determines the result
        bcomplex = getattr(torch, "bcomplex32", torch.complex32)  # from torch 2.14 on
        scalar = bcomplex if dtype is torch.bfloat16 else torch.complex32
    return torch.promote_types(dtype, scalar)


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)


def keep_scalar(leaf: Tensor, scalar: Tensor) -> Tensor:
    """Return the 0-d operand of a leaf unchanged."""
    return scalar


def as_scalar(leaf: Tensor, scalar: Tensor) -> Tensor:
    """Convert the 0-d operand of a 0-d leaf that represents a tensor with dims."""
    # Without the cast, torch would promote both 0-d tensors to the larger dtype.
    return scalar if leaf.ndim or leaf.dtype == scalar.dtype else cast_for_promotion(leaf.dtype, scalar)


def cast_for_promotion(dtype: torch.dtype, scalar: Tensor) -> Tensor:
    """Cast a 0-d tensor so that it promotes ``dtype`` as it would promote a tensor with dims."""
    wanted = dtype_beside(dtype, scalar.dtype)
    return scalar if torch.promote_types(dtype, scalar.dtype) == wanted else scalar.to(wanted)


def is_inexact(*args: object) -> bool:
    """Return True if the last argument has a floating point or complex dtype.

    Like the other dtype predicates, it can be a ``cast_filter``, which is called with a key and a leaf.

    Args:
        *args: anything, then a tensor or a dtype.

    >>> is_inexact("key", torch.zeros(1)), is_inexact(torch.complex64)
    (True, True)
    >>> is_inexact(torch.int8)
    False
    """
    dtype = _dtype(args)
    return dtype.is_floating_point or dtype.is_complex


def is_floating(*args: object) -> bool:
    """Return True if the last argument has a floating point dtype; see :func:`is_inexact`.

    >>> is_floating(torch.zeros(1)), is_floating(torch.complex64)
    (True, False)
    """
    return _dtype(args).is_floating_point


def is_integer(*args: object) -> bool:
    """Return True if the last argument has an integer dtype (not bool); see :func:`is_inexact`.

    >>> is_integer(torch.zeros(1).int()), is_integer(torch.bool)
    (True, False)
    """
    dtype = _dtype(args)
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def is_bool(*args: object) -> bool:
    """Return True if the last argument has the bool dtype; see :func:`is_inexact`.

    >>> is_bool(torch.tensor(True)), is_bool(torch.int8)
    (True, False)
    """
    return _dtype(args) == torch.bool


def _dtype(args: tuple[object, ...]) -> torch.dtype:
    value = as_dtype(args[-1]) if args else None
    dtype = value if isinstance(value, torch.dtype) else getattr(value, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the last argument is a tensor or a dtype; got {args!r}")
    return dtype
