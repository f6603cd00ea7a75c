"""The keys of a collection on a server: those of tensordict, and a header that says what they cannot."""

from __future__ import annotations

import json
import math
import pickle
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from td_core import LazyStackedTensorDict, TensorDict, lazy_stack
from td_core.errors import CodecError, FormatError
from td_core.spi import STORABLE, Encoded, as_bytes, dump_table, encode, load_table, parse_json, show_path
from td_store.arrays import (
    ArrayPlan,
    PlannedArray,
    compute_check,
    list_names,
    make_array_plan,
    make_table_header,
    read_shape,
)  # fmt: skip

from ._redis_source import PIECE, Connection, RedisSource, expect_changes

#: The most bytes of a string of Redis, and how many seconds the server has strings that are used for a moment.
_LARGEST, _SPARE = 512 << 20, 600
_DTYPES = frozenset(STORABLE.values())
#: The strings beside the arrays: our header, and what tensordict says of a collection and of a lazy stack.
_FACTS = (
    "td",
    "__batch_size__",
    "__device__",
    "__type__",
    "__count__",
    "__stack_dim__",
    "__inner_batch_size__",
)
#: The encodings of tensordict for values, by the kind of their nodes.
_ENCODINGS = {"NonTensorData": "json", "NonTensorStack": "json_array"}


class Content(NamedTuple):
    """What the server has of a collection: the header as it is stored, the table of nodes, arrays, and other fields."""

    header: bytes | None
    table: Encoded
    sources: dict[str, RedisSource]
    extra: dict[str, Any]


def plan_arrays(data: Any, reserved: Iterable[str] = (), *, blank: bool = False) -> ArrayPlan:
    """Plan the arrays of a collection; the name of an array is its keys, joined by dots."""
    plan = make_array_plan(data, _DTYPES, _join, blank=blank, reserved=reserved)
    for array in plan.arrays.values():
        if array.nbytes > _LARGEST:
            raise CodecError(
                f"cannot store {show_path(array.path)} of {array.nbytes} bytes: a string of Redis has at most {_LARGEST} "
                "(proto-max-bulk-len): split it along a dim"
            )
    return plan


def _join(path: tuple[str, ...]) -> str:
    return ".".join(key.replace("%", "%25").replace(".", "%2E") for key in path)


def read_content(connection: Connection, *, allow_pickle: bool = False) -> Content:
    """Read what describes a collection; FileNotFoundError if there is none."""
    key, where = connection.key, connection.where

    def ask(*commands: tuple[Any, ...]) -> list[Any]:
        def call(client: Any) -> list[Any]:
            with client.pipeline() as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                found: list[Any] = pipe.execute()
                return found

        return connection.run(call)

    while True:
        (header, *facts), visible, stamps = ask(
            ("MGET", *map(key, _FACTS)), ("SMEMBERS", key("__keys__")), ("HGETALL", key("stamps"))
        )
        if header is None and not any(facts):
            raise FileNotFoundError(f"there is no collection at {where}")
        names = sorted(name.decode() for name in visible)
        fields: dict[str, Any] = {}
        if header is not None:
            fields = parse_json(header, where)
            table = load_table(fields, where)
            if names != fields.get("keys"):
                raise FormatError(
                    f"{where}: tensordict has added or removed entries: delete {key('td')} to read what it sees"
                )
            names = list(dict.fromkeys(name for place in table.leaves for name in list_names(place)))
        again, *rows = ask(("GET", key("td")), *(("HGETALL", key("m", name)) for name in names))
        if again == header:
            break
    values = {name: row for name, row in zip(names, rows) if b"is_non_tensor" in row}
    sources = {
        name: _read_source(connection, name, row, stamps.get(name.encode()))
        for name, row in zip(names, rows)
        if name not in values
    }
    if header is None:
        foreign = _Foreign(where, dict(zip(_FACTS[1:], facts)), sources, dict(zip(names, rows)))
        texts = ask(*(("GET", key("d", name)) for name in values)) if values else []
        for (name, row), text in zip(values.items(), texts):
            foreign.add_value(name, row[b"encoding"], text, allow_pickle)
        return Content(None, foreign.finish(), sources, {"device": facts[1].decode() if facts[1] else None})
    if fields.get("check") != compute_check((name, source.shape) for name, source in sources.items()):
        raise FormatError(
            f"{where}: another program has changed the shapes of entries: delete {key('td')} to read what it sees"
        )
    return Content(header, table, sources, {name: fields.get(name) for name in ("ttl", "lazy")})


def _read_source(
    connection: Connection, name: str, row: dict[bytes, bytes], stamp: bytes | None
) -> RedisSource:
    try:
        dtype = STORABLE[row[b"dtype"].decode()]
        shape: Any = read_shape(parse_json(row[b"shape"], connection.where), dtype.itemsize)
        if row.get(b"homogeneous") == b"0":  # members of other shapes, one after the other
            shape = [
                sum(math.prod(read_shape(each)) for each in parse_json(row[b"shapes"], connection.where))
            ]
    except (LookupError, TypeError, ValueError) as error:
        raise FormatError(
            f"{connection.where}: the metadata of the array {name!r} is damaged: {row!r:.200}"
        ) from error
    return RedisSource(connection, name, dtype, shape, stamp)


class _Foreign:
    """Builds the table of a collection that tensordict has written."""

    def __init__(
        self, where: str, facts: dict[str, Any], sources: dict[str, RedisSource], rows: dict[str, Any]
    ) -> None:
        self.where, self.places = where, dict[int, Any]()
        self.dim = None if facts["__type__"] is None else int(facts["__stack_dim__"])
        size = parse_json(facts["__batch_size__" if self.dim is None else "__inner_batch_size__"], where)
        self.members = [
            TensorDict({}, size) for _ in range(1 if self.dim is None else int(facts["__count__"]))
        ]
        for name, source in sources.items():
            shapes, begin = [source.shape], 0
            if self.dim is not None:
                shapes = [source.shape[1:]] * len(self.members)
                if rows[name].get(b"homogeneous") == b"0":
                    shapes = parse_json(rows[name][b"shapes"], where)
            for i, (member, shape) in enumerate(zip(self.members, shapes, strict=True)):
                leaf = torch.empty(tuple(shape), dtype=source.dtype, device="meta")
                member.set(tuple(name.split(".")), leaf)
                self.places[id(leaf)] = name if self.dim is None else [name, 0, i]
                if b"shapes" in rows[name]:
                    self.places[id(leaf)] = {"packed": name, "begin": begin, "shape": list(shape)}
                begin += leaf.numel()

    def add_value(self, name: str, encoding: bytes, text: bytes, allow_pickle: bool) -> None:
        """Set a value that is no tensor."""
        path = tuple(name.split("."))
        if encoding == b"pickle" and not allow_pickle:
            raise FormatError(
                f"{self.where}: {show_path(path)} is a pickle, which can run any code: pass allow_pickle=True if you trust it"
            )
        value = pickle.loads(text) if encoding == b"pickle" else parse_json(text, self.where)
        for member in self.members:
            if encoding == b"json_array" and member.batch_size[:1] == (len(value),):
                member.set(
                    path, lazy_stack([TensorDict().set_non_tensor("v", item) for item in value]).get("v")
                )
            else:
                member.set_non_tensor(path, value)

    def finish(self) -> Encoded:
        """Return the table."""
        root: Any = (
            self.members[0] if self.dim is None else LazyStackedTensorDict(*self.members, stack_dim=self.dim)
        )
        encoded = encode(root)
        return load_table(dump_table(encoded, [self.places[id(leaf)] for leaf in encoded.leaves]), self.where)


def _list_arrays(table: Encoded) -> set[str]:
    return {name for place in table.leaves for name in list_names(place)}


def _list_visible(table: Encoded) -> Iterator[tuple[str, Any]]:
    """Yield the names that tensordict sees: of arrays with None, of values with their encoding and their JSON."""
    arrays = _list_arrays(table)
    todo: list[tuple[int, tuple[str, ...]]] = [(0, ())] if table.nodes[0]["kind"] == "TensorDict" else []
    while todo:
        position, path = todo.pop()
        for key, ref in table.nodes[position]["entries"]:
            name = _join((*path, key))
            if isinstance(ref, list):
                if table.leaves[ref[0]] == name:
                    yield name, None
            elif (kind := table.nodes[ref]["kind"]) == "TensorDict":
                todo.append((ref, (*path, key)))
            elif kind in _ENCODINGS and name not in arrays:  # the array of another entry can have the name
                value, types = table.values[table.nodes[ref]["values"][0][1]]
                if types is None:
                    yield name, (_ENCODINGS[kind], json.dumps(value))


def write_content(
    connection: Connection,
    make: Callable[[Content | None], tuple[Encoded, Sequence[ArrayPlan], dict[str, Any]]],
    *,
    blank: bool = False,
) -> dict[str, str]:
    """Change a collection on the server; others see the change as a whole, or not at all.

    Args:
        connection: the keys of the collection.
        make: takes what the server has, and returns the table, the plans of new arrays, and other fields of the header.
        blank: new arrays are zeros.

    Returns:
        The keys under which the strings of removed arrays are for some minutes, by the names of the arrays.
    """

    def call(client: Any) -> dict[str, str]:
        with client.pipeline() as pipe:
            while True:
                with expect_changes():
                    pipe.watch(*map(connection.key, ("td", "__keys__", "__batch_size__")))
                    old = None
                    with suppress(FileNotFoundError):
                        old = read_content(connection)
                    return _write(pipe, client, connection, old, *make(old), blank)

    connection.run(bool)  # what is due now would disturb the watch
    return connection.run(call, writes=True)


def _write(
    pipe: Any,
    client: Any,
    connection: Connection,
    old: Content | None,
    table: Encoded,
    plans: Sequence[ArrayPlan],
    extra: dict[str, Any],
    blank: bool,
) -> dict[str, str]:
    key, token = connection.key, secrets.token_hex(8)
    arrays = {name: array for plan in plans for name, array in plan.arrays.items()}
    sources = {} if old is None else old.sources
    shapes = {name: (arrays.get(name) or sources[name]).shape for name in _list_arrays(table)}
    gone = sources.keys() - (shapes.keys() - arrays.keys())
    removed = [name for name in gone if pipe.exists(key("d", name))]
    _upload(client, {key(token, "new", name): array for name, array in arrays.items()}, blank)
    pipe.multi()
    for name in removed:
        pipe.rename(key("d", name), key(token, name)).expire(key(token, name), _SPARE)
        pipe.delete(key("m", name)).hdel(key("stamps"), name)
    for name, array in arrays.items():
        pipe.rename(key(token, "new", name), key("d", name)).persist(key("d", name))
        pipe.delete(key("m", name))  # what it says of a value that had the name
        pipe.hset(key("m", name), mapping={"shape": json.dumps(list(array.shape)), "dtype": str(array.dtype)})
        pipe.hset(key("stamps"), name, token)
    before = {} if old is None else dict(_list_visible(old.table))
    visible = dict(_list_visible(table))
    for name, value in {**dict.fromkeys(before), **visible}.items():
        if before.get(name) != value and name not in shapes:
            pipe.delete(key("d", name), key("m", name))
            if value is not None:
                pipe.set(key("d", name), value[1])
                pipe.hset(key("m", name), mapping={"is_non_tensor": 1, "encoding": value[0]})
    own = {**extra, "keys": sorted(visible), "check": compute_check(shapes.items())}
    meta = table.nodes[0]["meta"]
    pipe.set(key("td"), json.dumps({**make_table_header(table), **own}, separators=(",", ":")))
    pipe.set(key("__device__"), meta.get("device") or "")
    pipe.set(key("__batch_size__"), json.dumps(meta.get("batch_size", [])))
    pipe.incr(key("gen")).delete(key("__keys__"))
    if visible:
        pipe.sadd(key("__keys__"), *visible)
    ttl, keys = extra.get("ttl"), list_keys(connection, {*shapes, *visible})
    connection.keep_alive(ttl, keys, time.monotonic() + (ttl or 0) / 10)
    for each in connection.keys if connection.ttl else ():
        pipe.expire(each, connection.ttl)
    pipe.execute()
    return {name: key(token, name) for name in removed}


def _upload(client: Any, arrays: Mapping[str, PlannedArray], blank: bool) -> None:
    """Write arrays to strings that the server removes if this process dies before they get their names."""
    with client.pipeline(transaction=False) as pipe:
        room = PIECE
        for key, array in arrays.items():
            pipe.set(key, b"", ex=_SPARE)
            if blank and array.nbytes:
                pipe.setrange(key, array.nbytes - 1, b"\0")
            data = b"" if blank else b"".join(as_bytes(part).numpy().tobytes() for part in array.read())
            for start in range(0, len(data), PIECE):
                pipe.append(key, data[start : start + PIECE])
                room -= len(data[start : start + PIECE])
                if room <= 0:
                    pipe.execute()
                    room = PIECE
        pipe.execute()


def list_keys(connection: Connection, names: Iterable[str]) -> list[str]:
    """Return all keys of a collection with the entries of some names."""
    facts = map(connection.key, (*_FACTS, "__keys__", "stamps", "gen"))
    return [*facts, *(connection.key(kind, name) for name in names for kind in "dm")]
