"""Dispatch ``torch.*`` functions on collections: a table from each function to the method that implements it.

torch calls ``__torch_function__`` if one of the tensor arguments of a function is a collection. A function that is not
in the table raises TypeError: it is not defined for leaves of different shapes, or not implemented.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.dtypes import as_dtype
from .._torch.kernels import Op
from .._torch.operators import OPERATIONS
from .._tree.devices import as_device, set_device_labels
from .._tree.node import Core
from .casting import pair_leaves
from .joining import cat, stack
from .operands import combine, run_each_leaf, write_result

Handler = Callable[..., Any]

#: Keyword names of torch functions that differ from those of the methods: torch's name -> method's name.
KEYWORDS: dict[object, dict[str, str]] = {
    **{join: {"tensors": "input"} for join in (torch.cat, torch.concat, torch.concatenate, torch.stack)},
    torch.broadcast_to: {"size": "shape"},
    torch.clamp_max: {"max": "other"},
    torch.clamp_min: {"min": "other"},
    torch.max: {"other": "dim"},
    torch.min: {"other": "dim"},
    torch.pow: {"exponent": "other"},
    torch.reshape: {"shape": "size"},
    torch.swapdims: {"dim0": "axis0", "dim1": "axis1"},
    torch.unflatten: {"sizes": "unflattened_size"},
}

#: Methods that have the name of a torch function, but another meaning.
_OTHER_MEANING = {
    "as_tensor",
    "device",
    "dtype",
    "empty",
    "fill_",
    "load",
    "norm",
    "save",
    "scatter",
    "select",
}

_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "randint_like", "zeros_like")

_JOINS = {"hstack": 1, "vstack": 0, "row_stack": 0, "dstack": 2, "column_stack": 1}

#: The losses of torch.nn.functional that compare an input and a target element by element.
_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)


def _method(name: str) -> Handler:
    """Return a handler that calls the method of a name on the first argument."""

    def call(input: object, *args: object, out: object = None, **kwargs: object) -> object:
        found = getattr(input, name)
        if type(found) is not MethodType:  # a field of the class hides the method
            found = next(vars(base)[name] for base in reversed(type(input).__mro__) if name in vars(base))
            args = (input, *args)
        if out is not None and "out" in signature(found).parameters:
            kwargs["out"], out = out, None
        return _write_out(out, found(*args, **kwargs))

    return call


def _write_out(out: object, result: object) -> object:
    """Write a collection, or values and indices, into ``out``, and return that; return the result if it is None."""
    if out is None:
        return result
    if isinstance(result, tuple) and isinstance(out, (tuple, list)):
        return type(result)([_write_out(into, part) for into, part in zip(out, result, strict=True)])
    if not isinstance(result, Core):
        raise TypeError(f"out= is for results that are collections; got a {type(result).__name__}")
    return write_result(out, result.batch_size, result)


def suggest_line(name: str, args: Iterable[object], kwargs: Mapping[str, object]) -> str:
    """Return the line that calls a torch function on each leaf, with the arguments of a call on collections."""
    count = 0

    def show(item: object) -> str:
        nonlocal count
        if isinstance(item, Core):
            count += 1
            return f"x{count}"
        return "tensor" if isinstance(item, Tensor) else reprlib.repr(item)

    shown = ", ".join([*map(show, args), *[f"{key}={show(item)}" for key, item in kwargs.items()]])
    leaves, others = (
        ", ".join(f"{word}{i}" for i in range(first, count + 1)) for word, first in (("x", 1), ("td", 2))
    )
    return f"td.apply(lambda {leaves}: {name}({shown}){', ' * bool(others)}{others})"


def _two_operands(name: str, method: str, reflected: str) -> Handler:
    """Return a handler that calls a method of the first operand, or the reflected one of the second."""
    function = getattr(torch, name)
    swapped = Op(None, lambda leaf, first: function(first, leaf))

    def call(input: object, other: Any, *, out: object = None, **kwargs: object) -> object:
        if isinstance(input, Core):
            return _write_out(out, getattr(input, method)(other, **kwargs))
        if kwargs:
            raise TypeError(
                f"torch.{name}() of a {type(input).__name__} and a collection: the collection comes first"
            )
        result = getattr(other, reflected)(input) if reflected else combine(other, name, swapped, input)
        if result is NotImplemented:
            raise TypeError(
                f"torch.{name}() takes no {type(input).__name__} beside a collection; got {input!r}"
            )
        return _write_out(out, result)

    return call


def _like(function: Callable[..., Tensor], input: object, *args: object, **kwargs: Any) -> object:
    """Call a ``*_like`` function on each leaf, and return a collection of the same structure."""
    if not isinstance(input, Core):
        raise TypeError(f"torch.{function.__name__}() takes a collection as its first argument only")
    if "dtype" in kwargs:
        kwargs["dtype"] = as_dtype(kwargs["dtype"])  # torch.compile cannot trace a Python class as dtype
    leaf = (lambda leaf: function(leaf, *args, **kwargs)) if args else partial(function, **kwargs)
    result = run_each_leaf(function.__name__, input, leaf if args or kwargs else function)
    device = kwargs.get("device")
    if device is not None:
        set_device_labels(result, as_device(device))
    return result


def _loss(name: str) -> Handler:
    """Return a handler that computes a loss of ``nn.functional`` for each pair of leaves, then reduces it."""
    function: Callable[..., Tensor] = getattr(nn.functional, name)
    names = [*signature(function).parameters][2:]

    def call(input: object, target: object, *args: object, **kwargs: object) -> object:
        options = {key: value for key, value in [*zip(names, args), *kwargs.items()] if value is not None}
        if not (isinstance(input, Core) and isinstance(target, Core)) or any(
            isinstance(value, Core) for value in options.values()
        ):
            raise TypeError(f"{name}() takes two collections, and numbers or tensors as options")
        reduction = options.pop("reduction", "mean")
        if not {"size_average", "reduce"}.isdisjoint(options):
            raise TypeError(f"{name}() of collections takes reduction= in place of size_average and reduce")
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"the reduction of {name}() is 'none', 'mean' or 'sum'; got {reduction!r}")
        first = input
        result = first.apply(lambda leaf, other: function(leaf, other, reduction="none", **options), target)
        return result if reduction == "none" else getattr(result, reduction)()

    return call


def _join_along(name: str, dim: int) -> Handler:
    """Return a handler that concatenates collections along a dim, which they get first if they lack it."""

    def call(tensors: Sequence[Any], *, out: object = None) -> object:
        items = [item.atleast_1d() if dim == 1 else item.atleast_2d() for item in tensors]
        if name != "hstack":
            items = [item.unsqueeze(-1) if item.batch_dims <= dim else item for item in items]
        return cat(items, min(dim, items[0].batch_dims - 1), out=out)

    return call


def _where(condition: object, input: object = None, other: object = None, *, out: object = None) -> object:
    """Choose by a condition between a collection and another operand, in either order."""
    if isinstance(input, Core):
        return input.where(condition, other, out=out)
    if not isinstance(other, Core) or isinstance(condition, Core):
        raise TypeError("torch.where() takes a collection as its second or third argument only")
    return other.where(condition.logical_not(), input, out=out)  # type: ignore[attr-defined]


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> object:
    """Compute torch.autograd.grad of collections; if ``inputs`` is a collection, so is the result."""
    outputs, inputs, grad_outputs = map(_get_single, (outputs, inputs, grad_outputs))
    computed, gradients = outputs, grad_outputs
    if isinstance(outputs, Core):
        # Leaves without gradients, such as indices, take no part; torch raises its error if there are no others.
        leaves = outputs._leaves()
        computed = [leaf for leaf in leaves if leaf.requires_grad] or leaves
    if isinstance(grad_outputs, Core):
        if not isinstance(outputs, Core):
            raise TypeError("torch.autograd.grad() takes a collection as grad_outputs where outputs is one")
        pairs = pair_leaves(outputs, grad_outputs, attrgetter("requires_grad"))
        computed, gradients = [leaf for leaf, _ in pairs], [given for _, given in pairs]
    if not isinstance(inputs, Core):
        return torch.autograd.grad(computed, inputs, gradients, *args, **kwargs)
    leaves = inputs._leaves()
    result = torch.autograd.grad(computed, leaves, gradients, *args, **kwargs)
    by_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, result)}
    return inputs.apply(lambda leaf: by_leaf[id(leaf)])


def _get_single(provided: object) -> object:
    """Unwrap a collection from the one-item tuple that torch puts it in; raise if there are several."""
    if not isinstance(provided, (tuple, list)) or not any(isinstance(item, Core) for item in provided):
        return provided
    if len(provided) > 1:
        raise TypeError(
            f"torch.autograd.grad() takes one collection; got {len(provided)} in a {type(provided).__name__}"
        )
    return provided[0]


def _make_table() -> dict[object, Handler]:
    """Return the handlers of operations, losses, joins and the other torch functions that need their own."""
    table: dict[object, Handler] = {}
    for row in OPERATIONS:
        has_two = row.kind in ("binary", "comparison")
        for name in row.functions:
            if not has_two:
                table[getattr(torch, name)] = _method(row.method)
                continue
            handler = _two_operands(name, row.method, row.method_of_second)
            places = [(torch, name), (Tensor, name), (Tensor, f"__{row.dunder}__")]
            table.update({getattr(place, key): handler for place, key in places if hasattr(place, key)})
    for name in _LIKE:
        table[getattr(torch, name)] = partial(_like, getattr(torch, name))
    for joiner in (torch.cat, torch.concat, torch.concatenate):
        table[joiner] = cat
    for name, dim in _JOINS.items():
        table[getattr(torch, name)] = _join_along(name, dim)
    for name in _LOSSES:
        table[getattr(nn.functional, name)] = _loss(name)
    for product in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
        table[product] = _two_operands("matmul", "matmul", "__rmatmul__")
    table[torch.stack] = stack
    table[torch.where] = _where
    table[torch.autograd.grad] = _grad
    return table


#: Implementation per torch function.
TABLE = _make_table()


def add_methods(collection: type) -> None:
    """Add each torch function that has the name of a public method, unless the table has it."""
    for name in dir(collection):
        function = getattr(torch, name, None)
        is_function = isinstance(function, (FunctionType, BuiltinFunctionType))
        if is_function and not name.startswith("_") and name not in _OTHER_MEANING:
            TABLE.setdefault(function, _method(name))
