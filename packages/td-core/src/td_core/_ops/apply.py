"""Calling a function on every leaf.

One walk with an explicit stack serves every form; only a lazy stack is entered by recursion, member by member, so that
its leaves need not be stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._coerce import coerce
from .._collection import Child, Core, add_key_note, leaf_node_mismatch_error, missing_key_error, show_path
from .._devices import as_device
from .._dim_names import check_names
from .._locking import check_unlocked
from .._mapping_views import IsLeaf
from ..errors import BatchSizeError, StructureError
from ..typing import NO_DEFAULT, BatchSize, DeviceType
from .batch_size import as_batch_size, fit_batch_size
from .joining import write_result
from .leaf_writes import check_copied, clone_overlapping
from .operands import copy_leaves
from .shared_memory import are_equal, get_memory_key, may_share_memory

SelfT = TypeVar("SelfT", bound="ApplyMixin")
Path = tuple[str, ...]

_MISSING: Any = object()
"""Stands for a level that another collection lacks."""


class ApplyMixin(Core):
    """``apply``, ``apply_`` and ``named_apply``."""

    __slots__ = ()

    def apply(
        self: SelfT,
        fn: Callable[..., Any],
        *others: Any,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = NO_DEFAULT,  # type: ignore[assignment]
        names: Sequence[str | None] | None = NO_DEFAULT,  # type: ignore[assignment]
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: Any = None,
        **constructor_kwargs: Any,
    ) -> Any:
        """Return a collection of ``fn(leaf, *leaves_of_others)`` for every leaf.

        Args:
            fn: gets a leaf, and the leaves of ``others`` under the same key; None drops the entry.
            *others: collections with the same keys.
            batch_size: of the result and all its levels; by default each level keeps its own.
            device: of the result; by default this one's.
            names: of the result; by default this one's, unless the batch size changes.
            inplace: copy the results into the leaves, and return this collection, which keeps its batch size and names. For a
                tensor that stands under several keys, as tied weights do, ``fn`` is called once, at the first.
            default: passed for entries that one of ``others`` lacks.
            filter_empty: True drops every level without entries, False none, None those that lost all of theirs. Where
                nothing remains the result is None.
            propagate_lock: lock the result if this collection is locked.
            call_on_nested: call ``fn`` on sub-collections too, instead of on their leaves.
            is_leaf: class -> whether ``fn`` is called on entries of it.
            out: gets the results, as its entries or copied into them where it is locked, and is returned.
            **constructor_kwargs: ``named=True`` makes this :meth:`named_apply`, with its ``nested_keys``; no others exist.

        Raises:
            KeyPathError: one of ``others`` lacks an entry, and there is no ``default``.
            BatchSizeError: a result does not start with the batch size, or ``out`` has not that which is given.
            ValueError: there are both ``out`` and ``inplace``.

        >>> td = TensorDict({"a": 1, "b": {"c": 2}})
        >>> td.apply(lambda leaf: leaf + 1)["b", "c"]
        tensor(3)
        """
        named = nested_keys = False
        if constructor_kwargs:
            named = constructor_kwargs.pop("named", False)
            nested_keys = constructor_kwargs.pop("nested_keys", False)
            if constructor_kwargs:
                raise TypeError(f"apply() takes no {', '.join(constructor_kwargs)}")
        walk = _Walk(
            fn,
            named,
            nested_keys,
            inplace,
            default,
            filter_empty,
            _is_any_leaf if call_on_nested else is_leaf,
        )
        return walk.run(self, others, batch_size, device, names, propagate_lock, out)

    def named_apply(
        self: SelfT,
        fn: Callable[..., Any],
        *others: Any,
        nested_keys: bool = False,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = NO_DEFAULT,  # type: ignore[assignment]
        names: Sequence[str | None] | None = NO_DEFAULT,  # type: ignore[assignment]
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
        out: Any = None,
        **constructor_kwargs: Any,
    ) -> Any:
        """Return a collection of ``fn(key, leaf, *leaves_of_others)`` for every leaf.

        The key is the last part of a leaf's key; with ``nested_keys`` all of it, a tuple for nested entries. The other
        arguments are those of :meth:`apply`.

        >>> td = TensorDict({"a": 1, "b": {"c": 2}})
        >>> td.named_apply(lambda key, leaf: leaf if key == ("b", "c") else None, nested_keys=True)
        TensorDict(batch_size=[], fields={b: {c: i64[]}})
        """
        if constructor_kwargs:
            raise TypeError(f"named_apply() takes no {', '.join(constructor_kwargs)}")
        walk = _Walk(
            fn, True, nested_keys, inplace, default, filter_empty, _is_any_leaf if call_on_nested else is_leaf
        )
        return walk.run(self, others, batch_size, device, names, propagate_lock, out)

    def apply_(self: SelfT, fn: Callable[..., Any], *others: Any, **kwargs: Any) -> SelfT:
        """Copy ``fn(leaf, *leaves_of_others)`` into every leaf, and return this collection.

        Where ``fn`` returns None a leaf stays as it is. The arguments are those of :meth:`apply`; a tensor that stands under
        several keys is changed once.

        >>> TensorDict({"a": 1}).apply_(lambda leaf: leaf + 1)["a"]
        tensor(2)
        """
        self.apply(fn, *others, inplace=True, **kwargs)
        return self


@dataclass
class _Walk:
    """One call of ``apply``."""

    fn: Callable[..., Any]
    named: bool
    nested_keys: bool
    inplace: bool
    default: Any
    filter_empty: bool | None
    is_leaf: IsLeaf | None
    size: torch.Size | None = None
    device: Any = NO_DEFAULT
    names: Any = NO_DEFAULT
    writes: list[tuple[Any, str, Child, Child, Path]] = field(default_factory=list)
    #: In place, where leaves may be one memory: what was changed, with its key and the leaves of the others beside it.
    changed: dict[Any, tuple[Path, Sequence[Any]]] | None = None

    def run(
        self,
        root: Any,
        others: tuple[Any, ...],
        batch_size: BatchSize | None,
        device: Any,
        names: Any,
        propagate_lock: bool,
        out: Any,
    ) -> Any:
        """Walk ``root`` and return the result."""
        for other in others:
            if not isinstance(other, Core):
                raise TypeError(f"apply() goes through collections side by side; got {type(other).__name__}")
        if self.inplace and out is not None:
            raise ValueError("apply() writes into out= or, with inplace=True, into this collection; got both")
        if self.inplace:  # this collection keeps what it is, as a lazy stack its members
            if torch.compiler.is_compiling() or may_share_memory(root._leaves()):
                self.changed = {}
        elif batch_size is not None:
            self.size = as_batch_size(batch_size)
            self.names = None
        elif out is not None and out.batch_size != root.batch_size:
            self.size = out.batch_size
        if device is not NO_DEFAULT:
            self.device = None if device is None else as_device(device)
        if names is not NO_DEFAULT:
            self.names = None
        result = self.level(root, others, ())
        if self.inplace:
            self.write()
            return root if result is not None else None
        if result is None:
            return out
        if names is not NO_DEFAULT and names is not None:
            result._set_names(check_names(names, len(result.batch_size)))
        if out is not None:
            return write_result(out, result.batch_size, result, inplace=False)
        if propagate_lock and root._locked:
            result.lock_()
        return result

    def level(self, root: Any, others: tuple[Any, ...], path: Path) -> Any:
        """Return the result for a level and all below it; None where it is dropped."""
        stacked = root._members_and_dim()
        if stacked is not None and self.size is None:
            return self.members(root, stacked, others, path)
        fn, named, nested_keys, is_leaf = self.fn, self.named, self.nested_keys, self.is_leaf
        # torch.compile cannot tell whether a tuple of nodes is true.
        plain, single = not self.inplace, len(others) == 0
        alone = single and not named
        # The levels above, each with what is needed to go on with it.
        above: list[Any] = []
        node, entries, name = root, {}, ""
        items = iter(dict(node._children()).items())
        size = node.batch_size if self.size is None else self.size
        device = node.device if self.device is NO_DEFAULT else self.device
        while True:
            ndim = len(size)
            fitting: torch.Size | None = None
            free = plain and device is None
            for key, child in items:
                if isinstance(child, Tensor) or (is_leaf is not None and is_leaf(type(child))):
                    if not single:
                        rest = [self.other(other, key, path, child) for other in others]
                    if self.changed is not None and self.is_changed(
                        child, (*path, key), [] if single else rest
                    ):
                        entries[key] = child
                        continue
                    try:
                        if alone:
                            value = fn(child)
                        elif single:
                            value = fn((*path, key) if nested_keys and path else key, child)
                        elif named:
                            value = fn((*path, key) if nested_keys and path else key, child, *rest)
                        else:
                            value = fn(child, *rest)
                    except Exception as error:
                        add_key_note(error, (*path, key))
                        raise
                    if value is None:
                        continue
                    if free and isinstance(value, Tensor):
                        # To compare two sizes is cheaper than to slice one, and most leaves follow one of their shape.
                        try:
                            shape = value.shape
                        except RuntimeError:
                            pass  # a nested tensor of strided layout has none
                        else:
                            if shape == fitting or shape[:ndim] == size:
                                fitting = shape
                                entries[key] = value
                                continue
                    entries[key] = self.check_result(value, child, node, key, size, device, path)
                elif child._is_value:
                    kept = child
                    if child._is_tensor_proxy:
                        kept = self.unwrap_child(child, node, key, path, others)
                        if kept is None:
                            continue
                    if self.size is not None:
                        # One value takes any batch size; a stack of values keeps the elements that it has.
                        if kept._max_batch_size() is None:
                            kept = kept._with_children(kept._children(), batch_size=size)
                        else:
                            kept = fit_batch_size(kept, size, (*path, key))
                    entries[key] = kept
                else:
                    inner = (
                        others if single else tuple([self.other(other, key, path, child) for other in others])
                    )
                    stacked = child._members_and_dim()
                    if stacked is not None and self.size is None:
                        value = self.members(child, stacked, inner, (*path, key))
                        if value is not None:
                            entries[key] = value
                        continue
                    above.append((node, entries, items, others, path, size, device, name))
                    node, entries, others, path, name = child, {}, inner, (*path, key), key
                    items = iter(dict(node._children()).items())
                    if self.size is None:
                        size = node.batch_size
                    if self.device is NO_DEFAULT:
                        device = node.device
                    break
            else:
                result = None
                if entries or not self.is_dropped(node):
                    result = self.build(node, entries) if plain else node
                if not above:
                    return result
                key = name
                node, entries, items, others, path, size, device, name = above.pop()
                if result is not None:
                    entries[key] = result

    def unwrap_child(self, child: Any, node: Any, key: str, path: Path, others: tuple[Any, ...]) -> Any:
        """Return the result for a node that stands for a tensor, as such a node; None where there is none."""
        results = [child, *[self.other(other, key, path, child) for other in others]]
        tensors = [item._unwrap() if isinstance(item, Core) else item for item in results]
        name = [(*path, key) if self.nested_keys and path else key] if self.named else []
        if self.changed is not None and self.is_changed(tensors[0], (*path, key), tensors[1:]):
            return child
        try:
            value = self.fn(*name, *tensors)
        except Exception as error:
            add_key_note(error, (*path, key))
            raise
        if value is None:
            return child if self.inplace else None
        if not self.inplace:
            return child._unflatten_iter(iter((value,)))
        if value is not tensors[0]:
            self.writes.append((node, key, tensors[0], value, (*path, key)))
        return child

    def members(self, node: Any, stacked: Any, others: tuple[Any, ...], path: Path) -> Any:
        """Return the result for a lazy stack, member by member."""
        members, dim = stacked
        for other in others:
            if other is not _MISSING and other.batch_size[dim : dim + 1] != (len(members),):
                raise BatchSizeError(
                    f"{show_path(path)} is a lazy stack of {len(members)} along dim {dim}, another collection has batch "
                    f"size {list(other.batch_size)} there"
                )
        columns = [
            [other] * len(members) if other is _MISSING else list(other.unbind(dim)) for other in others
        ]
        results = [
            self.level(member, tuple(rest), path) for member, *rest in zip(members, *columns, strict=True)
        ]
        if all(result is None for result in results):
            return None
        if self.inplace:
            return node
        return node._with_members(
            [
                self.build(member, {}) if result is None else result
                for member, result in zip(members, results, strict=True)
            ]
        )

    def other(self, node: Any, key: str, path: Path, child: Child) -> Any:
        """Return the entry ``key`` of another collection, or what stands for it."""
        leaf = (
            isinstance(child, Tensor)
            or child._is_value
            or (self.is_leaf is not None and self.is_leaf(type(child)))
        )
        if node is _MISSING:
            return self.default if leaf else _MISSING
        try:
            result = node._get_child(key)
        except KeyError:
            if self.default is NO_DEFAULT:
                raise missing_key_error(node, key, path) from None
            return self.default if leaf else _MISSING
        if isinstance(result, Tensor) and not leaf:
            raise leaf_node_mismatch_error(child, result, (*path, key))
        return result

    def is_changed(self, child: Child, path: Path, rest: Sequence[Any]) -> bool:
        """Tell whether this leaf was changed under another key; StructureError where it had other leaves beside it there."""
        assert self.changed is not None
        first, beside = self.changed.setdefault(get_memory_key(child, not rest), (path, rest))
        if beside is rest:
            return False
        if not torch.compiler.is_compiling() and not all(map(are_equal, beside, rest)):
            raise StructureError(
                f"cannot change {show_path(path)} in place: it is the tensor of {show_path(first)}, and what the other "
                "collections have beside the two differs; give them equal ones, or exclude() all keys but one"
            )
        return True

    def check_result(
        self, value: Any, child: Child, node: Any, key: str, size: torch.Size, device: Any, path: Path
    ) -> Child:
        """Return a result as an entry; in place, note what is to be written instead."""
        if self.inplace:
            if value is not child:
                if not isinstance(value, (Tensor, Core)):
                    value = coerce(value, size, device, (*path, key))
                self.writes.append((node, key, child, value, (*path, key)))
            return child
        return coerce(value, size, device, (*path, key))

    def is_dropped(self, node: Any) -> bool:
        """Tell whether a level whose result has no entries leaves no trace."""
        return self.filter_empty is True or (self.filter_empty is None and len(node._children()) > 0)

    def build(self, node: Any, entries: dict[str, Child]) -> Any:
        """Return the level that holds the results."""
        return node._with_children(entries, batch_size=self.size, device=self.device, names=self.names)

    def write(self) -> None:
        """Copy the results of an in-place call into the leaves, after checking all of them."""
        targets: list[Tensor] = []
        values: list[Tensor] = []
        paths: list[Path] = []
        others: list[tuple[Any, str, Any, Any]] = []
        for node, key, child, value, path in self.writes:
            if isinstance(child, Tensor) and isinstance(value, Tensor):
                check_copied(child, path, value)
                targets.append(child)
                values.append(value)
                paths.append(path)
            elif isinstance(child, Tensor) or isinstance(value, Tensor):
                raise leaf_node_mismatch_error(child, value, path)
            else:
                if child._is_value:
                    check_unlocked(node, f"replace {show_path(path)}")
                others.append((node, key, child, value))
        # Torch copies nothing that overlaps, and a lazy stack may be given its own members in another order.
        copy_leaves(targets, clone_overlapping(targets, values), lambda i: show_path(paths[i]))
        for node, key, child, value in others:
            if child._is_value:
                node._set_child(key, value)
            else:
                child.update_(value)


def _is_any_leaf(cls: type) -> bool:
    return True
