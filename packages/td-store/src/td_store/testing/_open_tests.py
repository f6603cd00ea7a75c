"""Conformance suite for opened collections: what each operation reads from the store, and what it writes to it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, lazy_stack
from td_core.typing import NestedKey, SourceIndex

from .._stored_tensor import StoredTensor
from ._sources import LoggedSource

__all__ = ["OpenTests"]

ROWS = 6
MASK = torch.tensor([True, False, False, True, False, True])
Operation = Callable[[Any], object]
#: An opened collection, and the requests to its sources: operation, key and index.
Opened = tuple[Any, list[tuple[str, str, SourceIndex]]]

#: Operations that must read nothing.
LAZY: dict[str, Operation] = {
    "keys": lambda td: list(td.keys(True, True)),
    "items": lambda td: [key for key, _ in td.items(True, True)],
    "get": lambda td: td["n", "b"],
    "shape": lambda td: td["a"].shape,
    "dtype": lambda td: td["a"].dtype,
    "bytes": lambda td: td.bytes(),
    "numel": lambda td: td.numel(),
    "lock": lambda td: td.lock_(),
    "select": lambda td: td.select("a"),
    "exclude": lambda td: td.exclude("a"),
    "flatten_keys": lambda td: td.flatten_keys(),
    "copy": copy.copy,
    "shallow_clone": lambda td: td.clone(recurse=False),
    "set_another_key": lambda td: td.clone(recurse=False).set("z", torch.zeros(ROWS)),
    "int": lambda td: td[1],
    "negative": lambda td: td[-1],
    "slice": lambda td: td[1:4],
    "step": lambda td: td[::2],
    "ellipsis": lambda td: td[..., 1:3],
    "none": lambda td: td[None],
    "get_at": lambda td: td.get_at("a", 2),
    "iterate": lambda td: list(td),
    "unbind": lambda td: td.unbind(0)[1],
    "split": lambda td: td.split(4)[1],
    "chunk": lambda td: td.chunk(2)[1],
    "view": lambda td: td.view(2, 3),
    "reshape": lambda td: td.reshape(3, -1),
    "unflatten": lambda td: td.unflatten(0, (2, 3)),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "squeeze": lambda td: td[:1].squeeze(0),
    "permute": lambda td: td[None].permute(1, 0),
    "expand": lambda td: td.expand(2, ROWS),
    "detach": lambda td: td.detach(),
    "contiguous": lambda td: td.contiguous(),
    "state_dict": lambda td: dict(td.state_dict()),
    "lazy_stack": lambda td: lazy_stack([td, td])[1],
    "zeros_like": torch.zeros_like,
}

#: Operations that must read these rows of each leaf, with one request.
ROWS_READ: dict[str, tuple[Operation, list[int]]] = {
    "list": (lambda td: td[[4, 1]], [1, 4]),
    "repeated": (lambda td: td[[4, 1, 4]], [1, 4]),
    "neighbours": (lambda td: td[[3, 2]], [2, 3]),
    "tensor": (lambda td: td[torch.tensor([[0, 2], [5, 0]])], [0, 2, 5]),
    "mask": (lambda td: td[MASK], [0, 3, 5]),
    "getitems": (lambda td: td.__getitems__([5, 3]), [3, 5]),
    "get_at": (lambda td: td.get_at("a", torch.tensor([5, 3])), [3, 5]),
    "masked_select": (lambda td: td.masked_select(MASK), [0, 3, 5]),
    "view": (lambda td: td[1:][[4, 0]], [1, 5]),
    "flattened": (lambda td: td.view(2, 3).view(-1)[[4, 1]], [1, 4]),
    "two_dims": (lambda td: td.view(2, 3)[[1, 0], [1, 1]], [1, 4]),
    "clone_of_view": (lambda td: td[2:4].clone(), [2, 3]),
    "sum_of_part": (lambda td: td.split(2)[1]["a"].sum(), [2, 3]),
}

#: Operations that must read each leaf once.
WHOLE: dict[str, Operation] = {
    "clone": lambda td: td.clone(),
    "to_tensordict": lambda td: td.to_tensordict(),
    "deepcopy": copy.deepcopy,
    "cpu": lambda td: td.cpu(),
    "to_device": lambda td: td.to("cpu"),
    "to_dtype": lambda td: td.to(torch.float64),
    "add": lambda td: td + 1,
    "add_itself": lambda td: td + td,
    "equal": lambda td: (td == td).all(),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "apply": lambda td: td.apply(lambda leaf: leaf * 2),
    "sum": lambda td: td.sum(0),
    "numpy": lambda td: td.numpy(),
    "where": lambda td: td.where(MASK, 0),
    "flip": lambda td: td.flip(0),
    "gather": lambda td: td.gather(0, torch.tensor([1, 1])),
    "share_memory_": lambda td: td.clone(recurse=False).share_memory_(),
}

#: Operations in place: by name, the operation and whether it may read. The second argument has new rows.
WRITES: dict[str, tuple[Callable[[TensorDict, TensorDict], object], bool]] = {
    "set_row": (lambda td, new: td.__setitem__(1, new[0]), False),
    "set_slice": (lambda td, new: td.__setitem__(slice(1, 3), new[:2]), False),
    "set_positions": (lambda td, new: td.__setitem__([4, 1], new[:2]), False),
    "set_mask": (lambda td, new: td.__setitem__(MASK, new[:3]), False),
    "set_number": (lambda td, new: td.__setitem__(2, 0), False),
    "set_at": (lambda td, new: td.set_at_("a", new["a"][0], 1), False),
    "set_at_positions": (lambda td, new: td.set_at_("a", new["a"][:2], torch.tensor([4, 1])), False),
    "set_": (lambda td, new: td.set_("a", new["a"]), False),
    "set_inplace": (lambda td, new: td.set("a", new["a"], inplace=True), False),
    "update_": (lambda td, new: td.update_(new), False),
    "update_inplace": (lambda td, new: td.update(new, inplace=True), False),
    "update_at_": (lambda td, new: td.update_at_(new[:2], slice(1, 3)), False),
    "copy_": (lambda td, new: td.copy_(new), False),
    "copy_at_": (lambda td, new: td.copy_at_(new[0], 3), False),
    "fill_": (lambda td, new: td.fill_("a", 3), False),
    "zero_": (lambda td, new: td.zero_(), False),
    "load_state_dict": (lambda td, new: td.load_state_dict(new.state_dict()), False),
    "add_": (lambda td, new: td.add_(new), True),
    "mul_": (lambda td, new: td.mul_(2), True),
    "masked_fill_": (lambda td, new: td.masked_fill_(MASK, 7), True),
    "apply_": (lambda td, new: td.apply_(lambda leaf: leaf.add_(1)), True),
    "into_slice": (lambda td, new: td[1:3].zero_(), False),
    "into_row": (lambda td, new: td[2].copy_(new[0]), False),
    "into_rows": (lambda td, new: [row.zero_() for row in td[:2]], False),
    "into_unbound": (lambda td, new: td.unbind(0)[4].zero_(), False),
    "into_part": (lambda td, new: td.split(4)[1].copy_(new[:2]), False),
    "into_chunk": (lambda td, new: td.chunk(3)[1].zero_(), False),
    "into_view": (lambda td, new: td.view(2, 3)[1, 2].zero_(), False),
    "into_reshaped": (lambda td, new: td.reshape(3, 2)[:, 1].zero_(), False),
    "into_unsqueezed": (lambda td, new: td.unsqueeze(0)[0, 1:].zero_(), False),
    "into_permuted": (lambda td, new: td[None].permute(1, 0)[2, 0].zero_(), False),
    "into_detached": (lambda td, new: td.detach().zero_(), False),
    "into_data": (lambda td, new: td.data.zero_(), False),
    "into_selected": (lambda td, new: td.select(("n", "b"))[1].zero_(), False),
    "into_leaf": (lambda td, new: td["n", "b"][:, 1].fill_(4), False),
    "into_lazy_stack": (lambda td, new: lazy_stack([td])[0, 1:].zero_(), False),
    "add_to_slice": (lambda td, new: td[2:4].add_(5), True),
    "add_to_leaf": (lambda td, new: td["a"][1:].sub_(new["a"][1:]), True),
}


class OpenTests:
    """Conformance suite of opened collections. A subclass defines :meth:`open`.

    The suite counts the requests to the sources of stored leaves. It checks only results where an opened collection has other
    leaves, such as mapped tensors.

    >>> class TestMemory(OpenTests):
    ...     def open(self, data, folder):
    ...         return data.apply(lambda leaf: StoredTensor(MemorySource(leaf)))
    """

    def open(self, data: TensorDict, folder: Path) -> TensorDict:
        """Save ``data`` in ``folder``, and return the collection, opened so that writes to its leaves reach the store."""
        raise NotImplementedError(f"{type(self).__name__} must define open()")

    @pytest.fixture(name="opened")
    def open_with_log(self, tmp_path: Path) -> Opened:
        """Return an opened collection, and the list of requests to its sources."""
        log: list[tuple[str, str, SourceIndex]] = []

        def watch(key: NestedKey, leaf: Tensor) -> Tensor:
            if not isinstance(leaf, StoredTensor):
                return leaf
            return StoredTensor(
                LoggedSource(leaf.source, ".".join(key) if isinstance(key, tuple) else key, log)
            )

        opened = self.open(make_data(), tmp_path)
        with opened.unlock_():
            return opened.named_apply(watch, nested_keys=True), log

    @pytest.mark.parametrize("name", LAZY)
    def test_lazy_operation_reads_nothing(self, name: str, opened: Opened) -> None:
        td, log = opened
        result, expected = LAZY[name](td), LAZY[name](make_data())
        repr(result)
        assert log == []
        check_same(result, expected)

    @pytest.mark.parametrize("name", ["repr", "pickle"])
    def test_description_reads_nothing(self, name: str, opened: Opened) -> None:
        td, log = opened
        describe: Operation = repr if name == "repr" else pickle.dumps
        assert describe(td)
        assert log == []

    @pytest.mark.parametrize("name", ROWS_READ)
    def test_read_rows_requests_only_those_rows(self, name: str, opened: Opened) -> None:
        td, log = opened
        operation, rows = ROWS_READ[name]
        check_same(operation(td), operation(make_data()))
        assert len({leaf for _, leaf, _ in log}) == len(log)
        assert all(request == "read" and list_rows(index[0]) == rows for request, _, index in log)

    @pytest.mark.parametrize("name", WHOLE)
    def test_whole_operation_reads_each_leaf_once(self, name: str, opened: Opened) -> None:
        td, log = opened
        result = WHOLE[name](td)
        requests = [(request, leaf) for request, leaf, _ in log]
        check_same(result, WHOLE[name](make_data()))
        assert requests in ([], [("read", "a"), ("read", "n.b")], [("read", "n.b"), ("read", "a")])

    @pytest.mark.parametrize("name", WRITES)
    def test_write_reaches_the_store(self, name: str, opened: Opened, tmp_path: Path) -> None:
        td, log = opened
        operation, can_read = WRITES[name]
        expected = make_data()
        operation(expected, make_new())
        operation(td, make_new())
        assert can_read or all(request == "write" for request, _, _ in log)
        check_same(td, expected)

    @pytest.mark.parametrize("name", WRITES)
    def test_write_touches_only_changed_rows(self, name: str, opened: Opened) -> None:
        td, log = opened
        before, after = make_data(), make_data()
        WRITES[name][0](after, make_new())
        WRITES[name][0](td, make_new())
        for request, leaf, index in log:
            key = tuple(leaf.split("."))
            changed = (before[key] != after[key]).flatten(1).any(1).nonzero().flatten().tolist()
            touched = list_rows(index[0])
            assert (
                request == "read"
                or set(touched) <= set(range(min(changed), max(changed) + 1))
                or name in WHOLE_LEAF
            )

    def test_iterate_and_write_touches_one_row_at_a_time(self, opened: Opened) -> None:
        td, log = opened
        for i, row in enumerate(td):
            log.clear()
            row["a"] += i
            assert all(list_rows(index[0]) == [i] for _, _, index in log)

    @pytest.mark.parametrize("method", ["data_ptr", "untyped_storage", "storage", "share_memory_"])
    def test_ask_stored_leaf_for_memory_raises(self, method: str, opened: Opened) -> None:
        leaf = opened[0]["a"]
        if isinstance(leaf, StoredTensor):
            with pytest.raises(RuntimeError, match=f"a stored tensor has no memory, so {method}"):
                getattr(leaf, method)()

    def test_write_at_positions_after_read_changes_only_the_copy(self, opened: Opened) -> None:
        td, _ = opened
        td[[0, 2]].zero_()
        td.clone().zero_()
        check_same(td, make_data())


#: Operations that write all rows of a leaf, even if some keep their elements.
WHOLE_LEAF = {"masked_fill_", "zero_", "into_detached", "into_data", "mul_", "add_"}


def make_data() -> TensorDict:
    """Return the collection that the suite stores."""
    leaves = {"a": torch.arange(18.0).view(ROWS, 3), "n": {"b": torch.arange(24).view(ROWS, 2, 2)}}
    return TensorDict(leaves, batch_size=[ROWS])


def make_new() -> TensorDict:
    """Return a collection of the same structure with other elements."""
    new: TensorDict = make_data().apply(lambda leaf: -1 - leaf)
    return new


def list_rows(part: slice | Tensor) -> list[int]:
    """Return the positions in the first item of an index."""
    return list(range(part.start, part.stop, part.step)) if isinstance(part, slice) else part.tolist()


def check_same(result: Any, expected: Any) -> None:
    """Check that results of an operation on an opened collection and on one in memory have the same elements."""
    if isinstance(expected, (list, tuple)):
        assert len(result) == len(expected)
        for left, right in zip(result, expected):
            check_same(left, right)
    elif isinstance(expected, dict):
        check_same(list(result.items()), list(expected.items()))
    elif isinstance(expected, Tensor):
        assert result.dtype is expected.dtype
        assert torch.equal(result.clone(), expected)
    elif hasattr(expected, "batch_size"):
        assert result.batch_size == expected.batch_size
        check_same(list(result.items(True, True)), list(expected.items(True, True)))
    elif hasattr(expected, "tolist"):  # numpy
        assert result.tolist() == expected.tolist()
    else:
        assert result == expected
