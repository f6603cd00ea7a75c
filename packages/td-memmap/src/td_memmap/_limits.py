"""Limit on the number of files that one process can map."""

from __future__ import annotations

import errno
from pathlib import Path

# With fewer files skip the check, since reading the limits from /proc takes time.
_FEW = 10_000
_SPARE = 500


def check_mappings(count: int, what: str) -> None:
    """Raise OSError (ENOMEM) if ``count`` more mappings exceed the system's limit per process."""
    if count < _FEW:
        return
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        used = Path("/proc/self/maps").read_bytes().count(b"\n")
    except (OSError, ValueError):
        return
    if used + count + _SPARE > limit:
        raise OSError(
            errno.ENOMEM,
            f"cannot {what}: {count} leaves are as many mappings, and this process may have {limit} "
            f"(vm.max_map_count), of which {used} are in use; use an archive (.tdz), which is one mapping, raise the "
            "limit, or stack the leaves",
        )
