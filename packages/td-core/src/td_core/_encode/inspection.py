"""Results of looking at a save without loading it: the tree of its nodes and leaves, and the report of a check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .._python.public_names import set_module
from .._tree.walks import expand, visit

_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")


def make_printable(text: str) -> str:
    """Escape a name for one line of terminal output, without line breaks and control characters."""
    return text if text.isprintable() else repr(text)[1:-1]


def show_size(nbytes: int) -> str:
    """Format a number of bytes for messages, such as ``1.63 MB``."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{nbytes} bytes" if unit == 0 else f"{size:.2f} {_UNITS[unit]}"


@set_module("td_core")
@dataclass(slots=True)
class Tree:
    """A node or leaf of a save, as the header of the save describes it.

    Attributes:
        name: key; of the root, the name of the file or directory.
        kind: class or kind of a node, or ``"leaf"``.
        shape: shape of a leaf, or batch size of a node; None if the header has neither.
        dtype: dtype of a leaf; None for a node.
        nbytes: size in bytes of the leaf, or of all leaves below.
        provider: distribution and version of the plugin that wrote the node.
        pickled: files with pickled values, which only ``allow_pickle=True`` reads.
        values: values of the node that are stored as JSON.
        children: entries and members by key.
        place: where the elements of a leaf are: a file, an array, a range of bytes; None for a node.

    >>> print(Tree("a", "leaf", [2], "torch.int8", 2))
    a: leaf [2] torch.int8, 2 bytes
    """

    name: str
    kind: str
    shape: list[int] | None = None
    dtype: str | None = None
    nbytes: int = 0
    provider: str | None = None
    pickled: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    children: dict[str, Tree] = field(default_factory=dict)
    place: str | None = None

    def __str__(self) -> str:
        return "\n".join(f"{'    ' * len(path)}{node._format()}" for path, node in self.walk())

    def _format(self) -> str:
        about = [f"{make_printable(self.name)}: {make_printable(self.kind)}"]
        if self.shape is not None:
            about.append(f" {self.shape}")
        if self.dtype is not None:
            about.append(f" {self.dtype}")
        about.append(f", {show_size(self.nbytes)}")
        if self.provider is not None:
            about.append(f", by {make_printable(self.provider)}")
        if self.pickled:
            about.append(f", PICKLED: {', '.join(self.pickled)}")
        return "".join(about)

    def walk(self) -> Iterator[tuple[tuple[str, ...], Tree]]:
        """Yield the key path and the tree of this node and of each node and leaf below, parents first.

        >>> root = Tree("x", "TensorDict", [], children={"a": Tree("a", "leaf", [2])})
        >>> [(path, node.kind) for path, node in root.walk()]
        [((), 'TensorDict'), (('a',), 'leaf')]
        """

        def below(item: tuple[tuple[str, ...], Tree]) -> list[tuple[tuple[str, ...], Tree]]:
            path, node = item
            return [((*path, key), child) for key, child in reversed(node.children.items())]

        return expand([((), self)], below)

    def as_dict(self) -> dict[str, Any]:
        """Return the tree as nested dicts, for JSON.

        >>> Tree("a", "leaf", [2]).as_dict()["shape"]
        [2]
        """
        root: dict[str, object] = {}

        def fill(node: Tree, row: dict[str, Any]) -> Iterator[tuple[Tree, dict[str, Any]]]:
            for name in ("kind", "shape", "dtype", "nbytes", "provider", "pickled", "place"):
                row[name] = getattr(node, name)
            row["children"] = {key: {} for key in node.children}
            yield from zip(node.children.values(), row["children"].values(), strict=True)

        visit(fill, self, root)
        return root


@set_module("td_core")
@dataclass(frozen=True, slots=True)
class Problem:
    """Part of a save that is missing, damaged, changed or modified.

    Attributes:
        file: path below the root of the save, or another name of the part.
        kind: ``"missing"``, ``"damaged"``, ``"error"``, ``"changed"`` (it differs from its recorded hash, and is newer: written
            in place, or damaged), or ``"modified"`` (written in place since the save, with no hash that it contradicts).
        detail: the difference, for messages.

    >>> print(Problem("a.memmap", "missing", "8 bytes were saved"))
    a.memmap is missing: 8 bytes were saved
    """

    file: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return make_printable(f"{self.file} is {self.kind}: {self.detail}")


@set_module("td_core")
@dataclass(frozen=True, slots=True)
class Report:
    """Result of :func:`td_core.verify`.

    Attributes:
        path: location of the save.
        files: number of files, or parts of a file, that were checked.
        hashed: number of hashes that were compared.
        problems: those that differ.

    >>> Report("save", 3, 0).ok
    True
    """

    path: str
    files: int
    hashed: int
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all files are unchanged, or were only modified in place since the save."""
        return all(problem.kind == "modified" for problem in self.problems)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.files} files, {self.hashed} hashes, {len(self.problems)} problems"]
        return "\n".join([*lines, *map(str, self.problems)])
