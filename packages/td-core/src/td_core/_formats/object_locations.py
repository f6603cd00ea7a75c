"""The registry of functions that open the stores of URLs, and which locations are object stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import MissingPluginError, PluginError
from ..typing import ObjectLocation, ObjectStore
from .locations import Location, as_location, get_scheme

#: Opens the store of a URL with the storage options of an operation.
StoreFactory = Callable[[str, Mapping[str, object]], ObjectStore]

_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]+")
#: The package that opens common URLs, and a scheme that it has.
_PROVIDER, _COMMON = "td-remote", "s3"


class Stores:
    """Registry of functions that open stores, by the scheme of their URLs."""

    def __init__(self) -> None:
        self._by_scheme: dict[str, StoreFactory] = {}

    def add(self, scheme: str, factory: StoreFactory) -> None:
        """Register the function for a scheme; PluginError if it is taken or malformed, or local paths have it."""
        if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme) or scheme == "file":
            raise PluginError(
                f"the scheme of a store is two or more letters in lower case, and not 'file'; got {scheme!r}"
            )
        if not callable(factory):
            raise PluginError(
                f"a function of (URL, options) opens the stores of the scheme {scheme!r}; got {factory!r}"
            )
        if scheme in self._by_scheme:
            raise PluginError(f"the scheme {scheme!r} is taken by {self._by_scheme[scheme]!r}")
        self._by_scheme[scheme] = factory

    def remove(self, scheme: str) -> None:
        """Unregister a scheme."""
        del self._by_scheme[scheme]

    def __contains__(self, scheme: object) -> bool:
        return scheme in self._by_scheme

    def open(self, url: str, options: Mapping[str, object]) -> ObjectStore:
        """Open the store of a URL; raise the error of :meth:`check_scheme`."""
        return self._by_scheme[self.check_scheme(url)](url, options)

    def check_scheme(self, url: str) -> str:
        """Return the scheme of a URL; MissingPluginError if no plugin registered it."""
        scheme = get_scheme(url)
        if scheme in self._by_scheme:
            return scheme
        known = ", ".join(map(repr, sorted(self._by_scheme))) or "none"
        hint = (
            ""
            if _COMMON in self._by_scheme
            else f"; common ones are those of {MissingPluginError.describe(_PROVIDER)}"
        )
        raise MissingPluginError(
            f"no installed package opens {ObjectLocation.hide_secrets(url)!r}: none provides the scheme {scheme!r} with the hook "
            f"td_stores; registered schemes: {known}{hint}"
        )


STORES = Stores()


def find_objects(
    location: Location, storage_options: Mapping[str, object] | None = None
) -> ObjectLocation | None:
    """Return a URL, or a store, as a location of objects, and None for others; see :meth:`Serializer.find_objects`."""
    if isinstance(location, ObjectLocation):
        return location
    place = find_place(location, storage_options)
    if isinstance(place, str):
        STORES.check_scheme(place)
    return place if isinstance(place, ObjectLocation) else None


def find_place(location: Location, storage_options: object = None) -> Location:
    """Return a local path as a ``Path``, a URL of a known scheme or a store as an :class:`ObjectLocation`, others unchanged."""
    place = as_location(location)
    if storage_options is not None:
        if not isinstance(storage_options, Mapping):
            raise TypeError(f"storage_options must be a mapping; got {type(storage_options).__name__}")
        if not isinstance(place, str):
            shown = (
                f"{str(place)!r} is a local path"
                if isinstance(place, Path)
                else f"got a {type(place).__name__}"
            )
            raise ValueError(f"storage_options are for URLs; {shown}")
    if isinstance(place, str):
        return (
            ObjectLocation(place, storage_options or {}, STORES.open)
            if get_scheme(place) in STORES
            else place
        )
    members = ("where", "stat", "read", "write", "list", "delete")  # of an ObjectStore
    return ObjectLocation(place) if all(hasattr(place, name) for name in members) else place
