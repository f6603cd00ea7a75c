"""Public names: lazy imports, public modules for pickles, and the names and signatures of built methods and classmethods."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

from .._torch.private import add_safe_name
from ..errors import FIRST_PARTY, MissingPluginError

DefinedT = TypeVar("DefinedT")
MethodT = TypeVar("MethodT", bound=Callable[..., object])
P = ParamSpec("P")
R = TypeVar("R")

#: By distribution: the public names of a sibling that no package above it has; one string each, as lists would slow the import.
SIBLING_NAMES = {
    "td-store": "StoredTensor",
    "td-memmap": (
        "AppendError FileTakenError MemoryMappedTensor NoFileError PickleRefusedError append_memmap "
        "is_memmap_archive load_memmap memmap memmap_like pack_memmap refresh_archive_checksums unpack_memmap"
    ),
    "td-tensorclass": (
        "MetaData NonTensorData NonTensorDataBase NonTensorStack TensorAttrs TensorClass TypedTensorDict "
        "UnbatchedTensor UnknownFieldError from_dataclass is_non_tensor is_tensorclass tensorclass"
    ),
    "td-distributed": (
        "DistributedStateful all_gather all_reduce broadcast consolidate from_buffer from_consolidated "
        "from_remote_init gather_and_stack init_remote irecv is_consolidated isend recv reduce scatter send "
        "storage_of"
    ),
    "td-nn": (
        "AddStateIndependentNormalScale CompositeDistribution CudaGraphModule Delta EnsembleModule FlowReport "
        "InteractionType MissingKeyError ModuleKeysError NormalParamExtractor OneHotCategorical OutputError "
        "ProbabilisticTensorDictModule ProbabilisticTensorDictSequential SelectionError TensorClassModuleBase "
        "TensorClassModuleWrapper TensorDictModule TensorDictModuleBase TensorDictModuleWrapper "
        "TensorDictSequential TruncatedNormal TruncatedStandardNormal WrapModule add_custom_mapping "
        "as_tensordict_module composite_lp_aggregate dispatch interaction_type mappings rand_one_hot "
        "set_composite_lp_aggregate set_interaction_type set_skip_existing skip_existing"
    ),
    "td-data": (
        "BlockSampler Concat Loader MixtureSampler Packed PrioritizedSampler RandomSampler ReplayBuffer Sampler "
        "SequentialSampler SliceSampler Slices WeightedRandomSampler prefetch"
    ),
    "td-safetensors": "MappedTensor from_safetensors to_safetensors",
    "td-zarr": "ZarrTensorDict from_zarr to_zarr",
    "td-hdf5": "DatasetSource PersistentTensorDict from_h5 to_h5",
    "td-arrow": (
        "BatchIterator TableWriter arrow_schema from_arrow from_csv from_json from_mds from_pandas from_parquet "
        "iter_batches to_arrow to_csv to_json to_mds to_pandas"
    ),
    "td-remote": "Remote cache_info copy",
    "td-redis": (
        "Connection LazyStackedTensorDictStore RedisSource STORE_BACKENDS TensorDictStore from_store to_store"
    ),
}


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str] | Mapping[str, str]], hidden: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build ``__getattr__`` and ``__dir__`` of a package that imports its public names at their first use.

    >>> find, list_names = lazy_names("json", {"json.decoder": ["JSONDecodeError"]})
    >>> list_names(), find("JSONDecodeError").__name__
    (['JSONDecodeError'], 'JSONDecodeError')
    """
    # ``modules`` maps relative or absolute module names to names in them, or to a mapping from public names to these. The
    # last module wins for a repeated name. ``__dir__`` lists no name of ``hidden``.
    homes = {
        name: (module, names[name] if isinstance(names, Mapping) else name)
        for module, names in modules.items()
        for name in names
    }

    def find(name: str) -> object:
        if name not in homes:
            raise _explain_absence(package, name)
        module, original = homes[name]
        try:
            value = getattr(import_module(module, package), original)
        except ModuleNotFoundError as error:
            missing = (error.name or "").replace("_", "-")
            if missing not in FIRST_PARTY:
                raise
            told = f"{package}.{name} is in {MissingPluginError.describe(missing)}"
            raise ModuleNotFoundError(told, name=error.name) from error
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(homes.keys() - {*hidden})


def _explain_absence(package: str, name: str) -> Exception:
    """Build the error for a name that a package lacks, with the package that has it."""
    home = next((home for home, names in SIBLING_NAMES.items() if name in names.split()), "")
    core = __name__.partition(".")[0]
    if not home and package.partition(".")[0] != core and name in getattr(sys.modules[core], "__all__", ()):
        home = core
    hint = ""
    if home:
        module = home.replace("-", "_")
        hint = f": it is in {module if find_spec(module) else MissingPluginError.describe(home)}"
    caller = sys._getframe(2)
    while caller.f_code.co_name == "__getattr__" and caller.f_back is not None:
        caller = caller.f_back
    # After an AttributeError, the statement "from package import name" raises an error of its own, without the hint.
    if hint and caller.f_code.co_name == "_handle_fromlist":
        return ImportError(f"cannot import name {name!r} from {package!r}{hint}", name=name)
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}")


class LazyFunction:
    """A function that is imported when it is first called, or when its signature is first read.

    As an attribute of a format, it is an operation of the format whose module imports a heavy library.

    >>> loads = LazyFunction("json", "json", "loads")
    >>> loads("[1]"), list(inspect.signature(loads).parameters)[0]
    ([1], 's')
    """

    def __init__(self, package: str, module: str, name: str) -> None:
        self._package, self._module, self.__name__ = package, module, name

    def _find(self) -> Callable[..., object]:
        found: Callable[..., object] = getattr(import_module(self._module, self._package), self.__name__)
        return found

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Import and call the function."""
        return self._find()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._find())

    def __repr__(self) -> str:
        return f"<lazy function {self.__name__} of {self._package}>"


def set_module(name: str, *, in_files: bool = False) -> Callable[[DefinedT], DefinedT]:
    """Return a decorator that sets ``__module__`` to a public name, so that pickles do not name private modules.

    ``in_files``: let ``torch.load(weights_only=True)`` accept the class, also under the name of its own module.

    >>> @set_module("mypackage")
    ... class Image:
    ...     pass
    >>> Image.__module__
    'mypackage'
    """

    def decorate(defined: Any) -> Any:
        before, defined.__module__ = defined.__module__, name
        if in_files:
            torch.serialization.add_safe_globals([defined])
            add_safe_name(defined, f"{before}.{defined.__name__}")
        return defined

    return decorate


def name_method(method: MethodT, name: str, doc: str) -> MethodT:
    """Give a method that a factory built its name and docstring."""
    method.__name__, method.__doc__ = name, doc
    # torch.compile keeps graphs by code object, up to a limit, and the closures of one factory share theirs.
    method.__code__ = method.__code__.replace(co_name=name)
    return method


def make_classmethod(
    function: Callable[P, R], *, dense: bool = False, with_class: Callable[..., Any] | None = None
) -> classmethod[Any, P, R]:
    """Build a classmethod with the signature and docstring of a function, for the hook ``td_methods``.

    Args:
        function: the function, without a parameter for the class.
        dense: convert the collection that ``function`` returns to the class on which the method is called.
        with_class: function to call instead, with the class as its first argument; for example
            ``lambda cls, path: my_format.load_as(cls, path)``.

    >>> def from_range(stop: int):
    ...     return TensorDict({"a": torch.arange(stop)})
    >>> class Numbers(TensorDict):
    ...     from_range = make_classmethod(from_range, dense=True)
    >>> type(Numbers.from_range(3)).__name__
    'Numbers'
    """

    @functools.wraps(function)
    def method(cls: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs) if with_class is None else with_class(cls, *args, **kwargs)
        return cls._wrap_dense(result) if dense else result

    signature = inspect.signature(function)
    first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [first, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return classmethod(method)
