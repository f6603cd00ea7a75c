"""The header of tensordict, ``"tensordict"``, beside ours: build it from the table of nodes, and read it into one.

Its JSON is ``{"version": 1, "root": LEVEL}``. A level has ``batch_size``, ``names``, ``keys``, and for a lazy stack
``stack_dim``, for a tensorclass ``class``. A key has ``{"tensor": name}``, ``{"non_tensor": value}`` or ``{"td": LEVEL}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from td_core import kinds
from td_core.errors import FormatError
from td_core.spi import Encoded, show_path
from td_store.arrays import Stack, TableBuilder, get_most_nodes

from ._format import Array

#: Beyond this nesting tensordict, and the JSON encoder, fail with a RecursionError.
_MAX_DEPTH = 100


class _NoFormError(Exception):
    """The header has no form for a part of a collection."""


def describe(
    header: Mapping[str, object], leaves: list[Tensor], stacks: dict[int, Stack]
) -> dict[str, Any] | None:
    """Build the header of tensordict from the ``td`` header, or return None if it cannot describe the collection."""
    try:
        return {"version": 1, "root": _Writer(header, leaves, stacks).write_level(0, None, 0)}
    except _NoFormError:
        return None


class _Writer:
    def __init__(self, header: Mapping[str, Any], leaves: list[Tensor], stacks: dict[int, Stack]) -> None:
        self.rows, self.places, self.values = header["nodes"], header["leaves"], header["values"]
        self.leaves, self.stacks = leaves, stacks

    def write_level(
        self, position: int, stacked: tuple[int, int, str | None] | None, depth: int
    ) -> dict[str, Any]:
        """Describe a node. In a lazy stack, ``stacked`` has the stack dim, the number of members and the dim name."""
        row = self.rows[position]
        kind, members = row["kind"], row["members"]
        if depth > _MAX_DEPTH:
            raise _NoFormError
        if [name for name, _ in members] == ["_tensordict"] and ":" in kind and not stacked:
            level = self.write_level(members[0][1], None, depth)
            if "class" in level:
                raise _NoFormError
            keys = level.pop("keys")
            return {**level, "class": f"<class '{kind.replace(':', '.')}'>", "keys": keys}
        if kind == "TensorDictParams" and not stacked:
            return self.write_level(members[0][1], None, depth)
        if kind == "LazyStackedTensorDict" and not stacked and members and not row["values"]:
            meta = row["meta"]
            return self.write_level(
                members[0][1], (meta["stack_dim"], len(members), meta.get("stack_dim_name")), depth
            )
        if kind != "TensorDict":
            raise _NoFormError
        return self.write_dense(row, stacked, depth)

    def write_dense(
        self, row: Any, stacked: tuple[int, int, str | None] | None, depth: int
    ) -> dict[str, Any]:
        size, names = list(row["meta"]["batch_size"]), row["meta"].get("names")
        level: dict[str, Any] = {"batch_size": size, "names": names}
        if stacked is not None:
            dim, count, name = stacked
            if names is not None or name is not None:
                names = list(names or [None] * len(size))
                names.insert(dim, name)
            size.insert(dim, count)
            level.update(batch_size=size, names=names, stack_dim=dim)
        keys = level["keys"] = {}
        for key, ref in row["entries"]:
            keys[key] = self.write_entry(ref, stacked, depth)
        return level

    def write_entry(
        self, ref: Any, stacked: tuple[int, int, str | None] | None, depth: int
    ) -> dict[str, Any]:
        if isinstance(ref, list):
            place = self.places[ref[0]]
            if stacked is not None and ref[0] in self.stacks:
                return {"tensor": place[0]}
            if stacked is not None or not isinstance(place, str):
                raise _NoFormError
            return {"tensor": place}
        child = self.rows[ref]
        if stacked is None:
            if child["kind"] == "NonTensorData" and [name for name, _ in child["values"]] == ["data"]:
                plain, types = self.values[child["values"][0][1]]
                if types is not None:
                    raise _NoFormError
                return {"non_tensor": plain}
            if child["kind"] == "UnbatchedTensor":
                return {**self.write_entry(child["entries"][0][1], None, depth), "unbatched": True}
        return {"td": self.write_level(ref, stacked, depth + 1)}


def read_reference(header: object, where: str, arrays: Mapping[str, Array]) -> Encoded:
    """Convert the header of tensordict to a table of nodes, with names of tensors as leaves; FormatError if it is damaged."""
    if not isinstance(header, dict) or type(header.get("version")) is not int or header["version"] != 1:
        version = header.get("version") if isinstance(header, dict) else header
        raise FormatError(f"{where}: the tensordict header has the version {version!r:.100}; expected 1")
    reader = _Reader(where, arrays)
    try:
        reader.add_level(header["root"], None)
        while reader.todo:
            reader.add_next()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{where}: the tensordict header is damaged at {show_path(reader.path)}: {error!r}"
        ) from error
    return reader.table


class _Reader(TableBuilder):
    """Builds the rows of a table without recursion."""

    def __init__(self, where: str, arrays: Mapping[str, Array]) -> None:
        # A stack of many members is described in few bytes, so they are compared with the tensors that have their rows.
        super().__init__(where, get_most_nodes(sum(array.nbytes for array in arrays.values())))
        self.arrays = arrays
        #: Levels to read: position of their row, level, selected member of a stack, key path.
        self.todo: list[tuple[int, Any, tuple[int, int] | None, tuple[str, ...]]] = []
        self.path: tuple[str, ...] = ()

    def add_level(self, level: Any, selected: tuple[int, int] | None) -> int:
        """Add the row of a level without its entries, and of the members or the inner collection that it has."""
        if selected is None and level.get("class") is not None:
            outer = self.add_row(_read_class(level["class"]), {})
            inner = self.add_level({**level, "class": None}, None)
            self.rows[outer]["members"].append(["_tensordict", inner])
            return outer
        size = _read_sizes(level["batch_size"])
        names = level.get("names")
        dim = level.get("stack_dim")
        if selected is None and dim is not None:
            count = size[dim]
            self.check_rows(level, dim, count)
            meta: dict[str, Any] = {"stack_dim": dim}
            if names is not None and names[dim] is not None:
                meta["stack_dim_name"] = names[dim]
            if not count:
                meta["batch_size"] = size
            stack = self.add_row("LazyStackedTensorDict", meta)
            for i in range(count):
                self.rows[stack]["members"].append([str(i), self.add_level(level, (dim, i))])
            return stack
        if selected is not None:
            size = [*size[: selected[0]], *size[selected[0] + 1 :]]
            names = None if names is None else [*names[: selected[0]], *names[selected[0] + 1 :]]
        meta = {"batch_size": size}
        if names is not None and any(name is not None for name in names):
            meta["names"] = names
        position = self.add_row("TensorDict", meta)
        self.todo.append((position, level, selected, self.path))
        return position

    def check_rows(self, level: Any, dim: Any, count: int) -> None:
        """Raise ValueError if a tensor of a stack does not have the rows of its members."""
        for key, entry in level["keys"].items():
            array = self.arrays.get(entry["tensor"]) if "tensor" in entry else None
            if array is not None and array.shape[dim : dim + 1] != (count,):
                raise ValueError(
                    f"a stack of {count} along dim {dim} has {key!r} of the shape {list(array.shape)}"
                )

    def add_next(self) -> None:
        """Add the entries of one level."""
        position, level, selected, path = self.todo.pop()
        size = self.rows[position]["meta"]["batch_size"]
        for key, entry in level["keys"].items():
            self.path = (*path, key)
            ref: Any
            if "td" in entry:
                ref = self.add_level(entry["td"], selected)
            elif "tensor" in entry:
                name = entry["tensor"]
                if not isinstance(name, str):
                    raise TypeError(f"the name of a tensor is {name!r}")
                ref = self.add_leaf(name if selected is None else [name, *selected])
                if entry.get("unbatched"):
                    ref = self.add_unbatched(size, ref)
            else:
                ref = self.add_value("NonTensorData", size, [entry["non_tensor"], None])
            self.rows[position]["entries"].append([key, ref])


def _read_sizes(sizes: object) -> list[int]:
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise TypeError(f"its batch_size is {sizes!r}")
    return list(sizes)


def _read_class(name: object) -> str:
    """Return the tag of the kind that a class name means; the name itself if no such class is defined."""
    if not isinstance(name, str):
        raise TypeError(f"its class is {name!r}")
    dotted = name.removeprefix("<class '").removesuffix("'>")
    parts = dotted.split(".")
    # The module may end at each of the dots.
    tags = (f"{'.'.join(parts[:i])}:{'.'.join(parts[i:])}" for i in range(len(parts) - 1, 0, -1))
    return next((tag for tag in tags if kinds.find(tag) is not None), dotted)


def build_foreign_table(arrays: Mapping[str, Array]) -> Encoded:
    """Build a table of nodes for a file without one: the names are split at dots, except where that would clash.

    A name is one key if one of its parts is empty, or if another name is the path to it.
    """
    names = list(arrays)
    split = {name: _split_name(name) for name in names}
    leaves = set(split.values())
    paths: list[tuple[str, ...]] = []
    for name in names:
        path = split[name]
        clash = any(path[:length] in leaves for length in range(1, len(path)))
        paths.append((name,) if clash else path)
    builder = TableBuilder()
    known: dict[tuple[str, ...], int] = {(): builder.add_row("TensorDict", {"batch_size": []})}
    for name, path in zip(names, paths, strict=True):
        for length in range(1, len(path)):
            if path[:length] not in known:
                known[path[:length]] = builder.add_row("TensorDict", {"batch_size": []})
                entries = builder.rows[known[path[: length - 1]]]["entries"]
                entries.append([path[length - 1], known[path[:length]]])
        builder.rows[known[path[:-1]]]["entries"].append([path[-1], builder.add_leaf(name)])
    return builder.table


def _split_name(name: str) -> tuple[str, ...]:
    parts = tuple(name.split("."))
    return parts if all(parts) else (name,)
