"""Functions that only programs of tensordict call: its switch for lazy stacks, and the parser of printed collections."""

from __future__ import annotations

import re
from typing import Any

import torch

from td_core import TensorDict
from td_core.spi import SHORT_NAMES, Switch, make_dense

__all__ = ["lazy_legacy", "parse_tensor_dict_string", "set_lazy_legacy"]

_COMPACT_ROOT = re.compile(
    r"\w+\(batch_size=\[([\d,]*)\](?:, device=([\w:]+))?(?:, stack_dim=\d+)?, fields=\{"
)
_LONG_NODE = re.compile(r"\w+()\(\s*fields=\{")
_LONG_TAIL = re.compile(
    r"\s*,\s*(?:exclusive_fields=\{\s*\}\s*,\s*)?batch_size=torch\.Size\(\[([\d, ]*)\]\),\s*device=(?:None|([\w:]+))"
    r"(?:,\s*is_shared=\w+)?(?:,\s*stack_dim=\d+)?\)"
)
_LONG_LEAF = re.compile(
    r"\w+\(shape=torch\.Size\(\[([\d, ]*)\]\), device=([\w:]+), dtype=torch\.(\w+)(?:, \w+=[\w.]+)*\)"
)
_COMPACT_LEAF = re.compile(r"(\w+)\[([\d,]*)\](?!\{)(?:@([\w:]+))?")
_COMPACT_NODE = re.compile(r"\w*?(?:\[([\d,]*)\])?\{")
_KEY = re.compile(r"\s*(.*?): ", re.DOTALL)
_CLOSING = re.compile(r"\s*\}")
_NEXT = re.compile(r"\s*,\s*")

_DTYPES = {short: dtype for dtype, short in SHORT_NAMES.items()}


def parse_tensor_dict_string(s: str) -> TensorDict:
    """Build a TensorDict of zeros with the structure of a printed collection.

    Args:
        s: the result of ``repr``, in the compact or long form with the default print options. A lazy stack is
            parsed as a dense collection.

    Raises:
        ValueError: ``s`` is not a printed collection, or has an entry that is not a tensor.

    >>> text = "TensorDict(batch_size=[3], fields={a: i64[2], b: {c: f32[]}})"
    >>> parse_tensor_dict_string(text)["a"].shape
    torch.Size([3, 2])
    """
    text = s.strip()
    head = _COMPACT_ROOT.match(text)
    start = head or _LONG_NODE.match(text)
    if start is None:
        raise ValueError(f"no batch size found: this is not a printed collection: {text[:80]!r}")
    as_node, as_leaf = (_LONG_NODE, _LONG_LEAF) if head is None else (_COMPACT_NODE, _COMPACT_LEAF)
    size, device = ((), None) if head is None else (_ints(head[1]), head[2])
    # One frame per open node: its entries, its batch size, and its key in the parent.
    stack: list[tuple[dict[str, Any], tuple[int, ...], str]] = [({}, size, "")]
    position = start.end()
    while True:
        entries, size, key = stack[-1]
        if (closing := _CLOSING.match(text, position)) is not None:
            position = closing.end()
            if head is None:
                tail = _LONG_TAIL.match(text, position)
                if tail is None:
                    raise _unreadable(text, position - 1)
                size, device, position = _ints(tail[1]), tail[2], tail.end()
            stack.pop()
            node = make_dense(entries, torch.Size(size), None if device is None else torch.device(device))
            if not stack:
                break
            stack[-1][0][key] = node
        else:
            name = _KEY.match(text, position)
            if name is None:
                raise _unreadable(text, position)
            position = name.end()
            if (leaf := as_leaf.match(text, position)) is not None:
                entries[name[1]] = _long_leaf(leaf) if head is None else _compact_leaf(leaf, size, text)
                position = leaf.end()
            elif (below := as_node.match(text, position)) is not None:
                stack.append(({}, size + _ints(below[1] or ""), name[1]))
                position = below.end()
                continue
            else:
                raise _unreadable(text, name.start())
        if (separator := _NEXT.match(text, position)) is not None:
            position = separator.end()
    if text[position:] != ("" if head is None else ")"):
        raise _unreadable(text, position)
    return node


def _ints(dims: str) -> tuple[int, ...]:
    return tuple(int(dim) for dim in dims.split(",") if dim.strip())


def _long_leaf(leaf: re.Match[str]) -> torch.Tensor:
    dtype = getattr(torch, leaf[3], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"cannot read {leaf[0]!r}: torch.{leaf[3]} is not a dtype")
    return torch.zeros(_ints(leaf[1]), dtype=dtype, device=leaf[2])


def _compact_leaf(leaf: re.Match[str], size: tuple[int, ...], text: str) -> torch.Tensor:
    if leaf[1] not in _DTYPES:
        raise _unreadable(text, leaf.start())
    return torch.zeros((*size, *_ints(leaf[2])), dtype=_DTYPES[leaf[1]], device=leaf[3] or "cpu")


def _unreadable(text: str, position: int) -> ValueError:
    return ValueError(
        f"cannot read {text[position : position + 60].strip()!r} at character {position}: only tensors and "
        "collections, printed with the default options, can be read back"
    )


class set_lazy_legacy(Switch):  # noqa: N801  named as in tensordict
    """Make ``stack`` create lazy stacks, as a context manager or decorator, or permanently with ``.set()``.

    Other operations return the same contents with either setting: views of the leaves.

    Args:
        mode: whether ``torch.stack`` and ``TensorDict.stack`` create a lazy stack, unless ``out`` is given.

    >>> with set_lazy_legacy(True):
    ...     torch.stack([TensorDict(a=0), TensorDict(a=1)])
    LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={a: i64[]})
    """

    _name = "stacks_lazily"
    _reaches_threads = True

    def __init__(self, mode: bool) -> None:
        super().__init__(bool(mode))


def lazy_legacy(allow_none: bool = False) -> bool | None:
    """Return whether ``stack`` creates lazy stacks, see :class:`set_lazy_legacy`.

    Args:
        allow_none: return None if that was never set in this thread, instead of False.

    >>> lazy_legacy()
    False
    """
    mode: bool | None = set_lazy_legacy._settings.stacks_lazily
    return mode if allow_none else bool(mode)
