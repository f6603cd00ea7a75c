"""Load a local save, or the entries of some keys of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from td_core.typing import NestedKey

from . import _fs
from ._archive import load_archive
from ._load import LoadOptions, load_directory


def load_local(path: str, options: LoadOptions) -> Any:
    """Load the directory or archive at ``path``, or what the options select of it."""
    if (
        options.keys is not None
        and options.device is not None
        and torch.device(options.device).type != "meta"
    ):
        # Map all leaves, and copy those that are selected.
        part = load_local(path, replace(options, device=None))
        return part.to(options.device, non_blocking=options.non_blocking)
    load = load_archive if _fs.is_file(path) else load_directory
    return select_part(load(path, options, options.subpath), options.keys)


def select_part(loaded: Any, keys: Iterable[NestedKey] | NestedKey | None) -> Any:
    """Return a loaded collection with the entries of some keys, or with all for None."""
    if keys is None:
        return loaded
    was_locked = loaded.is_locked
    chosen = [keys] if isinstance(keys, (str, tuple)) else keys
    part = loaded.unlock_().select(*chosen, inplace=True)
    return part.lock_() if was_locked else part
