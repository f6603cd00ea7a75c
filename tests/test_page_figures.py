"""Sizes, counts and ratios that pages state in words are those of the code, or of the pages that programs write."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # the sources are the same in every environment

ROOT = Path(__file__).parents[1]
SHIFTS = {"kB": 10, "MB": 20, "GB": 30}
#: Sizes of pages, with ``{}`` for the number, and the constants that decide them.
SIZES = [
    ("docs/packages/redis.md", "if they have at most {} MB", "td-redis/src/td_redis/_redis_source.py", "PIECE"),
    ("docs/packages/redis.md", "a read of more than {} MB", "td-redis/src/td_redis/_redis_source.py", "PIECE"),
    ("docs/packages/redis.md", "A leaf has at most {} MB", "td-redis/src/td_redis/_store_keys.py", "_LARGEST"),
    ("docs/packages/remote.md", "with a header above {} kB", "td-remote/src/td_remote/_engines.py", "HEAD"),
    ("docs/packages/remote.md", "the first bytes, then up to {} MB", "td-hdf5/src/td_hdf5/_object_h5.py", "_BEGINNING"),
    ("docs/packages/remote.md", "parts of {} MB, two at a time", "td-remote/src/td_remote/_engines.py", "PART"),
    ("docs/packages/remote.md", "once, with a warning, up to {} MB", "td-remote/src/td_remote/_engines.py", "WHOLE"),
    ("docs/packages/remote.md", "blocks of {} MB, which", "td-remote/src/td_remote/_block_cache.py", "BLOCK"),
    ("docs/packages/remote.md", "than {} GB free", "td-remote/src/td_remote/_block_cache.py", "_FREE"),
    ("docs/plugins_stores.md", "the first {} kB of", "td-core/src/td_core/typing.py", "HEAD_SIZE"),
    ("docs/packages/zarr.md", "aims at {} MB", "td-zarr/src/td_zarr/_array_documents.py", "_AUTO_BYTES"),
]  # fmt: skip


def read(path: str) -> str:
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def read_constant(path: str, name: str) -> int:
    """Return a constant of a module, such as ``8 << 20``, without importing it."""
    for node in ast.walk(ast.parse((ROOT / "packages" / path).read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [
            each.id
            for target in targets
            for each in ast.walk(target or ast.Pass())
            if isinstance(each, ast.Name)
        ]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and name in names:
            found = node.value.elts[names.index(name)] if isinstance(node.value, ast.Tuple) else node.value
            value = eval(compile(ast.Expression(found), path, "eval"), {"__builtins__": {}})
            assert isinstance(value, int)
            return value
    raise AssertionError(f"{path} has no constant {name}")


@pytest.mark.parametrize(("page", "words", "path", "name"), SIZES)
def test_size_on_page_is_that_of_the_constant(page: str, words: str, path: str, name: str) -> None:
    found = re.search(re.escape(words).replace(r"\{\}", r"([\d,]+)"), read(page))
    assert found, words
    assert int(found[1]) << SHIFTS[words.split("{} ")[1][:2]] == read_constant(path, name)


def count_lines(text: str, start: str) -> int:
    """Return the number of lines of the class that begins with ``start``."""
    lines = text.partition(start)[2].splitlines()
    return next(i for i, line in enumerate(lines) if i and line[:1] not in (" ", "")) + 1


@pytest.mark.parametrize("page", ["docs/cookbook/own_format.md", "CONTRIBUTING.md"])
def test_page_counts_the_lines_of_the_format(page: str) -> None:
    block = (ROOT / "docs/cookbook/own_format.md").read_text(encoding="utf-8").partition(">>> class Npz")[2]
    lines = block.partition("```")[0].strip().splitlines()
    assert "forty lines" in read(page) and 35 <= len(lines) < 45


def test_page_counts_the_lines_of_the_store() -> None:
    source = (ROOT / "examples/sqlite_store.py").read_text(encoding="utf-8")
    found = re.search(r"sqlite_store.py` has one of (\d+) lines", read("docs/plugins_stores.md"))
    assert found
    assert abs(int(found[1]) - count_lines(source, "class SqliteStore")) < 5


def test_pages_state_ratios_of_the_comparison() -> None:
    comparison = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    ten = re.search(r"^\| 10 leaves \| ([\d.]+) \|", comparison, re.MULTILINE)
    assert ten
    assert f"a collection with ten leaves takes {float(ten[1]):.1f} times" in read("docs/why.md")
    times = {
        name: int(ms) for name, ms in re.findall(r"^\| `import (\w+)` \| (\d+) ms", comparison, re.MULTILINE)
    }
    assert "an import that takes a tenth of the time" in read("docs/why.md")
    assert 0.05 < times["td"] / times["tensordict"] < 0.15
    assert "Importing them takes a tenth of a second" in read("README.md")
    assert 50 <= times["td"] < 150
