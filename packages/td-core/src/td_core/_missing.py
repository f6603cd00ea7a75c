"""Messages about packages that are not installed, switched off, or broken."""

from __future__ import annotations

import re
from typing import Any

from .errors import MissingPluginError

__all__ = ["FIRST_PARTY_FORMATS", "UNAVAILABLE", "describe_missing_package", "missing_writer_error"]

_PROVIDER = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?)==([A-Za-z0-9.+!_\-]*)\Z")

#: The package and the suffixes of each format of the project, except the default format.
FIRST_PARTY_FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "safetensors": ("td-safetensors", (".safetensors", ".safetensors.index.json")),
    "hdf5": ("td-hdf5", (".h5", ".hdf5")),
    "zarr": ("td-zarr", (".zarr", ".zarr.zip")),
}

#: Reason why an installed distribution provides nothing, by name; filled by the plugin manager.
UNAVAILABLE: dict[str, str] = {}


def describe_missing_package(distribution: str) -> str:
    """Return the part of a message that names the missing package and the remedy."""
    why = UNAVAILABLE.get(distribution, f"not installed: pip install {distribution}")
    return f"the package {distribution!r}, which is {why}"


def missing_writer_error(what: str, provider: Any) -> MissingPluginError | None:
    """Build the error for content whose ``provider`` is missing; None if it does not have the form ``name==version``."""
    result = _PROVIDER.match(provider) if isinstance(provider, str) else None
    if result is None:
        return None
    name, version = result.groups()
    why = UNAVAILABLE.get(name, f"not installed: pip install {name}")
    return MissingPluginError(f"{what} was written by {name!r} {version}, which is {why}")
