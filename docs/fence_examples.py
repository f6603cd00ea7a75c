"""Extension of griffe: methods that calls make, declared signatures, Markdown for examples and roles; and a hook of mkdocs."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from operator import attrgetter
from typing import Any

import griffe
from reference_names import ROLE, link_role

#: A decorator of functions whose signature has the fields of a dataclass.
DECLARED = re.compile(r"shows\(")


def markdown(text: str) -> str:
    """Convert the examples of a docstring to fenced code blocks, and its roles to links or code spans."""
    lines: list[str] = []
    fenced = False
    for line in ROLE.sub(link_role, text).splitlines():
        if line.lstrip().startswith(">>>") and not fenced:
            lines += ["", "```pycon"]
            fenced = True
        elif fenced and not line.strip():
            lines.append("```")
            fenced = False
        lines.append(line)
    return "\n".join([*lines, "```"] if fenced else lines)


def find_object(item: Any) -> Any:
    """Import what a name of a module or class stands for."""
    module = item.module.path
    return attrgetter(item.path.removeprefix(module + "."))(import_module(module))


def show_declaration(function: Any, found: Any, loader: Any) -> None:
    """Give a function the parameters and docstring of the function that its name stands for."""
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


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Hook of mkdocs: mark sessions as such, so that prompts and results are not copied with the code."""
    return markdown.replace("```python\n>>> ", "```pycon\n>>> ")


class FenceExamples(griffe.Extension):
    """Extension that converts each docstring after griffe has read it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of an object that is not a module."""
        if obj.is_function and any(DECLARED.match(str(each.value)) for each in obj.decorators):
            show_declaration(obj, find_object(obj), kwargs["loader"])
        if obj.is_function and obj.parent is not None and obj.parent.name == "DeclaredMethods":
            provided = getattr(
                import_module("td_core").TensorDict, obj.name
            )  # the stub has its first sentence only
            obj.docstring = griffe.Docstring(inspect.getdoc(provided) or "", parent=obj)
        if obj.docstring is not None and not obj.is_module:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, loader: Any, **kwargs: Any) -> None:
        """Show methods that a call makes, such as ``sum = reduction("sum", ...)``, and second names."""
        for name, member in [*cls.members.items()]:
            if (
                name.startswith("_")
                or not member.is_attribute
                or "class-attribute" not in member.labels
                or not isinstance(member.value, (griffe.ExprCall, griffe.ExprName))
            ):
                continue
            found = getattr(find_object(cls), name, None)  # a field of a dataclass without a default has none
            if (inspect.isfunction(found) or inspect.ismethod(found)) and found.__doc__:
                function = griffe.Function(name, lineno=member.lineno, endlineno=member.endlineno, parent=cls)
                function.labels |= {"classmethod"} if inspect.ismethod(found) else set()
                show_declaration(function, found, loader)
                cls.set_member(name, function)
            elif isinstance(found, property) and found.__doc__:
                member.docstring = griffe.Docstring(inspect.getdoc(found) or "", parent=member)

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Convert the docstring of a module; ``on_object`` runs before griffe has read it."""
        if mod.docstring is not None:
            mod.docstring.value = markdown(mod.docstring.value)
