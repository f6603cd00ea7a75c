"""The plugin of the entry point ``td``: node kinds, coercers and methods of non-tensor data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from td_core.spi import Coercer, NodeKind, hookimpl, make_classmethod

from ._non_tensor_methods import (
    COERCERS,
    attrs,
    filter_non_tensor_data,
    from_dataclass,
    get_non_tensor,
    is_non_tensor,
    non_tensor_items,
    set_non_tensor,
)
from ._value_kinds import NODE_KINDS


@hookimpl
def td_node_kinds() -> Iterable[NodeKind]:
    """Return the kinds of non-tensor data; each tensorclass adds its own when it is defined."""
    return NODE_KINDS


@hookimpl
def td_coercers() -> Iterable[Coercer]:
    """Return the coercers that convert strings, bytes, None, lists and any other object to non-tensor data."""
    return COERCERS


@hookimpl
def td_methods() -> Mapping[str, object]:
    """Return the methods that td-tensorclass attaches to every collection."""
    return {
        "attrs": attrs,
        "get_non_tensor": get_non_tensor,
        "set_non_tensor": set_non_tensor,
        "is_non_tensor": is_non_tensor,
        "non_tensor_items": non_tensor_items,
        "filter_non_tensor_data": filter_non_tensor_data,
        "from_dataclass": make_classmethod(from_dataclass, dense=True),
    }
