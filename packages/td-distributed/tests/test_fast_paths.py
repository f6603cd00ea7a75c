"""Pickling and other fast paths of one storage: same values, identity and locks as the general path."""

from __future__ import annotations

import importlib.util
import io
import json
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from td_core import TensorDict, TensorDictParams
from td_core.errors import FormatError
from td_distributed import from_consolidated, storage_of

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


def make_jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), 2.0)], layout=torch.jagged)


def make_nested() -> Any:
    return TensorDict({"a": torch.arange(6).view(2, 3), "n": {"b": torch.ones(2), "e": {}}}, batch_size=[2])


def make_tied() -> Any:
    weight = torch.arange(4.0)
    return TensorDict({"a": weight, "n": {"b": weight}, "c": weight.clone()})


TREES: dict[str, Callable[[], Any]] = {
    "nested": make_nested,
    "lazy": lambda: TensorDict.lazy_stack([TensorDict({"a": torch.full((i + 1,), i)}) for i in range(3)]),
    "jagged": lambda: TensorDict({"n": make_jagged()}, [2]),
    "large": lambda: TensorDict({"a": torch.arange(10_000.0), "b": torch.arange(10_000).view(100, 100).t()}),
    "slice": lambda: TensorDict({"a": torch.arange(100_000), "b": torch.ones(100_000, 2)}, [100_000])[7],
    "params": lambda: TensorDictParams(TensorDict({"w": torch.ones(3)})),
    "requires grad": lambda: TensorDict({"w": torch.ones(3, requires_grad=True)}),
    "empty": lambda: TensorDict({"a": torch.zeros(0, 3), "n": {}}),
    "float8": lambda: TensorDict({"a": torch.ones(3).to(torch.float8_e5m2), "c": torch.ones(1) + 1j}),
    "conjugate": lambda: TensorDict({"c": torch.tensor([1 + 2j]).conj()}),
    "one element": lambda: TensorDict({"c": torch.arange(4.0)[1::2][:1]}),
    "tied": make_tied,
}
if HAS_TENSORCLASS:
    from td_tensorclass import NonTensorStack

    TREES["values"] = lambda: TensorDict(
        {"l": NonTensorStack("x", (1, 2)), "s": "text", "a": torch.ones(2)}, [2]
    )


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    assert found.batch_size == wanted.batch_size
    assert list(found.keys(True)) == list(wanted.keys(True))
    for one, other in zip(found._leaves(), wanted._leaves(), strict=True):
        assert one.dtype == other.dtype and one.requires_grad == other.requires_grad
        assert isinstance(one, Parameter) == isinstance(other, Parameter)
        pairs = zip(one.unbind(), other.unbind(), strict=True) if other.is_nested else [(one, other)]
        assert all(a.shape == b.shape and torch.equal(a.double(), b.double()) for a, b in pairs)
    if HAS_TENSORCLASS and "l" in wanted.keys():
        assert found["l"] == wanted["l"]
        assert found["s"] == wanted["s"]


def pickle_in_band(tree: Any, protocol: int) -> Any:
    return pickle.loads(pickle.dumps(tree, protocol))


def pickle_out_of_band(tree: Any) -> Any:
    buffers: list[Any] = []
    data = pickle.dumps(tree, 5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers)


def save_and_load(tree: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"protocol {n}": lambda tree, n=n: pickle_in_band(tree, n) for n in (2, 3, 4, 5)},
    "out of band": pickle_out_of_band,
    "between processes": lambda tree: pickle.loads(ForkingPickler.dumps(tree)),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("consolidated", [False, True])
def test_pickle_consolidated_keeps_content(name: str, way: str, consolidated: bool) -> None:
    if name == "float8" and way == "protocol 2" and not consolidated:
        pytest.skip("torch writes such leaves, and cannot read them")
    tree = TREES[name]()
    locked = tree.is_locked
    if consolidated:
        tree = tree.consolidate()
    back = WAYS[way](tree)
    assert_same(back, tree)
    assert back.is_locked == locked
    assert back.is_consolidated() == consolidated
    if consolidated:
        assert torch.equal(storage_of(back), storage_of(tree))
        for leaf in back._leaves():
            leaf.detach().zero_()
        assert not storage_of(back).any() or name == "jagged"


@pytest.mark.parametrize("way", WAYS)
def test_pickle_leaf_requiring_grad_keeps_requires_grad(way: str) -> None:
    tree = TensorDict.lazy_stack([TensorDict({"a": torch.ones(2)}) for _ in range(2)]).consolidate()
    tree[1]["a"].requires_grad_()
    back = WAYS[way](tree)
    assert [back[0]["a"].requires_grad, back[1]["a"].requires_grad] == [False, True]


@pytest.mark.parametrize("way", WAYS)
def test_unpickle_consolidated_restores_locks_of_source(way: str) -> None:
    tree = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}, "m": TensorDict(c=1, lock=True)})
    back = WAYS[way](tree.consolidate())
    assert [back.is_locked, back["n"].is_locked, back["m"].is_locked] == [False, False, True]
    back["n", "d"] = torch.zeros(2)
    back["a"] = torch.zeros(2)
    assert not back.is_consolidated()
    assert_same(WAYS[way](back), back)
    assert back.consolidate().is_consolidated()


def test_torch_load_weights_only_keeps_content() -> None:
    assert_same(save_and_load(make_nested()), make_nested())
    back = save_and_load(make_nested().consolidate())
    assert_same(back, make_nested())
    assert back.is_consolidated()


class Calls:
    """Object that pickles as a call of a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda nodes, places, data: data[24:48].view(torch.int64).fill_(1 << 30),
            "rows of a jagged tensor lie",
        ),
        (
            lambda nodes, places, data: places.__setitem__(3, [0, 24, 1 << 40]),
            "leaf 1 lies at bytes 1099511627776",
        ),
        (
            lambda nodes, places, data: nodes[0]["entries"].append(["b", [0]]),
            "each leaf of the encoded tree occurs once",
        ),
        (
            lambda nodes, places, data: nodes[0]["meta"].update(batch_size=[9]),
            r"the batch size \[9\] does not fit",
        ),
    ],
)
def test_torch_load_hostile_file_raises(change: Any, message: str) -> None:
    rows = torch.nested.nested_tensor_from_jagged(torch.arange(6.0), torch.tensor([0, 2, 6]))
    reduced: Any = TensorDict({"j": rows, "a": torch.ones(2)}, [2]).consolidate().__reduce_ex__(2)
    function, (schema, (data,), values, classes) = reduced
    nodes, places = json.loads(schema)
    change(nodes, places, data)
    call = function, (json.dumps([nodes, places]), [data], values, classes)
    with pytest.raises(FormatError, match=f"the pickle is damaged: .*{message}"):
        save_and_load(Calls(*call))


def test_pickle_slice_contains_only_bytes_of_slice() -> None:
    assert len(pickle.dumps(TREES["slice"]())) < 2000


def test_pickle_protocol_5_storage_is_out_of_band() -> None:
    tree = TREES["large"]().consolidate()
    buffers: list[Any] = []
    data = pickle.dumps(tree, 5, buffer_callback=buffers.append)
    assert len(data) < 1000 and len(buffers) == 1
    back = pickle.loads(data, buffers=buffers)
    assert storage_of(back).data_ptr() == storage_of(tree).data_ptr()


def test_pickle_protocol_5_large_leaves_are_out_of_band() -> None:
    tree = TensorDict(
        {"a": torch.ones(10_000), "b": torch.ones(10_000), **{str(i): torch.ones(1) for i in range(50)}}
    )
    buffers: list[Any] = []
    back = pickle.loads(pickle.dumps(tree, 5, buffer_callback=buffers.append), buffers=buffers)
    assert len(buffers) == 3
    assert back["a"].data_ptr() == tree["a"].data_ptr()


def test_pickle_shared_storages_stay_shared() -> None:
    base = torch.arange(10.0)
    tree = TensorDict({"a": base[:6], "b": base[2:], "c": base[:6]})
    for way in (way for name, way in WAYS.items() if name != "protocol 2"):
        back = way(tree).clone(recurse=False)
        back["a"][2] = 100
        assert back["b"][0] == 100
        assert back["c"][2] == 100


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("consolidated", [False, True])
def test_unpickle_readonly_buffers_copies_unless_consolidated(consolidated: bool, skipped: int) -> None:
    tree = TREES["large"]()
    tree = tree.consolidate() if consolidated else tree
    buffers: list[Any] = []
    data = pickle.dumps(tree, 5, buffer_callback=buffers.append)
    frozen = [memoryview(bytes(skipped) + bytes(buffer))[skipped:] for buffer in buffers]
    back = pickle.loads(data, buffers=frozen)
    assert_same(back, tree)
    starts = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in frozen]
    # Bytes that are not aligned cannot be viewed as the dtype, either.
    assert (back._leaves()[0].data_ptr() == starts[0]) == (consolidated and not skipped)
    assert back.is_consolidated() == consolidated and not back.is_locked
    if not consolidated:
        for leaf in back._leaves():
            leaf.zero_()


def test_unpickle_twice_returns_independent_leaves() -> None:
    for protocol in (3, 4, 5):
        data = pickle.dumps(make_nested(), protocol)
        first = pickle.loads(data)
        first["a"].zero_()
        assert_same(pickle.loads(data), make_nested())


DOUBLE = """
tree = queue.get()
tree["a"].mul_(2)
answer.put((tree.is_shared(), tree.is_consolidated()))
queue.get()
"""


@pytest.mark.parametrize("consolidated", [False, True])
def test_queue_between_processes_shares_memory(consolidated: bool) -> None:
    context = multiprocessing.get_context("spawn")
    queue, answer = context.Queue(), context.Queue()
    # A spawned process cannot import a test file, so it executes the source text in DOUBLE.
    process = context.Process(target=exec, args=(DOUBLE, {"queue": queue, "answer": answer}), daemon=True)
    process.start()
    tree = make_nested()
    tree = tree.consolidate() if consolidated else tree
    queue.put(tree)
    assert answer.get(timeout=60) == (True, consolidated)
    queue.put(None)
    process.join(60)
    assert tree["a"].tolist() == [[0, 2, 4], [6, 8, 10]]


def test_clone_consolidated_shares_no_memory() -> None:
    tree = make_nested().consolidate()
    copied = tree.clone()
    assert not copied.is_locked and not copied.is_consolidated()
    copied["a"].zero_()
    assert_same(tree, make_nested())


def test_share_memory_consolidated_moves_storage() -> None:
    tree = make_nested().consolidate().share_memory_()
    assert tree.is_shared() and tree.is_consolidated()
    assert storage_of(tree).is_shared()


@pytest.mark.parametrize("shares", [False, True])
def test_share_memory_of_mapped_file_shares_writes(tmp_path: Path, shares: bool) -> None:
    path = tmp_path / "file"
    for tree in (make_nested().consolidate(path), from_consolidated(path)):
        if shares:
            tree.share_memory_()
        other = pickle.loads(ForkingPickler.dumps(tree))
        other["a"].fill_(9)
        assert tree.is_shared() and tree["a"].unique().tolist() == [9]
        assert_same(from_consolidated(path), make_nested())


def test_consolidate_again_returns_self() -> None:
    tree = make_nested().consolidate()
    assert tree.consolidate() is tree
    assert tree.consolidate(share_memory=True) is not tree


@pytest.mark.parametrize("number", [0, 1, 2])
def test_update_from_any_storage_layout_equals_torch(number: int) -> None:
    tree = make_nested().consolidate()
    plain = make_nested() + 1
    source = [plain.consolidate(), plain.select("n", "a").consolidate(), plain][number]
    tree.update_(source)
    assert_same(tree, make_nested() + 1)
    assert tree.is_consolidated()


def test_to_device_consolidated_copies_once() -> None:
    tree = make_nested().consolidate()
    moved = tree.to("meta")
    assert moved.device == torch.device("meta") and moved["n"].device == torch.device("meta")
    assert {leaf.device.type for leaf in moved._leaves()} == {"meta"}
    assert [leaf.shape for leaf in moved._leaves()] == [leaf.shape for leaf in tree._leaves()]
    assert moved.is_consolidated() and moved.consolidate() is moved
    assert tree.to(torch.float64)["a"].dtype == torch.float64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_consolidate_on_cuda_equals_cpu() -> None:
    tree = make_nested().consolidate()
    pinned = tree.pin_memory()
    assert pinned.is_consolidated() and storage_of(pinned).is_pinned()
    moved = pinned.to("cuda")
    assert moved.is_consolidated() and moved.device.type == "cuda"
    assert storage_of(moved).device.type == "cuda"
    assert_same(moved.cpu(), tree)
    copied = moved.clone()
    assert not copied.is_locked
    assert_same(copied.cpu(), tree)
    target = (make_nested() - 1).consolidate()
    target.update_(moved)
    assert_same(target, make_nested())
    assert_same(pickle_in_band(moved, 5).cpu(), tree)
    assert storage_of(make_nested().consolidate(pin_memory=True)).is_pinned()
    direct = make_nested().consolidate(device="cuda")
    assert direct.device == direct["a"].device and direct.device.type == "cuda"
    assert_same(direct.cpu(), tree)
    assert (
        moved.pin_memory()["a"].device.type == "cuda"
    )  # a collection that is not consolidated behaves the same


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "options", [{}, {"num_threads": 4}, {"return_early": True}, {"device": "cpu", "num_threads": 4}], ids=str
)
def test_consolidate_waits_for_current_cuda_stream(options: dict[str, Any]) -> None:
    side = torch.cuda.Stream()
    for number in (3.0, 5.0):
        big = torch.randn(4096, 4096, device="cuda")
        td = TensorDict({str(i): torch.zeros(1 << 18, device="cuda") for i in range(8)})
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(60):
                big = torch.mm(big, big).clamp_(-1, 1)
            td += number + big[0, 0] * 0
            found: Any = td.consolidate(**options)
            found = found.result() if "return_early" in options else found
            assert all((leaf == number).all() for leaf in found._leaves())
