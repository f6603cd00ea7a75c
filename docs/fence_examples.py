"""Extension of griffe: docstrings that doctest and reStructuredText readers know, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]+)`")


def markdown(text: str) -> str:
    """Return a docstring with its examples fenced and its roles as code."""
    lines: list[str] = []
    fenced = False
    for line in ROLE.sub(r"`\1`", text).splitlines():
        if line.lstrip().startswith(">>>") and not fenced:
            lines += ["", "```pycon"]
            fenced = True
        elif fenced and not line.strip():
            lines.append("```")
            fenced = False
        lines.append(line)
    return "\n".join([*lines, "```"] if fenced else lines)


class FenceExamples(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, which it does not have yet when it is an object."""
        if mod.docstring is not None:
            mod.docstring.value = markdown(mod.docstring.value)
