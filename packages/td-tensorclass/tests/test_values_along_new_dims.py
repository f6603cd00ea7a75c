"""Values along a dim that vmap adds: every element along it has the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import TensorCollection, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import StructureError
from td_tensorclass import tensorclass

WEIGHTS = TensorDict({"w": torch.ones(3)}, [3])
ROWS = ["a", "b"]


@tensorclass
class Record:
    x: torch.Tensor
    s: str


def make_entries() -> dict[str, Any]:
    return {"x": torch.ones(2, 4), "s": ROWS}


def make_lazy() -> TensorCollection:
    return lazy_stack([TensorDict({"x": torch.ones(4), "s": value}) for value in ROWS])


MAKERS = {
    "dense": lambda: TensorDict(make_entries(), [2]),
    "nested": lambda: TensorDict({"n": make_entries()}, [2]),
    "node": lambda: TensorDict({"n": make_entries()}, [2])["n"],
    "params": lambda: TensorDictParams(TensorDict(make_entries(), [2])),
    "tensorclass": lambda: Record(**make_entries(), batch_size=[2]),
    "values": lambda: TensorDict({"s": ROWS}, [2]),
}


def multiply(weights: TensorDict, data: TensorCollection) -> TensorCollection:
    source = data.data if isinstance(data, TensorDictParams) else data
    return source.copy().apply(lambda x: x * weights["w"])


def read(data: TensorCollection) -> Any:
    return (data["n"] if "n" in data.keys() else data).get("s").tolist()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_vmap_adds_a_dim_and_repeats_values_along_it(kind: str, chunk_size: int | None) -> None:
    data = MAKERS[kind]()
    for out_dim, values in ((0, [ROWS] * 3), (1, [["a"] * 3, ["b"] * 3]), (-1, [["a"] * 3, ["b"] * 3])):
        result = torch.vmap(multiply, (0, None), out_dim, chunk_size=chunk_size)(WEIGHTS, data)
        assert result.batch_size == ((3, 2) if out_dim == 0 else (2, 3))
        assert read(result) == values
        assert read(result[1:]) == values[1:]
    assert read(data) == ROWS


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("copies", [2, 3])  # also as many copies as rows
def test_nested_vmap_repeats_values_along_the_added_dim_only(kind: str, copies: int) -> None:
    data, weights = MAKERS[kind](), TensorDict({"w": torch.ones(copies)}, [copies])
    inner = torch.vmap(multiply, (0, None))
    assert read(torch.vmap(inner, (None, 0))(weights, data)) == [["a"] * copies, ["b"] * copies]
    assert read(torch.vmap(inner, (None, 0), 1)(weights, data)) == [ROWS] * copies
    assert read(torch.vmap(inner, (0, None))(torch.stack([weights] * 4), data)) == [[ROWS] * copies] * 4
    mapped = torch.vmap(lambda data: data + 0 if kind != "values" else data)(data)
    assert read(torch.vmap(multiply, (0, None))(weights, mapped)) == [ROWS] * copies


def test_vmap_repeats_values_of_a_lazy_stack_along_first_dim() -> None:
    data = make_lazy()
    result = torch.vmap(multiply, (0, None))(WEIGHTS, data)
    assert result.batch_size == (3, 2) and read(result) == [ROWS] * 3
    with pytest.raises(
        StructureError, match=r"vmap changed the dims; exclude\(\) the key, or densify\(\) a lazy stack"
    ):
        torch.vmap(multiply, (0, None), 1)(WEIGHTS, data)
    assert read(torch.vmap(multiply, (0, None), 1)(WEIGHTS, data.densify())) == [["a"] * 3, ["b"] * 3]


def test_repeated_values_are_saved_joined_and_written(tmp_path: Any) -> None:
    pytest.importorskip("td_memmap")
    result = torch.vmap(multiply, (0, None))(WEIGHTS, MAKERS["dense"]())
    assert read(TensorDict.load_memmap(result.memmap(tmp_path / "save").saved_path)) == [ROWS] * 3
    assert read(torch.stack([result, result])) == [[ROWS] * 3] * 2
    assert read(result.reshape(6)) == ROWS * 3
    result = result.clone()
    result[1, 0] = {"x": 0.0, "s": "new"}
    assert read(result) == [ROWS, ["new", "b"], ROWS]


def test_compiled_vmap_repeats_values() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.vmap(multiply, (0, None)), backend="eager", fullgraph=True)
    assert read(compiled(WEIGHTS, MAKERS["dense"]())) == [ROWS] * 3
