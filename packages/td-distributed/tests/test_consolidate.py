"""consolidate() in memory: content, one storage for all leaves, options, and changes afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from consolidation_trees import DTYPES, TREES, assert_same, make_tied
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from td_core import TensorDict
from td_core.errors import LockedError, StructureError
from td_distributed import (
    _consolidate,
    _storage,
    from_buffer,
    from_consolidated,
    storage_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex")


def list_storages(collection: Any) -> set[int]:
    pieces = [_storage.pieces_of(leaf)[0] for leaf in collection._leaves()]
    return {piece.untyped_storage().data_ptr() for each in pieces for piece in each if piece.numel()}


@pytest.mark.parametrize("name", TREES)
def test_consolidate_in_memory_keeps_content(name: str) -> None:
    tree = TREES[name]()
    locked = tree.is_locked
    result = tree.consolidate()
    assert_same(result, tree)
    assert tree.is_locked == locked and not tree.is_consolidated()
    assert result.is_locked and result.is_consolidated()
    assert len(list_storages(result)) <= 1
    assert not list_storages(result) & list_storages(tree)


@pytest.mark.parametrize("name", TREES)
def test_from_buffer_of_storage_keeps_content(name: str) -> None:
    tree = TREES[name]()
    result = tree.consolidate(metadata=True)
    assert_same(result, tree)
    assert_same(from_buffer(storage_of(result)), tree)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_consolidate_fake_tensors_get_separate_spans() -> None:
    with FakeTensorMode():
        tree = TensorDict({key: torch.ones(3) for key in "abc"}).consolidate()
        assert len(storage_of(tree)) == 3 * 16
        assert tree["a"] is not tree["b"]


def test_consolidate_threads_inherit_inference_mode() -> None:
    with torch.inference_mode():
        assert (
            TensorDict({"a": torch.ones(3), "b": torch.ones(2)}).consolidate(num_threads=2)["a"].tolist()
            == [1] * 3
        )


def test_consolidate_jagged_shared_offsets_stay_shared() -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=torch.jagged)
    tree = TensorDict({"x": rows, "y": rows * 2}, [2]).consolidate()
    assert (tree["x"] + tree["y"]).values().tolist() == [3] * 6


def test_consolidate_orders_leaves_and_pads_to_8_bytes() -> None:
    tree = TensorDict({"a": torch.ones(3, dtype=torch.uint8), "n": {"b": torch.ones(1)}, "c": torch.ones(1)})
    data = storage_of(tree.consolidate())
    one = torch.ones(1).view(torch.uint8).tolist()
    assert data.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, *one, 0, 0, 0, 0, *one, 0, 0, 0, 0]


def test_fill_zeroes_gaps_between_large_leaves() -> None:
    leaves = [torch.full((size,), size % 7, dtype=torch.uint8) for size in (20_001, 20_002, 20_008, 20_003)]
    layout = _storage.plan_leaves(leaves)
    storage = torch.full((layout.nbytes + 24,), 255, dtype=torch.uint8)
    _storage.fill(storage, layout, _storage.Views(storage).pieces(layout), leaves)
    wanted = [torch.cat([leaf, torch.zeros(-len(leaf) % 8, dtype=torch.uint8)]) for leaf in leaves]
    assert torch.equal(storage, torch.cat([*wanted, torch.zeros(24, dtype=torch.uint8)]))


def test_consolidate_tied_leaves_stay_tied(tmp_path: Path) -> None:
    tree = make_tied()
    result = tree.consolidate(tmp_path / "td")
    assert len(storage_of(result)) == 32
    for one in (result, from_consolidated(tmp_path / "td")):
        one["a"].zero_()
        assert one["n", "b"].tolist() == [0, 0, 0, 0]
        assert one["c"].tolist() == [0, 1, 2, 3]


def test_write_leaf_inplace_changes_storage() -> None:
    result = TREES["flat"]().consolidate()
    result.set_("a", torch.tensor([5.0, 6.0]))
    result["b"].zero_()
    assert result.is_consolidated()
    assert storage_of(result).view(torch.int64)[:6].tolist() == [0] * 6
    assert storage_of(result)[48:].view(torch.float32).tolist() == [5, 6]


def test_is_consolidated_after_structural_change_is_false() -> None:
    result = TREES["flat"]().consolidate()
    with pytest.raises(LockedError, match="unlock_"):
        result["new"] = torch.ones(2)
    result.unlock_()
    assert not result.is_consolidated()
    result["new"] = torch.ones(2)
    again = result.consolidate()
    assert sorted(again.keys()) == ["a", "b", "new"]


def test_is_consolidated_of_derived_collection_is_false() -> None:
    result = TREES["flat"]().consolidate()
    assert not result[0].is_consolidated()
    assert not (result + 1).is_consolidated()
    assert not result.select("a").is_consolidated()


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_consolidate_num_threads_equals_single_thread(num_threads: int) -> None:
    tree = TREES["dtypes"]()
    assert_same(tree.consolidate(num_threads=num_threads), tree)


def test_consolidate_return_early_returns_future(tmp_path: Path) -> None:
    tree = TREES["flat"]()
    future = tree.consolidate(tmp_path / "td", return_early=True)
    assert_same(future.result(), tree)
    assert_same(from_consolidated(tmp_path / "td"), tree)


def test_consolidate_return_early_inplace_returns_self() -> None:
    tree = TREES["flat"]()
    assert tree.consolidate(return_early=True, inplace=True).result() is tree
    assert tree.is_consolidated()


def test_consolidate_again_with_options_makes_new_storage(tmp_path: Path) -> None:
    tree = TREES["flat"]().consolidate()
    assert tree.consolidate() is tree
    assert_same(from_buffer(storage_of(tree.consolidate(metadata=True))), tree)
    assert not tree.is_shared() and tree.consolidate(share_memory=True).is_shared()
    tree.consolidate(tmp_path / "td")
    assert_same(from_consolidated(tmp_path / "td"), tree)
    assert tree.consolidate(tmp_path / "shared", share_memory=True).is_shared()
    assert_same(from_consolidated(tmp_path / "shared"), tree)


def test_consolidate_return_early_ignores_later_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_consolidate, "run_in_background", lambda work, name: SimpleNamespace(result=work))
    tree = TREES["flat"]()
    future = tree.consolidate(return_early=True)
    tree["c"] = tree.pop("a")
    assert_same(future.result(), TREES["flat"]())
    consolidated = tree.consolidate()
    assert consolidated.consolidate(return_early=True).result() is consolidated


@pytest.mark.parametrize("skipped", [0, 1, 8, 16])
@pytest.mark.parametrize("memory", ["a tensor", "foreign"])
def test_from_buffer_aligned_returns_views(skipped: int, memory: str) -> None:
    buffer = storage_of(TREES["locked"]().consolidate(metadata=True))
    data = torch.cat([buffer[:skipped], buffer])
    part = data[skipped:]
    back = from_buffer(part if memory == "a tensor" else torch.from_numpy(part.numpy()))
    assert_same(back, TREES["locked"]())
    assert back.is_locked and back.is_consolidated() == (not skipped % 16)


def test_from_buffer_strided_returns_copies() -> None:
    buffer = storage_of(TREES["locked"]().consolidate(metadata=True))
    assert_same(from_buffer(buffer.repeat_interleave(2)[::2]), TREES["locked"]())


@pytest.mark.parametrize("name", [name for name in TREES if not name.startswith("locked")])
def test_consolidate_inplace_replaces_leaves(name: str) -> None:
    tree = TREES[name]()
    if tree.is_locked:
        pytest.skip("a frozen one stays as it is")
    before = list_storages(tree)
    assert tree.consolidate(inplace=True) is tree
    assert_same(tree, TREES[name]())
    assert len(list_storages(tree)) <= 1 and not list_storages(tree) & before
    assert tree.is_locked and tree.is_consolidated()
    assert tree.consolidate(inplace=True) is tree


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("locked")])
def test_consolidate_inplace_locked_raises(name: str, tmp_path: Path) -> None:
    tree = TREES[name]()
    before, locked = list_storages(tree), tree.is_locked
    with pytest.raises(LockedError, match="cannot consolidate it in place: the TensorDict is locked"):
        tree.consolidate(tmp_path / "td", inplace=True)
    assert list_storages(tree) == before
    assert tree.is_locked == locked and not (tmp_path / "td").exists()


def test_consolidate_share_memory_is_shared() -> None:
    result = TREES["flat"]().consolidate(share_memory=True)
    assert result.is_shared()
    assert_same(result, TREES["flat"]())


def test_consolidate_device_sets_device_label() -> None:
    result = TREES["flat"]().consolidate(device="cpu")
    assert result.device == torch.device("cpu")
    for option in ("share_memory", "pin_memory"):
        with pytest.raises(StructureError, match="need a storage on the CPU; it would be on meta"):
            TREES["flat"]().consolidate(device="meta", **{option: True})


def test_consolidate_result_does_not_require_grad() -> None:
    tree = TensorDict({"a": torch.ones(2, requires_grad=True)})
    assert not tree.consolidate()["a"].requires_grad


shapes = st.lists(st.integers(0, 4), max_size=3)


tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.sampled_from(DTYPES),
    shapes,
    st.integers(0, 9),
)


structures = st.recursive(
    tensors, lambda below: st.dictionaries(st.text(max_size=4), below, max_size=4), max_leaves=12
).filter(lambda tree: isinstance(tree, dict))


@given(structures, st.booleans())
def test_consolidate_random_tree_reads_back_equal(structure: dict[str, Any], locked: bool) -> None:
    tree = TensorDict(structure, lock=locked)
    result = tree.consolidate(metadata=True)
    assert_same(result, tree)
    back = from_buffer(storage_of(result))
    assert_same(back, tree)
    assert back.is_locked == locked


def test_pickle_consolidated_two_classes_of_one_name_keeps_each() -> None:
    one, other = (type("Twice", (TensorDict,), {"__module__": __name__}) for _ in range(2))
    td = TensorDict({"a": one({"x": torch.ones(2)}), "b": other({"x": torch.ones(2)})})
    consolidated = td.consolidate()
    rebuild, arguments = consolidated.__reduce_ex__(4)[:2]
    saved, given = consolidated.__reduce_ex__(2)[:2]
    for each in (consolidated, rebuild(*arguments), saved(*given), consolidated.to("meta")):
        assert [type(each["a"]), type(each["b"])] == [one, other]
