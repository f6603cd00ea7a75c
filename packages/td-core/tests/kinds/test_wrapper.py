"""A collection that holds another: results of operations, of members of a lazy stack too, keep the class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict
from td_core.spi import Wrapper


class Box(Wrapper):
    """A wrapper without members of its own."""

    def __init__(self, td: Any) -> None:
        self._tensordict = td

    @classmethod
    def _wrap(cls, td: Any) -> Any:
        return td if isinstance(td, cls) else cls(td)

    def _set_child(self, key: str, value: Any) -> None:
        self._tensordict._set_child(key, value)

    def _with_children(self, children: Any, **metadata: Any) -> Any:
        return self._wrap(self._tensordict._with_children(children, **metadata))


HELD: dict[str, Callable[[], Any]] = {
    "dense": lambda: TensorDict({"a": torch.arange(6.0).view(2, 3)}, [2]),
    "lazy": lambda: LazyStackedTensorDict(*[TensorDict(a=torch.arange(3.0) + 3 * row) for row in range(2)]),
    "uneven": lambda: LazyStackedTensorDict(*[TensorDict(a=torch.ones(row + 1)) for row in range(2)]),
}


@pytest.mark.parametrize("held", HELD)
def test_results_keep_the_class_and_equal_those_of_the_held_collection(held: str) -> None:
    box, td = Box(HELD[held]()), HELD[held]()
    for change in (
        lambda x: x.apply(torch.neg),
        lambda x: x + 1,
        lambda x: x[1:],
        lambda x: x.unsqueeze(0),
        torch.clone,
    ):
        result, expected = change(box), change(td)
        assert type(result) is Box and type(result._tensordict) is type(expected)
        assert result.batch_size == expected.batch_size
        assert all(map(torch.equal, result._leaves(), expected._leaves()))


@pytest.mark.parametrize("held", HELD)
def test_writes_reach_the_held_collection(held: str) -> None:
    td = HELD[held]()
    box = Box(td)
    box.apply_(torch.neg)
    assert all(map(torch.equal, td._leaves(), HELD[held]().neg()._leaves()))
    box["b"] = torch.ones(2)
    assert td["b"].tolist() == [1, 1]
    del box["b"]
    assert "b" not in td.keys()
    box.lock_()
    with pytest.raises(RuntimeError, match="locked"):
        td["b"] = torch.ones(2)
