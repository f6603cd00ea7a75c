"""The methods that packages add to every collection: their names, their placeholders, and the function that attaches them.

Before the package is registered, access to one of its methods raises :class:`~td_core.errors.MissingPluginError`. A
registered function hides the placeholder, so a call has no overhead.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Iterator

import torch

from ..errors import MissingPluginError, PluginError
from .methods import DeclaredMethods

__all__ = [
    "METHODS", "PROPERTIES", "PROTOCOLS", "PROVIDED", "Placeholder", "SiblingMethods", "attach", "detach",
]  # fmt: skip

#: The methods that each package provides; ``methods.pyi`` has their signatures.
PROVIDED = {
    "td-memmap": (
        "memmap", "memmap_", "memmap_like", "load_memmap", "load_memmap_", "memmap_refresh_", "make_memmap",
        "make_memmap_from_storage", "make_memmap_from_tensor", "is_memmap", "saved_path",
    ),
    "td-tensorclass": (
        "attrs", "get_non_tensor", "set_non_tensor", "is_non_tensor", "non_tensor_items", "filter_non_tensor_data",
        "from_dataclass",
    ),
    "td-distributed": (
        "consolidate", "is_consolidated", "from_consolidated", "send", "recv", "isend", "irecv", "init_remote",
        "from_remote_init", "broadcast", "scatter", "gather_and_stack", "all_gather", "all_reduce", "reduce",
    ),
    "td-safetensors": ("to_safetensors", "from_safetensors"),
    "td-hdf5": ("to_h5", "from_h5"),
    "td-zarr": ("to_zarr", "from_zarr"),
    "td-arrow": (
        "to_arrow", "from_arrow", "to_parquet", "from_parquet", "to_pandas", "from_pandas", "to_csv", "from_csv", "to_json",
        "from_json", "to_mds", "from_mds",
    ),
    "td-redis": ("to_store",),
}  # fmt: skip
#: The methods that other libraries look for, and their packages. They have no placeholder, so that no collection has the
#: attribute without the package.
PROTOCOLS = {"__arrow_c_stream__": "td-arrow", "__arrow_c_array__": "td-arrow"}
#: The methods that are properties.
PROPERTIES = frozenset(["saved_path"])
#: The package of each method.
METHODS = {name: distribution for distribution, names in PROVIDED.items() for name in names}
#: The package of each declared method.
_OWNERS = {**METHODS, **PROTOCOLS}


class Placeholder:
    """Placeholder of a method whose package is not registered.

    Access through a collection raises :class:`~td_core.errors.MissingPluginError`, an ``AttributeError``, so ``hasattr``
    returns False.

    >>> class Collection:
    ...     '''Class with the placeholder.'''
    >>> Collection.shine = Placeholder(Collection, "shine", "td-example")
    >>> class Example(Collection):
    ...     '''Subclass, such as a kind of collection.'''
    >>> Example().shine()
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: Example.shine() is provided by the package 'td-example', which is
    not installed: install it from where its authors publish it
    >>> hasattr(Example(), "shine")
    False
    """

    def __init__(self, owner: type, name: str, distribution: str) -> None:
        self.owner = owner
        self.__name__ = name
        self.distribution = distribution

    def __get__(self, instance: object, owner: type | None = None) -> Placeholder:
        cls = owner if owner is not None else type(instance)
        if cls is self.owner:
            return self
        call = "" if self.__name__ in PROPERTIES else "()"
        message = f"{cls.__name__}.{self.__name__}{call} is provided by " + MissingPluginError.describe(
            self.distribution
        )
        # torch.compile evaluates hasattr() over a descriptor only when it raises AttributeError itself.
        raise AttributeError(message) if torch.compiler.is_compiling() else MissingPluginError(message)


for _name, _distribution in METHODS.items():
    setattr(DeclaredMethods, _name, Placeholder(DeclaredMethods, _name, _distribution))


class SiblingMethods(DeclaredMethods):
    """The methods that packages of the project provide; other plugins add theirs here."""

    __slots__ = ()


def attach(name: str, member: object, distribution: str) -> None:
    """Add a function, classmethod or property to every collection.

    Raises PluginError if the name is not public, shadows a member, or is one of another package.
    """
    if name in _OWNERS:
        _check_provided(name, distribution)
    else:
        _check_new(name, member)
    setattr(SiblingMethods, name, member)


def detach(name: str) -> None:
    """Remove an attached member."""
    delattr(SiblingMethods, name)


def _check_provided(name: str, distribution: str) -> None:
    if distribution != _OWNERS[name]:
        raise PluginError(f"the method {name!r} is declared for the package {_OWNERS[name]!r} alone")
    if name in vars(SiblingMethods):
        raise PluginError(f"the method {name!r} is already provided")


def _check_new(name: str, member: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name[0] == "_":
        raise PluginError(f"the method name {name!r} is not a public Python identifier")
    if not isinstance(member, (classmethod, staticmethod, property)) and not inspect.isfunction(member):
        raise PluginError(
            f"the method {name!r} is a {type(member).__name__}; it must be a function, "
            "classmethod, staticmethod or property"
        )
    for base in dict.fromkeys(base for cls in _with_subclasses(SiblingMethods) for base in cls.__mro__):
        if name in vars(base):
            raise PluginError(f"the method name {name!r} would shadow {base.__qualname__}.{name}")


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)
