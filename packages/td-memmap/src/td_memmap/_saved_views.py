"""Load saved views of old releases, stored as a source and an operation, as dense collections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from td_core.errors import FormatError

from . import _file_names

#: Operations that a saved view may have, and their argument names.
_OPERATIONS = {
    "squeeze": {"dim"},
    "unsqueeze": {"dim"},
    "view": {"size"},
    "transpose": {"dim0", "dim1"},
    "permute": {"dims"},
}


def rebuild(meta: Mapping[str, Any], members: Mapping[str, Any]) -> Any:
    """Apply the operation or index of a saved view to its source."""
    source = members[_file_names.SOURCE]
    if "custom_op" not in meta:
        return source[decode_index(meta["index"], top=True)]
    return apply_view(source, meta)


def apply_view(source: Any, meta: Mapping[str, Any]) -> Any:
    """Apply the operation of a saved view to its source; raise FormatError if it is not allowed."""
    name, arguments = meta["custom_op"], meta.get("custom_op_kwargs")
    if (
        name not in _OPERATIONS
        or not isinstance(arguments, dict)
        or not arguments.keys() <= _OPERATIONS[name]
    ):
        raise FormatError(f"a saved view cannot be made by {name!r} with {arguments!r}")
    return getattr(source, name)(**arguments)


def decode_index(code: Any, *, top: bool = False) -> Any:
    """Decode an index from tagged lists; raise FormatError if it is invalid."""
    match code:
        case None | bool() | int():
            return code
        case ["ellipsis"]:
            return ...
        case ["tuple" | "list" as tag, list(items)]:
            return (tuple if tag == "tuple" else list)(map(decode_index, items))
        case ["slice" | "range" as tag, dict(bounds)]:
            limits: list[Any] = [bounds.get(name) for name in ("start", "stop", "step")]
            return slice(*limits) if tag == "slice" else range(*limits)
        case ["tensor", values, *_]:
            return torch.tensor(values, device="cpu")
        case list() if top and not (code and isinstance(code[0], str)):
            return tuple(map(decode_index, code))
    raise FormatError(f"a saved view has an index that cannot be one: {code!r}")
