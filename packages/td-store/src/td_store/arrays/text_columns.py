"""Text columns: values with one string for each element of a batch, which formats store as arrays of strings.

The table of a save has a :class:`StoredText` in the place of such a value, and its header has the field ``texts``: for each array
the position of the value, its shape, and the positions of the elements that are None. In the array they are empty strings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from td_core.errors import FormatError
from td_core.spi import Encoded, load_table

from .array_rows import Row, Rows
from .places import list_names, read_shape

#: The kind of values with one element for each element of the batch.
_KIND = "NonTensorStack"


class StoredText(list[object]):
    """A value of a table, a pair as ``split_value`` returns it, whose strings are in an array and were not read.

    Attributes:
        name: name of the array.
        shape: its shape.
        missing: positions of the elements that are None, in a flat array.

    >>> StoredText("name", (3,), [1]).join(["a", "", "c"])
    [['a', None, 'c'], None]
    """

    def __init__(self, name: str, shape: Sequence[int], missing: Sequence[int] = ()) -> None:
        super().__init__([None, None])
        self.name, self.shape, self.missing = name, tuple(shape), list(missing)

    def join(self, strings: Sequence[str]) -> list[object]:
        """Return the pair with the strings of the array, which has one for each element."""
        items: list[object] = list(strings)
        for position in self.missing:
            # Another program can have written a string there.
            items[position] = items[position] or None
        return [items, None]


@dataclass(slots=True)
class TextColumn:
    """An array of strings to write.

    Attributes:
        shape: its shape.
        strings: its elements, one after the other.
        batch_names: names of its dims; None for a dim without a name.
        path: keys of the array, without those of hidden members.
    """

    shape: tuple[int, ...]
    strings: list[str]
    batch_names: list[str | None] = field(default_factory=list)
    path: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return all strings as bytes, for a checksum."""
        return "\0".join(self.strings).encode()


def take_texts(
    rows: Rows, values: list[Any], choose: Callable[[int], str], known: Sequence[object] = ()
) -> dict[str, TextColumn]:
    """Replace the text columns in the values of a table by :class:`StoredText`, and return them by the names of their arrays.

    Args:
        rows: the nodes of the table.
        values: its values, which are changed.
        choose: takes the position of a node, and returns a free name for its array, or one that is empty to leave the value.
        known: values to leave as they are.
    """
    left = {id(pair) for pair in known}
    columns: dict[str, TextColumn] = {}
    for position, row in enumerate(rows):
        if row["kind"] != _KIND or [name for name, _ in row["values"]] != ["data"]:
            continue
        ((_, place),) = row["values"]
        pair = values[place]
        strings = None if isinstance(pair, StoredText) or id(pair) in left else _list_strings(row, pair)
        if strings is None or not (name := choose(position)):
            continue
        shape = tuple(row["meta"]["batch_size"])
        missing = [i for i, text in enumerate(strings) if text is None]
        values[place] = StoredText(name, shape, missing)
        labels = list(row["meta"].get("names") or [None] * len(shape))
        columns[name] = TextColumn(shape, [text or "" for text in strings], labels)
    return columns


def _list_strings(row: Row, pair: Sequence[object]) -> list[str | None] | None:
    """Return the strings of a value, one after the other, or None if an array cannot hold it."""
    items, types = pair
    size = row["meta"].get("batch_size")
    if types is not None or not size or not isinstance(items, list) or len(items) != math.prod(size):
        return None
    kinds = {*map(type, items)}
    return items if str in kinds <= {str, type(None)} and _can_hold(items) else None


def _can_hold(items: list[str | None]) -> bool:
    """Return True if arrays of strings hold some: those of HDF5 end at a NUL, and UTF-8 has no surrogates."""
    text = "".join(item for item in items if item is not None)
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def add_texts(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header with the field ``texts``, if some of its values are in arrays."""
    stored = [(i, pair) for i, pair in enumerate(header["values"]) if isinstance(pair, StoredText)]
    if not stored:
        return header
    return {**header, "texts": {pair.name: [i, list(pair.shape), pair.missing] for i, pair in stored}}


def load_array_table(header: object, where: str) -> Encoded:
    """Return the table of a header as :func:`td_core.spi.load_table` does, with :class:`StoredText` for text columns.

    Raises:
        FormatError: the header is damaged, or of a later version.
    """
    table = load_table(header, where)
    try:
        texts = header.get("texts", {}) if isinstance(header, dict) else {}
        for name, (place, shape, missing) in texts.items():
            count = math.prod(read_shape(shape))
            if type(place) is not int or table.values[place] != [None, None] or place < 0:
                raise ValueError(f"the text {name!r:.100} is in the place of {place!r:.100}")
            if not all(type(i) is int and 0 <= i < count for i in missing):
                raise ValueError(f"the text {name!r:.100} lacks the elements {missing!r:.100}")
            table.values[place] = StoredText(name, shape, missing)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: the texts of its header are damaged: {error!r}") from error
    return table


def list_texts(table: Encoded) -> dict[str, StoredText]:
    """Return the text columns of a table by the names of their arrays."""
    return {pair.name: pair for pair in table.values if isinstance(pair, StoredText)}


def list_array_names(table: Encoded) -> list[str]:
    """Return the names of the arrays of the leaves and text columns of a table, each once."""
    names = [name for place in table.leaves for name in list_names(place)]
    return list(dict.fromkeys([*names, *list_texts(table)]))


def read_texts(table: Encoded, read: Callable[[StoredText], Sequence[str]]) -> Encoded:
    """Return a table with the strings of its text columns; ``read`` returns those of the array of one."""
    if not list_texts(table):
        return table
    values = [pair.join(read(pair)) if isinstance(pair, StoredText) else pair for pair in table.values]
    return replace(table, values=values)


def check_text(text: StoredText, shape: Sequence[int], where: str) -> None:
    """Raise FormatError if the array of a text column has another shape than the header says."""
    if tuple(shape) != text.shape:
        raise FormatError(
            f"{where}: the array {text.name!r} has the shape {list(shape)}; its header has {list(text.shape)}"
        )


def find_old_names(before: Encoded, after: Encoded) -> Mapping[int, str]:
    """Return the names that text columns of one table had in an earlier one, by the positions of their nodes, if they fit."""
    held: dict[tuple[str, ...], StoredText] = {}
    for path, row in zip(before.node_paths(), before.nodes, strict=True):
        for _, place in row["values"]:
            if isinstance(pair := before.values[place], StoredText):
                held[path] = pair
    if not held:
        return {}
    used = list_texts(after)
    return {
        position: held[path].name
        for position, (path, row) in enumerate(zip(after.node_paths(), after.nodes, strict=True))
        if path in held
        and held[path].name not in used
        and list(held[path].shape) == row["meta"].get("batch_size")
    }
