"""Casts of every leaf to one dtype, and the classes bool, int, float and complex as dtypes, wherever torch accepts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, is_bool, is_floating, is_integer
from td_core._functions.dtypes import CASTS
from td_core._methods.casting import DtypeMixin
from td_core._torch.dtypes import METHODS
from td_core.errors import BatchSizeError


@pytest.fixture(params=["nested", "lazy", "nested lazy"])
def td(request: pytest.FixtureRequest, make_collection: Any) -> Any:
    return make_collection(request.param)


SHORTHANDS = [
    name
    for name, method in vars(DtypeMixin).items()
    if inspect.isfunction(method) and method.__closure__  # a factory built it
]


CASTABLE = [name for name in SHORTHANDS if "cast" not in METHODS[name].cannot]


def test_generated_cast_methods_equal_table() -> None:
    assert sorted(METHODS) == SHORTHANDS


@pytest.mark.parametrize("name", CASTABLE)
def test_cast_methods_equal_torch_to(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    dtype = getattr(torch, name)
    expected = {key: leaf.to(dtype) for key, leaf in td.items(True, True)}
    assert_leaves_equal(getattr(td, name)(), expected)
    assert_leaves_equal(td.to(dtype), expected)
    assert_leaves_equal(td.type(dtype), expected)


@pytest.mark.filterwarnings("ignore:B?Complex")
def test_complex32_casts_leaves() -> None:
    assert TensorDict({"a": torch.zeros(1)}).complex32()["a"].dtype == torch.complex32


@pytest.mark.parametrize("name", [name for name in SHORTHANDS if name.startswith("q")])
def test_cast_quantized_dtype_raises(name: str) -> None:
    with pytest.raises(RuntimeError):
        getattr(TensorDict({"a": torch.zeros(1)}), name)()


@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_cast_table_methods_return_their_dtype(dtype: torch.dtype) -> None:
    assert CASTS[dtype](torch.ones(1, dtype=torch.int8)).dtype == dtype


def test_cast_same_dtype_keeps_leaves(make_nested: Any) -> None:
    td = make_nested()
    assert td.float()["a"] is td["a"]
    assert td.float() is not td


def test_cast_filter_receives_key_and_leaf(td: TensorDict) -> None:
    seen: set[object] = set()

    def only_a(key: tuple[str, ...], leaf: Tensor) -> bool:
        seen.add(key)
        assert isinstance(leaf, Tensor)
        return key == ("a",)

    result = td.double(cast_filter=only_a)
    assert seen == {key if isinstance(key, tuple) else (key,) for key in td.keys(True, True)}
    for key, leaf in result.items(True, True):
        assert leaf.dtype == (torch.float64 if key == "a" else torch.float32)
    assert td.type(torch.int8, cast_filter=only_a)["a"].dtype == torch.int8


DTYPE_OF = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def make_dense_td() -> TensorDict:
    return TensorDict({"a": torch.arange(6.0).view(3, 2), "n": {"b": torch.ones(3, 2)}}, batch_size=[3])


KINDS: dict[str, Callable[[], Any]] = {
    "dense": make_dense_td,
    "lazy": lambda: LazyStackedTensorDict(*make_dense_td().unbind(0)),
    "params": lambda: TensorDictParams(make_dense_td(), no_convert=True),
    "nested lazy": lambda: TensorDict(
        {"l": LazyStackedTensorDict(*make_dense_td().unbind(0))}, batch_size=[3]
    ),
}


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "to": lambda x, dtype: x.to(dtype),
    "to dtype=": lambda x, dtype: x.to(dtype=dtype),
    "to device": lambda x, dtype: x.to("cpu", dtype),
    "to non_blocking": lambda x, dtype: x.to(dtype, True),
    "view": lambda x, dtype: x.double().view(dtype),
    "view dtype=": lambda x, dtype: x.double().view(dtype=dtype),
    "sum": lambda x, dtype: x.sum(dim=0, dtype=dtype),
    "prod": lambda x, dtype: x.prod(dim=0, dtype=dtype),
    "nansum": lambda x, dtype: x.nansum(dim=0, dtype=dtype),
    "mean": lambda x, dtype: x.mean(dim=0, dtype=dtype),
    "softmax": lambda x, dtype: x.softmax(0, dtype=dtype),
    "new_zeros": lambda x, dtype: x.new_zeros(2, dtype=dtype),
    "new_ones": lambda x, dtype: x.new_ones(2, dtype=dtype),
    "new_empty": lambda x, dtype: x.new_empty(2, dtype=dtype),
    "new_full": lambda x, dtype: x.new_full((2,), 1, dtype=dtype),
    "new_tensor": lambda x, dtype: x.new_tensor([1.0], dtype=dtype),
    "zeros_like": lambda x, dtype: torch.zeros_like(x, dtype=dtype),
    "full_like": lambda x, dtype: torch.full_like(x, 1, dtype=dtype),
    "torch.sum": lambda x, dtype: torch.sum(x, dim=0, dtype=dtype),
}


CASES = [(name, kind, number) for name in CALLS for kind in KINDS for number in DTYPE_OF]


def get_dtypes_or_error(call: Callable[[], Any]) -> Any:
    """Return the dtypes of the leaves of a result, or the class of the error."""
    try:
        return [leaf.dtype for leaf in call().values(True, True)]
    except Exception as error:
        return type(error)


@pytest.mark.parametrize(("name", "kind", "number"), CASES)
def test_number_class_as_dtype_equals_its_dtype(name: str, kind: str, number: type) -> None:
    call = CALLS[name]
    wanted = DTYPE_OF[number]
    td = KINDS[kind]()
    found, expected = (
        get_dtypes_or_error(lambda: call(td, number)),
        get_dtypes_or_error(lambda: call(td, wanted)),
    )
    assert found == expected
    leaf = torch.ones(3, 2)
    if isinstance(found, list):
        assert found == [call(leaf, number).dtype] * 2
    elif found is not BatchSizeError:  # raised for a view with more elements
        with pytest.raises(Exception):  # noqa: B017  torch raises several types
            call(leaf, number)


@pytest.mark.parametrize("number", DTYPE_OF)
def test_from_schema_accepts_number_class(number: type) -> None:
    assert TensorDict.from_schema({"a": ((2,), number)})["a"].dtype == DTYPE_OF[number]


@pytest.mark.parametrize("number", DTYPE_OF)
def test_dtype_predicates_accept_number_class(number: type) -> None:
    assert (is_bool(number), is_integer(number), is_floating(number)) == (
        number is bool,
        number is int,
        number is float,
    )


@pytest.mark.parametrize("name", ["to", "to device", "view", "sum", "new_zeros", "zeros_like"])
@pytest.mark.parametrize("number", [int, complex])
def test_compile_number_class_as_dtype_equals_eager(name: str, number: type) -> None:
    call = CALLS[name]
    torch.compiler.reset()
    td = TensorDict({"a": torch.ones(3, 2)}, batch_size=[3])
    compiled = torch.compile(lambda x: call(x, number), backend="eager", fullgraph=True)
    assert get_dtypes_or_error(lambda: compiled(td)) == get_dtypes_or_error(
        lambda: call(td, DTYPE_OF[number])
    )


@pytest.mark.parametrize("name", ["to", "to dtype=", "to device", "sum", "new_zeros", "zeros_like"])
def test_other_class_as_dtype_raises(name: str) -> None:
    with pytest.raises(TypeError, match="str|type"):
        CALLS[name](make_dense_td(), str)


def test_view_dtype_and_size_raises() -> None:
    for call in (
        lambda td: td.view(3, dtype=torch.int32),
        lambda td: td.view(size=[3], dtype=torch.int32),
        lambda td: td.view(3, batch_size=[3]),
    ):
        with pytest.raises(TypeError, match="view"):
            call(make_dense_td())
