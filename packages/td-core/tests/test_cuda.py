"""Test on a GPU: synchronisation, indices, CUDA graphs, memory, devices and autocast."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core._torch.operators import OPERATIONS as POINTWISE
from td_core._tree.devices import set_device_labels
from td_core.errors import CollectionIndexError

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def make_sample(device: str = "cuda") -> TensorDict:
    leaves = {"a": torch.arange(12.0).view(3, 4), "n": {"b": torch.arange(6.0).view(3, 2)}}
    return TensorDict(leaves, [3]).to(device)


def assert_same_on_device(found: Any, expected: Any, device: str = "cuda") -> None:
    assert found.batch_size == expected.batch_size
    for key, leaf in expected.items(True, True):
        assert found[key].device.type == device
        torch.testing.assert_close(found[key].cpu(), leaf.cpu(), rtol=0, atol=0)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Return a function that makes torch raise at every synchronisation with the GPU."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


HOST = torch.tensor([2, 0])
# Operations that must not synchronise. Converting a mask to positions has to, so it is not listed.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "number": lambda td, rows: td + 1,
    "two": lambda td, rows: td * td,
    "unary": lambda td, rows: td.exp(),
    "in place": lambda td, rows: td.mul_(2),
    "compare": lambda td, rows: td == td,
    "clone": lambda td, rows: td.clone(),
    "stack": lambda td, rows: torch.stack([td, td], 1),
    "cat": lambda td, rows: torch.cat([td, td]),
    "int": lambda td, rows: td[1],
    "slice": lambda td, rows: td[1:],
    "positions": lambda td, rows: td[rows],
    "positions of the host": lambda td, rows: td[HOST],
    "list": lambda td, rows: td[[2, 0]],
    "two lists": lambda td, rows: td.unsqueeze(0)[[0, 0], [2, 0]],
    "write a row": lambda td, rows: td.__setitem__(0, td[1]),
    "write positions": lambda td, rows: td.__setitem__(rows, td[rows]),
    "write a list": lambda td, rows: td.__setitem__([2, 0], td[1:].clone()),
    "write a number": lambda td, rows: td.__setitem__(rows, 1.0),
    "write a number at a list": lambda td, rows: td.__setitem__([2, 0], 1),
    "update": lambda td, rows: td.update(td.clone()),
    "update_": lambda td, rows: td.update_(td + 1),
    "where": lambda td, rows: td.where(td["a"].sum(-1) > 3, td + 1),
    "where a number": lambda td, rows: td.where(td["a"].sum(-1) > 3, 0),
    "masked_fill": lambda td, rows: td.masked_fill(td["a"].sum(-1) > 3, 0),
    "gather": lambda td, rows: td.gather(0, rows),
    "reshape": lambda td, rows: td.reshape(1, 3).permute(1, 0).flip(0),
    "sum": lambda td, rows: (td.sum(), td.mean(0), td.norm()),
    "one sum": lambda td, rows: td.sum(reduce=True),
    "half": lambda td, rows: td.half(),
    "zeros": lambda td, rows: (torch.zeros_like(td), td.new_zeros(2), td.clone().zero_()),
    "state_dict": lambda td, rows: td.load_state_dict(td.state_dict()),
    "lazy stack": lambda td, rows: lazy_stack([td, td])["n", "b"],
    "lazy stack at positions": lambda td, rows: lazy_stack([td, td])[:, rows],
    "to itself": lambda td, rows: td.to("cuda"),
}


@CUDA
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_on_gpu_does_not_synchronize(name: str, no_waiting: Callable[[], None]) -> None:
    td, rows = make_sample(), HOST.cuda()
    OPERATIONS[name](td.clone(), rows)  # the first call loads kernels, which synchronises
    torch.cuda.synchronize()
    no_waiting()
    found = OPERATIONS[name](td, rows)
    torch.cuda.set_sync_debug_mode("default")
    on_host = make_sample("cpu")
    expected = OPERATIONS[name](on_host, HOST)
    torch.testing.assert_close(td.cpu().to_dict(), on_host.to_dict())
    if isinstance(found, (TensorDict, LazyStackedTensorDict)):
        torch.testing.assert_close(found.cpu().to_dict(), expected.cpu().to_dict())


@CUDA
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_to_module_call_on_gpu_does_not_synchronize(no_waiting: Callable[[], None]) -> None:
    module = nn.Linear(4, 2).cuda()
    params, x = TensorDict.from_module(module).data * 2, torch.ones(3, 4, device="cuda")
    module(x)
    torch.cuda.synchronize()
    no_waiting()
    with params.to_module(module):
        found = module(x)
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, module(x) * 2)


INDICES: dict[str, Any] = {
    "list": [2, -1, 0],
    "tensor": torch.tensor([0, 2, 2]),
    "int32": torch.tensor([0, 2], dtype=torch.int32),
    "mask": torch.tensor([True, False, True]),
    "tuple": (torch.tensor([[0], [1]]), torch.tensor([0, 1])),
    "none and list": (None, [0, 1]),
    "slice and mask": (slice(None), [True, False]),
    "array": torch.tensor([1, 0]).numpy(),
    "twice the same": (HOST // 2, HOST // 2),
}


@CUDA
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_index_on_gpu_equals_cpu(name: str, on_gpu: bool) -> None:
    def moved(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(map(moved, item))
        return item.cuda() if on_gpu and isinstance(item, torch.Tensor) else item

    host = TensorDict({"a": torch.arange(24).view(3, 2, 4), "n": {"b": torch.rand(3, 2)}}, [3, 2])
    there = host.cuda()
    index = INDICES[name]
    assert_same_on_device(there[moved(index)], host[index])
    there[moved(index)] = 0
    host[index] = 0
    assert_same_on_device(there, host)
    there[moved(index)] = there[moved(index)] + 1
    host[index] = host[index] + 1
    assert_same_on_device(there, host)


@CUDA
@pytest.mark.parametrize("index", [[5], torch.tensor([0, -4]), ([0], [2])])
def test_index_out_of_range_raises_before_gpu_kernel(index: Any) -> None:
    td = TensorDict({"a": torch.zeros(3, 2)}, [3, 2]).cuda()
    for use in (lambda: td[index], lambda: td.__setitem__(index, 1)):
        with pytest.raises(CollectionIndexError, match="out of bounds for batch dim"):
            use()
    assert td.sum(reduce=True).item() == 0  # a failed device assert would break all later calls


@CUDA
def test_cuda_graph_replay_equals_eager() -> None:
    td, other = make_sample(), make_sample() + 1

    def step() -> Any:
        result = (td * 2 + other).clamp(0, 20)
        result["n", "c"] = result["a"].sum(-1)
        td.update_(result.exclude(("n", "c")))
        return torch.stack([result, result])[0].reshape(-1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    td.update_(make_sample())
    graph.replay()
    expected = (make_sample() * 2 + other).clamp(0, 20)
    assert_same_on_device(td, expected)
    assert_same_on_device(out.select("a", ("n", "b")), expected)


@CUDA
def test_del_td_frees_gpu_memory_at_once() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for make in (
        make_sample,
        lambda: make_sample()[0],
        lambda: lazy_stack([make_sample()] * 2) + 1,
        lambda: make_sample().lock_().clone(),
    ):
        td = make()
        assert torch.cuda.memory_allocated() > before
        del td
        assert torch.cuda.memory_allocated() == before


@CUDA
def test_pointwise_cpu_and_gpu_leaves_keeps_devices() -> None:
    td = TensorDict({"a": torch.ones(2), "b": torch.ones(2, device="cuda")}, [2])
    assert td.device is None
    for result in (
        td + 1,
        td * td * 2,
        td.clone().add_(1),
        torch.stack([td, td])[0] * 2,
        td.update_(td.clone()) + td,
    ):
        assert [leaf.device.type for leaf in result.values()] == ["cpu", "cuda"]
        assert [leaf.tolist() for leaf in result.values()] == [[2.0, 2.0]] * 2


@CUDA
def test_torch_load_map_location_moves_gpu_td() -> None:
    for td in (make_sample(), lazy_stack([make_sample(), make_sample()]), TensorDictParams(make_sample())):
        file = io.BytesIO()
        torch.save(td, file)
        for place in ("cpu", "cuda"):
            file.seek(0)
            found = torch.load(file, map_location=place, weights_only=not isinstance(td, TensorDictParams))
            assert found.device.type == place
            assert_same_on_device(found, td, place)


@pytest.mark.parametrize("weights_only", [False, True])
def test_torch_load_sets_device_label_of_loaded_leaves(weights_only: bool) -> None:
    there = torch.device("cuda", 0)  # a device label needs no GPU
    for td in (
        make_sample("cpu"),
        lazy_stack([make_sample("cpu"), make_sample("cpu")]),
        TensorDict({"n": make_sample("cpu")}),
    ):
        set_device_labels(td, there)
        file = io.BytesIO()
        torch.save(td, file)
        file.seek(0)
        found = torch.load(file, weights_only=weights_only)
        assert found.device == torch.device("cpu") and found["n"].device == torch.device("cpu")
        found["new"] = torch.zeros(found.batch_size)


@CUDA
def test_index_under_default_cuda_device_equals_cpu() -> None:
    with torch.device("cuda"):
        td = TensorDict({"a": [1.0, 2.0], "n": {"b": torch.ones(2)}}, [2])
        assert td["a"].device.type == "cuda" and td.device is None
        assert td[[1]]["a"].tolist() == [2.0]
        assert td.cpu()[[1]]["a"].tolist() == [2.0]
        assert td[td["a"] > 1]["a"].tolist() == [2.0]


@CUDA
@pytest.mark.parametrize("name", [row.name for row in POINTWISE if row.kind == "unary" and row.named])
def test_unary_autocast_dtypes_equal_torch_per_leaf(name: str) -> None:
    td = TensorDict({"a": torch.ones(3, dtype=torch.float16), "b": torch.ones(2)}).cuda()
    with torch.autocast("cuda"):
        result = getattr(td, name)()
        assert [leaf.dtype for leaf in result.values()] == [
            getattr(leaf, name)().dtype for leaf in td.values()
        ]


@CUDA
def test_mul_inplace_tied_leaf_changes_once() -> None:
    leaf = torch.ones(1 << 20, device="cuda")
    td = TensorDict({"a": leaf, "b": {"c": leaf}})
    for _ in range(3):
        td.mul_(2)
    assert leaf.unique().tolist() == [8.0]
