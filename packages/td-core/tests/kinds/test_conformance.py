"""The public conformance suite, applied to the kinds of core."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.testing import CollectionTests


def make_sample() -> TensorDict:
    """Build a TensorDict with the same values at every call; every kind below holds these values."""
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
        return make_sample()


class TestLockedCopy(CollectionTests):
    def make(self) -> TensorDict:
        return make_sample().lock_().clone()


def make_stack(dim: int) -> LazyStackedTensorDict:
    """Build a lazy stack with the values of ``sample``, whose members share no memory."""
    source = make_sample()
    return LazyStackedTensorDict(
        *(source[(slice(None),) * dim + (at,)].clone() for at in range(source.shape[dim])), stack_dim=dim
    )


class TestLazyStack(CollectionTests):
    keeps_kind = False  # shape operations across the stack dim return a dense collection

    def make(self) -> LazyStackedTensorDict:
        return make_stack(0)


class TestLazyStackAlongTheSecondDim(CollectionTests):
    keeps_kind = False

    def make(self) -> LazyStackedTensorDict:
        return make_stack(1)


class TestParams(CollectionTests):
    keeps_kind = False  # results of operations on parameters are plain tensors

    @pytest.fixture(autouse=True)
    def _no_grad(self) -> Iterator[None]:
        """Disable grad mode, so that tests can write into parameters in place."""
        with torch.no_grad():
            yield

    def make(self) -> TensorDictParams:
        return TensorDictParams(make_sample())
