"""The engine on obstore, whose requests run in threads. After a fork it must not be used in the child: it would hang."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import Any
from urllib.parse import unquote, urlsplit

from td_core.errors import FormatError, PluginError
from td_core.typing import ObjectInfo, Range

from ._engines import HEAD, PART, Answer, WholeObjects, measure, refuse_short, share_limit, split_parts
from ._retries import Attempts, Policy, find_status, make_missing_error, translate

#: Schemes for which obstore has a store.
SCHEMES = frozenset({"abfs", "abfss", "adl", "az", "gs", "http", "https", "s3", "s3a"})
#: Parts of one upload that are under way at the same time.
_PARTS = 4


class ForkError(OSError, RuntimeError):
    """Use of an engine in a process that was forked from one that had used it."""


class _Process:
    """Whether this process has used obstore, and whether it was forked from one that had."""

    used = False
    forked = False

    @classmethod
    def enter_child(cls) -> None:
        """Remember in a forked process what its parent has used."""
        cls.forked = cls.used or cls.forked

    @classmethod
    def use(cls, where: str) -> None:
        """Raise ForkError in a process that was forked after its parent had used obstore."""
        if cls.forked:
            raise ForkError(
                f"{where}: obstore was in use when this process was forked: start workers with "
                "multiprocessing_context='spawn' or 'forkserver', or use Remote(..., engine='fsspec')"
            )
        cls.used = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Process.enter_child)


def open_obstore(url: str, options: Mapping[str, Any], store: Any, policy: Policy) -> ObstoreEngine:
    """Return the engine of a URL; the store is one for its bucket or server, or the one that the user has made."""
    _Process.use(policy.where)
    if store is not None:
        return ObstoreEngine(store, store, _find_path(url, store), policy)
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise PluginError(
            f"{policy.where}: the engine 'obstore' needs: pip install td-remote[fast]"
        ) from error
    parts = urlsplit(url)
    seconds = f"{max(1, round(policy.timeout * 1000))}ms"
    given = dict(options)
    client: dict[str, Any] = {
        "connect_timeout": seconds,
        "read_timeout": seconds,
        "timeout": f"{round(policy.limit(PART))}s",
    }
    # Options of the client replace those of the environment.
    plain = {f"{cloud}_ALLOW_HTTP" for cloud in ("AWS", "AZURE", "GOOGLE")} & os.environ.keys()
    client["allow_http"] = parts.scheme == "http" or any(os.environ[name].lower() == "true" for name in plain)
    client |= given.pop("client_options", {})
    with translate(policy, "open", ""):
        root = f"{parts.scheme}://{parts.netloc}"
        # Attempts that read are counted here; the parts of an upload can be repeated only by obstore.
        stores = [
            from_url(root, client_options=client, **{"retry_config": {"max_retries": count}, **given})
            for count in (0, policy.retries)
        ]
    reader, writer = stores
    return ObstoreEngine(reader, writer, unquote(parts.path).strip("/"), policy)


def _find_path(url: str, store: Any) -> str:
    """Return the path of a URL below a store of the user."""
    parts = urlsplit(url)
    base = urlsplit(getattr(store, "url", "")).path or getattr(store, "prefix", None) or ""
    path, base = unquote(parts.path).strip("/"), str(base).strip("/")
    if base and path != base and not path.startswith(f"{base}/"):
        raise ValueError(f"the path of the URL is not below that of the store; got {path!r} and {base!r}")
    return path[len(base) :].strip("/")


class ObstoreEngine:
    """Objects in a store of obstore, or of its protocols.

    Args:
        store: sends single requests.
        writer: uploads in parts, with attempts of its own for them.
        path: the location in both.
        policy: how requests are sent.
    """

    name = "obstore"
    describes = True

    def __init__(self, store: Any, writer: Any, path: str, policy: Policy) -> None:
        self._store, self._writer, self._path, self._policy = store, writer, path, policy
        host = f"{type(store).__name__} {getattr(store, 'url', '')} {getattr(store, 'config', {}).get('bucket', '')}"
        self._limit = share_limit(host, policy.concurrency)
        self._threads = ThreadPoolExecutor(policy.concurrency, "td-remote")
        self._whole, self._lock = WholeObjects(policy), threading.Lock()
        #: A web server cannot create an object only if there is none.
        self._is_web = type(store).__name__ == "HTTPStore"

    def find(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return a description of each object, None for one that is missing."""
        return self._run_all("find", [(name, partial(self._find, name)) for name in names])

    def fetch(self, ranges: Sequence[Range]) -> list[Answer]:
        """Return what the server answers for each range."""
        return self._run_all("read", [(item.name, partial(self._fetch, item)) for item in ranges])

    def put(self, name: str, content: Iterable[Any], create: bool) -> None:
        """Write an object, a large one in parts; with ``create`` a small one is atomic, and a large one looks first."""
        _Process.use(self._policy.where)
        parts = split_parts(content)
        first = list(islice(parts, 2))
        is_small = len(first) == 1
        if create and (self._is_web or not is_small) and self.find([name]) != [None]:
            raise FileExistsError(f"{self._policy.where}: the object {name!r} exists")
        if is_small:
            mode = "create" if create and not self._is_web else "overwrite"
            send = partial(self._store.put, self._locate(name), first[0], mode=mode, use_multipart=False)
            self._run_all("write", [(name, send)])
            return
        errors: list[Exception] = []

        def produce() -> Iterator[bytes]:
            try:
                yield from chain(first, parts)
            except Exception as error:
                errors.append(error)
                raise

        try:
            with translate(self._policy, "write", name):
                self._writer.put(
                    self._locate(name), produce(), use_multipart=True, chunk_size=PART, max_concurrency=_PARTS
                )
        except Exception:
            if errors:  # that of the content, not of the upload
                raise errors[0] from None
            raise

    def list_below(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        _Process.use(self._policy.where)
        folder = self._locate(prefix.rpartition("/")[0])
        start = len(self._path) + 1 if self._path else 0
        work = partial(self._collect, folder)
        for meta in sorted(
            Attempts(self._policy, "list", prefix).run(work), key=lambda meta: str(meta["path"])
        ):
            name = str(meta["path"])[start:]
            if name.startswith(prefix):
                yield _describe(name, meta)

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, also those that are missing."""

        def work(name: str) -> None:
            try:
                self._store.delete(self._locate(name))
            except FileNotFoundError:
                return

        self._run_all("delete", [(name, partial(work, name)) for name in names])

    def _collect(self, folder: str) -> list[Any]:
        return [meta for batch in self._store.list(folder or None) for meta in batch]

    def _locate(self, name: str) -> str:
        return "/".join(filter(None, (self._path, name)))

    def _run_all(self, operation: str, work: Sequence[tuple[str, Any]]) -> list[Any]:
        """Return the results of requests, which are repeated as the policy says."""
        _Process.use(self._policy.where)

        def run(item: tuple[str, Any]) -> Any:
            def attempt() -> Any:
                with self._limit:
                    return item[1]()

            return Attempts(self._policy, operation, item[0]).run(attempt)

        if len(work) == 1:
            return [run(work[0])]
        return [future.result() for future in [self._threads.submit(run, item) for item in work]]

    def _find(self, name: str) -> ObjectInfo | None:
        if not self._locate(name):
            return None
        try:
            return _describe(name, self._store.head(self._locate(name)))
        except FileNotFoundError:
            return None
        except Exception as error:
            if "MissingContentLength" not in str(error):
                raise
            return self._fetch(Range(name, 0, 1)).info  # an answer with a range has the size

    def _fetch(self, item: Range) -> Answer:
        """Return the content of a range of the object that has the stamp of the range."""
        path = self._locate(item.name)
        if not path:
            raise make_missing_error(self._policy.where, item.name)
        if self._whole.has(item.name, item.stamp):
            return self._whole.cut(item)
        options: dict[str, Any] = {}
        if item.start < 0:
            options["range"] = {"suffix": -item.start}
        elif item.stop is not None:
            options["range"] = (item.start, item.stop)
        elif item.start:
            options["range"] = {"offset": item.start}
        if item.stamp is not None and item.stamp.startswith('"'):  # only a strong ETag is compared
            options["if_match"] = item.stamp
        try:
            found = self._store.get(path, options=options or None)
            info = _describe(item.name, found.meta)
            content = self._read(item, found)
        except Exception as error:
            if type(error).__name__ == "NotSupportedError" or "non-partial response" in str(error):
                return self._fetch_whole(item, path)
            if "UnexpectedRange" in str(error):
                raise FormatError(
                    f"{self._policy.where}: the server answers with another range of the object {item.name!r} than was asked for"
                ) from error
            if find_status(error) != 416 and "Range started at" not in str(error):
                raise
            return Answer(b"", self._find(item.name))
        refuse_short(item, content, info)
        return Answer(content, info)

    def _read(self, item: Range, found: Any) -> Any:
        """Return the content of an answer; of a web server, which may send more, not more than was asked for."""
        size = measure(item)
        if not self._is_web or size is None:
            return found.bytes()
        return next(iter(found.stream(min_chunk_size=size)), b"")[:size]

    def _fetch_whole(self, item: Range, path: str) -> Answer:
        """Return a range of an object that is read whole, since the server does not answer requests for ranges."""
        if item.start == 0 and item.stop is not None and item.stop <= HEAD:
            found = self._store.get(path)
            first = next(iter(found.stream(min_chunk_size=HEAD)), b"")
            return Answer(first[: item.stop], _describe(item.name, found.meta))
        with self._lock:
            if not self._whole.has(item.name, item.stamp):
                found = self._store.get(path)
                if not found.meta["size"]:  # it has no ranges on any server
                    return Answer(b"", _describe(item.name, found.meta))
                self._whole.check(item.name, found.meta["size"])
                self._whole.add(found.bytes(), _describe(item.name, found.meta))
        return self._whole.cut(item)


def _describe(name: str, meta: Any) -> ObjectInfo:
    stamp = meta["e_tag"] or meta["version"] or f"size={meta['size']} {meta['last_modified'].timestamp()}"
    return ObjectInfo(name, meta["size"], stamp)
