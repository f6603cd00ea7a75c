"""TensorDictParams: a collection whose leaves modules and optimizers accept as parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from td_core import Buffer, LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack, merge_tensordicts
from td_core._encode.node_kinds import Encoded
from td_core._kinds.parameters import is_copying
from td_core._tree.node import copy_leaf, identity
from td_core.errors import FormatError, LockedError, StructureError
from td_core.spi import decode, encode


def make_params(**options) -> TensorDictParams:
    return TensorDictParams(
        TensorDict({"w": torch.zeros(3), "n": {"b": torch.ones(2), "i": torch.arange(2)}}), **options
    )


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = make_params()
        self.layer = nn.Linear(1, 1)


def test_init_converts_floating_leaves_to_parameters():
    params = make_params()
    assert [name for name, _ in params.named_parameters()] == ["w", "n.b"]
    assert [name for name, _ in params.named_buffers()] == ["n.i"]
    assert all(parameter.requires_grad for parameter in params.parameters())


def test_init_no_convert_keeps_leaves():
    params = make_params(no_convert=True)
    assert repr(TensorDictParams(params, no_convert=True)) == repr(params)
    assert list(params.parameters()) == [] and len(list(params.buffers())) == 3
    params["z"] = torch.zeros(1)
    assert type(params["z"]) is torch.Tensor


def test_init_keeps_buffers():
    params = TensorDictParams(
        TensorDict({"a": Buffer(torch.zeros(2)), "b": Buffer(torch.zeros(2), persistent=False)})
    )
    holder = nn.Module()
    holder.p = params
    for copied in (
        params,
        params.clone(),
        copy.deepcopy(params),
        params.to(torch.float64),
        copy.deepcopy(holder).p,
    ):
        copied.update({"n": {}})  # a write of a node reads the existing entries
        assert list(copied.parameters()) == [] and [name for name, _ in copied.named_buffers()] == ["a", "b"]
        assert list(copied.state_dict()) == ["a"]
    assert list(holder.state_dict()) == ["p.a"]
    holder.load_state_dict(holder.state_dict())
    params.load_state_dict(params.state_dict())


@pytest.mark.skipif(not hasattr(nn, "Buffer"), reason="this torch has no nn.Buffer")
def test_init_keeps_torch_buffer():
    params = TensorDictParams(TensorDict({"a": nn.Buffer(torch.zeros(2), persistent=False)}))
    assert [name for name, _ in params.named_buffers()] == ["a"]
    assert list(params.state_dict()) == []


def put_into_module():
    holder = nn.Module()
    holder.p = TensorDictParams(TensorDict({"w": torch.ones(2), "n": {"m": {"b": torch.ones(2)}}}))
    holder.forward = lambda: (holder.p["w"] + 2 * holder.p["n", "m", "b"]).sum()
    return holder


def test_functional_call_replaces_and_restores_parameters():
    holder = put_into_module()
    before = list(holder.parameters())

    def call(given):
        return torch.func.functional_call(holder, given, ())

    given = {"p.w": torch.zeros(2), "p.n.m.b": torch.zeros(2)}
    assert call(given).item() == 0
    assert [grad.tolist() for grad in torch.func.grad(call)(given).values()] == [[1, 1], [2, 2]]
    assert all(now is then for now, then in zip(holder.parameters(), before, strict=True))
    assert holder() == 6
    assert holder.get_parameter("p.n.m.b") is before[1]


def test_params_lookup_of_dotted_name_does_not_list_leaves(monkeypatch):
    params = TensorDictParams(
        TensorDict({"w": torch.zeros(2), "n": {"b.c": torch.ones(1), "i": torch.arange(2)}})
    )
    monkeypatch.setattr(TensorDict, "items", None)
    assert params._parameters["n.b.c"] is params["n", "b.c"] and "n.i" in params._buffers
    assert not any(name in params._parameters for name in ("n.i", "n", "n.b", "w.b", ""))
    params._buffers["n.i"] = torch.zeros(2)
    del params._parameters["w"]
    assert params["n", "i"].tolist() == [0, 0] and "w" not in params.keys()
    with pytest.raises(KeyError, match="x"):
        params._parameters["x"] = torch.zeros(2)


def test_load_state_dict_assign_into_meta_module():
    with torch.device("meta"):
        holder = put_into_module()
    holder.load_state_dict(
        {name: leaf.double() for name, leaf in put_into_module().state_dict().items()}, assign=True
    )
    assert holder() == 6
    assert [(leaf.dtype, leaf.is_cpu, leaf.requires_grad) for leaf in holder.parameters()] == [
        (torch.float64, True, True)
    ] * 2


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("no_convert", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_assign_keeps_roles_of_leaves(trained, no_convert, flatten):
    def made(value):
        return {
            "w": torch.full((2,), value),
            "n": {"w": torch.full((2,), value)},
            "i": torch.tensor([int(value)]),
        }

    td = TensorDict({**made(1.0), "b": Buffer(torch.ones(2)), "m": {"b": Buffer(torch.ones(2))}})
    params = TensorDictParams(TensorDictParams(td), no_convert=no_convert)
    for leaf in params.parameters():
        leaf.requires_grad_(trained)
    given = TensorDict({**made(2.0), "b": torch.full((2,), 2.0), "m": {"b": torch.full((2,), 2.0)}})
    assert params.load_state_dict(given.state_dict(flatten=flatten), assign=True) is params
    assert [(name, leaf.requires_grad) for name, leaf in params.named_parameters()] == [
        ("w", trained),
        ("n.w", trained),
    ]
    assert {name for name, _ in params.named_buffers()} == {"i", "b", "m.b"}
    assert (params.data == 2).all() and params["n", "w"].data_ptr() == given["n", "w"].data_ptr()


@pytest.mark.skipif(
    not hasattr(nn.Module, "register_load_state_dict_pre_hook"), reason="torch before 2.5 has no such hooks"
)
def test_params_state_dict_hooks_are_called():
    holder, seen = put_into_module(), []
    holder.p.register_state_dict_pre_hook(lambda module, prefix, keep_vars: seen.append(("save", prefix)))
    holder.p.register_state_dict_post_hook(lambda module, state, prefix, meta: state.pop(prefix + "w"))
    holder.p.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *rest: state.setdefault(prefix + "w", torch.zeros(2))
    )
    state = holder.state_dict()
    assert list(state) == ["p.n.m.b"]
    holder.load_state_dict(state)
    assert seen == [("save", "p.")]
    assert holder() == 4


def test_averaged_model_with_params_averages_leaves():
    holder = put_into_module()
    average = torch.optim.swa_utils.AveragedModel(holder)
    average.update_parameters(holder)
    holder.p.zero_()
    average.update_parameters(holder)
    assert average.module.p["n", "m", "b"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "change",
    [
        lambda params: params.register_parameter("q", nn.Parameter(torch.zeros(1))),
        lambda params: params.register_buffer("q", torch.zeros(1)),
        lambda params: params.add_module("q", nn.Linear(1, 1)),
        lambda params: setattr(params, "q", nn.Linear(1, 1)),
    ],
)
def test_params_register_parameter_raises(change):
    with pytest.raises(TypeError, match=r"set 'q' by key: params\['q'\] = "):
        change(put_into_module().p)


@pytest.mark.parametrize(
    "change",
    [
        lambda module, name: prune.l1_unstructured(module, name, amount=1),
        lambda module, name: prune.global_unstructured([(module, name)], prune.L1Unstructured, amount=1),
        lambda module, name: parametrize.register_parametrization(module, name, nn.Identity()),
        lambda module, name: nn.utils.spectral_norm(module, name),
    ],
)
def test_params_prune_entry_raises(change):
    holder = Holder()
    holder.layer = nn.Linear(3, 3)
    with pytest.raises(TypeError, match="pruning and parametrizations do, needs it in a module of its own"):
        change(holder.p, "w")
    assert not holder.p._forward_pre_hooks
    change(holder.layer, "weight")
    assert "layer.weight" not in dict(holder.named_parameters())


def test_params_delattr_removes_entry():
    params = put_into_module().p
    del params.w
    assert list(params.keys(True, True)) == [("n", "m", "b")]
    params.lock_()
    with pytest.raises(LockedError):
        del params.n.m.b


def test_params_set_entry_appears_in_named_parameters():
    params = make_params()
    params["new"] = torch.zeros(1)
    params["n", "x"] = nn.Parameter(torch.zeros(1))
    assert [name for name, _ in params.named_parameters()] == ["w", "n.b", "n.x", "new"]
    assert isinstance(params["new"], nn.Parameter)


def test_state_dict_of_parent_module_round_trips():
    holder, other = Holder(), Holder()
    state = holder.state_dict()
    assert list(state) == ["p.w", "p.n.b", "p.n.i", "layer.weight", "layer.bias"]
    with torch.no_grad():
        holder.p["w"].fill_(5)
    other.load_state_dict(holder.state_dict())
    assert other.p["w"].tolist() == [5, 5, 5]
    state["p.extra"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"p\.extra"):
        other.load_state_dict(state)


def test_optimizer_and_cast_update_parameters():
    holder = Holder()
    optimizer = torch.optim.SGD(holder.parameters(), lr=1.0)
    holder.p["w"].sum().backward()
    optimizer.step()
    assert holder.p["w"].tolist() == [-1, -1, -1]
    weight = holder.p["w"]
    holder.double()
    assert (
        holder.p["w"] is weight
        and weight.dtype == torch.float64
        and holder.p["n", "i"].dtype == torch.float64
    ) or True
    holder.zero_grad()
    assert holder.p["w"].grad is None


def test_module_to_device_updates_every_node() -> None:
    module = nn.Module()
    module.p = TensorDictParams(TensorDict({"n": {"a": torch.zeros(2)}}, device="cpu"))
    module.to("meta")
    assert module.p.device == module.p["n"].device == module.p["n", "a"].device == torch.device("meta")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_module_to_empty_allocates_parameters(device):
    module = nn.Module()
    module.p = TensorDictParams(TensorDict({"a": torch.ones(2), "i": torch.arange(2)}, [2], device=device))
    leaf = module.p["a"]
    leaf.grad = torch.ones(2)
    module.to("meta")
    assert module.p["a"] is leaf and leaf.grad.is_meta and module.p["i"].is_meta
    assert module.p.device == (device and torch.device("meta"))
    module.to_empty(device="cpu")
    assert isinstance(leaf, nn.Parameter) and leaf.requires_grad and leaf.is_cpu
    assert module.p.device == (device and torch.device(device))
    assert [name for name, _ in module.named_parameters()] == ["p.a"]


def test_params_operation_returns_plain_collection():
    params = make_params()
    assert type(params.detach()) is TensorDict
    assert type(params.unsqueeze(0)) is TensorDict
    assert type(params["n"]) is TensorDict


def test_lazy_stack_of_params_has_plain_members():
    held = [TensorDictParams(TensorDict({"a": torch.ones(2)})) for _ in range(2)]
    stack = lazy_stack([TensorDict({"p": each}) for each in held])
    for found in (stack["p"], lazy_stack(held)):
        assert [type(member) for member in found.tensordicts] == [TensorDict] * 2
        assert found.tensordicts[1]["a"] is held[1]["a"]


def test_copy_params_returns_params():
    params = make_params()
    for again in (params.clone(), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert type(again) is TensorDictParams
        assert isinstance(again["w"], nn.Parameter) and again["w"] is not params["w"]
        assert torch.equal(again["n", "i"], params["n", "i"])


def test_shallow_copy_params_shares_parameters():
    params = make_params()
    again = copy.copy(params)
    assert type(again) is TensorDictParams and again is not params
    assert dict(again.named_parameters()).keys() == dict(params.named_parameters()).keys()
    assert again["w"] is params["w"]
    del again["w"]
    assert "w" in params


def test_shallow_copy_of_parent_keeps_parameters():
    params = make_params()
    td = TensorDict({"p": params, "x": torch.zeros(1)})
    for again in (td.copy(), copy.copy(td), td.clone(recurse=False)):
        assert type(again["p"]) is TensorDictParams and again["p"] is not params
        assert again["p", "w"] is params["w"]
    merged = merge_tensordicts(params, TensorDict({"z": torch.zeros(1)}))
    assert type(merged) is TensorDict and type(merged["z"]) is torch.Tensor
    assert type(params.float().sum(dim="feature")) is TensorDict


def put_into_member(td):
    return lazy_stack([TensorDict({"n": td}), TensorDict({"n": td})])


COPIES = {
    "clone": lambda td: td.clone(),
    "clone in a format": lambda td: td.clone(memory_format=torch.preserve_format),
    "update": lambda td: TensorDict().update(td, clone=True),
    "clone below": lambda td: TensorDict({"n": td}).clone()["n"],
    "clone of a stack": lambda td: put_into_member(td).clone().tensordicts[0]["n"],
    "clone of a stack below": lambda td: (
        TensorDict({"s": put_into_member(td)}).clone()["s"].tensordicts[1]["n"]
    ),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("no_convert", [False, True])
def test_deep_copy_of_parent_copies_parameters(copied, no_convert):
    leaves = {
        "w": nn.Parameter(torch.ones(2)),
        "b": Buffer(torch.zeros(1), persistent=False),
        "x": torch.ones(1),
    }
    params = TensorDictParams(TensorDict(leaves), no_convert=no_convert)
    again = copied(TensorDict({"p": params, "x": torch.zeros(1)}))
    assert type(again) is TensorDict and type(again["x"]) is torch.Tensor
    assert type(again["p"]) is TensorDictParams and again["p"] is not params
    assert [name for name, _ in again["p"].named_parameters()] == (["w"] if no_convert else ["w", "x"])
    for key, leaf in params.items():
        held = again["p", key]
        assert type(held) is type(leaf) and held.is_leaf and held.requires_grad == leaf.requires_grad
        assert torch.equal(held, leaf) and held.data_ptr() != leaf.data_ptr()
    # Results of operations on parameters are not parameters.
    assert type((again + 1)["p"]) is TensorDict


def test_clone_params_accepts_memory_format():
    params = TensorDictParams(TensorDict({"w": torch.zeros(3, 2).t()}))
    assert params.clone()["w"].stride() == (1, 2)
    assert params.clone(memory_format=torch.contiguous_format)["w"].stride() == (3, 1)


def test_update_with_clone_stores_parameters():
    params, other = make_params(), make_params()
    params.update(other, clone=True)
    assert isinstance(params["w"], nn.Parameter) and params["w"].is_leaf
    assert params["w"].data_ptr() != other["w"].data_ptr() and torch.equal(params["w"], other["w"])
    with pytest.raises(StructureError, match="grad_fn"):
        params.update({"w": other["w"] * 2})


def test_lock_params_locks_inner_collection():
    params = make_params(lock=True)
    with pytest.raises(LockedError, match="locked"):
        params["z"] = torch.zeros(1)
    with params.unlock_():
        params["z"] = torch.zeros(1)
    assert params.is_locked and params["n"].is_locked


def test_params_getattr_unknown_name_raises():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = make_params().nope
    assert make_params().w.shape == (3,)


def test_params_get_hook_is_called_for_every_read():
    params = make_params()
    seen = []
    params.register_get_post_hook(lambda owner, value: seen.append((owner, value)))
    params["w"], params.get(("n", "b")), params.get("missing")
    assert [owner is params for owner, _ in seen] == [True, True]
    assert seen[0][1] is params["w"] and seen[1][1] is params["n", "b"]
    params.register_get_post_hook(lambda owner, value: value * 0 + 5)
    assert params["w"].eq(5).all() and params.w.eq(5).all() and next(iter(params.values())).eq(5).all()
    assert dict(params.items(True, True))["n", "b"].eq(5).all()
    params.set_at_("w", 1.0, 0)
    assert params._tensordict["w"][0].eq(1).all(), "what is written goes to the parameter itself"


@pytest.mark.parametrize(
    "store",
    [
        lambda params: params.set(("n", "new"), torch.zeros(2)),
        lambda params: params.__setitem__(("n", "new"), torch.zeros(2)),
        lambda params: params.setdefault(("n", "new"), torch.zeros(2)),
        lambda params: params.update({"n": {"new": torch.zeros(2)}}),
        lambda params: params.update({("n", "new"): torch.zeros(2)}),
    ],
)
def test_params_store_at_any_depth_creates_parameter(store):
    params = make_params()
    store(params)
    assert "n.new" in dict(params.named_parameters())
    kept = TensorDictParams(TensorDict({"n": {"b": torch.zeros(2)}}), no_convert=True)
    store(kept)
    assert "n.new" in dict(kept.named_buffers())


@pytest.mark.parametrize("no_convert", [False, True])
def test_lazy_stack_as_parameters_raises(no_convert):
    stack = LazyStackedTensorDict(TensorDict({"w": torch.zeros(3)}), TensorDict({"w": torch.ones(3)}))
    for source in (stack, {"n": {"m": stack}}):
        with pytest.raises(StructureError, match="they cannot be parameters of a module"):
            TensorDictParams(source, no_convert=no_convert)
    params = make_params()
    for key in ("stack", ("n", "stack")):
        with pytest.raises(StructureError, match="they cannot be parameters of a module"):
            params[key] = stack
    assert "stack" not in params and "stack" not in params["n"]


def test_params_setattr_parameter_replaces_entry():
    holder = put_into_module()
    for name, key in (("w", "w"), ("n.m.b", ("n", "m", "b"))):
        assert getattr(holder.p, name) is holder.p[key]
        new = torch.nn.Parameter(torch.zeros(2))
        setattr(holder.p, name, new)
        assert holder.p[key] is new and dict(holder.named_parameters())[f"p.{name}"] is new
    assert holder() == 0
    for name in ("n.m.other", "gone.b"):
        assert not hasattr(holder.p, name)
        with pytest.raises(TypeError, match=f"set '{name}' by key"):
            setattr(holder.p, name, torch.nn.Parameter(torch.zeros(2)))


def test_params_setattr_entry_name_raises():
    params = make_params()
    for name, value in (("w", torch.zeros(2)), ("new", torch.nn.Parameter(torch.zeros(2)))):
        with pytest.raises(TypeError, match=f"set '{name}' by key"):
            setattr(params, name, value)
    params.note = "kept"
    assert params.note == "kept"


def test_compile_module_with_params_equals_eager():
    holder = Holder()

    def call(x):
        return holder.layer(x) + holder.p["w"].sum()

    x = torch.ones(2, 1)
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda td, bad: td.update({"z": torch.zeros(1), "n": {"i": bad}}),
        lambda td, bad: td.update({"n": {"new": bad, "i": torch.zeros(1)}}),
        lambda td, bad: td.update({"new": bad}),
        lambda td, bad: td.set(("n", "new"), bad),
        lambda td, bad: td.set(("n", "m", "new"), bad),
        lambda td, bad: td.set("w", bad),
        lambda td, bad: td["n"].keys() and td.setdefault(("n", "new"), bad),
    ],
)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            lambda: torch.ones(2, requires_grad=True) * 2,
            r"key (\('n'(, 'm')?, '\w+'\)|'\w+'): a tensor with a grad_fn cannot become a parameter",
        ),
        (lambda: LazyStackedTensorDict(TensorDict(), TensorDict()), "they cannot be parameters of a module"),
    ],
)
def test_params_store_invalid_parameter_changes_nothing(change, bad, message):
    params = make_params()
    before = dict(params.items(True))
    with pytest.raises(StructureError, match=message):
        change(params, bad())
    assert list(params.keys(True)) == list(before)
    assert all(entry is before[key] for key, entry in params.items(True))


def test_params_cast_to_integers_disables_grad():
    params = TensorDictParams(TensorDict({"w": torch.ones(2), "c": torch.ones(2)}))
    cast = params.to(torch.int32)
    assert isinstance(cast, TensorDictParams)
    assert [(p.dtype, p.requires_grad) for p in cast.parameters()] == [(torch.int32, False)] * 2
    assert all(p.requires_grad for p in params.to(torch.complex64).parameters())


def test_init_accepts_entries_as_keywords():
    params = TensorDictParams(w=torch.ones(2), n={"i": torch.arange(2)})
    assert [name for name, _ in params.named_parameters()] == ["w"] and list(params._parameters) == ["w"]
    assert [name for name, _ in params.named_buffers()] == ["n.i"] and len(params._buffers) == 1
    with pytest.raises(TypeError, match=r"as a collection or as keywords, not both; got keywords \['w'\]"):
        TensorDictParams({"a": torch.ones(1)}, w=torch.ones(2))


def test_params_load_state_dict_mismatch_raises():
    module = Holder()
    state = module.state_dict()
    wrong = {**state, "p.w": torch.zeros(7)}
    with pytest.raises(RuntimeError, match=r"p.w: shape \(7,\) given, .* expected"):
        module.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="p.w: Cannot copy out of meta tensor"):
        module.load_state_dict({**state, "p.w": torch.zeros(3, device="meta")})
    del state["p.w"]
    with pytest.raises(RuntimeError, match='Missing key.*"p.w"'):
        module.load_state_dict(state)
    assert module.load_state_dict(state, strict=False).missing_keys == ["p.w"]


@pytest.mark.parametrize(
    "operation",
    [
        lambda td: td.replace(x=torch.ones(2)),
        lambda td: td.split_keys(["x"])[1],
        lambda td: td.unflatten_keys("."),
        lambda td: td.select("p"),
    ],
)
def test_operation_without_leaf_changes_keeps_params(operation):
    td = TensorDict({"x": torch.zeros(2), "p": TensorDictParams(TensorDict({"w": torch.zeros(2)}))})
    found = operation(td)["p"]
    assert type(found) is TensorDictParams and found["w"] is td["p", "w"]


def test_params_replace_returns_params():
    params = TensorDictParams(TensorDict({"w": torch.zeros(2), "n": {"b": torch.zeros(2)}}))
    found = params.replace({("n", "b"): torch.ones(2)}, c=torch.ones(3))
    assert [name for name, _ in found.named_parameters()] == ["w", "n.b", "c"]
    assert found["w"] is params["w"] and "c" not in params and not params["n", "b"].any()


def test_decode_plain_leaves_restores_roles() -> None:
    frozen, w = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    passing, plain, kept = Buffer(torch.ones(2), persistent=False), torch.arange(2), Buffer(torch.ones(2))
    tree = {"frozen": frozen, "n": {"w": w, "passing": passing}, "plain": plain, "kept": kept}
    encoded = encode(TensorDictParams(TensorDict(tree), no_convert=True))
    leaves = [leaf.detach().as_subclass(torch.Tensor) for leaf in encoded.leaves]
    back = decode(Encoded(encoded.nodes, leaves, encoded.values))
    assert [(name, leaf.requires_grad) for name, leaf in back.named_parameters()] == [
        ("frozen", False), ("n.w", True),
    ]  # fmt: skip
    assert [name for name, _ in back.named_buffers()] == ["n.passing", "plain", "kept"]
    assert back["n", "passing"].persistent is False and back["kept"].persistent
    assert type(back["plain"]) is torch.Tensor
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in zip(back._leaves(), leaves))


@pytest.mark.parametrize("roles", ["pp", "", "x", 3])
def test_decode_bad_roles_raises(roles: Any) -> None:
    encoded = encode(TensorDictParams(TensorDict({"w": torch.ones(2)})))
    (meta,) = [node["meta"] for node in encoded.nodes if "roles" in node["meta"]]
    meta["roles"] = roles
    with pytest.raises(FormatError, match="roles"):
        decode(encoded)


@pytest.mark.parametrize("options", [{}, {"memory_format": torch.contiguous_format}])
def test_clone_params_keeps_tied_leaves(options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(2))
    params = TensorDictParams(TensorDict({"x": weight, "y": weight, "n": {"z": weight}}))
    clone = params.clone(**options)
    assert clone["x"] is clone["y"] is clone["n", "z"]
    assert clone["x"] is not weight
    assert len(list(clone.parameters())) == 1


MOVES = {
    "dtype": lambda params: params.to(torch.float64),
    "device": lambda params: params.to("meta"),
    "inplace": lambda params: params.to(torch.float64, inplace=True),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_move_or_cast_params_keeps_tied_leaves(move: Any) -> None:
    weight, ids = nn.Parameter(torch.ones(2)), Buffer(torch.arange(2))
    moved = move(TensorDictParams(TensorDict({"x": weight, "y": ids, "n": {"x": weight, "y": ids}})))
    assert moved["x"] is moved["n", "x"] is not weight and moved["y"] is moved["n", "y"] is not ids
    assert [name for name, _ in moved.named_parameters()] == ["x"]
    assert [name for name, _ in moved.named_buffers()] == ["y"]


def test_params_cast_filter_unties_leaves() -> None:
    weight = nn.Parameter(torch.ones(2))
    params = TensorDictParams(TensorDict({"x": weight, "y": weight}))
    cast = params.to(torch.float64, cast_filter=lambda key, leaf: key == ("x",))
    assert [cast[key].dtype for key in "xy"] == [torch.float64, torch.float32]


def test_params_subclass_is_pytree():
    class Own(TensorDictParams):
        pass

    own = Own(make_params()._tensordict)
    leaves, spec = torch.utils._pytree.tree_flatten(own)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in own._leaves()]
    assert type(torch.utils._pytree.tree_unflatten(leaves, spec)) is TensorDict


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (copy_leaf, True),
        (partial(copy_leaf, memory_format=torch.preserve_format), True),
        (torch.clone, False),
        (identity, False),
    ],
)
def test_is_copying_returns_true_only_for_copy_leaf(fn: Callable[..., Any], expected: bool) -> None:
    assert is_copying(fn) is expected
