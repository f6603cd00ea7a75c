"""What a table says about the collection that it was made of: in its schema, and in the fields of its columns.

The schema has the table of nodes of :func:`td_core.spi.make_table_header` with a place for each leaf and value: ``{"column":
names}``, or ``{"inline": place}`` for a leaf whose arrays are in the header. A field has what its Arrow type does not say.
Columns are the truth: whatever contradicts them is ignored.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from td_core.errors import CodecError, FormatError
from td_core.spi import STORABLE, Encoded, as_bytes, load_table, parse_json
from td_store.arrays import as_storable, get_stored, restore, split_leaf
from td_store.files import Checksum

from ._arrow_types import Facts

KEY = b"td"
#: Has the algorithm and the hash of a schema, apart from the header, so that damage to either one is found.
_HASH = b"td.hash"
#: The most bytes of leaves that a header holds, before they are encoded.
_MOST_INLINE = 1 << 20


def read_facts(field: pa.Field) -> Facts:
    """Return what a field says in addition to its type; nothing if another program wrote it, or it is damaged."""
    text = (field.metadata or {}).get(KEY)
    if text is None:
        return {}
    try:
        facts = parse_json(text)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def make_field(name: str, array: pa.Array, facts: Facts, nullable: bool | None = None) -> pa.Field:
    """Return the field of a column."""
    metadata = {KEY: json.dumps(facts).encode()} if facts else None
    return pa.field(name, array.type, array.null_count > 0 if nullable is None else nullable, metadata)


def dump_header(header: Facts) -> dict[bytes, bytes]:
    """Return the metadata of a schema: JSON in ASCII, since Parquet requires UTF-8."""
    return {KEY: json.dumps(header).encode()}


def read_header(metadata: Mapping[bytes, bytes] | None, where: str) -> tuple[Encoded, Facts] | None:
    """Return the table of nodes of a schema, and the header that it is from; None for a table of another program."""
    text = (metadata or {}).get(KEY)
    if text is None:
        return None
    try:
        header = parse_json(text)
    except ValueError as error:
        raise FormatError(f"{where}: the td header of its schema is damaged: {error}") from error
    table = load_table(header, where)
    lead = header.get("lead")
    if (
        not isinstance(lead, list)
        or not all(type(size) is int and size >= 0 for size in lead)
        or len(lead) > 2
    ):
        raise FormatError(f"{where}: the td header of its schema has the rows {lead!r:.100}")
    return table, header


class InlineLeaves:
    """Stores leaves in the header: those that have no rows, and those that no column can hold."""

    def __init__(self) -> None:
        self.arrays: dict[str, Facts] = {}
        self._size = 0

    def add(self, leaf: Tensor, path: str, reason: str) -> Facts:
        """Add a leaf, and return its place; raise CodecError if it is too large."""
        pieces, make_place = split_leaf(leaf, STORABLE.values())
        names = []
        for piece in pieces:
            tensor = as_storable(piece.tensor, STORABLE.values())
            self._size += tensor.nbytes
            if self._size > _MOST_INLINE:
                raise CodecError(
                    f"cannot save {path}: {reason}, and it is too large for the header of a table"
                )
            names.append(str(len(self.arrays)))
            content = base64.b64encode(as_bytes(tensor).numpy().tobytes()).decode()
            self.arrays[names[-1]] = {
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "bytes": content,
            }
        return {"inline": make_place(names)}


def read_inline(place: Any, header: Facts) -> Tensor:
    """Return a leaf of the header; raise FormatError if its place or its array is damaged."""

    def read(name: str) -> Tensor:
        try:
            item = header["inline"][name]
            raw = bytearray(base64.b64decode(item["bytes"], validate=True))
            dtype, shape = STORABLE[item["dtype"]], item["shape"]
            stored, _ = get_stored(dtype, tuple(shape), STORABLE.values())
            flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            return flat.view(stored).view(shape)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise FormatError(f"its array in the td header is damaged: {error!r}") from error

    return restore(place, read)


def hash_column(array: pa.Array, algorithm: str | None = None) -> str:
    """Return the hash of the elements of a column, whatever the positions of its buffers are."""
    batch = pa.RecordBatch.from_arrays([array], ["a"])
    return Checksum(algorithm, [batch.serialize()]).hexdigest()


def add_hashes(schema: pa.Schema, columns: Mapping[str, str] | None = None) -> pa.Schema:
    """Return a schema with its hash, and hashes of columns in the header."""
    metadata = {KEY: b"{}", **(schema.metadata or {})}
    hashes = {"algorithm": Checksum().algorithm, "columns": dict(columns or {}), "schema": True}
    metadata |= dump_header({**parse_json(metadata[KEY]), "hashes": hashes})
    schema = schema.with_metadata(metadata)
    return schema.with_metadata({**metadata, _HASH: _hash_schema(schema, None).encode()})


def check_hash(schema: pa.Schema, is_hashed: bool) -> bool:
    """Return True if a schema has its hash; raise FormatError if that differs, or is not there and ``is_hashed``."""
    saved = (schema.metadata or {}).get(_HASH)
    if saved is None and not is_hashed:
        return False
    algorithm = (saved or b"").decode(errors="replace").partition(" ")[0]
    digest = _hash_schema(schema, algorithm or None)
    if saved != digest.encode():
        raise FormatError(f"the hash of its schema is {digest}, {saved!r:.60} was saved")
    return True


def _hash_schema(schema: pa.Schema, algorithm: str | None) -> str:
    """Return the algorithm, and the hash of the header and of the names, types and facts of all fields."""
    checksum = Checksum(algorithm, [json.dumps([*map(_describe, schema)]).encode()])
    checksum.update((schema.metadata or {}).get(KEY, b""))
    return f"{checksum.algorithm} {checksum.hexdigest()}"


def _describe(field: pa.Field, named: bool = True) -> list[Any]:
    """Return what a field says as JSON; Parquet renames the items of lists."""
    kind, extension = field.type, ""
    if isinstance(kind, pa.BaseExtensionType):
        kind, extension = kind.storage_type, kind.extension_name
    facts, parts = (field.metadata or {}).get(KEY, b"").decode(errors="replace"), range(kind.num_fields)
    text = f"{str(kind).partition('<')[0]}{str(kind).rpartition('>')[2]}" if parts else str(kind)
    below = [_describe(kind.field(i), pa.types.is_struct(kind)) for i in parts]
    return [field.name if named else "", extension, text, facts, below]
