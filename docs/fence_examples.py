"""Extension of griffe: declared signatures, and Markdown for doctest examples and reStructuredText roles in docstrings."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from operator import attrgetter
from typing import Any

import griffe

#: Decorators of functions whose signature and docstring a declaration has.
DECLARED = re.compile(r"(implements|implements_classmethod|shows|takes)\(")
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


def show_declaration(function: Any, loader: Any) -> None:
    """Give a function the parameters and docstring that its decorator takes from elsewhere."""
    module = function.module.path
    found = attrgetter(function.path.removeprefix(module + "."))(import_module(module))
    signature = inspect.signature(found)
    function.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                each.name,
                annotation=None if each.annotation is each.empty else str(each.annotation),
                kind=griffe.ParameterKind(each.kind.description),
                default=None if each.default is each.empty else repr(each.default),
            )
            for each in signature.parameters.values()
        )
    )
    function.returns = str(signature.return_annotation)
    function.docstring = griffe.Docstring(
        inspect.getdoc(found) or "",
        parent=function,
        parser=loader.docstring_parser,
        parser_options=loader.docstring_options,
    )


class FenceExamples(griffe.Extension):
    """Extension that converts each docstring after griffe has read it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of an object that is not a module."""
        if obj.is_function and any(DECLARED.match(str(each.value)) for each in obj.decorators):
            show_declaration(obj, kwargs["loader"])
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Convert the docstring of a module; ``on_object`` runs before griffe has read it."""
        if mod.docstring is not None:
            mod.docstring.value = markdown(mod.docstring.value)
