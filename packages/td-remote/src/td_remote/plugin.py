"""Register the object stores of URLs. The rest of the package, and fsspec, are imported when the first URL is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from td_core.spi import hookimpl

if TYPE_CHECKING:
    from ._remote_location import Remote

#: Schemes of file systems of fsspec that have objects or files, and of its caches, which begin a chain.
_SCHEMES = (
    "abfs", "abfss", "adl", "az", "blockcache", "filecache", "ftp", "gcs", "github", "gs", "hdfs", "hf", "http", "https",
    "memory", "oci", "oss", "s3", "s3a", "sftp", "simplecache", "smb", "ssh", "webdav", "webhdfs", "zip",
)  # fmt: skip


def open_url(url: str, options: Mapping[str, Any]) -> Remote:
    """Return the location at a URL; ``options`` are the other arguments of :class:`td_remote.Remote`."""
    from ._remote_location import Remote

    return Remote(url, **options)


@hookimpl
def td_stores() -> Mapping[str, Any]:
    """Return the function that opens the store of a URL, for each scheme."""
    return dict.fromkeys(_SCHEMES, open_url)
