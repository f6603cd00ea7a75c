"""to, with a device, a dtype or both, and pinned and shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core._functions.device_moves import get_device_to_sync, parse_target
from td_core._tree.walks import list_nested
from td_core.errors import LockedError


@pytest.fixture(params=["nested", "lazy", "nested lazy"])
def td(request: pytest.FixtureRequest, make_collection: Any) -> Any:
    return make_collection(request.param)


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


def test_share_memory_of_uneven_stack_shares_members() -> None:
    stack = TensorDict.lazy_stack(
        [TensorDict(a=torch.ones(2), b={"c": torch.ones(1)}), TensorDict(a=torch.ones(3))]
    )
    assert stack.share_memory_() is stack
    assert all(leaf.is_shared() for member in stack.unbind(0) for leaf in member.values(True, True))
    nested = TensorDict(n=TensorDict.lazy_stack([TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))]))
    assert nested.share_memory_().is_shared()
