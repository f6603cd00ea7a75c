"""Arrays that are strings on a Redis server, and the connection to it, which each process makes for itself."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, TypeVar

import redis
import torch
from redis.backoff import NoBackoff
from redis.retry import Retry
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import as_bytes, set_module
from td_core.typing import SourceIndex

ResultT = TypeVar("ResultT")

#: Seconds before each retry of a lost connection, and how often elements are read again that change meanwhile.
_WAITS, _TRIES = (0.05, 0.2, 0.8), 10
#: The most bytes that are read or written at one moment, and the most parts of an array that one command reads.
PIECE, _MOST = 8 << 20, 1 << 16
#: The errors of Python, by those of the library; the first that fits.
_ERRORS: tuple[tuple[Any, type[OSError]], ...] = (
    ((redis.AuthenticationError, redis.exceptions.NoPermissionError), PermissionError),
    (redis.TimeoutError, TimeoutError),
    (redis.ConnectionError, ConnectionError),
    (redis.RedisError, OSError),
)
#: Reads parts of several strings at one moment, and returns them after the number of writes and the stamp of each.
_SCRIPT = """
local found = {redis.call('GET', KEYS[1])}
for i = 3, #KEYS do
  local parts, count, last = {}, 0, tonumber(ARGV[3 * i - 7]) - 1
  for start in string.gmatch(ARGV[3 * i - 6], '%d+') do
    count = count + 1
    parts[count] = redis.call('GETRANGE', KEYS[i], start, start + last)
  end
  found[2 * i - 4] = redis.call('HGET', KEYS[2], ARGV[3 * i - 8])
  found[2 * i - 3] = table.concat(parts)
end
return found
"""


class _Pending(threading.local):
    """The writes of a block of this thread, which are sent together at its end; or None."""

    writes: list[Runs] | None = None


@set_module("td_redis")
class Connection:
    """The keys of one collection on a server. Its pickle contains no passwords: see :func:`td_core.reopen`.

    >>> Connection({"password": "secret"}, "tensordict", "run1").where
    'redis://localhost:6379/0 tensordict:run1'
    """

    def __init__(self, options: dict[str, Any], prefix: str, td_id: str) -> None:
        self.__setstate__((options, [], prefix, td_id))

    def __getstate__(self) -> tuple[dict[str, Any], list[str], str, str]:
        # A process that is being started gets the passwords.
        kept = {
            name: value
            for name, value in self.options.items()
            if isinstance(value, (int, float)) or name in ("host", "unix_socket_path") or get_spawning_popen()
        }
        kept.pop("client", None)
        return kept, self.lacking or sorted(self.options.keys() - kept.keys()), self.prefix, self.td_id

    def __setstate__(self, state: tuple[dict[str, Any], list[str], str, str]) -> None:
        self.options, self.lacking, self.prefix, self.td_id = state
        self.scripts, self.pending, self.client = True, _Pending(), self.options.get("client")
        self.keep_alive(None, [])

    def keep_alive(self, ttl: int | None, keys: list[str], due: float = 0.0) -> None:
        """Let the server remove some keys when they were not used for ``ttl`` seconds; None for never."""
        self.ttl, self.keys, self.due = ttl, keys, due

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the connection the options again that its pickle does not contain."""
        self.__setstate__(({**self.options, **storage_options}, [], self.prefix, self.td_id))

    @property
    def where(self) -> str:
        """The place, for messages."""
        options = {"host": "localhost", "port": 6379, "db": 0, **self.options}
        server = options.get("unix_socket_path") or "{host}:{port}/{db}".format(**options)
        return f"redis://{'client' if 'client' in options else server} {self.prefix}:{self.td_id}"

    def key(self, *parts: str) -> str:
        """Return a key of the collection; the braces keep all of them on one node of a cluster."""
        return ":".join((f"{self.prefix}:{{{self.td_id}}}", *parts))

    def run(self, call: Callable[[Any], ResultT], *, writes: bool = False) -> ResultT:
        """Call a function with the client; again if the connection is lost, except after a part of a write may be sent."""
        for wait in (*_WAITS, None):
            is_sent = False
            try:
                client = self._connect(check=writes)
                is_sent = writes
                result = call(client)
                if self.ttl and time.monotonic() > self.due:
                    self.due = time.monotonic() + self.ttl / 10
                    with client.pipeline(transaction=False) as pipe:
                        for key in self.keys:
                            pipe.expire(key, self.ttl)
                        pipe.execute()
                return result
            except redis.RedisError as error:
                is_lost = isinstance(error, redis.ConnectionError) and not is_sent
                if wait is None or not is_lost or isinstance(error, redis.AuthenticationError):
                    cls = next(cls for kinds, cls in _ERRORS if isinstance(error, kinds))
                    raise cls(f"{self.where}: {error}") from error
            time.sleep(wait)
        raise AssertionError  # the last turn returns or raises

    def _connect(self, check: bool) -> Any:
        """Return the client; with ``check`` with a connection in its pool, so that what follows sends the first byte."""
        if self.lacking:
            raise ValueError(
                f"{self.where}: its pickle does not contain {', '.join(self.lacking)}: give the options again with "
                "td_core.reopen(collection, storage_options={...})"
            )
        if self.client is None:
            defaults = {"socket_timeout": 30, "retry": Retry(NoBackoff(), 0)}
            self.client = redis.Redis(**{**defaults, **self.options})
        if check:
            pool = self.client.connection_pool
            try:
                connection = pool.get_connection()
            except TypeError:  # before redis-py 5.3
                connection = pool.get_connection("_")
            pool.release(connection)
        return self.client


class Runs(NamedTuple):
    """Parts of an array, all of one size, and the bytes to write there."""

    source: RedisSource
    size: int
    offsets: list[int]
    data: bytes = b""


@set_module("td_redis")
class RedisSource:
    """An array on a server. ``stamp`` is what the server has for this array, and for none that replaces it.

    >>> RedisSource(Connection({}, "tensordict", "run1"), "a", torch.float32, [3], None)
    RedisSource('redis://localhost:6379/0 tensordict:run1', 'a')
    """

    def __init__(
        self, connection: Connection, name: str, dtype: torch.dtype, shape: Sequence[int], stamp: bytes | None
    ) -> None:
        self.connection, self.name, self.stamp = connection, name, stamp
        self.shape, self.dtype = torch.Size(shape), dtype
        #: The elements, after the array was removed from the server.
        self.memory: Tensor | None = None

    def __repr__(self) -> str:
        return f"RedisSource({self.connection.where!r}, {self.name!r})"

    def read(self, index: SourceIndex) -> Tensor:
        """Return a part of the array."""
        return self.read_many([(self, index)])[0]

    def read_many(self, requests: Sequence[tuple[RedisSource, SourceIndex]]) -> list[Tensor]:
        """Return parts of several arrays, with one request to each server."""
        todo: dict[int, list[tuple[int, Runs]]] = {}
        found: dict[int, Tensor] = {}
        for i, (source, index) in enumerate(requests):
            if source.memory is None:
                todo.setdefault(id(source.connection), []).append((i, source._find_runs(index)))
            else:
                found[i] = source.memory[index].clone()
        for group in todo.values():
            for (i, runs), data in zip(group, _read_runs([runs for _, runs in group])):
                index = requests[i][1]
                shape = [
                    len(range(x.start, x.stop, x.step)) if isinstance(x, slice) else len(x) for x in index
                ]
                found[i] = _make_tensor(data, runs.source.dtype, shape)
        return [found[i] for i in range(len(requests))]

    def _find_runs(self, index: SourceIndex, data: bytes = b"") -> Runs:
        """Return the runs of neighbours that an index selects, in the order of the elements."""
        size, first, dim = self.dtype.itemsize, 0, len(index)
        while dim and isinstance(item := index[dim - 1], slice) and item == slice(0, self.shape[dim - 1], 1):
            dim -= 1
            size *= self.shape[dim]
        if dim and isinstance(item := index[dim - 1], slice) and item.step == 1:
            dim -= 1
            first, size = item.start * size, size * (item.stop - item.start)
        offsets = torch.tensor([first], device="cpu")
        for i, item in enumerate(index[:dim]):
            row = math.prod(self.shape[i + 1 :]) * self.dtype.itemsize
            at = torch.arange(self.shape[i], device="cpu")[item] if isinstance(item, slice) else item
            offsets = (offsets[:, None] + at * row).view(-1)
        return Runs(self, size, offsets.tolist(), data)

    def write(self, index: SourceIndex, value: Tensor) -> None:
        """Write a part of the array."""
        if self.memory is not None:
            self.memory[index] = value
            return
        runs = self._find_runs(index, as_bytes(value).numpy().tobytes())
        if self.connection.pending.writes is None:
            write_runs([runs])
        else:
            self.connection.pending.writes.append(runs)

    def keep(self, data: bytes) -> None:
        """Keep the elements of the array, which was removed."""
        self.memory = _make_tensor(bytearray(data), self.dtype, self.shape)

    def flush(self) -> None:
        """Do nothing: the server has what was written."""

    def reopen(self, storage_options: Mapping[str, object]) -> None:
        """Give the connection its options again."""
        self.connection.reopen(storage_options)


def _make_tensor(data: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the elements with some bytes, of which there may be none."""
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _split(todo: Sequence[Runs]) -> list[list[tuple[int, Runs]]]:
    """Split parts into batches of limited size; each part is with its position in ``todo``."""
    pieces = []
    for i, (source, size, offsets, data) in enumerate(todo):
        count = min(_MOST, max(1, PIECE // size))
        for k in range(0, len(offsets), count):
            whole = data[k * size : (k + count) * size]
            for at in range(0, size, PIECE):  # more than once for a single long run
                end = min(size, at + PIECE)
                starts = [offset + at for offset in offsets[k : k + count]]
                pieces.append((i, Runs(source, end - at, starts, whole[at:end] if size > PIECE else whole)))
    batches: list[list[tuple[int, Runs]]] = []
    room = 0
    for i, piece in pieces:
        room -= piece.size * len(piece.offsets)
        if room < 0:
            batches.append([])
            room = PIECE - piece.size * len(piece.offsets)
        batches[-1].append((i, piece))
    return batches


def _read_runs(todo: Sequence[Runs]) -> list[bytearray]:
    """Read parts of arrays of one server, all as they are at one moment."""
    connection = todo[0].source.connection
    if connection.pending.writes:
        write_runs(connection.pending.writes)
        connection.pending.writes.clear()
    for _ in range(_TRIES):
        generations, found = set(), [bytearray() for _ in todo]
        for batch in _split(todo):
            generation, parts = connection.run(partial(_read_batch, [runs for _, runs in batch]))
            generations.add(generation)
            for (i, _), part in zip(batch, parts):
                found[i] += part
        if len(generations) == 1:
            return found
    raise FormatError(
        f"{connection.where}: others have written each of the {_TRIES} times that it was read: read less at once"
    )


def _read_batch(batch: Sequence[Runs], client: Any) -> tuple[object, list[bytes]]:
    """Return the number of writes so far, and the bytes of each part."""
    connection = batch[0].source.connection
    if connection.scripts and any(len(runs.offsets) > 1 for runs in batch):
        try:
            generation, stamps, parts = _run_script(connection, batch, client)
        except redis.ResponseError as error:
            refused = isinstance(error, redis.exceptions.NoPermissionError) or "unknown command" in str(error)
            if not refused:
                raise
            connection.scripts = False
            return _read_batch(batch, client)
    else:
        generation, stamps, parts = _run_commands(connection, batch, client)
    _check_stamps(batch, stamps)
    for (source, size, offsets, _), part in zip(batch, parts):
        if len(part) != size * len(offsets):
            where = f"{connection.where}: the array {source.name!r}"
            raise FormatError(
                f"{where} has fewer bytes than its shape {list(source.shape)} and {source.dtype}"
            )
    return generation, parts


def _run_script(connection: Connection, batch: Sequence[Runs], client: Any) -> tuple[object, Any, Any]:
    keys, rest = [connection.key("gen"), connection.key("stamps")], list[object]()
    for source, size, offsets, _ in batch:
        keys.append(connection.key("d", source.name))
        rest += source.name, size, ",".join(map(str, offsets))
    generation, *found = client.eval(_SCRIPT, len(keys), *keys, *rest)
    return generation, found[::2], found[1::2]


def _run_commands(connection: Connection, batch: Sequence[Runs], client: Any) -> tuple[object, Any, Any]:
    with client.pipeline() as pipe:
        pipe.get(connection.key("gen"))
        pipe.hmget(connection.key("stamps"), [runs.source.name for runs in batch])
        for source, size, offsets, _ in batch:
            for offset in offsets:
                pipe.getrange(connection.key("d", source.name), offset, offset + size - 1)
        generation, stamps, *found = pipe.execute()
    ranges = iter(found)
    return generation, stamps, [b"".join(next(ranges) for _ in runs.offsets) for runs in batch]


def write_runs(todo: Sequence[Runs]) -> None:
    """Write parts of arrays of one server, at one moment if they are not large."""
    for batch in _split(todo):
        todo[0].source.connection.run(partial(_write_batch, [runs for _, runs in batch]), writes=True)


def _write_batch(batch: Sequence[Runs], client: Any) -> None:
    """Write parts of arrays, unless one was replaced, which the server watches."""
    connection = batch[0].source.connection
    with client.pipeline() as pipe:
        while True:
            with expect_changes():
                pipe.watch(connection.key("stamps"))
                _check_stamps(
                    batch, pipe.hmget(connection.key("stamps"), [runs.source.name for runs in batch])
                )
                pipe.multi()
                for source, size, offsets, data in batch:
                    for i, offset in enumerate(offsets):
                        pipe.setrange(
                            connection.key("d", source.name), offset, data[i * size : (i + 1) * size]
                        )
                pipe.incr(connection.key("gen"))
                pipe.execute()
                return


@contextlib.contextmanager
def expect_changes() -> Iterator[None]:
    """End a block in which a watched key has changed; raise the error of a connection that was lost meanwhile."""
    try:
        yield
    except redis.WatchError as error:
        if isinstance(error.__context__, redis.RedisError):
            raise error.__context__ from None


def _check_stamps(batch: Sequence[Runs], stamps: Sequence[bytes | None]) -> None:
    """Raise FormatError if an array was removed or replaced."""
    for runs, stamp in zip(batch, stamps):
        if runs.source.stamp != stamp:
            raise FormatError(
                f"{runs.source.connection.where}: the array {runs.source.name!r} was removed or replaced since it was opened: "
                "open it again"
            )
