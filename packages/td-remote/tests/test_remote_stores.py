"""The suite of object stores on every engine: in memory, on a web server, and in a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from td_remote import Remote
from td_store.testing import ObjectStoreTests


class TestMemory(ObjectStoreTests):
    creates_atomically = False

    def make(self, contents: Mapping[str, bytes]) -> Remote:
        remote = Remote(f"memory://{uuid.uuid4().hex}/x")
        for name, content in contents.items():
            remote.write(name, [content])
        return remote


class WebTests(ObjectStoreTests):
    can_list = False
    creates_atomically = False
    made: ClassVar[list[Any]] = []

    @pytest.fixture(autouse=True)
    def prepare(self, web: Callable[..., Remote], server: Any) -> None:
        type(self).made = [web, server]

    def make(self, contents: Mapping[str, bytes]) -> Remote:
        web, server = self.made
        server.contents = {f"/x/{name}".rstrip("/"): content for name, content in contents.items()}
        return self.open(web)

    def open(self, web: Callable[..., Remote]) -> Remote:
        return web()


class TestReadOnlyWebServer(WebTests):
    is_writable = False


class TestWebServer(WebTests):
    """A server that takes PUT and DELETE, without encryption."""

    def open(self, web: Callable[..., Remote]) -> Remote:
        return web(allow_http=True)


class TestBucket(ObjectStoreTests):
    stamps_content = True
    made: ClassVar[list[Any]] = []

    @pytest.fixture(autouse=True)
    def prepare(self, s3: Callable[..., Remote], bucket: Any) -> None:
        type(self).made = [s3, *bucket]

    def make(self, contents: Mapping[str, bytes]) -> Remote:
        s3, client, name = self.made
        for key, content in contents.items():
            client.put_object(Bucket=name, Key=f"x/{key}".rstrip("/"), Body=content)
        return s3()
