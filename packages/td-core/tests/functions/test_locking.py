"""The with block of a collection undoes the operation that gave it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core._functions.locking import do_nothing, undo_on_exit, write_back_on_exit
from td_core._python.collector import pause_collector
from td_core.errors import LockedError, StructureError


def make_rows() -> TensorDict:
    x = torch.arange(8).view(2, 4)
    return TensorDict({"x": x, "n": {"y": torch.stack([x, x * 2], -1)}}, [2, 4])


def test_exit_context_without_operation_raises():
    with pytest.raises(StructureError, match="no undoable operation"), TensorDict():
        pass


def test_view_result_does_not_keep_source_alive() -> None:
    with pause_collector():
        td = make_rows()
        source = weakref.ref(td)
        td = td.view(8)
        assert source() is None
    with pytest.raises(StructureError, match="is gone; keep it in a variable"), td as flat:
        flat["x"] = flat["x"] + 1
    assert td["x"].tolist() == list(range(1, 9))


def test_view_context_temporary_entry_of_lazy_stack_raises() -> None:
    stack = LazyStackedTensorDict(make_rows(), make_rows())
    with pytest.raises(StructureError, match="is gone"), stack["n"].view(-1) as flat:
        flat["new"] = flat["y"]


def test_to_noop_keeps_outer_context(make_nested: Any) -> None:
    td = make_nested().to("cpu")
    with td.flatten_keys(".") as flat:
        flat.to("cpu")["new"] = torch.zeros(td.batch_size)
    assert "new" in td.keys()


#: Operations whose result a block can change.
UNDOABLE: dict[str, Callable[[Any], Any]] = {
    "view": lambda td: td.view(-1),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "permute": lambda td: td.permute(1, 0),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "to": lambda td: td.to(torch.float64),
    "flip": lambda td: td.flip(1),
    "select": lambda td: td.select("x"),
}


@pytest.mark.parametrize("name", UNDOABLE)
def test_block_writes_change_back_once(name: str) -> None:
    td = make_rows()
    expected = td["x"] * 2
    with UNDOABLE[name](td) as result:
        result["x"] = result["x"] * 2
    assert torch.equal(td["x"], expected) and td["x"].dtype == expected.dtype
    assert torch.equal(td["n", "y"], make_rows()["n", "y"])
    with (
        pytest.raises(StructureError, match=r"context of a TensorDict that no undoable operation gave"),
        result,
    ):
        pass


@pytest.mark.parametrize("outer", ["flatten_keys", "permute", "select", "to"])
@pytest.mark.parametrize("inner", ["flip", "to", "unsqueeze"])
def test_nested_blocks_undo_innermost_first(outer: str, inner: str) -> None:
    td = make_rows()
    with UNDOABLE[outer](td) as first, UNDOABLE[inner](first) as second:
        second["x"] = second["x"] * 2
    assert torch.equal(td["x"], make_rows()["x"] * 2)


#: Sources whose flattened keys a nested block writes back, with the same keys in all members or not.
NESTED: dict[str, Callable[[], Any]] = {
    "dense": make_rows,
    "locked": lambda: make_rows().lock_(),
    "flat_keys": lambda: make_rows().flatten_keys("."),
    "lazy": lambda: LazyStackedTensorDict(make_rows(), make_rows()),
    "uneven": lambda: LazyStackedTensorDict(
        make_rows(), make_rows().update({"n": {"new": torch.ones(2, 4)}})
    ),
    "uneven_flat_keys": lambda: LazyStackedTensorDict(
        make_rows().flatten_keys("."), make_rows().update({"n": {"new": torch.ones(2, 4)}}).flatten_keys(".")
    ),
    "parameters": lambda: TensorDictParams(make_rows(), no_convert=True),
}


@pytest.mark.parametrize("inner", ["flatten_keys", "view", "permute", "unsqueeze", "flip"])
@pytest.mark.parametrize("kind", NESTED)
def test_block_below_flatten_keys_block_writes_to_keys_of_source(kind: str, inner: str) -> None:
    td, before = NESTED[kind](), NESTED[kind]()
    last = (lambda td: td.permute(*reversed(range(td.ndim)))) if inner == "permute" else UNDOABLE[inner]
    with td.flatten_keys(".") as first, last(first) as second:
        second.apply_(lambda leaf: leaf.mul_(2)) if kind == "locked" else second.update(second * 2)
    for node, old in td._zip_members(before):
        assert set(node.keys(True, True)) == set(old.keys(True, True))
        assert all(torch.equal(node[key], old[key] * 2) for key in old.keys(True, True))


def test_block_of_lock_and_unlock_restores_each_state() -> None:
    td = make_rows()
    with td.lock_():
        with td.unlock_():
            td["new"] = torch.zeros(2, 4)
        with pytest.raises(LockedError):
            td["other"] = torch.zeros(2, 4)
        with td.lock_():
            pass
        assert td.is_locked, "the inner block found it locked"
    assert not td.is_locked and "new" in td


def test_block_with_error_undoes_and_raises_it() -> None:
    td = make_rows()

    def change() -> None:
        with td.flatten_keys(".") as flat:
            flat["x"] = flat["x"] + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change()
    assert torch.equal(td["x"], make_rows()["x"] + 1)
    with pytest.raises(ZeroDivisionError), TensorDict():
        raise ZeroDivisionError  # not the error of a block without an operation


def test_block_of_to_module_restores_parameters() -> None:
    module = nn.Linear(2, 1)
    before = dict(module.named_parameters())
    weights = TensorDict.from_module(module).data.clone()
    with weights.to_module(module):
        assert module.weight is not before["weight"]
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_undo_on_exit_calls_last_function_only() -> None:
    seen: list[str] = []
    td = undo_on_exit(TensorDict(), lambda node: seen.append("first"))
    with undo_on_exit(td, lambda node: seen.append("second")) as entered:
        assert entered is td
        undo_on_exit(td, lambda node: seen.append("inner"))
    assert seen == ["second"]
    with td:
        pass
    assert seen == ["second", "inner"]
    with undo_on_exit(td, do_nothing):
        pass
    assert seen == ["second", "inner"]


def test_write_back_on_exit_passes_owner_result_and_arguments() -> None:
    seen: list[Any] = []
    owner, result = TensorDict({"a": 1}), TensorDict({"a": 2})
    with write_back_on_exit(result, owner, lambda *arguments: seen.append(arguments), 3, 4):
        assert seen == []
    assert len(seen) == 1
    assert seen[0][0] is owner and seen[0][1] is result and seen[0][2:] == (3, 4)


def test_write_back_on_exit_of_freed_owner_raises() -> None:
    with pause_collector():
        result = write_back_on_exit(TensorDict(), TensorDict(), do_nothing)
    with (
        pytest.raises(StructureError, match=r"this TensorDict was taken from is gone; keep it in a variable"),
        result,
    ):
        pass
