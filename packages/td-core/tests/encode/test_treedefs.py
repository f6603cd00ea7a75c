"""Treedefs of checkpoints: what a mapping is taken apart into, and what is refused."""

from __future__ import annotations

import functools
import operator
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from td_core import TensorDict
from td_core._encode.treedefs import LeafName, Selecting, flatten_checkpoint, unflatten_checkpoint
from td_core._encode.value_codec import is_same_value
from td_core.errors import CodecError, FormatError
from td_core.spi import join_value, split_value
from td_core.testing import assert_same  # type: ignore[attr-defined]

Pair = namedtuple("Pair", "a b")

_keys = st.one_of(
    st.text(max_size=3), st.integers(-3, 3), st.none(), st.booleans(), st.tuples(st.integers(0, 2))
)
_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.sets(st.integers(0, 3)),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2]), Path("a"), Counter("aab")]),
    st.builds(torch.full, st.just((2,)), st.integers(-5, 5)),
)
_trees = st.recursive(
    _values,
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(_keys, below, max_size=3),
        st.dictionaries(_keys, below, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(st.dictionaries(_keys, _trees, max_size=4))
def test_flatten_any_tree_comes_back_through_json(tree: dict[Any, Any]) -> None:
    treedef, entries = flatten_checkpoint(tree)
    found = unflatten_checkpoint(join_value(*split_value(treedef)), entries)
    assert is_same_value(found, tree)
    assert repr(found) == repr(tree)  # the same classes of containers and keys, in order


def test_flatten_tied_tensors_have_one_name() -> None:
    weight = torch.arange(6.0)
    tree = {
        "a": weight,
        "b": [weight, weight[:3], weight.view(2, 3)],
        "e": torch.empty(0),
        "f": torch.empty(0),
    }
    _, entries = flatten_checkpoint(tree)
    assert list(entries) == ["a", "b.1", "b.2", "e", "f"]


def test_unflatten_tied_tensors_are_one_object() -> None:
    layer = nn.Linear(2, 2)
    found = unflatten_checkpoint(*flatten_checkpoint({"m": nn.Sequential(layer, layer)}))["m"]
    assert found["0.weight"] is found["1.weight"]


def test_flatten_conjugate_view_is_not_tied() -> None:
    value = torch.tensor([1 + 2j])
    found = unflatten_checkpoint(*flatten_checkpoint({"a": value, "b": value.conj()}))
    assert found["a"].item() == 1 + 2j
    assert found["b"].item() == 1 - 2j


def test_flatten_equal_names_get_a_mark() -> None:
    tree = {"a": {1: torch.zeros(1), "1": torch.ones(1)}, "a.1": torch.ones(2), "": torch.ones(3)}
    treedef, entries = flatten_checkpoint(tree)
    assert list(entries) == ["a.1", "a.1~", "a.1~~", "~"]
    assert is_same_value(unflatten_checkpoint(treedef, entries), tree)


def test_flatten_state_dict_of_module_keeps_versions() -> None:
    module = nn.BatchNorm1d(3)
    found = unflatten_checkpoint(*_store({"m": module}))["m"]
    assert type(found) is OrderedDict
    assert found._metadata == module.state_dict()._metadata
    assert found._metadata[""]["version"] == 2


def _store(tree: dict[Any, Any]) -> tuple[Any, Any]:
    treedef, entries = flatten_checkpoint(tree)
    return join_value(*split_value(treedef)), entries


def test_flatten_leaves_have_no_graph() -> None:
    parameter = nn.Parameter(torch.ones(2))
    _, entries = flatten_checkpoint({"a": parameter, "b": parameter * 2})
    assert [entry.requires_grad for entry in entries.values()] == [False, False]  # type: ignore[union-attr]
    assert entries["a"].data_ptr() == parameter.data_ptr()  # type: ignore[union-attr]


def test_flatten_collection_stays_a_collection() -> None:
    data = TensorDict({"a": torch.ones(3)}, [3])
    treedef, entries = flatten_checkpoint({"x": [data, data]})
    assert treedef == {"x": [LeafName("x.0"), LeafName("x.0")]}
    assert_same(entries["x.0"], data)


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        (
            {"a": {"b": [1, print]}},
            r"\['a'\]\['b'\]\[1\]: only a pickle could hold a builtins.builtin_function_or_method",
        ),
        ({"a": defaultdict(list)}, r"\['a'\]: only a pickle could hold a collections.defaultdict"),
        ({3: (Pair(1, 2),)}, r"\[3\]\[0\]: only a pickle could hold a .*\.Pair"),
        ({"a": functools.partial(max)}, r"\['a'\]: only a pickle could hold a functools.partial"),
        ({"a": {print: 1}}, r"\['a'\]\[<built-in function print>\]: only a pickle"),
        ({"a": {(1, print): 1}}, r"\['a'\]\[\(1, <built-in function print>\)\]: cannot store the value"),
        ({"a": nn.Linear}, r"\['a'\]: cannot store the value .*: only the classes"),
        ({"a": {torch.ones(1)}}, r"\['a'\]: cannot store the value"),
    ],
)
def test_flatten_value_that_needs_a_pickle_raises(tree: Any, place: str) -> None:
    with pytest.raises(CodecError, match="cannot save " + place):
        flatten_checkpoint(tree)


def test_flatten_tree_that_contains_itself_raises() -> None:
    tree: dict[str, Any] = {}
    tree["a"] = tree
    with pytest.raises(
        CodecError, match=r"cannot save \['a'\].*nested deeper than 200 levels, or contains itself"
    ):
        flatten_checkpoint(tree)


def test_unflatten_missing_entry_raises() -> None:
    with pytest.raises(FormatError, match="the checkpoint lacks the tensor 'x'"):
        unflatten_checkpoint({"a": LeafName("x")}, {})


@pytest.mark.parametrize(
    ("plain", "types"),
    [
        (3, "leaf"),
        ([{}, 3], "state_dict"),
        ([1], "state_dict"),
        ("ab", "state_dict"),
        ([[], {}], "state_dict"),
    ],
)
def test_join_damaged_treedef_raises(plain: object, types: str) -> None:
    with pytest.raises(FormatError, match="the value at the top level is no"):
        join_value(plain, types)


def test_flatten_checkpoint_of_schedulers_keeps_counters() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    found = unflatten_checkpoint(*_store({"s": scheduler}))["s"]
    assert found == scheduler.state_dict()
    assert operator.itemgetter("milestones")(found) == Counter({2: 2, 5: 1})


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (deque([1]), r"list\(value\)"),
        (defaultdict(list), r"dict\(value\)"),
        (torch.Generator(), r"value.get_state\(\)"),
        (Random(0), r"value.getstate\(\)"),
        (functools.partial(max), "leave it out"),
    ],
)
def test_flatten_object_with_a_plain_form_names_it(value: object, instead: str) -> None:
    with pytest.raises(CodecError, match=rf"only a pickle could hold a .*; .*{instead}.*, or register"):
        flatten_checkpoint({"a": value})


@pytest.mark.parametrize(
    ("name", "instead"),
    [("default_rng", "value.bit_generator.state"), ("RandomState", r"value.get_state\(\)")],
)
def test_flatten_generator_of_numpy_names_its_state(name: str, instead: str) -> None:
    random = pytest.importorskip("numpy").random
    with pytest.raises(CodecError, match=f"save {instead} in its place"):
        flatten_checkpoint({"a": getattr(random, name)(0)})


@pytest.mark.parametrize(
    ("keys", "selected", "entries"),
    [
        (["m"], {"m": {"a.b": "t"}}, ["m.a.b"]),
        ([("m", "a.b")], {"m": {"a.b": "t"}}, ["m.a.b"]),
        (["m.a"], {"m": {"a.b": "t"}}, ["m.a.b"]),
        (["n", "empty"], {"n": 3, "empty": []}, []),
        ([("l", 1)], {"l": ["t"]}, ["l.1"]),
        ([("l", 0)], {"l": [1]}, []),
        ([("tied",)], {"tied": "t"}, ["m.a.b"]),
    ],
)
def test_selecting_keeps_what_is_at_keys(keys: Any, selected: Any, entries: list[str]) -> None:
    tensor = torch.ones(2)
    tree = {"m": {"a.b": tensor}, "n": 3, "empty": [], "l": [1, torch.zeros(1)], "tied": tensor}
    treedef, _ = flatten_checkpoint(tree)
    walk = Selecting(keys)
    found = walk.select(treedef)
    # A "t" stands for the entry.
    assert repr(found) == repr(selected).replace("'t'", repr(LeafName(entries[0])) if entries else "")
    assert (walk.entries, walk.missing) == ([(name,) for name in entries], set())


def test_selecting_lists_missing_keys_and_paths_below_collections() -> None:
    treedef, _ = flatten_checkpoint({"rows": TensorDict({"a": torch.ones(2)}), "b": 1})
    walk = Selecting([("rows", "a"), "c", "bb"])
    assert walk.select(treedef) == {"rows": LeafName("rows")}
    assert (walk.entries, walk.missing) == ([("rows", "a")], {"c", "bb"})
