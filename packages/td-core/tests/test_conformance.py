"""The public conformance suite, on the kinds of core."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.testing import CollectionTests


def sample() -> TensorDict:
    """Return the same values every time: every kind below holds them."""
    generator = torch.Generator().manual_seed(0)
    return TensorDict(
        {
            "a": torch.rand(3, 2, generator=generator),
            "nested": {"b": torch.rand(3, 2, 4, generator=generator), "deep": {"c": torch.ones(3, 2)}},
        },
        batch_size=[3, 2],
    ).to(os.environ.get("TD_TEST_DEVICE"))


class TestTensorDict(CollectionTests):
    def make(self) -> TensorDict:
        return sample()


class TestLockedCopy(CollectionTests):
    def make(self) -> TensorDict:
        return sample().lock_().clone()


def stacked(dim: int) -> LazyStackedTensorDict:
    """Return the same values as a lazy stack of members of their own."""
    source = sample()
    return LazyStackedTensorDict(
        *(source[(slice(None),) * dim + (at,)].clone() for at in range(source.shape[dim])), stack_dim=dim
    )


class TestLazyStack(CollectionTests):
    keeps_kind = False  # a shape operation across the stack dim has to make it dense

    def make(self) -> LazyStackedTensorDict:
        return stacked(0)


class TestLazyStackAlongTheSecondDim(CollectionTests):
    keeps_kind = False

    def make(self) -> LazyStackedTensorDict:
        return stacked(1)


class TestParams(CollectionTests):
    keeps_kind = False  # what is computed from parameters holds no parameters

    @pytest.fixture(autouse=True)
    def _no_grad(self) -> Iterator[None]:
        """Let the tests write into parameters."""
        with torch.no_grad():
            yield

    def make(self) -> TensorDictParams:
        return TensorDictParams(sample())
