"""Conformance suite for kinds of collections. Results are compared with torch on the plain leaves."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from .._encode.decode import decode
from .._encode.node_kinds import KINDS, Encoded, encode
from .._methods.collection import TensorCollection
from .._python.collector import pause_collector
from .._torch.private import pytree
from .._tree.node import Core
from ..errors import BatchSizeError, KeyPathError, LockedError, StructureError
from ..typing import NestedKey

__all__ = ["CollectionTests"]

Leaves = dict[NestedKey, Tensor]

# Every type of index, valid for a batch of at least two dims of size at least two.
INDICES: dict[str, object] = {
    "int": 0,
    "negative": -1,
    "slice": slice(1, None),
    "step": slice(None, None, 2),
    "ellipsis": ...,
    "none": None,
    "tuple": (0, slice(None)),
    "second": (slice(None), 1),
    "ellipsis and int": (..., 0),
    "none and int": (None, 0),
    "list": [1, 0, 1],
    "range": range(2),
    "tensor": torch.tensor([[0, 1], [1, 1]]),
    "scalar tensor": torch.tensor(1),
    "two tensors": (torch.tensor([0, 1]), torch.tensor([1, 0])),
    "array": np.array([1, 0]),
    "numpy int": np.int64(1),
}

POINTWISE: dict[str, Callable[[Any], object]] = {
    "neg": lambda x: -x,
    "add": lambda x: x + 2,
    "radd": lambda x: 2 + x,
    "mul": lambda x: x * 3,
    "self": lambda x: x + x,
    "abs": lambda x: x.abs(),
    "exp": lambda x: x.exp(),
    "sigmoid": lambda x: x.sigmoid(),
    "clamp": lambda x: x.clamp(0, 1),
    "eq": lambda x: x == x,
    "isnan": lambda x: x.isnan(),
}

# Only nonnegative dims, which refer to the same dim of a leaf and of the batch.
SHAPES: dict[str, Callable[[Any], Any]] = {
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze and squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "transpose": lambda x: x.transpose(0, 1),
    "flatten": lambda x: x.flatten(0, 1),
    "unbind": lambda x: x.unbind(0)[-1],
    "split": lambda x: x.split(1, 1)[1],
    "chunk": lambda x: x.chunk(2, 0)[0],
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip((0,)),
}

JOINS: dict[str, Callable[[list[Any]], Any]] = {
    "stack 0": lambda items: torch.stack(items, 0),
    "stack 1": lambda items: torch.stack(items, 1),
    "stack 2": lambda items: torch.stack(items, 2),
    "cat 0": lambda items: torch.cat(items, 0),
    "cat 1": lambda items: torch.cat(items, 1),
}

RESULTS: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[0],
    "mask": lambda x: x[torch.ones(x.shape[0], dtype=torch.bool)],
    "neg": lambda x: -x,
    "clone": lambda x: x.clone(),
    "shallow clone": lambda x: x.clone(recurse=False),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "stack": lambda x: torch.stack([x, x]),
    "unbind": lambda x: x.unbind(0)[0],
    "apply": lambda x: x.apply(torch.clone),
    "lock": lambda x: x.clone().lock_(),
}

#: Metadata that a copy must keep, each with the function that reads it.
TOLD: dict[str, Callable[[TensorCollection], object]] = {
    "class": type,
    "batch size": lambda x: x.batch_size,
    "device": lambda x: x.device,
    "names": lambda x: x.names,
    "keys": lambda x: list(x.keys(include_nested=True)),
    "lock": lambda x: x.is_locked,
}

# Each operation returns a collection equal to its input (up to copies), so all metadata must be kept.
KEEPING: dict[str, Callable[[Any], Any]] = {
    "(-x).neg()": lambda x: (-x).neg(),
    "x.clone()": lambda x: x.clone(),
    "x.clone(recurse=False)": lambda x: x.clone(recurse=False),
    "x[:]": lambda x: x[:],
    "x.apply(torch.clone)": lambda x: x.apply(torch.clone),
    "x.unsqueeze(0).squeeze(0)": lambda x: x.unsqueeze(0).squeeze(0),
    "x.transpose(0, 1).transpose(0, 1)": lambda x: x.transpose(0, 1).transpose(0, 1),
    "torch.stack([x, x]).unbind(0)[1]": lambda x: torch.stack([x, x]).unbind(0)[1],
    "torch.cat([x, x]).chunk(2)[1]": lambda x: torch.cat([x, x]).chunk(2)[1],
}


#: Numbers for unique class names, since decoding finds a class by name.
_NUMBERS = itertools.count()


def _adds_nothing(namespace: dict[str, object]) -> None:
    # Empty slots keep the memory layout, which an assignment to __class__ requires.
    namespace.update(__slots__=(), __module__=__name__)


class CollectionTests:
    """Conformance suite of a kind of collection. A subclass defines :meth:`make`.

    Attributes:
        new_key: a key that can be added to the collection, or None if the keys of the kind are fixed.
        keeps_kind: whether operations return instances of the same class.

    >>> from td_core import TensorDict
    >>> class TestTensorDict(CollectionTests):
    ...     def make(self):
    ...         source = {"a": torch.randn(3, 2), "n": {"b": torch.ones(3, 2, 4)}}
    ...         return TensorDict(source, batch_size=[3, 2])
    >>> TestTensorDict().test_walks_visit_leaves_in_one_order()
    """

    new_key: ClassVar[str | None] = "a new key"
    keeps_kind: ClassVar[bool] = True

    def make(self) -> Any:
        """Build a new, unlocked collection with at least two batch dims of size 2 or more and floating-point leaves.

        Every call returns the same structure and shapes, with new leaves.
        """
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def state(self, collection: TensorCollection) -> object:
        """Return the state to compare with ``==``: by default header and values of the record from ``flatten``.

        Override it to include state that the record does not have.
        """
        record = KINDS.of(collection).flatten(collection)
        return record.meta, dict(record.values)

    def labelled(self) -> Any:
        """Return a collection of :meth:`make` with device and dim names set, and :attr:`new_key` as its last key."""
        collection = self.make()
        leaf = next(iter(self.leaves(collection).values()))
        if self.new_key is not None:
            collection.set(self.new_key, leaf.new_zeros(collection.batch_size))
        collection._set_device(leaf.device)
        assert collection.device == leaf.device, "_set_device does not store the device"
        names = [f"dim {number}" for number in range(collection.batch_dims)]
        collection.names = names
        assert collection.names == names, "_names does not store the names that are set"
        return collection

    def check_same(self, again: TensorCollection, collection: TensorCollection, how: str) -> None:
        """Assert that ``again``, a copy of a collection, equals it. ``how`` names the way of copying in messages."""
        for what, read in TOLD.items():
            result, wanted = read(again), read(collection)
            assert result == wanted, f"{how} changes the {what}: {result!r} instead of {wanted!r}"
        self.check_state(again, collection, how)
        self.check(again, self.leaves(collection))

    def check_state(self, again: TensorCollection, collection: TensorCollection, how: str) -> None:
        """Assert that ``again`` has the class and the :meth:`state` of the collection."""
        assert type(again) is type(collection), (
            f"{how} gives a {type(again)!r} instead of a {type(collection)!r}"
        )
        result, wanted = self.state(again), self.state(collection)
        assert result == wanted, f"{how} changes what the kind holds: {result!r} instead of {wanted!r}"

    def leaves(self, collection: TensorCollection) -> Leaves:
        """Return the tensor leaves by key."""
        keys = list(collection.keys(include_nested=True, leaves_only=True))
        result = {key: collection.get(key) for key in keys}
        return {key: value for key, value in result.items() if isinstance(value, Tensor)}

    def check(self, result: Any, expected: Leaves, batch_size: torch.Size | None = None) -> None:
        """Assert that ``result`` has the expected leaves, batch size and kind."""
        match = self.leaves(result)
        assert list(match) == list(expected), f"the keys are {list(match)} instead of {list(expected)}"
        for key, leaf in expected.items():
            assert match[key].dtype == leaf.dtype, f"{key!r} is of {match[key].dtype} instead of {leaf.dtype}"
            torch.testing.assert_close(match[key], leaf, equal_nan=True, rtol=0, atol=0)
        if batch_size is not None:
            size = result.batch_size
            assert size == batch_size, f"the batch size is {list(size)} instead of {list(batch_size)}"
            assert isinstance(size, torch.Size), (
                f"batch_size is not a torch.Size, but a {type(size).__name__}"
            )
        if self.keeps_kind:
            wanted = type(self.make())
            assert type(result) is wanted, f"the result is a {type(result)!r} instead of a {wanted!r}"

    def test_make_gives_what_the_suite_needs(self) -> None:
        """``make`` returns a collection that meets the requirements of the suite."""
        collection = self.make()
        assert isinstance(collection, TensorCollection), (
            f"make() returns a {type(collection).__name__}, not a collection"
        )
        size = collection.batch_size
        assert isinstance(size, torch.Size), f"batch_size is not a torch.Size, but a {type(size).__name__}"
        assert len(size) >= 2, f"make() returns batch size {list(size)}; the suite needs two dims"
        assert min(size) >= 2, (
            f"make() returns batch size {list(size)}; the suite needs dims of size 2 or more"
        )
        leaves = self.leaves(collection)
        assert leaves, f"make() returns a {type(collection).__name__} without tensors"
        for key, leaf in leaves.items():
            assert leaf.is_floating_point(), (
                f"make() returns {key!r} of {leaf.dtype}; the suite needs floating point"
            )
            assert leaf.shape[: len(size)] == size, (
                f"{key!r} of make() has shape {list(leaf.shape)}, which does not begin with the batch size {list(size)}"
            )
        assert not collection.is_locked, "make() returns a locked collection; the suite changes it"

    def test_children_make_the_same_node_again(self) -> None:
        """``_with_children`` sets the given children and metadata, and keeps the kind and all other metadata."""
        collection = self.labelled()
        children = dict(collection._children())
        for key, child in children.items():
            assert isinstance(child, (Tensor, Core)), f"_children has a {type(child).__name__} at {key!r}"
        again = collection._with_children(children)
        for what, read in TOLD.items():
            if self.keeps_kind or what != "class":
                assert read(again) == read(collection), f"_with_children loses the {what}: {read(again)!r}"
        if self.keeps_kind:
            self.check_state(again, collection, "_with_children")
        self.check(again, self.leaves(collection))
        lead = collection.batch_size[:1]
        bare = collection._with_children(children, batch_size=lead, device=None, names=None)
        assert bare.batch_size == lead, "_with_children ignores the batch_size that it is given"
        assert bare.device is None, "_with_children ignores the device that it is given, None"
        assert bare.names == [None], "_with_children ignores the names that it is given, None"

    @pytest.mark.parametrize("operation", KEEPING.values(), ids=KEEPING)
    def test_operations_keep_what_the_kind_holds(self, operation: Callable[[Any], Any]) -> None:
        """Results of operations have the same :meth:`state` as the collection."""
        if not self.keeps_kind:
            pytest.skip("results may be of another kind")
        collection = self.make()
        self.check_state(operation(collection), collection, "the operation")

    def test_operations_in_place_return_the_collection(self) -> None:
        """``_take_over`` takes the entries of a result, unless the kind refuses to be changed in place."""
        collection = self.make()
        expected, size = self.leaves(collection.roll(1, 0)), collection.batch_size
        try:
            result = collection.roll(1, 0, inplace=True)
        except StructureError:
            pytest.skip("this kind is not changed in place")
        assert result is collection
        self.check(collection, expected, size)

    def test_the_batch_size_can_be_changed(self) -> None:
        """Setting a valid batch size stores it, unless the kind refuses to drop dims; an invalid one raises."""
        collection = self.labelled()
        size, names = collection.batch_size, collection.names
        with pytest.raises(BatchSizeError):
            collection.batch_size = (size[0] + 1, *size[1:])
        assert collection.batch_size == size
        try:
            collection.batch_size = size[:1]
        except BatchSizeError:
            pytest.skip("this kind keeps its dims")
        assert collection.batch_size == size[:1], "_set_batch_size does not store the batch size"
        assert collection.names == names[:1], "_names keeps names of dims that are gone"
        collection.batch_size = size
        assert collection.batch_size == size, "_set_batch_size does not store the batch size"
        # A new dim has no name, or the one that a nested collection has kept for it.
        rest = [None] * (len(size) - 1)
        assert collection.names in ([names[0], *rest], names), "_names has no place for new dims"

    def test_children_can_be_set_and_deleted(self) -> None:
        """A new entry is the last one, and deleting it removes it."""
        if self.new_key is None:
            pytest.skip("the keys of this kind are fixed")
        collection = self.make()
        before = list(collection.keys())
        leaf = next(iter(self.leaves(collection).values())).new_zeros(collection.batch_size)
        collection.set(self.new_key, leaf)
        assert list(collection.keys()) == [*before, self.new_key]
        torch.testing.assert_close(collection.get(self.new_key), leaf)
        collection.del_(self.new_key)
        assert list(collection.keys()) == before
        with pytest.raises(KeyPathError):
            collection[self.new_key]

    def test_entries_are_stored_and_removed(self) -> None:
        """``_set_child`` stores an entry as the last one of ``_children``, and ``_del_child`` removes it."""
        if self.new_key is None:
            pytest.skip("the keys of this kind are fixed")
        collection = self.make()
        before = list(collection._children())
        leaf = next(iter(self.leaves(collection).values())).new_ones(collection.batch_size)
        collection._set_child(self.new_key, leaf)
        after = list(collection._children())
        assert self.new_key in after, "_set_child does not store an entry, or _children does not list it"
        assert after == [*before, self.new_key], f"_children lists {after} after _set_child"
        torch.testing.assert_close(collection._children()[self.new_key], leaf)
        collection._del_child(self.new_key)
        assert list(collection._children()) == before, "_del_child does not remove the entry"
        with pytest.raises(KeyError):
            collection._del_child(self.new_key)

    def test_walks_visit_leaves_in_one_order(self) -> None:
        """``_flatten_leaves``, ``_flatten_other`` and ``_map`` visit leaves in the same order."""
        collection = self.make()
        first = collection._leaves()
        like: list[Tensor] = []
        collection._flatten_other(collection, like)
        assert [id(leaf) for leaf in like] == [id(leaf) for leaf in first]
        new = iter([leaf + 1 for leaf in first])
        rebuilt = collection._map(lambda _: next(new))
        self.check(rebuilt, {key: leaf + 1 for key, leaf in self.leaves(collection).items()})
        self.check(collection._map(torch.neg), {key: -leaf for key, leaf in self.leaves(collection).items()})

    def test_a_missing_key_is_named(self) -> None:
        """For a missing key ``[]`` raises KeyPathError that names it, and ``get`` returns the default."""
        collection = self.make()
        with pytest.raises(KeyPathError, match="no such key"):
            collection["no such key"]
        assert collection.get("no such key", None) is None

    @pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
    def test_indexing_is_that_of_a_tensor(self, index: Any) -> None:
        """Indexing a collection equals torch's indexing of every leaf and of the batch size."""
        collection = self.make()
        plain = list(index) if isinstance(index, range) else index
        expected = {
            key: self._index(leaf, plain, collection) for key, leaf in self.leaves(collection).items()
        }
        self.check(collection[index], expected, torch.empty(collection.batch_size)[plain].shape)

    def _index(self, leaf: Tensor, index: Any, collection: Core) -> Tensor:
        """Index a leaf along the batch dims only: an ellipsis expands to batch dims, not to feature dims."""
        index = index if isinstance(index, tuple) else (index,)
        if any(item is ... for item in index):
            index = (*index, *[slice(None)] * (leaf.ndim - collection.batch_dims))
        return leaf[index]

    def test_indexing_by_masks(self) -> None:
        """Masks over the first dim and over all batch dims select as in torch."""
        collection = self.make()
        batch = collection.batch_size
        masks = [torch.arange(batch[0]) % 2 == 0, torch.arange(batch.numel()).view(batch) % 2 == 0]
        for mask in masks:
            expected = {key: leaf[mask] for key, leaf in self.leaves(collection).items()}
            self.check(collection[mask], expected, torch.empty(batch)[mask].shape)

    def test_too_many_indices_are_refused(self) -> None:
        """An index with more items than batch dims raises IndexError."""
        collection = self.make()
        with pytest.raises(IndexError):
            collection[(0,) * (collection.batch_dims + 1)]

    def test_writing_by_index(self) -> None:
        """Assignment to an index writes into every leaf in place."""
        collection = self.make()
        leaves = self.leaves(collection)
        expected = {key: leaf.clone() for key, leaf in leaves.items()}
        for leaf in expected.values():
            leaf[0] = leaf[1]
        collection[0] = collection[1].clone()
        self.check(collection, expected)
        for leaf in expected.values():
            leaf[1] = 0
        collection[1] = 0
        self.check(collection, expected)

    @pytest.mark.parametrize("operation", POINTWISE.values(), ids=POINTWISE)
    def test_pointwise_operations(self, operation: Callable[[Any], Any]) -> None:
        """Pointwise operations equal the operation of torch on each leaf."""
        collection = self.make()
        expected = {key: operation(leaf) for key, leaf in self.leaves(collection).items()}
        self.check(operation(collection), expected, collection.batch_size)

    @pytest.mark.parametrize("operation", SHAPES.values(), ids=SHAPES)
    def test_shape_operations(self, operation: Callable[[Any], Any]) -> None:
        """Shape operations equal those of torch on the batch dims of each leaf."""
        collection = self.make()
        expected = {key: operation(leaf) for key, leaf in self.leaves(collection).items()}
        self.check(operation(collection), expected, operation(torch.empty(collection.batch_size)).shape)

    def test_reshaping(self) -> None:
        """``permute``, ``reshape`` and ``expand`` keep the feature dims of each leaf."""
        collection = self.make()
        batch = collection.batch_size
        leaves = self.leaves(collection).items()
        dims = len(batch)
        order = tuple(reversed(range(dims)))
        self.check(
            collection.permute(*order),
            {key: leaf.permute(*order, *range(dims, leaf.ndim)) for key, leaf in leaves},
            torch.Size(reversed(batch)),
        )
        flat = {key: leaf.reshape(-1, *leaf.shape[dims:]) for key, leaf in leaves}
        self.check(collection.reshape(-1), flat, torch.Size([batch.numel()]))
        self.check(
            collection.expand(2, *batch),
            {key: leaf.expand(2, *leaf.shape) for key, leaf in leaves},
            torch.Size([2, *batch]),
        )

    @pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
    def test_joining(self, join: Callable[[list[Any]], Any]) -> None:
        """``torch.stack`` and ``torch.cat`` join the leaves under each key."""
        items = [self.make(), self.make(), self.make()]
        columns = [self.leaves(item) for item in items]
        expected = {key: join([column[key] for column in columns]) for key in columns[0]}
        self.check(join(items), expected, join([torch.empty(item.batch_size) for item in items]).shape)

    def test_unbinding_undoes_stacking(self) -> None:
        """``unbind`` of a stack returns the stacked items, in order."""
        items = [self.make(), self.make()]
        for dim in (0, 1):
            for part, item in zip(torch.stack(items, dim).unbind(dim), items, strict=True):
                self.check(part, self.leaves(item), item.batch_size)

    def test_stacking_other_keys_is_refused(self) -> None:
        """Stacking items with different keys raises StructureError that names a differing key."""
        if self.new_key is None:
            pytest.skip("the keys of this kind are fixed")
        other = self.make()
        other.set(self.new_key, torch.zeros(other.batch_size))
        with pytest.raises(StructureError, match=self.new_key):
            torch.stack([self.make(), other])

    def test_cloning(self) -> None:
        """A clone has new leaves. A shallow clone shares the leaves, but not the structure."""
        collection = self.make()
        clone = collection.clone()
        self.check(clone, self.leaves(collection), collection.batch_size)
        shared = {leaf.data_ptr() for leaf in collection._leaves()}
        assert shared.isdisjoint(leaf.data_ptr() for leaf in clone._leaves())
        shallow = collection.clone(recurse=False)
        assert [id(leaf) for leaf in shallow._leaves()] == [id(leaf) for leaf in collection._leaves()]
        if self.new_key is not None:
            shallow.set(self.new_key, torch.zeros(collection.batch_size))
            assert self.new_key not in list(collection.keys())

    def test_casting_and_moving(self) -> None:
        """``to`` changes the dtype or device of every leaf, and sets the device label."""
        collection = self.make()
        self.check(
            collection.to(torch.float64),
            {key: leaf.double() for key, leaf in self.leaves(collection).items()},
            collection.batch_size,
        )
        moved = collection.to("cpu")
        assert moved.device == torch.device("cpu")
        there = {key: leaf.cpu() for key, leaf in self.leaves(collection).items()}
        self.check(moved, there, collection.batch_size)
        assert moved.clear_device_().device is None, "_set_device does not store the device"

    def test_applying_a_function(self) -> None:
        """``apply`` replaces each leaf by the result of the function and keeps the kind."""
        collection = self.make()
        expected = {key: leaf * 2 for key, leaf in self.leaves(collection).items()}
        self.check(collection.apply(lambda leaf: leaf * 2), expected, collection.batch_size)

    def test_locking(self) -> None:
        """A locked collection refuses changes of structure, but allows in-place writes of leaves."""
        collection = self.make().lock_()
        assert collection.is_locked
        key = next(iter(self.leaves(collection)))
        if self.new_key is not None:
            with pytest.raises(LockedError):
                collection.set(self.new_key, torch.zeros(collection.batch_size))
            with pytest.raises(LockedError):
                collection.del_(key)
        collection.set_(key, torch.zeros_like(collection.get(key)))
        assert not collection.get(key).any()
        assert not collection.unlock_().is_locked

    def test_names_follow_the_dims(self) -> None:
        """Indexing and shape operations move dim names together with their dims."""
        collection = self.make()
        names = [f"dim {number}" for number in range(collection.batch_dims)]
        collection.names = names
        assert collection.names == names
        assert collection[0].names == names[1:]
        assert collection[:, None].names == [names[0], None, *names[1:]]
        assert collection.transpose(0, 1).names == [names[1], names[0], *names[2:]]
        assert (-collection).names == names
        stacked: Any = torch.stack([collection, collection], 1)
        assert stacked.names == [names[0], None, *names[1:]]

    def test_pytree(self) -> None:
        """Unflattening a flattened collection restores it, also with a spec that ``torch.export.save`` serialized.

        Any object may replace a leaf in between.
        """
        collection = self.labelled()
        leaves, spec = pytree.tree_flatten(collection)
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        for item in (spec, pytree.treespec_loads(pytree.treespec_dumps(spec))):
            assert item == spec
            again = pytree.tree_unflatten(leaves, item)
            if self.keeps_kind:
                self.check_same(again, collection, "a pytree")
            self.check(again, self.leaves(collection), collection.batch_size)
        pytree.tree_unflatten(list(range(len(leaves))), spec)
        doubled = pytree.tree_map(lambda leaf: leaf * 2, collection)
        self.check(doubled, {key: leaf * 2 for key, leaf in self.leaves(collection).items()})

    def test_vmap(self) -> None:
        """``torch.vmap`` maps a function over the first and over the second batch dim."""
        collection = self.make()
        expected = {key: leaf + 1 for key, leaf in self.leaves(collection).items()}
        self.check(torch.vmap(lambda item: item + 1)(collection), expected, collection.batch_size)
        moved = torch.vmap(lambda item: item + 1, in_dims=1, out_dims=1)(collection)
        self.check(moved, expected, collection.batch_size)

    def test_encoding(self) -> None:
        """``decode`` inverts ``encode`` after a JSON round trip of the rows, also for a locked collection."""
        for collection in (self.labelled(), self.labelled().lock_(), self.make()):
            encoded = encode(collection)
            assert encoded.nodes[0]["kind"] == KINDS.of(collection).tag
            nodes = json.loads(json.dumps(encoded.nodes))
            again = decode(Encoded(nodes, encoded.leaves, encoded.values))
            self.check_same(again, collection, "decode(encode(...))")

    def test_a_subclass_comes_back_as_itself(self) -> None:
        """``unflatten`` returns an instance of ``record.cls`` if it is set."""
        collection = self.labelled()
        kind = KINDS.of(collection)
        cls = types.new_class(f"Subclass{next(_NUMBERS)}", (type(collection),), exec_body=_adds_nothing)
        if KINDS.of(cls) is not kind:
            pytest.skip("each class is a kind of its own")
        object.__setattr__(collection, "__class__", cls)
        again = decode(encode(collection))
        assert type(again) is cls, f"unflatten of {kind.tag!r} gives a {type(again).__name__}, not record.cls"

    @pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
    def test_pickling(self, protocol: int) -> None:
        """Pickling and unpickling keeps kind, leaves, batch size, names and lock."""
        for collection in (self.labelled(), self.labelled().lock_()):
            self.check_same(pickle.loads(pickle.dumps(collection, protocol)), collection, "a pickle")

    def test_copying(self) -> None:
        """``copy.deepcopy`` copies the leaves and keeps the lock; ``copy.copy`` shares the leaves."""
        collection = self.labelled()
        deep = copy.deepcopy(collection)
        self.check_same(deep, collection, "copy.deepcopy")
        shared = {leaf.data_ptr() for leaf in collection._leaves()}
        assert shared.isdisjoint(leaf.data_ptr() for leaf in deep._leaves())
        shallow = copy.copy(collection)
        assert [id(leaf) for leaf in shallow._leaves()] == [id(leaf) for leaf in collection._leaves()]
        self.check_same(copy.deepcopy(collection.lock_()), collection, "copy.deepcopy")

    def test_state_dict(self) -> None:
        """``load_state_dict`` restores the leaves in another collection of the same structure."""
        collection, other = self.make(), self.make()
        other.zero_()
        other.load_state_dict(collection.state_dict())
        self.check(other, self.leaves(collection), collection.batch_size)

    @pytest.mark.parametrize("operation", RESULTS.values(), ids=RESULTS)
    def test_results_are_freed_by_reference_count(self, operation: Callable[[Any], Any]) -> None:
        """Results have no reference cycles: they are freed without the garbage collector."""
        collection = self.make()
        with pause_collector():
            result = operation(collection)
            leaves = [weakref.ref(leaf) for leaf in result._leaves()]
            # An index of a lazy stack may return a member, which the stack keeps alive.
            kept = {id(leaf) for leaf in collection._leaves()} | {
                id(node) for node in collection._tree_children()
            }
            watched: list[weakref.ref[object]] = [weakref.ref(result), *leaves]
            watched = [item for item in watched if id(item()) not in kept]
            del result
            assert [item() for item in watched] == [None] * len(watched)

    def test_repr(self) -> None:
        """``repr`` contains the name of the class and every key."""
        collection = self.make()
        text = repr(collection)
        assert text.startswith(type(collection).__name__)
        assert all(str(key) in text for key in collection.keys())  # noqa: SIM118 (iteration yields rows, not keys)
