"""Wrappers of private torch functions: each gives the same result with torch and with its fallback."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core._torch import private as _torch_private


def replace_data(leaf: torch.Tensor) -> None:
    leaf.data = leaf.data.view(torch.int32)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda leaf: leaf.resize_(2, 2),
    "one dim more": lambda leaf: leaf.unsqueeze_(0),
    "strides": lambda leaf: leaf.t_(),
    "dtype": replace_data,
    "requires grad": lambda leaf: leaf.requires_grad_(),
}


@pytest.mark.parametrize("torch_has_it", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_metadata_guard_detects_each_change_of_leaf(
    change: str, torch_has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch_has_it:
        monkeypatch.setattr(_torch_private, "_find_tested", lambda path, call: None)
    leaves = [torch.zeros(3, 3), torch.ones(2)]
    same = _torch_private.guard_forms(leaves)
    leaves[0].add_(1)
    with torch.no_grad():
        assert same(*leaves)
    assert not same(*leaves[::-1])
    assert not same(torch.nn.Parameter(torch.zeros(3, 3), requires_grad=False), leaves[1])
    CHANGES[change](leaves[0])
    assert not same(*leaves)
    with torch.no_grad():
        assert not same(*leaves)


@pytest.mark.parametrize("torch_has_it", [True, False])
def test_metadata_guard_other_tensor_kind_does_not_match(
    torch_has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch_has_it:
        monkeypatch.setattr(_torch_private, "_find_tested", lambda path, call: None)
    leaf = torch.zeros(2)
    same = _torch_private.guard_forms([leaf])
    with torch.inference_mode():
        sealed = torch.zeros(2)
    ragged = torch.nested.nested_tensor([leaf, leaf], layout=torch.jagged)
    negative = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag
    assert negative.is_neg()
    for other in (sealed, leaf.to_sparse(), leaf.to("meta"), negative, ragged):
        assert not same(other)
    assert same(leaf)


def test_count_users_decreases_when_tensor_leaves_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = list(torch.zeros(4).split(2))
    memory = leaves[0].untyped_storage()
    before = _torch_private.count_users(memory)
    leaves[0].data = torch.ones(2)
    after = _torch_private.count_users(memory)
    assert (before is None and after is None) or after == before - 1
    monkeypatch.setattr(_torch_private, "_find_tested", lambda path, call: None)
    assert _torch_private.count_users(memory) is None


def test_map_location_during_torch_load_returns_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    torch.save(torch.ones(2), file := io.BytesIO())

    def look(storage: Any, where: str) -> None:
        places.append(_torch_private.map_location())

    for _ in range(2):
        file.seek(0)
        torch.load(file, map_location=look)
        monkeypatch.setattr(_torch_private, "_LOADING", None)
    assert places == [look, None] and _torch_private.map_location() is None


def test_forbid_data_pointer_makes_access_raise() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))
    _torch_private.forbid_data_pointer(wrapper)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        wrapper.data_ptr()


CHANGED = {
    "_C._dynamo.guards.TensorGuards": lambda: _torch_private.guard_forms([torch.zeros(2)])(torch.ones(2)),
    "_C._dynamo.guards.dict_version": lambda: (
        _torch_private.find_state_reader()({"a": 1}) != _torch_private.find_state_reader()({"b": 1})
    ),
    "_C._dynamo.guards._reinterpret_tensor": lambda: torch.equal(
        _torch_private.find_apart_view()(torch.arange(4)[1:], (2,), (1,), 1), torch.tensor([2, 3])
    ),
    "_C._storage_Use_Count": lambda: _torch_private.count_users(torch.UntypedStorage(1)) is None,
    "_nested_view_from_buffer": lambda: torch.equal(
        _torch_private.make_nested_view(
            torch.arange(2), *torch.tensor([[[1], [1]], [[1], [1]]]), torch.arange(2)
        )[1],
        torch.tensor([1]),
    ),
    "_functorch.pyfunctorch.temporarily_pop_interpreter_stack": lambda: torch.equal(
        torch.vmap(_exit_transforms)(torch.ones(2)), torch.ones(2)
    ),
}


def _exit_transforms(mapped: torch.Tensor) -> torch.Tensor:
    with _torch_private.exit_transforms([torch.zeros(1)]):
        return mapped


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("path", CHANGED)
def test_changed_private_function_warns_and_uses_fallback(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TypeError("another signature")

    find = _torch_private._find
    monkeypatch.setattr(_torch_private, "_find", lambda name: refuse if name == path else find(name))
    _torch_private._find_tested.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=rf"torch\.{path} of torch .* \(another signature\)"):
            assert CHANGED[path]()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            assert CHANGED[path]()
    finally:
        _torch_private._find_tested.cache_clear()


@pytest.mark.parametrize("torch_has_it", [True, False])
def test_increase_versions_raises_that_of_each_tensor(
    torch_has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch_has_it:
        monkeypatch.setattr(_torch_private, "_find_tested", lambda path, call: None)
    tensors = [torch.zeros(1), torch.nn.Parameter(torch.zeros(2))]
    _torch_private.increase_versions(tensors)
    assert [tensor._version for tensor in tensors] == [1, 1]
