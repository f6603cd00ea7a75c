"""Work on trees of nodes that any kind can use: the defaults that walk, entries by key path, checks and their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.kernels import PLAIN
from ..errors import (
    BatchSizeError,
    CycleError,
    KeyMismatchError,
    KeyPathError,
    KeyThroughLeafError,
    StructureError,
)
from .dim_names import lift_names, set_batch_size
from .keys import suggest_keys
from .node import LEAF_KINDS, Child, Core, identity
from .walks import get_path, has_common_node, has_entries, list_holders, list_state_nodes, walk, walk_levels


class Defaults(Core):
    """The default implementations that walk the nodes below."""

    __slots__ = ()

    def _change_batch_size(self, batch_size: torch.Size) -> None:
        """Check that all leaves start with ``batch_size``, then store it here and in nested nodes with a shorter one."""
        ndim, default, is_named = len(batch_size), Defaults._change_batch_size, False
        if batch_size == self.batch_size[:ndim]:  # a prefix of the old batch size fits every entry
            set_batch_size(self, batch_size)
            return
        self._check_batch_size(batch_size)
        for node, _, entries in walk_levels(self):
            set_batch_size(node, batch_size)
            for key, child in list(entries.items()):
                if isinstance(child, Tensor):
                    del entries[key]
                    continue
                is_named = is_named or child._names is not None
                if child.batch_size[:ndim] == batch_size:
                    del entries[key]
                elif child._is_value or type(child)._change_batch_size is not default:
                    child._change_batch_size(batch_size)
                    del entries[key]
        if is_named:
            lift_names(self)

    def _check_batch_size(self, batch_size: torch.Size, path: tuple[str, ...] = ()) -> None:
        """Raise BatchSizeError unless the shape of every leaf starts with ``batch_size``."""
        ndim, default = len(batch_size), Defaults._check_batch_size
        for _, position, entries in walk_levels(self):
            for key, child in list(entries.items()):
                if isinstance(child, Tensor):
                    if get_lead(child, ndim) != batch_size:
                        raise BatchSizeError(
                            f"the batch size {list(batch_size)} does not fit: "
                            f"{show_path(path + get_path(position, key))} has shape {list(child.shape)}"
                        )
                elif child.batch_size[:ndim] == batch_size:
                    del entries[key]
                elif type(child)._check_batch_size is not default:
                    child._check_batch_size(batch_size, path + get_path(position, key))
                    del entries[key]


def get_tree_children(item: object) -> Sequence[Child]:
    """Return the children of a node, for a lazy stack the members; an empty list for a leaf or any other object."""
    return () if type(item) in PLAIN or not isinstance(item, Core) else item._tree_children()


def unwrap_entry(child: Any) -> Any:
    """Return the leaf that a node represents; any other entry unchanged."""
    return child._unwrap() if type(child) in LEAF_KINDS else child


def check_keys(node: Core, keys: Mapping[Any, object]) -> None:
    """Raise an error if a node, or a member of a lazy stack, cannot have an entry under one of the keys."""
    checked = None
    for holder in list_holders(node):
        schema = holder._schema
        if schema is not checked:  # thousands of members have one schema
            schema.check_keys(keys)
            checked = schema


def check_cycle(target: Core, value: Core, path: tuple[str, ...]) -> None:
    """Raise CycleError if ``value`` contains ``target`` or, for a lazy stack, if the part for a member contains that member."""
    inner = target._inner()
    below = list_state_nodes(value)
    for node in below:
        if node is inner:
            raise CycleError(
                f"cannot set {show_path(path)}: the value contains the collection it is set into"
            )
    if has_common_node(below, list_holders(inner)):
        for member, part in inner._zip_members(value):
            check_cycle(member, part, path)


def has_lazy_stack(root: Core) -> bool:
    """Return True if a tree contains a lazy stack."""
    return any(level._members_and_dim() is not None for level in walk(root))


def add_nested(node: Core, key: str, level: Any) -> None:
    """Store a new node under ``key``. If another thread has stored one concurrently, merge the entries into it."""
    result = node._add_child(key, level)
    if result is level:
        return
    if has_entries(result):
        result.update(level)
    else:
        node._set_child(key, level)


def get_lead(leaf: Tensor, ndim: int) -> torch.Size:
    """Return the ``ndim`` leading dims of a leaf. A strided nested tensor has no ``shape``, so use ``size(dim)``."""
    if leaf.is_nested and leaf.layout is torch.strided:
        return torch.Size([leaf.size(dim) for dim in range(min(ndim, leaf.ndim))])
    return leaf.shape[:ndim]


def get_data(leaf: Tensor) -> Tensor:
    """Return ``leaf.data``, which is detached from autograd."""
    return leaf.data


def clone_detached(leaf: Tensor) -> Tensor:
    """Return a clone of a leaf without its autograd history."""
    return leaf.detach().clone()


def is_aliasing(fn: Callable[[Tensor], Tensor]) -> bool:
    """Return True if ``fn`` returns leaves that share storage with the old ones, so that values must be shared too.

    >>> is_aliasing(torch.Tensor.detach), is_aliasing(torch.Tensor.clone)
    (True, False)
    """
    fn = fn.args[0] if isinstance(fn, partial) and fn.func is _call_once else fn
    return fn is identity or fn is Tensor.detach or fn is get_data


def call_once_per_leaf(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap ``fn`` so that it is called once per tensor: a tied tensor stays tied."""
    return partial(_call_once, fn, {})


def _call_once(fn: Callable[[Tensor], Tensor], made: dict[Tensor, Tensor], leaf: Tensor) -> Tensor:
    if leaf not in made:
        made[leaf] = fn(leaf)
    return made[leaf]


def check_same_keys(
    wanted: Mapping[str, Child], actual: Mapping[str, Child], path: tuple[str, ...], start: str = ""
) -> None:
    """Raise KeyMismatchError unless two mappings have the same keys, in any order; ``start`` begins its message."""
    if wanted.keys() != actual.keys():
        missing = [key for key in wanted if key not in actual]
        extra = [key for key in actual if key not in wanted]
        raise KeyMismatchError(
            f"{start}the structures differ at {show_path(path)}: missing keys {missing}, extra keys {extra}; "
            "select() the common keys first, or give default= where the operation has it"
        )


def check_same_leaves(
    wanted: Mapping[str, Child], actual: Mapping[str, Child], path: tuple[str, ...]
) -> None:
    """Raise KeyMismatchError unless two mappings have the same keys, except for value nodes without a tensor."""
    for left, right in ((wanted, actual), (actual, wanted)):
        for key, child in dict(left).items():
            if key not in right and (
                isinstance(child, Tensor) or has_entries(child) or type(child) in LEAF_KINDS
            ):
                check_same_keys(wanted, actual, path)


def check_collection(operation: str, data: object) -> None:
    """Raise TypeError for data that is not a collection."""
    if not isinstance(data, Core):
        hint = "; from_dict() and from_pytree() convert nested dicts" if isinstance(data, Mapping) else ""
        raise type_error(operation, data, "a collection, such as a TensorDict", hint)


def check_mapping(operation: str, data: object) -> None:
    """Raise TypeError for data that is not a mapping."""
    if not isinstance(data, Mapping):
        raise type_error(operation, data, "a mapping")


def type_error(operation: str, data: object, wanted: str, hint: str = "") -> TypeError:
    """Return the error for data of a type that an operation does not take."""
    return TypeError(f"{operation}() takes {wanted}; got {type(data).__name__}{hint}")


def check_same_form(wanted: Child, actual: Child, path: tuple[str, ...]) -> None:
    """Raise StructureError unless both are tensors, both nodes of entries, or both value nodes."""
    same = isinstance(wanted, Tensor) == isinstance(actual, Tensor)
    if not same or has_entries(wanted) != has_entries(actual):
        raise leaf_node_mismatch_error(wanted, actual, path)


def leaf_node_mismatch_error(wanted: Child, actual: Child, path: tuple[str, ...]) -> StructureError:
    """Return the error for a key that holds a tensor in one tree and a node in the other."""
    there, here = (
        "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}" for value in (wanted, actual)
    )
    return StructureError(f"the structures differ at {show_path(path)}: {there} there, {here} here")


def show_path(path: tuple[str, ...]) -> str:
    """Format a key path for a message.

    >>> show_path(("a",)), show_path(("a", "b"))
    ("key 'a'", "key ('a', 'b')")
    """
    if not path:
        return "the root"
    return f"key {path[0]!r}" if len(path) == 1 else f"key {path!r}"


def add_key_note(error: Exception, path: tuple[str, ...]) -> None:
    """Add the key path to an error of another library as a note (Python 3.11 or later)."""
    if hasattr(error, "add_note"):
        error.add_note(f"at {show_path(path)}")


def missing_key_error(node: Core, key: object, path: tuple[str, ...] = ()) -> KeyPathError:
    """Return the error for a key that is missing in ``node``, the node at ``path``."""
    from_here = f" in {show_path(path)}" if path else ""
    nested = _find_nested(node, str(key))
    hint = f"did you mean {path + nested!r}?" if nested else suggest_keys(str(key), list(node._children()))
    return KeyPathError(f"key {key!r} not found{from_here} in {type(node).__name__}: {hint}")


def _find_nested(root: Core, key: str) -> tuple[str, ...]:
    """Return the path of the entry that a key with dots or slashes names; empty if there is none."""
    for path in (tuple(key.split(separator)) for separator in "./" if separator in key):
        node: object = root
        for part in path:
            node = node._children().get(part) if has_entries(node) else None
        if node is not None:
            return path
    return ()


def get_entry(root: Core, path: tuple[str, ...]) -> Child:
    """Return the entry at a key path, or raise KeyPathError with the key at which the path ends."""
    node: Child = root
    for depth, part in enumerate(path):
        if isinstance(node, Tensor):
            raise _key_through_leaf_error(path, depth)
        try:
            child = node._get_child(part)
        except KeyError:
            raise missing_key_error(node, part, path[:depth]) from None
        node = child
    return node


def get_parent(root: Core, path: tuple[str, ...]) -> Core:
    """Return the node of the last key of a path, whose entry need not exist; KeyPathError if a parent is missing."""
    entry = get_entry(root, path[:-1])
    if isinstance(entry, Tensor):
        raise _key_through_leaf_error(path, len(path) - 1)
    return entry


def _key_through_leaf_error(path: tuple[str, ...], depth: int) -> KeyThroughLeafError:
    return KeyThroughLeafError(
        f"{show_path(path[:depth])} is a tensor, so it has no entry {path[depth]!r} (looked up {path!r})"
    )
