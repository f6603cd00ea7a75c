"""Read what a group contains: its arrays, and the header that describes the collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import Encoded, check_table
from td_store.arrays import compute_check, list_array_names, list_texts, load_array_table, read_texts

from ._array_documents import (
    INCOMPLETE,
    ArrayInfo,
    Document,
    check_name,
    get_attributes,
    parse_json,
    read_array_document,
)
from ._array_engines import read_text
from ._dim_labels import LEVEL
from ._foreign_groups import ForeignGroup
from ._zarr_objects import Objects


@dataclass(slots=True)
class GroupContent:
    """A group: its arrays, and the header of the collection.

    Attributes:
        objects: the objects of the group.
        arrays: the arrays by name.
        table: the table of nodes, with places as leaves.
        is_strict: whether a chunk that is missing is an error.
        is_ours: whether the group has a ``td`` header.
        has_sizes: whether the root has a batch size.
        texts: the arrays of strings of text columns by name.
    """

    objects: Objects
    arrays: dict[str, ArrayInfo]
    table: Encoded
    is_strict: bool
    is_ours: bool
    has_sizes: bool = True
    texts: dict[str, ArrayInfo] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The location, for messages."""
        return self.objects.where

    def make_blank(self, name: str) -> Tensor:
        """Return a meta tensor of the shape and dtype of an array."""
        array = self.arrays[name]
        return torch.empty(array.shape, dtype=array.dtype, device="meta")

    def read_texts(self, table: Encoded) -> Encoded:
        """Return a table with the strings of its text columns."""
        return read_texts(
            table, lambda text: read_text(self.objects, self.texts, text, strict=self.is_strict)
        )


def read_group(objects: Objects, *, allow_pickle: bool = False, stack_values: bool = True) -> GroupContent:
    """Read the metadata of a group; FormatError if it is damaged, or if there is no group."""
    version = objects.read_version()
    root = read_root(objects)
    attributes = get_attributes(root, objects.where)
    if INCOMPLETE in attributes:
        raise FormatError(f"{objects.where}: a save to this group has not ended: save it again")
    if "td" not in attributes:
        documents = list_documents(objects, root)
        infos = _read_arrays(objects, {k: v for k, v in documents.items() if v.get("node_type") == "array"})
        table = ForeignGroup(objects, documents, infos, allow_pickle, stack_values).build(attributes)
        check_table(table, objects.where)
        return GroupContent(objects, infos, table, False, False, LEVEL in attributes)
    header = attributes["td"]
    if isinstance(header, str):
        header = parse_json(header, f"{objects.where}: the td header")
    table = load_array_table(header, objects.where)
    arrays = _read_arrays(objects, find_documents(objects, root, list_array_names(table)))
    texts = {name: arrays.pop(name) for name in list_texts(table)}
    check = compute_check((name, array.shape) for name, array in arrays.items())
    if header.get("check") != check:
        raise FormatError(
            f"{objects.where}: the td header does not describe the arrays of the group; another program changed shapes"
        )
    # Changes of the metadata are noticed from now on.
    objects.root, objects.version = root, version
    return GroupContent(objects, arrays, table, not header.get("sparse"), True, texts=texts)


def read_root(objects: Objects) -> Document:
    """Return the metadata of the root of a group of any version of the format."""
    content, old = objects.get_many(["zarr.json", ".zgroup"])
    if content is not None:
        root: Document = parse_json(content, f"{objects.where}: zarr.json")
        if root.get("node_type") != "group" or root.get("zarr_format") != 3:
            raise FormatError(
                f"{objects.where} is not a Zarr group: its node_type is {root.get('node_type')!r:.100}, and its "
                f"zarr_format {root.get('zarr_format')!r:.100}"
            )
        return root
    if old is None:
        raise objects.missing_error()
    attributes = objects.get(".zattrs")
    return {
        "zarr_format": 2,
        "attributes": {} if attributes is None else parse_json(attributes, f"{objects.where}: .zattrs"),
    }


def _read_arrays(objects: Objects, documents: Mapping[str, Document]) -> dict[str, ArrayInfo]:
    return {name: read_array_document(name, document, objects.where) for name, document in documents.items()}


def find_documents(objects: Objects, root: Document, names: Sequence[str]) -> dict[str, Document]:
    """Return the metadata of arrays: as consolidated in the root, or else from the array itself; FormatError without one."""
    for name in names:
        check_name(name, objects.where)
    consolidated = get_consolidated(root, objects.where)
    result = {name: consolidated[name] for name in names if name in consolidated}
    missing = [name for name in names if name not in result]
    for name, content in zip(
        missing, objects.get_many([f"{name}/zarr.json" for name in missing]), strict=True
    ):
        if content is None:
            raise FormatError(f"{objects.where}: the array {name!r} is missing")
        result[name] = parse_json(content, f"{objects.where}: {name}/zarr.json")
    for name, document in result.items():
        if document.get("node_type") != "array":
            raise FormatError(f"{objects.where}: {name!r} is not an array")
    return {name: result[name] for name in names}


def get_consolidated(root: Document, where: str) -> dict[str, Document]:
    """Return the metadata of all groups and arrays that a root has, by name; FormatError if it is malformed."""
    consolidated = root.get("consolidated_metadata")
    metadata = consolidated.get("metadata") if isinstance(consolidated, dict) else consolidated
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(item, dict) for item in metadata.values()):
        raise FormatError(f"{where}: the consolidated metadata of its root is damaged")
    return metadata


def list_documents(objects: Objects, root: Document) -> dict[str, Document]:
    """Return the metadata of all groups and arrays below a root of any version of the format, by name."""
    if root["zarr_format"] == 3:
        consolidated = get_consolidated(root, objects.where)
        if not consolidated:
            names = sorted(
                k.removesuffix("/zarr.json") for k in objects.list_keys() if k.endswith("/zarr.json")
            )
            contents = objects.get_many([f"{name}/zarr.json" for name in names])
            consolidated = {
                name: parse_json(content, f"{objects.where}: {name}/zarr.json")
                for name, content in zip(names, contents, strict=True)
                if content is not None
            }
        for name, document in consolidated.items():
            if document.get("node_type") not in ("array", "group"):
                raise FormatError(
                    f"{objects.where}: {check_name(name, objects.where)!r} is neither an array nor a group: its node_type is "
                    f"{document.get('node_type')!r:.100}"
                )
        return {check_name(name, objects.where): document for name, document in consolidated.items()}
    return _list_old_documents(objects)


#: The metadata objects of version 2, and the type of their node.
_OLD = {".zarray": "array", ".zgroup": "group"}


def _list_old_documents(objects: Objects) -> dict[str, Document]:
    """Return the metadata of version 2, with the attributes and the type of each node in it."""
    content = objects.get(".zmetadata")
    if content is not None:
        found = parse_json(content, f"{objects.where}: .zmetadata").get("metadata")
        if not isinstance(found, dict):
            raise FormatError(f"{objects.where}: .zmetadata has no metadata")
    else:
        keys = [key for key in objects.list_keys() if key.rpartition("/")[2] in (*_OLD, ".zattrs")]
        found = {
            key: parse_json(content, f"{objects.where}: {key}")
            for key, content in zip(keys, objects.get_many(keys), strict=True)
            if content is not None
        }
    result = {}
    for key in sorted(found):
        name, _, last = key.rpartition("/")
        if name and last in _OLD:
            attributes = found.get(f"{name}/.zattrs", {})
            result[check_name(name, objects.where)] = _join_old(found[key], attributes, last, objects.where)
    return result


def _join_old(document: object, attributes: object, file: str, where: str) -> Document:
    """Return the metadata of a node of version 2 with its attributes and the type of the node in it."""
    if not isinstance(document, dict) or not isinstance(attributes, dict):
        raise FormatError(f"{where}: a {file} or .zattrs is not a JSON object")
    joined = {**document, "attributes": attributes, "node_type": _OLD[file], "zarr_format": 2}
    return cast("Document", joined)


def find_old_document(objects: Objects, name: str) -> Document:
    """Return the metadata of an array of version 2, with its attributes; FormatError if it is missing."""
    content, attributes = objects.get_many([f"{name}/.zarray", f"{name}/.zattrs"])
    if content is None:
        raise FormatError(f"{objects.where}: the array {name!r} is missing")
    where = f"{objects.where}: {name}"
    found = {} if attributes is None else parse_json(attributes, f"{where}/.zattrs")
    return _join_old(parse_json(content, f"{where}/.zarray"), found, ".zarray", objects.where)
