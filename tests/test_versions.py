"""All packages have the same version and require the same minor version of each other."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import td_core

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
SOURCE = ROOT / "packages/td-core/src/td_core/_version.py"
VERSION = re.search(r'__version__ = "(.+)"', SOURCE.read_text(encoding="utf-8"))[1]


def test_td_core_version_equals_source() -> None:
    assert td_core.__version__ == VERSION == version("td-core")


@pytest.mark.parametrize("package", PACKAGES)
def test_build_file_reads_version_from_td_core(package: str) -> None:
    folder = ROOT / "packages" / package
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in text
    derived = re.search(r'\[tool\.hatch\.version\]\npath = "(.+)"', text)[1]
    assert (folder / derived).resolve() == SOURCE


@pytest.mark.parametrize("package", PACKAGES)
def test_build_file_requires_siblings_of_same_minor_version(package: str) -> None:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    wanted = {"td-core": [], "td-all": [name for name in PACKAGES if name != "td-all"]}.get(
        package, ["td-core"]
    )
    major, minor, *_ = VERSION.split(".")
    asked = [Requirement(line) for line in re.findall(r'^    "(td-.+)",$', text, re.MULTILINE)]
    assert sorted(requirement.name for requirement in asked) == sorted(wanted)
    assert {str(requirement.specifier) for requirement in asked} <= {f"~={major}.{minor}.0"}


def test_installed_packages_have_same_version(installed: set[str]) -> None:
    assert {name: version(name) for name in installed} == dict.fromkeys(installed, VERSION)
    for name in installed:
        module = import_module("td" if name == "td-all" else name.replace("-", "_"))
        assert module.__version__ == VERSION
        for requirement in map(Requirement, requires(name) or []):
            if requirement.name.startswith("td-"):
                assert requirement.specifier.contains(VERSION), f"{name} asks for {requirement}"
