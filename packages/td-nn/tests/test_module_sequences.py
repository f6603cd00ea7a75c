"""TensorDictSequential: construction, keys, calls, edits, and selection of members."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from td_core import TensorDict, lazy_stack
from td_core.spi import RULES
from td_nn import MissingKeyError, TensorDictModule, TensorDictModuleBase, TensorDictSequential, WrapModule

ONE = torch.ones(1)


def add(in_keys, out_keys, **options):
    """Return a module that returns the sum of its inputs plus one."""
    return TensorDictModule(lambda *values: sum(values) + 1, in_keys, out_keys, **options)


def chain(**options):
    return TensorDictSequential(add(["x"], ["h"]), add(["h"], ["y"]), **options)


def named():
    return TensorDictSequential({"enc": add(["x"], ["h"]), "dec": add(["h"], ["y"])})


def entries(td):
    return {key: td[key].item() for key in td.keys(True, True)}


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (lambda m: (m, m), 2),
        (lambda m: ([m, m],), 2),
        (lambda m: ((m, m),), 2),
        (lambda m: (nn.ModuleList([m, m]),), 2),
        (lambda m: ([m, m], m), 3),
        (lambda m: ({"a": m, "b": m},), 2),
        (lambda m: (nn.ModuleDict({"a": m}),), 1),
        (lambda m: (), 0),
    ],
)
def test_construct_accepts_members_in_any_container(arguments, count):
    seq = TensorDictSequential(*arguments(add(["x"], ["y"])))
    assert len(seq) == count
    assert (seq.in_keys, seq.out_keys) == ((["x"], ["y"]) if count else ([], []))


def test_construct_wraps_callable_member():
    seq = TensorDictSequential(lambda td: td.set("y", td["x"]), nn.Identity())
    assert [type(member) for member in seq] == [WrapModule, WrapModule]
    assert seq(TensorDict(x=ONE))["y"] == 1


@pytest.mark.parametrize("member", [3, "module", nn.Linear, None])
def test_construct_uncallable_member_raises(member):
    with pytest.raises(
        TypeError, match="a member of a sequence is a module or a function of a collection; got"
    ):
        TensorDictSequential(member)


def test_construct_member_with_keys_but_not_module_raises():
    class Foreign:
        in_keys, out_keys = ("x",), ("y",)

        def __call__(self, td):
            return td

    with pytest.raises(TypeError, match="a Foreign has keys and is not an nn.Module"):
        TensorDictSequential(Foreign())
    with pytest.raises(TypeError, match="the name of a member is a string; got 1"):
        TensorDictSequential({1: nn.Identity()})


@pytest.mark.parametrize(
    ("pairs", "in_keys", "out_keys"),
    [
        ([("x", "y"), ("y", "x"), ("x", "y")], ["x"], ["x", "y"]),
        ([("a", "b"), ("c", "d"), ("a", "e")], ["a", "c"], ["b", "d", "e"]),
        ([("x", "n"), (("n", "a"), "y")], ["x"], ["n", "y"]),
        ([("x", ("n", "a")), ("n", "y")], ["x", "n"], [("n", "a"), "y"]),
        ([("x", ("n", "a")), (("n", "a", "b"), "y")], ["x"], [("n", "a"), "y"]),
        ([("x", "_"), ("_", "y")], ["x", "_"], ["_", "y"]),
        ([("x", "y"), ("y", "x")], ["x"], ["y", "x"]),
    ],
)
@pytest.mark.filterwarnings("ignore:the key '_'")
def test_keys_are_computed_from_members(pairs, in_keys, out_keys):
    seq = TensorDictSequential(*[add([reads], [writes]) for reads, writes in pairs])
    assert (seq.in_keys, seq.out_keys) == (in_keys, out_keys)


def test_in_keys_contains_repeated_key_once():
    assert TensorDictSequential(add(["x", "x"], ["y"])).in_keys == ["x"]


def test_compute_in_and_out_keys_without_instance_returns_keys():
    members = [add(["x"], ["h"]), add(["h"], ["y"])]
    assert TensorDictSequential._compute_in_and_out_keys(members) == (["x"], ["h", "y"])


FLOWS = [
    # inplace, selected keys, entries of the result, result is the input, entries of the input after the call
    (None, None, {"x": 1, "h": 2, "y": 3}, True, {"x": 1, "h": 2, "y": 3}),
    (None, ["y"], {"x": 1, "h": 2, "y": 3}, True, {"x": 1, "h": 2, "y": 3}),
    (True, None, {"x": 1, "h": 2, "y": 3}, True, {"x": 1, "h": 2, "y": 3}),
    (True, ["y"], {"x": 1, "h": 5, "y": 3}, True, {"x": 1, "h": 5, "y": 3}),
    (True, [], {"x": 1, "h": 5}, True, {"x": 1, "h": 5}),
    (False, None, {"h": 2, "y": 3}, False, {"x": 1, "h": 5}),
    (False, ["y"], {"y": 3}, False, {"x": 1, "h": 5}),
    ("empty", None, {"h": 2, "y": 3}, False, {"x": 1, "h": 5}),
    ("empty", ["h"], {"h": 2}, False, {"x": 1, "h": 5}),
]


@pytest.mark.parametrize(("inplace", "selected", "found", "same", "after"), FLOWS)
def test_call_inplace_chooses_collection_of_results(inplace, selected, found, same, after):
    td = TensorDict(x=ONE, h=5 * ONE)
    seq = chain(inplace=inplace, selected_out_keys=selected)
    result = seq(td)
    assert (entries(result), result is td, entries(td)) == (found, same, after)
    td, out = TensorDict(x=ONE, h=5 * ONE), TensorDict(q=ONE)
    assert seq(td, tensordict_out=out) is out
    written = {"h": 2, "y": 3}
    kept = written if selected is None else {key: written[key] for key in selected}
    assert entries(out) == {"q": 1, **kept}
    assert entries(td) == {"x": 1, "h": 5}
    assert seq(td, TensorDict()).keys() == kept.keys()


def test_selected_out_keys_removes_outputs_of_function():
    seq = TensorDictSequential(
        add(["x"], [("n", "h")]), lambda td: td.set("extra", ONE), add([("n", "h")], ["y"])
    )
    result = seq.select_out_keys("y")(TensorDict(x=ONE))
    assert entries(result) == {"x": 1, "y": 3}


def test_call_inplace_empty_keeps_batch_size_and_kind():
    stack = lazy_stack([TensorDict(x=ONE), TensorDict(x=ONE)])
    result = chain(inplace="empty")(stack)
    assert (type(result), list(result.batch_size), set(result.keys())) == (type(stack), [2], {"h", "y"})
    assert list(stack.keys()) == ["x"]


def test_call_with_selection_stores_it_in_input():
    seq = TensorDictSequential(add(["x"], ["h"]), add(["h"], ["y"], inplace=False), selected_out_keys=["y"])
    td = TensorDict(x=ONE)
    assert seq(td) is td
    assert entries(td) == {"x": 1, "y": 3}


def test_call_members_not_inplace_stores_final_outputs_only():
    seq = TensorDictSequential(
        add(["x"], ["h"], inplace=False), add(["h"], ["y"], inplace=False), inplace=True
    )
    assert entries(seq(TensorDict(x=ONE))) == {"x": 1, "y": 3}


def test_assign_out_keys_keeps_these_outputs_only():
    seq = chain()
    seq.out_keys = ["y"]
    assert (seq.out_keys, seq.out_keys_source) == (["y"], ["y"])
    assert entries(seq(TensorDict(x=ONE))) == {"x": 1, "y": 3}


def test_call_unknown_keyword_raises():
    for call in (lambda: chain()(TensorDict(x=ONE), foo=1), lambda: chain()(x=ONE, foo=1)):
        with pytest.raises(
            RuntimeError, match=r"takes its inputs \['x'\] by keyword, and tensordict_out; got \['foo'\]"
        ):
            call()


@pytest.mark.parametrize("make", [chain, named])
def test_getitem_by_index_returns_member(make):
    seq = make()
    members = list(seq)
    assert seq[0] is members[0]
    assert seq[-1] is members[1]
    part = seq[1:]
    assert (type(part), part.in_keys, list(part)) == (TensorDictSequential, ["h"], members[1:])
    assert len(seq[5:]) == 0
    with pytest.raises(IndexError, match="index 2 is out of range: the TensorDictSequential has 2 members"):
        _ = seq[2]


def test_getitem_by_name_returns_member():
    seq = named()
    assert seq["dec"] is seq[1]
    assert list(seq[:1].module) == ["enc"]
    with pytest.raises(KeyError, match="none"):
        _ = seq["none"]
    with pytest.raises(TypeError, match="have no names; got the index 'enc'"):
        _ = chain()["enc"]


def test_getitem_by_slice_keeps_type_and_options():
    class Mine(TensorDictSequential):
        def __init__(self, *modules, extra, **options):
            super().__init__(*modules, **options)
            self.extra = extra

    seq = Mine(add(["x"], ["h"]), add(["h"], ["y"]), extra=3, partial_tolerant=True, inplace="empty").eval()
    part = seq[:1]
    assert (type(part), part.extra, part.partial_tolerant, part.inplace) == (Mine, 3, True, "empty")
    assert not part.module.training
    assert len(seq) == 2


@pytest.mark.parametrize("make", [chain, named])
def test_setitem_and_delitem_update_keys(make):
    seq = make()
    seq[0] = add(["z"], ["h"])
    assert seq.in_keys == ["z"]
    assert seq(TensorDict(z=ONE))["y"] == 3
    del seq[1:]
    assert (len(seq), seq.out_keys) == (1, ["h"])
    del seq[0]
    assert (len(seq), seq.in_keys, seq.out_keys) == (0, [], [])


def test_append_insert_and_extend_add_members():
    seq = chain()
    assert seq.append(add(["y"], ["z"])).out_keys == ["h", "y", "z"]
    assert seq.insert(0, add(["w"], ["x"])).in_keys == ["w"]
    assert seq.extend([lambda td: td]).out_keys == ["x", "h", "y", "z"]
    assert seq(TensorDict(w=ONE))["z"] == 5
    by_name = named()
    by_name["last"] = add(["y"], ["z"])
    assert by_name.insert(0, add(["w"], ["x"]), name="first").in_keys == ["w"]
    assert by_name.extend({"f": lambda td: td})._names() == ["first", "enc", "dec", "last", "f"]


@pytest.mark.parametrize("make", [chain, named])
def test_pop_removes_last_member_and_updates_keys(make):
    seq = make()
    last = seq[1]
    assert seq.pop() is last
    assert (len(seq), seq.out_keys) == (1, ["h"])
    with pytest.raises(IndexError, match="index 3 is out of range"):
        seq.pop(3)
    for name in ("clear", "update"):
        with pytest.raises(AttributeError, match="use `del seq"):
            getattr(seq, name)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda: named().append(nn.Identity()), "have names: give name="),
        (lambda: chain().append(nn.Identity(), name="n"), "have no names"),
        (lambda: chain().extend({"n": nn.Identity()}), "have no names"),
        (lambda: chain().__setitem__("n", nn.Identity()), "have no names"),
        (lambda: chain().__setitem__(slice(1), nn.Identity()), "replaced one by one"),
        (lambda: chain().append(3), "a member of a sequence is a module"),
    ],
)
def test_edit_members_wrong_argument_raises(edit, said):
    with pytest.raises(TypeError, match=said):
        edit()


def test_insert_existing_name_raises():
    with pytest.raises(ValueError, match="there is a member 'dec' already"):
        named().append(nn.Identity(), name="dec")
    with pytest.raises(KeyError, match="none"):
        del named()["none"]


def test_edit_that_removes_selected_key_raises_and_keeps_members():
    seq = chain(selected_out_keys=["y"])
    with pytest.raises(ValueError, match=r"would remove the selected out_keys \['y'\]; call reset_out_keys"):
        del seq[1]
    assert (len(seq), seq.out_keys, seq.out_keys_source) == (2, ["y"], ["h", "y"])
    seq[0] = add(["x"], ["h", "g"])
    assert (seq.out_keys, seq.out_keys_source) == (["y"], ["h", "g", "y"])


def test_select_subsequence_keeps_members_that_keys_need():
    a, b, c = add(["x"], ["h"]), add(["x"], ["g"]), add(["h"], ["y"])
    seq = TensorDictSequential({"a": a, "b": b, "c": c}, inplace="empty").select_out_keys("y")
    part = seq.select_subsequence(out_keys=["y", "unknown"])
    assert (list(part.module), list(part), part.inplace) == (["a", "c"], [a, c], "empty")
    assert part.out_keys == ["h", "y"]
    assert list(seq.select_subsequence(in_keys=["h"]).module) == ["c"]
    assert list(seq.select_subsequence(out_keys=["h", "g"]).module) == ["a", "b"]
    with pytest.raises(ValueError, match=r"no member is left of those that read \['z'\]"):
        seq.select_subsequence(in_keys=["z"])


def test_select_subsequence_cuts_or_drops_nested_sequence():
    inner = TensorDictSequential(add(["x"], ["h"]), add(["x"], ["g"]))
    unused = TensorDictSequential(add(["x"], ["u"]))
    seq = TensorDictSequential(inner, unused, add(["h"], ["y"]))
    part = seq.select_subsequence(out_keys=["y"])
    assert [len(part), len(part[0]), part.out_keys] == [2, 1, ["h", "y"]]
    assert len(inner) == 2


def test_select_subsequence_keeps_function_between_members():
    seq = TensorDictSequential(
        lambda td: td, add(["x"], ["h"]), lambda td: td.set("h", -td["h"]), add(["h"], ["y"])
    )
    part = seq.select_subsequence(out_keys=["y"])
    assert len(part) == 3
    assert part(TensorDict(x=ONE))["y"] == -1


def test_select_subsequence_of_node_keeps_writers_of_its_entries():
    seq = TensorDictSequential(add(["x"], [("n", "a")]), add(["x"], [("n", "b")]), add(["x"], ["z"]))
    assert len(seq.select_subsequence(out_keys=["n"])) == 2
    seq = TensorDictSequential(TensorDictModule(lambda x: {"a": x}, ["x"], ["n"]), add([("n", "a")], ["y"]))
    assert len(seq.select_subsequence(out_keys=["y"])) == 2


def test_partial_tolerant_skips_member_without_inputs():
    seq = chain(partial_tolerant=True)
    assert entries(seq(TensorDict(h=ONE))) == {"h": 1, "y": 2}
    assert entries(seq(TensorDict(z=ONE))) == {"z": 1}
    by_name = TensorDictSequential({"a": add(["x"], ["h"]), "b": add(["q"], ["w"])}, partial_tolerant=True)
    with pytest.raises(KeyError) as caught:
        by_name(x=ONE)
    assert "TensorDictSequential did not write 'w'" in str(caught.value)
    assert "seq[\"b\"] writes it, and was skipped because there is no 'q'" in str(caught.value)


def test_partial_tolerant_lazy_stack_runs_on_members_with_inputs():
    stack = lazy_stack([TensorDict(x=ONE), TensorDict(x=ONE, q=ONE)])
    seq = TensorDictSequential(add(["x"], ["h"]), add(["q"], ["w"]), partial_tolerant=True)
    assert seq(stack) is stack
    assert [entries(member) for member in stack.tensordicts] == [
        {"x": 1, "h": 2},
        {"x": 1, "q": 1, "h": 2, "w": 2},
    ]


def test_state_dict_keys_contain_member_names():
    layer = TensorDictModule(nn.Linear(1, 1), ["x"], ["x"])
    twice = TensorDictSequential(layer, layer)
    assert list(twice.state_dict())[::2] == ["module.0.module.weight", "module.1.module.weight"]
    assert len(list(twice.parameters())) == 2
    assert "module.enc.module.weight" in TensorDictSequential({"enc": layer}).state_dict()
    other = copy.deepcopy(twice)
    other.load_state_dict(twice.state_dict())
    assert other[0] is other[1]


def test_call_nested_sequences_equals_flat_sequence():
    seq = TensorDictSequential(chain(), TensorDictSequential(add(["y"], ["z"])))
    assert seq(TensorDict(x=ONE))["z"] == 4
    assert (seq.in_keys, seq.out_keys, len(seq)) == (["x"], ["h", "y", "z"], 2)


def test_call_after_member_that_returns_none_raises():
    seq = TensorDictSequential({"silent": lambda td: None, "next": add(["x"], ["y"])})
    with pytest.raises(RuntimeError, match=r"the member before TensorDictModule\(<lambda>\) returned None"):
        seq(TensorDict(x=ONE))
    assert TensorDictSequential(lambda td: None)(TensorDict(x=ONE)) is None


def test_call_subclass_without_super_init_runs_members():
    class Plain(TensorDictSequential):
        def __init__(self, *modules):
            in_keys, out_keys = self._compute_in_and_out_keys(modules)
            TensorDictModule.__init__(self, nn.ModuleList(modules), in_keys, out_keys, inplace=None)

    seq = Plain(add(["x"], ["h"]), add(["h"], ["y"]))
    assert entries(seq(TensorDict(x=ONE))) == {"x": 1, "h": 2, "y": 3}
    assert (seq.partial_tolerant, seq.out_keys) == (False, ["h", "y"])


def test_construct_accepts_any_module_with_keys():
    class Shift(TensorDictModuleBase):
        in_keys = ["h"]  # noqa: RUF012
        out_keys = ["y"]  # noqa: RUF012

        def forward(self, tensordict):
            return tensordict.set("y", tensordict["h"] - 1)

    seq = TensorDictSequential(add(["x"], ["h"]), Shift())
    assert seq(ONE) == (2, 1)
    with pytest.raises(MissingKeyError):
        TensorDictSequential(add(["x"], ["h"], strict=True))(TensorDict())


class Counter(TensorDictModuleBase):
    """A module that writes a counter beside its output."""

    in_keys = ["x"]  # noqa: RUF012
    out_keys = ["h"]  # noqa: RUF012

    def forward(self, td):
        return td.set("calls", td.get("calls", torch.tensor(0)) + 1).set("h", td["x"] * 2)


class BareChain(TensorDictSequential):
    """A sequence that declares its keys through the constructor of ``TensorDictModule``, as those of TorchRL do."""

    def __init__(self, *members, **options):
        super(TensorDictSequential, self).__init__(nn.ModuleList(members), ["x"], ["h"], **options)


@pytest.mark.parametrize(("inplace", "kept"), [(True, 2), (None, 2), (False, None), ("empty", None)])
@pytest.mark.parametrize("make", [TensorDictSequential, BareChain])
def test_construct_by_any_constructor_selects_nothing(make, inplace, kept):
    seq, td = make(Counter(), inplace=inplace), TensorDict(x=ONE)
    for _ in range(2):
        result = seq(td)
    assert (seq.out_keys, result["h"]) == (["h"], 2)
    assert result.get("calls", None) == kept
    assert "calls" not in seq.select_out_keys("h")(TensorDict(x=ONE))


def test_assign_out_keys_in_program_of_tensordict_selects_nothing(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    seq = chain()
    seq.out_keys = ["y"]
    assert (seq.out_keys, entries(seq(TensorDict(x=ONE)))) == (["y"], {"x": 1, "h": 2, "y": 3})
