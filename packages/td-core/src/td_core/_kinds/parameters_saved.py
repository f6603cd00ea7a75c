"""Roles and ties of the leaves of parameters, as a save records them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from .._functions.metadata import get_view_id
from .._tree.node import Core
from .._tree.roles import in_role, is_differentiable, role
from .._tree.walks import get_path, walk_levels
from ..errors import FormatError


def iter_slots(root: Core) -> Iterator[tuple[tuple[str, ...], Core, Tensor]]:
    """Yield (key path, node, leaf) per leaf; the leaves of a node come before those of its children."""
    for node, position, entries in walk_levels(root):
        path = get_path(position)
        for key, child in entries.items():
            if isinstance(child, Tensor):
                yield (*path, key), node, child


def get_roles(root: Core) -> str:
    """Return the roles of all leaves as a string, one letter per leaf; see :func:`role`."""
    return "".join(role(leaf) for _, _, leaf in iter_slots(root))


def list_unusual_roles(root: Core) -> dict[str, list[list[str]]]:
    """List the key paths of the leaves, by role, whose role does not follow from their dtype."""
    result: dict[str, list[list[str]]] = {}
    for path, _, leaf in iter_slots(root):
        if (letter := role(leaf)) != _get_usual_role(leaf):
            result.setdefault(letter, []).append([*path])
    return result


def set_unusual_roles(root: Core, unusual: Mapping[str, list[list[str]]]) -> None:
    """Convert each leaf to the role that :func:`list_unusual_roles` listed, or that follows from its dtype."""
    if not {*"pfbn-"} >= {*unusual}:
        raise FormatError(f"leaves of parameters have the roles {[*unusual]}")
    letters = {tuple(path): letter for letter, paths in unusual.items() for path in paths}
    made: dict[object, Tensor] = {}
    for path, node, leaf in list(iter_slots(root)):
        letter = letters.get(path) or _get_usual_role(leaf)
        # Leaves that map one file are one parameter, as before the save.
        place = (get_view_id(leaf), letter) if _has_memory(leaf) else path
        if place not in made:
            made[place] = in_role(leaf, letter)
        if made[place] is not leaf:
            node._set_child(path[-1], made[place])


def _has_memory(leaf: Tensor) -> bool:
    """Return True if a leaf has elements at an address, unlike a fake tensor."""
    is_real = type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_real and leaf.device.type != "meta" and leaf.numel() > 0


def _get_usual_role(leaf: Tensor) -> str:
    return "p" if is_differentiable(leaf) else "b"


def set_roles(root: Core, roles: str) -> None:
    """Convert each leaf to the role that :func:`get_roles` returned; FormatError if the roles do not match."""
    places = list(iter_slots(root))
    if len(places) != len(roles) or not {*"pfbn-"} >= {*roles}:
        raise FormatError(f"{len(places)} leaves of parameters have the roles {roles!r:.100}")
    for (path, node, leaf), letter in zip(places, roles):
        if (held := in_role(leaf, letter)) is not leaf:
            node._set_child(path[-1], held)


def list_tied(root: Core) -> list[list[list[str]]]:
    """List the key paths of each leaf that has several."""
    places: dict[int, list[list[str]]] = {}
    for path, _, leaf in iter_slots(root):
        places.setdefault(id(leaf), []).append([*path])
    return [paths for paths in places.values() if len(paths) > 1]


def tie_leaves(root: Core, tied: Sequence[Sequence[Sequence[str]]]) -> None:
    """Make the leaves at the key paths that :func:`list_tied` listed one leaf again, as far as they were loaded."""
    groups = {tuple(path): number for number, paths in enumerate(tied) for path in paths}
    first: dict[int, Tensor] = {}
    for path, node, leaf in list(iter_slots(root)):
        if path not in groups:
            continue
        held = first.setdefault(groups[path], leaf)
        if (held.shape, held.dtype) != (leaf.shape, leaf.dtype):
            raise FormatError(
                f"the leaf at {path!r} was tied to one of shape {tuple(held.shape)} and {held.dtype}"
            )
        if held is not leaf:
            node._set_child(path[-1], held)
