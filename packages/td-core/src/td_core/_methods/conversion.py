"""Conversions to and from Python objects, such as ``from_dict`` and ``tolist``, and to text: ``repr`` and ``describe``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from torch import Tensor
from typing_extensions import Self

from .._convert import from_python as source
from .._convert.description import Description, describe
from .._convert.from_python import PYTREE_TYPE
from .._convert.printing import PrintedNode, print_collection, print_for_notebook, print_leaf
from .._convert.to_python import (
    ConvertTensors,
    convert_tensor,
    convert_value,
    copy_to_struct_array,
    copy_to_tensordicts,
    list_elements,
    make_namedtuples,
    restore_keys,
    restore_pytree,
)
from .._python.public_names import make_classmethod
from .._torch.dtypes import SHORT_NAMES
from .._tree.defaults import unwrap_entry
from .._tree.keys import is_pair_key
from .._tree.node import Core
from ..typing import BatchSize, DeviceType

if TYPE_CHECKING:
    import numpy.typing as npt


class ConversionMixin(Core):
    """The methods ``from_dict``, ``to_dict``, ``tolist``, ``numpy`` and similar conversions."""

    __slots__ = ()

    from_any = make_classmethod(source.from_any, dense=True)
    """Convert a Python container to a collection; see :func:`td_core.from_any`."""
    from_list = make_classmethod(source.from_list, dense=True)
    """Stack a list of mappings or collections; see :func:`td_core.from_list`."""
    from_tuple = make_classmethod(source.from_tuple, dense=True)
    """Convert a tuple to a collection; see :func:`td_core.from_tuple`."""
    from_namedtuple = make_classmethod(source.from_namedtuple, dense=True)
    """Convert a named tuple to a collection; see :func:`td_core.from_namedtuple`."""
    from_struct_array = make_classmethod(source.from_struct_array, dense=True)
    """Convert a structured array to a collection; see :func:`td_core.from_struct_array`."""
    from_pytree = make_classmethod(source.from_pytree)
    """Convert a pytree to a collection; see :func:`td_core.from_pytree`."""
    fromkeys = make_classmethod(source.fromkeys, dense=True)
    """Build a collection with the same value under each key; see :func:`td_core.fromkeys`."""
    from_schema = make_classmethod(source.from_schema, dense=True)
    """Build a collection of zeros with the given keys, shapes and dtypes; see :func:`td_core.from_schema`."""

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[Any, object] | Core,
        *,
        auto_batch_size: bool | None = None,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Convert a mapping to a collection; see :func:`td_core.from_dict`.

        >>> TensorDict.from_dict({"a": torch.zeros(3, 2)}, batch_dims=1).batch_size
        torch.Size([3])
        """
        result: Self = cls._wrap_dense(
            source.from_dict(
                input_dict,
                auto_batch_size=auto_batch_size,
                batch_size=batch_size,
                device=device,
                batch_dims=batch_dims,
                names=names,
            )
        )
        return result

    def from_dict_instance(
        self,
        input_dict: Mapping[Any, object],
        *,
        auto_batch_size: bool | None = None,
        batch_size: BatchSize | None = None,
        device: DeviceType | None = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Any:
        """Convert a mapping to a collection whose nodes have the kinds of this collection's nodes under the same keys.

        The arguments are those of :meth:`from_dict`. Under a key where this collection holds or declares a non-tensor
        value, the new value is stored as a non-tensor value too.

        >>> TensorDict({"a": 1}).from_dict_instance({"a": 2})["a"]
        tensor(2)
        """
        result = source.from_dict(
            source.wrap_values_like(self, input_dict),
            auto_batch_size=auto_batch_size,
            batch_size=batch_size,
            device=device,
            batch_dims=batch_dims,
            names=names,
        )
        return source.convert_levels_like(self, result)

    def to_dict(
        self, *, retain_none: bool = True, convert_tensors: ConvertTensors = False, tolist_first: bool = False
    ) -> dict[str, Any]:
        """Convert the collection to nested dicts; non-tensor data is converted to its values.

        Args:
            retain_none: keep the entries whose value is None.
            convert_tensors: True converts tensors to numbers and lists, ``"numpy"`` to arrays.
            tolist_first: convert each nested collection with batch dims to a list, see :meth:`tolist`.

        >>> TensorDict({"a": 1, "b": {"c": [1, 2]}}).to_dict(convert_tensors=True)
        {'a': 1, 'b': {'c': [1, 2]}}
        """
        # Hot path: copy the dict of each node in C, then replace only the entries that are not plain tensors.
        root: dict[str, object] = dict(self._schema.list_entries(self))
        todo = [root]
        paired: dict[int, dict[Any, Any]] = {}
        below: dict[str, object]
        # By hand: the row `to_dict` of benchmarks/ops.py.
        while todo:
            out = todo.pop()
            for key, child in list(out.items()) if convert_tensors or not retain_none else out.items():
                if isinstance(child, Tensor):
                    if convert_tensors:
                        out[key] = convert_tensor(self, child, convert_tensors)
                    continue
                if isinstance(child, Core) and not child._is_value:
                    if tolist_first and child.batch_size:
                        out[key] = child.tolist(convert_tensors=convert_tensors, tolist_first=True)
                    else:
                        out[key] = below = dict(child._schema.list_entries(child))
                        todo.append(below)
                        if key[:1] == "<" and is_pair_key(key):
                            paired[id(out)] = out
                    continue
                value = convert_value(self, child, convert_tensors)
                if value is not None or retain_none:
                    out[key] = value
                else:
                    del out[key]
        restore_keys(paired.values())
        return root

    def tolist(
        self,
        *,
        convert_nodes: bool = True,
        convert_tensors: ConvertTensors = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> Any:
        """Convert the collection to nested lists over the batch dims, with one dict per batch element.

        Args:
            convert_nodes: False returns collections without batch dims instead of dicts.
            convert_tensors: as for :meth:`to_dict`.
            tolist_first: as for :meth:`to_dict`.
            as_linked_list: return a list that writes back, see :class:`td_core.LinkedList`.

        Raises:
            TypeError: ``convert_tensors`` is set and ``convert_nodes`` is False.

        >>> TensorDict({"a": [1, 2]}, batch_size=[2]).tolist(convert_tensors=True)
        [{'a': 1}, {'a': 2}]
        """
        return list_elements(self, convert_nodes, convert_tensors, tolist_first, as_linked_list)

    def numpy(self) -> dict[str, Any]:
        """Convert the collection to nested dicts of numpy arrays, which share memory with the leaves.

        A nested tensor is converted to a tuple of arrays, one per component.

        >>> TensorDict({"a": [1, 2]}).numpy()
        {'a': array([1, 2])}
        """
        return self.to_dict(convert_tensors="numpy", retain_none=False)

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError: otherwise ``numpy.asarray`` would treat a collection as a sequence."""
        raise TypeError(
            f"a {type(self).__name__} is not one array: numpy() gives an array for each tensor, to_struct_array() one "
            "structured array, and tolist() the values; an object array takes collections one by one"
        )

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError: otherwise ``torch.as_tensor`` would treat a collection as a sequence without elements."""
        raise TypeError(
            f"a {type(self).__name__} is not one tensor, so torch.as_tensor(), torch.tensor() and the like do not take it: "
            'td["key"] gives a tensor, td.apply(function) calls a function for each, cat_tensors() and stack_tensors() '
            "put entries together, and tolist() gives the values"
        )

    def __dlpack_device__(self) -> NoReturn:
        """Raise TypeError, as ``__dlpack__`` does."""
        self.__dlpack__()

    def to_namedtuple(self, dest_cls: type | None = None) -> Any:
        """Convert the collection to nested named tuples.

        Args:
            dest_cls: class of the outermost tuple and of nested ones with the same fields; by default a new class.

        Raises:
            ValueError: a key is not a valid Python identifier.

        >>> TensorDict({"a": 1, "b": {"c": 2}}).to_namedtuple().b.c
        tensor(2)
        """
        return make_namedtuples(self, dest_cls)

    def to_pytree(self) -> Any:
        """Convert the collection back to the pytree that :meth:`from_pytree` converted, with the current leaves.

        A collection that :meth:`from_pytree` did not create is returned unchanged.

        >>> td = TensorDict({"a": 1})
        >>> td.to_pytree() is td
        True
        """
        return restore_pytree(self) if PYTREE_TYPE in self._children() else self

    def to_struct_array(self) -> npt.NDArray[np.void]:
        """Copy the entries into a structured array of shape ``batch_size``, with one field per entry.

        Raises:
            DepthError: the collection is nested deeper than numpy allows.

        >>> TensorDict({"a": [1, 2], "b": [0.5, 1.5]}, batch_size=[2]).to_struct_array()
        array([(1, 0.5), (2, 1.5)], dtype=[('a', '<i8'), ('b', '<f4')])
        """
        return copy_to_struct_array(self)

    def to_tensordict(self, *, retain_none: bool | None = None) -> Any:
        """Copy the collection into plain TensorDicts at every node: clone leaves, make lazy stacks dense, drop classes.

        Args:
            retain_none: True adds the fields of a tensorclass that are None, as non-tensor data.

        Raises:
            KeyMismatchError: members of a lazy stack have different keys, so entries would be lost.

        >>> td = TensorDict({"a": 1})
        >>> td.to_tensordict()["a"] is td["a"]
        False
        """
        return copy_to_tensordicts(self, bool(retain_none))


class ReprMixin(Core):
    """``repr``, and ``_repr_html_`` for notebooks."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the compact form, or the long form if :class:`td_core.set_printoptions` selects it."""
        return print_collection(self)

    def _repr_html_(self) -> str | None:
        """Return a collapsible HTML tree with the size of each node in bytes; None if that option is off."""
        return print_for_notebook(self)

    def describe(self) -> Description:
        """Return a table of the leaves: key, dtype, shape, size, share of the size, device, and what shares memory.

        The result prints as text, and as a table in notebooks; it is iterable, with one row for each key. Nothing is read, and
        the members of a lazy stack, which are in one row, are not stacked.

        >>> weight = torch.zeros(2, 3)
        >>> TensorDict({"layer": {"weight": weight, "bias": torch.zeros(2)}, "tied": weight}).describe()
        TensorDict [], 56 bytes
        key           dtype  shape   size      share  device  memory
        layer.weight  f32    [2, 3]  24 bytes  42.9%  cpu
        layer.bias    f32    [2]     8 bytes   14.3%  cpu
        tied          f32    [2, 3]  24 bytes  42.9%  cpu     shared with layer.weight
        """
        return describe(self)

    def _ipython_key_completions_(self: Core) -> list[object]:
        """Return the keys that IPython and notebooks offer after ``data["``."""
        return list(self.keys(include_nested=True))

    def _print_node(self) -> PrintedNode:
        """Return what is printed of this node; a lazy stack describes its entries without stacking them."""
        leaf = unwrap_entry(self)
        text = f"{SHORT_NAMES[leaf.dtype]}{list(leaf.shape)}" if isinstance(leaf, Tensor) else None
        return PrintedNode(
            [print_leaf(key, child) for key, child in dict(self._children()).items()], text=text
        )
