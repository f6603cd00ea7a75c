"""The pickle and copy protocols.

Deep copies and pickles keep the attributes that were set on instances of subclasses and on modules, in every node;
:func:`copy.copy` keeps those of the root. Operations and other formats drop them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._encode.node_kinds import encode
from .._encode.pickling import (
    copy_deeply,
    copy_with_attributes,
    make_state,
    reduce_collection,
    restore_state,
)
from .._tree.node import Core

if TYPE_CHECKING:
    from typing_extensions import Self


class PickleMixin(Core):
    """The pickle and copy protocols.

    Deep copies and pickles keep the attributes that were set on instances of subclasses and on modules, in every node;
    :func:`copy.copy` keeps those of the root. Operations and other formats drop them.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return a rebuild function and plain arguments, or the result of a ``__reduce__`` that the class defines."""
        if (
            type(self).__reduce__ is not object.__reduce__
            or type(self).__getstate__ is not PickleMixin.__getstate__
        ):
            return object.__reduce_ex__(self, protocol)  # type: ignore[return-value]
        return reduce_collection(self, protocol)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the encoded tree for ``__setstate__``."""
        encoded = encode(self, shared=True)
        return make_state(encoded, encoded.leaves)

    def __setstate__(self, state: Any) -> None:
        """Restore the collection that ``__getstate__`` encoded, or set the attributes of the root."""
        restore_state(self, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the leaves and values; an object that occurs twice is copied once."""
        return copy_deeply(self, memo)

    def __copy__(self) -> Self:
        """Return a shallow copy: new nodes, the same leaves."""
        return copy_with_attributes(self)
