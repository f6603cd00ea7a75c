"""Save a collection: plan the tree, write it next to the prefix, map it, and publish it."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from td_core import StructureError, TensorCollection, TensorDictFuture
from td_core.spi import (
    RULES,
    JaggedParts,
    Node,
    lock,
    make_reporter,
    map_in_roles,
    run_in_background,
    show_path,
    visit,
    wait_for,
)
from td_store.files import Checksum

from . import _file_names, _fs
from ._anonymous import AnonymousFile, align
from ._chunks import iter_chunks, write_chunks
from ._commit import Staging
from ._errors import FileTakenError
from ._fs import DirectoryTree, Parts
from ._mapped_memory import check_mappings, source_of
from ._memmap_backend import MemmapBackend, attach_backend
from ._meta import format_manifest
from ._options import MemmapOptions
from ._plan import LeafFile, Plan, encode_node, make_plan, plan_anonymous
from ._shapes import element_count, make_empty, reshape_flat
from ._tensor import MemoryMappedTensor, Place, as_plain, is_at_its_place, is_whole, map_file

# Below this size, writing a file takes less time than passing it to a thread (measured up to 1 MB). By default no
# threads are used: writes go to the page cache, and on two cores 4 threads took 0.85 to 1.15 times as long as one.
_WORTH_A_THREAD = 1 << 20


def save_directory(
    tree: TensorCollection, prefix: str, options: MemmapOptions
) -> Callable[[], TensorCollection]:
    """Plan and check a save. Return a function that writes it and returns the mapped collection."""
    plan, tree = plan_save(tree, options)
    check_mappings(sum(1 for file in plan.leaves if file.nbytes), f"save at {prefix} and map the result")
    _check_same_places(plan, prefix, options)
    _refuse_archived(plan, options)
    if not options.existsok and _fs.get_status(os.path.join(prefix, _file_names.META)) is not None:
        raise FileTakenError(f"a save exists at {prefix}; pass existsok=True to replace it")
    return lambda: _Writer(plan, prefix, options).run(tree)


def plan_save(tree: TensorCollection, options: MemmapOptions) -> tuple[Plan, TensorCollection]:
    """Plan a save. Return the plan and the collection to map, a copy unless it is mapped in place."""
    if not options.inplace:
        tree = copy_nodes(tree)
    plan = make_plan(
        tree,
        robust_key=options.is_robust,
        allow_pickle=options.allow_pickle,
        content=not options.like,
        rows=options.rows,
    )
    return plan, tree


def copy_nodes(tree: TensorCollection) -> TensorCollection:
    """Copy the nodes of a collection, but not its leaves; keep the user's locks, not the locks of mapping."""
    result = tree._shallow_copy()

    def copy_lock(node: TensorCollection, copy: Any) -> Iterator[tuple[object, object]]:
        if node._locked is True:
            copy.lock_()
        else:
            pairs = zip(node._tree_children(), copy._tree_children(), strict=False)
            yield from (pair for pair in pairs if not isinstance(pair[0], Tensor))

    visit(copy_lock, tree, result)
    return result


def _check_same_places(plan: Plan, prefix: str, options: MemmapOptions) -> None:
    if options.copy_existing or options.like:
        return
    real = _fs.resolve_path(prefix)
    for file in plan.leaves:
        leaf = file.tensor
        if not isinstance(leaf, MemoryMappedTensor):
            continue
        here = leaf._place.filename
        if here is None or not file.nbytes or not is_at_its_place(leaf):
            continue
        target = os.path.join(real, *file.path)
        if is_whole(leaf):
            if _fs.is_path_of(target, leaf._place.identity) or _fs.resolve_path(here) == target:
                continue
        raise FileTakenError(
            f"cannot save {show_path(file.key)} to {target}: it is stored in {here}; pass copy_existing=True to copy it"
        )


def _refuse_archived(plan: Plan, options: MemmapOptions) -> None:
    """Raise FileTakenError if mapping in place would redirect writes from an archive to new files."""
    for file in plan.leaves if options.inplace and not options.copy_existing else ():
        if type(file.tensor) is MemoryMappedTensor or file.tensor.is_nested or not file.nbytes:
            continue
        place = source_of(file.tensor)
        if isinstance(place, Place) and place.mode == "r+":
            raise FileTakenError(
                f"cannot map {show_path(file.key)} to another file in place: what is written to it reaches {place.filename}, "
                "and would not any more; pass copy_existing=True to copy it"
            )


class _Writer:
    """Writer of a planned save."""

    def __init__(self, plan: Plan, prefix: str, options: MemmapOptions) -> None:
        self.plan = plan
        self.prefix = prefix
        self.options = options
        self.files: dict[LeafFile, MemoryMappedTensor] = {}
        self.hashes: dict[Parts, str] = {}
        self.texts: dict[Parts, str] = {}
        self.sizes: dict[Parts, list[object]] = {}

    def run(self, tree: TensorCollection) -> TensorCollection:
        plan, options = self.plan, self.options
        # Write no manifest for sparse files, whose content is written later.
        planned = plan.files() if options.like else [*plan.files(), (_file_names.MANIFEST,)]
        with Staging(
            self.prefix, planned, durable=options.durable, own=partial(_find_kept_files, plan)
        ) as staging:
            self.staging = staging
            self.report = make_reporter(options.progress, sum(file.nbytes for file in plan.leaves), "save")
            for parts in plan.directories:
                staging.make(parts)
            self._write_leaves()
            for parts, name, text in plan.texts[:-1]:
                staging.tree.write(parts, name, text, sync=options.durable)
                self._note_text(parts, name, text)
            if not options.like:
                self._write_manifest()
            if options.durable:
                for parts in reversed(plan.directories):
                    staging.tree.sync(parts)
            staging.write_last(*plan.texts[-1][1:])
            staging.publish()
        return finish(tree, plan, _map_leaves(plan, self.files, options.like), self.prefix, options)

    def _write_leaves(self) -> None:
        with contextlib.ExitStack() as stack:
            pool = None
            if self.options.num_threads > 0:
                wait_for({file.tensor.device for file in self.plan.leaves})
                pool = stack.enter_context(ThreadPoolExecutor(self.options.num_threads, "td-memmap"))
            running: list[Future[object]] = []
            for file in self.plan.leaves:
                if file.same_as is None:
                    if self._link_existing(file):
                        self.report(file.nbytes)
                    else:
                        self._create(file, pool, running)
                if running and len(running) > 4 * self.options.num_threads:
                    running.pop(0).result()
            for future in running:
                future.result()
        for file in self.plan.leaves:
            if file.same_as is not None and file not in self.files:
                self._link_tied(file, file.same_as)

    def _create(self, file: LeafFile, pool: Any, running: list[Future[object]]) -> None:
        path = "/".join((self.prefix, *file.path))
        if not file.nbytes:
            data = make_empty(file.tensor.dtype, file.shape)
            self.files[file] = MemoryMappedTensor._on(data, Place(file.shape, path))
        elif pool is None or file.nbytes < _WORTH_A_THREAD:
            self._fill(file, self._open(file, path, running), path)
        else:
            work = file, self._open(file, path, running), path
            try:
                running.append(pool.submit(self._fill, *work))
            except RuntimeError:
                # At interpreter exit, a background save is awaited but no new thread can start.
                self._fill(*work)

    def _open(self, file: LeafFile, path: str, running: list[Future[object]] | None = None) -> int:
        while True:
            try:
                return self.staging.tree.create(file.parts, file.name)
            except OSError as error:
                if error.errno != errno.EMFILE or not running:
                    raise _add_leaf_name(error, file, path) from error
            running.pop(0).result()  # Each running write holds a file open, so wait for one.

    def _fill(self, file: LeafFile, fd: int, path: str) -> None:
        try:
            if self.options.like and file.leaf is not None:
                (_fs.set_size if self.options.sparse else _fs.reserve)(fd, file.nbytes)
                self.report(file.nbytes)
            else:
                self._write_elements(file, fd)
            if self.options.durable:
                _fs.sync_file(fd)
            status = _fs.get_open_status(fd)
            leaf = map_file(
                fd, path, file.tensor.dtype, file.shape, None, shared=True, status=status, nbytes=file.nbytes
            )
        except OSError as error:
            raise _add_leaf_name(error, file, path) from error
        finally:
            _fs.close(fd)
        self.files[file] = leaf
        self.sizes[file.path] = [file.nbytes, status.st_mtime_ns]

    def _write_elements(self, file: LeafFile, fd: int) -> None:
        digest = Checksum() if self.options.checksums else None
        for piece in iter_chunks(file.tensor):
            _fs.write_all(fd, piece)
            if digest is not None:
                digest.update(piece)
            self.report(piece.nbytes)
        if digest is not None:
            self.hashes[file.path] = digest.hexdigest()

    def _link_existing(self, file: LeafFile) -> bool:
        """Hard-link the file at the prefix from which a leaf is mapped; return False if the leaf has no such file."""
        leaf, previous = file.tensor, self.staging.previous
        if previous is None or self.staging.in_place or not isinstance(leaf, MemoryMappedTensor):
            return False
        result = _find_mapped_file(previous, file)
        if result is None or not self._link(previous, file.path, file):
            return False
        self._hash(file.path, iter_chunks(leaf))
        self.sizes[file.path] = [file.nbytes, result.st_mtime_ns]
        self.files[file] = leaf
        return True

    def _link(self, source: DirectoryTree, path: Parts, file: LeafFile) -> bool:
        try:
            self.staging.tree.link(source, path, file.path)
        except FileNotFoundError:
            return False  # Another process has replaced the save since then.
        except OSError as error:
            if error.errno in _fs.NO_LINKS:
                return False
            raise
        return True

    def _link_tied(self, file: LeafFile, first: LeafFile) -> None:
        """Hard-link a leaf to the file of an earlier leaf on the same memory."""
        path = "/".join((self.prefix, *file.path))
        if not self._link(self.staging.tree, first.path, file):
            self._fill(file, self._open(file, path), path)
            return
        source = self.files[first]
        self.sizes[file.path] = self.sizes[first.path]
        if first.path in self.hashes:
            self.hashes[file.path] = self.hashes[first.path]
        self.report(file.nbytes)
        self.files[file] = MemoryMappedTensor._on(source.detach(), replace(source._place, filename=path))

    def _note_text(self, parts: Parts, name: str, text: bytes) -> None:
        path = (*parts, name)
        self.sizes[path] = [len(text), None]
        self.texts[path] = f"{zlib.crc32(text):08x}"
        self._hash(path, [text])

    def _hash(self, path: Parts, content: Iterable[object]) -> None:
        if self.options.checksums:
            self.hashes[path] = Checksum(content=content).hexdigest()

    def _write_manifest(self) -> None:
        # The manifest also lists the root's metadata, which is written last.
        self._note_text(*self.plan.texts[-1])
        text = format_manifest(
            self.sizes, Checksum().algorithm if self.options.checksums else None, self.hashes, self.texts
        )
        self.staging.tree.write((), _file_names.MANIFEST, text, sync=self.options.durable)


def _map_leaves(plan: Plan, files: dict[LeafFile, MemoryMappedTensor], like: bool) -> dict[int, Tensor]:
    """Return the mapped tensor of each leaf of a plan by ``id`` of the leaf; tied leaves have one tensor."""
    result = reversed(plan.leaves)
    mapped: dict[int, Tensor] = {id(file.leaf): files[file] for file in result if file.leaf is not None}
    for leaf, parts, ragged in plan.jagged:
        # The files of memmap_like are filled later, so cached component lengths may become wrong.
        seqlens = (None, None) if like else JaggedParts.of(leaf).seqlens
        made_of = {role: as_plain(files[file]) for role, file in parts.items()}
        mapped[id(leaf)] = JaggedParts(ragged, **made_of, seqlens=seqlens).join()
    return mapped


def _find_kept_files(plan: Plan, previous: DirectoryTree) -> list[Parts]:
    """Return the planned files that already exist and from which a leaf is mapped."""
    return [file.path for file in plan.leaves if file.same_as is None and _find_mapped_file(previous, file)]


def _find_mapped_file(tree: DirectoryTree, file: LeafFile) -> os.stat_result | None:
    """Return the status of a leaf's file if the leaf maps all of it, else None."""
    leaf = file.tensor
    if not isinstance(leaf, MemoryMappedTensor) or not leaf._place.shared or not is_whole(leaf):
        return None
    result = tree.stat_path(file.path)
    fits = (
        result is not None
        and _fs.get_identity(result) == leaf._place.identity
        and result.st_size == file.nbytes
    )
    return result if fits else None


def _add_leaf_name(error: OSError, file: LeafFile, path: str) -> OSError:
    """Return an OSError with the key, size and path of a leaf in its message."""
    return _fs.add_path(error, f"cannot write {show_path(file.key)}, {file.nbytes} bytes", path)


def save_anonymous(tree: TensorCollection, options: MemmapOptions) -> TensorCollection:
    """Map a collection to an anonymous file; leaves that are already mapped shared remain in their files."""
    like = options.like
    plan = plan_anonymous(tree, content=not like)
    _refuse_archived(plan, options)
    files: dict[LeafFile, MemoryMappedTensor] = {}
    offsets: dict[LeafFile, int] = {}
    end = 0
    for file in plan.leaves:
        leaf = file.tensor
        if isinstance(leaf, MemoryMappedTensor) and is_whole(leaf) and leaf._place.shared and not like:
            files[file] = leaf
        elif file.same_as is None:
            offsets[file] = end
            end = align(end + file.nbytes)
    shared = AnonymousFile.of_size(end, sparse=like) if end else None
    report = make_reporter(options.progress, sum(file.nbytes for file in plan.leaves), "save")
    for file in plan.leaves:
        first = file.same_as
        if file in offsets:
            files[file] = _anonymous(file, shared, offsets[file], like and file.leaf is not None)
        elif file not in files and first is not None:
            files[file] = MemoryMappedTensor._on(files[first].detach(), files[first]._place)
        report(file.nbytes)
    return finish(tree, plan, _map_leaves(plan, files, like), None, options)


def _anonymous(file: LeafFile, shared: AnonymousFile | None, start: int, like: bool) -> MemoryMappedTensor:
    """Write a leaf at byte ``start`` of an anonymous file and map it."""
    if shared is None:
        return MemoryMappedTensor._on(make_empty(file.tensor.dtype, file.shape), Place(file.shape))
    if not like:
        write_chunks(shared.fd, file.tensor, start)
    data = shared.elements(file.tensor.dtype, element_count(file.shape), start)
    return MemoryMappedTensor._on(
        reshape_flat(data, file.shape), Place(file.shape, file=shared, offset=start)
    )


def finish(
    tree: TensorCollection, plan: Plan, mapped: dict[int, Tensor], prefix: str | None, options: MemmapOptions
) -> TensorCollection:
    """Return the collection with its mapped leaves: locked, on the CPU, with MemmapBackends attached."""
    if options.inplace:
        # A stack may contain a member twice; replace the member's leaves only once.
        nodes = {id(node._inner()): node for node, _ in plan.nodes}
        # Keep the parameter objects of modules: optimizers hold references to them.
        kept = {id(leaf) for node, _ in plan.nodes if isinstance(node, nn.Module) for leaf in node._leaves()}
        for node in nodes.values():
            _replace_leaves(node, mapped, kept)
        if prefix is not None and len(nodes) < len(plan.nodes):
            _split_shared_nodes(tree)
        result = tree
    else:
        result = put_leaves(tree, mapped)
    saved = MemmapBackend(
        prefix,
        options.is_robust,
        options.allow_pickle,
        options.share_non_tensor,
        rows=options.rows is not None,
    )
    return attach_backend(result, saved)


def put_leaves(tree: TensorCollection, mapped: dict[int, Tensor]) -> TensorCollection:
    """Return the collection with other leaves, by ``id``; parameters remain parameters, unless for tensordict's programs."""

    def relocate(leaf: Tensor) -> Tensor:
        return mapped[id(leaf)]

    return tree._map(relocate) if RULES.follows_tensordict else map_in_roles(tree, relocate)


def _split_shared_nodes(tree: TensorCollection) -> None:
    """Copy nodes that occur twice, so that each key path of a save has a separate node."""
    seen: set[int] = set()

    def split(node: TensorCollection) -> Iterator[tuple[TensorCollection]]:
        record = encode_node(node)
        for key, child in record.entries.items():
            if isinstance(child, TensorCollection):
                if id(child._inner()) in seen:
                    child = copy_nodes(child)
                    node._set_child(key, child)
                seen.add(id(child._inner()))
                yield (child,)
        yield from zip(record.members.values())

    visit(split, tree)


def _replace_leaves(node: Node, mapped: dict[int, Tensor], kept: set[int]) -> None:
    for key, child in encode_node(node).entries.items():
        if isinstance(child, Tensor):
            if id(child) not in mapped:
                raise StructureError(
                    f"the {type(node).__name__} was changed by another thread during the save; lock_() it while threads share it"
                )
            if id(child) in kept and not isinstance(child, MemoryMappedTensor) and not child.is_nested:
                child.data = as_plain(mapped[id(child)])
            else:
                node._set_child(key, mapped[id(child)])


def lock_then_run(
    data: TensorCollection, work: Callable[[], TensorCollection]
) -> Callable[[], TensorCollection]:
    """Lock a collection now, and return a function that runs ``work`` and unlocks again if it fails."""
    was_locked = data.is_locked
    lock(data, by_user=False)

    def run() -> TensorCollection:
        try:
            return work()
        except BaseException:
            if not was_locked:
                data.unlock_()
            raise

    return run


def save_in_background(data: TensorCollection, work: Callable[[], object]) -> TensorDictFuture:
    """Run the save of a collection in a new thread."""
    wait_for({leaf.device for leaf in data._leaves()})
    return run_in_background(work, "td-memmap-save")
