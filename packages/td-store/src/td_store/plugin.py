"""Register the object stores of URLs, which are file systems of fsspec. It is imported when the first of them is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from td_core.spi import LazyFunction, hookimpl

#: Schemes of file systems of fsspec that have objects or files, and of its caches, which begin a chain.
_SCHEMES = (
    "abfs", "abfss", "adl", "az", "blockcache", "filecache", "ftp", "gcs", "github", "gs", "hdfs", "hf", "http", "https",
    "memory", "oci", "oss", "r2", "s3", "s3a", "sftp", "simplecache", "smb", "ssh", "webdav", "webhdfs", "zip",
)  # fmt: skip


@hookimpl
def td_stores() -> Mapping[str, Any]:
    """Return the function that opens the store of a URL, for each scheme."""
    return dict.fromkeys(_SCHEMES, LazyFunction(__package__, "._fsspec_store", "FsspecStore"))
