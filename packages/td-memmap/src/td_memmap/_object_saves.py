"""Save to an object store, load from one, and open what is there: leaves are ranges of bytes that are read when used."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from td_core import TensorCollection, TensorDictFuture
from td_core.spi import make_reporter, run_in_background, run_parallel
from td_core.typing import ObjectLocation, ObjectStore
from td_store import StoredTensor
from td_store.arrays import NewTree, RangeSource, read_stored, refuse_objects, upload
from td_store.files import Checksum

from . import _file_names
from ._archive import write_to_file
from ._chunks import iter_chunks
from ._fs import Parts
from ._load import LoadOptions, Node, Reader
from ._load_part import select_part
from ._manifest import check
from ._meta import LeafEntry, find_directory, format_manifest
from ._object_trees import ObjectTree, make_marker, open_tree
from ._options import MemmapOptions
from ._plan import LeafFile, Plan
from ._save import plan_save
from ._save_files import find_save_files
from ._shapes import Shape, check_size, element_count, make_empty, reshape_flat

#: The most objects that are written at the same time.
_TOGETHER = 16


class _ObjectReader(Reader):
    """Reader of a save in an object store. Leaves are stored tensors; nested and compressed ones are read."""

    #: The mode of stored tensors, and whether a leaf is read at once.
    leaf_mode = "r"
    reads = False

    def _check_mappings(self, count: int) -> None:
        """Do nothing: no file is mapped."""

    def map_leaf(self, node: Node, key: str, entry: LeafEntry) -> Tensor:
        self.reads = entry.nested or entry.jagged is not None
        return super().map_leaf(node, key, entry)

    def map_file(
        self, parts: Parts, name: str, dtype: torch.dtype, shape: Shape, nbytes: int | None = None
    ) -> Tensor:
        if nbytes is None:
            nbytes = element_count(shape) * dtype.itemsize
        if not nbytes:
            return make_empty(dtype, shape)
        status = self.tree.stat(parts, name)
        check_size(self.tree.show(parts, name), None if status is None else status.st_size, nbytes)
        place, count = self.tree.find_content(parts, name), nbytes // dtype.itemsize
        if place is None:
            content = bytearray(self.tree.read(parts, name, status.st_size))
            return reshape_flat(torch.frombuffer(content, dtype=dtype, count=count), shape)
        if self.reads or isinstance(shape, Tensor):
            whole = RangeSource(place.reader, dtype, (count,), place.begin, name)
            return reshape_flat(whole.read((slice(0, count, 1),)), shape)
        source = RangeSource(place.reader, dtype, tuple(shape), place.begin, name)
        return StoredTensor(source, mode=self.leaf_mode)


def load_objects(place: ObjectLocation, options: LoadOptions) -> Any:
    """Load a save from an object store; all leaves are read together."""
    if options.mode == "r+":
        refuse_objects(place, "write into", "load it with another mode, and save() the result")
    target = None if options.device is None else torch.device(options.device)
    is_meta = target is not None and target.type == "meta"
    lazy = _read_lazily(place, options if is_meta else replace(options, device=None))
    if is_meta:
        return lazy
    whole = read_stored(lazy, progress=options.progress)
    if lazy.is_locked:
        whole.lock_()
    return whole if target is None else whole.to(target, non_blocking=options.non_blocking)


def open_objects(place: ObjectLocation, options: LoadOptions, mode: str) -> Any:
    """Open a save in an object store, without reading leaves except nested and compressed ones."""
    if mode == "r+":
        refuse_objects(place, "write into", "open it with mode='c', and save() the result")
    opened = _read_lazily(place, options, mode)
    return opened.unlock_() if mode == "c" else opened.lock_()


def _read_lazily(place: ObjectLocation, options: LoadOptions, mode: str = "r") -> Any:
    """Return the collection of a save, whose leaves are stored tensors."""
    if options.verify:
        check(place)
    options = replace(options, keeper=None, copier=None, mode=None, progress=False)
    with open_tree(place) as tree:
        if options.subpath is not None:
            tree.base = find_directory(tree, options.subpath, robust_key=options.is_robust)
        reader = _ObjectReader(tree, options)
        reader.leaf_mode = mode
        return select_part(reader.load(), options.keys)


def save_objects(
    data: TensorCollection, place: ObjectLocation, options: MemmapOptions, *, overwrite: bool
) -> TensorCollection | TensorDictFuture:
    """Save to an object store: a tree of objects, or an archive, which is one object."""
    if options.share_non_tensor:
        raise ValueError(
            f"share_non_tensor=True needs a local directory: values are shared through its files; got {place}"
        )
    plan, _ = plan_save(data, options)
    if options.archive or (options.archive is None and place.where.lower().endswith(".tdz")):
        work: Callable[[], object] = partial(_save_archive, plan, place, options)
    else:
        work = partial(_ObjectWriter(plan, place, options).run, overwrite=overwrite and options.existsok)
    if options.return_early:
        return run_in_background(work, "td-memmap-save", data)
    work()
    return data


def _save_archive(plan: Plan, place: ObjectLocation, options: MemmapOptions) -> None:
    total = sum(file.nbytes for file in plan.leaves)
    report = make_reporter(options.progress, total, "save")
    quiet = replace(options, progress=False)
    left = total

    def count(size: int) -> None:
        nonlocal left
        report(min(size, left))  # the archive has more bytes than the leaves
        left -= min(size, left)

    with tempfile.TemporaryFile() as file:
        write_to_file(plan, quiet, file)
        upload(place.store, file, count, create=not options.existsok)


class _ObjectWriter:
    """Writes a planned save as a tree of objects: leaves, metadata, the manifest, and the root last."""

    def __init__(self, plan: Plan, place: ObjectLocation, options: MemmapOptions) -> None:
        self.plan, self.place, self.options = plan, place, options
        self.hashes: dict[Parts, str] = {}
        self.sizes: dict[Parts, list[Any]] = {}
        self.texts: dict[Parts, str] = {}

    def run(self, *, overwrite: bool) -> None:
        """Write all objects."""
        store, plan = self.place.store, self.plan
        planned = ["/".join(path) for path in (*plan.files(), (_file_names.MANIFEST,))]
        old = _list_old(self.place) if overwrite else set()
        marker = make_marker(sorted(old.union(planned)))
        tree = NewTree(store, _file_names.META, marker, overwrite=overwrite)
        report = make_reporter(self.options.progress, sum(file.nbytes for file in plan.leaves), "save")
        writes = [partial(self._write_leaf, tree, file, report) for file in plan.leaves if file.nbytes]
        writes += [partial(self._write_text, tree, *text) for text in plan.texts[:-1]]
        run_parallel(writes, max(self.options.num_threads, _TOGETHER))
        self._note_text(*plan.texts[-1])
        tree.write(_file_names.MANIFEST, [self._make_manifest(tree, store, old)])
        tree.commit([plan.texts[-1][-1]], old)

    def _write_leaf(self, tree: NewTree, file: LeafFile, report: Callable[[int], None]) -> None:
        digest = Checksum() if self.options.checksums else None

        def produce() -> Iterator[Any]:
            for piece in iter_chunks(file.tensor):
                if digest is not None:
                    digest.update(piece)
                # A buffer of a GPU's leaf is reused for the next piece.
                yield bytes(piece) if file.tensor.is_cuda else piece
                report(piece.nbytes)

        tree.write("/".join(file.path), produce())
        self.sizes[file.path] = [file.nbytes, None]
        if digest is not None:
            self.hashes[file.path] = digest.hexdigest()

    def _write_text(self, tree: NewTree, parts: Parts, name: str, text: bytes) -> None:
        tree.write("/".join((*parts, name)), [text])
        self._note_text(parts, name, text)

    def _note_text(self, parts: Parts, name: str, text: bytes) -> None:
        path = (*parts, name)
        self.sizes[path], self.texts[path] = [len(text), None], f"{zlib.crc32(text):08x}"
        if self.options.checksums:
            self.hashes[path] = Checksum(content=[text]).hexdigest()

    def _make_manifest(self, tree: NewTree, store: ObjectStore, old: set[str]) -> bytes:
        """Return the manifest, with the stamps of all objects, by which readers notice those of another save."""
        algorithm = Checksum().algorithm if self.options.checksums else None
        stamps = {name: info.stamp for name, info in tree.written.items()}
        # If this process dies before it has removed them, the next save does.
        left = sorted(old - stamps.keys() - {_file_names.META, _file_names.MANIFEST})
        return format_manifest(
            self.sizes, algorithm, self.hashes, self.texts, where=store.where, stamps=stamps, left=left
        )


def _list_old(place: ObjectLocation) -> set[str]:
    """Return the names of the objects of the save at a location, or of one that has not ended."""
    tree = ObjectTree(place, is_lenient=True)
    names = tree.list_unfinished()
    if names is None:
        names = [*map("/".join, find_save_files(tree).files), *tree.list_left()]
    return {name for name in names if _file_names.split_relative(name) in tree.infos}
