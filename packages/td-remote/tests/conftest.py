"""Register the plugin if it is not installed, and start the servers of the tests."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from td_core.testing import installed
from td_remote import Remote, plugin

sys.path.insert(0, str(Path(__file__).parent))

from servers import WebServer, serve

#: What clients of S3 read from the environment.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "user-key",
    "AWS_SECRET_ACCESS_KEY": "user-secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}

# Processes of the tests share what this one has imported.
multiprocessing.get_context("forkserver").set_forkserver_preload(["td_remote", "td_store", "fsspec"])

#: Names of what a session of nox has installed, so that no test is skipped there by mistake.
for name in filter(None, os.environ.get("TD_EXPECT_ENGINES", "").split(",")):
    importlib.import_module(name)


@pytest.fixture(autouse=True, scope="session")
def registered() -> Iterator[None]:
    """Register the plugin for the tests, unless its entry point is installed."""
    with installed(plugin, id="remote", distribution="td-remote", if_missing=True):
        yield


@pytest.fixture
def server() -> Iterator[WebServer]:
    """Return a web server without objects."""
    with serve() as serving:
        yield serving


@pytest.fixture(scope="session")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server with the interface of S3, and return its URL."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    folder = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("s3"))
    server.start()
    os.chdir(folder)
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_url: str) -> Any:
    """Return the client of boto and the name of a new bucket."""
    boto3 = pytest.importorskip("boto3")
    client = boto3.client(
        "s3",
        endpoint_url=s3_url,
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        region_name=CREDENTIALS["AWS_REGION"],
    )
    name = uuid.uuid4().hex
    client.create_bucket(Bucket=name)
    return client, name


@pytest.fixture(params=["s3fs", "obstore"])
def s3(
    request: pytest.FixtureRequest, s3_url: str, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Remote]:
    """Return a function of a name and settings that returns a location in a new bucket, with each engine in turn."""
    pytest.importorskip(request.param)
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_url, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    engine = "fsspec" if request.param == "s3fs" else "obstore"
    return lambda name="x", **settings: Remote(f"s3://{bucket[1]}/{name}", engine=engine, **settings)


@pytest.fixture(params=["fsspec", "obstore"])
def web(request: pytest.FixtureRequest, server: WebServer) -> Callable[..., Remote]:
    """Return a function of a name and settings that returns a location on the web server, with each engine in turn."""
    pytest.importorskip("aiohttp" if request.param == "fsspec" else "obstore")
    return lambda name="x", **settings: Remote(f"{server.url}/{name}", engine=request.param, **settings)
