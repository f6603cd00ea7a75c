"""The pickle and copy protocols.

Deep copies and pickles keep the attributes that were set on instances of subclasses and on modules, in every node;
:func:`copy.copy` keeps those of the root. Operations and other formats drop them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._encode.decode import decode, decode_all
from .._encode.node_kinds import KINDS, Encoded, encode, get_key_path
from .._encode.pickling import copy_plain, encode_for_pickle, make_state, rebuild_collection
from .._tree.backends import get_backends
from .._tree.defaults import add_key_note
from .._tree.node import Core

if TYPE_CHECKING:
    from typing_extensions import Self


_foreign: Callable[[type, object], Any] | None = None


def set_foreign_state(read: Callable[[type, Any], Any]) -> None:
    """Register the function that decodes an attribute dict from a pickle of tensordict."""
    global _foreign
    _foreign = read


class PickleMixin(Core):
    """The pickle and copy protocols.

    Deep copies and pickles keep the attributes that were set on instances of subclasses and on modules, in every node;
    :func:`copy.copy` keeps those of the root. Operations and other formats drop them.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return a rebuild function and plain arguments, or the result of a ``__reduce__`` that the class defines."""
        cls = type(self)
        if cls.__reduce__ is not object.__reduce__ or cls.__getstate__ is not PickleMixin.__getstate__:
            return object.__reduce_ex__(self, protocol)  # type: ignore[return-value]
        reduced = None
        general = partial(encode_for_pickle, self, protocol)
        for attachment in get_backends(self):
            reduced = reduced or attachment.reduce(self, protocol, general)
        reduced = reduced or (rebuild_collection, general())
        attributes = KINDS.attributes_of(self)
        return (*reduced, (attributes,)) if attributes else reduced

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the encoded tree for ``__setstate__``."""
        encoded = encode(self, shared=True)
        return make_state(encoded, encoded.leaves)

    def __setstate__(self, state: Any) -> None:
        """Restore the collection that ``__getstate__`` encoded, or set the attributes of the root."""
        if len(state) == 1 and isinstance(state, tuple):
            KINDS.set_attributes(self, state[0])
            return
        if _foreign is not None and isinstance(state, dict):
            decoded = _foreign(type(self), state)
        else:
            decoded = decode(Encoded(*state), fix_devices=True)
        names = [name for base in type(decoded).__mro__ for name in getattr(base, "__slots__", ())]
        for name in [*names, *getattr(decoded, "__dict__", ())]:
            if name != "__weakref__" and hasattr(decoded, name):
                object.__setattr__(self, name, getattr(decoded, name))
        KINDS.set_attributes(self, KINDS.attributes_of(decoded))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the leaves and values; an object that occurs twice is copied once."""
        encoded = encode(self, shared=True)
        copy_plain(encoded.leaves, memo)
        leaves: list[Tensor] = []
        try:
            for leaf in encoded.leaves:
                leaves.append(deepcopy(leaf, memo))
        except Exception as error:
            add_key_note(error, get_key_path(encoded.nodes, [len(leaves)]))
            raise
        values = deepcopy(encoded.values, memo)
        # deepcopy of a value has also copied the nodes of this tree that the value refers to; reuse these copies.
        places = list(map(id, encoded.objects))
        made = {i: memo[place] for i, place in enumerate(places) if place in memo}
        if 0 in made:
            return made[0]
        copied = decode_all(Encoded(encoded.nodes, leaves, values, encoded.classes), made)
        memo.setdefault(id(memo), []).append(encoded.objects)
        memo.update(zip(places, copied))
        for position, attributes in encoded.attributes.items():
            if position not in made:
                KINDS.set_attributes(copied[position], deepcopy(attributes, memo))
        return copied[0]

    def __copy__(self) -> Self:
        """Return a shallow copy: new nodes, the same leaves."""
        copied = self._shallow_copy()
        if attributes := KINDS.attributes_of(self):
            KINDS.set_attributes(copied, attributes)
        return copied
