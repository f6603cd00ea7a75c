"""Read the parameters of a module into a collection with ``from_module``, and write them with ``to_module``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.kernels import PLAIN
from .._torch.lazy_parameters import WITHOUT_SHAPE, stack_without_shapes, take_member
from .._torch.private import functorch_level
from .._tree.defaults import show_path, type_error
from .._tree.keys import unravel_key_to_tuple
from .._tree.node import FACTORIES, LEAF_KINDS, Child, Core, make_dense
from .._tree.roles import (
    as_buffer,
    is_buffer,
    is_differentiable,
    is_parameter,
    is_persistent,
    is_registered,
    mark_buffer,
    unwrap_parameter,
)
from .._writes.check import check_copied, describe_leaf
from .._writes.run import Transaction
from ..errors import KeyPathError, StructureError
from .locking import undo_on_exit
from .shape import same_memory

#: One write into a module: dict of slots, key, new leaf or value, old content, and role of the slot: "p" parameter, "b" buffer,
#: "B" buffer of a collection (recognised by its mark), "" any. With the key None, it is one of many parameters, as two dicts.
Move = tuple[dict[str, Any], str | None, Any, Any, str]
#: A parameter that becomes a plain attribute or the reverse: the module's ``_parameters``, its ``__dict__``, key, old
#: content, and True if the parameter becomes an attribute.
Home = tuple[dict[str, Any], dict[str, Any], str, Tensor, bool]
#: The parameters, buffers and submodules of a module; of a collection, the same dict three times.
Slots = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
Path = tuple[str, ...]

_NO_DIMS = torch.Size()
_PARAMETER = frozenset({nn.Parameter})


def _open_level(owner: nn.Module | Core) -> tuple[Slots, Core]:
    """Return the slots of a module or collection, and an empty node for their old content; a value node is returned unchanged."""
    if not isinstance(owner, Core):
        return (owner._parameters, owner._buffers, owner._modules), make_dense({}, _NO_DIMS)
    entries: Any = owner._inner()._children()
    if owner._is_value:
        below = owner
    else:
        below = make_dense({}, _NO_DIMS) if owner._members_and_dim() is not None else owner._with_children({})
    return (entries, entries, entries), below


def _plain(leaf: Tensor) -> Tensor:
    """Convert a leaf to a plain ``Tensor`` that passes gradients to it."""
    if type(leaf) in PLAIN or torch.compiler.is_compiling():
        return leaf
    with torch.enable_grad():
        return leaf.as_subclass(Tensor)


def _swap_in(slots: list[Home], undo: bool = False) -> None:
    """Turn each listed parameter into a plain attribute, or back; ``undo`` reverses this."""
    for parameters, attributes, key, held, lowers in slots:
        if lowers is not undo:
            parameters.pop(key, None)  # nn.Module would find a None there before the attribute
            attributes[key] = held
        else:
            attributes.pop(key, None)
            parameters[key] = held


def _run_to_end(undo: Callable[[], object]) -> None:
    """Call ``undo``; call it again if Ctrl-C interrupts it, so that the module is never half restored."""
    try:
        undo()
    except (KeyboardInterrupt, SystemExit):
        undo()
        raise


def _fit(value: Any, held: object, slot: str, wrap: bool, made: dict[object, Tensor]) -> object:
    """Convert a leaf to a slot's type; gradients still reach it. ``made`` caches results, so that tied leaves stay tied."""
    result = made.get((id(value), slot))
    if result is not None:
        return result
    if slot == "p":
        if not wrap or is_parameter(value) or (value.requires_grad and not is_buffer(value)):
            return value
        fitted = unwrap_parameter(value) if value.requires_grad else _make_parameter(value, held, made)
    elif slot and (is_parameter(value) or (slot == "B" and wrap and not is_buffer(value))):
        fitted = unwrap_parameter(value)
        if slot == "B" and not torch.compiler.is_compiling():
            mark_buffer(fitted, is_persistent(held))
    else:
        return value
    made[id(value), slot] = fitted
    return fitted


def _make_parameter(value: Tensor, held: Any, made: dict[object, Tensor]) -> Tensor:
    """Wrap a plain leaf that replaces a parameter in a parameter that shares its storage."""
    # .data of a tied parameter returns a new view at each read, so also match by memory.
    tied = made.get(id(held))
    if tied is not None and same_memory(tied, value):
        return tied
    trained = held.requires_grad and is_differentiable(value)
    made[id(held)] = fitted = nn.Parameter(value.detach(), requires_grad=trained)
    return fitted


def from_module(
    module: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> object:
    """Return the parameters and buffers of a module, with one nested collection per submodule.

    Args:
        module: any module; the leaves are its tensors, not copies. Its buffers are marked: each becomes an instance
            of :class:`Buffer`, which a :class:`TensorDictParams` of the result keeps as a buffer.
        as_module: return a :class:`TensorDictParams`.
        lock: lock the result.
        use_state_dict: read the entries of ``module.state_dict()``, so that its hooks run.
        filter_empty: leave out submodules without parameters and buffers.

    Returns:
        A TensorDict of empty batch size (or a TensorDictParams around one).

    >>> from_module(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    TensorDict(batch_size=[], fields={0: {weight: f32[3,2], bias: f32[3]}})
    """
    return wrap_and_lock(read_entries(module, as_module, use_state_dict, filter_empty), as_module, lock)


def read_entries(module: nn.Module, as_module: bool, use_state_dict: bool, filter_empty: bool = True) -> Core:
    """Read the parameters and buffers of a module, or its state dict, into a new collection."""
    _check_module("from_module", module)
    if not use_state_dict:
        taken: Core = _copy_slots(module, filter_empty)
        return taken
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    state = module.state_dict(keep_vars=as_module)
    for name, leaf in state.items():
        if name in buffers and not is_parameter(leaf) and not torch.compiler.is_compiling():
            mark_buffer(leaf)
    return _unflatten_state(state)


def _check_module(operation: str, module: object, wanted: str = "a module") -> None:
    if not isinstance(module, nn.Module):
        hint = "; from_modules(*modules) takes several" if isinstance(module, (list, tuple)) else ""
        raise type_error(operation, module, wanted, hint)


def _unflatten_state(state: dict[str, object]) -> Core:
    result = make_dense({}, torch.Size())
    for key, value in state.items():
        result._set_path(tuple(key.split(".")), value)
    return result


def wrap_and_lock(result: Core, as_module: bool, lock: bool) -> Core:
    """Wrap what was read from a module as parameters, and lock it, if the caller needs that."""
    if as_module:
        result = FACTORIES.parameters(result)
    return result.lock_() if lock else result


def _copy_slots(root: nn.Module, filter_empty: bool) -> Any:
    if isinstance(root, Core):
        return root._tensordict
    size = torch.Size()
    top = _list_tensors(root)
    todo: list[tuple[nn.Module, dict[str, Any], tuple[nn.Module, ...]]] = [(root, top, ())]
    levels: list[tuple[dict[str, Any], str]] = []
    # By hand: the row `from_module` of benchmarks/ops.py.
    while todo:
        module, entries, above = todo.pop()
        if module in above:
            raise StructureError(f"the module {type(module).__name__} contains itself")
        for key, child in module._modules.items():
            if child is None:
                continue
            levels.append((entries, key))
            if isinstance(child, Core):
                entries[key] = child._tensordict
                continue
            below = _list_tensors(child)
            entries[key] = make_dense(below, size)
            if child._modules:
                todo.append((child, below, (*above, module)))
    if filter_empty:
        # Parents were listed before their children, so the reverse order empties children first.
        for entries, key in reversed(levels):
            if not entries[key]._children():
                del entries[key]
    return make_dense(top, size)


def _is_sharded(module: object) -> bool:
    """Return True if ``fully_shard`` of torch.distributed.fsdp was applied to a module. Does not import fsdp."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    sharded = getattr(fsdp, "FSDPModule", None)  # FSDPModule is public since torch 2.6
    return hasattr(type(module), "reshard") if sharded is None else isinstance(module, sharded)


def _mark_buffers(module: Any) -> None:
    """Mark the buffers of a module as buffers, except in a graph, which cannot hold marks."""
    if not module._buffers or torch.compiler.is_compiling():
        return
    for key, leaf in module._buffers.items():
        persistent = key not in module._non_persistent_buffers_set
        marked = leaf is None or is_parameter(leaf) or (is_buffer(leaf) and leaf.persistent is persistent)
        if not marked:
            mark_buffer(leaf, persistent)


def _list_tensors(module: Any) -> dict[str, Child]:
    if _is_sharded(module):
        # Between forward and backward a module may hold unsharded parameters, whose memory FSDP frees later.
        module.reshard()
    _mark_buffers(module)
    tensors: dict[str, Child] = {**module._parameters, **module._buffers}
    if not PLAIN.issuperset(map(type, tensors.values())):
        tensors = {key: value for key, value in tensors.items() if value is not None}
    return tensors


def from_modules(
    *modules: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    lazy_stack: bool = False,
    expand_identical: bool = False,
) -> Any:
    """Stack the parameters of modules of one architecture, for an ensemble under ``vmap``.

    If all modules have parameters without a shape, as those of ``nn.LazyLinear``, the first call of a module under ``vmap``
    with the result gives them a shape and initialises those of each module.

    Args:
        *modules: at least one module.
        as_module: return a :class:`TensorDictParams`.
        lock: lock the result.
        use_state_dict: as in :func:`from_module`.
        lazy_stack: return a lazy stack of the modules' own tensors, without copies.
        expand_identical: expand a tensor that all modules share instead of copying it.

    Raises:
        StructureError: the modules' parameters differ in names or shapes.

    >>> from_modules(nn.Linear(2, 3), nn.Linear(2, 3))
    TensorDict(batch_size=[2], fields={weight: f32[3,2], bias: f32[3]})
    """
    result = stack_modules(modules, as_module, use_state_dict, lazy_stack, expand_identical)
    return wrap_and_lock(result, as_module, lock)


def stack_modules(
    modules: tuple[nn.Module, ...],
    as_module: bool,
    use_state_dict: bool,
    lazy_stack: bool,
    expand_identical: bool,
) -> Core:
    """Read the parameters and buffers of modules, and stack them."""
    if not modules:
        raise StructureError("from_modules() needs at least one module")
    for module in modules:
        _check_module("from_modules", module, "modules, one by one")
    items = [read_entries(module, as_module, use_state_dict) for module in modules]
    return items[0]._stack_lazily(items, 0) if lazy_stack else _stack_parameters(items, expand_identical)


def _stack_parameters(items: list[Core], expand_identical: bool) -> Core:
    columns: list[list[Tensor]] = []
    for item in items:
        column: list[Tensor] = []
        items[0]._flatten_other(item, column)
        columns.append(column)
    stacked: list[Tensor] = []
    for row in zip(*columns):
        first = row[0]
        without_shape = stack_without_shapes(row, partial(describe_leaf, items[0], first))
        if without_shape is not None:
            stacked.append(without_shape)
            continue
        if expand_identical and all(leaf is first for leaf in row):
            stacked.append(first.expand(len(row), *first.shape))
            continue
        try:
            value = torch.stack([leaf.detach() if isinstance(leaf, nn.Parameter) else leaf for leaf in row])
        except (RuntimeError, ValueError) as error:
            raise StructureError(
                f"cannot stack the modules: {describe_leaf(items[0], first)}: {error}"
            ) from error
        if isinstance(first, nn.Parameter):
            value = nn.Parameter(value, requires_grad=first.requires_grad)
        elif is_buffer(first):
            value = as_buffer(value, is_persistent(first))
        stacked.append(value)
    result = items[0]._unflatten(stacked)
    result._change_batch_size(torch.Size((len(items),)))
    return result


def write_to_module(
    node: Core,
    module: nn.Module,
    inplace: bool | None,
    return_swap: bool,
    swap_dest: Core | None,
    use_state_dict: bool,
    non_blocking: bool,
    preserve_module_state: bool,
) -> object:
    """Replace the parameters and buffers of a module by the leaves of a collection; see ``to_module``."""
    if not isinstance(module, (nn.Module, Core)):
        raise type_error("to_module", module, "a module")
    if use_state_dict:
        if inplace is not None:
            raise StructureError(
                "inplace has no meaning with use_state_dict=True: load_state_dict copies in place"
            )
        return _load_state(node, module, swap_dest)
    eager = not torch.compiler.is_compiling() and functorch_level() is None
    pairing = Pairing(bool(inplace), eager and not preserve_module_state, non_blocking)
    swap = pairing.read(node if eager or not WITHOUT_SHAPE else node._map(take_member), module)
    try:
        pairing.run(eager and preserve_module_state)
        if not return_swap:
            return None
        if swap_dest is not None:
            swap = swap_dest.update(swap)
    except BaseException:
        pairing.undo()
        raise
    return undo_on_exit(swap, lambda _: _run_to_end(pairing.undo))


def _load_state(node: Core, module: nn.Module, swap_dest: Core | None) -> object:
    """Load the leaves of a collection with ``module.load_state_dict``; return the old state."""
    state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    flat = {".".join(unravel_key_to_tuple(key)): leaf for key, leaf in node.items(True, True)}
    swap = _unflatten_state(state)
    try:
        module.load_state_dict(flat)
        if swap_dest is not None:
            swap = swap_dest.update(swap)
    except BaseException:
        # load_state_dict() copies every entry that fits before it raises.
        module.load_state_dict(state)
        raise
    return undo_on_exit(swap, lambda _: _run_to_end(partial(module.load_state_dict, state)))


class Pairing:
    """The leaves of a collection and the slots of a module that they are written to.

    Attributes:
        plain: a plain leaf replaces a parameter as a plain attribute.
        writes: the copies into the module's tensors; None to replace the contents of the slots.
    """

    __slots__ = ("homes", "moves", "orders", "plain", "todo", "writes")

    def __init__(self, copy: bool, plain: bool, non_blocking: bool) -> None:
        self.plain = plain
        self.writes = Transaction(non_blocking) if copy else None
        self.moves: list[Move] = []
        self.homes: list[Home] = []
        #: The parameters of each module some of whose parameters become attributes, and a copy of that dict.
        self.orders: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.todo: list[tuple[Core, Any, Slots, Any, Path]] = []

    def read(self, node: Any, module: nn.Module) -> Core:
        """Check that the module has a slot for each leaf. Return a collection of old contents, cloned if they are copied."""
        slots, _ = _open_level(module)
        swap = make_dense({}, _NO_DIMS)
        self.todo.append((node, module, slots, swap, ()))
        # Exchange the parameters of a module with one call: the row `to_module` of benchmarks/ops.py.
        replaces = self.writes is None and not self.plain and not torch.compiler.is_compiling()
        while self.todo:
            node, owner, slots, old, path = self.todo.pop()
            if _is_sharded(owner):
                raise StructureError(
                    f"{type(owner).__name__} is under fully_shard, which keeps its parameters elsewhere too: "
                    "call to_module() with use_state_dict=True"
                )
            children = dict(node._children())
            if replaces and slots[0] is not slots[2]:
                children = self._add_parameters(slots[0], children, old._children())
            for key, child in children.items():
                if type(child) in LEAF_KINDS:
                    child = _plain(child._leaves()[0])
                if isinstance(child, Tensor):
                    old._set_child(key, self._add_leaf(owner, slots, key, child, path))
                else:
                    self._add_node(owner, slots[2], key, child, old, path)
        return swap

    def _add_parameters(
        self, slots: dict[str, object], children: dict[str, object], old: dict[str, Any]
    ) -> dict[str, object]:
        """Add the writes of the plain leaves that replace plain parameters. Return the other entries."""
        leaves, rest = children, {}
        held = dict(zip(children, map(slots.get, children)))
        if not (
            PLAIN.issuperset(map(type, children.values())) and PLAIN.issuperset(map(type, held.values()))
        ):
            leaves = {}
            for key, child in children.items():
                if type(child) in PLAIN and type(held[key]) in PLAIN:
                    leaves[key] = child
                else:
                    rest[key] = child
                    del held[key]
        self.moves.append((slots, None, leaves, held, "p"))
        old.update(held)
        return rest

    def _add_leaf(self, owner: Any, dicts: Slots, key: str, leaf: Tensor, path: Path) -> Tensor:
        """Add the write of a leaf. Return the old content of its slot."""
        parameters, buffers, modules = dicts
        collection = modules is parameters
        slots, slot = (parameters, "p") if key in parameters else (buffers, "b")
        held = slots.get(key)
        if not collection and (held is None or (self.plain and slots is parameters)):
            slots, held = self._swap(owner, key, leaf)
            slot = "p" if slots is parameters else ""
        # The entry of a collection may be a node instead of a tensor.
        if held is None or (collection and not isinstance(held, Tensor)):
            raise KeyPathError(
                f"{show_path((*path, key))}: {type(owner).__name__} has no parameter or buffer {key!r}"
            )
        if collection:
            # A tensor without the mark replaced a parameter, as an attribute of a module does.
            slot = "p" if is_registered(held) else "B" if is_buffer(held) else ""
        if self.writes is not None:
            with torch.no_grad():
                check_copied(held, (*path, key), leaf)
            self.writes.copy(held, leaf, (*path, key))
            held = held.detach().clone()
        self.moves.append((slots, key, leaf, held, slot))
        old: Tensor = held
        return old

    def _swap(self, owner: nn.Module, key: str, leaf: Tensor) -> tuple[dict[str, Any], Tensor | None]:
        """Return the dict that takes a leaf in place of a parameter (``_parameters`` or ``__dict__``), and its old content."""
        parameters, attributes = owner._parameters, owner.__dict__
        held = parameters.get(key)
        lowered = held is None  # an earlier call may have replaced the parameter by a plain attribute
        if lowered:
            held = attributes.get(key)
        if not isinstance(held, Tensor):
            return parameters, None
        copies = self.writes is not None
        lowers = lowered if copies else (lowered or self.plain) and not isinstance(leaf, nn.Parameter)
        if lowers is not lowered:
            self.homes.append((parameters, attributes, key, held, lowers))
            if not self.orders or self.orders[-1][0] is not parameters:
                self.orders.append((parameters, dict(parameters)))
        return attributes if lowers else parameters, held

    def _add_node(
        self, owner: object, modules: dict[str, Any], key: str, node: Core, old: Core, path: Path
    ) -> None:
        """Add the pair of a nested collection and a submodule, or the write of a value node."""
        inner = modules.get(key)
        is_level = not node._is_value
        found = None if inner is None or isinstance(inner, Tensor) else _open_level(inner)
        if found is not None and found[1]._is_value is not is_level:
            slots, below = found
            old._set_child(key, below)
            if is_level:
                self.todo.append((node, inner, slots, below, (*path, key)))
                return
            self.moves.append((modules, key, node, inner, ""))
            if self.writes is not None:
                self.writes.change(modules.__setitem__, key, node)
        elif not is_level or node._children():
            what = "submodule" if is_level else "value"
            raise KeyPathError(f"{show_path((*path, key))}: {type(owner).__name__} has no {what} {key!r}")

    def run(self, wrap: bool) -> None:
        """Run the writes. ``wrap``: a plain leaf that replaces a parameter becomes one."""
        if self.writes is not None:
            with torch.no_grad():
                self.writes.commit()
            return
        _swap_in(self.homes)
        made: dict[object, Tensor] = {}
        for slots, key, value, held, slot in self.moves:
            if key is not None:
                slots[key] = _fit(value, held, slot, wrap, made)
            elif not wrap or _PARAMETER.issuperset(map(type, value.values())):
                slots.update(value)
            else:
                slots.update({name: _fit(leaf, held[name], slot, wrap, made) for name, leaf in value.items()})

    def undo(self) -> None:
        """Restore the old contents, in reverse order: a slot of a shared submodule may be written twice."""
        for slots, key, _, held, _ in reversed(self.moves):
            if key is None:
                slots.update(held)
            elif self.writes is None or not isinstance(held, Tensor):
                slots[key] = held
            else:
                slots[key].detach().copy_(held)
        _swap_in(self.homes, undo=True)
        for parameters, before in self.orders:
            for key, held in before.items():
                parameters[key] = parameters.pop(key, held)
