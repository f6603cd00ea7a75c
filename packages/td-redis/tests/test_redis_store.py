"""Collections on a server: structure, values, lazy stacks, several clients, time to live, pickles and bad arguments."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict, lazy_stack
from td_core.errors import BatchSizeError, CodecError, FormatError
from td_core.testing import assert_same
from td_redis import LazyStackedTensorDictStore, TensorDictStore, from_store, to_store
from td_redis._redis_source import PIECE, RedisSource


def make_data() -> TensorDict:
    data = TensorDict({"a": torch.arange(12).view(4, 3), "n": {"b": torch.zeros(4)}}, [4], names=["time"])
    data["n", "b"] += 0.5
    return data


@pytest.fixture
def store(location: dict[str, Any]) -> TensorDictStore:
    made: TensorDictStore = make_data().to_store(**location)
    return made


def reopen(store: Any, location: dict[str, Any]) -> Any:
    return from_store(td_id=store.td_id, **location)


EDITS: dict[str, Any] = {
    "set_new": lambda td: td.set("x", torch.arange(8).view(4, 2)),
    "set_nested": lambda td: td.set(("n", "deep", "x"), torch.ones(4, 1)),
    "set_node": lambda td: td.set(
        "m", TensorDict({"p": torch.zeros(4), "q": {"r": torch.ones(4).bfloat16()}}, [4])
    ),
    "set_stack": lambda td: td.set(
        "s", lazy_stack([TensorDict({"a": torch.full((i,), i)}) for i in range(4)])
    ),
    "replace_by_other_shape": lambda td: td.set("a", torch.arange(4.0)),
    "replace_by_same_shape": lambda td: td.set("a", torch.full((4, 3), 7)),
    "replace_by_other_dtype": lambda td: td.set("a", torch.full((4, 3), 7.0)),
    "replace_node_by_leaf": lambda td: td.set("n", torch.full((4,), 2)),
    "replace_leaf_by_node": lambda td: td.set("a", TensorDict({"b": torch.ones(4)}, [4])),
    "remove_leaf": lambda td: td.del_(("n", "b")),
    "remove_node": lambda td: td.del_("n"),
    "rename": lambda td: td.rename_key_("a", "z").rename_key_(("n", "b"), ("n", "c")),
    "pop": lambda td: td.pop("a"),
    "clear": lambda td: td.clear(),
    "update": lambda td: td.update(
        {"a": torch.ones(4, 3), "new": torch.zeros(4), "n": {"b": torch.full((4,), 9.0)}}
    ),
    "write_row": lambda td: td.__setitem__(1, td[0].clone()),
    "write_rows": lambda td: td.__setitem__([3, 0], td[[0, 1]]),
    "write_mask": lambda td: td.__setitem__(torch.tensor([True, False, True, False]), td[:2].clone()),
    "write_column": lambda td: td["a"][:, 1].fill_(5),
    "write_new_key_at_row": lambda td: td.__setitem__(
        2, TensorDict({"a": torch.ones(3).long(), "new": torch.ones(2)})
    ),
    "update_": lambda td: td.update_({"a": torch.ones(4, 3).long()}),
    "add_": lambda td: td.add_(1),
    "zero_": lambda td: td.zero_(),
    "batch_size": lambda td: setattr(td, "batch_size", []),
    "names": lambda td: setattr(td, "names", ["row"]),
    "key_with_dot": lambda td: td.set("n.b", torch.ones(4)),
    "key_with_percent": lambda td: td.set("n%2Eb", torch.ones(4)),
    "empty_node": lambda td: td.set("e", TensorDict({}, [4])),
    "no_elements": lambda td: td.set("z", torch.zeros(4, 0)),
}


@pytest.mark.parametrize("name", EDITS)
def test_edit_reaches_the_server(name: str, store: Any, location: dict[str, Any]) -> None:
    expected = make_data()
    EDITS[name](expected)
    EDITS[name](store)
    assert_same(store.to_local(), expected)
    opened = reopen(store, location)
    assert_same(opened.to_local(), expected)
    assert list(opened.keys(True)) == list(expected.keys(True))


VALUE, LEAF, NODE = "text", torch.ones(4, 2), TensorDict({"x": torch.zeros(4)}, [4])
KINDS = {
    "value": VALUE,
    "values": ["p", "q", "r", "s"],
    "not_json": {1.5},
    "leaf": LEAF,
    "empty": torch.zeros(4, 0),
    "node": NODE,
}
CHANGES: dict[str, Any] = {
    "set": lambda td, new: td.set("k", new),
    "update": lambda td, new: td.update({"k": new, "a": torch.zeros(4)}),
    "rename": lambda td, new: td.set("other", new).rename_key_("other", "k"),
    "pop_and_set": lambda td, new: (td.pop("k"), td.set("k", new)),
    "delete_and_update": lambda td, new: (td.del_("k"), td.update({"k": new})),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("old", KINDS)
def test_entry_is_replaced_by_one_of_any_kind(
    old: str, new: str, change: str, location: dict[str, Any]
) -> None:
    pytest.importorskip("td_tensorclass")
    data = make_data().set("k", KINDS[old])
    store = data.to_store(**location)
    held = store["k"]
    CHANGES[change](store, KINDS[new])
    CHANGES[change](data, KINDS[new])
    assert_same(store.to_local(), data)
    assert_same(reopen(store, location).to_local(), data)
    if isinstance(held, torch.Tensor):
        assert torch.equal(held.clone(), KINDS[old])


def test_value_whose_name_an_array_has_is_not_shown_to_tensordict(location: dict[str, Any]) -> None:
    pytest.importorskip("td_tensorclass")
    tied = torch.ones(4)
    store = TensorDict({"a": tied, "b": tied}, [4]).to_store(**location)
    del store["a"]  # the array has the name 'a', and stays for 'b'
    store["a"] = "text"
    assert_same(reopen(store, location).to_local(), TensorDict({"b": tied, "a": "text"}, [4]))
    connection = store["b"].source.connection
    assert connection.run(lambda client: client.smembers(connection.key("__keys__"))) == set()
    del store["b"]
    store["c"] = tied
    connection.run(lambda client: client.delete(connection.key("td")))
    seen = reopen(store, location)
    assert (seen["a"], sorted(seen.keys())) == ("text", ["a", "c"])


@pytest.mark.parametrize("old", ["value", "values"])
def test_value_of_a_store_is_locked(old: str, location: dict[str, Any]) -> None:
    pytest.importorskip("td_tensorclass")
    store = make_data().set("k", KINDS[old]).to_store(**location)
    with pytest.raises(td_core.LockedError, match="cannot clear the collection: the NonTensor.* is locked"):
        store.get("k").clear()
    assert store["k"] == KINDS[old]


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64,
          torch.float8_e4m3fn]  # fmt: skip


def test_what_tensordict_loses_comes_back(location: dict[str, Any]) -> None:
    data = TensorDict(
        {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES}, [3], names=["time"], device="cpu"
    )
    data["empty"] = TensorDict({"below": TensorDict({}, [3])}, [3])
    data["expanded"] = torch.arange(3).view(3, 1).expand(3, 1000)
    data["row", "uneven"] = lazy_stack(
        [TensorDict({"a": torch.zeros(i), str(i): torch.ones(())}) for i in range(3)]
    )
    opened = reopen(data.to_store(**location), location)
    assert_same(opened.to_local(), data)
    assert (list(opened.keys(True)), opened.names) == (list(data.keys(True)), ["time"])


def test_values_come_back(location: dict[str, Any]) -> None:
    pytest.importorskip("td_tensorclass")
    data = TensorDict({"text": "hello", "pair": ("x", (1, None)), "rows": ["p", "q"], "n": {"d": {1.5}}}, [2])
    store = data.to_store(**location)
    opened = reopen(store, location)
    assert (opened["text"], opened["pair"], opened["rows"], opened["n", "d"]) == (
        "hello",
        ("x", (1, None)),
        ["p", "q"],
        {1.5},
    )
    store["text"] = "other"
    store["rows"] = ["p", "r"]
    assert (reopen(store, location)["text"], reopen(store, location)["rows"]) == ("other", ["p", "r"])


def test_value_without_serializer_is_refused_before_anything_is_written(location: dict[str, Any]) -> None:
    pytest.importorskip("td_tensorclass")
    store = make_data().to_store(**location)
    with pytest.raises(CodecError, match="'v'"):
        TensorDict({"v": object()}).to_store(td_id="refused", **location)
    with pytest.raises(FileNotFoundError):
        from_store(td_id="refused", **location)
    with pytest.raises(CodecError, match="'v'"):
        store["v"] = object()
    assert_same(reopen(store, location).to_local(), make_data())


def test_tensorclass_comes_back(location: dict[str, Any]) -> None:
    tensorclass = pytest.importorskip("td_tensorclass")

    class Pose(tensorclass.TensorClass):
        xy: torch.Tensor

    pose = Pose(xy=torch.ones(3, 2), batch_size=[3])
    pose.to_store(td_id="pose", **location)[1] = Pose(xy=torch.zeros(2), batch_size=[])
    opened = from_store(td_id="pose", tensorclass_cls=Pose, **location)
    assert type(opened) is Pose
    assert opened.xy.tolist() == [[1, 1], [0, 0], [1, 1]]
    plain = TensorDict({"xy": torch.ones(3, 2)}, [3]).to_store(**location)
    assert type(from_store(td_id=plain.td_id, tensorclass_cls=Pose, **location)) is Pose


def test_large_leaves_are_sent_in_pieces(location: dict[str, Any]) -> None:
    data = TensorDict(
        {"a": torch.arange(PIECE // 4 + 3), "b": torch.arange(PIECE // 8 + 5), "c": torch.ones(2)}
    )
    store = data.to_store(**location)
    assert_same(reopen(store, location).to_local(), data)
    store["a"] = data["a"] * 2
    store["b"][1:] = 7
    assert torch.equal(store["a"].clone(), data["a"] * 2)
    assert store["b"][:3].tolist() == [0, 7, 7]
    assert int(store["b"].sum()) == 7 * (PIECE // 8 + 4)


def test_leaf_larger_than_a_string_of_redis_is_refused(location: dict[str, Any]) -> None:
    data = TensorDict({"n": {"a": torch.zeros((), dtype=torch.uint8).expand(2, (512 << 20) // 2 + 1)}})
    data["n", "a"] = data["n", "a"].as_strided(data["n", "a"].shape, (0, 0))
    with pytest.raises(
        CodecError, match=r"'n', 'a'.*536870914 bytes: a string of Redis has at most 536870912"
    ):
        TensorDictStore.from_schema({("n", "a"): ([2, (512 << 20) // 2 + 1], torch.uint8)}, **location)


def test_from_schema_makes_zeros_without_sending_them(location: dict[str, Any]) -> None:
    schema = {"a": ([3], torch.float32), ("n", "b"): ([], torch.int16), "z": ([0], torch.bool)}
    store = TensorDictStore.from_schema(schema, batch_size=[4], td_id="zeros", **location)
    store[1] = TensorDict({"a": torch.ones(3)})
    assert store["a"].sum(1).tolist() == [0, 3, 0, 0]
    assert store["n", "b"].tolist() == [0, 0, 0, 0]
    assert from_store(td_id="zeros", **location)["z"].shape == (4, 0)


def test_from_dict_finds_the_batch_size(location: dict[str, Any]) -> None:
    store = TensorDictStore.from_dict(
        {"a": torch.ones(3, 2), "n": {"b": torch.zeros(3)}}, auto_batch_size=True, batch_dims=1, **location
    )
    assert (store.batch_size, store["n"].batch_size) == (torch.Size([3]), torch.Size([3]))


def test_empty_store_gets_the_entries_of_its_first_row(location: dict[str, Any]) -> None:
    store = TensorDictStore(batch_size=[4], td_id="buffer", **location)
    reader = from_store(td_id="buffer", **location)
    assert list(reader.keys()) == []
    store[1] = TensorDict({"obs": torch.ones(2), "n": {"done": torch.tensor(True)}})
    store[2:] = TensorDict(
        {"obs": torch.full((2, 2), 3.0), "n": {"done": torch.ones(2, dtype=torch.bool)}}, [2]
    )
    assert reader["obs"].tolist() == [[0, 0], [1, 1], [3, 3], [3, 3]]
    assert reader[[3, 0]]["n", "done"].tolist() == [True, False]


def test_store_without_cached_metadata_sees_entries_of_others(store: Any, location: dict[str, Any]) -> None:
    live = from_store(td_id=store.td_id, cache_metadata=False, **location)
    below = live["n"]
    store["x"] = torch.ones(4)
    store["n", "c"] = torch.ones(4)
    del store["a"]
    assert sorted(live.keys()) == ["n", "x"]
    assert sorted(below.keys()) == ["b", "c"]
    live["y"] = torch.zeros(4)
    assert sorted(reopen(store, location).keys()) == ["n", "x", "y"]
    del store["n"]
    assert list(below.keys()) == []


@pytest.mark.parametrize("change", ["removed", "replaced", "dropped"])
def test_leaf_that_others_have_replaced_raises(change: str, store: Any, location: dict[str, Any]) -> None:
    other = reopen(store, location)
    if change == "removed":
        del store["a"]
    elif change == "replaced":
        store["a"] = torch.zeros(4, 6, dtype=torch.int32)  # as many bytes
    else:
        store.clear_redis()
    for use in (
        lambda: other["a"].clone(),
        lambda: other["a"].zero_(),
        lambda: other[[2, 0]],
        lambda: other["a"][2:3].fill_(1),
    ):
        with pytest.raises(
            FormatError, match="the array 'a' was removed or replaced since it was opened: open it again"
        ):
            use()


def test_leaf_that_the_program_has_removed_keeps_its_elements(store: Any) -> None:
    held, rows = store["a"], store["n", "b"][1:3]
    del store["n"]
    store["a"] = torch.zeros(4)
    assert held.tolist() == make_data()["a"].tolist()
    rows.fill_(7)
    assert rows.tolist() == [7, 7]
    assert store["a"].tolist() == [0, 0, 0, 0]


def test_reads_of_several_leaves_are_of_one_moment(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from td_redis import _redis_source

    monkeypatch.setattr(_redis_source, "PIECE", 40)
    read, count = _redis_source._read_batch, iter(range(100))

    def read_and_write(batch: Any, client: Any) -> Any:
        found = read(batch, client)
        if next(count) < last:
            with monkeypatch.context() as patch:
                patch.setattr(_redis_source, "_read_batch", read)
                store["a"].add_(1)
        return found

    monkeypatch.setattr(_redis_source, "_read_batch", read_and_write)
    last = 2
    assert store["a"].clone().diff(dim=0).unique().tolist() == [3]
    count, last = iter(range(100000)), 100000
    with pytest.raises(FormatError, match="others have written each of the 10 times that it was read"):
        store["a"].clone()


def test_scripts_that_the_server_forbids_are_not_used(
    store: Any, location: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import redis

    def refuse(self: Any, *args: Any) -> Any:
        return self.execute_command("NO_SUCH_COMMAND")

    opened = reopen(store, location)
    monkeypatch.setattr(redis.Redis, "eval", refuse)
    assert opened[[3, 0, 1]]["a"].tolist() == make_data()["a"][[3, 0, 1]].tolist()
    assert not opened["a"].source.connection.scripts
    opened[[3, 0, 2]] = opened[[0, 0, 0]]
    assert store["a"][:, 0].tolist() == [0, 3, 0, 0]


def make_stack() -> Any:
    members = [TensorDict({"a": torch.full((i + 1,), i), "b": torch.tensor(i)}) for i in range(3)]
    return lazy_stack(members)


def test_lazy_stack_comes_back(location: dict[str, Any]) -> None:
    store = LazyStackedTensorDictStore.from_lazy_stack(make_stack(), **location)
    opened = LazyStackedTensorDictStore.from_store(td_id=store.td_id, **location)
    assert type(opened) is LazyStackedTensorDictStore
    assert_same(opened.to_local(), make_stack())
    opened[1]["a"].fill_(9)
    opened["c"] = torch.arange(3)
    del opened["b"]
    opened[2]["a"] = torch.ones(5)
    again = from_store(td_id=store.td_id, **location)
    assert [member["a"].tolist() for member in again] == [[0], [9, 9], [1, 1, 1, 1, 1]]
    assert (again["c"].tolist(), "b" in again.keys(), again.batch_size) == ([0, 1, 2], False, torch.Size([3]))


def test_lazy_stack_along_another_dim_and_with_names_comes_back(location: dict[str, Any]) -> None:
    members = [TensorDict({"a": torch.full((2,), i)}, [2], names=["row"]) for i in range(3)]
    data = td_core.LazyStackedTensorDict(*members, stack_dim=1, stack_dim_name="member")
    opened = from_store(td_id=data.to_store(**location).td_id, **location)
    assert (opened.batch_size, opened.names, opened.stack_dim) == (torch.Size([2, 3]), ["row", "member"], 1)
    assert opened["a"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_new_lazy_stack_is_filled_row_by_row(location: dict[str, Any]) -> None:
    store = LazyStackedTensorDictStore(count=3, inner_batch_size=[], td_id="lazy", **location)
    store[0] = TensorDict({"a": torch.ones(2)})
    store[1], store[2] = TensorDict({"a": torch.ones(1)}), TensorDict({"a": torch.ones(0)})
    assert [member["a"].shape[0] for member in from_store(td_id="lazy", **location)] == [2, 1, 0]
    with pytest.raises(TypeError, match="has a LazyStackedTensorDictStore: open it with from_store"):
        TensorDictStore(td_id="lazy", **location)
    with pytest.raises(TypeError, match="takes a lazy stack; got a TensorDict"):
        LazyStackedTensorDictStore.from_lazy_stack(TensorDict(), **location)


def test_lazy_stack_with_hooks_is_refused(location: dict[str, Any]) -> None:
    data = td_core.LazyStackedTensorDict(TensorDict({"a": 1}), hook_out=lambda entry: entry)
    with pytest.raises(CodecError, match="with hooks"):
        data.to_store(**location)


def list_keys(location: dict[str, Any]) -> list[bytes]:
    import redis

    client = location.get("client") or redis.Redis(**location)
    keys = client.keys()
    if "client" not in location:
        client.close()
    return sorted(keys)


def test_block_removes_what_the_object_has_made(location: dict[str, Any]) -> None:
    kept = make_data().to_store(td_id="kept", **location)
    before = list_keys(location)
    with make_data().to_store(td_id="block", **location) as store, store.unlock_():
        store["x"] = torch.ones(4)
        assert len(list_keys(location)) > len(before)
        with from_store(td_id="block", **location) as opened:
            assert opened["x"].sum() == 4
        assert reopen(store, location)["x"].sum() == 4
    assert list_keys(location) == before
    kept.clear_redis()
    assert list_keys(location) == []
    with pytest.raises(FileNotFoundError, match="there is no collection at redis://.* tensordict:kept"):
        from_store(td_id="kept", **location)
    with pytest.raises(FileNotFoundError, match="was removed since it was opened"):
        kept["new"] = torch.ones(4)


def test_ids_with_wildcards_drop_only_themselves(location: dict[str, Any]) -> None:
    make_data().to_store(td_id="ab", **location)
    make_data().to_store(td_id="a*", **location).clear_redis()
    assert_same(from_store(td_id="ab", **location).to_local(), make_data())


@pytest.mark.parametrize(("ttl", "seconds"), [(None, [-1]), (100, range(90, 101))])
def test_keys_live_as_long_as_ttl_says(ttl: int | None, seconds: Any, location: dict[str, Any]) -> None:
    store = make_data().to_store(td_id="life", ttl=ttl, **location)
    store["x"] = torch.ones(4)
    run = store["a"].source.connection.run

    def ask(client: Any) -> set[int]:
        return {client.ttl(key) for key in client.keys()}

    assert run(ask) <= {*seconds}
    if ttl is not None:
        run(lambda client: [client.expire(key, 5) for key in client.keys()])
        store["a"].clone()  # the time of the last use was just now
        assert run(ask) == {5}
        opened = from_store(td_id="life", **location)
        opened["a"].clone()
        assert run(ask) <= {*seconds}


def test_default_time_to_live_is_a_week(location: dict[str, Any]) -> None:
    store = make_data().to_store(**location)
    assert store["a"].source.connection.ttl == 7 * 24 * 3600


def test_pickle_has_the_place_and_no_elements(store: Any, location: dict[str, Any]) -> None:
    for copy in (pickle.loads(pickle.dumps(store)), pickle.loads(pickle.dumps({"x": store["n"]}))["x"]):
        if "client" in location:
            with pytest.raises(
                ValueError,
                match=r"its pickle does not contain client: give the options again with td_core.reopen",
            ):
                copy.to_local()
            td_core.reopen(copy, storage_options=location)
        assert type(copy) is TensorDictStore
        copy["new"] = torch.ones(4)
    assert sorted(reopen(store, location).keys()) == ["a", "n", "new"]
    assert reopen(store, location)["n", "new"].sum() == 4


def test_lazy_stack_is_pickled(location: dict[str, Any]) -> None:
    copy = pickle.loads(pickle.dumps(make_stack().to_store(**location)))
    if "client" in location:
        td_core.reopen(copy, storage_options=location)
    assert type(copy) is LazyStackedTensorDictStore
    assert_same(copy.to_local(), make_stack())


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "backend": (
        {"backend": "sqlite"},
        ValueError,
        "backend is one of 'redis', 'dragonfly', 'keydb'; got 'sqlite'",
    ),
    "allow_pickle": ({"allow_pickle": True}, ValueError, "td-redis never writes pickles"),
    "unknown": ({"hots": "x"}, TypeError, "hots"),
    "decoded": ({"decode_responses": True}, ValueError, "decode_responses must not be True"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_raises_before_a_request(name: str) -> None:
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        to_store(make_data(), port=1, **options)


def test_options_of_connection_beside_a_client_are_refused() -> None:
    fakeredis = pytest.importorskip("fakeredis")
    with pytest.raises(TypeError, match="with client=, these options would have no effect: password"):
        make_data().to_store(client=fakeredis.FakeRedis(), password="x")
    with pytest.raises(ValueError, match="decode_responses must not be True"):
        make_data().to_store(client=fakeredis.FakeRedis(decode_responses=True))


def test_id_that_is_taken_is_refused(location: dict[str, Any]) -> None:
    make_data().to_store(td_id="taken", **location)
    with pytest.raises(FileExistsError, match="there is a collection at redis://.* tensordict:taken"):
        TensorDict({"b": torch.ones(1)}).to_store(td_id="taken", **location)
    assert TensorDictStore(td_id="taken", batch_size=[4], **location)["a"].shape == (4, 3)
    with pytest.raises(BatchSizeError, match=r"batch_size \[3\] was given, .* has \[4\]"):
        TensorDictStore(td_id="taken", batch_size=[3], **location)


def test_short_string_is_a_format_error(store: Any) -> None:
    connection = store["a"].source.connection
    connection.run(lambda client: client.set(connection.key("d", "a"), b"123"))
    for use in (lambda: store["a"].clone(), lambda: store[[0, 2, 3]]):
        with pytest.raises(
            FormatError, match=r"the array 'a' has fewer bytes than its shape \[4, 3\] and torch.int64"
        ):
            use()


DAMAGES: dict[str, tuple[Any, str]] = {
    "header": (lambda client, key: client.set(key("td"), b"{"), "redis://"),
    "version": (lambda client, key: client.set(key("td"), b'{"version": 9}'), "version"),
    "dtype": (
        lambda client, key: client.hset(key("m", "a"), "dtype", "os.system"),
        "metadata of the array 'a' is damaged",
    ),
    "shape": (
        lambda client, key: client.hset(key("m", "a"), "shape", "[-1]"),
        "metadata of the array 'a' is damaged",
    ),
    "other_shape": (
        lambda client, key: client.hset(key("m", "a"), "shape", "[3, 4]"),
        "another program has changed the shapes",
    ),
    "no_metadata": (lambda client, key: client.delete(key("m", "a")), "metadata of the array 'a' is damaged"),
    "another_key": (
        lambda client, key: client.sadd(key("__keys__"), "b"),
        "tensordict has added or removed entries",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_collection_raises(name: str, store: Any, location: dict[str, Any]) -> None:
    damage, message = DAMAGES[name]
    connection = store["a"].source.connection
    connection.run(lambda client: damage(client, connection.key))
    with pytest.raises(FormatError, match=message):
        reopen(store, location)


def test_source_is_a_part_of_the_interface(store: Any) -> None:
    source = store["a"].source
    assert isinstance(source, RedisSource)
    assert "'a'" in repr(source)
