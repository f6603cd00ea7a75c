"""``StoredTensor``: a tensor whose elements are in a store, and are read when an operation needs them.

torch passes every operation on such a tensor to ``__torch_dispatch__``, which does one of three things. A view becomes
another stored tensor of the same source; torch computes its sizes and strides with a meta tensor. A write becomes a write
to the source. Every other operation reads. So nothing is ever written to memory that is then lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from td_core.spi import StoredLeaf, check_mode, pytree, set_module, without_torch_function
from td_core.typing import DeviceType, Source, SourceIndex

from ._blocks import find_row_blocks
from ._modes import WRAPPERS, RefusingSource, unwrap
from ._requests import (
    Points,
    Request,
    fetch,
    find_points,
    hold,
    request_points,
    request_view,
    write_points,
    write_view,
)

ResultT = TypeVar("ResultT")


class Operation(Protocol):
    """An operation of torch as ``__torch_dispatch__`` receives it."""

    _schema: Any
    tags: Sequence[torch.Tag]

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the operation."""


def as_memory(leaves: Sequence[object]) -> list[Tensor]:
    """Return the leaves with those in a store read, each of them once; autograd records the reads."""
    # Outside of __torch_dispatch__, autograd must see that a leaf which requires grad is read.
    return read_all(
        leaf.clone() if isinstance(leaf, StoredTensor) and leaf.requires_grad else leaf for leaf in leaves
    )


def index_together(node: Any, plan: Any) -> object:
    """Apply an index plan with positions to a node, and read the rows of all stored leaves together."""
    before, _TOGETHER.points = _TOGETHER.points, {}
    try:
        result = node._transform(plan)
    finally:
        _TOGETHER.points = before
    leaves = result._leaves()
    postponed = [leaf for leaf in leaves if isinstance(leaf, StoredTensor) and isinstance(leaf.source, Rows)]
    if not postponed:
        return result
    memory = dict(zip(map(id, postponed), read_all(postponed)))
    return result._unflatten([memory.get(id(leaf), leaf) for leaf in leaves])


@set_module("td_store")
class StoredTensor(StoredLeaf):
    """A tensor whose elements are in a store: a file, a data base, a server.

    It has a shape, dtype and device like every tensor. Its elements are read when an operation needs them:

    - An index of integers and slices, ``view``, ``permute``, ``split``, ``unbind`` and the other views read nothing. Their
      result is a stored tensor, too, and writes to it are writes to the store.
    - An index with positions or a mask reads the rows at these positions, with one request to the source.
    - Operations in place write to the store: ``x[i] = y``, ``copy_`` and ``zero_`` without reading, ``add_`` after it.
    - Every other operation reads the tensor and continues in memory. So do ``clone()``, ``cpu()`` and ``to(device)``.
    - What would need memory, such as ``data_ptr()``, raises an error.

    A pickle contains the source, not the elements.

    Args:
        source: the array in the store.
        device: device of the tensor, to which elements are moved after they were read; by default the CPU.
        mode: ``"r+"`` writes to the store, ``"r"`` refuses writes, ``"c"`` reads the array into memory before the first
            write, so that the store does not change.

    >>> import tempfile, torch
    >>> from td_core import TensorDict
    >>> from td_store import StoredTensor
    >>> from td_store.testing import RawFile
    >>> file = tempfile.NamedTemporaryFile()
    >>> source = RawFile.create(file.name, torch.arange(12).view(6, 2))
    >>> td = TensorDict({"a": StoredTensor(source)}, batch_size=[6])
    >>> td[1:3]["a"]
    StoredTensor(RawFile, size=(2, 2), dtype=torch.int64)
    >>> td[1:3].zero_().is_empty()
    False
    >>> td[torch.tensor([2, 3])]["a"]
    tensor([[0, 0],
            [6, 7]])
    """

    _twin: Tensor

    @staticmethod
    def __new__(cls, source: Source, device: DeviceType | None = None, mode: str = "r+") -> StoredTensor:
        """Create the tensor without reading."""
        check_mode(mode)
        if not hasattr(source, "shape"):
            raise TypeError(f"a StoredTensor takes a source; got {type(source).__name__}")
        twin = torch.empty(tuple(source.shape), dtype=source.dtype, device="meta")
        return _wrap(cls, WRAPPERS[mode](source), twin, torch.device("cpu" if device is None else device))

    def __init__(self, source: Source, device: DeviceType | None = None, mode: str = "r+") -> None:
        pass

    _as_memory = staticmethod(as_memory)
    _index_together = staticmethod(index_together)
    _find_row_blocks = staticmethod(find_row_blocks)

    def flush(self) -> None:
        """Return when everything that was written is in the store."""
        self.source.flush()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Describe the tensor without reading."""
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        grad = ", requires_grad=True" if self.requires_grad else ""
        name = type(unwrap(self.source)).__name__
        return f"{type(self).__name__}({name}, size={tuple(self.shape)}, dtype={self.dtype}{device}{grad})"

    def __format__(self, format_spec: str) -> str:
        """Format the element of a tensor without dims, as a number; describe any other tensor."""
        return format(self.item(), format_spec) if self.ndim == 0 else object.__format__(self, format_spec)

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
        """Reduce to the source and the geometry, without reading."""
        geometry = tuple(self.shape), self.stride(), int(self.storage_offset())
        return rebuild_stored_tensor, (type(self), self.source, *geometry, self.device, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy in memory: a copy of a store would be another store."""
        copied: Tensor = memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))
        return copied

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., ResultT],
        types: Collection[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> ResultT:
        """Apply the operations that torch would not pass to ``__torch_dispatch__``."""
        if len(types) > 1 and not all(issubclass(kind, Tensor) for kind in types):
            # Tensors with first-class dims are of a class of their own, which runs the function on what is in memory.
            flat, spec = pytree.tree_flatten((args, kwargs or {}))
            args, kwargs = pytree.tree_unflatten(as_memory(flat), spec)
            return func(*args, **kwargs)
        special = _FUNCTIONS.get(func)
        if special is not None:
            result: ResultT = special(*args, **(kwargs or {}))
            return result
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Operation,
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """View, read or write, as the schema of an operation says."""
        return _choose(func)(func, *args, **(kwargs or {}))


def _wrap(cls: type[StoredTensor], source: Source, twin: Tensor, device: torch.device) -> StoredTensor:
    """Return a stored tensor with the geometry of a meta tensor."""
    self = cls._like(twin, device)
    self.source, self._twin = source, twin
    return self


@set_module("td_store.store_pickles")
def rebuild_stored_tensor(
    cls: type[StoredTensor],
    source: Source,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    device: torch.device,
    requires_grad: bool,
) -> StoredTensor:
    """Rebuild a stored tensor from a pickle."""
    twin = torch.empty(tuple(source.shape), dtype=source.dtype, device="meta")
    view = _wrap(cls, source, twin.as_strided(size, stride, offset), device)
    if requires_grad:
        view.requires_grad_()
    return view


def read_all(leaves: Iterable[object]) -> list[Any]:
    """Return the leaves with those in a store read, each of them once."""
    leaves = list(leaves)
    stored = {id(leaf): leaf for leaf in leaves if isinstance(leaf, StoredTensor)}
    results = dict(zip(stored, map(_to_device, stored.values(), _finish([*map(_request, stored.values())]))))
    return [results.get(id(leaf), leaf) for leaf in leaves]


def _request(leaf: StoredTensor) -> Request | Tensor:
    """Plan the read of a leaf; an empty one is its own result."""
    if not leaf.numel():
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    # The rows that a collection postponed are one request to their source, unless they were viewed since.
    if isinstance(leaf.source, Rows) and leaf.shape == leaf.source.shape and leaf.is_contiguous():
        return leaf.source.request
    return request_view(leaf)


def _finish(requests: Sequence[Request | Tensor]) -> list[Tensor]:
    memory = iter(fetch([item for item in requests if isinstance(item, Request)]))
    return [
        item.finish(item.window(next(memory))) if isinstance(item, Request) else item for item in requests
    ]


def _to_device(leaf: StoredTensor, memory: Tensor) -> Tensor:
    return memory.to(leaf.device)


class Rows(RefusingSource):
    """Source of the rows of a stored tensor at positions, which are read later, together with those of other leaves."""

    refusal = "cannot write to rows that were read from a store at positions"

    def __init__(self, request: Request, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.request, self.shape, self.dtype = request, torch.Size(shape), dtype

    def read(self, index: SourceIndex) -> Tensor:
        """Read all rows, and index them."""
        return _finish([self.request])[0][index].clone()


class _Together(threading.local):
    """The indices that this thread has converted, by position and size, while it postpones reads of rows; or None."""

    points: dict[tuple[int, int], tuple[Tensor, Points]] | None = None


_TOGETHER = _Together()


def _view(func: Operation, view: object, *args: object, **kwargs: object) -> object:
    """Apply a view to the geometry."""
    if not isinstance(view, StoredTensor):  # such as other.view_as(view)
        return _compute(func, view, *args, **kwargs)
    twins = func(view._twin, *args, **kwargs)
    if isinstance(twins, Tensor):
        if twins.dtype != view.dtype or twins.is_conj() or twins.is_neg():
            return StoredTensor(Converted(view, func, args, twins), view.device)
        return _wrap(type(view), view.source, twins, view.device)
    return [_wrap(type(view), view.source, twin, view.device) for twin in twins]


def _compute(func: Operation, *args: object, **kwargs: object) -> object:
    """Read all operands, each of them once."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    args, kwargs = pytree.tree_unflatten(read_all(flat), spec)
    return func(*args, **kwargs)


def _find_written(
    func: Operation, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[tuple[StoredTensor, bool]]:
    """Yield the stored tensors that an operation writes, and whether it writes all elements without reading them."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for item in pytree.tree_flatten(value)[0]:
                if isinstance(item, StoredTensor):
                    yield item, argument.is_out or func._schema.name in _RANDOM


def _modify(func: Operation, *args: object, **kwargs: object) -> object:
    """Apply an operation that writes some of its operands: read, compute, write back, and exclude other writers meanwhile."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    written: dict[int, StoredTensor] = {}
    blank: dict[int, Tensor] = {}
    for item, overwrites in _find_written(func, args, kwargs):
        written[id(item)] = item
        if overwrites and sum(item is x for x in flat) == 1:
            blank[id(item)] = torch.empty(item.shape, dtype=item.dtype, device=item.device)
    # Read before others are excluded: a thread that holds another operand could wait for one of these.
    early = read_all(blank.get(id(item), None if id(item) in written else item) for item in flat)
    with _hold_all(view.source for view in written.values()):
        memory = read_all(item if read is None else read for item, read in zip(flat, early))
        origin = {id(new): old for new, old in zip(memory, flat) if id(old) in written}
        args, kwargs = pytree.tree_unflatten(memory, spec)
        results, spec = pytree.tree_flatten(func(*args, **kwargs))
        changed = {id(old): new for new, old in zip(memory, flat)}
        for key, view in written.items():
            if changed[key].shape != view.shape:
                raise RuntimeError(f"{func} cannot change the shape of a stored tensor: {list(view.shape)}")
            _write(view, changed[key])
    return pytree.tree_unflatten([origin.get(id(result), result) for result in results], spec)


@contextlib.contextmanager
def _hold_all(sources: Iterable[Source]) -> Iterator[None]:
    """Exclude other writers of some sources during a block; all threads take the locks in one order."""
    distinct = {(repr(source), id(source)): source for source in sources}
    with contextlib.ExitStack() as stack:
        for place in sorted(distinct):
            stack.enter_context(hold(distinct[place]))
        yield


def _write(view: StoredTensor, value: Tensor) -> None:
    if any(step == 0 and n > 1 for n, step in zip(view.shape, view.stride())):
        raise RuntimeError(
            "cannot write in place: the stored tensor is expanded, so several of its elements are one in the store; "
            "clone() it first"
        )
    if view.numel():
        write_view(view, value.expand(view.shape))


def _fill(func: Operation, target: StoredTensor, value: object = 0) -> StoredTensor:
    """Write a number, without reading: ``fill_`` and ``zero_``."""
    (value,) = read_all([value])
    dtype = None if isinstance(value, Tensor) else target.dtype
    _write(target, torch.as_tensor(value, dtype=dtype, device="cpu"))
    return target


def _copy(func: Operation, target: Tensor, value: Tensor, non_blocking: bool = False) -> object:
    """Write a tensor, without reading the target: ``copy_``. A large tensor in another store is copied in parts."""
    if not isinstance(target, StoredTensor):
        return _compute(func, target, value, non_blocking)
    if isinstance(value, StoredTensor) and value.source is target.source:
        (value,) = read_all([value])
    _write(target, value)
    return target


def _copy_each(func: Operation, targets: Sequence[Tensor], values: Sequence[Tensor], *rest: object) -> None:
    """Write a list of tensors one by one: ``torch._foreach_copy_``."""
    for target, value in zip(targets, values):
        target.copy_(value)


def _zero_each(func: Operation, targets: Sequence[Tensor]) -> None:
    for target in targets:
        target.zero_()


def _make_like(func: Operation, view: Tensor, *args: object, **kwargs: object) -> object:
    """Make a new tensor of the shape, dtype or device of a stored one, without reading."""
    if not isinstance(view, StoredTensor):
        return _compute(func, view, *args, **kwargs)
    device = view.device if kwargs.get("device") is None else kwargs["device"]
    return func(view._twin, *args, **{**kwargs, "device": device})


def _index(func: Operation, view: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Read at positions or a mask."""
    indices = read_all(indices)
    if not isinstance(view, StoredTensor):
        result: Tensor = func(view, indices)
        return result
    mapped = _find_mapped(view)
    if mapped is not None:
        return _to_device(view, func(mapped, indices))
    points = _find_points(view.shape, indices)
    before, after = points.split(view.shape)
    size = (*before, *points.shape, *after)
    if not view.numel() or 0 in points.shape:
        return torch.empty(size, dtype=view.dtype, device=view.device)
    request = request_points(view, points)
    if _TOGETHER.points is not None and not view.requires_grad:
        return StoredTensor(Rows(request, size, view.dtype), view.device)
    return _to_device(view, _finish([request])[0])


def _find_points(size: Sequence[int], indices: Sequence[Tensor | None]) -> Points:
    """Convert an index to positions; once for rows of several leaves."""
    rows = indices[0]
    if _TOGETHER.points is None or rows is None or len(indices) > 1 or rows.dtype is not torch.int64:
        return find_points(size, indices)
    key = id(rows), size[0]
    if key not in _TOGETHER.points:
        # The tensor is kept, so that its id is that of no other.
        _TOGETHER.points[key] = rows, find_points(size, indices)
    return _TOGETHER.points[key][1]


def _find_mapped(view: StoredTensor) -> Tensor | None:
    """Return the elements of a view in the mapped memory of its source, or None if the source is not mapped."""
    get_mapped = getattr(unwrap(view.source), "map", None)
    mapped: Tensor | None = None if get_mapped is None else get_mapped()
    if mapped is None or not mapped.is_contiguous():
        return None
    if view.shape == mapped.shape and view.is_contiguous():
        return mapped
    offset = int(mapped.storage_offset()) + int(view.storage_offset())
    return mapped.as_strided(view.shape, view.stride(), offset)


def _index_put(
    func: Operation,
    view: Tensor,
    indices: Sequence[Tensor | None],
    value: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    """Write at positions or a mask."""
    *indices, value = read_all([*indices, value])
    if not isinstance(view, StoredTensor):
        result: Tensor = func(view, indices, value, accumulate)
        return result
    if value.dtype != view.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {view.dtype} for the destination and "
            f"{value.dtype} for the source."
        )
    return _put(view, indices, value, accumulate)


def _put(view: StoredTensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: bool) -> Tensor:
    points = find_points(view.shape, indices)
    if view.numel() and 0 not in points.shape:
        write_points(view, points, value.cpu(), accumulate)
    return view


def _fill_positions(func: Operation, view: Tensor, dim: int, index: Tensor, value: object) -> object:
    """Write a number at positions of a dim."""
    fits = -view.ndim <= dim < view.ndim and index.ndim < 2 and index.dtype is torch.int64
    if not isinstance(view, StoredTensor) or not fits:
        return _modify(func, view, dim, index, value)
    index, value = read_all([index, value])
    number = func(_make_one(view), 0, torch.zeros(1, dtype=torch.int64, device="cpu"), value)
    return _put(view, [*[None] * (dim % view.ndim), index.reshape(-1)], number, False)


def _fill_mask(func: Operation, view: Tensor, mask: Tensor, value: object) -> object:
    """Write a number where a mask is True."""
    fits = 0 < mask.ndim <= view.ndim and mask.dtype is torch.bool
    fits = fits and all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(view.shape)))
    if not isinstance(view, StoredTensor) or not fits:
        return _modify(func, view, mask, value)
    mask, value = read_all([mask, value])
    number = func(_make_one(view), torch.ones(1, dtype=torch.bool, device="cpu"), value)
    mask = mask.reshape(*[1] * (view.ndim - mask.ndim), *mask.shape)
    while mask.ndim > 1 and mask.shape[-1] == 1:  # whole rows
        mask = mask.squeeze(-1)
    return _put(view, [mask.expand(view.shape[: mask.ndim])], number, False)


def _make_one(view: Tensor) -> Tensor:
    return torch.empty(1, dtype=view.dtype, device="cpu")


def _index_select(func: Operation, view: Tensor, dim: int, index: Tensor) -> object:
    (index,) = read_all([index])
    is_plain = isinstance(view, StoredTensor) and -view.ndim <= dim < view.ndim and index.ndim < 2
    # torch refuses other positions, which an index supports.
    if not is_plain or index.dtype not in _POSITIONS or (index.numel() and int(index.min()) < 0):
        return _compute(func, view, dim, index)
    read: Any = torch.ops.aten.index.Tensor
    return _index(read, view, [*[None] * (dim % view.ndim), index.reshape(-1)])


_POSITIONS = frozenset({torch.int32, torch.int64})


def _clone(func: Operation, view: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    read: Tensor = read_all([view])[0]
    if memory_format is None or memory_format is torch.preserve_format:
        return read
    return read.contiguous(memory_format=memory_format)


def _refuse(func: Operation, *args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError(
        f"a stored tensor cannot change its shape or memory in place ({func._schema.name}); clone() reads it into memory"
    )


#: Operations that write random numbers without reading what they overwrite.
_RANDOM = frozenset(
    f"aten::{name}_"
    for name in (
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "normal",
        "random",
        "uniform",
    )
)

_NEW = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")

#: The operations that do not follow from the schema: what they read or write is less than all of their operands.
_OPERATIONS: dict[str, Callable[..., object]] = {
    "aten::index": _index,
    "aten::index_select": _index_select,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::index_fill_": _fill_positions,
    "aten::masked_fill_": _fill_mask,
    "aten::copy_": _copy,
    "aten::fill_": _fill,
    "aten::zero_": _fill,
    "aten::clone": _clone,
    "aten::_foreach_copy_": _copy_each,
    "aten::_foreach_zero_": _zero_each,
    "aten::detach_": lambda func, view: view,
    "aten::is_pinned": lambda func, view, device=None: False,
    "aten::is_same_size": lambda func, view, other: view.shape == other.shape,
    **dict.fromkeys((f"aten::{name}_like" for name in _NEW), _make_like),
    **dict.fromkeys((f"aten::new_{name}" for name in (*_NEW, "empty_strided")), _make_like),
    **dict.fromkeys(("aten::set_", "aten::resize_", "aten::resize_as_"), _refuse),
}


def _choose(func: Operation) -> Callable[..., object]:
    """Return what runs an operation: an entry of the table, or what the aliases in its schema say."""
    schema = func._schema
    if schema.name in _OPERATIONS:
        return _OPERATIONS[schema.name]
    if torch.Tag.inplace_view in func.tags:
        return _refuse
    if any(item.alias_info is not None and item.alias_info.is_write for item in schema.arguments):
        return _modify
    return _compute if all(item.alias_info is None for item in schema.returns) else _view


class Converted(RefusingSource):
    """Source of a view with another dtype, or a conjugate view: it reads another stored tensor, and cannot be written."""

    def __init__(
        self, view: StoredTensor, func: Operation, arguments: Sequence[object], twin: Tensor
    ) -> None:
        self.view, self.func, self.arguments = view, func, arguments
        self.shape, self.dtype = twin.shape, twin.dtype
        self.refusal = (
            f"cannot write to a stored tensor through the view {func}; write to the stored tensor itself"
        )

    def read(self, index: SourceIndex) -> Tensor:
        """Read the whole view, convert it, and index the result."""
        whole = self.func(self.view.clone(), *self.arguments)
        copy: Tensor = whole.resolve_conj().resolve_neg()[index].cpu().clone()
        return copy

    def flush(self) -> None:
        """Flush the store."""
        self.view.source.flush()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle the view {self.func} of a stored tensor; clone() it first")


def _refuse_memory(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"a stored tensor has no memory, so {name} is not possible: its elements are in a "
            f"{type(getattr(self, 'source', self)).__name__}; clone() reads them into memory"
        )

    return refuse


def _in_memory(method: Callable[..., ResultT]) -> Callable[..., ResultT]:
    return lambda self, *args, **kwargs: method(*as_memory([self, *args]), **kwargs)


def _change_in_memory(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(self: Tensor, *args: Tensor) -> Tensor:
        changed = method(*as_memory([self, *args]))
        return self.copy_(changed) if isinstance(self, StoredTensor) else changed

    return call


def _get_item(self: Tensor, index: object) -> Tensor:
    """Index a tensor; take rows of mapped memory directly."""
    with without_torch_function():
        if type(index) is Tensor and index.ndim == 1 and index.dtype is torch.int64:
            if isinstance(self, StoredTensor) and not self.requires_grad:
                mapped = _find_mapped(self)
                # index_select is faster, but supports no negative positions, and its errors do not name the position.
                with contextlib.suppress(IndexError, RuntimeError):
                    if mapped is not None:
                        return _to_device(self, mapped.index_select(0, index))
        return Tensor.__getitem__(self, index)  # type: ignore[index]


def _to(self: Any, *args: object, **kwargs: object) -> Tensor:
    """Read if a device is given, even if it is the same one: to() with a device means its memory."""
    given = [*args[:1], kwargs.get("device"), kwargs.get("other")]
    if any(isinstance(item, (torch.device, str, int, Tensor)) for item in given):
        if torch.device("meta") in [
            torch.device(item) for item in given if isinstance(item, (torch.device, str))
        ]:
            twin: Tensor = self._twin.to(*args, **kwargs)
            return twin
        self, *rest = as_memory([self, *args])
        moved: Tensor = self.to(*rest, **kwargs)
        return moved
    with without_torch_function():
        cast: Tensor = self.to(*args, **kwargs)
    return cast


def _with_read_arguments(method: Callable[..., ResultT]) -> Callable[..., ResultT]:
    def call(self: Tensor, *args: object, **kwargs: object) -> ResultT:
        args = tuple(as_memory(args))
        kwargs = dict(zip(kwargs, as_memory([*kwargs.values()])))
        with without_torch_function():
            return method(self, *args, **kwargs)

    return call


_DATA: Any = Tensor.data

#: Functions that torch implements without the dispatcher, or that return the tensor itself where memory is wanted.
_FUNCTIONS: dict[object, Callable[..., Any]] = {
    Tensor.__getitem__: _get_item,
    Tensor.to: _to,
    # torch reads the memory of the positions without an operation.
    **{method: _with_read_arguments(method) for method in (torch.tensor_split, Tensor.tensor_split)},
    **{
        method: _in_memory(method)
        for method in (
            Tensor.cpu,
            Tensor.pin_memory,
            Tensor.numpy,
            Tensor.tolist,
            Tensor.__array__,
            Tensor.__dlpack__,
        )
    },
    **{method: _change_in_memory(method) for method in (Tensor.apply_, Tensor.map_, Tensor.map2_)},
    Tensor.is_shared: lambda self: False,
    _DATA.__set__: _refuse_memory("an assignment to its data"),
    **{
        getattr(Tensor, name): _refuse_memory(f"{name}()")
        for name in ("data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_")
    },
}
