"""Declaration of tensorclasses, by decorator and by inheritance."""

from __future__ import annotations

import dataclasses
import inspect
from copy import deepcopy
from dataclasses import FrozenInstanceError, InitVar, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Optional, Protocol, TypedDict, TypeVar, Union

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from td_core import TensorDict, TensorDictBase, TensorDictParams, decode, encode, lazy_stack, set_printoptions
from td_core._nodes import KINDS
from td_core.errors import BatchSizeError, FormatError, LockedError, StructureError
from td_tensorclass import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    UnbatchedTensor,
    UnknownFieldError,
    is_tensorclass,
    tensorclass,
)

V = TypeVar("V")


class Sized(Protocol):
    def __len__(self) -> int: ...


class Rows(TypedDict):
    a: int


def declare(
    fields: dict[str, Any], decorated: bool, body: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Define a tensorclass with these annotations, by decorator or by inheritance."""
    namespace = {"__annotations__": fields, "__module__": __name__, "__qualname__": "X", **(body or {})}
    if decorated:
        cls = type("X", (), namespace)
        return tensorclass(cls) if not options else tensorclass(**options)(cls)
    return type(TensorClass)("X", (TensorClass,), namespace, **options)


both = pytest.mark.parametrize("decorated", [True, False], ids=["decorator", "base class"])


@both
class TestConstruction:
    def test_init_by_position_and_keyword_sets_fields(self, decorated: bool) -> None:
        cls = declare({"x": Tensor, "y": Tensor, "s": str}, decorated, {"y": None, "s": "hi"})
        point = cls(torch.zeros(3, 2), batch_size=[3], device="cpu", names=["time"])
        assert point.x.shape == (3, 2)
        assert (point.y, point.s) == (None, "hi")
        assert point.batch_size == (3,)
        assert point.device == torch.device("cpu")
        assert point.names == ["time"]
        assert type(point).__name__ == "X"
        assert is_tensorclass(point)
        assert is_tensorclass(cls)

    def test_init_numbers_and_arrays_become_tensors(self, decorated: bool) -> None:
        cls = declare({"x": Any}, decorated)
        assert cls(1).x.equal(torch.tensor(1))
        assert cls([1, 2]).x.equal(torch.tensor([1, 2]))
        assert cls(np.zeros(3)).x.dtype == torch.float64
        assert cls("s").x == "s"
        assert cls({"a": 1}).x == {"a": 1}
        assert cls(["a", "b"]).x == ["a", "b"]
        assert cls((1, 2)).x == (1, 2)
        assert cls(None).x is None

    def test_init_number_with_batch_size_is_one_value(self, decorated: bool) -> None:
        cls = declare({"x": Tensor, "n": int}, decorated, {"n": 3})
        assert cls(torch.zeros(2)).n.equal(torch.tensor(3))
        point = cls(torch.zeros(2), batch_size=[2])
        assert point.n == point[0].n == 3
        point.n = 5
        assert point.n == 5
        with pytest.raises(BatchSizeError, match="a number has no dims"):
            declare({"x": Tensor}, decorated)(3, batch_size=[2])

    @pytest.mark.parametrize(
        ("args", "kwargs", "error", "message"),
        [
            ((), {}, TypeError, r"X\(\) misses the arguments \['x'\]"),
            ((1, 2, 3), {}, TypeError, r"X\(\) takes 2 positional arguments, \['x', 'y'\]; got 3"),
            ((1,), {"x": 2}, TypeError, r"X\(\) got \['x'\] both by position and by name"),
            ((1,), {"z": 2}, UnknownFieldError, "X has no field 'z': existing keys: "),
            ((torch.zeros(3),), {"batch_size": [4]}, BatchSizeError, r"key 'x' has shape \[3\]"),
        ],
    )
    def test_init_wrong_arguments_raise(
        self, decorated: bool, args: Any, kwargs: Any, error: type[Exception], message: str
    ) -> None:
        cls = declare({"x": Any, "y": Any}, decorated, {"y": None})
        with pytest.raises(error, match=message):
            cls(*args, **kwargs)

    def test_init_missing_fields_have_defaults(self, decorated: bool) -> None:
        body = {
            "x": field(default_factory=lambda: torch.ones(2)),
            "n": 3,
            "quiet": field(default="q", init=False),
            "shared": "constant",
        }
        fields = {"x": Tensor, "n": int, "quiet": str, "shared": ClassVar[str]}
        cls = declare(fields, decorated, body)
        first, second = cls(), cls()
        assert first.x is not second.x
        assert first.n.equal(torch.tensor(3))
        assert first.quiet == "q"
        assert first.shared == "constant"
        assert list(first.keys()) == ["x", "n", "quiet"]
        for more in ({}, {"x": torch.ones(2), "n": 3}):
            with pytest.raises(
                UnknownFieldError, match=r"^X\(\) takes no field 'quiet': declared with init=False$"
            ):
                cls(quiet="r", **more)
            with pytest.raises(UnknownFieldError, match="^X has no field 'quite': did you mean 'quiet'"):
                cls(quiet="r", quite="s", **more)

    def test_kw_only_positional_argument_raises(self, decorated: bool) -> None:
        cls = declare({"x": Tensor, "y": Tensor, "z": Tensor}, decorated, {"x": None}, kw_only=True)
        assert cls(y=torch.zeros(1), z=torch.ones(1)).z.item() == 1
        with pytest.raises(TypeError, match="takes 0 positional arguments"):
            cls(torch.zeros(1))

    def test_declare_field_without_default_after_default_raises(self, decorated: bool) -> None:
        with pytest.raises(TypeError, match="the field 'y' without a default follows 'x'"):
            declare({"x": Tensor, "y": Tensor}, decorated, {"x": None})

    def test_signature_and_doc_contain_fields(self, decorated: bool) -> None:
        cls = declare({"x": "Tensor", "s": "str"}, decorated, {"s": "hi"})
        assert list(inspect.signature(cls).parameters) == ["x", "s", "batch_size", "device", "names", "lock"]
        assert cls.__doc__.startswith("X(x: 'Tensor', s: 'str' = 'hi', *, batch_size=None")

    def test_init_lock_is_locked(self, decorated: bool) -> None:
        point = declare({"x": Tensor}, decorated)(torch.zeros(1), lock=True)
        with pytest.raises(LockedError, match="cannot set key 'x'"):
            point.x = torch.ones(1)


@both
class TestPostInit:
    def test_post_init_runs_for_instances_and_results(self, decorated: bool) -> None:
        seen: list[Any] = []
        cls = declare(
            {"x": Tensor}, decorated, {"__post_init__": lambda self: seen.append(tuple(self.x.shape))}
        )
        point = cls(torch.zeros(3), batch_size=[3])
        assert seen == [(3,)]
        _ = point[:2]
        assert seen == [(3,), (2,)]
        cls.from_tensordict(TensorDict({"x": torch.zeros(1)}))
        assert seen == [(3,), (2,), (1,)]

    def test_post_init_skip_on_rebuild_runs_only_on_init(self, decorated: bool) -> None:
        seen: list[Any] = []
        body = {"__post_init__": lambda self: seen.append(1)}
        cls = declare({"x": Tensor}, decorated, body, skip_post_init_on_rebuild=True)
        _ = cls(torch.zeros(3), batch_size=[3])[0] + 1
        assert seen == [1]

    def test_post_init_receives_init_vars_and_sets_fields(self, decorated: bool) -> None:
        def post_init(self: Any, scale: float) -> None:
            self.y = self.x * scale

        body = {"y": None, "__post_init__": post_init, "scale": 2.0}
        cls = declare({"x": Tensor, "y": Tensor, "scale": InitVar[float]}, decorated, body)
        assert cls(torch.ones(1)).y.item() == 2
        assert cls(torch.ones(1), scale=3.0).y.item() == 3
        assert list(cls(torch.ones(1)).keys()) == ["x", "y"]

    def test_replace_runs_post_init_on_new_values(self, decorated: bool) -> None:
        seen: list[Any] = []

        def post_init(self: Any) -> None:
            seen.append(self.x.tolist())
            self.x = self.x.clamp(0, 1)

        point = declare({"x": Tensor}, decorated, {"__post_init__": post_init})(torch.ones(1), batch_size=[1])
        assert point.replace(x=torch.tensor([5.0])).x.tolist() == [1]
        assert point.replace({"x": torch.tensor([-5.0])}).x.tolist() == [0]
        assert seen == [[1], [5], [-5]]
        assert point.x.tolist() == [1]
        assert point.replace() is point

    def test_post_init_of_lazy_stack_runs_per_member(self, decorated: bool) -> None:
        seen: list[Any] = []
        cls = declare(
            {"x": Tensor}, decorated, {"__post_init__": lambda self: seen.append(tuple(self.x.shape))}
        )
        stack = lazy_stack([cls(torch.zeros(2)), cls(torch.zeros(3))])
        # Stacking and reading members create no instances, so __post_init__ does not run again.
        assert [member.x.shape for member in stack.tensordicts] == [(2,), (3,)]
        assert seen == [(2,), (3,)]
        assert (stack + 1)[1].x.tolist() == [1, 1, 1]
        assert seen == [(2,), (3,)] * 2 + [(3,)]
        seen.clear()
        nested = lazy_stack([stack, stack]).apply(lambda x: x + 1)
        assert nested.batch_size == (2, 2)
        assert seen == [(2,), (3,)] * 2
        seen.clear()
        cls.from_tensordict(lazy_stack([TensorDict(x=torch.zeros(n)) for n in (2, 3)]))
        assert seen == [(2,), (3,)]
        seen.clear()
        even = lazy_stack([cls(torch.zeros(2)), cls(torch.zeros(2))])
        assert torch.stack([*even]).x.shape == even.contiguous().x.shape == (2, 2)
        assert seen == [(2,)] * 4 + [(2, 2)] * 2

    def test_post_init_of_lazy_stack_runs_once_per_member(self, decorated: bool) -> None:
        cls = declare(
            {"x": Tensor}, decorated, {"__post_init__": lambda self: setattr(self, "x", self.x + 1)}
        )
        stack = lazy_stack([cls(torch.zeros(2)), cls(torch.zeros(3))])
        for _ in range(2):
            assert [member.x.tolist() for member in stack.tensordicts] == [[1, 1], [1, 1, 1]]
        assert [member.x.tolist() for member in (stack * 2).tensordicts] == [[3, 3], [3, 3, 3]]

    def test_post_init_of_empty_result_is_not_run(self, decorated: bool) -> None:
        seen: list[Any] = []

        def post_init(self: Any) -> None:
            seen.append(None if self.x is None else tuple(self.x.shape))

        cls = declare({"x": Tensor}, decorated, {"__post_init__": post_init})
        point = cls(torch.zeros(3), batch_size=[3])
        for empty in (
            point.empty(),
            point.exclude("x"),
            point.empty()[:2],
            lazy_stack([point, point]).empty(),
        ):
            assert type(empty) is cls
            assert empty.x is None
        assert seen == [(3,)]
        # Constructing an instance without entries is not an operation on one.
        cls.from_tensordict(TensorDict())
        assert seen == [(3,), None]

    def test_lazy_stack_of_frozen_class_is_locked(self, decorated: bool) -> None:
        cls = declare({"x": Tensor}, decorated, {"__post_init__": lambda self: None}, frozen=True)
        stack = lazy_stack([cls(torch.zeros(2)), cls(torch.zeros(3))])
        for each in (stack, stack.clone(), stack.empty(), *stack.tensordicts, *(stack + 1).tensordicts):
            assert each.is_locked

    def test_setattr_unknown_name_raises(self, decorated: bool) -> None:
        cls = declare({"x": Tensor}, decorated, {"__post_init__": lambda self: setattr(self, "xx", 1)})
        with pytest.raises(UnknownFieldError, match="X has no field 'xx': did you mean 'x'"):
            cls(torch.zeros(1))


@both
class TestAttributes:
    def test_set_field_checks_shape(self, decorated: bool) -> None:
        point = declare({"x": Tensor, "y": Any}, decorated, {"y": None})(torch.zeros(3), batch_size=[3])
        point.x = torch.ones(3, 5)
        assert point.x.shape == (3, 5)
        with pytest.raises(BatchSizeError, match=r"key 'x' has shape \[4\]"):
            point.x = torch.zeros(4)
        point.y = "text"
        assert point.y == "text"
        point.y = None
        assert point.y is None
        assert list(point.keys()) == ["x"]
        del point.x
        assert point.x is None

    @pytest.mark.parametrize("write", ["attribute", "item", "set", "update", "nested"])
    def test_set_unknown_field_raises(self, decorated: bool, write: str) -> None:
        inner = declare({"xy": Tensor}, decorated)
        point = declare({"inner": inner}, decorated)(inner(torch.zeros(3), batch_size=[3]), batch_size=[3])
        steps = {
            "attribute": lambda: setattr(point.inner, "yx", 1),
            "item": lambda: point.inner.__setitem__("yx", torch.zeros(3)),
            "set": lambda: point.inner.set("yx", torch.zeros(3)),
            "update": lambda: point.inner.update({"yx": torch.zeros(3)}),
            "nested": lambda: point.set(("inner", "yx"), torch.zeros(3)),
        }
        with pytest.raises(UnknownFieldError, match="has no field 'yx'"):
            steps[write]()
        assert list(point.inner.keys()) == ["xy"]

    def test_setitem_index_unknown_field_raises(self, decorated: bool) -> None:
        cls = declare({"x": Tensor, "s": str}, decorated)
        other = declare({"x": Tensor, "w": Tensor}, decorated)
        point = cls(torch.zeros(2), s="a", batch_size=[2])
        for value in (other(torch.ones(()), torch.ones(())), TensorDict({"w": 1}), {"x": 1, "w": 1}):
            with pytest.raises(UnknownFieldError, match="no field 'w'"):
                point[0] = value
        assert point.x.tolist() == [0, 0]
        point[0] = {"x": 1}
        point[1] = cls(torch.tensor(2.0), s="b")
        assert point.x.tolist() == [1, 2]
        assert point.s == ["a", "b"]

    def test_getattr_unknown_name_suggests_closest(self, decorated: bool) -> None:
        point = declare({"colour": Tensor}, decorated)(torch.zeros(1))
        with pytest.raises(AttributeError, match="X has no field 'color': did you mean 'colour'"):
            _ = point.color
        assert not hasattr(point, "color")

    def test_property_raising_attribute_error_keeps_message(self, decorated: bool) -> None:
        body = {"bad": property(lambda self: self.x.nothing)}
        point = declare({"x": Tensor}, decorated, body)(torch.zeros(1))
        with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'nothing'"):
            _ = point.bad

    def test_get_set_nested_key_works(self, decorated: bool) -> None:
        inner = declare({"x": Tensor, "s": str}, decorated, {"s": None})
        outer = declare({"p": inner}, decorated)(inner(torch.zeros(3), batch_size=[3]), batch_size=[3])
        outer.set(("p", "s"), "text")
        assert outer.p.s == outer.get(("p", "s")) == outer["p", "s"] == "text"
        assert outer.get(("p", "nothing"), 5) == 5
        assert outer.get("p") is outer.p


class TestMembers:
    def test_declare_methods_properties_and_super_work(self) -> None:
        @tensorclass
        class Base:
            x: Tensor

            def double(self) -> Tensor:
                return self.x * 2

            @property
            def half(self) -> Tensor:
                return self.x / 2

            @classmethod
            def ones(cls, n: int) -> Any:
                return cls(torch.ones(n), batch_size=[n])

            @staticmethod
            def unit() -> str:
                return "m"

        @tensorclass
        class Child(Base):
            y: Tensor = None

            def double(self) -> Tensor:
                return super().double() + 1

        child = Child.ones(2)
        assert type(child) is Child
        assert child.double().tolist() == [3, 3]
        assert child.half.tolist() == [0.5, 0.5]
        assert Child.unit() == "m"
        assert (child[0].x, child[0].y) == (torch.tensor(1), None)

    @pytest.mark.parametrize("hint", ["the image", "Missing", "torch.missing", "Tensor[", "3", 3, None])
    def test_declare_annotation_not_a_type_is_accepted(self, hint: Any) -> None:
        cls = declare({"x": hint, "y": hint}, True)
        point = cls(torch.zeros(2), "text", batch_size=[2])
        assert (point[0].x, point[0].y) == (torch.tensor(0.0), "text")

    def test_decorate_tensorclass_returns_same_class(self) -> None:
        @tensorclass
        class Base:
            x: Tensor

        class Plain(Base):
            y: Tensor = None

        assert tensorclass(Plain) is Plain
        frozen = tensorclass(frozen=True)(Plain)
        assert issubclass(frozen, Plain)
        for cls in (Plain, frozen):
            assert list(inspect.get_annotations(cls)) == ["y"]
        assert list(inspect.get_annotations(Base)) == ["x"]

    def test_user_init_setting_fields_works(self) -> None:
        @tensorclass
        class Point:
            x: Tensor
            s: str = "default"

            def __init__(self, n: int) -> None:
                self.x = torch.zeros(n)

        assert Point(3).x.tolist() == [0, 0, 0]
        assert Point(3).s is None
        assert Point(3).batch_size == ()
        assert (Point(2) + 1).x.tolist() == [1, 1]
        point = Point(2, batch_size=[2], names=["t"], lock=True)
        assert (point.batch_size, point.names, point.is_locked) == ((2,), ["t"], True)
        assert Point(2, device="meta").x.device.type == "meta"
        assert Point(2, batch_size=None).batch_size == ()
        with pytest.raises(BatchSizeError, match=r"key 'x' has shape \[2\]"):
            Point(2, batch_size=[3])
        with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
            Point(2, bogus=1)

    @pytest.mark.parametrize("how", ["named", "passed on", "left out"])
    def test_user_init_calling_super_works(self, how: str) -> None:
        class Base(TensorClass):
            x: Tensor
            y: Tensor

        class Named(Base):
            def __init__(self, x: Tensor, *, batch_size: Any = None, device: Any = None) -> None:
                super().__init__(x, x * 2, batch_size=batch_size, device=device)

        class PassedOn(Base):
            def __init__(self, x: Tensor, **kwargs: Any) -> None:
                super().__init__(x, x * 2, **kwargs)

        class LeftOut(Base):
            def __init__(self, x: Tensor) -> None:
                super().__init__(x, x * 2)

        cls = {"named": Named, "passed on": PassedOn, "left out": LeftOut}[how]
        point = cls(torch.ones(3), batch_size=[3], device="cpu")  # type: ignore[call-arg,misc]
        assert (point.batch_size, point.device, point[0].y) == ((3,), torch.device("cpu"), 2)
        assert cls(torch.ones(3)).batch_size == ()

    @pytest.mark.parametrize("how", ["decorated", "inherited", "decorated dataclass"])
    def test_declare_with_plain_base_ignores_its_init(self, how: str) -> None:
        class Plain:
            def __init__(self) -> None:
                raise AssertionError("is not called")

        class Inherited(Plain, TensorClass):
            x: Tensor

        @tensorclass
        class Decorated(Plain):
            x: Tensor

        @tensorclass
        @dataclass
        class Data(Plain):
            x: Tensor

        cls: Any = {"decorated": Decorated, "inherited": Inherited, "decorated dataclass": Data}[how]
        point = cls(torch.ones(3), batch_size=[3])
        assert (point.batch_size, (point + 1)[0].x) == ((3,), 2)
        assert "x" in inspect.signature(cls).parameters

    def test_subclass_inherits_user_init(self) -> None:
        class Plain:
            def __init__(self) -> None:
                raise AssertionError("is not called")

        class Base(TensorClass):
            x: Tensor

            def __init__(self, n: int) -> None:
                self.x = torch.zeros(n)

        class Child(Plain, Base):
            y: Tensor | None = None

        child: Any = Child(2, batch_size=[2])  # type: ignore[call-arg]
        assert (child.batch_size, child[0].x, child.y) == ((2,), 0, None)

    def test_subclass_redefines_fields(self) -> None:
        class Base(TensorClass, nocast=True):
            x: Any
            y: Any = "base"

        class Child(Base):
            y: Any
            z: Any = 3

        assert [f.name for f in Child.fields()] == ["x", "y", "z"]
        assert (Child(1).x, Child(1).y, Child(1).z) == (1, "base", 3)

    def test_generic_class_keeps_fields(self) -> None:
        class Base(TensorClass, Generic[V]):
            x: V

        @tensorclass
        class Decorated(Generic[V]):
            x: V

        assert Base[int](x=1).x.item() == 1
        assert Decorated[int](x=1).x.item() == 1

        class Child(Base[int]):
            y: int = 2

        assert Child(1).y.item() == 2

    def test_dataclasses_functions_work_on_tensorclass(self) -> None:
        class Point(TensorClass):
            x: Tensor
            s: str = "hi"

        point = Point(torch.zeros(3), batch_size=[3])
        assert [f.name for f in dataclasses.fields(point)] == ["x", "s"]
        assert dataclasses.is_dataclass(Point)
        assert dataclasses.asdict(point)["s"] == "hi"
        assert dataclasses.replace(point, s="b").s == "b"

    def test_decorate_dataclass_makes_tensorclass(self) -> None:
        @tensorclass
        @dataclass
        class Point:
            x: Tensor
            tags: list = field(default_factory=lambda: ["a"])

        point = Point(torch.zeros(2), batch_size=[])
        assert repr(point) == "Point(batch_size=[], fields={tags: NonTensorStack, x: f32[2]})"
        assert (point == point).x.all()

    def test_setattr_class_attribute_raises(self) -> None:
        class Point(TensorClass):
            x: Tensor
            q = 3

        point = Point(torch.zeros(1))
        assert point.q == 3
        with pytest.raises(UnknownFieldError, match="no field 'q'"):
            point.q = 4


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
    def test_autocast_value_has_declared_type(self, hint: Any, given: Any, wanted: Any) -> None:
        point = declare({"x": hint}, False, autocast=True)(given)
        assert point.x == wanted
        assert type(point.x) is type(wanted)
        point.x = given
        assert point.x == wanted
        if given is not None:
            assert type(point.update({"x": given}).x) is type(wanted)

    @pytest.mark.parametrize("options", [{}, {"nocast": True}, {"autocast": True}], ids=str)
    @pytest.mark.parametrize("hint", [str, list, Any, "list | None"])
    def test_autocast_linked_list_stays_one_value_per_element(self, hint: Any, options: Any) -> None:
        cls = declare({"x": hint}, False, **options)
        given = cls(NonTensorStack("a", "b"), batch_size=[2])
        points = cls(given.x, batch_size=[2])
        assert [point.x for point in points] == ["a", "b"]
        points.x = given[[1, 0]].x
        assert [point.x for point in points] == ["b", "a"]

    @pytest.mark.parametrize("hint", [Tensor, "Tensor", Optional[Tensor]])  # noqa: UP045
    def test_autocast_number_becomes_tensor(self, hint: Any) -> None:
        assert declare({"x": hint}, False, autocast=True)([1.0]).x.equal(torch.tensor([1.0]))
        with pytest.raises(TypeError, match="the field 'x' is declared as a tensor; got 'a'"):
            declare({"x": hint}, False, autocast=True)("a")

    @pytest.mark.parametrize("hint", [nn.Parameter, UnbatchedTensor, Optional[UnbatchedTensor]])  # noqa: UP045
    def test_autocast_tensor_has_declared_subclass(self, hint: Any) -> None:
        made = declare({"x": hint}, False, autocast=True)([1.0, 2.0]).get("x")
        assert type(made) is (nn.Parameter if hint is nn.Parameter else UnbatchedTensor)
        assert made.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("hint", [NonTensorData, MetaData])
    @pytest.mark.parametrize("given", [[1, 2], (1, 2), {"a": 1}, "s", 3, torch.ones(2)], ids=repr)
    def test_autocast_value_node_has_declared_class(self, hint: Any, given: Any) -> None:
        for wanted in (hint, hint | None):
            point = declare({"x": wanted}, False, autocast=True)(given, batch_size=[2])
            assert type(point._tensordict.get("x")) is hint
            assert point.x is given and point[0].x is given

    @pytest.mark.parametrize("hint", [NonTensorData, MetaData, NonTensorStack])
    def test_autocast_mapping_for_value_class_is_one_value(self, hint: Any) -> None:
        point = declare({"x": hint}, False)({"a": 1}, batch_size=[2])
        assert point.x == {"a": 1} and point[0].x == {"a": 1}

    @pytest.mark.parametrize(
        "hint",
        [Any, "Any", Any | None, object, V, int | list, Union[int, list], "undefined", Sized, Rows],  # noqa: UP007
    )
    @pytest.mark.parametrize("given", [[1, 2], (1, 2), {"a": 1}, "s", len, int])
    def test_autocast_any_keeps_value(self, hint: Any, given: Any) -> None:
        point = declare({"x": hint}, False, autocast=True)(given, batch_size=[3])
        assert point.x == given
        assert type(point.x) is type(given)
        assert point[0].x == given

    @pytest.mark.parametrize("hint", [Any, object, V])
    def test_autocast_any_number_becomes_tensor(self, hint: Any) -> None:
        cls = declare({"x": hint}, False, autocast=True)
        assert cls(np.arange(3)).x.equal(torch.arange(3))
        assert cls(torch.ones(3)).x.equal(torch.ones(3))
        assert cls(2).x.equal(torch.tensor(2))

    @pytest.mark.parametrize("given", [[1, 2], np.array([1, 2]), torch.tensor([1, 2])])
    def test_autocast_list_for_array_becomes_array(self, given: Any) -> None:
        point = declare({"x": np.ndarray}, False, autocast=True)(given)
        assert type(point.x) is np.ndarray
        assert point.x.tolist() == [1, 2]

    def test_autocast_collection_for_tensor_raises(self) -> None:
        with pytest.raises(TypeError, match="the field 'x' is declared as a tensor; got TensorDict"):
            declare({"x": Tensor}, False, autocast=True)(TensorDict({"a": 1}))

    def test_autocast_failure_names_field(self) -> None:
        with pytest.raises(ValueError, match="the field 'x' is declared as int; got 'z'"):
            declare({"x": int}, False, autocast=True)("z")

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
    def test_autocast_collection_with_other_keys_is_kept(self, optional: bool) -> None:
        class Inner(TensorClass):
            a: Tensor

        class Other(TensorClass):
            b: Tensor

        cls = declare({"inner": Inner | None if optional else Inner}, False, autocast=True)
        for given in (TensorDict(a=torch.zeros(3), b=torch.ones(3)), Other(torch.ones(3))):
            outer = cls(given)
            assert type(outer.inner) is type(given) and outer.inner["b"] is given["b"]

    def test_nocast_numbers_and_arrays_are_kept(self) -> None:
        cls = declare({"x": Any}, False, nocast=True)
        assert cls(1).x == 1
        assert isinstance(cls(np.zeros(2)).x, np.ndarray)
        assert cls(torch.zeros(2)).x.shape == (2,)
        assert cls(1).update({"x": 2}).x == 2
        assert cls(1).update({"x": {"a": 1}}).x == {"a": 1}

    def test_tensor_only_other_value_raises(self) -> None:
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
                TypeError, match="its fields are tensors and collections; 's' is annotated as"
            ):
                declare({"s": hint}, False, tensor_only=True)

    @pytest.mark.parametrize(
        "hint",
        [TensorDict, TensorDict | None, Tensor | TensorDict, TensorDictBase, "NotDefinedHere"],
        ids=str,
    )
    def test_tensor_only_collection_is_accepted(self, hint: Any) -> None:
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

    def test_declare_exclusive_options_raise(self) -> None:
        with pytest.raises(TypeError, match="the options 'autocast' and 'nocast' exclude each other"):
            declare({"x": Any}, True, autocast=True, nocast=True)

    def test_set_non_tensor_data_keeps_its_value(self) -> None:
        assert declare({"x": Tensor}, False)(NonTensorData([1, 2])).x == [1, 2]


class TestOptions:
    def test_bracket_options_take_effect(self) -> None:
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
    def test_declare_reserved_field_raises(self, name: str) -> None:
        with pytest.raises(AttributeError, match=f"the field {name!r} would hide"):
            declare({name: Tensor}, True)

    @pytest.mark.parametrize("name", ["batch_size", "device", "names", "lock", "_tensordict", "_schema"])
    def test_declare_reserved_field_with_shadow_raises(self, name: str) -> None:
        with pytest.raises(AttributeError, match=f"the field {name!r} would hide .* rename it$"):
            declare({name: Tensor}, True, shadow=True)

    def test_shadow_field_hides_collection_member(self) -> None:
        with pytest.raises(
            AttributeError, match="the field 'mean' would hide the 'mean' of a collection; rename it"
        ):
            declare({"mean": Tensor}, False)
        point = declare({"mean": Tensor}, False, shadow=True)(torch.zeros(3), batch_size=[3])
        assert (point + 1)[0].mean.item() == 1

    def test_declare_field_named_data_works(self) -> None:
        point = declare({"data": Tensor}, False)(torch.zeros(3), batch_size=[3])
        assert point.data.shape == (3,)
        assert (point + 1).data.tolist() == [1, 1, 1]
        with pytest.raises(TypeError, match=r"misses the arguments \['data'\]"):
            declare({"data": Tensor}, False)()

    def test_cast_filter_limits_dtype_changes(self) -> None:
        cls = declare({"x": Tensor, "y": Tensor}, False, cast_filter=lambda key, leaf: key != ("x",))
        point = cls(torch.zeros(2), torch.zeros(2))
        for result in (point.double(), point.to(torch.float64), point.type(torch.float64)):
            assert (result.x.dtype, result.y.dtype) == (torch.float32, torch.float64)


@both
def test_repr_omits_fields_with_repr_false(decorated: bool) -> None:
    fields = {"x": Tensor, "y": Any, "z": Any}
    cls = declare(fields, decorated, {"y": field(default=None, repr=False), "z": None})
    assert repr(cls(torch.zeros(3))) == "X(batch_size=[], fields={x: f32[3], z: None})"
    assert repr(cls(torch.zeros(3), y="s")) == "X(batch_size=[], fields={x: f32[3], z: None})"
    with set_printoptions(compact=False):
        assert "y=" not in repr(cls(torch.zeros(3), y=torch.zeros(3)))
    assert dataclasses.fields(cls)[1].repr is False


def test_from_tensordict_wraps_collection() -> None:
    class Point(TensorClass):
        x: Tensor
        y: Tensor = None
        s: str = "default"

    td = TensorDict({"x": torch.zeros(3)}, batch_size=[3])
    point = Point.from_tensordict(td)
    assert point.x is td["x"]
    assert point.s == "default" and point.y is None
    assert Point.from_tensordict(td, {"s": "z"}).s == "z"
    assert list(td.keys()) == ["x"]
    with pytest.raises(UnknownFieldError, match="Point has no field 'w'"):
        Point.from_tensordict(TensorDict({"w": 1}))
    assert type(point.to_tensordict()) is TensorDict


class Leg(TensorClass):
    x: Tensor

    def far(self) -> Tensor:
        return self.x.norm()


class Journey(TensorClass):
    first: Leg
    second: Leg | None = None
    other: TensorDict | None = None


def test_stack_classes_of_equal_fields_raises() -> None:
    class Step(TensorClass):
        x: Tensor

    for join in (torch.stack, torch.cat, TensorDict.lazy_stack):
        with pytest.raises(StructureError, match="cannot join a Leg and a Step"):
            join([Leg(torch.ones(2), batch_size=[2]), Step(torch.ones(2), batch_size=[2])])
    below = [TensorDict({"n": {"p": cls(torch.ones(2), batch_size=[2])}}, [2]) for cls in (Leg, Step)]
    for join in (torch.stack, torch.cat):
        with pytest.raises(
            StructureError, match=r"cannot join a Leg and a Step at key \('n', 'p'\): convert"
        ):
            join(below)


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_stack_class_and_tensordict_raises_in_both_orders(join: Any) -> None:
    class Slotted(TensorDict):
        pass

    leg, x = Leg(torch.ones(2), batch_size=[2]), torch.zeros(2)
    others = (TensorDict({"x": x}, [2]), Slotted({"x": x}, [2]), TensorDictParams(TensorDict({"x": x}, [2])))
    for other in others:
        for pair in ([leg, other], [other, leg]):
            with pytest.raises(StructureError, match="cannot join a .* and a .*: convert one of them"):
                join(pair)
            below = [TensorDict({"n": {"p": each}}, [2]) for each in pair]
            with pytest.raises(
                StructureError, match=r"cannot join a .* and a .* at key \('n', 'p'\): convert"
            ):
                join(below)
    stack = lazy_stack([TensorDict({"x": 0.0}), TensorDict({"x": 1.0})])
    with pytest.raises(StructureError, match="cannot join a TensorDict and a Leg"):
        join([stack, leg])


@pytest.mark.parametrize("locked", [False, True])
def test_from_tensordict_nested_nodes_get_annotated_class(locked: bool) -> None:
    journey = Journey(
        Leg(torch.ones(3, 2)), Leg(torch.zeros(3, 2)), TensorDict({"x": torch.ones(3)}, [3]), batch_size=[3]
    )
    td = journey.to_tensordict()
    if locked:
        td.lock_()
    found = Journey.from_tensordict(td)
    assert [type(each) for each in (found.first, found.second, found.other)] == [Leg, Leg, TensorDict]
    assert found.first.x is td["first", "x"] and found.first.far() == 6**0.5
    assert found.is_locked == found.first.is_locked == locked
    assert type(td["first"]) is TensorDict
    uneven = TensorDict.lazy_stack([TensorDict({"first": torch.ones(i + 1)}) for i in range(2)])
    assert Journey.from_tensordict(uneven, safe=False)[1].first.shape == (2,)
    unfit = TensorDict({"first": {"y": torch.ones(3)}}, [3])
    assert type(Journey.from_tensordict(unfit).first) is TensorDict
    unknown = TensorDict({"third": {"x": torch.ones(3)}}, [3])
    assert Journey.from_tensordict(unknown, safe=False).get(("third", "x")) is unknown["third", "x"]


def test_setitem_index_nested_keys_are_written() -> None:
    class Point(TensorClass):
        x: Tensor
        y: TensorDict

    point = Point(torch.zeros(2), TensorDict({"c": torch.zeros(2)}, [2]), batch_size=[2])
    point[0] = {("y", "c"): 1.0, ("x",): 2.0}
    assert point.y["c"].tolist() == [1, 0] and point.x.tolist() == [2, 0]
    with pytest.raises(UnknownFieldError, match="Point has no field .*'w', 'c'"):
        point[0] = {("w", "c"): 1.0}


def test_decorate_copies_methods_into_class_dict() -> None:
    class Named:
        def name(self) -> str:
            return "named"

    @tensorclass
    class Documented(Named):
        x: Tensor

        def name(self) -> str:
            """Return a name."""
            return "documented, " + super().name()

        @property
        def twice(self) -> Tensor:
            return self.x * 2

        @classmethod
        def zero(cls) -> Documented:
            return cls(torch.zeros(2))

    assert {"name", "twice", "zero"} <= vars(Documented).keys()
    found = Documented.zero()
    assert type(found) is Documented and found.name() == "documented, named"

    class Below(Documented):
        def name(self) -> str:
            return "below, " + super().name()

    assert Below.zero().name() == "below, documented, named"
    Documented.name = lambda self: "other"
    assert Below.zero().name() == "below, other"


class Labelled(TensorClass):
    x: Tensor
    label: str | None = None


def test_delattr_on_stack_clears_all_members_or_none() -> None:
    members = [Labelled(torch.zeros(2), "a"), Labelled(torch.zeros(2), "b")]
    stack = lazy_stack(members)
    members[1].lock_()
    with pytest.raises(LockedError, match="cannot remove key 'label'"):
        stack.label = None
    assert [member.label for member in members] == ["a", "b"]
    members[1].unlock_()
    stack.label = None
    assert [member.label for member in members] == [None, None]


class ByValue(TensorClass):
    x: Tensor
    label: str = "none"


def bare_class_of(cls: Any) -> Any:
    """Build the class without fields that cloudpickle creates first when it loads a class by value."""
    return type(cls)(
        cls.__name__, (TensorClass,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )


class TestAClassThatAPickleMakes:
    kept = ByValue(x=torch.ones(2), label="a", batch_size=[2])

    def test_unpickled_class_discarded_keeps_registered_class(self) -> None:
        bare_class_of(ByValue)
        assert type(decode(replace(encode(self.kept), classes={}))) is ByValue
        assert type(ByValue.from_dict(self.kept.to_dict(), batch_size=[2]).clone()) is ByValue

    def test_unpickled_class_is_registered_with_first_instance(self) -> None:
        made = bare_class_of(ByValue)
        for name, value in vars(ByValue).items():
            if name not in {"__dict__", "__weakref__"}:
                setattr(made, name, value)
        try:
            encoded = encode(self.kept)
            assert type(decode(encoded)) is ByValue  # the class in the pickle has priority over its name
            first = decode(replace(encoded, classes={0: made}))
            assert type(first) is made and first.label == "a"
            assert type(decode(replace(encoded, classes={}))) is made
        finally:
            KINDS.add(KINDS.of(ByValue), replace=True)

    def test_decode_prefers_encoded_class_over_its_name(self) -> None:
        class Local(TensorClass):
            x: Tensor

        node = Local(x=torch.ones(2), batch_size=[2])
        encoded = encode(TensorDict({"a": node}))
        # cloudpickle omits the function from the name, and another process has no such kind.
        for row in encoded.nodes:
            row["kind"] = row["kind"].replace("<locals>.Local", "gone")
        assert type(decode(encoded)["a"]) is Local
        with pytest.raises(FormatError, match="gone', which no installed package provides"):
            decode(replace(encoded, classes={}))

    def test_pickle_class_by_value_resolves_annotations(self) -> None:
        class Early(TensorClass):
            below: DefinedLater  # type: ignore[name-defined]  # noqa: F821

        try:
            globals()["DefinedLater"] = ByValue
            state = Early._schema.__reduce_ex__(4)[2]
        finally:
            del globals()["DefinedLater"]
        schema = type(Early._schema)(Early, Early._schema.options, {})
        assert schema.hint("below") is Any
        for name, value in state[1].items():
            setattr(schema, name, value)
        assert schema.hint("below") is ByValue

    def test_copy_redefined_classes_keeps_each_class(self) -> None:
        made = [dataclass_again() for _ in range(2)]
        td = TensorDict({str(i): cls(x=torch.ones(2), batch_size=[2]) for i, cls in enumerate(made)})
        for copied in (deepcopy(td), pickle_like(td), decode(encode(td))):
            assert [type(copied["0"]), type(copied["1"])] == made


def dataclass_again() -> Any:
    class Again(TensorClass):
        x: Tensor

    return Again


def pickle_like(td: Any) -> Any:
    rebuild, arguments = td.__reduce_ex__(4)[:2]
    return rebuild(*arguments)


def test_declared_fields_returns_names_and_types() -> None:
    class Pair(TensorClass):
        a: Tensor
        n: int = 0

    assert Pair.declared_fields() == {"a": Tensor, "n": int}
    assert Pair(torch.zeros(2)).declared_fields() == {"a": Tensor, "n": int}
    assert TensorDict.declared_fields() is None
