"""What a tensorclass declares: its options, its fields, and how constructor arguments fill them.

The standard library's ``dataclass`` reads the annotations, so fields, defaults, ``ClassVar``, ``InitVar``, ``KW_ONLY``
and inheritance mean here what they mean there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple

import torch

from td_core._keys import suggest_keys

from ._annotations import annotations_of
from ._field_errors import UnknownFieldError

#: Names that are never fields: the other arguments of the constructor, and what a class and its instances consist of.
RESERVED = frozenset({"batch_size", "device", "names", "lock", "_tensordict", "_undo", "_schema", "_cast"})

#: Names of collection members that may be fields all the same.
ALLOWED = frozenset({"data"})


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a tensorclass, as :func:`tensorclass` documents them."""

    autocast: bool = False
    nocast: bool = False
    frozen: bool = False
    shadow: bool = False
    tensor_only: bool = False
    skip_post_init_on_rebuild: bool = False
    cast_filter: Callable[[Any, Any], bool] | None = None
    kw_only: bool = False

    def merge(self, given: Mapping[str, Any]) -> Options:
        """Return these options of a base class with those of a subclass on top; None inherits.

        Raises:
            TypeError: an option is unknown, or two of them exclude each other.

        >>> Options(frozen=True).merge({"autocast": True}).frozen
        True
        """
        unknown = [name for name in given if name not in OPTIONS]
        if unknown:
            raise TypeError(
                f"a tensorclass has no option {', '.join(map(repr, unknown))}; options: {sorted(OPTIONS)}"
            )
        merged = dataclasses.replace(
            self, **{name: value for name, value in given.items() if value is not None}
        )
        exclusive = [name for name in ("autocast", "nocast", "tensor_only") if getattr(merged, name)]
        if len(exclusive) > 1:
            raise TypeError(f"the options {' and '.join(map(repr, exclusive))} exclude each other")
        return merged


OPTIONS = frozenset(field.name for field in dataclasses.fields(Options))


class Slot(NamedTuple):
    """One constructor argument or field, in the order of declaration."""

    name: str
    default: Any
    factory: Any
    init: bool
    is_field: bool


class Schema:
    """The fields of one tensorclass, ready for its constructor.

    Attributes:
        cls: the class.
        options: its options.
        names: its fields, in order.
        slots: its fields and ``InitVar`` arguments, in order.
        all_given: whether the arguments are the fields, all of them and no other.
        positional: the names of arguments that may be given by position.
        init_vars: the names that ``__post_init__`` gets.
        unprinted: its fields that are declared with ``repr=False``.
        defaulted: its fields that are not None where they are not given.
    """

    __slots__ = (
        "_hints", "_locals", "all_given", "cls", "defaulted", "init_vars", "names", "options", "positional", "slots",
        "unprinted",
    )  # fmt: skip

    def __init__(self, cls: type, options: Options, local_names: Mapping[str, Any]) -> None:
        self.cls = cls
        self.options = options
        declared: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        fields = {field.name for field in dataclasses.fields(cls)}
        # What is left beside fields and class variables are the arguments of __post_init__.
        kept = [item for item in declared.values() if item._field_type.name != "_FIELD_CLASSVAR"]
        self.slots = tuple(
            [
                Slot(field.name, field.default, field.default_factory, field.init, field.name in fields)
                for field in kept
            ]
        )
        self.names = {slot.name: None for slot in self.slots if slot.is_field}
        self.init_vars = tuple(slot.name for slot in self.slots if not slot.is_field)
        self.all_given = all(slot.is_field and slot.init for slot in self.slots)
        self.positional = tuple(field.name for field in kept if field.init and not field.kw_only)
        self.unprinted = frozenset(field.name for field in kept if not field.repr)
        self.defaulted = tuple(
            slot
            for slot in self.slots
            if slot.is_field
            and not (slot.factory is MISSING and (slot.default is MISSING or slot.default is None))
        )
        self._hints: dict[str, Any] = {}
        self._locals = dict(local_names)
        self._check(kept)
        # At once: torch.compile cannot follow how names are looked up.
        for name in self.names:
            self.hint(name)

    def __getstate__(self) -> Any:
        """Return what a pickle by value of the class holds: where it is read, no module has the names in annotations."""
        for name in self.names:
            self.hint(name)
        return None, {name: getattr(self, name) for name in self.__slots__}

    def _check(self, kept: Iterable[Any]) -> None:
        last_default = None
        for field in kept:
            if not field.init or field.kw_only:
                continue
            if field.default is not MISSING or field.default_factory is not MISSING:
                last_default = field.name
            elif last_default is not None:
                raise TypeError(
                    f"{self.cls.__name__}: the field {field.name!r} without a default follows {last_default!r}, "
                    "which has one; give it a default, or declare the class with kw_only=True"
                )

    def signature(self) -> inspect.Signature:
        """Return the signature of the constructor."""
        kinds = inspect.Parameter
        annotations = {name: item.type for name, item in self.cls.__dataclass_fields__.items()}  # type: ignore[attr-defined]
        results: list[inspect.Parameter] = []
        for slot in self.slots:
            if slot.init:
                kind = kinds.POSITIONAL_OR_KEYWORD if slot.name in self.positional else kinds.KEYWORD_ONLY
                provided = slot.default if slot.factory is MISSING else slot.factory
                default = kinds.empty if provided is MISSING else provided
                results.append(kinds(slot.name, kind, default=default, annotation=annotations[slot.name]))
        for name, default in (("batch_size", None), ("device", None), ("names", None), ("lock", False)):
            results.append(kinds(name, kinds.KEYWORD_ONLY, default=default))
        return inspect.Signature(sorted(results, key=lambda item: item.kind))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return positional and keyword arguments as keywords.

        Raises:
            TypeError: too many, or one given twice.
        """
        if len(args) > len(self.positional):
            raise TypeError(
                f"{self.cls.__name__}() takes {len(self.positional)} positional arguments, {list(self.positional)}; "
                f"got {len(args)}"
            )
        provided = dict(zip(self.positional, args))
        twice = [name for name in provided if name in kwargs]
        if twice:
            raise TypeError(f"{self.cls.__name__}() got {twice} both by position and by name")
        return {**provided, **kwargs}

    def fill(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return a value for each field, None for those without, and the ``InitVar`` arguments.

        Raises:
            TypeError: an argument without a default was not given.
            UnknownFieldError: an argument is none of the class.
        """
        values: dict[str, Any] = {}
        init_vars: list[Any] = []
        missing: list[str] = []
        taken = 0
        for name, default, factory, init, is_field in self.slots:
            value = None
            if init and name in given:
                value = given[name]
                taken += 1
            elif default is not MISSING:
                value = default
            elif factory is not MISSING:
                value = factory()
            elif init:
                missing.append(name)
            if is_field:
                values[name] = value
            else:
                init_vars.append(value)
        if taken != len(given):
            accepted = {slot.name for slot in self.slots if slot.init}
            refused = [name for name in given if name not in accepted]
            if all(name in self.names for name in refused):
                raise UnknownFieldError(
                    f"{self.cls.__name__}() takes no field {', '.join(map(repr, refused))}: declared with init=False"
                )
            raise self.unknown_field_error(name for name in refused if name not in self.names)
        if missing:
            raise TypeError(f"{self.cls.__name__}() misses the arguments {missing}, which have no default")
        return values, init_vars

    def defaults(self, given: Container[str]) -> dict[str, Any]:
        """Return the defaults, fresh ones of factories, of the fields that are not given and are not None then."""
        result = {
            slot.name: slot.default if slot.factory is MISSING else slot.factory()
            for slot in self.defaulted
            if slot.name not in given
        }
        return {name: value for name, value in result.items() if value is not None}

    def unknown_field_error(self, names: Iterable[Any]) -> UnknownFieldError:
        """Return the error for keys that are no fields."""
        listed = [str(name) for name in names]
        return UnknownFieldError(
            f"{self.cls.__name__} has no field {', '.join(map(repr, listed))}: {suggest_keys(listed[0], self.names)}"
        )

    def is_resolved(self, name: str) -> bool:
        """Tell whether the names in the annotation of a field are defined."""
        self.hint(name)
        return name in self._hints

    def hint(self, name: str) -> Any:
        """Return the resolved annotation of a field; Any where a name in it is not defined (yet), or it is no type.

        ``Optional[X]`` is X: None is always allowed.
        """
        if name in self._hints:
            return self._hints[name]
        if torch.compiler.is_compiling():
            return Any
        declared = self.cls.__dataclass_fields__[name].type  # type: ignore[attr-defined]
        owner = next((base for base in self.cls.__mro__ if name in annotations_of(base)), self.cls)
        module = sys.modules.get(owner.__module__)
        holder = types.SimpleNamespace(__annotations__={name: declared})
        try:
            result = typing.get_type_hints(
                holder, vars(module) if module else {}, {self.cls.__name__: self.cls, **self._locals}
            )[name]
        except (NameError, AttributeError):
            return Any
        except (SyntaxError, TypeError):
            result = Any  # words, not a type
        rest = get_choices(result)
        result = rest[0] if len(rest) == 1 else result
        try:
            isinstance(None, typing.get_origin(result) or result)
        except TypeError:  # a protocol or a TypedDict, say
            result = Any if isinstance(result, type) else result
        self._hints[name] = result
        return result


def get_choices(hint: Any) -> tuple[Any, ...]:
    """Return what a union consists of, without None; of anything else, that alone.

    >>> get_choices(int | str | None), get_choices(int)
    ((<class 'int'>, <class 'str'>), (<class 'int'>,))
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(arg for arg in typing.get_args(hint) if arg is not type(None))
    return (hint,)


def get_local_names(cls: type, frame: types.FrameType | None) -> dict[str, Any]:
    """Return what the names in a class's annotations mean where it is defined inside a function.

    Module level names are found when they are needed; those of a function are gone by then.
    """
    while frame is not None and frame.f_globals.get("__name__") != cls.__module__:
        frame = frame.f_back
    if frame is None or frame.f_locals is frame.f_globals:
        return {}
    written = " ".join(str(item) for item in annotations_of(cls).values())
    return {name: frame.f_locals[name] for name in re.findall(r"\w+", written) if name in frame.f_locals}
