"""Checkpoints: a mapping with modules, optimizers, collections, tensors and values that is saved and loaded as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from .._encode.node_kinds import KINDS
from .._encode.records import Record
from .._encode.treedefs import Tree, flatten_checkpoint
from .._tree.defaults import show_path
from .._tree.node import Core
from ..errors import CodecError, KeyMismatchError, StructureError
from .shards import list_shards

#: The objects whose state dict has the same keys in every state; others may have more of them later.
_FIXED = (nn.Module, LRScheduler, Core)

_Path = tuple[object, ...]


class _Target(NamedTuple):
    """An object to load, its key path, and its state dict in the checkpoint."""

    path: _Path
    target: Tree
    saved: Tree


def make_checkpoint(tree: Tree) -> Core:
    """Return a node of the tensors, collections and values of a mapping, with the state dicts of modules and optimizers.

    Raises:
        CodecError: a value cannot be stored without a pickle; the message has its key path.
    """
    treedef, entries = flatten_checkpoint(tree)
    record = Record({"batch_size": []}, entries, values={"treedef": treedef})
    made: Core = KINDS["Checkpoint"].node_of(record)
    return made


def load_into(tree: Tree, into: Tree, shown: str) -> Tree:
    """Load the state dicts of a checkpoint into modules and other objects, and return the rest of the checkpoint.

    All keys and shapes are checked before the first of them is loaded.

    Raises:
        CodecError: parameters of an object are sharded.
        KeyMismatchError: a key is missing, or the checkpoint has an unexpected one.
        StructureError: a shape differs.
    """
    targets: list[_Target] = []
    rest = _pair(tree, into, (), targets, shown)
    for item in targets:
        _check(item, shown)
    for item in targets:
        item.target.load_state_dict(item.saved)
    return rest


def _pair(tree: Tree, into: Tree, path: _Path, targets: list[_Target], shown: str) -> Tree:
    """Append the objects in ``into`` with their state dicts, and return what of the tree is left."""
    if not isinstance(tree, Mapping):
        raise StructureError(
            f"{_locate(shown, path)} is not a mapping; got a {type(tree).__name__}"
            + ("" if path else ": load_() of a collection loads a collection into it")
        )
    missing = [key for key in into if key not in tree]
    if missing:
        raise KeyMismatchError(
            f"{_locate(shown, path)} has no {_join(missing)}; its keys: {_join(tree) or 'none'}"
        )
    rest = {key: value for key, value in tree.items() if key not in into}
    for key, target in into.items():
        below = (*path, key)
        if hasattr(target, "load_state_dict"):
            saved = tree[key]
            saved = saved.state_dict() if isinstance(saved, Core) else saved
            if not isinstance(saved, Mapping):
                raise StructureError(
                    f"{_locate(shown, below)} is not a state dict; got a {type(saved).__name__}"
                )
            targets.append(_Target(below, target, saved))
        elif isinstance(target, Mapping):
            if left := _pair(tree[key], target, below, targets, shown):
                rest[key] = left
        else:
            raise TypeError(
                f"into={{...}} has objects with load_state_dict(), or mappings of them; {show_path(below)} is a "
                f"{type(target).__name__}: read it from the result of load()"
            )
    return rest


def _check(item: _Target, shown: str) -> None:
    """Raise an error unless an object can load its state dict, as far as the present state of the object shows."""
    path, target, saved = item
    where, wanted = _locate(shown, path), target.state_dict()
    if isinstance(target, _FIXED):
        _check_keys(where, saved, wanted)
    if list_shards(_list_leaves(target, wanted)):
        raise CodecError(
            f"{where} cannot be loaded into sharded parameters: load it without into=, and call set_model_state_dict() or "
            "set_optimizer_state_dict() of torch.distributed.checkpoint.state_dict with full_state_dict=True"
        )
    _check_groups(where, saved, wanted)
    _check_shapes(where, saved, wanted)


def _check_keys(where: str, saved: Tree, wanted: Tree) -> None:
    missing, unexpected = ([key for key in a if key not in b] for a, b in ((wanted, saved), (saved, wanted)))
    if missing or unexpected:
        parts = [f"misses {_join(missing)}"] if missing else []
        parts += [f"has the unexpected {_join(unexpected)}"] if unexpected else []
        raise KeyMismatchError(f"{where} {' and '.join(parts)}; nothing was loaded")


def _list_leaves(target: Tree, wanted: Tree) -> Iterator[Tensor]:
    """Yield the tensors that are directly in the state dict of an object, and the parameters of an optimizer."""
    yield from (value for value in wanted.values() if isinstance(value, Tensor))
    for group in getattr(target, "param_groups", ()):
        yield from group["params"]


def _check_groups(where: str, saved: Tree, wanted: Tree) -> None:
    """Raise StructureError if two state dicts of optimizers have different groups of parameters."""
    if "param_groups" not in wanted:
        return
    if "param_groups" not in saved:
        raise KeyMismatchError(f"{where} misses 'param_groups'; nothing was loaded")
    sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (saved, wanted)]
    if sizes[0] != sizes[1]:
        raise StructureError(
            f"{where} has groups of {sizes[0]} parameters, and the optimizer of {sizes[1]}; nothing was loaded"
        )


def _check_shapes(where: str, saved: Tree, wanted: Tree) -> None:
    """Raise StructureError if two tensors at the same keys of nested mappings have different shapes."""
    for key, value in wanted.items():
        other = saved.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            _check_shapes(f"{where}[{key!r}]", other, value)
        elif isinstance(value, Tensor) and isinstance(other, Tensor):
            if is_lazy(value) or value.is_nested or other.is_nested or value.shape == other.shape:
                continue
            raise StructureError(
                f"{where}[{key!r}] has the shape {list(other.shape)}, and the target {list(value.shape)}; nothing was loaded"
            )


def _locate(shown: str, path: _Path) -> str:
    return f"the checkpoint {shown}" + "".join(f"[{key!r}]" for key in path)


def _join(keys: Tree) -> str:
    return f"{', '.join(map(repr, keys)):.500}"
