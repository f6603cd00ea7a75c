"""assert_close of collections: structure, tolerances, and leaves of any two subclasses of Tensor."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    assert_allclose_td,
    assert_close,
    lazy_stack,
)
from td_core.errors import KeyPathError


class First(Tensor):
    """A subclass of Tensor."""


class Second(Tensor):
    """Another subclass of Tensor."""


class Derived(First):
    """A subclass of a subclass."""


def make(convert: Callable[[Tensor], Tensor], start: float = 0.0) -> TensorDict:
    leaves = {"w": torch.arange(start, start + 6).view(3, 2), "n": {"b": torch.ones(3)}}
    return TensorDict(leaves, batch_size=[3]).apply(convert)


def make_kinds(folder: Path, start: float) -> dict[str, Any]:
    """Build collections of equal elements, with leaves of different classes."""
    kinds = {
        "plain": make(torch.clone, start),
        "parameters": TensorDictParams(make(torch.clone, start)),
        "buffers": make(getattr(nn, "Buffer", torch.clone), start),  # torch 2.4 has no Buffer
        "first": make(lambda leaf: leaf.as_subclass(First), start),
        "second": make(lambda leaf: leaf.as_subclass(Second), start),
        "derived": make(lambda leaf: leaf.as_subclass(Derived), start),
    }
    if importlib.util.find_spec("td_store") is not None:
        from td_store import StoredTensor
        from td_store.testing import RawFile

        count = itertools.count()
        kinds["stored"] = make(
            lambda leaf: StoredTensor(RawFile.create(folder / f"{start}-{next(count)}.bin", leaf)), start
        )
    return {**kinds, "lazy": lazy_stack(kinds["second"].unbind(0))}


def test_assert_close_compares_leaves_of_all_pairs_of_classes(tmp_path: Path) -> None:
    same, others = make_kinds(tmp_path, 0.0), make_kinds(tmp_path, 1.0)
    for first, second in itertools.product(same, same):
        assert assert_close(same[first], same[second])
        with pytest.raises(AssertionError, match="key 'w' differs: Tensor-likes are not close"):
            assert_close(same[first], others[second])


def test_assert_close_of_other_classes_compares_dtype_and_shape() -> None:
    first, second = (make(lambda leaf, cls=cls: leaf.as_subclass(cls)) for cls in (First, Second))
    with pytest.raises(
        AssertionError, match=r"key 'w' differs: The values for attribute 'dtype' do not match"
    ):
        assert_close(first, second.double())
    with pytest.raises(
        AssertionError, match=r"key 'w' differs: The values for attribute 'shape' do not match"
    ):
        assert_close(first, second.set("w", second["w"][:, :1]))


TREE = TensorDict({"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3])


class TestAssertClose:
    def test_assert_close_equal_collections_returns_true(self) -> None:
        assert assert_close(TREE, TREE.clone())
        assert assert_allclose_td(TREE, TensorDict(TREE, []))
        assert assert_close(TREE, TREE.exclude("a"), intersection=True)
        assert assert_close(TREE, TREE.apply(lambda x: x + 1e-9 if x.is_floating_point() else x))
        stack = LazyStackedTensorDict(*[TensorDict(a=torch.ones(n)) for n in (1, 2)])
        assert assert_close(stack, stack.clone())

    def test_assert_close_tolerances_and_nan(self) -> None:
        a, b = TensorDict(a=torch.zeros(1)), TensorDict(a=torch.full((1,), 1e-3))
        assert assert_close(a, b, rtol=0, atol=1e-2)
        with pytest.raises(AssertionError, match="key 'a' differs: "):
            assert_close(a, b)
        nan = TensorDict(a=torch.tensor(float("nan")))
        assert assert_close(nan, nan.clone())
        with pytest.raises(AssertionError, match="key 'a' differs"):
            assert_close(nan, nan.clone(), equal_nan=False)

    @pytest.mark.parametrize(
        ("other", "error", "message"),
        [
            (TREE.exclude(("b", "c")), KeyPathError, r"differ at key 'b': missing keys \['c'\]"),
            (TREE.apply(lambda x: x.double()), AssertionError, r"dtype"),
            (
                TensorDict({"a": {}, "b": TREE["b"]}, [3]),
                AssertionError,
                "the structures differ at key 'a'",
            ),
            ({"a": 1}, TypeError, "compares collections; got dict"),
        ],
    )
    def test_assert_close_difference_raises_with_key(self, other: Any, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            assert_close(TREE, other)

    def test_assert_close_msg_and_prefix_start_message(self) -> None:
        with pytest.raises(AssertionError, match=r"^here: key \('p', 'a'\) differs"):
            assert_close(TensorDict(a=1), TensorDict(a=2), msg="here: ", prefix="p")
