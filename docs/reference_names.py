"""Names of the reference: the public names in groups and by package, and where the code spans of pages lead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

#: The groups of methods of all collections in the order of the reference: title, and the mixins or the packages that have them.
GROUPS = {
    "Entries": "EntryMixin TensorDict StructureMixin",
    "Attributes": "MetadataMixin",
    "Writing in place": "UpdateMixin",
    "Shapes and rows": "ShapeMixin ElementMixin",
    "Joining": "JoinMixin",
    "Selecting": "SelectMixin",
    "Pointwise operations": "PointwiseMixin",
    "Reductions": "ReductionMixin",
    "Along dims": "AlongMixin",
    "Dtypes, copies and gradients": "DtypeMixin CastingMixin",
    "Devices": "DeviceMixin",
    "Functions of leaves": "ApplyMixin ParallelMixin",
    "Conversion": "ConversionMixin ReprMixin",
    "Modules": "ModuleMixin",
    "Locking": "LockMixin",
    "Saving": "SaveMixin td-memmap td-safetensors td-hdf5 td-zarr td-redis",
    "Tables": "td-arrow",
    "Values": "td-tensorclass",
    "Communication": "td-distributed",
}
#: Names that mean something else in a text, such as a variable, a type or a class of a program, unless they are called.
AMBIGUOUS = {
    "bool", "bytes", "data", "device", "dim", "double", "dtype", "float", "get", "grad", "half", "int", "names", "set", "shape",
    "size", "td", "type", "depth", "attrs", "map", "mod", "copy", "any", "all", "max", "min", "sum", "Record",
}  # fmt: skip
#: Public names that a star import leaves out.
UNSTARRED = {"td_core": ("open",)}
#: What variables of the pages are.
VARIABLES = {
    **dict.fromkeys(("batch", "data", "grads", "params", "part", "result", "stack", "target", "td"), "td_core.TensorDict"),
    "params.data": "td_core.TensorDict",
    "loader": "td_data.Loader",
    "ring": "td_data.ReplayBuffer",
}  # fmt: skip
#: Where names lead that are not a method of collections, and of more than one class: to the class that pages mean.
MEMBERS = {
    **dict.fromkeys(("in_keys", "out_keys"), "td_nn.TensorDictModule"),
    **dict.fromkeys(
        ("default_interaction_type", "log_prob_key", "num_samples", "return_composite"), "td_nn.ProbabilisticTensorDictModule"
    ),
    "get_dist": "td_nn.ProbabilisticTensorDictModule.get_dist",
    "log_prob_keys": "td_nn.ProbabilisticTensorDictModule.log_prob_keys",
    "log_prob_composite": "td_nn.CompositeDistribution.log_prob_composite",
    "select_out_keys": "td_nn.TensorDictModuleBase.select_out_keys",
    "select_subsequence": "td_nn.TensorDictSequential.select_subsequence",
    "from_tensordict": "td_tensorclass.TensorClass.from_tensordict",
    **dict.fromkeys(("install_as_tensordict", "td.install_as_tensordict"), "td.install_as_tensordict"),
}  # fmt: skip
#: The role of a docstring, such as a link to a class.
ROLE = re.compile(r":\w+:`~?([^`]+)`")
#: A code span, or a fence, heading or link, in which no code span is replaced.
SPAN = re.compile(
    r"(?ms)^ *```.*?^ *```|^#[^\n]*|\[[^]\n]*\]\([^)]*\)|`(?P<name>@?[\w.]+)(?P<call>\([^`\n]*\))?`"
)


def list_packages() -> list[str]:
    """Return the packages that have a page in the reference."""
    pages = Path(__file__).parent.glob("reference/td_*.md")
    packages = sorted(path.stem for path in pages)
    return sorted(packages, key=lambda package: package != "td_core")


@cache
def list_methods() -> dict[str, list[str]]:
    """Return the public methods of collections in each group; ValueError if one is in none."""
    siblings = import_module("td_core.plugins.siblings")
    collection = import_module("td_core").TensorDict
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    places = {owner: title for title, owners in GROUPS.items() for owner in owners.split()}
    for name in sorted(name for name in dir(collection) if not name.startswith("_")):
        owner = next(cls.__name__ for cls in collection.__mro__ if name in vars(cls))
        title = places.get(siblings.METHODS.get(name, owner))
        if title is None:
            raise ValueError(
                f"no group of docs/reference_names.py has the methods of {owner}, such as {name}"
            )
        groups[title].append(name)
    return groups


@cache
def list_names(package: str) -> dict[str, dict[str, Any]]:
    """Return the public classes, errors, functions and constants of a package, by kind, with what they are."""
    module = import_module(package)
    kinds: dict[str, dict[str, Any]] = {"class": {}, "error": {}, "function": {}}
    for name in (*getattr(module, "__all__", ()), *UNSTARRED.get(package, ())):
        found = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(found) or getattr(found, "__name__", name) != name:
            continue  # a second name of a function has the docstring of the first
        is_error = inspect.isclass(found) and issubclass(found, BaseException)
        kind = "error" if is_error else "class" if inspect.isclass(found) else "function"
        kinds[kind][name] = found
    return kinds


def list_members(package: str) -> Iterator[str]:
    """Yield the public members of the classes of a package that have a docstring."""
    for name, cls in list_names(package)["class"].items():
        for member in (each for each in dir(cls) if not each.startswith("_")):
            found = inspect.getattr_static(cls, member)
            if (inspect.isroutine(found) or isinstance(found, property)) and inspect.getdoc(found):
                yield f"{package}.{name}.{member}"


@cache
def find_targets() -> dict[str, str]:
    """Return the place in the reference of each name that a page may have as code."""
    core, *others = (
        [f"{package}.{name}" for name in chain(*list_names(package).values())] for package in list_packages()
    )
    spi = import_module("td_core.spi")
    hooks = [f"td_core.spi.{name}" for name in spi.__all__ if callable(getattr(spi, name))]
    methods = [f"td_core.TensorDict.{name}" for name in chain(*list_methods().values())]
    targets = dict(MEMBERS)
    # Of two places of a name, the last one counts.
    for place in chain(hooks, *reversed(others), methods, core):
        full = place.partition(".")[2].removeprefix("spi.")
        short = full.removeprefix("TensorDict.")
        words = {place, full, f"td.{full}", short}
        targets |= {f"{word}()": place for word in words}
        targets |= dict.fromkeys(words - AMBIGUOUS, place)
    members = [*chain(*map(list_members, list_packages()[1:])), *methods]
    targets |= {word: place for place in members for word in (place, place.partition(".")[2])}
    return targets


def find_target(name: str, *, is_called: bool) -> str | None:
    """Return the place of a name, which can begin with a variable, or None."""
    targets = find_targets()
    variable, _, rest = name.rpartition(".")
    place = targets.get(f"{name}()") if is_called else None
    return place or targets.get(name.removeprefix("@")) or targets.get(f"{VARIABLES.get(variable)}.{rest}")


def link(match: re.Match[str]) -> str:
    """Return a code span as a link to its place in the reference, or as it is if it has none."""
    target = match["name"] and find_target(match["name"], is_called=bool(match["call"]))
    return f"[{match[0]}][{target}]" if target else match[0]


def link_role(match: re.Match[str]) -> str:
    """Return the role of a docstring as a link to its place in the reference, or as a code span if it has none."""
    target = find_target(match[1], is_called=False)
    return f"[`{match[1]}`][{target}]" if target else f"`{match[1]}`"
