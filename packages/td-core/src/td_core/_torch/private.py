"""All private names of torch that the packages use. No other module uses a private name of torch.

Any release of torch may remove or change them, so each has a fallback. Those whose signature is not obvious are also called
once, when they are first used; if this fails, a warning names them, and the fallback is used.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from operator import eq
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import StructureError

__all__ = [
    "add_batch_dim", "add_safe_name", "assert_in_graph", "is_innermost_transform", "get_base", "batch_dim", "exit_transforms",
    "find_refusing_transform", "default_collate_functions", "break_graph", "forbid_data_pointer", "foreach_kernel",
    "functorch_level", "is_caller", "guard_forms", "is_read_only_view", "is_traced", "map_location", "get_mapped_dim",
    "make_nested_view", "new_object", "plain_results", "get_ragged_dim", "get_cached_seqlens", "increase_versions",
    "find_apart_view", "find_state_reader", "make_wrapper", "pytree", "without_torch_function", "unmap", "unwrap_transforms",
    "count_dispatch_modes", "count_users", "wrap_jacobians", "wrap_vmap",
]  # fmt: skip


T = TypeVar("T")


def _find(path: str, default: object = None) -> Any:
    """Return the attribute of torch at a dotted name, or the default if it does not exist."""
    result: object = torch
    for name in path.split("."):
        result = getattr(result, name, None)
    return default if result is None else result


@functools.cache
def _find_tested(path: str, call: Callable[[object], object]) -> Any:
    """Return the attribute of torch at a dotted name; None if it does not exist or ``call`` raises an error with it."""
    found = _find(path)
    if found is None:
        return None
    try:
        call(found)
    except Exception as error:  # a changed function can raise any error
        warnings.warn(
            f"torch.{path} of torch {torch.__version__} does not work as expected ({error}): td_core uses a slower way",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return found


#: Context manager in which tensor subclasses are plain tensors for torch functions, and no mode is called. Its relative that
#: leaves modes on ends in a recursion of torch.compile under a mode, as the one of ``torch.set_default_device()``.
without_torch_function: Any = _find("_C.DisableTorchFunction")

_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

#: ``object.__new__``; a function for torch before 2.13, whose torch.compile cannot trace the builtin.
new_object: Callable[[type[T]], T] = (
    object.__new__ if _RELEASE >= (2, 13) else lambda cls: object.__new__(cls)
)

#: Function that asserts a condition, also in a graph of torch.compile.
assert_in_graph: Callable[[object], None] = _find("_check")

#: Constructor of tensors of a subclass without elements.
make_wrapper: Callable[..., Any] = _find("Tensor._make_wrapper_subclass")

#: Make C++ functions raise RuntimeError if they access the memory of a tensor without any; they might crash otherwise.
forbid_data_pointer: Callable[[Tensor], Any] = _find("_C._set_throw_on_mutable_data_ptr", lambda tensor: None)


def foreach_kernel(name: str) -> Callable[..., Any] | None:
    """Return ``torch._foreach_<name>``, which takes a list of tensors; None if torch lacks it.

    >>> [negated] = foreach_kernel("neg")([torch.ones(2)])
    >>> negated
    tensor([-1., -1.])
    """
    kernel: Callable[..., list[Tensor]] | None = _find(f"_foreach_{name}")
    return kernel


def map_location() -> object:
    """Return the ``map_location`` of the ``torch.load`` call that runs in this thread, or None outside of one."""
    return getattr(_LOADING, "map_location", None)


_LOADING: object = _find("serialization._serialization_tls")


def add_safe_name(item: Any, name: str) -> None:
    """Let ``torch.load(weights_only=True)`` resolve an old name to ``item``; a no-op on torch 2.4 and 2.5."""
    if "tuple" in str(torch.serialization.add_safe_globals.__annotations__).lower():
        torch.serialization.add_safe_globals([(item, name)])


def _unknown_level() -> bool:
    """Return True ("maybe inside a transform"), so that callers take the path that is always correct."""
    return True


#: Function that returns None outside the transforms of ``torch.func`` (vmap, grad, jvp), and another value inside.
functorch_level: Callable[[], Any] = _find("_C._functorch.peek_interpreter_stack", _unknown_level)


#: Function that returns the number of active dispatch modes, which see each operation.
count_dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", lambda: 0)


def is_traced() -> bool:
    """Return True under torch.compile and inside the transforms of ``torch.func``, where tensors have no real memory.

    >>> is_traced()
    False
    """
    return torch.compiler.is_compiling() or functorch_level() is not None


_level_of: Callable[[Tensor], int] | None = _find("_C._functorch.maybe_get_level")
_GRAD: object = _find("_C._functorch.TransformType.Grad")


def _suspend_vmap(pop: Callable[[], Any]) -> None:
    def suspend(mapped: Tensor) -> Tensor:
        with pop():
            return mapped

    torch.vmap(suspend)(torch.zeros(1))


@contextmanager
def exit_transforms(leaves: list[Tensor]) -> Iterator[None]:
    """Context manager that suspends the transforms of ``torch.func`` that none of the tensors belongs to."""
    if torch.compiler.is_compiling() or functorch_level() is None or _level_of is None:
        yield
        return
    pop = _find_tested("_functorch.pyfunctorch.temporarily_pop_interpreter_stack", _suspend_vmap)
    if pop is None:
        yield
        return
    own = max(map(_level_of, leaves), default=-1)
    with ExitStack() as left:
        while (transform := functorch_level()) is not None and transform.level() > own:
            left.enter_context(pop())
        yield


def is_innermost_transform(leaves: list[Tensor]) -> bool:
    """Return True if the innermost transform of ``torch.func`` is a grad or vjp that tracks one of these tensors."""
    if torch.compiler.is_compiling():
        return False  # torch.compile cannot trace this check, and torch.func.grad in a graph does not support lazy stacks
    transform = functorch_level()
    if transform is None or _level_of is None:
        return transform is not None
    return (_GRAD is None or transform.key() == _GRAD) and transform.level() in map(_level_of, leaves)


_unwrap: Callable[[Tensor], Tensor] | None = _find("_C._functorch.get_unwrapped")

#: Function of (tensor, dim, level) that returns the tensor inside a vmap of this level, which maps this dim.
add_batch_dim: Any = _find("_C._functorch._add_batch_dim")

_batch_dim: Callable[[Tensor], int] | None = _find("_C._functorch.maybe_get_bdim")


def unwrap_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of ``torch.func`` transforms; outside of them the tensor itself."""
    while _level_of is not None and _unwrap is not None and _level_of(tensor) >= 0:
        tensor = _unwrap(tensor)
    return tensor


_get_transforms: Callable[[], Any] = _find("_C._functorch.get_interpreter_stack", lambda: None)
_VMAP: object = _find("_C._functorch.TransformType.Vmap")
_DERIVATIVES: tuple[object, ...] = (_GRAD, _find("_C._functorch.TransformType.Jvp"))


def find_refusing_transform(target: Tensor, operands: Iterable[object]) -> str | None:
    """Return the transform of ``torch.func`` that refuses to write operands into a tensor from outside of it, or None."""
    if torch.compiler.is_compiling() or functorch_level() is None:
        return None
    own = _list_levels(target)
    others = {level for item in operands if isinstance(item, Tensor) for level in _list_levels(item)}
    for transform in _get_transforms() or ():
        level, key = transform.level(), transform.key()
        if level not in own and (key in _DERIVATIVES or (key == _VMAP and level in others)):
            return "vmap" if key == _VMAP else "grad or jvp"
    return None


def _list_levels(tensor: Tensor) -> list[int]:
    """Return the levels of the transforms that wrap a tensor."""
    levels: list[int] = []
    while _level_of is not None and _unwrap is not None and (level := _level_of(tensor)) >= 0:
        levels.append(level)
        tensor = _unwrap(tensor)
    return levels


def batch_dim(tensor: Tensor) -> int | None:
    """Return the dim that vmap maps in the wrapped tensor, -1 if none; None if torch does not expose it."""
    return None if _batch_dim is None else _batch_dim(tensor)


def get_mapped_dim(tensor: Tensor) -> int | None:
    """Return the dim of a tensor that the innermost vmap maps; None if none, or if torch does not expose it."""
    transform = functorch_level()
    if transform is None or _level_of is None or _level_of(tensor) != transform.level():
        return None
    dim = batch_dim(tensor)
    return dim if dim is not None and dim >= 0 else None


def unmap(tensor: Tensor) -> Tensor:
    """Return the tensor with the dim that the innermost vmap maps; the tensor itself if none is mapped."""
    return tensor if get_mapped_dim(tensor) is None or _unwrap is None else _unwrap(tensor)


def wrap_vmap(name: str, wrap: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
    """Replace an internal function of ``torch.vmap`` by its wrapper; a no-op if torch lacks that function."""
    for path in ("_functorch.vmap", "_functorch.apis"):
        module = _find(path)
        if module is not None and hasattr(module, name):
            setattr(module, name, wrap(getattr(module, name)))


#: Names in the frames of torch.func.jacrev and jacfwd: leaves and structure of the basis, and of the result.
_BASES = (("flat_basis_chunk", "output_spec"), ("flat_basis", "primals_spec"))
_RESULTS = (("flat_output_input", "output_spec"), ("jac_outs_ins", "spec"))


def wrap_jacobians(finish: Callable[[Callable[[], object], int | None], object]) -> None:
    """Call ``finish(build, ndim)`` where jacrev and jacfwd build a collection; a no-op if torch has no such functions.

    ``build()`` returns the result. ``ndim`` is the number of dims of the first input, which are the last of each Jacobian;
    None for a basis, whose leaves have a new first dim.
    """
    module = _find("_functorch.eager_transforms")
    original = getattr(module, "tree_unflatten", None)
    if original is None:
        return

    @wraps(original)
    def unflatten(leaves: object, spec: object) -> object:
        if torch.compiler.is_compiling():
            return original(leaves, spec)
        frame = sys._getframe(1)
        if not frame.f_code.co_name.startswith(("wrapper_fn", "compute_jacobian")):
            return original(leaves, spec)
        held = frame.f_locals
        build = partial(original, leaves, spec)
        if any(held.get(a) is leaves and held.get(b) is spec for a, b in _BASES):
            return finish(build, None)
        is_result = any(held.get(a) is leaves and held.get(b) is spec for a, b in _RESULTS)
        inputs = held.get("flat_primals") if is_result else None
        return finish(build, inputs[0].ndim) if inputs else build()

    module.tree_unflatten = unflatten


def break_graph(why: str) -> None:
    """Break the graph of ``torch.compile``, or raise StructureError under ``torch.export``, which allows no breaks."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=why)
    elif torch.compiler.is_compiling():
        raise StructureError(why)


def get_base(tensor: Tensor) -> Tensor | None:
    """Return the base of a view in autograd; None if the tensor is not a view."""
    return None if torch.compiler.is_compiling() else getattr(tensor, "_base", None)


_creation_of: Callable[[Tensor], object] | None = _find("_C._autograd._get_creation_meta")
_DEFAULT: object = _find("_C._autograd.CreationMeta.DEFAULT")


def is_read_only_view(tensor: Tensor) -> bool:
    """Return True if autograd forbids in-place writes to a view, such as one of the views that unbind or split returns."""
    return get_base(tensor) is not None and _creation_of is not None and _creation_of(tensor) != _DEFAULT


def default_collate_functions() -> dict[object, Callable[..., object]]:
    """Return the class table of ``torch.utils.data.default_collate``; an unused dict if torch lacks it."""
    return getattr(torch.utils.data._utils.collate, "default_collate_fn_map", {})


_CALLER: Any = _find("_ops.HigherOrderOperator", ())


def is_caller(func: object) -> bool:
    """Return True if ``func`` calls another function on any arguments: a checkpoint or a higher-order operator."""
    return isinstance(func, _CALLER) or getattr(func, "__module__", None) == "torch.utils.checkpoint"


def _as_plain(
    cls: type[Tensor],
    func: Callable[..., object],
    types: object,
    args: Iterable[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    """Call a torch function with plain tensors instead of subclass tensors; slow fallback for the function of torch."""
    plain: list[object] = [arg.as_subclass(Tensor) if isinstance(arg, cls) else arg for arg in args]
    return func(*plain, **(kwargs or {}))


#: The ``__torch_function__`` of a tensor subclass whose results are plain tensors.
plain_results: Any = _find("_C._disabled_torch_function_impl", classmethod(_as_plain))


def make_tracing_error(message: str) -> Exception:
    """Return an error to raise where torch.compile traces an input: a graph break, or an error with ``fullgraph=True``."""
    compiler = sys.modules.get("torch._dynamo.exc")
    return RuntimeError(message) if compiler is None else compiler.Unsupported(message)


def make_nested_view(flat: Tensor, shapes: Tensor, strides: Tensor, offsets: Tensor) -> Tensor:
    """Build a strided nested tensor whose components lie in ``flat``: a view, or a copy if torch lacks the function.

    >>> sizes = torch.tensor([[1], [2]])
    >>> nested = make_nested_view(torch.arange(3), sizes, torch.ones_like(sizes), torch.tensor([0, 1]))
    >>> [part.tolist() for part in nested.unbind()]
    [[0], [1, 2]]
    """
    view: Callable[..., Tensor] | None = _find_tested("_nested_view_from_buffer", _view_two_rows)
    if view is not None:
        return view(flat, shapes, strides, offsets)
    rows = zip(shapes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    return torch.nested.as_nested_tensor(
        [flat.as_strided(shape, stride, offset) for shape, stride, offset in rows]
    )


def _view_two_rows(view: Callable[..., Tensor]) -> None:
    lengths = torch.tensor([[1], [2]], device="cpu")
    view(torch.zeros(3, device="cpu"), lengths, torch.ones_like(lengths), torch.tensor([0, 1], device="cpu"))


class _Looks:
    """Fallback of TensorGuards: the metadata of some tensors, compared attribute by attribute."""

    def __init__(self, *tensors: Tensor, **options: Any) -> None:
        self.looks = list(map(self._of, tensors))

    @staticmethod
    def _of(tensor: Tensor) -> tuple[object, ...]:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return (object(),)  # a new object is equal to no other
        form = type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad
        return *form, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()

    def check(self, *tensors: Tensor) -> bool:
        return len(tensors) == len(self.looks) and all(map(eq, map(self._of, tensors), self.looks))


def _guard_one_tensor(guards: Any) -> None:
    tensor = torch.zeros(1, device="cpu")
    if not guards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check(tensor):
        raise RuntimeError("it refuses the guarded tensor")


def guard_forms(tensors: Iterable[Tensor]) -> Callable[..., bool]:
    """Return a predicate: True if tensors have the class, dtype, device, shape, strides etc. of these tensors.

    >>> guard_forms([torch.zeros(2)])(torch.ones(2)), guard_forms([torch.zeros(2)])(torch.ones(3))
    (True, False)
    """
    # The predicate ignores content and memory, and may be False too often, as for tensors made in inference mode.
    guards = _find_tested("_C._dynamo.guards.TensorGuards", _guard_one_tensor) or _Looks
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _read_two_states(read: Callable[[Mapping[str, object]], object]) -> None:
    held: dict[str, object] = {"a": 1}
    states = [read(held), read(held)]
    held["a"] = 2
    if states != [states[0]] * 2 or read(held) == states[0] or read({"a": 1}) == read({"a": 1}):
        raise RuntimeError("it does not return one number for each state of a dict")


def _list_identities(held: Mapping[str, object]) -> object:
    return [*held], [*map(id, held.values())]


def find_state_reader() -> Callable[[Mapping[str, object]], object]:
    """Find a function that returns another value after each change of a dict, as long as its old values are alive.

    >>> read, held = find_state_reader(), {"a": 1}
    >>> before = read(held)
    >>> held["b"] = 2
    >>> before == before, before == read(held)
    (True, False)
    """
    read: Callable[[Mapping[str, object]], object] | None = _find_tested(
        "_C._dynamo.guards.dict_version", _read_two_states
    )
    return read or _list_identities


def _view_apart(view: Callable[..., Tensor]) -> None:
    source = torch.arange(6, device="cpu")
    made = view(source[1:], (2, 2), (2, 1), 1)
    if (
        made.tolist() != [[2, 3], [4, 5]]
        or made._base is not None
        or made.data_ptr() != source[2:].data_ptr()
    ):
        raise RuntimeError("it does not return the elements from an offset on")


def _detach_view(source: Tensor, shape: tuple[int, ...], steps: tuple[int, ...], offset: int) -> Tensor:
    return source.as_strided(shape, steps, int(source.storage_offset()) + offset).detach()


def find_apart_view() -> Callable[[Tensor, tuple[int, ...], tuple[int, ...], int], Tensor]:
    """Find a function of (vector, shape, strides, offset) whose result shares memory, but is no view for autograd.

    >>> find_apart_view()(torch.arange(6), (2, 2), (2, 1), 1)
    tensor([[1, 2],
            [3, 4]])
    """
    view: Callable[..., Tensor] | None = _find_tested("_C._dynamo.guards._reinterpret_tensor", _view_apart)
    return view or _detach_view


def get_ragged_dim(tensor: Tensor) -> int:
    """Return the ragged dim of a jagged nested tensor."""
    return int(getattr(tensor, "_ragged_idx", 1))


def get_cached_seqlens(tensor: Tensor) -> tuple[int | None, int | None]:
    """Return the cached (min, max) component lengths of a jagged nested tensor; None for uncached ones."""
    return getattr(tensor, "_maybe_min_seqlen", None), getattr(tensor, "_maybe_max_seqlen", None)


def _count_users_of_new(count: Callable[[int], int]) -> None:
    memory = torch.UntypedStorage(1)
    if count(memory._cdata) != 1:
        raise RuntimeError("it does not return 1 for a new storage")


def count_users(memory: torch.UntypedStorage) -> int | None:
    """Return the reference count of a storage's memory; None if torch does not expose it.

    >>> count_users(torch.zeros(1).untyped_storage()) in (None, 1)
    True
    """
    count = _find_tested("_C._storage_Use_Count", _count_users_of_new)
    return None if count is None else int(count(memory._cdata))


def _increase_two(increase: Callable[[list[Tensor]], None]) -> None:
    tensors = [torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")]
    increase(tensors)
    if [tensor._version for tensor in tensors] != [1, 1]:
        raise RuntimeError("it does not raise the versions")


def increase_versions(tensors: list[Tensor]) -> None:
    """Raise the version of each tensor, as a write in place does.

    >>> tensor = torch.zeros(1)
    >>> increase_versions([tensor])
    >>> tensor._version
    1
    """
    # Before torch 2.6, the function takes one tensor.
    increase = _find_tested("_C._increment_version", _increase_two) if _RELEASE >= (2, 6) else None
    if increase is not None:
        increase(tensors)
        return
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)
