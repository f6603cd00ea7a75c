"""Every private name of torch that the packages use, looked up once; each has a fallback, and a test.

What is here may vanish in any release of torch. Nothing else in the package touches a private name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import eq
from typing import Any

import torch
from torch import Tensor

from .errors import StructureError

__all__ = [
    "add_safe_name", "is_innermost_transform", "get_base", "batch_dim", "exit_transforms",
    "default_collate_functions", "break_graph", "foreach_kernel", "functorch_level", "is_caller",
    "is_read_only_view", "looks", "map_location", "get_mapped_dim", "make_nested_view", "plain_results",
    "get_ragged_dim", "get_cached_seqlens", "unmap", "unwrap_transforms", "count_users", "wrap_vmap",
]  # fmt: skip


def _find(path: str, default: Any = None) -> Any:
    """Return what torch has under a dotted name; the default where it has no such thing."""
    result: Any = torch
    for name in path.split("."):
        result = getattr(result, name, None)
    return default if result is None else result


def foreach_kernel(name: str) -> Callable[..., Any] | None:
    """Return ``torch._foreach_<name>``, which takes a list of tensors, or None where this torch has none.

    >>> foreach_kernel("no_such_function") is None
    True
    """
    return _find(f"_foreach_{name}")  # type: ignore[no-any-return]


def map_location() -> Any:
    """Return where a call of ``torch.load`` that is under way in this thread puts what it reads, None where it does not say.

    >>> map_location() is None
    True
    """
    return getattr(_LOADING, "map_location", None)


_LOADING: Any = _find("serialization._serialization_tls")


def add_safe_name(item: Any, name: str) -> None:
    """Let ``torch.load(weights_only=True)`` read an old name as ``item``; torch 2.4 and 2.5 have no way to.

    >>> add_safe_name(torch.Size, "old_module.Size")
    """
    if "tuple" in str(torch.serialization.add_safe_globals.__annotations__).lower():
        torch.serialization.add_safe_globals([(item, name)])


def _unknown_level() -> bool:
    """Stand for "maybe inside a transform", which keeps callers on the path that is always right."""
    return True


#: Return None outside the transforms of ``torch.func`` (vmap, grad, jvp), something else inside.
functorch_level: Callable[[], Any] = _find("_C._functorch.peek_interpreter_stack", _unknown_level)

_level_of: Callable[[Tensor], int] | None = _find("_C._functorch.maybe_get_level")
_pop: Callable[[], Any] | None = _find("_functorch.pyfunctorch.temporarily_pop_interpreter_stack")
_GRAD: Any = _find("_C._functorch.TransformType.Grad")


@contextmanager
def exit_transforms(leaves: list[Tensor]) -> Iterator[None]:
    """Leave the transforms of ``torch.func`` that none of the tensors is part of, as if the block had run before them.

    >>> with exit_transforms([torch.zeros(2)]):
    ...     functorch_level() is None
    True
    """
    if torch.compiler.is_compiling() or functorch_level() is None or _level_of is None or _pop is None:
        yield
        return
    own = max(map(_level_of, leaves), default=-1)
    with ExitStack() as left:
        while (transform := functorch_level()) is not None and transform.level() > own:
            left.enter_context(_pop())
        yield


def is_innermost_transform(leaves: list[Tensor]) -> bool:
    """Tell whether the innermost transform of ``torch.func`` is one that follows these very tensors, as grad and vjp do.

    vmap and jvp take what is cut out of their tensors for a part of them.

    >>> is_innermost_transform([torch.zeros(2)])
    False
    """
    if torch.compiler.is_compiling():
        return False  # a graph cannot ask, and torch.func.grad inside it takes no lazy stacks
    transform = functorch_level()
    if transform is None or _level_of is None:
        return transform is not None
    return (_GRAD is None or transform.key() == _GRAD) and transform.level() in map(_level_of, leaves)


_unwrap: Callable[[Tensor], Tensor] | None = _find("_C._functorch.get_unwrapped")
_batch_dim: Callable[[Tensor], int] | None = _find("_C._functorch.maybe_get_bdim")


def unwrap_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that the transforms of ``torch.func`` have wrapped; outside of them the same one.

    >>> leaf = torch.zeros(2)
    >>> unwrap_transforms(leaf) is leaf
    True
    """
    while _level_of is not None and _unwrap is not None and _level_of(tensor) >= 0:
        tensor = _unwrap(tensor)
    return tensor


def batch_dim(tensor: Tensor) -> int | None:
    """Return which dim of what it wraps vmap maps over, -1 where it maps over none; None where this torch does not tell.

    >>> batch_dim(torch.zeros(2)) in (-1, None)
    True
    """
    return None if _batch_dim is None else _batch_dim(tensor)


def get_mapped_dim(tensor: Tensor) -> int | None:
    """Return the dim of a tensor that the innermost vmap maps over; None where it maps over none, or torch does not tell.

    >>> torch.vmap(lambda x: x + get_mapped_dim(x), 1)(torch.zeros(2, 3)).shape, get_mapped_dim(torch.zeros(2)) is None
    (torch.Size([3, 2]), True)
    """
    transform = functorch_level()
    if transform is None or _level_of is None or _level_of(tensor) != transform.level():
        return None
    dim = batch_dim(tensor)
    return dim if dim is not None and dim >= 0 else None


def unmap(tensor: Tensor) -> Tensor:
    """Return a tensor with the dim that the innermost vmap maps over; itself where there is none.

    >>> torch.vmap(lambda x: x + unmap(x).ndim)(torch.zeros(2, 3))[0, 0]
    tensor(2.)
    """
    return tensor if get_mapped_dim(tensor) is None or _unwrap is None else _unwrap(tensor)


def wrap_vmap(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a wrapper in the place of one of the functions that ``torch.vmap`` consists of; nothing where it has none such."""
    for path in ("_functorch.vmap", "_functorch.apis"):
        module = _find(path)
        if module is not None and hasattr(module, name):
            setattr(module, name, wrap(getattr(module, name)))


def break_graph(why: str) -> None:
    """Have ``torch.compile`` go on in another graph; where there can be no other, it or this raises, and says why.

    Raises:
        StructureError: the program is exported.

    >>> break_graph("no graph is traced")
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=why)
    elif torch.compiler.is_compiling():
        raise StructureError(why)


def get_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that autograd knows this one to be a view of; None where it is none.

    >>> get_base(torch.zeros(3)) is None
    True
    """
    return None if torch.compiler.is_compiling() else getattr(tensor, "_base", None)


_creation_of: Callable[[Tensor], Any] | None = _find("_C._autograd._get_creation_meta")
_DEFAULT: Any = _find("_C._autograd.CreationMeta.DEFAULT")


def is_read_only_view(tensor: Tensor) -> bool:
    """Tell whether autograd lets nobody write to a view: one of several that came of one call, as of unbind and split.

    >>> of_one_call = (torch.zeros(2, 3, requires_grad=True) * 1).unbind(0)
    >>> is_read_only_view(of_one_call[0]), is_read_only_view(torch.zeros(2, 3)[0])
    (True, False)
    """
    return get_base(tensor) is not None and _creation_of is not None and _creation_of(tensor) != _DEFAULT


def default_collate_functions() -> dict[Any, Callable[..., Any]]:
    """Return the table by which ``torch.utils.data.default_collate`` collates classes; a dummy where torch has none.

    >>> isinstance(default_collate_functions(), dict)
    True
    """
    return getattr(torch.utils.data._utils.collate, "default_collate_fn_map", {})


_CALLER: Any = _find("_ops.HigherOrderOperator", ())


def is_caller(func: Any) -> bool:
    """Return whether ``func`` calls another function, on arguments of any kind: a checkpoint, or a compiled region.

    >>> is_caller(torch.exp)
    False
    """
    return isinstance(func, _CALLER) or getattr(func, "__module__", None) == "torch.utils.checkpoint"


def _as_plain(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a torch function on tensors of a subclass as on plain ones; slower than what torch has for it."""
    plain: list[Any] = [arg.as_subclass(Tensor) if isinstance(arg, cls) else arg for arg in args]  # type: ignore[attr-defined]
    return func(*plain, **(kwargs or {}))


#: The ``__torch_function__`` of a tensor subclass whose results are plain tensors.
plain_results: Any = _find("_C._disabled_torch_function_impl", classmethod(_as_plain))


def make_nested_view(flat: Tensor, shapes: Tensor, strides: Tensor, offsets: Tensor) -> Tensor:
    """Return the strided nested tensor whose components stand in ``flat``: a view, or a copy where torch has none.

    >>> table = torch.tensor([[1], [2]])
    >>> make_nested_view(torch.arange(3), table, torch.ones_like(table), torch.tensor([0, 1])).unbind()
    (tensor([0]), tensor([1, 2]))
    """
    view: Callable[..., Tensor] | None = _find("_nested_view_from_buffer")
    if view is not None:
        return view(flat, shapes, strides, offsets)
    rows = zip(shapes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    return torch.nested.as_nested_tensor(
        [flat.as_strided(shape, stride, offset) for shape, stride, offset in rows]
    )


class _Looks:
    """What each of some tensors is, compared attribute by attribute."""

    def __init__(self, *tensors: Tensor, **options: Any) -> None:
        self.looks = list(map(self._of, tensors))

    @staticmethod
    def _of(tensor: Tensor) -> tuple[Any, ...]:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return (object(),)  # like no other
        form = type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad
        return *form, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()

    def check(self, *tensors: Tensor) -> bool:
        return len(tensors) == len(self.looks) and all(map(eq, map(self._of, tensors), self.looks))


_GUARDS: Any = _find("_C._dynamo.guards.TensorGuards", _Looks)


def looks(tensors: Iterable[Tensor]) -> Callable[..., bool]:
    """Return what tells whether as many tensors are as these are now: of one class, dtype, device, shape, strides and so on.

    It says no more often than it must (``torch.inference_mode`` is a difference), and nothing about content or memory.

    >>> leaf = torch.zeros(2, 3)
    >>> same = looks([leaf])
    >>> same(leaf.zero_()), same(leaf.t_())
    (True, False)
    """
    check: Callable[..., bool] = _GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def get_ragged_dim(tensor: Tensor) -> int:
    """Return which dim of a jagged nested tensor is ragged.

    >>> get_ragged_dim(torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged))
    1
    """
    return int(getattr(tensor, "_ragged_idx", 1))


def get_cached_seqlens(tensor: Tensor) -> tuple[int | None, int | None]:
    """Return the least and the greatest length of its components, as a jagged nested tensor was told; None for what it was not.

    >>> get_cached_seqlens(torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged))
    (1, 2)
    """
    return getattr(tensor, "_maybe_min_seqlen", None), getattr(tensor, "_maybe_max_seqlen", None)


_USES: Callable[[int], int] | None = _find("_C._storage_Use_Count")


def count_users(memory: torch.UntypedStorage) -> int | None:
    """Return how many tensors and storages refer to the memory of a storage; None where this torch does not tell.

    >>> leaf = torch.zeros(2)
    >>> memory = leaf.untyped_storage()
    >>> before = count_users(memory)
    >>> view = leaf[0]
    >>> before is None or count_users(memory) == before + 1
    True
    """
    return None if _USES is None else int(_USES(memory._cdata))
