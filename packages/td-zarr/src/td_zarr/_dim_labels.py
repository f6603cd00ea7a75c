"""What other programs see of the structure: names of dims, and the levels and values in the form of tensordict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from td_store.arrays import ArrayPlan, PlannedArray, StoredText, TextColumn

from ._array_documents import STACK, join_names

#: The attributes in which tensordict describes a level, and a value.
LEVEL, VALUE = "__tensordict__", "__tensordict_non_tensor__"


class Level(TypedDict, total=False):
    """The attribute in which tensordict describes a level."""

    batch_size: list[int]
    version: int
    names: list[str | None]


#: What stacks a node: the stack dim, the number of members, and the name of the dim.
Stacked = tuple[int, int, str | None]


def name_dims(arrays: Mapping[str, PlannedArray | TextColumn]) -> dict[str, list[str]]:
    """Return the names of the dims of each array, all different, so that xarray opens the group.

    A batch dim without a name is ``batch_0``; other dims have the name of the array: ``obs_1``. In a group, dims of one name
    have one size.
    """
    result = {}
    sizes: dict[tuple[str, str], int] = {}
    for name, array in arrays.items():
        group, _, last = name.rpartition("/")
        own = [f"{last}_{dim}" for dim in range(len(array.shape))]
        batch = array.batch_names[: len(own)]
        wanted = [label or f"batch_{dim}" for dim, label in enumerate(batch)]
        labels = [*wanted, *own[len(wanted) :]]
        if len(set(labels)) < len(labels) or any(
            sizes.get((group, label), size) != size for label, size in zip(labels, array.shape)
        ):
            labels = own
        sizes.update(((group, label), size) for label, size in zip(labels, array.shape))
        result[name] = labels
    return result


def _find_stacked(plan: ArrayPlan) -> dict[int, Stacked]:
    """Return what stacks the nodes that are lazy stacks of stacked leaves, or below one, by position."""
    stacked: dict[int, Stacked] = {}
    for position, row in enumerate(plan.header["nodes"]):
        if position in plan.homes:
            meta = row["meta"]
            stacked[position] = meta["stack_dim"], len(row["members"]), meta.get("stack_dim_name")
        if position in stacked:
            refs = [ref for _, ref in (*row["entries"], *row["members"]) if isinstance(ref, int)]
            stacked.update(dict.fromkeys(refs, stacked[position]))
    return stacked


def describe_levels(plan: ArrayPlan) -> dict[str, dict[str, Level]]:
    """Return the attributes of the groups of a plan by name, with batch sizes and names as tensordict has them.

    A lazy stack whose leaves are stacked is described as the dense level that its arrays are. A level has no batch size there if
    an array below it does not start with that, such as the values of a nested tensor.
    """
    stacked = _find_stacked(plan)
    result: dict[str, dict[str, Level]] = {"": {}}
    for position, row in enumerate(plan.header["nodes"]):
        path = plan.nodes[position]
        name = join_names(path) if path else ""
        if name in plan.arrays or (row["values"] and not row["entries"] and not row["members"]):
            continue
        attributes = result.setdefault(name, {})
        if row["kind"] == "TensorDict" and LEVEL not in attributes:
            attributes[LEVEL] = _describe_level(row["meta"], stacked.get(position))
    for name, array in plan.arrays.items():
        ends = [0, *(position for position, char in enumerate(name) if char == "/")]
        for end in ends:  # of the names of the groups that the array is in
            level = result.get(name[:end], {}).get(LEVEL)
            if level is not None and list(array.shape[: len(level["batch_size"])]) != level["batch_size"]:
                del result[name[:end]][LEVEL]
    return result


def _describe_level(meta: Mapping[str, Any], stacked: Stacked | None) -> Level:
    size, names = list(meta["batch_size"]), meta.get("names")
    if stacked is not None:
        dim, count, name = stacked
        if names is not None or name is not None:
            names = list(names or [None] * len(size))
            names.insert(dim, name)
        size.insert(dim, count)
    level: Level = {"batch_size": size, "version": 1}
    if names is not None:
        level["names"] = names
    return level


def describe_values(plan: ArrayPlan) -> dict[str, tuple[dict[str, object], bytes]]:
    """Return the attributes and the JSON of the values that tensordict can read, by the name of an array for each."""
    result = {}
    for position, row in enumerate(plan.header["nodes"]):
        names = [name for name, _ in row["values"]]
        if row["kind"] not in ("NonTensorData", "NonTensorStack") or names != ["data"]:
            continue
        pair = plan.header["values"][row["values"][0][1]]
        if isinstance(pair, StoredText):  # tensordict reads its array
            continue
        plain, types = pair
        name = join_names(plan.nodes[position])
        size = row["meta"].get("batch_size")
        if types is not None or name in plan.arrays or (row["kind"] == "NonTensorStack" and len(size) != 1):
            continue
        attributes: dict[str, object] = {VALUE: {"encoding": "json"}}
        if row["kind"] == "NonTensorStack":
            attributes[STACK] = size
        result[name] = attributes, json.dumps(plain).encode()
    return result
