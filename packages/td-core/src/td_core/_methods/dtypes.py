"""The method ``type`` and the casts to one dtype, such as ``float()`` and ``int64()``."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from typing_extensions import Self

from .._functions.dtypes import CASTS, CastFilter, cast_leaves, make_cast
from .._tree.node import Core


class DtypeMixin(Core):
    """The method ``type`` and the casts to one dtype, such as ``float()`` and ``int64()``."""

    __slots__ = ()

    # Begin of casts: written by tools/generate_methods.py from the table in td_core/_torch/dtypes.py.
    bfloat16 = make_cast("bfloat16")
    bool = make_cast("bool")
    complex128 = make_cast("complex128")
    complex32 = make_cast("complex32")
    complex64 = make_cast("complex64")
    double = make_cast("double")
    float = make_cast("float")
    float16 = make_cast("float16")
    float32 = make_cast("float32")
    float64 = make_cast("float64")
    half = make_cast("half")
    int = make_cast("int")
    int16 = make_cast("int16")
    int32 = make_cast("int32")
    int64 = make_cast("int64")
    int8 = make_cast("int8")
    qint32 = make_cast("qint32")
    qint8 = make_cast("qint8")
    quint4x2 = make_cast("quint4x2")
    quint8 = make_cast("quint8")
    uint16 = make_cast("uint16")
    uint32 = make_cast("uint32")
    uint64 = make_cast("uint64")
    uint8 = make_cast("uint8")
    # End of casts.

    def type(self, dst_type: Any, *, cast_filter: CastFilter | None = None) -> Self:
        """Cast the leaves to a dtype.

        Args:
            dst_type: a dtype, or another argument that :meth:`torch.Tensor.type` accepts.
            cast_filter: takes the key path (a tuple) and the leaf; if it returns False, the leaf is not cast.

        >>> TensorDict({"a": torch.zeros(2)}).type(torch.int8)["a"].dtype
        torch.int8
        """
        leaf = CASTS.get(dst_type) or methodcaller("type", dst_type)
        return cast_leaves(self, "type", leaf, cast_filter)
