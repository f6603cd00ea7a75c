"""Options of tensorclasses: casts, frozen, shadow, tensor_only and cast_filter."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from types import MappingProxyType
from typing import Any, Optional, Protocol, TypedDict, TypeVar, Union

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from td_core import TensorDict, TensorDictBase
from td_core.errors import LockedError
from td_tensorclass import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    UnbatchedTensor,
    tensorclass,
)
from td_tensorclass._schema import Options

V = TypeVar("V")


class Sized(Protocol):
    def __len__(self) -> int: ...


class Rows(TypedDict):
    a: int


class TestCasts:
    @pytest.mark.parametrize(
        ("hint", "given", "wanted"),
        [
            (int, torch.tensor(3), 3),
            (int, "3", 3),
            (float, 3, 3.0),
            (str, 1, "1"),
            (bool, torch.ones(()), True),
            (list, (1, 2), [1, 2]),
            (tuple, [1, 2], (1, 2)),
            (dict, {"a": 1}, {"a": 1}),
            (Optional[int], "3", 3),  # noqa: UP045
            (Optional[int], None, None),  # noqa: UP045
            ("int", "3", 3),
            (torch.dtype, torch.float32, torch.float32),
        ],
    )
    def test_autocast_value_has_declared_type(self, declare: Any, hint: Any, given: Any, wanted: Any) -> None:
        point = declare({"x": hint}, False, autocast=True)(given)
        assert point.x == wanted
        assert type(point.x) is type(wanted)
        point.x = given
        assert point.x == wanted
        if given is not None:
            assert type(point.update({"x": given}).x) is type(wanted)

    @pytest.mark.parametrize("options", [{}, {"nocast": True}, {"autocast": True}], ids=str)
    @pytest.mark.parametrize("hint", [str, list, Any, "list | None"])
    def test_autocast_linked_list_keeps_value_per_element(
        self, declare: Any, hint: Any, options: Any
    ) -> None:
        cls = declare({"x": hint}, False, **options)
        given = cls(NonTensorStack("a", "b"), batch_size=[2])
        points = cls(given.x, batch_size=[2])
        assert [point.x for point in points] == ["a", "b"]
        points.x = given[[1, 0]].x
        assert [point.x for point in points] == ["b", "a"]

    @pytest.mark.parametrize("hint", [Tensor, "Tensor", Optional[Tensor]])  # noqa: UP045
    def test_autocast_number_becomes_tensor(self, declare: Any, hint: Any) -> None:
        assert declare({"x": hint}, False, autocast=True)([1.0]).x.equal(torch.tensor([1.0]))
        with pytest.raises(TypeError, match="the field 'x' is declared as a tensor; got 'a'"):
            declare({"x": hint}, False, autocast=True)("a")

    @pytest.mark.parametrize("hint", [nn.Parameter, UnbatchedTensor, Optional[UnbatchedTensor]])  # noqa: UP045
    def test_autocast_tensor_has_declared_subclass(self, declare: Any, hint: Any) -> None:
        made = declare({"x": hint}, False, autocast=True)([1.0, 2.0]).get("x")
        assert type(made) is (nn.Parameter if hint is nn.Parameter else UnbatchedTensor)
        assert made.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("hint", [NonTensorData, MetaData])
    @pytest.mark.parametrize("given", [[1, 2], (1, 2), {"a": 1}, "s", 3, torch.ones(2)], ids=repr)
    def test_autocast_wraps_value_in_declared_non_tensor_class(
        self, declare: Any, hint: Any, given: Any
    ) -> None:
        for wanted in (hint, hint | None):
            point = declare({"x": wanted}, False, autocast=True)(given, batch_size=[2])
            assert type(point._tensordict.get("x")) is hint
            assert point.x is given and point[0].x is given

    @pytest.mark.parametrize("hint", [NonTensorData, MetaData, NonTensorStack])
    def test_init_mapping_in_non_tensor_field_is_one_value(self, declare: Any, hint: Any) -> None:
        point = declare({"x": hint}, False)({"a": 1}, batch_size=[2])
        assert point.x == {"a": 1} and point[0].x == {"a": 1}

    @pytest.mark.parametrize(
        "hint",
        [Any, "Any", Any | None, object, V, int | list, Union[int, list], "undefined", Sized, Rows],  # noqa: UP007
    )
    @pytest.mark.parametrize("given", [[1, 2], (1, 2), {"a": 1}, "s", len, int])
    def test_autocast_annotation_any_keeps_value(self, declare: Any, hint: Any, given: Any) -> None:
        point = declare({"x": hint}, False, autocast=True)(given, batch_size=[3])
        assert point.x == given
        assert type(point.x) is type(given)
        assert point[0].x == given

    @pytest.mark.parametrize("hint", [Any, object, V])
    def test_autocast_annotation_any_converts_number(self, declare: Any, hint: Any) -> None:
        cls = declare({"x": hint}, False, autocast=True)
        assert cls(np.arange(3)).x.equal(torch.arange(3))
        assert cls(torch.ones(3)).x.equal(torch.ones(3))
        assert cls(2).x.equal(torch.tensor(2))

    @pytest.mark.parametrize("given", [[1, 2], np.array([1, 2]), torch.tensor([1, 2])])
    def test_autocast_list_for_array_becomes_array(self, declare: Any, given: Any) -> None:
        point = declare({"x": np.ndarray}, False, autocast=True)(given)
        assert type(point.x) is np.ndarray
        assert point.x.tolist() == [1, 2]

    def test_autocast_collection_for_tensor_raises(self, declare: Any) -> None:
        with pytest.raises(TypeError, match="the field 'x' is declared as a tensor; got TensorDict"):
            declare({"x": Tensor}, False, autocast=True)(TensorDict({"a": 1}))

    def test_autocast_failure_names_field(self, declare: Any) -> None:
        with pytest.raises(ValueError, match="the field 'x' is declared as int; got 'z'"):
            declare({"x": int}, False, autocast=True)("z")

    @pytest.mark.parametrize("below", [{}, {"y": 1.0}, {"y": 1.0, "other": None}])
    def test_autocast_mapping_may_leave_fields_out(self, declare: Any, below: Any) -> None:
        inner = declare({"y": Tensor, "other": Tensor}, False)
        point = declare({"x": inner}, False, autocast=True)(x=below)
        assert type(point.x) is inner
        assert point.x.other is None
        assert point.x.y is None if not below else point.x.y.equal(torch.tensor(1.0))

    def test_autocast_mapping_becomes_nested_collection(self) -> None:
        class Inner(TensorClass):
            a: Tensor

        class Outer(TensorClass, autocast=True):
            inner: Inner
            td: TensorDict

        outer = Outer(inner={"a": torch.zeros(3)}, td={"b": torch.ones(3)}, batch_size=[3])
        assert type(outer.inner) is Inner
        assert outer.inner.batch_size == (3,)
        assert type(outer.td) is TensorDict
        again = Outer(inner=TensorDict({"a": torch.zeros(3)}, [3]), td={}, batch_size=[3])
        assert type(again.inner) is Inner

    @pytest.mark.parametrize("optional", [False, True])
    def test_autocast_collection_with_other_keys_is_kept(self, declare: Any, optional: bool) -> None:
        class Inner(TensorClass):
            a: Tensor

        class Other(TensorClass):
            b: Tensor

        cls = declare({"inner": Inner | None if optional else Inner}, False, autocast=True)
        for given in (TensorDict(a=torch.zeros(3), b=torch.ones(3)), Other(torch.ones(3))):
            outer = cls(given)
            assert type(outer.inner) is type(given) and outer.inner["b"] is given["b"]

    def test_nocast_numbers_and_arrays_are_kept(self, declare: Any) -> None:
        cls = declare({"x": Any}, False, nocast=True)
        assert cls(1).x == 1
        assert isinstance(cls(np.zeros(2)).x, np.ndarray)
        assert cls(torch.zeros(2)).x.shape == (2,)
        assert cls(1).update({"x": 2}).x == 2
        assert cls(1).update({"x": {"a": 1}}).x == {"a": 1}

    @pytest.mark.parametrize("hint", [NonTensorData, NonTensorData | None, Tensor | NonTensorData])
    @pytest.mark.parametrize("given", ["first", 3, ["a", "b"], NonTensorData("first", batch_size=[2])])
    def test_tensor_only_declared_value_is_kept(self, declare: Any, hint: Any, given: Any) -> None:
        point = declare({"x": hint}, False, tensor_only=True)(given, batch_size=[2])
        assert point.x == (given.data if isinstance(given, NonTensorData) else given)

    def test_tensor_only_other_value_raises(self, declare: Any) -> None:
        cls = declare({"x": Tensor, "y": Optional[Tensor]}, False, {"y": None}, tensor_only=True)  # noqa: UP045
        assert cls([1, 2]).x.tolist() == [1, 2]
        assert cls(1).y is None
        with pytest.raises(TypeError, match="the field 'x' takes tensors only; got 'a'"):
            cls("a")
        point = cls(torch.zeros(1))
        with pytest.raises(TypeError, match="the field 'x' takes tensors only"):
            point.x = "a"
        for hint in (str, int, Any, dict, Tensor | str):
            with pytest.raises(
                TypeError, match="its fields are tensors, collections and NonTensorData; 's' is annotated as"
            ):
                declare({"s": hint}, False, tensor_only=True)

    @pytest.mark.parametrize(
        "hint",
        [TensorDict, TensorDict | None, Tensor | TensorDict, TensorDictBase, "NotDefinedHere"],
        ids=str,
    )
    def test_tensor_only_collection_is_accepted(self, declare: Any, hint: Any) -> None:
        cls = declare({"x": torch.LongTensor, "d": hint}, False, tensor_only=True)
        for given in (
            {"a": torch.ones(3)},
            MappingProxyType({"a": torch.ones(3)}),
            TensorDict(a=torch.ones(3)),
        ):
            made = cls(torch.arange(3), given, batch_size=[3])
            assert type(made.d) is TensorDict
            assert (made.d.batch_size, made[0].d["a"]) == ((3,), 1)
        with pytest.raises(TypeError, match="the field 'x' takes tensors only; got {}"):
            cls({}, {})
        with pytest.raises(TypeError, match="the field 'd' takes tensors only"):
            cls(torch.arange(3), NonTensorData("a"))

    def test_declare_exclusive_options_raise(self, declare: Any) -> None:
        with pytest.raises(TypeError, match="the options 'autocast' and 'nocast' exclude each other"):
            declare({"x": Any}, True, autocast=True, nocast=True)

    def test_init_non_tensor_data_in_tensor_field_keeps_value(self, declare: Any) -> None:
        assert declare({"x": Tensor}, False)(NonTensorData([1, 2])).x == [1, 2]


class TestOptions:
    def test_options_in_brackets_apply_to_subclass(self) -> None:
        class Point(TensorClass["frozen", "nocast"]):  # type: ignore[misc]
            x: Any

        assert Point(1).x == 1
        with pytest.raises(FrozenInstanceError):
            Point(1).x = 2
        assert TensorClass["frozen"] is TensorClass["frozen"]
        with pytest.raises(TypeError, match="has no option 'nope'; options: "):
            TensorClass["nope"]

    def test_subclass_inherits_options(self) -> None:
        class Base(TensorClass, autocast=True):
            x: int

        class Child(Base):
            y: int = 0

        assert Child("3").x == 3

    def test_frozen_instance_write_raises(self) -> None:
        class Point(TensorClass, frozen=True):
            x: Tensor
            y: Tensor = None

        point = Point(torch.zeros(3), batch_size=[3])
        for change in (
            lambda: setattr(point, "x", 1),
            lambda: setattr(point, "batch_size", []),
            lambda: delattr(point, "x"),
        ):
            with pytest.raises(FrozenInstanceError):
                change()
        with pytest.raises(LockedError):
            point.set("x", torch.ones(3))
        with pytest.raises(LockedError):
            point["y"] = torch.ones(3)
        assert point.zero_() is point
        result = point[:2] + 1
        assert result.is_locked
        assert result.x.tolist() == [1, 1]
        with pytest.raises(FrozenInstanceError, match="Point is frozen"):
            point.unlock_()

    @pytest.mark.parametrize(
        "name", ["batch_size", "device", "get", "shape", "names", "to", "grad", "keys", "_tensordict"]
    )
    def test_declare_reserved_field_raises(self, declare: Any, name: str) -> None:
        with pytest.raises(AttributeError, match=f"the field {name!r} would hide"):
            declare({name: Tensor}, True)

    @pytest.mark.parametrize("name", ["batch_size", "device", "names", "lock", "_tensordict", "_schema"])
    def test_declare_reserved_field_with_shadow_raises(self, declare: Any, name: str) -> None:
        with pytest.raises(AttributeError, match=f"the field {name!r} would hide .* rename it$"):
            declare({name: Tensor}, True, shadow=True)

    def test_shadow_field_hides_collection_member(self, declare: Any) -> None:
        with pytest.raises(
            AttributeError, match="the field 'mean' would hide the 'mean' of a collection; rename it"
        ):
            declare({"mean": Tensor}, False)
        point = declare({"mean": Tensor}, False, shadow=True)(torch.zeros(3), batch_size=[3])
        assert (point + 1)[0].mean.item() == 1

    def test_declare_field_named_data_is_allowed(self, declare: Any) -> None:
        point = declare({"data": Tensor}, False)(torch.zeros(3), batch_size=[3])
        assert point.data.shape == (3,)
        assert (point + 1).data.tolist() == [1, 1, 1]
        with pytest.raises(TypeError, match=r"misses the arguments \['data'\]"):
            declare({"data": Tensor}, False)()

    def test_cast_filter_limits_dtype_changes(self, declare: Any) -> None:
        cls = declare({"x": Tensor, "y": Tensor}, False, cast_filter=lambda key, leaf: key != ("x",))
        point = cls(torch.zeros(2), torch.zeros(2))
        for result in (point.double(), point.to(torch.float64), point.type(torch.float64)):
            assert (result.x.dtype, result.y.dtype) == (torch.float32, torch.float64)


def test_signature_of_decorator_shows_options() -> None:
    _, *shown = inspect.signature(tensorclass).parameters.values()
    assert [each.name for each in shown] == [field.name for field in fields(Options)]
    assert {each.kind for each in shown} == {inspect.Parameter.KEYWORD_ONLY}
