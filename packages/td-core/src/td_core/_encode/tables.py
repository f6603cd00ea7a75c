"""The header in which a file format stores an encoded tree, and work on such a tree before its leaves are read.

The header is JSON: ``{"version": 1, "nodes": rows, "leaves": list(places), "values": pairs}``. The rows are those of
:class:`~td_core.spi.Encoded`. A place describes where the format has stored a leaf, in a form that the format chooses, such as
the name of an array. A pair is the result of ``split_value``.

A table that is read from a header has places as ``leaves`` and pairs as ``values``. A format selects keys, reads the leaves
of the places that remain, and calls :func:`decode_table`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from .._tree.defaults import show_path
from .._tree.keys import unravel_key_to_tuple
from .._tree.walks import visit
from ..errors import CodecError, FormatError, KeyPathError, MissingPluginError, TensorDictError
from ..typing import NestedKey
from .decode import decode
from .inspection import Tree
from .node_kinds import KINDS, Encoded, Row, sort_topologically
from .value_codec import join, split

#: Version of the header.
VERSION = 1
#: The environment variable that allows a header to describe more nodes, and its default.
MOST_NODES = "TD_MAX_NODES"
_MOST_NODES = 10_000


def dump_table(encoded: Encoded, places: Sequence[object]) -> dict[str, Any]:
    """Return a header for JSON, with a *place* for each leaf: where the format has stored it, such as the name of an array.

    Raises:
        CodecError: a value cannot be stored without pickle; the message has its key path.

    >>> from td_core.spi import encode
    >>> dump_table(encode(TensorDict({"a": 1})), ["array 0"])["leaves"]
    ['array 0']
    """
    pairs: list[list[object]] = []
    for value in encoded.values:
        try:
            pairs.append(list(split(value)))
        except CodecError as error:
            path = _find_value(encoded, len(pairs))
            raise CodecError(f"cannot save {show_path(path)}: {error}") from error
    return make_table_header(replace(encoded, leaves=list(places), values=pairs))


def make_table_header(table: Encoded) -> dict[str, Any]:
    """Return the header of a table, with places as leaves and pairs as values."""
    return {"version": VERSION, "nodes": table.nodes, "leaves": table.leaves, "values": table.values}


def _find_value(encoded: Encoded, position: int) -> tuple[str, ...]:
    """Return the key path of a value."""
    return next(
        (*path, name)
        for path, row in zip(encoded.node_paths(members=False), encoded.nodes)
        for name, ref in row["values"]
        if ref == position
    )


def load_table(header: Any, where: str) -> Encoded:
    """Return the table of a header that :func:`dump_table` returned, with places as leaves; messages begin with ``where``.

    Raises:
        FormatError: the header is damaged, or of a later version.

    >>> load_table({"version": 2}, "data.bin")
    Traceback (most recent call last):
    td_core.errors.FormatError: data.bin: the td header has the version 2; expected 1: upgrade the package of this format
    """
    version = header.get("version") if isinstance(header, dict) else header
    if type(version) is not int or version != VERSION:
        raise FormatError(
            f"{where}: the td header has the version {version!r:.100}; expected {VERSION}: upgrade the package of this format"
        )
    for name in ("nodes", "leaves", "values"):
        if not isinstance(header.get(name), list):
            raise FormatError(f"{where}: {name} of the td header is not a list")
    encoded = Encoded(header["nodes"], header["leaves"], header["values"])
    check_table(encoded, where)
    return encoded


def check_table(encoded: Encoded, where: str) -> None:
    """Raise FormatError for rows that are malformed, or refer to nodes or leaves that the table does not have."""
    rows = encoded.nodes
    if not rows:
        raise FormatError(f"{where}: its header has no nodes; expected at least one node")
    try:
        for position in range(len(rows)):
            _check_row(encoded, position)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: the nodes of its header are damaged: {error!r}") from error
    # A few rows that refer to each other repeatedly could expand to a tree of any size.
    refs = [ref for row in rows for _, ref in (*row["entries"], *row["members"]) if type(ref) is int]
    most = get_most_nodes(len(rows))
    if len({*refs}) < len(refs) and _count_nodes(rows, most) > most:
        raise refuse_nodes(where, most)


def _check_row(encoded: Encoded, position: int) -> None:
    """Raise TypeError, ValueError or LookupError if a row is malformed or refers to what the table does not have."""
    row = encoded.nodes[position]
    if not isinstance(row["kind"], str) or not isinstance(row["meta"], dict):
        raise TypeError(
            f"node {position} has the kind {row['kind']!r:.100} and the meta {row['meta']!r:.100}"
        )
    if not isinstance(row.get("from", ""), str):
        raise TypeError(f"node {position} was written by {row['from']!r:.100}")
    for key, ref in chain(row["entries"], row["members"]):
        if not isinstance(key, str):
            raise TypeError(f"a key of node {position} is {key!r:.100}")
        number, first, end = (
            (*ref, 0, len(encoded.leaves))
            if isinstance(ref, list)
            else (ref, position + 1, len(encoded.nodes))
        )
        if type(number) is not int or not first <= number < end:
            raise ValueError(f"the entry {key!r} of node {position} refers to {ref!r:.100}")
    for name, ref in row["values"]:
        if not isinstance(name, str) or type(ref) is not int or not 0 <= ref < len(encoded.values):
            raise ValueError(f"the value {name!r:.100} of node {position} refers to {ref!r:.100}")


def _count_nodes(rows: Sequence[Row], most: int) -> int:
    """Return the number of nodes of the tree that rows describe, at most ``most + 1``; a node can have several parents."""
    counts = [1] * len(rows)
    for position in range(len(rows) - 1, -1, -1):  # children follow their parent
        below = sum(counts[ref] for ref in _list_children(rows[position]))
        counts[position] = min(1 + below, most + 1)
    return counts[0]


def select_keys(encoded: Encoded, keys: Iterable[NestedKey] | NestedKey | None, where: str) -> Encoded:
    """Return a table with some keys, what is below them, and the nodes above them. Names of members are not a part of keys.

    Entries are in the order of the keys, as ``TensorDict.select`` returns them. None selects everything.

    Raises:
        KeyPathError: a key does not exist; the message begins with ``where``.

    >>> from td_core.spi import encode
    >>> header = dump_table(encode(TensorDict({"a": 1, "n": {"b": 2, "c": 3}})), ["0", "1", "2"])
    >>> select_keys(load_table(header, "data.bin"), ["a", ("n", "c")], "data.bin").leaves
    ['0', '2']
    """
    if keys is None:
        return encoded
    chosen = [keys] if isinstance(keys, (str, tuple)) else keys
    selection = _Selection(encoded.nodes, [unravel_key_to_tuple(key) for key in chosen])
    rows = selection.select_rows()
    if missing := selection.wanted - selection.found - {()}:
        raise KeyPathError(f"{where}: the save has no {', '.join(map(show_path, sorted(missing)))}")
    return _renumber(encoded, rows)


def prune_table(encoded: Encoded, root: int = 0) -> Encoded:
    """Return the table of a node, with what is below it and nothing else."""
    rows = [encoded.nodes[root], *encoded.nodes[1:]]
    return _renumber(encoded, _Selection(rows, [()]).select_rows())


class _Selection:
    """The selection of key paths in the rows of a table."""

    def __init__(self, rows: list[Row], paths: list[tuple[str, ...]]) -> None:
        self.rows = rows
        self.wanted = set(paths)
        self.found: set[tuple[str, ...]] = set()
        #: The position of a key path, or of the beginning of one, in the selection.
        self.ranks: dict[tuple[str, ...], int] = {}
        for rank, path in enumerate(paths):
            for length in range(len(path) + 1):
                self.ranks.setdefault(path[:length], rank)

    def select_rows(self) -> list[Row]:
        """Return the rows of the selected nodes, with references to rows of the result and to leaves of the table."""
        result: list[Row] = []
        # A node can have several parents; its selection is the same under the same key path.
        known: dict[tuple[int, tuple[str, ...], bool], int] = {}
        todo: deque[tuple[int, tuple[str, ...], bool]] = deque()

        def add(old: int, path: tuple[str, ...], whole: bool) -> int:
            item = (old, path if path in self.ranks else (), whole)
            if item not in known:
                known[item] = len(result)
                result.append({**self.rows[old], "entries": [], "members": []})
                todo.append((old, path, whole))
            return known[item]

        origins: list[int] = []
        add(0, (), () in self.wanted)
        for new in result:  # grows in the loop
            old, path, whole = todo.popleft()
            origins.append(old)
            row = self.rows[old]
            for group in ("entries", "members"):
                for below, key, ref in self._select_children(row, group, path, whole):
                    chosen = whole or below in self.wanted
                    if isinstance(ref, int):
                        new[group].append([key, add(ref, below, chosen)])
                    elif chosen:
                        new[group].append([key, ref])
        self._select_headers(result, origins)
        if any(ref <= position for position, row in enumerate(result) for ref in _list_children(row)):
            order = sort_topologically(result)
            result = [result[position] for position in order]
        return result

    def _select_headers(self, result: list[Row], origins: list[int]) -> None:
        """Let kinds adapt the headers of their nodes to the leaves that are selected."""
        for position, row in enumerate(result):
            kind = KINDS.get(row["kind"])
            if kind is not None and kind.select is not None:
                paths = (_list_leaf_keys(self.rows, origins[position]), _list_leaf_keys(result, position))
                row["meta"] = kind.select(row["meta"], *paths)

    def _select_children(
        self, row: Row, group: str, path: tuple[str, ...], whole: bool
    ) -> list[tuple[tuple[str, ...], str, object]]:
        """Return key path, key and reference of the children that are selected, or have selected ones below them."""
        hidden = group == "members" or has_leaf_kind(row)
        children = [(path if hidden else (*path, key), key, ref) for key, ref in row[group]]
        self.found.update(path for path, _, _ in children if path in self.wanted)
        if whole:
            return children
        children = [child for child in children if child[0] in self.ranks]
        return sorted(children, key=lambda child: self.ranks[child[0]])


def _list_leaf_keys(rows: list[Row], root: int) -> list[tuple[str, ...]]:
    """Return the key paths of the leaves below a node, in the order in which ``walk_levels`` visits them in a collection."""
    result: list[tuple[str, ...]] = []

    def list_level(nodes: list[Row], path: tuple[str, ...]) -> Iterator[tuple[list[Row], tuple[str, ...]]]:
        while any(row["members"] for row in nodes):
            nodes = [member for row in nodes for member in [rows[i] for _, i in row["members"]] or [row]]
        entries = [dict(row["entries"]) for row in nodes if not has_leaf_kind(row)]
        # A lazy stack has the keys that all members have.
        for key, ref in entries[0].items() if entries else ():
            if all(key in other for other in entries):
                if isinstance(ref, list):
                    result.append((*path, key))
                else:
                    yield [rows[other[key]] for other in entries], (*path, key)

    visit(list_level, [rows[root]], ())
    return result


def _list_children(row: Row) -> list[int]:
    return [ref for _, ref in chain(row["entries"], row["members"]) if isinstance(ref, int)]


def _renumber(encoded: Encoded, rows: list[Row]) -> Encoded:
    """Return a table of these rows with only the leaves and values that they refer to."""
    leaves: dict[int, int] = {}
    values: dict[int, int] = {}
    for row in rows:
        for group in ("entries", "members"):
            row[group] = [
                [key, [leaves.setdefault(ref[0], len(leaves))] if isinstance(ref, list) else ref]
                for key, ref in row[group]
            ]
        row["values"] = [[name, values.setdefault(ref, len(values))] for name, ref in row["values"]]
    return Encoded(rows, [encoded.leaves[i] for i in leaves], [encoded.values[i] for i in values])


def has_leaf_kind(row: Row) -> bool:
    """Return True if a row is of a kind that users see as one leaf."""
    kind = KINDS.get(row["kind"])
    return kind is not None and kind.is_leaf


def decode_table(encoded: Encoded, leaves: list[Any], where: str, *, strict: bool = True) -> object:
    """Build the collection of a table from :func:`load_table`, with the leaves of its places.

    With ``strict`` False, a tensorclass that is not defined becomes the collection that it holds.

    Raises:
        FormatError: the table does not describe a collection, or contradicts the leaves; the message begins with ``where``.

    >>> from td_core.spi import encode
    >>> header = dump_table(encode(TensorDict({"a": 1, "s": {"b": 2}})), ["x", "y"])
    >>> table = select_keys(load_table(header, "data.bin"), "s", "data.bin")
    >>> decode_table(table, [torch.tensor(5)], "data.bin")["s", "b"]
    tensor(5)
    """
    try:
        values = [join(plain, types) for plain, types in encoded.values]
    except (TypeError, ValueError) as error:
        raise FormatError(f"{where}: the values of its header are damaged: {error!r}") from error
    nodes = encoded.nodes if strict else _without_undefined_classes(encoded.nodes)
    try:
        return decode(replace(encoded, nodes=nodes, leaves=leaves, values=values))
    except TensorDictError as error:
        cls = type(error) if isinstance(error, (FormatError, MissingPluginError)) else FormatError
        hint = ""
        if strict and nodes is not _without_undefined_classes(nodes):
            hint = "; import the module that defines the class first, or pass strict=False for a TensorDict"
        raise cls(f"{where}: {error}{hint}") from error


def _without_undefined_classes(rows: list[Row]) -> list[Row]:
    """Return the rows with those of undefined tensorclasses replaced by what they hold; the list itself if there are none."""
    result = list(rows)
    undefined = False
    for position in range(len(rows) - 1, -1, -1):  # a child is replaced before its parent
        row = result[position]
        if [name for name, _ in row["members"]] == ["_tensordict"] and KINDS.get(row["kind"]) is None:
            undefined, result[position] = True, result[row["members"][0][1]]
    return result if undefined else rows


def describe_table(encoded: Encoded, name: str, describe_leaf: Callable[[str, object], Tree]) -> Tree:
    """Return the tree of a table from :func:`load_table`; ``describe_leaf`` takes the key and the place of a leaf.

    >>> from td_core import Tree
    >>> from td_core.spi import encode
    >>> table = load_table(dump_table(encode(TensorDict({"a": [1, 2]})), ["array 0"]), "data.bin")
    >>> print(describe_table(table, "data.bin", lambda key, place: Tree(key, "leaf", [2], "torch.int64", 16)))
    data.bin: TensorDict [], 16 bytes
        a: leaf [2] torch.int64, 16 bytes
    """
    trees = [_describe_node(row, encoded.values) for row in encoded.nodes]
    trees[0].name = name
    for row, tree in zip(reversed(encoded.nodes), reversed(trees)):  # children before their parents
        for key, ref in chain(row["entries"], row["members"]):
            if isinstance(ref, list):
                child = describe_leaf(key, encoded.leaves[ref[0]])
            else:
                child = trees[ref]
                child.name = key
            tree.children[key] = child
            tree.nbytes += child.nbytes
    return trees[0]


def _describe_node(row: Row, pairs: list[object]) -> Tree:
    size = row["meta"].get("batch_size")
    found = {
        name: pairs[ref][0] for name, ref in row["values"] if isinstance(pairs[ref], list) and pairs[ref]
    }
    shape = size if isinstance(size, list) else None
    return Tree("", str(row.get("class") or row["kind"]), shape, provider=row.get("from"), values=found)


def get_most_nodes(nbytes: int) -> int:
    """Return how many nodes the header of a save of some bytes can describe.

    >>> get_most_nodes(300), get_most_nodes(1_000_000)
    (10000, 1000000)
    """
    return max(int(os.environ.get(MOST_NODES, _MOST_NODES)), nbytes)


def refuse_nodes(where: str, most: float) -> FormatError:
    """Build the error for a header that describes too many nodes."""
    return FormatError(
        f"{where}: its header describes more than {most} nodes and leaves, which a file of its size cannot hold; if you trust "
        f"it, set the environment variable {MOST_NODES} to a larger number"
    )
