"""Each public name that a page of the site has as code leads to its place in the reference."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once  # the pages are the same in every environment

ROOT = Path(__file__).parents[1]
PAGES = [path for path in sorted(ROOT.glob("docs/**/*.md")) if "reference" not in path.parts]
#: Public names that pages have as code and that lead nowhere, and why.
UNLINKED = {
    **dict.fromkeys(("extend", "filename", "forward", "insert", "mode", "sample"), "of several classes"),
    **dict.fromkeys(("deterministic_sample", "log_prob", "rsample"), "of each distribution"),
    **dict.fromkeys(("cls", "offsets"), "of a file and of a jagged tensor in these texts"),
    "unpack": "a command",
}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    for module in ("td", "td_data", "safetensors", "h5py", "zarr", "pyarrow", "td_remote", "redis"):
        pytest.importorskip(module)
    return runpy.run_path(str(ROOT / "docs/reference_names.py"))


def list_public() -> set[str]:
    """Return the names of the public surface, without those for programs of tensordict alone."""
    surface = json.loads((ROOT / "tests/api/surface.json").read_text(encoding="utf-8"))
    facts = [each for group in surface for each in group["names"].items()]
    return {name for name, fact in facts if not name.startswith("_") and not fact.get("hidden")}


def is_own(name: str, names: dict[str, Any]) -> bool:
    """Return True if a dotted name is not that of another library, of an unknown variable or of a class of a program."""
    first, dot, _ = name.removeprefix("@").rpartition(".")
    known = {*names["VARIABLES"], *names["list_packages"](), "td_core.spi"}
    return not dot or first in known or first in names["find_targets"]().keys() - names["AMBIGUOUS"]


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT / "docs").as_posix() for page in PAGES])
def test_public_names_of_page_lead_to_the_reference(page: Path, names: dict[str, Any]) -> None:
    public = list_public()
    for match in names["SPAN"].finditer(page.read_text(encoding="utf-8")):
        name = match["name"]
        if not name or name.rpartition(".")[2].removeprefix("@") not in public or not is_own(name, names):
            continue
        word = name if match["call"] is None else f"{name}()"
        assert names["link"](match) != match[0] or word in names["AMBIGUOUS"] | UNLINKED.keys(), word


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        (":func:`td_core.save`", "[`td_core.save`][td_core.save]"),
        (":meth:`memmap`", "[`memmap`][td_core.TensorDict.memmap]"),
        (":class:`~td_data.Loader`", "[`td_data.Loader`][td_data.Loader]"),
        (":class:`torch.Tensor`", "`torch.Tensor`"),
        (":meth:`get`", "`get`"),
    ],
)
def test_role_of_docstring_leads_to_the_reference(role: str, expected: str, names: dict[str, Any]) -> None:
    assert names["ROLE"].sub(names["link_role"], role) == expected
