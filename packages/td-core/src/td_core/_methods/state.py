"""Methods ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._functions.state import load_state, write_state_dict
from .._tree.node import Core

if TYPE_CHECKING:
    from typing_extensions import Self


class StateDictMixin(Core):
    """Methods ``state_dict`` and ``load_state_dict``."""

    __slots__ = ()

    def state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, flatten: bool = True
    ) -> OrderedDict[str, Any]:
        """Return the leaves in an OrderedDict, as :meth:`torch.nn.Module.state_dict` does.

        Args:
            destination: an OrderedDict that the entries are written into, and that is returned.
            prefix: a prefix of every key (of the keys of the root only, if nested).
            keep_vars: do not detach the leaves.
            flatten: use dotted keys; False writes a nested OrderedDict per nested collection.

        Raises:
            KeyPathError: two leaves have the same dotted key.

        >>> list(TensorDict({"a": 1, "b": {"c": 2}}).state_dict())
        ['a', 'b.c']
        """
        return write_state_dict(self, destination, prefix, keep_vars, flatten)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        from_flatten: bool | None = None,
    ) -> Self:
        """Copy a state dict into the leaves, in place.

        Args:
            state_dict: flat or nested, of any version of tensordict; its batch sizes, if any, are set on the collection.
            strict: raise if keys are missing or unexpected. If False, unexpected keys are added, except to parameters,
                which ignore them.
            assign: store the tensors and values of the state dict itself instead of copying them.
            from_flatten: True if the keys are dotted; None to detect it from the metadata.

        Raises:
            StructureError: keys are missing or unexpected, or a shape differs; nothing was changed.

        >>> td = TensorDict({"a": torch.zeros(2)})
        >>> td.load_state_dict(TensorDict({"a": torch.ones(2)}).state_dict())["a"]
        tensor([1., 1.])
        """
        return load_state(self, state_dict, strict, assign, from_flatten)
