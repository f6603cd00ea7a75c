"""Fields of tensorclasses: constructors, attributes, inheritance and conversion from collections."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import TensorDict, TensorDictParams, lazy_stack, set_printoptions
from td_core.errors import BatchSizeError, LockedError, StructureError
from td_tensorclass import (
    TensorClass,
    UnknownFieldError,
    is_tensorclass,
    tensorclass,
)

V = TypeVar("V")


both = pytest.mark.parametrize("decorated", [True, False], ids=["decorator", "base class"])


@both
class TestConstruction:
    def test_init_by_position_and_keyword_sets_fields(self, declare: Any, decorated: bool) -> None:
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

    def test_init_numbers_and_arrays_become_tensors(self, declare: Any, decorated: bool) -> None:
        cls = declare({"x": Any}, decorated)
        assert cls(1).x.equal(torch.tensor(1))
        assert cls([1, 2]).x.equal(torch.tensor([1, 2]))
        assert cls(np.zeros(3)).x.dtype == torch.float64
        assert cls("s").x == "s"
        assert cls({"a": 1}).x == {"a": 1}
        assert cls(["a", "b"]).x == ["a", "b"]
        assert cls((1, 2)).x == (1, 2)
        assert cls(None).x is None

    def test_init_number_with_batch_size_is_one_value(self, declare: Any, decorated: bool) -> None:
        cls = declare({"x": Tensor, "n": int}, decorated, {"n": 3})
        assert cls(torch.zeros(2)).n.equal(torch.tensor(3))
        point = cls(torch.zeros(2), batch_size=[2])
        assert point.n == point[0].n == 3
        point.n = 5
        assert point.n == 5
        with pytest.raises(BatchSizeError, match=r"torch.full\(\(2,\), 3\) has one number"):
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
        self, declare: Any, decorated: bool, args: Any, kwargs: Any, error: type[Exception], message: str
    ) -> None:
        cls = declare({"x": Any, "y": Any}, decorated, {"y": None})
        with pytest.raises(error, match=message):
            cls(*args, **kwargs)

    def test_init_missing_fields_have_defaults(self, declare: Any, decorated: bool) -> None:
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

    def test_kw_only_class_positional_argument_raises(self, declare: Any, decorated: bool) -> None:
        cls = declare({"x": Tensor, "y": Tensor, "z": Tensor}, decorated, {"x": None}, kw_only=True)
        assert cls(y=torch.zeros(1), z=torch.ones(1)).z.item() == 1
        with pytest.raises(TypeError, match="takes 0 positional arguments"):
            cls(torch.zeros(1))

    def test_declare_field_without_default_after_default_raises(self, declare: Any, decorated: bool) -> None:
        with pytest.raises(TypeError, match="the field 'y' without a default follows 'x'"):
            declare({"x": Tensor, "y": Tensor}, decorated, {"x": None})

    def test_signature_and_doc_contain_fields(self, declare: Any, decorated: bool) -> None:
        cls = declare({"x": "Tensor", "s": "str"}, decorated, {"s": "hi"})
        assert list(inspect.signature(cls).parameters) == ["x", "s", "batch_size", "device", "names", "lock"]
        assert cls.__doc__.startswith("X(x: 'Tensor', s: 'str' = 'hi', *, batch_size=None")

    def test_init_lock_is_locked(self, declare: Any, decorated: bool) -> None:
        point = declare({"x": Tensor}, decorated)(torch.zeros(1), lock=True)
        with pytest.raises(LockedError, match="cannot set key 'x'"):
            point.x = torch.ones(1)


@both
class TestAttributes:
    def test_set_field_checks_shape(self, declare: Any, decorated: bool) -> None:
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
    def test_set_unknown_field_raises(self, declare: Any, decorated: bool, write: str) -> None:
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

    def test_setitem_index_unknown_field_raises(self, declare: Any, decorated: bool) -> None:
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

    def test_getattr_unknown_name_suggests_closest(self, declare: Any, decorated: bool) -> None:
        point = declare({"colour": Tensor}, decorated)(torch.zeros(1))
        with pytest.raises(AttributeError, match="X has no field 'color': did you mean 'colour'"):
            _ = point.color
        assert not hasattr(point, "color")

    def test_hasattr_method_of_protocol_without_its_package_is_false(
        self, declare: Any, decorated: bool
    ) -> None:
        point = declare({"x": Tensor}, decorated)(torch.zeros(1))
        if not hasattr(TensorDict(), "__arrow_c_stream__"):  # td-arrow is not installed
            for owner in (point, type(point)):
                assert not hasattr(owner, "__arrow_c_stream__")
                assert inspect.getattr_static(owner, "__arrow_c_stream__", None) is None

    def test_getattr_failing_property_keeps_its_message(self, declare: Any, decorated: bool) -> None:
        body = {"bad": property(lambda self: self.x.nothing)}
        point = declare({"x": Tensor}, decorated, body)(torch.zeros(1))
        with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'nothing'"):
            _ = point.bad

    def test_set_nested_key_sets_field_of_nested_class(self, declare: Any, decorated: bool) -> None:
        inner = declare({"x": Tensor, "s": str}, decorated, {"s": None})
        outer = declare({"p": inner}, decorated)(inner(torch.zeros(3), batch_size=[3]), batch_size=[3])
        outer.set(("p", "s"), "text")
        assert outer.p.s == outer.get(("p", "s")) == outer["p", "s"] == "text"
        assert outer.get(("p", "nothing"), 5) == 5
        assert outer.get("p") is outer.p


class TestMembers:
    def test_declare_inherits_methods_and_properties(self) -> None:
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
    def test_declare_annotation_not_a_type_is_accepted(self, declare: Any, hint: Any) -> None:
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

    def test_user_init_may_assign_fields(self) -> None:
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
    def test_user_init_may_call_super_init(self, how: str) -> None:
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

    def test_subclass_redeclared_field_keeps_position(self) -> None:
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

    def test_dataclasses_functions_accept_tensorclass(self) -> None:
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
        assert repr(point) == "Point(batch_size=[], fields={x: f32[2], tags: list[str]})"
        assert (point == point).x.all()

    def test_setattr_unannotated_class_attribute_raises(self) -> None:
        class Point(TensorClass):
            x: Tensor
            q = 3

        point = Point(torch.zeros(1))
        assert point.q == 3
        with pytest.raises(UnknownFieldError, match="no field 'q'"):
            point.q = 4


@both
def test_repr_omits_fields_with_repr_false(declare: Any, decorated: bool) -> None:
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


def test_stack_two_classes_with_equal_fields_raises() -> None:
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
def test_stack_tensorclass_and_tensordict_raises(join: Any) -> None:
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


def test_declared_fields_returns_names_and_types() -> None:
    class Pair(TensorClass):
        a: Tensor
        n: int = 0

    assert Pair.declared_fields() == {"a": Tensor, "n": int}
    assert Pair(torch.zeros(2)).declared_fields() == {"a": Tensor, "n": int}
    assert TensorDict.declared_fields() is None
