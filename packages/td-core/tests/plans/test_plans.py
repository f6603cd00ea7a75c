"""Cached plans: earlier arguments must not change later results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from td_core import TensorDict, assert_close, lazy_stack
from td_core._plans import shapes as _shape_plans
from td_core._plans.plans import Sizes, cache_plans


def make_td() -> TensorDict:
    return TensorDict({"a": torch.arange(24).view(2, 3, 4), "n": {"b": torch.arange(6).view(2, 3)}}, [2, 3])


#: An operation with valid arguments, and invalid arguments that equal them (6.0 == 6), so that a cache could mix them up.
TWINS: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = [
    (lambda *args: make_td().view(*args), (6,), (6.0,)),
    (lambda *args: make_td().reshape(*args), (3, 2), (3.0, 2.0)),
    (lambda *args: make_td().permute(*args), (1, 0), (1.0, 0.0)),
    (lambda *args: make_td().unsqueeze(*args), (1,), (1.0,)),
    (lambda *args: make_td().transpose(*args), (1, 0), (1.0, 0.0)),
    (lambda *args: make_td().expand(*args), (1, 2, 3), (1.0, 2.0, 3.0)),
    (lambda *args: make_td().split(*args), (1,), (1.0,)),
    (lambda *args: make_td().unbind(*args)[0], (1,), (1.0,)),
    (lambda *args: make_td().flatten(*args), (0, 1), (0.0, 1.0)),
    (lambda *args: torch.stack([make_td(), make_td()], *args), (1,), (1.0,)),
]


@pytest.mark.parametrize(("operation", "right", "wrong"), TWINS)
def test_invalid_argument_equal_to_cached_one_raises(
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


#: Operations that accept dims or sizes; one argument of each is the given int.
TAKES_INTS: dict[str, Callable[[Any, Any], Any]] = {
    "[..., 1]": lambda td, one: td[..., one],
    "[1, None]": lambda td, one: td[one, None],
    "view": lambda td, one: td.view(one, 6),
    "view, together": lambda td, one: td.view((one, 6)),
    "reshape": lambda td, one: td.reshape([6, one]),
    "flatten": lambda td, one: td.flatten(0, one),
    "unflatten": lambda td, one: td.unflatten(one, (one, 3)),
    "unsqueeze": lambda td, one: td.unsqueeze(one),
    "squeeze": lambda td, one: td[:, :1].squeeze(one),
    "permute": lambda td, one: td.permute(one, 0),
    "transpose": lambda td, one: td.transpose(0, one),
    "movedim": lambda td, one: td.movedim(one, 0),
    "expand": lambda td, one: td.expand(one, 2, 3),
    "expand, alone": lambda td, one: td[0, 0].expand(one),
    "broadcast_to": lambda td, one: td.broadcast_to((one, 2, 3)),
    "repeat": lambda td, one: td.repeat(one, 2),
    "tile": lambda td, one: td.tile(one),
    "repeat_interleave": lambda td, one: td.repeat_interleave(one, dim=one),
    "roll": lambda td, one: td.roll(one, one),
    "roll, flat": lambda td, one: td.roll(one),
    "flip": lambda td, one: td.flip(one),
    "rot90": lambda td, one: td.rot90(one, (0, one)),
    "narrow": lambda td, one: td.narrow(one, one, one),
    "unbind": lambda td, one: td.unbind(one)[0],
    "split": lambda td, one: td.split(one, one)[0],
    "split, several": lambda td, one: td.split([one, 2], one)[0],
    "chunk": lambda td, one: td.chunk(one, one)[0],
    "tensor_split": lambda td, one: td.tensor_split(one, one)[0],
    "tensor_split, places": lambda td, one: td.tensor_split((one,), one)[0],
    "pad": lambda td, one: td.pad([one, 0]),
    "gather": lambda td, one: td.gather(one, torch.zeros(2, 1, dtype=torch.long)),
    "stack": lambda td, one: torch.stack([td, td], one),
    "cat": lambda td, one: torch.cat([td, td], one),
    "lazy_stack": lambda td, one: lazy_stack([td, td], one),
    "to_lazystack": lambda td, one: td.to_lazystack(one),
    "new_zeros": lambda td, one: td.new_zeros(one),
    "new_ones": lambda td, one: td.new_ones(one, 2),
    "new_full": lambda td, one: td.new_full(one, 3),
    "sum": lambda td, one: td.sum(one),
    "sum, several": lambda td, one: td.sum((0, one)),
    "amax": lambda td, one: td.amax(one),
    "max": lambda td, one: td.max(one).values,
    "cummin": lambda td, one: td.cummin(one).values,
    "any": lambda td, one: td.any(one),
    "std": lambda td, one: td.double().std(one),
    "quantile": lambda td, one: td.double().quantile(0.5, one),
    "logsumexp": lambda td, one: td.double().logsumexp(one),
    "softmax": lambda td, one: td.double().softmax(one),
    "empty": lambda td, one: td.empty(batch_size=[one]),
    "TensorDict": lambda td, one: TensorDict({}, [one]),
    "TensorDict, alone": lambda td, one: TensorDict({}, one),
    "TensorDict, a size": lambda td, one: TensorDict({}, torch.Size([one])),
    "apply": lambda td, one: td[:1].apply(torch.clone, batch_size=[one]),
    "from_dict": lambda td, one: TensorDict.from_dict({"a": torch.zeros(1)}, batch_size=[one]),
}


@pytest.mark.parametrize("one", [np.int64(1), np.int32(1), torch.tensor(1)], ids=["int64", "int32", "tensor"])
@pytest.mark.parametrize("operation", TAKES_INTS)
@pytest.mark.parametrize(
    "make", [make_td, lambda: make_td().to_lazystack(0), lambda: make_td().to_lazystack(1)]
)
def test_numpy_or_tensor_int_argument_equals_int(make: Callable[[], Any], operation: str, one: Any) -> None:
    take = TAKES_INTS[operation]
    result, expected = take(make(), one), take(make(), 1)
    assert result.batch_size == expected.batch_size
    assert all(type(size) is int for size in result.batch_size)
    assert_close(result, expected)


@pytest.mark.parametrize("name", ["sum", "std", "unsqueeze", "unbind", "flip", "softmax", "amax"])
def test_bool_as_dim_raises(name: str) -> None:
    with pytest.raises(TypeError, match=r"a dim is an int.*; got True"):
        getattr(make_td().double(), name)(True)


def test_index_true_differs_from_one() -> None:
    for _ in range(2):
        assert make_td()[1, ...].batch_size == (3,)
        assert make_td()[True, ...].batch_size == (1, 2, 3)
        assert make_td()[0, None].batch_size == (1, 3)
        assert make_td()[False, None].batch_size == (0, 1, 2, 3)


def test_cached_plan_is_separate_per_batch_size_and_leaf() -> None:
    for sizes in ((2, 3), (3, 2), (6, 1), (2, 3)):
        for tail in ((), (4,), (1, 2)):
            leaf = torch.arange(torch.Size([*sizes, *tail]).numel()).view(*sizes, *tail)
            collection = TensorDict({"a": leaf}, sizes)
            assert torch.equal(collection.view(-1)["a"], leaf.view(-1, *tail))
            assert torch.equal(collection.permute(1, 0)["a"], leaf.transpose(0, 1))
            assert torch.equal(collection[..., 0]["a"], leaf[:, 0])


def test_sizes_cache_is_bounded() -> None:
    sizes = Sizes((6,), 2)
    for i in range(2000):
        assert sizes[2, 3, i] == (6, i)
    assert len(sizes) <= 256


def test_cache_plans_keeps_plans_of_ints_alone() -> None:
    calls: list[Any] = []

    @cache_plans
    def plan(*args: Any) -> Any:
        calls.append(args)
        return object()

    for argument in (torch.tensor([1]), 1.0, slice(1), (1.0,)):
        assert plan((2,), argument) is not plan((2,), argument)
    assert len(calls) == 8
    assert plan((2,), 1) is plan((2,), 1) is plan((2,), np.int64(1)) is plan((2,), torch.tensor(1))
    assert plan((2,), (1,)) is plan((2,), [1]) is plan((2,), [np.int64(1)])
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
def test_common_operation_stores_plan_in_cache(
    operation: Callable[[TensorDict], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    plan = getattr(_shape_plans, name)
    monkeypatch.setattr(_shape_plans, name, lambda *args: given.append(plan(*args)) or given[-1])
    operation(make_td())
    operation(make_td())
    assert given[0] is given[1]


def test_threads_using_plan_cache_get_correct_results() -> None:
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
