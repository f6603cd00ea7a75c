"""Methods ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._functions.state import Load, build_value, parse_state, try_load_whole, write_level
from .._tree.defaults import unwrap_entry
from .._tree.node import Core
from .._tree.walks import has_entries
from ..errors import KeyPathError

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
        target: Any = OrderedDict() if destination is None else destination
        if not hasattr(target, "_metadata"):
            target._metadata = OrderedDict()
        entries, out, before = write_level(self, target, prefix.removesuffix(".")), target, prefix
        above: list[Any] = []
        # By hand: the row `state_dict` of benchmarks/ops.py.
        while True:
            for key, child in entries:
                name = before + key
                if not isinstance(child, Tensor) and isinstance(child := unwrap_entry(child), Core):
                    above.append((entries, out, before))
                    if flatten:
                        if name in out._metadata and (not has_entries(child) or child._children()):
                            raise KeyPathError(f"two levels have the dotted key {name!r}; use flatten=False")
                        entries, before = write_level(child, out, name), name + "."
                    else:
                        out[name] = nested = OrderedDict()  # type: ignore[var-annotated]
                        nested._metadata = OrderedDict()  # type: ignore[attr-defined]
                        entries, out, before = write_level(child, nested, ""), nested, ""
                    break
                if name in out:
                    raise KeyPathError(f"two leaves have the dotted key {name!r}; use flatten=False")
                out[name] = child if keep_vars else child.detach()
            else:
                if not above:
                    return target  # type: ignore[no-any-return]
                entries, out, before = above.pop()

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
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"a state dict is a mapping; got {type(state_dict).__name__}")
        if not assign and from_flatten is not False and try_load_whole(self, state_dict):
            return self
        root = parse_state(self, state_dict, from_flatten)
        is_value = not has_entries(self)
        if is_value:
            return self.update_(build_value(self, root, assign))
        load = Load(self, strict, assign)
        with torch.no_grad():
            load.read(root)
            load.writes.commit()
        return self
