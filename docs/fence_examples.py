"""Extension of griffe that converts doctest examples and reStructuredText roles in docstrings to Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]+)`")


def markdown(text: str) -> str:
    """Convert the examples of a docstring to fenced code blocks, and its roles to code spans."""
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
    """Extension that converts each docstring after griffe has read it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of an object that is not a module."""
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Convert the docstring of a module; ``on_object`` runs before griffe has read it."""
        if mod.docstring is not None:
            mod.docstring.value = markdown(mod.docstring.value)
