"""The names of the methods that packages of the project provide, and what a method is without its package."""

from __future__ import annotations

import torch

from ..errors import MissingPluginError

__all__ = ["METHODS", "PROPERTIES", "PROTOCOLS", "PROVIDED", "Placeholder"]

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
}  # fmt: skip
#: The methods that other libraries look for, and their packages. They have no placeholder, so that no collection has the
#: attribute without the package.
PROTOCOLS = {"__arrow_c_stream__": "td-arrow", "__arrow_c_array__": "td-arrow"}
#: The methods that are properties.
PROPERTIES = frozenset(["saved_path"])
#: The package of each method.
METHODS = {name: distribution for distribution, names in PROVIDED.items() for name in names}


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
