"""Tests of extreme depth, many keys, concurrent threads, interrupts and memory."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core._python.collector import pause_collector
from td_core.errors import DepthError, StructureError, TensorDictError

DEPTH = 2_000
KEYS = 60


def make_chain(depth: int) -> TensorDict:
    td = TensorDict({"leaf": torch.zeros(2)}, batch_size=[2])
    for _ in range(depth):
        td = TensorDict({"n": td}, batch_size=[2])
    return td


def get_deepest_leaf(td) -> torch.Tensor:
    while "n" in td.keys():
        td = td.get("n")
    return td["leaf"]


def set_batch_size(td: TensorDict) -> TensorDict:
    """Set a batch size on the root after removing those of all nodes."""
    td.batch_size = []
    for node in td.values(True):
        if isinstance(node, TensorDict):
            node.batch_size = []
    td.batch_size = [2]
    return td


DEEP = {
    "clone": lambda td: td.clone(),
    "shallow": lambda td: td.clone(False),
    "index": lambda td: td[:1],
    "exp": lambda td: td.exp(),
    "add": lambda td: td + td,
    "scalar": lambda td: td * 2,
    "unsqueeze": lambda td: td.unsqueeze(0)[0],
    "stack": lambda td: torch.stack([td, td])[0],
    "cat": lambda td: torch.cat([td, td]),
    "unbind": lambda td: td.unbind(0)[0],
    "apply": lambda td: td.apply(lambda leaf: leaf + 1),
    "to": lambda td: td.to(torch.float64),
    "lock": lambda td: td.lock_(),
    "update": lambda td: td.update(td.clone()),
    "update_": lambda td: td.update_(td.clone()),
    "zero_": lambda td: td.zero_(),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "deepcopy": lambda td: copy.deepcopy(td),
    "detach": lambda td: td.detach(),
    "equality": lambda td: td == td,
    "sum": lambda td: td.sum(0),
    "reshape": lambda td: td.reshape(2, 1),
    "empty": lambda td: td.clone().update(td.empty(recurse=True)),
    "batch size": lambda td: setattr(td, "batch_size", []) or td,
    "batch size of all": lambda td: set_batch_size(td),
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_tree_operation_succeeds(name):
    result = DEEP[name](make_chain(DEPTH))
    assert isinstance(get_deepest_leaf(result), torch.Tensor)


@pytest.mark.parametrize(
    "operation",
    [
        repr,
        lambda td: td._repr_html_(),
        lambda td: td.flatten_keys(".").unflatten_keys("."),
        lambda td: td.state_dict(flatten=False),
        lambda td: td.to_dict(),
        lambda td: td.to_namedtuple(),
        lambda td: td.to_struct_array(),
        lambda td: td.to_pytree(),
        lambda td: td.numpy(),
        lambda td: td.tolist(),
        lambda td: td.where(torch.ones(2, dtype=torch.bool), TensorDict(batch_size=[2]), pad=0),
        lambda td: td.densify(),
        lambda td: LazyStackedTensorDict(td, td).densify(),
        lambda td: td.to_padded_tensor(mask_key="mask"),
        lambda td: td.pack(),
        lambda td: td.norm(),
        lambda td: td.named_apply(lambda key, leaf: leaf, nested_keys=True),
        lambda td: td.select(("n",) * DEPTH),
        lambda td: TensorDict(td.to_dict(), [2]),
        lambda td: TensorDict(batch_size=[2]).set(("n",) * DEPTH, torch.zeros(2)),
        lambda td: LazyStackedTensorDict(td, td)[("n",) * DEPTH],
        lambda td: td.__setitem__(0, td[1]),
    ],
)
def test_deep_tree_operation_succeeds_or_raises_depth_error(operation):
    try:
        operation(make_chain(DEPTH))
    except RecursionError as error:
        assert isinstance(error, DepthError), "a bare RecursionError"


def test_index_hundred_thousand_keys_keeps_all():
    leaf = torch.zeros(1)
    td = TensorDict({str(i): leaf for i in range(100_000)}, batch_size=[1])
    assert len(td.keys()) == 100_000 and len(list(td[0].keys())) == 100_000


READS = {
    "clone": lambda td: td.clone(),
    "shallow": lambda td: td.clone(False),
    "exp": lambda td: td.exp(),
    "add": lambda td: td + td,
    "index": lambda td: td[0],
    "fill": lambda td: td.__setitem__(0, 0),
    "unbind": lambda td: td.unbind(0),
    "stack": lambda td: torch.stack([td, td]),
    "lazy": lambda td: LazyStackedTensorDict(td, td)["t0"].densify(),
    "lock": lambda td: td.clone(False).lock_().unlock_(),
    "keys": lambda td: list(td.keys(True)),
    "leaf keys": lambda td: list(td.keys(True, True)),
    "sorted": lambda td: list(td.keys(True, sort=True)),
    "items": lambda td: list(td.items(True, True)),
    "values": lambda td: list(td.values(True)),
    "missing key": lambda td: td["missing"],
    "flatten": lambda td: td.flatten_keys("."),
    "update": lambda td: TensorDict(batch_size=[2]).update(td),
    "to_dict": lambda td: td.to_dict(),
    "state_dict": lambda td: td.state_dict(),
    "repr": repr,
    "pickle": lambda td: pickle.dumps(td),
    "sum": lambda td: td.sum(),
    "batch size": lambda td: setattr(td, "batch_size", [2]),
    "update_": lambda td: td.update_(td.clone(False)),
    "masked_fill_": lambda td: td.masked_fill_(torch.tensor([True, False]), 0),
    "empty": lambda td: td.empty(recurse=True),
    "pytree": lambda td: tree_map(torch.neg, td),
    "load_state_dict": lambda td: td.clone(False).load_state_dict(td.state_dict(), strict=False),
    "lazy keys": lambda td: list(LazyStackedTensorDict(td, td).keys(True)),
    "lazy to_dict": lambda td: LazyStackedTensorDict(td, td).to_dict(),
    "lazy sum": lambda td: LazyStackedTensorDict(td, td).sum(),
}


def let_others_run(phase: str, info: dict[str, int]) -> None:
    time.sleep(0)


def test_concurrent_set_of_distinct_keys_loses_none():
    td = TensorDict({f"t{i}": {} for i in range(8)}, batch_size=[2])
    failures: list[str] = []
    start = threading.Barrier(10)

    def write(i: int) -> None:
        start.wait()
        for j in range(KEYS):
            td[f"t{i}", f"k{j}"] = torch.zeros(2)
            td[f"r{i}", f"k{j}"] = torch.zeros(2)
        # Add and remove keys while readers are running.
        while i < 2 and any(reader.is_alive() for reader in readers):
            td[f"gone{i}"] = td["t0", f"gone{i}"] = torch.zeros(2)
            del td[f"gone{i}"], td["t0", f"gone{i}"]

    def read(names: list[str]) -> None:
        start.wait()
        for _ in range(10):
            for name in names:
                try:
                    READS[name](td)
                except TensorDictError:
                    pass  # raised for a concurrent change of the structure
                except Exception as error:
                    failures.append(f"{name}: {error!r}")

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    # The garbage collector can start at any allocation, and its Python callback lets other threads run.
    gc.callbacks.append(let_others_run)
    gc.set_threshold(50, 10**6)
    try:
        writers = [threading.Thread(target=write, args=(i,)) for i in range(8)]
        readers = [threading.Thread(target=read, args=(list(READS)[i::2],)) for i in range(2)]
        for thread in (*writers, *readers):
            thread.start()
        for thread in (*writers, *readers):
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_others_run)
    assert failures == []
    assert all(len(td[f"{name}{i}"].keys()) == KEYS for i in range(8) for name in "tr")


RESULTS = {
    "construct": lambda td: TensorDict({"a": td["a"], "n": {"b": td["a"]}}, [3]),
    "index": lambda td: td[0],
    "exp": lambda td: td.exp(),
    "stack": lambda td: torch.stack([td, td]),
    "lazy": lambda td: LazyStackedTensorDict(td, td.clone()),
    "clone": lambda td: td.clone(),
    "locked clone": lambda td: td.clone().lock_(),
    "unlocked": lambda td: td.clone().lock_().unlock_(),
    "select": lambda td: td.select("a"),
    "exclude": lambda td: td.exclude("a"),
    "unflatten": lambda td: td.unflatten_keys("."),
    "view": lambda td: td.view(3, 1),
    "flatten": lambda td: td.flatten_keys("."),
    "apply": lambda td: td.apply(lambda leaf: leaf + 1),
    "to": lambda td: td.to(torch.float64),
    "update": lambda td: td.clone().update(td),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "sum": lambda td: td.sum(0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_delete_result_frees_memory_without_gc(name):
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, batch_size=[3])
    RESULTS[name](td)
    with pause_collector():
        result = RESULTS[name](td)
        alive = weakref.ref(result)
        further = result.exclude("zz").flatten_keys(".")
        del result
        assert alive() is None, f"kept by {further}"


@pytest.mark.parametrize("operation", [lambda td: td.view(-1), lambda td: td.sum(0)], ids=["done", "refused"])
def test_operation_on_members_frees_stack_without_gc(operation):
    with pause_collector():
        td = LazyStackedTensorDict(*[TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (1, 2)])
        alive = weakref.ref(td)
        with suppress(StructureError):
            operation(td)
        del td
        assert alive() is None


def interrupt_at_line(number, call, do):
    """Run ``call``, and run ``do`` before its ``number``-th line in td_core. Return False if it has fewer lines."""
    passed = 0

    def trace(frame, event, arg):
        nonlocal passed
        if event == "line":
            passed += 1
            if passed == number:
                do()
        return trace

    def enter(frame, event, arg):
        return trace if f"{os.sep}td_core{os.sep}" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return passed >= number


def describe_structure(td):
    """Return keys, lock and batch size of a collection and of all nodes in it."""
    nested = [entry for entry in td.values() if not isinstance(entry, torch.Tensor)]
    below = [describe_structure(node) for node in (*getattr(td, "tensordicts", ()), *nested)]
    return list(td.keys()), td.is_locked, td.batch_size, below


def make_nest():
    return TensorDict({"n": {"b": torch.zeros(2), "m": {"c": torch.zeros(2)}}, "a": torch.zeros(2)}, [2])


def make_stack_of_nests():
    return LazyStackedTensorDict(make_nest(), make_nest())


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (make_nest, lambda td: td.lock_()),
        (make_stack_of_nests, lambda td: td.lock_()),
        (make_nest, lambda td: td.share_memory_()),
        (make_nest, lambda td: td.flatten_keys(".", inplace=True)),
        (lambda: make_nest().flatten_keys("."), lambda td: td.unflatten_keys(".", inplace=True)),
        (make_stack_of_nests, lambda td: td.extend([make_nest(), make_nest()])),
    ],
    ids=["lock", "lock a stack", "share", "flatten", "unflatten", "extend"],
)
def test_interrupt_change_is_done_or_undone(make, operation):
    def interrupt():
        raise KeyboardInterrupt

    td = make()
    before = describe_structure(td)
    operation(td)
    outcomes = (before, describe_structure(td))
    number = 0
    interrupted = True
    while interrupted:
        td = make()
        number += 1
        try:
            interrupted = interrupt_at_line(number, lambda td=td: operation(td), interrupt)
        except KeyboardInterrupt:
            pass
        assert describe_structure(td) in outcomes
    assert number > 20


@pytest.mark.parametrize("how", [{}, {"inplace": True}], ids=str)
def test_interrupt_to_module_leaves_one_set_of_parameters(how):
    def interrupt():
        raise KeyboardInterrupt

    def use(zeros, net):
        with zeros.to_module(net, **how):
            pass

    number = 0
    interrupted = True
    while interrupted:
        net = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
        for parameter in net.parameters():
            nn.init.ones_(parameter)
        zeros = TensorDict.from_module(net).data.clone().zero_()
        number += 1
        # An interrupt at the end of a with block in td_core skips its __exit__, so restore the grad mode here.
        with suppress(KeyboardInterrupt), torch.enable_grad():
            interrupted = interrupt_at_line(number, lambda zeros=zeros, net=net: use(zeros, net), interrupt)
        assert len({value.item() for value in net.state_dict().values()}) == 1
    assert number > 100


@pytest.mark.parametrize("first", ["lock_", "unlock_"])
def test_lock_during_concurrent_unlock_succeeds(first):
    number = 0
    while True:
        number += 1
        shared = TensorDict({"b": {}})
        td = TensorDict({"n": shared, "m": shared})
        if first == "unlock_":
            td.lock_()
        other = td.unlock_ if first == "lock_" else td.lock_
        if not interrupt_at_line(number, getattr(td, first), other):
            break
        assert td.unlock_().lock_()["n", "b"].is_locked
    assert number > 20


WRITES = {
    "set": lambda td, key: td.set(("new", key), torch.zeros(td.batch_size)),
    "deeper": lambda td, key: td.__setitem__(("new", "deep", key), torch.zeros(td.batch_size)),
    "setdefault": lambda td, key: td.setdefault(("new", key), torch.zeros(td.batch_size)),
    "create_nested": lambda td, key: td.create_nested(("new", key)),
    "update": lambda td, key: td.update({"new": {key: torch.zeros(td.batch_size)}}),
    "update from a collection": lambda td, key: td.update(
        TensorDict({"new": {key: torch.zeros(td.batch_size)}}, td.batch_size)
    ),
}
PLACES = {
    "dense": make_nest,
    "stack": lambda: LazyStackedTensorDict(make_nest(), make_nest(), stack_dim=1),
    "params": lambda: TensorDictParams(make_nest()),
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_concurrent_creation_of_node_keeps_both_entries(write, make):
    number = 0
    while True:
        number += 1
        td = make()
        if not interrupt_at_line(number, lambda td=td: write(td, "a"), lambda td=td: WRITES["set"](td, "b")):
            break
        assert "b" in td["new"].keys()
        assert {"a", ("deep", "a")} & set(td["new"].keys(True))
    assert number > 5


def test_write_node_that_becomes_leaf_raises_clear_error():
    refused = number = 0
    written = True
    while written:
        number += 1
        td = make_nest()
        try:
            written = interrupt_at_line(
                number,
                lambda td=td: td.update({"n": {"x": [1.0, 2.0]}}),
                lambda td=td: td.set("n", torch.zeros(2)),
            )
        except TensorDictError:
            refused += 1
    assert 0 < refused < number
