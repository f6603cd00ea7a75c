"""to_padded_tensor of uneven members and nested tensors; its masks are False at every element that was added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, StructureError, TensorDict, lazy_stack, pad_sequence

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

ROWS = [[True, True, False], [True, True, True]]
Build = Callable[[torch.layout], Any]


def nest(layout: torch.layout, sizes: tuple[int, ...] = (2, 3), *features: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(size, *features) for size in sizes], layout=layout)


def make_stack(*sizes: int, batch: bool = False) -> Any:
    return lazy_stack([TensorDict({"x": torch.ones(n)}, batch_size=[n] if batch else []) for n in sizes])


#: Collections, the key of the mask, and the mask.
MASKS: dict[str, tuple[Build, Any, Any]] = {
    "nested tensor": (lambda layout: TensorDict({"x": nest(layout)}, batch_size=[2]), "mask", ROWS),
    "features": (lambda layout: TensorDict({"x": nest(layout, (2, 3), 4)}, batch_size=[2]), "mask", ROWS),
    "beside dense": (
        lambda layout: TensorDict({"y": torch.ones(2, 5), "x": nest(layout)}, batch_size=[2]),
        "mask",
        ROWS,
    ),
    "two alike": (
        lambda layout: TensorDict({"x": nest(layout, (2, 3), 4), "n": {"y": nest(layout)}}, batch_size=[2]),
        "mask",
        ROWS,
    ),
    "in a node": (lambda layout: TensorDict({"n": {"x": nest(layout)}}, batch_size=[2]), ("n", "mask"), ROWS),
    "one node of two": (
        lambda layout: TensorDict({"x": nest(layout, (1, 4)), "n": {"x": nest(layout)}}, batch_size=[2]),
        ("n", "mask"),
        ROWS,
    ),
    "without batch": (lambda layout: TensorDict({"x": nest(layout)}), "mask", ROWS),
    "stack of nested": (
        lambda layout: lazy_stack(
            [TensorDict({"x": nest(layout, sizes)}, batch_size=[2]) for sizes in ((2, 3), (1, 2))]
        ),
        "mask",
        [ROWS, [[True, False, False], [True, True, False]]],
    ),
    "densified": (lambda layout: make_stack(2, 3).densify(layout), "mask", ROWS),
    "densified batch": (lambda layout: make_stack(2, 3, batch=True).densify(layout), "mask", ROWS),
    "uneven stack": (lambda _: make_stack(2, 3), "mask", ROWS),
    "uneven batch": (lambda _: make_stack(2, 3, batch=True), "mask", ROWS),
    "uneven stack in a node": (
        lambda _: TensorDict({"n": make_stack(2, 3, batch=True)}, batch_size=[2]),
        ("n", "mask"),
        ROWS,
    ),
    "uneven stack below": (lambda _: TensorDict({"n": make_stack(2, 3)}, batch_size=[2]), "mask", ROWS),
    "equal lengths": (
        lambda _: TensorDict({"x": nest(torch.jagged, (3, 3))}, batch_size=[2]),
        "mask",
        [[True] * 3] * 2,
    ),
    "nothing to pad": (lambda _: TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]), "mask", [True, True]),
}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_to_padded_tensor_marks_padding(name: str, layout: torch.layout) -> None:
    build, key, mask = MASKS[name]
    data = build(layout)
    padded = data.to_padded_tensor(-1.0, mask_key=key)
    assert padded[key].tolist() == mask
    without = data.to_padded_tensor(-1.0)
    assert key not in without.keys(True) and (padded.exclude(key) == without).all()


def test_to_padded_tensor_two_ragged_dims_marks_both() -> None:
    leaf = torch.nested.nested_tensor([torch.ones(2, 1), torch.ones(1, 2)])
    padded = TensorDict({"x": leaf}, batch_size=[2]).to_padded_tensor(mask_key="mask")
    assert torch.equal(padded["mask"], padded["x"] == 1)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_to_padded_tensor_entries_padded_differently_raises(layout: torch.layout) -> None:
    data = TensorDict({"x": nest(layout), "n": {"y": nest(layout, (1, 3))}}, batch_size=[2])
    with pytest.raises(StructureError, match=r"key 'x' and key \('n', 'y'\) are padded differently"):
        data.to_padded_tensor(mask_key="mask")
    assert data.to_padded_tensor()["n", "y"].tolist() == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_pad_sequence_of_nested_tensors_raises(layout: torch.layout) -> None:
    items = [TensorDict({"x": nest(layout, sizes)}, batch_size=[2]) for sizes in ((2, 3), (1, 2))]
    with pytest.raises(
        StructureError, match=r"pad_sequence: key 'x' is a nested tensor; to_padded_tensor\(\)"
    ):
        pad_sequence(items, return_mask=True)


def test_to_padded_tensor_uneven_batch_returns_mask() -> None:
    members = [TensorDict({"x": torch.ones(n, 2), "n": {"q": torch.ones(n)}}, [n]) for n in (1, 3, 2)]
    padded = LazyStackedTensorDict(*members).to_padded_tensor(padding=-1, mask_key=("n", "mask"))
    assert type(padded) is TensorDict
    assert padded.batch_size == padded["n"].batch_size == (3, 3)
    assert padded["n", "q"].tolist() == [[1, -1, -1], [1, 1, 1], [1, 1, -1]]
    assert padded["n", "mask"].tolist() == [[True, False, False], [True] * 3, [True, True, False]]
    assert padded["x"].shape == (3, 3, 2)


def test_to_padded_tensor_pads_nested_uneven_entries() -> None:
    members = [TensorDict({"x": torch.ones(n), "same": torch.ones(2)}) for n in (1, 2)]
    inner = LazyStackedTensorDict(*members)
    outer = TensorDict({"in": LazyStackedTensorDict(inner, inner.clone(), stack_dim=1)})
    padded = outer.to_padded_tensor(5.0)
    assert padded["in", "x"].tolist() == [[[1, 5], [1, 5]], [[1, 1], [1, 1]]]
    assert padded["in", "same"].shape == (2, 2, 2)
    nested = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert TensorDict({"x": nested}).to_padded_tensor(5.0)["x"].tolist() == [[1, 5], [1, 1]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_to_padded_tensor_nested_tensor_sets_batch_size(layout: torch.layout) -> None:
    members = [TensorDict({"n": {"a": torch.ones(n, 2)}}, [n]) for n in (1, 3)]
    ragged = LazyStackedTensorDict(*members)
    expected = ragged.to_padded_tensor(-1.0, mask_key=("n", "mask"))
    padded = ragged.densify(layout).to_padded_tensor(-1.0, mask_key=("n", "mask"))
    assert padded.batch_size == padded["n"].batch_size == (2, 3)
    assert torch.equal(padded["n", "a"], expected["n", "a"])
    assert padded["n", "mask"].tolist() == [[True, False, False], [True, True, True]]
