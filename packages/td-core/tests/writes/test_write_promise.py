"""The table of docs/guide/writes.md: what each operation does under each condition, for every kind of node.

The outcome is that of the page; results are those of torch on the plain leaf.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict

pytestmark = pytest.mark.filterwarnings(
    "ignore:Casting complex", "ignore:.*quantiz", "ignore:Sparse", "ignore:The PyTorch API of nested"
)

PAGE = Path(__file__).parents[4] / "docs" / "guide" / "writes.md"
GROUPS = ("copy", "index", "compute", "fill")


def read_table() -> dict[str, dict[str, str]]:
    """Return the outcome of each group by condition, as the page states it."""
    rows = re.findall(r"^\| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    start = cells.index(["condition", *GROUPS])
    return {row[0]: dict(zip(GROUPS, row[1:], strict=True)) for row in cells[start + 1 :] if len(row) == 5}


TABLE = read_table()


def make_leaf(*shape: int, start: float = 0.1) -> Tensor:
    return (torch.arange(float(torch.Size(shape).numel())).view(shape) * 0.37 + start) % 0.8 + 0.1


def make_entries(lead: tuple[int, ...], start: float, spoil: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the entries of a tree, of which the last leaf is spoiled."""
    last = spoil(make_leaf(*lead, 3, start=start + 0.2))
    return {
        "a": make_leaf(*lead, 3, start=start),
        "n": {"b": make_leaf(*lead, 2, start=start + 0.1), "z": last},
    }


def keep(leaf: Tensor) -> Tensor:
    return leaf


def make_dense(start: float = 0.1, spoil: Callable[[Tensor], Tensor] = keep) -> Any:
    return TensorDict(make_entries((2,), start, spoil), [2])


def make_lazy(start: float = 0.1, spoil: Callable[[Tensor], Tensor] = keep, wrap: Any = TensorDict) -> Any:
    return LazyStackedTensorDict(
        wrap(make_entries((), start, keep)), wrap(make_entries((), start + 0.3, spoil))
    )


def make_nested_lazy(start: float = 0.1, spoil: Callable[[Tensor], Tensor] = keep) -> Any:
    stack = make_lazy(start, spoil)
    return TensorDict({"a": make_leaf(2, 3, start=start), "n": stack}, [2])


KINDS: dict[str, Callable[..., Any]] = {
    "dense": make_dense,
    "lazy": make_lazy,
    "nested lazy": make_nested_lazy,
}

if importlib.util.find_spec("td_store") is not None:
    from td_store import StoredTensor
    from td_store.testing import MemorySource

    def make_stored(start: float = 0.1, spoil: Callable[[Tensor], Tensor] = keep) -> Any:
        td = make_dense(start, spoil)
        for key in ("a", ("n", "b")):
            td[key] = StoredTensor(MemorySource(td[key]))
        return td

    KINDS["stored"] = make_stored

if importlib.util.find_spec("td_tensorclass") is not None:
    from td_tensorclass import TensorClass, TypedTensorDict

    class Inner(TensorClass):
        b: Tensor
        z: Tensor

    class Outer(TensorClass):
        a: Tensor
        n: Inner

    class Typed(TypedTensorDict):
        a: Tensor
        n: TensorDict

    def make_record(entries: dict[str, Any], batch_size: Any = ()) -> Any:
        return Outer(entries["a"], Inner(**entries["n"], batch_size=batch_size), batch_size=batch_size)

    def make_tensorclass(start: float = 0.1, spoil: Callable[[Tensor], Tensor] = keep) -> Any:
        return make_record(make_entries((2,), start, spoil), [2])

    def make_typed(start: float = 0.1, spoil: Callable[[Tensor], Tensor] = keep) -> Any:
        return Typed(**make_entries((2,), start, spoil), batch_size=[2])

    def make_with_values(start: float = 0.1, spoil: Callable[[Tensor], Tensor] = keep) -> Any:
        td = make_dense(start, spoil)
        td["s"] = f"first {start}"
        td["n", "values"] = ["one", f"second {start}"]
        return td

    KINDS |= {
        "tensorclass": make_tensorclass,
        "lazy tensorclass": partial(make_lazy, wrap=make_record),
        "typed": make_typed,
        "with values": make_with_values,
    }

if importlib.util.find_spec("td_memmap") is not None:

    def make_mapped(start: float = 0.1, spoil: Callable[[Tensor], Tensor] = keep) -> Any:
        td = make_dense(start).memmap_().unlock_().clear_device_()
        if spoil is not keep:
            td["n", "z"] = spoil(td["n", "z"].clone())
        return td

    KINDS["memory-mapped"] = make_mapped


def make_module(node: Any) -> torch.nn.Module:
    """Return a module with the leaves of a tree as buffers."""
    module = torch.nn.Module()
    for key, child in node._inner()._children().items():
        if isinstance(child, Tensor):
            module.register_buffer(key, child)
        else:
            module.add_module(key, make_module(child))
    return module


def set_at(td: Any, index: Any, value: Any) -> None:
    td[index] = value


def as_dict(node: Any) -> Any:
    if isinstance(node, Tensor) or node._is_value:
        return node
    return {key: as_dict(child) for key, child in node._inner()._children().items()}


ALL = torch.tensor([True, True])


def copy(leaf: Tensor, value: Tensor) -> Any:
    return leaf.copy_(value)


#: Per group and name, the write into a collection, and that into one leaf.
WRITES: dict[str, dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]]] = {
    "copy": {
        "update_": (lambda td, source: td.update_(source), copy),
        "update_ from a dict": (lambda td, source: td.update_(as_dict(source)), copy),
        "update_ of keys": (lambda td, source: td.update_(source, keys_to_update=["a", "n"]), copy),
        "copy_": (lambda td, source: td.copy_(source), copy),
        "update in place": (lambda td, source: td.update(source, inplace=True), copy),
        "set_": (lambda td, source: td.set_("n", source["n"]), copy),
        "set in place": (lambda td, source: td.set("n", source["n"], inplace=True), copy),
        "apply_": (lambda td, source: td.apply_(lambda leaf, value: value, source), copy),
        "load_state_dict": (lambda td, source: td.load_state_dict(source.state_dict()), copy),
        "to_module": (lambda td, source: source.to_module(make_module(td), inplace=True), copy),
        "apply with out": (lambda td, source: source.apply(lambda value: value, out=td.lock_()), copy),
    },
    "index": {
        "slice": (lambda td, source: set_at(td, slice(None), source), copy),
        "dict": (lambda td, source: set_at(td, slice(0, 2), as_dict(source)), copy),
        "positions": (lambda td, source: set_at(td, [0, 1], source), copy),
        "mask": (lambda td, source: set_at(td, ALL, source), copy),
        "update_at_": (lambda td, source: td.update_at_(source, slice(None)), copy),
        "copy_at_": (lambda td, source: td.copy_at_(source, [0, 1]), copy),
        "set_at_": (lambda td, source: td.set_at_("n", source["n"], slice(None)), copy),
    },
    "compute": {
        **{
            f"{name}": (
                lambda td, source, name=name: getattr(td, name)(source),
                lambda leaf, value, own=own: getattr(leaf, own)(value),
            )
            for name, own in [
                *[(f"{name}_", f"{name}_") for name in ("add", "sub", "mul", "div", "pow", "clamp_max")],
                ("maximum_", "clamp_min_"),
                ("__iadd__", "__iadd__"),
            ]
        },
        "lerp_": (lambda td, source: td.lerp_(source, 0.5), lambda leaf, value: leaf.lerp_(value, 0.5)),
        "addcmul_": (
            lambda td, source: td.addcmul_(source, source),
            lambda leaf, value: leaf.addcmul_(value, value),
        ),
        "addcdiv_": (
            lambda td, source: td.addcdiv_(source, source),
            lambda leaf, value: leaf.addcdiv_(value, value),
        ),
        "sqrt_": (lambda td, source: td.sqrt_(), lambda leaf, value: leaf.sqrt_()),
        "neg_": (lambda td, source: td.neg_(), lambda leaf, value: leaf.neg_()),
        "add_ a number": (lambda td, source: td.add_(2), lambda leaf, value: leaf.add_(2)),
    },
    "fill": {
        "zero_": (lambda td, source: td.zero_(), lambda leaf, value: leaf.zero_()),
        "fill_": (lambda td, source: td.fill_("n", 1), lambda leaf, value: leaf.fill_(1)),
        "masked_fill_": (lambda td, source: td.masked_fill_(ALL, 1), lambda leaf, value: leaf.fill_(1)),
        "number at a slice": (
            lambda td, source: set_at(td, slice(None), 1),
            lambda leaf, value: leaf.fill_(1),
        ),
        "number at a mask": (lambda td, source: set_at(td, ALL, 1), lambda leaf, value: leaf.fill_(1)),
    },
}


if importlib.util.find_spec("td_distributed") is not None:

    class Loop:
        """A process group of one process, which receives what it sent."""

        def __init__(self) -> None:
            self.messages: list[Tensor] = []

        def name(self) -> str:
            return "gloo"

        def size(self) -> int:
            return 1

        def wait(self) -> None:
            """Return at once: the group is the handle of its messages, too."""

        def send(self, tensors: list[Tensor], rank: int, tag: int) -> Loop:
            self.messages.append(tensors[0].clone())
            return self

        def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Loop:
            tensors[0].copy_(self.messages.pop(0))
            return self

    def receive(td: Any, source: Any) -> None:
        loop = Loop()
        source.send(group=loop, group_dst=0)
        td.recv(group=loop, group_src=0)

    WRITES["copy"]["recv"] = receive, copy

#: As for modules, autograd does not record what is loaded or received, so it refuses nothing. No message has mapped tensors.
_NO_GRAD = ("requires grad", "is a view of such a leaf", "torch.func.grad")
UNRECORDED = {"load_state_dict": _NO_GRAD, "to_module": _NO_GRAD, "recv": (*_NO_GRAD, "torch.vmap")}
#: Conditions under which a message has leaves of another dtype or layout.
OTHER_FORMS = (
    "the leaf is on the meta device",
    "the leaf is quantized",
    "the leaf has an integer dtype",
    "the value has another dtype",
)
#: Writes of the group "compute" that take no value.
ALONE = ("sqrt_", "neg_", "add_ a number")


def make_inference_tensor(leaf: Tensor) -> Tensor:
    with torch.inference_mode():
        return leaf.clone()


def make_view_of_leaf(leaf: Tensor) -> Tensor:
    return torch.stack([leaf, leaf]).requires_grad_()[0]


#: Conditions of one leaf, and a function that turns a leaf into one that meets it.
LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "the leaf requires grad, is a leaf of autograd, and grad mode is on": lambda leaf: leaf.requires_grad_(),
    "the leaf is a view of such a leaf": make_view_of_leaf,
    "the leaf requires grad, and `unbind` or `split` returned it": lambda leaf: (
        torch.stack([leaf, leaf]).requires_grad_().mul(1).unbind(0)[0]
    ),
    "the leaf requires grad, and an operation computed it": lambda leaf: leaf.requires_grad_() * 1,
    "the leaf was made in inference mode, and the mode is off": make_inference_tensor,
    "the leaf is expanded": lambda leaf: leaf[..., :1].clone().expand(leaf.shape),
    "the leaf is on the meta device": lambda leaf: leaf.to("meta"),
    "the leaf is sparse": lambda leaf: leaf.to_sparse(),
    "the leaf is quantized": lambda leaf: torch.quantize_per_tensor(leaf, 0.1, 0, torch.quint8),
    "the leaf has an integer dtype": lambda leaf: (leaf * 10).long(),
    "the leaf is not contiguous": lambda leaf: torch.stack([leaf, leaf], -1)[..., 0],
}
if "stored" in KINDS:
    LEAVES["the leaf is in a store that is opened read-only"] = lambda leaf: StoredTensor(
        MemorySource(leaf), mode="r"
    )
#: Conditions of one value, and a function that turns a value into one that meets it.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "the value has a shape that does not broadcast": lambda value: torch.cat([value, value], -1),
    "the value has another dtype": lambda value: value.to(torch.complex64),
    "the value is on the meta device": lambda value: value.to("meta"),
    "the value is sparse": lambda value: value.to_sparse(),
    "the value is quantized": lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.quint8),
    "the value was made in inference mode": make_inference_tensor,
}


@pytest.fixture(scope="session")
def snapshot(describe_leaf: Any) -> Callable[[Any], Any]:
    """Return a function that returns the leaves with their content, and the structure with the values."""

    def take(root: Any) -> Any:
        leaves = root._leaves()
        return list(map(id, leaves)), list(map(describe_leaf, leaves)), repr(root)

    return take


def find_last(root: Any) -> Tensor:
    """Return the spoiled leaf: in a lazy stack, that of the last member."""
    node = root["n"] if isinstance(root, TensorDict) else root
    if isinstance(node, LazyStackedTensorDict):
        return node.tensordicts[-1].get("z") if "z" in node.keys() else node.tensordicts[-1]["n"].get("z")
    return root.get(("n", "z"))


def try_torch(write: Callable[[Any, Any], Any], leaf: Tensor, value: Any) -> Exception | None:
    try:
        write(leaf, value)
    except Exception as error:  # torch raises many classes
        return error
    return None


def get_outcome(condition: str, group: str, name: str) -> str:
    """Return the outcome on the page; a message is received only into leaves of the same form."""
    return "StructureError" if name == "recv" and condition in OTHER_FORMS else TABLE[condition][group]


@pytest.fixture(scope="session")
def find_fault(describe_leaf: Any, snapshot: Any) -> Callable[[Any, str, str, str], str | None]:
    """Return a function that runs one write under one condition: it returns what differs from the page and from torch."""

    def find(make: Any, condition: str, group: str, name: str) -> str | None:
        whole, single = WRITES[group][name]
        spoil, spoil_value = LEAVES.get(condition, keep), VALUES.get(condition, keep)
        td, source = make(0.1, spoil), KIND_OF_SOURCE.get(make, make)(0.6, spoil_value)
        leaf, value = find_last(make(0.1, spoil)), find_last(source)
        refused = try_torch(single, leaf, value)
        outcome, before = get_outcome(condition, group, name), snapshot(td)
        try:
            whole(td, source)
        except Exception as error:
            if td.is_locked and "out" in name:
                td.unlock_()
            if snapshot(td) != before:
                return f"wrote some leaves before it raised {error!r}"
            if name == "load_state_dict" and "cannot stack key" in str(error):
                return None  # the state dict has stacked entries, and torch cannot stack these leaves
            if outcome == "written" or (outcome == "as torch" and refused is None):
                return f"raised {error!r}"
            if outcome != "as torch" and type(error).__name__ != outcome:
                return f"raised {type(error).__name__}, not {outcome}: {error}"
            return None if "'z'" in str(error) else f"the key is not in the message: {error}"
        if outcome not in ("written", "as torch"):
            return f"raised nothing, not {outcome}"
        if refused is not None:
            return f"raised nothing, torch {refused!r}"
        expected, found = describe_leaf(leaf), describe_leaf(find_last(td))
        return None if expected[-1] == found[-1] else f"wrote {found}, torch {expected}"

    return find


#: Makers of sources, for kinds whose leaves would make the source expensive.
KIND_OF_SOURCE = {make: make_dense for name, make in KINDS.items() if name in ("stored", "memory-mapped")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("condition", [*LEAVES, *VALUES])
def test_write_under_condition_is_as_the_page_says(find_fault: Any, condition: str, kind: str) -> None:
    faults = {}
    for group, name in select_writes(condition, kind):
        fault = find_fault(KINDS[kind], condition, group, name)
        if fault is not None:
            faults[group, name] = fault
    assert faults == {}


#: Kinds whose leaves a module can have.
MODULES = ("dense", "stored", "typed", "memory-mapped")


def select_writes(condition: str, kind: str) -> list[tuple[str, str]]:
    """Return (group, name) of all writes for dense collections and lazy stacks, and of a third for other kinds."""
    writes = [
        (group, name)
        for group in GROUPS
        for name in WRITES[group]
        if TABLE[condition][group]
        and not (condition in VALUES and name in ALONE)
        and not any(words in condition for words in UNRECORDED.get(name, ()))
        and (name != "to_module" or kind in MODULES)
    ]
    return writes if kind in ("dense", "lazy") else writes[(len(condition) + len(kind)) % 3 :: 3]


#: Per row of the page, a function that changes the entries of a source.
KEYS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "the value lacks a key": lambda entries: entries["n"].pop("z"),
    "the value has a key that the collection lacks": lambda entries: entries["n"].update(zz=make_leaf(2, 3)),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested lazy"])
@pytest.mark.parametrize("condition", KEYS)
def test_write_of_other_keys_is_as_the_page_says(snapshot: Any, condition: str, kind: str) -> None:
    creates = "collection lacks" in condition
    faults = {}
    for group, name in select_writes(condition, kind):
        if name in (
            "copy_at_",
            "update_at_",
            "set_at_",
            "apply_",
            "apply with out",
            "load_state_dict",
            *ALONE,
        ):
            continue
        if creates and kind in ("tensorclass", "lazy tensorclass") and group == "index":
            continue  # a tensorclass has only its fields
        outcome, td, entries = TABLE[condition][group], KINDS[kind](), as_dict(make_dense(0.6))
        KEYS[condition](entries)
        before, last = snapshot(td), find_last(td).clone()
        outcome = "StructureError" if name == "recv" else outcome
        if name == "update in place" and creates:
            outcome = "written"  # update() stores entries that the collection lacks
            if "tensorclass" in kind:
                continue
        try:
            WRITES[group][name][0](td, TensorDict(entries, [2]))
        except Exception as error:
            if type(error).__name__ != outcome or snapshot(td) != before:
                faults[group, name] = f"{error!r}, unchanged: {snapshot(td) == before}"
        else:
            if outcome != "written" or torch.equal(find_last(td), last) is creates:
                faults[group, name] = "raised nothing, or wrote something else"
    assert faults == {}


@pytest.mark.parametrize("kind", KINDS)
def test_write_locked_collection_equals_torch(find_fault: Any, kind: str) -> None:
    condition = "the collection is locked"
    faults = {}
    for group, name in select_writes(condition, kind):
        fault = find_fault(lambda *args: KINDS[kind](*args).lock_(), condition, group, name)
        if fault is not None:
            faults[group, name] = fault
    assert faults == {}


@pytest.mark.parametrize("lazy", [False, True])
def test_write_overlapping_value_equals_torch(describe_leaf: Any, lazy: bool) -> None:
    faults = {}
    for group, name in select_writes("the value overlaps its leaf in memory", "dense"):
        memory = make_leaf(3, 3)
        td = TensorDict({"a": make_leaf(2, 3), "n": {"z": memory[:2]}}, [2])
        source = TensorDict({"a": make_leaf(2, 3, start=0.5), "n": {"z": memory[1:]}}, [2])
        if lazy and name in ("to_module", "recv"):
            continue  # the two sides have other structures
        whole, single = WRITES[group][name]
        expected = memory[:2].clone()
        single(expected, memory[1:].clone())
        whole(LazyStackedTensorDict(*td.unbind(0)) if lazy else td, source)
        if describe_leaf(memory[:2])[-1] != describe_leaf(expected)[-1]:
            faults[group, name] = (memory[:2], expected)
    assert faults == {}


@pytest.mark.parametrize("kind", ["dense", "lazy", "nested lazy"])
def test_write_mapped_value_into_leaf_from_outside_raises(snapshot: Any, kind: str) -> None:
    condition = "`torch.vmap` maps over the value, and not over the leaf"
    for group, name in select_writes(condition, "dense"):
        if name in ALONE or (name == "to_module" and kind not in MODULES):
            continue
        td = KINDS[kind]()
        td = td.lock_() if "out" in name else td
        before, batch = snapshot(td), torch.rand(4, *find_last(td).shape)

        def write(last: Tensor, td: Any = td, group: str = group, name: str = name) -> Tensor:
            WRITES[group][name][0](td, KINDS[kind](0.6, lambda leaf: last))
            return last

        with pytest.raises(RuntimeError) as caught:
            torch.vmap(write)(batch)
        assert type(caught.value).__name__ == TABLE[condition][group], name
        assert re.search("'z'.*from outside of torch.func.vmap", str(caught.value)), name
        assert snapshot(td) == before, name


@pytest.mark.parametrize("transform", ["grad", "jvp"])
@pytest.mark.parametrize("kind", ["dense", "lazy", "nested lazy"])
def test_write_leaf_from_outside_of_derivative_raises(snapshot: Any, kind: str, transform: str) -> None:
    condition = "the leaf is from outside of `torch.func.grad` or `jvp`"
    for group, name in select_writes(condition, "dense"):
        outside = KINDS[kind]()
        before, last = snapshot(outside), find_last(outside)

        def write(x: Tensor, last: Tensor = last, group: str = group, name: str = name) -> Tensor:
            # All leaves but the last are made inside, so torch alone would refuse only the last write.
            td = KINDS[kind](0.1, lambda leaf: last)
            for node in [td, *([td.tensordicts[0]] if kind == "lazy" else [])]:
                for key, leaf in list(node.items()):
                    if isinstance(leaf, Tensor) and kind != "lazy":
                        node[key] = leaf * x
            WRITES[group][name][0](td.lock_(), KINDS[kind](0.6))
            return x.sum()

        x = torch.ones(())
        with pytest.raises(RuntimeError, match="from outside of torch.func.grad or jvp") as caught:
            torch.func.grad(write)(x) if transform == "grad" else torch.func.jvp(write, (x,), (x,))
        assert type(caught.value).__name__ == TABLE[condition][group], name
        assert snapshot(outside) == before, name


@pytest.mark.parametrize("kind", ["dense", "lazy", "nested lazy"])
@pytest.mark.parametrize("builtin", [ValueError, RuntimeError])
def test_write_that_does_not_fit_is_a_builtin_error(builtin: type[Exception], kind: str) -> None:
    td, wide = KINDS[kind](), KINDS[kind](0.6, lambda leaf: torch.cat([leaf, leaf], -1))
    for group in ("copy", "index", "compute"):
        for name in set(WRITES[group]) - {*ALONE, "" if kind in MODULES else "to_module"}:
            with pytest.raises(builtin):
                WRITES[group][name][0](td, wide)
    with pytest.raises(builtin):
        td.update_(TensorDict({"a": torch.zeros(3, 3)}, [3]))
    with pytest.raises(builtin):
        td.names = ["x", "y"]


def test_every_condition_of_the_page_is_tested() -> None:
    tested = {*LEAVES, *VALUES, *KEYS}
    source = Path(__file__).read_text(encoding="utf-8")
    assert [row for row in TABLE if row not in tested and f'"{row}"' not in source] == []
