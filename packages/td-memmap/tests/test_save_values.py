"""Keys, dtypes and tensors of every form survive saving and loading."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from td_core import TensorDict
from td_core._kinds.lazy_stack import LazyStackedTensorDict
from td_core._torch.dtypes import STORABLE
from td_core._tree.buffers import as_bytes
from td_memmap import _chunks

UNUSUAL_KEYS = [
    "shape", "device", "_type", "_class", "_format_version", "_names", "_locked", "_members", "type", "dtype", "size",
    "cls", "leaves", "entries", "meta", "meta.json", "a.memmap", ".", "..", "", " ", "a/b", "a\\b", "../x", "%", "%k0",
    "%41", "é中", "😀", "\ud800", "\x00", "\n", "k" * 1000, "é" * 200, "Case", "case", "x", "x.shape", "0", "_tensordict",
    "CON", "a.b", "-", "~", "'", '"', "index", "custom_op", "stack_dim", "members",
]  # fmt: skip


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(1 + 2j).conj(),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(60, dtype=torch.int8).view(3, 4, 5).permute(2, 0, 1),
        torch.arange(3).expand(5, 3),
        torch.arange(4, dtype=torch.int8)._neg_view(),
    ],
    ids=lambda leaf: str(list(leaf.shape)),
)
@pytest.mark.parametrize("limit", [16, 1 << 20])
def test_iter_chunks_non_contiguous_limits_chunk_size(
    leaf: torch.Tensor, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chunks, "CHUNK_SIZE", limit)
    found = [bytes(piece) for piece in _chunks.iter_chunks(leaf)]
    assert b"".join(found) == bytes(as_bytes(leaf).numpy())
    assert max(map(len, found)) <= limit


@pytest.mark.parametrize("key", UNUSUAL_KEYS, ids=ascii)
def test_memmap_unusual_key_round_trips(key: str, prefix: Path, same: Any) -> None:
    td = TensorDict({"first": torch.ones(1)})
    td[key] = torch.arange(3)
    td["below", key] = torch.arange(2)
    td["other"] = TensorDict({key: TensorDict({key: torch.ones(1)})})
    td.memmap(prefix)
    same(TensorDict.load_memmap(prefix), td)
    assert all(file.resolve().is_relative_to(prefix.resolve()) for file in prefix.parent.rglob("*"))


def test_memmap_all_unusual_keys_together_round_trip(prefix: Path, same: Any) -> None:
    td = TensorDict({key: torch.tensor([i]) for i, key in enumerate(UNUSUAL_KEYS)}, names=None)
    nested = TensorDict({key: TensorDict({"v": torch.tensor([i])}) for i, key in enumerate(UNUSUAL_KEYS)})
    both = TensorDict({"leaves": td, "nodes": nested})
    both.memmap(prefix)
    same(TensorDict.load_memmap(prefix), both)


def test_memmap_keys_with_colliding_file_names_round_trip(prefix: Path, same: Any) -> None:
    td = TensorDict(
        {"a": torch.ones(1), "a.memmap": TensorDict({"b": torch.zeros(1)}), "meta.json": TensorDict()}
    )
    td.memmap(prefix)
    same(TensorDict.load_memmap(prefix), td)


@pytest.mark.filterwarnings("ignore:B?Complex", "ignore:The PyTorch API of nested tensors")
def test_memmap_every_dtype_round_trips(prefix: Path, same: Any) -> None:
    content = torch.arange(64, dtype=torch.uint8) % 2
    td = TensorDict({name: content.view(dtype) for name, dtype in STORABLE.items()})
    td.memmap(prefix)
    same(TensorDict.load_memmap(prefix), td)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
@pytest.mark.parametrize("shape", [(0, 1 << 60), (0, (1 << 63) - 1), (1 << 40, 0, 1 << 40), (1 << 62, 0)])
def test_memmap_empty_tensors_of_any_size_round_trip(
    shape: tuple[int, ...], dtype: torch.dtype, prefix: Path, same: Any
) -> None:
    td = TensorDict({"a": torch.empty(shape, dtype=dtype)}, shape[:1])
    for place in prefix, prefix.with_suffix(".tdz"):
        td.memmap(place)
        same(TensorDict.load_memmap(place), td)
        assert TensorDict.load_memmap(place, device="meta")["a"].shape == shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memmap_nested_tensors_round_trip(prefix: Path) -> None:
    parts = [torch.arange(6.0).view(2, 3), torch.arange(4.0).view(1, 4)]
    wide = [torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)]
    td = TensorDict(
        {
            "strided": torch.nested.nested_tensor(parts),
            "transposed": torch.nested.nested_tensor(parts).transpose(1, 2),
            "no element": torch.nested.nested_tensor([torch.zeros(0, 2), torch.zeros(0, 3)]),
            "no jagged element": torch.nested.nested_tensor([torch.zeros(0, 2)] * 2, layout=torch.jagged),
            "jagged": torch.nested.nested_tensor(wide, layout=torch.jagged),
            "with lengths": torch.nested.narrow(
                torch.arange(12).view(2, 6),
                1,
                torch.tensor([1, 2]),
                torch.tensor([3, 2]),
                layout=torch.jagged,
            ),
            "in another order": torch.nested.nested_tensor_from_jagged(
                torch.arange(6.0), torch.tensor([3, 0, 6]), torch.tensor([2, 3])
            ),
        }
    )
    saved = td.memmap(prefix)
    for found in (saved, TensorDict.load_memmap(prefix), td.memmap()):
        assert list(found.keys()) == list(td.keys())
        for key, leaf in td.items():
            assert found[key].layout == leaf.layout
            for one, other in zip(found[key].unbind(), leaf.unbind(), strict=True):
                assert torch.equal(one, other), key
                assert torch.equal(pickle.loads(pickle.dumps(one)), other), key
    inode = os.stat(prefix / "strided.memmap").st_ino
    saved.memmap(prefix)
    assert os.stat(prefix / "strided.memmap").st_ino == inode


def test_memmap_jagged_leaf_keeps_longest_length(prefix: Path) -> None:
    rows = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=torch.jagged)
    td = TensorDict({"n": rows, "t": rows.transpose(1, 2)}, [2])
    for found in (td.memmap(prefix), TensorDict.load_memmap(prefix), td.memmap()):
        assert {key: found[key].to_padded_tensor(0).shape[1:] for key in "nt"} == {"n": (3, 2), "t": (2, 3)}
    # The lengths of the result may change when it is filled, so they are not cached.
    like = td.memmap_like(prefix.with_name("like"))["n"]
    like.offsets().copy_(torch.tensor([0, 4, 4]))
    assert like.to_padded_tensor(0).shape[1] >= 4


@pytest.mark.once
def test_memmap_large_leaves_uses_little_memory(tmp_path: Path) -> None:
    code = f"""
import resource, torch
from td_core import TensorDict
row = torch.arange(1 << 20, dtype=torch.uint8)
big = torch.zeros(128 << 20, dtype=torch.uint8)
td = TensorDict({{"expanded": row.expand(200, 1 << 20), "strided": big.view(1 << 13, 1 << 14).t(), "plain": big}})
TensorDict({{"a": row, "s": row.view(4, -1).t()}}).memmap({str(tmp_path / "warm")!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
saved = td.memmap({str(tmp_path / "save")!r})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 10
    assert os.stat(tmp_path / "save" / "expanded.memmap").st_size == 200 << 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memmap_cuda_leaves_round_trip(prefix: Path, same: Any) -> None:
    td = TensorDict(
        {"a": torch.arange(10_000_000), "b": torch.arange(12).view(3, 4).t(), "c": torch.tensor(2.5)}
    )
    saved = td.to("cuda").memmap(prefix)
    same(saved, td)
    loaded = TensorDict.load_memmap(prefix, device="cuda")
    assert loaded["a"].is_cuda
    same(loaded.cpu(), td)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "options", [{}, {"num_threads": 4}, {"num_threads": 4, "return_early": True}], ids=str
)
def test_memmap_on_cuda_side_stream_waits_for_stream(tmp_path: Path, options: dict[str, Any]) -> None:
    side = torch.cuda.Stream()
    for number in (3.0, 5.0):
        big = torch.randn(4096, 4096, device="cuda")
        td = TensorDict({str(i): torch.zeros(1 << 18, device="cuda") for i in range(8)})
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(60):
                big = torch.mm(big, big).clamp_(-1, 1)
            td += number + big[0, 0] * 0
            saved: Any = td.memmap(tmp_path / str(number), **options)
            saved = saved.result() if "return_early" in options else saved
            assert all((leaf == number).all() for leaf in saved._leaves())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memmap_cuda_leaves_under_cuda_default_device(prefix: Path, same: Any) -> None:
    with torch.device("cuda"):
        td = TensorDict({"a": torch.arange(10), "b": torch.ones(3, 4).t()})
        same(td.memmap(prefix), td.cpu())
        same(TensorDict.load_memmap(prefix), td.cpu())
        td.save(f"{prefix}.tdz")
        same(TensorDict.load(f"{prefix}.tdz"), td.cpu())


@st.composite
def draw_leaf(draw: st.DrawFn, batch: tuple[int, ...]) -> Any:
    shape = (*batch, *draw(st.lists(st.integers(0, 3), max_size=2)))
    dtype = draw(st.sampled_from(list(STORABLE.values())))
    leaf = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
    form = draw(st.sampled_from(["plain", "strided", "expanded", "nested"]))
    if form == "nested" and not batch:
        # Components have equal rows, so that the first dim is the ragged dim in both layouts.
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        layout = draw(st.sampled_from([torch.strided, torch.jagged]))
        parts = [torch.arange(2.0 * size).view(size, 2) for size in sizes]
        return torch.nested.nested_tensor(parts, layout=layout)
    if form == "strided" and leaf.ndim > len(batch) + 1:
        return leaf.view(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    return leaf[..., None].expand(*shape, 3) if form == "expanded" else leaf


@st.composite
def draw_dense(draw: st.DrawFn, batch: tuple[int, ...], depth: int) -> Any:
    td = TensorDict(batch_size=batch)
    for key in draw(
        st.lists(st.one_of(st.sampled_from(UNUSUAL_KEYS), st.text(max_size=5)), max_size=4, unique=True)
    ):
        kind = draw(st.sampled_from(["leaf", "tied", "dense", "stack"])) if depth < 2 else "leaf"
        if kind == "dense":
            child = draw(draw_dense((*batch, *draw(st.lists(st.integers(0, 2), max_size=1))), depth + 1))
        elif kind == "stack":
            child = draw(draw_stack(batch, depth + 1))
        else:
            leaf = draw(draw_leaf(batch))
            if kind == "tied":
                td._set_child(key + "'", leaf)
            child = leaf
        td._set_child(key, child)
    return td


@st.composite
def draw_stack(draw: st.DrawFn, batch: tuple[int, ...], depth: int) -> Any:
    """Draw a lazy stack whose batch size starts with ``batch``, with any stack dim."""
    dim = draw(st.integers(0, len(batch)))
    count = batch[dim] if dim < len(batch) else draw(st.integers(1, 3))
    inner = batch[:dim] + batch[dim + 1 :]
    if not count:
        return LazyStackedTensorDict(batch_size=batch, stack_dim=dim)
    return LazyStackedTensorDict(*[draw(draw_dense(inner, depth)) for _ in range(count)], stack_dim=dim)


@given(
    tree=st.sampled_from([(), (2,), (0,)]).flatmap(
        lambda batch: st.one_of(draw_dense(batch, 0), draw_stack(batch, 0))
    )
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@pytest.mark.filterwarnings("ignore:B?Complex", "ignore:The PyTorch API of nested tensors")
def test_memmap_random_tree_round_trips(
    tree: Any, tmp_path_factory: pytest.TempPathFactory, same: Any
) -> None:
    folder = tmp_path_factory.mktemp("trees")
    for name in ("directory", "archive.tdz"):
        same(tree.memmap(folder / name), tree)
        same(TensorDict.load_memmap(folder / name), tree)
