"""The types of values: the registry, serializers of enums, and what each serializer of core accepts."""

from __future__ import annotations

import json
from enum import Enum, IntFlag

import pytest

from td_core import errors
from td_core._encode.value_codec import join, split
from td_core._encode.value_types import VALUES, LeafSerializer, Values, enum_serializer


class Color(Enum):
    RED = 1


class Access(IntFlag):
    READ = 1
    WRITE = 2


def test_enum_serializer_round_trips_members() -> None:
    for serializer, members in [
        (enum_serializer(Color, "test.Color"), [Color.RED]),
        (enum_serializer(Access), [Access.READ, Access.READ | Access.WRITE, Access(0)]),
    ]:
        VALUES.add(serializer)
        try:
            for member in members:
                back = join(*json.loads(json.dumps(split({"m": member}))))["m"]
                assert (type(back), back) == (type(member), member)
            with pytest.raises(errors.FormatError, match="is no"):
                join("nosuch", serializer.tag)
        finally:
            VALUES.remove(serializer.tag)


@pytest.mark.parametrize(
    ("serializer", "message"),
    [
        (LeafSerializer("tuple", Color, repr, repr), "the value tag 'tuple' is taken by <class 'tuple'>"),
        (
            LeafSerializer("test.tuple", tuple, repr, repr),
            "values of <class 'tuple'> already have a serializer",
        ),
        (LeafSerializer("test.str", str, repr, repr), "values of <class 'str'> already have a serializer"),
        (LeafSerializer("a@b", Color, repr, repr), "the value tag 'a@b' is not a name"),
    ],
)
def test_add_bad_serializer_raises(serializer: LeafSerializer, message: str) -> None:
    with pytest.raises(errors.PluginError, match=message):
        VALUES.add(serializer)


#: What JSON can hold, and what a damaged file may hold under any tag.
PLAIN = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("inf"),
    "",
    "x",
    "0x1f",
    "cuda:x",
    [],
    [1],
    [1, 2, 3],
    [[1, 2]],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("tag", sorted(VALUES.by_tag))
def test_load_accepts_only_what_dump_returns(tag: str) -> None:
    serializer = VALUES.by_tag[tag]
    refused = 0
    for plain in PLAIN:
        try:
            value = serializer.load(plain)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            refused += 1
        else:
            assert type(serializer.dump(value)) is type(plain)
    assert refused >= len(PLAIN) // 3


def test_find_returns_serializer_of_exact_class() -> None:
    class Sizes(tuple[int, ...]):
        pass

    assert VALUES.find(tuple) is VALUES.by_tag["tuple"]
    assert VALUES.find(Sizes) is None


def test_add_with_provider_writes_it_and_remove_forgets_it() -> None:
    values = Values()
    values.add(LeafSerializer("test.Color", Color, repr, repr), provider="td-test==1.2", natural=True)
    assert values.written == {"test.Color": "test.Color@td-test==1.2"}
    assert values.natural == {"test.Color"}
    values.remove("test.Color")
    assert (values.find(Color), values.by_tag, values.written, values.natural) == (None, {}, {}, set())


def test_add_class_by_name_needs_no_import() -> None:
    values = Values()
    serializer = LeafSerializer("test.Far", "far_away.Far", repr, repr)
    values.add(serializer)
    with pytest.raises(errors.PluginError, match="values of 'far_away.Far' already have a serializer"):
        values.add(LeafSerializer("test.Other", "far_away.Far", repr, repr))
    far = type("Far", (), {"__module__": "far_away"})
    assert values.find(far) is serializer
    values.remove("test.Far")
    assert values.find(far) is None


@pytest.mark.parametrize(
    "serializer", [LeafSerializer("test.X", "Far", repr, repr), LeafSerializer("test.X", Color, repr, 3)]
)  # type: ignore[arg-type]
def test_add_without_class_or_functions_raises(serializer: LeafSerializer) -> None:
    with pytest.raises(errors.PluginError, match="a value type is a class and two functions; got"):
        Values().add(serializer)
