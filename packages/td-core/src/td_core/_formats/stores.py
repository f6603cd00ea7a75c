"""The object stores of URLs: plugins register a function for each scheme, and a URL is opened with that of its scheme."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ..errors import MissingPluginError, PluginError
from ..typing import ObjectStore
from .locations import get_scheme, hide_secrets

#: Opens the store of a URL with the storage options of an operation.
StoreFactory = Callable[[str, Mapping[str, object]], ObjectStore]

_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]+")


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
        """Open the store of a URL; MissingPluginError if no plugin registered its scheme."""
        scheme = get_scheme(url)
        if scheme in self._by_scheme:
            return self._by_scheme[scheme](url, options)
        known = ", ".join(map(repr, sorted(self._by_scheme))) or "none"
        raise MissingPluginError(
            f"no installed package opens {hide_secrets(url)!r}: none provides the scheme {scheme!r} with the hook "
            f"td_stores; registered schemes: {known}"
        )


STORES = Stores()
