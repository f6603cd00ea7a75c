"""Plan a save: the tensors of a collection under the names that they get in the file, and both headers."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

from td_store.arrays import PlannedArray, make_array_plan

from ._format import NAMES
from ._reference import describe


@dataclass(slots=True)
class Plan:
    """What a save writes.

    Attributes:
        stored: the tensors by name, in the order of the tree; their positions in a file are not yet set.
        header: the ``td`` header.
        reference: the ``tensordict`` header, or None if it cannot describe the collection.
    """

    stored: dict[str, PlannedArray]
    header: dict[str, Any]
    reference: dict[str, Any] | None

    def make_metadata(self, hashes: dict[str, object] | None = None) -> dict[str, str]:
        """Return the metadata of a file: both headers as JSON."""
        header = {**self.header, **({"hashes": hashes} if hashes else {})}
        metadata = {"format": "pt"}
        if self.reference is not None:
            metadata["tensordict"] = json.dumps(self.reference)
            header["beside"] = zlib.crc32(metadata["tensordict"].encode())
        metadata["td"] = json.dumps(header, separators=(",", ":"))
        return metadata


def make_plan(data: object, *, blank: bool = False) -> Plan:
    """Plan the save of a collection, without reading the elements of a leaf. With ``blank``, elements are not saved.

    Raises:
        CodecError: a value or leaf cannot be stored; the message has its key path.
    """
    # The format reserves the name __metadata__.
    plan = make_array_plan(data, NAMES, ".".join, blank=blank, reserved=["__metadata__"])
    return Plan(plan.arrays, plan.header, describe(plan.header, plan.leaves, plan.stacks))
