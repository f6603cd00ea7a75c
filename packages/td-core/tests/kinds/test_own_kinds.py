"""Two kinds on public names alone pass the conformance suite: one counts its reads, one computes its entries when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import NO_DEFAULT, TensorDict, TensorDictBase
from td_core.spi import NodeKind, Record, hookimpl
from td_core.testing import CollectionTests, installed


class Counted(TensorDictBase):
    """A collection that counts the reads of its entries, together with all collections that are made of it."""

    def __init__(
        self, entries: Any, batch_size: Any, device: Any = None, names: Any = None, reads: Any = None
    ) -> None:
        self.entries = dict(entries)
        self.size, self.place, self._names = torch.Size(batch_size), device, names
        self.reads: list[str] = [] if reads is None else reads

    @property
    def batch_size(self) -> torch.Size:
        return self.size

    @batch_size.setter
    def batch_size(self, batch_size: Any) -> None:
        self._change_batch_size(torch.Size(batch_size))

    @property
    def device(self) -> torch.device | None:
        return self.place

    def _set_batch_size(self, batch_size: torch.Size) -> None:
        self.size = batch_size

    def _set_device(self, device: torch.device | None) -> None:
        self.place = device

    def _children(self) -> Mapping[str, Any]:
        return self.entries

    def _get_child(self, key: str) -> Any:
        self.reads.append(key)
        return self.entries[key]

    def _set_child(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def _del_child(self, key: str) -> None:
        del self.entries[key]

    def _with_children(
        self, children: Any, *, batch_size: Any = None, device: Any = NO_DEFAULT, names: Any = NO_DEFAULT
    ) -> Any:
        size = self.size if batch_size is None else batch_size
        place = self.place if device is NO_DEFAULT else device
        return type(self)(children, size, place, self._names if names is NO_DEFAULT else names, self.reads)


class Computed(Mapping[str, Any]):
    """The entries of a :class:`Lazy`: a function is called when its entry is read first."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = dict(entries.entries if isinstance(entries, Computed) else entries)

    def __getitem__(self, key: str) -> Any:
        if isinstance(self.entries[key], FunctionType):
            self.entries[key] = self.entries[key]()
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.entries))

    def __len__(self) -> int:
        return len(self.entries)


class Lazy(Counted):
    """A collection whose entries are functions without arguments, called when the entry is read first."""

    def __init__(self, entries: Any, batch_size: Any, *metadata: Any) -> None:
        super().__init__({}, batch_size, *metadata)
        self.computed = Computed(entries)
        self.entries = self.computed.entries

    def _children(self) -> Mapping[str, Any]:
        return self.computed

    def _get_child(self, key: str) -> Any:
        return self.computed[key]


def flatten(node: Counted) -> Record:
    return Record.of(node, node._children())


def unflatten(cls: type[Counted]) -> Callable[[Record], Counted]:
    def build(record: Record) -> Counted:
        *metadata, locked = record.read_header()
        node = (record.cls or cls)(record.entries, *metadata)
        return node.lock_() if locked else node

    return build


class Plugin:
    @hookimpl
    def td_node_kinds(self) -> list[NodeKind]:
        return [NodeKind(f"test.{cls.__name__}", cls, flatten, unflatten(cls)) for cls in (Counted, Lazy)]


@pytest.fixture(autouse=True)
def plugin() -> Iterator[None]:
    """Register both kinds."""
    with installed(Plugin()):
        yield


class TestCounted(CollectionTests):
    def make(self) -> Counted:
        nested = Counted({"b": torch.randn(3, 2, 4)}, [3, 2])
        return Counted({"a": torch.randn(3, 2), "n": nested}, [3, 2])


class TestLazy(CollectionTests):
    def make(self) -> Lazy:
        def make_nested() -> Lazy:
            return Lazy({"b": lambda: torch.randn(3, 2, 4)}, [3, 2])

        return Lazy({"a": lambda: torch.randn(3, 2), "n": make_nested}, [3, 2])


def test_counted_counts_reads_of_results() -> None:
    counted = Counted({"a": torch.ones(3), "b": torch.ones(3)}, [3])
    assert counted["a"].sum() == 3
    assert (counted + 1)["b"].tolist() == [2, 2, 2]
    part = counted[1:].get("a")
    assert (part.shape, counted.reads) == ((2,), ["a", "b", "a"])


def test_lazy_computes_entry_once_at_first_read() -> None:
    calls: list[str] = []

    def compute() -> Tensor:
        calls.append("a")
        return torch.arange(3)

    lazy = Lazy({"a": compute, "b": lambda: torch.ones(3)}, [3])
    assert (list(lazy.keys()), len(lazy.keys()), calls) == (["a", "b"], 2, [])
    assert lazy["b"].tolist() == [1, 1, 1]
    assert calls == []
    assert (lazy["a"].tolist(), lazy[1:]["a"].tolist(), calls) == ([0, 1, 2], [1, 2], ["a"])


def test_kinds_are_entries_of_tensordict() -> None:
    td = TensorDict(
        {"c": Counted({"a": torch.ones(2)}, [2]), "l": Lazy({"a": lambda: torch.zeros(2)}, [2])}, [2]
    )
    stacked = torch.stack([td, td])
    assert (type(stacked["c"]), type(stacked["l"])) == (Counted, Lazy)
    assert stacked["c", "a"].tolist() == [[1, 1], [1, 1]]
    assert stacked["l", "a"].tolist() == [[0, 0], [0, 0]]


class Labelled(TensorDict):
    """A TensorDict whose copies and results of arithmetic keep a label: it overrides only ``_map``."""

    label = "none"

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Any:
        result: Any = super()._map(fn)
        result.label = self.label
        return result


@pytest.mark.parametrize(
    "operation",
    [
        lambda td: td.clone(),
        lambda td: td.clone(recurse=False),
        lambda td: td.copy(),
        lambda td: td.detach(),
        lambda td: td.exp(),
        lambda td: td + 1,
        lambda td: td.double(),
        lambda td: td._shallow_copy(),
    ],
)
def test_subclass_with_own_map_keeps_state(operation: Callable[[Any], Any]) -> None:
    node = Labelled({"a": torch.zeros(2), "n": {"b": torch.ones(2)}})
    node.label = "here"
    result = operation(node)
    assert (type(result), result.label) == (Labelled, "here")
    nested = operation(TensorDict({"node": node}))
    assert nested["node"].label == "here"
    expected = operation(TensorDict({"b": torch.ones(2)}))["b"]
    assert torch.equal(nested["node", "n", "b"], expected)
    assert torch.equal(result["n", "b"], expected)
