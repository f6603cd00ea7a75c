"""What a save accepts loads equal; what it cannot hold it refuses before it writes a byte."""

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


def strided(shapes: list[list[int]]) -> Tensor:
    return torch.nested.nested_tensor([numbers(shape) for shape in shapes])


def jagged(shapes: list[list[int]]) -> Tensor:
    return torch.nested.nested_tensor([numbers(shape) for shape in shapes], layout=torch.jagged)


def holed(shapes: list[list[int]]) -> Tensor:
    starts, lengths = (
        torch.zeros(len(shapes), dtype=torch.int64),
        torch.tensor([shape[0] for shape in shapes]),
    )
    values = numbers([len(shapes), max(1, int(lengths.max())), *shapes[0][1:]])
    return torch.nested.narrow(values, 1, starts, lengths, layout=torch.jagged)


def numbers(shape: list[int]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


#: Leaves of a shape, and whether files can hold them.
DENSE: dict[str, tuple[Callable[[list[int]], Tensor], bool]] = {
    "plain": (numbers, True),
    "expanded": (lambda shape: torch.ones(()).expand(shape), True),
    "transposed": (lambda shape: numbers(shape[::-1]).permute(*reversed(range(len(shape)))), True),
    "conjugate": (lambda shape: torch.complex(numbers(shape), -numbers(shape)).conj(), True),
    "negative": (lambda shape: torch.complex(numbers(shape), -numbers(shape)).conj().imag, True),
    "bfloat16": (lambda shape: numbers(shape).bfloat16(), True),
    "bool": (lambda shape: numbers(shape) % 2 == 0, True),
    "subclass": (lambda shape: numbers(shape).as_subclass(Marked), True),
    "parameter": (lambda shape: nn.Parameter(numbers(shape)), True),
    "grad": (lambda shape: numbers(shape).requires_grad_(), True),
    "mapped": (lambda shape: td_memmap.MemoryMappedTensor.from_tensor(numbers(shape)), True),
    "coo": (lambda shape: numbers(shape).to_sparse(), False),
    "hybrid": (lambda shape: numbers(shape).to_sparse(1), False),
    "csr": (lambda shape: numbers([*shape, 2][:2]).to_sparse_csr(), False),
    "csc": (lambda shape: numbers([*shape, 2][:2]).to_sparse_csc(), False),
    "bsr": (lambda shape: numbers([*shape, 2][:2]).to_sparse_bsr((1, 1)), False),
    "quantized": (lambda shape: torch.quantize_per_tensor(numbers(shape), 0.5, 0, torch.quint8), False),
    "by channel": (
        lambda shape: torch.quantize_per_channel(
            numbers(shape), torch.ones(shape[0]), torch.zeros(shape[0], dtype=torch.int64), 0, torch.qint8
        ),
        False,
    ),
    "meta": (lambda shape: torch.ones(shape, device="meta"), False),
}

#: Leaves of components, of a batch dim and what is common below; and whether one storage can hold them too.
RAGGED: dict[str, tuple[Callable[[list[list[int]]], Tensor], bool]] = {
    "strided": (strided, False),
    "jagged": (jagged, True),
    "with holes": (holed, True),
    "jagged with grad": (lambda shapes: jagged(shapes).detach().requires_grad_(), True),
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


def content(leaf: Tensor) -> Any:
    if leaf.is_nested:
        return [part.tolist() for part in leaf.detach().unbind()]
    return leaf.detach().resolve_conj().resolve_neg().tolist()


def assert_same(found: Any, wanted: Any) -> None:
    assert found.batch_size == wanted.batch_size
    for key, leaf in wanted.items(include_nested=True, leaves_only=True):
        other = found.get(key)
        assert (other.layout, other.dtype, content(other)) == (leaf.layout, leaf.dtype, content(leaf)), key
        # A file holds elements: what else a leaf was, it is no more.
        assert not other.requires_grad
        assert not isinstance(other, (Marked, nn.Parameter))


def check_round_trip(data: Any, form: str, accepted: bool, folder: Path) -> None:
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
def dense(draw: Any) -> tuple[TensorDict, bool]:
    shape = draw(st.lists(st.integers(1, 3), min_size=2, max_size=2))
    make, accepted = DENSE[draw(st.sampled_from(sorted(DENSE)))]
    leaf = make(shape)
    batch = list(leaf.shape)[: draw(st.integers(0, 2))]
    try:
        return TensorDict({"n": {"x": leaf}, "y": torch.zeros(batch)}, batch), accepted
    except Exception:
        return TensorDict({"n": {"x": leaf}}), accepted


@st.composite
def ragged(draw: Any) -> tuple[TensorDict, bool]:
    name = draw(st.sampled_from(sorted(RAGGED)))
    make, everywhere = RAGGED[name]
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    common = draw(st.lists(st.integers(1, 3), max_size=2)) if name != "with holes" else [2]
    if name == "strided":
        # The ragged dim is any: those before it are as long in all components.
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


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(case=dense())
def test_dense_leaf_loads_equal_or_is_refused(
    form: str, case: tuple[TensorDict, bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, accepted = case
    check_round_trip(data, form, accepted, tmp_path_factory.mktemp("dense"))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(case=ragged())
def test_ragged_leaf_loads_equal_or_is_refused(
    form: str, case: tuple[TensorDict, bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, everywhere = case
    accepted = everywhere or form != "consolidated"
    check_round_trip(data, form, accepted, tmp_path_factory.mktemp("ragged"))


ROWS = [[3, 4], [3, 5]]


@pytest.mark.parametrize("form", ["directory", "archive"])
@pytest.mark.parametrize("where", ["alone", "nested", "stacked"])
def test_components_with_two_batch_dims_load_equal(form: str, where: str, tmp_path: Path) -> None:
    leaf = strided(ROWS)
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
def test_files_for_components_with_batch_dims_can_be_filled(size: list[int], tmp_path: Path) -> None:
    leaf = strided([[3, 2, 4], [3, 2, 5]])
    made = TensorDict({"x": leaf}, size).memmap_like(tmp_path / "save")
    made["x"].copy_(leaf)
    assert content(TensorDict.load_memmap(tmp_path / "save")["x"]) == content(leaf)
    live = TensorDict(batch_size=size).memmap(tmp_path / "live")
    live.make_memmap_from_tensor("x", leaf)
    assert content(TensorDict.load_memmap(tmp_path / "live")["x"]) == content(leaf)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ([3], r"shape is \[2, 2\], expected as many components as the batch size \[3\] says"),
        ([2, 3, 4, 1], r"shape is \[2, 2\], expected as many components as the batch size"),
        ([2, 4], r"the shape of a component is \[3, 4\], expected a shape that starts with \[4\]"),
    ],
)
def test_components_that_do_not_fit_the_batch_size_are_refused(
    size: list[int], message: str, tmp_path: Path
) -> None:
    TensorDict({"x": strided(ROWS)}, [2, 3]).memmap(tmp_path / "save")
    meta = tmp_path / "save" / "meta.json"
    meta.write_text(meta.read_text().replace('"shape": [2, 3]', f'"shape": {size}'))
    with pytest.raises(FormatError, match=message):
        TensorDict.load_memmap(tmp_path / "save")
    report = td_memmap.verify(tmp_path / "save")
    assert not report.ok


def test_make_memmap_of_other_components_is_refused(tmp_path: Path) -> None:
    live = TensorDict(batch_size=[2, 4]).memmap(tmp_path / "save")
    with pytest.raises(
        RuntimeError, match=r"cannot add key 'x': its shape .* does not start with the batch size \[2, 4\]"
    ):
        live.make_memmap_from_tensor("x", strided(ROWS))
