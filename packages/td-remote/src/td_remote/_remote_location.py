"""A location at a URL with its settings: an object store, which every format accepts in place of a path.

Options are secrets: a pickle has the URL and the settings alone, unless it is made for a process that is a worker of this one.
"""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from td_core.spi import set_module
from td_core.typing import ObjectInfo, ObjectLocation, Range

from ._block_cache import BlockCache, read_size
from ._engines import Engine, check_answer, fit_range, measure, place_range
from ._file_systems import open_fsspec
from ._obstore_engine import SCHEMES, open_obstore
from ._retries import Policy, make_missing_error, make_replaced_error

#: Where the options of fsspec have the user and password of a URL. In other schemes that part of a URL means something else.
_LOGIN = {
    **dict.fromkeys(("s3", "s3a"), ("key", "secret")),
    **dict.fromkeys(("ftp", "sftp", "ssh", "smb"), ("username", "password")),
}
#: A user and password in a URL.
_PASSWORD = re.compile(r"://([^/?#@]*:[^/?#@]*)@")
#: So many descriptions of objects are kept.
_MOST = 1 << 16


@set_module("td_remote")
class Remote:
    """A location at a URL, with its settings. Every operation of every format accepts it in place of a path or URL.

    A URL by itself is the same as ``Remote(url)``, and ``storage_options`` are the other arguments.

    Args:
        url: the location, such as ``"s3://bucket/data.zarr"``. A user and password in it become options.
        engine: ``"fsspec"``, ``"obstore"``, or ``"auto"``: obstore if it is installed, has the scheme, and no options are given,
            so that credentials come from the environment; otherwise fsspec.
        concurrency: the most requests of this process for one host at the same time; by default ``TD_REMOTE_CONCURRENCY`` or 64.
        retries: how many times a request is repeated after a time-out, a lost connection, or a busy server.
        timeout: the seconds without a byte after which a request has failed.
        cache: a directory for blocks that were read, which any number of processes can share. By default it is
            ``TD_REMOTE_CACHE``; then whole objects are not kept.
        cache_size: the most bytes in the directory, such as ``"10GB"``; by default ``TD_REMOTE_CACHE_SIZE``.
        store: a file system of fsspec, or a store of obstore, that you have made for the host or bucket of the URL.
        allow_http: whether objects can be written without encryption, to a URL that begins with ``http:``.
        **storage_options: options of the engine, as its documentation has them.

    Attributes:
        url: the location, without a user and password that became options.
        where: the location for messages.
        gap: the bytes between two ranges that cost less than a request.

    Raises:
        ValueError: an argument is out of its range, or the location has no scheme.

    >>> import td_core
    >>> folder = Remote("memory://shelf") / "runs"
    >>> folder
    Remote('memory://shelf/runs', engine='fsspec')
    >>> _ = (folder / "notes.txt").write("", [b"first"])
    >>> [(info.name, info.size) for info in folder.list()]
    [('notes.txt', 5)]
    """

    #: How many seconds the stamp of an object is taken to be the same, where answers do not have it.
    checked_for = 1.0

    def __init__(
        self,
        url: str,
        *,
        engine: Literal["auto", "fsspec", "obstore"] = "auto",
        concurrency: int | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        cache: str | os.PathLike[str] | None = None,
        cache_size: int | str | None = None,
        store: object = None,
        allow_http: bool = False,
        **storage_options: object,
    ) -> None:
        if not isinstance(url, str) or "://" not in url:
            raise ValueError(f"a remote location is a URL such as 's3://bucket/name'; got {url!r}")
        if engine not in ("auto", "fsspec", "obstore"):
            raise ValueError(f"the engine is 'auto', 'fsspec' or 'obstore'; got {engine!r}")
        if concurrency is None:
            text = os.environ.get("TD_REMOTE_CONCURRENCY", "64")
            concurrency = int(text) if text.isdigit() else 0
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is an integer of at least {least}; got {value!r}")
        if not timeout > 0:
            raise ValueError(f"timeout is a positive number of seconds; got {timeout!r}")
        self.where = ObjectLocation.hide_secrets(url)
        self.url, login = _split_login(url, engine)
        if "headers" in login and "headers" in storage_options:
            given: Any = storage_options.pop("headers")
            login["headers"] = {**login["headers"], **given}
        self._settings: dict[str, Any] = {
            "engine": engine, "concurrency": concurrency, "retries": retries, "timeout": timeout, "cache": cache,
            "cache_size": cache_size, "allow_http": allow_http,
        }  # fmt: skip
        self._secrets: dict[str, Any] = {
            **login,
            **storage_options,
            **({} if store is None else {"store": store}),
        }
        self._missing: tuple[str, ...] = ()
        self._engine_name = self._choose_engine()
        self._policy = Policy(
            self.where, retries, timeout, concurrency, tuple(_list_texts(url, self._secrets))
        )
        folder = cache if cache is not None else os.environ.get("TD_REMOTE_CACHE") or None
        size = cache_size if cache_size is not None else os.environ.get("TD_REMOTE_CACHE_SIZE", "10GB")
        self._cache: BlockCache | None = None
        if folder is not None and "::" not in url:
            self._cache = BlockCache(Path(folder), read_size(size), keeps_whole=cache is not None)
        self._opened: tuple[int, Engine] | None = None
        #: The description of each object, and when it was made.
        self._known: dict[str, tuple[ObjectInfo, float]] = {}

    def __repr__(self) -> str:
        return f"Remote({self.where!r}, engine={self._engine_name!r})"

    def __truediv__(self, name: str) -> Remote:
        """Return the location of an object, or of a tree, below this one."""
        if not isinstance(name, str) or not name.strip("/") or ".." in name.split("/"):
            raise ValueError(f"the name of an object below {self.where} has no '..'; got {name!r}")
        path, mark, query = self.url.partition("?")
        return self._copy(f"{path.rstrip('/')}/{name.strip('/')}{mark}{query}")

    @property
    def parent(self) -> Remote:
        """The location above this one."""
        path, mark, query = self.url.partition("?")
        return self._copy(f"{path.rstrip('/').rpartition('/')[0]}{mark}{query}")

    def __reduce__(self) -> tuple[object, ...]:
        url, missing = self.url, (*self._secrets, *self._missing)
        if _PASSWORD.search(url) and not url.startswith("github:"):  # that of a chain, or of a rare scheme
            url, missing = _PASSWORD.sub("://", url), (*missing, "user and password of the URL")
        return rebuild_remote, (url, self._settings, {}, missing)

    def __copy__(self) -> Remote:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Remote:
        return self

    def _copy(self, url: str) -> Remote:
        again = Remote(url, **self._settings, **self._secrets)
        again._missing = self._missing
        return again

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the location its options again, which its pickle does not contain."""
        again = Remote(self.url, **{**self._settings, **storage_options})
        self.__dict__.update(again.__dict__)

    @property
    def gap(self) -> int:
        """The bytes between two ranges that cost less than a request."""
        return 1 << 16 if self._engine_name == "obstore" else 1 << 18

    def stat(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Return a description of each object, None for one that is missing."""
        found = self._open().find(names)
        for info in found:
            self._learn(info)
        return found

    def peek(self, name: str, size: int) -> tuple[ObjectInfo, memoryview] | None:
        """Return the description of an object and its first bytes, read with one request; None if it is missing."""
        found = self._peek([Range(name, 0, size)])
        return None if found is None else (found[0], found[1][0])

    def peek_ends(self, name: str, size: int) -> tuple[ObjectInfo, memoryview, memoryview] | None:
        """Return the description of an object, its first and its last bytes, read at once; None if it is missing."""
        found = self._peek([Range(name, 0, size), Range(name, -size)])
        return None if found is None else (found[0], found[1][0], found[1][1])

    def _peek(self, ranges: Sequence[Range]) -> tuple[ObjectInfo, Sequence[memoryview]] | None:
        """Return the description of an object, and ranges at its ends that may be larger than it is."""
        engine, name = self._open(), ranges[0].name
        if not engine.describes:
            (info,) = self.stat([name])
            return None if info is None else (info, self.read([fit_range(item, info) for item in ranges]))
        try:
            answers = engine.fetch(ranges)
        except FileNotFoundError:
            return None
        info = answers[0].info
        if info is None:
            return None
        self._learn(info)
        return info, [
            check_answer(self._policy, fit_range(item, info), answer)
            for item, answer in zip(ranges, answers, strict=True)
        ]

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return exactly the bytes of each range; all requests are sent together."""
        ranges = self._place(ranges)
        wanted = [item for item in ranges if measure(item) != 0]
        if self._cache is not None:
            found = self._cache.read(self.where, self._describe_all(wanted), self._fetch)
        else:
            found = self._fetch(wanted)
        self._find_current({item.name: item.stamp for item in ranges if item.stamp is not None})
        contents = iter(found)
        return [memoryview(b"") if measure(item) == 0 else next(contents) for item in ranges]

    def write(self, name: str, content: Iterable[Any], *, create: bool = False) -> ObjectInfo:
        """Write an object, in parts of 16 MB if it is larger: readers see it complete, or as it was before."""
        self._check_writable()
        self._known.pop(name, None)
        self._open().put(name, content, create)
        (info,) = self.stat([name])
        if info is None:
            raise OSError(f"{self.where}: the object {name!r} was removed while it was written")
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        yield from self._open().list_below(prefix)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is missing is not an error."""
        self._check_writable()
        self._open().remove(names)

    def _check_writable(self) -> None:
        if self.url.lower().startswith("http:") and not self._settings["allow_http"]:
            raise PermissionError(
                f"{self.where}: writing without encryption needs allow_http=True, or a URL that begins with https:"
            )

    def _choose_engine(self) -> str:
        engine, store = self._settings["engine"], self._secrets.get("store")
        options = {name for name in self._secrets if name != "store"}
        if store is not None:
            found = "fsspec" if hasattr(store, "_strip_protocol") else "obstore"
            if engine not in ("auto", found):
                raise ValueError(
                    f"{self.where}: the store is one for the engine {found!r}; got engine={engine!r}"
                )
            if options:
                raise ValueError(f"{self.where}: the store has its options already; got {sorted(options)}")
            return found
        if engine != "auto":
            return str(engine)
        scheme = self.url.partition(":")[0].lower()
        is_plain = not options and "?" not in self.url and "::" not in self.url and not self._missing
        return "obstore" if is_plain and scheme in SCHEMES and find_spec("obstore") else "fsspec"

    def _open(self) -> Engine:
        """Return the engine of this process."""
        if self._missing:
            raise OSError(
                f"{self.where}: a pickle does not contain storage options: call td_core.reopen(collection, "
                f"storage_options=...) with {', '.join(map(repr, self._missing))}, or open the save again"
            )
        opened = self._opened
        if opened is None or opened[0] != os.getpid():  # without a lock, which a fork could leave locked
            options = {name: value for name, value in self._secrets.items() if name != "store"}
            open_engine = open_obstore if self._engine_name == "obstore" else open_fsspec
            engine = open_engine(self.url, options, self._secrets.get("store"), self._policy)
            self._opened = opened = os.getpid(), engine
        return opened[1]

    def _fetch(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        """Return the bytes of ranges from the server."""
        answers = self._open().fetch(ranges) if ranges else []
        for answer in answers:
            self._learn(answer.info)
        return [
            check_answer(self._policy, item, answer) for item, answer in zip(ranges, answers, strict=True)
        ]

    def _place(self, ranges: Sequence[Range]) -> Sequence[Range]:
        """Return ranges, those with a start from the end and a stop with positions."""
        odd = sorted({item.name for item in ranges if item.start < 0 and item.stop is not None})
        sizes = dict(zip(odd, self.stat(odd), strict=True)) if odd else {}
        return [
            place_range(self.where, item, sizes[item.name]) if item.name in sizes else item for item in ranges
        ]

    def _describe_all(self, ranges: Sequence[Range]) -> Sequence[tuple[Range, ObjectInfo]]:
        """Return ranges with positions and the description of each object, for the cache."""
        infos = self._find_current({item.name: item.stamp for item in ranges})
        return [
            (place_range(self.where, item, info)._replace(stamp=info.stamp), info)
            for item in ranges
            for info in [infos[item.name]]
        ]

    def _find_current(self, stamps: Mapping[str, str | None]) -> dict[str, ObjectInfo]:
        """Return the descriptions of objects, at most ``checked_for`` seconds old; raise if one is missing or was replaced."""
        now = time.monotonic()
        known = {name: self._known[name] for name in [*stamps] if name in self._known}
        infos = {name: info for name, (info, at) in known.items() if now - at < self.checked_for}
        old = [name for name in stamps if name not in infos]
        infos.update({info.name: info for info in self.stat(old) if info is not None} if old else {})
        for name, stamp in stamps.items():
            if name not in infos:
                raise make_missing_error(self.where, name)
            if stamp not in (None, infos[name].stamp):
                raise make_replaced_error(self.where, name)
        return infos

    def _learn(self, info: ObjectInfo | None) -> None:
        if info is not None:
            if len(self._known) > _MOST:
                self._known.clear()
            self._known[info.name] = info, time.monotonic()


def _split_login(url: str, engine: str) -> tuple[str, dict[str, Any]]:
    """Return a URL without user and password, and these as options of the engine."""
    scheme = url.partition(":")[0].lower()
    parts = urlsplit(url)
    if "::" in url or "@" not in parts.netloc or scheme not in (*_LOGIN, "http", "https"):
        return url, {}
    login = parts.netloc.rpartition("@")[0]
    user, _, password = (unquote(text) for text in login.partition(":"))
    stripped = url.replace(f"{login}@", "", 1)
    if scheme in _LOGIN:
        names = ("access_key_id", "secret_access_key") if engine == "obstore" else _LOGIN[scheme]
        return stripped, {name: value for name, value in zip(names, (user, password), strict=True) if value}
    token = base64.b64encode(f"{user}:{password}".encode()).decode()
    headers = {"Authorization": f"Basic {token}"}
    return stripped, {"client_options": {"default_headers": headers}} if engine == "obstore" else {
        "headers": headers
    }


def _list_texts(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts in options and in the query of a URL, which messages must not contain."""
    if "?" in url:
        yield url.partition("?")[2]
    yield from _PASSWORD.findall(url)
    todo = list(options.values())
    for value in todo:  # which grows
        if isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, str) and len(value) > 3:
            yield value


@set_module("td_remote.remote_pickles")
def rebuild_remote(
    url: str, settings: Mapping[str, Any], secrets: Mapping[str, Any], missing: Sequence[str]
) -> Remote:
    """Return a location from its pickle, which lacks the options ``missing``."""
    remote = Remote(url, **settings, **secrets)
    remote._missing = tuple(missing)
    return remote


def _reduce_for_worker(remote: Remote) -> Any:
    """Reduce a location with its options, for a process that this one starts, or its queues."""
    return rebuild_remote, (remote.url, remote._settings, remote._secrets, remote._missing)


ForkingPickler.register(Remote, _reduce_for_worker)
