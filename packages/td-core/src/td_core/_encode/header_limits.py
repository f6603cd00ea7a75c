"""What a header can describe: shapes that a tensor can have, and not more nodes than a file of its size can hold."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..errors import FormatError

_TOO_LARGE = 1 << 63
_MOST_DIMS = 64
#: The environment variable that allows a header to describe more nodes, and its default.
MOST_NODES = "TD_MAX_NODES"
_MOST_NODES = 10_000


def read_shape(sizes: Sequence[object], itemsize: int = 1) -> torch.Size:
    """Return a shape of a header; raise ValueError unless a tensor with elements of ``itemsize`` bytes can have it.

    >>> read_shape([3, 2]), read_shape([1 << 40, 0])
    (torch.Size([3, 2]), torch.Size([1099511627776, 0]))
    """
    nbytes = itemsize
    for size in sizes:
        if type(size) is not int or not 0 <= size < _TOO_LARGE:
            raise ValueError(f"{size!r:.100} is not a size")
        nbytes *= size or 1  # a size of 0 would hide that the other ones are impossible
    shape = torch.Size(sizes)  # type: ignore[arg-type]
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"a shape of {len(shape)} dims")
    if nbytes >= _TOO_LARGE:
        try:
            torch.empty(shape, dtype=torch.uint8, device="meta")
        except RuntimeError as error:
            raise ValueError(f"no tensor has the shape {list(shape)}") from error
        if 0 not in shape:
            raise ValueError(f"no file holds the shape {list(shape)}")
    return shape


def get_most_nodes(nbytes: int) -> int:
    """Return how many nodes the header of a save of some bytes can describe.

    >>> get_most_nodes(300), get_most_nodes(1_000_000)
    (10000, 1000000)
    """
    return max(int(os.environ.get(MOST_NODES, _MOST_NODES)), nbytes)


def refuse_nodes(where: str, most: float) -> FormatError:
    """Build the error for a header that describes too many nodes."""
    return FormatError(
        f"{where}: its header describes more than {most} nodes and leaves, which a file of its size cannot hold; if you trust "
        f"it, set the environment variable {MOST_NODES} to a larger number"
    )
