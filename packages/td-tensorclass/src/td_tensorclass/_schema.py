"""The schema of a tensorclass: its options, its fields, and the binding of constructor arguments to them.

The standard library's ``dataclass`` reads the annotations, so fields, defaults, ``ClassVar``, ``InitVar``, ``KW_ONLY``
and inheritance have the same meaning as in a dataclass.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from td_core import TensorCollection, TensorDict
from td_core.errors import TensorDictError
from td_core.spi import EntrySchema, Node, set_module, suggest_keys, unravel_key_to_tuple

from ._non_tensor import NonTensorData
from ._value_nodes import NonTensorNode, ValueNode

#: Names that cannot be fields: the other constructor arguments, and internal attributes of classes and instances.
RESERVED = frozenset({"batch_size", "device", "names", "lock", "_tensordict", "_undo", "_schema", "_cast"})

#: Names of methods that tensordict lacks, so that its programs have fields of these names: they hide the methods, and the
#: functions of torch still accept the class.
_METHODS_OF_TENSORS = """
    acosh allclose angle argmax argmin argsort asinh atan2 atanh bitwise_or bitwise_xor count_nonzero cumprod cumsum
    diff eq equal erfinv exp2 floor_divide floor_divide_ fmax fmin fmod fmod_ ge gt index_add index_copy isin isinf
    kthvalue le log_softmax logaddexp logcumsumexp logical_not logical_not_ logical_or logical_xor logit lt matmul
    median nan_to_num nan_to_num_ nanmedian nanquantile ne relu relu_ rsqrt rsqrt_ scatter_reduce sort square square_
    take_along_dim topk unique
"""

#: Names of collection members that may be fields without ``shadow=True``.
ALLOWED = frozenset({"data", "open", *_METHODS_OF_TENSORS.split()})


@set_module("td_tensorclass")
class UnknownFieldError(TensorDictError, AttributeError, TypeError, ValueError):
    """An attribute, argument or key of a tensorclass is not one of its fields.

    >>> all(issubclass(UnknownFieldError, each) for each in (AttributeError, TypeError, ValueError))
    True
    """


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """Combine the options of a base class with those of a subclass, where None keeps the inherited value, and check them."""
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


Options.__init__.__qualname__ = "tensorclass"  # A TypeError names the decorator.
OPTIONS = frozenset(field.name for field in dataclasses.fields(Options))


class Slot(NamedTuple):
    """One constructor argument or field, in the order of declaration."""

    name: str
    default: object
    factory: Any
    init: bool
    is_field: bool


class Schema(EntrySchema):
    """The fields of one tensorclass, ready for its constructor.

    Attributes:
        cls: the class.
        options: its options.
        names: its fields, in order.
        slots: its fields and ``InitVar`` arguments, in order.
        all_given: True if the constructor arguments are exactly the fields.
        positional: names of the arguments that may be passed by position.
        init_vars: names of the ``InitVar`` arguments, which are passed to ``__post_init__``.
        unprinted: fields that are declared with ``repr=False``.
        defaulted: fields whose default is not None.
        converts_tensors, cast_filter: as in the base class.
    """

    __slots__ = (
        "_hints", "_locals", "all_given", "cast_filter", "cls", "converts_tensors", "defaulted", "init_vars", "names",
        "options", "positional", "slots", "unprinted",
    )  # fmt: skip

    clears_none = True

    def __init__(self, cls: type, options: Options, local_names: Mapping[str, object]) -> None:
        self.cls = cls
        self.options = options
        self.converts_tensors = options.autocast
        self.cast_filter = options.cast_filter
        kept = _list_arguments(cls)
        fields = {field.name for field in dataclasses.fields(cls)}
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
        self._hints: dict[str, object] = {}
        self._locals = dict(local_names)
        self._check(kept)
        # Resolve all hints now: torch.compile cannot trace get_type_hints().
        for name in self.names:
            self.hint(name)

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Resolve all hints before a class is pickled by value: the unpickling process may lack the names in them."""
        for name in self.names:
            self.hint(name)
        return None, {name: getattr(self, name) for name in self.__slots__}

    def _check(self, kept: Iterable[dataclasses.Field[object]]) -> None:
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
        """Build the signature of the constructor."""
        kinds = inspect.Parameter
        annotations = {name: item.type for name, item in _get_declared(self.cls).items()}
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

    def bind(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
        """Convert positional and keyword arguments to keyword arguments; TypeError if one is passed twice, or too many are."""
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

    def fill(self, given: Mapping[str, object]) -> tuple[dict[str, object], list[object]]:
        """Fill in defaults. Return the value per field (None if it has none) and the ``InitVar`` arguments."""
        values: dict[str, object] = {}
        init_vars: list[object] = []
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

    def defaults(self, given: Container[str]) -> dict[str, object]:
        """Return the defaults that are not None of the fields not in ``given``; factories are called."""
        result = {
            slot.name: slot.default if slot.factory is MISSING else slot.factory()
            for slot in self.defaulted
            if slot.name not in given
        }
        return {name: value for name, value in result.items() if value is not None}

    def unknown_field_error(self, names: Iterable[object]) -> UnknownFieldError:
        """Build the error for keys that are not fields."""
        listed = [str(name) for name in names]
        return UnknownFieldError(
            f"{self.cls.__name__} has no field {', '.join(map(repr, listed))}: {suggest_keys(listed[0], self.names)}"
        )

    def check_keys(self, keys: Mapping[str, object]) -> None:
        """Raise UnknownFieldError if one of the keys is not a field."""
        if not keys.keys() <= self.names.keys():
            unknown = [key for key in keys if unravel_key_to_tuple(key)[0] not in self.names]
            if unknown:
                raise self.unknown_field_error(unknown)

    def find_class(self, key: str) -> Any:
        """Return the collection class that a field is annotated with, or None."""
        return collection_class(self.hint(key)) if key in self.names else None

    def convert(self, key: str, value: object) -> Any:
        """Cast a value to the type of a field."""
        return value if key not in self.names or value is None else self.cls._cast(key, value)  # type: ignore[attr-defined]

    def convert_plain(self, key: str, value: object) -> Any:
        """Cast a value of a mapping, if the options autocast or nocast are set."""
        return self.convert(key, value) if self.options.autocast or self.options.nocast else value

    def adopt(self, key: str, node: object) -> Any:
        """Convert a TensorDict to the tensorclass that its field is annotated with, if its keys are fields of that class."""
        if type(node) is TensorDict and is_tensorclass(wanted := self.find_class(key)):
            below = node._children()
            if below.keys() <= wanted._schema.names.keys():
                return wanted.from_tensordict(node._with_children(below))
        return node

    def adopt_all(self, children: Mapping[str, object]) -> dict[str, Any]:
        """Return the nodes that ``adopt`` has converted."""
        made = {name: self.adopt(name, child) for name, child in children.items()}
        return {name: node for name, node in made.items() if node is not children[name]}

    def add_defaults(self, node: object) -> Any:
        """Return an instance with its defaults; a node of another class is returned unchanged."""
        cls: Any = self.cls
        return cls._wrap(cls._add_defaults(node._tensordict, ())) if isinstance(node, cls) else node

    def list_entries(self, node: Node) -> dict[str, Tensor | Node | None]:
        """Return the entries of a node, and None for the other fields.

        A value that only some members of a lazy stack have is None in the others; KeyMismatchError for a tensor or collection.
        """
        present: Mapping[str, Tensor | Node | None] = node._children()
        if type(present) is not dict and any(name not in present for name in self.names):
            members = iter(with_none([holder._inner() for (holder,) in node._zip_members()]))
            present = super().list_entries(node._inner()._map_members(lambda _: next(members)))
        return {**present, **{name: None for name in self.names if name not in present}}

    def is_resolved(self, name: str) -> bool:
        """Return True if all names in the annotation of a field are defined."""
        self.hint(name)
        return name in self._hints

    def hint(self, name: str) -> Any:
        """Return the resolved annotation of a field; Any if a name in it is undefined or it is not a type.

        ``Optional[X]`` gives X, because None is always allowed.
        """
        if name in self._hints:
            return self._hints[name]
        if torch.compiler.is_compiling():
            return Any
        declared = _get_declared(self.cls)[name].type
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
            result = Any  # the annotation is not a type, such as a string with a description
        rest = get_choices(result)
        result = rest[0] if len(rest) == 1 else result
        try:
            isinstance(None, typing.get_origin(result) or result)
        except TypeError:  # isinstance() rejects it, such as a protocol or a TypedDict
            result = Any if isinstance(result, type) else result
        self._hints[name] = result
        return result


def _list_arguments(cls: Any) -> list[dataclasses.Field[object]]:
    """Return the fields and ``InitVar`` arguments of a class, in the order of declaration."""
    declared: dict[str, Any] = cls.__dataclass_fields__
    return [item for item in declared.values() if item._field_type.name != "_FIELD_CLASSVAR"]


def annotations_of(cls: type) -> dict[str, object]:
    """Return the annotations of a class without inherited ones; undefined names remain strings or ``ForwardRef``."""
    # Python 3.14 evaluates annotations on access (PEP 649), which raises NameError for undefined names.
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)


@functools.cache
def make_bracketed(cls: type, *names: str) -> type:
    """Derive the class that ``cls[names]`` returns, with these options set to True."""
    title, options = f"{cls.__name__}_{'_'.join(names)}", dict.fromkeys(names, True)
    return types.new_class(title, (cls,), options, lambda body: body.update(__module__=cls.__module__))


def collection_class(hint: object) -> Any:
    """Return the collection class that an annotation names; None for other types and for non-tensor data."""
    cls = typing.get_origin(hint) or hint
    is_collection = (
        isinstance(cls, type) and issubclass(cls, TensorCollection) and not issubclass(cls, ValueNode)
    )
    return cls if is_collection else None


def is_tensorclass(cls: object) -> bool:
    """Return True for a class with fields, which a collection class need not have."""
    return isinstance(getattr(cls, "_schema", None), Schema)


def get_choices(hint: object) -> tuple[Any, ...]:
    """Return the members of a union without None; for any other hint, a tuple of that hint."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(arg for arg in typing.get_args(hint) if arg is not type(None))
    return (hint,)


def get_local_names(cls: type, frame: types.FrameType | None) -> dict[str, object]:
    """Return the local variables that the annotations of a class contain, if it is defined in a function."""
    # Names of a module can be looked up later; local variables exist only now.
    while frame is not None and frame.f_globals.get("__name__") != cls.__module__:
        frame = frame.f_back
    if frame is None or frame.f_locals is frame.f_globals:
        return {}
    written = " ".join(str(item) for item in annotations_of(cls).values())
    return {name: frame.f_locals[name] for name in re.findall(r"\w+", written) if name in frame.f_locals}


def _get_declared(cls: Any) -> dict[str, dataclasses.Field[object]]:
    """Return the fields of a dataclass by name, with class variables and ``InitVar`` arguments."""
    fields: dict[str, dataclasses.Field[object]] = cls.__dataclass_fields__
    return fields


def with_none(items: list[Node]) -> list[Node]:
    """Add None to collections that lack a key, if its entries in all others are non-tensor data."""
    children = [item._children() for item in items]
    if all(child.keys() == children[0].keys() for child in children):
        return items
    for key in {key: None for child in children for key in child}:
        held = [child[key] for child in children if key in child]
        if len(held) == len(items) or not all(isinstance(entry, NonTensorNode) for entry in held):
            continue
        for i, child in enumerate(children):
            if key not in child:
                items[i] = items[i]._shallow_copy()
                # Of a lazy stack, some members may have the entry.
                for (holder,) in items[i]._zip_members():
                    if key not in holder._children():
                        holder._set_child(key, NonTensorData(None, batch_size=holder.batch_size))
    return items
