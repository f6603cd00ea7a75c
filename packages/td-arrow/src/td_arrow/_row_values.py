"""Values of rows as Arrow arrays, and back: text, bytes, numbers, dates, lists of these, and JSON for all others."""

from __future__ import annotations

import datetime
import decimal
import json
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from td_core.errors import CodecError, FormatError
from td_core.spi import join_value, parse_json, split_value

from ._arrow_types import Cells, Facts, list_type

_PLAIN: dict[type, Any] = {
    str: pa.string(), bytes: pa.binary(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), datetime.date: pa.date32(),
    datetime.timedelta: pa.duration("us"),
}  # fmt: skip
_UTC = datetime.timezone.utc
#: Errors of pyarrow for a value that the type of the others cannot hold.
_REFUSED = (pa.ArrowException, OverflowError, UnicodeError, ValueError, TypeError)


def make_values(values: Sequence[Any], where: Callable[[int], str]) -> Cells:
    """Return values of rows as a column; None is null. ``where`` returns the place of a value, for messages."""
    kind = find_type([value for value in values if value is not None])
    if kind is not None:
        try:
            array = pa.array(values, kind)
            if isinstance(array, pa.ChunkedArray):  # more text than offsets of 32 bits can address
                array = pa.array(values, pa.large_string() if kind == pa.string() else pa.large_binary())
            utc = pa.types.is_timestamp(kind) and any(
                value is not None and value.tzinfo is _UTC for value in values
            )
            return Cells(array, {"kind": "values", **({"utc": True} if utc else {})})
        except _REFUSED:
            pass
    return _make_json(values, where)


def _make_json(values: Sequence[Any], where: Callable[[int], str]) -> Cells:
    pairs: list[Any] = []
    for row, value in enumerate(values):
        try:
            pairs.append(None if value is None else split_value(value))
        except CodecError as error:
            raise CodecError(f"{where(row)}: {error}") from error
    present = [pair for pair in pairs if pair is not None]
    shared = present[0][1] if present else None
    same = all(types == shared for _, types in present)
    texts = [None if pair is None else json.dumps(pair[0] if same else pair) for pair in pairs]
    facts = {"kind": "values", "json": True, **({"types": shared} if same else {"each": True})}
    return Cells(pa.array(texts, pa.string()), facts)


def find_type(values: list[Any]) -> pa.DataType | None:
    """Return the Arrow type that holds all values exactly, or None."""
    types = {*map(type, values)}
    if len(types) != 1:
        return None if types else pa.null()
    (cls,) = types
    if cls is list:
        items = [item for value in values for item in value]
        inner = None if not items or None in items else find_type(items)
        return None if inner is None or pa.types.is_large_list(inner) else list_type(inner)
    special = _SPECIAL.get(cls)
    return _PLAIN.get(cls) if special is None else special(values)


def _find_timestamp(values: list[datetime.datetime]) -> pa.DataType | None:
    zones = {_name_zone(value.tzinfo) for value in values}
    if (
        len(zones) > 1
        or len({value.tzinfo is _UTC for value in values}) > 1
        or False in zones
        or any(value.fold for value in values)
    ):
        return None
    return pa.timestamp("us", zones.pop())


def _name_zone(zone: datetime.tzinfo | None) -> Any:
    """Return the name of a time zone in Arrow, None for none, False for one that Arrow would change."""
    if zone is None:
        return None
    if zone is _UTC:
        return "UTC"
    return getattr(zone, "key", None) or False if type(zone) is zoneinfo.ZoneInfo else False


def _find_decimal(values: list[decimal.Decimal]) -> pa.DataType | None:
    parts = [value.as_tuple() for value in values]
    exponents = [part.exponent for part in parts if isinstance(part.exponent, int)]
    if len(exponents) < len(values) or any(not value and value.is_signed() for value in values):
        return None  # infinities, NaN, and zeros with a sign, which Arrow lacks
    scale = max(0, -min(exponents))
    digits = max(len(part.digits) + int(part.exponent) for part in parts) + scale
    return pa.decimal128(max(digits, scale, 1), scale) if max(digits, scale) <= 38 else None


_SPECIAL: dict[type, Callable[[list[Any]], Any]] = {
    datetime.datetime: _find_timestamp,
    datetime.time: lambda values: (
        None if any(each.tzinfo is not None or each.fold for each in values) else pa.time64("us")
    ),
    decimal.Decimal: _find_decimal,
}


def read_values(array: pa.Array, facts: Facts) -> list[Any]:
    """Return the values of rows, None for nulls; raise FormatError if Python has no type for them."""
    if facts.get("json") and (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        return [None if text is None else _read_json(text, facts) for text in array.to_pylist()]
    kind = array.type
    if pa.types.is_union(kind) or pa.types.is_interval(kind):
        raise FormatError(f"has the type {kind}, which td cannot read: leave it out with keys=")
    array = _without_nanoseconds(array)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return _read_zoned(array, kind.tz, bool(facts.get("utc")))
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
    elif pa.types.is_run_end_encoded(kind):
        array = pc.run_end_decode(array)
    try:
        values: list[Any] = array.to_pylist()
    except (ValueError, OverflowError) as error:
        raise FormatError(f"has values that Python cannot hold: {error}") from error
    return values


def _without_nanoseconds(array: pa.Array) -> pa.Array:
    """Return times in microseconds, which Python has; raise FormatError if digits would be lost."""
    kind, types = array.type, pa.types
    if not (types.is_timestamp(kind) or types.is_duration(kind) or types.is_time(kind)) or kind.unit != "ns":
        return array
    plain = pa.duration("us") if types.is_duration(kind) else pa.time64("us")
    try:
        return array.cast(pa.timestamp("us", kind.tz) if types.is_timestamp(kind) else plain)
    except pa.ArrowInvalid as error:
        raise FormatError(
            f"has the type {kind}, and Python has no type for nanoseconds: round them to "
            'microseconds, or read the table with times="numbers"'
        ) from error


def _read_zoned(array: pa.Array, name: str, utc: bool) -> list[Any]:
    """Return datetimes with a zone of the standard library; pyarrow would use that of pytz, if it is installed."""
    try:
        zone = _UTC if utc and name == "UTC" else _parse_zone(name)
    except (ValueError, zoneinfo.ZoneInfoNotFoundError) as error:
        raise FormatError(f"has the time zone {name!r:.100}, which is unknown") from error
    naive = array.cast(pa.timestamp(array.type.unit, "UTC")).cast(pa.timestamp(array.type.unit)).to_pylist()
    return [None if time is None else time.replace(tzinfo=_UTC).astimezone(zone) for time in naive]


def _parse_zone(name: str) -> datetime.tzinfo:
    if name[:1] in "+-":
        hours, _, minutes = name[1:].partition(":")
        delta = datetime.timedelta(hours=int(hours), minutes=int(minutes or 0))
        return datetime.timezone(delta if name[0] == "+" else -delta)
    return zoneinfo.ZoneInfo(name)


def _read_json(text: str, facts: Facts) -> Any:
    try:
        plain = parse_json(text)
        if facts.get("each"):
            plain, types = plain
        else:
            types = facts.get("types")
        return join_value(plain, types)
    except (ValueError, TypeError) as error:
        raise FormatError(f"holds JSON that is damaged: {error}") from error
