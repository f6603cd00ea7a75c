"""The inputs of a CUDA graph: tensors that each replay copies, and values that must equal the captured ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from td_core import TensorCollection
from td_core.spi import pytree as torch_pytree

from ._module_base import show_module
from ._module_keys import Key
from .module_errors import MissingKeyError

#: Location of an input: the key path of an entry, or the position of a leaf among the other arguments.
Place = tuple[str, ...] | int

#: The location of the batch size among the values; no entry has an empty key path.
BATCH_SIZE = ()


#: Types of arguments that contain no others: if a call has only these, torch's slow pytrees are not needed.
LEAVES = (Tensor, int, float, str, type(None))


class _Flat(NamedTuple):
    """Structure of arguments that are all leaves: number of positional arguments, and names of the others."""

    positional: int
    names: tuple[str, ...]


class GraphInputs(NamedTuple):
    """The inputs of one call: its tensors, its other values, and the structure of the arguments after a collection."""

    tensors: dict[Place, Tensor]
    values: dict[Any, Any]
    spec: Any  # None if there are no arguments after the collection

    def check_gradients(self, module: object) -> None:
        """Raise RuntimeError if a tensor requires gradients."""
        for place, tensor in self.tensors.items():
            if tensor.requires_grad:
                raise RuntimeError(
                    f"{show_module(module)} gives its inputs no gradients, and {_show(place)} requires them: detach it, "
                    "or let the function refer to it instead of taking it as an input"
                )

    def check_against(self, captured: GraphInputs, module: object) -> None:
        """Raise an error if these inputs differ from captured ones in anything but the elements of tensors."""
        if (
            self.spec != captured.spec
            or self.tensors.keys() != captured.tensors.keys()
            or self.values.keys() != captured.values.keys()
        ):
            self._refuse_structure(captured, show_module(module))
        for place, tensor in self.tensors.items():
            old = captured.tensors[place]
            if tensor.shape != old.shape or tensor.dtype != old.dtype:
                raise ValueError(
                    f"{show_module(module)} was captured with {_show(place)} of shape {list(old.shape)} and dtype "
                    f"{old.dtype}; "
                    f"got {list(tensor.shape)} and {tensor.dtype}"
                )
        for place, value in self.values.items():
            if not _is_equal(value, captured.values[place]):
                raise ValueError(
                    f"{show_module(module)} was captured with {_show(place)} = {captured.values[place]!r}, which is a "
                    "constant of the graph; "
                    f"got {value!r}. Give it as a tensor, or make another CudaGraphModule"
                )

    def _refuse_structure(self, captured: GraphInputs, who: str) -> NoReturn:
        places, before = {*self.tensors, *self.values}, {*captured.tensors, *captured.values}
        missing = [place for place in before - places if isinstance(place, tuple)]
        if missing and BATCH_SIZE in places:
            keys = [place[0] if len(place) == 1 else place for place in missing]
            raise MissingKeyError(who, f"misses its input{'s' if len(keys) > 1 else ''} {keys}", keys)
        raise ValueError(
            f"{who} was captured with {_show_all(before)}; got {_show_all(places)}, or arguments that nest in another way"
        )


def read_inputs(args: tuple[object, ...], kwargs: dict[str, Any], in_keys: list[Key] | None) -> GraphInputs:
    """Read the inputs of a call. Of a leading collection, read the entries at ``in_keys``, or all if it is empty."""
    tensors: dict[Place, Tensor] = {}
    values: dict[Any, Any] = {}
    kwargs = dict(sorted(kwargs.items()))
    others = (args, kwargs)
    spec: Any = None
    if args and isinstance(args[0], TensorCollection):
        others = args[1:], kwargs
        values[BATCH_SIZE] = args[0].batch_size
        for place, value in read_entries(args[0], in_keys or args[0].keys()):
            (tensors if isinstance(value, Tensor) else values)[place] = value
    if others[0] or others[1]:
        leaves = [*others[0], *others[1].values()]
        spec = _Flat(len(others[0]), tuple(others[1]))
        if not all(isinstance(leaf, LEAVES) for leaf in leaves):
            leaves, spec = torch_pytree.tree_flatten(others)
        for position, leaf in enumerate(leaves):
            (tensors if isinstance(leaf, Tensor) else values)[position] = leaf
    return GraphInputs(tensors, values, spec)


def read_entries(
    tensordict: TensorCollection, keys: Iterable[Key], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield key path and value of each leaf at or below some keys."""
    for key in keys:
        value = tensordict.get(key, None)
        path = (*above, key) if isinstance(key, str) else (*above, *key)
        if isinstance(value, TensorCollection):
            value = tensordict[key]  # [] returns a value, get() its node
        if isinstance(value, TensorCollection):
            yield from read_entries(value, value.keys(), path)
        elif value is not None:
            yield path, value


def copy_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: GraphInputs,
    in_keys: list[Key] | None,
    device: torch.device,
) -> tuple[dict[Place, Tensor], tuple[Any, ...], dict[str, Any]]:
    """Copy the tensors to a device. Return the copies, and the arguments of the call with the copies in them."""
    copies = {place: torch.empty_like(tensor, device=device) for place, tensor in inputs.tensors.items()}
    for place, copied in copies.items():
        copied.copy_(inputs.tensors[place])
    first: tuple[Any, ...] = ()
    if BATCH_SIZE in inputs.values:
        provided = args[0].select(*in_keys, strict=False) if in_keys else args[0]
        made = provided.copy().to(device)
        for place, copied in copies.items():
            if isinstance(place, tuple):
                made.set(place, copied)
        first = (made,)
    if inputs.spec is None:
        return copies, first, {}
    result = {**copies, **inputs.values}
    leaves = [result[position] for position in sorted(place for place in result if isinstance(place, int))]
    if isinstance(inputs.spec, _Flat):
        count, names = inputs.spec
        return copies, (*first, *leaves[:count]), dict(zip(names, leaves[count:]))
    others, kwargs = torch_pytree.tree_unflatten(leaves, inputs.spec)
    return copies, (*first, *others), kwargs


def _is_equal(left: object, other: object) -> bool:
    """Return True if two values are identical or equal; False if ``==`` does not give a bool."""
    if left is other:
        return True
    try:
        return type(left) is type(other) and bool(left == other)
    except (ValueError, RuntimeError):  # == of two arrays, for example
        return False


def _show(place: Any) -> str:
    if place == BATCH_SIZE:
        return "the batch size"
    if isinstance(place, int):
        return f"argument {place}"
    return f"entry {place[0] if len(place) == 1 else place!r}"


def _show_all(places: Iterable[object]) -> str:
    return ", ".join(sorted(_show(place) for place in places if place != BATCH_SIZE)) or "no inputs"
