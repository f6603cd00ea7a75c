"""in_keys and out_keys of modules: valid keys, assignment, and declaration in a class body."""

from __future__ import annotations

import abc
import gc
from typing import ClassVar

import pytest
import torch

from td_core import TensorDict
from td_core.spi import RULES
from td_nn import (
    ModuleKeysError,
    SelectionError,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    dispatch,
)

ONE = torch.ones(1)


def module(in_keys, out_keys="y"):
    return TensorDictModule(lambda *values: values[0], in_keys, out_keys)


def wrap(keys):
    return WrapModule(lambda td: td, in_keys=keys)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        (("a", "b"), [("a", "b")]),
        ((("a", "x"), ("a", "y")), [("a", "x", "a", "y")]),
        (["a", "b"], ["a", "b"]),
        ([("a",), ("c", ("d",))], ["a", ("c", "d")]),
        ([], []),
    ],
)
@pytest.mark.parametrize("make", [module, wrap])
def test_construct_stores_keys_in_shortest_form(make, given, kept):
    made = make(given)
    assert made.in_keys == kept
    assert isinstance(made.in_keys, list)
    made.out_keys = given
    assert made.out_keys == kept


@pytest.mark.parametrize(
    "given", [None, 1, {"a": 1}.keys(), (key for key in "ab"), (), ["a", 1], [("a", 1)], [()], [None], {"a"}]
)
@pytest.mark.parametrize("make", [module, lambda keys: module("x", keys)])
def test_construct_wrong_key_raises(make, given):
    with pytest.raises(ValueError, match="a key is a string or a .*tuple of strings; got"):
        make(given)


def test_construct_wrong_key_error_has_attribute_and_value():
    with pytest.raises(
        ModuleKeysError, match=r"out_keys is a list of keys or one key.*got 3 \(of type int\)"
    ):
        module("x", 3)


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: WrapModule(lambda td: td, in_keys="a").in_keys, ["a"]),
        (lambda: TensorDictSequential(module("x"), selected_out_keys="y").out_keys, ["y"]),
        (lambda: TensorDictSequential(module("x")).select_subsequence(out_keys="y").out_keys, ["y"]),
        (lambda: type("B", (TensorDictModuleBase,), {"in_keys": "a", "out_keys": []}).in_keys, ["a"]),
    ],
)
def test_construct_single_string_is_one_key(make, kept):
    assert make() == kept


def test_in_keys_list_changed_by_caller_keeps_keys_of_module():
    given = ["x"]
    made = module(given)
    given.append("z")
    made.in_keys.append("w")
    assert made.in_keys == ["x"]


def test_assign_out_keys_replaces_all_keys_and_selection():
    made = TensorDictModule(lambda x: (x, x + 1), ["x"], ["a", "b"]).select_out_keys("b")
    made.out_keys = ["c", "d"]
    assert (made.out_keys, made.out_keys_source) == (["c", "d"], ["c", "d"])
    assert list(made(TensorDict(x=ONE)).keys()) == ["x", "c", "d"]


def test_assign_in_keys_keeps_argument_names():
    made = TensorDictModule(lambda a, b: a - b, {"b": "x", "a": "y"}, ["z"])
    made.in_keys = ["u", "v"]
    assert made(u=ONE, v=3 * ONE) == 2
    with pytest.raises(ModuleKeysError, match=r"has the arguments \['b', 'a'\]; got 1 in_keys"):
        made.in_keys = ["u"]


def test_call_out_key_underscore_is_not_stored():
    made = TensorDictModule(lambda x: (x, x + 1, x + 2), ["x"], ["_", "y", "_"])
    assert made.out_keys == ["_", "y", "_"]
    assert list(made(TensorDict(x=ONE)).keys()) == ["x", "y"]
    assert made(ONE) == 2
    assert TensorDictModule(lambda x: x, ["x"], [("a", "_")])(TensorDict(x=ONE))["a", "_"] == 1
    assert TensorDictModule(lambda x: x, ["x"], ["_"])(ONE) == ()


def test_construct_underscore_as_in_key_warns():
    with pytest.warns(UserWarning, match="as an input it is read like any other"):
        made = module(["_"])
    assert made(TensorDict({"_": ONE}))["y"] == 1


def test_call_duplicate_keys_reads_twice_and_stores_last_output():
    made = TensorDictModule(lambda a, b: (a + b, a - b), ["x", "x"], ["y", "y"])
    assert made(TensorDict(x=ONE))["y"] == 0
    assert made(x=ONE) == (0, 0)


class Declared(TensorDictModuleBase):
    in_keys = ["x"]  # noqa: RUF012
    out_keys = ["y", "z"]  # noqa: RUF012

    @dispatch
    def forward(self, tensordict):
        return tensordict.set("y", tensordict["x"]).set("z", tensordict["x"] + 1)


def test_assign_keys_on_instance_keeps_class_and_other_instances():
    first, second = Declared(), Declared()
    first.in_keys = ["w"]
    first.select_out_keys("z")
    first.out_keys.append("q")
    assert (second.in_keys, second.out_keys) == (["x"], ["y", "z"])
    assert (Declared.in_keys, Declared.out_keys) == (["x"], ["y", "z"])
    assert first.out_keys == ["z"]
    one, two = WrapModule(lambda td: td), WrapModule(lambda td: td)
    one.in_keys = ["x"]
    assert two.in_keys == []


def test_subclass_inherits_or_overrides_declared_keys():
    child = type("Child", (Declared,), {"out_keys": ["z"]})
    assert (child().in_keys, child().out_keys, child.out_keys_source.__get__(child())) == (
        ["x"],
        ["z"],
        ["z"],
    )


def test_read_in_keys_of_module_without_keys_raises():
    bare = type("Bare", (TensorDictModuleBase,), {})()
    for read in (
        lambda: bare.in_keys,
        lambda: bare.out_keys,
        lambda: repr(bare),
        lambda: bare.out_keys_source,
    ):
        with pytest.raises(AttributeError, match="'Bare' object has no attribute '(in|out)_keys(_source)?'"):
            read()
    assert not TensorDictModuleBase.is_tdmodule_compatible(bare)
    assert TensorDictModuleBase.is_tdmodule_compatible(Declared())


def test_assign_keys_before_super_init_keeps_them():
    class Early(TensorDictModuleBase):
        def __init__(self):
            self.in_keys = ["x"]
            super().__init__()
            self.out_keys = ["y"]

        def forward(self, tensordict):
            return tensordict.set("y", tensordict["x"])

    assert (Early().in_keys, Early().out_keys) == (["x"], ["y"])
    assert Early().select_out_keys()(TensorDict(x=ONE)).keys() == {"x"}


def test_construct_subclass_with_abc_metaclass_keeps_keys():
    class Meta(abc.ABCMeta):
        pass

    class Loss(TensorDictModuleBase, abc.ABC, metaclass=Meta):
        def __new__(cls):
            return super().__new__(cls)

        def __init__(self):
            super().__init__()
            self.in_keys, self.out_keys = ["x"], ["y"]

        @abc.abstractmethod
        def forward(self, tensordict): ...

    with pytest.raises(TypeError, match="abstract"):
        Loss()
    assert type("Real", (Loss,), {"forward": lambda self, td: td})().in_keys == ["x"]


class ReadOnly(TensorDictModuleBase):
    @property
    def in_keys(self):
        return ["x"]

    @property
    def out_keys(self):
        return ["y", "z"]

    forward = Declared.forward


class Settable(ReadOnly):
    _own = ("y", "z")

    @property
    def out_keys(self):
        return list(self._own)

    @out_keys.setter
    def out_keys(self, keys):
        self._own = tuple(keys)


@pytest.mark.parametrize(("cls", "shown"), [(ReadOnly, ["y", "z"]), (Settable, ["z"])])
def test_select_out_keys_of_property_keys_keeps_selected(cls, shown):
    made = cls().select_out_keys("z")
    assert (made.out_keys, made.out_keys_source) == (shown, ["y", "z"])
    assert list(made(TensorDict(x=ONE)).keys()) == ["x", "z"]
    assert made(ONE) == 2
    made.reset_out_keys()
    assert (made.out_keys, made.out_keys_source) == (["y", "z"], ["y", "z"])
    assert made(ONE) == (1, 2)


class OwnSetter(TensorDictModuleBase):
    """A module whose setter stores the keys in the attributes that tensordict has for them."""

    in_keys: ClassVar = ["x"]
    forward = Declared.forward

    @TensorDictModuleBase.out_keys.setter
    def out_keys(self, keys):
        self._out_keys = self._out_keys_apparent = list(keys)


def test_setter_of_subclass_stores_keys_that_the_getter_reads():
    made = OwnSetter()
    with pytest.raises(AttributeError, match="'OwnSetter' object has no attribute 'out_keys'"):
        _ = made.out_keys
    made.out_keys = ["y", "z"]
    assert (made.out_keys, made.out_keys_source, made._out_keys) == (["y", "z"], ["y", "z"], ["y", "z"])
    made.select_out_keys("z")
    assert (made.out_keys, made(ONE)) == (["z"], 2)
    assert made.reset_out_keys().out_keys == ["y", "z"]


@pytest.mark.parametrize(
    "base", [TensorDictModuleBase, TensorDictModule, TensorDictSequential, TensorDictModuleWrapper]
)
def test_setter_and_getter_of_keys_extend_those_of_the_base(base):
    class Noted(base):
        @base.in_keys.setter
        def in_keys(self, keys):
            base.in_keys.fset(self, [f"my_{key}" for key in keys])

        @base.out_keys.getter
        def out_keys(self):
            return [*base.out_keys.fget(self), "more"]

    made = Noted.__new__(Noted)
    torch.nn.Module.__init__(made)
    made.in_keys, made.out_keys = ["x"], ["y"]
    assert (made.in_keys, made.out_keys) == (["my_x"], ["y", "more"])


def test_call_reads_in_keys_property_each_time():
    class Moving(TensorDictModule):
        source = "x"

        @property
        def in_keys(self):
            return [self.source]

        @in_keys.setter
        def in_keys(self, keys):
            self.source = keys[0]

    made = Moving(lambda x: x, ["x"], ["y"])
    made.source = "other"
    assert made(TensorDict(other=3 * ONE))["y"] == 3
    assert made(other=2 * ONE) == 2


def test_wrapper_keys_follow_inner_module_until_assigned():
    inner = TensorDictModule(lambda x: (x, x + 1), ["x"], ["y", "z"])
    outer = TensorDictModuleWrapper(inner)
    inner.out_keys = ["v", "w"]
    assert (outer.in_keys, outer.out_keys, outer.out_keys_source) == (["x"], ["v", "w"], ["v", "w"])
    outer.select_out_keys("w")
    assert (outer.out_keys, inner.out_keys) == (["w"], ["v", "w"])
    assert outer(TensorDict(x=ONE)).keys() == {"x", "w"}
    assert outer(ONE) == 2
    outer.out_keys = ["q"]
    outer.in_keys = ["p"]
    assert (outer.out_keys, outer.in_keys, inner.out_keys, inner.in_keys) == (["q"], ["p"], ["v", "w"], ["x"])


def test_delete_module_with_selection_frees_it_without_gc():
    import weakref

    gc.disable()
    try:
        made = TensorDictModule(lambda x: (x, x), ["x"], ["y", "z"]).select_out_keys("y")
        made(TensorDict(x=ONE))
        reference = weakref.ref(made)
        del made
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("keys", [("a", "b"), ("a", ("n", "b")), (("n", "b"),)], ids=str)
def test_selected_keys_are_a_list_or_a_tuple_of_known_keys(keys, kind):
    module = TensorDictModule(lambda x: (x, x, x), ["x"], ["a", "b", ("n", "b")])
    assert TensorDictSequential(module, selected_out_keys=kind(keys)).out_keys == list(keys)
    seq = TensorDictSequential(module, TensorDictModule(lambda x: x, [("n", "b")], ["c"]))
    assert seq.select_subsequence(out_keys=kind(keys)).out_keys == module.out_keys
    assert seq.select_subsequence(in_keys=kind(["x", ("n", "b")])).in_keys == ["x"]


def test_selected_tuple_that_is_a_key_is_one_key():
    seq = TensorDictSequential(TensorDictModule(lambda x: (x, x, x), ["x"], ["n", "b", ("n", "b")]))
    seq = TensorDictSequential(seq, selected_out_keys=("n", "b"))
    assert seq.out_keys == [("n", "b")]
    with pytest.raises(SelectionError, match="'a', 'b'"):
        TensorDictSequential(seq, selected_out_keys=("a", "b"))


class _Declaring(TensorDictModuleBase):
    in_keys: ClassVar = ["x"]
    out_keys: ClassVar = ["y"]

    def forward(self, tensordict):
        return tensordict


class _Assigning(TensorDictModuleBase):
    def __init__(self):
        super().__init__()
        self.in_keys, self.out_keys = ["x"], ["y"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorDictModule(abs, ["x"], ["y"]),
        lambda: TensorDictModule(abs, ["x"], ["z", "y"]).select_out_keys("y"),
        lambda: TensorDictModuleWrapper(TensorDictModule(abs, ["x"], ["y"])),
        lambda: TensorDictSequential(TensorDictModule(abs, ["x"], ["y"])),
        _Declaring,
        _Assigning,
    ],
)
def test_keys_in_program_of_tensordict_are_the_list_of_the_module(make, monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    module, other = make(), make()
    module.in_keys.append("more")
    module.out_keys.insert(0, "first")
    assert (module.in_keys, module.out_keys) == (["x", "more"], ["first", "y"])
    assert (other.in_keys, other.out_keys) == (["x"], ["y"])
    module.in_keys = ["z"]
    assert module.in_keys == ["z"]


def test_module_of_program_of_tensordict_reads_and_writes_changed_keys(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    module = TensorDictModule(lambda x, y: (x + y, x - y), ["x"], ["sum"])
    module.in_keys.append("y")
    module.out_keys.append("difference")
    result = module(TensorDict(x=torch.tensor(3), y=torch.tensor(1)))
    assert (result["sum"], result["difference"]) == (4, 2)
    assert [int(value) for value in module(x=torch.tensor(3), y=torch.tensor(1))] == [4, 2]


def test_out_keys_assigned_to_wrapper_in_program_of_tensordict_are_written(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    wrapper = TensorDictModuleWrapper(TensorDictModule(abs, ["x"], ["y"]))
    wrapper.out_keys = ["z"]
    wrapper.in_keys = ["other"]
    assert (wrapper.td_module.out_keys, wrapper.td_module.in_keys) == (["z"], ["x"])
    assert wrapper(TensorDict(x=-torch.ones(1)))["z"] == 1
