"""Write collections to groups: a local directory or zip file appears complete or not at all; in a store, the root is last."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from td_core.errors import FormatError
from td_core.spi import add_check_line, as_bytes, make_reporter, run_in_background, run_parallel
from td_core.typing import Progress
from td_store.arrays import ArrayPlan, PlannedArray, list_array_names, load_array_table, make_array_plan
from td_store.files import NewDirectory, NewFile

from ._array_documents import (
    INCOMPLETE,
    NATIVE,
    ArrayInfo,
    ChunkOptions,
    Consolidated,
    Document,
    get_attributes,
    join_names,
    make_array_document,
    make_group_document,
    make_plain_document,
    make_text_document,
    parse_json,
    read_array_document,
)
from ._array_engines import encode_zeros, list_chunks, write_texts
from ._chunk_access import write_arrays
from ._dim_labels import LEVEL, VALUE, describe_levels, describe_values, name_dims
from ._group_header import read_root
from ._group_locks import hold_directory
from ._local_objects import LocalObjects, find_local_path, find_objects
from ._read_collections import open_collection
from ._zarr_objects import TEMPORARY, Objects, create_zip

#: The beginning of the metadata of arrays as td writes it. zarr and tensorstore put spaces or other keys there. A process that
#: was killed can have left an array that the header does not have.
_OURS = b'{"shape":['
#: How many objects of another program a message names.
_SHOWN = 5


def save(
    data: Any,
    location: Any,
    *,
    chunks: Any = None,
    shards: Any = None,
    filters: Any = None,
    compressors: Any = None,
    serializer: Any = None,
    pack: int | Literal["auto"] | None = None,
    checksums: bool = False,
    durable: bool = False,
    num_threads: int = 0,
    return_early: bool = False,
    storage_options: Mapping[str, object] | None = None,
    progress: Progress = False,
) -> Any:
    """Save a collection as a Zarr group of version 3.

    A local directory or zip file has its complete content under its name, or the old one remains, whenever the process is
    killed. In another store, an old group is removed first, and a group that is not complete cannot be opened.

    Args:
        data: the collection.
        location: a directory, a zip file (``.zip``), a URL, or a store or group of zarr.
        chunks: rows of a chunk, a tuple of sizes that count along the leading dims, or ``"auto"`` for about 1 MB. By default
            an array has one chunk, which is mapped when it is loaded. This option and the next four are one value for all
            arrays, or a mapping from keys, or prefixes of keys, to values; the key None has the default.
        shards: rows of a shard, which is a file of several chunks; or a tuple, as for ``chunks``.
        filters: codecs of zarr that are applied first.
        compressors: codecs of zarr that compress, such as ``zarr.codecs.ZstdCodec()``. By default nothing is compressed.
        serializer: codec of zarr that converts arrays to bytes.
        pack: leaves of fewer bytes share one array for each dtype, which is faster for thousands of small leaves; ``"auto"`` is
            16 kB. Other programs see these arrays, and not the leaves.
        checksums: store a checksum of each chunk, which every read compares.
        durable: return after the data has reached the disk.
        num_threads: number of threads that write arrays of one chunk; 0 writes in this thread. Other arrays are written on the
            threads of zarr.
        return_early: write in the background and return a :class:`TensorDictFuture`. The leaves must not change before
            its ``result()`` returns.
        storage_options: options of the file system of a URL.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Returns:
        ``data``, or a future of it.

    Raises:
        CodecError: a value or leaf cannot be stored; nothing is written.
        FileExistsError: ``location`` has arrays, groups or files that td has not written.

    >>> td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(3)}})
    >>> save(td, "data.zarr") is td
    True
    """
    options = ChunkOptions(chunks, shards, filters, compressors, serializer, checksums)
    planned = plan_group(data, options, pack=_find_limit(pack))
    report = make_reporter(progress, planned.nbytes, "save")
    write = partial(_write, planned, num_threads=num_threads, report=report)
    work = partial(_replace, location, write, durable=durable, storage_options=storage_options)
    if not return_early:
        work()
        return data
    return run_in_background(work, "td-zarr-save", data)


#: ``pack="auto"``: leaves of fewer bytes share an array.
_PACKED = 1 << 14


class PlannedGroup:
    """The documents and arrays of a group to write.

    Attributes:
        plan: the arrays and the header.
        arrays: the arrays by name, with their metadata.
        texts: the arrays of strings by name, with their metadata.
        documents: the metadata of all groups and arrays, by name; without the root.
        values: the chunks of the values that tensordict can read, by key.
        root: the metadata of the root.
    """

    def __init__(self, plan: ArrayPlan, documents: dict[str, Document], *, sparse: bool = False) -> None:
        self.plan = plan
        levels = describe_levels(plan)
        infos = {name: read_array_document(name, document, "") for name, document in documents.items()}
        self.arrays = {name: infos[name] for name in plan.arrays}
        self.texts = {name: infos[name] for name in plan.texts}
        documents = dict(documents)
        for name in infos:
            for length in range(1, name.count("/") + 1):
                levels.setdefault("/".join(name.split("/")[:length]), {})
        self.values: dict[str, bytes] = {}
        for name, (attributes, content) in describe_values(plan).items():
            dims = [f"{name.rpartition('/')[2]}_0"]
            documents[name] = make_plain_document(torch.uint8, [len(content)], dims, attributes)
            self.values[f"{name}/c.0"] = content
        groups = {name: make_group_document(attributes) for name, attributes in levels.items() if name}
        self.documents: dict[str, Document] = {**groups, **documents}
        header = {**plan.header, "sparse": True} if sparse else plan.header
        self.root = make_group_document({**levels[""], "td": json.dumps(header, separators=(",", ":"))})
        nested: dict[str, Document] = {
            name: {**document, "consolidated_metadata": consolidate({})} for name, document in groups.items()
        }
        self.root["consolidated_metadata"] = consolidate({**self.documents, **nested})

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(item.nbytes for item in self.plan.arrays.values())


def consolidate(documents: Mapping[str, Document]) -> Consolidated:
    """Return the consolidated metadata of a root, where the children of a group are together: zarr sorts by depth alone."""
    names = sorted(documents, key=lambda name: name.split("/"))
    return {"kind": "inline", "must_understand": False, "metadata": {name: documents[name] for name in names}}


def _find_limit(pack: int | Literal["auto"] | None) -> int:
    """Return the size in bytes below which leaves share an array."""
    if pack is None or pack == "auto":
        return 0 if pack is None else _PACKED
    if type(pack) is not int or pack < 0:
        raise ValueError(f"pack is a number of bytes, 'auto' or None; got {pack!r}")
    return pack


def plan_group(
    data: object, options: ChunkOptions, *, blank: bool = False, pack: int = 0, reserved: Iterable[str] = ()
) -> PlannedGroup:
    """Plan a save, without names of ``reserved``, and read no leaf; CodecError if a value or leaf cannot be stored."""
    plan = make_array_plan(
        data, NATIVE, join_names, blank=blank, reserved=reserved, separator="/", pack=pack, texts=True
    )
    dims = name_dims({**plan.arrays, **plan.texts})
    documents = {name: make_array_document(item, dims[name], options) for name, item in plan.arrays.items()}
    for name, column in plan.texts.items():
        documents[name] = make_text_document(column, dims[name], options)
    return PlannedGroup(plan, documents)


def _write(
    planned: PlannedGroup, objects: Objects, *, num_threads: int, report: Callable[[int], None]
) -> None:
    """Write all objects of a group, the root last."""
    write_entries(objects, planned, num_threads=num_threads, report=report)
    _put_root(objects, planned)


def write_entries(
    objects: Objects,
    planned: PlannedGroup,
    known: Container[str] = (),
    *,
    num_threads: int = 0,
    report: Callable[[int], None] = lambda size: None,
) -> None:
    """Write the arrays of a group, and the metadata of its groups and arrays except those that are ``known``."""
    raw: list[Callable[[], None]] = []
    others: dict[str, tuple[ArrayInfo, Callable[[], Tensor]]] = {}
    for name, info in planned.arrays.items():
        item = planned.plan.arrays[name]
        if info.raw is not None and info.nbytes:
            raw.append(partial(_write_raw, objects, info, item, report))
        else:
            others[name] = info, partial(read_planned, item)
    put_documents(objects, planned, known)
    run_parallel(raw, max(num_threads, objects.together))
    write_arrays(objects, others, report)
    _write_texts(objects, planned)


def _write_texts(objects: Objects, planned: PlannedGroup) -> None:
    write_texts(objects, [(info, planned.plan.texts[name]) for name, info in planned.texts.items()])


def put_documents(objects: Objects, planned: PlannedGroup, known: Container[str] = ()) -> None:
    """Write the metadata of all groups and arrays but the root, and the values that tensordict can read."""
    puts = [partial(objects.put, key, [content]) for key, content in planned.values.items()]
    documents = {name: document for name, document in planned.documents.items() if name not in known}
    puts += [partial(objects.put, f"{name}/zarr.json", [dump_json(doc)]) for name, doc in documents.items()]
    run_parallel(puts, objects.together)


def _put_root(objects: Objects, planned: PlannedGroup) -> None:
    """Write the metadata of the root, which makes the group complete."""
    objects.put("zarr.json", [dump_json(planned.root)])


def dump_json(document: object) -> bytes:
    """Return a document as JSON, with its check line."""
    return add_check_line(json.dumps(document, separators=(",", ":")).encode())


def _write_raw(objects: Objects, info: ArrayInfo, item: PlannedArray, report: Callable[[int], None]) -> None:
    objects.put(f"{info.name}/{info.raw}", [as_bytes(part).numpy() for part in item.read()])
    report(item.nbytes)


def read_planned(item: PlannedArray) -> Tensor:
    """Return the elements of an array to write as one tensor."""
    parts = item.read()
    if item.dim is None and len(parts) > 1:
        return torch.cat([part.reshape(-1) for part in parts])
    return parts[0] if item.dim is None or item.dim else torch.stack(parts)


def _replace(
    location: object,
    write: Callable[[Objects], None],
    *,
    durable: bool,
    storage_options: Mapping[str, object] | None,
) -> None:
    """Write a group at a location, in the place of the one that is there."""
    path = find_local_path(location)
    if path is None:
        objects = find_objects(location, storage_options)
        try:
            with objects.lock.hold():
                _start(objects)
                write(objects)
        finally:
            objects.close()
    elif path.endswith(".zip"):
        if os.path.isdir(path):
            raise IsADirectoryError(f"cannot save to {path!r}, which is a directory")
        with NewFile(path) as file:
            with create_zip(file.temporary) as objects:
                write(objects)
            file.commit(durable=durable)
    else:
        if os.path.isdir(path):
            check_replaceable(LocalObjects(path))
        with NewDirectory(path) as folder:
            write(LocalObjects(folder.temporary))
            with hold_directory(folder.path):
                folder.commit(durable=durable)


def _start(objects: Objects) -> None:
    """Mark the group in a store as incomplete, and remove an old one; FileExistsError if td has not written what is there."""
    has_objects = check_replaceable(objects)
    if objects.is_read_only and objects.list_keys():
        raise FileExistsError(
            f"cannot save to {objects.where!r}: it has objects, which this store cannot remove"
        )
    objects.start_save()
    if objects.is_read_only:  # a later root would be a second object of that name
        return
    marker = dump_json(make_group_document({INCOMPLETE: True}))
    if has_objects:
        objects.put("zarr.json", [marker])
        objects.clear()
    else:  # of two processes that save to a new location, one is refused
        objects.put_new("zarr.json", marker)


def create(
    like: object,
    location: object,
    *,
    chunks: object = None,
    shards: object = None,
    filters: object = None,
    compressors: object = None,
    serializer: object = None,
    storage_options: Mapping[str, object] | None = None,
) -> Any:
    """Write a group of zeros with the structure, shapes and dtypes of a collection, and open it for writing.

    All chunks are written, so that one that is lost later is an error, and not zeros; on most file systems those without
    compression take no space. The leaves of the collection are not read. The options are those of :func:`td_zarr.save`.

    Raises:
        FileExistsError: something is at the location.
    """
    options = ChunkOptions(chunks, shards, filters, compressors, serializer)
    planned = plan_group(like, options, blank=True)
    path = find_local_path(location)
    if (
        os.path.lexists(path)
        if path is not None
        else find_objects(location, storage_options).get("zarr.json")
    ):
        raise FileExistsError(f"cannot create {str(location)!r}: it exists")
    if path is not None and path.endswith(".zip"):
        raise ValueError(f"cannot create {path!r}: a zip file cannot be written in place; pass a directory")

    def write(objects: Objects) -> None:
        put_documents(objects, planned)
        for info in planned.arrays.values():
            if info.nbytes and info.raw is not None and isinstance(objects, LocalObjects):
                objects.extend(f"{info.name}/{info.raw}", info.nbytes)
            elif info.nbytes:
                objects.put_same(list_chunks(info), encode_zeros(info))
        _write_texts(objects, planned)
        _put_root(objects, planned)

    _replace(location, write, durable=False, storage_options=storage_options)
    return open_collection(location, mode="r+", storage_options=storage_options)


def check_replaceable(objects: Objects) -> bool:
    """Raise FileExistsError if a place has arrays, groups or files that td has not written, which a save would remove.

    Return whether there are objects.
    """
    # What a process that was killed has left does not count.
    beginnings = (".zarr.json.tmp-", TEMPORARY, f"%{TEMPORARY}")
    everything = objects.list_keys()
    keys = [key for key in everything if not key.startswith(beginnings)]
    if not keys or keys == ["zarr.json"]:
        return bool(everything)
    where = f"cannot save to {objects.where!r}"
    if "zarr.json" not in keys:
        raise FileExistsError(f"{where}: it has files that are not of a Zarr group; remove them")
    try:
        root = read_root(objects)
        attributes = get_attributes(root, objects.where)
        if INCOMPLETE in attributes or (LEVEL in attributes and "td" not in attributes):
            return True
        if "td" not in attributes:
            raise FileExistsError(f"{where}: it is a group of another program; remove it")
        others = list(_list_others(objects, keys, attributes["td"]))
    except FormatError as error:
        raise FileExistsError(f"{where}: what is there is damaged; remove it ({error})") from error
    if others:
        raise FileExistsError(
            f"{where}: it has {', '.join(map(repr, others[:_SHOWN]))}, which another program has written; remove that first"
        )
    return True


def _list_others(objects: Objects, keys: list[str], header: object) -> Iterator[str]:
    """Yield the names of arrays, groups and files that are not those of a header."""
    arrays, groups = _read_names(header, objects.where)
    unknown = [key for key in keys if not _is_inside(key, arrays)]
    nodes = [key for key in unknown if key.endswith("/zarr.json")]
    for key, content in zip(nodes, objects.get_many(nodes), strict=True):
        name = key.removesuffix("/zarr.json")
        if not content:  # a process was killed before it wrote the metadata, and then the chunks
            continue
        document = parse_json(content, f"{objects.where}: {key}")
        attributes = get_attributes(document, f"{objects.where}: {key}")
        is_array = document.get("node_type") == "array"
        if is_array and (VALUE in attributes or content.startswith(_OURS)):
            arrays.add(name)
        elif name not in groups and (is_array or {*attributes} - {LEVEL}):
            yield name
    for key in unknown:
        if not (key == "zarr.json" or key in nodes or _is_inside(key, arrays)):
            yield key


def _read_names(header: object, where: str) -> tuple[set[str], set[str]]:
    """Return the names of the arrays of a header, and of the groups above them."""
    table = load_array_table(parse_json(header, where) if isinstance(header, str) else header, where)
    arrays = set(list_array_names(table))
    return arrays, {name[:end] for name in arrays for end, char in enumerate(name) if char == "/"}


def _is_inside(key: str, names: set[str]) -> bool:
    """Return True if an object belongs to one of some arrays."""
    return any(char == "/" and key[:end] in names for end, char in enumerate(key))
