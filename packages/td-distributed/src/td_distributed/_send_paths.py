"""Send a memory-mapped collection as a path on a file system that both processes share.

The sender requests the receiver's ``root=`` folder and receives its path, or nothing. If the save is below that folder,
the sender sends the relative path; otherwise it sends the bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from td_core import TensorCollection, TensorDict
from td_core.errors import FormatError
from td_core.spi import StorageBackend, parse_json, user_class

from ._memory import allocate, get_bytes, make_vector

#: Mark of a message that requests the receiver's root: "td_root" in ASCII.
ASKS = 0x74645F726F6F74
LONGEST = 1 << 16


def get_folder(collection: TensorCollection) -> str | None:
    """Return the folder of a memory-mapped collection, whose path can be sent instead of its bytes; else None."""
    for backend in (collection._inner()._backends or {}).values():
        if isinstance(backend, StorageBackend) and (result := backend.get_folder(collection)):
            return result
    return None


def make_path_header(folder: str, peer: Any) -> bytes | None:
    """Receive the peer's root. Return the header with the path of ``folder`` below it, or None if it is elsewhere."""
    device = peer.device()
    length = int(peer.recv(torch.zeros(1, dtype=torch.int64, device=device)).item())
    if not 0 <= length <= LONGEST:
        raise FormatError(f"the peer answered with a root of {length} bytes")
    if not length:
        return None
    root = os.fsdecode(bytes(get_bytes(peer.recv(allocate(length, device).zero_()))))
    saved = Path(folder).resolve()
    if not saved.is_relative_to(root):
        return None
    return json.dumps({"path": saved.relative_to(root).as_posix()}).encode()


def answer_root(root: str | Path | None, peer: Any) -> None:
    """Send the root folder of this process to the peer, or an empty text if it has none."""
    text = b"" if root is None else os.fsencode(Path(root).resolve())
    peer.send(torch.tensor([len(text)], device="cpu"))
    if text:
        peer.send(make_vector(text))


def parse_path(header: bytes) -> object:
    """Parse the path from a header; None if the header announces bytes."""
    with contextlib.suppress(ValueError):
        provided = parse_json(header)
        return provided.get("path") if isinstance(provided, dict) else None
    return None


def load(root: str | Path | None, path: Any, cls: type | None = None) -> Any:
    """Load the save at a received path, memory-mapped without writing back to its files.

    Raises:
        FormatError: this process has no root, or the path is outside of it; no file was opened.
        MissingPluginError: td-memmap is not installed.
    """
    if root is None:
        raise FormatError(
            f"the message names files at {path!r}, but this process gave no root= to look below"
        )
    base = Path(root).resolve()
    try:
        place = (base / path).resolve()
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise FormatError(f"the message names files at {path!r}, which is not a path: {error}") from error
    if not place.is_relative_to(base):
        raise FormatError(f"the message names files at {path!r}, outside of the root {base}")
    named: Any = user_class(cls) or TensorDict
    return named.load_memmap(place, mode="r")
