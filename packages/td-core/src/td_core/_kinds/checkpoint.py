"""Checkpoints: a mapping with modules, optimizers, collections, tensors and values that is saved and loaded as one.

A checkpoint is saved as a node with its tensors and collections by name, and a treedef with their places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from .._encode.treedefs import Selecting, Tree, flatten_checkpoint, unflatten_checkpoint
from .._formats.locations import Location, as_location, show_location
from .._formats.object_locations import find_place
from .._formats.saving import list_shards, load_as_class, save_collection
from .._formats.serializers import SERIALIZERS, Serializer, list_options
from .._methods.collection import TensorCollection
from .._tree.defaults import show_path, type_error
from .._tree.node import Child, Core, Walked
from ..errors import CodecError, KeyMismatchError, StructureError, UnsupportedOperationError
from .parameters_saved import list_tied, tie_leaves
from .tensordict import TensorDict
from .wrapper import Wrapper

#: The objects whose state dict has the same keys in every state; others may have more of them later.
_FIXED = (nn.Module, LRScheduler, Core)

_Path = tuple[object, ...]


class Checkpoint(Wrapper):
    """A collection of the tensors of a checkpoint, with their places; results of operations are without them."""

    def __init__(self, entries: TensorCollection, treedef: object) -> None:
        self._tensordict = entries
        self.treedef = treedef

    def _set_child(self, key: str, value: Child) -> None:
        self._tensordict._set_child(key, value)

    def _unflatten(self, leaves: Sequence[Tensor], treedef: Walked = None) -> Checkpoint:
        return Checkpoint(self._tensordict._unflatten(leaves, treedef), self.treedef)

    def _shallow_copy(self) -> Checkpoint:
        return Checkpoint(self._tensordict._shallow_copy(), self.treedef)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Checkpoint:
        return Checkpoint(self._tensordict._map(fn), self.treedef)

    def to_tree(self) -> Tree:
        """Build the mapping that was saved, in memory."""
        # The leaves can be mapped from files, which must not change when an optimizer takes a step.
        entries = self._tensordict.clone()
        tie_leaves(entries, list_tied(self._tensordict))  # clone() ties those of one TensorDictParams alone
        return unflatten_checkpoint(self.treedef, entries._children())


def save(
    data: Core | Mapping[Any, object], path: Location | None, *, format: str | None = None, **options: object
) -> Any:
    """Save a collection, or a checkpoint: a mapping with modules, optimizers, collections, tensors and values.

    Args:
        data: the collection or the mapping. Of objects with a ``state_dict()``, such as modules, optimizers and schedulers, this
            is saved. Dicts, lists, tuples, numbers and other values that need no pickle are kept as they are, and tensors
            that are tied are saved once.
        path: a local path, or a URL or object that the format accepts; None only for formats that need none.
        format: name of a registered format. None selects the format of the suffix of ``path``, as of ``"x.h5"``, and
            ``"memmap"``, which is a directory, if no format has it.
        **options: options of the format.

    Returns:
        The result of the format: ``data``, a collection mapped from the files, or a future. For a mapping ``data``, or a future.

    Raises:
        CodecError: a value of a mapping cannot be stored without a pickle; the message has its key path, and nothing is written.
            ``allow_pickle=True`` is for the values in collections, and does not change it.
        FormatError: ``format`` is None, and several formats, or only another library, have the suffix of ``path`` (as ``.pt``).
        MissingPluginError: the format is not registered.
        TypeError: ``data`` is neither a collection nor a mapping, the format has no such option, or does not accept the location.
        UnsupportedOperationError: ``data`` is a mapping, and the format stores collections only.

    >>> save(TensorDict(), "a.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    if not isinstance(data, (Core, Mapping)):
        hint = ": save({'name': ...}, path) saves modules, optimizers, tensors and other values by name"
        raise type_error("save", data, "a collection, such as a TensorDict, or a mapping", hint)
    location = find_place(path, options.get("storage_options"))
    serializer = SERIALIZERS.for_saving(location, format)
    if isinstance(data, Core):
        return save_collection(data, location, serializer, options)
    return _save_checkpoint(data, location, serializer, options)


def _save_checkpoint(
    data: Mapping[Any, object], location: Location, serializer: Serializer, options: dict[str, object]
) -> object:
    if not serializer.stores_kinds:
        raise UnsupportedOperationError(
            f"the format {serializer.name!r} stores collections, and has no place for a mapping with modules "
            "and values; from_dict() converts a nested dict of tensors"
        )
    node = make_checkpoint(data)
    if options.get("return_early"):
        # The next step of an optimizer writes into the tensors.
        node = node._unflatten([leaf.clone() for leaf in node._leaves()])
    result = save_collection(node, location, serializer, options)
    return data if isinstance(result, Core) else result


def load(
    path: Location,
    *,
    into: Mapping[Any, object] | None = None,
    format: str | None = None,
    **options: object,
) -> Any:
    """Load a collection, or a checkpoint: the mapping that was saved, with state dicts in place of the objects.

    Args:
        path: location of the save: a local path, or a URL or object that a format accepts.
        into: for a checkpoint: objects by key, or mappings of them, whose ``load_state_dict`` is called with what was saved at
            their keys. All keys and shapes are checked before the first call. For a part of an object, as with
            ``strict=False``, load the mapping, and call its ``load_state_dict``.
        format: name of a registered format; None selects the format that recognises ``path``.
        **options: options of the format. With every format, ``verify=True`` checks first what :func:`verify` checks: the whole
            save is read, and the hashes that ``save(checksums=True)`` has recorded are compared. With every format of the
            project, ``keys`` are those to load, with all that is below them; of a checkpoint, those of the mapping.

    Returns:
        The collection; or the mapping, in memory, without what was loaded ``into`` objects. Tensors that were tied are tied.

    Raises:
        CodecError: the parameters of an object in ``into`` are sharded.
        FileNotFoundError: ``path`` does not exist.
        KeyMismatchError: a key of ``into``, or of the state of an object in it, is missing, or its state has an unexpected key.
        MissingPluginError: the format is not registered.
        FormatError: no registered format, or more than one, recognises ``path``, or the save is damaged.
        StructureError: a shape differs from that of an object in ``into``, or the save is not a checkpoint.
        TypeError: the format has no such option, no format accepts the location, ``into`` has an object without
            ``load_state_dict``, or it is given with ``strict=False``.

    >>> load("missing.json", format="json")
    Traceback (most recent call last):
    td_core.errors.MissingPluginError: no installed package provides the format 'json'; registered formats:
    ...
    """
    if into is not None and options.get("strict") is False:
        key = next(iter(into), "model")
        raise TypeError(
            "into={...} loads all of each object, and strict=False does not change that; to load a part, call "
            f"load_state_dict(load(path)[{key!r}], strict=False) of the object"
        )
    if options.get("keys") is None:
        loaded = load_as_class(None, path, format, options)
    else:
        loaded = _load_keys(path, format, options)
    result = loaded.to_tree() if isinstance(loaded, Checkpoint) else loaded
    return result if into is None else load_into(result, into, show_location(as_location(path)))


def _load_keys(path: Location, format: str | None, options: dict[str, Any]) -> Any:
    """Load the keys of a save; those of a checkpoint are key paths in its mapping, or names of its tensors."""
    keys = options["keys"]
    keys = [keys] if isinstance(keys, (str, tuple)) else list(keys)
    try:
        loaded = load_as_class(None, path, format, {**options, "keys": keys})
    except KeyError:
        # A format has the names of the tensors only, not the keys of the mapping.
        serializer = SERIALIZERS.for_loading(find_place(path, options.get("storage_options")), format)
        outline = {name: value for name, value in options.items() if name not in ("keys", "verify")}
        if "device" in (list_options(serializer, "load") or ()):
            outline["device"] = "meta"
        loaded = load_as_class(None, path, format, outline)
        if not isinstance(loaded, Checkpoint):
            raise
    if not isinstance(loaded, Checkpoint):
        return loaded
    walk = Selecting(keys)
    treedef = walk.select(loaded.treedef)
    if walk.missing and options.get("strict", True):
        where = _locate(show_location(as_location(path)), ())
        raise KeyMismatchError(f"{where} has no {_join(walk.missing)}; its keys: {_join(loaded.treedef)}")
    if walk.entries:
        loaded = load_as_class(None, path, format, {**options, "keys": walk.entries})
    return Checkpoint(loaded._tensordict, treedef)


class _Target(NamedTuple):
    """An object to load, its key path, and its state dict in the checkpoint."""

    path: _Path
    target: Tree
    saved: Tree


def make_checkpoint(tree: Tree) -> Checkpoint:
    """Return a node of the tensors, collections and values of a mapping, with the state dicts of modules and optimizers."""
    treedef, entries = flatten_checkpoint(tree)
    return Checkpoint(TensorDict._make(entries, torch.Size(), None, None), treedef)


def load_into(tree: Tree, into: Tree, shown: str) -> Tree:
    """Load the state dicts of a checkpoint into objects, and return the rest; all keys and shapes are checked first."""
    targets: list[_Target] = []
    if not isinstance(into, Mapping):
        raise TypeError(
            f"into has objects by key, such as into={{'model': model}}; got a {type(into).__name__}"
        )
    rest = _pair(tree, into, (), targets, shown)
    for item in targets:
        _check(item, shown)
    for item in targets:
        item.target.load_state_dict(item.saved)
    return rest


def _pair(tree: Tree, into: Tree, path: _Path, targets: list[_Target], shown: str) -> Tree:
    """Append the objects in ``into`` with their state dicts, and return what of the tree is left."""
    if not isinstance(tree, Mapping):
        hint = (
            "; load it without into=, and call to_module(model, inplace=True) of the result for parameters, or load_(path) "
            "of a collection"
            if isinstance(tree, Core)
            else ""
        )
        place = _locate(shown, path) if path else f"what is saved at {shown}"
        raise StructureError(f"{place} is not a mapping; got a {type(tree).__name__}{hint}")
    missing = [key for key in into if key not in tree]
    if missing:
        raise KeyMismatchError(
            f"{_locate(shown, path)} has no {_join(missing)}; its keys: {_join(tree) or 'none'}"
        )
    rest = {key: value for key, value in tree.items() if key not in into}
    for key, target in into.items():
        below = (*path, key)
        if hasattr(target, "load_state_dict"):
            saved = tree[key]
            saved = saved.state_dict() if isinstance(saved, Core) else saved
            if not isinstance(saved, Mapping):
                raise StructureError(
                    f"{_locate(shown, below)} is not a state dict; got a {type(saved).__name__}"
                )
            targets.append(_Target(below, target, saved))
        elif isinstance(target, Mapping):
            if left := _pair(tree[key], target, below, targets, shown):
                rest[key] = left
        else:
            raise TypeError(
                f"into={{...}} has objects with load_state_dict(), or mappings of them; {show_path(below)} is a "
                f"{type(target).__name__}: read it from the result of load()"
            )
    return rest


def _check(item: _Target, shown: str) -> None:
    """Raise an error unless an object can load its state dict, as far as the present state of the object shows."""
    path, target, saved = item
    where, wanted = _locate(shown, path), target.state_dict()
    if isinstance(target, _FIXED):
        _check_keys(where, saved, wanted)
    if list_shards(_list_leaves(target, wanted)):
        raise CodecError(
            f"{where} cannot be loaded into sharded parameters: load it without into=, and call set_model_state_dict() or "
            "set_optimizer_state_dict() of torch.distributed.checkpoint.state_dict with full_state_dict=True"
        )
    _check_groups(where, saved, wanted)
    _check_shapes(where, saved, wanted)


def _check_keys(where: str, saved: Tree, wanted: Tree) -> None:
    missing, unexpected = ([key for key in a if key not in b] for a, b in ((wanted, saved), (saved, wanted)))
    if missing or unexpected:
        parts = [f"misses {_join(missing)}"] if missing else []
        parts += [f"has the unexpected {_join(unexpected)}"] if unexpected else []
        raise KeyMismatchError(f"{where} {' and '.join(parts)}; nothing was loaded")


def _list_leaves(target: Tree, wanted: Tree) -> Iterator[Tensor]:
    """Yield the tensors that are directly in the state dict of an object, and the parameters of an optimizer."""
    yield from (value for value in wanted.values() if isinstance(value, Tensor))
    for group in getattr(target, "param_groups", ()):
        yield from group["params"]


def _check_groups(where: str, saved: Tree, wanted: Tree) -> None:
    """Raise StructureError if two state dicts of optimizers have different groups of parameters."""
    if "param_groups" not in wanted:
        return
    if "param_groups" not in saved:
        raise KeyMismatchError(f"{where} misses 'param_groups'; nothing was loaded")
    sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (saved, wanted)]
    if sizes[0] != sizes[1]:
        raise StructureError(
            f"{where} has groups of {sizes[0]} parameters, and the optimizer of {sizes[1]}; nothing was loaded"
        )


def _check_shapes(where: str, saved: Tree, wanted: Tree) -> None:
    """Raise StructureError if two tensors at the same keys of nested mappings have different shapes."""
    for key, value in wanted.items():
        other = saved.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            _check_shapes(f"{where}[{key!r}]", other, value)
        elif isinstance(value, Tensor) and isinstance(other, Tensor):
            if is_lazy(value) or value.is_nested or other.is_nested or value.shape == other.shape:
                continue
            raise StructureError(
                f"{where}[{key!r}] has the shape {list(other.shape)}, and the target {list(value.shape)}; nothing was loaded"
            )


def _locate(shown: str, path: _Path) -> str:
    return f"the checkpoint {shown}" + "".join(f"[{key!r}]" for key in path)


def _join(keys: Tree) -> str:
    return f"{', '.join(map(repr, keys)):.500}"
