"""First-class dims of torch (``functorch.dim``) in an index, and the entries that such an index returns.

torch returns tensors that are not instances of ``torch.Tensor``. A collection holds each of them in a node, and reading the
entry returns the tensor of torch. Operations use a tensor subclass in its place, which passes every function on to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._convert.printing import PrintedNode
from .._encode.node_kinds import KINDS, NodeKind
from .._encode.records import Layout, Record
from .._methods.collection import TensorCollection
from .._plans.elements import JoinPlan
from .._plans.index import ITEM_PLANS, IndexPlan
from .._plans.plans import ShapePlan
from .._plans.shapes import stack_plan
from .._plans.steps import Along, Shape, Step, Whole
from .._torch.private import pytree
from .._transforms.pytree import register
from .._tree.coerce import COERCERS, Coercer
from .._tree.defaults import leaf_node_mismatch_error
from .._tree.node import LEAF_KINDS, Child, Core
from .._tree.stored_leaves import as_memory
from ..errors import BatchSizeError, CollectionIndexError, KeyPathError, StructureError

if TYPE_CHECKING:
    from typing_extensions import Self

#: Functions that must reach torch under their own names, since their arguments can be dims.
_WITH_DIMS = frozenset({Tensor.__getitem__, Tensor.__setitem__})


class DimTensor(Tensor):
    """Stand-in for a tensor with first-class dims: a ``torch.Tensor`` with the shape of its other dims."""

    held: Any

    @staticmethod
    def __new__(cls, held: Any) -> DimTensor:
        """Wrap a ``functorch.dim.Tensor``."""
        result = torch.empty(0, device="meta").as_subclass(cls)
        result.held = held
        return result

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: object = (), kwargs: object = None
    ) -> Any:
        args, kwargs = pytree.tree_map(_unwrap, (args, kwargs or {}))
        # Any function without special meaning runs under vmap over the dims.
        called = func if func in _WITH_DIMS else lambda *args, **kwargs: func(*args, **kwargs)
        return pytree.tree_map(wrap, _get_class().__torch_function__(called, (), args, kwargs))


def _is_dim(item: object) -> bool:
    """Return True for a first-class dim, or a tensor of which all dims are first-class."""
    module = sys.modules.get("functorch.dim")
    return module is not None and (
        isinstance(item, module.Dim) or (isinstance(item, module.Tensor) and not item.ndim)
    )


def _get_class() -> Any:
    return sys.modules["functorch.dim"].Tensor


def _unwrap(item: object) -> object:
    return item.held if type(item) is DimTensor else item


def wrap(item: object) -> Any:
    """Return the stand-in for a tensor with first-class dims, and any other object unchanged."""
    return DimTensor(item) if isinstance(item, _get_class()) else item


def as_entry(leaf: Any) -> Child:
    """Convert a result to an entry: a node if it has first-class dims."""
    leaf = wrap(leaf)
    return DimEntry(leaf) if type(leaf) is DimTensor else leaf


class DimPlan(IndexPlan):
    """The plan of an index with first-class dims. A lazy stack is stacked first."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        read = self.leaf
        self.leaf = lambda leaf: as_entry(read(*as_memory([leaf])))

    @property
    def steps(self) -> Any:  # type: ignore[override]
        raise CollectionIndexError(
            "a first-class dim cannot index values that are not tensors, one for each element: exclude() them first"
        )

    def locate(self, size: Shape, device: torch.device | None = None) -> Any:
        """Raise CollectionIndexError: the elements of the result have no positions."""
        return self.steps

    def along(self, stack_dim: int) -> Along | None:
        """Return how a lazy stack applies the plan to its members; None if its stack dim is indexed."""
        if stack_dim >= self.n:
            return super().along(stack_dim)
        item = self._list_items()[self._find_item(stack_dim)]
        if type(item) is not slice or item != slice(None):
            return None
        member = self._make_member_plan(stack_dim, [Step(0, 0, Whole(()))])
        return Along(None, member, self.kept.index(stack_dim))


class DimEntry(TensorCollection):
    """Node that a collection stores for a tensor with first-class dims."""

    _is_value = True

    def __init__(self, leaf: DimTensor) -> None:
        self._leaf = leaf

    @property
    def batch_size(self) -> torch.Size:
        return self._leaf.shape

    @property
    def device(self) -> torch.device:
        return self._leaf.device

    def _children(self) -> Mapping[str, Child]:
        return {}

    def _with_children(self, children: Mapping[str, Child], **metadata: object) -> Self:
        return type(self)(self._leaf)

    def _set_child(self, key: str, value: Child) -> None:
        raise KeyPathError(f"a tensor with first-class dims has no entries, so {key!r} cannot be set")

    def _del_child(self, key: str) -> None:
        raise KeyError(key)

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        """Keep the shape of the tensor."""

    def _set_device(self, device: torch.device | None) -> None:
        """Keep the device of the tensor."""

    def _set_names(self, names: object) -> None:
        """Ignore names, as a tensor does."""

    def _check_batch_size(self, batch_size: torch.Size, path: tuple[str, ...] = ()) -> None:
        if self.batch_size[: len(batch_size)] != batch_size:
            raise BatchSizeError(
                f"the batch size {list(batch_size)} does not fit a tensor with first-class dims whose other dims have "
                f"the sizes {list(self.batch_size)}"
            )

    def _with_batch_size(self, batch_size: torch.Size) -> Self:
        self._check_batch_size(batch_size)
        return self

    def _unwrap(self) -> object:
        return self._leaf.held

    def _print_node(self) -> PrintedNode:
        return PrintedNode([], text=f"with dims {self._leaf.held.dims}")

    def _flatten_leaves(self, out: list[Tensor]) -> list[object]:
        out.append(self._leaf)
        return []

    def _flatten_other(self, other: Core, out: list[Tensor], path: tuple[str, ...] = ()) -> None:
        out.append(self._pair(other, path))

    def _pair(self, other: Child, path: tuple[str, ...] = ()) -> Tensor:
        if not isinstance(other, DimEntry):
            raise leaf_node_mismatch_error(self, other, path)
        return other._leaf

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Any:
        result = fn(self._leaf)
        return self if result is None else as_entry(result)

    def _broadcast_to_leaves(
        self, value: Tensor, out: list[Tensor], scalar: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        out.append(value if scalar is None else scalar(self._leaf, value))

    def _transform(self, plan: ShapePlan) -> Any:
        return as_entry(plan.leaf(self._leaf))

    def _transform_multi(self, plan: ShapePlan) -> tuple[Any, ...]:
        return tuple([as_entry(part) for part in plan.leaf(self._leaf)])

    def _join(self, items: Sequence[Core], plan: JoinPlan, path: tuple[str, ...] = ()) -> Any:
        return as_entry(plan.leaf([self._pair(item, path) for item in items]))

    def _stack_lazily(self, items: Sequence[Core], dim: int, source: tuple[Core, str] | None = None) -> Any:
        return self._join(items, stack_plan(self.batch_size, dim, len(items)))

    def _compare(self, other: Any, single: Callable[..., object]) -> Child:
        return as_entry(single(self._leaf, self._pair(other)))


LEAF_KINDS.add(DimEntry)
register(
    DimEntry,
    lambda node: ([node._leaf.held], ()),
    lambda items, _: as_entry(next(iter(items))),
    lambda _: ("data",),
)


def _refuse(node: object) -> Any:
    raise StructureError(
        "a tensor with first-class dims cannot be stored, sent, copied or pickled: give its dims positions by order()"
    )


#: Only a description, which nothing reads back, takes such a node apart.
_LAYOUTS = {"description": Layout(lambda node: Record.of(node, {"data": node._leaf}), _refuse)}
KINDS.add(NodeKind("td_core.DimEntry", DimEntry, _refuse, _refuse, _LAYOUTS, is_leaf=True))

ITEM_PLANS.append((_is_dim, DimPlan))
COERCERS.add(Coercer(("functorch.dim.Tensor",), lambda value, batch_size, device: as_entry(value)))
