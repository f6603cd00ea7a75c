"""The plugin of the entry point ``td``: node kinds, coercers and methods of non-tensor data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from td_core import Coercer, NodeKind, hookimpl
from td_core.plugins.declarations import implementations

from ._non_tensor_methods import COERCERS
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
    return implementations("td-tensorclass")
