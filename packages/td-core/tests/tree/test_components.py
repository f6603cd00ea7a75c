"""Nested tensors as leaves: components are rearranged like the elements of other leaves."""

from __future__ import annotations

import pytest
import torch

from td_core import TensorDict, assert_close, group_by
from td_core._torch.private import get_ragged_dim
from td_core._tree.components import JaggedParts
from td_core.errors import StructureError

LENGTHS = (2, 3, 1)


def make_ragged(start: float = 0.0) -> torch.Tensor:
    parts = [torch.arange(float(n)) + start for n in LENGTHS]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def make_transposed() -> torch.Tensor:
    parts = [torch.arange(4.0 * n).view(n, 4) for n in LENGTHS]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def make_marked() -> torch.Tensor:
    """A jagged tensor whose ragged dim is set after construction, as in verl, so that its shape shows another dim."""
    parts = [torch.arange(4.0 * n).view(4, n) for n in LENGTHS]
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    tensor = torch.nested.nested_tensor_from_jagged(torch.cat(parts, 1), offsets)
    tensor._ragged_idx = 2
    return tensor


LEAVES = {"ragged": make_ragged, "transposed": make_transposed, "marked": make_marked}


def make_data(leaf=make_ragged) -> TensorDict:
    return TensorDict({"rows": leaf(), "n": {"at": torch.arange(3)}}, [3])


def list_components(td: TensorDict) -> list[list]:
    return [part.tolist() for part in td["rows"].unbind()]


#: Operations that rearrange a collection; its entry ("n", "at") holds the original position of each component.
MOVES = [
    lambda td: td[1:],
    lambda td: td[::2],
    lambda td: td[:0],
    lambda td: td[...],
    lambda td: td[()],
    lambda td: td[[2, 0]],
    lambda td: td[[1]],
    lambda td: td[torch.tensor([2, 2, 1])],
    lambda td: td[torch.tensor([True, False, True])],
    lambda td: td.__getitems__([1, 0]),
    lambda td: td.split([1, 2])[1],
    lambda td: torch.chunk(td, 2)[0],
    lambda td: td.tensor_split(2)[1],
    lambda td: td.view(-1),
    lambda td: td.reshape(3),
    lambda td: td.squeeze(),
    lambda td: td.transpose(0, 0),
    lambda td: td.flip(0),
    lambda td: td.roll(1, 0),
    lambda td: td.repeat(2),
    lambda td: td.repeat_interleave(2, 0),
    lambda td: td.gather(0, torch.tensor([1, 1])),
    lambda td: td.masked_select(torch.tensor([False, True, True])),
    lambda td: torch.cat([td, td[1:]]),
    lambda td: group_by(td, ("n", "at"))[1][2],
    lambda td: TensorDict({"deep": td}, [3])[1:]["deep"],
]


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("move", MOVES)
def test_rearrange_components_matches_other_entries(move, leaf):
    td = make_data(LEAVES[leaf])
    result = move(td)
    before = list_components(td)
    assert list_components(result) == [before[i] for i in result["n", "at"].tolist()]
    assert result["rows"].size(0) == result.batch_size[0]
    assert result["rows"].layout is torch.jagged
    assert get_ragged_dim(result["rows"]) == get_ragged_dim(td["rows"])


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("move", [lambda td: td[1:], lambda td: td[[2, 0]], lambda td: torch.cat([td, td])])
def test_rearrange_components_is_contiguous_and_caches_max(move, leaf):
    rows = move(make_data(LEAVES[leaf]))["rows"]
    assert rows.is_contiguous()
    if hasattr(torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "_max_seqlen_tensor"):
        parts = rows.unbind()
        longest = [max(sizes) for sizes in zip(*[part.shape for part in parts])]
        assert rows.to_padded_tensor(0.0).shape == (len(parts), *longest)


@pytest.mark.parametrize("move", [lambda td: td.unsqueeze(0), lambda td: td[None], lambda td: td[[[0, 1]]]])
def test_add_batch_dim_raises(move):
    with pytest.raises(StructureError, match="a nested tensor has one batch dim, of its 3 components"):
        move(make_data())


@pytest.mark.parametrize(
    "compute", [lambda td: td.sum(0), lambda td: td.pad([0, 1]), lambda td: td.softmax(0)]
)
def test_unsupported_operation_raises_error_of_torch(compute):
    with pytest.raises(RuntimeError):
        compute(make_data())


def test_index_components_passes_gradients():
    td = make_data()
    td["rows"] = td["rows"].detach().requires_grad_()
    td[[2, 0]]["rows"].sum().backward()
    assert [part.tolist() for part in td["rows"].grad.unbind()] == [[1, 1], [0, 0, 0], [1]]


WRITES = [
    (1, lambda td: -1.0, {1: [-1, -1, -1]}),
    (slice(0, 2), lambda td: td[:2].apply(torch.zeros_like), {0: [0, 0], 1: [0, 0, 0]}),
    ([2, 0], lambda td: {"rows": 7.0}, {0: [7, 7], 2: [7]}),
    ([2, 0], lambda td: td[[2, 0]].apply(lambda leaf: leaf * 0 + 4), {0: [4, 4], 2: [4]}),
    (torch.tensor([False, True, False]), lambda td: 5, {1: [5, 5, 5]}),
    (0, lambda td: td[0].apply(lambda leaf: leaf + 1), {0: [1, 2]}),
    (..., lambda td: 2, {0: [2, 2], 1: [2, 2, 2], 2: [2]}),
]


@pytest.mark.parametrize(("index", "value", "changed"), WRITES)
def test_setitem_writes_components(index, value, changed):
    td = make_data()
    held, expected = td["rows"], list_components(td)
    td[index] = value(td)
    assert list_components(td) == [changed.get(i, part) for i, part in enumerate(expected)]
    assert td["rows"] is held


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, lambda td: td[1]),
        ([0, 1], lambda td: td[[1, 0]]),
        ([[0, 1]], lambda td: 0),
        (slice(0, 2), lambda td: {"n": {"at": 9}, "rows": td["rows"]}),
    ],
)
def test_setitem_mismatched_components_writes_nothing(index, value):
    td = make_data()
    with pytest.raises(StructureError, match="cannot write key 'rows'"):
        td[index] = value(td)
    assert list_components(td) == list_components(make_data()) and td["n", "at"].tolist() == [0, 1, 2]


WHOLE = [
    lambda td, other: td.update_(other),
    lambda td, other: td.update(other, inplace=True),
    lambda td, other: td.copy_(other),
    lambda td, other: td.apply_(lambda mine, theirs: theirs, other),
    lambda td, other: td.load_state_dict(other.state_dict()),
    lambda td, other: td.load_state_dict(other.state_dict(flatten=False)),
    lambda td, other: td.set_("rows", other["rows"]),
]


@pytest.mark.parametrize("write", WHOLE)
def test_write_equal_components_keeps_leaf(write):
    td, other = make_data(), TensorDict({"rows": make_ragged(5.0), "n": {"at": torch.arange(3)}}, [3])
    held = td["rows"]
    write(td, other)
    assert td["rows"] is held
    assert_close(td, other)


@pytest.mark.parametrize("write", WHOLE)
def test_write_other_components_raises(write):
    td = make_data()
    with pytest.raises(StructureError, match="key 'rows'"):
        write(td, td[[1, 0, 2]])
    assert list_components(td) == list_components(make_data()) and td["n", "at"].tolist() == [0, 1, 2]


def test_assert_close_different_components_raises():
    with pytest.raises(AssertionError, match="key 'rows' differs"):
        assert_close(make_data(), TensorDict({"rows": make_ragged(0.5), "n": {"at": torch.arange(3)}}, [3]))


CHANGES = [
    lambda td: td.add_(1),
    lambda td: td.zero_(),
    lambda td: td.apply_(lambda leaf: leaf * 2),
    lambda td: td.load_state_dict((td + td).state_dict()),
    lambda td: td.apply(lambda leaf: leaf * 3),
    lambda td: td.named_apply(lambda key, leaf: leaf - 1),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", CHANGES)
def test_pointwise_strided_layout_applies_per_component(change) -> None:
    # The default result of densify(); it has no shape, and the guards of torch cannot describe it.
    parts = [torch.arange(float(n)) for n in LENGTHS]
    rows, other = torch.nested.nested_tensor(parts), torch.arange(3.0)
    td = TensorDict({"rows": rows, "x": other.clone()}, [3])
    expected = change(
        TensorDict({**{str(i): part.clone() for i, part in enumerate(parts)}, "x": other.clone()})
    )
    for _ in range(3):  # repeat, to use the cached metadata of earlier writes
        result = change(td.clone())
        assert list_components(result) == [expected[str(i)].tolist() for i in range(3)]
        assert torch.equal(result["x"], expected["x"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_item_shape_strided_ragged_dim_is_minus_one() -> None:
    td = TensorDict({"n": {"rows": torch.nested.nested_tensor([torch.zeros(n, 4) for n in LENGTHS])}})
    assert td.get_item_shape(("n", "rows")) == (3, -1, 4)
    assert td.auto_batch_size_().batch_size == (3,)
    with pytest.raises(
        RuntimeError, match=r"cannot compute sum: key \('n', 'rows'\): .*\(shape \[3, -1, 4\]\)"
    ):
        td.sum(0)


LAYOUTS = {"jagged": torch.jagged, "strided": torch.strided}

#: In-place operations with a second collection; torch's result for a jagged tensor of ones and a dense tensor of twos.
COMBINED = {
    "update_": (lambda td, other: td.update_(other), None),
    "update": (lambda td, other: td.update(other, inplace=True), None),
    "apply_": (lambda td, other: td.apply_(lambda mine, theirs: theirs, other), None),
    "load_state_dict": (lambda td, other: td.load_state_dict(other.state_dict()), None),
    "set_": (lambda td, other: td.set_(("n", "rows"), other["n", "rows"]), None),
    "mul_": (lambda td, other: td.mul_(other), 2.0),
    "+=": (lambda td, other: td.__iadd__(other), 3.0),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nested_first", [True, False])
@pytest.mark.parametrize(("change", "combined"), COMBINED.values(), ids=COMBINED)
def test_combine_nested_and_dense_leaf_works_or_changes_nothing(layout, nested_first, change, combined):
    rows = torch.nested.nested_tensor([torch.ones(n) for n in LENGTHS], layout=LAYOUTS[layout])
    nested = TensorDict({"x": torch.full((3, 2), 7.0), "n": {"rows": rows}}, [3])
    plain = TensorDict({"x": torch.ones(3, 2), "n": {"rows": torch.full((3, 3), 2.0)}}, [3])
    td, other = (nested, plain) if nested_first else (plain, nested)
    if combined and nested_first and layout == "jagged":
        change(td, other)
        assert [part.tolist() for part in td["n", "rows"].unbind()] == [[combined] * n for n in LENGTHS]
        return
    before = [part.tolist() for leaf in td.values(True, True) for part in leaf.unbind()]
    with pytest.raises(RuntimeError, match="rows"):
        change(td, other)
    assert [part.tolist() for leaf in td.values(True, True) for part in leaf.unbind()] == before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_fill_nested_leaf_changes_nothing(layout):
    rows = torch.nested.nested_tensor([torch.ones(n) for n in LENGTHS], layout=LAYOUTS[layout])
    td = TensorDict({"x": torch.zeros(3, 2), "n": {"rows": rows}}, [3])
    with pytest.raises(NotImplementedError, match=r"masked_fill_ in place: key \('n', 'rows'\)"):
        td.masked_fill_(torch.tensor([True, False, True]), 5.0)
    assert not td["x"].any()


def test_mul_inplace_scales_each_component():
    td = make_data().mul_(torch.tensor([1, 10, 100]))
    assert list_components(td) == [[0, 1], [0, 10, 20], [0]]
    assert td["n", "at"].tolist() == [0, 10, 200]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_index_strided_components_keeps_selected_or_raises() -> None:
    td = TensorDict(
        {"rows": torch.nested.as_nested_tensor([*make_ragged().unbind()], layout=torch.strided)}, [3]
    )
    assert list_components(td[[2, 0]]) == [[0], [0, 1]]
    with pytest.raises(
        StructureError, match="key 'rows': a nested tensor of strided layout has at least one"
    ):
        td[:0]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_setitem_new_nested_tensor_raises(layout: torch.layout) -> None:
    leaf = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=layout)
    td = TensorDict({"n": {"at": torch.arange(2)}}, [2])
    with pytest.raises(
        StructureError, match=r"cannot make key \('n', 'j'\) at an index: it is a nested tensor"
    ):
        td[:] = {"n": {"at": torch.zeros(2), "j": leaf}}
    assert td["n", "at"].tolist() == [0, 1] and list(td["n"].keys()) == ["at"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor_from_jagged(
            torch.arange(6.0), torch.tensor([0, 3, 6]), lengths=torch.tensor([1, 2])
        ),
    ],
    ids=["strided", "jagged", "with lengths"],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda td: td[:], lambda td: td.reshape(2), lambda td: td[torch.arange(2)],
        lambda td: td.chunk(1)[0], lambda td: td.split(2)[0],
    ],
)  # fmt: skip
def test_noop_shape_op_on_nested_leaf_keeps_leaf(change, make):
    leaf = make()
    assert change(TensorDict({"n": leaf}, [2]))["n"] is leaf


def test_bytes_count_all_parts_of_jagged_leaves() -> None:
    values, offsets, lengths = torch.ones(10, 3), torch.tensor([0, 4, 10]), torch.tensor([2, 5])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    ragged = torch.nested.nested_tensor_from_jagged(values * 2, offsets)
    assert TensorDict({"a": holes}).bytes() == 120 + 24 + 16
    td = TensorDict({"a": holes, "b": ragged, "c": ragged})
    assert td.bytes() == (120 + 24 + 16) + 2 * (120 + 24)
    assert td.bytes(count_duplicates=False) == 120 + 120 + 24 + 16
    assert td.param_count(count_duplicates=False) == holes.numel() + ragged.numel()
    odd = {
        "s": torch.eye(3).to_sparse(),
        "n": torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided),
    }
    td = TensorDict({"again": odd, **odd})
    assert td.bytes(count_duplicates=False) * 2 == td.bytes()


#: Parts of a jagged tensor that do not belong together, by their fault: ragged dim, offsets, lengths, and the message.
WRONG_PARTS = {
    "end": (1, [0, 2, 9], None, r"lie outside of its 6 values: \[0, 2, 9\]"),
    "decreasing": (1, [0, 5, 2], None, "lie outside"),
    "negative": (1, [-1, 2, 6], None, "lie outside"),
    "far length": (1, [0, 2, 6], [2, 1 << 62], "lie outside"),
    "number of lengths": (1, [0, 2, 6], [2], "lie outside"),
    "no offsets": (1, [], None, "lie outside"),
    "floats": (1, [0.0, 2.0], None, "not a vector of integers"),
    "table": (1, [[0, 2]], None, "not a vector of integers"),
    "table of lengths": (1, [0, 6], [[6]], "not a vector of integers"),
    "dim 0": (0, [0, 6], None, "ragged dim of a jagged tensor is 0, of 3 dims"),
    "far dim": (3, [0, 6], None, "is 3, of 3 dims"),
}


@pytest.mark.parametrize(("dim", "offsets", "lengths", "message"), WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_check_parts_that_do_not_belong_together_raises(
    dim: int, offsets: list[int], lengths: list[int] | None, message: str
) -> None:
    rows = torch.tensor(offsets) if offsets else torch.zeros(0, dtype=torch.int64)
    counts = None if lengths is None else torch.tensor(lengths)
    with pytest.raises(ValueError, match=message):
        JaggedParts(dim, torch.zeros(6, 2), rows, counts).check()


def test_check_parts_returns_bounds_and_keeps_gaps() -> None:
    parts = JaggedParts(1, torch.arange(6.0), torch.tensor([0, 2, 6]), torch.tensor([1, 3])).check()
    assert parts.seqlens == (1, 3)
    assert [part.tolist() for part in parts.join().unbind()] == [[0.0], [2.0, 3.0, 4.0]]
    meta = JaggedParts(1, torch.zeros(6, device="meta"), torch.tensor([0, 99]))
    assert meta.check() is meta


@pytest.mark.parametrize(
    "value", [torch.ones(1), torch.ones(3), torch.ones(1, 1)], ids=["one", "more", "dims"]
)
def test_write_component_of_another_length_raises_and_changes_nothing(value: torch.Tensor) -> None:
    td = make_data()
    with pytest.raises(StructureError, match=r"'rows'.*it has shape \[2\] there"):
        td[0] = {"rows": value, "n": {"at": 9}}
    assert td["rows"].values().equal(make_ragged().values())
    assert td["n", "at"][0] == 0


def test_write_component_takes_its_length_and_numbers() -> None:
    td = make_data()
    td[0] = {"rows": torch.tensor([5.0, 6.0])}
    td[2] = {"rows": torch.tensor([7.0])}
    td[1] = {"rows": 4.0}
    assert td["rows"].values().tolist() == [5, 6, 4, 4, 4, 7]


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "prod", "std", "argmax", "nansum", "max", "median"])
@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_reduce_feature_dims_of_components_equals_torch(name: str, leaf) -> None:
    td = make_data(leaf)
    options = {"correction": 0} if name == "std" else {}
    result = getattr(td.select("rows"), name)("feature", **options)
    parts = [getattr(part.flatten(), name)(-1, **options) for part in leaf().unbind()]
    if name in ("max", "median"):
        assert result.indices["rows"].tolist() == [part.indices.item() for part in parts]
        result, parts = result.values, [part.values for part in parts]
    assert result["rows"].equal(torch.stack(parts))


def test_quantiles_of_feature_dims_of_components_equal_torch() -> None:
    levels = torch.tensor([0.1, 0.5])
    result = make_data().select("rows").quantile(levels, "feature")
    assert result["rows"].equal(torch.stack([part.quantile(levels) for part in make_ragged().unbind()], 1))
