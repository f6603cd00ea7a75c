"""Rows written at an index, from a mapping or a collection: each leaf equals the result of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.errors import BatchSizeError

INDICES: list[Any] = [
    0, -1, slice(0, 2), slice(3, 3), [1, 3], torch.tensor([1, 3]), torch.tensor([True, False, True, False, False, False]),
    (0, 1), (slice(0, 2), 1), (0, slice(0, 2)), None, ..., torch.tensor([[0, 1], [2, 3]]), (slice(None), [0, 2]),
    (torch.tensor([0, 1]), torch.tensor([2, 3])), (),
]  # fmt: skip

#: Leading dims of the rows, computed from the batch dims of the indexed collection.
LEADS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "rows": lambda lead: lead,
    "ones in front": lambda lead: (1, *lead),
    "only ones": lambda lead: (1,) * max(len(lead), 1),
    "one row less deep": lambda lead: lead[1:],
    "too many": lambda lead: (7, *lead[1:]),
}

Rows = dict[str, Any]


def copy_nested(rows: Rows) -> Rows:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in rows.items()}


#: Containers of the rows: mappings, and collections with or without the batch dims.
SOURCES: dict[str, Callable[[Rows, tuple[int, ...]], Any]] = {
    "mapping": lambda rows, lead: copy_nested(rows),
    "tuple keys": lambda rows, lead: {
        **{key: value for key, value in rows.items() if key != "n"},
        **{("n", key): value for key, value in rows["n"].items()},
    },
    "no batch size": lambda rows, lead: TensorDict(copy_nested(rows)),
    "batch size below": lambda rows, lead: TensorDict({**rows, "n": TensorDict(rows["n"], lead)}),
    "batch size": lambda rows, lead: TensorDict(copy_nested(rows), lead),
    "stack": lambda rows, lead: LazyStackedTensorDict(*TensorDict(copy_nested(rows), lead).unbind(0)),
    "parameters": lambda rows, lead: TensorDictParams(TensorDict(copy_nested(rows), lead), no_convert=True),
}


def make_dense() -> TensorDict:
    return TensorDict({"a": torch.zeros(6, 4, 5), "n": {"b": torch.zeros(6, 4)}}, [6, 4])


def make_nested_stack() -> TensorDict:
    members = [TensorDict({"b": torch.zeros(4)}, [4]) for _ in range(6)]
    return TensorDict({"a": torch.zeros(6, 4, 5), "n": LazyStackedTensorDict(*members)}, [6, 4])


TARGETS: dict[str, Callable[[], Any]] = {
    "dense": make_dense,
    "stack of dim 0": lambda: LazyStackedTensorDict(*make_dense().unbind(0)),
    "stack of dim 1": lambda: LazyStackedTensorDict(*make_dense().unbind(1), stack_dim=1),
    "stack below": make_nested_stack,
    "locked": lambda: make_dense().lock_(),
}

ELEMENTS = {"a": (5,), ("n", "b"): (), "new": (3,), ("n", "c"): ()}


def make_rows(lead: tuple[int, ...], new: bool) -> Rows:
    rows: Rows = {"a": torch.rand((*lead, 5)), "n": {"b": torch.rand(lead)}}
    if new:
        rows["new"], rows["n"]["c"] = torch.rand((*lead, 3)), torch.rand(lead)
    return rows


def write_with_torch(index: Any, rows: Rows) -> dict[Any, Tensor] | None:
    """Return the leaves after torch wrote the rows; None if torch raises."""
    flat = {"a": rows["a"], ("n", "b"): rows["n"]["b"]}
    if "new" in rows:
        flat = {**flat, "new": rows["new"], ("n", "c"): rows["n"]["c"]}
    result = {}
    for key, value in flat.items():
        result[key] = torch.zeros(6, 4, *ELEMENTS[key])
        try:
            result[key][index] = value
        except (RuntimeError, IndexError):
            return None
    return result


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_write_rows_existing_keys_equals_torch(target: str, index: Any, lead: str) -> None:
    dims = LEADS[lead](tuple(torch.zeros(6, 4)[index].shape))
    rows = make_rows(dims, False)
    expected = write_with_torch(index, rows)
    for name, make in SOURCES.items():
        if name == "stack" and (not dims or dims[0] == 0):
            continue
        for how in ("setitem", "update_at_", "copy_at_"):
            td, value = TARGETS[target](), make(rows, dims)
            if expected is None:
                with pytest.raises((RuntimeError, ValueError)):
                    write(td, index, value, how)
                assert (td == 0).all(), f"{name}, {how}: nothing was written"
                continue
            write(td, index, value, how)
            for key, leaf in expected.items():
                assert torch.equal(td[key], leaf), f"{name}, {how}: {key}"


def write(td: Any, index: Any, value: Any, how: str) -> None:
    if how == "setitem":
        td[index] = value
    else:
        getattr(td, how)(value, index)


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_write_rows_new_keys_equals_torch(index: Any, lead: str) -> None:
    dims = LEADS[lead](tuple(torch.zeros(6, 4)[index].shape))
    rows = make_rows(dims, True)
    expected = write_with_torch(index, rows)
    for name, make in SOURCES.items():
        if name == "stack" and (not dims or dims[0] == 0):
            continue
        td, value = make_dense(), make(rows, dims)
        if expected is None:
            with pytest.raises((RuntimeError, ValueError)):
                td[index] = value
            assert (td == 0).all() and "new" not in td and ("n", "c") not in td, name
            continue
        td[index] = value
        for key, leaf in expected.items():
            assert td[key].shape == leaf.shape and torch.equal(td[key], leaf), f"{name}: {key}"


@pytest.mark.parametrize("index", [0, (0, 1), slice(0, 2), [1, 3], None], ids=str)
@pytest.mark.parametrize("target", ["stack of dim 0", "stack of dim 1", "stack below"])
def test_write_rows_new_keys_in_stack_equals_torch(target: str, index: Any) -> None:
    lead = tuple(torch.zeros(6, 4)[index].shape)
    for form in ("rows", "ones in front", "only ones"):
        dims = LEADS[form](lead)
        rows = make_rows(dims, True)
        expected = write_with_torch(index, rows)
        assert expected is not None
        for name, make in SOURCES.items():
            if name == "stack" and not dims:
                continue
            td = TARGETS[target]()
            td[index] = make(rows, dims)
            for key, leaf in expected.items():
                assert torch.equal(td[index][key], leaf[index]), f"{name}, {form}: {key}"


@pytest.mark.parametrize(
    ("index", "value", "shape"),
    [
        (slice(0, 2), {"new": torch.ones(2, 5)}, (6, 5)),
        (slice(0, 2), TensorDict({"new": torch.ones(2, 5)}), (6, 5)),
        (slice(0, 2), TensorDict({"new": torch.ones(5)}), (6, 5)),
        (slice(0, 2), TensorDict({"new": torch.tensor(1.0)}), (6,)),
        (slice(0, 2), TensorDict({"new": torch.ones(1, 5)}, [1]), (6, 5)),
        (0, {"new": torch.ones(1, 5)}, (6, 1, 5)),
        (0, TensorDict({"new": torch.ones(1, 5)}), (6, 1, 5)),
        (0, TensorDict({"new": torch.ones(1, 5)}, [1]), (6, 5)),
        (0, {"a": torch.ones(1, 5), "new": torch.ones(1, 3)}, (6, 3)),
        (0, {"a": torch.ones(5), "new": torch.ones(1, 3)}, (6, 1, 3)),
        (slice(0, 2), {"a": torch.ones(5), "new": torch.ones(3)}, (6, 3)),
        (slice(0, 2), {"a": torch.ones(1, 5), "new": torch.ones(2, 3)}, (6, 3)),
        (slice(0, 2), {"a": [[1.0] * 5] * 2, "new": [[1.0], [1.0]]}, (6, 1)),
    ],
)
def test_write_new_key_creates_expected_shape(index: Any, value: Any, shape: tuple[int, ...]) -> None:
    td = TensorDict({"a": torch.zeros(6, 5)}, [6])
    td[index] = value
    expected = torch.zeros(shape)
    expected[index] = 1
    assert td["new"].shape == shape and torch.equal(td["new"], expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"new": torch.ones(3, 5)},
            r"key 'new' has shape \[3, 5\], which does not start with the batch size \[2\]",
        ),
        (
            {"a": torch.ones(2, 5), "new": torch.ones(3, 5)},
            r"cannot make key 'new' at an index: it has shape \[3, 5\], of which \[3\] are batch dims as beside it",
        ),
        (TensorDict({"a": torch.ones(3, 5)}, [3]), r"batch size \[3\], which does not broadcast"),
        ({"n": {"new": torch.ones(3)}}, r"\('n', 'new'\) has shape \[3\]"),
    ],
)
def test_write_rows_of_wrong_size_raises_with_key(value: Any, message: str) -> None:
    td = TensorDict({"a": torch.zeros(6, 5)}, [6])
    with pytest.raises(BatchSizeError, match=message):
        td[:2] = value
    assert list(td.keys()) == ["a"] and (td == 0).all()


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_write_rows_with_fewer_batch_dims_equals_torch(batch: tuple[int, ...]) -> None:
    td = TensorDict({"a": torch.zeros(6, 4, 5)}, [6, 4])
    td[:2, :3] = TensorDict({"a": torch.ones(2, 3, 5), "new": torch.ones(2, 3)}, batch)
    expected = torch.zeros(6, 4)
    expected[:2, :3] = 1
    assert torch.equal(td["new"], expected) and torch.equal(td["a"], expected[..., None].expand(6, 4, 5))


def test_write_rows_under_vmap_and_compile_equals_eager() -> None:
    torch.compiler.reset()

    def write_first(td: Any, row: Tensor) -> Any:
        td = td.clone()
        td[0] = {"a": row}
        td[1] = TensorDict({"a": row})
        return td["a"]

    td, row = TensorDict({"a": torch.zeros(3, 5)}, [3]), torch.ones(1, 5)
    expected = torch.zeros(3, 5)
    expected[:2] = 1
    assert torch.equal(torch.compile(write_first, fullgraph=True, backend="eager")(td, row), expected)
    both = torch.vmap(write_first)(torch.stack([td, td]), torch.stack([row, row]))
    assert torch.equal(both, expected.expand(2, 3, 5))
