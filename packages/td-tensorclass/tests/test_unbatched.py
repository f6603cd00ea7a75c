"""UnbatchedTensor: the same tensor for every element of a batch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, assert_close
from td_core.errors import StructureError
from td_tensorclass import NonTensorData, NonTensorStack, TensorClass, UnbatchedTensor, is_non_tensor

PAYLOAD = torch.tensor([1.0, 2.0, 3.0])


def make() -> TensorDict:
    return TensorDict({"u": UnbatchedTensor(PAYLOAD.clone()), "x": torch.zeros(2, 3)}, batch_size=[2, 3])


SHAPES: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "index": (lambda td: td[0], [3]),
    "mask": (lambda td: td[torch.ones(2, 3, dtype=torch.bool)], [6]),
    "view": (lambda td: td.view(6), [6]),
    "permute": (lambda td: td.permute(1, 0), [3, 2]),
    "expand": (lambda td: td.expand(4, 2, 3), [4, 2, 3]),
    "unsqueeze": (lambda td: td.unsqueeze(0), [1, 2, 3]),
    "unbind": (lambda td: td.unbind(1)[2], [2]),
    "split": (lambda td: td.split(2, 1)[0], [2, 2]),
    "stack": (lambda td: torch.stack([td, td]), [2, 2, 3]),
    "cat": (lambda td: torch.cat([td, td], 1), [2, 6]),
    "lazy stack": (lambda td: LazyStackedTensorDict(td, td), [2, 2, 3]),
    "gather": (lambda td: td.gather(0, torch.zeros(1, 3, dtype=torch.int64)), [1, 3]),
    "repeat": (lambda td: td.repeat(2, 1), [4, 3]),
    "sum": (lambda td: td.sum(0), [3]),
    "clone": (lambda td: td.clone(), [2, 3]),
    "pickle": (lambda td: pickle.loads(pickle.dumps(td)), [2, 3]),
    "deepcopy": (copy.deepcopy, [2, 3]),
    "pytree": (lambda td: torch.utils._pytree.tree_map(torch.neg, td), [2, 3]),
    "vmap": (lambda td: torch.vmap(lambda part: part + 0)(td), [2, 3]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_operation_keeps_unbatched_tensor(name: str) -> None:
    operation, batch_size = SHAPES[name]
    result = operation(make())
    assert result.batch_size == torch.Size(batch_size)
    shown = result["u"]
    assert type(shown) is UnbatchedTensor
    assert shown.as_subclass(Tensor).equal(PAYLOAD)
    assert shown.batch_size == result.batch_size


def test_pointwise_and_cast_apply_to_unbatched_tensor() -> None:
    td = make()
    assert (td + 1)["u"].tolist() == [2, 3, 4]
    assert (td * td)["u"].tolist() == [1, 4, 9]
    assert td.to(torch.float64)["u"].dtype == torch.float64
    assert td.apply(torch.neg)["u"].tolist() == [-1, -2, -3]
    td.zero_()
    assert td["u"].tolist() == [0, 0, 0]
    with pytest.raises(StructureError, match="an UnbatchedTensor is the same for all of them"):
        make() + torch.ones(2, 3)


def test_assert_close_different_unbatched_tensors_raises() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.ones(3))}, [2])
    near, far = (TensorDict({"u": UnbatchedTensor(torch.ones(3) + by)}, [2]) for by in (1e-8, 1e-2))
    assert assert_close(td, near)
    with pytest.raises(AssertionError, match="key 'u'"):
        assert_close(td, far)
    assert assert_close(td, far, rtol=0.1, atol=0.1)
    values = TensorDict({"u": NonTensorStack("a", "b")}, [2])
    for pair in ((td, values), (values, td)):
        with pytest.raises(AssertionError, match="the structures differ at key 'u'"):
            assert_close(*pair)


@pytest.mark.parametrize(
    "value", [NonTensorStack("a", "b"), NonTensorData("a"), UnbatchedTensor(torch.ones(3))], ids=repr
)
@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_stack_non_tensor_and_collection_raises(join: Any, value: Any) -> None:
    pair = [TensorDict({"n": {"v": entry}}, [2]) for entry in (value, TensorDict({}, [2]))]
    for items in (pair, pair[::-1]):
        with pytest.raises(
            StructureError, match=r"the structures differ at key \('n', 'v'\): a \w+ there, a \w+ here"
        ):
            join(items)
        with pytest.raises(
            StructureError, match=r"the structures differ at the root: a \w+ there, a \w+ here"
        ):
            join([item["n"]._children()["v"] for item in items])


@pytest.mark.parametrize(
    "other", [NonTensorStack("a", "b"), TensorDict({}, [2])], ids=lambda node: type(node).__name__
)
def test_operation_with_other_kind_raises_naming_key(other: Any) -> None:
    first, second = (
        TensorDict({"n": {"u": u}, "x": torch.ones(2)}, [2]) for u in (UnbatchedTensor(torch.ones(3)), other)
    )
    found = (
        rf"the structures differ at key \('n', 'u'\): a UnbatchedNode there, a {type(other).__name__} here"
    )
    for operation in (torch.add, torch.eq, partial(torch.lerp, weight=0.5), lambda *pair: torch.stack(pair)):
        with pytest.raises(StructureError, match=found):
            operation(first, second)


def test_eq_of_unbatched_tensors_compares_elements() -> None:
    other = make()
    other["u"][0] = 7
    assert (make() == make()).all()
    assert (make() == other)["u"].tolist() == [False, True, True]
    assert (make() != other)["u"].tolist() == [True, False, False]


READERS: dict[str, Callable[[TensorDict], Any]] = {
    "item": lambda td: td["u"],
    "get": lambda td: td.get("u"),
    "nested get": lambda td: TensorDict({"n": td}, [2, 3]).get(("n", "u")),
    "lazy get": lambda td: LazyStackedTensorDict(td, td).get("u"),
    "items": lambda td: dict(td.items())["u"],
    "values": lambda td: next(iter(td.values())),
    "leaf items": lambda td: dict(td.items(True, True))["u"],
    "leaf values": lambda td: next(iter(td.values(True, True))),
    "setdefault": lambda td: td.setdefault("u", 0),
    "pop": lambda td: td.pop("u"),
    "to_dict": lambda td: td.to_dict()["u"],
    "get_non_tensor": lambda td: td.get_non_tensor("u"),
    "state dict": lambda td: td.state_dict(keep_vars=True)["u"],
}


@pytest.mark.parametrize("name", READERS)
def test_get_returns_unbatched_tensor(name: str) -> None:
    td = make()
    payload = td["u"]
    shown = READERS[name](td)
    assert type(shown) is UnbatchedTensor
    assert shown.data_ptr() == payload.data_ptr()


def test_keys_leaves_only_includes_unbatched_tensor() -> None:
    td = TensorDict({"n": make()}, [2, 3])
    assert list(td.keys(True, True)) == [("n", "u"), ("n", "x")]
    assert list(make().keys(leaves_only=True)) == ["u", "x"]
    assert len(td.keys(True, True)) == 2
    assert make().entry_class("u") is UnbatchedTensor
    assert isinstance(make().numpy()["u"], np.ndarray)
    assert repr(make()) == "TensorDict(batch_size=[2,3], fields={u: f32[3], x: f32[]})"


def test_apply_calls_function_with_unbatched_tensor() -> None:
    named = make().named_apply(lambda key, leaf: leaf + 1 if key == "u" else leaf)
    assert named["u"].tolist() == [2, 3, 4]
    assert make().apply(torch.add, make())["u"].tolist() == [2, 4, 6]
    assert make().apply(lambda leaf: leaf.sum(), batch_size=[])["u"] == 6
    assert "u" not in make().named_apply(lambda key, leaf: None if key == "u" else leaf)
    td = make().lock_()
    td.apply_(lambda leaf, other: leaf + other, make())
    assert td["u"].tolist() == [2, 4, 6]


def test_state_dict_unbatched_tensor_round_trips() -> None:
    state = (make() + 1).state_dict()
    assert list(state) == ["u", "x"]
    td = make()
    payload = td["u"]
    td.load_state_dict(state)
    assert payload.tolist() == td["u"].tolist() == [2, 3, 4]
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    assert make().load_state_dict(torch.load(file, weights_only=True))["u"].tolist() == [2, 3, 4]
    assigned = make().load_state_dict(state, assign=True)
    assert type(assigned["u"]) is UnbatchedTensor
    assert assigned["u"].data_ptr() == state["u"].data_ptr()
    with pytest.raises(StructureError, match=r"missing keys: \['u'\]"):
        make().load_state_dict(make().exclude("u").state_dict())
    with pytest.raises(StructureError, match="shape"):
        make().load_state_dict({**state, "u": torch.zeros(4)})


def test_set_unbatched_tensor_replaces_whole_tensor() -> None:
    td = make()
    assert not is_non_tensor(td.get("u"))
    assert not td.is_non_tensor("u")
    assert "u" in td.filter_non_tensor_data().keys()
    td["u"].add_(1)
    assert td["u"].tolist() == [2, 3, 4]
    td.set_("u", UnbatchedTensor(PAYLOAD))
    assert td["u"].tolist() == [1, 2, 3]
    td["u"] = UnbatchedTensor(torch.zeros(2, 3))
    assert td[0]["u"].shape == (2, 3)
    with pytest.raises(StructureError):
        td[0] = {"u": torch.zeros(3), "x": torch.zeros(3)}
    td[0] = td[1] + 0
    with pytest.raises(StructureError, match="written whole"):
        td[0] = td[1] + 1
    with pytest.raises(StructureError, match="one number for each element"):
        td.masked_fill(torch.ones(2, 3, dtype=torch.bool), 0)
    with pytest.raises(StructureError, match=r"the UnbatchedTensor at key \('u',\) differs"):
        td.where(torch.ones(2, 3, dtype=torch.bool), 7)
    assert td.update({"u": UnbatchedTensor(PAYLOAD)})["u"].tolist() == [1, 2, 3]
    assert td.load_state_dict(make().state_dict())["u"].tolist() == [1, 2, 3]


#: In-place operations on the leaves of a collection, and the expected elements of the tensor.
IN_PLACE: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "to": (lambda td: td.to(torch.float64, inplace=True), ("dtype", torch.float64)),
    "share_memory_": (lambda td: td.share_memory_(), ("is_shared", True)),
    "requires_grad_": (lambda td: td.requires_grad_(), ("requires_grad", True)),
    "detach_": (lambda td: td.requires_grad_().detach_(), ("requires_grad", False)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_inplace_operation_changes_unbatched_tensor(name: str) -> None:
    change, (attribute, wanted) = IN_PLACE[name]
    td = TensorDict({"n": make()}, [2, 3])
    assert change(td) is td
    for key in ("u", "x"):
        found = getattr(td["n", key], attribute)
        assert (found() if callable(found) else found) == wanted


@pytest.mark.skipif(not hasattr(TensorDict, "memmap_"), reason="needs td-memmap")
def test_memmap_maps_unbatched_tensor_in_place(tmp_path: Any) -> None:
    td = TensorDict({"n": make()}, [2, 3]).memmap_(tmp_path)
    td["n", "u"].fill_(7)
    assert TensorDict.load_memmap(tmp_path)["n", "u"].tolist() == [7, 7, 7]


def test_stack_different_unbatched_tensors_raises() -> None:
    other = make()
    other["u"] = UnbatchedTensor(torch.zeros(3))
    with pytest.raises(StructureError, match="differs between items 0 and 1"):
        torch.stack([make(), other])


def test_tensorclass_field_holds_unbatched_tensor() -> None:
    class Model(TensorClass):
        scale: Tensor
        x: Tensor

    model = Model(UnbatchedTensor(PAYLOAD), torch.zeros(4), batch_size=[4])
    assert model[0].scale.tolist() == [1, 2, 3]
    assert type(model[0].scale) is UnbatchedTensor


def test_unbatched_tensor_operations_return_same_class() -> None:
    tensor = UnbatchedTensor([1, 2])
    tensor.batch_size = [7]
    assert isinstance(tensor, Tensor)
    assert (tensor.batch_size, tensor.shape) == ((7,), (2,))
    assert type(tensor + 1) is UnbatchedTensor
    assert tensor[0] == 1


def test_view_dtype_of_unbatched_tensor_equals_torch() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.ones(3)), "x": torch.zeros(2)}, [2])
    assert torch.equal(td.view(torch.int32)["u"], torch.ones(3).view(torch.int32))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("flatten", [False, True])
def test_load_state_dict_into_empty_adds_unbatched_tensor(flatten: bool, assign: bool) -> None:
    td = TensorDict({"u": UnbatchedTensor(PAYLOAD), "n": {"u": UnbatchedTensor(PAYLOAD)}}, [4])
    for empty in (TensorDict(), TensorDict(batch_size=[4])):
        found = empty.load_state_dict(td.state_dict(flatten=flatten), strict=False, assign=assign)
        for key in ("u", ("n", "u")):
            assert found[key].tolist() == [1, 2, 3] and found[0][key].tolist() == [1, 2, 3]
            assert found[key].batch_size == (4,)


@pytest.mark.parametrize(
    "operation", [TensorDict.floor, TensorDict.floor_, TensorDict.qint8, partial(torch.randint_like, high=5)]
)
def test_error_on_unbatched_tensor_names_key(operation: Callable[..., Any]) -> None:
    td = TensorDict({"n": {"u": UnbatchedTensor(torch.ones(5) + 0j)}}, [3])
    with pytest.raises(RuntimeError, match=r"key \('n', 'u'\)"):
        operation(td)


def test_setitem_other_unbatched_tensor_changes_nothing() -> None:
    td = TensorDict({"a": torch.zeros(3), "u": UnbatchedTensor(torch.zeros(2))}, [3])
    with pytest.raises(StructureError, match="is the same for the whole batch"):
        td[0] = TensorDict({"a": torch.ones(()), "u": UnbatchedTensor(torch.ones(2))})
    assert td["a"].tolist() == [0, 0, 0]


def test_lazy_stack_setitem_error_in_one_member_changes_none() -> None:
    members = [
        TensorDict(
            {"k": NonTensorStack("a", "b"), "a": torch.zeros(2), "u": UnbatchedTensor(torch.tensor(u))}, [2]
        )
        for u in (1, 0)
    ]
    lazy = LazyStackedTensorDict(*members, stack_dim=1)
    with pytest.raises(StructureError, match="is the same for the whole batch"):
        lazy[0] = TensorDict({"k": "z", "a": torch.ones(2), "u": UnbatchedTensor(torch.tensor(1))}, [2])
    assert [member["a"].tolist() for member in members] == [[0, 0], [0, 0]]
    assert [member["k"] for member in members] == [["a", "b"], ["a", "b"]]


def test_deepcopy_unbatched_tensor_copies_it() -> None:
    td = TensorDict({"u": UnbatchedTensor(torch.ones(2))}, [3])
    shown = td["u"]
    for holder in (shown, td.state_dict()["u"], dict(td.items())["u"]):
        copied = copy.deepcopy(holder)
        assert type(copied) is UnbatchedTensor and copied.batch_size == holder.batch_size
        assert copied.tolist() == [1, 1] and copied.data_ptr() != shown.data_ptr()
    both = copy.deepcopy([shown, shown, td])
    assert both[0] is both[1] and both[0].data_ptr() == both[2]["u"].data_ptr()
    leaf = UnbatchedTensor(torch.ones(2)).requires_grad_()
    (leaf * 2).sum().backward()
    copied = copy.deepcopy(leaf)
    assert copied.requires_grad and copied.is_leaf and copied.grad.tolist() == [2, 2]
    assert copied.grad is not leaf.grad
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(UnbatchedTensor(leaf * 2))


def test_compare_unbatched_tensor_with_plain_tensor_reads_elements() -> None:
    plain = TensorDict({"u": torch.arange(3.0)}, batch_size=[3])
    shared = TensorDict({"u": UnbatchedTensor(torch.arange(3.0))}, batch_size=[3])
    for first, second in ((plain, shared), (shared, plain)):
        assert assert_close(first, second)
        assert (first == second).all() and not (first != second).any()
        with pytest.raises(AssertionError, match="key 'u' differs"):
            assert_close(first + 1, second)
        assert not (first + 1 == second).any()
