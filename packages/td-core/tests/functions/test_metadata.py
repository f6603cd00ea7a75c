"""Tests of shape, device, dim names, and properties of the leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.errors import DimNamesError, KeyPathError, StructureError


def list_batch_sizes(node: Any) -> dict[Any, list[int]]:
    levels = {
        (): node,
        **{key: value for key, value in node.items(True) if not isinstance(value, torch.Tensor)},
    }
    return {key: list(level.batch_size) for key, level in levels.items()}


class TestShape:
    def test_shape_size_and_dim_equal_batch_size(self, td: Any) -> None:
        assert td.shape == td.size() == td.batch_size == torch.Size([3])
        assert td.size(0) == td.size(-1) == td.numel() == len(td) == 3
        assert td.dim() == td.ndim == td.ndimension() == td.batch_dims == 1
        with pytest.raises(IndexError, match=r"expected to be in range of \[-1, 0\], but got 1"):
            td.size(1)
        with pytest.raises(TypeError, match=r"dim is an int( here)?; got 2.5"):
            td.unbind(2.5)

    def test_construct_names_string_names_one_dim(self) -> None:
        assert TensorDict(batch_size=[3], names="time").names == ["time"]

    @pytest.mark.parametrize(("size", "count"), [([], 1), ([0], 0), ([3, 4], 12)])
    def test_numel_equals_product_of_batch_size(self, size: list[int], count: int) -> None:
        assert TensorDict(batch_size=size).numel() == count


class TestLeaves:
    def test_bytes_param_count_and_depth_return_totals(self, td: Any) -> None:
        assert td.bytes() == 108
        assert td.param_count() == 21
        assert td.depth == 1

    def test_bytes_without_duplicates_counts_storage_once(self) -> None:
        x = torch.zeros(4)
        td = TensorDict({"a": x, "b": x, "c": {"d": x[:2]}})
        assert td.bytes() == 40
        assert td.bytes(count_duplicates=False) == 24
        assert td.param_count(count_duplicates=False) == 6

    def test_bytes_includes_gradients(self) -> None:
        x = torch.zeros(4, requires_grad=True)
        td = TensorDict({"a": x, "b": x, "computed": x * 2, "without": torch.zeros(4, requires_grad=True)})
        assert td.bytes() == 64
        td["computed"].sum().backward()
        assert (td.bytes(), td.bytes(count_duplicates=False)) == (96, 64)

    @pytest.mark.parametrize(
        ("source", "depth"),
        [({}, 0), ({"a": {"b": {}}}, 0), ({"a": {"b": {"c": 1}}}, 2), ({"a": {"b": {}}, "c": 1}, 0)],
    )
    def test_depth_counts_nodes_above_leaves(self, source: Any, depth: int) -> None:
        assert TensorDict(source).depth == depth

    def test_depth_uneven_members_returns_largest(self) -> None:
        uneven = LazyStackedTensorDict(TensorDict({"a": torch.zeros(2)}), TensorDict({"a": {"b": {"c": 1}}}))
        assert uneven.depth == 2 and TensorDict({"s": uneven}).depth == 3

    def test_dtype_is_common_dtype_or_none(self, td: Any) -> None:
        assert td.dtype is None
        assert td.select("b").dtype == torch.float32
        assert TensorDict().dtype is None
        assert not td.is_floating_point()
        assert td.select("b").is_floating_point()

    def test_is_contiguous_checks_every_leaf(self, make_dense: Any, make_lazy_stack: Any) -> None:
        assert make_dense().is_contiguous()
        assert not make_lazy_stack().is_contiguous()
        assert not TensorDict({"n": {"a": torch.zeros(2, 3).T}}).is_contiguous()
        # Below a plain node, other kinds count as they are.
        for fits, leaf in ((True, torch.zeros(2, 3)), (False, torch.zeros(3, 2).T)):
            assert TensorDictParams(TensorDict({"a": leaf})).is_contiguous() == fits
            assert (
                TensorDict({"b": 1, "n": TensorDictParams(TensorDict({"a": leaf}))}).is_contiguous() == fits
            )
        assert not TensorDict({"a": 1, "n": {"stack": make_lazy_stack()}}).is_contiguous()

    def test_is_shared_requires_every_leaf(self) -> None:
        td = TensorDict({"a": torch.zeros(3).share_memory_(), "n": {"b": torch.zeros(3)}})
        assert not td.is_shared()
        assert td.select("a").is_shared()

    def test_data_ptr_returns_address_per_leaf(self) -> None:
        td = TensorDict({"a": torch.zeros(4)[1:], "n": {"b": torch.zeros(3)}}, [3])
        addresses = td.data_ptr()
        assert addresses.batch_size == torch.Size([])
        assert addresses["n", "b"].item() == td["n", "b"].data_ptr()
        assert td.data_ptr(storage=True)["a"] == addresses["a"] - 4

    def test_entry_class_returns_type_of_entry(self, td: Any) -> None:
        assert td.entry_class(("b", "c")) is torch.Tensor
        assert td.entry_class("b") is type(td["b"])
        with pytest.raises(KeyPathError, match="key 'zz' not found in key 'b'"):
            td.entry_class(("b", "zz"))
        with pytest.raises(KeyPathError, match="not found"):
            td.entry_class(("a", "zz"))

    def test_get_item_shape_returns_shape_of_entry(self, td: Any) -> None:
        assert td.get_item_shape("a") == torch.Size([3, 2])
        assert td.get_item_shape("b") == torch.Size([3])
        assert td.get_item_shape(("b", "d")) == torch.Size([3, 4])
        with pytest.raises(KeyPathError, match="key 'zz' not found"):
            td.get_item_shape("zz")

    def test_get_item_shape_uneven_entry_uses_minus_one(self) -> None:
        stack = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(2, n)}) for n in (1, 2)])
        assert stack.get_item_shape("a") == torch.Size([2, 2, -1])

    def test_sorted_keys_returns_sorted_list(self) -> None:
        assert TensorDict({"b": 1, "a": {"z": 1}}).sorted_keys == ["a", "b"]


class TestNames:
    def named(self) -> TensorDict:
        return TensorDict(
            {"a": torch.zeros(2, 3), "b": {"c": torch.zeros(2, 3, 2)}}, [2, 3], names=["u", "v"]
        )

    def test_rename_returns_collection_with_new_names(self) -> None:
        td = self.named()
        assert td.rename("x", "y").names == ["x", "y"]
        assert td.rename(u="x")["b"].names == ["x", "v"]
        assert td.rename(None).names == [None, None]
        assert td.rename("x", None).names == ["x", None]
        assert td.rename(u="x")["a"] is td["a"]
        assert td.rename(..., "x").names == ["u", "x"] and td.rename("x", ...).names == ["x", "v"]
        assert td.rename(...).names == td.rename("u", ..., "v").names == ["u", "v"]
        with pytest.raises(DimNamesError):
            td.rename("x", ..., "y", "z")
        assert td.names == td["b"].names == ["u", "v"]

    def test_rename_inplace_changes_names_of_all_nodes(self) -> None:
        td = self.named()
        assert td.rename_(u="z") is td
        assert td.names == td["b"].names == ["z", "v"]

    @pytest.mark.parametrize(
        ("names", "mapping", "message"),
        [
            (("x",), {}, "got 1 names"),
            ((), {"zz": "x"}, r"no dim is named \['zz'\]; the names are \['u', 'v'\]"),
            (("x", "x"), {}, "must be unique"),
            ((), {}, "the new names or a map"),
            (("x", "y"), {"u": "z"}, "the new names or a map"),
            ((), {"u": "v"}, "must be unique"),
        ],
    )
    def test_rename_inplace_invalid_names_raises(
        self, names: tuple[str, ...], mapping: dict[str, str], message: str
    ) -> None:
        td = self.named()
        with pytest.raises(DimNamesError, match=message):
            td.rename_(*names, **mapping)
        assert td.names == ["u", "v"]

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            ((..., "q"), [None, None, "q"]),
            (("q", ...), ["q", None, None]),
            (("q", None, None), ["q", None, None]),
            (("q", ..., "r"), ["q", None, "r"]),
            ((...,), [None, None, None]),
        ],
    )
    def test_refine_names_sets_unnamed_dims(self, names: Any, expected: list[str | None]) -> None:
        td = TensorDict(batch_size=[2, 3, 4])
        assert td.refine_names(*names) is td
        assert td.names == expected

    def test_refine_names_conflicting_name_raises(self) -> None:
        with pytest.raises(DimNamesError, match="got 1 names"):
            TensorDict(batch_size=[2, 3]).refine_names("q")
        with pytest.raises(StructureError, match="the dim 'v' has its name"):
            self.named().refine_names(..., "q")

    @pytest.mark.parametrize(
        "value",
        [
            {"q": torch.zeros(2, 3)},
            TensorDict({"q": torch.zeros(2, 3)}, [2, 3]),
            TensorDict({"q": torch.zeros(2, 3, 4)}, [2, 3, 4], names=[None, "v", "w"]),
        ],
    )
    def test_set_node_inherits_names_of_parent(self, value: Any) -> None:
        for write in (
            lambda td: td.set("n", value),
            lambda td: td.set(("m", "n"), value),
            lambda td: td.update({"n": value}),
        ):
            td = self.named()
            write(td)
            node = td["m", "n"] if "m" in td else td["n"]
            assert node.names[:2] == ["u", "v"]
            assert node.names[2:] == ["w"] * (len(node.batch_size) - 2)
        assert isinstance(value, dict) or value.names[0] is None

    def test_set_node_with_conflicting_names_raises(self) -> None:
        td = self.named()
        with pytest.raises(
            StructureError, match=r"cannot set key 'n': its dim names \['s', 'v'\] contradict .* \['u', 'v'\]"
        ):
            td["n"] = TensorDict({"q": torch.zeros(2, 3)}, [2, 3], names=["s", "v"])
        assert "n" not in td


class TestDevice:
    def test_auto_device_sets_common_device(self) -> None:
        td = TensorDict({"a": torch.zeros(1), "n": {"b": torch.zeros(1)}})
        assert td.auto_device_().device == td["n"].device == torch.device("cpu")

    def test_auto_device_mixed_devices_sets_none(self) -> None:
        td = TensorDict({"a": torch.zeros(1), "n": {"b": torch.zeros(1, device="meta")}}).auto_device_()
        assert td.device is None
        assert td["n"].device == torch.device("meta")

    def test_clear_device_sets_none_in_all_nodes(self) -> None:
        td = TensorDict({"a": torch.zeros(1), "n": {"b": torch.zeros(1)}}, device="cpu").lock_()
        assert td.clear_device_().device is td["n"].device is None

    def test_is_cpu_and_is_meta_follow_device_label(self) -> None:
        assert TensorDict(device="cpu").is_cpu
        assert TensorDict(device="meta").is_meta
        assert not TensorDict().is_cpu
        assert not TensorDict(device="cpu").is_cuda


def test_metadata_methods_at_depth_two_thousand_succeed() -> None:
    td = TensorDict({"x": torch.zeros(2)})
    for _ in range(2000):
        td = TensorDict({"k": td})
    assert td.depth == 2000
    assert td.bytes() == 8
    assert td.auto_batch_size_().batch_size == torch.Size([2])
    assert td.auto_device_().clear_device_().rename("t").names == ["t"]


def test_get_item_shape_of_members_of_different_kinds_raises() -> None:
    stack = LazyStackedTensorDict(TensorDict({"a": torch.zeros(2)}), TensorDict({"a": {"b": 1}}))
    with pytest.raises(
        StructureError, match=r"^key 'a' has no shape: it is \[Tensor, TensorDict\] in the members"
    ):
        stack.get_item_shape("a")


def test_set_names_above_level_of_fewer_dims_keeps_its_dims():
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3])
    td["n"].batch_size = []
    td.names = ["x"]
    assert (td.names, td["n"].names, td["n"]._names) == (["x"], [], None)
