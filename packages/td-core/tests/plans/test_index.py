"""The index parser, compared with torch on plain tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core import TensorDict
from td_core._plans.index import plan_index
from td_core.errors import CollectionIndexError

pytestmark = pytest.mark.filterwarnings("ignore:the index False")

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


def make_leaf(batch: tuple[int, ...], tail: tuple[int, ...] = (2,)) -> Tensor:
    return torch.arange(torch.Size((*batch, *tail)).numel()).view((*batch, *tail))


@st.composite
def int_tensors(draw: st.DrawFn, size: int) -> object:
    shape = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 1), (1, 2), (0,)]))
    numel = torch.Size(shape).numel()
    if size == 0 and numel:
        shape, numel = (0,), 0
    values = draw(st.lists(st.integers(-size, max(size - 1, 0)), min_size=numel, max_size=numel))
    array = np.array(values, dtype=np.int64).reshape(shape)
    form = draw(st.sampled_from(["torch", "int32", "numpy", "list"]))
    if form == "torch":
        return torch.from_numpy(array)
    if form == "int32":
        return torch.from_numpy(array.astype(np.int32))
    if form == "numpy":
        return array
    return array.tolist()


def draw_slices(size: int) -> st.SearchStrategy[slice]:
    ends = st.none() | st.integers(-size - 1, size + 1)
    return st.builds(slice, ends, ends, st.none() | st.integers(1, 3))


@st.composite
def indices(draw: st.DrawFn, batch: tuple[int, ...]) -> object:
    """Generate any index that torch accepts for a tensor of shape ``batch``."""
    stop = draw(st.integers(0, len(batch)))
    items: list[object] = []
    dim = 0
    has_ellipsis = False
    while dim < stop:
        size = batch[dim]
        form = draw(
            st.sampled_from(["int", "slice", "tensor", "mask", "none", "bool", "ellipsis", "range", "full"])
        )
        if form == "int" and size:
            items.append(
                draw(st.integers(-size, size - 1).flatmap(lambda i: st.sampled_from([i, np.int64(i)])))
            )
        elif form == "tensor":
            items.append(draw(int_tensors(size)))
        elif form == "mask":
            ndim = draw(st.integers(1, stop - dim))
            shape = batch[dim : dim + ndim]
            numel = torch.Size(shape).numel()
            mask = np.array(
                draw(st.lists(st.booleans(), min_size=numel, max_size=numel)), dtype=bool
            ).reshape(shape)
            items.append(
                draw(st.sampled_from([mask, torch.from_numpy(mask), mask.tolist() if mask.size else mask]))
            )
            dim += ndim
            continue
        elif form == "none":
            items.append(None)
            continue
        elif form == "bool":
            items.append(draw(st.booleans().flatmap(lambda b: st.sampled_from([b, torch.tensor(b)]))))
            continue
        elif form == "ellipsis" and not has_ellipsis:
            items.append(...)
            has_ellipsis = True
            stop = min(stop + draw(st.integers(0, 1)), len(batch))
            dim = max(dim, stop - draw(st.integers(0, stop - dim)))
            continue
        elif form == "range":
            items.append(range(size))
        elif form == "full":
            items.append(slice(None))
        else:
            items.append(draw(draw_slices(size)))
        dim += 1
    if len(items) == 1 and draw(st.booleans()) and not isinstance(items[0], list):
        return items[0]
    return tuple(items)


def to_torch_index(index: object) -> object:
    """Convert an index to a form that all supported versions of torch accept."""
    if isinstance(index, tuple):
        return tuple(to_torch_index(item) for item in index)
    if isinstance(index, np.ndarray):
        return torch.from_numpy(index)  # torch accepts an empty array of any dtype as an index
    if isinstance(index, (list, range)):
        tensor = torch.tensor(list(index))
        return tensor if tensor.dtype == torch.bool else tensor.long()
    return index


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], object]:
    batch = draw(SHAPES)
    return batch, draw(indices(batch))


@settings(max_examples=600, deadline=None)
@given(cases())
def test_plan_index_equals_torch(
    case: tuple[tuple[int, ...], object],
) -> None:
    batch, index = case
    try:
        expected = make_leaf(batch, ())[to_torch_index(index)]
    except IndexError:
        with pytest.raises(IndexError):
            plan_index(index, torch.Size(batch)).leaf(make_leaf(batch, ()))
        return
    plan = plan_index(index, torch.Size(batch))
    assert plan.lead + batch[plan.n :] == tuple(expected.shape)
    assert len(plan.sources) == len(plan.lead)
    assert torch.equal(plan.leaf(make_leaf(batch, ())), expected)
    columns = torch.stack([make_leaf(batch, ()) * 2, make_leaf(batch, ()) + 1], -1)
    assert torch.equal(plan.leaf(columns), torch.stack([expected * 2, expected + 1], -1))


@settings(max_examples=600, deadline=None)
@given(cases(), st.data())
def test_lazy_stack_index_equals_torch(case: tuple[tuple[int, ...], object], data: st.DataObject) -> None:
    batch, index = case
    if not batch:
        return
    stack_dim = data.draw(st.integers(0, len(batch) - 1))
    try:
        plan = plan_index(index, torch.Size(batch))
        expected = plan.leaf(make_leaf(batch))
    except IndexError:
        return
    try:
        along = plan.along(stack_dim)
    except IndexError:
        assert not expected.numel()  # torch does not check indices of a tensor without elements
        return
    if along is None:
        return
    members = make_leaf(batch).unbind(stack_dim)
    if isinstance(along.picks, int):
        member = members[along.picks]
        assert along.stack_dim is None
        assert torch.equal(member if along.plan is None else along.plan.leaf(member), expected)
        return
    picked = members if along.picks is None else [members[i] for i in along.picks]
    done = [member if along.plan is None else along.plan.leaf(member) for member in picked]
    if done:
        assert torch.equal(torch.stack(done, along.stack_dim), expected)
    else:
        assert expected.shape[along.stack_dim] == 0


@pytest.mark.parametrize(
    ("index", "stack_dim", "picks", "new_dim"),
    [
        (1, 0, 1, None),
        (1, 1, None, 0),
        (slice(0, 2), 0, range(2), 0),
        ((slice(None), slice(1, 3)), 1, range(1, 3), 1),
        ((None, [2, 0]), 0, [2, 0], 1),
        (torch.tensor([True, False, True]), 0, [0, 2], 0),
        ((0, torch.tensor([1, 1])), 1, [1, 1], 0),
        ((..., 0), 2, 0, None),
        (None, 0, None, 1),
    ],
)
def test_member_index_plan_returns_picks_and_stack_dim(
    index: object, stack_dim: int, picks: object, new_dim: object
) -> None:
    along = plan_index(index, (3, 4, 5)).along(stack_dim)
    assert along is not None
    assert (along.picks, along.stack_dim) == (picks, new_dim)


@pytest.mark.parametrize("index", [(..., slice(2), ...), (..., 0, ...), (0, ..., ...)])
def test_index_two_ellipses_equals_torch(index: object) -> None:
    leaf = torch.zeros(2, 3, 4)
    assert TensorDict({"a": leaf}, batch_size=[2, 3, 4])[index].batch_size == leaf[index].shape  # type: ignore[index]


@pytest.mark.parametrize(
    "index", [torch.ones(3, 4, dtype=torch.bool), ([0, 1], [0, 1]), torch.zeros(2, 2).long()]
)
def test_member_index_plan_of_multi_dim_index_is_none(index: object) -> None:
    assert plan_index(index, (3, 4, 5)).along(0) is None


@pytest.mark.parametrize(
    ("index", "dims"),
    [
        (0, (1,)),
        (slice(1), (0, 1)),
        (None, (None, 0, 1)),
        ((..., 0), (0,)),
        (True, (None, 0, 1)),
        ([0, 1], (0, 1)),
        (torch.ones(2, dtype=torch.bool), (0, 1)),
        (torch.zeros(2, 2, dtype=torch.long), (None, None, 1)),
        (torch.ones(2, 3, dtype=torch.bool), (None,)),
        (([0, 1], [0, 1]), (None,)),
        ((0, [0, 1]), (1,)),
        ((slice(None), [0, 1]), (0, 1)),
    ],
)
def test_plan_index_dims_keep_names(index: object, dims: tuple[int | None, ...]) -> None:
    plan = plan_index(index, (2, 3))
    assert plan.sources + tuple(range(plan.n, 2)) == dims


def test_plan_index_mask_becomes_integer_tensors() -> None:
    plan = plan_index(torch.tensor([[True, False], [True, True]]), (2, 2))
    assert [item.tolist() for item in plan.index] == [[0, 1, 1], [0, 0, 1]]


def test_plan_index_nested_list_is_one_array() -> None:
    assert plan_index([[0, 1], [1, 1]], (2, 3)).lead == (2, 2)


def test_plan_index_supports_writes() -> None:
    leaf = torch.zeros(2, 3, 4)
    leaf[plan_index((..., [True, False, True]), (2, 3)).index] = 1
    assert leaf.sum((0, 2)).tolist() == [8.0, 0.0, 8.0]


@pytest.mark.parametrize(
    ("index", "batch", "message"),
    [
        (0, (), r"too many indices: 0 indexes 1 dims, and the batch size \[\] has 0"),
        (
            (0, 0, 0),
            (2, 3),
            r"too many indices: \(0, 0, 0\) indexes 3 dims, and the batch size \[2, 3\] has 2",
        ),
        ((..., 0, 0, 0), (2, 3), "too many indices"),
        (torch.ones(2, 3, 4).bool(), (2, 3), r"too many indices: Tensor of shape \[2, 3, 4\] indexes 3 dims"),
        (5, (2, 3), r"index 5 is out of bounds for batch dim 0 of size 2 \(index 5, batch size \[2, 3\]\)"),
        ((slice(None), -4), (2, 3), "index -4 is out of bounds for batch dim 1 of size 3"),
        (
            torch.ones(3).bool(),
            (2, 3),
            r"got \[3\] for batch dim 0 and following, \[2\] of the batch size \[2, 3\]",
        ),
        ((0, np.ones((2,), bool)), (2, 3), r"got \[2\] for batch dim 1 and following, \[3\]"),
        (1.5, (2,), "got float 1.5"),
        ({1}, (2,), "got set {1}"),
        (["a"], (2,), r"\['a'\] cannot be an index"),
        (["a", slice(None)], (2,), "cannot be an index"),
        ([0.5], (2,), "must have an int64, int32 or bool dtype; got torch.float32"),
        (torch.ones(2), (2,), "must have an int64, int32 or bool dtype; got torch.float32"),
        (([0, 1], [0, 1, 2]), (2, 3), r"cannot be broadcast together: got shapes \[\[2\], \[3\]\]"),
    ],
)
def test_plan_index_bad_index_raises(index: object, batch: tuple[int, ...], message: str) -> None:
    with pytest.raises(CollectionIndexError, match=message):
        plan_index(index, torch.Size(batch))


def test_slice_negative_step_raises_as_torch() -> None:
    with pytest.raises(
        ValueError, match=r"step of a slice must be greater than zero; got slice\(None, None, -1\)"
    ):
        plan_index(slice(None, None, -1), (3,))


def test_plan_index_scalar_tensor_works_under_vmap() -> None:
    leaf = make_leaf((3,))
    picked = torch.vmap(lambda i: plan_index(i, (3,)).leaf(leaf))(torch.tensor([2, 0]))
    assert torch.equal(picked, leaf[[2, 0]])


ROWS = {
    "one": [2],
    "twice": [3, 0, 3],
    "none": [],
    "from the end": [-1, 1],
    "mask": [True, False, False, True],
}
LEAVES = {
    "plain": lambda: torch.arange(24.0).view(4, 2, 3),
    "turned": lambda: torch.arange(24.0).view(3, 2, 4).permute(2, 1, 0),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
    "no elements": lambda: torch.zeros(4, 0),
    "conjugate": lambda: torch.arange(4).to(torch.complex64).conj(),
    "bool": lambda: torch.tensor([True, False, False, True]),
    "float8": lambda: torch.ones(4, 2).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", LEAVES)
def test_getitem_rows_equals_torch(kind: str, rows: str) -> None:
    leaf = LEAVES[kind]()
    index = torch.tensor(ROWS[rows], dtype=torch.bool if rows == "mask" else torch.int64)
    td = TensorDict({"a": leaf, "b": {"c": torch.arange(4)}}, [4])
    picked, wanted = td[index], leaf[index]
    assert type(picked["a"]) is type(wanted)
    assert (picked["a"].dtype, picked["a"].stride()) == (wanted.dtype, wanted.stride())
    assert picked["a"].tolist() == wanted.tolist()
    assert picked["b", "c"].tolist() == torch.arange(4)[index].tolist()
    if leaf.requires_grad:
        (ours,) = torch.autograd.grad(picked["a"].square().sum(), leaf, create_graph=True)
        (theirs,) = torch.autograd.grad(wanted.square().sum(), leaf, create_graph=True)
        assert ours.tolist() == theirs.tolist()


LARGE = {
    "plain": lambda: torch.arange(2400.0).view(4, 3, 2, 100),
    "bytes": lambda: torch.arange(2400).view(4, 3, 2, 100).byte(),
    "turned": lambda: torch.arange(2400.0).view(100, 2, 3, 4).permute(3, 2, 1, 0),
    "part": lambda: torch.arange(4800.0).view(4, 3, 2, 200)[..., 50:150],
    "expanded": lambda: torch.arange(100.0).expand(4, 3, 2, 100),
    "parameter": lambda: torch.nn.Parameter(torch.arange(2400.0).view(4, 3, 2, 100)),
    "conjugate": lambda: torch.arange(2400).view(4, 3, 2, 100).to(torch.complex64).conj(),
}


@pytest.mark.parametrize("covered", [2, 3])
@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize("kind", LARGE)
def test_getitem_multi_dim_mask_equals_torch(kind: str, some: bool, covered: int) -> None:
    leaf = LARGE[kind]()
    mask = (torch.arange(24).view(4, 3, 2) % 5 == 0) & some if covered == 3 else torch.eye(4, 3).bool() & some
    picked = TensorDict({"a": leaf, "b": torch.arange(24).view(4, 3, 2)}, mask.shape)[mask]
    wanted = leaf[mask]
    assert type(picked["a"]) is type(wanted)
    assert (picked["a"].dtype, picked["a"].stride()) == (wanted.dtype, wanted.stride())
    assert picked["a"].tolist() == wanted.tolist()
    assert picked["b"].tolist() == torch.arange(24).view(4, 3, 2)[mask].tolist()
    if leaf.requires_grad:
        (ours,) = torch.autograd.grad(picked["a"].square().sum(), leaf, create_graph=True)
        (theirs,) = torch.autograd.grad(wanted.square().sum(), leaf, create_graph=True)
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("missing", [4, -5])
def test_getitem_row_out_of_range_raises_as_torch(missing: int) -> None:
    td = TensorDict({"a": torch.zeros(4, 2)}, [4])
    with pytest.raises(IndexError, match=f"index {missing} is out of bounds for dimension 0 with size 4"):
        td[torch.tensor([0, missing])]
