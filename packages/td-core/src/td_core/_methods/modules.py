"""Methods ``from_module``, ``from_modules`` and ``to_module``, and the state dicts of collections."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn
from typing_extensions import Self

from .._functions.modules import read_entries, stack_modules, wrap_and_lock, write_to_module
from .._functions.state import load_state, write_state_dict
from .._tree.node import Core
from ..errors import StructureError


class ModuleMixin(Core):
    """Methods ``from_module``, ``from_modules`` and ``to_module``, and the state dicts of collections."""

    __slots__ = ()

    @classmethod
    def _of_module(cls, taken: Core) -> Core:
        """Convert a module's parameters to the type that classmethods of this class return."""
        made: Core = cls._wrap_dense(taken)
        return made

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: bool = False,
        lock: bool = False,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> Any:
        """Return the parameters and buffers of a module, nested by submodule; see :func:`td_core.from_module`.

        >>> TensorDict.from_module(nn.Linear(2, 3))["weight"].shape
        torch.Size([3, 2])
        """
        taken = read_entries(module, as_module, use_state_dict, filter_empty)
        return wrap_and_lock(cls._of_module(taken), as_module, lock)

    @classmethod
    def from_modules(
        cls,
        *modules: nn.Module,
        as_module: bool = False,
        lock: bool = True,
        use_state_dict: bool = False,
        lazy_stack: bool = False,
        expand_identical: bool = False,
    ) -> Any:
        """Stack the parameters of modules of one architecture; see :func:`td_core.from_modules`.

        >>> TensorDict.from_modules(nn.Linear(2, 3), nn.Linear(2, 3)).batch_size
        torch.Size([2])
        """
        taken = stack_modules(modules, as_module, use_state_dict, lazy_stack, expand_identical)
        return wrap_and_lock(cls._of_module(taken), as_module, lock)

    def to_module(
        self,
        module: nn.Module,
        *,
        inplace: bool | None = None,
        return_swap: bool = True,
        swap_dest: Core | None = None,
        use_state_dict: bool = False,
        non_blocking: bool = False,
        preserve_module_state: bool = True,
        memo: object = None,
    ) -> Any:
        """Replace the parameters and buffers of a module by the leaves of this collection.

        As a context manager (``with params.to_module(model):``) it restores the module on exit, also if the body raises.

        Args:
            module: a module with a parameter or buffer per leaf, and a submodule per nested collection.
            inplace: copy the leaves into the module's tensors instead of replacing them.
            return_swap: return the previous parameters and buffers of the module.
            swap_dest: a collection that is updated with the previous parameters and buffers, and returned.
            use_state_dict: call ``module.load_state_dict``, so that its hooks run.
            non_blocking: passed to the copies of ``inplace=True``.
            preserve_module_state: if True, a plain leaf that replaces a ``Parameter`` is wrapped in one that shares its
                storage. Tensors that require grad, and all tensors under ``torch.func`` and ``torch.compile``, are set
                unwrapped and receive the gradients. If False, a plain leaf replaces a parameter as a plain attribute,
                which ``module.parameters()`` and ``module.state_dict()`` do not list. A parameter that replaces a
                buffer is set as a plain tensor that shares its storage and passes gradients to it.
            memo: only for compatibility of the signature; passing a value raises.

        Returns:
            The previous parameters and buffers of the module, or None if ``return_swap`` is False.

        Raises:
            KeyPathError: the module has no parameter, buffer, tensor, value or submodule for an entry; nothing was changed.
            StructureError: a leaf cannot be copied into its parameter or buffer; nothing was changed.
            StructureError: the module is under ``fully_shard``, which needs ``use_state_dict``; nothing was changed.

        >>> model = nn.Linear(2, 1)
        >>> zeros = TensorDict.from_module(model).data.clone().zero_()
        >>> with zeros.to_module(model):
        ...     model(torch.ones(2)).item()
        0.0
        """
        if memo is not None:
            raise StructureError(
                "memo is not an argument of the public to_module(): tied modules are found without it"
            )
        return write_to_module(
            self,
            module,
            inplace,
            return_swap,
            swap_dest,
            use_state_dict,
            non_blocking,
            preserve_module_state,
        )

    def state_dict(
        self, destination: object = None, prefix: str = "", keep_vars: bool = False, flatten: bool = True
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
        state_dict: Mapping[str, object],
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
