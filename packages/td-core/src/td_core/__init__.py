"""A batched, nested dict[str, Tensor] that behaves like one tensor, and the registry of its plugins.

>>> import torch
>>> from td_core import TensorDict
>>> td = TensorDict({"obs": torch.zeros(3, 4), "info": {"step": torch.arange(3)}}, batch_size=[3])
>>> td[1]["info", "step"]
tensor(1)
"""

import typing as _typing

from ._python.collector import pause_collector as _pause_collector

with _pause_collector():
    # These register core's node kinds and pytrees.
    from . import kinds, pickles  # noqa: F401
    from ._convert.from_python import (
        from_any,
        from_dict,
        from_list,
        from_namedtuple,
        from_pytree,
        from_schema,
        from_struct_array,
        from_tuple,
        fromkeys,
    )
    from ._formats.saving import append, create, inspect, reopen, verify
    from ._formats.saving import open as open  # noqa: A004  not in __all__: a star import must not hide the builtin function
    from ._functions.collation import collate
    from ._functions.comparison import assert_close
    from ._functions.grouping import group_by, isin, remove_duplicates
    from ._functions.joining import (
        cat,
        lazy_stack,
        maybe_dense_stack,
        merge_tensordicts,
        stack,
    )
    from ._functions.modules import from_module, from_modules
    from ._functions.packing import PackLayout
    from ._functions.select import pad
    from ._functions.sequences import pad_sequence, unpad_sequence
    from ._kinds import first_class_dims as _first_class_dims  # noqa: F401
    from ._kinds import lazy_stack_pytree as _lazy_stack_pytree  # noqa: F401
    from ._kinds import registered as _registered  # noqa: F401
    from ._kinds.checkpoint import load, save
    from ._kinds.lazy_stack import LazyStackedTensorDict
    from ._kinds.parameters import TensorDictParams
    from ._kinds.tensordict import TensorDict
    from ._methods.collection import TensorCollection, TensorDictBase, count_as_mapping, is_tensor_collection
    from ._python.public_names import lazy_names as _lazy_names
    from ._python.settings import get_printoptions, set_printoptions
    from ._transforms import mapped_dims as _mapped_dims  # noqa: F401
    from ._tree.roles import Buffer
    from ._tree.views import default_is_leaf
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
    from .plugins.manager import load_plugins as _load_plugins
    from .plugins.manager import plugins
    from .typing import NestedKey

__all__ = [
    "TensorCollection", "TensorDict", "TensorDictBase", "LazyStackedTensorDict", "TensorDictParams", "Buffer", "from_any",
    "from_dict", "from_list", "from_module", "from_modules", "from_namedtuple", "from_pytree", "from_schema",
    "from_struct_array", "from_tuple", "fromkeys", "stack", "cat", "lazy_stack", "maybe_dense_stack", "merge_tensordicts",
    "collate", "group_by", "isin", "remove_duplicates", "pad", "pad_sequence", "unpad_sequence", "PackLayout",
    "assert_close", "is_tensor_collection", "default_is_leaf", "NestedKey", "count_as_mapping", "load", "save", "create",
    "append", "inspect", "reopen", "verify", "Tree", "Report", "Problem", "Description", "DescriptionRow", "plugins",
    "get_printoptions", "set_printoptions", "TensorDictError", "BatchSizeError", "CodecError", "CollectionIndexError",
    "CycleError", "DepthError", "DimError", "DimNamesError", "FormatError", "KeyMismatchError", "KeyPathError",
    "KeyTakenError", "KeyThroughLeafError", "LockedError", "MissingPluginError", "PluginError", "StructureError",
    "TensorDictFuture", "UnsupportedOperationError", "__version__",
]  # fmt: skip

# Most programs have no stored tensors and do not look into files, so these modules are imported at first use. StoredTensor is in
# td-store, so it is not in __all__: a star import must not need another package. The last names are for programs of tensordict
# (docs/migrating.md), and Encoded and Record for pickles of earlier releases.
if _typing.TYPE_CHECKING:
    from td_store import StoredTensor as StoredTensor

    from ._convert.description import Description as Description
    from ._convert.description import DescriptionRow as DescriptionRow
    from ._convert.from_python import make_tensordict as make_tensordict
    from ._encode.inspection import Problem as Problem
    from ._encode.inspection import Report as Report
    from ._encode.inspection import Tree as Tree
    from ._formats.background import TensorDictFuture as TensorDictFuture
    from ._functions.comparison import assert_allclose_td as assert_allclose_td
    from ._functions.joining import dense_stack_tds as dense_stack_tds
    from ._functions.shape import expand_as_right as expand_as_right
    from ._functions.shape import expand_right as expand_right
    from ._python.linked_list import LinkedList as LinkedList
    from ._python.settings import get_defaults_to_none as get_defaults_to_none
    from ._python.settings import set_get_defaults_to_none as set_get_defaults_to_none
    from ._torch.dtypes import is_bool as is_bool
    from ._torch.dtypes import is_floating as is_floating
    from ._torch.dtypes import is_inexact as is_inexact
    from ._torch.dtypes import is_integer as is_integer
    from ._tree.keys import KEY_SEPARATOR as KEY_SEPARATOR
    from ._tree.keys import unravel_key as unravel_key
    from ._tree.keys import unravel_key_list as unravel_key_list
    from ._tree.keys import unravel_key_to_tuple as unravel_key_to_tuple
    from .typing import NO_DEFAULT as NO_DEFAULT
else:
    __getattr__ = _lazy_names(
        __name__,
        {
            "._convert.description": ["Description", "DescriptionRow"],
            "._encode.inspection": ["Problem", "Report", "Tree"],
            "td_store": ["StoredTensor"],
            "._formats.background": ["TensorDictFuture"],
            "._convert.from_python": ["make_tensordict"],
            "._functions.comparison": ["assert_allclose_td"],
            "._functions.joining": ["dense_stack_tds"],
            "._functions.shape": ["expand_as_right", "expand_right"],
            "._python.linked_list": ["LinkedList"],
            "._python.settings": ["get_defaults_to_none", "set_get_defaults_to_none"],
            "._torch.dtypes": ["is_bool", "is_floating", "is_inexact", "is_integer"],
            "._tree.keys": ["KEY_SEPARATOR", "unravel_key", "unravel_key_list", "unravel_key_to_tuple"],
            ".typing": ["NO_DEFAULT"],
            "._encode.node_kinds": ["Encoded"],
            "._encode.records": ["Record"],
        },
    )[0]


def __dir__() -> list[str]:
    modules = {
        name for name, value in globals().items() if isinstance(value, type(_typing)) and name[0] != "_"
    }
    return sorted({*__all__, "open", *modules, *(name for name in globals() if name.startswith("__"))})


with _pause_collector():
    _load_plugins()
