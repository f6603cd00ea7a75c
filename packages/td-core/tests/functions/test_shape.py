"""Compare shape operations and indexing with torch per leaf, on dense collections and lazy stacks."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, expand_as_right, expand_right
from td_core._functions.shape import same_memory
from td_core.errors import BatchSizeError, CollectionIndexError, DimError, LockedError, StructureError

BATCH = (2, 1, 4)


def make_td(batch: tuple[int, ...] = BATCH, names: list[str | None] | None = None) -> TensorDict:
    numel = torch.Size(batch).numel()
    leaf = torch.arange(numel).view(batch)
    inner = TensorDict({"y": torch.stack([leaf + 100, leaf + 200], -1), "m": {}}, batch, names=names)
    return TensorDict({"x": leaf.clone(), "n": inner}, batch_size=batch, names=names)


def make_lazy_factory(dim: int) -> Callable[[], Any]:
    def build() -> LazyStackedTensorDict:
        return LazyStackedTensorDict(*make_td().unbind(dim), stack_dim=dim)

    return build


KINDS = {
    "dense": make_td,
    "lazy0": make_lazy_factory(0),
    "lazy1": make_lazy_factory(1),
    "lazy2": make_lazy_factory(2),
}

INDEX = torch.tensor([[[3, 0, 1, 1]], [[0, 0, 2, 3]]])

# Each operation works on a collection and on a tensor of the same batch shape, so that results can be compared.
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "view": lambda t: t.view(8),
    "view many": lambda t: t.view(2, 2, 2),
    "view infer": lambda t: t.view(-1, 2),
    "view size": lambda t: t.view(torch.Size([1, 8])),
    "reshape": lambda t: t.reshape(4, 2),
    "reshape infer": lambda t: t.reshape((2, -1)),
    "flatten": lambda t: t.flatten(),
    "flatten dims": lambda t: t.flatten(1, -1),
    "unflatten": lambda t: t.unflatten(-1, (2, 2)),
    "unflatten infer": lambda t: t.unflatten(2, (-1, 2)),
    "squeeze": lambda t: t.squeeze(),
    "squeeze dim": lambda t: t.squeeze(1),
    "squeeze other": lambda t: t.squeeze(dim=0),
    "squeeze dims": lambda t: t.squeeze((0, 1)),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "unsqueeze last": lambda t: t.unsqueeze(dim=-1),
    "permute": lambda t: t.permute(2, 0, 1),
    "permute sequence": lambda t: t.permute((0, 2, 1)),
    "permute keyword": lambda t: t.permute(dims=(-1, 1, 0)),
    "transpose": lambda t: t.transpose(0, -1),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "swapdims": lambda t: t.swapdims(1, 2),
    "movedim": lambda t: t.movedim(0, 2),
    "moveaxis": lambda t: t.moveaxis((0, 1), (1, 2)),
    "expand": lambda t: t.expand(2, 3, 4),
    "expand more": lambda t: t.expand((5, -1, 3, -1)),
    "expand_as": lambda t: t.expand_as(torch.zeros(3, 2, 1, 4)),
    "broadcast_to": lambda t: t.broadcast_to((2, 2, 4)),
    "repeat": lambda t: t.repeat(2, 3, 1),
    "repeat sequence": lambda t: t.repeat((1, 1, 2)),
    "repeat_interleave": lambda t: t.repeat_interleave(2, dim=-1),
    "repeat_interleave flat": lambda t: t.repeat_interleave(2),
    "repeat_interleave tensor": lambda t: t.repeat_interleave(torch.tensor([1, 2]), dim=0, output_size=3),
    "tile": lambda t: t.tile((2,)),
    "tile more": lambda t: t.tile((2, 1, 1, 3)),
    "roll": lambda t: t.roll(1, 0),
    "roll flat": lambda t: t.roll(3),
    "roll dims": lambda t: t.roll((1, -1), (0, 2)),
    "flip": lambda t: t.flip(0),
    "flip dims": lambda t: t.flip((0, -1)),
    "fliplr": lambda t: t.fliplr(),
    "flipud": lambda t: t.flipud(),
    "rot90": lambda t: t.rot90(),
    "rot90 plane": lambda t: t.rot90(3, (0, 2)),
    "rot180": lambda t: t.rot90(2, (0, 2)),
    "rot0": lambda t: t.rot90(4, (0, 2)),
    "narrow": lambda t: t.narrow(2, 1, 2),
    "narrow start": lambda t: t.narrow(0, torch.tensor(-1), 1),
    "split": lambda t: t.split(3, 2),
    "split sizes": lambda t: t.split([1, 3], dim=-1),
    "chunk": lambda t: t.chunk(2),
    "chunk more": lambda t: t.chunk(3, 2),
    "tensor_split": lambda t: t.tensor_split(3, 2),
    "tensor_split places": lambda t: t.tensor_split([1, 2], -1),
    "unbind": lambda t: t.unbind(0),
    "unbind last": lambda t: t.unbind(-1),
    "int": lambda t: t[1],
    "ints": lambda t: t[1, 0],
    "slice": lambda t: t[:1],
    "ellipsis": lambda t: t[..., 1:3],
    "none": lambda t: t[:, None],
    "tensor": lambda t: t[torch.tensor([1, 0, 1])],
    "list": lambda t: t[:, :, [0, 3]],
    "mask": lambda t: t[torch.tensor([True, False])],
    "full mask": lambda t: t[INDEX > 1],
    "two tensors": lambda t: t[[0, 1], :, [3, 2]],
    "range": lambda t: t[..., range(2)],
}


def assert_equals_torch(result: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert len(result) == len(expected)
        for part, want in zip(result, expected, strict=True):
            assert_equals_torch(part, want)
        return
    shape = expected.shape
    assert result.batch_size == result["n"].batch_size == result["n", "m"].batch_size == shape
    assert torch.equal(result["x"], expected)
    assert torch.equal(result["n", "y"], torch.stack([expected + 100, expected + 200], -1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_shape_op_each_kind_equals_torch(kind: str, name: str) -> None:
    operation = OPERATIONS[name]
    assert_equals_torch(operation(KINDS[kind]()), operation(make_td()["x"]))


@pytest.mark.parametrize("stack_dim", [0, 1, 2])
@pytest.mark.parametrize(
    "name",
    ["permute", "transpose", "unsqueeze", "movedim", "flip", "roll", "slice", "ellipsis", "repeat", "tensor"],
)
def test_shape_op_lazy_stack_keeps_kind(stack_dim: int, name: str) -> None:
    assert isinstance(OPERATIONS[name](make_lazy_factory(stack_dim)()), LazyStackedTensorDict)


def test_transpose_flip_ragged_members_does_not_stack() -> None:
    members = [TensorDict({"x": torch.full((2, i + 1), i)}, [2]) for i in range(3)]
    moved = LazyStackedTensorDict(*members, stack_dim=0).transpose(0, 1).flip(1)
    assert [part["x"].tolist() for part in moved[0].unbind(0)] == [[2, 2, 2], [1, 1], [0]]


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda td: td.view(6, 4), [None, None]),
        (lambda td: td.view(2, 3, 4), ["a", "b", "c"]),
        (lambda td: td.flatten(0, 1), [None, "c"]),
        (lambda td: td.unflatten(1, (3, 1)), ["a", None, None, "c"]),
        (lambda td: td.permute(2, 0, 1), ["c", "a", "b"]),
        (lambda td: td.unsqueeze(1), ["a", None, "b", "c"]),
        (lambda td: td[:, :1].squeeze(1), ["a", "c"]),
        (lambda td: td.expand(5, 2, 3, 4), [None, "a", "b", "c"]),
        (lambda td: td.repeat(1, 2, 1), ["a", "b", "c"]),
        (lambda td: td.roll(1), ["a", "b", "c"]),
        (lambda td: td.rot90(), ["b", "a", "c"]),
        (lambda td: td.unbind(1)[0], ["a", "c"]),
        (lambda td: td.split(1, 2)[0], ["a", "b", "c"]),
        (lambda td: td[0], ["b", "c"]),
        (lambda td: td[..., None, 0], ["a", "b", None]),
        (lambda td: td[:, torch.zeros(2, 2, dtype=torch.long)], ["a", None, None, "c"]),
        (lambda td: td[:, [0, 1]], ["a", "b", "c"]),
    ],
)
def test_shape_op_names_follow_dims(
    call: Callable[[TensorDict], TensorDict], names: list[str | None]
) -> None:
    result = call(make_td((2, 3, 4), ["a", "b", "c"]))
    assert (result.names, result["n"].names) == (names, names)


def test_shape_op_nested_td_keeps_extra_batch_dims() -> None:
    td = TensorDict({"n": TensorDict({"x": torch.zeros(2, 3, 4, 5)}, [2, 3, 4])}, [2, 3])
    assert td.flatten()["n"].batch_size == (6, 4)
    assert td.unsqueeze(-1)["n"].batch_size == (2, 3, 1, 4)
    assert td.unbind(1)[0]["n"].batch_size == (2, 4)
    assert td[0]["n"].batch_size == (3, 4)


def test_shape_op_empty_batch_size_adds_dims() -> None:
    td = TensorDict({"x": torch.arange(5)})
    for grown in [
        td.view(1),
        td.reshape(-1),
        td.flatten(),
        td.unsqueeze(0),
        td.expand(1),
        td[None],
        td[..., None],
        td[True],
    ]:
        assert grown.batch_size == (1,)
        assert torch.equal(grown["x"], torch.arange(5)[None])
    for same in [td.permute(), td.squeeze(), td[...], td[()], td.view(()), td.expand(()), td.repeat(())]:
        assert same.batch_size == ()
        assert torch.equal(same["x"], torch.arange(5))


def test_view_to_no_dims_without_feature_dims_is_scalar() -> None:
    td = TensorDict({"x": torch.ones(1, 1)}, [1, 1])
    assert td.view(())["x"].shape == td.reshape(())["x"].shape == td.squeeze()["x"].shape == ()


@pytest.mark.parametrize(
    "name",
    [
        "view",
        "flatten dims",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "permute",
        "transpose",
        "narrow",
        "expand",
        "int",
        "slice",
        "none",
    ],
)
def test_shape_op_view_shares_memory(name: str) -> None:
    td = make_td()
    OPERATIONS[name](td)["n", "y"].fill_(7)
    assert (td["n", "y"] == 7).any()


def test_atleast_nd_prepends_dims() -> None:
    td = make_td((3,))
    assert [td.atleast_1d().batch_size, td.atleast_2d().batch_size, td.atleast_3d().batch_size] == [
        (3,),
        (1, 3),
        (1, 1, 3),
    ]
    assert make_td((2, 1, 4)).atleast_2d().batch_size == (2, 1, 4)


def test_view_dtype_reinterprets_bits() -> None:
    td = TensorDict({"x": torch.ones(2, 4)}, [2])
    assert td.view(torch.int32)["x"].tolist() == [[0x3F800000] * 4] * 2
    assert td.view(torch.uint8, batch_size=(2, 16)).batch_size == (2, 16)
    assert td.to_lazystack(0).view(torch.uint8, batch_size=(2, 16)).batch_size == (2, 16)


@pytest.mark.parametrize(
    "kind", [lambda td: td, lambda td: td.to_lazystack(0), lambda td: td.to_lazystack(1).clone()]
)
def test_view_dtype_changing_batch_dim_raises(kind):
    td = kind(TensorDict({"n": {"x": torch.zeros(2, 3, dtype=torch.int64)}}, batch_size=[2, 3]))
    with pytest.raises(BatchSizeError, match=r"key \('n', 'x'\) has shape \[.*\], which does not start with"):
        td.view(torch.int32)
    viewed = td.view(torch.int32, batch_size=[2])
    assert viewed.batch_size == viewed["n"].batch_size == (2,)
    assert viewed["n", "x"].shape == (2, 6)


def test_contiguous_returns_contiguous_leaves() -> None:
    td = TensorDict({"x": torch.arange(6).view(2, 3).T}, [3])
    assert td.contiguous()["x"].is_contiguous()
    assert torch.equal(td.contiguous()["x"], td["x"])
    odd = TensorDict({"x": torch.zeros(4, 1).as_strided((4, 1), (1, 7))}, [4])
    assert odd.contiguous()["x"].stride() == (1, 7)
    assert odd.contiguous(canonical=True)["x"].stride() == (1, 1)
    assert type(make_lazy_factory(0)().contiguous()) is TensorDict


@pytest.mark.parametrize(
    ("call", "batch"),
    [
        (lambda td: td.flatten(inplace=True), (8,)),
        (lambda td: td.unflatten(2, (2, 2), inplace=True), (2, 1, 2, 2)),
        (lambda td: td.repeat(2, 1, 1, inplace=True), (4, 1, 4)),
        (lambda td: td.repeat_interleave(2, dim=0, inplace=True), (4, 1, 4)),
        (lambda td: td.roll(1, 0, inplace=True), (2, 1, 4)),
        (lambda td: td.contiguous(inplace=True), (2, 1, 4)),
    ],
)
def test_shape_op_inplace_returns_self_and_locked_raises(
    call: Callable[[Any], Any], batch: tuple[int, ...]
) -> None:
    td = make_td()
    assert call(td) is td
    assert td.batch_size == td["n"].batch_size == td["x"].shape == batch
    locked = make_td().lock_()
    with pytest.raises(LockedError, match=r"cannot .* in place: the TensorDict is locked"):
        call(locked)
    assert locked.batch_size == BATCH


def test_flatten_inplace_lazy_stack_raises() -> None:
    with pytest.raises(
        StructureError, match=r"cannot flatten in place: the members of a LazyStackedTensorDict hold"
    ):
        make_lazy_factory(0)().flatten(inplace=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_densify_ragged_entries_become_nested_tensors(layout: torch.layout) -> None:
    members = [TensorDict({"x": torch.full((i + 1, 2), i), "n": {"y": torch.ones(3)}}) for i in range(3)]
    outer = TensorDict({"stack": LazyStackedTensorDict(*members)})
    dense = outer.densify(layout)["stack"]
    assert type(dense) is TensorDict
    assert dense["x"].layout == layout
    assert [part.tolist() for part in dense["x"].unbind()] == [member["x"].tolist() for member in members]
    assert torch.equal(dense["n", "y"], torch.ones(3, 3))
    with pytest.raises(StructureError, match=r"key .x. has shape"):
        outer.contiguous()


UNDOABLE = [
    "view",
    "flatten dims",
    "unflatten",
    "squeeze dim",
    "squeeze",
    "unsqueeze",
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "flip",
    "roll",
    "roll flat",
    "rot90",
    "rot90 plane",
    "fliplr",
]


@pytest.mark.parametrize("name", UNDOABLE)
def test_shape_op_context_writes_changes_back(name: str) -> None:
    td = make_td()
    x, y = td["x"], td["n", "y"]
    reference = make_td()["x"]
    with OPERATIONS[name](td) as other:
        other["new"] = other["x"] + 5
        other["n", "deep"] = other["n", "y"].double()
        other["x"] = other["x"] * 3
    assert td.batch_size == BATCH
    assert torch.equal(td["x"], reference * 3)
    assert torch.equal(td["new"], reference + 5)
    assert torch.equal(td["n", "deep"], y.double())
    assert torch.equal(x, reference), "a replaced leaf replaces, it does not write into the old one"


def test_view_context_inplace_write_keeps_leaf_object() -> None:
    td = make_td()
    leaf = td["x"]
    with td.view(8) as flat:
        flat["x"] += 1
    assert td["x"] is leaf
    assert leaf.flatten().tolist() == list(range(1, 9))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_view_context_unchanged_parameter_is_kept(device: str) -> None:
    params = TensorDictParams(TensorDict({"x": torch.zeros(2, 4, device=device)}, [2, 4]))
    leaf = params["x"]
    with params.view(8), params.permute(1, 0):
        pass
    assert params["x"] is leaf


@pytest.mark.parametrize(
    ("leaf", "change"),
    [
        (torch.arange(16).view(4, 2, 2), lambda leaf: leaf.transpose(-1, -2)),
        (torch.tensor([1j, 2, 3j, 4]), torch.conj),
        (
            torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([0, 2, 3, 3, 6])),
            lambda leaf: leaf * 2,
        ),
    ],
    ids=["transposed", "conjugated", "jagged"],
)
def test_view_context_other_view_of_same_memory_is_written_back(
    leaf: Tensor, change: Callable[[Tensor], Tensor]
) -> None:
    td = TensorDict({"x": leaf}, [4])
    expected = [row.clone() for row in change(leaf).unbind()]
    with td.view(4) as other:
        other["x"] = change(other["x"])
    assert all(torch.equal(*pair) for pair in zip(td["x"].unbind(), expected, strict=True))


@pytest.mark.parametrize("transform", [torch.vmap, lambda fn: lambda td: torch.func.vjp(fn, td)[0]])
def test_view_context_under_vmap_and_vjp_writes_back(transform: Any) -> None:
    def program(td: TensorDict) -> TensorDict:
        with td.view(-1) as flat:
            flat["y"] = flat["x"] + 1
        return td

    td = TensorDict({"x": torch.arange(8.0).view(2, 2, 2)}, [2, 2])
    assert torch.equal(transform(program)(td)["y"], td["x"] + 1)


def test_view_context_locked_td_writes_in_place() -> None:
    td = make_td().lock_()
    leaf = td["x"]
    with td.view(8) as flat:
        flat["x"] = torch.zeros(8, dtype=torch.long)
    assert td["x"] is leaf
    assert not leaf.any()
    with pytest.raises(LockedError, match="cannot set key 'new'"), td.view(8) as flat:
        flat["new"] = torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda td: td.view(5),
            BatchSizeError,
            r"shape \[5\] is invalid for a batch of 8 elements, \[2, 1, 4\]",
        ),
        (lambda td: td.view(8, batch_size=(8,)), TypeError, r"or new batch dims \(size=\); it got both"),
        (lambda td: td.view(8, size=(8,)), TypeError, "by position or by keyword, not both"),
        (lambda td: td.unsqueeze(), TypeError, "missing 1 required positional argument: 'dim'"),
        *[
            (
                methodcaller(name, bogus=1),
                TypeError,
                rf"{name}\(\) got an unexpected keyword argument 'bogus'",
            )
            for name in ("expand", "permute", "reshape", "squeeze", "unsqueeze", "view")
        ],
        (lambda td: td.squeeze(3), DimError, r"range of \[-3, 2\], but got 3"),
        (lambda td: td.permute(0, 1), DimError, r"each of \[0, 1, 2\] once; got \[0, 1\]"),
        (
            lambda td: td.repeat(2),
            ValueError,
            r"one number for each batch dim; got \[2\] for the batch size \[2, 1, 4\]",
        ),
        (lambda td: td.rot90(1, (0, 0)), DimError, r"two different dims; got \(0, 0\)"),
        (lambda td: td[0, 0, 0, 0], CollectionIndexError, "too many indices"),
        (lambda td: td[2], CollectionIndexError, "index 2 is out of bounds for batch dim 0 of size 2"),
    ],
)
def test_shape_op_invalid_argument_raises(
    call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(make_td())


def test_permute_without_dims_keeps_order() -> None:
    assert make_td().permute().batch_size == BATCH


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_index_has_no_graph_break(dynamic: bool | None) -> None:
    def run(x: Tensor, where: Tensor) -> Tensor:
        td = TensorDict({"x": x, "n": {"y": x + 1}}, [x.shape[0], 2])
        parts = [
            td[0],
            td[-1, 1],
            td[1:],
            td[::2],
            td[..., 0],
            td[:, None],
            td[where],
            td[:, [0, 1, 1]],
            td[[0], 1],
        ]
        return sum(part["n", "y"].sum() * i for i, part in enumerate(parts))

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=dynamic)
    for size in (3, 4, 6):
        x, where = torch.arange(size * 2 * 3.0).view(size, 2, 3), torch.tensor([2, 0])
        assert torch.equal(compiled(x, where), run(x, where))


def test_compile_shape_ops_have_no_graph_break() -> None:
    def run(x: Tensor) -> Tensor:
        td = TensorDict({"x": x, "n": {"y": x + 1}}, [x.shape[0], 2])
        flat = td.view(-1).unsqueeze(0).transpose(0, 1)
        return flat[1:, 0]["n", "y"].sum() + td.permute(1, 0).flatten(0, 1)[0]["x"].sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for size in (2, 3, 5):
        x = torch.arange(size * 2 * 3.0).view(size, 2, 3)
        assert torch.equal(compiled(x), run(x))


@pytest.mark.parametrize(
    ("operation", "leaf"),
    [
        (lambda td: td.view(6), torch.zeros(3, 2).T),
        (lambda td: td.pad([1, 0]), torch.zeros(2, 3).to_sparse()),
        (lambda td: td.split(1), torch.zeros(2, 3).to_sparse()),
    ],
)
def test_shape_op_unsupported_leaf_raises_with_key(operation, leaf):
    td = TensorDict({"fine": torch.zeros(2, 3), "n": {"odd": leaf}}, [2, 3])
    with pytest.raises(RuntimeError, match=r"key 'odd' of shape \[2, 3\]: "):
        operation(td)


@pytest.mark.parametrize("join", [TensorDict.stack, TensorDict.lazy_stack], ids=["dense", "lazy"])
def test_expand_as_td_expands_leaf_to_matching_leaf(join: Any) -> None:
    def make(*tail: int) -> TensorDict:
        level = TensorDict({"c": torch.rand(3, *tail, 2)}, [3, *tail])
        return TensorDict({"a": torch.rand(3, *tail, 4), "b": level}, [3])

    td, other = join([make(1), make(1)]), TensorDict.stack([make(5), make(5)])
    result = td.expand_as(other)
    assert torch.equal(result["a"], td["a"].expand(2, 3, 5, 4))
    assert torch.equal(result["b", "c"], td["b", "c"].expand(2, 3, 5, 2))
    assert (result.batch_size, result["b"].batch_size) == ((2, 3), (2, 3, 5))
    other["b"] = other.pop("b").to_dict()
    assert td.expand_as(other)["b"].batch_size == (2, 3)


def test_expand_as_td_other_keys_expands_batch_only() -> None:
    td = TensorDict({"a": torch.rand(3, 4), "b": {"c": torch.rand(3)}}, [3])
    other = TensorDict({"a": {"x": torch.rand(2, 3, 5)}, "z": torch.rand(2, 3, 7)}, [2, 3])
    result = td.expand_as(other)
    assert (result["a"].shape, result["b", "c"].shape) == ((2, 3, 4), (2, 3))
    with pytest.raises(RuntimeError, match=r"key 'a'.*expanded size"):
        td.expand_as(TensorDict({"a": torch.rand(3, 5)}, [3]))


def test_reshape_inplace_returns_self() -> None:
    td = TensorDict({"a": torch.arange(12).view(3, 4), "n": {"b": torch.zeros(3, 4, 5)}}, [3, 4])
    assert td.reshape(2, -1, inplace=True) is td
    assert td.batch_size == td["n"].batch_size == (2, 6)
    assert td["a"].tolist() == torch.arange(12).view(2, 6).tolist()


BASE = torch.arange(16.0)


SQUARE = BASE.view(4, 4)


META = torch.zeros(4, device="meta")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (BASE, BASE, True),
        (BASE, BASE.view(16), True),
        (BASE, BASE.clone(), False),
        (BASE, BASE[:-1], False),
        (SQUARE, SQUARE.t(), False),
        (BASE, BASE.view(torch.int32), False),
        (META, META.view(4), True),
        (META, torch.zeros(4, device="meta"), False),
    ],
    ids=["itself", "view", "copy", "part", "transposed", "other dtype", "meta view", "meta copy"],
)
def test_same_memory_returns_true_for_equal_views(left: Tensor, right: Tensor, expected: bool) -> None:
    assert same_memory(left, right) is expected


class TestExpansion:
    def test_expand_right_appends_dims(self, make_dense: Any) -> None:
        assert expand_right(torch.arange(2), (2, 3)).tolist() == [[0, 0, 0], [1, 1, 1]]
        assert expand_as_right(torch.zeros(3), make_dense()).shape == (3,)
        with pytest.raises(RuntimeError, match="must match the existing size"):
            expand_right(torch.zeros(2), (3, 3))
        with pytest.raises(RuntimeError, match="has 2 dims"):
            expand_right(torch.zeros(2, 3), (2,))

    def test_expand_as_right_collection_expands_leaves(self, make_dense: Any) -> None:
        result = expand_as_right(make_dense(), TensorDict(batch_size=[3, 5]))
        assert result.batch_size == result["b"].batch_size == (3, 5)
        assert result["a"].shape == (3, 5, 2)
        assert torch.equal(result["a"][:, 4], make_dense()["a"])
        with pytest.raises(RuntimeError, match=r"\[3\] does not start \[4\]"):
            expand_as_right(make_dense(), torch.zeros(4))
