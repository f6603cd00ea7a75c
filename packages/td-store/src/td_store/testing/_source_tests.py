"""Conformance suite for sources of stored tensors."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from td_core.typing import Source, SourceIndex

from .._stored_tensor import StoredTensor

__all__ = ["SourceTests"]

SHAPES = [(), (5,), (1,), (4, 3), (1, 3), (3, 4, 2), (3, 2, 2, 3), (0,), (0, 3), (3, 0)]

#: Per name, the index for a tensor of a shape; None where the shape does not have it.
INDICES: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "all": lambda shape: ...,
    "empty_tuple": lambda shape: (),
    "none": lambda shape: None,
    "true": lambda shape: True,
    "false": lambda shape: False,
    "int": lambda shape: shape[0] // 2,
    "negative": lambda shape: -1 if shape[0] else slice(0),
    "int_tensor": lambda shape: torch.tensor(shape[0] - 1),
    "slice": lambda shape: slice(1, shape[0]),
    "negative_slice": lambda shape: slice(-2, None),
    "step": lambda shape: slice(None, None, 2),
    "none_left": lambda shape: slice(2, 2),
    "last_dim": lambda shape: (..., shape[-1] // 2),
    "last_dim_slice": lambda shape: (..., slice(1, None)),
    "inserted": lambda shape: (None, slice(1, None), None),
    "list": lambda shape: [shape[0] - 1, 0],
    "repeated": lambda shape: [0, shape[0] - 1, 0, 0],
    "negative_list": lambda shape: [-1, 0],
    "increasing": lambda shape: torch.arange(0, shape[0], 2),
    "no_positions": lambda shape: torch.zeros(0, dtype=torch.int64),
    "matrix": lambda shape: torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]]),
    "int32": lambda shape: torch.tensor([shape[0] - 1, 0], dtype=torch.int32),
    "mask": lambda shape: torch.arange(shape[0]) % 3 != 1,
    "no_mask": lambda shape: torch.zeros(shape[0], dtype=torch.bool),
    "whole_mask": lambda shape: torch.arange(torch.Size(shape).numel()).view(shape) % 3 == 1,
    "second_list": lambda shape: (slice(None), [shape[1] - 1, 0]),
    "second_mask": lambda shape: (slice(1, None), torch.arange(shape[1]) != 1),
    "last_list": lambda shape: (..., [shape[-1] - 1, 0]),
    "slice_list": lambda shape: (slice(None, None, 2), [shape[1] - 1, 0, 0]),
    "int_list": lambda shape: (shape[0] - 1, [shape[1] - 1, 0]),
    "list_int": lambda shape: ([shape[0] - 1, 0], shape[1] - 1),
    "pairs": lambda shape: ([shape[0] - 1, 0, 0], [0, shape[1] - 1, 0]),
    "outer": lambda shape: (torch.tensor([[shape[0] - 1], [0]]), torch.tensor([shape[1] - 1, 0])),
    "pair_mask": lambda shape: torch.arange(shape[0] * shape[1]).view(shape[:2]) % 2 == 0,
    "apart": lambda shape: ([shape[0] - 1, 0], slice(None), [shape[2] - 1, 0]),
    "apart_rows": lambda shape: (slice(None), [shape[1] - 1, 0], slice(None), [shape[3] - 1, 0]),
    "inner_pairs": lambda shape: (slice(None), [shape[1] - 1, 0], [0, shape[2] - 1]),
    "inner_list": lambda shape: (1, slice(None), [shape[2] - 1, 0]),
    "inner_mask": lambda shape: (
        slice(None),
        torch.arange(shape[1] * shape[2]).view(shape[1:3]) % 2 == 0,
    ),
}

#: Views whose index the suite reads and writes as well: by name, the view of a tensor of rank 3.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[:, 1],
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 1),
    "flatten": lambda x: x.view(-1),
    "flatten_rows": lambda x: x.flatten(0, 1),
    "flatten_columns": lambda x: x.flatten(1),
    "flatten_part": lambda x: x[1:, :, :].flatten(0, 1)[1:],
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(0)[0],
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "second_part": lambda x: x.split(2, dim=1)[1],
    "second_row": lambda x: x.unbind(1)[2],
    "movedim": lambda x: x.movedim(0, -1)[..., 1:],
}


#: Ways to start a process: one that inherits what its parent has opened, and one that does not. The processes of a fork
#: server import td_core only once.
METHODS = ["fork", "forkserver"] if "forkserver" in multiprocessing.get_all_start_methods() else ["spawn"]


def _make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def _list_indices(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the indices that a tensor of a shape has, by name."""
    found = {}
    for name, make in INDICES.items():
        # An index is left out if the rank is too small for it, or the dim is empty.
        with contextlib.suppress(IndexError, TypeError):
            found[name] = make(shape)
            _make(shape)[found[name]]
            continue
        found.pop(name, None)
    return found


class SourceTests:
    """Conformance suite of a source. A subclass defines :meth:`make`.

    Attributes:
        dtypes: dtypes of arrays that the source stores.
        is_shared: whether another process that received the source writes to the same array.

    >>> class TestMemory(SourceTests):
    ...     is_shared = False
    ...
    ...     def make(self, array, folder):
    ...         return MemorySource(array)
    """

    dtypes: ClassVar[list[torch.dtype]] = [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64,
    ]  # fmt: skip
    is_shared: ClassVar[bool] = True

    def make(self, array: Tensor, folder: Path) -> Source:
        """Return a source that can be written, on a new array in ``folder`` with these elements."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def test_shape_and_dtype_are_those_of_the_array(self, tmp_path: Path) -> None:
        for number, shape in enumerate(SHAPES):
            folder = tmp_path / str(number)
            folder.mkdir()
            source = self.make(_make(shape), folder)
            assert tuple(source.shape) == shape
            assert source.dtype is torch.float32

    # One test for all indices of a shape, since a test costs more than a read.
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_read_index_returns_elements(self, shape: tuple[int, ...], tmp_path: Path) -> None:
        array = _make(shape)
        stored = StoredTensor(self.make(array, tmp_path))
        for name, index in _list_indices(shape).items():
            check_equal(stored[index], array[index], name)

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_write_index_changes_those_elements(self, shape: tuple[int, ...], tmp_path: Path) -> None:
        array = _make(shape)
        stored = StoredTensor(self.make(array, tmp_path))
        for number, (name, index) in enumerate(_list_indices(shape).items()):
            value = torch.full_like(array[index], -number)
            array[index] = value
            stored[index] = value
            stored.flush()
            check_equal(stored, array, name)
            array[index] = number + 0.5
            stored[index] = number + 0.5
            check_equal(stored, array, name)

    @pytest.mark.parametrize("view", VIEWS)
    def test_read_view_returns_elements(self, view: str, tmp_path: Path) -> None:
        array = _make((3, 4, 2))
        expected, stored = VIEWS[view](array), VIEWS[view](StoredTensor(self.make(array, tmp_path)))
        assert isinstance(stored, StoredTensor)
        check_equal(stored, expected)
        check_equal(stored[[-1, 0, 0]], expected[[-1, 0, 0]])
        check_equal(stored[expected > 7], expected[expected > 7])
        check_equal(stored[0], expected[0])

    @pytest.mark.parametrize("view", VIEWS)
    def test_write_view_changes_the_array(self, view: str, tmp_path: Path) -> None:
        array = _make((3, 4, 2))
        whole = StoredTensor(self.make(array, tmp_path))
        expected, stored = VIEWS[view](array), VIEWS[view](whole)
        changes: list[Callable[[Any], object]] = [
            lambda x: x.mul_(-2),
            lambda x: x[1:].fill_(5),
            lambda x: x.__setitem__([-1, 0], 7.0),
            lambda x: x.__setitem__(torch.ones(x.shape) > 0, 0.5),
            lambda x: x.copy_(torch.arange(float(x.numel())).view(x.shape)),
        ]
        for change in changes:
            change(expected)
            change(stored)
            check_equal(whole, array)

    @pytest.mark.parametrize("place", [3, -4, [0, 3], torch.tensor([[-4]])], ids=repr)
    def test_index_out_of_range_raises(self, place: Any, tmp_path: Path) -> None:
        stored = StoredTensor(self.make(_make((3, 2)), tmp_path))
        with pytest.raises(IndexError, match=r"out of (bounds|range)"):
            stored[place]
        with pytest.raises(IndexError, match=r"out of (bounds|range)"):
            stored[place] = 0.0
        check_equal(stored, _make((3, 2)))

    def test_write_repeated_position_keeps_last_value(self, tmp_path: Path) -> None:
        stored = StoredTensor(self.make(_make((3, 2)), tmp_path))
        stored[[1, 1, 0, 1]] = torch.tensor([[7.0], [8.0], [9.0], [6.0]]).expand(4, 2)
        assert stored.tolist() == [[9, 9], [6, 6], [4, 5]]

    def test_add_at_repeated_positions_adds_all(self, tmp_path: Path) -> None:
        array = _make((3, 2))
        stored = StoredTensor(self.make(array, tmp_path))
        for x in (array, stored):
            x.index_put_((torch.tensor([1, 1, 0]),), torch.ones(3, 2), accumulate=True)
        check_equal(stored, array)

    def test_every_dtype_is_read_and_written(self, tmp_path: Path) -> None:
        for number, dtype in enumerate(self.dtypes):
            folder = tmp_path / str(number)
            folder.mkdir()
            array = _make((3, 2), dtype)
            stored = StoredTensor(self.make(array, folder))
            assert stored.dtype is dtype
            check_equal(stored, array)
            stored[1] = array[2]
            assert stored.clone()[1].tolist() == array[2].tolist()

    def test_write_to_result_of_read_leaves_the_array(self, tmp_path: Path) -> None:
        array = _make((3, 2))
        source = self.make(array, tmp_path)
        indices: list[SourceIndex] = [
            (slice(0, 3, 1), slice(0, 2, 1)),
            (torch.tensor([0, 2]), slice(0, 2, 1)),
        ]
        for index in indices:
            source.read(index).zero_()
        check_equal(StoredTensor(source), array)

    def test_read_many_returns_what_read_returns(self, tmp_path: Path) -> None:
        source: Any = self.make(_make((3, 2)), tmp_path)
        if not hasattr(source, "read_many"):
            pytest.skip("the source has no read_many()")
        index = (slice(1, 3, 1), slice(0, 1, 1)), (torch.tensor([0, 2]), slice(0, 2, 1))
        for result, item in zip(source.read_many([(source, item) for item in index]), index, strict=True):
            check_equal(result, source.read(item))

    def test_map_returns_memory_of_the_array(self, tmp_path: Path) -> None:
        array = _make((3, 2))
        source: Any = self.make(array, tmp_path)
        if not hasattr(source, "map") or source.map() is None:
            pytest.skip("the source has no map(), or cannot map this array")
        check_equal(source.map(), array)
        source.write((slice(1, 2, 1), slice(0, 2, 1)), torch.full((1, 2), 7.0))
        array[1] = 7.0
        check_equal(source.map(), array)
        source.map()[0] = 8.0
        array[0] = 8.0
        check_equal(StoredTensor(source), array)

    def test_pickle_reads_and_writes(self, tmp_path: Path) -> None:
        array = _make((4, 3))
        stored = StoredTensor(self.make(array, tmp_path))[1:, 1:].T
        back = pickle.loads(pickle.dumps(stored))
        assert type(back) is StoredTensor
        check_equal(back, array[1:, 1:].T)
        back[1] = 9.0
        check_equal(
            back, stored.clone() if self.is_shared else torch.cat([array[1:, 1:2].T, torch.full((1, 3), 9.0)])
        )

    def test_eight_threads_read_and_write(self, tmp_path: Path) -> None:
        array = _make((64, 3))
        stored = StoredTensor(self.make(array, tmp_path))

        def work(number: int) -> None:
            for _ in range(5):
                check_equal(stored[number::8], array[number::8])
                check_equal(stored[[number + 8, number]], array[[number + 8, number]])
                stored[number::8] = array[number::8]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        check_equal(stored, array)

    def test_threads_that_change_rows_keep_those_of_others(self, tmp_path: Path) -> None:
        stored = StoredTensor(self.make(torch.zeros(64, 3), tmp_path))
        if not hasattr(stored.source, "hold"):
            pytest.skip("the source has no hold()")

        def work(number: int) -> None:
            for row in range(number, 64, 8):
                stored.index_add_(0, torch.tensor([row]), torch.full((1, 3), row + 1.0))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        check_equal(stored, torch.arange(1.0, 65.0)[:, None].expand(64, 3))

    @pytest.mark.parametrize("method", METHODS)
    def test_other_process_reads_and_writes(self, method: str, tmp_path: Path) -> None:
        array = _make((4, 3))
        stored = StoredTensor(self.make(array, tmp_path))
        check_equal(stored, array)  # the parent process has opened the store
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["td_core"])
        queue = context.Queue()
        process = context.Process(target=_write_in_process, args=(stored, queue))
        process.start()
        assert queue.get(timeout=120) == array[1:3].tolist()
        process.join(60)
        assert process.exitcode == 0
        if self.is_shared:
            array[2] = -1
            check_equal(stored, array)


def _write_in_process(stored: StoredTensor, queue: Queue[list[float]]) -> None:
    queue.put(stored[1:3].tolist())
    stored[2] = -1.0
    stored.flush()


def check_equal(result: Tensor, expected: Tensor, what: str = "") -> None:
    """Check that a stored tensor or a tensor has the elements, shape and dtype of another one."""
    assert result.shape == expected.shape, what
    assert result.dtype is expected.dtype, what
    assert torch.equal(result.clone(), expected), what
