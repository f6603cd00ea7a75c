"""Arrays of JAX as entries by DLPack, and leaves as arrays of JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from td_core import BatchSizeError, TensorDict

jax = pytest.importorskip("jax")

DTYPES = (
    "bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "bfloat16", "float32", "complex64",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
#: Ways to make an entry of an array of three rows.
WRITES: dict[str, Any] = {
    "constructor": lambda array: TensorDict({"a": array}, [3]),
    "from_dict": lambda array: TensorDict.from_dict({"a": array}, batch_size=[3]),
    "from_any": lambda array: TensorDict.from_any({"a": array}),
    "set": lambda array: TensorDict({}, [3]).set("a", array),
    "update": lambda array: TensorDict({"a": torch.zeros(3, 2)}, [3]).update({"a": array}),
}


@pytest.mark.parametrize("name", DTYPES)
def test_array_becomes_leaf_of_its_dtype(name: str) -> None:
    array = jax.numpy.arange(6).reshape(3, 2).astype(name)
    leaf = TensorDict({"a": array}, [3])["a"]
    assert type(leaf) is torch.Tensor
    assert leaf.dtype == getattr(torch, name)
    assert torch.equal(leaf, torch.arange(6).view(3, 2).to(leaf.dtype))


@pytest.mark.parametrize("way", WRITES)
def test_write_to_leaf_leaves_array_unchanged(way: str) -> None:
    array = jax.numpy.ones((3, 2))
    td = WRITES[way](array)
    assert torch.equal(td["a"], torch.ones(3, 2))
    td["a"].zero_()
    assert bool((array == 1).all())


@pytest.mark.parametrize("shape", [(), (0, 2), (3, 0)], ids=str)
def test_array_without_elements_or_dims(shape: tuple[int, ...]) -> None:
    assert TensorDict({"a": jax.numpy.zeros(shape)})["a"].shape == shape


def test_transposed_array_has_its_elements() -> None:
    array = jax.numpy.arange(6).reshape(2, 3).T
    assert TensorDict({"a": array}, [3])["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_array_of_other_length_raises() -> None:
    with pytest.raises(BatchSizeError, match=r"^key 'a' has shape \[2\]"):
        TensorDict({"a": jax.numpy.zeros(2)}, [3])


def test_array_that_torch_cannot_read_raises() -> None:
    with pytest.raises(
        TypeError, match=r"^key 'a': torch cannot read a .* by DLPack: .*wrap it in NonTensorData"
    ):
        TensorDict({"a": jax.numpy.zeros(3, "int4")}, [3])


def test_tracer_raises() -> None:
    with pytest.raises(TypeError, match=r"^key 'a': torch cannot read a .*Tracer by DLPack"):
        jax.jit(lambda array: TensorDict({"a": array}, [3])["a"])(jax.numpy.ones(3))


def test_leaf_becomes_array() -> None:
    td = TensorDict({"a": torch.rand(3, 2), "n": {"b": torch.arange(3)}}, [3])
    arrays = jax.tree.map(jax.dlpack.from_dlpack, td.to_dict())
    np.testing.assert_array_equal(arrays["a"], td["a"].numpy())
    assert arrays["n"]["b"].tolist() == [0, 1, 2]
