"""Key paths of an encoded tree, for error messages and for matching two trees; and a check of untrusted tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from td_core.errors import FormatError
from td_core.spi import Encoded, expand, show_path

Path = tuple[str, ...]

#: One row of the table of an encoded tree, described in :class:`td_core.spi.Encoded`; JSON can store it.
Row = dict[str, Any]


def walk(nodes: list[Row]) -> Iterator[tuple[Path, Row | int]]:
    """Iterate depth first over (key path, node) per node and (key path, position) per leaf."""

    def list_below(item: tuple[Path, Row | int]) -> list[tuple[Path, Row | int]]:
        path, node = item
        rows = [] if isinstance(node, int) else [*node["entries"], *node["members"]]
        return [
            ((*path, key), ref[0] if isinstance(ref, list) else nodes[ref]) for key, ref in reversed(rows)
        ]

    return expand([((), nodes[0])], list_below)


def leaves(nodes: list[Row]) -> list[int]:
    """Return the positions of all leaves, depth first."""
    # This loop is written out for the rows "consolidate" of benchmarks/io.py.
    results: list[int] = []
    todo: list[Any] = [0]
    while todo:
        position = todo.pop()
        if type(position) is list:
            results += position
        else:
            node = nodes[position]
            todo += [child for _, child in node["members"][::-1]]
            todo += [child for _, child in node["entries"][::-1]]
    return results


def format_leaf_path(encoded: Encoded, leaf: int) -> str:
    """Format the key path of a leaf for an error message."""
    return show_path(encoded.leaf_paths()[leaf])


def format_value_path(nodes: list[Row], value: int) -> str:
    """Format the key path of the node that holds a value, for an error message."""
    for path, node in walk(nodes):
        if isinstance(node, dict) and any(position == value for _, position in node["values"]):
            return show_path(path)
    return "a value"


def check_tree(nodes: Any, leaves: int, values: int) -> None:
    """Raise FormatError unless an untrusted table of nodes is a tree in which each leaf and value occurs once."""
    # A short table whose nodes refer to each other repeatedly could expand to a tree of any size.
    result: dict[str, list[int]] = {"node": [0], "leaf": [], "value": []}
    for position, node in enumerate(nodes):
        for group in ("entries", "members"):
            keys = [key for key, _ in node[group]]
            if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
                raise FormatError(
                    f"the keys of node {position} are not all strings, or not all different: {keys!r}"
                )
            for _, child in node[group]:
                result["leaf" if isinstance(child, list) else "node"] += (
                    child if isinstance(child, list) else [child]
                )
        result["value"] += [value for _, value in node["values"]]
    for what, count in (("node", len(nodes)), ("leaf", leaves), ("value", values)):
        places = result[what]
        if any(type(place) is not int for place in places) or sorted(places) != list(range(count)):
            raise FormatError(
                f"each {what} of the encoded tree occurs once; there are {count}, found {places!r:.100}"
            )
