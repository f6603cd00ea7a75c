"""In-place writes of parameters below another collection: as for the parameters alone, autograd does not record them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.errors import StructureError


def make_params() -> TensorDictParams:
    return TensorDictParams(
        TensorDict(
            {"w": torch.ones(2, 3), "m": {"b": torch.ones(2), "i": torch.zeros(2, dtype=torch.int64)}}, [2]
        )
    )


#: A collection around parameters, and the key path of the parameters in it.
AROUND: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "alone": (lambda params: params, ()),
    "entry": (lambda params: TensorDict({"net": params}, [2]), ("net",)),
    "deeper": (lambda params: TensorDict({"a": {"net": params}}, [2]), ("a", "net")),
    "beside a recorded leaf": (
        lambda params: TensorDict({"x": torch.ones(2, requires_grad=True) * 1, "net": params}, [2]),
        ("net",),
    ),
    "in a lazy stack": (
        lambda params: LazyStackedTensorDict(
            TensorDict({"net": params}, [2]), TensorDict({"net": make_params()}, [2]), stack_dim=1
        ),
        ("net",),
    ),
}

#: A write of 5 into all leaves (or into "w" of the parameters), or at row 0.
WRITES: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "fill_": lambda td, path: td.fill_((*path, "w"), 5),
    "update_": lambda td, path: td.update_(make_source(td)),
    "update_ of a key": lambda td, path: td.update_(make_source(td), keys_to_update=[(*path, "w")]),
    "copy_": lambda td, path: td.copy_(make_source(td)),
    "set_": lambda td, path: td.set_((*path, "w"), torch.full_like(td[(*path, "w")], 5)),
    "apply_": lambda td, path: td.apply_(lambda leaf: torch.full_like(leaf, 5)),
    "update_at_": lambda td, path: td.update_at_(make_source(td)[0], 0),
    "copy_at_": lambda td, path: td.copy_at_(make_source(td)[[0]], [0]),
    "set_at_": lambda td, path: td.set_at_((*path, "w"), torch.full_like(td[(*path, "w")][0], 5), 0),
    "load_state_dict": lambda td, path: td.load_state_dict(make_source(td).state_dict()),
}


def make_source(td: Any) -> Any:
    return td.detach().clone().apply(lambda leaf: torch.full_like(leaf, 5))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("around", AROUND)
def test_write_parameters_below_collection_equals_alone(around: str, write: str) -> None:
    params = make_params()
    wrap, path = AROUND[around]
    weight, td = params["w"], wrap(params)
    leaves = td._leaves()
    WRITES[write](td, path)
    row = [5.0] * 3
    assert params["w"].tolist() == [row, [1.0] * 3 if "at_" in write else row]
    assert params["w"] is weight and weight.is_leaf and weight.requires_grad and weight.grad_fn is None
    assert all(left is right for left, right in zip(td._leaves(), leaves, strict=True))


@pytest.mark.parametrize("around", AROUND)
def test_zero_parameters_below_collection_equals_alone(around: str) -> None:
    params = make_params()
    AROUND[around][0](params).zero_()
    assert params["w"].tolist() == [[0.0] * 3] * 2 and params["m", "b"].tolist() == [0.0, 0.0]
    assert params["w"].requires_grad


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.add_(1),
        lambda td: td.masked_fill_(torch.ones(td.batch_size, dtype=torch.bool), 1),
        lambda td: td.__setitem__(0, make_source(td)[0]),
        lambda td: td.update(make_source(td), inplace=True),
    ],
)
def test_write_recorded_by_autograd_refuses_parameters(write: Callable[[Any], Any], around: str) -> None:
    params = make_params()
    with pytest.raises(StructureError, match="it is a leaf that requires grad"):
        write(AROUND[around][0](params))
    assert (params["w"] == 1).all()


def test_write_beside_parameters_is_recorded() -> None:
    start, value = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    td = TensorDict({"x": start * 1, "net": make_params()}, [2])
    td.update_({"x": value * 3, "net": {"m": {"b": value * 2}}})
    td["x"].sum().backward()
    assert value.grad.tolist() == [3.0, 3.0] and start.grad.tolist() == [0.0, 0.0]
    assert td["net", "m", "b"].tolist() == [2.0, 2.0] and td["net", "m", "b"].is_leaf


def test_write_wrong_value_beside_parameters_writes_nothing() -> None:
    td = TensorDict({"net": make_params(), "x": torch.ones(2)}, [2])
    with pytest.raises(
        StructureError, match=r"key 'x' in place: it has shape \[2\] there, the value \[2, 3\]"
    ):
        td.update_({"net": {"w": torch.zeros(2, 3)}, "x": torch.zeros(2, 3)})
    assert (td["net", "w"] == 1).all()


def test_zero_frozen_parameter_stays_frozen() -> None:
    params = make_params()
    params["w"].requires_grad_(False)
    TensorDict({"net": params}, [2]).zero_()
    assert not params["w"].any() and not params["w"].requires_grad
