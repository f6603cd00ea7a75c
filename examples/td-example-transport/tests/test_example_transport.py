"""The example transport, installed with td-distributed."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
from td_example_transport import Pipe, TransportTests, join, listen

from td_core import TensorDict
from td_core.errors import FormatError


class TestPipe(TransportTests):
    listen = staticmethod(listen)
    join = staticmethod(join)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


def test_header_of_the_same_structure_is_sent_once(sockets: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = map(Pipe, sockets)
    sizes = []
    for number in range(3):
        sender.send(TensorDict({"a": torch.full((4,), number)}))
        sizes.append(len(sockets[1].recv(1 << 16, socket.MSG_PEEK)))
        assert receiver.recv()["a"].tolist() == [number] * 4
    assert sizes[0] > sizes[1] == sizes[2] == 16 + 32


def test_message_that_is_too_large_raises_before_it_is_read(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    Pipe(sockets[0]).send(TensorDict({"a": torch.zeros(1000)}))
    receiver = Pipe(sockets[1], largest=100)
    with pytest.raises(FormatError, match="of .* and 4000 bytes is too large"):
        receiver.recv()
    with pytest.raises(OSError, match="Bad file descriptor"):
        receiver.recv()


@pytest.mark.parametrize("data", [bytes(64), b"\1" * 64], ids=["zeros", "ones"])
def test_bytes_of_another_program_raise(data: bytes, sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[0].sendall(data)
    with pytest.raises(FormatError):
        Pipe(sockets[1]).recv()
