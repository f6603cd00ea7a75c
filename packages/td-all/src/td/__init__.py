"""td-core with all of its siblings under one import.

It has every public name of ``td_core``, ``td_store``, ``td_memmap``, ``td_tensorclass``, ``td_distributed`` and ``td_nn``, and
those for Zarr groups that are opened; each name is loaded when it is first used. ``td.data`` is the package ``td_data``, and
``td.remote`` is ``td_remote``.

>>> import torch, td
>>> data = td.TensorDict({"obs": torch.zeros(3, 4), "task": "reach"}, batch_size=[3])
>>> data[0]["task"]
'reach'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import td_core as _td_core
import td_distributed as _td_distributed
import td_memmap as _td_memmap
import td_nn as _td_nn
import td_store as _td_store
import td_tensorclass as _td_tensorclass
from td import data as data
from td import remote as remote
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from td._alias import install_as_tensordict as install_as_tensordict
    from td_core import *  # noqa: F403
    from td_core import open as open  # noqa: A004
    from td_distributed import *  # noqa: F403
    from td_memmap import *  # type: ignore[assignment]  # noqa: F403
    from td_nn import *  # noqa: F403
    from td_store import *  # noqa: F403
    from td_tensorclass import *  # noqa: F403
    from td_zarr import ZarrTensorDict as ZarrTensorDict
    from td_zarr import from_zarr as from_zarr
    from td_zarr import to_zarr as to_zarr

__version__ = _td_core.__version__

# For a name in two packages (save, verify, ...), the last package wins: td_core comes last, since its functions are more general.
_PACKAGES = (_td_store, _td_nn, _td_distributed, _td_memmap, _td_tensorclass, _td_core)
_NAMES = {
    "._alias": ["install_as_tensordict"],
    **{package.__name__: package.__all__ for package in _PACKAGES},
    "td_core": [*_td_core.__all__, "open"],
}
__dir__ = _lazy_names(__name__, _NAMES)[1]
# A star import must not need a package that td-all does not require.
_STORES = {"td_zarr": ["ZarrTensorDict", "from_zarr", "to_zarr"]}
#: What only programs of tensordict use: names that can be imported, and that nothing lists.
_OF_TENSORDICT = {
    "._names_of_tensordict": ["lazy_legacy", "parse_tensor_dict_string", "set_lazy_legacy"],
    "td_core": [
        "KEY_SEPARATOR", "LinkedList", "NO_DEFAULT", "assert_allclose_td", "dense_stack_tds", "expand_as_right",
        "expand_right", "get_defaults_to_none", "is_bool", "is_floating", "is_inexact", "is_integer", "make_tensordict",
        "set_get_defaults_to_none", "unravel_key", "unravel_key_list", "unravel_key_to_tuple",
    ],
    "td_memmap": ["print_directory_tree"],
    "td_nn": ["biased_softplus", "expln", "inv_softplus"],
    "td_tensorclass": [
        "capture_non_tensor_stack", "is_leaf_nontensor", "list_to_stack", "set_capture_non_tensor_stack", "set_list_to_stack",
    ],
}  # fmt: skip
_HIDDEN = frozenset(name for names in _OF_TENSORDICT.values() for name in names)
_find_hidden, _find = (_lazy_names(__name__, names)[0] for names in (_OF_TENSORDICT, {**_NAMES, **_STORES}))

if not TYPE_CHECKING:  # type checkers use the imports above and cannot evaluate what follows

    def __getattr__(name: str) -> object:
        return (_find_hidden if name in _HIDDEN else _find)(name)

    # A star import must not hide the builtin function.
    __all__ = [name for name in __dir__() if name != "open"]
