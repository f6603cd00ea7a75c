"""The layout of a save: a group for each node, a dataset for each leaf, and the header that describes the collection."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from td_core.errors import FormatError
from td_core.spi import STORABLE, Encoded
from td_store.arrays import ArrayPlan, StoredText, list_names, load_array_table, make_array_plan

from ._datasets import NATIVE, Array, escape_key, list_arrays

KeyPath = tuple[str, ...]


@dataclass(slots=True)
class Layout:
    """What a save writes.

    Attributes:
        plan: the arrays, by the names of their datasets.
        groups: name of the group of each node; None for a node without one. That of the root can be empty.
    """

    plan: ArrayPlan
    groups: list[str | None]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the nodes."""
        rows: list[dict[str, Any]] = self.plan.header["nodes"]
        return rows

    def make_header(self, hashes: dict[str, object] | None = None) -> dict[str, Any]:
        """Return the header in the attributes of the root."""
        header = {key: value for key, value in self.plan.header.items() if key != "check"}
        header["groups"] = self.groups
        header["arrays"] = list_arrays(self.plan.arrays)
        if hashes is not None:
            header["hashes"] = hashes
        return header

    def list_links(self) -> Iterator[tuple[str, int | None]]:
        """Yield the name of each link in the order of the keys, with the position of its node; None for a dataset."""
        found: set[str] = set()
        for row in self.rows:
            for group in ("entries", "members"):
                for _, ref in row[group]:
                    names: list[str | None] = [*self._list_datasets(ref)]
                    is_dataset = bool(names) or isinstance(ref, list)
                    for name in names if is_dataset else [self.groups[ref]]:
                        if name and name not in found and name != self.groups[0]:
                            found.add(name)
                            yield name, None if is_dataset else ref

    def _list_datasets(self, ref: int | list[int]) -> list[str]:
        """Return the names of the datasets of a leaf, or that of a text column."""
        header = self.plan.header
        if isinstance(ref, list):
            return list_names(header["leaves"][ref[0]])
        pairs = [header["values"][place] for _, place in self.rows[ref]["values"]]
        return [pair.name for pair in pairs if isinstance(pair, StoredText)]


def add_parents(names: Iterable[str]) -> set[str]:
    """Return names of links with those of the groups that they are in."""
    found = set(names)
    above = found
    while above:
        above = {name.rpartition("/")[0] for name in above} - found - {""}
        found |= above
    return found


def make_layout(data: object, *, blank: bool = False) -> Layout:
    """Plan a save, if ``blank`` without elements, and read no leaf; CodecError if a value or leaf cannot be stored."""
    return _make_layout(data, lambda path: "/".join(map(escape_key, path)), blank)


def choose_name(group: str, key: str, taken: Container[str]) -> str:
    """Return the name of a link for a key in a group, with a number if it is taken."""
    base = f"{group}/{escape_key(key)}" if group else escape_key(key)
    name, number = base, 1
    while name in taken:
        name, number = f"{base}#{number}", number + 1
    return name


def make_entry_layout(data: object, key: str, group: str, taken: Container[str]) -> Layout:
    """Plan to write an entry into a group of a file; ``data`` has it as its only one, ``taken`` the names of all links."""
    name = choose_name(group, key, taken)

    def join(path: KeyPath) -> str:
        # The first part is the key, with an ending if the leaf has several arrays.
        return "/".join([name + path[0][len(key) :], *map(escape_key, path[1:])]) if path else group

    return _make_layout(data, join, False)


def _make_layout(data: object, join: Callable[[KeyPath], str], blank: bool) -> Layout:
    plan = make_array_plan(
        data, NATIVE, lambda path: join(path) if path else "data", blank=blank, separator="/", texts=True
    )
    groups: list[str | None] = []
    for path, row in zip(plan.nodes, plan.header["nodes"], strict=True):
        has_group = not path or row["entries"] or row["members"] or not row["values"]
        # Keys that are escaped can give a dataset the name of a group.
        is_taken = any(join(path[:length]) in plan.arrays for length in range(1, len(path) + 1))
        groups.append(join(path) if has_group and not is_taken else None)
    return Layout(plan, groups)


def read_arrays(header: Mapping[str, Any], path: str) -> tuple[Encoded, dict[str, Array]]:
    """Return the table of a header, with places and groups, and dtype and shape by name; FormatError if it is damaged."""
    table = load_array_table(header, path)
    arrays: dict[str, Array] = {}
    try:
        for name, (dtype, shape) in header["arrays"].items():
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"the shape of {name!r} is {shape!r}")
            arrays[name] = Array(STORABLE[f"torch.{dtype}"], tuple(shape))
            if arrays[name].dtype not in NATIVE:
                raise ValueError(f"the dtype of {name!r} is {dtype!r}")
        names = {name for place in table.leaves for name in list_names(place)}
        if not names <= arrays.keys():
            raise ValueError(f"it lacks the datasets {sorted(names - arrays.keys())!r:.200}")
        if len(header["groups"]) != len(table.nodes):
            raise ValueError(f"it has {len(header['groups'])} groups")
        table.nodes = [
            {**row, "group": name} for row, name in zip(table.nodes, header["groups"], strict=True)
        ]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: the td header is damaged: {error!r}") from error
    return table, arrays
