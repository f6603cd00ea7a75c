"""TypedTensorDict: a TensorDict with declared keys."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from functools import partial
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, get_origin, get_type_hints

from torch import Tensor, nn

from td_core import LazyStackedTensorDict, TensorCollection, TensorDict, TensorDictBase
from td_core.spi import EntrySchema, Node, make_dense
from td_core.typing import BatchSize, DeviceType, NestedKey

from ._schema import ALLOWED, RESERVED, annotations_of, collection_class, make_bracketed
from ._typing import BatchSizeArgument, DeviceArgument, NamesArgument, dataclass_transform
from ._value_nodes import ValueNode

if TYPE_CHECKING:
    from typing_extensions import Self


#: Cache of the classes of lazy stacks of a class.
_stack_classes: dict[type, object] = {}


class _TypedStack(LazyStackedTensorDict):
    """A lazy stack of instances of a TypedTensorDict, and an instance of that class for ``isinstance``."""

    __slots__ = ()

    _typed: ClassVar[Any]

    def unlock_(self) -> Self:
        """Allow structural changes again; raise FrozenInstanceError if the class of the members is frozen."""
        self._typed._refuse_unlock()
        return super().unlock_()

    def _stack_lazily(self, items: Sequence[Node], dim: int, source: tuple[Node, str] | None = None) -> Any:
        if all(isinstance(item, self._typed) for item in items):
            return type(self)(*items, stack_dim=dim)
        return super()._stack_lazily(items, dim, source)


class _KeySchema(EntrySchema):
    """The annotations of a TypedTensorDict, which name the classes of its nodes."""

    __slots__ = ("_cls",)

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def find_class(self, key: str) -> type | None:
        try:
            result: type | None = collection_class(get_type_hints(self._cls).get(key))
        except (NameError, TypeError, AttributeError):
            return None  # the annotation contains an undefined name
        return result


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
class _TypedMeta(ABCMeta):
    """Metaclass that creates classes without ``__dict__``, so that setting a misspelt attribute raises."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, object], **kwargs: object
    ) -> Any:
        namespace.setdefault("__slots__", ())
        return super().__new__(mcs, name, bases, namespace, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return True for an instance, and for a lazy stack of instances."""
        if super().__instancecheck__(instance):
            return True
        return isinstance(instance, _TypedStack) and issubclass(instance._typed, cls)

    @property
    def _stack_class(cls) -> Any:
        """The class of lazy stacks of this class, which has the declared keys as attributes."""
        if cls not in _stack_classes:
            keys = sorted(cls.__expected_keys__)  # type: ignore[attr-defined]
            # A pickle finds the class through this property.
            namespace = {
                "__slots__": (),
                "__module__": cls.__module__,
                "__qualname__": f"{cls.__qualname__}._stack_class",
                "_typed": cls,
                **_list_members(cls),
                **{key: _accessor(key, partial(_get_default_of_member, key)) for key in keys},
            }
            _stack_classes[cls] = type(f"{cls.__name__}Stack", (_TypedStack,), namespace)
        return _stack_classes[cls]


class TypedTensorDict(TensorDict, metaclass=_TypedMeta):
    """A TensorDict whose subclasses declare keys, which are attributes too.

    A declared key is required, unless it is annotated as ``NotRequired`` or has a default or default factory, as in
    :func:`dataclasses.field`. If the entry is missing, the attribute returns the default, or calls the factory. Other
    keys may be added later.

    The options are class arguments or are given in brackets: ``class Data(TypedTensorDict, frozen=True)``,
    ``class Data(TypedTensorDict["frozen", "shadow"])``. Instances of a ``frozen`` class are locked and cannot be unlocked,
    but results of operations on them are not locked. Keys of a ``shadow`` class may hide members of a TensorDict.

    Args:
        source: a mapping or collection with the entries, to which ``kwargs`` are added.
        batch_size, device, names, lock: as for :class:`TensorDict`.
        **kwargs: the entries.

    Raises:
        TypeError: a required key is missing, or an undeclared one is given; or the class has an unknown option.

    >>> class Data(TypedTensorDict):
    ...     obs: Tensor
    ...     reward: Tensor = None
    >>> data = Data(obs=torch.zeros(3, 4), batch_size=[3])
    >>> data[0].obs.shape, data["obs"].shape, data.reward
    (torch.Size([4]), torch.Size([3, 4]), None)
    """

    if TYPE_CHECKING:
        # Declare the other constructor arguments for type checkers; their types differ between writing and reading.
        batch_size: BatchSizeArgument = dataclasses.field(default=None)  # type: ignore[arg-type,override]
        device: DeviceArgument = dataclasses.field(default=None)  # type: ignore[arg-type]
        names: NamesArgument = dataclasses.field(default=None)  # type: ignore[arg-type,override]
        lock: dataclasses.InitVar[bool] = dataclasses.field(default=False)

    _frozen: ClassVar[bool] = False
    _shadow: ClassVar[bool] = False
    __required_keys__: ClassVar[frozenset[str]] = frozenset()
    __optional_keys__: ClassVar[frozenset[str]] = frozenset()
    __expected_keys__: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(
        cls, *, frozen: bool | None = None, shadow: bool | None = None, **kwargs: object
    ) -> None:
        _check_options(kwargs)
        super().__init_subclass__()
        cls._schema = _KeySchema(cls)
        cls._frozen = cls._frozen if frozen is None else frozen
        cls._shadow = cls._shadow if shadow is None else shadow
        required, optional = set(cls.__required_keys__), set(cls.__optional_keys__)
        for name, hint in annotations_of(cls).items():
            qualifier = _get_qualifier(hint)
            if qualifier == "ClassVar":
                continue
            default, factory = _parse_default(cls.__dict__.get(name, MISSING))
            never = name.startswith("_") or name in RESERVED
            if never or (hasattr(TensorDict, name) and name not in ALLOWED and not cls._shadow):
                raise AttributeError(
                    f"{cls.__name__}: the key {name!r} would hide the {name!r} of a TensorDict; rename it"
                    + ("" if never else ", or declare the class with shadow=True")
                )
            needed = default is MISSING and factory is None and qualifier != "NotRequired"
            (required if needed else optional).add(name)
            (optional if needed else required).discard(name)
            setattr(cls, name, _accessor(name, partial(_get_default, name, default, factory)))
        cls.__required_keys__, cls.__optional_keys__ = frozenset(required), frozenset(optional)
        cls.__expected_keys__ = cls.__required_keys__ | cls.__optional_keys__

    def __class_getitem__(cls, parameters: object) -> Any:
        """Return a cached subclass with the named options set to True; other parameters give a generic alias."""
        names = parameters if isinstance(parameters, tuple) else (parameters,)
        if not all(isinstance(name, str) for name in names):
            return GenericAlias(cls, parameters)
        _check_options(names)
        return make_bracketed(cls, *names)

    def __init__(
        self,
        source: Mapping[str, Any] | Node | None = None,
        /,
        *,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
        names: Sequence[str | None] | None = None,
        lock: bool = False,
        **kwargs: object,
    ) -> None:
        extra = [name for name in kwargs if name not in self.__required_keys__ | self.__optional_keys__]
        if extra:
            raise TypeError(
                f"{type(self).__name__}() got the undeclared keys {extra}; declared: "
                f"{sorted(self.__required_keys__ | self.__optional_keys__)}"
            )
        provided: Any = {} if source is None else source
        if not isinstance(provided, (Mapping, TensorCollection)):
            raise TypeError(
                f"{type(self).__name__}() takes a mapping or a collection; got {type(source).__name__}"
            )
        entries = {**dict(provided.items()), **kwargs}
        self._require(entries)
        super().__init__(
            entries, batch_size=batch_size, device=device, names=names, lock=lock or self._frozen
        )

    def unlock_(self) -> Self:
        """Allow structural changes again; see :meth:`TensorCollection.unlock_`.

        Raises:
            FrozenInstanceError: the class is frozen.

        >>> class Data(TypedTensorDict):
        ...     obs: Tensor
        >>> Data(obs=torch.zeros(2), lock=True).unlock_().is_locked
        False
        """
        self._refuse_unlock()
        return super().unlock_()

    @classmethod
    def _refuse_unlock(cls) -> None:
        if cls._frozen:
            raise dataclasses.FrozenInstanceError(f"cannot unlock: {cls.__name__} is frozen")

    @classmethod
    def _require(cls, keys: Any) -> None:
        missing = sorted(name for name in cls.__required_keys__ if name not in keys)
        if missing:
            raise TypeError(f"{cls.__name__} misses the required keys {missing}")

    @classmethod
    def from_tensordict(cls, tensordict: Node, *, check: bool = True) -> Self:
        """Build a typed view of a collection: an entry that is set or removed in one changes in the other.

        The view of a lazy stack is a lazy stack of views of its members, with the declared keys as attributes and the methods
        of the class; ``isinstance`` recognises it. Batch size, names and lock are those of the collection at the time of the
        call, and so is what a package attached to it, such as a save. The entries of parameters are copied into a new dict.

        Args:
            tensordict: the collection.
            check: raise if a required key is missing; False permits entries that are set later.

        Raises:
            TypeError: a required key is missing, and ``check`` is True.

        >>> class Data(TypedTensorDict):
        ...     obs: Tensor
        >>> source = TensorDict({"obs": torch.zeros(3)}, batch_size=[3])
        >>> Data.from_tensordict(source).obs = torch.ones(3)
        >>> source["obs"]
        tensor([1., 1., 1.])
        """
        if check:
            cls._require(tensordict.keys())
        inner: Any = tensordict._inner()
        if isinstance(inner, LazyStackedTensorDict) and inner.tensordicts:
            view: Self = cls._view_stack(inner)
            return view
        shared = isinstance(inner, TensorDict) and not isinstance(tensordict, nn.Module)
        entries = inner._children() if shared else dict(inner._children())
        is_linked = isinstance(inner, TensorDictBase) and not shared and not isinstance(tensordict, nn.Module)
        if is_linked and type(inner._children()) is dict:
            entries = inner._children()
        made: Any = make_dense(
            entries,
            inner.batch_size,
            inner.device,
            inner._names,
            _make_linked_class(cls) if is_linked else cls,
        )
        if is_linked:
            made._source = inner
        if shared and inner._locked:
            # Unlocking the view alone would allow changes of the locked collection.
            made._locked, made._lock_parents = inner._locked, [weakref.ref(inner)]
            made._backends = inner._backends
        if cls._frozen:
            made.lock_()
        result: Self = made
        return result

    def _stack_lazily(self, items: Sequence[Node], dim: int, source: tuple[Node, str] | None = None) -> Any:
        if all(isinstance(item, type(self)) for item in items):
            return type(self)._stack_class(*items, stack_dim=dim)
        return super()._stack_lazily(items, dim, source)

    @classmethod
    def _view_stack(cls, stack: Any) -> Any:
        members = [cls.from_tensordict(member, check=False) for member in stack.tensordicts]
        made = cls._stack_class(
            *members,
            stack_dim=stack.stack_dim,
            hook_out=stack.hook_out,
            hook_in=stack.hook_in,
            stack_dim_name=stack.names[stack.stack_dim],
        )
        return made.lock_() if stack.is_locked or cls._frozen else made

    @classmethod
    def _of_saved(cls, saved: Node) -> Node:
        if isinstance(saved, ValueNode):
            raise TypeError("it has no entries")
        inner = saved._inner()
        levels = {}
        for key, child in inner._children().items() if isinstance(inner, TensorDict) else ():
            wanted: Any = None if isinstance(child, (Tensor, ValueNode)) else cls._schema.find_class(key)
            if wanted is not None and isinstance(child, TensorDictBase):
                levels[key] = wanted._of_saved(child)
        if levels:
            inner = inner._with_children({**inner._children(), **levels})
        made: Node = cls._wrap_dense(inner)
        if saved._locked is True:
            made.lock_()
        return made

    @classmethod
    def _wrap_dense(cls, result: Any) -> Any:
        made = isinstance(result, TensorDictBase) and not isinstance(result, (ValueNode, cls))
        return cls.from_tensordict(result) if made else result


def _list_members(cls: type) -> dict[str, object]:
    """Return what subclasses of TypedTensorDict define and a lazy stack lacks, such as methods."""
    bases = [
        base for base in cls.__mro__ if issubclass(base, TypedTensorDict) and base is not TypedTensorDict
    ]
    return {
        name: value
        for base in reversed(bases)
        for name, value in vars(base).items()
        if name in ("_frozen", "_shadow")
        or not (name.startswith("__") or hasattr(LazyStackedTensorDict, name))
    }


class _LinkedSchema(_KeySchema):
    """The declared keys of a view, whose entries are stored by its source."""

    is_in_memory = False


class _Linked:
    """Members of a view of a collection that is no TensorDict: the source stores the entries, maybe in a file."""

    __slots__ = ()

    def _find_source(self) -> Any:
        """Return the source; None for results of operations."""
        return getattr(self, "_source", None)

    def _edit_together(self) -> Any:
        source = self._find_source()
        return super()._edit_together() if source is None else source._edit_together()  # type: ignore[misc]

    def _set_path(self, key: NestedKey, value: object, *args: Any, **kwargs: Any) -> None:
        # Without the fast path of a TensorDict, which stores a leaf in memory.
        TensorDictBase._set_path(self, key, value, *args, **kwargs)  # type: ignore[arg-type]

    def _set_child(self, key: str, value: object) -> None:
        source = self._find_source()
        if source is not None:
            source._set_child(key, value)
            value = source._get_child(key)
        super()._set_child(key, value)  # type: ignore[misc]

    def _add_child(self, key: str, value: object) -> Any:
        return TensorDictBase._add_child(self, key, value)  # type: ignore[arg-type]

    def _set_children(self, values: Mapping[str, object]) -> None:
        for key, value in values.items():
            self._set_child(key, value)

    def _del_child(self, key: str) -> None:
        source = self._find_source()
        if source is not None:
            source._del_child(key)
        if source is None or key in self._children():  # type: ignore[attr-defined]
            super()._del_child(key)  # type: ignore[misc]


@functools.cache
def _make_linked_class(cls: Any) -> Any:
    """Return the subclass of a typed class, under its name, whose instances pass their entries on to a source."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__slots__": ("_source",)}
    made: Any = type(cls)(cls.__name__, (_Linked, cls), names)
    made._schema = _LinkedSchema(made)
    return made


def _get_qualifier(hint: object) -> str:
    """Return the outermost name of an annotation, such as ``ClassVar``."""
    # NotRequired and ClassVar may come from typing or typing_extensions, or be part of a string annotation.
    text = str(hint if isinstance(hint, str) else get_origin(hint)).partition("[")[0]
    return text.rpartition(".")[2]


def _parse_default(default: object) -> tuple[object, Callable[[], object] | None]:
    """Return the default of a key, or MISSING, and its factory, or None."""
    if not isinstance(default, dataclasses.Field):
        return default, None
    return default.default, None if default.default_factory is MISSING else default.default_factory


def _check_options(names: Iterable[str]) -> None:
    unknown = [name for name in names if name not in ("frozen", "shadow")]
    if unknown:
        raise TypeError(
            f"a TypedTensorDict has no option {', '.join(map(repr, unknown))}; options: ['frozen', 'shadow'], those of a "
            "TensorClass convert values too"
        )


def _accessor(name: str, get_default: Callable[[object], object]) -> property:
    def read(self: Any) -> object:
        try:
            entry = self._children()[name]
        except KeyError:
            return get_default(self)
        if isinstance(entry, Tensor):
            return entry
        return entry._unwrap() if isinstance(entry, TensorCollection) else entry

    def write(self: Any, value: object) -> None:
        if getattr(self, "_frozen", False):
            raise dataclasses.FrozenInstanceError(
                f"cannot assign to {name!r}: {type(self).__name__} is frozen"
            )
        self._set_path(name, value)

    return property(read, write, doc=f"The entry {name!r}.")


def _get_default(name: str, default: object, factory: Callable[[], object] | None, node: Node) -> object:
    """Return the default of a declared key; AttributeError if it has none."""
    if factory is not None:
        return factory()
    if default is MISSING:
        raise AttributeError(f"the {type(node).__name__} has no entry {name!r}") from None
    return default


def _get_default_of_member(name: str, stack: Any) -> object:
    return getattr(stack.tensordicts[0], name)
