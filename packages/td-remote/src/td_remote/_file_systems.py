"""Make the file system of fsspec for a URL, and choose the engine that suits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs

from ._fsspec_engine import AsyncEngine, FsspecEngine
from ._http_requests import HttpEngine
from ._retries import Policy, translate
from ._s3_requests import S3Engine

#: The engines of file systems that they know better, by the module of their class.
_ENGINES: dict[str, type[FsspecEngine]] = {
    "fsspec.implementations.http": HttpEngine,
    "s3fs.core": S3Engine,
}


def open_fsspec(url: str, options: Mapping[str, Any], store: Any, policy: Policy) -> FsspecEngine:
    """Return the engine of a URL; the file system is one that nothing else uses, or the one that the user has made."""
    with translate(policy, "open", ""):
        if store is None:
            try:
                store, path = url_to_fs(url, **_add_defaults(url, dict(options), policy))
            except ValueError as error:
                if "Protocol not known" not in str(error):
                    raise
                raise ImportError("fsspec has no file system of the scheme") from error
            if hasattr(store, "retries"):
                store.retries = 1  # those of the policy are enough
        else:
            path = store._strip_protocol(url)
    names = [cls.__module__ for cls in type(store).__mro__]
    engine = next((engine for module, engine in _ENGINES.items() if module in names), None)
    if engine is None:
        engine = AsyncEngine if isinstance(store, AsyncFileSystem) else FsspecEngine
    return engine(url, store, path, policy)


def _add_defaults(url: str, options: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Return options with those that keep a library from retries of its own, and from reuse after a fork."""
    scheme = url.partition(":")[0].lower()
    if "::" in url:
        return options
    if scheme in ("s3", "s3a"):
        given = {
            "connect_timeout": policy.timeout,
            "read_timeout": policy.timeout,
            "retries": {"max_attempts": 0},
        }
        given["max_pool_connections"] = policy.concurrency
        options["config_kwargs"] = {**given, **options.get("config_kwargs", {})}
    return {"skip_instance_cache": True, **options}
