"""Versions and requirements are the same wherever they are repeated."""

from __future__ import annotations

import pickle
import re
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import requires, version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import td_core
from td_core import TensorDict
from td_core.errors import FIRST_PARTY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def read(path: str) -> str:
    """Return the text of a file of the project."""
    return (ROOT / path).read_text(encoding="utf-8")


BUILD_FILES: dict[str, dict[str, Any]] = {
    path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
CORE = BUILD_FILES["td-core"]["project"]
SOURCE = ROOT / "packages/td-core/src/td_core/_version.py"
VERSION = runpy.run_path(str(SOURCE))["__version__"]
PINNED = dict(re.findall(r"^([\w-]+)==([\w.]+)$", read("constraints.txt"), re.MULTILINE))
PYTHON = CORE["requires-python"].removeprefix(">=")
TORCH = next(line for line in CORE["dependencies"] if line.startswith("torch"))
README = read("README.md")

#: Oldest Python and library of the packages that have others than td-core.
OWN = {
    "td-arrow": (PYTHON, "pyarrow"),
    "td-hdf5": (PYTHON, "h5py"),
    "td-remote": (PYTHON, "fsspec"),
    "td-redis": (PYTHON, "redis"),
    "td-zarr": ("3.11", "zarr"),
}


def test_td_core_version_equals_source() -> None:
    assert td_core.__version__ == VERSION == version("td-core")


@pytest.mark.parametrize("package", BUILD_FILES)
def test_build_file_reads_version_from_td_core(package: str) -> None:
    build = BUILD_FILES[package]
    assert build["project"]["dynamic"] == ["version"]
    assert (ROOT / "packages" / package / build["tool"]["hatch"]["version"]["path"]).resolve() == SOURCE


@pytest.mark.parametrize("package", BUILD_FILES)
def test_build_file_requires_siblings_of_same_minor_version(package: str) -> None:
    everything = [name for name in BUILD_FILES if name != "td-all"]
    siblings = {name: ["td-core", *needs] for name, needs in FIRST_PARTY.items()}
    wanted = {"td-core": [], "td-all": everything, **siblings}[package]
    major, minor, *_ = VERSION.split(".")
    project = BUILD_FILES[package]["project"]
    extras = project.get("optional-dependencies", {}).values()
    asked = [Requirement(line) for line in (*project["dependencies"], *chain.from_iterable(extras))]
    own = [line for line in asked if line.name.startswith("td-") and line.name != package]
    found = {line.name: str(line.specifier) for line in own}
    assert found == dict.fromkeys(wanted, f"~={major}.{minor}.0")


@pytest.mark.parametrize("package", BUILD_FILES)
def test_build_file_repeats_that_of_td_core(package: str) -> None:
    build = BUILD_FILES[package]
    assert build["build-system"] == BUILD_FILES["td-core"]["build-system"]
    for name in ("license", "license-files", "readme"):
        assert build["project"][name] == CORE[name], name
    python, library = OWN.get(package, (PYTHON, None))
    assert build["project"]["requires-python"] == f">={python}"
    assert {*build["project"]["classifiers"]} <= {*CORE["classifiers"]}
    external = [line for line in build["project"]["dependencies"] if not line.startswith("td-")]
    assert [Requirement(line).name for line in {*external}.difference(CORE["dependencies"])] == [
        library
    ] * bool(library)
    assert read(f"packages/{package}/LICENSE") == read("LICENSE")


def test_installed_packages_have_same_version(installed: set[str]) -> None:
    assert {name: version(name) for name in installed} == dict.fromkeys(installed, VERSION)
    for name in installed:
        module = import_module("td" if name == "td-all" else name.replace("-", "_"))
        assert module.__version__ == VERSION
        for requirement in map(Requirement, requires(name) or []):
            if requirement.name.startswith("td-"):
                assert requirement.specifier.contains(VERSION), f"{name} asks for {requirement}"


def test_oldest_python_is_the_same_everywhere() -> None:
    tools = tomllib.loads(read("pyproject.toml"))["tool"]
    assert tools["ruff"]["target-version"] == f"py{PYTHON.replace('.', '')}"
    assert tools["mypy"]["python_version"] == PYTHON
    assert set(re.findall(r"Python (3\.\d+)", README)) == {PYTHON, *(python for python, _ in OWN.values())}
    example = tomllib.loads(read("examples/td-example-codec/pyproject.toml"))["project"]
    assert example["requires-python"] == CORE["requires-python"]
    assert TORCH in example["dependencies"]


def read_torch_table() -> dict[str, dict[str, str]]:
    """Return the cells of the README's table on releases of torch, by release and row."""
    lines = README.partition("with which release of torch:\n\n")[2].partition("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {
        release: {row[0]: row[column] for row in rows}
        for column, releases in enumerate(head)
        for release in re.findall(r"2\.\d+", releases)
    }


def test_readme_table_of_torch_begins_with_the_oldest_and_has_the_tested() -> None:
    releases = [*read_torch_table()]
    assert releases == sorted(releases, key=Version)
    assert f"torch >= {releases[0]}" == TORCH
    assert f"torch {releases[0]}, or newer" in README
    assert PINNED["torch"].rpartition(".")[0] in releases


def compile_write_at_mask() -> None:
    def write(td: TensorDict) -> None:
        td[td["a"] > 0] = 0

    torch.compile(write, backend="eager", fullgraph=True)(TensorDict({"a": torch.ones(3)}, [3]))


def pickle_jagged() -> None:
    rows = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    pickle.loads(pickle.dumps(TensorDict({"a": rows}, [2])))


#: What must succeed on a release of torch if the README's table has "yes" in a row, and must fail if it has "no".
PROBES = {
    "`torch.compile` in one graph": compile_write_at_mask,
    "pickles of jagged tensors": pickle_jagged,
    "FSDP2": lambda: import_module("torch.distributed.fsdp").FSDPModule,
}


@pytest.mark.once  # torch is the same in every environment
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("row", PROBES)
def test_readme_table_of_torch_is_true_for_this_release(row: str) -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    answer = read_torch_table().get(release, {row: ""})[row]
    if answer not in ("yes", "no"):
        pytest.skip(f"the README does not describe {row} with torch {release} in one word")
    if answer == "yes":
        PROBES[row]()
        return
    with pytest.raises(Exception):  # noqa: B017  each release fails in its own way
        PROBES[row]()


#: What torch has from a release on, by words of the row of docs/torch.md.
SINCE: dict[str, Callable[[], object]] = {
    "`torch.nn.Buffer`": lambda: torch.nn.Buffer,
    "`register_load_state_dict_pre_hook`": lambda: torch.nn.Module.register_load_state_dict_pre_hook,
    "FSDP2": PROBES["FSDP2"],
    "pickles of jagged": pickle_jagged,
    "`torch.compile(fullgraph=True)`": compile_write_at_mask,
}


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("words", SINCE)
def test_torch_page_is_true_for_this_release(words: str) -> None:
    [row] = (line for line in read("docs/torch.md").splitlines() if line.startswith("|") and words in line)
    if Version(torch.__version__) >= Version(row.split("|")[2].strip()):
        SINCE[words]()


@pytest.mark.parametrize("path", ["README.md", "docs/comparison.md"])
def test_pages_compare_with_pinned_tensordict(path: str) -> None:
    assert set(re.findall(r"tensordict (\d+\.\d+\.\d+)", read(path))) == {PINNED["tensordict"]}


def test_alias_follows_pinned_tensordict(installed: set[str]) -> None:
    if "td-all" not in installed:
        pytest.skip("td-all has the alias")
    assert PINNED["tensordict"] == import_module("td._alias").RELEASE


def test_comparison_page_is_that_of_its_script() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/comparison.py"))
    commands = {f"{name}_command": script["shown"](name) for name in script["COMMANDS"]}
    parts = re.split(r"\{(\w+)(?::[^}]*)?\}", script["TEMPLATE"])
    pattern = "".join(
        (re.escape(commands[part]) if part in commands else "(?s:.+?)") if i % 2 else re.escape(part)
        for i, part in enumerate(parts)
    )
    page = read("docs/comparison.md")
    assert re.fullmatch(pattern, page)
    assert f"td {VERSION} and" in page


def test_readme_states_measured_time_of_import() -> None:
    assert "Importing them takes a tenth of a second in addition to torch." in " ".join(README.split())
    times = dict(re.findall(r"^\| `import (td\w*)` \| (\d+) ms", read("docs/comparison.md"), re.MULTILINE))
    assert times.keys() == {"td_core", "td"}
    assert all(int(time) < 150 for time in times.values())
