"""Plans that are kept: what was given before must not change what comes out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import TensorDict, _shape_plans
from td_core._plans import Sizes, remembered


def td() -> TensorDict:
    return TensorDict({"a": torch.arange(24).view(2, 3, 4), "n": {"b": torch.arange(6).view(2, 3)}}, [2, 3])


#: An operation, and arguments that are equal to its own without meaning the same.
TWINS: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = [
    (lambda *args: td().view(*args), (6,), (6.0,)),
    (lambda *args: td().reshape(*args), (3, 2), (3.0, 2.0)),
    (lambda *args: td().permute(*args), (1, 0), (1.0, 0.0)),
    (lambda *args: td().unsqueeze(*args), (1,), (1.0,)),
    (lambda *args: td().transpose(*args), (1, 0), (1.0, 0.0)),
    (lambda *args: td().expand(*args), (1, 2, 3), (1.0, 2.0, 3.0)),
    (lambda *args: td().split(*args), (1,), (1.0,)),
    (lambda *args: td().unbind(*args)[0], (1,), (1.0,)),
    (lambda *args: td().flatten(*args), (0, 1), (0.0, 1.0)),
    (lambda *args: torch.stack([td(), td()], *args), (1,), (1.0,)),
]


@pytest.mark.parametrize(("operation", "right", "wrong"), TWINS)
def test_a_wrong_argument_leaves_nothing_behind_for_the_right_one(
    operation: Callable[..., Any], right: tuple[Any, ...], wrong: tuple[Any, ...]
) -> None:
    remembered_before = operation(*right)
    for arguments in (wrong, tuple(map(np.float32, right))):
        try:
            operation(*arguments)
        except (TypeError, ValueError, RuntimeError):
            pass
        result = operation(*right)
        expected = remembered_before if isinstance(result, tuple) else (remembered_before,)
        for mine, theirs in zip(result if isinstance(result, tuple) else (result,), expected, strict=True):
            assert mine.batch_size == theirs.batch_size
            assert all(type(size) is int for size in mine.batch_size)
            assert (mine == theirs).all()


@pytest.mark.parametrize("number", [np.int64(1), torch.tensor(1)])
def test_other_integers_stay_legal(number: Any) -> None:
    assert td().unsqueeze(int(number)).batch_size == (2, 1, 3)
    assert td()[..., number].batch_size == (2,)
    assert td()[number, None].batch_size == (1, 3)


def test_true_and_one_are_different_indices() -> None:
    for _ in range(2):
        assert td()[1, ...].batch_size == (3,)
        assert td()[True, ...].batch_size == (1, 2, 3)
        assert td()[0, None].batch_size == (1, 3)
        assert td()[False, None].batch_size == (0, 1, 2, 3)


def test_the_same_operation_follows_the_batch_size_and_the_leaf() -> None:
    for sizes in ((2, 3), (3, 2), (6, 1), (2, 3)):
        for tail in ((), (4,), (1, 2)):
            leaf = torch.arange(torch.Size([*sizes, *tail]).numel()).view(*sizes, *tail)
            collection = TensorDict({"a": leaf}, sizes)
            assert torch.equal(collection.view(-1)["a"], leaf.view(-1, *tail))
            assert torch.equal(collection.permute(1, 0)["a"], leaf.transpose(0, 1))
            assert torch.equal(collection[..., 0]["a"], leaf[:, 0])


def test_shapes_that_never_repeat_do_not_fill_the_memory() -> None:
    sizes = Sizes((6,), 2)
    for i in range(2000):
        assert sizes[2, 3, i] == (6, i)
    assert len(sizes) <= 256


def test_what_cannot_be_kept_is_worked_out() -> None:
    calls: list[Any] = []

    @remembered
    def plan(*args: Any) -> Any:
        calls.append(args)
        return object()

    for argument in ([1], torch.tensor(1), 1.0, slice(1), (1.0,), np.int64(1)):
        assert plan((2,), argument) is not plan((2,), argument)
    assert len(calls) == 12
    assert plan((2,), 1) is plan((2,), 1)
    assert plan((2,), 1) is not plan((2,), True)


USUAL: list[tuple[Callable[[TensorDict], Any], str]] = [
    (lambda td: td.view(6), "view_plan"),
    (lambda td: td.reshape(6), "reshape_plan"),
    (lambda td: td.permute(1, 0), "permute_plan"),
    (lambda td: td.transpose(0, 1), "transpose_plan"),
    (lambda td: td.expand(4, 2, 3), "expand_plan"),
    (lambda td: td.unsqueeze(-1), "unsqueeze_plan"),
    (lambda td: td.squeeze(0), "squeeze_plan"),
    (lambda td: td.flatten(), "flatten_plan"),
    (lambda td: td.unflatten(0, (1, 2)), "unflatten_plan"),
    (lambda td: td.split(1), "split_plan"),
    (lambda td: td.chunk(2), "chunk_plan"),
    (lambda td: td.unbind(1), "unbind_plan"),
]


@pytest.mark.parametrize(("operation", "name"), USUAL, ids=[name for _, name in USUAL])
def test_the_plans_of_usual_operations_are_kept(
    operation: Callable[[TensorDict], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    plan = getattr(_shape_plans, name)
    monkeypatch.setattr(_shape_plans, name, lambda *args: given.append(plan(*args)) or given[-1])
    operation(td())
    operation(td())
    assert given[0] is given[1]


def test_threads_share_plans() -> None:
    wrong: list[Any] = []

    def work() -> None:
        for tail in range(1, 200):
            leaf = torch.zeros(2, 3, tail)
            result = TensorDict({"a": leaf}, [2, 3]).view(6)
            if result["a"].shape != (6, tail):
                wrong.append(result)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
