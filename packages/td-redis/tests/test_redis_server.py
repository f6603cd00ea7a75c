"""A server that is killed, processes, passwords, lost connections, the command line, and what tensordict has written."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
import time
from functools import partialmethod
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict
from td_core.testing import assert_same
from td_redis import TensorDictStore, from_store
from td_redis.__main__ import main


def make_data() -> TensorDict:
    return TensorDict({"a": torch.arange(12).view(4, 3), "n": {"b": torch.zeros(4)}}, [4])


def test_restarted_server_is_read_and_written_again(server: Any) -> None:
    store = make_data().to_store(port=server.port)
    server.kill()
    with pytest.raises(ConnectionError, match=rf"redis://localhost:{server.port}/0 tensordict:.*: "):
        store["a"].clone()
    with pytest.raises(ConnectionError):
        store["a"].zero_()
    server.start()
    assert_same(store.to_local(), make_data())
    server.kill()
    server.start()
    store[1] = store[0].clone()
    store["new"] = torch.ones(4)
    assert from_store(td_id=store.td_id, port=server.port)["a"][1].tolist() == [0, 1, 2]


def write_numbers(store: Any) -> None:
    for number in range(1, 100_000):
        store[:] = TensorDict({key: torch.full((1000,), float(number)) for key in ("a", "b")}, [1000])


def test_writer_that_loses_the_server_leaves_old_or_new(server: Any) -> None:
    store = TensorDict({"a": torch.zeros(1000), "b": torch.zeros(1000)}, [1000]).to_store(port=server.port)
    for round in range(3):
        killing = threading.Timer(0.02 * round, server.kill)
        killing.start()
        with pytest.raises(ConnectionError):
            write_numbers(store)
        killing.join()
        server.start()
        found = from_store(td_id=store.td_id, port=server.port).to_local()
        assert found["a"].unique().tolist() == found["b"].unique().tolist()
        assert len(found["a"].unique()) == 1


def read_rows(store: Any, results: Any) -> None:
    results.put(store[[3, 1]]["a"].tolist())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_use_connections_of_their_own(method: str, server: Any) -> None:
    context: Any = multiprocessing.get_context(method)
    store = make_data().to_store(port=server.port)
    store["a"].clone()
    results = context.Queue()
    children = [context.Process(target=read_rows, args=(store, results)) for _ in range(2)]
    for child in children:
        child.start()
    for _ in range(20):
        assert store[[0, 2]]["a"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert [results.get(timeout=60) for _ in children] == [[[9, 10, 11], [3, 4, 5]]] * 2
    for child in children:
        child.join()


def test_threads_read_and_write_together(server: Any) -> None:
    store = TensorDict({"a": torch.zeros(8, 100), "b": torch.zeros(8, 100)}, [8]).to_store(port=server.port)
    errors: list[BaseException] = []

    def work(row: int) -> None:
        try:
            for number in range(20):
                store[row] = TensorDict({"a": torch.full((100,), number), "b": torch.full((100,), number)})
                found = store[list(range(8))]
                assert all((found["a"][i] == found["b"][i]).all() for i in range(8))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store["a"].unique().tolist() == [19]


def test_password_is_in_no_pickle_and_no_message(server: Any) -> None:
    secret = "p4ssw0rd-in-no-message"
    plain = make_data().to_store(port=server.port)
    run = plain["a"].source.connection.run
    run(lambda client: client.config_set("requirepass", secret))
    try:
        store = make_data().to_store(port=server.port, password=secret)
        assert secret not in repr(store) + store._store.where + repr(store["a"].source)
        data = pickle.dumps(store)
        assert secret.encode() not in data
        copy = pickle.loads(data)
        with pytest.raises(ValueError, match="its pickle does not contain password: give the options again"):
            copy.to_local()
        assert_same(td_core.reopen(copy, storage_options={"password": secret}).to_local(), make_data())
        results = multiprocessing.get_context("spawn").Queue()
        child = multiprocessing.get_context("spawn").Process(target=read_rows, args=(store, results))
        child.start()
        assert results.get(timeout=60) == [[9, 10, 11], [3, 4, 5]]
        child.join()
        with pytest.raises(PermissionError, match="tensordict:none") as caught:
            from_store(td_id="none", port=server.port, password=f"wrong {secret}")
        assert secret not in str(caught.value)
    finally:
        import redis

        with redis.Redis(port=server.port, password=secret) as client:
            client.config_set("requirepass", "")


def test_server_that_does_not_answer_is_a_time_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="tensordict:x"):
            from_store(td_id="x", host="127.0.0.1", port=silent.getsockname()[1], socket_timeout=0.2)
        assert time.monotonic() - begin < 20


def test_no_server_is_a_connection_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf"redis://127.0.0.1:{port}/3 runs:x"):
        TensorDictStore(td_id="x", host="127.0.0.1", port=port, db=3, prefix="runs")
    with pytest.raises(ConnectionError, match="redis:///no/such.sock tensordict:x"):
        from_store(td_id="x", unix_socket_path="/no/such.sock")


class Flaky:
    """Lets the first calls of a function fail."""

    def __init__(self, function: Any, errors: int) -> None:
        self.function, self.errors, self.calls = function, errors, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import redis

        self.calls += 1
        if self.calls <= self.errors:
            raise redis.ConnectionError("Connection closed by server.")
        return self.function(*args, **kwargs)


def test_lost_connection_is_retried_for_reads_alone(
    location: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.client import Pipeline

    store = make_data().to_store(**location)
    execute = Pipeline.execute
    for errors, is_read_raises in ((3, False), (4, True)):
        flaky = Flaky(execute, errors)
        monkeypatch.setattr(Pipeline, "execute", partialmethod(flaky))
        if is_read_raises:
            with pytest.raises(ConnectionError, match="Connection closed by server"):
                store["a"].clone()
        else:
            assert store["a"].tolist() == make_data()["a"].tolist()
        assert flaky.calls == 4
    flaky = Flaky(execute, 1)
    monkeypatch.setattr(Pipeline, "execute", partialmethod(flaky))
    with pytest.raises(ConnectionError, match="Connection closed by server"):
        store["a"].zero_()
    assert flaky.calls == 1
    monkeypatch.undo()
    assert store["a"].tolist() == make_data()["a"].tolist()
    pool = store["a"].source.connection.client.connection_pool
    connecting = Flaky(pool.get_connection, 3)  # nothing of the write was sent yet
    monkeypatch.setattr(pool, "get_connection", connecting)
    store["a"].zero_()
    assert store["a"].unique().tolist() == [0]


def test_command_lists_and_drops(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_data().to_store(port=server.port, td_id="one", ttl=None)
    make_data().to_store(port=server.port, td_id="two", ttl=100)
    make_data().to_store(port=server.port, td_id="other", prefix="p")
    url = ["--url", f"redis://localhost:{server.port}/0"]
    main(["list", *url])
    assert capsys.readouterr().out.splitlines() == [
        "one  2 entries  until it is dropped",
        "two  2 entries  100 s",
    ]
    main(["drop", "one", *url])
    main(["list", *url])
    main(["list", "--prefix", "p", *url])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["two", "other"]
    with pytest.raises(SystemExit):
        main(["drop", *url])
    assert "drop takes the ids of collections" in capsys.readouterr().err


def test_keys_of_tensordict_are_read(location: dict[str, Any]) -> None:
    """The keys that tensordict 0.15.3 writes, with a value that it has pickled."""
    tensorclass = pytest.importorskip("td_tensorclass")
    store = TensorDictStore(td_id="theirs", batch_size=[3], ttl=None, **location)
    connection = store._store.connection

    def write(client: Any) -> None:
        def key(*parts: str) -> str:
            return connection.key(*parts)

        client.delete(*client.keys())
        client.set(key("__batch_size__"), "[3]")
        client.set(key("__device__"), "")
        client.sadd(key("__keys__"), "a", "n.b", "s", "st")
        client.set(key("d", "a"), torch.arange(6).numpy().tobytes())
        client.hset(key("m", "a"), mapping={"shape": "[3, 2]", "dtype": "torch.int64"})
        client.set(key("d", "n.b"), torch.ones(3).numpy().tobytes())
        client.hset(key("m", "n.b"), mapping={"shape": "[3]", "dtype": "torch.float32"})
        client.set(key("d", "s"), '"hello"')
        client.hset(key("m", "s"), mapping={"is_non_tensor": 1, "encoding": "json"})
        client.set(key("d", "st"), '["x", "y", "z"]')
        client.hset(key("m", "st"), mapping={"is_non_tensor": 1, "encoding": "json_array"})

    connection.run(write)
    opened = from_store(td_id="theirs", **location)
    expected = {"a": torch.arange(6).view(3, 2), "n": {"b": torch.ones(3)}, "s": "hello"}
    expected["st"] = tensorclass.NonTensorStack("x", "y", "z")
    assert_same(opened.to_local(), TensorDict(expected, [3]))
    opened[1] = TensorDict({"a": torch.tensor([7, 7])})
    assert connection.run(lambda client: client.get(connection.key("td"))) is None
    opened["new"] = torch.ones(3)  # the header is written with the first change of the structure
    assert from_store(td_id="theirs", **location)["a"].tolist() == [[0, 1], [7, 7], [4, 5]]
    connection.run(lambda client: client.set(connection.key("d", "s"), pickle.dumps(os.sep)))
    connection.run(lambda client: client.hset(connection.key("m", "s"), "encoding", "pickle"))
    connection.run(lambda client: client.delete(connection.key("td")))
    with pytest.raises(
        td_core.FormatError, match="'s' is a pickle, which can run any code: pass allow_pickle=True"
    ):
        from_store(td_id="theirs", **location)
    assert from_store(td_id="theirs", allow_pickle=True, **location)["s"] == os.sep


def test_lazy_stack_of_tensordict_is_read(location: dict[str, Any]) -> None:
    connection = TensorDictStore(td_id="stack", ttl=None, **location)._store.connection

    def write(client: Any) -> None:
        client.delete(*client.keys())
        facts = {
            "__type__": "lazy_stack",
            "__count__": 3,
            "__stack_dim__": 0,
            "__inner_batch_size__": "[]",
            "__device__": "",
        }
        for name, value in facts.items():
            client.set(connection.key(name), value)
        client.sadd(connection.key("__keys__"), "a", "b")
        client.set(connection.key("d", "a"), torch.arange(6.0).numpy().tobytes())
        same = {"shape": "[3, 2]", "dtype": "torch.float32", "homogeneous": 1, "layout": "stack"}
        client.hset(connection.key("m", "a"), mapping=same)
        client.set(connection.key("d", "b"), torch.tensor([0, 1, 1, 2, 2, 2]).numpy().tobytes())
        uneven = {
            "shape": "[3, 1]",
            "dtype": "torch.int64",
            "homogeneous": 0,
            "shapes": "[[1], [2], [3]]",
            "layout": "stack",
        }
        client.hset(connection.key("m", "b"), mapping=uneven)

    connection.run(write)
    opened = from_store(td_id="stack", **location)
    assert opened["a"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert [member["b"].tolist() for member in opened] == [[0], [1, 1], [2, 2, 2]]
    opened[1]["b"].fill_(9)
    assert from_store(td_id="stack", **location)[1]["b"].tolist() == [9, 9]
    with pytest.raises(td_core.LockedError):
        opened["new"] = torch.ones(3)
