"""The ends of messages: find a message that is shorter than announced, of which backends such as gloo say nothing.

A receiver fills the end of its buffer with other bytes than those that it expects there, before a message arrives. Small messages
end with :data:`END`. The last bytes of a part, which is sent from where it is, are announced in the message before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from td_core.errors import FormatError

from ._memory import get_bytes

#: The end of a message; no byte is zero.
END = b"td_end\r\n"
#: Number of bytes of a part that are announced.
TAIL = 8
_OTHER = bytes(255 - byte for byte in range(256))


def list_tails(parts: Sequence[Tensor]) -> bytes:
    """Return the last bytes of each part, those of a shorter one after zeros; zeros for parts on other devices than the CPU."""
    return b"".join(
        bytes(get_bytes(part[-TAIL:])).rjust(TAIL, b"\0") if part.is_cpu else bytes(TAIL) for part in parts
    )


def expect_tails(rooms: Sequence[Tensor], tails: bytes) -> None:
    """Fill the end of each buffer on the CPU with other bytes than its part will have there."""
    for number, room in enumerate(rooms):
        if room.is_cpu:
            last = get_bytes(room[-TAIL:])
            last[:] = tails[number * TAIL : (number + 1) * TAIL][TAIL - len(last) :].translate(_OTHER)


def compare_tails(rooms: Sequence[Tensor], tails: bytes) -> None:
    """Raise FormatError if a part did not arrive to its end."""
    for number, room in enumerate(rooms):
        if room.is_cpu:
            last = get_bytes(room[-TAIL:])
            if last != tails[number * TAIL : (number + 1) * TAIL][TAIL - len(last) :]:
                raise cut_error(f"part {number} of a message", len(room))


def expect_end(room: Tensor, size: int) -> Tensor:
    """Clear what follows the first ``size`` bytes of a buffer, where the message will have its end; return the buffer."""
    room[size : size + len(END)] = 0
    return room


def compare_end(room: Tensor, size: int) -> None:
    """Raise FormatError if the message of ``size`` bytes in a buffer did not arrive to its end."""
    if get_bytes(room[size : size + len(END)]) != END:
        raise cut_error("a message", size)


def cut_error(what: str, size: int) -> FormatError:
    """Return the error for a message that is shorter than announced."""
    return FormatError(
        f"{what} was cut: {size} bytes were announced, and its end did not arrive; nothing was changed"
    )
