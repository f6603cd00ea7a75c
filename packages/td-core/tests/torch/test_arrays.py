"""NumPy arrays with any strides, byte order and flags: stored or written by every method, they keep their elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, from_any
from td_core.errors import StructureError

BASE = np.arange(12, dtype=np.float32).reshape(3, 4)


def make_read_only() -> Any:
    array = BASE.copy()
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Any] = {
    "contiguous": BASE.copy(),
    "reversed": BASE[::-1],
    "reversed columns": BASE[:, ::-1],
    "every other, reversed": np.arange(24)[::-2].reshape(3, 4)[::-1],
    "other byte order": BASE.astype(">f4"),
    "other byte order, reversed": BASE.astype(">f8")[::-1, ::-1],
    "other byte order, integers": BASE.astype(">i8"),
    "other byte order, unsigned": BASE.astype(">u2"),
    "other byte order, half": BASE.astype(">f2"),
    "one row for all": np.broadcast_to(BASE[1], (3, 4)),
    "read only": make_read_only(),
    "other order of dims": np.asfortranarray(BASE),
    "not aligned": np.frombuffer(bytearray(b"x" + BASE.tobytes()), np.float32, offset=1).reshape(3, 4),
    "bools": (BASE > 5)[::-1],
    "of records": np.array([[(i, j) for j in range(4)] for i in range(3)], [("x", "u1"), ("y", "f4")])["y"],
    "of records, reversed": np.array([(0, i) for i in range(12)], "u1,>f4")["f1"].reshape(3, 4)[::-1],
}


def to_tensor(array: Any) -> Tensor:
    return torch.tensor(
        array.tolist(), dtype=torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype
    )


def make_zeros() -> TensorDict:
    return TensorDict({"a": torch.zeros(3, 4)}, [3])


def make_stack() -> Any:
    return LazyStackedTensorDict(*make_zeros().unbind(0))


def set_item(td: Any, index: Any, value: Any) -> Any:
    td[index] = value
    return td


NEW: dict[str, Callable[[Any], Any]] = {
    "constructor": lambda x: TensorDict({"a": x}),
    "constructor with a batch size": lambda x: TensorDict({"a": x}, [3]),
    "keyword": lambda x: TensorDict(a=x),
    "set": lambda x: TensorDict().set("a", x),
    "setitem": lambda x: set_item(TensorDict(), "a", x),
    "setdefault": lambda x: (td := TensorDict(), td.setdefault("a", x))[0],
    "update": lambda x: TensorDict().update({"a": x}),
    "update with a device": lambda x: TensorDict(device="cpu").update({"a": x}),
    "replace": lambda x: TensorDict({"b": 1}).replace(a=x),
    "from_dict": lambda x: TensorDict.from_dict({"a": x}),
    "from_dict_instance": lambda x: make_zeros().from_dict_instance({"a": x}),
    "from_any": lambda x: from_any({"a": x}),
    "from_struct_array": lambda x: TensorDict.from_struct_array(
        np.array([(x,)], [("a", x.dtype, x.shape)])[::-1]
    )[0],
    "index, a new key": lambda x: set_item(TensorDict(batch_size=[3]), slice(None), {"a": x}),
    "index of a stack, a new key": lambda x: set_item(
        LazyStackedTensorDict(*[TensorDict() for _ in range(3)]), slice(None), {"a": x}
    ),
    "set of a stack": lambda x: LazyStackedTensorDict(*[TensorDict() for _ in range(3)]).set("a", x),
    "list of rows": lambda x: TensorDict({"a": list(x)}),
    "list of lists of rows": lambda x: TensorDict({"a": [list(x)]}, [1])[0],
    "list beside a tensor": lambda x: TensorDict(
        {"a": [x, torch.zeros(3, 4, dtype=to_tensor(x).dtype)]}, [2]
    )[0],
    "apply": lambda x: make_zeros().apply(lambda leaf: x),
}

WRITTEN: dict[str, Callable[[Any], Any]] = {
    "set_": lambda x: make_zeros().set_("a", x),
    "set in place": lambda x: make_zeros().set("a", x, inplace=True),
    "set_ of a stack": lambda x: make_stack().set_("a", x),
    "set_at_": lambda x: make_zeros().set_at_("a", x, slice(None)),
    "set_at_ rows": lambda x: [td := make_zeros(), *[td.set_at_("a", x[i], i) for i in range(3)]][0],
    "set_at_ nested": lambda x: TensorDict({"n": make_zeros()}, [3]).set_at_(("n", "a"), x, slice(None))["n"],
    "set_at_ of a stack": lambda x: make_stack().set_at_("a", x, slice(None)),
    "set_at_ list": lambda x: make_zeros().set_at_("a", x.tolist(), slice(None)),
    "set_at_ list of rows": lambda x: make_zeros().set_at_("a", list(x), slice(None)),
    "set_at_ tuple": lambda x: make_zeros().set_at_("a", tuple(map(tuple, x.tolist())), slice(None)),
    "set_at_ numbers": lambda x: [
        td := make_zeros(), *[td.set_at_("a", x[i, j], (i, j)) for i in range(3) for j in range(4)]
    ][0],
    "set_at_ reversed": lambda x: make_zeros().set_at_("a", x[::-1], np.arange(3)[::-1]),
    "update_": lambda x: make_zeros().update_({"a": x}),
    "update_ list": lambda x: make_zeros().update_({"a": x.tolist()}),
    "update in place": lambda x: make_zeros().update({"a": x}, inplace=True),
    "update_at_": lambda x: make_zeros().update_at_({"a": x}, slice(None)),
    "update_at_ tuple": lambda x: make_zeros().update_at_({"a": tuple(map(tuple, x.tolist()))}, slice(None)),
    "index": lambda x: set_item(make_zeros(), slice(None), {"a": x}),
    "index list": lambda x: set_item(make_zeros(), [0, 1, 2], {"a": x.tolist()}),
    "index mask": lambda x: set_item(make_zeros(), np.ones(3, bool)[::-1], {"a": x}),
    "index reversed": lambda x: set_item(make_zeros(), np.arange(3)[::-1], {"a": x[::-1]}),
    "index of a stack": lambda x: set_item(make_stack(), slice(None), {"a": x}),
    "apply_": lambda x: make_zeros().apply_(lambda leaf: x),
}  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("method", NEW)
def test_set_array_layout_equals_its_elements(method: str, array: str) -> None:
    expected, got = to_tensor(ARRAYS[array]), NEW[method](ARRAYS[array])["a"]
    assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("method", WRITTEN)
def test_write_array_layout_equals_its_elements(method: str, array: str) -> None:
    assert torch.equal(WRITTEN[method](ARRAYS[array])["a"], to_tensor(ARRAYS[array]).float())


def test_set_contiguous_array_shares_memory() -> None:
    array = BASE.copy()
    TensorDict({"a": array})["a"].zero_()
    assert (array == 0).all()


@pytest.mark.parametrize("array", ["read only", "one row for all", "reversed", "other byte order"])
def test_set_array_with_copy_keeps_source(array: str) -> None:
    before = ARRAYS[array].copy()
    TensorDict({"a": ARRAYS[array]})["a"].zero_()
    assert (ARRAYS[array] == before).all()


@pytest.mark.parametrize(
    "operate",
    [
        lambda td, x: td + x,
        lambda td, x: td.mul_(x),
        lambda td, x: td == x,
        lambda td, x: td.clamp(x, None),
        lambda td, x: td.masked_fill(x > 1, 3.0),
        lambda td, x: td.where(x > 1, 0.0),
        lambda td, x: td[x.astype(int)[::-1]],
        lambda td, x: td[(x > 1)[::-1]],
        lambda td, x: td.new_tensor(x),
    ],
)
@pytest.mark.parametrize(
    "array", [np.arange(3.0)[::-1], np.arange(3.0).astype(">f8"), np.broadcast_to(1.0, (3,))]
)
def test_operate_with_array_equals_its_elements(operate: Any, array: Any) -> None:
    td = TensorDict({"a": torch.rand(3, 4)}, [3])
    expected = operate(td.clone(), np.array(array.tolist()))["a"]
    assert torch.equal(operate(td.clone(), array)["a"], expected)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (
            lambda x: TensorDict({"n": {"a": x}}),
            r"key \('n', 'a'\): can't convert np.ndarray of type numpy.longdouble",
        ),
        (lambda x: make_zeros().set_("a", x), "key 'a': can't convert"),
        (lambda x: make_zeros().set_at_("a", x, 0), "key 'a': can't convert"),
        (lambda x: set_item(make_zeros(), 0, {"a": x}), "key 'a': can't convert"),
        (lambda x: make_zeros().update_({"a": x}), "key 'a': can't convert"),
    ],
)
def test_set_unsupported_array_dtype_raises_with_key(store: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        store(np.zeros(4, np.longdouble))


@pytest.mark.parametrize("value", [np.ones((2, 5)), [1, 2], (1, 2), np.ones(4)[:, None]])
def test_set_at_wrong_shape_raises_with_key(value: Any) -> None:
    td = TensorDict({"n": make_zeros()}, [3])
    with pytest.raises(StructureError, match=r"cannot write key \('n', 'a'\) at the index 0"):
        td.set_at_(("n", "a"), value, 0)
    assert (td == 0).all()
