"""Verify a save against its manifest: the size of every file, and its hash if hashes were recorded."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from td_core import Problem, Report
from td_core.errors import FormatError
from td_core.spi import Serializer, compare_check_line, make_reporter
from td_core.typing import Progress
from td_store.files import Checksum

from . import _file_names, _fs
from ._archive import ArchiveTree
from ._fs import DirectoryTree, Parts
from ._load import check_metadata, retry_on_replace
from ._meta import FileTree, parse_json, read_if_there, read_json
from ._object_trees import open_tree

if TYPE_CHECKING:
    from typing_extensions import Buffer


class CheckedTree(FileTree, Protocol):
    """Files whose content is compared."""

    def chunks(self, path: Parts) -> Iterator[Buffer]:
        """Yield the content of a file in chunks."""


def verify(path: Any, *, progress: Progress = False) -> Report:
    """Check the size of every file of a save, its metadata, and its hash if hashes were recorded (``checksums=True``).

    Elements that were written in place differ from a recorded hash, as damaged ones do: the report says ``"changed"``, and is
    not ``ok``. Save again to record new hashes. Metadata and values that td wrote in place have a checksum of their own.

    Args:
        path: directory or archive of the save, also a URL or an object store.
        progress: show a progress bar, or call a function of (bytes done, total bytes).

    Returns:
        A report that lists all files that differ.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        FormatError: the metadata itself is damaged.

    >>> _ = TensorDict({"a": torch.ones(2)}).memmap("save", checksums=True)
    >>> verify("save").problems
    []
    """
    objects = Serializer.find_objects(path)
    if objects is not None:
        with open_tree(objects) as tree:
            if isinstance(tree, ArchiveTree):
                return _verify_archive(tree, progress)
            return _verify_files(tree, progress)
    place = _fs.make_absolute(path)
    if _fs.is_file(place):
        with ArchiveTree(place) as archive:
            return _verify_archive(archive, progress)

    def check_tree(tree: DirectoryTree) -> tuple[Report, bool]:
        report = _verify_files(tree, progress)
        return report, not report.problems and tree.stat((), _file_names.MANIFEST) is not None

    report: Report = retry_on_replace(place, check_tree)
    return report


def _verify_files(tree: CheckedTree, progress: Progress) -> Report:
    """Check the files of a tree by its manifest, or by its metadata alone if it has none."""
    manifest = read_manifest(tree)
    if manifest is None:
        return _verify_levels(tree)
    report = verify_tree(tree, manifest, progress)
    report.problems.extend(_find_unreadable(tree, report.problems))
    return report


def check(path: Any) -> None:
    """Raise FormatError if a save has damaged or missing files; the message lists all of them."""
    report = verify(path)
    if not report.ok:
        raise FormatError(str(report))


def read_manifest(tree: FileTree) -> object:
    """Return the manifest of a save, or None if it has none."""
    content = read_if_there(tree, (), _file_names.MANIFEST)
    return None if content is None else parse_json(content, tree.show((), _file_names.MANIFEST))


def verify_tree(tree: CheckedTree, manifest: object, progress: Progress = False) -> Report:
    """Compare the files of a save with its manifest and return a report."""
    check = _ManifestCheck(tree, manifest)
    problems = []
    report = make_reporter(progress, sum(row[0] for row in check.files.values()), "verify")
    for name, row in check.files.items():
        try:
            problem = check.compare(name, row)
        except FormatError as error:  # such as a directory in the place of the file
            problem = Problem(name, "error", str(error))
        if problem is not None:
            problems.append(problem)
        report(row[0])
    return Report(tree.path, len(check.files), len(check.hashes), problems)


class _ManifestCheck:
    """The content of a manifest, to compare files with it; raises FormatError for other content."""

    def __init__(self, tree: CheckedTree, manifest: Any) -> None:
        self.tree = tree
        where = tree.show((), _file_names.MANIFEST)
        files = manifest.get("files") if isinstance(manifest, dict) else None
        if not isinstance(files, dict):
            raise FormatError(f"{where}: files is {files!r}, expected the size of every file")
        version = manifest.get("format", 1)
        if type(version) is not int or version != 1:
            raise FormatError(f"{where}: format is {version!r}, expected 1: upgrade td-memmap")
        for field in ("hashes", "texts"):
            if not isinstance(manifest.get(field, {}), dict):
                raise FormatError(f"{where}: {field} is {manifest[field]!r}, expected the hash of every file")
        self.files: dict[str, list[Any]] = files
        self.hashes: dict[str, object] = manifest.get("hashes", {})
        self.texts: dict[str, object] = manifest.get("texts", {})
        self.algorithm = str(manifest.get("algorithm"))
        if self.hashes or "algorithm" in manifest:
            try:
                Checksum(self.algorithm)
            except FormatError as error:
                raise FormatError(f"{where}: {error}") from error
        for name, row in files.items():
            if not (isinstance(row, list) and len(row) == 2 and type(row[0]) is int):
                raise FormatError(f"{where}: the row of {name!r} is {row!r}, expected size and time")
        saved = tree.stat((), _file_names.MANIFEST)
        self.saved_ns = 0 if saved is None else saved.st_mtime_ns

    def compare(self, name: str, row: list[Any]) -> Problem | None:
        """Compare a file with its row, and with its hashes."""
        path = _file_names.split_relative(name)
        if path is None:
            return Problem(name, "error", "its name leaves the save")
        result = self.tree.stat_path(path)
        if result is None:
            rewritten = self._is_replaced(path)
            return Problem(name, "modified" if rewritten else "missing", f"{row[0]} bytes were saved")
        since = row[1] if type(row[1]) is int else self.saved_ns
        if not name.endswith(".memmap"):
            return self._compare_text(name, path, row[0], result.st_mtime_ns > since)
        wanted = self.hashes.get(name)
        detail = self._find_difference(path, row[0], result.st_size, wanted)
        if not detail:
            return None
        # Values by rows have checksums of their own, which the check of all metadata compares, and never become fewer bytes.
        in_rows = _file_names.is_row_file(path[-1])
        if result.st_size < row[0] or (result.st_mtime_ns <= since and not in_rows):
            return Problem(name, "damaged", detail)
        # A copy has new times, so a time does not tell elements that were written in place from damaged ones.
        return Problem(name, "modified" if wanted is None or in_rows else "changed", detail)

    def _find_difference(self, path: Parts, saved: int, size: int, wanted: object) -> str:
        """Say how a file of elements differs from its size and hash in the manifest; empty if it does not."""
        if size != saved:
            return f"{size} bytes, {saved} were saved"
        if wanted is None:
            return ""
        digest = Checksum(self.algorithm, self.tree.chunks(path)).hexdigest()
        return f"its hash is {digest}, {wanted} was saved" if digest != wanted else ""

    def _is_replaced(self, path: Parts) -> bool:
        """Return True for a file that writing a value in place removed, since its metadata no longer needs it."""
        optional = _file_names.is_row_file(path[-1]) or path[-1] in _file_names.SIDECARS
        return optional and self._is_rewritten((*path[:-1], _file_names.META))

    def _is_rewritten(self, path: Parts) -> bool:
        """Return True if metadata was written in place since the save."""
        name = "/".join(path)
        row = self.files.get(name)
        problem = None if row is None or self.tree.stat_path(path) is None else self.compare(name, row)
        return problem is not None and problem.kind == "modified"

    def _compare_text(self, name: str, path: Parts, size: int, newer: bool) -> Problem | None:
        """Compare a file of metadata or values; what td wrote in place of it has a check line, and is not damaged."""
        content = b"".join(self.tree.chunks(path))
        try:
            has_line = compare_check_line(content)
        except ValueError as error:
            return Problem(name, "damaged", str(error))
        wanted, crc = self.hashes.get(name), self.texts.get(name)
        if len(content) != size:
            detail = f"{len(content)} bytes, {size} were saved"
        elif wanted is not None and wanted != (digest := Checksum(self.algorithm, [content]).hexdigest()):
            detail = f"its hash is {digest}, {wanted} was saved"
        elif crc is not None and crc != (digest := Checksum("crc32", [content]).hexdigest()):
            detail = f"its CRC-32 is {digest}, {crc} was saved"
        else:
            return None
        if has_line:
            return Problem(name, "modified", detail)
        # Only writing a value in place makes a file shorter, and that file is JSON.
        if not newer or (len(content) < size and not _is_json(self.tree, path)):
            return Problem(name, "damaged", detail)
        # What tensordict wrote has no check line, and an earlier release wrote no hash of metadata without checksums=True.
        return Problem(name, "modified" if crc is None and wanted is None else "changed", detail)


def _is_json(tree: FileTree, path: Parts) -> bool:
    try:
        read_json(tree, path[:-1], path[-1])
    except FormatError:
        return False
    return True


def _find_unreadable(tree: FileTree, known: list[Problem]) -> list[Problem]:
    """Return the problems that a load would encounter and that are not in ``known``."""
    try:
        result = _verify_levels(tree).problems
    except FormatError as error:
        # The message names the file. Ignore the error if a damaged file is already known.
        damaged = any(problem.kind != "modified" for problem in known)
        return [] if damaged else [Problem(_file_names.META, "error", str(error))]
    files = {problem.file for problem in known if problem.kind != "modified"}
    return [problem for problem in result if problem.file not in files]


def _verify_levels(tree: FileTree) -> Report:
    """Check by the metadata alone that the file of every leaf exists and is long enough."""
    files, result = check_metadata(tree)
    problems = []
    for parts, entry, error in result:
        there = any(tree.stat(parts, stem + ".memmap") for stem in entry.files)
        path = "/".join((*parts, entry.files[0] + ".memmap"))
        problems.append(Problem(path, "damaged" if there else "missing", str(error)))
    return Report(tree.path, files, 0, problems)


def _verify_archive(archive: ArchiveTree, progress: Progress) -> Report:
    problems = []
    report = make_reporter(progress, sum(info.file_size for info in archive.files.values()), "verify")
    for place, info in archive.files.items():
        try:
            if info.compress_type == zipfile.ZIP_STORED:
                archive.offset(info)  # a load maps the entry by its own header, which zipfile reads in part
            for piece in archive.contents(info):
                report(len(piece))
        except FormatError as error:
            problems.append(Problem("/".join(place), "damaged", str(error)))
    problems.extend(_find_unreadable(archive, problems))
    return Report(archive.path, len(archive.files), len(archive.files), problems)
