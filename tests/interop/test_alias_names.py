"""The alias has every public name of tensordict, except those that td excludes on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

MODULES = (
    "", ".base", ".functional", ".memmap", ".nn", ".nn.common", ".nn.distributions",
    ".nn.distributions.composite", ".nn.distributions.continuous", ".nn.distributions.discrete",
    ".nn.distributions.truncated_normal", ".nn.cudagraphs", ".nn.ensemble", ".nn.params",
    ".nn.probabilistic", ".nn.utils", ".nn.sequence",
    ".nn.tensorclass_module", ".prototype", ".prototype.fx", ".store",
    ".tensorclass", ".tensordict", ".typedtensordict", ".utils",
)  # fmt: skip

#: Names of a tool unrelated to tensors.
EXCLUDED = {"timeit"}

PUBLISHED = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
names = {home: importlib.import_module("tensordict" + home).__all__ for home in json.loads(sys.argv[1])}
print(json.dumps(names))
"""
LACKING = """
import importlib, json, sys, td
td.install_as_tensordict()
modules = {home: importlib.import_module("tensordict" + home) for home in json.loads(sys.argv[1])}
lacking = {home: [n for n in names if not hasattr(modules[home], n)] for home, names in json.loads(sys.argv[1]).items()}
print(json.dumps(lacking))
"""


def run_with_json(code: str, question: Any) -> dict[str, list[str]]:
    """Run a program in a separate process with a JSON argument, and parse its output."""
    command = [sys.executable, "-c", code, json.dumps(question)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def published() -> dict[str, list[str]]:
    return run_with_json(PUBLISHED, MODULES)


def test_alias_lacks_only_excluded_names(published: dict[str, list[str]]) -> None:
    lacking = run_with_json(LACKING, published)
    assert {name for names in lacking.values() for name in names} == EXCLUDED


def test_star_import_from_alias_adds_no_names(published: dict[str, list[str]]) -> None:
    from td._alias import MODULES as OURS

    strange = {home: sorted(set(OURS[home[1:]]) - set(published[home])) for home in MODULES}
    assert strange == {home: [] for home in MODULES}
