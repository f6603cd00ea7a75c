"""Look at a save without loading it: describe its leaves, and check its arrays and their hashes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from td_core import Problem, Report, Tree
from td_core.errors import FormatError, TensorDictError, UnsupportedOperationError
from td_core.spi import Encoded, describe_table, make_reporter, show_path
from td_core.typing import Progress

from .._checksums import Checksum
from .build_collection import build_collection
from .places import Place, is_nested, list_names, restore


def describe_arrays(
    table: Encoded,
    where: str,
    make_blank: Callable[[str], Tensor],
    locate: Callable[[str], str],
) -> Tree:
    """Return the tree of a save for ``inspect``. Arrays that several leaves share count for each of them.

    Args:
        table: the table, with places as leaves.
        where: the location of the save.
        make_blank: takes the name of an array, and returns a meta tensor of its shape and dtype.
        locate: takes the name of an array, and returns where its elements are, for people.

    Raises:
        FormatError: a place is malformed, or contradicts its arrays.
    """

    def describe(key: str, place: Place) -> Tree:
        try:
            blanks = {name: make_blank(name) for name in list_names(place)}
            leaf = Tree(
                key,
                "leaf",
                nbytes=sum(blank.nbytes for blank in blanks.values()),
                place=", ".join(map(locate, blanks)),
            )
            if is_nested(place):
                elements = place["jagged"]["values"] if "jagged" in place else place["nested"]
                leaf.kind, leaf.dtype = "nested leaf", str(restore(elements, blanks.__getitem__).dtype)
                return leaf
            found = restore(place, blanks.__getitem__)
        except (FormatError, LookupError, TypeError) as error:
            raise FormatError(f"{where}: {key!r}: {error}") from error
        leaf.shape, leaf.dtype = list(found.shape), str(found.dtype)
        if isinstance(place, list) or (isinstance(place, dict) and "packed" in place):  # a part of an array
            leaf.nbytes = found.nbytes
        return leaf

    return describe_table(table, os.path.basename(where.rstrip("/")) or where, describe)


def check_in_place(table: Encoded, where: str) -> None:
    """Raise UnsupportedOperationError for a save with a nested tensor, which cannot be written in place."""
    for place, path in zip(table.leaves, table.leaf_paths(members=False), strict=True):
        if is_nested(place):
            raise UnsupportedOperationError(
                f"{where}: {show_path(path)} is a nested tensor, which cannot be written in place: leave it out with keys="
            )


def check_growing(table: Encoded, where: str) -> None:
    """Raise UnsupportedOperationError for a strided nested tensor, to which torch adds no rows."""
    for place, path in zip(table.leaves, table.leaf_paths(members=False), strict=True):
        if isinstance(place, dict) and "nested" in place:
            raise UnsupportedOperationError(
                f"cannot append rows to {where}: {show_path(path)} is a nested tensor with the layout torch.strided; save it "
                "with the layout torch.jagged"
            )


def read_hashes(
    hashes: Any, field: str, arrays: Mapping[str, object], where: str
) -> tuple[dict[str, str], str]:
    """Return the hash of each array, and the algorithm; ``hashes`` is None, or an object with both.

    Raises:
        FormatError: the object is malformed, or has hashes of other arrays.
    """
    if hashes is None:
        return {}, "crc32"
    digests = hashes.get(field) if isinstance(hashes, dict) else None
    if not isinstance(digests, dict) or digests.keys() != arrays.keys():
        raise FormatError(f"{where}: the hashes of its header are damaged")
    return digests, str(hashes.get("algorithm"))


def check_arrays(
    table: Encoded,
    where: str,
    sizes: Mapping[str, int],
    read: Callable[[str], Tensor],
    *,
    hashes: tuple[Mapping[str, str], str] = ({}, "crc32"),
    locate: Callable[[str], str] = str,
    progress: Progress = False,
) -> list[Problem]:
    """Read all arrays of a save, compare their hashes, and build the collection; return the problems.

    Args:
        table: the table, with places as leaves.
        where: the location of the save, for messages.
        sizes: size in bytes of each array, by name.
        read: returns the tensor of the array with a name, or raises FormatError.
        hashes: hash of each array that has one, and their algorithm.
        locate: takes the name of an array, and returns the file of a :class:`td_core.Problem`.
        progress: show a progress bar, or call a function of (bytes done, total bytes).
    """
    report = make_reporter(progress, sum(sizes.values()), "verify")
    digests, algorithm = hashes
    problems = []
    for name, size in sizes.items():
        try:
            array = read(name)
        except FormatError as error:
            kind = "missing" if "is missing" in str(error) else "damaged"
            problems.append(Problem(locate(name), kind, f"{_find_keys(table, name)}: {error}"))
            continue
        report(size)
        if name not in digests:
            continue
        digest = Checksum(algorithm, [array]).hexdigest()
        if digest != digests[name]:
            detail = (
                f"the hash of {_find_keys(table, name)} is {digest}, {digests[name]} was saved: it was written in place "
                "since, or is damaged"
            )
            problems.append(Problem(locate(name), "damaged", detail))
    if not problems:
        build_collection(table, where, read)
    return problems


def _find_keys(table: Encoded, name: str) -> str:
    """Return the key paths of the leaves that an array belongs to, for messages."""
    paths = zip(table.leaves, table.leaf_paths(members=False), strict=True)
    return ", ".join(dict.fromkeys(show_path(path) for place, path in paths if name in list_names(place)))


def report_damage(where: str, file: str, check: Callable[[], Report]) -> Report:
    """Return the report of a check; of a save that cannot be opened, a report that ``file`` is damaged."""
    try:
        return check()
    except TensorDictError as error:
        return Report(where, 1, 0, [Problem(file, "damaged", str(error))])
