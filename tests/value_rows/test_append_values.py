"""append_memmap adds values by rows, and random programs of writes and appends equal lists."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import td_memmap
from td_core import TensorDict
from td_core.errors import StructureError
from td_core.testing import assert_same
from td_memmap import AppendError, _fs, append_memmap, pack_memmap, unpack_memmap
from td_tensorclass import NonTensorData, NonTensorStack


def load(prefix: Path, **options: Any) -> Any:
    return TensorDict.load_memmap(prefix, **options)


def make_jagged(lengths: list[int]) -> torch.Tensor:
    parts = [torch.arange(float(size)) for size in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def test_append_row_writes_same_bytes_for_any_count(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = TensorDict({"name": ["new"], "t": make_jagged([2])}, [1])
    sizes: list[int] = []
    real = _fs.write_at

    def write(fd: int, data: Any, offset: int) -> None:
        sizes.append(memoryview(data).nbytes)
        real(fd, data, offset)

    found = []
    for rows in (10, 10_000):
        names = [f"row {row}" for row in range(rows)]
        TensorDict({"name": names, "t": make_jagged([1] * rows)}, [rows]).memmap(prefix)
        sizes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(_fs, "write_at", write)
            append_memmap(prefix, one)
        found.append(sorted(sizes))
    assert found == [[8, 8, 8, 12]] * 2  # a slot, an offset, two elements, and a value


def make_rows(values: list[Any]) -> Any:
    stack = NonTensorStack.from_list(values, 1)
    return TensorDict({"x": torch.arange(len(values)), "n": {"name": stack}}, [len(values)])


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
def test_append_rows_with_values_adds_them(
    compatible: bool, checksums: bool, prefix: Path, tmp_path: Path
) -> None:
    first, second = make_rows(["a", (1, 2), None]), make_rows([b"x", "ü"])
    first.memmap(prefix, checksums=checksums, compatible=compatible)
    mapped: Any = load(prefix)
    for _ in range(2):
        append_memmap(prefix, second)
        assert td_memmap.verify(prefix).problems == []
    append_memmap(prefix, second[:0])
    expected = torch.cat([first, second, second])
    assert_same(load(prefix), expected)
    assert mapped["n", "name"] == ["a", (1, 2), None]
    assert os.listdir(tmp_path) == ["save"]
    grown: Any = load(prefix)
    grown.set_at_(("n", "name"), "new", 5)
    assert load(prefix)["n", "name"] == ["a", (1, 2), None, b"x", "ü", "new", "ü"]
    append_memmap(prefix, second)
    assert load(prefix)["n", "name"][5:] == ["new", "ü", b"x", "ü"]
    pack_memmap(prefix, tmp_path / "a.tdz")
    unpack_memmap(tmp_path / "a.tdz", tmp_path / "again")
    append_memmap(tmp_path / "again", second)
    assert load(tmp_path / "again").batch_size == (11,)


def test_append_to_empty_columns_adds_rows(prefix: Path) -> None:
    data = make_rows(["a", "b"])
    data[:0].memmap(prefix)
    append_memmap(prefix, data[:0])
    append_memmap(prefix, data)
    assert_same(load(prefix), data)


@pytest.mark.parametrize("compatible", [False, True])
def test_append_other_value_stores_rows(compatible: bool, prefix: Path, list_files: Any) -> None:
    data_of = NonTensorData
    rows = [TensorDict({"v": data_of(text, batch_size=[2, 3])}, [2]) for text in ("a", "a", "b", "a")]
    rows[0].memmap(prefix, compatible=compatible)
    append_memmap(prefix, rows[1])
    assert load(prefix)["v"] == "a" and list_files(prefix) == {
        "%manifest.json",
        "meta.json",
        "v/meta.json",
        "v/%values.json",
    }
    for each in rows[2:]:
        append_memmap(prefix, each)
    expected = torch.cat(rows)
    assert load(prefix)["v"] == expected["v"]
    for row in (0, 5, 7):
        assert type(load(prefix)[row].get("v")) is data_of and load(prefix)[row]["v"] == expected[row]["v"]


def test_append_values_that_do_not_fit_raises_with_key(prefix: Path) -> None:
    data = make_rows(["a", "b"])
    data.memmap(prefix)
    tensors = TensorDict({"x": data["x"], "n": {"name": torch.zeros(2)}}, [2])
    wide = make_rows(["a", "b"]).set(("n", "name"), data["n"].get("name").unsqueeze(1))
    pickled = make_rows(["a", complex])
    for rows, message in (
        (tensors, r"key \('n', 'name'\) is a NonTensorStack, the rows have a tensor there"),
        (
            wide,
            r"key \('n', 'name'\) has one value for each element of \[2\], the rows have a NonTensorStack",
        ),
        (pickled, r"cannot append to key \('n', 'name'\): .*complex"),
    ):
        with pytest.raises((AppendError, StructureError), match=message):
            append_memmap(prefix, rows)
        assert_same(load(prefix), data)
    pickled.memmap(prefix, allow_pickle=True)
    with pytest.raises(AppendError, match=r"the value of key \('n', 'name'\) must stay"):
        append_memmap(prefix, data, allow_pickle=True)


@pytest.mark.once
def test_append_killed_at_any_call_adds_all_rows_or_none(
    prefix: Path, tmp_path: Path, kill_at_call: Any
) -> None:
    first = TensorDict({"name": ["a", "b"], "t": make_jagged([1, 2])}, [2])
    first.memmap(prefix)
    for number in range(0, 400, 3):
        before = load(prefix).batch_size[0]
        unfinished = kill_at_call(number, lambda: append_memmap(prefix, first))
        found = load(prefix)
        assert found.batch_size[0] in (before, before + 2), f"killed at call {number}"
        assert found["name"] == ["a", "b"] * (found.batch_size[0] // 2)
        assert [part.shape[0] for part in found["t"].unbind()] == [1, 2] * (found.batch_size[0] // 2)
        if not unfinished:
            break
    assert number > 40
    append_memmap(prefix, first)
    assert os.listdir(tmp_path) == ["save"] and td_memmap.verify(prefix).ok


VALUES = st.one_of(
    st.text(max_size=8),
    st.none(),
    st.integers(),
    st.tuples(st.text(max_size=3)),
    st.binary(max_size=4),
    st.lists(st.text(max_size=2)),
)
STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 99), VALUES),
    st.tuples(st.just("slice"), st.integers(0, 99), st.lists(VALUES, min_size=1, max_size=4)),
    st.tuples(st.just("append"), st.just(0), st.lists(VALUES, max_size=4)),
    st.tuples(st.sampled_from(["load", "refresh", "save", "compatible", "pickle"]), st.just(0), st.none()),
)


class Program:
    """A saved collection and the values that it should have, changed by the same steps."""

    def __init__(self, prefix: Path, values: list[Any]) -> None:
        self.prefix, self.values = prefix, list(values)
        self.data: Any = make_rows(values).memmap(prefix)

    def run(self, step: str, place: int, value: Any) -> None:
        count = len(self.values)
        if step == "append":
            append_memmap(self.prefix, make_rows(value))
            self.values += value
            self.data = load(self.prefix)
        elif step == "write":
            place %= count
            self.data.get(("n", "name"))[place] = value
            self.values[place] = value
        elif step == "slice":
            place %= count
            value = value[: count - place]
            self.data.get("n")[place : place + len(value)] = make_rows(value)["n"]
            self.values[place : place + len(value)] = value
        else:
            self.reload(step)

    def reload(self, step: str) -> None:
        if step == "load":
            self.data = load(self.prefix)
        elif step == "refresh":
            self.data = self.data.memmap_().memmap_refresh_()
        elif step == "pickle":
            self.data = pickle.loads(pickle.dumps(self.data))
        else:
            self.data = (
                load(self.prefix, device="cpu").clone().memmap(self.prefix, compatible=step == "compatible")
            )


@given(st.lists(VALUES, min_size=1, max_size=5), st.lists(STEPS, max_size=12))
@settings(deadline=None)
def test_random_program_on_column_equals_list(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], steps: list[Any]
) -> None:
    program = Program(tmp_path_factory.mktemp("program") / "save", values)
    for step in steps:
        program.run(*step)
        for data in (program.data, load(program.prefix)):
            assert data.get(("n", "name")).tolist() == program.values, step
    assert td_memmap.verify(program.prefix).ok
