"""Values written under torch.compile, into lazy stacks and dense collections; nested compile regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass


class Sample(TensorClass):
    a: torch.Tensor
    phase: str = "none"


def members() -> list[TensorDict]:
    return [TensorDict({"a": torch.tensor(float(i)), "n": {"b": torch.ones(2)}}) for i in range(2)]


KINDS: dict[str, Callable[[], Any]] = {
    "dense": lambda: TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, batch_size=[2]),
    "lazy": lambda: LazyStackedTensorDict(*members()),
    "lazy below": lambda: TensorDict({"l": LazyStackedTensorDict(*members())}, batch_size=[2]),
    "lazy of tensorclasses": lambda: LazyStackedTensorDict(*[Sample(a=torch.ones(())) for _ in range(2)]),
}
VALUES: dict[str, Callable[[], Any]] = {
    "string": lambda: "train",
    "none": lambda: None,
    "list of strings": lambda: ["a", "b"],
    "value": lambda: NonTensorData("v"),
    "values": lambda: NonTensorStack("u", "v"),
    "mapping of strings": lambda: {"x": "y"},
    "collection of strings": lambda: TensorDict({"x": "y", "t": torch.ones(2)}, batch_size=[2]),
}
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "setitem": lambda td, value: td.__setitem__("phase", value),
    "set": lambda td, value: td.set("phase", value),
    "nested set": lambda td, value: td.set(("n", "phase"), value),
    "update": lambda td, value: td.update({"phase": value}),
    "nested update": lambda td, value: td.update({"n": {"phase": value}}),
    "set_non_tensor": lambda td, value: td.set_non_tensor("phase", value),
    "twice": lambda td, value: td.set("phase", value).set("phase", "again"),
}


#: All kinds of writes with a string, and all kinds of values with one write.
WRITTEN = [
    *[(name, "string") for name in WRITES],
    *[("update", value) for value in VALUES if value != "string"],
]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dense"])
@pytest.mark.parametrize(("name", "value"), WRITTEN)
def test_compile_set_non_tensor_writes_value(name: str, value: str, kind: str) -> None:
    written, expected = KINDS[kind](), KINDS[kind]()
    try:
        WRITES[name](expected, VALUES[value]())
    except Exception as refused:
        pytest.skip(f"refused without a graph too: {type(refused).__name__}")
    torch.compiler.reset()
    given = VALUES[value]()

    def write(td: Any) -> Any:
        WRITES[name](td, given)
        return td

    result = torch.compile(write, backend="eager", fullgraph=True)(written)
    assert str(result.to_dict()) == str(written.to_dict()) == str(expected.to_dict())


@pytest.mark.skipif(
    not hasattr(torch.compiler, "nested_compile_region"), reason="this torch has no compiled regions"
)
@pytest.mark.parametrize(
    "make", [KINDS["dense"], lambda: TensorDict({"t": Sample(a=torch.ones(2), batch_size=[2])}, [2])]
)
@pytest.mark.parametrize("name", ["sin", "clone"])
def test_nested_compile_region_keeps_non_tensor(name: str, make: Callable[[], Any]) -> None:
    torch.compiler.reset()
    td = make()
    td["s"] = "x"
    region = torch.compiler.nested_compile_region(lambda td: getattr(td, name)())
    result = torch.compile(lambda td: region(td), backend="aot_eager", fullgraph=True)(td)
    assert str(result.to_dict()) == str(getattr(td, name)().to_dict())


@pytest.mark.parametrize("index", [torch.tensor([True, False]), torch.tensor([1, 0])])
def test_tensor_index_of_values_in_a_graph_names_ways_out(index: torch.Tensor) -> None:
    data = TensorDict({"x": torch.arange(2.0), "s": ["a", "b"]}, [2])
    torch._dynamo.reset()
    read = torch.compile(lambda data, index: data[index]["x"], backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported,
        match=r"exclude\(\) the key of the column or call filter_non_tensor_data",
    ):
        read(data, index)
    for part in (data.exclude("s"), data.filter_non_tensor_data()):
        assert torch.equal(read(part, index), data["x"][index])
