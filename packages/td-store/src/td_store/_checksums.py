"""Checksums of leaves: xxh3 if the package xxhash is installed, else CRC-32."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import as_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Crc32:
    """CRC-32 with the interface of a ``hashlib`` object."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


xxh3_128: Callable[[], object] | None
try:
    from xxhash import xxh3_128
except ImportError:
    xxh3_128 = None


class Checksum:
    """The hash of some bytes, with the methods of a ``hashlib`` object.

    Args:
        algorithm: ``"crc32"`` or ``"xxh3_128"``, as a save records it; by default the best one that is installed.
        content: buffers of bytes or CPU tensors to start with.

    Attributes:
        algorithm: the name of the algorithm, which a save stores beside its hashes.

    Raises:
        FormatError: the algorithm is not installed.

    >>> Checksum("crc32", [b"a", torch.tensor([98, 99], dtype=torch.uint8)]).hexdigest()
    '352441c2'
    """

    __slots__ = ("_state", "algorithm")

    def __init__(self, algorithm: str | None = None, content: Iterable[object] = ()) -> None:
        self.algorithm = algorithm or ("crc32" if xxh3_128 is None else "xxh3_128")
        self._state: Any
        if self.algorithm == "crc32":
            self._state = _Crc32()
        elif self.algorithm == "xxh3_128" and xxh3_128 is not None:
            self._state = xxh3_128()
        else:
            raise FormatError(f"the hashes are {algorithm!r:.50}, which needs: pip install xxhash")
        for piece in content:
            self.update(piece)

    def update(self, piece: object) -> None:
        """Add a buffer of bytes, or the elements of a CPU tensor."""
        self._state.update(as_bytes(piece).numpy() if isinstance(piece, Tensor) else piece)

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far in hexadecimal digits."""
        return str(self._state.hexdigest())
