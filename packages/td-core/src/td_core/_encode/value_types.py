"""The types of values: the registry of serializers by type and tag, and the serializers that core registers.

Every ``load`` here accepts only what its ``dump`` can return, and raises a clear error for anything else.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum, Flag
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from .._python.public_names import set_module
from .._python.type_names import NamedTypes, find_imported, is_type_name
from .._torch.dtypes import NAMES
from ..errors import PluginError

if TYPE_CHECKING:
    import numpy.typing as npt

_TAG = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*\Z")

# Types that JSON represents exactly. int and dict have serializers, for large ints and keys that are not strings.
_JSON = (str, float, bool, type(None), list)

_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,4})?\Z")
_ARRAY_DTYPE = re.compile(r"[<>|]([biufcSU][0-9]{1,9}|[mM]8(\[[0-9]{0,9}[a-zA-Zμ]{1,2}\])?)\Z")


ValueT = TypeVar("ValueT")


@set_module("td_core.spi")
@dataclass(frozen=True, slots=True)
class LeafSerializer:
    """Functions that store values of one Python type, in every format.

    Attributes:
        tag: unique, stable name that is written to files, such as ``"mypackage.Image"``.
        type: the class, matched exactly: an instance of a subclass raises instead of being stored as its base. A string is
            the name of the class, such as ``"pandas.Timestamp"``, whose library need not be imported.
        dump: converts a value to one that the codec can store: JSON, bytes, tuples, other registered types.
        load: the inverse; raises ValueError or TypeError for input that ``dump`` cannot return.

    >>> from fractions import Fraction
    >>> fractions = LeafSerializer("fractions.Fraction", Fraction, str, Fraction)
    >>> fractions.load(fractions.dump(Fraction(1, 3)))
    Fraction(1, 3)
    """

    tag: str
    type: type | str
    dump: Callable[[Any], object]
    load: Callable[[Any], Any]


def enum_serializer(cls: type[Enum], tag: str | None = None) -> LeafSerializer:
    """Build the serializer that stores the members of an enum by name (members of a flag by value).

    Args:
        cls: the enum.
        tag: name of the type in files; None uses its module and name.

    >>> Color = Enum("Color", ["RED", "BLUE"])
    >>> enum_serializer(Color, "Color").dump(Color.RED)
    'RED'
    """
    tag = f"{cls.__module__}.{cls.__qualname__}" if tag is None else tag
    if issubclass(cls, Flag):
        return LeafSerializer(tag, cls, lambda member: member.value, cls)
    return LeafSerializer(tag, cls, lambda member: member.name, cls.__getitem__)


class Values:
    """Registry of value types by class, by name of the class, and by tag."""

    def __init__(self) -> None:
        self.by_type: dict[type, LeafSerializer] = {}
        self.by_name: NamedTypes[LeafSerializer] = NamedTypes()
        self.by_tag: dict[str, LeafSerializer] = {}
        self.written: dict[str, str] = {}
        self.natural: set[str] = set()

    def add(self, serializer: LeafSerializer, *, provider: str | None = None, natural: bool = False) -> None:
        """Register a serializer of ``provider`` (``distribution==version``), or raise PluginError if tag or type is taken.

        ``natural``: the dumped value is readable without the sidecar, such as the items of a tuple.
        """
        tag, cls = serializer.tag, serializer.type
        if not isinstance(tag, str) or not _TAG.match(tag):
            raise PluginError(f"the value tag {tag!r} is not a name of letters, digits, '_', '.' and '-'")
        known = isinstance(cls, type) or is_type_name(cls)
        if not known or not callable(serializer.dump) or not callable(serializer.load):
            raise PluginError(
                f"a value type is a class and two functions; got {serializer!r}; the name of a class includes its "
                "module, as in 'pandas.Timestamp'"
            )
        if tag in self.by_tag:
            raise PluginError(f"the value tag {tag!r} is taken by {self.by_tag[tag].type!r}")
        found = find_imported(cls) if isinstance(cls, str) else cls
        taken = found in _JSON or (
            self.find(found) if isinstance(found, type) else self.by_name.get(str(cls))
        )
        if taken:
            raise PluginError(f"values of {cls!r} already have a serializer")
        self.by_tag[tag] = serializer
        if isinstance(cls, str):
            self.by_name[cls] = serializer
        else:
            self.by_type[cls] = serializer
        self.written[tag] = tag if provider is None else f"{tag}@{provider}"
        if natural:
            self.natural.add(tag)

    def find(self, cls: type) -> LeafSerializer | None:
        """Return the serializer of a class, or None."""
        return self.by_type.get(cls) or self.by_name.find(cls)

    def remove(self, tag: str) -> None:
        """Unregister a serializer."""
        cls = self.by_tag.pop(tag).type
        if isinstance(cls, str):
            del self.by_name[cls]
        else:
            del self.by_type[cls]
        del self.written[tag]
        self.natural.discard(tag)


VALUES = Values()


def _exactly(cls: type[ValueT], value: object) -> ValueT:
    if type(value) is not cls:
        raise TypeError(f"expected {cls.__name__}, found {type(value).__name__}")
    return value


def _items(value: object, *types: type) -> list[Any]:
    """Check that a value is a list whose items have exactly these types, and return it."""
    items = _exactly(list, value)
    if len(items) != len(types):
        raise ValueError(f"expected {len(types)} items, found {len(items)}")
    return [_exactly(cls, item) for cls, item in zip(types, items, strict=True)]


def _load_pairs(value: object) -> dict[object, object]:
    pairs = [_exactly(list, pair) for pair in _exactly(list, value)]
    loaded: dict[object, object] = dict(map(tuple, pairs))
    if len(loaded) != len(pairs):
        raise ValueError("duplicate key")
    return loaded


def _load_set(value: object) -> set[object]:
    items = _exactly(list, value)
    loaded = set(items)
    if len(loaded) != len(items):
        raise ValueError("duplicate item")
    return loaded


def _sort_items(value: set[object] | frozenset[object]) -> list[object]:
    # Sort, since the iteration order of a set of strings differs between processes, but files must not differ.
    return sorted(value, key=repr)


def _to_text(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _from_text(value: object) -> bytes:
    return base64.b64decode(_exactly(str, value), validate=True)


def _load_int(value: object) -> int:
    if not re.match(r"-?0x[0-9a-f]+\Z", text := _exactly(str, value)):
        raise ValueError("not a hexadecimal integer")
    return int(text, 16)


def _dump_moment(value: datetime | time) -> list[object] | str:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise TypeError(f"only time zones of the class datetime.timezone can be stored, not {value.tzinfo!r}")
    return [value.isoformat(), 1] if value.fold else value.isoformat()


def _load_moment(cls: type[datetime] | type[time]) -> Callable[[object], datetime | time]:
    def load(value: object) -> datetime | time:
        if type(value) is list:
            text, fold = _items(value, str, int)
            return cls.fromisoformat(text).replace(fold=fold)
        return cls.fromisoformat(_exactly(str, value))

    return load


#: Classes that can be stored as values: the container classes of pytrees.
CONTAINERS: dict[str, type] = {cls.__name__: cls for cls in (dict, OrderedDict, list, tuple)}


def _dump_class(value: type) -> str:
    if CONTAINERS.get(value.__name__) is not value:
        raise TypeError(f"only the classes {list(CONTAINERS)} can be stored")
    return value.__name__


def _load_class(value: object) -> type:
    if (name := _exactly(str, value)) not in CONTAINERS:
        raise ValueError(f"none of the classes {list(CONTAINERS)}")
    return CONTAINERS[name]


def _load_device(value: object) -> torch.device:
    if not _DEVICE.match(name := _exactly(str, value)):
        raise ValueError("not the name of a device")
    return torch.device(name)


def _load_dtype(value: object) -> torch.dtype:
    dtype = NAMES.get(_exactly(str, value))
    if dtype is None or str(dtype) != value:
        raise ValueError("not a dtype that this torch knows")
    return dtype


def _load_size(value: object) -> torch.Size:
    sizes = [_exactly(int, item) for item in _exactly(list, value)]
    if any(not -(2**63) <= size < 2**63 for size in sizes):
        raise ValueError("a size of more than 64 bits")
    return torch.Size(sizes)


def _dump_array(value: npt.NDArray[np.generic]) -> list[object]:
    if not _ARRAY_DTYPE.match(value.dtype.str) or value.dtype.fields is not None:
        raise TypeError(f"an array of dtype {value.dtype} cannot be stored")
    return [value.dtype.str, list(value.shape), _to_text(value.tobytes())]


def _load_array(value: object) -> npt.NDArray[np.generic]:
    name, shape, text = _items(value, str, list, str)
    if not _ARRAY_DTYPE.match(name):
        raise ValueError(f"unknown array dtype {name!r}")
    dtype = np.dtype(name)
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"impossible shape {shape}")
    content = bytearray(_from_text(text))
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for the shape {shape} of {dtype}")
    if dtype.kind == "b" and any(byte > 1 for byte in content):
        raise ValueError("a bool that is neither 0 nor 1")
    if dtype.kind == "U" and np.any(
        np.frombuffer(content, dtype.byteorder.replace("|", "=") + "u4") > 0x10FFFF
    ):
        raise ValueError("text that is not Unicode")
    # np.frombuffer rejects an empty buffer.
    return np.frombuffer(content, dtype).reshape(shape) if content else np.zeros(shape, dtype)


def _scalar(cls: type, dump: Callable[[Any], object], accepts: type) -> LeafSerializer:
    """Build the serializer of a NumPy scalar type; ``accepts`` is the type that ``dump`` returns."""

    def load(value: object) -> object:
        with np.errstate(over="ignore"):
            scalar = cls(_exactly(accepts, value))
        if dump(scalar) != value and value == value:
            raise ValueError(f"{cls.__name__} cannot hold it")
        return scalar

    return LeafSerializer("numpy." + cls.__name__.rstrip("_"), cls, dump, load)


def _complex(cls: Any, part: type, accepts: type) -> LeafSerializer:
    def dump(value: Any) -> list[object]:
        return [accepts(value.real), accepts(value.imag)]

    def load(value: object) -> object:
        real, imag = _items(value, accepts, accepts)
        scalar = np.empty((), cls)
        with np.errstate(over="ignore"):
            # Assign the parts separately: real + 1j * inf would turn the real part into NaN.
            scalar.real, scalar.imag = part(real), part(imag)
        return scalar[()]

    return LeafSerializer("numpy." + cls.__name__, cls, dump, load)


def _time64(cls: type) -> LeafSerializer:
    def dump(value: Any) -> list[object]:
        return [*np.datetime_data(value.dtype), int(value.view("i8"))]

    def load(value: object) -> object:
        unit, count, ticks = _items(value, str, int, int)
        if unit == "generic":
            return cls("NaT") if ticks == -(2**63) else cls(ticks)
        return cls(ticks, (unit, count))

    return LeafSerializer("numpy." + cls.__name__, cls, dump, load)


def _path(cls: type[PurePath], loaded: type[PurePath]) -> LeafSerializer:
    return LeafSerializer(cls.__name__, cls, str, lambda value: loaded(_exactly(str, value)))


# On some platforms two of these names are the same type, so dict.fromkeys() removes duplicates below.
_SIGNED = (np.int8, np.int16, np.int32, np.int64, np.longlong)
_UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64, np.ulonglong)

_NATURAL = [
    LeafSerializer("tuple", tuple, list, lambda value: tuple(_exactly(list, value))),
    LeafSerializer("OrderedDict", OrderedDict, dict, lambda value: OrderedDict(_exactly(dict, value))),
    LeafSerializer("Counter", Counter, dict, lambda value: Counter(_exactly(dict, value))),
    LeafSerializer("torch.Size", torch.Size, list, _load_size),
    _scalar(np.bool_, bool, bool),
    # str() would drop trailing null characters, so call str.__str__.
    _scalar(np.str_, str.__str__, str),
    *(_scalar(cls, int, int) for cls in dict.fromkeys((*_SIGNED, *_UNSIGNED))),
    *(_scalar(cls, float, float) for cls in (np.float16, np.float32, np.float64)),
]

_OTHER = [
    LeafSerializer("int", int, hex, _load_int),
    LeafSerializer("dict", dict, lambda value: [list(pair) for pair in value.items()], _load_pairs),
    LeafSerializer("set", set, _sort_items, _load_set),
    LeafSerializer("frozenset", frozenset, _sort_items, lambda value: frozenset(_load_set(value))),
    LeafSerializer("bytes", bytes, _to_text, _from_text),
    LeafSerializer("bytearray", bytearray, _to_text, lambda value: bytearray(_from_text(value))),
    LeafSerializer(
        "complex", complex, lambda v: [v.real, v.imag], lambda v: complex(*_items(v, float, float))
    ),
    LeafSerializer(
        "range", range, lambda v: [v.start, v.stop, v.step], lambda v: range(*_items(v, int, int, int))
    ),
    LeafSerializer("slice", slice, lambda v: [v.start, v.stop, v.step], lambda v: slice(*_exactly(list, v))),
    LeafSerializer("date", date, date.isoformat, lambda v: date.fromisoformat(_exactly(str, v))),
    LeafSerializer("datetime", datetime, _dump_moment, _load_moment(datetime)),
    LeafSerializer("time", time, _dump_moment, _load_moment(time)),
    LeafSerializer(
        "timedelta",
        timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: timedelta(*_items(v, int, int, int)),
    ),
    _path(PurePosixPath, PurePosixPath),
    _path(PureWindowsPath, PureWindowsPath),
    # pathlib cannot create a concrete path of another operating system; use the pure class.
    _path(PosixPath, PosixPath if os.name == "posix" else PurePosixPath),
    _path(WindowsPath, WindowsPath if os.name == "nt" else PureWindowsPath),
    LeafSerializer("type", type, _dump_class, _load_class),
    LeafSerializer("torch.dtype", torch.dtype, str, _load_dtype),
    LeafSerializer("torch.device", torch.device, str, _load_device),
    LeafSerializer("numpy.ndarray", np.ndarray, _dump_array, _load_array),
    LeafSerializer("numpy.bytes", np.bytes_, _to_text, lambda value: np.bytes_(_from_text(value))),
    _complex(np.complex64, np.float32, float),
    _complex(np.complex128, np.float64, float),
    _time64(np.datetime64),
    _time64(np.timedelta64),
]

for _serializer in _NATURAL:
    VALUES.add(_serializer, natural=True)
for _serializer in _OTHER:
    VALUES.add(_serializer)
