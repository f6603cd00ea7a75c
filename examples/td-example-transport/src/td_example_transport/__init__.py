"""A transport of collections over a Unix socket, and the tests that a transport must pass."""

from ._pipe import Pipe, join, listen
from ._transport_tests import TransportTests

__all__ = ["Pipe", "TransportTests", "join", "listen"]
