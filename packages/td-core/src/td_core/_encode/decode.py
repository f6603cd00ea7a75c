"""Decode an encoded tree: build its nodes from the rows of the table, children before parents."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._tree.defaults import show_path
from .._tree.devices import fix_decoded_devices
from .._tree.node import Core
from ..errors import FormatError, MissingPluginError, StructureError
from .node_kinds import KINDS, Encoded, NodeKind, Row, find_subclass, get_key_path, user_class
from .records import Record


def decode(encoded: Encoded, *, named: type | None = None, fix_devices: bool = False) -> Any:
    """Decode a tree; the inverse of :func:`encode`.

    Args:
        encoded: the table.
        named: the class that the caller expects; it replaces a class of the root that was moved to another module.
        fix_devices: correct the devices of nodes, if leaves were loaded on other devices.

    Raises:
        FormatError: the table is damaged, the kind of a node is not registered, or a node cannot be unflattened.
        MissingPluginError: a kind belongs to a package that is not installed; the message names it.

    >>> from td_core.spi import encode
    >>> decode(encode(TensorDict({"a": 1})))["a"]
    tensor(1)
    """
    result = decode_all(encoded, named=user_class(named))[0]
    return fix_decoded_devices(result, encoded.nodes, encoded.leaves) if fix_devices else result


def decode_all(
    encoded: Encoded, made: Mapping[int, Core] | None = None, named: type | None = None
) -> list[Core]:
    """Decode all nodes except those in ``made``, by position. ``named`` replaces a class of the root that was moved."""
    _check_encoded(encoded)
    nodes: list[Any] = [None] * len(encoded.nodes)
    declared: list[type | None] | None = None
    # Children follow their parent, so a walk from the end decodes every child first.
    for position in range(len(encoded.nodes) - 1, -1, -1):
        if made and position in made:
            nodes[position] = made[position]
            continue
        row, record = encoded.nodes[position], _read_record(encoded, nodes, position)
        cls = encoded.classes.get(position)
        if cls is None and not _is_known(row):
            declared = declared or _list_declared_classes(encoded.nodes, named)
            cls = _find_moved_class(row, declared[position])
        kind = _find_kind(encoded.nodes, position) if cls is None else KINDS.of(cls)
        if cls is None and "class" in row:
            cls = find_subclass(kind.type, row["class"])
        record.cls = cls
        try:
            nodes[position] = kind.node_of(record)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, (FormatError, MissingPluginError, StructureError)):
                raise
            writer = f", written by {row['from']!r}," if "from" in row else ""
            raise FormatError(
                f"{_format_place(encoded.nodes, position)}, of the kind {row['kind']!r}{writer} cannot be put together: "
                f"{error!r}"
            ) from error
    for position, attributes in encoded.attributes.items():
        try:
            KINDS.set_attributes(nodes[position], attributes)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"the attributes of node {position} cannot be set: {error!r}") from error
    return nodes


def _check_encoded(encoded: Encoded) -> None:
    """Raise FormatError unless the nodes are a list that is not empty, and the leaves are tensors."""
    if not encoded.nodes:
        raise FormatError("an encoded tree has at least one node; there is none")
    if not isinstance(encoded.nodes, (list, tuple)):
        raise FormatError(f"the nodes of an encoded tree are a list; got a {type(encoded.nodes).__name__}")
    if not all(issubclass(cls, Tensor) for cls in {*map(type, encoded.leaves)}):
        place = next(i for i, leaf in enumerate(encoded.leaves) if not isinstance(leaf, Tensor))
        raise FormatError(
            f"{_format_place(encoded.nodes, [place])} of the encoded tree is a tensor; got {encoded.leaves[place]!r:.100}"
        )


def _read_record(encoded: Encoded, nodes: list[Core], position: int) -> Record:
    """Return the record of a node, whose children in ``nodes`` are decoded; raise FormatError for a damaged row."""
    row = encoded.nodes[position]
    try:
        entries, members = (
            {
                key: encoded.leaves[ref[0]] if isinstance(ref, list) else _later(nodes, ref, position)
                for key, ref in row[group]
            }
            for group in ("entries", "members")
        )
        values = {name: encoded.values[ref] for name, ref in row["values"]}
        _check_row(row, [entries, members, values])
        row["kind"]  # raises KeyError if it is missing
        return Record(row["meta"], entries, members, values)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"node {position} of the encoded tree is damaged: {error!r}") from error


def _find_kind(rows: list[dict[str, object]], position: int) -> NodeKind:
    """Return the kind that a row names, or raise FormatError or MissingPluginError."""
    row = rows[position]
    tag = row["kind"]
    if type(tag) is str and tag in KINDS:
        return KINDS[tag]
    shown = _format_place(rows, position)
    missing = MissingPluginError.of_writer(f"{shown}, of the kind {tag!r},", row.get("from"))
    raise missing or FormatError(f"{shown} is of the kind {tag!r}, which no installed package provides")


def _is_known(row: Row) -> bool:
    """Return True if this process has defined the class that a row of an encoded tree names."""
    tag = row["kind"]
    if type(tag) is not str or tag not in KINDS:
        return False
    return "class" not in row or find_subclass(KINDS[tag].type, row["class"]) is not None


def _find_moved_class(row: Row, cls: type | None) -> type | None:
    """Return the declared class ``cls`` if it can replace the stored class of a node, which is not defined; else None."""
    if cls is None or "from" in row:
        return None
    kind = KINDS.get(row["kind"]) if type(row["kind"]) is str else None
    fits = KINDS.of(cls).with_class if kind is None else issubclass(cls, kind.type)
    return cls if fits else None


def _list_declared_classes(rows: list[Row], named: type | None) -> list[type | None]:
    """List the declared class of each node: ``named`` for the root, or what the schema of its parent declares."""
    classes: list[type | None] = [named, *[None] * (len(rows) - 1)]
    owners: list[object] = [None] * len(rows)
    # Ignore damaged rows here; decode_all raises the error for them.
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
        for position, row in enumerate(rows):
            tag = row["kind"]
            kind = KINDS.get(tag) if type(tag) is str else None
            owner: Any = owners[position] or classes[position]
            if kind is not None:
                own = find_subclass(kind.type, row["class"]) if "class" in row else kind.type
                owner = user_class(own or kind.type) or owner
            for key, ref in row["entries"]:
                if isinstance(ref, int) and owner is not None:
                    classes[ref] = owner._schema.find_class(key)
            for _, ref in row["members"]:
                owners[ref] = owner
                # Members of a lazy stack have its declared class.
                classes[ref] = classes[position] if kind is not None and not kind.with_class else None
    return classes


def _format_place(rows: list[dict[str, object]], position: int | list[int]) -> str:
    """Format the key path of a node or leaf, or its position in the table if the rows of its parents are damaged."""
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
        return show_path(get_key_path(rows, position))
    return f"leaf {position[0]}" if isinstance(position, list) else f"node {position}"


def _check_row(row: Row, groups: list[dict[str, object]]) -> None:
    """Raise ValueError for a repeated key or a negative position, and TypeError for a key that is not a string."""
    for name, group in zip(("entries", "members", "values"), groups, strict=True):
        if len(group) != len(row[name]):
            raise ValueError(f"a key is repeated in its {name}")
        if not {*map(type, group)} <= {str}:
            raise TypeError(f"not all keys of its {name} are strings")
        if any((ref[0] if isinstance(ref, list) else ref) < 0 for _, ref in row[name]):
            raise ValueError(f"a place in its {name} is negative")


def _later(nodes: list[Core], ref: int, position: int) -> Core:
    if not position < ref < len(nodes):
        raise ValueError(f"child {ref} of node {position}")
    return nodes[ref]
