"""Every collection comes back from its table as it was, in memory and from files, also after pickles of Arrow."""

from __future__ import annotations

import datetime
import decimal
import itertools
import zoneinfo
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from td_arrow import from_arrow, load, save, to_arrow, verify
from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams, lazy_stack
from td_core.errors import CodecError, UnsupportedOperationError
from td_core.testing import assert_same

WORDS = ["a", None, 'b,"é😀']


def jagged(lengths: list[int], *inner: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a jagged tensor with rows of the lengths."""
    parts = [torch.arange(n * max(1, sum(inner)) or 0).to(dtype)[:n] for n in lengths]
    if inner:
        parts = [torch.randn(n, *inner).to(dtype) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def ragged_behind() -> torch.Tensor:
    """Return a jagged tensor whose ragged dim is the last one."""
    values = torch.randn(4, 6)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 2, 6]), jagged_dim=2)


def with_holes() -> torch.Tensor:
    """Return a jagged tensor with lengths, whose values have elements of no row."""
    return torch.nested.nested_tensor_from_jagged(
        torch.arange(9.0), torch.tensor([0, 4, 9]), torch.tensor([2, 3])
    )


def members(*sizes: Any) -> LazyStackedTensorDict:
    """Return a lazy stack whose members have leaves of the sizes."""
    return lazy_stack([TensorDict({"a": torch.randn(*size), "z": torch.ones(2)}) for size in sizes])


DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    torch.complex128,
]  # fmt: skip

#: Collections without values, by name.
CASES: dict[str, Callable[[], Any]] = {
    "nested": lambda: TensorDict({"x": torch.arange(3), "n": {"y": torch.zeros(3, 2), "m": {"z": torch.ones(3)}}}, [3]),
    "order": lambda: TensorDict({"n": {"b": torch.zeros(3), "a": torch.ones(3)}, "x": torch.arange(3)}, [3]),
    "dtypes": lambda: TensorDict(
        {f"{str(d)[6:]}_{len(s)}": (torch.rand(3, *s) * 4).to(d) for d in DTYPES for s in ((), (2,), (2, 3))}, [3]
    ),
    "no columns": lambda: TensorDict({}, [3]),
    "no leaves": lambda: TensorDict({"e": {}, "x": torch.arange(3)}, [3]),
    "no elements": lambda: TensorDict({"z": torch.zeros(3, 0, dtype=torch.int8), "w": torch.zeros(3, 2, 0)}, [3]),
    "no rows": lambda: TensorDict({"x": torch.zeros(0, 2), "n": {"y": torch.zeros(0)}}, [0]),
    "no batch": lambda: TensorDict({"x": torch.tensor(1.5), "n": {"y": torch.ones(2, 3)}}),
    "two dims": lambda: TensorDict(
        {"x": torch.randn(2, 3, 4), "n": TensorDict({"y": torch.zeros(2, 3, 1)}, [2, 3, 1])}, [2, 3]
    ),
    "names": lambda: TensorDict({"x": torch.randn(2, 3)}, [2, 3], names=["rows", None]),
    "locked": lambda: TensorDict({"x": torch.randn(2)}, [2], device="cpu").lock_(),
    "strange keys": lambda: TensorDict(
        {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, "": torch.ones(2), "é": torch.ones(2)}, [2]
    ),
    "expanded": lambda: TensorDict({"x": torch.ones(1).expand(3), "t": torch.randn(4, 3).t()}, [3]),
    "parameters": lambda: TensorDictParams(TensorDict({"w": torch.zeros(3, 2), "n": {"b": torch.ones(3)}}, [3])),
    "gradient": lambda: TensorDict({"x": torch.ones(3)}, [3]),
    "jagged": lambda: TensorDict(
        {"j": jagged([2, 0, 3]), "k": jagged([1, 2, 3], 2), "i": jagged([1, 1, 1], dtype=torch.int64)}, [3]
    ),
    "jagged behind": lambda: TensorDict({"j": ragged_behind()}, [3]),
    "even stack": lambda: members((2,), (2,)),
    "uneven stack": lambda: members((2, 3), (3, 3), (0, 3)),
    "uneven sizes": lambda: lazy_stack(
        [TensorDict({"a": torch.randn(n, 2), "i": {"c": torch.ones(n)}}, [n]) for n in (2, 0, 1)]
    ),
    "two uneven dims": lambda: members((2, 1, 2), (3, 4, 2), (1, 2, 2)),
    "hidden sizes": lambda: members((0, 1), (3, 4)),
    "other ranks": lambda: members((2,), (2, 3)),
    "other dtypes": lambda: lazy_stack([TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(2).int()})]),
    "missing keys": lambda: lazy_stack(
        [TensorDict({"a": torch.ones(2), "b": torch.zeros(3), "n": {"c": torch.ones(1)}}), TensorDict({"a": torch.ones(2)})]
    ),
    "missing in between": lambda: lazy_stack(
        [
            TensorDict({"a": torch.ones(2), "c": torch.ones(1)}),
            TensorDict({"a": torch.ones(2), "b": torch.ones(1), "c": torch.ones(1)}),
        ]
    ),
    "stack inside": lambda: TensorDict({"x": torch.arange(3), "words": members((2,), (1,), (3,))}, [3]),
    "stack along the second dim": lambda: LazyStackedTensorDict(
        *(TensorDict({"a": torch.full((3, 2), float(i))}, [3]) for i in range(2)), stack_dim=1
    ),
    "uneven along the second dim": lambda: LazyStackedTensorDict(
        *(TensorDict({"a": torch.randn(3, n)}, [3]) for n in (2, 4)), stack_dim=1
    ),
    "deep": lambda: TensorDict({tuple("abcdefghij" * 7): torch.ones(2)}, [2]),
}  # fmt: skip


def make_values() -> dict[str, Any]:
    """Return collections with values, by name."""
    td_tensorclass = pytest.importorskip("td_tensorclass")
    stack = td_tensorclass.NonTensorStack
    utc = datetime.timezone.utc
    vienna = zoneinfo.ZoneInfo("Europe/Vienna")
    rows: dict[str, Any] = {
        "words": WORDS,
        "bytes": [b"a", b"\xff\x00", b""],
        "ints": stack(1, 2**53 + 1, -1),
        "bools": stack(True, False, None),
        "floats": stack(0.5, float("inf"), 1e-300),
        "large": stack(2**70, 1, 2),
        "dates": [datetime.date(2020, 1, 1), None, datetime.date(1, 1, 1)],
        "times": [datetime.time(1, 2, 3, 4)] * 3,
        "naive": [datetime.datetime(2020, 1, 1, 1, 2, 3, 4)] * 3,
        "utc": [datetime.datetime(2020, 1, 1, tzinfo=utc), None, datetime.datetime(2021, 1, 1, tzinfo=utc)],
        "zone": [datetime.datetime(2020, 7, 1, tzinfo=vienna)] * 3,
        "deltas": [datetime.timedelta(1, 2, 3)] * 3,
        "decimals": [decimal.Decimal("1.50"), decimal.Decimal("-2.25"), None],
        "other decimals": [decimal.Decimal("1.5"), decimal.Decimal("1E+3"), decimal.Decimal("0.001")],
        "lists": stack([1, 2], [3], []),
        "lists of text": stack(["a"], [], ["b", "c"]),
        "dicts": [{"a": (1, 2)}, {"b": {"c": None}}, None],
        "mixed": ["a", 1, 2.5],
        "tuples": stack((1, "a"), (2, "b"), (3, "c")),
        "surrogates": ["\ud800", "a", "b"],
        "nothing": [None, None, None],
    }
    one = td_tensorclass.NonTensorData
    result = {name: TensorDict({"v": values}, [3]) for name, values in rows.items()}
    result["one"] = TensorDict(
        {
            "v": one("all", batch_size=[3]),
            "w": one({"k": (1,)}, batch_size=[3]),
            "n": one(None, batch_size=[3]),
        },
        [3],
    )
    result["no rows"] = TensorDict({"v": one("all", batch_size=[0]), "x": torch.zeros(0)}, [0])
    result["no batch"] = TensorDict({"v": "text", "n": {"i": one(3)}})
    result["two dims"] = TensorDict({"v": stack(stack("a", "b"), stack("c", "d"))}, [2, 2])
    result["in members"] = lazy_stack([TensorDict({"a": torch.ones(n), "v": str(n)}) for n in (1, 2)])
    result["missing in members"] = lazy_stack(
        [TensorDict({"a": torch.ones(1), "v": "x"}), TensorDict({"a": torch.ones(1)})]
    )
    result["unbatched"] = TensorDict(
        {"u": td_tensorclass.UnbatchedTensor(torch.ones(2)), "x": torch.ones(3)}, [3]
    )
    return result


VALUES = (
    "words", "bytes", "ints", "bools", "floats", "large", "dates", "times", "naive", "utc", "zone", "deltas",
    "decimals", "other decimals", "lists", "lists of text", "dicts", "mixed", "tuples", "surrogates", "nothing", "one", "no rows",
    "no batch", "two dims", "in members", "missing in members", "unbatched",
)  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"separator": "."}, {"tensors": "extension"}, {"tensors": "binary"}, {"tensors": "auto"}, {"copy": True},
]  # fmt: skip


def name_options(options: dict[str, Any]) -> str:
    """Return the id of a test."""
    return "-".join(map(str, options.values())) or "plain"


@pytest.mark.parametrize("options", OPTIONS, ids=name_options)
@pytest.mark.parametrize("name", CASES)
def test_table_of_collection_gives_it_back(name: str, options: dict[str, Any]) -> None:
    td = CASES[name]()
    assert_same(from_arrow(to_arrow(td, **options)), td)


@pytest.mark.parametrize("name", VALUES)
def test_table_of_values_gives_them_back(name: str) -> None:
    td = make_values()[name]
    for options in OPTIONS[:2]:
        assert_same(from_arrow(to_arrow(td, **options)), td)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("name", CASES)
def test_file_of_collection_gives_it_back(
    name: str, suffix: str, tmp_path: Path, reads_null_cells: bool
) -> None:
    if name.startswith("missing") and suffix == ".parquet" and not reads_null_cells:
        pytest.skip("this pyarrow does not read null cells of a fixed size from Parquet")
    td = CASES[name]()
    save(td, tmp_path / f"x{suffix}")
    assert_same(load(tmp_path / f"x{suffix}"), td)
    save(td, tmp_path / f"y{suffix}", checksums=True)
    assert verify(tmp_path / f"y{suffix}").ok


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_file_of_values_gives_them_back(suffix: str, tmp_path: Path) -> None:
    for number, td in enumerate(make_values().values()):
        save(td, tmp_path / f"{number}{suffix}", checksums=True)
        assert_same(load(tmp_path / f"{number}{suffix}"), td)
        assert verify(tmp_path / f"{number}{suffix}").ok


@pytest.mark.parametrize("name", ["two dims", "names", "dtypes", "no rows"])
def test_two_row_dims_come_back(name: str) -> None:
    td = CASES[name]()
    table = to_arrow(td, row_dims=2)
    assert table.num_rows == td.batch_size[:2].numel()
    assert_same(from_arrow(table), td)


def test_two_row_dims_after_a_filter_are_one() -> None:
    td = TensorDict({"x": torch.arange(6).view(2, 3)}, [2, 3], names=["a", "b"])
    found = from_arrow(to_arrow(td, row_dims=2).slice(1, 4))
    assert (found["x"].tolist(), found.batch_size, found.names) == ([1, 2, 3, 4], torch.Size([4]), ["a"])


def test_two_row_dims_of_lazy_rows_are_refused() -> None:
    with pytest.raises(UnsupportedOperationError, match=r"lazy stack along one of them: pass its contiguous"):
        to_arrow(CASES["uneven along the second dim"](), row_dims=2)


def test_cells_without_elements_of_another_program_are_empty() -> None:
    cells = pa.array([[[], []], [[], []]], pa.list_(pa.list_(pa.float32(), 0), 2))
    assert from_arrow(pa.table({"x": cells}))["x"].shape == (2, 2, 0)


def test_lengths_are_compacted() -> None:
    found = from_arrow(to_arrow(TensorDict({"j": with_holes()}, [2])))["j"]
    assert [part.tolist() for part in found.unbind()] == [[0.0, 1.0], [4.0, 5.0, 6.0]]
    assert found.values().numel() == 5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_strided_nested_tensor_comes_back() -> None:
    leaf = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 2)])
    found = from_arrow(to_arrow(TensorDict({"n": leaf}, [2])))["n"]
    assert [part.tolist() for part in found.unbind()] == [part.tolist() for part in leaf.unbind()]


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.eye(2).to_sparse(), r"cannot save key 'x': .*convert it with to_dense\(\)"),
        (torch.zeros(2, device="meta"), "cannot save key 'x': a tensor on the device 'meta'"),
        (torch.zeros(1 << 20), "cannot save key 'x': it has no rows, and it is too large for the header"),
    ],
)
def test_leaf_that_no_table_holds_is_refused(leaf: torch.Tensor, message: str) -> None:
    td = TensorDict({"x": leaf}, [2] if leaf.shape[:1] == (2,) else [])
    if leaf.numel() > 100:
        td_tensorclass = pytest.importorskip("td_tensorclass")
        td = TensorDict({"x": td_tensorclass.UnbatchedTensor(leaf)}, [2])
    with pytest.raises(CodecError, match=message):
        to_arrow(td)


@pytest.mark.parametrize("value", [object(), {1}.__iter__(), decimal.Decimal("NaN")])
def test_value_that_no_column_holds_names_key_and_row(value: object) -> None:
    td_tensorclass = pytest.importorskip("td_tensorclass")
    with pytest.raises(CodecError, match=r"cannot save key \('n', 's'\), row 1: .*no serializer"):
        to_arrow(TensorDict({"n": {"s": td_tensorclass.NonTensorStack("a", value)}}, [2]))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "fixed_size_list<item: fixed_size_list<item: float not null>[3] not null>[2]"),
        ({"tensors": "extension"}, "extension<arrow.fixed_shape_tensor[value_type=float, shape=[2,3]"),
        ({"tensors": "binary"}, "fixed_size_binary[24]"),
        ({"tensors": {"x": "binary", None: "list"}}, "fixed_size_binary[24]"),
        ({"tensors": {"y": "binary"}}, "fixed_size_list<item: fixed_size_list"),
    ],
)
def test_tensors_decides_the_type(options: dict[str, Any], kind: str) -> None:
    field = to_arrow(TensorDict({"x": torch.zeros(4, 2, 3)}, [4]), **options).schema.field("x")
    assert str(field.type).startswith(kind)
    assert not field.nullable


@pytest.mark.parametrize(("count", "kind"), [(1024, "fixed_size_list"), (1025, "fixed_size_binary")])
def test_large_cells_are_bytes_in_parquet(count: int, kind: str, tmp_path: Path) -> None:
    save(TensorDict({"x": torch.zeros(2, count)}, [2]), tmp_path / "x.parquet")
    assert str(pa.parquet.read_schema(tmp_path / "x.parquet").field("x").type).startswith(kind)


def test_numbers_are_views_of_the_leaf() -> None:
    td = TensorDict({"x": torch.arange(4.0), "v": torch.zeros(4, 2), "b": torch.ones(4) > 0}, [4])
    table = to_arrow(td)
    td["x"][1] = 9.0
    assert table["x"].to_pylist() == [0.0, 9.0, 2.0, 3.0]
    found = from_arrow(table)
    found["v"][0, 0] = 7.0
    assert td["v"][0, 0] == 7.0
    assert to_arrow(td, copy=True)["x"].chunk(0).buffers()[1].address != td["x"].data_ptr()


def test_all_sizes_of_cells_come_back_by_every_choice() -> None:
    for sizes, dtype, choice in itertools.product(
        [(), (1,), (3,), (2, 1), (1, 2, 2)], DTYPES, ["list", "extension", "binary"]
    ):
        td = TensorDict({"x": (torch.rand(5, *sizes) * 9).to(dtype)}, [5])
        found = from_arrow(to_arrow(td, tensors=choice))
        assert_same(found, td)
        assert_same(from_arrow(to_arrow(td, tensors=choice).slice(1, 3)), td[1:4])
