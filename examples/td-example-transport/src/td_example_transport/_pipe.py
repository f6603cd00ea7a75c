"""Send and receive collections over a Unix socket."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from td_core import TensorCollection
from td_core.errors import FormatError
from td_distributed.spi import pack, payload_size, unpack

#: The sizes of header and payload; a header of no bytes is the last one again.
_FRAME = struct.Struct("<QQ")
_LARGEST_HEADER, _PIECE = 1 << 28, 1 << 24


class Pipe:
    """One end of a connection.

    Args:
        connected: a connected socket.
        timeout: seconds without a byte after which an operation ends with an error; None waits for ever.
        largest: the most bytes of a payload that is received.
    """

    def __init__(
        self, connected: socket.socket, timeout: float | None = 60.0, largest: int = 1 << 40
    ) -> None:
        self._socket, self._largest = connected, largest
        self._socket.settimeout(timeout)
        self._sent = self._received = b""

    @classmethod
    def listen(cls, path: str, **options: Any) -> Pipe:
        """Wait for the other end at a path, which must not exist; it is removed when the other end is there."""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            try:
                server.settimeout(options.get("timeout", 60.0))
                server.listen(1)
                return cls(server.accept()[0], **options)
            finally:
                os.unlink(path)

    @classmethod
    def connect(cls, path: str, **options: Any) -> Pipe:
        """Connect to the end that listens at a path, or will within the time-out."""
        client = socket.socket(socket.AF_UNIX)
        last = time.monotonic() + (options.get("timeout", 60.0) or math.inf)
        while True:
            try:
                client.connect(path)
                return cls(client, **options)
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > last:
                    client.close()
                    raise
            time.sleep(0.01)

    def send(self, data: TensorCollection) -> None:
        """Send a collection."""
        header, payload = pack(data)
        new = b"" if header == self._sent else header
        with self._close_on_error():
            self._socket.sendall(_FRAME.pack(len(new), len(payload)) + new)
            view = memoryview(payload.cpu().numpy())
            for start in range(0, len(view), _PIECE):  # the time-out is that of each call
                self._socket.sendall(view[start : start + _PIECE])
        self._sent = header

    def recv(self) -> Any:
        """Receive a collection."""
        with self._close_on_error():
            length, size = _FRAME.unpack(self._read(torch.empty(_FRAME.size, dtype=torch.uint8)).numpy())
            if length > _LARGEST_HEADER or size > self._largest:
                raise FormatError(f"a message of {length} and {size} bytes is too large")
            room = torch.empty(length, dtype=torch.uint8)
            header = bytes(self._read(room).numpy()) if length else self._received
            if payload_size(header) != size:  # before memory is allocated
                raise FormatError(f"a message of {size} bytes has a header for {payload_size(header)}")
            payload = self._read(torch.empty(size, dtype=torch.uint8))
        self._received = header
        return unpack(header, payload)

    def _read(self, room: torch.Tensor) -> torch.Tensor:
        """Fill a vector of bytes, and return it."""
        view = memoryview(room.numpy())
        while view:
            count = self._socket.recv_into(view[:_PIECE])
            if not count:
                raise ConnectionError("the other end has closed the connection, or its process has ended")
            view = view[count:]
        return room

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        """Close the pipe after an error: the rest of a message would be taken for another one."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def listen(folder: Path, timeout: float) -> Pipe:
    """Return the first end of a connection between two processes that know a folder."""
    return Pipe.listen(str(folder / "socket"), timeout=timeout)


def join(folder: Path, timeout: float) -> Pipe:
    """Return the second end."""
    return Pipe.connect(str(folder / "socket"), timeout=timeout)
