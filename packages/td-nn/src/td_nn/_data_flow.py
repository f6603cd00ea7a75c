"""The data flow of a sequence, computed from its keys: a report of faults, a table and a diagram."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from td_core import TensorCollection
from td_core.typing import NestedKey

from ._module_base import show_module
from ._module_keys import SINK, Key, as_keys, is_provided, is_related
from .module_errors import show_step, show_steps


class Member(NamedTuple):
    """A module that a sequence runs, directly or in a nested sequence."""

    steps: tuple[str, ...]
    module: Any

    @property
    def path(self) -> str:
        """Index of the member in the sequence, such as ``seq[0]``."""
        return show_steps(self.steps)

    @property
    def declares_keys(self) -> bool:
        """True if the module has in_keys or out_keys."""
        return bool(self.module.in_keys or self.module.out_keys)


@dataclass(frozen=True)
class FlowReport:
    """Result of :meth:`TensorDictSequential.check`; it is true if no key is missing.

    Attributes:
        missing: for each key that no earlier member writes: the path of the member that reads it, the key, and a hint.
        unread: for each key that no later member reads and the sequence does not keep: the path of the member that writes
            it, and the key.
        overwritten: for each key that is written again: the path of the later member, the key, and its earlier writer.
        undeclared: the paths of members without keys; no key counts as missing after the first of them.

    >>> from td_nn import TensorDictModule, TensorDictSequential
    >>> seq = TensorDictSequential(TensorDictModule(abs, ["x"], ["x"]))
    >>> seq.check().overwritten
    [('seq[0]', 'x', 'the input')]
    """

    missing: list[tuple[str, Key, str]] = field(default_factory=list)
    unread: list[tuple[str, Key]] = field(default_factory=list)
    overwritten: list[tuple[str, Key, str]] = field(default_factory=list)
    undeclared: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        lines = [
            *[f"missing: {path} reads {key!r}, which is not there{hint}" for path, key, hint in self.missing],
            *[f"unread: {path} writes {key!r}, which no later member reads" for path, key in self.unread],
            *[f"overwritten: {path} writes {key!r}, which {by} gives" for path, key, by in self.overwritten],
            *[f"undeclared: {path} does not say its keys" for path in self.undeclared],
        ]
        return (
            "\n".join(lines)
            or "every key that is read is there, and every key that is written is read or kept"
        )


def check_flow(sequence: Any, keys: TensorCollection | Sequence[NestedKey] | None = None) -> FlowReport:
    """Find the keys that are missing, unread or overwritten; see :meth:`TensorDictSequential.check`."""
    if keys is None:
        provided = list(sequence.in_keys)
    elif isinstance(keys, TensorCollection):
        provided = list(keys.keys(True))
    else:
        provided = list(as_keys(keys))
    members = flatten(sequence)
    report = FlowReport()
    source = dict.fromkeys(provided, "the input")
    for place, member in enumerate(members):
        if not member.declares_keys:
            report.undeclared.append(member.path)
        for key in member.module.in_keys:
            if not is_provided(key, source) and not report.undeclared:
                report.missing.append((member.path, key, _hint(key, source, members[place + 1 :])))
        for key in member.module.out_keys:
            if key == SINK:
                continue
            if key in source:
                report.overwritten.append((member.path, key, source[key]))
            source[key] = member.path
    report.unread.extend(_iter_unread(members, sequence._selected_out_keys or ()))
    return report


def _iter_unread(members: list[Member], kept: tuple[Key, ...]) -> Iterator[tuple[str, Key]]:
    """Yield writer and key of outputs that are neither read later, nor selected, nor of the last member."""
    for place, member in enumerate(members[:-1]):
        for key in member.module.out_keys:
            if key != SINK and not _is_read(key, members[place + 1 :], kept):
                yield member.path, key


def _is_read(key: Key, later: list[Member], kept: tuple[Key, ...]) -> bool:
    for member in later:
        if not member.declares_keys or any(is_related(key, read) for read in member.module.in_keys):
            return True
        if key in member.module.out_keys:
            return False
    return key in kept


def _hint(key: Key, present: Iterable[Key], later: list[Member]) -> str:
    writers = [member.path for member in later if is_provided(key, member.module.out_keys)]
    if writers:
        return f"; {writers[0]} writes it later"
    names = {str(item): item for item in present}
    near = difflib.get_close_matches(str(key), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def flatten(sequence: Any, steps: tuple[str, ...] = ()) -> list[Member]:
    """List the modules of a sequence and of nested sequences, in the order in which they run."""
    results: list[Member] = []
    for name, module in zip(sequence._names(), sequence):
        inside = (*steps, show_step(name))
        results += flatten(module, inside) if hasattr(type(module), "_names") else [Member(inside, module)]
    return results


def show_flow(sequence: Any) -> str:
    """Format a table of the keys that each member reads and writes."""
    rows = [("member", "module", "reads", "writes")]
    for member in flatten(sequence):
        reads, writes = _show_keys(member.module.in_keys), _show_keys(member.module.out_keys)
        rows.append(("".join(member.steps), show_module(member.module), reads, writes))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    head = f"{type(sequence).__name__}: {_show_keys(sequence.in_keys)} -> {_show_keys(sequence.out_keys)}"
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([head, *table])


def draw_flow(sequence: object) -> str:
    """Draw a Mermaid diagram: a box per member, and a rounded box per value of a key."""
    lines: list[str] = []
    nodes: dict[Key, str] = {}
    drawn = 0

    def show_key(key: Key, is_new: bool) -> str:
        nonlocal drawn
        held = next((nodes[node] for node in nodes if not is_new and is_provided(key, [node])), None)
        if held is not None:
            return held
        nodes[key] = f"k{drawn}"
        drawn += 1
        return f'{nodes[key]}(["{_show_key(key)}"])'

    for number, member in enumerate(flatten(sequence)):
        label = "".join(member.steps).replace('"', "#quot;")
        lines.append(f'm{number}["{label} {show_module(member.module)}"]')
        lines += [f"{show_key(key, False)} --> m{number}" for key in member.module.in_keys]
        lines += [f"m{number} --> {show_key(key, True)}" for key in member.module.out_keys]
    return "\n    ".join(["flowchart LR", *lines])


def _show_keys(keys: Iterable[Key]) -> str:
    return ", ".join(map(_show_key, keys)) or "-"


def _show_key(key: Key) -> str:
    return key if isinstance(key, str) else ".".join(key)
