"""Tests of the constructor of TensorDict and of access by key."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    from_module,
    unravel_key_list,
)
from td_core.errors import (
    BatchSizeError,
    DimNamesError,
    FormatError,
    KeyPathError,
    KeyTakenError,
    KeyThroughLeafError,
    LockedError,
    StructureError,
)


def test_construct_nested_mapping_inherits_batch_size_and_device():
    td = TensorDict({"a": {"b": {"c": torch.zeros(3)}}, ("d", "e"): torch.ones(3)}, [3], device="cpu")
    assert td["a", "b"].batch_size == torch.Size([3]) and td["d"].device == torch.device("cpu")
    assert list(td.keys(True, True)) == [("a", "b", "c"), ("d", "e")]


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("k", torch.ones(3), lambda td: td["k"].tolist() == [1, 1, 1]),
        ("k", 5, lambda td: td["k"].item() == 5),
        ("k", {"a": 1}, lambda td: td["k", "a"].item() == 1),
        (("n", "k"), torch.ones(2), lambda td: td["n", "k"].tolist() == [1, 1]),
        ("k", nn.Parameter(torch.ones(1)), lambda td: isinstance(td["k"], nn.Parameter)),
    ],
)
def test_construct_with_many_entries_converts_the_last_one(key, value, read):
    source = {f"k{i}": torch.full((2,), i) for i in range(10)}
    td = TensorDict({**source, key: value})
    assert read(td)
    assert list(td.keys())[:10] == list(source)
    td["new"] = 1
    assert "new" not in source
    with pytest.raises(KeyPathError, match="a key is a string"):
        TensorDict({**source, 3: torch.ones(1)})


def test_construct_key_and_nested_key_below_it_raises():
    for source in ({("a", "b"): 1, "a": {"c": 2}}, {"a": {"c": 2}, ("a", "b"): 1}):
        with pytest.raises(KeyError, match="both the key 'a' and the nested key"):
            TensorDict(source)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (({"a": torch.zeros(2)}, [3]), BatchSizeError, r"key 'a' has shape \[2\].*batch size \[3\]"),
        (({"a": 1}, [3]), BatchSizeError, r"torch.full\(\(3,\), 1\) has one number"),
        (({}, [-1]), BatchSizeError, r"no negative dim; got \[-1\]"),
        (({}, [np.int64(2), -1]), BatchSizeError, r"no negative dim; got \[2, -1\]"),
        (({}, "x"), BatchSizeError, "a batch size is an int or a sequence of ints"),
        ((torch.zeros(3),), ValueError, "a mapping or a collection; got Tensor"),
        (({"a": torch.zeros(3)}, [3], None, ["t", "u"]), DimNamesError, "got 2 names"),
        (({"a": torch.zeros(3, 3)}, [3, 3], None, ["t", "t"]), DimNamesError, "must be unique"),
        (({1: torch.zeros(3)},), KeyPathError, "a key is a string"),
        (({(): torch.zeros(3)},), KeyPathError, "a key is a string"),
    ],
)
def test_construct_invalid_arguments_raises(arguments, error, message):
    with pytest.raises(error, match=message):
        TensorDict(*arguments)


def test_construct_from_collection_drops_its_batch_size():
    source = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3], names=["t"])
    td = TensorDict(source)
    assert td.batch_size == torch.Size([]) and td["a"] is source["a"]
    assert TensorDict(source, [3]).names == ["t"]


def test_construct_with_device_moves_every_entry():
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, device="meta")
    td["c"] = torch.zeros(3)
    td["m"] = TensorDict({"d": torch.zeros(1)})
    assert {leaf.device.type for leaf in td.values(True, True)} == {"meta"}
    assert td["m"].device == torch.device("meta")


def test_set_batch_size_shape_mismatch_raises():
    td = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 2)}}, [3])
    td.batch_size = [3, 4]
    assert td["n"].batch_size == torch.Size([3, 4])
    with pytest.raises(BatchSizeError, match=r"key 'a' has shape \[3, 4\]"):
        td.batch_size = [3, 4, 2]
    assert td.batch_size == torch.Size([3, 4])


def make_ragged() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(3)}))


WRONG: dict[str, tuple[Callable[[TensorDict], Any], type[Exception], str]] = {
    "entries twice": (lambda td: TensorDict({"a": 1}, b=2), ValueError, "as a mapping or as keywords, not both"),
    "set: option": (lambda td: td.set("a", 1, foo=2), TypeError, r"set\(\) takes no foo"),
    "set_: missing": (lambda td: td.set_(("n", "q"), 1), KeyPathError, "key 'q' not found in key 'n'"),
    "set_: below a leaf": (lambda td: td.set_(("a", "q"), 1), KeyThroughLeafError, "'a' is a tensor, so it"),
    "set_at_: below a leaf": (lambda td: td.set_at_(("a", "q"), 1, 0), KeyThroughLeafError, "'a' is a tensor, so it"),
    "set_at_: shape": (lambda td: td.set_at_("a", torch.ones(3), 0), StructureError, "cannot write key 'a' at the index 0"),
    "get: defaults": (lambda td: td.get("q", 1, 2), TypeError, "takes a key and one default, got 2 defaults"),
    "del: missing": (lambda td: td.del_(("n", "q")), KeyPathError, "key 'q' not found in key 'n'"),
    "del: below a leaf": (lambda td: td.del_(("a", "q")), KeyThroughLeafError, "'a' is a tensor, so it has"),
    "del: index": (lambda td: operator.delitem(td, 0), KeyPathError, "only keys can be deleted, not the index 0"),
    "del: of one member": (lambda td: make_ragged().del_("q"), KeyPathError, "key 'q' not found in LazyStackedTensorDict"),
    "popitem": (lambda td: TensorDict().popitem(), KeyPathError, "the TensorDict is empty"),
    "replace": (lambda td: td.replace({}, {}), TypeError, "takes one mapping or collection, got 2"),
    "update: locked": (lambda td: td.lock_().update({"z": 1}), LockedError, "cannot update"),
    "separator": (lambda td: td.flatten_keys(3), TypeError, "the separator is a string; got 3"),
    "unflatten": (
        lambda td: TensorDict({"a.b": 1, "a": {"b": 2}}).unflatten_keys(), KeyTakenError, "needs 'b' where there is",
    ),
    "named_apply: option": (lambda td: td.named_apply(lambda key, leaf: leaf, foo=3), TypeError, "takes no foo"),
    "apply: a leaf for a level": (
        lambda td: td.apply(lambda entry: torch.zeros(2), inplace=True, call_on_nested=True), StructureError, "at key 'n'",
    ),
    "+: a level for a leaf": (
        lambda td: td + TensorDict({"a": {"q": torch.ones(2)}, "n": {"b": torch.ones(2)}}, [2]), StructureError, "at key 'a'",
    ),
    "+: a leaf for a level": (
        lambda td: td + TensorDict({"a": torch.ones(2), "n": torch.ones(2)}, [2]), StructureError, "at key 'n'",
    ),
    "+=": (lambda td: operator.iadd(td, "x"), TypeError, "unsupported operand"),
    "roll": (lambda td: td.roll((1, 2)), BatchSizeError, r"without dims there is one shift; got \[1, 2\]"),
    "tensor_split": (lambda td: td.tensor_split([1, 0]), BatchSizeError, "the positions must not decrease"),
    "quantile": (lambda td: td.quantile(0.5, dim="feature", keepdim=True), TypeError, "has no keepdim=True"),
    "masked_fill": (lambda td: td.masked_fill(torch.tensor([True, False]), "x"), TypeError, "masked_fill: key 'a'"),
    "members": (lambda td: LazyStackedTensorDict(torch.ones(2)), TypeError, "of a lazy stack are collections; got Tensor"),
    "stack dim": (lambda td: LazyStackedTensorDict(td, stack_dim=3), IndexError, "stack_dim 3 is out of range"),
    "stack size": (lambda td: LazyStackedTensorDict(td, td, batch_size=[3, 2]), BatchSizeError, r"members make \[2, 2\]"),
    "no such entry": (lambda td: make_ragged().get_nestedtensor("q"), KeyPathError, "key 'q' not found"),
    "padding side": (lambda td: make_ragged().get("a", as_padded_tensor=True, padding_side="up"), ValueError, "'left' or"),
    "other dims": (
        lambda td: TensorDict.lazy_stack([TensorDict(a=[1]), TensorDict(a=[[1]])]).get("a", as_padded_tensor=True),
        StructureError, r"key 'a': cannot pad leaves of \[1, 2\] dims",
    ),
    "other dims of all": (
        lambda td: TensorDict.lazy_stack([TensorDict(a=[1]), TensorDict(a=[[1]])]).to_padded_tensor(),
        StructureError, r"key 'a': cannot pad leaves of \[1, 2\] dims",
    ),
    "nested: other dims": (
        lambda td: TensorDict.lazy_stack([TensorDict(a=[1]), TensorDict(a=[[1]])]).get("a", as_nested_tensor=True),
        StructureError, "key 'a' cannot be one nested tensor",
    ),
    "clamp": (lambda td: td.to(torch.complex64).clamp(0, 1), NotImplementedError, "cannot compute clamp: key 'a'"),
    "where": (lambda td: td.where(torch.tensor([True, False]), torch.ones(3)), RuntimeError, "where: key 'a': The expanded"),
    "view": (lambda td: td.to(torch.int8).view(torch.int32), RuntimeError, "cannot compute view: key 'a': self.size"),
    "itself": (lambda td: TensorDict(LOOP), StructureError, r"\('d', 'd'\) holds a mapping that contains itself"),
    "keys": (lambda td: unravel_key_list("ab"), KeyPathError, "takes a sequence of keys; got the single key 'ab'"),
    "module": (lambda td: from_module(RECURSIVE), StructureError, "the module Module contains itself"),
    "state dict": (lambda td: td.load_state_dict({"a": "x"}), FormatError, "key 'a' of the state dict is a str"),
    "state dict: both": (
        lambda td: td.load_state_dict({"n": td["a"], "n.b": td["a"]}), StructureError, "a leaf and a level at 'n' of 'n.b'",
    ),
    "state dict: dots": (
        lambda td: TensorDict({"a.b": {"c": 1}, "a": {"b": {"d": 2}}}).state_dict(flatten=True), KeyPathError, "two levels",
    ),
}  # fmt: skip
LOOP: dict[str, Any] = {}
LOOP["d"] = LOOP
RECURSIVE = nn.Module()
RECURSIVE.again = RECURSIVE


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_invalid_call_raises_and_changes_nothing(
    call: Callable[[TensorDict], Any], error: type[Exception], message: str
) -> None:
    td = TensorDict({"a": torch.arange(4.0).view(2, 2), "n": {"b": torch.arange(2.0)}}, [2])
    before = td.clone()
    with pytest.raises(error, match=message):
        call(td)
    assert list(td.keys(True)) == list(before.keys(True)) and (td == before).all()
