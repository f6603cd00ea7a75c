"""``where`` of lazy stacks with uneven members and of nested tensors: what is replaced as a whole keeps its shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import StructureError, TensorDict, TensorDictParams, lazy_stack

KEEP = torch.tensor([True, False])


def make_stack(sizes: Any, value: float, **more: Any) -> Any:
    """Build a lazy stack of members with leaves of these sizes."""
    return lazy_stack(
        [
            TensorDict(
                {
                    "x": torch.full((size,), float(value)),
                    "n": {"y": torch.full((size, 2), float(value))},
                    **more,
                }
            )
            for size in sizes
        ]
    )


def read(stack: Any) -> list[list[float]]:
    """Return the leaves of the members."""
    return [member["x"].tolist() for member in stack.unbind(0)]


@pytest.mark.parametrize("start", [[1, 1], [1, 2], [2, 1], [5, 4], [0, 2]], ids=str)
@pytest.mark.parametrize("sizes", [[3, 4], [3, 3]], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_where_lazy_stack_takes_whole_entries_of_other(
    sizes: list[int], start: list[int], nested: bool
) -> None:
    stack, other = make_stack(sizes, 5), make_stack(start, 0)
    if nested:
        stack, other = (TensorDict({"in": item}, batch_size=[2]) for item in (stack, other))
    for result in (stack.where(KEEP, other), torch.where(KEEP, stack, other)):
        result = result["in"] if nested else result
        assert read(result) == [[5.0] * sizes[0], [0.0] * start[1]]
        assert [member["n", "y"].shape[0] for member in result.unbind(0)] == [sizes[0], start[1]]
    stack.where(~KEEP, other, out=stack, update_batch_size=True)
    assert read(stack["in"] if nested else stack) == [[0.0] * start[0], [5.0] * sizes[1]]


def test_where_lazy_stack_takes_whole_rows_of_dense_other() -> None:
    other = TensorDict({"x": torch.zeros(2, 1), "n": {"y": torch.zeros(2, 1, 2)}}, batch_size=[2])
    assert read(make_stack([3, 4], 5).where(KEEP, other)) == [[5.0] * 3, [0.0]]


def test_where_lazy_stack_promotes_dtype_of_whole_entries() -> None:
    stack, other = make_stack([3, 4], 5), make_stack([1, 1], 0).apply(lambda leaf: leaf.to(torch.int64))
    assert stack.where(KEEP, other)[1]["x"].dtype == torch.float32
    assert other.where(KEEP, stack)[0]["x"].dtype == torch.float32


def test_where_lazy_stack_condition_within_member_broadcasts_leaves() -> None:
    members = [TensorDict({"x": torch.ones(2, size)}, batch_size=[2]) for size in (3, 4)]
    others = [TensorDict({"x": torch.zeros(2, 1)}, batch_size=[2])] * 2
    result = lazy_stack(members).where(torch.tensor([[True, False], [False, False]]), lazy_stack(others))
    assert [member["x"].tolist() for member in result.unbind(0)] == [[[1.0] * 3, [0.0] * 3], [[0.0], [0.0]]]


def test_where_lazy_stack_pads_entries_of_uneven_members() -> None:
    result = make_stack([3, 4], 5).where(KEEP, make_stack([1, 2], 0, z=torch.ones(2)), pad=7)
    assert [member["z"].tolist() for member in result.unbind(0)] == [[7.0, 7.0], [1.0, 1.0]]
    assert read(result) == [[5.0] * 3, [0.0] * 2]


@pytest.mark.parametrize("value", [0, torch.tensor(0)], ids=["number", "0-d tensor"])
@pytest.mark.parametrize("nested", [False, True])
def test_where_uneven_members_and_a_number_keep_shapes(value: Any, nested: bool) -> None:
    stack = make_stack([3, 4], 5)
    data = TensorDict({"in": stack}, batch_size=[2]) if nested else stack
    result = data.where(KEEP, value)
    assert read(result["in"] if nested else result) == [[5.0] * 3, [0.0] * 4]


def test_where_uneven_members_and_a_tensor_with_dims_raises() -> None:
    with pytest.raises(StructureError, match=r"where: a tensor is broadcast with whole leaves.*key 'x'"):
        make_stack([3, 4], 5).where(KEEP, torch.zeros(2))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("other", ["nested", "uneven", 0, torch.tensor(0.0)], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_where_nested_tensors_selects_components(layout: torch.layout, other: Any) -> None:
    def make(value: float, sizes: tuple[int, ...]) -> TensorDict:
        parts = [torch.full((size,), value) for size in sizes]
        return TensorDict({"x": torch.nested.nested_tensor(parts, layout=layout)}, batch_size=[2])

    sizes = (2, 4) if other == "uneven" else (2, 3)
    value = make(0, sizes) if isinstance(other, str) else other
    result = make(1, (2, 3)).where(KEEP, value)["x"]
    assert [part.tolist() for part in result.unbind()] == [[1.0] * 2, [0.0] * sizes[1]]
    assert result.layout is layout


def make_dense(size: int, value: float) -> Any:
    leaves = {"x": torch.full((2, size), value), "n": {"y": torch.full((2, size, 2), value)}}
    return TensorDict(leaves, batch_size=[2])


PLACES: dict[str, Any] = {
    "root": lambda data: data,
    "nested": lambda data: TensorDict({"in": data, "z": torch.ones(2)}, batch_size=[2]),
}


@pytest.mark.parametrize("place", PLACES)
def test_where_dense_takes_whole_rows_of_uneven_members(place: str) -> None:
    put = PLACES[place]
    left, right = put(make_dense(3, 5)), put(make_stack([1, 2], 0))
    for result in (left.where(KEEP, right), torch.where(KEEP, left, right), right.where(~KEEP, left)):
        result = result if place == "root" else result["in"]
        assert read(result) == [[5.0] * 3, [0.0] * 2]
        assert [member["n", "y"].shape[0] for member in result.unbind(0)] == [3, 2]


def test_where_parameters_take_whole_rows_of_uneven_members() -> None:
    result = TensorDictParams(make_dense(3, 5)).where(KEEP, make_stack([1, 2], 0))
    assert read(result) == [[5.0] * 3, [0.0] * 2]


def test_where_dense_in_dense_out_of_uneven_members_raises() -> None:
    with pytest.raises(StructureError, match="'x'"):
        make_dense(3, 5).where(KEEP, make_stack([1, 2], 0), out=make_dense(3, 5))


@pytest.mark.parametrize("place", ["root", "nested"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "maximum", "__gt__", "__eq__"])
def test_operation_of_dense_with_uneven_members_broadcasts_members(name: str, place: str) -> None:
    left, right = PLACES[place](make_dense(1, 3)), PLACES[place](make_stack([1, 2], 2))
    result = getattr(left, name)(right)
    wanted = getattr(torch.tensor(3.0), name)(torch.tensor(2.0)).item()
    assert read(result if place == "root" else result["in"]) == [[wanted], [wanted] * 2]
