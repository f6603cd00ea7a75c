"""Tests of stored tensors, on a source in memory and on one in a file."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from functorch.dim import dims
from torch import Tensor

from td_core import LockedError, TensorDict, lazy_stack, set_printoptions
from td_store import StoredTensor
from td_store.testing import LoggedSource, MemorySource, OpenTests, RawFile, SourceTests


class TestMemorySource(SourceTests):
    is_shared = False

    def make(self, array: Tensor, folder: Path) -> MemorySource:
        return MemorySource(array)


class TestRawFile(SourceTests):
    def make(self, array: Tensor, folder: Path) -> RawFile:
        return RawFile.create(folder / "array.bin", array)


class TestOpenMemory(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        return data.apply(lambda leaf: StoredTensor(MemorySource(leaf)))


class TestOpenRawFile(OpenTests):
    def open(self, data: TensorDict, folder: Path) -> Any:
        def store(key: Any, leaf: Tensor) -> Tensor:
            return StoredTensor(RawFile.create(folder / f"{'.'.join(key)}.bin", leaf))

        return data.named_apply(store, nested_keys=True)


WRITES: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x.__setitem__(1, 0),
    "positions": lambda x: x.__setitem__([1, 0], 0),
    "view": lambda x: x[1:].zero_(),
    "arithmetic": lambda x: x.add_(1),
    "copy": lambda x: x.copy_(torch.zeros(3, 2)),
    "out": lambda x: torch.add(torch.ones(3, 2), 1, out=x),
    "random": lambda x: x.uniform_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_in_mode_r_raises(name: str) -> None:
    source = MemorySource(torch.arange(6.0).view(3, 2))
    with pytest.raises(
        LockedError, match=r"it is opened with mode='r'; open it with mode='r\+', or clone\(\) it"
    ):
        WRITES[name](StoredTensor(source, mode="r"))
    assert source.array.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("name", WRITES)
def test_write_in_mode_c_changes_only_the_tensor(name: str) -> None:
    array = torch.arange(6.0).view(3, 2)
    source, expected = MemorySource(array), array.clone()
    stored = StoredTensor(source, mode="c")
    view = stored[1:]
    for x in (stored, expected):
        torch.manual_seed(0)
        WRITES[name](x)
    assert torch.equal(stored.clone(), expected)
    assert torch.equal(view.clone(), expected[1:])
    assert torch.equal(pickle.loads(pickle.dumps(stored)).clone(), expected)
    assert torch.equal(source.array, array)


def test_create_with_unknown_mode_raises() -> None:
    with pytest.raises(ValueError, match=r"mode is one of 'r', 'r\+', 'c'; got 'w'"):
        StoredTensor(MemorySource(torch.zeros(2)), mode="w")


def test_write_into_leaf_of_mode_r_names_its_key() -> None:
    td = TensorDict({"n": {"a": StoredTensor(MemorySource(torch.zeros(3)), mode="r")}}, batch_size=[3])
    message = r"key \('n', 'a'\).*cannot write to MemorySource\(\(3,\)\): it is opened with mode='r'"
    writes: list[Callable[[], Any]] = [
        td.zero_,
        lambda: td.add_(1),
        lambda: td.__setitem__(1, 0),
        lambda: td.__setitem__([2, 1], TensorDict({"n": {"a": torch.ones(2)}}, batch_size=[2])),
        lambda: td.update_(td.clone()),
        lambda: td.copy_(td.clone()),
        lambda: td.set_(("n", "a"), torch.ones(3)),
        lambda: td.set_at_(("n", "a"), 1.0, 0),
        lambda: td.load_state_dict(td.clone().state_dict()),
    ]
    for write in writes:
        with pytest.raises(LockedError, match=message):
            write()


class Many(MemorySource):
    """A source that counts the calls of its ``read_many``."""

    calls: ClassVar[list[int]] = []

    def read_many(self, requests: list[tuple[Any, Any]]) -> list[Tensor]:
        self.calls.append(len(requests))
        return [source.read(index) for source, index in requests]


class TestManySource(SourceTests):
    is_shared = False

    def make(self, array: Tensor, folder: Path) -> Many:
        return Many(array)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize(
    ("name", "operation"),
    {
        "positions": lambda td: td[[2, 0]],
        "mask": lambda td: td[torch.tensor([True, False, True])],
        "tuple": lambda td: td[([2, 0],)],
        "getitems": lambda td: td.__getitems__([2, 0]),
        "nested_lazy_stack": lambda td: lazy_stack([td, td], 1)[[2, 0]],
    }.items(),
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_index_rows_of_all_leaves_calls_read_many_once(name: str, operation: Any, mode: str) -> None:
    leaves = {"a": torch.arange(6).view(3, 2), "n": {"b": torch.arange(3.0)}}
    plain = TensorDict(leaves, batch_size=[3])
    td = plain.apply(lambda leaf: StoredTensor(Many(leaf), mode=mode))
    Many.calls.clear()
    result = operation(td)
    assert Many.calls == [2 if name != "nested_lazy_stack" else 4]
    assert all(type(leaf) is Tensor for leaf in result.values(True, True))
    assert (result == operation(plain)).all()


def test_operation_with_several_stored_operands_calls_read_many_once() -> None:
    first, second = (StoredTensor(Many(torch.arange(3.0))) for _ in range(2))
    Many.calls.clear()
    assert torch.stack([first, second[[0, 1, 2]], second]).tolist() == [[0, 1, 2]] * 3
    assert Many.calls == [2]


def test_source_that_reads_another_shape_raises() -> None:
    class Wrong(MemorySource):
        def read(self, index: Any) -> Tensor:
            return self.array[0]

    with pytest.raises(RuntimeError, match=r"Wrong.read\(.*returned shape \[2\] .*expected shape \[3, 2\]"):
        StoredTensor(Wrong(torch.zeros(3, 2))).clone()


def test_large_writes_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("td_store._requests.LARGEST_WRITE", 64)
    log: list[Any] = []
    target = StoredTensor(LoggedSource(MemorySource(torch.zeros(10, 4)), "target", log))
    source = StoredTensor(LoggedSource(MemorySource(torch.arange(40.0).view(10, 4)), "source", log))
    target.copy_(source)
    assert target.tolist() == source.tolist()
    assert [(request, name, index[0]) for request, name, index in log[:4]] == [
        ("read", "source", slice(0, 4, 1)),
        ("write", "target", slice(0, 4, 1)),
        ("read", "source", slice(4, 8, 1)),
        ("write", "target", slice(4, 8, 1)),
    ]


def test_copy_of_overlapping_part_reads_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("td_store._requests.LARGEST_WRITE", 8)
    stored, expected = StoredTensor(MemorySource(torch.arange(6.0))), torch.arange(6.0)
    stored[1:].copy_(stored[:-1])
    expected[1:] = expected[:-1].clone()
    assert stored.tolist() == expected.tolist()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x.storage(),
    "share_memory_": lambda x: x.share_memory_(),
    "resize_": lambda x: x.resize_(2),
    "set_": lambda x: x.set_(torch.zeros(2, dtype=x.dtype)),
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "data": lambda x: setattr(x, "data", torch.zeros(3, 2, dtype=x.dtype)),
    "expanded": lambda x: x[None].expand(2, 3, 2).zero_(),
    "conjugate": lambda x: x.conj().zero_(),
    "real": lambda x: x.real.zero_(),
    "other_dtype": lambda x: x.view(torch.float32).zero_(),
    "out": lambda x: torch.ones(5, out=x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operation_without_a_place_in_the_store_raises(name: str) -> None:
    array = torch.arange(6).view(3, 2).to(torch.complex64)
    source = MemorySource(array)
    with pytest.raises(RuntimeError, match="stored tensor"):
        REFUSED[name](StoredTensor(source))
    assert torch.equal(source.array, array)


CONVERTED: dict[str, Callable[[Any], Any]] = {
    "conj": lambda x: x.conj(),
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "view_as_real": torch.view_as_real,
    "dtype": lambda x: x.view(torch.float32),
    "conjugate_product": lambda x: x.conj()[1:] * x[1:],
    "matrix_product": lambda x: x.mH @ x,
}


@pytest.mark.parametrize("name", CONVERTED)
def test_convert_complex_view_reads_its_elements(name: str) -> None:
    array = torch.arange(12.0).view(3, 2, 2)
    array = torch.view_as_complex(array)
    result = CONVERTED[name](StoredTensor(MemorySource(array)))
    assert torch.equal(result.clone(), CONVERTED[name](array).resolve_conj())


def test_gradient_of_stored_leaf_is_in_memory() -> None:
    stored = StoredTensor(MemorySource(torch.arange(3.0))).requires_grad_()
    td = TensorDict({"a": stored}, batch_size=[3])
    (td[[0, 2]]["a"].sum() + (stored**2).sum() + td.to("cpu")["a"].sum() + stored[1:].sum()).backward()
    assert stored.grad.tolist() == [2.0, 4.0, 7.0]
    assert type(stored.grad) is Tensor


def test_import_td_core_does_not_import_stored_tensors() -> None:
    code = "import sys, td_core; print([name for name in sys.modules if '_stored' in name])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    code = "import sys, td_core, td_store; assert 'StoredTensor' in dir(td_store); print(td_core.StoredTensor.__module__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "td_store"


def test_show_options_of_printing_read_nothing() -> None:
    log: list[Any] = []
    td = TensorDict({"a": StoredTensor(LoggedSource(MemorySource(torch.zeros(3)), "a", log))})
    with set_printoptions(compact=False, show_is_view=True, show_storage_size=True, show_grad=True):
        assert "StoredTensor(shape=torch.Size([3])" in repr(td)
    assert td.bytes() == td.bytes(count_duplicates=False) == 12
    assert not td.is_shared()
    assert log == []


def test_compile_reads_the_current_elements() -> None:
    log: list[Any] = []
    stored = StoredTensor(LoggedSource(MemorySource(torch.arange(3.0)), "a", log))
    double = torch.compile(lambda x: x * 2 + 1, backend="aot_eager")
    assert double(stored).tolist() == [1, 3, 5]
    stored[1] = 7
    log.clear()
    assert double(stored).tolist() == [1, 15, 5]
    assert [request for request, _, _ in log] == ["read"]


COMPILED: dict[str, Callable[[Any], Any]] = {
    "leaf": lambda td: td["a"] * 2 + 1,
    "view": lambda td: td[1:3]["a"].sum(),
    "positions": lambda td: td[torch.tensor([2, 0])]["a"],
    "arithmetic": lambda td: (td * 2)["n", "b"],
    "write": lambda td: td.add_(1)["a"].clone(),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile_stored_leaf_needs_clone_for_one_graph(name: str) -> None:
    def make() -> TensorDict:
        leaf = StoredTensor(MemorySource(torch.arange(6.0).view(3, 2)))
        return TensorDict({"a": leaf, "n": {"b": leaf}}, [3])

    call = COMPILED[name]
    expected = call(make().clone())
    torch._dynamo.reset()
    with pytest.raises(
        RuntimeError, match=r"a stored tensor cannot be traced by torch.compile: clone\(\) it"
    ):
        torch.compile(call, backend="eager", fullgraph=True)(make())
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(make().clone()), expected)


def test_compile_function_of_leaf_needs_clone_for_one_graph() -> None:
    stored = StoredTensor(MemorySource(torch.arange(3.0)))
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"clone\(\) it"):
        double(stored)
    assert double(stored.clone()).tolist() == [0, 2, 4]


OTHERS: dict[str, Callable[[Any], Any]] = {
    "numpy_array": np.asarray,
    "from_dlpack": torch.from_dlpack,
    "tensor": lambda x: x.clone(),
    "contains": lambda x: 1.0 in x,
    "float": lambda x: float(x[0, 1]),
    "format": lambda x: f"{x[0, 1]:.2f}",
    "length": len,
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(4, 2)),
    "as_strided": lambda x: x.as_strided((2, 2), (2, 1), 2),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "tensor_split": lambda x: x.tensor_split(3)[1],
    "foreach": lambda x: torch._foreach_add([x, torch.ones(2)], 1.0)[0],
    "foreach_in_place": lambda x: torch._foreach_mul_([x, torch.ones(2)], 2.0)[0],
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 2, dtype=torch.int64), 9.0),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1]), torch.ones(1, 2)),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([1]), torch.ones(1, 2)),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1]), 8.0),
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 1])),
    "masked_select": lambda x: x.masked_select(torch.arange(6).view(3, 2) % 2 == 0),
    "put_": lambda x: x.put_(torch.tensor([1]), torch.tensor([5.0])),
    "apply_": lambda x: x.apply_(lambda number: number + 1),
    "map_": lambda x: x.map_(torch.ones(3, 2), lambda left, right: left + right),
    "tril_": lambda x: x.tril_(),
    "out": lambda x: torch.add(x, 1, out=x),
    "sort": lambda x: x.sort(0, descending=True).values,
    "gradient": torch.func.grad(lambda x: (x * x).sum()),
    "vmap": torch.vmap(lambda row: row.sum()),
    "inference": lambda x: torch.inference_mode()(lambda: x[1:].zero_() + x[:2])().clone(),
    "autocast": lambda x: torch.autocast("cpu", enabled=False)(lambda: x @ x.T)(),
    "nested": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged).values(),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False)[1:],
    "new_zeros": lambda x: x.new_zeros(2),
    "ones_like": torch.ones_like,
    "copy_into_memory": lambda x: torch.zeros(3, 2).copy_(x),
    "index_with_stored": lambda x: torch.arange(9)[x[:, 0].long()],
    "equal": lambda x: torch.equal(x, x.clone()),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "repeat": lambda x: x.repeat(2, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_function_equals_that_on_memory(name: str) -> None:
    array = torch.arange(6.0).view(3, 2)
    source = MemorySource(array)
    result, expected = OTHERS[name](StoredTensor(source)), OTHERS[name](array)
    if isinstance(expected, Tensor):
        assert torch.equal(result.clone(), expected)
    else:
        assert np.array_equal(result, expected)
    assert torch.equal(source.array, array)


def test_ask_for_memory_in_c_raises() -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(StoredTensor(MemorySource(torch.zeros(3))))


#: Functions with positions or dims that decide what is read.
FUNCTIONS: dict[str, Any] = {
    "repeat_interleave": lambda x, at: x.repeat_interleave(at, 0),
    "repeat_interleave_function": lambda x, at: torch.repeat_interleave(x, at, dim=-2),
    "index_select": lambda x, at: x.index_select(1, at[1:3]),
    "index_select_int32": lambda x, at: torch.index_select(x, -1, torch.tensor(1, dtype=torch.int32)),
    "tensor_split": lambda x, at: torch.cat(x.tensor_split(at.sort().values[:2])),
    "tensor_split_function": lambda x, at: torch.cat(torch.tensor_split(x, torch.tensor([1, 2]), dim=1), 1),
    "take_along_dim": lambda x, at: x.take_along_dim(at[None, :2], 1),
    "first_class_dims": lambda x, at: (lambda i, j: (x[i, j] * 2 + x[j % 1, j]).order(i, j))(*dims(2)),
}


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_with_positions_or_dims_reads_stored_tensors(
    name: str, mapped: bool, tmp_path: Path
) -> None:
    pytest.importorskip("functorch.dim")
    array, at = torch.arange(8.0).view(4, 2), torch.tensor([2, 0, 1, 1])

    def store(tensor: Tensor, file: str) -> StoredTensor:
        return StoredTensor(RawFile.create(tmp_path / file, tensor) if mapped else MemorySource(tensor))

    expected = FUNCTIONS[name](array, at)
    assert torch.equal(FUNCTIONS[name](store(array, "x"), at), expected)
    assert torch.equal(FUNCTIONS[name](store(array, "y"), store(at, "at")), expected)


@pytest.mark.parametrize("positions", [[-1], [4], [0.5]])
def test_index_select_of_stored_tensor_refuses_what_torch_refuses(positions: list[Any]) -> None:
    at = torch.tensor(positions)
    for x in (torch.zeros(4, 2), StoredTensor(MemorySource(torch.zeros(4, 2)))):
        with pytest.raises((IndexError, RuntimeError)):
            x.index_select(0, at)
