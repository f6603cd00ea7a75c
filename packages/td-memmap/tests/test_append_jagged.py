"""append_memmap adds components of jagged entries, and rows of nodes in the general form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import td_memmap
from td_core import TensorDict, append, lazy_stack
from td_core.testing import assert_same
from td_memmap import AppendError, append_memmap


def load(prefix: Path, **options: Any) -> Any:
    return TensorDict.load_memmap(prefix, **options)


def make_jagged(lengths: list[int], *tail: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    parts = [
        torch.arange(size * max(1, torch.Size(tail).numel())).view(size, *tail).to(dtype) for size in lengths
    ]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def make_gaps(lengths: list[int]) -> torch.Tensor:
    """Return a jagged tensor with gaps between its components."""
    offsets = torch.arange(len(lengths) + 1) * 5
    values = torch.arange(5.0 * len(lengths))
    return torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor(lengths))


def test_append_jagged_entries_adds_components(prefix: Path) -> None:
    made = []
    for lengths in ([2, 0, 3], [1], [0, 4]):
        wide = make_jagged(lengths, 2, dtype=torch.int64)
        entries = {"x": torch.arange(len(lengths)), "tokens": make_jagged(lengths), "n": {"wide": wide}}
        made.append(TensorDict(entries, [len(lengths)]))
    made[0].memmap(prefix, checksums=True)
    mapped = load(prefix)
    for each in made[1:]:
        append(each, prefix)
        assert td_memmap.verify(prefix).problems == []
    expected = torch.cat(made)
    assert_same(load(prefix), expected)
    assert_same(mapped, made[0])


@pytest.mark.parametrize("saved", ["gaps", "plain"])
@pytest.mark.parametrize("given", ["gaps", "plain"])
def test_append_jagged_entries_with_gaps_keeps_components(saved: str, given: str, prefix: Path) -> None:
    make = {"gaps": make_gaps, "plain": make_jagged}
    first, second = make[saved]([2, 4]), make[given]([1, 3])
    TensorDict({"t": first}, [2]).memmap(prefix)
    append_memmap(prefix, TensorDict({"t": second}, [2]))
    append_memmap(prefix, TensorDict({"t": second}, [2]))
    found = [part.tolist() for part in load(prefix)["t"].unbind()]
    assert found == [part.tolist() for each in (first, second, second) for part in each.unbind()]


def transpose_jagged() -> torch.Tensor:
    return make_jagged([2, 3], 4).transpose(1, 2)


JAGGED_ERRORS = {
    "a tensor": (torch.zeros(2), "it is a jagged tensor, the rows have a tensor of shape"),
    "dtype": (make_jagged([1, 2], dtype=torch.int64), "it is a jagged tensor of torch.float32"),
    "sizes": (
        make_jagged([1, 2], 3),
        r".*the other sizes \[\], the rows have torch.float32, the dim 1 and \[3\]",
    ),
    "a node": (TensorDict({}, [2]), "it is a tensor, the rows have a TensorDict there"),
}


@pytest.mark.parametrize(("value", "message"), JAGGED_ERRORS.values(), ids=JAGGED_ERRORS)
def test_append_other_entry_to_jagged_raises_with_key(value: Any, message: str, prefix: Path) -> None:
    data = TensorDict({"x": torch.zeros(2), "n": {"tokens": make_jagged([1, 2])}}, [2])
    data.memmap(prefix)
    rows = data.clone().set(("n", "tokens"), value)
    with pytest.raises(AppendError, match=rf"cannot append to key \('n', 'tokens'\): {message}"):
        append_memmap(prefix, rows)
    assert_same(load(prefix), data)


def test_append_jagged_rows_that_cannot_grow_raises_with_key(prefix: Path) -> None:
    wide = TensorDict({"tokens": transpose_jagged()}, [2])
    wide.memmap(prefix)
    message = "key 'tokens': only jagged tensors whose ragged dim is 1 can grow, that of this one is 2"
    with pytest.raises(AppendError, match=message):
        append_memmap(prefix, wide)
    plain = TensorDict({"a": torch.zeros(2)}, [2])
    plain.memmap(prefix)
    with pytest.raises(AppendError, match="key 'a': nested tensors cannot grow"):
        append_memmap(prefix, TensorDict({"a": make_jagged([1, 2])}, [2]))


def test_append_to_keys_in_general_form_adds_rows(prefix: Path) -> None:
    data = TensorDict(
        {"shape": torch.arange(2), "k" * 300: {"b": torch.ones(2), "_type": torch.zeros(2)}}, [2]
    )
    data.memmap(prefix)
    append_memmap(prefix, data)
    assert_same(load(prefix), torch.cat([data, data]))
    with pytest.raises(AppendError, match=r"the root has the keys .*, the rows have \['shape'\]"):
        append_memmap(prefix, data.select("shape"))
    stack = lazy_stack([TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(3)})])
    held = TensorDict({"x": torch.ones(2), "s": stack}, [2])
    held.memmap(prefix)
    with pytest.raises(AppendError, match="key 's' is of a kind that cannot grow"):
        append_memmap(prefix, held)
