"""All kinds with the same elements give the same results: dense, strided, lazy stacks, nested lazy stacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorCollection, TensorDict


def make_dense_td() -> TensorDict:
    # A node precedes a leaf, so that walks with different orders of leaves give wrong results.
    leaves = {"b": {"c": torch.arange(9).view(3, 3) + 1}, "a": torch.arange(36.0).view(3, 3, 4)}
    return TensorDict(leaves, [3, 3])


def make_stack(td: TensorDict, dim: int, inner: int | None = None) -> Any:
    parts = [part.clone() for part in td.unbind(dim)]
    if inner is not None:
        parts = [make_stack(part, inner) for part in parts]
    return LazyStackedTensorDict(*parts, stack_dim=dim)


def nest(dim: int, inner: int | None = None) -> TensorDict:
    td = make_dense_td()
    td["b"] = make_stack(td["b"], dim, inner)
    return td


# All batch dims have the same size, so that exchanged dims give wrong values and not only errors.
KINDS: dict[str, Callable[[], Any]] = {
    "stack of dim 0": lambda: make_stack(make_dense_td(), 0),
    "stack of dim 1": lambda: make_stack(make_dense_td(), 1),
    "stack of stacks": lambda: make_stack(make_dense_td(), 1, 0),
    "stack of dim 0 below": lambda: nest(0),
    "stack of dim 1 below": lambda: nest(1),
    "stack of stacks below": lambda: nest(1, 0),
    "strided": lambda: make_dense_td().apply(lambda leaf: leaf.transpose(0, 1).contiguous().transpose(0, 1)),
}

INDICES = [
    "0", "-1", "0, 1", "..., 0", ":, -1", "None", ":, None, 0", "True", "False", "1:", "::2", "..., 1:2", "5:",
    "torch.tensor(1)", "torch.tensor([2, 0])", ":, torch.tensor([2, 0])", "torch.tensor([[1, 0]])",
    "torch.tensor([0, 1]), torch.tensor([2, 0])", "[0, 2], None, [0, 1]", "torch.tensor([True, False, True])",
    ":, torch.tensor([True, False, True])", "torch.eye(3, dtype=torch.bool)", "torch.zeros(0, dtype=torch.long)",
    "torch.tensor([True, False, True]), 0", "()",
]  # fmt: skip

READS = [
    "x.view(-1)", "x.reshape(9, 1)", "x.flatten()", "x.unflatten(1, (3, 1))", "x.unsqueeze(1)", "x.permute(1, 0)",
    "x.transpose(0, 1)", "x.movedim(0, 1)", "x.expand(2, 3, 3)", "x.repeat(2, 1)", "x.repeat_interleave(2, 0)",
    "x.roll(1, 0)", "x.flip(0)", "x.rot90()", "x.narrow(1, 1, 2)", "x.split(2, 1)", "x.chunk(2)", "x.unbind(1)",
    "x.tensor_split([1], 1)", "x.tensor_split(4)", "x.split([0, 3])", "x.masked_fill(mask, 5)",
    "x.gather(0, torch.tensor([[0, 2, 1]]))", "x.masked_select(mask)", "x.masked_fill_(mask, 5)", "x.masked_fill(mask[0], 5)",
    "x.where(mask, x * 0)", "x.where(mask[:, 0], x * 0)",
    "x.pad([0, 1, 1, 0])", "x.contiguous()", "x.densify()", "torch.stack([x, x], 1)", "torch.cat([x, dense()], 1)",
    "torch.stack([dense(), x])", "x.exp()", "x + x", "x + dense()", "dense() - x", "x * torch.arange(9.0).view(3, 3)",
    "x + torch.arange(3.0)", "x - torch.arange(3.0)[:, None]", "1 - x", "x == x.clone()", "x > 3", "x.clamp(dense(), x)",
    "x.add(x.select('a'), default=1.0)", "x.float().lerp(x.float() * 2, 0.5)", "x.add_(dense())", "x.mul_(2)",
    "x.sum()", "x.sum(0)", "x.sum(-1)", "x.sum((0, 1))", "x.amax(1)", "x.max(0)", "x.cummin(1)", "x.float().std(0)",
    "x.prod(0, keepdim=True)", "(x > 3).all(1)", "x.any()", "x.float().norm()", "x.float().softmax(1)",
    "x.float().quantile(0.5, 1)", "x.update(dense() * 2)", "x.update_(dense() * 2)", "x.update_({('b', 'c'): 3})",
    "x.update({'n': {'z': torch.ones(3, 3)}})", "x.set_(('b', 'c'), torch.full((3, 3), 9))", "x.fill_('b', 2)",
    "x.set_at_('a', 5.0, (0, 1, 2))", "x.set_at_(('b', 'c'), 9, (slice(None), 1))", "x.copy_at_(dense()[0], 1)",
    "x.update_at_(dense()[0] * 2, 1)", "x.set(('b', 'z'), torch.ones(3, 3, 1))", "x.select(('b', 'c'))",
    "x.exclude(('b', 'c'))", "x.rename_key_('a', ('b', 'z'))", "x.flatten_keys('.').unflatten_keys('.')",
    "x.split_keys([('b', 'c')])", "x.clone().zero_()", "x.to(torch.float64)", "x.apply(lambda t: t + 1)",
    "x.apply(torch.add, dense())", "x.apply_(lambda t: t * 2)", "x.named_apply(lambda k, t: t + len(k), nested_keys=True)",
    "x.empty(recurse=True)", "x.to_tensordict()", "x.float().pack()[0]", "x.to_lazystack(1)", "x.__getitems__([0, 2])",
    *[
        f"[key in x.keys{how} for key in ('b', 'z', ('a',), ('b',), ('b', 'c'), (('b',), ('c',)), ('z',))]"
        for how in ("()", "(True)", "(True, True)", "(False, True)", "(sort=True)")
    ],
    "3 in x.keys()", "3 in x.keys(True)", "3 in x.items()", "'a' in x.items()",
    "torch.utils._pytree.tree_map(lambda t: t + 1, x)", "torch.vmap(lambda t: t + 1)(x)",
    "torch.vmap(lambda t: t * 2, in_dims=1)(x)", "x.clone().zero_().load_state_dict(x.state_dict())",
]  # fmt: skip


def to_plain(result: Any) -> Any:
    """Convert a result to plain containers of tensors and sizes."""
    if isinstance(result, tuple):
        return [to_plain(part) for part in result]
    if isinstance(result, TensorCollection):
        entries = {key: to_plain(entry) for key, entry in sorted(result.items(), key=str)}
        return {(): [result.batch_size, *result.names], **entries}
    return result


def run_or_error(statement: str, make: Callable[[], Any]) -> Any:
    """Return the result of an expression, ``x`` after a statement, or the class of the raised error."""
    mask = torch.arange(9).view(3, 3) % 4 == 1
    x = make()
    x.names = ["u", "v"]
    names = {"x": x, "dense": make_dense_td, "torch": torch, "np": np, "TensorDict": TensorDict, "mask": mask}
    try:
        if " = " in statement:
            exec(statement, names)
            return to_plain(names["x"])
        return to_plain(eval(statement, names))
    except Exception as error:
        return type(error)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    else:
        assert one == other


# Values to write at an index: numbers, arrays and mappings of all or some entries.
VALUES = [
    "3", "2.5", "True", "np.float32(3)", "torch.tensor(3)", "{'a': 7, ('b', 'c'): 2}", "{'b': 2}", "{'a': torch.ones(4)}",
    "{'a': torch.tensor(3)}", "{'a': [1, 2, 3, 4]}", "{'a': np.ones((1, 4))}", "{'b': TensorDict({'c': torch.tensor(5)})}",
    "TensorDict({'a': torch.ones(4)})", "{'b': {'c': 1.5}}", "{'b': {'c': torch.ones(1)}}", "{}", "{'b': torch.tensor(4)}",
    "{'b': np.array(4)}",
]  # fmt: skip
REFUSED = (
    "{'b': torch.ones(3)}",
    "{'a': {'z': 1}}",
    "[1, 2]",
    "1j",
    "{'a': torch.ones(5)}",
)

STATEMENTS = [
    *READS,
    *[f"x[{index}]" for index in INDICES],
    *[f"x[{index}] = 50" for index in INDICES],
    *[f"x[{index}] = dense()[{index}] + 50" for index in INDICES],
    *[f"x[{index}] = {{'b': dense()['b'][{index}] * 0}}" for index in INDICES],
    *[
        f"x[{index}] = {value}"
        for index in ("0", ":, 1", "1:", ":, [2, 0]", "mask")
        for value in (*VALUES, *REFUSED)
    ],
]


@pytest.mark.filterwarnings("ignore:the index False")
@pytest.mark.parametrize("statement", STATEMENTS)
def test_statement_result_equals_dense_kind(statement: str) -> None:
    expected = run_or_error(statement, make_dense_td)
    assert isinstance(expected, type) == (
        statement.endswith(REFUSED) or statement.startswith("3 in x.keys")
    ), expected
    for name, make in KINDS.items():
        if name != "strided" or not statement.startswith("x.view"):
            try:
                assert_same(expected, run_or_error(statement, make))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


# Statements that create no new leaves, although some create index tensors internally.
IN_PLACE = [
    "x[[0, 2]]", "x[:, range(2)]", "x[np.array([1, 0])]", "x[[[0, 1], [2, 2]]]", "x.masked_select([True, False, True])",
    "x[[2, 0]] = 5", "x[:, [0, 2]] = x.clone()[:, :2]", "x.add(x.select('a'), default=2)", "x.view(-1)", "x == x.clone()",
    "list(x.map_iter(lambda part: part, shuffle=True, num_workers=0, chunksize=3))[0].batch_size",
]  # fmt: skip


@pytest.mark.parametrize("statement", IN_PLACE)
def test_default_device_does_not_affect_existing_leaves(statement: str) -> None:
    uneven = make_dense_td().unbind(0)
    uneven[1]["only here"] = torch.zeros(3)
    for make in (
        make_dense_td,
        lambda: make_stack(make_dense_td(), 0),
        lambda: LazyStackedTensorDict(*uneven),
    ):
        expected = run_or_error(statement, make)
        found = make()
        with torch.device("meta"):
            assert_same(expected, run_or_error(statement, lambda found=found: found))
