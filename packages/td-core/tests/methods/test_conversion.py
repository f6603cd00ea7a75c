"""Conversions of collections to Python and numpy; functions that need one tensor or array raise and name the right method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate, default_convert

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams


def make_rows() -> TensorDict:
    return TensorDict({"a": torch.arange(6.0).view(3, 2)}, batch_size=[3])


def make_one() -> TensorDict:
    return TensorDict({"a": torch.ones(2)})


KINDS: dict[str, Callable[[], Any]] = {
    "rows": make_rows,
    "no batch dims": make_one,
    "no entries": TensorDict,
    "no rows": lambda: make_rows()[:0],
    "two batch dims": lambda: TensorDict(batch_size=[3, 0]),
    "lazy": lambda: LazyStackedTensorDict(make_rows(), make_rows()),
    "lazy along 1": lambda: LazyStackedTensorDict(make_rows(), make_rows(), stack_dim=1),
    "lazy of scalars": lambda: LazyStackedTensorDict(*[TensorDict(a=float(i)) for i in range(2)]),
    "params": lambda: TensorDictParams(make_rows()),
    "params without batch dims": lambda: TensorDictParams(make_one()),
}
OF_TORCH: dict[str, Callable[[Any], Any]] = {
    "as_tensor": torch.as_tensor,
    "as_tensor of a dtype": lambda x: torch.as_tensor(x, dtype=torch.float32, device="cpu"),
    "tensor": torch.tensor,
    "asarray": torch.asarray,
    "new_tensor": lambda x: torch.zeros(1).new_tensor(x),
    "nested_tensor": lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
}
OF_NUMPY: dict[str, Callable[[Any], Any]] = {
    "asarray": np.asarray,
    "array": np.array,
    "array of objects": lambda x: np.array(x, dtype=object),
    "ascontiguousarray": np.ascontiguousarray,
    "stack": lambda x: np.stack([x, x]),
    "concatenate": lambda x: np.concatenate([x, x]),
}
LISTS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: [x, x],
    "tuple": lambda x: (x, x),
    "nested list": lambda x: [[x], [x]],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", OF_TORCH)
def test_torch_function_with_collection_raises(function: str, kind: str) -> None:
    td = KINDS[kind]()
    with pytest.raises(TypeError, match=rf"a {type(td).__name__} is not one tensor.*td\[\"key\"\]"):
        OF_TORCH[function](td)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("no rows", "two batch dims")])
@pytest.mark.parametrize("function", OF_TORCH)
@pytest.mark.parametrize("form", LISTS)
def test_torch_function_with_list_of_collections_raises(form: str, function: str, kind: str) -> None:
    value = LISTS[form](KINDS[kind]())
    with pytest.raises(TypeError, match=r"has no length and is not a sequence.*torch\.stack\(\)"):
        OF_TORCH[function](value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", OF_NUMPY)
@pytest.mark.parametrize("form", ["alone", *LISTS])
def test_numpy_with_collections_raises(form: str, function: str, kind: str) -> None:
    td = KINDS[kind]()
    value = td if form == "alone" else LISTS[form](td)
    with pytest.raises(
        TypeError, match=rf"a {type(td).__name__} is not one array: numpy\(\).*to_struct_array"
    ):
        OF_NUMPY[function](value)


@pytest.mark.parametrize("function", [torch.from_dlpack, np.from_dlpack])
def test_dlpack_of_collection_raises(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="is not one tensor"):
        function(make_rows())


def test_index_tensor_with_collection_raises() -> None:
    with pytest.raises(TypeError, match="takes no collections"):
        torch.zeros(3)[make_rows()]


@pytest.mark.parametrize("make", [torch.as_tensor, torch.tensor])
def test_compiled_function_with_collection_raises(make: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="is not one tensor"):
        torch.compile(lambda td: make(td), backend="eager")(make_rows())


@pytest.mark.parametrize("kind", ["no batch dims", "no entries", "params without batch dims"])
def test_len_without_batch_dims_raises(kind: str) -> None:
    td = KINDS[kind]()
    with pytest.raises(TypeError, match=rf"a {type(td).__name__} without batch dims has no length"):
        len(td)
    assert len(td.keys()) == len(list(td.keys()))


@pytest.mark.parametrize("kind", ["rows", "no rows", "two batch dims", "lazy", "lazy along 1", "params"])
def test_iterate_yields_one_item_per_batch_element(kind: str) -> None:
    td = KINDS[kind]()
    assert len(td) == td.batch_size[0] == len(list(td)) == len(list(reversed(td)))


def test_object_array_holds_collections() -> None:
    array = np.empty(2, dtype=object)
    array[0], array[1] = make_one(), make_rows()
    assert isinstance(array[0], TensorDict) and array[1].batch_size == (3,)


@pytest.mark.parametrize("make", [make_one, make_rows])
def test_data_loader_keeps_collections_whole(make: Callable[[], TensorDict]) -> None:
    items = [make(), make()]
    assert default_convert(items[0]) is items[0]
    assert default_collate(items)["a"].shape == (2, *items[0]["a"].shape)
    (batch,) = DataLoader(items, batch_size=2, collate_fn=torch.stack)
    assert batch["a"].shape == (2, *items[0]["a"].shape)
    assert [item["a"].shape for item in DataLoader(items, batch_size=None)] == [items[0]["a"].shape] * 2


CONVERTIBLE: dict[str, Callable[[TensorDict], Any]] = {
    "dense": lambda td: td,
    "lazy": lambda td: LazyStackedTensorDict(*td.unbind(0)),
    "lazy along 1": lambda td: LazyStackedTensorDict(*td.unbind(1), stack_dim=1),
    "params": lambda td: TensorDictParams(td, no_convert=True),
}
ARRAYS: dict[str, Any] = {
    "a": np.arange(6).reshape(2, 3),
    "n": {"b": np.arange(12.0).reshape(2, 3, 2), "e": {}},
}


def make_convertible() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(2, 3), "n": {"b": torch.arange(12.0).view(2, 3, 2).double(), "e": {}}},
        [2, 3],
    )


def to_lists(tree: Any) -> Any:
    return (
        {key: to_lists(value) for key, value in tree.items()}
        if isinstance(tree, dict)
        else np.asarray(tree).tolist()
    )


@pytest.mark.parametrize("kind", CONVERTIBLE)
def test_convert_each_kind_returns_same_values(kind: str) -> None:
    td = CONVERTIBLE[kind](make_convertible())
    assert (
        to_lists(td.to_dict()) == td.to_dict(convert_tensors=True) == to_lists(td.numpy()) == to_lists(ARRAYS)
    )
    rows = td.tolist(convert_tensors=True)
    assert [[cell["a"] for cell in row] for row in rows] == ARRAYS["a"].tolist()
    assert rows[1][2] == {"a": 5, "n": {"b": [10.0, 11.0], "e": {}}}
    named = td.to_namedtuple()
    assert named.a.tolist() == ARRAYS["a"].tolist() and named.n.b.tolist() == ARRAYS["n"]["b"].tolist()


@pytest.mark.parametrize("kind", CONVERTIBLE)
def test_to_struct_array_equals_array_of_each_leaf(kind: str) -> None:
    found = CONVERTIBLE[kind](make_convertible().exclude(("n", "e"))).to_struct_array()
    assert found.shape == (2, 3) and found.dtype.names == ("a", "n")
    assert np.array_equal(found["a"], ARRAYS["a"]) and np.array_equal(found["n"]["b"], ARRAYS["n"]["b"])
    assert TensorDict.from_struct_array(found)["n", "b"].tolist() == ARRAYS["n"]["b"].tolist()


@pytest.mark.parametrize("kind", CONVERTIBLE)
def test_to_tensordict_each_kind_copies_to_plain_levels(kind: str) -> None:
    td = CONVERTIBLE[kind](make_convertible())
    result = td.to_tensordict()
    for node in (result, result["n"], result["n", "e"]):
        assert type(node) is TensorDict and node.batch_size == (2, 3)
    result["a"].zero_()
    assert td["a"].tolist() == ARRAYS["a"].tolist()


def test_to_tensordict_uneven_members_raises() -> None:
    stack = LazyStackedTensorDict(TensorDict(a=1, b=1), TensorDict(a=2))
    with pytest.raises(RuntimeError, match="'b'"):
        stack.to_tensordict()


def test_tolist_as_linked_list_writes_back() -> None:
    td = make_convertible()
    rows = td.tolist(as_linked_list=True)
    rows[0] = {"a": torch.zeros(3, dtype=torch.int64), "n": {"b": torch.zeros(3, 2, dtype=torch.float64)}}
    assert td["a"].tolist() == [[0, 0, 0], [3, 4, 5]] and not td["n", "b"][0].any()


@pytest.mark.parametrize("method", ["from_dict", "from_any", "from_pytree"])
def test_from_dict_methods_equal_leaves(method: str) -> None:
    if method == "from_pytree":
        pytest.importorskip("td_tensorclass")
    source = {"a": torch.arange(3), "n": {"b": torch.ones(3, 2)}}
    result = getattr(TensorDict, method)(source)
    assert result["a"] is source["a"] and result["n", "b"] is source["n"]["b"]


@pytest.mark.parametrize(
    "tree", [{"a": 1, "b": [2, (3, {"c": 4})]}, [1, [2]], {1: 2, "x": {3: [4]}}, ({"a": ()},)], ids=str
)
def test_to_pytree_round_trips_containers(tree: Any) -> None:
    pytest.importorskip("td_tensorclass")
    td = TensorDict.from_pytree(tree_map(torch.tensor, tree))
    assert tree_map(Tensor.item, td.to_pytree()) == tree
    assert tree_map(Tensor.item, (td + 1).to_pytree()) == tree_map(lambda number: number + 1, tree)
