"""Check a write before the first leaf is written: the conditions under which torch refuses it, and errors with key paths.

The checks of one leaf raise an error with its key path. The checks of all leaves return False, and then the leaves are
checked one by one. The node remembers the forms of the tensors that passed: a write of tensors of these forms compares them
in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._torch.kernels import PLAIN
from .._torch.private import (
    find_refusing_transform,
    functorch_level,
    get_base,
    guard_forms,
    is_read_only_view,
)
from .._tree.components import has_same_components
from .._tree.defaults import show_path
from .._tree.node import Core
from .._tree.stored_leaves import find_refusal
from .._tree.walks import list_holders, visit
from ..errors import LockedError, StructureError

Path = tuple[str, ...]

#: Errors that torch raises for an unsupported leaf; they are raised again with the key in the message.
LEAF_ERRORS = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError)

_REQUIRES_GRAD = attrgetter("requires_grad")
_LAYOUT = attrgetter("layout")
_IS_NESTED = attrgetter("is_nested")
_IS_META = attrgetter("is_meta")
_IS_QUANTIZED = attrgetter("is_quantized")
_STRIDED = {torch.strided}

#: By key, the guard of the tensors that passed a check; None after the first time.
_Passed = dict[object, Callable[..., bool] | None]
#: Number of guards of one node.
_REMEMBERED = 16


def check_fits(value: Tensor | Core, shape: torch.Size, path: Path) -> None:
    """Raise StructureError if a value does not broadcast to the shape of its entry."""
    right: torch.Size = value.shape  # type: ignore[union-attr]
    if right == shape:
        return
    ndim = len(right)
    if ndim <= len(shape) and all(
        a in (1, b) for a, b in zip(right, shape[len(shape) - ndim :], strict=True)
    ):
        return
    raise add_path(StructureError(f"it has shape {list(shape)} there, the value {list(right)}"), path)


def check_writable(target: Tensor, path: Path, value: Tensor | None = None) -> None:
    """Raise StructureError if torch cannot write into an entry, or cannot copy this value into it."""
    problem = find_problem(target, value) or find_expansion(target)
    if problem is not None:
        raise add_path(problem, path)


def check_copied(target: Tensor, path: Path, value: Tensor) -> None:
    """Raise StructureError if torch cannot copy this value into an entry, with broadcasting."""
    check_writable(target, path, value)
    if not target.is_nested:
        check_fits(value, target.shape, path)
        if target.is_quantized:
            check_trial(Tensor.copy_, path, "in place", target, value)
    # The shapes of nested tensors compare as unequal unless they share offsets, so compare components.
    elif not has_same_components(value, target):
        raise add_path(StructureError("its components and those of the value have different shapes"), path)


def check_trial(
    write: Callable[..., object], path: Path, where: str, target: Tensor, *operands: object
) -> None:
    """Raise StructureError if torch refuses a write, which is tried on a copy of the target."""
    try:
        write(target.detach().clone(), *operands)
    except (RuntimeError, TypeError) as error:
        raise add_path(StructureError(str(error)), path, where) from error


def add_path(problem: RuntimeError, path: Path, where: str = "in place") -> RuntimeError:
    """Return an error with the key of the entry that cannot be written in its message."""
    return type(problem)(f"cannot write {show_path(path)} {where}: {problem}")


def rephrase_error(error: Exception, message: str) -> Exception:
    """Return an error of the same type with a new message, or the error itself if its type may need other arguments."""
    return type(error)(message) if type(error) in (*LEAF_ERRORS, LockedError) else error


def describe_leaf(node: Core, leaf: Tensor) -> str:
    """Return the key path of a leaf as text for messages."""
    path = find_path(node, leaf)
    return show_path(path) if path else "a leaf"


def find_path(node: Core, leaf: Tensor) -> tuple[str, ...]:
    """Return the first key path of a leaf, or () if it is not in the tree."""
    return next(iter(_find_paths(node, leaf)), ())


def show_keys(node: Core, leaves: list[Tensor]) -> str:
    """Return the key paths of leaves as text, each once."""
    return " and ".join(dict.fromkeys(show_path(path) for leaf in leaves for path in _find_paths(node, leaf)))


def _find_paths(node: Core, leaf: Tensor) -> list[tuple[str, ...]]:
    """Return the key paths of a leaf. In a lazy stack, search the members, which hold the leaves."""
    paths: list[tuple[str, ...]] = []

    def collect(level: Core, path: tuple[str, ...]) -> Iterator[tuple[object, tuple[str, ...]]]:
        for holder in list_holders(level):
            children = dict(holder._children())
            if not children and any(own is leaf for own in holder._leaves()):
                paths.append(path)
            for key, child in children.items():
                if child is leaf:
                    paths.append((*path, key))
                elif isinstance(child, Core):
                    yield child, (*path, key)

    visit(collect, node, ())
    return paths


def find_problem(target: Tensor, value: object = None, *operands: object) -> RuntimeError | None:
    """Return the error of a write of a value, or of the result of operands, into an entry; None if torch can write it."""
    if type(target) not in PLAIN and (refusal := find_refusal(target)) is not None:
        return LockedError(refusal)
    why = _explain_autograd(target) or _explain_transform(target, value, *operands)
    if why is None and isinstance(value, Tensor):
        why = _explain_content(target, value)
    return None if why is None else StructureError(why)


def _explain_autograd(target: Tensor) -> str | None:
    """Return why autograd refuses a write into a leaf; None if it allows it."""
    if is_sealed(target):
        return "it was made under torch.inference_mode(); write under that, or clone() the collection first"
    if not (target.requires_grad and torch.is_grad_enabled()):
        return None
    base = get_base(target)
    if target.is_leaf or (base is not None and base.is_leaf):
        return (
            f"it is a {'leaf' if base is None else 'view of a leaf'} that requires grad; write under torch.no_grad(), or "
            "into td.data"
        )
    if is_read_only_view(target):
        return (
            "it requires grad, and is a view of which autograd lets nobody write, as those of unbind() and split(); "
            "clone() the collection first"
        )
    return None


def _explain_transform(target: Tensor, *operands: object) -> str | None:
    """Return why an active transform of torch.func refuses a write of operands into a leaf; None if none does."""
    if functorch_level() is None or (refusing := find_refusing_transform(target, operands)) is None:
        return None
    why = "which maps over the value" if refusing == "vmap" else "which would not record the write"
    return f"it is from outside of torch.func.{refusing}, {why}; pass the collection as an argument, or clone() it inside"


def _explain_content(target: Tensor, value: Tensor) -> str | None:
    """Return why torch cannot copy between the two layouts, or from a meta or quantized tensor; None if it can."""
    if value.layout is not target.layout or value.is_nested != target.is_nested:
        forms = [
            f"{'a nested tensor' if leaf.is_nested else 'a tensor'} of the layout {leaf.layout}"
            for leaf in (target, value)
        ]
        return f"it is {forms[0]}, the value {forms[1]}; use set() to replace it"
    if value.is_meta and not target.is_meta:
        return "the value is on the meta device, and has no content"
    return "the value is quantized" if value.is_quantized and not target.is_quantized else None


def is_sealed(leaf: Tensor) -> bool:
    """Return True if a leaf is an inference tensor and inference mode is off, so that torch refuses to write it."""
    if torch.compiler.is_compiling():
        return False
    return leaf.is_inference() and not torch.is_inference_mode_enabled()


def find_expansion(target: Tensor) -> RuntimeError | None:
    """Return the error of a write into an expanded entry; None if it is not expanded."""
    if not is_expanded(target):
        return None
    return StructureError(
        "it is expanded, so several of its elements are one in memory; clone() the collection first"
    )


def is_expanded(leaf: Tensor) -> bool:
    """Return True if a leaf has a dim of stride zero and size above one.

    >>> is_expanded(torch.zeros(1).expand(3)), is_expanded(torch.zeros(3))
    (True, False)
    """
    if leaf.layout is not torch.strided or leaf.is_contiguous() or leaf.is_nested:
        return False
    return 0 in leaf.stride() and any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape))


def are_writable(leaves: list[Tensor]) -> bool:
    """Return True if torch can write all leaves in one call: plain, strided, not nested, quantized, expanded or sealed.

    Leaves that require grad are writable only while autograd is off.
    """
    if not PLAIN.issuperset(map(type, leaves)) or needs_grad(leaves) or any(map(_IS_NESTED, leaves)):
        return False
    if any(map(_IS_QUANTIZED, leaves)):
        return False
    # A contiguous leaf is not expanded, and is_contiguous() costs a tenth of reading the strides.
    if not is_all_contiguous(leaves) and (not is_all_strided(leaves) or any(map(is_expanded, leaves))):
        return False
    # torch raises for an inference tensor only after it wrote all leaves.
    return (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or not any(map(Tensor.is_inference, leaves))
    )


def are_copyable(values: list[Any]) -> bool:
    """Return True if torch can copy all values into strided leaves in one call, without autograd."""
    return (
        PLAIN.issuperset(map(type, values))
        and not needs_grad(values)
        and is_all_strided(values)
        and not any(map(_IS_META, values))
        and not any(map(_IS_QUANTIZED, values))
    )


def have_same_sizes(leaves: list[Tensor], values: list[Tensor]) -> bool:
    """Return True if each value has the shape of its leaf; False if torch cannot compare them."""
    try:
        return all(map(Tensor.is_same_size, leaves, values))
    except (RuntimeError, ValueError):  # a nested tensor and a dense one
        return False


def needs_grad(leaves: list[Tensor]) -> bool:
    """Return True if autograd records writes to a leaf, or of a value."""
    return torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, leaves))


def is_all_contiguous(leaves: list[Tensor]) -> bool:
    """Return True if all leaves are contiguous; a sparse leaf is not."""
    try:
        return all(map(Tensor.is_contiguous, leaves))
    except RuntimeError:
        return False


def is_all_strided(leaves: list[Tensor]) -> bool:
    """Return True if all leaves have the strided layout."""
    return {*map(_LAYOUT, leaves)} == _STRIDED


def has_passed(node: Core, check: str, tensors: list[Tensor]) -> bool:
    """Return True if tensors have the forms of some that passed a check at an earlier write to this node; not for graphs."""
    passed: _Passed | None = getattr(node._inner(), "_passed", None)
    if not passed:
        return False
    try:
        same = passed.get(_make_key(check, tensors))
        return same is not None and not any(map(_IS_NESTED, tensors)) and same(*tensors)
    except (AttributeError, RuntimeError):  # an item is not a tensor, or nested
        return False


def remember(node: Core, check: str, tensors: list[Tensor]) -> None:
    """Record on the node that tensors passed a check, from the second time on: many nodes, such as slices, are written once."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return  # outside of that mode, the leaves that were made in it do not pass
    holder: Any = node._inner()
    key = _make_key(check, tensors)
    passed: _Passed | None = getattr(holder, "_passed", None)
    if passed is None:
        with suppress(AttributeError):  # a kind of a plugin without the slot
            holder._passed = {key: None}
    elif key not in passed:
        if len(passed) >= _REMEMBERED:
            passed.clear()
        passed[key] = None
    elif len({*map(id, tensors)}) == len(tensors):  # a guard refuses repeated tensors
        passed[key] = guard_forms(tensors)


def _make_key(check: str, tensors: list[Tensor]) -> object:
    """Return the key under which a node remembers a check: writes of several forms can take turns."""
    return check, torch.is_grad_enabled(), len(tensors), tensors[0].shape, tensors[0].dtype
