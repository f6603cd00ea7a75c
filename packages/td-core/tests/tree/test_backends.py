"""Storage backends and keepers: a method that is not overridden asks for the general way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, TensorDictParams
from td_core._tree.backends import Keeper, StorageBackend, get_backends


class Recorder(StorageBackend):
    """A backend that records the calls, and leaves all work to the general implementation unless it has an answer."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.calls = answers, list[str]()

    def _answer(self, name: str) -> Any:
        self.calls.append(name)
        return self.answers.get(name)

    def clone(self, node: Any) -> Any:
        return self._answer("clone")

    def write(
        self, node: Any, source: Any, targets: Sequence[Tensor], values: Any, non_blocking: bool
    ) -> Any:
        return self._answer("write")

    def reduce(self, node: Any, protocol: int, encode: Any) -> Any:
        return self._answer("reduce")


def attach(td: TensorDict, backend: object) -> TensorDict:
    td.lock_()
    td._backends = {"td-test": backend}
    return td


def make_td() -> TensorDict:
    return TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}})


def test_get_backends_returns_storage_backends_of_the_state() -> None:
    backend = Recorder()
    td = attach(make_td(), backend)
    assert list(get_backends(td)) == [backend]
    params = TensorDictParams(make_td())
    attach(params._tensordict, backend)
    assert list(get_backends(params)) == [backend]
    assert list(get_backends(attach(make_td(), "another object"))) == list(get_backends(make_td())) == []


def test_unlock_removes_backends() -> None:
    assert list(get_backends(attach(make_td(), Recorder()).unlock_())) == []


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("clone", lambda td: td.clone()),
        ("write", lambda td: td.update_(td.apply(torch.ones_like))),
        ("reduce", lambda td: pickle.loads(pickle.dumps(td))),
    ],
)
def test_backend_without_answer_leaves_the_general_way(name: str, operation: Any) -> None:
    backend = Recorder()
    result, expected = operation(attach(make_td(), backend)), operation(make_td())
    assert backend.calls == [name]
    assert (result == expected).all()


def test_answer_of_backend_is_the_result() -> None:
    answer = make_td()
    assert attach(make_td(), Recorder(clone=answer)).clone() is answer
    td = attach(make_td(), Recorder(write=True))
    td.update_(td.apply(torch.ones_like))
    assert not td["a"].any(), "the backend says that it has written the values"
    assert pickle.loads(pickle.dumps(attach(make_td(), Recorder(reduce=(dict, ((("a", 1),),)))))) == {"a": 1}


@pytest.mark.parametrize(
    "call",
    [
        lambda backend, td: backend.clone(td),
        lambda backend, td: backend.move(td, torch.device("cpu"), None),
        lambda backend, td: backend.pin(td),
        lambda backend, td: backend.write(td, td, [], [], False),
        lambda backend, td: backend.reduce(td, 2, tuple),
        lambda backend, td: backend.get_folder(td),
    ],
)
def test_default_of_each_method_is_none(call: Any) -> None:
    assert call(StorageBackend(), make_td()) is None


def test_default_keeper_stores_nothing() -> None:
    keeper, td = Keeper(), make_td()
    with keeper.lock(td):
        keeper.check(td, ["value"])
        keeper.write(td)
    assert keeper.reload(td, writes=True) is keeper.read_again(td) is None
    assert keeper.of_each() is keeper.of_part() is keeper
    assert type(copy.copy(keeper)) is Keeper
