"""Check that a save replaces a save, and not what another program has written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from td_core.errors import FormatError
from td_core.spi import load_table
from td_store.arrays import list_names

from ._array_documents import INCOMPLETE, get_attributes, parse_json
from ._dim_labels import LEVEL, VALUE
from ._group_header import read_root
from ._zarr_objects import TEMPORARY, Objects

#: The beginning of the metadata of arrays as td writes it. zarr and tensorstore put spaces or other keys there. A process that
#: was killed can have left an array that the header does not have.
_OURS = b'{"shape":['
#: How many of them a message names.
_SHOWN = 5


def check_replaceable(objects: Objects) -> None:
    """Raise FileExistsError if a place has arrays, groups or files that td has not written, which a save would remove."""
    # What a process that was killed has left does not count.
    beginnings = (".zarr.json.tmp-", TEMPORARY, f"%{TEMPORARY}")
    keys = [key for key in objects.list_keys() if not key.startswith(beginnings)]
    if not keys or keys == ["zarr.json"]:
        return
    where = f"cannot save to {objects.where!r}"
    if "zarr.json" not in keys:
        raise FileExistsError(f"{where}: it has files that are not of a Zarr group; remove them")
    try:
        root = read_root(objects)
        attributes = get_attributes(root, objects.where)
        if INCOMPLETE in attributes or (LEVEL in attributes and "td" not in attributes):
            return
        if "td" not in attributes:
            raise FileExistsError(f"{where}: it is a group of another program; remove it")
        others = list(_list_others(objects, keys, attributes["td"]))
    except FormatError as error:
        raise FileExistsError(f"{where}: what is there is damaged; remove it ({error})") from error
    if others:
        raise FileExistsError(
            f"{where}: it has {', '.join(map(repr, others[:_SHOWN]))}, which another program has written; remove that first"
        )


def _list_others(objects: Objects, keys: list[str], header: Any) -> Iterator[str]:
    """Yield the names of arrays, groups and files that are not those of a header."""
    table = load_table(
        parse_json(header, objects.where) if isinstance(header, str) else header, objects.where
    )
    arrays = {name for place in table.leaves for name in list_names(place)}
    groups = {name[:end] for name in arrays for end, char in enumerate(name) if char == "/"}
    unknown = [key for key in keys if not _is_inside(key, arrays)]
    nodes = [key for key in unknown if key.endswith("/zarr.json")]
    for key, content in zip(nodes, objects.get_many(nodes), strict=True):
        name = key.removesuffix("/zarr.json")
        if not content:  # a process was killed before it wrote the metadata, and then the chunks
            continue
        document = parse_json(content, f"{objects.where}: {key}")
        attributes = get_attributes(document, f"{objects.where}: {key}")
        if document.get("node_type") == "array" and (VALUE in attributes or content.startswith(_OURS)):
            arrays.add(name)
        elif name not in groups and (document.get("node_type") == "array" or {*attributes} - {LEVEL}):
            yield name
    for key in unknown:
        if not (key == "zarr.json" or key in nodes or _is_inside(key, arrays)):
            yield key


def _is_inside(key: str, names: set[str]) -> bool:
    """Return True if an object belongs to one of some arrays."""
    return any(char == "/" and key[:end] in names for end, char in enumerate(key))
