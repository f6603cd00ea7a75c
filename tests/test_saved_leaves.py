"""Saves of every type of leaf: it loads equal, or the save raises before it writes a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from td_core import TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError, StructureError

td_memmap = pytest.importorskip("td_memmap")
pytest.importorskip("td_distributed")

pytestmark = pytest.mark.filterwarnings("ignore")


class Marked(Tensor):
    pass


def make_strided(shapes: list[list[int]]) -> Tensor:
    return torch.nested.nested_tensor([make_numbers(shape) for shape in shapes])


def make_jagged(shapes: list[list[int]]) -> Tensor:
    return torch.nested.nested_tensor([make_numbers(shape) for shape in shapes], layout=torch.jagged)


def make_with_holes(shapes: list[list[int]]) -> Tensor:
    starts, lengths = (
        torch.zeros(len(shapes), dtype=torch.int64),
        torch.tensor([shape[0] for shape in shapes]),
    )
    values = make_numbers([len(shapes), max(1, int(lengths.max())), *shapes[0][1:]])
    return torch.nested.narrow(values, 1, starts, lengths, layout=torch.jagged)


def make_numbers(shape: list[int]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


#: Functions that build a leaf of a shape, and whether a save supports it.
DENSE: dict[str, tuple[Callable[[list[int]], Tensor], bool]] = {
    "plain": (make_numbers, True),
    "expanded": (lambda shape: torch.ones(()).expand(shape), True),
    "transposed": (lambda shape: make_numbers(shape[::-1]).permute(*reversed(range(len(shape)))), True),
    "conjugate": (lambda shape: torch.complex(make_numbers(shape), -make_numbers(shape)).conj(), True),
    "negative": (lambda shape: torch.complex(make_numbers(shape), -make_numbers(shape)).conj().imag, True),
    "bfloat16": (lambda shape: make_numbers(shape).bfloat16(), True),
    "bool": (lambda shape: make_numbers(shape) % 2 == 0, True),
    "subclass": (lambda shape: make_numbers(shape).as_subclass(Marked), True),
    "parameter": (lambda shape: nn.Parameter(make_numbers(shape)), True),
    "grad": (lambda shape: make_numbers(shape).requires_grad_(), True),
    "mapped": (lambda shape: td_memmap.MemoryMappedTensor.from_tensor(make_numbers(shape)), True),
    "coo": (lambda shape: make_numbers(shape).to_sparse(), False),
    "hybrid": (lambda shape: make_numbers(shape).to_sparse(1), False),
    "csr": (lambda shape: make_numbers([*shape, 2][:2]).to_sparse_csr(), False),
    "csc": (lambda shape: make_numbers([*shape, 2][:2]).to_sparse_csc(), False),
    "bsr": (lambda shape: make_numbers([*shape, 2][:2]).to_sparse_bsr((1, 1)), False),
    "quantized": (lambda shape: torch.quantize_per_tensor(make_numbers(shape), 0.5, 0, torch.quint8), False),
    "by channel": (
        lambda shape: torch.quantize_per_channel(
            make_numbers(shape),
            torch.ones(shape[0]),
            torch.zeros(shape[0], dtype=torch.int64),
            0,
            torch.qint8,
        ),
        False,
    ),
    "meta": (lambda shape: torch.ones(shape, device="meta"), False),
}

#: Functions that build a nested tensor from the shapes of its components, and whether consolidate() supports it.
RAGGED: dict[str, tuple[Callable[[list[list[int]]], Tensor], bool]] = {
    "strided": (make_strided, False),
    "jagged": (make_jagged, True),
    "with holes": (make_with_holes, True),
    "jagged with grad": (lambda shapes: make_jagged(shapes).detach().requires_grad_(), True),
}

FORMS: dict[str, tuple[Callable[[Any, str], Any], Callable[[str], Any]]] = {
    "directory": (lambda data, path: data.memmap(path), TensorDict.load_memmap),
    "archive": (
        lambda data, path: data.memmap(path, archive=True),
        TensorDict.load_memmap,
    ),
    "compressed": (
        lambda data, path: data.memmap(path, archive=True, compression="deflate"),
        TensorDict.load_memmap,
    ),
    "consolidated": (lambda data, path: data.consolidate(path), TensorDict.from_consolidated),
}


def to_list(leaf: Tensor) -> Any:
    if leaf.is_nested:
        return [part.tolist() for part in leaf.detach().unbind()]
    return leaf.detach().resolve_conj().resolve_neg().tolist()


def assert_same(found: Any, wanted: Any) -> None:
    assert found.batch_size == wanted.batch_size
    for key, leaf in wanted.items(include_nested=True, leaves_only=True):
        other = found.get(key)
        assert (other.layout, other.dtype, to_list(other)) == (leaf.layout, leaf.dtype, to_list(leaf)), key
        # A file stores elements only, not the class or requires_grad of a leaf.
        assert not other.requires_grad
        assert not isinstance(other, (Marked, nn.Parameter))


def assert_round_trip(data: Any, form: str, accepted: bool, folder: Path) -> None:
    write, read = FORMS[form]
    path = str(folder / "save")
    if not accepted:
        with pytest.raises((CodecError, StructureError), match=r"key ('x'|\('n', 'x'\))"):
            write(data, path)
        assert os.listdir(folder) == []
        return
    result = write(data, path)
    if form != "consolidated":
        assert_same(result, data)
    assert_same(read(path), data)


@st.composite
def dense_cases(draw: Any) -> tuple[TensorDict, bool]:
    shape = draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))
    make, accepted = DENSE[draw(st.sampled_from(sorted(DENSE)))]
    leaf = make(shape)
    batch = list(leaf.shape)[: draw(st.integers(0, 2))]
    try:
        return TensorDict({"n": {"x": leaf}, "y": torch.zeros(batch)}, batch), accepted
    except Exception:
        return TensorDict({"n": {"x": leaf}}), accepted


@st.composite
def ragged_cases(draw: Any) -> tuple[TensorDict, bool]:
    name = draw(st.sampled_from(sorted(RAGGED)))
    make, everywhere = RAGGED[name]
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    common = draw(st.lists(st.integers(1, 3), max_size=2)) if name != "with holes" else [2]
    if name == "strided":
        # Any dim may be the ragged one; the dims before it are equal in all components.
        at = draw(st.integers(0, len(common)))
        leaf = make([[*common[:at], length, *common[at:]] for length in lengths])
        batch = [len(lengths), *common[:at]]
    else:
        leaf = make([[length, *common] for length in lengths])
        batch = [len(lengths)]
        if draw(st.booleans()) and common and leaf.dim() > 2 and name == "jagged":
            leaf = leaf.transpose(1, 2)
            batch.append(common[0])
    batch = batch[: draw(st.integers(0, len(batch)))]
    return TensorDict({"n": {"x": leaf}, "y": torch.zeros(batch)}, batch), everywhere


@pytest.mark.once
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(case=dense_cases())
def test_save_dense_leaf_loads_equal_or_raises(
    form: str, case: tuple[TensorDict, bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, accepted = case
    assert_round_trip(data, form, accepted, tmp_path_factory.mktemp("dense"))


@pytest.mark.once
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(case=ragged_cases())
def test_save_nested_tensor_loads_equal_or_raises(
    form: str, case: tuple[TensorDict, bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, everywhere = case
    accepted = everywhere or form != "consolidated"
    assert_round_trip(data, form, accepted, tmp_path_factory.mktemp("ragged"))


ROWS = [[3, 4], [3, 5]]


@pytest.mark.parametrize("form", ["directory", "archive"])
@pytest.mark.parametrize("where", ["alone", "nested", "stacked"])
def test_save_components_with_two_batch_dims_loads_equal(form: str, where: str, tmp_path: Path) -> None:
    leaf = make_strided(ROWS)
    data: Any = TensorDict({"x": leaf}, [2, 3])
    if where == "nested":
        data = TensorDict({"n": data}, [2])
    elif where == "stacked":
        data = lazy_stack([data, data.clone()])
    write, read = FORMS[form]
    write(data, str(tmp_path / "save"))
    back = read(str(tmp_path / "save"))
    found = back["n"] if where == "nested" else back[1] if where == "stacked" else back
    assert found.batch_size == (2, 3)
    assert found[1, 2]["x"].tolist() == leaf.unbind()[1][2].tolist()


@pytest.mark.parametrize("size", [[2], [2, 3], [2, 3, 2]])
def test_memmap_like_components_with_batch_dims_is_writable(size: list[int], tmp_path: Path) -> None:
    leaf = make_strided([[3, 2, 4], [3, 2, 5]])
    made = TensorDict({"x": leaf}, size).memmap_like(tmp_path / "save")
    made["x"].copy_(leaf)
    assert to_list(TensorDict.load_memmap(tmp_path / "save")["x"]) == to_list(leaf)
    live = TensorDict(batch_size=size).memmap(tmp_path / "live")
    live.make_memmap_from_tensor("x", leaf)
    assert to_list(TensorDict.load_memmap(tmp_path / "live")["x"]) == to_list(leaf)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ([3], r"shape is \[2, 2\], expected as many components as the batch size \[3\] says"),
        ([2, 3, 4, 1], r"shape is \[2, 2\], expected as many components as the batch size"),
        ([2, 4], r"the shape of a component is \[3, 4\], expected a shape that starts with \[4\]"),
    ],
)
def test_load_components_of_other_batch_size_raises(size: list[int], message: str, tmp_path: Path) -> None:
    TensorDict({"x": make_strided(ROWS)}, [2, 3]).memmap(tmp_path / "save")
    meta = tmp_path / "save" / "meta.json"
    meta.write_text(meta.read_text().strip().replace('"shape": [2, 3]', f'"shape": {size}'))
    with pytest.raises(FormatError, match=message):
        TensorDict.load_memmap(tmp_path / "save")
    report = td_memmap.verify(tmp_path / "save")
    assert not report.ok


def test_make_memmap_components_of_other_batch_size_raises(tmp_path: Path) -> None:
    live = TensorDict(batch_size=[2, 4]).memmap(tmp_path / "save")
    with pytest.raises(
        RuntimeError, match=r"cannot add key 'x': its shape .* does not start with the batch size \[2, 4\]"
    ):
        live.make_memmap_from_tensor("x", make_strided(ROWS))
