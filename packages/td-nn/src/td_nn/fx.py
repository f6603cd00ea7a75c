"""Trace modules that read and write collections with torch.fx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from td_core import TensorCollection

from ._module import TensorDictModule
from ._module_base import TensorDictModuleBase, show_module
from ._module_keys import SINK, Key, as_keys
from ._sequence import TensorDictSequential

__all__ = ["TDGraphModule", "symbolic_trace"]


class TDGraphModule(nn.Module):
    """A torch.fx graph that reads a collection, with the keys of its results.

    Args:
        graph_module: a graph that takes a collection and returns a tuple.
        out_keys: the keys of the results.

    >>> from td_nn import TensorDictModule
    >>> traced = symbolic_trace(TensorDictModule(torch.nn.Linear(3, 2), ["x"], ["y"]))
    >>> traced(TensorDict(x=torch.ones(3)))["y"].shape
    torch.Size([2])
    """

    def __init__(self, graph_module: fx.GraphModule, out_keys: Sequence[Key]) -> None:
        super().__init__()
        self._graph_module = graph_module
        self.out_keys: list[Key] = list(as_keys(list(out_keys), "out_keys"))

    @property
    def graph(self) -> fx.Graph:
        """The torch.fx graph."""
        return self._graph_module.graph

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        return self._graph_module.code

    def forward(self, tensordict: TensorCollection, *, tensordict_out: TensorCollection | None = None) -> Any:
        """Run the graph and store its results in ``tensordict_out`` if given, else in ``tensordict``; return that."""
        target = tensordict if tensordict_out is None else tensordict_out
        for key, value in zip(self.out_keys, self._graph_module(tensordict)):
            target.set(key, value)
        return target


def symbolic_trace(td_module: TensorDictModuleBase) -> TDGraphModule:
    """Trace a :class:`TensorDictModule`, or a sequence of them, into one graph over the tensors.

    The graph reads the ``in_keys`` of the module, and passes results between members as tensors, without a collection.

    Args:
        td_module: the module, whose submodules torch.fx can trace. The graph shares their parameters.

    Raises:
        TypeError: the module has another type or its own ``forward``, or is a sequence with ``partial_tolerant=True``.

    >>> from td_nn import TensorDictModule
    >>> traced = symbolic_trace(TensorDictModule(torch.nn.ReLU(), ["x"], ["y"]))
    >>> [node.op for node in traced.graph.nodes]
    ['placeholder', 'call_function', 'call_module', 'output']
    """
    root = _Flow(td_module)
    graph = fx.Tracer().trace(root)
    return TDGraphModule(fx.GraphModule(root, graph), root.out_keys)


class _Flow(nn.Module):
    """The module that torch.fx traces: it reads a collection and returns tensors."""

    def __init__(self, td_module: Any) -> None:
        super().__init__()
        _check(td_module)
        self.td_module = td_module
        self.out_keys = [key for key in td_module.out_keys if key != SINK]

    def forward(self, tensordict: TensorCollection) -> Any:
        """Return the values of the ``out_keys``."""
        values: dict[Key, Any] = {}
        _run(self.td_module, tensordict, values)
        return tuple([values[key] for key in self.out_keys])


def _check(module: nn.Module) -> None:
    """Raise TypeError unless the keys of a module and of its members describe all that ``forward`` does."""
    kind = next((kind for kind in (TensorDictSequential, TensorDictModule) if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward:
        raise TypeError(
            f"symbolic_trace() takes a TensorDictModule or a TensorDictSequential of them, with the forward() of their class; "
            f"got a {type(module).__name__}"
        )
    if isinstance(module, TensorDictSequential):
        if module.partial_tolerant:
            raise TypeError(
                f"symbolic_trace() cannot trace {show_module(module)}: with partial_tolerant=True, each call chooses which "
                "members run"
            )
        for member in module:
            _check(member)


def _run(module: Any, tensordict: TensorCollection, values: dict[Key, Any]) -> None:
    if isinstance(module, TensorDictSequential):
        for member in module:
            _run(member, tensordict, values)
        return
    inputs = [values[key] if key in values else tensordict[key] for key in module.in_keys]
    call = module.module if module.method is None else getattr(module.module, module.method)
    names = module._argument_names
    if names is None:
        result = call(*inputs, **module.method_kwargs)
    else:
        result = call(**dict(zip(names, inputs)), **module.method_kwargs)
    out_keys = module.out_keys_source
    if len(out_keys) == 1:
        result = (result,)
    values.update((key, result[position]) for position, key in enumerate(out_keys))
