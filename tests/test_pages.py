"""The pages of the project link to what exists, and ARCHITECTURE.md and CONTRIBUTING.md name code that exists."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.once  # the sources are the same in every environment

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md", "examples/*/README.md", "tests/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("packages/*/src/**/*.py"))
}
FILES = {
    *SOURCES,
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("packages/*/src/**/*.pyi")),
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("packages/*/tests/**/*.py")),
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py")),
}
#: Code spans of these pages that are not code or files of the project.
OTHERS = {"is", "nox", "install", ".nox/.cache/base", "packages/X/tests", "meta.json", "dist/"}


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_of_page_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in (link for link in links if "://" not in link and not link.startswith("mailto:")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        # Headings of the reference are made from docstrings: the build of the site checks links to them.
        if anchor and target.parent.name != "reference":
            assert anchor in list_anchors(target), link


SITE = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]


@pytest.mark.parametrize("page", SITE, ids=[str(page.relative_to(ROOT)) for page in SITE])
def test_code_of_page_fits_a_screen(page: Path) -> None:
    for block in re.findall(r"^```.*?^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        assert max(map(len, block.splitlines())) <= 118, block


def read_prose(page: str) -> str:
    """Return the text of a page without its code blocks, in one line."""
    text = re.sub(
        r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    return " ".join(text.split())


def list_names(page: str) -> list[str]:
    """Return the code spans of a page that are dotted names, or paths."""
    spans = re.findall(r"`([^`]+)`", read_prose(page))
    return sorted(
        {span.removesuffix("()") for span in spans if re.fullmatch(r"[\w./%-]+(\(\))?", span)} - OTHERS
    )


def is_file(name: str) -> bool:
    """Return True if a path, or the end of one, leads to a file or folder of the project."""
    return (ROOT / name).exists() or any(f"/{path}".endswith(f"/{name}") for path in FILES)


def find_names(text: str) -> set[str]:
    """Return the names that a source defines, declares, or has in a table."""
    pairs = re.findall(r"\b(?:def|class) (\w+)|\b(\w+) *[:=,)\"]", text)
    return {name for pair in pairs for name in pair}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"])
def test_page_names_files_that_exist(page: str) -> None:
    for name in list_names(page):
        if "/" in name or name.endswith((".py", ".md", ".json", ".txt", ".toml")):
            assert is_file(name), name


def test_architecture_names_code_that_exists() -> None:
    defined = find_names("\n".join(SOURCES.values()))
    for name in list_names("ARCHITECTURE.md"):
        first, _, last = name.rpartition(".")
        if first.startswith("torch"):
            attrgetter(name.partition(".")[2])(torch)
        elif not is_file(name):
            assert last in defined or is_file(f"{last}.py") or is_file(f"{last}/__init__.py"), name


def test_architecture_names_the_files_of_names() -> None:
    pairs = re.findall(r"`([\w.]+)(?:\(\))?` (?:\(|of |in )`([\w/]+\.py)`", read_prose("ARCHITECTURE.md"))
    assert len(pairs) > 10
    for name, file in pairs:
        texts = [source for path, source in SOURCES.items() if path.endswith(f"/{file}")]
        assert name.rpartition(".")[2] in find_names("\n".join(texts)), f"{name} in {file}"


def test_compile_table_names_each_file_that_tests_for_a_graph() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## What is decided where for torch.compile")[2].partition("\n## ")[0]
    rows = "".join(line for line in section.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", rows)) - {
        "_tree/stored_leaves.py"
    }  # torch calls its method in a graph
    asking = {path for path, source in SOURCES.items() if "is_compiling()" in source}
    assert named == {path.partition("/src/")[2].removeprefix("td_core/") for path in asking}
