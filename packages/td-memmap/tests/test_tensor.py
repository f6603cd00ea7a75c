"""MemoryMappedTensor: creating one, indexing it, and writing through it to its file."""

from __future__ import annotations

import errno
import gc
import operator
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from td_core import TensorDict
from td_core._torch.dtypes import STORABLE
from td_core._tree.buffers import as_bytes
from td_core.errors import CodecError, FormatError
from td_memmap import FileTakenError, MemoryMappedTensor, NoFileError

VIEWS = {
    "int": 1,
    "negative": -1,
    "slice": slice(1, None),
    "step": slice(None, None, 2),
    "tuple": (slice(None), 1),
    "none": None,
    "ellipsis": ...,
    "ellipsis and int": (..., 0),
    "none and int": (None, 0),
    "all ints": (1, 2),
    "numpy int": np.int64(1),
    "0-d tensor": torch.tensor(1),
    "empty tuple": (),
}


COPIES = {
    "list": [0, 1],
    "range": range(2),
    "tensor": torch.tensor([0, 1]),
    "mask": torch.tensor([True, False, True]),
    "numpy": np.array([0, 1]),
    "true": True,
}


@pytest.mark.parametrize("index", VIEWS.values(), ids=VIEWS)
def test_getitem_view_returns_tensor_on_same_file(
    index: Any, mapped: MemoryMappedTensor, source: Tensor, tmp_path: Path
) -> None:
    view = mapped[index]
    assert type(view) is MemoryMappedTensor
    assert view.filename == str(tmp_path / "t")
    assert view.parent_shape == (3, 4)
    assert torch.equal(view, source[index])
    again = pickle.loads(pickle.dumps(view))
    assert type(again) is MemoryMappedTensor
    assert torch.equal(again, source[index])
    again.fill_(-1)
    source[index] = -1
    assert torch.equal(mapped, source)


@pytest.mark.parametrize("index", COPIES.values(), ids=COPIES)
def test_getitem_copy_returns_plain_tensor(index: Any, mapped: MemoryMappedTensor, source: Tensor) -> None:
    result = mapped[index]
    assert type(result) is Tensor
    assert torch.equal(result, source[index])


def test_operations_return_plain_tensors_or_write_file(mapped: MemoryMappedTensor, source: Tensor) -> None:
    for result in (
        mapped + 1,
        mapped.clone(),
        mapped.view(4, 3),
        mapped == mapped,
        torch.stack([mapped, mapped]),
    ):
        assert type(result) is Tensor
    assert mapped.add_(1) is mapped
    again = MemoryMappedTensor.from_filename(mapped.filename, torch.float32, (3, 4))
    assert torch.equal(again, source + 1)


def test_split_and_unbind_return_views_on_file(mapped: MemoryMappedTensor, source: Tensor) -> None:
    for dim in (0, 1, -1):
        for parts, plain in (
            (mapped.unbind(dim), source.unbind(dim)),
            (mapped.split(2, dim), source.split(2, dim)),
            (mapped.chunk(2, dim), source.chunk(2, dim)),
            (
                mapped.split_with_sizes([1, source.shape[dim] - 1], dim),
                source.split_with_sizes([1, source.shape[dim] - 1], dim),
            ),
        ):
            assert len(parts) == len(plain)
            for part, expected in zip(parts, plain, strict=True):
                assert part.filename == mapped.filename
                assert torch.equal(part, expected)
                assert torch.equal(pickle.loads(pickle.dumps(part)), expected)


@pytest.mark.parametrize("dtype", STORABLE.values(), ids=STORABLE)
def test_from_tensor_every_dtype_round_trips(dtype: torch.dtype, tmp_path: Path) -> None:
    content = torch.arange(64, dtype=torch.uint8) % (2 if dtype == torch.bool else 200)
    source = content.view(dtype).view(2, -1)
    tensor = MemoryMappedTensor.from_tensor(source, filename=tmp_path / "t")
    assert tensor.dtype == dtype
    assert (tmp_path / "t").read_bytes() == content.numpy().tobytes()
    again = MemoryMappedTensor.from_filename(tmp_path / "t", dtype, source.shape)
    assert torch.equal(as_bytes(again), content)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12).view(3, 4).t(),
        lambda: torch.arange(3).expand(4, 3),
        lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
        lambda: torch.tensor([1 + 2j]).conj().imag,
        lambda: torch.arange(10)[::3],
        lambda: torch.tensor(3.5),
        lambda: torch.zeros(0, 3),
    ],
)
def test_from_tensor_noncontiguous_writes_c_order(make: Any, tmp_path: Path) -> None:
    source = make()
    tensor = MemoryMappedTensor.from_tensor(source, filename=tmp_path / "t")
    assert tensor.shape == source.shape
    assert tensor.is_contiguous()
    assert torch.equal(tensor, source.resolve_conj().resolve_neg())


def test_from_tensor_empty_creates_no_file(tmp_path: Path) -> None:
    tensor = MemoryMappedTensor.zeros(0, 3, filename=tmp_path / "t")
    assert not (tmp_path / "t").exists()
    assert pickle.loads(pickle.dumps(tensor)).shape == (0, 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_from_tensor_nested_round_trips(tmp_path: Path) -> None:
    parts = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(1, 4)]
    tensor = MemoryMappedTensor.from_tensor(torch.nested.nested_tensor(parts), filename=tmp_path / "t")
    assert tensor.is_nested
    assert tensor.parent_shape.tolist() == [[2, 3], [1, 4]]
    again = pickle.loads(pickle.dumps(tensor))
    assert all(torch.equal(one, other) for one, other in zip(again.unbind(), parts, strict=True))


CREATORS = {
    "zeros": (MemoryMappedTensor.zeros, 0, {}),
    "ones": (MemoryMappedTensor.ones, 1, {}),
    "empty": (MemoryMappedTensor.empty, 0, {}),
    "full": (MemoryMappedTensor.full, 7, {"fill_value": 7}),
}


@pytest.mark.parametrize(("create", "value", "extra"), CREATORS.values(), ids=CREATORS)
def test_create_functions_return_filled_tensors(
    create: Any, value: float, extra: dict[str, Any], tmp_path: Path
) -> None:
    expected = torch.full((2, 3), value, dtype=torch.int16)
    for args, kwargs in (((2, 3), {}), (((2, 3),), {}), ((torch.Size([2, 3]),), {}), ((), {"shape": (2, 3)})):
        tensor = create(*args, dtype=torch.int16, **kwargs, **extra)
        assert torch.equal(tensor, expected)
    tensor = create(2, 3, filename=tmp_path / "t", dtype=torch.int16, **extra)
    assert tensor.filename == str(tmp_path / "t")
    with pytest.raises(FileTakenError, match=r"t exists; pass existsok=True to replace it"):
        create(2, 3, filename=tmp_path / "t", **extra)
    with pytest.raises(TypeError, match="takes its shape once"):
        create(2, shape=(2,), **extra)
    with pytest.raises(TypeError, match=r"unexpected arguments \['size'\]"):
        create(2, size=(2,), **extra)
    with pytest.raises(RuntimeError, match="is on the CPU; got device='cuda'"):
        create(2, device="cuda", **extra)
    with pytest.raises(CodecError, match="cannot store the dtype torch.qint8 at an anonymous file"):
        create(2, dtype=torch.qint8, **extra)


def test_create_impossible_size_raises(tmp_path: Path) -> None:
    for shape, message in ((-1, 2), "negative dimension -1"), ((1 << 40, 1 << 40), "overflow"):
        with pytest.raises(RuntimeError, match=message):
            MemoryMappedTensor.zeros(shape)
        with pytest.raises(RuntimeError, match=message):
            MemoryMappedTensor.from_filename(tmp_path / "t", torch.int8, shape)
    for filename, what in (tmp_path / "t", "cannot write it"), (None, f"cannot reserve {1 << 62} bytes"):
        with pytest.raises(OSError, match=f"{what}.*: '{filename or tempfile.gettempdir()}'"):
            MemoryMappedTensor.zeros(1 << 62, dtype=torch.int8, filename=filename)
    assert not os.listdir(tmp_path)


def test_like_functions_return_filled_tensors(tmp_path: Path) -> None:
    like = torch.full((2,), 5, dtype=torch.int8)
    for name, expected in (("zeros_like", 0), ("ones_like", 1), ("empty_like", 0)):
        tensor = getattr(MemoryMappedTensor, name)(like, filename=tmp_path / name)
        assert tensor.tolist() == [expected] * 2
        assert tensor.dtype == torch.int8
        assert os.path.getsize(tmp_path / name) == 2
    assert MemoryMappedTensor.full_like(like, 3).tolist() == [3, 3]


def test_constructor_tensor_list_array_or_size_creates_tensor(tmp_path: Path) -> None:
    assert torch.equal(MemoryMappedTensor(torch.ones(3)), torch.ones(3))
    assert MemoryMappedTensor(torch.Size([2])).tolist() == [0, 0]
    assert MemoryMappedTensor([1, 2], dtype=torch.int8).dtype == torch.int8
    assert MemoryMappedTensor(np.ones(2)).dtype == torch.float64
    assert MemoryMappedTensor(torch.arange(3), index=1).item() == 1
    base = MemoryMappedTensor(torch.arange(4), filename=tmp_path / "t")
    wrapped = MemoryMappedTensor(
        base.untyped_storage(), dtype=torch.int64, shape=(2, 2), filename=tmp_path / "t"
    )
    wrapped[0, 0] = 9
    assert base[0] == 9


def test_gc_during_storage_deallocation_keeps_process_alive(tmp_path: Path) -> None:
    """Up to torch 2.9, collecting a storage of a Python subclass aborted the process."""
    MemoryMappedTensor.from_tensor(torch.arange(3), filename=tmp_path / "x.memmap")
    before = gc.get_threshold()
    gc.set_threshold(50, 1 << 30)
    try:
        kept = [MemoryMappedTensor.from_filename(tmp_path / "x.memmap", torch.int64, [3]) for _ in range(300)]
    finally:
        gc.set_threshold(*before)
    assert all(each.tolist() == [0, 1, 2] for each in kept)


def test_from_tensor_replacing_file_keeps_mapped_elements(mapped: MemoryMappedTensor, source: Tensor) -> None:
    new = MemoryMappedTensor.from_tensor(torch.zeros(3, 4), filename=mapped.filename, existsok=True)
    assert torch.equal(mapped, source)
    assert torch.equal(new, torch.zeros(3, 4))
    assert os.listdir(Path(mapped.filename).parent) == ["t"]
    kept = MemoryMappedTensor.from_tensor(
        torch.ones(3, 4), filename=mapped.filename, existsok=True, copy_data=False
    )
    assert torch.equal(kept, torch.zeros(3, 4))
    kept.fill_(2)
    assert torch.equal(new, torch.full((3, 4), 2.0))
    longer = MemoryMappedTensor.from_tensor(
        torch.ones(4, 4), filename=mapped.filename, existsok=True, copy_data=False
    )
    assert longer.tolist() == [[2.0] * 4] * 3 + [[0.0] * 4]


def test_from_tensor_existing_file_raises_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").touch()
    monkeypatch.setattr("td_store.files.NewFile._create", None)
    with pytest.raises(FileTakenError, match="t exists; pass existsok=True to replace it"):
        MemoryMappedTensor.from_tensor(torch.ones(2), filename=tmp_path / "t")


def test_from_tensor_slice_to_own_file_writes_slice(mapped: MemoryMappedTensor, source: Tensor) -> None:
    new = MemoryMappedTensor.from_tensor(
        mapped[1:], filename=mapped.filename, existsok=True, copy_existing=True
    )
    assert torch.equal(new, source[1:])
    assert os.path.getsize(mapped.filename) == 32


def test_from_tensor_mapped_elsewhere_raises(mapped: MemoryMappedTensor, tmp_path: Path) -> None:
    assert MemoryMappedTensor.from_tensor(mapped, filename=mapped.filename) is mapped
    with pytest.raises(FileTakenError, match="pass copy_existing=True to copy it to"):
        MemoryMappedTensor.from_tensor(mapped, filename=tmp_path / "other")
    with pytest.raises(FileTakenError, match="is stored in"):
        MemoryMappedTensor.from_tensor(mapped[0], filename=tmp_path / "other")
    other = MemoryMappedTensor.from_tensor(mapped, filename=tmp_path / "other", copy_existing=True)
    assert torch.equal(other, mapped)
    assert MemoryMappedTensor.from_tensor(other) is not other


def test_from_filename_mode_r_keeps_writes_private(mapped: MemoryMappedTensor, source: Tensor) -> None:
    private = MemoryMappedTensor.from_filename(mapped.filename, torch.float32, (3, 4), mode="r")
    private.fill_(-1)
    assert torch.equal(mapped, source)
    shared = MemoryMappedTensor.from_filename(mapped.filename, torch.float32, (3, 4), mode="r+")
    shared.fill_(-1)
    assert (mapped == -1).all()
    with pytest.raises(ValueError, match=r"mode must be 'r', 'r\+' or None; got 'w'"):
        MemoryMappedTensor.from_filename(mapped.filename, torch.float32, (3, 4), mode="w")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY, errno.EIO])
def test_from_filename_readonly_file_raises_only_in_mode_r_plus(
    code: int, source: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TensorDict({"t": source}).memmap(tmp_path)
    loaders: list[Callable[[str | None], Tensor]] = [
        lambda mode: MemoryMappedTensor.from_filename(
            tmp_path / "t.memmap", torch.float32, (3, 4), mode=mode
        ),
        lambda mode: TensorDict.load_memmap(tmp_path, mode=mode)["t"],
    ]
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    for load in loaders:
        with pytest.raises(OSError, match=os.strerror(code)):
            load("r+")
        for mode in (None, "r"):
            if code == errno.EIO and mode is None:
                with pytest.raises(OSError, match=os.strerror(code)):
                    load(mode)
                continue
            tensor = load(mode)
            tensor.fill_(-1)
            assert torch.equal(load("r"), source)


def test_from_filename_short_file_raises_and_keeps_size(mapped: MemoryMappedTensor) -> None:
    with pytest.raises(
        FormatError, match=r"too short for shape \[4, 4\] of torch.float32: it has 48 bytes, 64 are needed"
    ):
        MemoryMappedTensor.from_filename(mapped.filename, torch.float32, (4, 4))
    assert os.path.getsize(mapped.filename) == 48
    with pytest.raises(FileNotFoundError):
        MemoryMappedTensor.from_filename(mapped.filename + "x", torch.float32, (4, 4))


def test_from_filename_pipe_raises(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    files = os.listdir("/proc/self/fd")
    with pytest.raises(FormatError, match="pipe: it is not a regular file"):
        MemoryMappedTensor.from_filename(tmp_path / "pipe", torch.float32, (4,))
    assert os.listdir("/proc/self/fd") == files


REFUSED = {
    "sparse": (lambda: torch.eye(2).to_sparse(), CodecError, "layout torch.sparse_coo"),
    "meta": (lambda: torch.empty(2, device="meta"), CodecError, "elements of a meta tensor"),
    "grad": (lambda: torch.ones(2, requires_grad=True), RuntimeError, "cannot require gradients"),
    "not a tensor": (lambda: [1, 2], TypeError, r"convert the list with torch.as_tensor\(\)"),
}


@pytest.mark.parametrize(("make", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_from_tensor_unstorable_raises(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MemoryMappedTensor.from_tensor(make())


def test_anonymous_file_is_freed_with_tensors() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    tensor = MemoryMappedTensor.from_tensor(torch.arange(5))
    view: Any = tensor[1:]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    with pytest.raises(NoFileError, match="it has no filename"):
        _ = tensor.filename
    del tensor
    assert view.tolist() == [1, 2, 3, 4]
    del view
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_anonymous_file_without_o_tmpfile_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    tensor = MemoryMappedTensor.from_tensor(torch.arange(3))
    assert tensor.add_(1).tolist() == [1, 2, 3]
    assert os.listdir(tmp_path) == []


def test_from_handler_short_file_raises() -> None:
    handler = MemoryMappedTensor.zeros(2).handler
    with pytest.raises(FormatError, match="the file is too short: 3 elements .* need 12 bytes, it has 8"):
        MemoryMappedTensor.from_handler(handler, torch.float32, (3,))


def test_getitem_vmapped_index_equals_torch() -> None:
    mapped = MemoryMappedTensor.from_tensor(torch.arange(6).view(3, 2))
    assert torch.vmap(lambda i: mapped[i])(torch.tensor([0, 2])).tolist() == [[0, 1], [4, 5]]


def test_transforms_and_compile_return_plain_tensors(mapped: MemoryMappedTensor, source: Tensor) -> None:
    assert torch.equal(torch.vmap(lambda row: row[0] + 1)(mapped), source[:, 0] + 1)
    assert torch.equal(torch.func.grad(lambda x: (x * x).sum())(mapped), 2 * source)

    @torch.compile(backend="eager", fullgraph=True)
    def compute(x: Tensor) -> Tensor:
        first, *_ = x.unbind(0)
        return x[0] * 2 + x[1:].sum(0) + first.detach() + x.split(1)[0][0]

    assert torch.equal(compute(mapped), source[0] * 4 + source[1:].sum(0))

    @torch.compile(backend="eager", fullgraph=True)
    def increment(x: Tensor) -> None:
        x.add_(1)

    increment(mapped)
    assert torch.equal(mapped, source + 1)


def test_memory_with_view_stays_mapped(source: Tensor, tmp_path: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(f"{tmp_path}/t")

    MemoryMappedTensor.from_tensor(source, filename=tmp_path / "t")
    mapped = MemoryMappedTensor.from_filename(tmp_path / "t", torch.float32, (3, 4))
    assert mappings() == 1
    row = mapped.view(-1)[4:8]
    del mapped
    gc.collect()
    assert mappings() == 1
    assert torch.equal(row, source[1])
    del row
    assert mappings() == 0


def test_from_tensor_full_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from td_memmap import _fs

    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_fs.os, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        MemoryMappedTensor.from_tensor(torch.ones(3), filename=tmp_path / "t")
    assert os.listdir(tmp_path) == []


def test_interpreter_exit_with_mapped_tensor_prints_nothing():
    program = "import torch, td_memmap; torch.kept = td_memmap.MemoryMappedTensor.from_tensor(torch.ones(3))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_from_tensor_removes_stale_files(source: Tensor, tmp_path: Path) -> None:
    (tmp_path / ".x.tmp-00000000").touch()
    for existsok in (False, True):
        MemoryMappedTensor.from_tensor(source, filename=tmp_path / "x", existsok=existsok)
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "index",
    [
        2,
        slice(1, 3),
        (slice(None),),
        None,
        [0, 2],
        torch.tensor([3, 0]),
        torch.tensor([True, False, True, False]),
    ],
    ids=str,
)
def test_setitem_mapped_collection_writes_files(index: Any, grad: bool, tmp_path: Path) -> None:
    plain = TensorDict({"a": torch.zeros(4, 2), "n": {"b": torch.zeros(4, dtype=torch.int64)}}, [4])
    mapped = plain.memmap(tmp_path)
    value = (plain[index] + torch.tensor(2)).apply(
        lambda leaf: leaf + torch.arange(leaf.numel()).view_as(leaf)
    )
    value["a"].requires_grad_(grad)
    plain[index] = value
    if grad:
        with torch.no_grad():
            mapped[index] = value
    else:
        mapped[index] = value
    assert isinstance(mapped["a"], MemoryMappedTensor)
    assert (TensorDict.load_memmap(tmp_path) == plain).all()


def test_setitem_mapped_leaf_requiring_grad_raises(tmp_path: Path) -> None:
    mapped = TensorDict({"a": torch.zeros(4), "b": torch.zeros(4)}, [4]).memmap(tmp_path)
    mapped["b"].requires_grad_()
    with pytest.raises(RuntimeError, match="'b'"):
        mapped[torch.tensor([1])] = TensorDict({"a": torch.ones(1), "b": torch.ones(1)}, [1])
    assert not TensorDict.load_memmap(tmp_path)["a"].any()


def test_create_functions_wrong_arguments_raise() -> None:
    full = MemoryMappedTensor.full((2, 3), 5, dtype=torch.int8)
    assert full.shape == (2, 3) and full.tolist() == [[5] * 3] * 2
    with pytest.raises(TypeError, match=r"full\(\) takes a shape and a fill_value"):
        MemoryMappedTensor.full((2, 3))
    for make in (MemoryMappedTensor.zeros, MemoryMappedTensor.ones, MemoryMappedTensor.empty):
        assert make(2, 3).shape == (2, 3)
        with pytest.raises(TypeError, match=r"takes a shape: numbers, one tuple, or shape="):
            make()
    row = MemoryMappedTensor.from_tensor(torch.arange(2), shape=(3, 2))
    assert row.tolist() == [[0, 1]] * 3
    row[0] = 7
    assert row.tolist() == [[7, 7], [0, 1], [0, 1]]


def test_constructor_handler_maps_existing_memory(tmp_path: Path) -> None:
    whole = MemoryMappedTensor.zeros(4)
    part = MemoryMappedTensor(None, handler=whole.handler, dtype=torch.float32, shape=(4,), index=slice(1, 3))
    part.fill_(1)
    assert whole.tolist() == [0, 1, 1, 0]
    with pytest.raises(
        FormatError, match=r"the storage is too small: shape \[5\] of torch.float32 needs 20 bytes"
    ):
        MemoryMappedTensor.from_storage(whole.untyped_storage(), shape=(5,))
    with pytest.raises(NoFileError, match="is not in an anonymous file"):
        operator.attrgetter("handler")(MemoryMappedTensor.zeros(4, filename=tmp_path / "a"))
