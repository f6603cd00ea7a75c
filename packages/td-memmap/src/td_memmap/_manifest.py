"""Verify a save against its manifest: the size of every file, and its hash if hashes were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from td_core import Problem, Report
from td_core.errors import FormatError
from td_core.spi import Checksum, make_reporter
from td_core.typing import Progress

from . import _file_names, _fs
from ._archive import ArchiveTree
from ._fs import DirectoryTree, Parts
from ._load import check_metadata, retry_on_replace
from ._meta import FileTree, parse_json, read_if_there, read_json


def verify(path: str | Path, *, progress: Progress = False) -> Report:
    """Check the size of every file of a save, and its hash if hashes were recorded (``checksums=True``).

    Args:
        path: directory or archive of the save.
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
    place = _fs.make_absolute(path)
    if _fs.is_file(place):
        return _verify_archive(place, progress)

    def check_tree(tree: DirectoryTree) -> tuple[Report, bool]:
        manifest = read_manifest(tree)
        if manifest is None:
            return _verify_levels(tree), False
        report = verify_tree(tree, manifest, progress)
        report.problems.extend(_find_unreadable(tree, report.problems))
        return report, not report.problems

    report: Report = retry_on_replace(place, check_tree)
    return report


def check(path: str) -> None:
    """Raise FormatError if a save has damaged or missing files; the message lists all of them."""
    report = verify(path)
    if not report.ok:
        raise FormatError(str(report))


def read_manifest(tree: DirectoryTree) -> object:
    """Return the manifest of a save, or None if it has none."""
    content = read_if_there(tree, (), _file_names.MANIFEST)
    return None if content is None else parse_json(content, tree.show((), _file_names.MANIFEST))


def verify_tree(tree: DirectoryTree, manifest: object, progress: Progress = False) -> Report:
    """Compare the files of a save with its manifest and return a report."""
    files, hashes, algorithm = _parse_manifest(manifest, tree.show((), _file_names.MANIFEST))
    saved = tree.stat((), _file_names.MANIFEST)
    problems = []
    report = make_reporter(progress, sum(row[0] for row in files.values()), "verify")
    for name, row in files.items():
        problem = _check_file(tree, name, row, hashes.get(name), str(algorithm), saved)
        if problem is not None:
            problems.append(problem)
        report(row[0])
    return Report(tree.path, len(files), len(hashes), problems)


def _parse_manifest(manifest: Any, where: str) -> tuple[dict[str, list[Any]], dict[str, object], object]:
    """Return the rows and hashes of files by name, and the name of the hash algorithm; raise FormatError for other content."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise FormatError(f"{where}: files is {files!r}, expected the size of every file")
    version = manifest.get("format", 1)
    if type(version) is not int or version != 1:
        raise FormatError(f"{where}: format is {version!r}, expected 1: upgrade td-memmap")
    hashes = manifest.get("hashes", {})
    algorithm = manifest.get("algorithm")
    if not isinstance(hashes, dict):
        raise FormatError(f"{where}: hashes is {hashes!r}, expected the hash of every file")
    if hashes or algorithm is not None:
        try:
            Checksum(str(algorithm))
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error
    for name, row in files.items():
        if not (isinstance(row, list) and len(row) == 2 and type(row[0]) is int):
            raise FormatError(f"{where}: the row of {name!r} is {row!r}, expected size and time")
    return files, hashes, algorithm


def _check_file(
    tree: DirectoryTree, name: str, row: list[Any], wanted: object, algorithm: str, saved: Any
) -> Problem | None:
    path = _file_names.split_relative(name)
    if path is None:
        return Problem(name, "error", "its name leaves the save")
    result = tree.stat_path(path)
    since = row[1] if type(row[1]) is int else saved.st_mtime_ns
    if result is None:
        # Writing a value in place removes the files next to its metadata that it no longer needs.
        beside = tree.stat_path((*path[:-1], _file_names.META)) if path[-1] in _file_names.SIDECARS else None
        kind = "modified" if beside is not None and beside.st_mtime_ns > since else "missing"
        return Problem(name, kind, f"{row[0]} bytes were saved")
    kind = "modified" if result.st_mtime_ns > since else "damaged"
    if result.st_size != row[0]:
        # Only writing a value in place makes a file shorter, and that file is JSON.
        shorter = result.st_size < row[0] and (name.endswith(".memmap") or not _is_json(tree, path))
        return Problem(name, "damaged" if shorter else kind, f"{result.st_size} bytes, {row[0]} were saved")
    if wanted is not None:
        digest = Checksum(algorithm, read_file_chunks(tree, path)).hexdigest()
        if digest != wanted:
            return Problem(name, kind, f"its hash is {digest}, {wanted} was saved")
    return None


def _is_json(tree: DirectoryTree, path: Parts) -> bool:
    try:
        read_json(tree, path[:-1], path[-1])
    except FormatError:
        return False
    return True


def read_file_chunks(tree: DirectoryTree, path: Parts) -> Iterator[Any]:
    """Yield the content of a file in chunks."""
    fd, _ = tree.open(path[:-1], path[-1])
    with _fs.closing(fd):
        yield from _fs.read_chunks(fd)


def _find_unreadable(tree: FileTree, known: list[Problem]) -> list[Problem]:
    """Return the problems that a load would encounter and that are not in ``known``."""
    try:
        result = _verify_levels(tree).problems
    except FormatError as error:
        # The message names the file. Ignore the error if a damaged file is already known.
        damaged = any(problem.kind != "modified" for problem in known)
        return [] if damaged else [Problem(_file_names.META, "error", str(error))]
    files = {problem.file for problem in known}
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


def _verify_archive(path: str, progress: Progress) -> Report:
    problems = []
    with ArchiveTree(path) as archive:
        report = make_reporter(progress, sum(info.file_size for info in archive.files.values()), "verify")
        for place, info in archive.files.items():
            try:
                for piece in archive.contents(info):
                    report(len(piece))
            except FormatError as error:
                problems.append(Problem("/".join(place), "damaged", str(error)))
        problems.extend(_find_unreadable(archive, problems))
        return Report(path, len(archive.files), len(archive.files), problems)
