"""Turn a subclass of TensorClass into a tensorclass: build schema, casts and properties from its annotations."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from typing import Any

from torch import Tensor

from td_core import TensorCollection
from td_core.spi import as_batch_size, as_device, make_dense

from ._casts import make_cast
from ._registration import register_class
from ._schema import ALLOWED, RESERVED, Options, Schema, annotations_of, get_local_names, is_tensorclass


@dataclasses.dataclass
class _Arguments:
    """The arguments beside the fields with which ``dataclasses.replace`` calls a class."""

    batch_size: dataclasses.InitVar[object] = None
    device: dataclasses.InitVar[object] = None
    names: dataclasses.InitVar[object] = None


class _Fields:
    """The attribute ``__dataclass_fields__``: of an instance, it also has the arguments that ``replace`` must pass on."""

    def __init__(self, fields: dict[str, dataclasses.Field[Any]]) -> None:
        self._fields = fields
        self._named = {**fields, **_Arguments.__dataclass_fields__}
        self._unnamed = {name: field for name, field in self._named.items() if name != "names"}

    def __get__(self, instance: Any, owner: type) -> dict[str, dataclasses.Field[Any]]:
        if instance is None:
            return self._fields
        # Names that are all None would have to be as many as the dims of another batch size.
        return self._unnamed if instance._names is None else self._named


def declare(cls: Any, root: Any, provided: Mapping[str, object], frame: Any) -> None:
    """Add schema, cast, properties and constructor to a new TensorClass subclass; options that are None are inherited."""
    inherited = cls._schema.options if is_tensorclass(cls) else Options()
    options = inherited.merge(provided)
    _keep_defaults(cls, root)
    written_doc = cls.__dict__.get("__doc__")
    dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=options.kw_only)(cls)
    _drop_generated(cls, root)
    # Annotations may contain local variables of ``frame``, the function in which the class is defined.
    schema = Schema(cls, options, get_local_names(cls, frame))
    _check_names(cls, root, schema)
    cls.__dataclass_fields__ = _Fields(cls.__dataclass_fields__)
    cls._schema = schema
    cls._cast = staticmethod(make_cast(schema))
    cls._has_post_init = hasattr(cls, "__post_init__")
    cls._has_post_init_for_results = (
        cls._has_post_init and not options.skip_post_init_on_rebuild and not schema.init_vars
    )
    # As in a dataclass, the constructor of a frozen class does not call __setattr__.
    cls._sets_fields = cls.__setattr__ is not root.__setattr__ and not options.frozen
    cls._has_finish = options.frozen or cls._has_post_init_for_results
    for name in schema.names:
        setattr(cls, name, _make_property(name))
    if "__init__" in cls.__dict__:
        cls.__init__ = _wrap_init(cls.__init__)
    else:
        # Use the __init__ of the nearest tensorclass: that of a plain base class may come first in the MRO.
        maker = next(item for item in cls.__mro__ if issubclass(item, root) and "__init__" in item.__dict__)
        cls.__init__ = maker.__init__
    if cls.__init__ is root.__init__:
        cls.__signature__ = schema.signature()
    if written_doc is None:
        cls.__doc__ = f"{cls.__name__}{schema.signature()}"
    register_class(cls)


def _keep_defaults(cls: type[TensorCollection], root: TensorCollection) -> None:
    """Set explicit defaults for annotated fields, so that ``dataclass`` ignores base attributes of the same name."""
    inherited = getattr(cls, "__dataclass_fields__", {})
    for name in annotations_of(cls):
        if name in cls.__dict__:
            continue
        if name in inherited:
            default = inherited[name].default
            setattr(cls, name, dataclasses.field() if default is MISSING else default)
        elif hasattr(root, name):
            # dataclass would take a member of collections, such as ``data``, as the default of the field.
            setattr(cls, name, dataclasses.field())


def _wrap_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a user-defined ``__init__`` so that it also accepts batch_size, device, names and lock."""
    parameters = inspect.signature(init).parameters
    passed_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    own = {"batch_size", "device", "names", "lock"} - parameters.keys()

    @functools.wraps(init)
    def construct(self: Any, *args: object, **kwargs: Any) -> None:
        provided = {name: kwargs[name] for name in own & kwargs.keys() if kwargs[name] is not None}
        if not passed_on:
            kwargs = {name: value for name, value in kwargs.items() if name not in own}
        if provided:
            # Create the collection first, so that field assignments use this batch; super().__init__() may replace it.
            size = as_batch_size(provided.get("batch_size"))
            device = as_device(provided["device"]) if "device" in provided else None
            object.__setattr__(self, "_tensordict", make_dense({}, size, device, None))
        init(self, *args, **kwargs)
        if "batch_size" in provided and self.batch_size != size:
            self.batch_size = size
        if "device" in provided and self.device != device:
            object.__setattr__(self, "_tensordict", self._tensordict.to(device))
        if "names" in provided:
            self.names = provided["names"]
        if provided.get("lock"):
            self.lock_()

    return construct


def _drop_generated(cls: type[TensorCollection], root: Any) -> None:
    """Restore the tensorclass ``__repr__`` and ``__eq__`` where ``dataclass`` generated them for a plain base."""
    for base in cls.__mro__[1:]:
        if "__dataclass_params__" in base.__dict__ and not issubclass(base, root):
            for name in ("__repr__", "__eq__"):
                if name in base.__dict__ and name not in cls.__dict__:
                    setattr(cls, name, getattr(root, name))


def _check_names(cls: type[TensorCollection], root: TensorCollection, schema: Schema) -> None:
    for name in schema.names:
        never = name in RESERVED
        if never or (not schema.options.shadow and name not in ALLOWED and hasattr(root, name)):
            raise AttributeError(
                f"{cls.__name__}: the field {name!r} would hide the {name!r} of a collection; rename it"
                + ("" if never else ", or declare the class with shadow=True")
            )


def _make_property(name: str) -> property:
    def read(self: Any) -> object:
        try:
            child = self._tensordict._children()[name]
        except KeyError:
            return self._get_missing(name)
        if isinstance(child, Tensor):
            return child
        # A pytree function may have put another object in place of a leaf.
        return child._unwrap() if isinstance(child, TensorCollection) else child

    def write(self: object, value: object) -> None:
        self.__setattr__(name, value)

    return property(read, write, doc=f"The field {name!r}.")
