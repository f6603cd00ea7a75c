"""Packing all leaves into one tensor and back, and padding ragged entries to one shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._collection import Child, Core, make_dense, show_path
from .._element_plans import pad_plan
from .._keys import unravel_key_to_tuple
from .._plans import wrap_dim
from .._public_names import set_module
from .._ragged import make_padded_tensor
from ..errors import BatchSizeError, DepthError, KeyMismatchError, StructureError
from ..typing import NestedKey
from .shape import ShapeMixin

SelfT = TypeVar("SelfT", bound="PackMixin")


@set_module("td_core")
@dataclass(frozen=True)
class PackLayout:
    """Where each leaf stands in a packed tensor: what :meth:`TensorDict.pack` returns beside it.

    Attributes:
        keys: the keys of the leaves, in the order in which they are packed.
        shapes: for each leaf, its shape behind the batch dims.
        dim: the packed dim, negative.
        nested: for each nested collection its key, its batch dims behind those of the root, and its class (None:
            a plain collection).
        device: the device of the collection.
        cls: the class of the root; None: a plain collection.
        offsets: for each leaf, where it starts along the packed dim.
        numel: the size of the packed dim.

    >>> packed, layout = TensorDict({"a": torch.zeros(2, 3), "b": torch.ones(2)}, [2]).pack()
    >>> layout.offsets, layout.numel, layout.unpack(packed)["b"]
    ((0, 3), 4, tensor([1., 1.]))
    """

    keys: tuple[NestedKey, ...]
    shapes: tuple[torch.Size, ...]
    dim: int = -1
    nested: tuple[tuple[NestedKey, torch.Size, type | None], ...] = ()
    device: torch.device | None = None
    cls: type | None = None
    offsets: tuple[int, ...] = field(init=False)
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        *offsets, numel = accumulate(map(math.prod, self.shapes), initial=0)
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "numel", numel)

    def unpack(self, tensor: Tensor) -> Any:
        """Return the collection that a packed tensor holds; its batch size is that of the tensor without ``dim``.

        Raises:
            ValueError: the packed dim has another size.

        >>> PackLayout(("a", "b"), (torch.Size([2]), torch.Size([]))).unpack(torch.arange(3))["a"]
        tensor([0, 1])
        """
        result = tensor.shape[self.dim] if -tensor.ndim <= self.dim else 0
        if result != self.numel:
            raise ValueError(
                f"the packed tensor must have {self.numel} entries along dim {self.dim}; got {result}"
            )
        packed = tensor.movedim(self.dim, -1)
        batch_size = packed.shape[:-1]
        sizes = [math.prod(shape) for shape in self.shapes]
        leaves = [
            part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for part, shape in zip(packed.split_with_sizes(sizes, -1), self.shapes, strict=True)
        ]
        nodes: dict[tuple[str, ...], Any] = {(): make_dense({}, batch_size, self.device)}
        for key, tail, _ in self.nested:
            path = unravel_key_to_tuple(key)
            nodes[path] = make_dense({}, torch.Size((*batch_size, *tail)), self.device)
            nodes[path[:-1]]._set_child(path[-1], nodes[path])
        for key, leaf in zip(self.keys, leaves, strict=True):
            *parents, last = unravel_key_to_tuple(key)
            nodes[tuple(parents)]._set_child(last, leaf)
        # From the inside out, so that each class finds its entries in their own class.
        for key, _, cls in reversed(self.nested):
            if cls is not None:
                path = unravel_key_to_tuple(key)
                nodes[path[:-1]]._set_child(path[-1], cls.from_tensordict(nodes[path]))  # type: ignore[attr-defined]
        return nodes[()] if self.cls is None else self.cls.from_tensordict(nodes[()])  # type: ignore[attr-defined]


class PackMixin(ShapeMixin):
    """``pack`` and ``to_padded_tensor``."""

    __slots__ = ()

    def pack(self, dim: int = -1, *, layout: PackLayout | None = None) -> tuple[Tensor, PackLayout]:
        """Return all leaves in one tensor of the batch size and one more dim, and where each of them is in it.

        Leaves stand in the order of their keys, each flattened behind the batch dims.

        Args:
            dim: the place of the packed dim.
            layout: one that an earlier ``pack`` returned; the leaves must be those it has.

        Raises:
            TypeError: leaves have different dtypes.
            KeyMismatchError: the leaves are not those of ``layout``.
            BatchSizeError: a leaf has another shape than in ``layout``.
            StructureError: a leaf is a nested tensor, or an entry is non-tensor data.

        >>> TensorDict({"a": torch.zeros(2, 3), "b": torch.ones(2)}, [2]).pack()[0]
        tensor([[0., 0., 0., 1.],
                [0., 0., 0., 1.]])
        """
        size = self.batch_size
        position = wrap_dim(dim, len(size) + 1) - len(size) - 1
        left = _make_layout(self, position)
        if layout is not None:
            _check_layout(layout, left)
            left = PackLayout(layout.keys, layout.shapes, position, layout.nested, layout.device, layout.cls)
        leaves = [self[key] for key in left.keys]
        for key, leaf in zip(left.keys, leaves, strict=True):
            if leaf.dtype != leaves[0].dtype:
                raise TypeError(
                    f"cannot pack leaves of different dtypes: key {left.keys[0]!r} has {leaves[0].dtype}, key {key!r} "
                    f"has {leaf.dtype}; convert them first, for example with float()"
                )
        if not leaves:
            packed = torch.zeros((*size, 0), device=self.device)
        else:
            # A reshape to -1 would be ambiguous for a batch without elements.
            packed = torch.cat(
                [leaf.reshape(*size, math.prod(leaf.shape[len(size) :])) for leaf in leaves], -1
            )
        return packed.movedim(-1, position), left

    def to_padded_tensor(self, padding: float = 0.0, mask_key: NestedKey | None = None) -> Any:
        """Return a dense collection in which ragged entries are padded to the largest shape.

        Args:
            padding: what the new elements are.
            mask_key: an entry to add: True where the batch has elements, False where it was padded.

        Raises:
            DepthError: the nesting is deeper than Python can call.

        >>> from td_core import LazyStackedTensorDict
        >>> members = [TensorDict({"a": torch.ones(n)}, [n]) for n in (1, 2)]
        >>> padded = LazyStackedTensorDict(*members).to_padded_tensor(mask_key="mask")
        >>> padded["a"], padded["mask"]
        (tensor([[1., 0.],
                [1., 1.]]), tensor([[ True, False],
                [ True,  True]]))
        """
        try:
            result = _pad_node(self, padding)
            if mask_key is not None:
                result.set(mask_key, _make_mask(self, mask_key))
        except RecursionError as error:
            raise DepthError(f"the levels are too many to be padded one inside the other: {error}") from error
        return result


def _make_layout(root: PackMixin, dim: int) -> PackLayout:
    ndim = len(root.batch_size)
    keys: list[NestedKey] = []
    shapes: list[torch.Size] = []
    nested: list[tuple[NestedKey, torch.Size, type | None]] = []
    root._all_children()
    for key, entry in root.items(True, sort=True):
        if isinstance(entry, Tensor):
            if entry.is_nested:
                raise StructureError(
                    f"cannot pack {show_path(unravel_key_to_tuple(key))}: it is a nested tensor, whose components have "
                    "shapes of their own; to_padded_tensor() the collection first"
                )
            keys.append(key)
            shapes.append(entry.shape[ndim:])
        elif entry._is_value:
            raise StructureError(f"cannot pack {show_path(unravel_key_to_tuple(key))}: it is non-tensor data")
        else:
            entry._all_children()
            nested.append((key, entry.batch_size[ndim:], _get_class(entry)))
    return PackLayout(tuple(keys), tuple(shapes), dim, tuple(nested), root.device, _get_class(root))


def _get_class(node: Core) -> type | None:
    """Return the class that makes nodes from plain collections; None for those that are plain."""
    return type(node) if hasattr(type(node), "from_tensordict") else None


def _check_layout(layout: PackLayout, left: PackLayout) -> None:
    wanted = {unravel_key_to_tuple(key): shape for key, shape in zip(layout.keys, layout.shapes, strict=True)}
    result = {unravel_key_to_tuple(key): shape for key, shape in zip(left.keys, left.shapes, strict=True)}
    if wanted.keys() != result.keys():
        raise KeyMismatchError(
            f"the leaves are not those of the layout: missing keys {[key for key in wanted if key not in result]}, "
            f"extra keys {[key for key in result if key not in wanted]}"
        )
    for path, shape in wanted.items():
        if result[path] != shape:
            raise BatchSizeError(
                f"{show_path(path)} has shape {list(result[path])} behind the batch dims, the layout has {list(shape)}"
            )


def _pad_node(node: Any, padding: float) -> Any:
    """Return a node without lazy stacks or nested tensors."""
    if node._is_value:
        return node
    stacked = node._members_and_dim()
    if stacked is not None:
        members, dim = stacked
        return _pad_and_stack([_pad_node(member, padding) for member in members], dim, padding)
    children: dict[str, Child] = {}
    for key, child in dict(node._children()).items():
        if not isinstance(child, Tensor):
            children[key] = _pad_node(child, padding)
        else:
            children[key] = torch.nested.to_padded_tensor(child, padding) if child.is_nested else child
    if -1 not in node.batch_size:
        return node._with_children(children)
    # What densify() made of members of different batch sizes has its size from now on.
    ndim = len(node.batch_size)
    leads = [child.shape[:ndim] for child in children.values() if child.ndim >= ndim]
    return node._with_children(children, batch_size=next((lead for lead in leads if -1 not in lead), None))


def _pad_and_stack(nodes: Sequence[Any], dim: int, padding: float) -> Any:
    """Return dense nodes of one number of batch dims stacked, with the keys that all of them have."""
    columns = [node._children() for node in nodes]
    children: dict[str, Child] = {}
    size = tuple([max(sizes) for sizes in zip(*[node.batch_size for node in nodes], strict=True)])
    missing = [[n for pair in zip(size, node.batch_size) for n in (0, pair[0] - pair[1])] for node in nodes]
    for key, first in columns[0].items():
        if not all(key in column for column in columns):
            continue
        values = [column[key] for column in columns]
        if all(isinstance(value, Tensor) for value in values):
            children[key] = make_padded_tensor(key, values, dim, padding)
        elif first._is_value:
            values = [
                value._transform(pad_plan(value.batch_size, amounts, 0)) if any(amounts) else value
                for value, amounts in zip(values, missing, strict=True)
            ]
            children[key] = values[0]._stack_lazily(values, dim)
        else:
            children[key] = _pad_and_stack(values, dim, padding)
    return nodes[0]._with_children(
        children, batch_size=torch.Size((*size[:dim], len(nodes), *size[dim:])), names=None
    )


def _make_mask(node: Any, key: NestedKey) -> Tensor:
    """Return where the batch of a padded node has elements: what goes under ``key``."""
    stacked = node._members_and_dim()
    if stacked is None:
        size = node.batch_size
        ragged = next((leaf for leaf in node._leaves() if leaf.is_nested), None) if -1 in size else None
        if ragged is None:
            return torch.ones(size, dtype=torch.bool, device=node.device)
        parts = [leaf.new_ones(leaf.shape[: len(size) - 1], dtype=torch.bool) for leaf in ragged.unbind()]
        return make_padded_tensor(key, parts, 0, False)
    members, dim = stacked
    return make_padded_tensor(key, [_make_mask(member, key) for member in members], dim, False)
