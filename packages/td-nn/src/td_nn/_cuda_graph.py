"""CudaGraphModule: a function whose kernels are captured in a CUDA graph once, and replayed by later calls.

A graph reads and writes fixed addresses. So the function is captured on copies of its inputs; each later call writes the
new inputs into these copies, replays the graph, and clones the outputs of the graph.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from td_core import TensorCollection
from td_core.spi import copy_all
from td_core.spi import pytree as torch_pytree
from td_core.typing import NestedKey

from ._dispatch import dispatch
from ._graph_inputs import GraphInputs, Place, copy_inputs, read_entries, read_inputs
from ._interaction import interaction_type
from ._module_base import show_module
from ._module_keys import Key, as_keys, has_key


class CudaGraphModule:
    """Capture the GPU operations of a module or function in a CUDA graph, and replay the graph in later calls.

    The first ``warmup - 1`` calls run the function on a side stream, the next one captures it, and later ones replay the
    graph. Every call must pass tensors of the same shapes and dtypes, and equal values of all other arguments, because
    these are part of the graph. If the parameters of ``module`` were moved or replaced, or its mode was changed, the next
    call captures it again. Results are clones without gradients. If the function returns the collection that it was
    called with, so does the call; the written entries are clones.

    Without CUDA, each call runs the function directly, after the same check for gradients. This class is not an
    ``nn.Module``, so an optimizer of a module that contains it does not get the parameters twice.

    Args:
        module: a module, or a function of tensors or of a collection. Its operations on the GPU must not depend on values
            of tensors there, and must draw with the default random generator.
        warmup: number of calls up to and including the one that captures the function.
        in_keys: the keys that a function of a collection reads; ``[]`` if it may read every entry. For a module with
            keys, the keys of the module are used.
        out_keys: the keys that the function writes.
        device: the GPU of the graph, the current one by default. Inputs elsewhere are copied there.

    Raises:
        TypeError: ``module`` cannot be called.
        ValueError: ``warmup`` is not a positive int; in a call: shapes, dtypes, other values or the structure of the
            arguments differ from those of the captured call.
        RuntimeError: in a call: an input requires gradients.
        MissingKeyError: in a call: the collection lacks an entry that the captured one had.

    Warns:
        UserWarning: there is no GPU; ``in_keys`` or ``out_keys`` differ from the keys of the module; in a call: the
            interaction type differs from that of the captured call.

    >>> import warnings
    >>> warnings.simplefilter("ignore")  # on machines without a GPU
    >>> double = CudaGraphModule(lambda x: x * 2, warmup=2)
    >>> double(torch.ones(3))
    tensor([2., 2., 2.])
    """

    def __init__(
        self,
        module: Callable[..., Any],
        warmup: int = 2,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not callable(module):
            raise TypeError(f"CudaGraphModule takes a module or a function; got {module!r}")
        if not isinstance(warmup, int) or warmup < 1:
            raise ValueError(f"warmup is a positive int; got {warmup!r}")
        self.module = module
        self.in_keys = _choose_keys(module, "in_keys", in_keys)
        self.out_keys = _choose_keys(module, "out_keys", out_keys)
        self.counter = 0
        self.device: Any = None if device is None else torch.device(device)
        self._warmup = warmup
        self._dispatches = bool(self.in_keys) and not hasattr(module, "in_keys")
        self._captured: _Captured | None = None
        if not self._runs_on_gpu:
            why = "torch finds no CUDA device" if device is None else f"there is no CUDA device {self.device}"
            warnings.warn(
                f"{why}: each call of this CudaGraphModule runs the function directly", stacklevel=2
            )
        elif self.device is None or self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def _runs_on_gpu(self) -> bool:
        return torch.cuda.is_available() and (self.device is None or self.device.type == "cuda")

    @property
    def _inner_module(self) -> Callable[..., Any]:
        return self.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, or replay its graph.

        >>> import warnings
        >>> warnings.simplefilter("ignore")
        >>> CudaGraphModule(torch.add)(torch.ones(2), torch.ones(2))
        tensor([2., 2.])
        """
        return self._call_keys(*args, **kwargs) if self._dispatches else self._call(args, kwargs)

    @dispatch(auto_batch_size=False)
    def _call_keys(self, tensordict: TensorCollection, *args: object, **kwargs: object) -> object:
        """Run a function of a collection, which ``dispatch`` builds if the caller passes tensors."""
        return self._call((tensordict, *args), kwargs)

    def _call(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> object:
        if not args and isinstance(kwargs.get("tensordict"), TensorCollection):
            kwargs = dict(kwargs)
            args = (kwargs.pop("tensordict"),)
        inputs = read_inputs(args, kwargs, self.in_keys)
        inputs.check_gradients(self)
        if not self._runs_on_gpu or torch.cuda.is_current_stream_capturing():
            return self.module(*args, **kwargs)
        # Entering the context takes 2 us, a tenth of a replay.
        here = torch.cuda.current_device() == self.device.index
        with nullcontext() if here else torch.cuda.device(self.device):
            return _deliver(self._run_on_gpu(args, kwargs, inputs), args, kwargs, inputs)

    def _run_on_gpu(self, args: tuple[object, ...], kwargs: dict[str, Any], inputs: GraphInputs) -> _Results:
        """Replay the graph, or run or capture the function on copies of the inputs."""
        captured = self._captured
        if captured is not None and captured.state == _read_state(captured.slots, self.module):
            inputs.check_against(captured.inputs, self)
            self._check_interaction(captured)
            if inputs.tensors:
                targets = [captured.inputs.tensors[place] for place in inputs.tensors]
                copy_all(targets, list(inputs.tensors.values()))
            captured.graph.replay()
            return captured.results
        self._captured = None
        copies, args, kwargs = copy_inputs(args, kwargs, inputs, self.in_keys, self.device)
        inputs = inputs._replace(tensors=copies)
        stream: torch.cuda.Stream = torch.cuda.Stream(self.device)
        if self.counter < self._warmup - 1:
            self.counter += 1
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results = self._run(args, kwargs, inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return results
        slots = _find_slots(self.module)
        graph = torch.cuda.CUDAGraph()
        with _without_collector(), torch.cuda.graph(graph, stream=stream):
            results = self._run(args, kwargs, inputs)
        state = _read_state(slots, self.module)
        self._captured = _Captured(graph, inputs, results, slots, state, interaction_type())
        self.counter += 1
        graph.replay()
        return results

    def _run(self, args: tuple[object, ...], kwargs: dict[str, object], inputs: GraphInputs) -> _Results:
        """Call the function on copies of its inputs, and find the inputs and entries that it changed."""
        copies = inputs.tensors
        versions = [copied._version for copied in copies.values()]
        result = self.module(*args, **kwargs)
        changed = {
            place: copied
            for (place, copied), version in zip(copies.items(), versions)
            if copied._version != version
        }
        if not (args and result is args[0] and isinstance(result, TensorCollection)):
            return _Results(result, changed, None, [])
        kept = {id(copied) for copied in copies.values()}
        entries = read_entries(result, result.keys())
        written = result.select(*[place for place, value in entries if id(value) not in kept])
        out_keys = getattr(self.module, "out_keys_source", self.out_keys) or []
        return _Results(result, changed, written, [key for key in out_keys if not has_key(result, key)])

    def _check_interaction(self, captured: _Captured) -> None:
        if interaction_type() is not captured.interaction:
            warnings.warn(
                f"{show_module(self)} was captured with the interaction type {captured.interaction}, which the graph keeps; "
                f"it is called with {interaction_type()}",
                stacklevel=5,
            )

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state dict of the module; an empty one for a function.

        >>> import warnings
        >>> warnings.simplefilter("ignore")
        >>> list(CudaGraphModule(torch.nn.Linear(2, 1)).state_dict())
        ['weight', 'bias']
        """
        result: Mapping[str, Any] = self.module.state_dict() if isinstance(self.module, nn.Module) else {}
        return result

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Load a state dict into the module; later replays use the new values. A no-op for a function.

        >>> import warnings
        >>> warnings.simplefilter("ignore")
        >>> layer = torch.nn.Linear(2, 1)
        >>> state = {"weight": torch.zeros(1, 2), "bias": torch.ones(1)}
        >>> CudaGraphModule(layer).load_state_dict(state)
        >>> layer.bias.item()
        1.0
        """
        if isinstance(self.module, nn.Module):
            self.module.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        # A CUDA graph cannot be copied or pickled, so a copy captures a new one.
        return {**self.__dict__, "_captured": None, "counter": 0}

    def __repr__(self) -> str:
        fields = f"module={self.module},\nwarmup={self._warmup},\nin_keys={self.in_keys},\nout_keys={self.out_keys}"
        indented = fields.replace("\n", "\n    ")
        return f"{type(self).__name__}(\n    {indented})"


#: The parameters or the buffers of a module, and the name of one.
Slot = tuple[Mapping[str, "Tensor | None"], str]


class _Results(NamedTuple):
    """Result of a function, inputs changed in place, and entries written to and removed from its collection."""

    result: Any
    changed: dict[Place, Tensor]
    written: Any
    removed: list[Key]


class _Captured(NamedTuple):
    """A graph, the tensors that it reads and writes, and the state of the module at the capture."""

    graph: torch.cuda.CUDAGraph
    inputs: GraphInputs
    results: _Results
    slots: list[Slot]
    state: list[object]
    interaction: object


def _deliver(
    results: _Results, args: tuple[Any, ...], kwargs: dict[str, object], inputs: GraphInputs
) -> object:
    """Clone the results of a function, and repeat its in-place changes on the arguments of the call."""
    with torch.no_grad():
        for place, copied in results.changed.items():
            if isinstance(place, tuple):
                args[0].set_(place, copied)
            else:
                inputs.tensors[place].copy_(copied)
        if results.written is not None:
            tensordict = args[0]
            if results.removed:
                tensordict.exclude(*results.removed, inplace=True)
            return tensordict.update(results.written.clone())
        result = results.result
        if isinstance(result, (Tensor, TensorCollection)):
            result = result.clone()
        else:
            result = torch_pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, result)
    target = kwargs.get("tensordict_out")
    return target.update(result) if isinstance(target, TensorCollection) else result


def _choose_keys(
    module: Callable[..., object], name: str, provided: Sequence[NestedKey] | None
) -> list[Key] | None:
    """Return the keys of a module; for a function without keys, the provided ones."""
    keys = None if provided is None else list(as_keys(provided, name))
    if not hasattr(module, name):
        return keys
    own = list(getattr(module, name))
    if keys and keys != own:
        warnings.warn(
            f"{show_module(module)} has the {name} {own}, which count, and not {keys}", stacklevel=3
        )
    return own


def _find_slots(module: Callable[..., object]) -> list[Slot]:
    """List the parameters and buffers of a module, each as a dict and a name in it."""
    if not isinstance(module, nn.Module):
        return []
    return [
        (slots, name)
        for item in module.modules()
        for slots in (item._parameters, item._buffers)
        for name, value in slots.items()
        if value is not None
    ]


def _read_state(slots: list[Slot], module: Callable[..., object]) -> list[object]:
    """Read the state that a graph depends on: the mode and the addresses of parameters and buffers."""
    tensors = [slot.get(name) for slot, name in slots]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return [isinstance(module, nn.Module) and module.training, *addresses]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector: the capture fails if it frees another graph."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
