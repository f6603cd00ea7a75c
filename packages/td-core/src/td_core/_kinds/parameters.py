"""TensorDictParams: a collection whose leaves are the parameters and buffers of an ``nn.Module``.

Only the collection stores tensors: ``_parameters`` and ``_buffers`` of the module are views computed from it, so a
write to any node appears in ``parameters()`` and ``state_dict()`` at once.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from .._functions.device_moves import take_over_leaves
from .._functions.shape import Replacement
from .._functions.structure import restore_on_error
from .._methods.collection import TensorDictBase
from .._plans.elements import JoinPlan
from .._transforms.pytree import register, register_with_subclasses
from .._tree.coerce import build_nested
from .._tree.defaults import check_mapping, has_lazy_stack, show_path
from .._tree.devices import fix_device_metadata
from .._tree.dim_names import set_batch_size
from .._tree.keys import is_key, unravel_key_to_tuple
from .._tree.locks import check_unlocked
from .._tree.node import (
    FACTORIES,
    Child,
    Core,
    CoreT,
    EntrySchema,
    concurrent_change_error,
    copy_leaf,
)
from .._tree.roles import Buffer as Buffer  # older pickles import Buffer from this module
from .._tree.roles import adopt, in_role, is_persistent, is_registered, is_settled, role
from .._tree.walks import expand, has_entries
from ..errors import StructureError
from ..typing import NestedKey
from .parameters_saved import iter_slots
from .wrapper import Wrapper

if TYPE_CHECKING:
    from typing_extensions import Self

MethodT = TypeVar("MethodT", bound=Callable[..., object])


#: Metadata key under which nested value nodes are saved: torch passes only the top-level metadata to a submodule.
_VALUES = "_values"


class _Slots(MutableMapping[str, Any]):
    """Mutable mapping from dotted names to the parameters (or buffers) of a collection; writes reach the collection.

    Lookup walks the key path without listing all leaves, since a module reads names one by one.
    """

    __slots__ = ("_parameters", "_root")

    def __init__(self, root: Core, parameters: bool) -> None:
        self._root = root
        self._parameters = parameters

    def items(self) -> Any:
        """Return (name, leaf) pairs as a list, so that a module may write while it iterates."""
        entries = self._root.items(include_nested=True, leaves_only=True)
        return [
            (".".join(key) if isinstance(key, tuple) else key, leaf)
            for key, leaf in entries
            if is_registered(leaf) is self._parameters
        ]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self.items()])

    def __len__(self) -> int:
        return len(self.items())

    def __getitem__(self, name: str) -> Any:
        node, key = _find_slot(self._root, name)
        leaf = node._children()[key]
        if is_registered(leaf) is not self._parameters:
            raise KeyError(name)
        return leaf

    def __setitem__(self, name: str, value: Tensor) -> None:
        node, key = _find_slot(self._root, name)
        node._set_child(key, value)

    def __delitem__(self, name: str) -> None:
        node, key = _find_slot(self._root, name)
        check_unlocked(node, f"remove key {key!r}")
        node._del_child(key)


def _find_slot(root: Core, name: str) -> tuple[Core, str]:
    """Return the node and key of the leaf with a dotted name; keys may contain dots."""

    def below(item: tuple[Core, str]) -> Iterator[tuple[Core, str]]:
        node, rest = item
        for dot in (i for i, letter in enumerate(rest) if letter == "."):
            if isinstance(inner := node._children().get(rest[:dot]), Core):
                yield inner, rest[dot + 1 :]

    for node, rest in expand([(root, name)], below):
        if isinstance(node._children().get(rest), Tensor):
            return node, rest
    raise KeyError(name)


def _make_readonly(read: Callable[[TensorDictParams], object]) -> Any:
    """Return a property whose setter ignores assignments of ``nn.Module.__init__``: only the collection stores tensors."""
    return property(read, lambda self, value: None)


def _disable_grad(method: MethodT) -> MethodT:
    """Wrap an in-place method in ``no_grad``, so that it can write parameters as an optimizer does."""

    @functools.wraps(method)
    def wrapper(self: object, *args: object, **kwargs: object) -> object:
        with torch.no_grad():
            return method(self, *args, **kwargs)

    wrapper.__module__, wrapper.__qualname__ = __name__, f"TensorDictParams.{method.__name__}"
    return cast("MethodT", wrapper)


class FixedSchema(EntrySchema):
    """The schema of parameters: as in a module, loading a state dict adds no entries."""

    __slots__ = ()

    can_grow = False


class TensorDictParams(Wrapper, TensorDictBase, nn.Module):  # type: ignore[misc]  # both have state_dict and zero_grad
    """An ``nn.Module`` whose parameters and buffers are the leaves of a collection.

    Floating-point leaves become ``nn.Parameter`` unless they are buffers; all other leaves become buffers. A plain tensor
    that replaces a parameter or a :class:`Buffer` takes its role. With ``no_convert``, and in the parameters of
    ``from_module(as_module=True)``, a plain tensor that replaces a parameter becomes a buffer, which does not train.
    Operations return plain collections, except ``clone``, ``to`` and similar methods, which return parameters.

    Args:
        parameters: a collection or mapping of tensors; it is not changed.
        no_convert: create no parameters: parameters stay parameters, all other leaves become buffers, also those that are set
            later. A tensor that requires grad stays what it is if it replaces a parameter.
        lock: lock the collection.
        **kwargs: entries by keyword, instead of ``parameters``.

    Raises:
        StructureError: the collection contains a lazy stack, whose entries are created when they are read, so that an
            optimizer would never see them; or a leaf that would become a parameter has a ``grad_fn``.

    >>> td = TensorDict({"w": torch.zeros(2), "n": {"b": torch.ones(1)}})
    >>> params = TensorDictParams(td)
    >>> [name for name, _ in params.named_parameters()]
    ['w', 'n.b']
    """

    # This is a slot, since torch.export would find a pytree in ``__dict__``, copy it, and store the copy.
    __slots__ = ("_tensordict",)

    _schema = FixedSchema()

    _no_convert: object
    _get_hooks: list[Callable[..., object]]

    def __init__(
        self,
        parameters: Core | Mapping[Any, object] | None = None,
        *,
        no_convert: object = False,
        lock: bool = False,
        **kwargs: object,
    ) -> None:
        super().__init__()  # skips nn.Module.__init__, which torch.compile cannot trace
        if parameters is None:
            parameters = kwargs
        elif kwargs:
            raise TypeError(
                f"give the parameters as a collection or as keywords, not both; got keywords {list(kwargs)}"
            )
        if isinstance(parameters, TensorDictParams):
            parameters = parameters._tensordict
        elif not isinstance(parameters, Core):
            check_mapping("TensorDictParams", parameters)
            parameters = build_nested(parameters, torch.Size(), None)
        set_attribute = object.__setattr__
        set_attribute(self, "_no_convert", no_convert)
        set_attribute(self, "_get_hooks", [])
        _refuse_lazy_stacks(parameters)
        set_attribute(self, "_tensordict", _adopt_entry(parameters, None, not no_convert))
        if lock:
            self.lock_()

    @classmethod
    def _wrap_dense(cls, result: Any) -> object:
        made = isinstance(result, TensorDictBase) and has_entries(result) and not isinstance(result, cls)
        return cls(result) if made else result

    @classmethod
    def _of_module(cls, taken: Core) -> TensorDictParams:
        return cls(taken, no_convert=True)

    _parameters = _make_readonly(lambda self: _Slots(self._tensordict, True))
    _buffers = _make_readonly(lambda self: _Slots(self._tensordict, False))
    _non_persistent_buffers_set = _make_readonly(
        lambda self: {name for name, leaf in self._buffers.items() if not is_persistent(leaf)}
    )

    def __getattr__(self, name: str) -> Any:
        """Return an entry as an attribute, as modules do; a nested node is returned as a module of its parameters.

        Methods of packages that are not installed raise an error that names the package.
        """
        for base in type(self).__mro__:
            if name in base.__dict__:
                # The property itself raised AttributeError; evaluate it again to show its error.
                return base.__dict__[name].__get__(self, type(self))
        inner = getattr(self, "_tensordict", None)
        if inner is not None and name in inner._children():
            result = self.get(name)
            return self._from_inner(result) if isinstance(result, TensorDictBase) else result
        if inner is not None and "." in name:  # nn.Module reads parameters by dotted name
            with suppress(KeyError):
                node, key = _find_slot(inner, name)
                return node._children()[key]
        return nn.Module.__getattr__(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a plain attribute, or replace a parameter as ``fully_shard`` does; entries are set by key.

        Raises:
            TypeError: the name is a key, or the value is a parameter or module, which would not be registered.
        """
        if isinstance(value, nn.Parameter) and name in self._parameters:
            self._parameters[name] = value
            return
        inner = getattr(self, "_tensordict", None)
        if isinstance(value, (nn.Parameter, nn.Module)) or (inner is not None and name in inner._children()):
            self.register_parameter(name)
        object.__setattr__(self, name, value)

    def register_parameter(self, name: str, *args: object, **kwargs: object) -> None:
        """Raise TypeError: entries are set by key."""
        raise TypeError(
            f"set {name!r} by key: params[{name!r}] = ..., a Buffer where it is to be one; what computes a parameter anew at "
            "each call, as pruning and parametrizations do, needs it in a module of its own"
        )

    register_buffer = add_module = register_parameter

    def __repr__(self) -> str:
        """Return the class name around the ``repr`` of the collection."""
        return f"{type(self).__name__}(params={self._tensordict!r})"

    def _inner(self) -> Core:
        return self._tensordict._inner()

    def __getitem__(self, index: object) -> Any:
        """Return an entry by key, or index the batch dims, which returns a plain collection."""
        result = super().__getitem__(index)
        return self._run_hooks(result) if self._get_hooks and is_key(index) else result

    def get(self, key: NestedKey, *args: object, **kwargs: object) -> Any:
        """Return the entry ``key``, or a default if it is missing; see :meth:`TensorCollection.get`."""
        result = super().get(key, *args, **kwargs)
        return self._run_hooks(result) if self._get_hooks and isinstance(result, (Tensor, Core)) else result

    def values(self, *args: Any, **kwargs: Any) -> Any:
        """Return a live view of the entries; see :meth:`TensorCollection.values`."""
        values = super().values(*args, **kwargs)
        return map(self._run_hooks, values) if self._get_hooks else values

    def items(self, *args: Any, **kwargs: Any) -> Any:
        """Return a live view of (key, entry) pairs; see :meth:`TensorCollection.items`."""
        items = super().items(*args, **kwargs)
        return ((key, self._run_hooks(value)) for key, value in items) if self._get_hooks else items

    def _run_hooks(self, value: object) -> object:
        for hook in self._get_hooks:
            provided = hook(self, value)
            value = value if provided is None else provided
        return value

    def _set_child(self, key: str, value: Child) -> None:
        self._tensordict._set_child(key, self._adopt(key, value))

    def _add_child(self, key: str, value: Core) -> Child:
        adopted: Any = self._adopt(key, value)
        return self._tensordict._add_child(key, adopted)

    def _get_writable(self, key: str) -> Child:
        result = self._tensordict._get_child(key)
        return (
            self._from_inner(result) if isinstance(result, TensorDictBase) and has_entries(result) else result
        )

    def _take_over(self, result: Core) -> list[Replacement]:
        # Nodes below are replaced, so that all leaves are converted to their roles.
        self._set_children(result._children())
        set_batch_size(self, result.batch_size)
        self._names = result._names
        return []

    def _adopt(self, key: str, value: Child) -> Child:
        if isinstance(value, Core):
            _refuse_lazy_stacks(value)
        held = self._tensordict._children().get(key)
        try:
            return _adopt_entry(value, held, not self._no_convert)
        except StructureError as error:
            raise StructureError(f"{show_path((key,))}: {error}") from None

    def _set_path(
        self, key: NestedKey, value: object, prefix: tuple[str, ...] = (), *, non_blocking: bool = False
    ) -> None:
        with self._adopt_on_exit() if len(unravel_key_to_tuple(key)) > 1 else nullcontext():
            super()._set_path(key, value, prefix, non_blocking=non_blocking)

    @contextmanager
    def _adopt_on_exit(self, keeps_roles: bool = False) -> Iterator[None]:
        """Convert the leaves that the block stores to their roles; undo all writes if one fails."""
        held = {path: leaf for path, _, leaf in iter_slots(self._tensordict)}
        with restore_on_error(self._tensordict):
            yield
            _refuse_lazy_stacks(self._tensordict)
            for path, node, leaf in iter_slots(self._tensordict):
                old = held.get(path)
                try:
                    kept = adopt(leaf, old, not self._no_convert or (keeps_roles and is_registered(old)))
                except StructureError as error:
                    raise StructureError(f"{show_path(path)}: {error}") from None
                if kept is not leaf:
                    node._set_child(path[-1], kept)

    def update(
        self,
        input_dict_or_td: Mapping[Any, object] | Core | None = None,
        clone: bool = False,
        inplace: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Store the entries of another collection or mapping; see :meth:`TensorCollection.update`."""
        # Copies of parameters become parameters, which must be autograd leaves; in-place writes follow autograd's rules.
        with (
            self._adopt_on_exit(),
            torch.set_grad_enabled(torch.is_grad_enabled() and (inplace or not clone)),
        ):
            super().update(input_dict_or_td, clone, inplace, **kwargs)
        return self

    def _shallow_copy(self) -> Self:
        return self._from_inner(self._tensordict._shallow_copy())

    @property
    def _copy_stored(self) -> Callable[[Tensor], Tensor]:
        return _cache_tied(copy_leaf)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Any:
        if not is_copying(fn):
            return super()._map(fn)
        # Copies of parameters are parameters, which must be autograd leaves.
        with torch.no_grad():
            return self._from_inner(self._tensordict._map(_cache_tied(fn)))

    _with_batch_size = Core._with_batch_size  # undoes the override of Wrapper: the result is parameters again

    def _join(self, items: Sequence[Core], plan: JoinPlan, path: tuple[str, ...] = ()) -> Any:
        plain = [item._tensordict if isinstance(item, TensorDictParams) else item for item in items]
        return plain[0]._join(plain, plan, path)

    def _stack_lazily(self, items: Sequence[Core], dim: int, source: tuple[Core, str] | None = None) -> Core:
        plain = [item._tensordict if isinstance(item, TensorDictParams) else item for item in items]
        return plain[0]._stack_lazily(plain, dim)

    set_ = _disable_grad(TensorDictBase.set_)
    set_at_ = _disable_grad(TensorDictBase.set_at_)
    update_ = _disable_grad(TensorDictBase.update_)
    update_at_ = _disable_grad(TensorDictBase.update_at_)
    copy_ = _disable_grad(TensorDictBase.copy_)
    fill_ = _disable_grad(TensorDictBase.fill_)
    zero_ = _disable_grad(TensorDictBase.zero_)
    apply_ = _disable_grad(TensorDictBase.apply_)

    def clone(self, recurse: bool = True, **kwargs: Any) -> Any:
        """Copy the parameters; with ``recurse=False`` return a new collection of the same parameters.

        >>> type(TensorDictParams(TensorDict({"w": torch.zeros(2)})).clone()).__name__
        'TensorDictParams'
        """
        return (
            self._map(functools.partial(copy_leaf, **kwargs)) if recurse else super().clone(False, **kwargs)
        )

    def to(self, *args: object, **kwargs: Any) -> Any:
        """Move or cast the parameters, as ``TensorDict.to``; tied parameters stay tied."""
        inner, old = self._tensordict, self._tensordict._leaves()
        moved = inner.to(*args, **kwargs)
        if moved is not inner:
            return self._rebuild_module(moved, old)
        if kwargs.get("inplace"):
            take_over_leaves(inner, self._rebuild_module(inner, old)._tensordict)
        return self

    def _rebuild_module(self, inner: Core, old: list[Tensor]) -> TensorDictParams:
        """Build a module from converted leaves, each in the role of its leaf in ``old``; tied leaves stay tied."""
        likes = iter(old)
        made: dict[object, Tensor] = {}

        def parameter(leaf: Tensor) -> Tensor:
            like = next(likes)
            place = (
                id(like),
                leaf.dtype,
                leaf.device,
            )  # a cast_filter may convert a tied leaf under one key only
            if place not in made:
                made[place] = _in_role_of(leaf, like)
            return made[place]

        try:
            return self._from_inner(inner._map(parameter))
        except StopIteration:
            raise concurrent_change_error(self) from None

    def _from_inner(self, inner: Core) -> Self:
        """Build a module of this class around a collection of parameters."""
        module = type(self)({}, no_convert=True)
        # Do not convert: tensors that temporarily replace parameters must stay.
        object.__setattr__(module, "_tensordict", inner)
        object.__setattr__(module, "_no_convert", self._no_convert)
        object.__setattr__(module, "_get_hooks", list(self._get_hooks))
        module.training = self.training
        return module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the parameters in place; ``nn.Module.to`` calls this."""
        with torch.no_grad():
            for leaf in self._tensordict._leaves():
                moved, grad = fn(leaf.data), leaf.grad
                try:
                    leaf.data = moved
                except RuntimeError:
                    # ``leaf.data`` cannot be set across the meta device; swap the tensors instead.
                    torch.utils.swap_tensors(leaf, _in_role_of(moved, leaf))
                if grad is not None:
                    leaf.grad = fn(grad)
        fix_device_metadata(self._tensordict)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Copy (with ``assign``: store) the leaves and values of this submodule from the state dict of a module."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        skipped = self._non_persistent_buffers_set
        held = (*self._parameters.items(), *self._buffers.items())
        leaves = {name: leaf for name, leaf in held if name not in skipped}
        for name, leaf in leaves.items():
            provided = state_dict.get(prefix + name)
            if provided is None:
                missing_keys.append(prefix + name)
            elif provided.shape != leaf.shape:
                error_msgs.append(
                    f"{prefix + name}: shape {tuple(provided.shape)} given, {tuple(leaf.shape)} expected"
                )
            elif local_metadata.get("assign_to_params_buffers"):
                node, key = _find_slot(self._tensordict, name)
                node._set_child(key, _in_role_of(provided, leaf))
            else:
                try:
                    with torch.no_grad():
                        leaf.copy_(provided)
                except RuntimeError as error:
                    error_msgs.append(f"{prefix + name}: {error}")
        if strict:
            known = {prefix + name for name in leaves}
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
        if provided := local_metadata.get(_VALUES):
            self._load_values(provided, prefix, unexpected_keys if strict else [], error_msgs)

    def _load_values(
        self, options: Mapping[str, Any], prefix: str, unexpected: list[str], errors: list[str]
    ) -> None:
        held = TensorDictBase.state_dict(self)._metadata  # type: ignore[attr-defined]
        unexpected += [prefix + name for name in options if name not in held]
        state: Any = OrderedDict()
        # A module can load values that were saved on any device.
        state._metadata = {name: {**meta, "device": None} for name, meta in options.items() if name in held}
        try:
            super().load_state_dict(state, strict=False)
        except RuntimeError as error:
            errors.append(f"{prefix.removesuffix('.')}: {error}")

    def state_dict(
        self, destination: object = None, prefix: str = "", keep_vars: bool = False, flatten: bool = True
    ) -> Any:
        """Return the leaves, without the buffers that are not persistent; see :meth:`TensorCollection.state_dict`."""
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        source = self
        if not all(map(is_persistent, self._tensordict._leaves())):
            entries = self._tensordict.items(include_nested=True, leaves_only=True)
            left_out = [key for key, leaf in entries if not is_persistent(leaf)]
            source = self._from_inner(self._tensordict.exclude(*left_out))
        state: Any = TensorDictBase.state_dict(source, destination, prefix, keep_vars, flatten)
        if destination is not None and flatten and hasattr(state, "_metadata"):
            levels, own = state._metadata, prefix.removesuffix(".")
            below = {name: meta for name, meta in levels.items() if name.startswith(prefix) and name != own}
            values = {name[len(prefix) :]: meta for name, meta in below.items() if "_non_tensor" in meta}
            if values:
                levels[own][_VALUES] = values
        for hook in self._state_dict_hooks.values():
            provided = hook(self, state, prefix, {})
            state = state if provided is None else provided
        return state

    def load_state_dict(
        self,
        state_dict: Any,
        strict: bool = True,
        assign: bool = False,
        from_flatten: bool | None = None,
    ) -> Self:
        """Copy a state dict into the leaves, in place; see :meth:`TensorCollection.load_state_dict`.

        With ``assign``, as in a module, parameters and buffers keep their roles, and frozen parameters stay frozen.
        """
        skipped = self._non_persistent_buffers_set
        if skipped and isinstance(state_dict, Mapping):
            held = self._buffers
            state_dict = copy.copy(state_dict)
            state_dict.update({name: held[name] for name in skipped if name not in state_dict})
        with self._adopt_on_exit(keeps_roles=True):
            super().load_state_dict(state_dict, strict, assign, from_flatten)
        return self

    def register_get_post_hook(self, hook: Callable[[TensorDictParams, Any], object]) -> None:
        """Register ``hook(params, value)``, called on every entry that is read; a result other than None replaces it.

        Hooks run for reads by key, as an attribute, and through :meth:`values` and :meth:`items`, but not inside operations.

        >>> params = TensorDictParams(TensorDict({"w": torch.zeros(2)}))
        >>> params.register_get_post_hook(lambda params, value: value + 1)
        >>> params["w"].tolist()
        [1.0, 1.0]
        """
        self._get_hooks.append(hook)


def _refuse_lazy_stacks(root: Core) -> None:
    if has_lazy_stack(root):
        raise StructureError(
            "the entries of a lazy stack are made when they are read, so they cannot be parameters of a module: "
            "stack its members densely, or make a TensorDictParams of each"
        )


def _adopt_entry(value: Child, held: Child | None, converts: bool) -> Child:
    """Convert a leaf or node for storage in place of ``held``; tied leaves stay tied."""
    if isinstance(value, Tensor):
        return adopt(value, held, converts)
    leaves = value._leaves()
    if not converts and all(map(is_settled, leaves)):
        return value
    places = {path: leaf for path, _, leaf in iter_slots(held)} if isinstance(held, Core) else {}
    made = {
        id(leaf): adopt(leaf, places.get(path), converts)
        for path, _, leaf in (iter_slots(value) if places else ())
        if path in places
    }

    def kept(leaf: Tensor) -> Tensor:
        if id(leaf) not in made:
            made[id(leaf)] = adopt(leaf, None, converts)
        return made[id(leaf)]

    return value._map(kept)


def is_copying(fn: Callable[..., object]) -> bool:
    """Return True if ``fn`` puts the elements of a leaf elsewhere, so that the result has the role of the leaf."""
    return getattr(fn, "func", fn) in (copy_leaf, _move_leaf)


def map_in_roles(root: CoreT, fn: Callable[[Tensor], Tensor]) -> CoreT:
    """Map the leaves of a tree to other memory, so that parameters remain parameters and buffers remain buffers."""
    return root._map(functools.partial(_move_leaf, fn))


def _move_leaf(fn: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return fn(leaf)


def _cache_tied(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a copy function so that tied leaves are copied once, each in its role; see :func:`is_copying`."""
    made: dict[int, Tensor] = {}

    def copy(leaf: Tensor) -> Tensor:
        if id(leaf) not in made:
            made[id(leaf)] = _in_role_of(fn(leaf), leaf)
        return made[id(leaf)]

    copy.func = copy_leaf  # type: ignore[attr-defined]
    return copy


def _in_role_of(leaf: Tensor, old: Tensor) -> Tensor:
    return in_role(leaf, role(old))


def _register_params(cls: Any) -> None:
    def unflatten(children: Iterable[Core], context: tuple[object, ...]) -> Core:
        # Return the plain collection: unflattened leaves are not the module's parameters.
        return next(iter(children))

    register(cls, lambda params: ([params._tensordict], ()), unflatten, lambda context: ("params",))


register_with_subclasses(TensorDictParams, _register_params)
FACTORIES.parameters = functools.partial(TensorDictParams, no_convert=True)
