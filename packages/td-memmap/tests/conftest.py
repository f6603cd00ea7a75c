"""What the tests of this package share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core._buffers import as_bytes
from td_core._collection import Core
from td_core._lazy_stack import LazyStackedTensorDict


def same_leaf(found: Tensor, wanted: Tensor, where: str) -> None:
    assert found.dtype == wanted.dtype, where
    assert found.layout == wanted.layout, where
    if wanted.is_nested:
        found_parts, wanted_parts = found.unbind(), wanted.unbind()
        assert len(found_parts) == len(wanted_parts), where
        for i, (one, other) in enumerate(zip(found_parts, wanted_parts, strict=True)):
            same_leaf(one, other, f"{where}[{i}]")
        return
    assert found.shape == wanted.shape, where
    # Bytes, so that NaN equals NaN and dtypes without arithmetic can be compared.
    assert torch.equal(as_bytes(found), as_bytes(wanted)), where


def assert_same(found: Any, wanted: Any, where: str = "root") -> None:
    """Check that two collections have the same structure, classes, batch sizes, names and bytes."""
    if isinstance(wanted, Tensor):
        return same_leaf(found, wanted, where)
    assert type(found) is type(wanted), where
    assert found.batch_size == wanted.batch_size, where
    assert list(found.names) == list(wanted.names), where
    if isinstance(wanted, LazyStackedTensorDict):
        assert found.stack_dim == wanted.stack_dim, where
        assert len(found.tensordicts) == len(wanted.tensordicts), where
        for i, (one, other) in enumerate(zip(found.tensordicts, wanted.tensordicts, strict=True)):
            assert_same(one, other, f"{where}/{i}")
        return None
    assert list(found._children()) == list(wanted._children()), where
    for key, child in wanted._children().items():
        assert_same(found._children()[key], child, f"{where}/{key!r}")
    return None


@pytest.fixture
def same() -> Any:
    return assert_same


@pytest.fixture
def nest() -> Core:
    """A small collection with something of everything that td-core has."""
    generator = torch.Generator().manual_seed(0)
    return TensorDict(
        {
            "a": torch.randn(3, 2, generator=generator),
            "n": TensorDict(
                {
                    "i": torch.arange(12).view(3, 4),
                    "empty": torch.zeros(3, 0),
                    "deep": {"b": torch.ones(3, dtype=torch.bool)},
                },
                batch_size=[3],
            ),
            "lazy": LazyStackedTensorDict(*(TensorDict({"x": torch.full((i,), i)}) for i in range(3))),
        },
        batch_size=[3],
    )


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "save"
