"""Requests to S3, with the client of s3fs: reads carry the stamp, and an upload has parts of one size."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from td_core.typing import ObjectInfo, Range

from ._engines import Answer, format_range, refuse_short, split_parts
from ._fsspec_engine import AsyncEngine, Request
from ._retries import find_status, make_missing_error

#: The parts of one upload that are under way at the same time: the client has three copies of each.
_PARTS = 2


class S3Engine(AsyncEngine):
    """Objects in a bucket."""

    describes = takes_ends = True

    async def find_one(self, name: str) -> ObjectInfo | None:
        """Return a description of an object, None if it is missing."""
        place = self._place_of(name)
        if not place["Key"]:
            return None
        try:
            found = await self.system._call_s3("head_object", **place)
        except Exception as error:
            if find_status(error) == 404:
                return None
            raise
        return ObjectInfo(name, found["ContentLength"], found["ETag"])

    async def fetch_one(self, item: Range) -> Answer:
        """Return the content of a range of the object that has the stamp of the range."""
        place = self._place_of(item.name)
        if not place["Key"]:
            raise make_missing_error(self.policy.where, item.name)
        options = {} if item[1:3] == (0, None) else {"Range": format_range(item)}
        if item.stamp is not None:
            options["IfMatch"] = item.stamp
        try:
            found = await self.system._call_s3("get_object", **place, **options)
        except Exception as error:
            if find_status(error) != 416:
                raise
            return Answer(b"", await self.find_one(item.name))
        async with found["Body"] as body:
            content = await body.read()
        size = int(found["ContentRange"].rpartition("/")[2]) if "ContentRange" in found else len(content)
        info = ObjectInfo(item.name, size, found["ETag"])
        refuse_short(item, content, info)
        return Answer(content, info)

    def put(self, name: str, content: Iterable[Any], create: bool) -> None:
        """Write an object, a large one in parts; ``create`` is a condition of the last request."""
        parts = map(bytes, split_parts(content))
        first = list(islice(parts, _PARTS))
        place: dict[str, Any] = {**self._place_of(name), **({"IfNoneMatch": "*"} if create else {})}
        if len(first) == 1:
            self._send("put_object", name, place, Body=first[0])
        else:
            self._put_parts(name, place, first, parts)

    def _put_parts(self, name: str, place: dict[str, Any], first: list[bytes], rest: Iterator[bytes]) -> None:
        """Upload parts, a few at a time; one that fails is sent again by itself."""
        target = {"Bucket": place["Bucket"], "Key": place["Key"]}
        target["UploadId"] = self._send("create_multipart_upload", name, target)["UploadId"]
        done: list[dict[str, Any]] = []

        def send(number: int, part: bytes) -> Request[Any]:
            call = partial(self._call, "upload_part", target, PartNumber=number, Body=part)
            return name, len(part), call

        try:
            while first:
                answers = self.gather("write", [send(i, part) for i, part in enumerate(first, len(done) + 1)])
                done += [
                    {"PartNumber": i, "ETag": answer["ETag"]}
                    for i, answer in enumerate(answers, len(done) + 1)
                ]
                first.clear()  # before the next parts are made
                first += islice(rest, _PARTS)
            self._send(
                "complete_multipart_upload", name, {**place, **target}, MultipartUpload={"Parts": done}
            )
        except BaseException:
            with contextlib.suppress(OSError):
                self._send("abort_multipart_upload", name, target)
            raise

    def _send(self, method: str, name: str, place: dict[str, Any], **options: Any) -> Any:
        size = len(options.get("Body", b""))
        return self.gather("write", [(name, size, partial(self._call, method, place, **options))])[0]

    async def _call(self, method: str, place: dict[str, Any], **options: Any) -> Any:
        if "Body" in options:  # a file is sent in pieces, bytes are copied as a whole
            options["Body"] = io.BytesIO(options["Body"])
        return await self.system._call_s3(method, **place, **options)

    def _place_of(self, name: str) -> dict[str, str]:
        bucket, key, _ = self.system.split_path(self.locate(name))
        return {"Bucket": bucket, "Key": key}
