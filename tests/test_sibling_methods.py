"""The methods that packages attach to every collection: manuals, annotations, and the same options wherever they are repeated."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pydoc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td_core import TensorDict
from td_core.plugins.siblings import METHODS, PROPERTIES, Placeholder

STUB = Path(__file__).parents[1] / "packages/td-core/src/td_core/plugins/methods.pyi"
P = inspect.Parameter


def find_function(name: str) -> Any:
    """Return the function of a method, or skip the test if its package is not installed."""
    member = inspect.getattr_static(TensorDict, name)
    if isinstance(member, Placeholder):
        pytest.skip(f"{METHODS[name]} is not installed")
    assert isinstance(member, property) == (name in PROPERTIES)
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


@pytest.mark.parametrize("name", METHODS)
def test_method_has_docstring_and_annotations(name: str) -> None:
    function = find_function(name)
    first, *_ = (inspect.getdoc(function) or "").splitlines()
    assert first.endswith((".", "``.")), name
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    assert [each.name for each in list(signature.parameters.values())[1:] if each.annotation is P.empty] == []


@pytest.mark.parametrize("name", METHODS)
def test_method_documents_all_arguments_or_refers_to_method(name: str) -> None:
    function = find_function(name)
    first, *own = inspect.signature(function).parameters
    text = inspect.getdoc(function) or ""
    documented = re.findall(
        r"^    \**(\w+): ", text.partition("Args:")[2].partition("Raises:")[0], re.MULTILINE
    )
    assert set(documented) - {first} in (set(), set(own))


@pytest.mark.parametrize("name", METHODS)
def test_stub_has_parameters_of_method(name: str) -> None:
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    (declared,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    _, *own = inspect.signature(find_function(name)).parameters.values()
    found = [*declared.args.args[1:], *declared.args.kwonlyargs]
    assert [each.arg for each in found] == [each.name for each in own if each.kind is not P.VAR_KEYWORD]
    texts = [ast.unparse(each.annotation) for each in found if each.annotation is not None]
    assert texts == [str(each.annotation) for each in own if each.kind is not P.VAR_KEYWORD]


def test_help_of_method_shows_signature_and_docstring() -> None:
    find_function("memmap")
    for shown in (TensorDict.memmap, TensorDict):
        text = pydoc.render_doc(shown, renderer=pydoc.plaintext)
        signature = "prefix: 'str | Path | None' = None, copy_existing: 'bool' = False, *, num_threads"
        # Since Python 3.13, a long signature has a line for each parameter, which begins with a bar in the help of a class.
        assert re.sub(r"[|\s]+", "", signature) in re.sub(r"[|\s]+", "", text)
        assert "num_threads: number of threads that write; 0 writes in the calling thread." in text


def list_parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return annotation and default of each parameter with a default."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: (each.annotation, each.default) for each in parameters if each.default is not P.empty}


#: By method, the options of ``memmap`` that it lacks.
LACKING = {
    "memmap_": {"archive", "compression"},
    "memmap_like": {"compression", "atomic", "checksums"},
    "save": set(),
}


@pytest.mark.parametrize("name", LACKING)
def test_method_has_options_of_memmap(name: str) -> None:
    expected = list_parameters(find_function("memmap"))
    found = list_parameters(getattr(TensorDict, name))
    assert expected.keys() - found.keys() == LACKING[name]
    assert found.keys() - expected.keys() == ({"format"} if name == "save" else set())
    different = {each for each in expected.keys() & found.keys() if expected[each] != found[each]}
    assert different == ({"prefix"} if name == "save" else set())  # save accepts URLs, too


def test_options_objects_have_options_of_methods() -> None:
    find_function("memmap")
    from td_memmap import _options

    for cls, name, own in (
        (_options.MemmapOptions, "memmap", {"inplace", "like", "sparse"}),
        (_options.LoadMemmapOptions, "load_memmap", {"prefix"}),
    ):
        expected = list_parameters(find_function(name))
        found = {each.name: (each.type, each.default) for each in dataclasses.fields(cls)}
        assert {key: value for key, value in found.items() if key not in own} == expected
