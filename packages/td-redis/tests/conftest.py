"""Register the plugin if it is not installed, and servers: one in the process, and one that is started where that is asked."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from td_core.testing import installed
from td_redis import plugin
from td_store import plugin as stores

if importlib.util.find_spec("redis") is None:
    collect_ignore_glob = ["test_*.py"]

#: The program of a server, if the environment asks for tests with one.
PROGRAM = os.environ.get("TD_REDIS_SERVER")


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugins for the tests, unless their entry points are installed."""
    with (
        installed(stores, id="store", distribution="td-store", if_missing=True),
        installed(plugin, id="redis", distribution="td-redis", if_missing=True),
    ):
        yield


class Server:
    """A server on a free port of this machine, with an empty directory."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.program, self.folder = program, folder
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        import redis

        log = (self.folder / "log").open("ab")
        command = [
            self.program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--appendonly",
            "yes",
            "--save",
            "",
        ]
        with log:
            self.process = subprocess.Popen([*command, "--dir", str(self.folder)], stdout=log, stderr=log)
        with redis.Redis(port=self.port) as client:
            for _ in range(200):
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    def kill(self) -> None:
        """Kill the server."""
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server for all tests."""
    if PROGRAM is None:
        pytest.skip("runs in `nox -s redis`, which starts a server")
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.fail(f"there is no program {PROGRAM}: install it with `apt-get install redis-server`")
    server = Server(program, tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def server(session_server: Server) -> Iterator[Server]:
    """Return a server without data, which runs; a test may kill it."""
    import redis

    with redis.Redis(port=session_server.port) as client:
        client.flushall()
    yield session_server
    if session_server.process.poll() is not None:
        session_server.start()


def make_fake(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the place of a server in this process."""
    return {"client": pytest.importorskip("fakeredis").FakeRedis()}


def make_real(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the place of a server that was started."""
    return {"port": request.getfixturevalue("server").port}


@pytest.fixture(params=[make_fake, make_real] if PROGRAM else [make_fake], ids=lambda make: make.__name__[5:])
def location(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options by which a collection finds the server."""
    make: Callable[[pytest.FixtureRequest], dict[str, Any]] = request.param
    return make(request)
