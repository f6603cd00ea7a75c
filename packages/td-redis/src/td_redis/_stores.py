"""Collections on a Redis server: entries are stored tensors, and changes of the structure reach the server, too."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from operator import methodcaller
from pkgutil import resolve_name
from typing import Any, Literal, get_args

import torch

from td_core import LazyStackedTensorDict, TensorDict, kinds
from td_core.errors import BatchSizeError, CodecError
from td_core.spi import Encoded, Node, as_batch_size, as_dtype, load_table, select_keys, set_module
from td_core.typing import DeviceType
from td_store import StoredTensor
from td_store.arrays import (
    Change,
    LiveCollection,
    LiveStore,
    TableEdit,
    build_leaves,
    is_nested,
    list_names,
    restore,
)

from ._redis_source import Connection, RedisSource, Runs, write_runs
from ._store_keys import Content, list_keys, plan_arrays, read_content, write_content

#: The servers that speak the protocol of Redis. Nothing depends on the name.
STORE_BACKENDS = Literal["redis", "dragonfly", "keydb"]
#: Seconds after its last use until the server removes a collection: a week.
_TTL = 7 * 24 * 3600


@set_module("td_redis")
class Store(LiveStore):
    """An opened collection."""

    def __init__(self, connection: Connection, device: DeviceType | None, cached: bool) -> None:
        self.connection, self.is_cached = connection, cached
        self.device = None if device is None else torch.device(device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("connection", "is_cached", "device")}

    @property
    def where(self) -> str:
        """The place, for messages."""
        return self.connection.where

    def check_entry(self, data: Node) -> None:
        """Raise CodecError if the only entry of a collection cannot be stored."""
        plan_arrays(data)

    def read_table(self) -> Encoded:
        """Return the table as the server has it."""
        return read_content(self.connection).table

    def commit(self, change: Change) -> None:
        """Change table and arrays, at one moment."""

        def make(old: Content | None) -> Any:
            if old is None:
                raise FileNotFoundError(f"the collection at {self.where} was removed since it was opened")
            edit, plans = TableEdit(old.table), []
            change.edit(edit)
            for path in change.added:
                edit.put(path, None)
            taken = {name for place in edit.finish().leaves for name in list_names(place)}
            for path, data in change.added.items():
                for above in reversed(path[:-1]):
                    data = TensorDict({above: data})
                plans.append(plan_arrays(data, taken))
                taken |= plans[-1].arrays.keys()
                edit.add(path, load_table(plans[-1].header, self.where), path)
            return edit.finish(), plans, old.extra

        spare = write_content(self.connection, make)
        for source in change.release():
            if source.name in spare:
                source.keep(self.connection.run(methodcaller("get", spare[source.name])))
        if spare:
            self.connection.run(lambda client: client.delete(*spare.values()))

    def open_entries(self, paths: Sequence[tuple[str, ...]]) -> Any:
        """Open a collection with the stored entries of some key paths alone."""
        content = read_content(self.connection)
        return self.build(content._replace(table=select_keys(content.table, list(paths), self.where)))

    def build(self, content: Content) -> Any:
        """Return the collection with stored tensors."""

        def make_leaf(place: Any) -> torch.Tensor:
            def read(name: str) -> torch.Tensor:
                leaf = StoredTensor(content.sources[name], self.device)
                return leaf.clone() if is_nested(place) else leaf

            return restore(place, read)

        return build_leaves(content.table, self.where, make_leaf, self.device)

    def owns(self, leaf: StoredTensor) -> bool:
        """Return False for a leaf that is elsewhere."""
        source: Any = leaf.source
        return not isinstance(source, RedisSource) or source.connection.where == self.where

    @contextlib.contextmanager
    def send_together(self) -> Iterator[None]:
        """Send the writes of a block at its end, none of them if it raises an error."""
        pending = self.connection.pending
        if pending.writes is not None:
            yield
            return
        writes: list[Runs] = []
        pending.writes = writes
        try:
            yield
        finally:
            pending.writes = None
        write_runs(writes)


class _OnServer:
    """What collections on a server have in common."""

    _store: Any = None
    #: Whether this object has made the collection, which the end of its ``with`` block removes.
    _is_made = False
    #: For each block of this object whether it undoes an operation.
    _blocks: Sequence[bool] = ()

    @classmethod
    def from_store(cls, *, td_id: str, **kwargs: Any) -> Any:
        """Open a collection by its id; see :func:`td_redis.from_store`."""
        return from_store(td_id=td_id, **kwargs)

    @property
    def td_id(self) -> str:
        """The id under which :meth:`from_store` opens the collection."""
        return str(self._store.connection.td_id)

    _td_id = td_id  # programs of tensordict use the private name

    @property
    def prefix(self) -> str:
        """What all keys begin with."""
        return str(self._store.connection.prefix)

    def to_local(self) -> Any:
        """Return a copy in memory."""
        return self.clone()  # type: ignore[attr-defined]

    def clear_redis(self) -> None:
        """Remove the collection from the server."""
        drop(self._store.connection)

    def close(self) -> None:
        """Close the connection, which is opened again when elements are used."""
        connection = self._store.connection
        if "client" not in connection.options and connection.client is not None:
            connection.client.close()
            connection.client = None

    def __enter__(self) -> Any:
        """Start a block, which undoes the last operation, as that of each collection, or removes what this object has made."""
        self._blocks = (*self._blocks, self._undo is not None)  # type: ignore[attr-defined]
        return super().__enter__() if self._blocks[-1] else self  # type: ignore[misc]

    def __exit__(self, *error: Any) -> None:
        """End a block."""
        *self._blocks, is_operation = self._blocks
        if is_operation:
            super().__exit__(*error)  # type: ignore[misc]
            return
        if self._is_made:
            self.clear_redis()
        self.close()


def connect(
    td_id: str | None,
    *,
    backend: str = "redis",
    host: str = "localhost",
    port: int = 6379,
    db: int = 0,
    unix_socket_path: str | None = None,
    prefix: str = "tensordict",
    client: Any = None,
    **redis_kwargs: Any,
) -> Connection:
    """Return the connection to a collection; a new one without ``td_id``."""
    if backend not in get_args(STORE_BACKENDS):
        raise ValueError(
            f"backend is one of {', '.join(map(repr, get_args(STORE_BACKENDS)))}; got {backend!r}"
        )
    options = {"host": host, "port": port, "db": db, **redis_kwargs}
    if unix_socket_path is not None:
        options["unix_socket_path"] = unix_socket_path
    if client is not None:
        if redis_kwargs:
            raise TypeError(f"with client=, these options would have no effect: {', '.join(redis_kwargs)}")
        options, redis_kwargs = {"client": client}, client.connection_pool.connection_kwargs
    if redis_kwargs.get("decode_responses"):
        raise ValueError("the client must return bytes: decode_responses must not be True")
    return Connection(options, prefix, str(uuid.uuid4()) if td_id is None else td_id)


def drop(connection: Connection) -> None:
    """Remove a collection, and what a process that was killed has left of it."""
    escaped = "".join(f"\\{char}" if char in "*?[]\\" else char for char in connection.key(""))

    def call(client: Any) -> None:
        for key in client.scan_iter(f"{escaped}*", count=1000):
            client.unlink(key)

    connection.run(call)


def save(
    data: Any, connection: Connection, device: DeviceType | None, extra: dict[str, Any], blank: bool = False
) -> Any:
    """Store a collection, and open it."""
    plan = plan_arrays(data, blank=blank)

    def make(old: Content | None) -> Any:
        if old is not None:
            raise FileExistsError(f"there is a collection at {connection.where}: open it with from_store()")
        return load_table(plan.header, connection.where), [plan], extra

    write_content(connection, make, blank=blank)
    opened = open_store(connection, device)
    if isinstance(opened, _OnServer):
        opened._is_made = True
    return opened


def open_store(
    connection: Connection, device: DeviceType | None = None, cached: bool = True, allow_pickle: bool = False
) -> Any:
    """Open the collection of a connection."""
    content = read_content(connection, allow_pickle=allow_pickle)
    connection.keep_alive(content.extra.get("ttl"), list_keys(connection, content.sources), connection.due)
    store = Store(connection, device, cached)
    built = store.build(content)
    if type(built) is LazyStackedTensorDict:
        return LazyStackedTensorDictStore._of_members(
            store, built.tensordicts, (built.stack_dim, None)
        ).lock_()
    if type(built) is not TensorDict:
        return built.lock_()
    opened = TensorDictStore._of_opened(store, (), built)
    if lazy := content.extra.get("lazy"):
        return LazyStackedTensorDictStore._of_members(store, [*opened.values()], lazy)
    return opened


@set_module("td_redis")
class TensorDictStore(_OnServer, LiveCollection):
    """A collection on a Redis server, which several processes read and write.

    Leaves are stored tensors: elements are read when they are used, the rows of all leaves with one request, and writes in
    place reach the server. So do new entries, removed and renamed ones. An index writes all leaves at one moment; ``store[i] =
    data`` adds the entries that are missing, as zeros. Results of operations are TensorDicts. A ``with`` block removes at its end
    what this object has made.

    Args:
        backend: a label, ``"redis"``, ``"dragonfly"`` or ``"keydb"``: the protocol is the same.
        host: name of the server.
        port: port of the server.
        db: number of the data base.
        unix_socket_path: a socket in place of host and port.
        prefix: what all keys begin with.
        batch_size: batch size of a new collection, by default [].
        device: device of the leaves, to which elements are moved after they were read.
        client: a client of redis-py in place of what describes the server.
        td_id: opens the collection of this id if there is one; a new collection has a new id by default.
        cache_metadata: False asks the server for the present entries whenever they are listed.
        ttl: seconds after the last use until the server removes the collection, by default a week; None for never.
        allow_pickle: read values that tensordict has pickled. They can run any code.
        **redis_kwargs: options of ``redis.Redis``, such as ``password``.

    >>> import fakeredis
    >>> store = TensorDictStore(batch_size=[4], client=fakeredis.FakeRedis())
    >>> store[1] = TensorDict({"a": torch.ones(2)})
    >>> store[[1, 2]]["a"].sum(1)
    tensor([2., 0.])
    """

    _store: Store
    _header: bytes | None = None

    def __init__(
        self,
        *,
        backend: STORE_BACKENDS = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        batch_size: Any = None,
        device: DeviceType | None = None,
        client: Any = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        ttl: int | None = _TTL,
        allow_pickle: bool = False,
        **redis_kwargs: Any,
    ) -> None:
        place = {"host": host, "port": port, "db": db, "unix_socket_path": unix_socket_path, "client": client}
        connection = connect(td_id, backend=backend, prefix=prefix, **place, **redis_kwargs)
        try:
            opened = open_store(connection, device, cache_metadata, allow_pickle)
        except FileNotFoundError:
            data = TensorDict({}, batch_size or [], device=device)
            opened = save(data, connection, device, {"ttl": ttl})
            opened._store.is_cached = cache_metadata
        if not isinstance(opened, TensorDictStore):
            raise TypeError(f"{connection.where} has a {type(opened).__name__}: open it with from_store()")
        if batch_size is not None and as_batch_size(batch_size) != opened.batch_size:
            raise BatchSizeError(
                f"batch_size {list(as_batch_size(batch_size))} was given, {connection.where} has {list(opened.batch_size)}"
            )
        self.__dict__.update(vars(opened))

    @classmethod
    def from_tensordict(cls, td: Any, *, device: DeviceType | None = None, **kwargs: Any) -> Any:
        """Store a collection, and return it opened; the options are those of the constructor.

        A lazy stack is returned as a :class:`LazyStackedTensorDictStore`, a tensorclass as an instance of its class.

        >>> import fakeredis
        >>> TensorDictStore.from_tensordict(TensorDict({"a": torch.ones(2)}), client=fakeredis.FakeRedis())["a"].sum()
        tensor(2.)
        """
        return store_collection(td, device=device, **kwargs)

    @classmethod
    def from_dict(  # type: ignore[override]  # the signature of tensordict
        cls,
        input_dict: Any,
        *,
        auto_batch_size: bool = False,
        batch_size: Any = None,
        device: DeviceType | None = None,
        batch_dims: int | None = None,
        names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Store a dict, and return it opened.

        >>> import fakeredis
        >>> TensorDictStore.from_dict({"a": torch.ones(2)}, batch_size=[2], client=fakeredis.FakeRedis()).batch_size
        torch.Size([2])
        """
        data = TensorDict.from_dict(
            input_dict,
            auto_batch_size=auto_batch_size,
            batch_size=batch_size,
            batch_dims=batch_dims,
            names=names,
        )
        return store_collection(data, device=device, **kwargs)

    @classmethod
    def from_schema(
        cls,
        schema: Mapping[Any, Any],
        *,
        batch_size: Any = None,
        device: DeviceType | None = None,
        ttl: int | None = _TTL,
        td_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Store zeros, which are not sent, for a mapping from keys to pairs of a shape without the batch dims and a dtype.

        >>> import fakeredis
        >>> schema = {"a": ([3], torch.float32)}
        >>> TensorDictStore.from_schema(schema, batch_size=[2], client=fakeredis.FakeRedis())["a"].shape
        torch.Size([2, 3])
        """
        size = as_batch_size(batch_size)
        data = TensorDict({}, size)
        for key, (shape, dtype) in schema.items():
            data.set(key, torch.zeros((), dtype=as_dtype(dtype)).expand((*size, *shape)))
        return save(data, connect(td_id, **kwargs), device, {"ttl": ttl}, blank=True)

    def _children(self) -> Any:
        store = self._store
        if store.edits is None and not self._is_removed and not (self._entries and store.is_cached):
            content = read_content(store.connection)
            if content.header is None or content.header != self._header:
                found = TensorDictStore._of_opened(store, (), store.build(content))
                for key in self._path:
                    found = getattr(found, "_entries", {}).get(key)
                held = vars(found) if isinstance(found, TensorDictStore) else {"_entries": {}}
                vars(self).update(held, _header=content.header)
        return self._entries

    def _assign(self, index: Any, value: Any, *, non_blocking: bool = False) -> None:
        with self._store.send_together():
            super()._assign(index, value, non_blocking=non_blocking)

    def update_(self, *args: Any, **kwargs: Any) -> Any:
        """Copy entries into the existing ones, in place, all at one moment."""
        with self._store.send_together():
            return super().update_(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Reduce to the place and the stored tensors; see :func:`td_core.reopen` for passwords."""
        return rebuild_store, (self._store, self._path, self.clone(recurse=False))


@set_module("td_redis")
class LazyStackedTensorDictStore(_OnServer, LazyStackedTensorDict):
    """A lazy stack on a Redis server, whose members are collections there; they can have different entries and shapes.

    Args:
        count: number of members of a new stack.
        stack_dim: position of the stack dim in the batch size.
        inner_batch_size: batch size of the members.
        **kwargs: the options of :class:`TensorDictStore`.

    >>> import fakeredis
    >>> store = LazyStackedTensorDictStore(count=2, inner_batch_size=[], client=fakeredis.FakeRedis())
    >>> store[0]["a"], store[1]["a"] = torch.ones(1), torch.ones(2)
    >>> store.shape, store[1]["a"].shape
    (torch.Size([2]), torch.Size([2]))
    """

    def __init__(self, *, count: int, stack_dim: int = 0, inner_batch_size: Any, **kwargs: Any) -> None:
        members = [TensorDict({}, inner_batch_size) for _ in range(count)]
        made = store_collection(LazyStackedTensorDict(*members, stack_dim=stack_dim), **kwargs)
        super().__init__(*made.tensordicts, stack_dim=made.stack_dim)
        self._store, self._is_made = made._store, True

    @classmethod
    def _of_members(cls, store: Store, members: Sequence[Any], dim: Sequence[Any]) -> Any:
        self = cls.__new__(cls)
        super(cls, self).__init__(*members, stack_dim=dim[0], stack_dim_name=dim[1])
        self._store = store
        return self

    @classmethod
    def from_lazy_stack(cls, lazy_td: Any, *, device: DeviceType | None = None, **kwargs: Any) -> Any:
        """Store a lazy stack, and return it opened; the options are those of :class:`TensorDictStore`."""
        if not isinstance(lazy_td, LazyStackedTensorDict):
            raise TypeError(f"from_lazy_stack() takes a lazy stack; got a {type(lazy_td).__name__}")
        return store_collection(lazy_td, device=device, **kwargs)

    def to_local(self) -> Any:
        """Return a copy in memory."""
        members = [member.clone() for member in self.tensordicts]
        return LazyStackedTensorDict(*members, stack_dim=self.stack_dim, stack_dim_name=self.stack_dim_name)

    def _edit_together(self) -> Any:
        return self._store.edit_together() if self._store is not None else super()._edit_together()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the members."""
        if self._store is None:
            return super().__reduce_ex__(protocol)
        return rebuild_stack, (self._store, self.tensordicts, (self.stack_dim, self.stack_dim_name))


@set_module("td_redis")
def rebuild_store(store: Store, path: tuple[str, ...], opened: Any) -> Any:
    """Rebuild the collection of a pickle."""
    return TensorDictStore._of_opened(store, path, opened)


@set_module("td_redis")
def rebuild_stack(store: Store, members: Sequence[Any], dim: Sequence[Any]) -> Any:
    """Rebuild the lazy stack of a pickle."""
    return LazyStackedTensorDictStore._of_members(store, members, dim)


def store_collection(
    data: Any,
    *,
    device: DeviceType | None = None,
    td_id: str | None = None,
    ttl: int | None = _TTL,
    allow_pickle: bool = False,
    **kwargs: Any,
) -> Any:
    """Store a collection, and return it opened; ``kwargs`` are the place."""
    if allow_pickle:
        raise ValueError("td-redis never writes pickles: allow_pickle must be False")
    connection = connect(td_id, **kwargs)
    extra: dict[str, Any] = {"ttl": ttl}
    if isinstance(data, LazyStackedTensorDict):
        if data.hook_in is not None or data.hook_out is not None:
            raise CodecError("cannot store a lazy stack with hooks, which are functions")
        extra["lazy"] = (data.stack_dim, data.stack_dim_name)
        data = TensorDict({str(i): member for i, member in enumerate(data.tensordicts)})
    return save(data, connection, device, extra)


def from_store(
    *,
    td_id: str,
    device: DeviceType | None = None,
    tensorclass_cls: type | str | None = None,
    cache_metadata: bool = True,
    allow_pickle: bool = False,
    **kwargs: Any,
) -> Any:
    """Open a collection by its id; the options are those of :class:`TensorDictStore`.

    ``tensorclass_cls`` is the class of the result, or its name with that of its module.

    Raises:
        FileNotFoundError: the server has no such collection.

    >>> import fakeredis
    >>> server = fakeredis.FakeRedis()
    >>> made = TensorDict({"a": torch.ones(2)}).to_store(client=server)
    >>> from_store(td_id=made.td_id, client=server)["a"].sum()
    tensor(2.)
    """
    opened = open_store(connect(td_id, **kwargs), device, cache_metadata, allow_pickle)
    named: Any = resolve_name(tensorclass_cls) if isinstance(tensorclass_cls, str) else tensorclass_cls
    return opened if named is None or isinstance(opened, named) else named.from_tensordict(opened)


# A save or message of such a collection has TensorDicts.
kinds.store_as(TensorDictStore, "TensorDict")
