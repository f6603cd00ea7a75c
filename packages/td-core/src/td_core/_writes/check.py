"""Check a write before the first leaf is written: the conditions under which torch refuses it.

The checks of one leaf raise an error with its key path. The checks of all leaves return False, and then the leaves are
checked one by one; leaves that passed are remembered on the node, so that the next write only compares identities.
"""

from __future__ import annotations

from contextlib import suppress
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .._buffers import find_refusal
from .._collection import Core, show_path
from .._foreach import PLAIN
from .._nested_components import has_same_components
from .._torch_private import find_refusing_transform, functorch_level, get_base, is_read_only_view
from ..errors import LockedError, StructureError

Path = tuple[str, ...]

_REQUIRES_GRAD = attrgetter("requires_grad")
_LAYOUT = attrgetter("layout")
_IS_NESTED = attrgetter("is_nested")
_IS_META = attrgetter("is_meta")
_IS_QUANTIZED = attrgetter("is_quantized")
_STRIDED = {torch.strided}

#: The ids of leaves that passed a check, and weak references whose callbacks clear them.
_Passed = tuple[list[int], list[ref[Tensor]]]


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
    raise StructureError(
        f"cannot write {show_path(path)} in place: it has shape {list(shape)} there, the value {list(right)}"
    )


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
        check_quantized(value, target, path)
    # The shapes of nested tensors compare as unequal unless they share offsets, so compare components.
    elif not has_same_components(value, target):
        raise add_path(StructureError("its components and those of the value have different shapes"), path)


def check_quantized(value: Tensor, target: Tensor, path: Path) -> None:
    """Raise StructureError if an entry is quantized and torch cannot copy a value of this dtype, shape or layout into it."""
    if target.is_quantized:
        try:
            target.detach().clone().copy_(value)
        except (RuntimeError, TypeError) as error:
            raise add_path(StructureError(str(error)), path) from error


def add_path(problem: RuntimeError, path: Path, where: str = "in place") -> RuntimeError:
    """Return an error with the key of the entry that cannot be written in its message."""
    return type(problem)(f"cannot write {show_path(path)} {where}: {problem}")


def find_problem(target: Tensor, value: object = None, *operands: object) -> RuntimeError | None:
    """Return the error of a write of a value, or of the result of operands, into an entry; None if torch can write it."""
    if type(target) not in PLAIN and (refusal := find_refusal(target)) is not None:
        return LockedError(refusal)
    why = _explain_autograd(target) or _explain_transform(target, value, *operands)
    if why is None and isinstance(value, Tensor):
        why = _explain_content(target, value)
    return None if why is None else StructureError(why)


def _explain_autograd(target: Tensor) -> str | None:
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


def are_writable(node: Core, leaves: list[Tensor]) -> bool:
    """Return True if torch can write all leaves in one call: plain, strided, not nested, quantized, expanded or sealed.

    Leaves that require grad are writable only while autograd is off.
    """
    if needs_grad(leaves):
        return False
    if has_passed(node, "leaves", leaves):
        # ``leaf.data = value`` or ``leaf.as_strided_()`` may have expanded a leaf since it passed.
        return is_all_contiguous(leaves) or not any(map(is_expanded, leaves))
    if not PLAIN.issuperset(map(type, leaves)) or any(map(_IS_NESTED, leaves)):
        return False
    if any(map(_IS_QUANTIZED, leaves)):
        return False
    # A contiguous leaf is not expanded, and is_contiguous() costs a tenth of reading the strides.
    if not is_all_contiguous(leaves) and any(map(_is_expanded_or_sparse, leaves)):
        return False
    # torch raises for an inference tensor only after it wrote all leaves.
    if not torch.compiler.is_compiling() and any(map(Tensor.is_inference, leaves)):
        if not torch.is_inference_mode_enabled():
            return False
    remember(node, "leaves", leaves)
    return True


def are_copyable(source: object, values: list[Any]) -> bool:
    """Return True if torch can copy all values of a source into strided leaves in one call, without autograd."""
    node = source if isinstance(source, Core) else None
    if node is not None and has_passed(node, "values", values):
        return not needs_grad(values)
    if not PLAIN.issuperset(map(type, values)) or needs_grad(values):
        return False
    if {*map(_LAYOUT, values)} != _STRIDED or any(map(_IS_META, values)) or any(map(_IS_QUANTIZED, values)):
        return False
    if node is not None:
        remember(node, "values", values)
    return True


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


def _is_expanded_or_sparse(leaf: Tensor) -> bool:
    return leaf.layout is not torch.strided or is_expanded(leaf)


def has_passed(node: Core, check: str, leaves: list[Tensor]) -> bool:
    """Return True if these very objects passed the check at an earlier write to this node."""
    if torch.compiler.is_compiling():
        return False
    passed: dict[str, _Passed] = getattr(node._inner(), "_passed", None) or {}
    return check in passed and list(map(id, leaves)) == passed[check][0]


def remember(node: Core, check: str, leaves: list[Tensor]) -> None:
    """Record on the node that leaves passed a check, until one of them is deleted; it does not keep them alive."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return  # outside of that mode, the leaves that were made in it do not pass
    holder: Any = node._inner()
    passed: dict[str, _Passed] | None = getattr(holder, "_passed", None)
    if passed is not None:
        ids = list(map(id, leaves))

        def forget(_: object) -> None:
            ids.clear()  # a new tensor may get the id of a deleted one

        passed[check] = ids, [ref(leaf, forget) for leaf in leaves]
        return
    with suppress(AttributeError):  # a kind of a plugin without the slot
        holder._passed = {}  # many nodes, such as slices, are written once: record from the second write on
