"""Imports have one direction, between the packages and between the layers of td_core."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from project_imports import ROOT, SOURCES, imports, modules, own_module

from td_core.errors import FIRST_PARTY

pytestmark = pytest.mark.once  # the sources are the same in every environment

SIBLINGS = SOURCES.keys() - {"td_core", "td"}
#: The kit for formats, the siblings that build on it, and the modules of td_core that find at first use what has moved there.
STORE = "td_store"
ON_STORE = {name.replace("-", "_") for name, needs in FIRST_PARTY.items() if needs}
ALLOWED = {
    "td_core": set(),
    **{name: {"td_core", *([STORE] if name in ON_STORE else [])} for name in SIBLINGS},
    "td": {"td_core", *SIBLINGS},
}
MOVED = {"__init__", "pickles", "testing"}
FOR_TYPES = ("td_core", "__init__", "td_store.StoredTensor")
LONGEST_FILE = 700

# What packages outside of td_core and the examples may import of it, in addition to the names of td_core itself.
PUBLIC_MODULES = {"errors", "kinds", "pickles", "plugins", "spi", "testing", "typing"}
OUTSIDE = sorted(
    path
    for path in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/**/*.py")]
    if "td_core" not in path.parts
)

# A module may import from its own layer and from earlier ones. A folder includes its modules, if they are not named.
LAYERS = [
    ["errors", "typing", "_version"],
    ["_torch"],
    ["_python"],
    [
        "plugins.methods",
        "plugins.siblings",
    ],
    ["_plans"],
    ["_tree"],
    ["_writes"],
    ["_encode"],
    ["_formats"],
    ["_transforms"],
    ["_functions"],
    ["_convert"],
    ["_methods"],
    ["_kinds"],
    ["kinds"],
    ["pickles"],
    ["plugins.hookspecs"],
    ["spi"],
    ["plugins"],
    ["__init__"],
    ["testing", "__main__"],
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


#: Imports for types or by a string that close a circle in a sibling, as (package, module, imported module).
KNOWN = {
    ("td", "_alias", "__init__"),
    ("td", "_private_names", "__init__"),
    ("td_tensorclass", "_unbatched", "_stored_unbatched"),
}
#: Modules with lazy names, and those that are imported to register a plugin: only they import by a string.
DOORS = re.compile(r"__init__|__main__|spi|pickles|plugin|\w+_pickles|_?\w*methods")
ALL_MODULES = [(package, name) for package in sorted(SOURCES) for name in modules(package)]


def layer(module: str) -> int:
    """Return the layer number of a module of td_core, or of the package that contains it."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        number = LAYER.get(".".join(parts[:length]))
        if number is not None:
            return number
    pytest.fail(f"td_core.{module} is in no layer: add it to LAYERS of {Path(__file__).name}")


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that are on an import cycle or lead to one."""
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        free = {name for name, targets in left.items() if not targets & left.keys()}
        if not free:
            return sorted(left)
        left = {name: targets for name, targets in left.items() if name not in free}


@pytest.mark.parametrize(("package", "name"), ALL_MODULES)
def test_package_imports_only_allowed_packages(package: str, name: str) -> None:
    strangers = [
        f"line {found.line}: {found.target}"
        for found in imports(package, name)
        if found.target.split(".")[0] not in ALLOWED[package] | {package}
        and (package, name, found.target) != FOR_TYPES
    ]
    assert strangers == []


def test_core_names_store_only_in_modules_of_lazy_names() -> None:
    found = {
        name
        for name, path in modules("td_core").items()
        if re.search(rf'"{STORE}\b', path.read_text(encoding="utf-8"))
    }
    assert found == MOVED


@pytest.mark.parametrize("name", modules("td_core"))
def test_core_module_imports_no_later_layer(name: str) -> None:
    mine = layer(name)
    wrong = []
    for found in imports("td_core", name):
        target = own_module("td_core", found.target)
        if target is not None and layer(target) > mine:
            wrong.append(f"line {found.line}: {target} is of a later layer")
    assert wrong == []


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_imports_have_no_cycle(package: str) -> None:
    graph = {
        name: {
            own_module(package, found.target)
            for found in imports(package, name)
            if not (found.local or (found.by_string and DOORS.fullmatch(name)))
        }
        - {None, name, *(target for owner, source, target in KNOWN if (owner, source) == (package, name))}
        for name in modules(package)
    }
    assert cycle(graph) == []


@pytest.mark.parametrize("name", modules("td_core"))
def test_only_modules_of_lazy_names_import_by_string(name: str) -> None:
    strings = [found.target for found in imports("td_core", name) if found.by_string]
    assert strings == [] or DOORS.fullmatch(name)


def test_cycle_finds_modules_of_cycle() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.parametrize(("package", "name"), ALL_MODULES)
def test_function_does_not_import_project(package: str, name: str) -> None:
    # td_core loads plugins at import, so they import the rest of their package only when called.
    lazily = {package} if name in ("plugin", "_methods", "_non_tensor_methods") else set()
    # compat modules are imported when a file of an old release is read.
    hidden = [
        f"line {found.line}: {found.target}"
        for found in imports(package, name)
        if found.local
        and found.target.split(".")[0] not in lazily
        and not found.target.startswith(f"{package}.compat.")
    ]
    assert hidden == []


@pytest.mark.parametrize(("package", "name"), ALL_MODULES)
def test_module_outside_compat_imports_compat_only_in_function(package: str, name: str) -> None:
    eager = [
        f"line {found.line}: {found.target}"
        for found in imports(package, name)
        if not found.local and found.target.startswith(f"{package}.compat") and not name.startswith("compat")
    ]
    assert eager == []


@pytest.mark.parametrize(("package", "name"), ALL_MODULES)
def test_source_file_is_short_and_not_named_utils(package: str, name: str) -> None:
    path = modules(package)[name]
    assert path.stem not in {"utils", "_utils", "helpers", "_helpers"}, "a helper lives with its concept"
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{path.name} has {lines} lines: cut it along its concepts"


def private_names(text: str) -> list[str]:
    """Return the private names of td_core that a module imports, or reads from the module td_core."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append(f"{node.value.id}.{node.attr}")
    return [name for name in found if name.startswith("td_core.") and is_private(name.split(".")[1:])]


def is_private(parts: list[str]) -> bool:
    """Return True if a name in td_core is not public: a part starts with an underscore, or the module is not public."""
    hidden = any(part.startswith("_") and part != "__version__" for part in parts)
    return hidden or (len(parts) > 1 and parts[0] not in PUBLIC_MODULES)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_outside_core_imports_no_private_name_of_core(path: Path) -> None:
    assert private_names(path.read_text(encoding="utf-8")) == [], (
        "use td_core.spi, or move the work into td_core"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from td_core import TensorDict, __version__, spi", []),
        ("from td_core.spi import visit; from td_core.plugins.hookspecs import hookimpl", []),
        ("from td_core._tree.walks import visit", ["td_core._tree.walks.visit"]),
        ("from td_core._tree import walks", ["td_core._tree.walks"]),
        ("import td_core._tree.walks", ["td_core._tree.walks"]),
        ("import td_core; td_core.__main__.main()", ["td_core.__main__"]),
        ("from td_core.plugins._hooks import x", ["td_core.plugins._hooks.x"]),
        ("import td_core; td_core.Tree.show", []),
    ],
)
def test_private_names_finds_every_spelling(text: str, expected: list[str]) -> None:
    assert private_names(text) == expected
