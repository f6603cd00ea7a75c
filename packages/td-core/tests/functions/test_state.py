"""state_dict and load_state_dict: layouts of every release, strictness; a failed load changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from td_core import Buffer, LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import KeyPathError, LockedError, StructureError


def make_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6.0).view(3, 2), "n": {"b": torch.ones(3, 4), "e": {}}}, batch_size=[3]
    )


def make_legacy_nested(td: TensorDict) -> OrderedDict:
    return OrderedDict(
        a=td["a"],
        n=OrderedDict(b=td["n", "b"], __batch_size=torch.Size([3]), __device=None),
        __batch_size=torch.Size([3]),
        __device=None,
    )


def make_legacy_flat(td: TensorDict) -> OrderedDict:
    return OrderedDict(
        [("a", td["a"]), ("n.b", td["n", "b"]), ("__batch_size", torch.Size([3])), ("__device", None)]
    )


LAYOUTS = {
    "flat": lambda td: td.state_dict(),
    "nested": lambda td: td.state_dict(flatten=False),
    "legacy nested": make_legacy_nested,
    "legacy flat": make_legacy_flat,
}


@pytest.mark.parametrize("name", ["__batch_size", "__device"])
@pytest.mark.parametrize("level", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_load_state_dict_sentinel_names_are_ordinary_keys(name, level, nested, flatten, assign):
    def made(value):
        td = TensorDict({name: {"a": value} if level else value, "b": value}, [2])
        return TensorDict({"n": td}, [2]) if nested else td

    source, target = made(torch.ones(2)), made(torch.zeros(2))
    target.load_state_dict(source.state_dict(flatten=flatten), assign=assign)
    assert (target == 1).all()


def test_state_dict_flat_equals_module_layout():
    state = make_td().state_dict(prefix="p.")
    assert list(state) == ["p.a", "p.n.b"]
    size = torch.Size([3])
    assert dict(state._metadata) == {
        "p": {"batch_size": size, "device": None},
        "p.n": {"batch_size": size, "device": None},
        "p.n.e": {"batch_size": size, "device": None},
    }


def test_state_dict_nested_has_metadata_per_node():
    state = make_td().state_dict(flatten=False)
    assert list(state) == ["a", "n"] and list(state["n"]) == ["b", "e"]
    assert state["n"]._metadata == {"": {"batch_size": torch.Size([3]), "device": None}}


def test_state_dict_keep_vars_and_destination():
    td = TensorDict({"w": torch.zeros(2, requires_grad=True)})
    destination: OrderedDict = OrderedDict()
    assert td.state_dict(destination=destination) is destination
    assert not destination["w"].requires_grad
    assert destination["w"].data_ptr() == td["w"].data_ptr()
    assert td.state_dict(keep_vars=True)["w"] is td["w"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_state_dict_any_layout_writes_inplace(layout):
    source = make_td()
    target = make_td().zero_()
    leaf = target["a"]
    assert target.load_state_dict(LAYOUTS[layout](source)) is target
    assert target["a"] is leaf
    assert torch.equal(target["a"], source["a"]) and torch.equal(target["n", "b"], source["n", "b"])


@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_load_state_dict_sets_batch_sizes(layout):
    target = TensorDict({"a": torch.zeros(3, 2), "n": {"b": torch.zeros(3, 4), "e": {}}})
    target.load_state_dict(LAYOUTS[layout](make_td()))
    assert target.batch_size == target["n"].batch_size == torch.Size([3])


def test_load_state_dict_strict_key_mismatch_changes_nothing():
    target = make_td().zero_()
    state = make_td().state_dict()
    del state["n.b"]
    state["n.z"] = torch.ones(3)
    with pytest.raises(StructureError, match=r"unexpected keys: \['n.z'\]; missing keys: \['n.b'\]"):
        target.load_state_dict(state)
    assert target["a"].sum() == 0
    more = make_td().state_dict()
    more["z"] = torch.ones(3)
    with pytest.raises(StructureError, match=r"unexpected keys: \['z'\]"):
        target.load_state_dict(more)
    assert target["a"].sum() == 0
    more["n"] = torch.ones(3)
    with pytest.raises(StructureError, match="has both a leaf and a level 'n'"):
        target.load_state_dict(more)
    with pytest.raises(StructureError, match="the root is on meta, in the state dict on cpu"):
        TensorDict({"a": 1}, device="meta").load_state_dict(TensorDict({"a": 1}, device="cpu").state_dict())
    target.load_state_dict(state, strict=False)
    assert torch.equal(target["a"], make_td()["a"]) and "z" in target["n"] and target["n", "b"].sum() == 0
    with pytest.raises(StructureError, match=r"unexpected keys: \['n.b', 'n.c.d'\]; missing keys: \['q'\]"):
        TensorDict(q=torch.ones(1)).load_state_dict({"n.b": torch.ones(1), "n.c.d": torch.ones(1)})


def test_load_state_dict_wrong_shape_changes_nothing():
    target = make_td().zero_()
    state = make_td().state_dict()
    state["n.b"] = torch.ones(3, 5)
    with pytest.raises(StructureError, match=r"key \('n', 'b'\) has shape \(3, 4\), given \(3, 5\)"):
        target.load_state_dict(state)
    assert target["a"].sum() == 0


def test_load_state_dict_assign_replaces_leaves_unless_locked():
    state = make_td().state_dict()
    target = make_td()
    target.load_state_dict(state, assign=True)
    assert target["a"] is state["a"]
    with pytest.raises(LockedError, match="assign=True"):
        target.lock_().load_state_dict(state, assign=True)
    target.load_state_dict(make_td().zero_().state_dict())
    assert target["a"].sum() == 0


def test_load_state_dict_dotted_keys_resolve_by_target():
    td = TensorDict({"x.y": torch.ones(1), "n": {"p.q": torch.full((1,), 2.0)}})
    target = td.clone().zero_()
    target.load_state_dict(td.state_dict())
    assert target["x.y"] == 1 and target["n", "p.q"] == 2


def test_state_dict_flat_key_collision_raises():
    td = TensorDict({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(KeyPathError, match=r"dotted key 'a.b'; use flatten=False"):
        td.state_dict()
    target = td.clone().zero_()
    target.load_state_dict(td.state_dict(flatten=False))
    assert target["a.b"] == 1 and target["a", "b"] == 0


@pytest.mark.parametrize("keep_vars", [False, True])
def test_state_dict_of_many_leaves_equals_that_of_each(keep_vars: bool) -> None:
    leaves = {f"k{i}": torch.full((2,), float(i), requires_grad=True) for i in range(12)}
    td = TensorDict({"n": TensorDict(dict(leaves)), "x": torch.ones(1)})
    state = td.state_dict(keep_vars=keep_vars, prefix="p.")
    assert list(state) == [*(f"p.n.{key}" for key in leaves), "p.x"]
    for key, leaf in leaves.items():
        found = state[f"p.n.{key}"]
        assert (found is leaf) == keep_vars
        assert found.requires_grad == keep_vars
        assert found.data_ptr() == leaf.data_ptr()
    td["n.k3"] = torch.zeros(1)
    with pytest.raises(KeyPathError, match=r"two leaves have the dotted key 'n.k3'"):
        TensorDict({"n.k3": torch.zeros(1), "n": td["n"]}).state_dict()


def test_state_dict_lazy_stack_loads_into_members():
    members = [TensorDict({"a": torch.full((2,), float(i))}) for i in range(3)]
    state = LazyStackedTensorDict(*members).state_dict()
    assert torch.equal(state["a"], torch.stack([member["a"] for member in members]))
    target = LazyStackedTensorDict(*[member.clone().zero_() for member in members])
    leaf = target.tensordicts[2]["a"]
    target.load_state_dict(state)
    assert target.tensordicts[2]["a"] is leaf and leaf.tolist() == [2.0, 2.0]


def test_state_dict_loads_from_and_into_module():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    params = TensorDict.from_module(model)
    assert list(params.state_dict()) == list(model.state_dict())
    zeros = params.data.clone().zero_()
    zeros.load_state_dict(model.state_dict(), from_flatten=True)
    assert torch.equal(zeros["0", "weight"], model[0].weight)


@pytest.mark.parametrize("td", [TensorDict(), TensorDict({"n": {}}, [3])])
def test_load_state_dict_without_leaves_returns_empty(td):
    assert td.load_state_dict(td.state_dict()).is_empty()


LOCKED: dict[str, Callable[[], Any]] = {
    "dense": lambda: make_td()["n"],
    "stack": lambda: lazy_stack([TensorDict({"b": torch.ones(4)}) for _ in range(3)]),
    "params": lambda: TensorDictParams(make_td()["n"]),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", LOCKED)
def test_load_state_dict_into_locked_level_copies_or_changes_nothing(kind: str, assign: bool) -> None:
    td = TensorDict({"a": torch.zeros(3), "n": LOCKED[kind]()}, [3])
    state = td.apply(lambda leaf: leaf + 1).state_dict()
    before = td["n", "b"].clone()
    td["n"].lock_()
    if assign:
        with pytest.raises(LockedError, match="assign=True"):
            td.load_state_dict(state, assign=True)
    else:
        td.load_state_dict(state)
    assert td["a"].tolist() == [1.0 - assign] * 3
    assert torch.equal(td["n", "b"], before if assign else before + 1)


def test_load_state_dict_with_extra_keys_of_locked_level_changes_nothing() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3])
    td["n"].lock_()
    with pytest.raises(LockedError, match="extra keys"):
        td.load_state_dict({"a": torch.ones(3), "n.b": torch.ones(3), "n.q": torch.ones(3)}, strict=False)
    assert td["a"].sum() == td["n", "b"].sum() == 0
    td.load_state_dict({"a": torch.ones(3), "n.b": torch.ones(3), "q": torch.ones(3)}, strict=False)
    assert list(td.keys(True)) == ["a", "n", ("n", "b"), "q"]


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("target", ["dense", "stack", "params", "locked"])
def test_load_state_dict_not_strict_adds_empty_nodes(target, flatten):
    source = TensorDict({"a": torch.zeros(2), "e": {"f": {}}}, [2])
    td = TensorDict({"a": torch.ones(2)}, [2])
    td = {
        "dense": td,
        "stack": lazy_stack(list(td.unbind(0))),
        "params": TensorDictParams(td, no_convert=True),
        "locked": td.clone().lock_(),
    }[target]
    td.load_state_dict(source.state_dict(flatten=flatten))
    assert list(td.keys(True)) == ["a"]
    td.load_state_dict(source.state_dict(flatten=flatten), strict=False)
    assert list(td.keys(True)) == (["a"] if target == "locked" else ["a", "e", ("e", "f")])
    assert td["a"].sum() == 0


def test_load_state_dict_not_a_mapping_raises():
    with pytest.raises(TypeError, match="a state dict is a mapping; got int"):
        make_td().load_state_dict(3)


def test_load_state_dict_batch_size_mismatch_writes_nothing():
    td = TensorDict({"a": torch.zeros(2, 2), "b": torch.zeros(3)})
    state = TensorDict({"a": torch.ones(2, 2), "b": torch.ones(3)}).state_dict()
    state._metadata[""]["batch_size"] = torch.Size([2])
    with pytest.raises(StructureError, match=r"key 'b' has shape \(3,\), the batch size there is \(2,\)"):
        td.load_state_dict(state)
    assert not td["a"].any()


def make_unwritable() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3, 4)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("leaf", "message"),
    [(make_unwritable, "inference_mode"), (lambda: torch.zeros(1, 4).expand(3, 4), "it is expanded")],
)
@pytest.mark.parametrize("flatten", [False, True])
def test_load_state_dict_unwritable_leaf_writes_nothing(leaf, message, flatten, stacked):
    def build():
        td = TensorDict({"a": torch.zeros(3), "n": {"b": leaf()}}, [3])
        return LazyStackedTensorDict(td, td.empty().update(td)) if stacked else td

    td = build()
    state = td.clone().apply(lambda leaf: leaf.clone() + 1).state_dict(flatten=flatten)
    with pytest.raises(StructureError, match=f"cannot write key .*'b'.* in place: .*{message}"):
        td.load_state_dict(state)
    assert not td["a"].any()
    td.load_state_dict(state, assign=True)
    assert td["a"].all() and td["n", "b"].all()


@pytest.mark.parametrize(
    "kind", [lambda td: td, lambda td: td.to_lazystack(0), lambda td: td.to_lazystack(1)]
)
def test_load_state_dict_assign_batch_size_mismatch_raises(kind):
    td = kind(TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, [2, 3]))
    wrong = {"a": torch.ones(2, 3), "b": torch.ones(1, 7)}
    with pytest.raises(StructureError, match=r"key 'b' has shape \(1, 7\), the batch size there is \(2, 3\)"):
        td.load_state_dict(wrong, assign=True)
    assert not td["a"].any()


@pytest.mark.parametrize("flatten", [False, True])
def test_load_state_dict_new_node_batch_size_mismatch_raises(flatten):
    source = TensorDict({"a": torch.ones(3), "n": {"m": {"c": torch.ones(3, 2)}}}, [3])
    target = TensorDict({"a": torch.zeros(3)}, [3])
    state = source.state_dict(flatten=flatten)
    level, key = (state, "n.m.c") if flatten else (state["n"]["m"], "c")
    level[key] = torch.ones(4, 2)
    message = r"key \('n', 'm', 'c'\) has shape \(4, 2\), the batch size there is \(3,\)"
    with pytest.raises(StructureError, match=message):
        target.load_state_dict(state, strict=False)
    level[key] = torch.ones(3, 2)
    metadata = state._metadata["n.m"] if flatten else state["n"]["m"]._metadata[""]
    metadata["batch_size"] = torch.Size([2])
    message = r"key \('n', 'm'\) has batch size \(2,\), the level above it \(3,\)"
    with pytest.raises(StructureError, match=message):
        target.load_state_dict(state, strict=False)
    assert list(target.keys()) == ["a"] and not target["a"].any()


def test_load_state_dict_moves_new_leaves_to_device():
    state = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3)}}).state_dict()
    found = TensorDict(device="meta").load_state_dict(state, strict=False)
    assert found["a"].device == found["n", "b"].device == torch.device("meta")


def make_params(value: float) -> TensorDict:
    return TensorDict(
        {
            "a": torch.full((2,), value),
            "n": {"b": torch.full((2, 3), value), "m": {"c": torch.full((2,), value)}},
        },
        batch_size=[2],
    )


SOURCES: dict[str, Callable[[], Any]] = {
    "dense": lambda: make_params(1),
    "lazy stack": lambda: lazy_stack([make_params(1)[0], make_params(1)[1]]),
    "lazy level": lambda: make_params(1).update(
        {"n": lazy_stack([make_params(1)["n"][0], make_params(1)["n"][1]])}
    ),
    "params": lambda: TensorDictParams(make_params(1)),
    "params as level": lambda: TensorDict(
        {"a": torch.ones(2), "n": TensorDictParams(make_params(1)["n"])}, [2]
    ),
    "locked": lambda: make_params(1).lock_(),
}


TARGETS: dict[str, Callable[[], Any]] = {
    "empty": TensorDict,
    "empty with a batch size": lambda: TensorDict(batch_size=[2]),
    "some entries": lambda: make_params(0).select("a", ("n", "m")),
    "other entries": lambda: TensorDict({"z": torch.zeros(2), "n": {}}, [2]),
    "all entries": lambda: make_params(0),
    "lazy stack": lambda: LazyStackedTensorDict(make_params(0)[0].select("a"), make_params(0)[1].select("a")),
}


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_load_state_dict_not_strict_copies_every_entry(
    source: str, target: str, flatten: bool, keep_vars: bool
) -> None:
    given, loaded = SOURCES[source](), TARGETS[target]()
    assert (
        loaded.load_state_dict(given.state_dict(flatten=flatten, keep_vars=keep_vars), strict=False) is loaded
    )
    for leaf in given._leaves():
        leaf.detach().fill_(7)
    for key in ("a", ("n", "b"), ("n", "m", "c")):
        assert (loaded[key] == 1).all() and loaded[key].shape == make_params(1)[key].shape
        assert not loaded[key].requires_grad


@pytest.mark.parametrize("flatten", [False, True])
def test_load_state_dict_assign_stores_same_tensors(flatten: bool) -> None:
    given, loaded = make_params(1), TensorDict()
    loaded.load_state_dict(given.state_dict(flatten=flatten, keep_vars=True), strict=False, assign=True)
    assert loaded["a"] is given["a"] and loaded["n", "m", "c"] is given["n", "m", "c"]


def load_directly(params: Any, state: Any, **options: Any) -> None:
    params.load_state_dict(state, strict=False, **options)


def load_in_a_module(params: Any, state: Any, **options: Any) -> None:
    holder = nn.Module()
    holder.held = params
    holder.load_state_dict({f"held.{key}": leaf for key, leaf in state.items()}, strict=False, **options)


def load_in_a_collection(params: Any, state: Any, **options: Any) -> None:
    TensorDict({"held": params}).load_state_dict(
        {f"held.{key}": leaf for key, leaf in state.items()}, strict=False, **options
    )


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("load", [load_directly, load_in_a_module, load_in_a_collection])
@pytest.mark.parametrize("no_convert", [False, True])
def test_load_state_dict_not_strict_adds_nothing_to_params(no_convert: bool, load: Any, assign: bool) -> None:
    entries = {
        "w": nn.Parameter(torch.zeros(2)),
        "n": {"b": nn.Parameter(torch.zeros(2)), "mean": Buffer(torch.zeros(2))},
    }
    params = TensorDictParams(TensorDict(entries), no_convert=no_convert)
    extra = {"x": torch.ones(5), "n.x": torch.ones(5), "n.m.x": torch.ones(5), "e.x": torch.ones(5)}
    load(params, {"w": torch.ones(2), "n.b": torch.ones(2), **extra}, assign=assign)
    assert [name for name, _ in params.named_parameters()] == ["w", "n.b"]
    assert [name for name, _ in params.named_buffers()] == ["n.mean"]
    assert params["w"].tolist() == params["n", "b"].tolist() == [1, 1] and params["n", "mean"].tolist() == [
        0,
        0,
    ]


def test_load_state_dict_strict_extra_entries_raises() -> None:
    params = TensorDictParams(TensorDict({"w": torch.zeros(2)}))
    with pytest.raises(
        StructureError, match=r"unexpected keys: \['n.x', 'x'\]|unexpected keys: \['x', 'n.x'\]"
    ):
        params.load_state_dict({"w": torch.ones(2), "x": torch.ones(5), "n.x": torch.ones(5)})
    assert params["w"].tolist() == [0, 0]


def test_load_state_dict_not_strict_wrong_shape_raises() -> None:
    params = TensorDictParams(TensorDict({"w": torch.zeros(2)}))
    with pytest.raises(StructureError, match=r"key 'w' has shape \(2,\), given \(3,\)"):
        params.load_state_dict({"w": torch.ones(3), "x": torch.ones(5)}, strict=False)
