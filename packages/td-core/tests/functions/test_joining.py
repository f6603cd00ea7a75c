"""stack and cat of collections equal torch on each leaf; errors name the key path and both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    merge_tensordicts,
)
from td_core._functions.joining import cat, dense_stack_tds, lazy_stack, maybe_dense_stack, stack
from td_core.errors import (
    BatchSizeError,
    DimError,
    KeyMismatchError,
    KeyPathError,
    KeyThroughLeafError,
    LockedError,
    StructureError,
)


def make_td(start: float, batch: tuple[int, ...] = (2, 3), **more: Any) -> TensorDict:
    x = torch.arange(torch.Size(batch).numel() * 4.0).view(*batch, 4) + start
    inner = TensorDict({"y": x[..., 0].clone(), "m": {}}, batch)
    return TensorDict({"x": x, "n": inner, **more}, batch)


def make_dense_td(start: float) -> TensorDict:
    return make_td(start)


def make_lazy_factory(dim: int) -> Callable[[float], Any]:
    return lambda start: LazyStackedTensorDict(*make_td(start).unbind(dim), stack_dim=dim)


KINDS = {"dense": make_dense_td, "lazy0": make_lazy_factory(0), "lazy1": make_lazy_factory(1)}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_stack_equals_torch(first: str, second: str, dim: int) -> None:
    result = stack([KINDS[first](0.0), KINDS[second](100.0)], dim)
    batch = torch.stack([torch.zeros(2, 3)] * 2, dim).shape
    at = dim if dim >= 0 else dim + 3
    assert result.batch_size == result["n"].batch_size == result["n", "m"].batch_size == batch
    assert torch.equal(result["x"], torch.stack([make_td(0.0)["x"], make_td(100.0)["x"]], at))
    assert torch.equal(result["n", "y"], torch.stack([make_td(0.0)["n", "y"], make_td(100.0)["n", "y"]], at))


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_cat_equals_torch(first: str, second: str, dim: int) -> None:
    result = cat([KINDS[first](0.0), KINDS[second](100.0)], dim)
    at = dim % 2
    assert result.batch_size == result["n"].batch_size == torch.cat([torch.zeros(2, 3)] * 2, dim).shape
    assert torch.equal(result["x"], torch.cat([make_td(0.0)["x"], make_td(100.0)["x"]], at))
    assert torch.equal(result["n", "y"], torch.cat([make_td(0.0)["n", "y"], make_td(100.0)["n", "y"]], at))


def test_cat_different_sizes_along_dim_equals_torch() -> None:
    parts = [make_td(float(i), (i, 3)) for i in (0, 2, 1)]
    result = cat(parts)
    assert result.batch_size == (3, 3)
    assert torch.equal(result["x"], torch.cat([part["x"] for part in parts]))


def test_stack_different_key_order_matches_by_key() -> None:
    a, b = TensorDict({"a": 0, "b": 1}), TensorDict({"b": 2, "a": 3})
    assert stack([a, b])["a"].tolist() == [0, 3]
    assert list(stack([a, b]).keys()) == ["a", "b"]


def test_stack_and_cat_accept_iterables_and_tensors() -> None:
    a, b = make_td(0.0), make_td(1.0)
    assert stack(iter((a, b))).batch_size == stack((a, b)).batch_size == (2, 2, 3)
    assert stack([a]).batch_size == (1, 2, 3)
    assert torch.equal(stack(make_td(0.0))["x"], a["x"])
    assert torch.equal(
        stack([torch.zeros(2), torch.ones(2)], 1), torch.stack([torch.zeros(2), torch.ones(2)], 1)
    )
    assert torch.equal(cat([torch.zeros(2), torch.ones(2)]), torch.tensor([0.0, 0, 1, 1]))
    assert TensorDict.stack([a, b]).batch_size == (2, 2, 3)
    assert TensorDict.cat([a, b]).batch_size == (4, 3)


def test_stack_locked_items_returns_unlocked_copy() -> None:
    a, b = make_td(0.0).lock_(), make_td(1.0).lock_()
    result = stack([a, b])
    assert not result.is_locked
    result["x"].zero_()
    assert a["x"].any()


def test_stack_and_cat_keep_equal_names_and_device() -> None:
    def named(*names: str) -> TensorDict:
        return TensorDict({}, [2, 3], names=names, device="cpu")

    assert stack([named("a", "b"), named("a", "b")], 1).names == ["a", None, "b"]
    assert cat([named("a", "b"), named("a", "b")], 1).names == ["a", "b"]
    assert stack([named("a", "b"), named("a", "c")]).names == [None, None, None]
    assert stack([named("a", "b"), named("a", "b")]).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("join", "batch"),
    [(stack, (2, 2, 3)), (cat, (4, 3)), (lazy_stack, (2, 2, 3)), (maybe_dense_stack, (2, 2, 3))],
)
def test_join_out_is_written_inplace(join: Callable[..., Any], batch: tuple[int, ...]) -> None:
    items = [make_td(0.0), make_td(100.0)]
    expected = cat(items) if join is cat else stack(items)
    out = make_td(-1.0, batch).lock_()
    leaf = out["x"]
    assert join(items, out=out) is out
    assert out["x"] is leaf
    assert torch.equal(leaf, expected["x"])
    assert torch.equal(out["n", "y"], expected["n", "y"])
    empty = TensorDict(batch_size=batch)
    assert torch.equal(join(items, out=empty)["n", "y"], expected["n", "y"])
    with pytest.raises(BatchSizeError, match=r"out= has batch size \[7\], the result has \[" + str(batch[0])):
        join(items, out=TensorDict(batch_size=[7]))


def test_stack_out_lazy_stack_writes_members() -> None:
    members = [make_td(-1.0), make_td(-1.0)]
    stack([make_td(0.0), make_td(100.0)], out=LazyStackedTensorDict(*members))
    assert torch.equal(members[1]["x"], make_td(100.0)["x"])


def test_lazy_stack_keeps_members() -> None:
    a, b = make_td(0.0), make_td(1.0, extra=torch.zeros(2, 3))
    result = lazy_stack([a, b], -1)
    assert isinstance(result, LazyStackedTensorDict)
    assert (result.stack_dim, result.batch_size) == (2, (2, 3, 2))
    assert result.tensordicts[1] is b
    assert "extra" not in result
    assert isinstance(TensorDict.lazy_stack([a, b]), LazyStackedTensorDict)
    assert lazy_stack([a, b], 1, stack_dim_name="time").names == [None, "time", None]


def test_maybe_dense_stack_uneven_returns_lazy_stack() -> None:
    a = make_td(0.0)
    assert type(maybe_dense_stack([a, make_td(1.0)])) is TensorDict
    for other in (
        make_td(1.0, extra=torch.zeros(2, 3)),
        TensorDict({"x": torch.zeros(2, 3, 5), "n": {"y": torch.zeros(2, 3), "m": {}}}, [2, 3]),
        TensorDict({"x": torch.zeros(2, 3, 4), "n": torch.zeros(2, 3)}, [2, 3]),
        make_td(0.0, (2, 4)),
    ):
        result = TensorDict.maybe_dense_stack([a, other], 1)
        assert isinstance(result, LazyStackedTensorDict)
        assert result.tensordicts[1] is other
        assert maybe_dense_stack([a, other], stack_dim_name="t").names == ["t", None, None]
    assert maybe_dense_stack([a, a], 1, stack_dim_name="t").names == [None, "t", None]
    with pytest.raises(
        TypeError, match=r"maybe_dense_stack\(\) takes strict_shape and stack_dim_name; got bogus"
    ):
        maybe_dense_stack([a, a], bogus=1)


def test_dense_stack_tds_equals_stack() -> None:
    a, b = make_td(0.0), make_td(1.0)
    assert torch.equal(dense_stack_tds(lazy_stack([a, b], 1))["x"], torch.stack([a["x"], b["x"]], 1))
    assert dense_stack_tds([a, b], 0).batch_size == (2, 2, 3)
    with pytest.raises(ValueError, match="needs dim for a list"):
        dense_stack_tds([a, b])
    with pytest.raises(ValueError, match="dim 0 is not the stack dim, 1"):
        dense_stack_tds(lazy_stack([a, b], 1), 0)
    named = LazyStackedTensorDict(a, b, stack_dim=1, stack_dim_name="s")
    for dim in (None, 1, -2):
        assert dense_stack_tds(named, dim).names == [None, "s", None]
    with pytest.raises(DimError, match="out of range"):
        dense_stack_tds(a, 2)


@pytest.mark.parametrize("dim", [None, 0, -1])
def test_dense_stack_tds_of_dense_collection_returns_it(dim: int | None) -> None:
    uneven = lazy_stack([TensorDict(x=torch.zeros(n)) for n in (1, 2)])
    for td in (TensorDict({"n": uneven, "x": torch.zeros(2)}, [2]), TensorDictParams(TensorDict({}, [2]))):
        assert dense_stack_tds(td, dim) is td
    for first, second in ((uneven, uneven), (uneven[0], uneven[1])):
        made = maybe_dense_stack([TensorDict(n=first), TensorDict(n=second)])
        assert dense_stack_tds(made) is made


def test_to_lazystack_shares_memory() -> None:
    td = make_td(0.0)
    stacked = td.to_lazystack(-1)
    assert (stacked.stack_dim, stacked.batch_size) == (1, (2, 3))
    stacked.tensordicts[2]["x"].fill_(5)
    assert (td["x"][:, 2] == 5).all()
    assert stacked.to_lazystack(0).stack_dim == 0


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_to_lazystack_keeps_dim_names(dim: int) -> None:
    for names in (["time", "env"], ["time", None], [None, "env"], None):
        td = TensorDict({"x": torch.zeros(2, 3), "n": {"y": torch.zeros(2, 3)}}, [2, 3], names=names)
        for stacked in (td.to_lazystack(dim), td.to_lazystack(0).to_lazystack(dim)):
            assert stacked.names == td.names
            assert stacked["n"].names == td["n"].names


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: stack([]), StructureError, "cannot stack: there is nothing in the list"),
        (lambda: cat([]), StructureError, "cannot concatenate: there is nothing in the list"),
        (lambda: lazy_stack([]), StructureError, "cannot stack: there is nothing in the list"),
        (lambda: maybe_dense_stack([]), StructureError, "nothing in the list"),
        (lambda: stack([make_td(0.0), torch.zeros(2, 3)]), TypeError, "item 1 is a Tensor, not a collection"),
        (lambda: stack([{"a": 1}]), TypeError, "item 0 is a dict, not a collection"),
        (
            lambda: stack([make_td(0.0), make_td(0.0, (2,))]),
            BatchSizeError,
            r"item 0 has batch size \[2, 3\] and item 1 has \[2\]",
        ),
        (
            lambda: cat([make_td(0.0), make_td(0.0, (5, 2))]),
            BatchSizeError,
            r"along dim 0: item 0 has .*\[2, 3\] and item 1 has \[5, 2\]",
        ),
        (lambda: cat([TensorDict(), TensorDict()]), DimError, r"batch size \[\] has no dimensions"),
        (lambda: cat([make_td(0.0), make_td(0.0)], 2), DimError, r"range of \[-2, 1\], but got 2"),
        (lambda: stack([make_td(0.0), make_td(0.0)], 3), DimError, r"range of \[-3, 2\], but got 3"),
        (lambda: lazy_stack([make_td(0.0), make_td(0.0)], 3), DimError, r"range of \[-3, 2\], but got 3"),
        (
            lambda: lazy_stack([make_td(0.0), make_td(0.0, (2,))]),
            BatchSizeError,
            r"\[2, 3\] and item 1 has \[2\]",
        ),
        (
            lambda: lazy_stack([make_td(0.0), make_td(0.0, (2, 4))], strict_shape=True),
            BatchSizeError,
            r"\[2, 3\] and item 1 has \[2, 4\]",
        ),
        (
            lambda: lazy_stack([make_td(0.0)], foo=1),
            TypeError,
            "takes strict_shape and stack_dim_name; got foo",
        ),
        (
            lambda: stack([make_td(0.0), make_td(0.0, z=torch.ones(2, 3))]),
            KeyMismatchError,
            r"missing keys \[\], extra keys \['z'\]",
        ),
        (
            lambda: stack(
                [
                    make_td(0.0),
                    TensorDict(
                        {"x": torch.zeros(2, 3, 4), "n": {"y": torch.zeros(2, 3, 1), "m": {}}}, [2, 3]
                    ),
                ]
            ),
            StructureError,
            r"cannot join: key \('n', 'y'\) has shape \(2, 3\) in item 0 and \(2, 3, 1\) in item 1; use lazy_stack\(\)",
        ),
        (
            lambda: stack([TensorDict({"n": TensorDict(batch_size=[size])}) for size in (2, 3)]),
            StructureError,
            r"cannot join: key 'n' has batch size \[2\] in item 0 and \[3\] in item 1; use lazy_stack\(\)",
        ),
    ],
)
def test_join_bad_items_raises(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


ENTRIES = {"a": torch.zeros(2, 3), "b": torch.ones(2, 3), "n": {"c": torch.full((2, 3), 2.0)}}


def make_entries() -> TensorDict:
    return TensorDict(ENTRIES, [2])


def test_stack_tensors_replaces_entries() -> None:
    td = make_entries()
    assert td.stack_tensors("b", ("n", "c"), out_key=("n", "o"), dim=1) is td
    assert torch.equal(td["n", "o"], torch.stack([ENTRIES["b"], ENTRIES["n"]["c"]], 1))
    assert set(td.keys(True, True)) == {"a", ("n", "o")}
    assert set(make_entries().stack_tensors("a", "b", out_key="o", dim=-1, keep_entries=True).keys()) == {
        "a",
        "b",
        "n",
        "o",
    }


def test_cat_tensors_replaces_entries() -> None:
    td = make_entries().cat_tensors("a", "b", out_key="a", dim=-1)
    assert torch.equal(td["a"], torch.cat([ENTRIES["a"], ENTRIES["b"]], -1))
    assert set(td.keys()) == {"a", "n"}


def test_stack_tensors_out_key_of_parent_replaces_node() -> None:
    td = make_entries().stack_tensors("b", ("n", "c"), out_key="n", dim=1)
    assert torch.equal(td["n"], torch.stack([ENTRIES["b"], ENTRIES["n"]["c"]], 1))
    assert set(td.keys()) == {"a", "n"}


@pytest.mark.parametrize("stacked", [False, True])
def test_join_entries_out_key_below_entry_replaces_it(stacked: bool) -> None:
    td = lazy_stack(list(make_entries().unbind(0))) if stacked else make_entries()
    td.stack_tensors("b", ("n", "c"), out_key=("n", "c", "o"), dim=1)
    assert torch.equal(td["n", "c", "o"], torch.stack([ENTRIES["b"], ENTRIES["n"]["c"]], 1))
    td.cat_tensors("a", "a", out_key=("a", "x"), dim=-1)
    assert torch.equal(td["a", "x"], torch.cat([ENTRIES["a"]] * 2, -1))
    assert set(td.keys(True, True)) == {("a", "x"), ("n", "c", "o")}


def test_join_entries_failure_changes_nothing() -> None:
    for call, error in [
        (lambda td: td.cat_tensors("a", "b", out_key=("a", "o")), BatchSizeError),
        (
            lambda td: td.cat_tensors("a", "b", out_key=("a", "o"), dim=1, keep_entries=True),
            KeyThroughLeafError,
        ),
        (lambda td: td.stack_tensors("a", "zz", out_key="o"), KeyPathError),
        (lambda td: td.cat_tensors("a", "b", out_key="o"), BatchSizeError),
        (lambda td: td.lock_().stack_tensors("a", "b", out_key="o"), LockedError),
        (lambda td: (td["n"].lock_(), td.cat_tensors("a", ("n", "c"), out_key="a")), LockedError),
    ]:
        td = make_entries()
        with pytest.raises(error):
            call(td)
        assert list(td.keys(True, True)) == ["a", "b", ("n", "c")]


def test_join_all_leaves_returns_one_tensor() -> None:
    td = TensorDict({"b": torch.ones(3), "n": {"a": torch.zeros(3)}})
    assert td.stack_from_tensordict().tolist() == [[1, 1, 1], [0, 0, 0]]
    assert td.stack_from_tensordict(-1, sorted=[("n", "a"), "b"]).tolist() == [[0, 1]] * 3
    assert td.cat_from_tensordict().tolist() == [1, 1, 1, 0, 0, 0]
    out = torch.zeros(2, 3)
    assert td.stack_from_tensordict(out=out) is out
    assert out.sum() == 3
    flat = TensorDict({"b": torch.ones(1), "a": torch.zeros(1)})
    assert flat.cat_from_tensordict(sorted=True).tolist() == [0, 1]
    with pytest.raises(KeyMismatchError, match=r"each key of the collection once; got \['b'\]"):
        td.stack_from_tensordict(sorted=["b"])


def test_stack_and_cat_compile_fullgraph() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        parts = TensorDict({"x": x, "n": {"y": x + 1}}, [x.shape[0]]).unbind(0)
        both = stack([cat([parts[0].unsqueeze(0), parts[1].unsqueeze(0)]), stack(parts[:2])], 1)
        return both["n", "y"].sum((0, 1))

    torch._dynamo.reset()
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(x), run(x))


def test_maybe_dense_stack_strict_out_keys_raises() -> None:
    items = [TensorDict({"a": torch.zeros(3)}, [3]), TensorDict({"a": torch.ones(3)}, [3])]
    for out in (
        TensorDict(batch_size=[2, 3]),
        TensorDict({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, [2, 3]),
    ):
        with pytest.raises(KeyMismatchError, match="out= has not the keys of the collections: missing"):
            maybe_dense_stack(items, out=out, strict=True)
    out = TensorDict({"a": torch.ones(2, 3)}, [2, 3])
    assert maybe_dense_stack(items, out=out, strict=True) is out
    assert not out["a"][0].any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_lazy_stack_tensors_returns_requested_form() -> None:
    leaves = [torch.ones(1), torch.ones(2)]
    assert lazy_stack(leaves, as_padded_tensor=True, padding_value=5).tolist() == [[1, 5], [1, 1]]
    assert [one is other for one, other in zip(lazy_stack(leaves, as_list=True), leaves, strict=True)] == [
        True,
        True,
    ]
    nested = lazy_stack(leaves, as_nested_tensor=True, layout=torch.strided)
    assert nested.is_nested and nested.layout is torch.strided


def test_stack_leaf_and_node_raises() -> None:
    leaf, level = TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"a": {"b": torch.zeros(2)}}, [2])
    for items in ([leaf, level], [level, leaf]):
        with pytest.raises(StructureError, match="the structures differ at key 'a'"):
            torch.stack(items)


class TestMerge:
    def test_merge_nested_keys_keeps_first_value(self) -> None:
        first = TensorDict(a=1, n={"b": 1})
        result = merge_tensordicts(first, TensorDict(a=2, n={"c": 2}), TensorDict(d=3, e={}))
        assert list(result.keys(True, True)) == ["a", ("n", "b"), ("n", "c"), "d"]
        assert "e" in result
        assert result["a"] == 1
        assert list(first.keys(True, True)) == ["a", ("n", "b")]

    def test_merge_callback_receives_all_values(self) -> None:
        items = [TensorDict(a=i, n={"b": i}) for i in range(3)]
        result = merge_tensordicts(*items, callback_exist=lambda *entries: torch.stack(entries))
        assert result["n", "b"].tolist() == [0, 1, 2]
        result = merge_tensordicts(*items, callback_exist={("n", "b"): lambda *entries: entries[-1]})
        assert (result["a"], result["n", "b"]) == (0, 2)
        result = merge_tensordicts(*items, callback_exist={"a": lambda *entries: entries[-1]})
        assert (result["a"], result["n", "b"]) == (2, 0)

    def test_merge_invalid_arguments_raises(self) -> None:
        with pytest.raises(StructureError, match="two collections or more, got 1"):
            merge_tensordicts(make_td(0.0))
        for items in ([{"a": 1}, {"a": {"x": 1}}], [{"a": {"x": 1}}, {"a": 1}]):
            with pytest.raises(StructureError, match="the structures differ at key 'a'"):
                merge_tensordicts(*map(TensorDict, items))


def merge_three(callback: Any) -> Any:
    first = TensorDict({"all": 0, "n": {"some": 10, "all": 1}, "one": 5})
    second = TensorDict({"all": 1, "n": {"some": 11, "all": 2}})
    third = TensorDict({"all": 2, "n": {"all": 3}})
    return merge_tensordicts(first, second, third, callback_exist=callback)


def join_three(*values: Any) -> Any:
    assert len(values) == 3
    return torch.stack(values)


@pytest.mark.parametrize(
    "callback",
    [join_three, {"all": join_three, ("n", "all"): join_three, ("n", "some"): join_three, "one": join_three}],
    ids=["one", "by key"],
)
def test_merge_callback_receives_keys_of_all_inputs(callback: Any) -> None:
    result = merge_three(callback)
    assert result["all"].tolist() == [0, 1, 2] and result["n", "all"].tolist() == [1, 2, 3]
    assert result["n", "some"].item() == 10 and result["one"].item() == 5


def test_merge_two_inputs_callback_receives_both() -> None:
    result = merge_tensordicts(TensorDict(a=1, b=2), TensorDict(a=3), callback_exist=lambda a, b: a + b)
    assert result["a"].item() == 4 and result["b"].item() == 2


def make_deep(size: int = 2, more: str | None = None) -> TensorDict:
    """Build a tree of which one leaf, three levels down, has a given size."""
    last = {"z": torch.full((2, size), float(size))} | ({more: torch.ones(2)} if more else {})
    return TensorDict(
        {
            "a": torch.full((2, 3), float(size)),
            "m": {"q": torch.ones(2)},
            "n": {"b": torch.ones(2), "c": {"e": {}, "d": last}},
        },
        batch_size=[2],
        names=["t"],
    )


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("second", [make_deep(3), make_deep(2, "more")], ids=["shape", "key"])
def test_maybe_dense_stack_makes_only_the_uneven_level_lazy(second, dim):
    result = maybe_dense_stack([make_deep(), second], dim, stack_dim_name="s")
    keys = ["m", "n", ("n", "c"), ("n", "c", "e"), ("n", "c", "d")]
    lazy = [key for key in keys if isinstance(result[key], LazyStackedTensorDict)]
    assert (type(result), lazy) == (TensorDict, [("n", "c", "d")])
    assert torch.equal(result["a"], torch.stack([make_deep()["a"], second["a"]], dim if dim >= 0 else 1))
    names = ["t", "t"]
    names[dim] = "s"
    for node in (result, *map(result.get, keys)):
        assert (node.batch_size, node.names) == ((2, 2), names)
    parts = result.unbind(dim)
    assert [part["n", "c", "d"].keys() for part in parts] == [
        x["n", "c", "d"].keys() for x in (make_deep(), second)
    ]
    assert all(
        (part["n", "c", "d"] == x["n", "c", "d"]).all()
        for part, x in zip(parts, (make_deep(), second), strict=True)
    )


@pytest.mark.parametrize(
    "items",
    [
        [make_deep(), make_deep().exclude("a")],
        [make_deep(), make_deep().set("a", torch.ones(2))],
        [make_deep(), make_deep().set("m", torch.ones(2))],
        [TensorDict(a=torch.ones(1)), TensorDict(a={"b": torch.ones(1)})],
        [TensorDict(a=torch.ones(2), batch_size=[2]), TensorDict(a=torch.ones(3), batch_size=[3])],
        [lazy_stack(list(make_deep())), lazy_stack(list(make_deep(3)))],
    ],
    ids=["keys", "shape", "form", "root form", "batch size", "lazy"],
)
def test_maybe_dense_stack_with_uneven_root_is_lazy(items):
    result = maybe_dense_stack(items)
    assert type(result) is LazyStackedTensorDict
    assert all((one == other).all() for one, other in zip(result.tensordicts, items, strict=True))


def test_maybe_dense_stack_of_params_keeps_uneven_level():
    items = [TensorDictParams(TensorDict(a=torch.ones(2), n={"b": torch.ones(k)})) for k in (1, 2)]
    result = maybe_dense_stack(items)
    assert torch.equal(result["a"], torch.ones(2, 2))
    assert [part["n", "b"].shape for part in result.unbind(0)] == [(1,), (2,)]


def test_maybe_dense_stack_negative_dim_is_that_of_the_root():
    def step(size):
        agents = lazy_stack([TensorDict(x=torch.full((1,), size)), TensorDict(y=torch.ones(2))])
        return TensorDict(
            agents=agents, chat=TensorDict(w=torch.zeros(size), batch_size=[size]), x=torch.ones(3)
        )

    for items in ([step(1), step(2)], [step(1), step(1).exclude("x")]):
        last, first = maybe_dense_stack(items, -1), maybe_dense_stack(items, 0)
        for key in ("agents", "chat"):
            assert last.get(key).stack_dim == first.get(key).stack_dim == 0
            assert last.get(key).batch_size == first.get(key).batch_size
        assert all(last[i]["chat"].batch_size == item["chat"].batch_size for i, item in enumerate(items))
