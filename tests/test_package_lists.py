"""Every list of the packages, their extras, and the project's scripts and sessions names those that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from td_core.errors import MissingPluginError
from td_core.plugins.manager import FIRST_PARTY, GROUP

pytestmark = pytest.mark.once  # the sources are the same in every environment

ROOT = Path(__file__).parents[1]
#: The import names of the distributions.
MODULES = {path.parents[2].name: path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py")}
CORE, ALL = "td-core", "td-all"
PARTS = MODULES.keys() - {ALL}
SIBLINGS = PARTS - {CORE}
#: Packages of file formats and servers, which only extras of td-all install and which `td` does not import.
STORES = {"td-arrow", "td-hdf5", "td-redis", "td-safetensors", "td-zarr"}
#: Packages that `td` has as a module, under a name of its own.
MODULES_OF_TD = {"td-data", "td-remote"}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
#: Pages by path, which name extras, scripts and sessions.
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}


def read(path: str) -> str:
    """Return the text of a file of the project."""
    return (ROOT / path).read_text(encoding="utf-8")


def shorten(names: set[str]) -> set[str]:
    """Remove the prefix that all distributions share."""
    return {name.removeprefix("td-") for name in names}


#: A file, a pattern that finds each item of a list in it, and what the items are.
LISTS = [
    ("README.md", r"^\| `(td-\w+)` \| `(\w+)` \|", set(MODULES.items())),
    ("CONTRIBUTING.md", r'-e "?(td-\w+)', MODULES.keys()),
    ("docs/start.md", r"\./(td-\w+)", MODULES.keys()),
    ("docs/start.md", r"\[td-\w+\]\(packages/(\w+)\.md\)", shorten(MODULES.keys())),
    ("docs/reference/td.md", r"\]\((td_\w+)\.md\)", {MODULES[name] for name in PARTS - STORES}),
    ("packages/td-all/README.md", r"\]\(\.\./(td-\w+)\)", PARTS),
    ("packages/td-core/README.md", r"`(td-\w+)`", SIBLINGS),
    ("mkdocs.yml", r"- packages/(td-\w+)/src$", MODULES.keys()),
    (
        "mkdocs.yml",
        r"- (td-\w+): packages/(\w+)\.md$",
        {(name, name.removeprefix("td-")) for name in MODULES},
    ),
    ("mkdocs.yml", r": reference/(td\w*)\.md$", set(MODULES.values())),
    ("noxfile.py", r'"(td-\w+)"', MODULES.keys()),
    ("pyproject.toml", r'"packages/(td-\w+)/src"', MODULES.keys()),
    ("pyproject.toml", r'"(td(?:_\w+)?)"', set(MODULES.values())),
    ("packages/td-all/pyproject.toml", r'^    "(td-\w+) ', PARTS - STORES),
    ("packages/td-all/pyproject.toml", r'^\w+ = \["(td-\w+) ~= ', STORES),
    (
        "packages/td-all/src/td/__init__.py",
        r"^import (td_\w+) as",
        {MODULES[name] for name in PARTS - STORES - MODULES_OF_TD},
    ),
    ("packages/td-all/src/td/__init__.py", r"^from td import (\w+) as", shorten(MODULES_OF_TD)),
    (
        "packages/td-all/src/td/__init__.py",
        r"    from (td_\w+) import \*",
        {MODULES[name] for name in PARTS - STORES - MODULES_OF_TD},
    ),
    ("packages/td-all/src/td/__init__.py", r"``(td_\w+)``", {MODULES[name] for name in PARTS - STORES}),
]


@pytest.mark.parametrize(("path", "pattern", "wanted"), LISTS, ids=[f"{row[0]} {row[1]}" for row in LISTS])
def test_list_has_every_package(path: str, pattern: str, wanted: set[object]) -> None:
    assert set(re.findall(pattern, read(path), re.MULTILINE)) == wanted


def test_pages_exist_for_every_package_and_no_other() -> None:
    assert {path.stem for path in ROOT.glob("docs/packages/*.md")} == shorten(MODULES.keys())
    assert {path.stem for path in ROOT.glob("docs/reference/td*.md")} == set(MODULES.values())
    assert {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")} == MODULES.keys()


def test_navigation_has_every_page() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert set(re.findall(r": ([\w/]+\.md)$", read("mkdocs.yml"), re.MULTILINE)) == pages


@pytest.mark.parametrize("name", sorted(PARTS))
def test_build_file_has_entry_point_of_sibling(name: str) -> None:
    found = re.findall(
        rf"^\[project\.entry-points\.{GROUP}\]\n(.*)$", read(f"packages/{name}/pyproject.toml"), re.MULTILINE
    )
    module = f"{MODULES[name]}.plugin"
    assert found == ([f'{name.removeprefix("td-")} = "{module}"'] if name in SIBLINGS else [])
    assert not found or (ROOT / "packages" / name / "src" / f"{module.replace('.', '/')}.py").exists()


def test_first_party_plugins_are_the_siblings() -> None:
    assert set(FIRST_PARTY) == SIBLINGS


@pytest.mark.parametrize("name", sorted(SIBLINGS))
def test_first_party_plugin_lists_the_packages_that_its_build_file_requires(name: str) -> None:
    required = re.findall(r'^    "(td-\w+) ~=', read(f"packages/{name}/pyproject.toml"), re.MULTILINE)
    assert required == [CORE, *FIRST_PARTY[name]]


def list_commands(text: str) -> list[list[str]]:
    """Return the packages that each command for a checkout installs."""
    commands = re.findall(r"pip install ((?:\\\n|[^\n`])*)", text)
    return [names for command in commands if (names := re.findall(r"\./(?:packages/)?(td-\w+)", command))]


@pytest.mark.parametrize("path", [path for path in TEXTS if list_commands(TEXTS[path])])
def test_install_command_of_page_lists_what_its_packages_require(path: str) -> None:
    for names in list_commands(TEXTS[path]):
        assert {other for name in names for other in FIRST_PARTY.get(name, ())} <= {*names}


@pytest.mark.parametrize("name", sorted(SIBLINGS))
def test_install_command_of_error_lists_what_the_package_requires(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MissingPluginError, "unavailable", {})
    [names] = list_commands(MissingPluginError.describe(name))
    assert names == [*FIRST_PARTY[name], name]


@pytest.mark.parametrize("path", [path for path in TEXTS if path != "CHANGELOG.md"])
def test_page_names_what_exists(path: str) -> None:
    text = TEXTS[path]
    for name, extra in re.findall(r"(td-\w+)\[(\w+)\]", text):
        assert f"\n{extra} = [" in read(f"packages/{name}/pyproject.toml"), f"{name} has no extra {extra}"
    for extra in re.findall(r"[Tt]he extra\s`(\w+)`", text):
        assert any(f"\n{extra} = [" in read(f"packages/{name}/pyproject.toml") for name in MODULES), extra
    for name in re.findall(r"(?<![\w/.-])(?:benchmarks|examples|tools)/[\w/.-]+\w", text):
        assert (ROOT / name).exists(), name
    sessions = {node.name for node in ast.parse(read("noxfile.py")).body if isinstance(node, ast.FunctionDef)}
    for names in re.findall(r"nox (?:--no-venv )?-s ([a-z_ ]*[a-z_])", text):
        assert set(names.split()) <= sessions, names
