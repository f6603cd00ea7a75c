"""Find the batch sizes of the nodes of a save that has none, since another program wrote it."""

from __future__ import annotations

from collections.abc import Sequence


def find_batch_sizes(
    shapes: Sequence[Sequence[tuple[int, ...]]], above: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return for each node the dims that all leaves below it share; for a node without leaves, those of the node above.

    Args:
        shapes: for each node the shapes of its own leaves; parents are before their children.
        above: for each node the position of its parent; for the root -1.

    >>> find_batch_sizes([[(3, 2), (3,)], [(3, 4)], []], [-1, 0, 0])
    [(3,), (3, 4), (3,)]
    """
    found: list[tuple[int, ...] | None] = [None] * len(shapes)
    for position in range(len(shapes) - 1, -1, -1):  # children before their parents
        size = found[position]
        for shape in shapes[position]:
            size = shape if size is None else _find_common(size, shape)
        found[position] = size
        parent = above[position]
        if size is not None and parent >= 0:
            known = found[parent]
            found[parent] = size if known is None else _find_common(known, size)
    result: list[tuple[int, ...]] = []
    for position, size in enumerate(found):
        result.append(size if size is not None else result[above[position]] if position else ())
    return result


def _find_common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    count = 0
    for left, right in zip(one, other):
        if left != right:
            break
        count += 1
    return one[:count]
