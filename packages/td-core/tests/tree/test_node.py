"""The base class of nodes: defaults that need only the members of a kind, checks of keys, and conversion of levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import KeyMismatchError, LazyStackedTensorDict, StructureError, TensorDict, lazy_stack
from td_core._tree.node import (
    Core,
    EntrySchema,
    check_no_hidden_keys,
    convert_level,
    copy_leaf,
    get_all_entries,
    make_dense,
    replace_leaves,
)


class Own(TensorDict):
    pass


def make_td() -> TensorDict:
    return TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(2)}}, [2], names=["row"])


def test_default_schema_accepts_every_key_and_value() -> None:
    schema, td = EntrySchema(), make_td()
    schema.check_keys({"anything": 1})
    assert schema.find_class("a") is None
    assert schema.convert("a", td) is schema.convert_plain("a", td) is schema.adopt("a", td) is td
    assert schema.add_defaults(td) is td
    assert list(schema.list_entries(td)) == ["a", "n"]


def test_add_child_keeps_an_entry_that_is_there() -> None:
    td, new = make_td(), TensorDict(batch_size=[2])
    held = td._children()["n"]
    assert Core._add_child(td, "n", new) is held is td["n"]
    assert Core._add_child(td, "m", new) is new is td["m"]


@pytest.mark.parametrize(("size", "same"), [([2], True), ([], True), ([2, 3], False)])
def test_with_batch_size_copies_only_to_a_longer_one(size: list[int], same: bool) -> None:
    td = TensorDict({"a": torch.zeros(2, 3)}, [2])
    fitted = td._with_batch_size(torch.Size(size))
    assert (fitted is td) is same
    assert fitted.batch_size == torch.Size(size if not same else [2])
    assert fitted["a"] is td["a"] and td.batch_size == (2,)


def test_nodes_of_one_kind_have_one_member_and_split_nothing() -> None:
    td = make_td()
    assert td._members_and_dim() is None and td._split_write(1) == () == td._split_write(1, 0)
    assert td._zip_members(1, 2) == [(td, 1, 2)]
    assert td._map_members(lambda node, other: (node, other), 3) == (td, 3)
    assert td._unwrap() is td._inner() is td._as_value(td) and td._as_value(3) == 3


def test_get_all_entries_refuses_keys_of_some_members() -> None:
    stack = lazy_stack([TensorDict({"a": 1, "b": 1}), TensorDict({"a": 1})])
    with pytest.raises(
        KeyMismatchError, match=r"different keys, and \['b'\], which some lack, would be lost"
    ):
        get_all_entries(stack)
    assert list(get_all_entries(make_td())) == ["a", "n"]


@pytest.mark.parametrize(("keys", "hidden"), [([], []), (["ab", "ba"], []), (["ab", "bc", "b"], ["a", "c"])])
def test_check_no_hidden_keys_names_them_in_order(keys: list[str], hidden: list[str]) -> None:
    if not hidden:
        check_no_hidden_keys(keys)
        return
    with pytest.raises(KeyMismatchError) as caught:
        check_no_hidden_keys(keys)
    assert f"{hidden}, which some lack" in str(caught.value)


def test_convert_level_keeps_entries_and_metadata() -> None:
    td = make_td()
    converted = convert_level(Own(), td)
    assert (type(converted), converted.batch_size, converted.names) == (Own, (2,), ["row"])
    assert converted["a"] is td["a"] and converted["n"] is td["n"]


@pytest.mark.parametrize("make", [make_td, lambda: LazyStackedTensorDict(make_td(), make_td())])
def test_replace_leaves_follows_the_order_of_flatten(make: Callable[[], Any]) -> None:
    td = make()
    new = [leaf + 5 for leaf in td._leaves()]
    result = replace_leaves(td, iter(new))
    assert type(result) is type(td)
    assert all(found is leaf for found, leaf in zip(result._leaves(), new, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_unflatten_other_number_of_leaves_raises(count: int) -> None:
    with pytest.raises(
        StructureError, match="the TensorDict was changed by another thread while it was read"
    ):
        Core._unflatten(make_td(), [torch.zeros(2)] * count)


def test_make_dense_holds_the_given_dict() -> None:
    children: dict[str, Any] = {"a": torch.zeros(2)}
    td, own = (
        make_dense(children, torch.Size([2])),
        make_dense(children, torch.Size([2]), None, ("row",), Own),
    )
    assert td._children() is own._children() is children
    assert (type(td), type(own), own._names) == (TensorDict, Own, ("row",))


def test_copy_leaf_calls_clone_of_the_subclass() -> None:
    class Marked(torch.Tensor):
        def clone(self, **kwargs: Any) -> Any:
            return "own clone"

    assert copy_leaf(torch.zeros(2).as_subclass(Marked)) == "own clone"
    leaf = torch.zeros(2)
    copied = copy_leaf(leaf)
    assert torch.equal(copied, leaf) and copied.data_ptr() != leaf.data_ptr()
