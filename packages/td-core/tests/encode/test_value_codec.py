"""The value codec: exact round trips, readable JSON, and errors with the path."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from td_core import errors
from td_core._encode.value_codec import MAX_DEPTH, is_readable, join, split
from td_core._encode.value_types import VALUES, LeafSerializer


def is_same_value(a: Any, b: Any) -> bool:
    """Compare values and types recursively; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            is_same_value(ka, kb) and is_same_value(va, vb)
            for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same_value, a, b))
    if isinstance(a, (set, frozenset)):
        return make_hashable(a) == make_hashable(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (complex, np.complexfloating)):
        return is_same_value(float(a.real), float(b.real)) and is_same_value(float(a.imag), float(b.imag))
    if isinstance(a, (float, np.floating)):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (np.datetime64, np.timedelta64)):
        return a.dtype == b.dtype and a.view("i8") == b.view("i8")
    if isinstance(a, slice):
        return all(map(is_same_value, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
    if isinstance(a, (datetime, time)):
        return a == b and a.fold == b.fold and a.utcoffset() == b.utcoffset()
    return bool(a == b)


def make_hashable(value: Any) -> Any:
    """Return a hashable key that also distinguishes the types of equal values."""
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(make_hashable, value))
    return type(value), tuple(map(make_hashable, value)) if isinstance(value, tuple) else value


def copy_through_json(value: Any) -> Any:
    plain, types = split(value)
    return join(*json.loads(json.dumps([plain, types])))


ZONES = st.one_of(
    st.none(), st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
)
NUMPY = st.one_of(
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(-(2**63), 2**63 - 1).map(np.longlong),
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.booleans().map(np.bool_),
    st.text().map(np.str_),
    st.binary().map(np.bytes_),
    st.complex_numbers().map(np.complex128),
    st.complex_numbers(width=64).map(np.complex64),
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.sampled_from(["D", "ns", "s", "Y"])).map(
        lambda p: np.datetime64(*p)
    ),
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.sampled_from(["h", "us"])).map(
        lambda p: np.timedelta64(*p)
    ),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.dates(),
    st.datetimes(timezones=ZONES),
    st.times(timezones=ZONES),
    st.timedeltas(),
    st.tuples(st.integers(), st.integers(), st.integers(1)).map(lambda args: range(*args)),
    st.text(alphabet="ab/. ", min_size=1).map(PurePosixPath),
    st.sampled_from(
        [
            torch.float32,
            torch.bool,
            torch.device("cpu"),
            torch.device("cuda:1"),
            PosixPath("/a b"),
            dict,
            OrderedDict,
            list,
            tuple,
        ]
    ),
    st.lists(st.integers(0, 2**40)).map(torch.Size),
    NUMPY,
)
# No NaN: as a key it does not equal itself.
HASHABLE = st.recursive(
    st.one_of(
        st.integers(), st.text(), st.binary(), st.dates(), st.booleans(), st.integers(0, 9).map(np.int16)
    ),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
VALUE = st.recursive(
    st.one_of(SCALARS, HASHABLE, st.binary().map(bytearray), st.slices(10)),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text(), inner),
        st.dictionaries(HASHABLE, inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
        st.dictionaries(st.integers(), inner).map(OrderedDict),
        st.sets(HASHABLE),
    ),
    max_leaves=12,
)


@given(VALUE)
@settings(max_examples=300, deadline=None)
def test_codec_join_inverts_split(value: Any) -> None:
    assert is_same_value(copy_through_json(value), value)


JSON_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
)


@given(JSON_VALUE)
@settings(deadline=None)
def test_codec_split_json_value_returns_no_types(value: Any) -> None:
    plain, types = split(value)
    assert types is None
    assert json.dumps(plain) == json.dumps(value)
    assert join(plain, None) is plain


@given(JSON_VALUE, JSON_VALUE)
@settings(deadline=None)
def test_codec_join_any_json_returns_or_raises_format_error(plain: Any, types: Any) -> None:
    with suppress(errors.FormatError):
        join(plain, types)


TAGS = st.sampled_from(sorted(VALUES.by_tag))
SIDECARS = st.recursive(
    st.one_of(st.none(), TAGS),
    lambda inner: st.fixed_dictionaries(
        {}, optional={"t": st.lists(TAGS), "c": st.dictionaries(st.sampled_from(["*", "0", "1", "a"]), inner)}
    ),
)


@given(JSON_VALUE, SIDECARS)
@settings(max_examples=300, deadline=None)
def test_codec_join_wrong_types_returns_or_raises_format_error(plain: Any, types: Any) -> None:
    with suppress(errors.FormatError):
        join(plain, types)


@pytest.mark.parametrize(
    ("value", "plain", "types"),
    [
        ((1, "a"), [1, "a"], "tuple"),
        ({"x": (1,), "y": [2]}, {"x": [1], "y": [2]}, {"c": {"x": "tuple"}}),
        ({1: "a"}, [[1, "a"]], "dict"),
        ({(1,): 2}, [[[1], 2]], {"c": {"0": {"c": {"0": "tuple"}}}, "t": ["dict"]}),
        (OrderedDict({2: 3}), [[2, 3]], {"t": ["OrderedDict", "dict"]}),
        (np.float32(0.5), 0.5, "numpy.float32"),
        (b"ab", "YWI=", "bytes"),
        ([(1,)] * 5, [[1]] * 5, {"c": {"*": "tuple"}}),
        (torch.float64, "torch.float64", "torch.dtype"),
        (slice(1, None, (2,)), [1, None, [2]], {"t": ["slice"], "c": {"2": "tuple"}}),
    ],
)
def test_codec_split_returns_plain_and_types(value: Any, plain: Any, types: Any) -> None:
    assert split(value) == (plain, types)
    assert is_same_value(join(plain, types), value)


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(10**5000),
        datetime(2020, 1, 1, fold=1),
        datetime(2020, 1, 1, tzinfo=timezone.utc),
        float("nan"),
        {"a": float("-inf")},
        complex(float("nan"), -0.0),
        np.datetime64("NaT", "s"),
        np.timedelta64("NaT", "s"),
        np.datetime64("2020-01-01"),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array(["a", "é"]),
        np.zeros((0, 3), np.complex64),
        np.array(["2020-01-01"], "M8[D]"),
        np.array("x", "S3"),
        np.array(True),
        PureWindowsPath("C:/x"),
        "\ud800",
        "",
        {"*": (1,), "0": (2,)},
        {date(2020, 1, 1), (1, 2), "a"},
    ],
    ids=lambda value: type(value).__name__,
)
def test_codec_split_and_join_edge_values_round_trip(value: Any) -> None:
    assert is_same_value(copy_through_json(value), value)


def test_codec_split_set_is_sorted() -> None:
    assert split({"b", "a", "c"})[0] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, "a"], True),
        ({"x": (np.float32(1), np.int8(2))}, True),
        (OrderedDict(a=torch.Size([2])), True),
        (OrderedDict({1: 2}), False),
        ([(b"x",)], False),
        ({1}, False),
    ],
)
def test_is_readable_refuses_bytes_sets_and_non_string_keys(value: Any, expected: bool) -> None:
    assert is_readable(split(value)[1]) is expected


class Point(NamedTuple):
    x: int


class Word(str):
    pass


class Color(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [object(), Point(1), Word("x"), Color.RED, torch.zeros(1), np.array([None]), lambda: 0, int],
    ids=lambda value: type(value).__name__,
)
def test_codec_split_unregistered_type_raises_with_path(value: Any) -> None:
    with pytest.raises(errors.CodecError, match=r"cannot store the value at \['a'\]\[1\]: ") as caught:
        split({"a": [0, value]})
    assert isinstance(caught.value, TypeError)


def test_codec_split_error_names_type_and_remedy() -> None:
    with pytest.raises(errors.CodecError) as caught:
        split(Word("x"))
    assert str(caught.value) == (
        "cannot store the value at the top level: no serializer is registered for its type "
        f"{__name__}.Word; register a LeafSerializer through the hook td_serializers, "
        "or pass allow_pickle=True where the format has it; got 'x'"
    )


def nest(make: Any, depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = make(value)
    return value


MAKERS = [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: slice(v)]


@pytest.mark.parametrize("make", MAKERS)
def test_codec_split_too_deep_raises(make: Any) -> None:
    with pytest.raises(errors.CodecError, match=f"nested deeper than {MAX_DEPTH} levels, or contains itself"):
        split(nest(make, 10_000))


@pytest.mark.parametrize("make", MAKERS[:3])
def test_codec_split_deepest_value_survives_json(make: Any) -> None:
    # A tuple counts twice: it is stored as a list.
    value = nest(make, MAX_DEPTH // 2)
    assert copy_through_json(value) == value


def test_codec_split_self_containing_value_raises() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(errors.CodecError, match="contains itself"):
        split(value)


@pytest.mark.parametrize(
    ("plain", "types", "message"),
    [
        (1, "tuple", r"the value at the top level is no 'tuple': expected list, found int; got 1"),
        ([1], {"c": {"1": "tuple"}}, "types of the value at the top level do not fit"),
        ([[1]], {"c": {"-1": "tuple"}}, "do not fit"),
        ([[1]], {"c": {"9" * 5000: "tuple"}}, "do not fit"),
        ({"a": 1}, {"c": {"b": "tuple"}}, "do not fit"),
        ({"a": {"b": 1}}, {"c": {"a": {"c": {"b": "set"}}}}, r"the value at \['a'\]\['b'\] is no 'set'"),
        (1, {"c": {"a": "tuple"}}, "do not fit"),
        (1, {"x": 1}, "do not fit"),
        (1, {"t": "tuple"}, "do not fit"),
        (1, {"t": [["tuple"]]}, "do not fit"),
        (1, 5, "do not fit"),
        (1, "os.system", "is of the unknown type 'os.system'"),
        (1, "os@$(rm)==1", "is of the unknown type"),
        ([1, 1], "set", "duplicate item"),
        ([[1, 2], [1, 3]], "dict", "duplicate key"),
        ([[[], 2]], "dict", "unhashable"),
        ("xx!", "bytes", "is no 'bytes'"),
        ("torch.nn", "torch.dtype", "not a dtype"),
        ("cuda:0; import os", "torch.device", "not the name of a device"),
        ("nosuch", "torch.device", "is no 'torch.device'"),
        ([1, 2, 0], "range", "is no 'range'"),
        ([10**10, 0, 0], "timedelta", "is no 'timedelta'"),
        (300, "numpy.int8", "is no 'numpy.int8'"),
        (1e300, "numpy.float16", "cannot hold it"),
        (["|O8", [1], ""], "numpy.ndarray", "unknown array dtype"),
        (["<f4", [2**62], ""], "numpy.ndarray", "0 bytes for the shape"),
        (["<f4", [-1], ""], "numpy.ndarray", "impossible shape"),
        (["<U1", [1], "////fw=="], "numpy.ndarray", "is no 'numpy.ndarray'"),
        (["|b1", [1], "Bw=="], "numpy.ndarray", "neither 0 nor 1"),
        ([2**70], "torch.Size", "is no 'torch.Size'"),
        ("0x" + "f" * 10, "int", None),
        ("9" * 10_000, "int", "not a hexadecimal integer"),
    ],
)
def test_codec_join_hostile_types_raises(plain: Any, types: Any, message: str | None) -> None:
    if message is None:
        assert join(plain, types) == int(plain, 16)
        return
    with pytest.raises(errors.FormatError, match=message):
        join(plain, types)


def test_codec_join_hostile_depth_raises() -> None:
    with pytest.raises(errors.FormatError, match=f"nested deeper than {MAX_DEPTH} levels"):
        join(nest(lambda v: [v], 10_000), nest(lambda v: {"c": {"0": v}}, 10_000))


class Celsius:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Celsius) and other.degrees == self.degrees


@pytest.fixture
def celsius() -> Any:
    VALUES.add(
        LeafSerializer("test.Celsius", Celsius, lambda v: (v.degrees,), lambda v: Celsius(*v)),
        provider="td-test==1.2",
    )
    yield
    if "test.Celsius" in VALUES.by_tag:
        VALUES.remove("test.Celsius")


def test_codec_split_and_join_registered_type_round_trips(celsius: None) -> None:
    plain, types = split([Celsius(1.5)])
    assert (plain, types) == ([[1.5]], {"c": {"0": {"t": ["test.Celsius@td-test==1.2", "tuple"]}}})
    assert join(plain, types) == [Celsius(1.5)]


def test_codec_join_type_of_missing_plugin_raises(celsius: None) -> None:
    stored = split({"t": Celsius(1.5)})
    VALUES.remove("test.Celsius")
    with pytest.raises(errors.MissingPluginError) as caught:
        join(*stored)
    assert str(caught.value) == (
        "the value at ['t'], of the type 'test.Celsius', was written by 'td-test' 1.2, "
        "which is not installed: install it from where its authors publish it"
    )
