"""The alias: ``import tensordict`` imports td under the module names of tensordict.

Alias modules in ``sys.modules`` look up each attribute in ``td`` when it is first accessed. A finder on
``sys.meta_path`` raises for submodules that td does not have, with a message that names td.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import td
from td_core import MissingPluginError
from td_core.spi import RULES

from . import _foreign_pickles, _private_names

__all__ = ["install_as_tensordict"]

ROOT = "tensordict"

#: The file that the alias modules name as theirs; child processes of ``python -m td run`` import it.
STAND_IN_FILE = str(Path(__file__).parent / "_stand_in" / ROOT / "__init__.py")

#: The tensordict release whose interface and files td follows; programs compare it to choose what they call.
RELEASE = "0.15.3"

#: Per module, the root first, the names of a star import. By attribute, every module provides all names of td.
MODULES: dict[str, tuple[str, ...]] = {
    "": (
        "KEY_SEPARATOR", "LazyStackedTensorDict", "LazyStackedTensorDictStore", "MemoryMappedTensor", "MetaData",
        "NestedKey", "NonTensorData", "NonTensorDataBase", "NonTensorStack", "PackLayout", "PersistentTensorDict",
        "TensorAttrs", "TensorClass", "TensorClassModuleBase", "TensorClassModuleWrapper", "TensorCollection",
        "TensorDict", "TensorDictBase", "TensorDictParams", "TensorDictStore", "TypedTensorDict", "UnbatchedTensor",
        "__version__", "append_memmap", "as_tensordict_module", "assert_allclose_td", "assert_close",
        "capture_non_tensor_stack", "cat", "collate", "default_is_leaf", "dense_stack_tds", "from_any", "from_arrow",
        "from_consolidated", "from_csv", "from_dataclass", "from_dict", "from_h5", "from_json", "from_module",
        "from_modules", "from_namedtuple", "from_pandas", "from_parquet", "from_pytree", "from_safetensors",
        "from_struct_array", "from_tuple", "from_zarr", "fromkeys", "get_defaults_to_none", "get_printoptions",
        "group_by", "is_bool", "is_floating", "is_inexact", "is_integer", "is_leaf_nontensor", "is_memmap_archive",
        "is_non_tensor", "is_tensor_collection", "is_tensorclass", "lazy_legacy", "lazy_stack", "list_to_stack", "load",
        "load_memmap", "make_tensordict", "maybe_dense_stack", "memmap", "merge_tensordicts", "pack_memmap", "pad",
        "pad_sequence", "parse_tensor_dict_string", "refresh_archive_checksums", "save", "set_capture_non_tensor_stack",
        "set_get_defaults_to_none", "set_lazy_legacy", "set_list_to_stack", "set_printoptions", "stack", "tensorclass",
        "to_arrow", "to_safetensors", "unpack_memmap", "unpad_sequence", "unravel_key", "unravel_key_list",
        "unravel_key_to_tuple",
    ),
    "_C": (),
    "_lazy": (),
    "_nestedkey": (),
    "_pytree": (),
    "_reductions": (),
    "_td": (),
    "_tensorcollection": (),
    "_unbatched": (),
    "base": (
        "NO_DEFAULT", "TensorDictBase", "from_any", "from_dict", "from_namedtuple", "from_struct_array", "from_tuple",
        "get_defaults_to_none", "is_tensor_collection", "set_get_defaults_to_none",
    ),
    "functional": (
        "collate", "dense_stack_tds", "group_by", "make_tensordict", "merge_tensordicts", "pad", "pad_sequence",
        "unpad_sequence",
    ),
    "memmap": ("MemoryMappedTensor",),
    "nn": (
        "AddStateIndependentNormalScale", "CompositeDistribution", "CudaGraphModule", "EnsembleModule", "InteractionType",
        "NormalParamExtractor", "OneHotCategorical", "ProbabilisticTensorDictModule",
        "ProbabilisticTensorDictSequential", "TensorClassModuleBase", "TensorClassModuleWrapper", "TensorDictModule",
        "TensorDictModuleBase", "TensorDictModuleWrapper", "TensorDictParams", "TensorDictSequential",
        "TruncatedNormal", "WrapModule", "add_custom_mapping", "as_tensordict_module", "biased_softplus",
        "composite_lp_aggregate", "dispatch", "interaction_type", "inv_softplus", "make_tensordict", "mappings",
        "rand_one_hot", "set_composite_lp_aggregate", "set_interaction_type", "set_skip_existing", "skip_existing",
    ),
    "nn.common": (
        "TensorDictModule", "TensorDictModuleBase", "TensorDictModuleWrapper", "WrapModule", "as_tensordict_module",
        "dispatch",
    ),
    "nn.cudagraphs": ("CudaGraphModule",),
    "nn.distributions": (
        "AddStateIndependentNormalScale", "CompositeDistribution", "Delta", "InteractionType", "NormalParamExtractor",
        "OneHotCategorical", "TruncatedNormal", "add_custom_mapping", "mappings", "rand_one_hot",
        "set_interaction_type",
    ),
    "nn.distributions.composite": ("CompositeDistribution",),
    "nn.distributions.continuous": ("AddStateIndependentNormalScale", "Delta", "NormalParamExtractor"),
    "nn.distributions.discrete": ("OneHotCategorical",),
    "nn.distributions.truncated_normal": ("TruncatedNormal", "TruncatedStandardNormal"),
    "nn.distributions.utils": (),
    "nn.ensemble": ("EnsembleModule",),
    "nn.functional_modules": (),
    "nn.params": ("TensorDictParams",),
    "nn.probabilistic": (
        "InteractionType", "ProbabilisticTensorDictModule", "ProbabilisticTensorDictSequential", "interaction_type",
        "set_interaction_type",
    ),
    "nn.sequence": ("TensorDictSequential",),
    "nn.tensorclass_module": ("TensorClassModuleBase", "TensorClassModuleWrapper"),
    "nn.utils": (
        "add_custom_mapping", "biased_softplus", "composite_lp_aggregate", "expln", "inv_softplus", "mappings",
        "set_composite_lp_aggregate", "set_skip_existing", "skip_existing",
    ),
    "persistent": (),
    "prototype": ("symbolic_trace",),
    "prototype.fx": ("TDGraphModule", "symbolic_trace"),
    "store": ("LazyStackedTensorDictStore", "STORE_BACKENDS", "TensorDictStore"),
    "tensorclass": (
        "MetaData", "NonTensorData", "NonTensorDataBase", "NonTensorStack", "TensorAttrs", "TensorClass",
        "from_dataclass", "is_non_tensor", "tensorclass",
    ),
    "tensordict": (
        "LazyStackedTensorDict", "MemoryMappedTensor", "NO_DEFAULT", "NestedKey", "TensorDict", "TensorDictBase",
        "assert_allclose_td", "dense_stack_tds", "expand_as_right", "expand_right", "is_tensor_collection",
        "is_tensorclass", "make_tensordict", "merge_tensordicts", "pad", "pad_sequence",
    ),
    "typedtensordict": ("TypedTensorDict",),
    "utils": (
        "KEY_SEPARATOR", "NestedKey", "unravel_key", "unravel_key_list", "unravel_key_to_tuple", "Buffer", "DeviceType",
        "IndexType", "LinkedList", "TensorDictFuture", "assert_allclose_td", "assert_close",
        "capture_non_tensor_stack", "expand_as_right", "expand_right", "get_printoptions", "is_bool", "is_floating",
        "is_inexact", "is_integer", "is_non_tensor", "is_tensorclass", "isin", "lazy_legacy", "list_to_stack",
        "parse_tensor_dict_string", "print_directory_tree", "remove_duplicates", "set_capture_non_tensor_stack",
        "set_lazy_legacy", "set_list_to_stack", "set_printoptions",
    ),
}  # fmt: skip

#: Names that td defines in another module, or that only pickles refer to: (module, name) -> (module, name) in td.
ELSEWHERE = {
    ("_C", "_unravel_key_to_tuple"): ("td._private_names", "unravel_key_to_tuple"),
    ("_C", "unravel_key"): ("td._private_names", "unravel_key"),
    ("_C", "unravel_keys"): ("td._private_names", "unravel_key"),
    ("_reductions", "_make_td"): ("td._foreign_pickles", "make"),
    ("_reductions", "_rebuild_tensordict_files_consolidated"): ("td._foreign_pickles", "make_consolidated"),
    ("_unbatched", "UnbatchedTensor"): ("td._foreign_pickles", "make_unbatched"),
    ("store", "LazyStackedTensorDictStore"): ("td_redis", "LazyStackedTensorDictStore"),
    ("store", "STORE_BACKENDS"): ("td_redis", "STORE_BACKENDS"),
    ("store", "TensorDictStore"): ("td_redis", "TensorDictStore"),
    ("tensorclass", "_reconstruct_typed_metadata"): ("td._foreign_pickles", "make_metadata"),
    ("", "LazyStackedTensorDictStore"): ("td_redis", "LazyStackedTensorDictStore"),
    ("", "PersistentTensorDict"): ("td._persistent_names", "PersistentTensorDict"),
    ("", "TensorDictStore"): ("td_redis", "TensorDictStore"),
    ("", "from_arrow"): ("td_arrow", "from_arrow"),
    ("", "from_csv"): ("td_arrow", "from_csv"),
    ("", "from_h5"): ("td_hdf5", "from_h5"),
    ("", "from_json"): ("td_arrow", "from_json"),
    ("", "from_pandas"): ("td_arrow", "from_pandas"),
    ("", "from_parquet"): ("td_arrow", "from_parquet"),
    ("", "from_safetensors"): ("td_safetensors", "from_safetensors"),
    ("", "from_zarr"): ("td_zarr", "from_zarr"),
    ("", "to_arrow"): ("td_arrow", "to_arrow"),
    ("", "to_safetensors"): ("td_safetensors", "to_safetensors"),
    ("", "unravel_key"): ("td._private_names", "unravel_key"),
    ("", "unravel_key_to_tuple"): ("td._private_names", "unravel_key_to_tuple"),
    ("base", "_ACCEPTED_CLASSES"): ("td._private_names", "ACCEPTED_CLASSES"),
    ("base", "_NESTED_TENSORS_AS_LISTS"): ("td._private_names", "MEMBERS_AS_NODES"),
    ("base", "_default_is_leaf"): ("td", "default_is_leaf"),
    ("base", "_is_leaf_nontensor"): ("td", "is_leaf_nontensor"),
    ("base", "CompatibleType"): ("typing", "Any"),
    ("base", "from_csv"): ("td_arrow", "from_csv"),
    ("base", "from_h5"): ("td_hdf5", "from_h5"),
    ("base", "from_json"): ("td_arrow", "from_json"),
    ("base", "from_pandas"): ("td_arrow", "from_pandas"),
    ("base", "from_parquet"): ("td_arrow", "from_parquet"),
    ("base", "from_zarr"): ("td_zarr", "from_zarr"),
    ("nn.distributions.composite", "_add_suffix"): ("td_nn._composite", "add_suffix"),
    ("memmap", "_is_writable"): ("td_memmap._fs", "may_share"),
    ("nn.functional_modules", "_exclude_td_from_pytree"): ("td._private_names", "exclude_from_pytree"),
    ("nn.probabilistic", "_use_generator"): ("td_nn._generators", "use_generator"),
    ("nn.utils", "_set_dispatch_td_nn_modules"): ("td_nn._switches", "set_dispatch"),
    ("nn.utils", "_set_skip_existing_None"): ("td_nn._switches", "skip_as_block_says"),
    ("persistent", "PersistentTensorDict"): ("td._persistent_names", "PersistentTensorDict"),
    ("prototype", "symbolic_trace"): ("td_nn.fx", "symbolic_trace"),
    ("prototype.fx", "TDGraphModule"): ("td_nn.fx", "TDGraphModule"),
    ("prototype.fx", "symbolic_trace"): ("td_nn.fx", "symbolic_trace"),
    ("utils", "DeviceType"): ("td_core.typing", "DeviceType"),
    ("utils", "IndexType"): ("typing", "Any"),
    ("utils", "prod"): ("math", "prod"),
    ("utils", "unravel_key"): ("td._private_names", "unravel_key"),
    ("utils", "unravel_key_to_tuple"): ("td._private_names", "unravel_key_to_tuple"),
    ("utils", "unravel_keys"): ("td._private_names", "unravel_key"),
    ("utils", "_getitem_batch_size"): ("td._private_names", "index_batch_size"),
    ("utils", "_is_non_tensor"): ("td._private_names", "is_non_tensor"),
    ("utils", "_is_tensorclass"): ("td", "is_tensorclass"),
    ("utils", "_maybe_correct_neg_dim"): ("td._private_names", "wrap_dim"),
    ("utils", "_shape"): ("td._private_names", "get_shape"),
    ("utils", "_unravel_key_to_tuple"): ("td._private_names", "unravel_key_to_tuple"),
    ("utils", "_zip_strict"): ("td._private_names", "zip_strict"),
    ("utils", "is_seq_of_nested_key"): ("td._private_names", "is_seq_of_nested_key"),
    ("utils", "logger"): ("td._private_names", "logger"),
    ("utils", "_LockedSchema"): ("td._foreign_pickles", "LockedSchema"),
    ("utils", "_StringOnlyDict"): ("builtins", "dict"),
}

#: Names of :data:`ELSEWHERE` that programs assign, so that td calls their function instead.
REPLACEABLE = {("memmap", "_is_writable")}


class Alias(ModuleType):
    """A module with the name of a tensordict module and the attributes of td."""

    def __init__(self, name: str, home: str, names: Sequence[str]) -> None:
        super().__init__(name, f"Names of td under {name}, see td.install_as_tensordict.")
        self.__spec__ = ModuleSpec(name, None, origin="td", is_package=True)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__file__ = STAND_IN_FILE
        self.__all__ = list(names)
        self._home = home

    def __getattr__(self, name: str) -> Any:
        if (self._home, name) in ELSEWHERE:
            module, there = ELSEWHERE[self._home, name]
            try:
                value = getattr(import_module(module), there)
            except ModuleNotFoundError as error:
                missing = str(error.name).partition(".")[0].replace("_", "-")
                reason = f"{self.__name__}.{name} is provided by {MissingPluginError.describe(missing)}"
                value = _Missing(name, (), {"_reason": reason})
        elif name in dir(td) or name in td._HIDDEN:
            value = getattr(td, name)
        else:
            raise AttributeError(_absent(self.__name__, name))
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if (self.__dict__.get("_home"), name) in REPLACEABLE:
            module, there = ELSEWHERE[self._home, name]
            setattr(import_module(module), there, value)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


class Absences:
    """Import finder that raises a clear ImportError for names that the alias does not have."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError for every module below the alias; return None for others."""
        parent, _, last = name.rpartition(".")
        if isinstance(sys.modules.get(parent), Alias):
            raise ImportError(_absent(parent, last))


class _Missing(type):
    """Class of the placeholders for names of packages that are not installed. Any use of one raises MissingPluginError."""

    _reason: str

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise MissingPluginError(cls._reason)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingPluginError(cls._reason)


def _absent(module: str, name: str) -> str:
    return (
        f"{module}.{name} is not provided by td, which stands in for {ROOT} here (td.install_as_tensordict()); "
        f"it has the names in dir({module}), and programs that need this one run with {ROOT} itself"
    )


def install_as_tensordict() -> None:
    r"""Make ``import tensordict`` and the imports of its documented submodules return td, in this process.

    Programs written for tensordict then run, and its pickles load, also with
    ``torch.load(weights_only=True)`` if they contain no user-defined class. Call it before anything imports
    ``tensordict``; calling it again is a no-op. ``tensordict.__version__`` is the release whose interface td follows.
    Afterwards collections count as mappings, see :func:`td_core.count_as_mapping`, and have a length of 0 without batch dims.
    They have the private methods that public programs call, such as ``_fast_apply``, and a ``NonTensorStack`` counts as a lazy
    stack. The page "Migrating from tensordict" lists the other rules of tensordict that hold then.

    Raises:
        ImportError: tensordict is already imported.

    >>> import subprocess, sys
    >>> program = "import td; td.install_as_tensordict(); from tensordict import TensorDict; print(TensorDict(a=1))"
    >>> subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    'TensorDict(batch_size=[], fields={a: i64[]})\n'
    """
    present = sys.modules.get(ROOT)
    if isinstance(present, Alias):
        return
    if present is not None:
        place = getattr(present, "__file__", None) or "an unknown place"
        raise ImportError(
            f"td cannot stand in for {ROOT}: the module {ROOT} is imported already, from {place}; "
            "call td.install_as_tensordict() before anything imports it"
        )
    root = Alias(ROOT, "", MODULES[""])
    root.__dict__["__version__"] = RELEASE
    modules = {ROOT: root}
    for home, names in MODULES.items():
        if not home:
            continue
        modules[f"{ROOT}.{home}"] = module = Alias(f"{ROOT}.{home}", home, names)
        parent, _, last = module.__name__.rpartition(".")
        # memmap and tensorclass are modules and functions; the attribute of the parent must be the function.
        if last not in modules[parent].__all__:
            modules[parent].__dict__[last] = module
    sys.modules.update(modules)
    sys.meta_path.insert(0, Absences())
    td.count_as_mapping()
    RULES.follows_tensordict = True
    td.set_printoptions(sort_keys="alphabetical", max_entries=None).set()
    _private_names.add_private_members()
    _foreign_pickles.accept()
    # With a pair, older releases raise an error in each load with weights_only=True.
    if torch.__version__ >= "2.6":
        torch.serialization.add_safe_globals(
            [(getattr(modules[f"{ROOT}.{home}"], name), f"{ROOT}.{home}.{name}") for home, name in _SAFE]
        )
    torch.serialization.add_safe_globals([getattr(torch.return_types, name) for name in _SAFE_OF_TORCH])


_SAFE = (
    ("_reductions", "_make_td"),
    ("_reductions", "_rebuild_tensordict_files_consolidated"),
    ("_td", "TensorDict"),
    ("_lazy", "LazyStackedTensorDict"),
    ("_unbatched", "UnbatchedTensor"),
    ("tensorclass", "NonTensorData"),
    ("tensorclass", "MetaData"),
    ("tensorclass", "NonTensorStack"),
    ("utils", "_LockedSchema"),
    ("utils", "_StringOnlyDict"),
)
_SAFE_OF_TORCH = ("max", "min", "cummax", "cummin")
