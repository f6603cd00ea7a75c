"""Register the methods of tables with td-core. The rest of the package, and pyarrow, are imported at first use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from td_core import NestedKey, TensorCollection, hookimpl, make_classmethod
from td_core.spi import as_named
from td_core.typing import DeviceType


def to_arrow(
    self: TensorCollection,
    *,
    separator: str | None = None,
    row_dims: int = 1,
    tensors: str | Mapping[NestedKey | None, str] = "list",
    mask_key: NestedKey | None = None,
    copy: bool = False,
) -> Any:
    """Return the collection as a ``pyarrow.Table``; see :func:`td_arrow.to_arrow`.

    Example:
        >>> TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_arrow().column_names
        ['x']
    """
    from ._write_columns import to_arrow

    return to_arrow(
        self, separator=separator, row_dims=row_dims, tensors=tensors, mask_key=mask_key, copy=copy
    )


def from_arrow(
    table: object,
    *,
    copy: bool | None = None,
    nulls: Any = "raise",
    mask_key: NestedKey | None = None,
    device: DeviceType | None = None,
    keys: Iterable[NestedKey] | NestedKey | None = None,
    separator: str | None = None,
    lists: str = "jagged",
    times: str = "values",
    categories: str = "values",
    strict: bool | None = None,
) -> Any:
    """Return the collection of a table; see :func:`td_arrow.from_arrow`. A class with declared entries returns an instance.

    Example:
        >>> table = TensorDict({"x": torch.arange(3)}, batch_size=[3]).to_arrow()
        >>> TensorDict.from_arrow(table.slice(1))["x"]
        tensor([1, 2])
    """
    from ._from_arrow import from_arrow

    return from_arrow(
        table,
        copy=copy,
        nulls=nulls,
        mask_key=mask_key,
        device=device,
        keys=keys,
        separator=separator,
        lists=lists,
        times=times,
        categories=categories,
        strict=strict,
    )


def _from_arrow_as(cls: type, table: object, **options: Any) -> Any:
    return as_named(cls, from_arrow(table, **options), "the table")


def _export_stream(self: TensorCollection, requested_schema: object = None) -> object:
    """Return the capsule of a stream of one batch, from which other libraries make their tables."""
    from ._arrow_capsules import export_stream

    return export_stream(self, requested_schema)


def _export_array(self: TensorCollection, requested_schema: object = None) -> object:
    """Return the capsules of an array of structs."""
    from ._arrow_capsules import export_array

    return export_array(self, requested_schema)


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the methods that convert to tables and back."""
    return {
        "to_arrow": to_arrow,
        "from_arrow": make_classmethod(from_arrow, with_class=_from_arrow_as),
        "__arrow_c_stream__": _export_stream,
        "__arrow_c_array__": _export_array,
    }
