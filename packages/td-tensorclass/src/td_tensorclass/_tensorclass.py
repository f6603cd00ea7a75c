"""TensorClass: a dataclass whose fields are the entries of one collection.

An instance holds only that collection; its fields are properties that are added when the class is defined.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorCollection, TensorDict, TensorDictBase, from_any
from td_core.errors import BatchSizeError, StructureError
from td_core.spi import (
    PLAIN,
    RULES,
    Node,
    PrintedNode,
    Wrapper,
    as_batch_size,
    as_device,
    check_unlocked,
    expand,
    is_foreign,
    make_dense,
    new_object,
    show_path,
    unravel_key_to_tuple,
)
from td_core.spi import lock as lock_nodes
from td_core.typing import BatchSize, DeviceType, NestedKey

from ._casts import is_batch_number
from ._declaration import declare
from ._non_tensor import NonTensorData
from ._schema import OPTIONS, Options, Schema, collection_class, make_bracketed, with_none
from ._typing import BatchSizeArgument, DeviceArgument, FieldsMeta, NamesArgument
from ._unbatched import UnbatchedTensor
from ._value_nodes import ValueNode, kind_mismatch_error

if TYPE_CHECKING:
    from typing_extensions import Self


#: Attributes of an instance that are not fields.
_STATE = frozenset({"_tensordict", "_undo"})


class TensorClass(Wrapper, metaclass=FieldsMeta):
    """Base of data classes whose fields are tensors that share their leading dims.

    A subclass declares fields as a dataclass does. The options of :func:`tensorclass` are class arguments or are given in
    brackets: ``class Point(TensorClass, frozen=True)``, ``class Point(TensorClass["frozen", "nocast"])``.

    The constructor takes the fields, and ``batch_size``, ``device``, ``names`` and ``lock`` as :class:`TensorDict` does.

    >>> class Point(TensorClass):
    ...     xy: torch.Tensor
    ...     label: str = "unnamed"
    >>> points = Point(torch.zeros(3, 2), batch_size=[3])
    >>> (points + 1)[0].xy
    tensor([1., 1.])
    >>> points[:2].label
    'unnamed'
    >>> points.colour
    Traceback (most recent call last):
    td_tensorclass.UnknownFieldError: Point has no field 'colour': existing keys: ['xy', 'label']
    """

    if TYPE_CHECKING:
        # Declare the other constructor arguments for type checkers; their types differ between writing and reading.
        batch_size: BatchSizeArgument = dataclasses.field(default=None, kw_only=True)  # type: ignore[arg-type,override]
        device: DeviceArgument = dataclasses.field(default=None, kw_only=True)  # type: ignore[arg-type]
        names: NamesArgument = dataclasses.field(default=None, kw_only=True)  # type: ignore[arg-type,override]
        lock: dataclasses.InitVar[bool] = dataclasses.field(default=False, kw_only=True)

    _schema: ClassVar[Schema]
    _cast: ClassVar[Callable[[str, Any], object]]
    _has_post_init: ClassVar[bool] = False
    #: True if the class overrides ``__setattr__``, which the constructor then calls for each field.
    _sets_fields: ClassVar[bool] = False
    _has_post_init_for_results: ClassVar[bool] = False
    #: True if :meth:`_finish` must run on results of operations.
    _has_finish: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        provided = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        super().__init_subclass__(**kwargs)
        declare(cls, TensorClass, provided, sys._getframe(1))

    def __class_getitem__(cls, parameters: object) -> Any:
        """Return a cached subclass with the named options set to True; other parameters give a generic alias."""
        names = parameters if isinstance(parameters, tuple) else (parameters,)
        if not all(isinstance(name, str) for name in names):
            return super().__class_getitem__(parameters)
        Options().merge(dict.fromkeys(names, True))
        return make_bracketed(cls, *names)

    def __init__(
        self,
        *args: object,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
        names: Sequence[str | None] | None = None,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        schema = self._schema
        if args:
            kwargs = schema.bind(args, kwargs)
        init_vars: Sequence[object] = ()
        if not schema.all_given or kwargs.keys() != schema.names.keys():
            kwargs, init_vars = schema.fill(kwargs)
        size = as_batch_size(batch_size)
        data: dict[str, Any] = {}
        td = make_dense(data, size, None if device is None else as_device(device))
        if names is not None:
            td.names = names
        object.__setattr__(self, "_tensordict", td)
        ndim = len(size)
        as_they_are = (
            device is None and names is None and not schema.converts_tensors and not self._sets_fields
        )
        fitting: torch.Size | None = None
        for name in schema.names:
            value = kwargs[name]
            if as_they_are and type(value) in PLAIN:
                try:
                    shape = value.shape
                except RuntimeError:
                    shape = None  # a strided nested tensor has no shape
                # Hot path: comparing sizes is cheaper than slicing one, and adjacent leaves often have equal shapes.
                if shape is not None and (shape == fitting or shape[:ndim] == size):
                    data[name] = value
                    fitting = shape
                    continue
            if self._sets_fields:
                setattr(self, name, value)
            elif value is not None:
                self._store(td, name, value)
        if lock or schema.options.frozen:
            lock_nodes(td)
        if self._has_post_init:
            self.__post_init__(*init_vars)  # type: ignore[attr-defined]

    def _store(
        self, td: Node, name: str, value: object, prefix: tuple[str, ...] = (), *, non_blocking: bool = False
    ) -> None:
        """Cast, check and store a value, which must not be None, as a field of ``td``."""
        if not isinstance(value, Tensor) or self._schema.converts_tensors:
            value = type(self)._cast(name, value)
            if td.batch_size and is_batch_number(self._schema.hint(name), value):
                value = NonTensorData(value)
        td._set_path(name, value, prefix, non_blocking=non_blocking)

    def _store_all(self, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            if value is not None:
                self._store(self._tensordict, name, value)

    @classmethod
    def _wrap_unchecked(cls, td: object) -> Self:
        """Wrap a collection as an instance without checks, lock or ``__post_init__``."""
        node = new_object(cls)
        object.__setattr__(node, "_tensordict", td)
        return node

    @classmethod
    def _wrap(cls, td: object) -> Self:
        """Wrap the result of an operation, whose keys must be fields: lock it if frozen, and run ``__post_init__``."""
        node = new_object(cls)
        object.__setattr__(node, "_tensordict", td)
        if cls._has_finish:
            node._finish()
        return node

    @classmethod
    def _wrap_stack(cls, td: Any) -> Self:
        # ``__post_init__`` already ran for the members, so it does not run for their stack.
        node = cls._wrap_unchecked(td)
        if cls._schema.options.frozen:
            lock_nodes(td)
        return node

    def _finish(self, *, without_entries: bool = False) -> None:
        """Lock the result of an operation if its class is frozen, and run ``__post_init__`` unless an option disables that."""
        td = self._tensordict
        if self._schema.options.frozen:
            lock_nodes(td)
        if self._has_post_init_for_results:
            for (node,) in self._zip_members():
                # __post_init__ may read any field, so for a result without entries it runs only on request.
                if without_entries or node._children():
                    node.__post_init__()

    @classmethod
    def from_tensordict(
        cls,
        tensordict: Node,
        non_tensordict: Mapping[str, object] | None = None,
        safe: bool | None = None,
    ) -> Self:
        """Wrap a collection as an instance, without copying it.

        A nested TensorDict becomes an instance of the tensorclass that its field is annotated with, if its keys are
        fields of that class.

        Args:
            tensordict: the collection, whose keys are fields; missing fields get their defaults, or are None.
            non_tensordict: more fields, which are set like attributes.
            safe: False skips the check of the keys.

        Raises:
            UnknownFieldError: a key is not a field.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        >>> Point.from_tensordict(TensorDict({"xy": torch.zeros(3, 2)}, batch_size=[3])).batch_size
        torch.Size([3])
        """
        if not isinstance(tensordict, TensorCollection) or isinstance(tensordict, ValueNode):
            raise TypeError(f"from_tensordict takes a collection of entries; got {type(tensordict).__name__}")
        inner = tensordict._inner()
        children = inner._children()
        if safe is not False:
            cls._schema.check_keys(children)
        declared = cls._schema.adopt_all(children) if type(inner) is TensorDict else {}
        if non_tensordict:
            cls._schema.check_keys(non_tensordict)
        if declared:
            inner = inner._with_children({**children, **declared})
        elif non_tensordict:
            inner = inner._shallow_copy()
        if cls._schema.defaulted and not RULES.follows_tensordict:
            inner = cls._add_defaults(inner, {*non_tensordict} if non_tensordict else ())
        node = cls._wrap_unchecked(inner)
        if non_tensordict:
            node._store_all(non_tensordict)
        if declared and tensordict._locked:
            lock_nodes(inner)
        if cls._has_finish:
            node._finish(without_entries=True)
        return node

    @classmethod
    def _add_defaults(cls, inner: Any, provided: Iterable[str]) -> Any:
        """Add the defaults of the fields that are neither in ``inner`` nor in ``provided``, to a shallow copy."""
        values = cls._schema.defaults({*provided, *_keys_anywhere(inner)})
        if not values:
            return inner
        locked, inner = inner._locked, inner._shallow_copy()
        node = cls._wrap_unchecked(inner)
        for name, value in values.items():
            try:
                node._store(inner, name, value)
            except BatchSizeError:
                # A default whose shape does not start with the batch size becomes one value for the whole batch.
                whole = UnbatchedTensor(value) if isinstance(value, Tensor) else NonTensorData(value)
                inner._set_path(name, whole)
        if locked:
            lock_nodes(inner)
        return inner

    @classmethod
    def _wrap_dense(cls, result: object, absent: Iterable[str] = ()) -> Any:
        """Convert a collection to an instance, nested ones to the classes of their fields; fields in ``absent`` are None."""
        if not isinstance(result, TensorDictBase) or isinstance(result, ValueNode):
            return result
        levels = {}
        for name, child in result._children().items():
            wanted = cls._schema.find_class(name)
            if wanted is not None and isinstance(child, (TensorDict, LazyStackedTensorDict)):
                levels[name] = wanted._of_saved(child)
        if levels:
            locked, result = result._locked, result._with_children({**result._children(), **levels})
            if locked:
                lock_nodes(result)
        return cls.from_tensordict(result, dict.fromkeys(absent))

    @classmethod
    def _of_saved(cls, saved: Node) -> Node:
        if isinstance(saved, ValueNode):
            raise TypeError("it has no entries")
        inner = saved._inner()._map_members(lambda node: cls._wrap_dense(node._inner())._inner())
        return cls._wrap_stack(inner)

    @classmethod
    def from_dict(cls, input_dict: Mapping[Any, Any] | Node, **kwargs: Any) -> Self:
        """Build an instance from a mapping; options as for :meth:`TensorCollection.from_dict`.

        As for the constructor, a nested mapping is one value unless its field is annotated as a collection. Missing
        fields get their defaults, or are None.

        Raises:
            UnknownFieldError: a key is not a field.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        ...     info: dict
        >>> Point.from_dict({"xy": torch.zeros(3, 2), "info": {"unit": "m"}}, batch_size=[3]).info
        {'unit': 'm'}
        """
        absent: list[str] = []
        if not isinstance(input_dict, Node):
            cls._schema.check_keys(input_dict)
            absent = [name for name, value in input_dict.items() if value is None]
            input_dict = {
                name: NonTensorData(value)
                if isinstance(value, Mapping)
                and not isinstance(value, Node)
                and collection_class(cls._schema.hint(name)) is None
                else value
                for name, value in input_dict.items()
                if value is not None
            }
        result: Self = cls._wrap_dense(TensorDict.from_dict(input_dict, **kwargs), absent)
        return result

    @classmethod
    def fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """Return the declared fields, as :func:`dataclasses.fields` does.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        >>> [field.name for field in Point.fields()]
        ['xy']
        """
        return dataclasses.fields(cls)

    @classmethod
    def declared_fields(cls) -> dict[str, Any] | None:
        """Return the type per field; ``Optional[X]`` is given as X.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        >>> Point.declared_fields()
        {'xy': <class 'torch.Tensor'>}
        """
        return {name: cls._schema.hint(name) for name in cls._schema.names}

    def _set_child(self, key: str, value: Tensor | Node) -> None:
        if key not in self._schema.names:
            raise self._schema.unknown_field_error([key])
        self._tensordict._set_child(key, value)

    def _assign(self, index: object, value: object, *, non_blocking: bool = False) -> None:
        super()._assign(index, self._read_source(value), non_blocking=non_blocking)

    def _plan_writes(self, writes: Any, index: object, value: object, *place: Any) -> None:
        super()._plan_writes(writes, index, self._read_source(value), *place)

    def _read_source(self, value: object) -> object:
        """Return a value that is written at an index; raise UnknownFieldError if it has a key that is not a field."""
        value = from_any(value) if is_foreign(value) else value
        if isinstance(value, (TensorCollection, Mapping)):
            self._schema.check_keys(value._children() if isinstance(value, TensorCollection) else value)
        return value

    def _set_children(self, values: Mapping[str, Tensor | Node]) -> None:
        self._schema.check_keys(values)
        self._tensordict._set_children(values)

    def _with_children(self, children: Mapping[str, Tensor | Node], **metadata: Any) -> Self:
        inner: Any = self._tensordict._with_children(children, **metadata)
        # If keys are not fields (for example flattened or renamed), return a plain collection so that no entry is lost.
        return self._wrap(inner) if children.keys() <= self._schema.names.keys() else inner

    def _stack_lazily(self, items: Sequence[Node], dim: int, source: tuple[Node, str] | None = None) -> Node:
        self._check_join(items, ())
        inner = self._tensordict
        return self._wrap_stack(inner._stack_lazily([item._inner() for item in items], dim))

    def _wrap_holder(self, node: object) -> TensorClass:
        # It is not a result of an operation, so __post_init__ does not run again.
        return self if node is self._tensordict else self._wrap_unchecked(node)

    def _check_join(self, items: Sequence[Node], path: tuple[str, ...]) -> None:
        for item in items:
            if type(item) is not type(self):
                raise _join_error(self, item, path)

    def _shallow_copy(self) -> Self:
        # With the same leaves it is not a new result, so __post_init__ does not run again.
        return self._wrap_unchecked(self._tensordict._shallow_copy())

    def _join(self, items: Sequence[Node], plan: Any, path: tuple[str, ...] = ()) -> Self:
        if plan.alike:
            self._check_join(items, path)
        inner = with_none([item._inner() for item in items])
        return self._wrap(inner[0]._join(inner, plan, path))

    def _get_join_entries(self, first: Node, plan: Any, path: tuple[str, ...]) -> dict[str, Tensor | Node]:
        if plan.alike:
            raise _join_error(first, self, path)
        return super()._get_join_entries(first, plan, path)

    def get(self, key: NestedKey, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor, collection or non-tensor value of a field, or the default if it is None.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        ...     label: str = None
        >>> Point(torch.zeros(2), label="a").get("label")
        'a'
        """
        entry = self._tensordict.get(key, *args, **kwargs)
        if entry is None and key in self._schema.names:
            return self._get_missing(key)
        return entry._unwrap() if isinstance(entry, TensorCollection) else entry

    def _set_path(
        self, key: NestedKey, value: object, prefix: tuple[str, ...] = (), *, non_blocking: bool = False
    ) -> None:
        path = (key,) if type(key) is str else unravel_key_to_tuple(key)
        name = path[0]
        if name not in self._schema.names:
            raise self._schema.unknown_field_error([name])
        if len(path) > 1:
            self._tensordict._set_path(path, value, prefix, non_blocking=non_blocking)
        elif value is None:
            self._clear_field(name)
        else:
            self._store(self._tensordict, name, value, prefix, non_blocking=non_blocking)

    def replace(self, *args: object, **kwargs: object) -> Self:
        """Return a copy with other values for some fields, on which ``__post_init__`` runs.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        >>> Point(torch.zeros(2)).replace(xy=torch.ones(2)).xy
        tensor([1., 1.])
        """
        replaced = super().replace(*args, **kwargs)
        return self if replaced is self else self._wrap(replaced._tensordict)

    @property
    def stack_dim(self) -> int:
        """The stack dim of an instance that is a lazy stack; AttributeError for other instances."""
        stack: Any = self._tensordict
        dim: int = stack.stack_dim
        return dim

    @property
    def tensordicts(self) -> list[Any]:
        """The members of an instance that is a lazy stack, as instances of this class; else AttributeError."""
        stack: Any = self._tensordict
        return [self._wrap_unchecked(member) for member in stack.tensordicts]

    def append(self, tensordict: Node) -> None:
        """Append a member to an instance that is a lazy stack; see :meth:`insert`."""
        self._get_growable_stack([tensordict]).append(tensordict._inner())

    def insert(self, index: int, tensordict: Node) -> None:
        """Insert a member into an instance that is a lazy stack.

        Args:
            index: position of the member before which the new one is inserted.
            tensordict: an instance of this class.

        Raises:
            StructureError: the instance is not a lazy stack, or the member is of another class.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        >>> points = Point.lazy_stack([Point(torch.zeros(2))])
        >>> points.insert(0, Point(torch.ones(3)))
        >>> points[0].xy
        tensor([1., 1., 1.])
        """
        self._get_growable_stack([tensordict]).insert(index, tensordict._inner())

    def extend(self, tensordict: TensorCollection | Iterable[TensorCollection]) -> None:
        """Append members to an instance that is a lazy stack; see :meth:`insert`.

        Args:
            tensordict: instances of this class, or one instance that is unbound along the stack dim.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        >>> points = Point.lazy_stack([Point(torch.zeros(2)), Point(torch.zeros(3))])
        >>> points.extend([Point(torch.zeros(4))])
        >>> points.batch_size
        torch.Size([3])
        """
        items = [tensordict] if isinstance(tensordict, TensorCollection) else list(tensordict)
        inner = [item._inner() for item in items]
        self._get_growable_stack(items).extend(
            inner[0] if isinstance(tensordict, TensorCollection) else inner
        )

    def _get_growable_stack(self, items: Sequence[Node]) -> Any:
        """Return the lazy stack of this instance; raise StructureError if it is not one, or if ``items`` do not fit."""
        if not hasattr(self._tensordict, "tensordicts"):
            raise StructureError(
                f"only a lazy stack can be extended; this {type(self).__name__} holds a "
                f"{type(self._tensordict).__name__}: use torch.cat()"
            )
        self._check_join(items, ())
        return self._tensordict

    def unlock_(self) -> Self:
        """Allow structural changes again; see :meth:`TensorCollection.unlock_`.

        Raises:
            FrozenInstanceError: the class is frozen.

        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        >>> Point(torch.zeros(2), lock=True).unlock_().is_locked
        False
        """
        if self._schema.options.frozen:
            raise FrozenInstanceError(f"cannot unlock: {type(self).__name__} is frozen")
        return super().unlock_()

    def _print_node(self) -> PrintedNode:
        present, schema = self._tensordict._children(), self._schema
        absent = [name for name in schema.names if name not in present]
        return self._tensordict._print_node().of_class(absent, schema.unprinted)

    def _get_missing(self, name: str) -> object:
        """Return the value of a field without an entry: None, or a list if only some members of a stack have it."""
        members = self.tensordicts if hasattr(self._tensordict, "tensordicts") else ()
        values = [getattr(member, name) for member in members]
        return None if all(value is None for value in values) else values

    def _absent_fields(self) -> list[str]:
        """Return the fields that are None although they have defaults."""
        present = _keys_anywhere(self._tensordict)
        return [slot.name for slot in self._schema.defaulted if slot.name not in present]

    def _clear_field(self, name: str) -> None:
        """Set a field to None, by removing its entry from the collection or from all members of a lazy stack."""
        stacks = LazyStackedTensorDict
        nodes = expand(
            [self._tensordict._inner()],
            lambda td: [member._inner() for member in td.tensordicts] if isinstance(td, stacks) else (),
        )
        holders = [td for td in nodes if not isinstance(td, stacks) and name in td._children()]
        for td in holders:
            check_unlocked(td, f"remove key {name!r}")
        for td in holders:
            if name in td._children():  # a member may occur twice
                td._del_child(name)

    if not TYPE_CHECKING:  # without this, type checkers could not report misspelt attributes

        def __setattr__(self, name: str, value: object) -> None:
            """Set a field or a settable property; raise UnknownFieldError for any other name."""
            schema = self._schema
            if name in _STATE:
                object.__setattr__(self, name, value)
            elif name in schema.names:
                if schema.options.frozen:
                    raise FrozenInstanceError(
                        f"cannot assign to field {name!r}: {type(self).__name__} is frozen"
                    )
                if isinstance(value, Tensor) and not schema.converts_tensors:
                    # Hot path: a tensor needs no cast, so skip the general setter.
                    self._tensordict._set_path(name, value)
                else:
                    self._set_path(name, value)
            elif hasattr(type(getattr(type(self), name, None)), "__set__"):
                if schema.options.frozen and not name.startswith("_"):
                    raise FrozenInstanceError(f"cannot assign to {name!r}: {type(self).__name__} is frozen")
                super().__setattr__(name, value)
            else:
                raise schema.unknown_field_error([name])

        def __delattr__(self, name: str) -> None:
            """Set a field to None."""
            if name not in self._schema.names:
                raise self._schema.unknown_field_error([name])
            if self._schema.options.frozen:
                raise FrozenInstanceError(f"cannot delete field {name!r}: {type(self).__name__} is frozen")
            self._clear_field(name)

        def __getattr__(self, name: str) -> Any:
            """Raise UnknownFieldError with a suggestion; called only for attributes that were not found."""
            if name == "_tensordict":
                # A user-defined __init__ may set fields before the collection exists.
                self._tensordict = make_dense({}, torch.Size(), None, None)
                return self._tensordict
            if any(name in base.__dict__ for base in type(self).__mro__):
                # A property raised AttributeError, so Python called __getattr__: read it again to raise the original error.
                return object.__getattribute__(self, name)
            if torch.compiler.is_compiling():
                # torch.compile traces hasattr() and getattr() with a default only for a plain AttributeError.
                raise AttributeError(f"{type(self).__name__} has no field {name!r}")
            raise self._schema.unknown_field_error([name])


def _keys_anywhere(td: Node) -> set[str]:
    """Return the keys of a collection; for a lazy stack, the union of the keys of its members."""
    return {key for (holder,) in td._zip_members() for key in holder._children()}


def _join_error(left: Node, other: Node, path: tuple[str, ...]) -> StructureError:
    if isinstance(other, ValueNode):
        return kind_mismatch_error(left, other, path)
    where = f" at {show_path(path)}" if path else ""
    return StructureError(
        f"cannot join a {type(left).__name__} and a {type(other).__name__}{where}: convert one of them, with "
        "from_tensordict() or to_tensordict()"
    )
