"""Describe a collection as a table with one row for each key: dtype, shape, size, device and shared memory."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from .._encode.inspection import show_size
from .._encode.node_kinds import encode
from .._python.public_names import set_module
from .._torch.dtypes import SHORT_NAMES
from .._tree.buffers import has_memory
from .._tree.components import get_parts
from .._tree.node import Core
from .._tree.ragged import get_display_shape
from .._tree.shared_memory import group_overlapping
from .._tree.views import list_foreign
from .._tree.walks import expand, has_entries

_COLUMNS = ("key", "dtype", "shape", "size", "share", "device", "memory")


@set_module("td_core")
@dataclass(frozen=True)
class DescriptionRow:
    """The leaves of a collection that have one key, or a value; members of a lazy stack are in one row.

    Attributes:
        key: the key path, without numbers of members.
        dtype: short name of the dtype, such as ``"f32"``; names joined by ``"/"`` if the members differ; for values,
            their type, such as ``"list[str]"``.
        shape: shape of the leaf; for leaves of members, their number and shape, with -1 for dims that differ.
        nbytes: size of all elements in bytes.
        share: part of the size of the collection, between 0 and 1.
        device: the device; names joined by ``"/"`` if the members differ.
        shares_memory_with: the first key of the collection with a leaf that overlaps in memory, or None.
    """

    key: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    share: float
    device: str
    shares_memory_with: tuple[str, ...] | None = None

    def _cells(self) -> tuple[str, ...]:
        shared = "" if self.shares_memory_with is None else f"shared with {'.'.join(self.shares_memory_with)}"
        size, shape = show_size(self.nbytes), str(list(self.shape))
        return ".".join(self.key), self.dtype, shape, size, f"{self.share:.1%}", self.device, shared


@set_module("td_core")
@dataclass(frozen=True)
class Description:
    """Table of the leaves of a collection, which prints as text, and as HTML in notebooks.

    Attributes:
        title: class and batch size of the collection.
        rows: one row for each key.
        nbytes: size of all rows in bytes; leaves that share memory count once for each key.
    """

    title: str
    rows: tuple[DescriptionRow, ...]
    nbytes: int

    def __iter__(self) -> Iterator[DescriptionRow]:
        return iter(self.rows)

    def _columns(self) -> list[tuple[str, ...]]:
        """Return the columns that are not empty, each with its head first."""
        table = [_COLUMNS, *(row._cells() for row in self.rows)]
        return [column for column in zip(*table) if any(column[1:]) or column[0] == "key"]

    def __repr__(self) -> str:
        shown = self._columns()
        widths = [max(map(len, column)) for column in shown]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in zip(*shown)]
        return "\n".join([f"{self.title}, {show_size(self.nbytes)}", *lines])

    def _repr_html_(self) -> str:
        def line(cells: tuple[str, ...], tag: str) -> str:
            left = ' style="text-align:left"'
            return f"<tr>{''.join(f'<{tag}{left}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        head, *rows = zip(*self._columns())
        body = "".join(line(cells, "td") for cells in rows)
        title = html.escape(f"{self.title}, {show_size(self.nbytes)}")
        return f"<table><caption>{title}</caption>{line(head, 'th')}{body}</table>"


def describe(root: Core) -> Description:
    """Return the table of a collection; reads no element, and stacks no members."""
    foreign = dict(list_foreign(root))
    if foreign:
        known = describe(_leave_out_foreign(root))
        rows = [DescriptionRow(key, type(item).__name__, (), 0, 0.0, "") for key, item in foreign.items()]
        return replace(known, rows=(*known.rows, *rows))
    encoded = encode(root, format_name="description")
    paths, nodes = encoded.leaf_paths(members=False), encoded.node_paths(members=False)

    def list_children(item: object) -> list[Any]:
        row = encoded.nodes[item] if isinstance(item, int) else {}
        return [child for group in ("members", "entries") for _, child in reversed(row.get(group, []))]

    groups: dict[tuple[str, ...], list[int]] = {}
    values: dict[tuple[str, ...], DescriptionRow] = {}
    for item in expand([0], list_children):
        if not isinstance(item, int):
            groups.setdefault(paths[item[0]], []).append(item[0])
        elif (row := encoded.nodes[item])["values"]:
            shape = tuple(row["meta"].get("batch_size", ()))
            name = encoded.objects[item]._print_node().text or row["kind"]
            values[nodes[item]] = DescriptionRow(nodes[item], name, shape, 0, 0.0, "")
    sizes = [_count_bytes(leaf) for leaf in encoded.leaves]
    total = sum(sizes)
    shared = _find_shared(encoded.leaves, paths, [*groups])
    rows = [
        _summarize(
            key, [encoded.leaves[i] for i in places], sum(sizes[i] for i in places), total, shared.get(key)
        )
        for key, places in groups.items()
    ]
    return Description(f"{type(root).__name__} {list(root.batch_size)}", (*rows, *values.values()), total)


def _leave_out_foreign(root: Core) -> Any:
    """Copy a collection without the objects in place of leaves."""

    def copy(node: Core) -> object:
        entries = dict(node._children())
        found = {key: child for key, child in entries.items() if isinstance(child, (Tensor, Core))}
        return node._with_children(
            {key: _leave_out_foreign(child) if has_entries(child) else child for key, child in found.items()}
        )

    return root._map_members(copy)


def _summarize(
    key: tuple[str, ...], leaves: list[Tensor], nbytes: int, total: int, shared: tuple[str, ...] | None
) -> DescriptionRow:
    shapes = [[size if type(size) is int else -1 for size in get_display_shape(leaf)] for leaf in leaves]
    if len({len(shape) for shape in shapes}) > 1:
        shape: tuple[int, ...] = (len(shapes), -1)
    else:
        merged = tuple(sizes[0] if len({*sizes}) == 1 else -1 for sizes in zip(*shapes))
        shape = merged if len(shapes) == 1 else (len(shapes), *merged)
    dtypes, devices = (
        "/".join(dict.fromkeys(names))
        for names in ((SHORT_NAMES[leaf.dtype] for leaf in leaves), (str(leaf.device) for leaf in leaves))
    )
    return DescriptionRow(key, dtypes, shape, nbytes, nbytes / total if total else 0.0, devices, shared)


def _count_bytes(leaf: Tensor) -> int:
    if is_lazy(leaf):
        return 0  # an uninitialized parameter has no elements yet
    return sum(part.numel() * part.element_size() for part in get_parts(leaf))


def _find_shared(
    leaves: list[Tensor], paths: list[tuple[str, ...]], order: list[tuple[str, ...]]
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return for each key the first other key, in the given order, with a leaf that overlaps in memory."""
    dense = [i for i, leaf in enumerate(leaves) if not is_lazy(leaf) and has_memory(leaf)]
    result: dict[tuple[str, ...], tuple[str, ...]] = {}
    for group in group_overlapping([leaves[i] for i in dense]):
        first, *others = sorted({paths[dense[i]] for i in group}, key=order.index)
        result.update(dict.fromkeys(others, first))
    return result
