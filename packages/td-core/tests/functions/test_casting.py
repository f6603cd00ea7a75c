"""Copying, casting, moving, gradients and new collections of the same structure."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core._functions.device_moves import get_device_to_sync, parse_target
from td_core._functions.dtypes import CASTS
from td_core._methods.dtypes import DtypeMixin
from td_core._torch.dtypes import METHODS
from td_core._tree.walks import list_nested
from td_core.errors import KeyMismatchError, LockedError, StructureError


@pytest.fixture(params=["nested", "lazy", "nested lazy"])
def td(request: pytest.FixtureRequest, make_collection: Any) -> Any:
    return make_collection(request.param)


SHORTHANDS = [
    name
    for name, method in vars(DtypeMixin).items()
    if inspect.isfunction(method) and method.__closure__  # a factory built it
]
CASTABLE = [name for name in SHORTHANDS if "cast" not in METHODS[name].cannot]


def test_generated_cast_methods_equal_table() -> None:
    assert sorted(METHODS) == SHORTHANDS


@pytest.mark.parametrize("name", CASTABLE)
def test_cast_methods_equal_torch_to(name: str, td: TensorDict, assert_leaves_equal: Any) -> None:
    dtype = getattr(torch, name)
    expected = {key: leaf.to(dtype) for key, leaf in td.items(True, True)}
    assert_leaves_equal(getattr(td, name)(), expected)
    assert_leaves_equal(td.to(dtype), expected)
    assert_leaves_equal(td.type(dtype), expected)


@pytest.mark.filterwarnings("ignore:B?Complex")
def test_complex32_casts_leaves() -> None:
    assert TensorDict({"a": torch.zeros(1)}).complex32()["a"].dtype == torch.complex32


@pytest.mark.parametrize("name", [name for name in SHORTHANDS if name.startswith("q")])
def test_cast_quantized_dtype_raises(name: str) -> None:
    with pytest.raises(RuntimeError):
        getattr(TensorDict({"a": torch.zeros(1)}), name)()


@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_cast_table_methods_return_their_dtype(dtype: torch.dtype) -> None:
    assert CASTS[dtype](torch.ones(1, dtype=torch.int8)).dtype == dtype


def test_cast_same_dtype_keeps_leaves(make_nested: Any) -> None:
    td = make_nested()
    assert td.float()["a"] is td["a"]
    assert td.float() is not td


def test_cast_filter_receives_key_and_leaf(td: TensorDict) -> None:
    seen: set[object] = set()

    def only_a(key: tuple[str, ...], leaf: Tensor) -> bool:
        seen.add(key)
        assert isinstance(leaf, Tensor)
        return key == ("a",)

    result = td.double(cast_filter=only_a)
    assert seen == {key if isinstance(key, tuple) else (key,) for key in td.keys(True, True)}
    for key, leaf in result.items(True, True):
        assert leaf.dtype == (torch.float64 if key == "a" else torch.float32)
    assert td.type(torch.int8, cast_filter=only_a)["a"].dtype == torch.int8


@pytest.mark.parametrize("inplace", [False, True])
def test_to_cast_filter_casts_accepted_leaves(td: TensorDict, inplace: bool) -> None:
    seen: list[object] = []

    def accepts(key: object, leaf: Tensor) -> bool:
        seen.append(key)
        return key[-1] == "a" and "n" not in key

    names = {key for key in td.keys(True, True) if "a" in key}
    result = td.to("cpu", torch.float64, cast_filter=accepts, inplace=inplace)
    assert all(isinstance(key, tuple) for key in seen)
    assert {key for key, leaf in result.items(True, True) if leaf.dtype == torch.float64} == names
    assert (result is td, result.device.type) == (inplace, "cpu")
    assert td.to(torch.float16, cast_filter=None).dtype == torch.float16


def test_clone_locked_td_copies_leaves_and_is_unlocked(td: TensorDict, assert_leaves_equal: Any) -> None:
    result = td.lock_().clone()
    assert_leaves_equal(result, dict(td.items(True, True)))
    assert type(result) is type(td)
    assert not result.is_locked
    pointers = {leaf.data_ptr() for leaf in td._leaves()}
    assert all(leaf.data_ptr() not in pointers for leaf in result._leaves())


@pytest.mark.parametrize("call", [lambda td: td.clone(recurse=False), lambda td: td.copy()])
def test_clone_recurse_false_shares_leaves_but_not_nodes(call: object, td: TensorDict) -> None:
    result = call(td.lock_())
    assert not result.is_locked
    assert all(new is old for new, old in zip(result._leaves(), td._leaves(), strict=True))
    result["new"] = torch.zeros(2, 3)
    assert "new" not in td


def test_clone_memory_format_applies_to_leaves() -> None:
    td = TensorDict({"a": torch.zeros(2, 3, 4, 5)})
    result = td.clone(memory_format=torch.channels_last)
    assert result["a"].is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(TypeError, match="copies no leaf, so it takes no memory_format"):
        td.clone(recurse=False, memory_format=torch.channels_last)


def test_to_device_labels_every_node(td: TensorDict, assert_leaves_equal: Any) -> None:
    result = td.to("cpu")
    assert result is not td
    assert result.device == torch.device("cpu")
    assert td.device is None
    assert result.to("cpu") is result
    assert result.cpu() is result
    assert_leaves_equal(result, dict(td.items(True, True)))
    todo = [result]
    while todo:
        node = todo.pop()
        assert node.device == torch.device("cpu")
        todo.extend(list_nested(node))


def test_to_other_device_moves_leaves(make_nested: Any) -> None:
    result = make_nested().to("meta")
    assert result.device == torch.device("meta")
    assert result["n", "b"].device == torch.device("meta")
    assert result["n"].device == torch.device("meta")
    both = make_nested().to("meta", torch.float64)
    assert (both["a"].device, both["a"].dtype) == (torch.device("meta"), torch.float64)


def test_to_with_each_argument_form_gives_equal_results(make_nested: Any) -> None:
    td = make_nested()
    double = torch.zeros(1, dtype=torch.float64)
    forms = [
        td.to("cpu", torch.float64),
        td.to(torch.device("cpu"), torch.float64, True),
        td.to(torch.float64).to("cpu", non_blocking=True),
        td.to(device="cpu", dtype=torch.float64),
        td.to(double),
        td.to(other=double),
        td.to(TensorDict({"a": double}, device="cpu")),
        td.to(other=TensorDict({"a": double}, device="cpu")),
        td.to("cpu", torch.float64, non_blocking_pin=True, num_threads=2),
    ]
    for result in forms:
        assert (result.device, result["n", "b"].dtype) == (torch.device("cpu"), torch.float64)
        assert result.batch_size == td.batch_size
    assert td.to() is td
    assert td.to(None) is td
    assert td.to(TensorDict({"a": double, "b": torch.zeros(1)})) is td


def test_to_batch_size_keeps_batch_size_of_source(make_nested: Any) -> None:
    td = make_nested()
    assert td.to(batch_size=[2]).batch_size == (2,)
    assert td.to(torch.float64, batch_size=[2]).batch_size == (2,)
    assert td.batch_size == (2, 3)


def test_to_memory_format_converts_leaves_of_right_ndim() -> None:
    td = TensorDict({"a": torch.zeros(2, 3, 4, 5), "b": torch.zeros(2)}, [2])
    for result in (td.to(memory_format=torch.channels_last), td.to(torch.channels_last)):
        assert result["a"].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(result["b"], td["b"])


def test_to_inplace_replaces_leaves(td: TensorDict, assert_leaves_equal: Any) -> None:
    expected = {key: leaf.double() for key, leaf in td.items(True, True)}
    assert td.to("cpu", torch.float64, inplace=True) is td
    assert_leaves_equal(td, expected)
    assert td.device == torch.device("cpu")
    with pytest.raises(LockedError, match="cannot replace leaves"):
        td.lock_().to(torch.float32, inplace=True)
    assert_leaves_equal(td, expected)


def test_to_inplace_uneven_members_casts_all() -> None:
    stack = LazyStackedTensorDict(
        TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(3), "b": 1.0})
    )
    assert stack.to(torch.float64, inplace=True) is stack
    assert [[leaf.dtype for leaf in member.values()] for member in stack.tensordicts] == [
        [torch.float64],
        [torch.float64] * 2,
    ]


@pytest.mark.parametrize("stacked", [False, True])
def test_to_inplace_locked_node_replaces_nothing(stacked: bool) -> None:
    parts = [TensorDict({"a": torch.ones(2), "b": {"c": torch.zeros(2)}}, [2]) for _ in range(2)]
    td = TensorDict.lazy_stack(parts) if stacked else TensorDict({"n": parts[0], "x": torch.ones(2)}, [2])
    parts[0]["b"].lock_()
    leaves = list(td.values(True, True)) if not stacked else [part["a"] for part in parts]
    for call in (lambda: td.to(torch.float64, inplace=True), lambda: td.pin_memory(inplace=True)):
        with pytest.raises(LockedError, match="cannot replace leaves: the TensorDict is locked"):
            call()
    found = list(td.values(True, True)) if not stacked else [part["a"] for part in parts]
    assert all(one is other for one, other in zip(leaves, found, strict=True))


@pytest.mark.parametrize(
    "arguments", [(3.5,), ("cpu", "cpu"), (torch.int8, torch.int8), ("cpu", True, True)], ids=str
)
def test_to_bad_argument_raises(arguments: tuple[object, ...], make_nested: Any) -> None:
    with pytest.raises(
        TypeError, match=r"to\(\) takes a device, a dtype, both, or another tensor or collection"
    ):
        make_nested().to(*arguments)


def test_to_unknown_device_raises(make_nested: Any) -> None:
    with pytest.raises(RuntimeError, match="nosuch"):
        make_nested().to("nosuch")


def test_parse_target_reads_other_and_dtype() -> None:
    target = parse_target((torch.zeros(1, device="meta"),), None, torch.int8, None, None, None)
    assert target[:3] == (torch.device("meta"), torch.int8, None)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("cpu", "cpu", None),
        ("cuda:0", "cpu", "cuda:0"),
        ("cpu", "cuda:1", "cuda:1"),
        ("cuda:0", "cuda:1", None),
        ("cpu", "meta", None),
    ],
)
def test_get_device_to_sync_returns_cuda_device_or_none(
    source: str, target: str, expected: str | None
) -> None:
    found = get_device_to_sync(torch.device(source), torch.device(target))
    assert found == (None if expected is None else torch.device(expected))


def test_detach_and_data_share_memory_with_source(td: TensorDict) -> None:
    td.requires_grad_()
    for result in (td.detach(), td.data):
        assert not result.requires_grad
        assert [leaf.data_ptr() for leaf in result._leaves()] == [leaf.data_ptr() for leaf in td._leaves()]
    assert td.requires_grad
    assert td.detach_() is td
    assert not td.requires_grad


def test_requires_grad_sets_all_leaves(td: TensorDict) -> None:
    assert td.requires_grad is False
    assert td.requires_grad_() is td
    assert all(leaf.requires_grad for leaf in td._leaves())
    td.requires_grad = False
    assert td.requires_grad is False


def test_requires_grad_integer_leaf_changes_nothing() -> None:
    td = TensorDict({"a": torch.zeros(1), "n": {"b": torch.zeros(1, dtype=torch.int64)}})
    with pytest.raises(
        RuntimeError, match=r"cannot require gradients: key \('n', 'b'\) has dtype torch.int64"
    ):
        td.requires_grad_()
    assert not td.requires_grad


def test_requires_grad_impossible_leaf_changes_nothing() -> None:
    with torch.inference_mode():
        sealed = torch.zeros(1)
    td = TensorDict({"a": torch.zeros(1), "b": sealed})
    with pytest.raises(
        RuntimeError, match="cannot require gradients: key 'b' was made under torch.inference_mode"
    ):
        td.requires_grad_()
    assert not td.requires_grad
    first = torch.zeros(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot stop to record gradients: key 'b' was computed from"):
        TensorDict({"a": first, "b": first * 2}).requires_grad_(False)
    assert first.requires_grad


def test_grad_equals_torch_and_zero_grad_removes_it(td: TensorDict, assert_leaves_equal: Any) -> None:
    td.requires_grad_()
    assert td.grad is None
    (td * td).sum(reduce=True).backward()
    assert_leaves_equal(td.grad, {key: 2 * leaf.detach() for key, leaf in td.items(True, True)})
    assert td.zero_grad(set_to_none=False) is td
    assert (td.grad == 0).all()
    td.zero_grad()
    assert td.grad is None


def test_grad_contains_only_leaves_with_gradient(assert_leaves_equal: Any) -> None:
    td = TensorDict({"a": torch.ones(2, requires_grad=True), "n": {"b": torch.ones(2, requires_grad=True)}})
    td["n", "b"].sum().backward()
    assert_leaves_equal(td.grad, {("n", "b"): torch.ones(2)})
    td["a"].grad = torch.ones_like(td["a"])
    td["empty"] = {}
    assert list(td.grad.keys(True)) == [
        "a",
        "n",
        ("n", "b"),
    ]  # a collection without leaves has no gradient


def test_set_grad_copies_into_existing_gradients(td: TensorDict, assert_leaves_equal: Any) -> None:
    td.requires_grad_()
    first, second = td.detach() * 2, td.detach() * 3
    td.grad = first
    assert_leaves_equal(td.grad, dict(first.items(True, True)))
    kept = [leaf.grad for leaf in td._leaves()]
    td.grad = second
    assert_leaves_equal(td.grad, dict(second.items(True, True)))
    assert all(leaf.grad is one for leaf, one in zip(td._leaves(), kept, strict=True))
    td.grad = None
    assert td.grad is None


def test_set_data_shares_memory_of_value(td: TensorDict, assert_leaves_equal: Any) -> None:
    td.requires_grad_()
    other = td.detach() * 2
    td.data = other
    assert_leaves_equal(td.detach(), dict(other.items(True, True)))
    assert td.requires_grad
    other.zero_()
    assert not td.any()


@pytest.mark.parametrize("name", ["data", "grad"])
def test_set_data_or_grad_mismatch_changes_nothing(name: str) -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(3)}})
    for other, error, message in [
        (
            TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(4)}}),
            StructureError,
            r"'b'\) has shape \[3\].*\[4\]",
        ),
        (TensorDict({"a": torch.zeros(2), "n": {"c": torch.zeros(3)}}), KeyError, "'c'"),
        ({"a": torch.zeros(2)}, TypeError, f"{name} is a collection of the same structure; got dict"),
    ]:
        with pytest.raises(error, match=message):
            setattr(td, name, other)
        assert td.all() and td.grad is None
    setattr(td, name, TensorDict({"n": {"b": torch.zeros(3)}}))
    assert td["a"].all() and td["a"].grad is None
    assert not getattr(td, name)["n", "b"].any()


def test_backward_equals_torch() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    td = TensorDict({"a": x * 2, "n": {"b": x * x, "c": torch.ones(2)}}, [2])
    gradient = TensorDict({"n": {"c": torch.ones(2), "b": torch.ones(2)}, "a": torch.full((2,), 10.0)}, [2])
    td.backward(gradient, retain_graph=True)
    torch.testing.assert_close(x.grad, 20 + 2 * x.detach())
    y = torch.ones((), requires_grad=True)
    losses = TensorDict({"a": y * x.sum(), "b": y})
    losses.backward(inputs=TensorDict({"y": y}))
    assert y.grad == 4
    torch.testing.assert_close(x.grad, 20 + 2 * x.detach())


@pytest.mark.parametrize("stacked", [False, True])
def test_backward_gradient_for_tracked_leaves_is_enough(stacked: bool) -> None:
    x = torch.ones(3, requires_grad=True)

    def make(rows: int) -> TensorDict:
        return TensorDict(
            {"a": x[:rows] * 2, "b": torch.ones(rows), "n": {"c": x[:rows] * 3, "d": torch.ones(2)}}
        )

    tracked = {rows: TensorDict({"n": {"c": torch.ones(rows)}, "a": torch.ones(rows)}) for rows in (2, 3)}
    td = lazy_stack([make(2), make(3)]) if stacked else make(3)
    gradient = lazy_stack([tracked[2], tracked[3]]) if stacked else tracked[3]
    td.backward(gradient)
    assert x.grad is not None and x.grad.tolist() == ([10.0, 10.0, 5.0] if stacked else [5.0] * 3)


def test_backward_incomplete_gradient_raises() -> None:
    x = torch.ones(3, requires_grad=True)
    td = TensorDict({"a": x * 2, "n": {"b": x * 3}})
    with pytest.raises(TypeError, match=r"^backward: gradient is a collection; got Tensor$"):
        td.backward(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(KeyMismatchError, match=r"missing keys \['n'\]"):
        td.backward(TensorDict({"a": torch.ones(3)}))
    assert x.grad is None


def test_backward_bad_gradient_raises() -> None:
    td = TensorDict({"n": {"a": torch.ones(2, requires_grad=True)}})
    with pytest.raises(RuntimeError, match=r"backward: key \('n', 'a'\) has shape \[2\].*give gradient="):
        td.backward()
    with pytest.raises(RuntimeError, match="backward: no leaf of this TensorDict requires gradients"):
        td.detach().backward()
    with pytest.raises(StructureError, match="missing keys"):
        td.backward(TensorDict({"n": {}}))


class Marked(Tensor):
    pass


def test_as_tensor_converts_subclass_leaves() -> None:
    marked = torch.zeros(2).as_subclass(Marked)
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    td = TensorDict({"a": marked, "p": nn.Parameter(torch.zeros(2)), "j": jagged})
    result = td.as_tensor()
    assert type(result["a"]) is Tensor
    assert result["a"].data_ptr() == marked.data_ptr()
    assert result["p"] is td["p"]
    assert result["j"] is td["j"]


def test_share_memory_shares_and_locks(td: TensorDict) -> None:
    assert not td.is_shared()
    assert td.share_memory_() is td
    assert td.is_shared()
    assert td.is_locked
    assert all(leaf.is_shared() for leaf in td._leaves())
    assert not TensorDict().is_shared()


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_pin_memory_without_accelerator_changes_nothing(td: TensorDict) -> None:
    before = td._leaves()
    for call in (td.pin_memory, td.pin_memory_, lambda: td.pin_memory(num_threads=2, inplace=True)):
        with pytest.raises(RuntimeError):
            call()
    assert all(new is old for new, old in zip(td._leaves(), before, strict=True))


NEW = {
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_empty": torch.empty,
}


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("size", [(4,), ((4, 5),), (4, 5), ([4],), ()], ids=str)
def test_new_methods_return_size_and_values(name: str, size: tuple[object, ...], td: TensorDict) -> None:
    batch = tuple(size[0]) if size and not isinstance(size[0], int) else size
    result = getattr(td, name)(*size)
    assert result.batch_size == batch
    assert list(result.keys(True, True)) == list(td.keys(True, True))
    for key, leaf in result.items(True, True):
        assert leaf.shape == (*batch, *td[key].shape[2:])
        assert leaf.dtype == td[key].dtype
        if name != "new_empty":
            assert torch.equal(leaf, NEW[name](leaf.shape))


def test_new_full_returns_fill_value(td: TensorDict, assert_leaves_equal: Any) -> None:
    assert_leaves_equal(
        td.new_full((2,), 7),
        {key: torch.full((2, *leaf.shape[2:]), 7.0) for key, leaf in td.items(True, True)},
    )
    assert_leaves_equal(
        td.new_full(2, 7, dtype=torch.int8),
        {key: leaf.to(torch.int8) for key, leaf in td.new_full((2,), 7).items(True, True)},
    )


def test_new_zeros_options_apply_to_leaves() -> None:
    td = TensorDict({"a": torch.zeros(2, 3)}, [2], names=["x"])
    result = td.new_zeros(4, dtype=torch.float64, device="meta", requires_grad=True)
    leaf = result["a"]
    assert (leaf.dtype, leaf.device, leaf.requires_grad) == (torch.float64, torch.device("meta"), True)
    assert result.device == torch.device("meta")
    assert result.names == ["x"]
    assert td.new_zeros(4).device is None
    assert td.to("cpu").new_zeros(4).device == torch.device("cpu")
    assert td.to("cpu").new_zeros(4, device=None).device is None


def test_new_zeros_empty_lazy_returns_lazy_stack(make_collection: Any) -> None:
    lazy = make_collection("lazy")
    result = lazy.new_zeros(4, 5, empty_lazy=True)
    assert type(result) is LazyStackedTensorDict
    assert result.batch_size == (4, 5)
    assert list(result.keys(include_nested=True)) == ["n", ("n", "m")]
    assert type(lazy.new_zeros(4, 5)) is TensorDict


def test_new_tensor_copies_data_to_every_leaf(td: TensorDict, assert_leaves_equal: Any) -> None:
    result = td.int().new_tensor([1.0, 2.0])
    assert result.batch_size == (2,)
    assert_leaves_equal(
        result, dict.fromkeys(dict(td.items(True, True)), torch.tensor([1, 2], dtype=torch.int32))
    )
    assert result.device == torch.device("cpu")
    copied = td.new_tensor(td.double())
    assert_leaves_equal(copied, dict(td.items(True, True)))
    assert copied._leaves()[0].data_ptr() != td._leaves()[0].data_ptr()
    other = td.new_tensor(torch.zeros(3), dtype=torch.float64, device="meta", requires_grad=True)
    assert all((leaf.dtype, leaf.requires_grad) == (torch.float64, True) for leaf in other._leaves())
    assert other.device == torch.device("meta")
    with pytest.raises(StructureError, match="missing keys"):
        td.new_tensor(TensorDict({"a": torch.zeros(2, 3)}, [2, 3]))


def test_casts_compile_fullgraph(make_nested: Any, assert_leaves_equal: Any) -> None:
    def program(td: TensorDict) -> TensorDict:
        return td.to(torch.float64).clone().detach().to("cpu").float().data.new_zeros(4)

    td = make_nested()
    assert_leaves_equal(
        torch.compile(program, fullgraph=True, backend="eager")(td), dict(program(td).items(True, True))
    )


def test_casts_under_vmap_equal_eager(make_nested: Any, assert_leaves_equal: Any) -> None:
    td = make_nested()
    assert_leaves_equal(
        torch.func.vmap(lambda td: td.double().clone())(td), dict(td.double().items(True, True))
    )
    assert_leaves_equal(
        torch.func.vmap(lambda td: td.new_tensor(td * 2))(td), dict((td * 2).items(True, True))
    )


def test_to_params_keeps_requires_grad(make_nested: Any) -> None:
    params = TensorDictParams(make_nested())
    assert all(leaf.requires_grad for leaf in params.to(torch.float64)._leaves())


@pytest.mark.parametrize(("structure", "device"), [("nested", None), ("nested", "cpu"), ("lazy", None)])
def test_to_context_writes_back_in_old_dtype(
    structure: str, device: str | None, make_collection: Any
) -> None:
    td = make_collection(structure)
    td = td if device is None else td.to(device)
    before = dict(td.clone().items(True, True))
    with td.to(torch.float64) as there:
        there["a"] = there["a"] + 1
        there["n", "b"] = there["n", "b"] + 1
        there["new"] = torch.ones(there.batch_size, dtype=torch.int8)
    assert td["new"].dtype == torch.int8
    td.del_("new")
    for key, leaf in td.items(True, True):
        assert leaf.dtype == before[key].dtype
        torch.testing.assert_close(leaf, before[key] + (key in ("a", ("n", "b"))))
    with td.to("cpu" if td.device else td.dtype) as same:
        same["a"] = same["a"] + 1
    torch.testing.assert_close(td["a"], before["a"] + 2)


def test_to_noop_keeps_outer_context(make_nested: Any) -> None:
    td = make_nested().to("cpu")
    with td.flatten_keys(".") as flat:
        flat.to("cpu")["new"] = torch.zeros(td.batch_size)
    assert "new" in td.keys()


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@CUDA
def test_to_cuda_and_back_copies_complete_data() -> None:
    for _ in range(20):
        td = TensorDict({str(i): torch.randn(512, 512) for i in range(8)}, [512]).pin_memory()
        there = td.to("cuda")
        expected = [leaf.clone() for leaf in td._leaves()]
        td.zero_()
        back = (there * 2).to("cpu")
        for leaf, value in zip(back._leaves(), expected, strict=True):
            assert torch.equal(leaf, value * 2)


@CUDA
def test_cuda_argument_forms_move_to_device(make_nested: Any, assert_leaves_equal: Any) -> None:
    td = make_nested()
    there = td.cuda()
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    assert there.cuda(0) is there
    assert td.cuda("cuda:0").device == torch.device("cuda:0")
    assert there.record_stream(torch.cuda.current_stream()) is there
    assert_leaves_equal(there.cpu(), dict(td.items(True, True)))


@CUDA
def test_pin_memory_pins_all_leaves(make_nested: Any) -> None:
    td = make_nested()
    assert all(leaf.is_pinned() for leaf in td.pin_memory(num_threads=2)._leaves())
    assert td.pin_memory_() is td
    assert all(leaf.is_pinned() for leaf in td._leaves())
    assert td.to("cuda", non_blocking_pin=True, num_threads=2).device.type == "cuda"
