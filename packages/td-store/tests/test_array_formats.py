"""Collections as named arrays: names, dtypes, parts of stacks, tied leaves, and the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import CodecError, FormatError, TensorDict, lazy_stack
from td_core.spi import STORABLE, encode, load_table, select_keys
from td_store.arrays import (
    ArrayPlan,
    build_collection,
    compute_check,
    find_stacks,
    get_stored,
    list_names,
    make_array_plan,
    restore,
    view_mapped,
)

NATIVE = {torch.float32, torch.float16, torch.int64, torch.uint8, torch.uint16}


def plan_tree(data: Any, **options: Any) -> ArrayPlan:
    return make_array_plan(data, NATIVE, "/".join, separator="/", **options)


def read_back(plan: ArrayPlan, keys: Any = None) -> Any:
    """Return the collection of a plan, through JSON and the elements of its arrays."""
    stored = {}
    for name, array in plan.arrays.items():
        parts = array.read()
        assert all(part.dtype is array.dtype and part.is_contiguous() for part in parts)
        stored[name] = torch.stack(parts) if array.dim == 0 else parts[0]
        assert tuple(stored[name].shape) == array.shape
        assert stored[name].nbytes == array.nbytes
    table = load_table(json.loads(json.dumps(plan.header)), "data.bin")
    return build_collection(select_keys(table, keys, "data.bin"), "data.bin", stored.__getitem__)


DTYPES = [
    (torch.float32, torch.float32, (3,)),
    (torch.bfloat16, torch.uint16, (3,)),
    (torch.float8_e5m2, torch.uint8, (3,)),
    (torch.complex64, torch.float32, (3, 2)),
]


@pytest.mark.parametrize("dtype", [dtype for dtype in STORABLE.values() if "bits" not in str(dtype)], ids=str)
@pytest.mark.parametrize("native", [(), (torch.float32, torch.float64, torch.complex64, torch.int64)])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_leaf_at_any_byte_of_a_mapped_file_is_aligned(dtype: torch.dtype, native: Any) -> None:
    stored, shape = get_stored(dtype, (3,), native)
    content = torch.arange(256, dtype=torch.uint8) % 2
    storage, size = content.untyped_storage(), 3 * dtype.itemsize
    for offset in range(64):
        place = "a" if dtype == stored else {"tensor": "a", "dtype": str(dtype)}
        leaf = restore(place, lambda _, begin=offset: view_mapped(storage, stored, shape, begin))
        assert (leaf.dtype, leaf.shape) == (dtype, (3,))
        assert leaf.data_ptr() % dtype.itemsize == 0
        found = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())
        assert torch.equal(found[leaf.storage_offset() * dtype.itemsize :][:size], content[offset:][:size])


@pytest.mark.parametrize(("dtype", "stored", "shape"), DTYPES, ids=str)
def test_dtype_that_format_lacks_is_stored_as_another(dtype: Any, stored: Any, shape: Any) -> None:
    leaf = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    plan = plan_tree(TensorDict({"a": leaf}))
    array = plan.arrays["a"]
    assert (array.dtype, array.shape) == (stored, shape)
    assert array.logical is (None if dtype is stored else dtype)
    found = read_back(plan)["a"]
    assert found.dtype is dtype
    assert torch.equal(found.to(torch.complex64), leaf.to(torch.complex64))


def make_stack(dim: int, sizes: tuple[int, int] = (2, 2)) -> Any:
    return lazy_stack(
        [TensorDict({"x": torch.full((2, n), float(n + i))}, [2]) for i, n in enumerate(sizes)], dim
    )


TREES: list[tuple[Any, list[str]]] = [
    ({"a": torch.ones(1), "n": {"b": torch.ones(1), "m": {"c": torch.ones(1)}}}, ["a", "n/b", "n/m/c"]),
    ({"s": make_stack(0)}, ["s/x"]),
    ({"s": make_stack(1)}, ["s/x"]),
    ({"s": make_stack(0, (1, 2))}, ["s/0/x", "s/1/x"]),
    ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, ["a/b", "a/b#1"]),
    ({"a": torch.ones(1), "a/b": torch.ones(1)}, ["a", "a#b"]),
    ({"a/b": torch.ones(1), "a": torch.ones(1)}, ["a/b", "a#1"]),
    ({"a": torch.zeros(1).expand(1000)}, ["a"]),
]


@pytest.mark.parametrize(("entries", "names"), TREES, ids=[str(row[1]) for row in TREES])
def test_names_are_paths_of_keys(entries: Any, names: list[str]) -> None:
    td = TensorDict(entries)
    plan = plan_tree(td)
    assert list(plan.arrays) == names
    assert {name for place in plan.header["leaves"] for name in list_names(place)} == set(names)
    found = read_back(plan)
    assert list(found.keys()) == list(td.keys())
    assert (found == td).all()


def test_tied_leaves_are_one_array_and_one_tensor() -> None:
    leaf = torch.arange(3)
    plan = plan_tree(TensorDict({"a": leaf, "n": {"b": leaf}, "c": leaf[:2]}))
    assert list(plan.arrays) == ["a", "c"]
    found = read_back(plan)
    assert found["a"] is found["n", "b"]


def test_expanded_leaf_is_stored_once() -> None:
    plan = plan_tree(TensorDict({"a": torch.ones(1).expand(1000)}))
    assert plan.arrays["a"].shape == (1,)
    assert read_back(plan)["a"].shape == (1000,)


def test_names_of_batch_dims_are_those_of_the_node() -> None:
    td = TensorDict({"a": torch.ones(2, 3, 4), "s": make_stack(1)}, [2], names=["t"])
    plan = plan_tree(td)
    assert {name: array.batch_names for name, array in plan.arrays.items()} == {
        "a": ["t"],
        "s/x": ["t", None],
    }


def test_blank_plan_has_shapes_alone() -> None:
    td = TensorDict({"a": torch.ones(2, device="meta")})
    assert plan_tree(td, blank=True).arrays["a"].shape == (2,)
    with pytest.raises(CodecError, match="cannot save .*'a'.*no elements to save"):
        plan_tree(td)


def test_reserved_name_is_not_used() -> None:
    assert list(plan_tree(TensorDict({"a": torch.ones(1)}), reserved=["a"]).arrays) == ["a#1"]


def test_selected_keys_alone_are_read() -> None:
    plan = plan_tree(TensorDict({"a": torch.ones(1), "n": {"b": torch.zeros(2)}}))
    del plan.arrays["a"]
    assert read_back(plan, "n")["n", "b"].shape == (2,)


@pytest.mark.parametrize(
    "place",
    [
        ["a", 0, 9],
        {"tensor": "a", "dtype": "torch.int7"},
        {"tensor": "a", "expand": [5]},
        {"jagged": {}},
        {},
        3,
    ],
)
def test_damaged_place_raises(place: Any) -> None:
    def read(name: str) -> Tensor:
        return torch.zeros(3)

    with pytest.raises(FormatError, match="its place in the header is damaged"):
        restore(place, read)


def test_check_depends_on_names_and_shapes() -> None:
    first = compute_check([("a", [2]), ("b", [3])])
    assert first == compute_check([("b", (3,)), ("a", (2,))])
    assert len({first, compute_check([("a", [3]), ("b", [2])]), compute_check([("a", [2])])}) == 3


def stack_leaves(*leaves: dict[str, Any]) -> Any:
    return lazy_stack([TensorDict(each) for each in leaves])


#: Members of a lazy stack, the leaves that its stacks have by key with ``uneven``, and whether they are stacked without it.
STACKS: dict[str, tuple[Any, dict[tuple[str, ...], list[int]] | None, bool]] = {
    "even": (stack_leaves({"a": torch.zeros(2)}, {"a": torch.ones(2)}), {("a",): [0, 1]}, True),
    "uneven": (stack_leaves({"a": torch.zeros(2)}, {"a": torch.ones(3)}), {("a",): [0, 1]}, False),
    "nested": (
        stack_leaves({"n": {"a": torch.zeros(2)}}, {"n": {"a": torch.ones(3)}}),
        {("n", "a"): [0, 1]},
        False,
    ),
    "missing key": (
        stack_leaves({"a": torch.zeros(2)}, {"b": torch.ones(3)}, {"b": torch.ones(2), "a": torch.ones(1)}),
        {("a",): [0, 2], ("b",): [1, 2]},
        False,
    ),
    "order of keys": (
        stack_leaves({"a": torch.zeros(2), "b": torch.zeros(1)}, {"b": torch.ones(1), "a": torch.ones(2)}),
        {("a",): [0, 1], ("b",): [0, 1]},
        False,
    ),
    "uneven batch sizes": (
        lazy_stack([TensorDict({"a": torch.zeros(n)}, [n]) for n in (2, 3)]),
        {("a",): [0, 1]},
        False,
    ),
    "dtypes": (stack_leaves({"a": torch.zeros(2)}, {"a": torch.ones(2).double()}), None, False),
    "numbers of dims": (stack_leaves({"a": torch.zeros(2)}, {"a": torch.ones(2, 2)}), None, False),
    "leaf and level": (stack_leaves({"a": torch.zeros(2)}, {"a": {"b": torch.ones(2)}}), None, False),
    "stack": (lazy_stack([stack_leaves({"a": torch.zeros(2)}, {"a": torch.ones(3)})] * 2), None, False),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_find_stacks_groups_leaves_of_members(name: str) -> None:
    data, expected, is_even = STACKS[name]
    encoded = encode(data)
    free = [True] * len(encoded.leaves)
    stacks, homes = find_stacks(encoded.nodes, encoded.leaves, free, uneven=True)
    paths = encoded.leaf_paths()
    found = {paths[stack.leaves[0]][1:]: stack.members for stack in stacks.values()}
    if name == "stack":  # the members of the outer stack are stacks
        assert 0 not in homes
    else:
        assert found == (expected or {})
        assert homes == ({0} if expected else set())
    for first, stack in stacks.items():
        assert first == stack.leaves[0]
        if name != "stack":
            assert [paths[leaf][0] for leaf in stack.leaves] == [str(member) for member in stack.members]
    assert bool(find_stacks(encoded.nodes, encoded.leaves, free)[1]) == is_even


@pytest.mark.parametrize("uneven", [False, True])
def test_find_stacks_leaf_that_is_stored_alone_is_not_stacked(uneven: bool) -> None:
    encoded = encode(stack_leaves({"a": torch.zeros(2)}, {"a": torch.ones(2)}))
    assert find_stacks(encoded.nodes, encoded.leaves, [True, False], uneven=uneven) == ({}, set())
