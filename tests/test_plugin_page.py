"""The page about plugins has every hook, with its exact signature."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from td_core.plugins import hookspecs

PAGE = Path(__file__).parent.parent / "docs" / "plugins.md"


def test_every_hook_is_documented_with_its_exact_signature():
    hooks = {
        f"{name}{str(inspect.signature(hook)).replace(chr(39), '')}"
        for name, hook in vars(hookspecs).items()
        if name.startswith("td_")
    }
    assert set(re.findall(r"^td_\w+\(.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)) == hooks
