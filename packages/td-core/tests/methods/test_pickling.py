"""Copies and pickles: leaves equal those that torch copies; shared memory, shared nodes and attributes are kept."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.spi import decode, encode


def make_with_grad() -> Tensor:
    leaf = torch.ones(3, requires_grad=True)
    leaf.grad = torch.full((3,), 2.0)
    return leaf


def make_with_old_grad() -> Tensor:
    return make_with_grad().requires_grad_(False)


def make_with_attribute() -> Tensor:
    leaf = torch.ones(3)
    leaf.note = [1]  # type: ignore[attr-defined]
    return leaf


LEAVES: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: torch.arange(6).view(2, 3),
    "part": lambda: torch.arange(6)[1:3],
    "overlapping elements": lambda: torch.arange(4).as_strided((2, 2), (1, 1)),
    "transposed": lambda: torch.arange(6).view(2, 3).t(),
    "expanded": lambda: torch.ones(1).expand(3),
    "empty": lambda: torch.zeros(0, 2),
    "number": lambda: torch.tensor(3),
    "odd stride": lambda: torch.arange(2).as_strided((1, 2), (7, 1)),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "grad": make_with_grad,
    "old grad": make_with_old_grad,
    "attribute": make_with_attribute,
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.zeros(2, device="meta"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse .* tensor support")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.eye(2).to_sparse_bsc((1, 2)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
)
def test_deepcopy_leaf_without_storage_copies_values(make: Callable[[], Tensor], grad: bool) -> None:
    leaf = make().requires_grad_(grad)
    found = deepcopy(TensorDict({"a": leaf, "b": leaf}))
    copied = found["a"]
    assert copied is found["b"] is not leaf and copied.is_leaf and copied.requires_grad is grad
    copied.detach().mul_(2)
    for old, new in zip(leaf.values(), copied.values(), strict=True):
        assert torch.equal(new, 2 * old)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error has notes from Python 3.11 on")
def test_deepcopy_non_leaf_tensor_error_notes_key() -> None:
    td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2, requires_grad=True) * 2}})
    with pytest.raises(RuntimeError, match="created explicitly") as caught:
        deepcopy(td)
    assert caught.value.__notes__ == ["at key ('n', 'b')"]


@pytest.mark.parametrize("form", LEAVES)
def test_deepcopy_leaf_equals_torch_deepcopy(form: str) -> None:
    leaf = LEAVES[form]()
    wanted, found = deepcopy(leaf), deepcopy(TensorDict({"n": {"a": leaf}}))["n", "a"]
    assert found is not leaf and type(found) is type(wanted)
    for name in ("dtype", "device", "layout", "shape", "requires_grad", "__dict__"):
        assert getattr(found, name) == getattr(wanted, name)
    if form == "attribute":
        assert found.note is not leaf.note  # type: ignore[attr-defined]
    if wanted.layout is torch.strided:
        assert (found.stride(), found.storage_offset()) == (wanted.stride(), wanted.storage_offset())
        assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
        assert (found.is_conj(), found.is_neg()) == (wanted.is_conj(), wanted.is_neg())
    if not leaf.is_meta:
        assert torch.equal(found.to_dense(), leaf.to_dense())
    one, other = found.grad, wanted.grad
    assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


@pytest.mark.parametrize("order", list(permutations(["td", "whole", "part", "storage"])), ids="-".join)
def test_deepcopy_container_keeps_shared_storages(order: tuple[str, ...]) -> None:
    whole = torch.arange(4)
    part = whole[1:]
    given: dict[str, Any] = {"whole": whole, "part": part, "storage": whole.untyped_storage()}
    given["td"] = TensorDict({"view": whole.view(2, 2), "whole": whole, "part": part, "again": whole})
    copied = deepcopy({key: given[key] for key in order})
    assert copied["td"]["whole"] is copied["td"]["again"] is copied["whole"]
    assert copied["td"]["part"] is copied["part"]
    copied["storage"].fill_(0)
    assert not any(leaf.any() for leaf in (copied["whole"], copied["part"], *copied["td"].values()))
    assert whole.tolist() == [0, 1, 2, 3]


def test_deepcopy_leaf_in_memo_returns_memo_value() -> None:
    leaf, other = torch.zeros(2), torch.ones(2)
    assert deepcopy(TensorDict({"a": leaf}), {id(leaf): other})["a"] is other


def save_and_load(td: Any) -> Any:
    file = io.BytesIO()
    torch.save(td, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "torch.save": save_and_load,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("order", [*permutations(["near", "far", "stack"])])
def test_copy_node_under_several_keys_stays_one_node(copied: Any, order: tuple[str, ...]) -> None:
    one = TensorDict({"x": torch.zeros(2), "below": {"y": torch.ones(2)}}, [2])
    above = TensorDict({"one": one, "below": one["below"]}, [2])
    places = {
        "near": above,
        "far": TensorDict({"above": above, "one": one}, [2]),
        "stack": LazyStackedTensorDict(one, one, stack_dim=1),
    }
    td = TensorDict({key: places[key] for key in order}, [2])
    again = copied(td)
    shared = again["near"]["one"]
    assert shared is not one and shared is again["far"]["one"]
    assert again["far"]["above"] is again["near"] and again["near"]["below"] is shared["below"]
    assert all(member is shared for member in again.get("stack").tensordicts)
    assert list(again.keys()) == list(order) and list(shared.keys()) == ["x", "below"]
    shared["new"] = torch.ones(2)
    assert "new" in again["far", "above", "one"].keys() and "new" not in one.keys()


class Twice(TensorDict):
    """A class with the name of a later class, as after running a notebook cell twice."""


First = Twice


class Twice(TensorDict):  # type: ignore[no-redef]
    """The class that the module has under this name."""


def copy_by_state(td: Any) -> Any:
    made = type(td).__new__(type(td))
    made.__setstate__(td.__getstate__())
    return made


def copy_by_reduce(td: Any) -> Any:
    rebuild, arguments = td.__reduce_ex__(4)[:2]
    return rebuild(*arguments)


@pytest.mark.parametrize("copied", [deepcopy, copy_by_reduce, copy_by_state])
@pytest.mark.parametrize("order", [*permutations((First, Twice))])
def test_copy_class_with_repeated_name_keeps_class(copied: Any, order: tuple[Any, ...]) -> None:
    one, other = (cls({"x": torch.ones(2)}, batch_size=[2]) for cls in order)
    shared = TensorDict({"other": other})
    root = TensorDict({"shared": shared, "n": {"again": shared, "deep": {"one": one}}})
    root["last"] = other
    for each in (one, other):
        assert type(copied(each)) is type(each)
    found = copied(root)
    assert [type(found["shared", "other"]), type(found["n", "deep", "one"])] == [type(other), type(one)]
    assert type(found["last"]) is type(other) and found["n", "again"] is found["shared"]


def test_decode_without_classes_uses_class_of_module() -> None:
    encoded = encode(First({}))
    assert type(decode(encoded)) is First
    assert type(decode(replace(encoded, classes={}))) is Twice
    made = [type("Gone", (Twice,), {"__module__": __name__}) for _ in range(2)]
    assert type(decode(replace(encode(made[0]({})), classes={}))) is made[1]


@pytest.mark.parametrize("order", [*permutations(["td", "node", "stack", "member"])], ids="-".join)
def test_deepcopy_container_keeps_node_and_member_identity(order: tuple[str, ...]) -> None:
    td = TensorDict({"n": {"x": torch.zeros(2)}}, [2])
    stack = LazyStackedTensorDict(td["n"], TensorDict({"x": torch.ones(2)}, [2]))
    given = {"td": td, "node": td["n"], "stack": stack, "member": stack.tensordicts[1]}
    copied = deepcopy({key: given[key] for key in order})
    assert copied["td"]["n"] is copied["node"] is copied["stack"].tensordicts[0] is not td["n"]
    assert copied["stack"].tensordicts[1] is copied["member"]
    copied["node"]["x"].fill_(3)
    assert copied["td"]["n", "x"].tolist() == [3, 3] and td["n", "x"].tolist() == [0, 0]


def make_members(count: int = 3) -> list[TensorDict]:
    whole = torch.arange(2.0 * count)
    return [TensorDict({"x": whole[2 * i : 2 * i + 2], "n": {"y": torch.tensor(i)}}) for i in range(count)]


STACKS: dict[str, Callable[[], LazyStackedTensorDict]] = {
    "plain": lambda: LazyStackedTensorDict(*make_members()),
    "dim 1": lambda: LazyStackedTensorDict(
        *[TensorDict({"x": torch.ones(2)}, [2]) for _ in range(3)], stack_dim=1
    ),
    "member twice": lambda: LazyStackedTensorDict(*(one := make_members()), one[0]),
    "node in two members": lambda: LazyStackedTensorDict(
        *[TensorDict({"n": node}) for node in [TensorDict({"a": 1})] * 2]
    ),
    "locked": lambda: LazyStackedTensorDict(*make_members()).lock_(),
    "locked member": lambda: LazyStackedTensorDict(*make_members(2), make_members(1)[0].lock_()),
    "nested stack": lambda: LazyStackedTensorDict(
        *[LazyStackedTensorDict(*make_members()) for _ in range(2)]
    ),
    "other keys": lambda: LazyStackedTensorDict(TensorDict({"a": 1}), TensorDict({"b": 1})),
    "no member": lambda: LazyStackedTensorDict(),
}


@pytest.mark.parametrize("form", STACKS)
def test_deepcopy_lazy_stack_equals_its_encoded_copy(form: str) -> None:
    stack = STACKS[form]()
    found, wanted = deepcopy(stack), pickle.loads(pickle.dumps(stack))
    assert type(found) is LazyStackedTensorDict and found is not stack
    for name in ("batch_size", "stack_dim", "names", "is_locked"):
        assert getattr(found, name) == getattr(wanted, name) == getattr(stack, name)
    for new, same, old in zip(found.tensordicts, wanted.tensordicts, stack.tensordicts, strict=True):
        assert new is not old and new.is_locked == same.is_locked and new.keys(True) == old.keys(True)
        for key, leaf in old.items(True, True):
            assert torch.equal(new[key], leaf) and new[key] is not leaf
    members = [stack.tensordicts, found.tensordicts, wanted.tensordicts]
    first, *others = [[[a is b for a in group] for b in group] for group in members]
    assert others == [first] * 2


def test_deepcopy_lazy_stack_keeps_shared_storage_and_leaves_the_original() -> None:
    stack = LazyStackedTensorDict(*make_members(), stack_dim_name="time")
    found = deepcopy(stack)
    assert found.names == ["time"]
    storages = {member["x"].untyped_storage().data_ptr() for member in found.tensordicts}
    assert len(storages) == 1
    found["x"] = torch.zeros(3, 2)
    found.tensordicts[0]["n", "y"].fill_(7)
    assert stack["x"].tolist() == [[0, 1], [2, 3], [4, 5]] and stack["n", "y"].tolist() == [0, 1, 2]


class Noted(TensorDict):
    """A subclass whose instances have attributes."""

    note: Any


class NotedStack(LazyStackedTensorDict):
    """A lazy stack whose instances have attributes."""

    note: Any


class Listening(TensorDictParams):
    """Parameters with a method that is used as a hook of the same object."""

    def listen(self, *_: Any) -> None:
        """Do nothing."""


def add_note(td: Any, note: Any) -> Any:
    td.note = note
    return td


KEEPING: dict[str, Callable[[Any], Any]] = {
    "copy": copy,
    "deepcopy": deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "pickle 2": lambda td: pickle.loads(pickle.dumps(td, 2)),
    "state": copy_by_state,
}


@pytest.mark.parametrize("name", KEEPING)
def test_copy_keeps_instance_attributes(name: str) -> None:
    stack = add_note(NotedStack(TensorDict({"x": 1}), add_note(Noted({"x": 2}), ["member"])), ["stack"])
    td = add_note(
        Noted({"n": add_note(Noted({"y": 1}), ["node"]), "stack": stack, "p": TensorDict()}), ["root"]
    )
    again = KEEPING[name](td)
    nodes = again["n"], again.get("stack"), again.get("stack").tensordicts[1]
    if name != "copy":
        assert [each.note for each in nodes] == [["node"], ["stack"], ["member"]]
    assert (again.note is td.note) is (name in ("copy", "state")) and vars(again) == {"note": ["root"]}
    assert not hasattr(again.clone(), "note")


class Slotted(TensorDict):
    """A subclass with slots only, one of them with a private name."""

    __slots__ = ("__mark", "note", "unset")

    def marked(self, mark: Any) -> Slotted:
        """Store a mark."""
        self.__mark = mark
        return self

    @property
    def mark(self) -> Any:
        """The stored mark."""
        return self.__mark


class SlottedParams(TensorDictParams):
    """Parameters with a slot."""

    __slots__ = ("note",)


@pytest.mark.parametrize("name", KEEPING)
def test_copy_keeps_slots(name: str) -> None:
    td = add_note(Slotted({"n": add_note(Slotted({"y": 1}), ["node"]).marked(1)}), ["root"]).marked([2])
    again = KEEPING[name](td)
    assert (again.note, again.mark) == (["root"], [2]) and (again.note is td.note) is (
        name in ("copy", "state")
    )
    assert not hasattr(again, "unset") and not hasattr(again, "__dict__")
    if name != "copy":
        assert (again["n"].note, again["n"].mark) == (["node"], 1)
    assert not hasattr(again.clone(), "note")
    if name != "state":
        assert KEEPING[name](add_note(SlottedParams(TensorDict({"w": 1.0})), ["p"])).note == ["p"]


@pytest.mark.parametrize("name", [name for name in KEEPING if name != "state"])
def test_copy_params_keeps_mode_and_hooks(name: str) -> None:
    params = Listening(TensorDict({"w": torch.zeros(2)})).eval()
    plain = KEEPING[name](params)
    assert not plain.training and not plain._forward_hooks
    params.register_forward_hook(params.listen)
    params.register_get_post_hook(params.listen)
    add_note(params, [params])
    again = KEEPING[name](params)
    owner = params if name == "copy" else again
    assert type(again) is Listening and not again.training and again.note[0] is owner
    assert [hook.__self__ for hook in (*again._forward_hooks.values(), *again._get_hooks)] == [owner, owner]
    again.register_forward_hook(print)
    again.register_get_post_hook(print)
    assert len(params._forward_hooks) == len(params._get_hooks) == 1


def test_load_weights_only_keeps_mode_of_params() -> None:
    assert not save_and_load(TensorDict({"p": TensorDictParams(TensorDict({"w": torch.zeros(2)})).eval()}))[
        "p"
    ].training


class Own(TensorDict):
    """A subclass that defines __getstate__ and __setstate__."""

    note: Any

    def __getstate__(self) -> Any:
        return "own", super().__getstate__()

    def __setstate__(self, state: Any) -> None:
        mark, rest = state
        super().__setstate__(rest)
        self.note = mark


class Reduced(TensorDict):
    """A subclass that defines __reduce__."""

    def __reduce__(self) -> Any:
        return Noted, ({"reduced": 1},)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickle_uses_getstate_or_reduce_of_subclass(protocol: int) -> None:
    again = pickle.loads(pickle.dumps(Own({"a": torch.ones(2)}, [2], lock=True), protocol))
    assert type(again) is Own and again.note == "own" and again.is_locked and again["a"].tolist() == [1, 1]
    found = pickle.loads(pickle.dumps(Reduced({"a": 1}), protocol))
    assert type(found) is Noted and list(found.keys()) == ["reduced"]


def test_deepcopy_of_list_keeps_what_collections_share() -> None:
    shared, node = torch.ones(2), TensorDict({"x": torch.zeros(3)})
    first = TensorDict({"a": shared, "n": node})
    second = TensorDict({"b": shared, "m": node, "view": shared[:1]})
    one, other = deepcopy([first, second])
    assert one["a"] is other["b"] and one["n"] is other["m"]
    assert one["a"] is not shared and one["n"] is not node
    other["view"].add_(1)
    assert one["a"].tolist() == [2, 1] and shared.tolist() == [1, 1]


@pytest.mark.parametrize("locked", [False, True])
def test_deepcopy_keeps_names_gradients_and_lock(locked: bool) -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = torch.full((2,), 3.0)
    td = TensorDict({"n": TensorDict({"p": leaf, "q": torch.nn.Parameter(leaf)}, [2])}, [2], names=["time"])
    copied = deepcopy(td.lock_() if locked else td)
    assert copied.names == ["time"] and copied.is_locked is locked
    assert type(copied["n", "q"]) is torch.nn.Parameter and copied["n", "p"].requires_grad
    assert copied["n", "p"].grad.tolist() == [3, 3] and copied["n", "p"].grad is not leaf.grad


def test_deepcopy_node_under_two_keys_stays_one() -> None:
    node = TensorDict({"x": torch.zeros(3)})
    copied = deepcopy(TensorDict({"a": node, "b": node}))
    assert copied["a"] is copied["b"]
