"""Print collections: the compact form, the long form, and the HTML tree for notebooks.

Printing stacks and copies nothing: a lazy stack is described from its members.
"""

from __future__ import annotations

import html
import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._encode.inspection import show_size
from .._python.settings import SETTINGS
from .._torch.dtypes import SHORT_NAMES
from .._transforms.pytree import leaves_below
from .._tree.node import Child, Core, make_dense
from .._tree.ragged import get_display_shape, merge_shapes
from .._tree.stored_leaves import is_stored
from .._tree.walks import expand, has_entries
from ..errors import StructureError

_WIDTH = 80

#: Printed for a declared field without an entry; such fields come last, in order of declaration.
ABSENT = "None"


class Ragged(NamedTuple):
    """Metadata of an entry of a lazy stack, read without stacking it; -1 for dims that differ between members.

    An uninitialized parameter of a lazy module is described in the same way.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype | None
    device: torch.device
    name: str
    devices: str


class PrintedLeaf(NamedTuple):
    """One entry to print.

    Attributes:
        key: its key.
        entry: a tensor, the metadata of one, a node, or the text to print.
        name: class name of ``entry`` in the compact form; None prints the name of its type.
    """

    key: str
    entry: Any
    name: str | None = None


class PrintedMembers(NamedTuple):
    """What is printed of a lazy stack: the stack dim and the entries that not all members have.

    Attributes:
        stack_dim: position of the stack dim.
        exclusive: (position, member, entries) of each member with entries that other members lack.
    """

    stack_dim: int
    exclusive: list[tuple[int, object, list[PrintedLeaf]]]


class PrintedNode(NamedTuple):
    """What is printed of a node.

    Attributes:
        fields: its entries.
        members: what is printed of the members of a lazy stack.
        is_declared: the class declares the entries, so that the long form prints them as attributes.
        text: what is printed in place of a node without entries, inside its parent.
    """

    fields: list[PrintedLeaf]
    members: PrintedMembers | None = None
    is_declared: bool = False
    text: str | None = None

    def of_class(self, absent: Iterable[str], hidden: Container[str]) -> PrintedNode:
        """Return what is printed of a class that wraps the node: all fields, ``absent`` ones last, except the ``hidden``."""
        fields = [*self.fields, *[PrintedLeaf(name, ABSENT) for name in absent]]
        return PrintedNode([field for field in fields if field.key not in hidden], None, True)


def print_collection(node: Core) -> str:
    """Return the compact form of a collection, or the long form if the print options select it."""
    options = SETTINGS.print_options
    if options["compact"]:
        return _print_compact(node, options)
    return _render((node, 0, options), _print_long)


def print_for_notebook(node: Core) -> str | None:
    """Return the HTML of a collection, or None if the print options switch it off."""
    if not SETTINGS.print_options["html"]:
        return None
    text = _render((None, node, None), _print_html) if has_entries(node) else html.escape(repr(node))
    return f'<div style="font-family:monospace;line-height:1.4">{text}</div>'


def print_leaf(key: str, child: object) -> PrintedLeaf:
    """Return what is printed of an entry."""
    # The pytree functions of torch may store a result of any type in place of a leaf.
    if isinstance(child, Tensor):
        return PrintedLeaf(key, read_leaf_metadata(child) if is_lazy(child) else child)
    return PrintedLeaf(key, child if isinstance(child, Core) else type(child).__name__)


def read_leaf_metadata(leaf: Tensor | Ragged) -> Ragged:
    """Return the metadata of a leaf, or the same object if it is the metadata of an entry of a lazy stack."""
    if isinstance(leaf, Ragged):
        return leaf
    return Ragged(get_display_shape(leaf), leaf.dtype, leaf.device, type(leaf).__name__, str(leaf.device))


def merge_fields(fields: Sequence[PrintedLeaf], dim: int) -> PrintedLeaf:
    """Return what is printed of an entry of a lazy stack along ``dim``, given that of the entry of each member."""
    key, first, name = fields[0]
    entries = [field.entry for field in fields]
    if all(isinstance(entry, (Tensor, Ragged)) for entry in entries):
        return PrintedLeaf(key, _merge_leaves(entries, dim))
    if all(isinstance(entry, Core) for entry in entries):
        with suppress(StructureError):  # nodes of different kinds cannot be stacked
            text = None if has_entries(first) else first._print_node().text
            return PrintedLeaf(key, first._stack_lazily(entries, dim), text or name or type(first).__name__)
    names = [_name_entry(entry) for entry in entries]
    return PrintedLeaf(key, names[0] if len(set(names)) == 1 else f"[{', '.join(names)}]")


def _name_entry(entry: object) -> str:
    if isinstance(entry, Ragged):
        return entry.name
    return entry if isinstance(entry, str) else type(entry).__name__


def _merge_leaves(leaves: Sequence[Tensor | Ragged], dim: int) -> Ragged:
    """Return the metadata of the stack of some leaves along ``dim``, as far as they agree."""
    described = [read_leaf_metadata(leaf) for leaf in leaves]
    shapes = [leaf.shape for leaf in described]
    shape = (-1,) if (-1,) in shapes else merge_shapes(shapes, dim)
    devices = ",".join(sorted({device for leaf in described for device in leaf.devices.split(",")}))
    return described[0]._replace(shape=shape, devices=devices)


def _tail(entry: Any, node: Core) -> str:
    """Format the feature dims of a leaf (those after the batch dims)."""
    shape = _shape(entry)
    return _dims(shape if shape == (-1,) else shape[len(node.batch_size) :])


def _dims(shape: Any) -> str:
    return f"[{','.join(map(str, shape))}]"


def _sort_fields(fields: list[PrintedLeaf], options: dict[str, object]) -> list[PrintedLeaf]:
    if options["sort_keys"] == "alphabetical":
        fields = sorted(fields, key=lambda field: (1, "") if field.entry is ABSENT else (0, field.key))
    limit = options["max_entries"]
    if not isinstance(limit, int) or len(fields) <= limit:
        return fields
    first, last = limit - limit // 2, len(fields) - limit // 2
    return [*fields[:first], PrintedLeaf("...", f"{last - first} more entries"), *fields[last:]]


class _Line:
    """A part of the compact form: a text, and the nested parts in braces after it, if any."""

    __slots__ = ("parts", "short", "text")

    def __init__(self, text: str, parts: list[_Line] | None = None) -> None:
        self.text = text
        self.parts = parts
        self.short: str | None = text  # the text of the part on one line; None if that is too long


def _print_compact(root: Core, options: dict[str, Any]) -> str:
    """Return the compact form, with as many levels on a line as fit."""
    names: list[str] = []
    if options["show_batch_size"]:
        names.append(f"batch_size={_dims(root.batch_size)}")
    if options["show_device"] and root.device is not None:
        names.append(f"device={root.device}")
    fields, stack, *_ = root._print_node()
    if stack is not None:
        names.append(f"stack_dim={stack.stack_dim}")
    parts: list[_Line] = []
    groups = [_Line(f"{type(root).__name__}({', '.join([*names, 'fields='])}", parts)]
    everything = groups.copy()
    todo: list[tuple[list[_Line], Core, list[PrintedLeaf]]] = [(parts, root, fields)]
    if stack is not None and stack.exclusive:
        members: list[_Line] = []
        groups.append(_Line(", exclusive_fields=", members))
        for i, member, right in stack.exclusive:
            parts = []
            members.append(_Line(f"{i}: ", parts))
            todo.append((parts, member, right))
        everything += [groups[1], *members]
    plain = type(make_dense({}, torch.Size()))
    with_device = options["show_field_device"] and root.device is None
    for parts, node, fields in todo:
        for field in _sort_fields(fields, options):
            part = _compact_entry(field, node, with_device, options, plain)
            parts.append(part)
            everything.append(part)
            if part.parts is not None:
                todo.append((part.parts, field.entry, field.entry._print_node().fields))
    for line in reversed(everything):
        if line.parts is not None:
            line.short = _join(line)
    return _lay_out(groups)


def _lay_out(groups: list[_Line]) -> str:
    """Join the groups of the compact form on one line, or break those that are too long."""
    total = "".join(group.short or " " * _WIDTH for group in groups) + ")"
    if len(total) <= _WIDTH and all(group.short is not None for group in groups):
        return total
    out: list[str] = []
    column = 0
    for i, group in enumerate(groups):
        closer = ")" if i == len(groups) - 1 else ""
        inline = not group.parts or (
            i > 0 and group.short is not None and column + len(group.short) + len(closer) <= _WIDTH
        )
        if inline:
            out.append((group.short or "") + closer)
        else:
            out.append(group.text + "{")
            out.extend(_break_lines(group, closer))
        column = len("".join(out).rpartition("\n")[2])
    return "".join(out)


def _compact_entry(
    field: PrintedLeaf, node: Core, with_device: bool, options: dict[str, object], plain: type
) -> _Line:
    key, entry, name = field
    if isinstance(entry, str):
        return _Line(f"{key}: {entry}")
    if isinstance(entry, (Tensor, Ragged)):
        dtype = SHORT_NAMES.get(entry.dtype, "None") if options["show_dtype"] else ""
        text = f"{key}: {dtype}{_tail(entry, node)}"
        devices = entry.devices if isinstance(entry, Ragged) else str(entry.device)
        if with_device and devices != "cpu":
            text += f"@{devices}"
        return _Line(text)
    if not has_entries(entry):
        return _Line(f"{key}: {entry._print_node().text if name is None else name}")
    name = type(entry).__name__ if name is None else name
    tail = entry.batch_size[len(node.batch_size) :]
    return _Line(f"{key}: {'' if name == plain.__name__ else name}{_dims(tail) if tail else ''}", [])


def _join(line: _Line) -> str | None:
    parts = line.parts or []
    length = len(line.text) + 2 + 2 * len(parts)
    shorts: list[str] = []
    for part in parts:
        if part.short is None:
            return None
        length += len(part.short)
        if length > 3 * _WIDTH:
            return None
        shorts.append(part.short)
    return f"{line.text}{{{', '.join(shorts)}}}"


def _break_lines(group: _Line, closer: str) -> Iterator[str]:
    """Yield the parts of a group, one per line, and the closing brackets."""
    todo: list[tuple[_Line, int, str]] = []

    def open_(line: _Line, indent: int, close: str) -> None:
        parts = line.parts or []
        endings = [*[","] * (len(parts) - 1), "}" + close]
        todo.extend((part, indent, ending) for part, ending in zip(reversed(parts), reversed(endings)))

    open_(group, 4, closer)
    # By hand: the row `repr` of benchmarks/ops.py.
    while todo:
        line, indent, ending = todo.pop()
        yield "\n" + " " * indent
        if line.short is not None and (not line.parts or indent + len(line.short) + len(ending) <= _WIDTH):
            yield line.short + ending
        else:
            yield line.text + "{"
            open_(line, indent + 4, ending)


def _render(root: Any, pieces_of: Callable[..., list[object]]) -> str:
    """Render a tree without recursion; ``pieces_of`` returns texts and argument tuples of nested nodes."""
    pieces = expand([root], lambda piece: () if isinstance(piece, str) else reversed(pieces_of(*piece)))
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _print_long(node: Core, indent: int, options: dict[str, object]) -> list[object]:
    """Return the pieces of the long form of a node."""
    pad = " " * (indent + 4)
    fields, stack, is_declared, _ = node._print_node()
    fields = _sort_fields(fields, options)
    ending: list[str] = []
    if options["show_batch_size"]:
        ending.append(f"batch_size={node.batch_size}")
    if options["show_device"]:
        ending.append(f"device={node.device}")
    if options["show_is_shared"]:
        ending.append(f"is_shared={bool(_leaves(node)) and node.is_shared()}")
    pieces: list[object] = [f"{type(node).__name__}(\n"]
    if is_declared:
        for field in fields:
            pieces += [f"{pad}{field.key}=", *_long_entry(field, indent + 4, options), ",\n"]
    else:
        shown = _long_fields(fields, indent + 8, options)
        pieces += [f"{pad}fields={{\n", *shown, f"{'' if fields else pad}}},\n"]
        if stack is not None:
            pieces.append(f"{pad}exclusive_fields={{\n")
            rows = stack.exclusive
            for i, _, right in rows:
                shown = _long_fields(_sort_fields(right, options), indent + 12, options)
                pieces += [f"{pad}    {i} ->\n", *shown]
                pieces.append("" if i == rows[-1][0] else ",\n")
            pieces.append(f"{'' if rows else pad}}},\n")
            ending.append(f"stack_dim={stack.stack_dim}")
    pieces.append(pad + f",\n{pad}".join(ending) + ")")
    return pieces


def _long_fields(fields: list[PrintedLeaf], indent: int, options: dict[str, object]) -> list[object]:
    pieces: list[object] = []
    for field in fields:
        pieces += [",\n"] if pieces else []
        pieces += [f"{' ' * indent}{field.key}: ", *_long_entry(field, indent, options)]
    return pieces


def _long_entry(field: PrintedLeaf, indent: int, options: dict[str, object]) -> list[object]:
    entry = field.entry
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, Core):
        if not has_entries(entry):
            return [repr(entry).replace("\n", "\n" + " " * indent)]
        return [(entry, indent, options)]
    return [_long_leaf(entry, options)]


def _long_leaf(leaf: Tensor, options: dict[str, object]) -> str:
    name = leaf.name if isinstance(leaf, Ragged) else type(leaf).__name__
    known = {**_DETAILS, **_DETAILS_OF_TENSORS} if isinstance(leaf, Tensor) else _DETAILS
    return f"{name}({', '.join([detail(leaf) for option, detail in known.items() if options[option]])})"


def _shape(leaf: Tensor) -> tuple[object, ...]:
    return leaf.shape if isinstance(leaf, Ragged) else get_display_shape(leaf)


def _storage(leaf: Tensor) -> int:
    return 0 if is_stored(leaf) else leaf.untyped_storage().nbytes()


def _moments(leaf: Tensor) -> str:
    unknown = "mean=nan, std=nan"
    if leaf.is_meta or not leaf.numel() or leaf.is_complex():
        return unknown
    try:
        values = leaf.detach().double()
        return f"mean={values.mean().item():.4g}, std={values.std().item() if leaf.numel() > 1 else float('nan'):.4g}"
    except (RuntimeError, TypeError, ValueError):
        return unknown  # nested, quantized and fake tensors do not support these functions


#: Functions that format one detail of a leaf for the long form, by print option.
_DETAILS: dict[str, Callable[[Any], str]] = {
    "show_shape": lambda leaf: f"shape=torch.Size([{', '.join(map(str, _shape(leaf)))}])",
    "show_field_device": lambda leaf: f"device={leaf.device}",
    "show_dtype": lambda leaf: f"dtype={leaf.dtype}",
    "show_field_is_shared": lambda leaf: f"is_shared={isinstance(leaf, Tensor) and leaf.is_shared()}",
}
_DETAILS_OF_TENSORS: dict[str, Callable[[Any], str]] = {
    "show_grad": lambda leaf: f"requires_grad={leaf.requires_grad}",
    "show_is_contiguous": lambda leaf: f"is_contiguous={leaf.is_contiguous()}",
    "show_is_view": lambda leaf: f"is_view={leaf._base is not None or leaf.nbytes < _storage(leaf)}",
    "show_storage_size": lambda leaf: f"storage_size={_storage(leaf)}",
    "plain": _moments,
}

_MUTED = 'style="opacity:0.7"'
_LIST = '<ul style="list-style:none;margin:0;padding-left:1.5em">'


def _print_html(field: PrintedLeaf | None, node: Core, parent: Core) -> list[object]:
    """Return the HTML pieces of a node; ``field`` is its entry in the parent, None for the root."""
    options, plain = SETTINGS.print_options, type(make_dense({}, torch.Size()))
    name = html.escape((field and field.name) or type(node).__name__)
    fields, stack, *_ = node._print_node()
    fields = _sort_fields(fields, options)
    size = node.batch_size if parent is None else node.batch_size[len(parent.batch_size) :]
    about = [f"device={node.device}"] if node.device is not None else []
    if stack is not None:
        about.append(f"stack_dim={stack.stack_dim}")
    if field is None:
        head = f"<b>{name}</b>"
        about.insert(0, f"batch_size={_dims(size)}")
    else:
        head = f"{html.escape(field.key)}:{'' if name == plain.__name__ else f' <b>{name}</b>'}"
        about = [*([_dims(size)] if size else []), *about, _count(fields)]
    about.append(show_size(sum(leaf.numel() * leaf.element_size() for leaf in _leaves(node))))
    pieces = [_summary(head, ", ".join(about), " open" if field is None else ""), *_html_fields(fields, node)]
    for i, member, right in [] if stack is None else stack.exclusive:
        head = _summary(f"only in member {i}:", _count(right))
        pieces += [f"<li>{head}", *_html_fields(_sort_fields(right, options), member), f"{_END}</li>"]
    return [*pieces, _END]


_END = "</ul></details>"


def _summary(head: str, about: str, state: str = "") -> str:
    """Return the opening tags of a collapsible block."""
    return f"<details{state}><summary>{head} <span {_MUTED}>{html.escape(about)}</span></summary>{_LIST}"


def _count(fields: list[PrintedLeaf]) -> str:
    return f"{len(fields)} {'entry' if len(fields) == 1 else 'entries'}"


def _html_fields(fields: list[PrintedLeaf], node: Core) -> list[object]:
    pieces: list[object] = []
    for field in fields:
        entry = field.entry
        if isinstance(entry, Core) and has_entries(entry):
            pieces += ["<li>", (field, entry, node), "</li>"]
        else:
            text = html.escape(_html_entry(entry, node))
            pieces.append(f"<li>{html.escape(field.key)}: <span {_MUTED}>{text}</span></li>")
    return pieces


def _html_entry(entry: Child, node: Core) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Core):
        assert isinstance(entry, Core)
        name, value = entry._print_node().text, entry._unwrap()
        return str(name) if isinstance(value, (Tensor, Core)) else f"{name} {_shorten(value)}"
    text = f"{SHORT_NAMES.get(entry.dtype, 'None')}{_tail(entry, node)} {entry.device}"
    return f"{text}, {show_size(entry.numel() * entry.element_size())}" if isinstance(entry, Tensor) else text


def _shorten(value: object) -> str:
    """Return the start and the end of the text of a value."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return short.repr_list(value, short.maxlevel) if isinstance(value, list) else short.repr(value)


def _leaves(root: Child) -> list[Tensor]:
    """Return the leaves; an empty list if any leaf is not an initialized tensor."""
    leaves = leaves_below([root])
    return leaves if all(isinstance(leaf, Tensor) and not is_lazy(leaf) for leaf in leaves) else []
