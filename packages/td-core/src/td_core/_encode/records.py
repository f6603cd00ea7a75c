"""Records: nodes that a kind has flattened into names, headers and values, and the layouts of formats for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .._plans.plans import as_batch_size
from .._python.public_names import set_module
from .._tree.dim_names import check_names
from .._tree.node import Child, Core
from ..typing import Names

_NONE = type(None)


class Header(NamedTuple):
    """The fields of a header that all kinds have; ``locked`` is True if the user locked the node."""

    batch_size: torch.Size
    device: torch.device | None
    names: Names | None
    locked: bool


@set_module("td_core.spi")
@dataclass(slots=True)
class Record:
    """One flattened node.

    Attributes:
        meta: header of the node, which JSON can store.
        entries: tensors and nodes under the user's keys, in order.
        members: nodes under names that the layout chooses (``"0"``, ``"_tensordict"``).
        values: Python values that need the value codec.
        batch_size: only when reading: the batch size of the parent, for kinds that do not store their own.
        cls: only when reading: the stored subclass of the kind's type, if this process has defined it.
        complete: only when reading: whether declared fields that the record lacks get their defaults.

    >>> Record({"shape": [3]}).entries
    {}
    """

    meta: dict[str, Any]
    entries: Mapping[str, Child] = field(default_factory=dict)
    members: Mapping[str, Core] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    batch_size: torch.Size = torch.Size()
    cls: Any = None
    complete: bool = True

    @classmethod
    def of(
        cls,
        node: Core,
        entries: Mapping[str, Child] | None = None,
        *,
        values: Mapping[str, object] | None = None,
        **fields: object,
    ) -> Record:
        """Return a record of a node. Its header has the batch size and, if set, device, dim names and the user's lock.

        ``fields`` are further fields of the header.

        >>> Record.of(TensorDict({"a": torch.zeros(3)}, batch_size=[3]).lock_(), unit="m").meta
        {'batch_size': [3], 'locked': True, 'unit': 'm'}
        """
        meta: dict[str, object] = {"batch_size": list(node.batch_size)}
        if node.device is not None:
            meta["device"] = str(node.device)
        if node._names is not None:
            meta["names"] = list(node._names)
        if node._locked is True:
            meta["locked"] = True
        if fields:
            meta.update(fields)
        return cls(meta, {} if entries is None else entries, {}, {} if values is None else values)

    def read_field(self, name: str, *types: type) -> Any:
        """Return a field of the header, whose type must be one of ``types``. With NoneType it may be missing.

        >>> Record({"unit": "m"}).read_field("unit", str)
        'm'
        """
        value = self.meta.get(name) if _NONE in types else self.meta[name]
        if type(value) not in types:
            raise TypeError(f"its header says that {name} is {value!r}")
        return value

    def read_batch_size(self) -> torch.Size:
        """Return the batch size of the header.

        Raises:
            KeyError, TypeError, ValueError: the header is damaged.
        """
        sizes = self.read_field("batch_size", list)
        if not {*map(type, sizes)} <= {int} or max(sizes, default=0) >= 1 << 63:
            raise TypeError(f"its header says that batch_size is {sizes!r:.200}")
        return as_batch_size(sizes)

    def read_header(self) -> Header:
        """Read a header that :meth:`of` made.

        Raises:
            KeyError, TypeError, ValueError: the header is damaged.

        >>> Record({"batch_size": [3], "device": "cpu"}).read_header()
        Header(batch_size=torch.Size([3]), device=device(type='cpu'), names=None, locked=False)
        """
        device = self.read_field("device", str, _NONE)
        names = self.read_field("names", list, _NONE)
        size = self.read_batch_size()
        return Header(
            size,
            None if device is None else torch.device(device),
            None if names is None else check_names(names, len(size)),
            bool(self.read_field("locked", bool, _NONE)),
        )


@set_module("td_core.spi")
@dataclass(frozen=True, slots=True)
class Layout:
    """How one format stores one kind.

    Attributes:
        flatten: function from a node to the record that the format stores.
        unflatten: function from such a record to a node.
        names: class names of the kind in this format; the first one is written, all are read.
        is_inline: True for values that a format may store in the parent of the node: the record has one value, ``"data"``,
            and describes nothing else but the batch size, device and dim names.

    >>> Layout(flatten=lambda node: Record({}), unflatten=lambda record: None, names=("TensorDict",)).names
    ('TensorDict',)
    """

    flatten: Callable[[Any], Record]
    unflatten: Callable[[Record], Any]
    names: tuple[str, ...] = ()
    is_inline: bool = False
