"""EnsembleModule: copies of one module with separate parameters, called together under ``vmap``."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from td_core import StructureError, TensorCollection, TensorDict, TensorDictParams, from_modules
from td_core.spi import pytree as torch_pytree

from ._dispatch import dispatch
from ._module_base import ResultT, TensorDictModuleBase, detach_parameters, show_module
from ._module_keys import Key

Randomness = Literal["error", "same", "different"]


class EnsembleModule(TensorDictModuleBase[ResultT]):
    """Several copies of a module, each with its own parameters and buffers, called together under ``vmap``.

    The parameters are reset in each copy, so the copies differ. A call returns a new collection, whose first batch dim
    has one element per copy. Running statistics, such as those of ``BatchNorm``, are kept for each copy.

    Args:
        module: a module that reads and writes collections. It is not changed.
        num_copies: the number of copies.
        expand_input: True passes the same input to every copy. False maps over the first dim of the input, which has
            one element per copy.
        randomness: effect of random operations, such as ``Dropout``: ``"error"`` raises, ``"same"`` draws the same
            numbers for every copy, ``"different"`` draws separate ones.

    Attributes:
        params_td: the stacked parameters and buffers, of batch size ``[num_copies]``.
        module: the copied module on the meta device. Its parameters have no values and are not parameters of the
            ensemble.

    Raises:
        TypeError: ``module`` has no keys.
        ValueError: ``num_copies`` is not a positive int, or ``randomness`` is not one of the three strings.
        StructureError: ``module`` has parameters without a shape, because it is a lazy module that was not called yet.

    Warns:
        UserWarning: parameters have the same values in each copy, because their module has no ``reset_parameters()``.

    >>> from td_nn import TensorDictModule
    >>> critic = TensorDictModule(torch.nn.Linear(3, 1), ["obs"], ["value"])
    >>> critics = EnsembleModule(critic, num_copies=4)
    >>> critics(TensorDict(obs=torch.ones(5, 3), batch_size=[5]))["value"].shape
    torch.Size([4, 5, 1])
    >>> critics(obs=torch.ones(5, 3)).std(0).shape
    torch.Size([5, 1])
    """

    module: Any

    @overload
    def __init__(
        self,
        module: TensorDictModuleBase[ResultT],
        num_copies: int,
        expand_input: bool = True,
        *,
        randomness: Randomness = "error",
    ) -> None: ...
    @overload
    def __init__(
        self,
        module: nn.Module,
        num_copies: int,
        expand_input: bool = True,
        *,
        randomness: Randomness = "error",
    ) -> None: ...
    def __init__(
        self,
        module: Any,
        num_copies: int,
        expand_input: bool = True,
        *,
        randomness: Randomness = "error",
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module) or not self.is_tdmodule_compatible(module):
            raise TypeError(
                f"EnsembleModule takes a module with in_keys and out_keys; got a {type(module).__name__}. Wrap it: "
                "TensorDictModule(module, in_keys, out_keys)"
            )
        if not isinstance(num_copies, int) or num_copies < 1:
            raise ValueError(f"num_copies is a positive int; got {num_copies!r}")
        if randomness not in ("error", "same", "different"):
            raise ValueError(f"randomness is 'error', 'same' or 'different'; got {randomness!r}")
        self.in_keys = module.in_keys
        self.out_keys = module.out_keys
        self.num_copies = num_copies
        self.expand_input = expand_input
        self.randomness = randomness
        self.params_td: TensorDictParams = _stack_parameters(module, num_copies)
        # A submodule would add its parameters to those of the ensemble, where they would never get gradients.
        self.__dict__["module"] = copy.deepcopy(module).to("meta")
        self._slots = [_find_slot(self.module, key) for key in self.params_td.keys(True, True)]
        self.reset_parameters()
        self._warn_of_equal_copies()

    @property
    def _inner_module(self) -> Any:
        return self.__dict__.get("module")

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: TensorCollection, *, tensordict_out: TensorCollection | None = None, **kwargs: Any
    ) -> Any:
        """Call every copy, and return a new collection whose first batch dim has one element per copy.

        Args:
            tensordict: a collection with the inputs; it is not changed.
            tensordict_out: a collection of batch size ``[num_copies, ...]`` that receives the outputs and is returned.
            **kwargs: further arguments of the module, the same for every copy.

        Raises:
            ValueError: ``expand_input`` is False, and the first dim of the input does not have one element per copy.
            RuntimeError: a random operation was called, and ``randomness`` is ``"error"``.
        """
        leaves: list[Tensor] = list(self.params_td.values(True, True))
        entries: list[Any] = []
        spec = None
        if not self.expand_input:
            if tensordict.batch_size[:1] != (self.num_copies,):
                self._check_input(tensordict)
            entries, spec = torch_pytree.tree_flatten(tensordict)
        elif not leaves:
            entries, spec = torch_pytree.tree_flatten(
                tensordict.expand(self.num_copies, *tensordict.batch_size)
            )
        results: list[Any] = []

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            item = tensordict
            if spec is None:
                item = item.copy()
            else:
                item = torch_pytree.tree_unflatten(tensors[len(leaves) :], spec)
            result, changed = self._call_copy(tensors[: len(leaves)], item, kwargs)
            flat, result_spec = torch_pytree.tree_flatten(result)
            provided = _find_positions(flat, tensors[len(leaves) :])
            results[:] = result_spec, provided, list(changed)
            return (*[leaf for leaf, at in zip(flat, provided) if at is None], *changed.values())

        try:
            # vmap would flatten and rebuild collections several times, so it only gets tensors.
            new = iter(torch.vmap(call, randomness=self.randomness)(*leaves, *entries))
        except RuntimeError as error:
            if self.randomness == "error" and "randomness" in str(error):
                raise RuntimeError(
                    f"a copy of {show_module(self)} calls a random operation, and randomness is 'error': give "
                    "EnsembleModule randomness='different', or 'same' for the same numbers in every copy"
                ) from error
            raise
        result_spec, provided, changed = results
        flat = [next(new) if at is None else entries[at] for at in provided]
        if changed:
            with torch.no_grad():
                for position, value in zip(changed, new):
                    leaves[position].copy_(value)
        result = torch_pytree.tree_unflatten(flat, result_spec)
        if tensordict_out is None:
            return result
        return tensordict_out.update(result.select(*self.out_keys_source))

    def _call_copy(
        self, leaves: Sequence[Tensor], tensordict: TensorCollection, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int, Tensor]]:
        """Call the module with the parameters of one copy. Return the result and the buffers that were replaced."""
        places = self._slots
        slots = [_slots_of(owner, name) for owner, name in places]
        held = [slot[name] for slot, (_, name) in zip(slots, places)]
        try:
            for slot, (_, name), leaf in zip(slots, places, leaves):
                slot[name] = leaf
            result = self.module(tensordict, **kwargs)
            # A TensorDictParams moves a plain tensor that replaces a parameter to its buffers.
            results = [
                slot[name] if type(slot) is dict else _slots_of(owner, name)[name]
                for slot, (owner, name) in zip(slots, places)
            ]
        finally:
            for slot, (_, name), value in zip(slots, places, held):
                slot[name] = value
        changed = enumerate(zip(results, leaves))
        return result, {position: new for position, (new, old) in changed if new is not old}

    def _check_input(self, tensordict: TensorCollection) -> None:
        """Raise ValueError unless the collection has no batch dims and each leaf has one element per copy."""
        size = tensordict.batch_size
        leading = [leaf.shape[:1] for leaf in tensordict.values(True, True)]
        if size or any(item != (self.num_copies,) for item in leading):
            shown = f"batch size {list(size)}" if size else f"leaves of leading sizes {leading}"
            raise ValueError(
                f"{show_module(self)} has {self.num_copies} copies and expand_input=False, so the first dim of its input "
                f"has an entry per copy; got {shown}"
            )

    def train(self, mode: bool = True) -> EnsembleModule[ResultT]:
        """Set the training mode of the ensemble and of its copies."""
        if "module" in self.__dict__:
            self.module.train(mode)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Reset the parameters of every copy.

        >>> from td_nn import TensorDictModule
        >>> layer = TensorDictModule(torch.nn.Linear(2, 1), ["x"], ["y"])
        >>> ensemble = EnsembleModule(layer, 2)
        >>> _ = ensemble.params_td.data.zero_()
        >>> ensemble.reset_parameters()
        >>> bool(ensemble.params_td["module", "weight"].any())
        True
        """
        _reset(self.module, self.params_td.data)

    def reset_parameters_recursive(self, parameters: TensorCollection | None = None) -> TensorDict | None:
        """Reset the given parameters in place, separately for each copy.

        Args:
            parameters: a collection with the keys of ``params_td``, of any batch size.

        Returns:
            The given parameters as tensors that require gradients and share their storage.

        Raises:
            ValueError: no parameters are given.

        >>> from td_nn import TensorDictModule
        >>> layer = TensorDictModule(torch.nn.Linear(2, 1), ["x"], ["y"])
        >>> ensemble = EnsembleModule(layer, 2)
        >>> params = ensemble.params_td.data.expand(3, 2).clone()
        >>> ensemble.reset_parameters_recursive(params)["module", "weight"].shape
        torch.Size([3, 2, 1, 2])
        """
        if parameters is None:
            raise ValueError(
                "reset_parameters_recursive() of an EnsembleModule takes the parameters to reset; those of the ensemble "
                "are reset by reset_parameters()"
            )
        _reset(self.module, parameters.data)
        return detach_parameters(parameters)

    def _warn_of_equal_copies(self) -> None:
        """Warn of parameters that have equal values in each copy because no module resets them."""
        equal = [
            ".".join(key if isinstance(key, tuple) else (key,))
            for key, leaf in self.params_td.items(True, True)
            if isinstance(leaf, nn.Parameter)
            and not leaf.is_meta
            and not _is_reset(self.module, key)
            and bool((leaf == leaf[:1]).all())
        ]
        if equal and self.num_copies > 1:
            warnings.warn(
                f"the {self.num_copies} copies of {show_module(self)} have equal values of {', '.join(equal)}, whose module "
                "has no reset_parameters()",
                stacklevel=3,
            )

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object) -> None:
        """Load a state dict; drop the keys ``module.*``, which only tensordict writes."""
        for key in [key for key in state_dict if key.startswith(f"{prefix}module.")]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return self._show(
            f"module={self.module},\nparams_td={self.params_td},\nin_keys={self.in_keys},\nout_keys={self.out_keys}",
            ["params_td"],
        )


def _stack_parameters(module: nn.Module, num_copies: int) -> TensorDictParams:
    """Repeat the parameters and buffers of a module along a new first dim; keep tied ones tied."""
    own = TensorDict.from_module(module)
    for key, leaf in own.items(True, True):
        if is_lazy(leaf):
            raise StructureError(
                f"cannot stack the modules: {key!r} has no shape yet; call the module once before"
            )
    stacked = from_modules(*[module] * num_copies, lock=False)
    seen: dict[int, object] = {}
    for key, leaf in own.items(True, True):
        tied = seen.setdefault(id(leaf), stacked[key])
        if tied is not stacked[key]:
            stacked[key] = tied
    return TensorDictParams(stacked, no_convert=True)


def _find_slot(module: nn.Module, key: Key) -> tuple[nn.Module, str]:
    """Return the submodule that owns a parameter or buffer, and the name in that submodule."""
    path = [key] if isinstance(key, str) else list(key)
    while len(path) > 1 and not isinstance(module, TensorDictParams):
        module = module.get_submodule(path.pop(0))
    return module, ".".join(path)


def _find_positions(leaves: list[Tensor], tensors: tuple[Tensor, ...]) -> list[int | None]:
    """Return the position of each leaf among some tensors, or None for another leaf."""
    if torch.compiler.is_compiling():  # torch 2.11 does not trace id() of a tensor that the graph makes
        return [next((at for at, tensor in enumerate(tensors) if tensor is leaf), None) for leaf in leaves]
    positions = {id(tensor): at for at, tensor in enumerate(tensors)}
    return [positions.get(id(leaf)) for leaf in leaves]


def _slots_of(owner: Any, name: str) -> Any:
    """Return the dict of parameters or the dict of buffers of a module, whichever has the name."""
    return owner._parameters if name in owner._parameters else owner._buffers


def _is_reset(module: nn.Module, key: Key) -> bool:
    """Return True if a submodule on the path to a parameter has ``reset_parameters``."""
    path = [key] if isinstance(key, str) else list(key)
    while not hasattr(type(module), "reset_parameters"):
        if len(path) == 1 or isinstance(module, TensorDictParams):
            return False
        module = module.get_submodule(path.pop(0))
    return True


def _reset(module: nn.Module, values: Any) -> None:
    """Reset values in place, at each index of their batch dims, with ``reset_parameters`` of the submodules."""
    for index in itertools.product(*map(range, values.batch_size)):
        with values[index].to_module(module):
            for item in module.modules():
                if hasattr(type(item), "reset_parameters"):
                    item.reset_parameters()  # type: ignore[operator]
