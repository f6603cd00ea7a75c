"""A batched, nested dict[str, Tensor] that behaves like one tensor, and the registry of its plugins.

>>> import torch
>>> from td_core import TensorDict
>>> td = TensorDict({"obs": torch.zeros(3, 4), "info": {"step": torch.arange(3)}}, batch_size=[3])
>>> td[1]["info", "step"]
tensor(1)
"""

import typing as _typing

from ._collector import pause_collector as _pause_collector

with _pause_collector():
    # These register core's node kinds and pytrees.
    from . import _core_kinds, _first_class_dims, _lazy_pytree, _mapped_dims, kinds, pickles  # noqa: F401
    from ._base import TensorCollection, TensorDictBase, count_as_mapping, is_tensor_collection
    from ._class_methods import make_classmethod
    from ._coerce import Coercer
    from ._decoding import decode
    from ._dtypes import is_bool, is_floating, is_inexact, is_integer
    from ._from_python import (
        from_any,
        from_dict,
        from_list,
        from_namedtuple,
        from_pytree,
        from_schema,
        from_struct_array,
        from_tuple,
        fromkeys,
        make_tensordict,
    )
    from ._functions.collation import collate
    from ._functions.comparison import assert_allclose_td, assert_close
    from ._functions.grouping import group_by, isin, remove_duplicates
    from ._functions.sequences import pad_sequence, unpad_sequence
    from ._keys import KEY_SEPARATOR, unravel_key, unravel_key_list, unravel_key_to_tuple
    from ._lazy_stack import LazyStackedTensorDict
    from ._linked_list import LinkedList
    from ._mapping_views import default_is_leaf
    from ._nodes import Encoded, NodeKind, encode
    from ._ops.joining import cat, dense_stack_tds, lazy_stack, maybe_dense_stack, merge_tensordicts, stack
    from ._ops.modules import from_module, from_modules
    from ._ops.packing import PackLayout
    from ._ops.select import pad
    from ._ops.shape import expand_as_right, expand_right
    from ._params import TensorDictParams
    from ._public_names import lazy_names as _lazy_names
    from ._records import Layout, Record
    from ._repr_parser import parse_tensor_dict_string
    from ._roles import Buffer
    from ._saving import append, create, inspect, load, save, verify
    from ._saving import open as open  # noqa: A004  not in __all__: a star import must not hide the builtin function
    from ._serializers import Serializer
    from ._settings import (
        get_defaults_to_none,
        get_printoptions,
        lazy_legacy,
        set_get_defaults_to_none,
        set_lazy_legacy,
        set_printoptions,
    )
    from ._tensordict import TensorDict
    from ._value_codec import join as join_value
    from ._value_codec import split as split_value
    from ._value_types import LeafSerializer, enum_serializer
    from ._version import __version__
    from .errors import (
        BatchSizeError,
        CodecError,
        CollectionIndexError,
        CycleError,
        DepthError,
        DimError,
        DimNamesError,
        FormatError,
        KeyMismatchError,
        KeyPathError,
        KeyTakenError,
        KeyThroughLeafError,
        LockedError,
        MissingPluginError,
        PluginError,
        StructureError,
        TensorDictError,
        UnsupportedOperationError,
    )
    from .plugins.hookspecs import hookimpl
    from .plugins.manager import load_plugins as _load_plugins
    from .plugins.manager import plugins
    from .typing import NO_DEFAULT, NestedKey, Source

__all__ = [
    "TensorCollection", "TensorDict", "TensorDictBase", "LazyStackedTensorDict", "TensorDictParams", "Buffer",
    "LinkedList", "from_any", "from_dict", "from_list", "from_module", "from_modules", "from_namedtuple",
    "from_pytree", "from_schema", "from_struct_array", "from_tuple", "fromkeys", "make_tensordict",
    "parse_tensor_dict_string", "stack", "cat", "lazy_stack", "maybe_dense_stack", "dense_stack_tds",
    "merge_tensordicts", "collate", "group_by", "isin", "remove_duplicates", "pad", "pad_sequence",
    "unpad_sequence", "PackLayout", "assert_allclose_td", "assert_close", "expand_as_right", "expand_right",
    "is_bool", "is_floating", "is_inexact", "is_integer", "is_tensor_collection", "default_is_leaf",
    "KEY_SEPARATOR", "NO_DEFAULT", "NestedKey", "unravel_key", "unravel_key_list", "unravel_key_to_tuple",
    "count_as_mapping", "load", "save", "create", "append", "inspect", "verify",
    "Tree", "Report", "Problem", "Description", "DescriptionRow", "encode",
    "decode", "Encoded", "Record", "split_value", "join_value", "NodeKind",
    "Layout", "Serializer", "LeafSerializer", "enum_serializer", "Coercer", "make_classmethod", "hookimpl", "plugins",
    "get_defaults_to_none", "set_get_defaults_to_none", "get_printoptions", "set_printoptions", "lazy_legacy",
    "set_lazy_legacy", "TensorDictError", "BatchSizeError", "CodecError", "CollectionIndexError",
    "CycleError", "DepthError", "DimError", "DimNamesError", "FormatError", "KeyMismatchError",
    "KeyPathError", "KeyTakenError", "KeyThroughLeafError", "LockedError", "MissingPluginError",
    "PluginError", "Source", "StoredTensor", "StructureError", "TensorDictFuture", "UnsupportedOperationError",
    "__version__",
]  # fmt: skip

# Most programs have no stored tensors and do not look into files, so these modules are imported at first use.
if _typing.TYPE_CHECKING:
    from ._background import TensorDictFuture as TensorDictFuture
    from ._description import Description as Description
    from ._description import DescriptionRow as DescriptionRow
    from ._inspection import Problem as Problem
    from ._inspection import Report as Report
    from ._inspection import Tree as Tree
    from ._stored import StoredTensor as StoredTensor
else:
    __getattr__ = _lazy_names(
        __name__,
        {
            "._description": ["Description", "DescriptionRow"],
            "._inspection": ["Problem", "Report", "Tree"],
            "._stored": ["StoredTensor"],
            "._background": ["TensorDictFuture"],
        },
    )[0]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


with _pause_collector():
    _load_plugins()
