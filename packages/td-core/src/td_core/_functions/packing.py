"""Pack all leaves into one tensor and unpack them, and pad ragged entries to one shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .._plans.plans import wrap_dim
from .._python.public_names import set_module
from .._tree.defaults import show_path, type_error
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import Core, get_all_entries, make_dense
from .._tree.walks import has_entries
from ..errors import BatchSizeError, KeyMismatchError, StructureError
from ..typing import NestedKey


@set_module("td_core")
@dataclass(frozen=True)
class PackLayout:
    """Positions and shapes of the leaves in a packed tensor; the second result of :meth:`TensorDict.pack`.

    Attributes:
        keys: the keys of the leaves, in the order in which they are packed.
        shapes: the feature shape of each leaf.
        dim: the packed dim, negative.
        nested: per nested collection its key, its batch dims after those of the root, and its class (None for a plain
            collection).
        device: the device of the collection.
        cls: the class of the root, or None for a plain collection.
        offsets: the start of each leaf along the packed dim.
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
        """Unpack a tensor into a collection, whose batch size is the tensor's shape without the packed dim.

        Args:
            tensor: a tensor of size ``numel`` along ``dim``; the other dims become batch dims.

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
        nodes: dict[tuple[str, ...], Core] = {(): make_dense({}, batch_size, self.device)}
        for key, tail, _ in self.nested:
            path = unravel_key_to_tuple(key)
            nodes[path] = make_dense({}, torch.Size((*batch_size, *tail)), self.device)
            nodes[path[:-1]]._set_child(path[-1], nodes[path])
        for key, leaf in zip(self.keys, leaves, strict=True):
            *parents, last = unravel_key_to_tuple(key)
            nodes[tuple(parents)]._set_child(last, leaf)
        # Convert innermost nodes first, so that a class is built from entries that already have their classes.
        for key, _, cls in reversed(self.nested):
            if cls is not None:
                path = unravel_key_to_tuple(key)
                nodes[path[:-1]]._set_child(path[-1], cls.from_tensordict(nodes[path]))  # type: ignore[attr-defined]
        return nodes[()] if self.cls is None else self.cls.from_tensordict(nodes[()])  # type: ignore[attr-defined]


def pack_leaves(node: Core, dim: int, layout: PackLayout | None) -> tuple[Tensor, PackLayout]:
    """Concatenate all leaves along ``dim``, see ``pack``; return the packed tensor and its layout."""
    size = node.batch_size
    position = wrap_dim(dim, len(size) + 1, "pack: dim") - len(size) - 1
    left = _make_layout(node, position)
    if layout is not None:
        if not isinstance(layout, PackLayout):
            raise type_error("pack", layout, "a PackLayout as layout")
        _check_layout(layout, left)
        left = PackLayout(layout.keys, layout.shapes, position, layout.nested, layout.device, layout.cls)
    leaves = [node[key] for key in left.keys]
    for key, leaf in zip(left.keys, leaves, strict=True):
        if leaf.dtype != leaves[0].dtype:
            raise TypeError(
                f"cannot pack leaves of different dtypes: key {left.keys[0]!r} has {leaves[0].dtype}, key {key!r} "
                f"has {leaf.dtype}; convert them first, for example with float()"
            )
    if not leaves:
        packed = torch.zeros((*size, 0), device=node.device)
    else:
        # reshape(..., -1) raises for a batch without elements.
        packed = torch.cat([leaf.reshape(*size, math.prod(leaf.shape[len(size) :])) for leaf in leaves], -1)
    return packed.movedim(-1, position), left


def _make_layout(root: Core, dim: int) -> PackLayout:
    """Return the layout of the leaves of a collection, packed along a dim."""
    ndim = len(root.batch_size)
    keys: list[NestedKey] = []
    shapes: list[torch.Size] = []
    nested: list[tuple[NestedKey, torch.Size, type | None]] = []
    get_all_entries(root)
    for key, entry in root.items(True, sort=True):
        if isinstance(entry, Tensor):
            if entry.is_nested:
                raise StructureError(
                    f"cannot pack {show_path(unravel_key_to_tuple(key))}: it is a nested tensor, whose components have "
                    "shapes of their own; to_padded_tensor() the collection first"
                )
            keys.append(key)
            shapes.append(entry.shape[ndim:])
        elif has_entries(entry):
            get_all_entries(entry)
            nested.append((key, entry.batch_size[ndim:], _get_class(entry)))
        else:
            raise StructureError(f"cannot pack {show_path(unravel_key_to_tuple(key))}: it is non-tensor data")
    return PackLayout(tuple(keys), tuple(shapes), dim, tuple(nested), root.device, _get_class(root))


def _get_class(node: Core) -> type | None:
    """Return the class of a node if it has ``from_tensordict``, or None for a plain node."""
    return type(node) if hasattr(type(node), "from_tensordict") else None


def _check_layout(layout: PackLayout, left: PackLayout) -> None:
    """Raise an error unless the leaves of two layouts have the same keys and shapes."""
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
