"""The exception classes: the tree in the docstring, the builtin classes that callers catch, and messages."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from td_core import errors
from td_core.errors import (
    FIRST_PARTY,
    KeyMismatchError,
    KeyPathError,
    KeyTakenError,
    MissingPluginError,
    TensorDictError,
)

LINE = re.compile(r"    (?P<indent>[│ ]*)(?:[├└]── )?(?P<name>\w+Error)(?: \((?P<builtin>[\w, ]+)\))?(?: |$)")


@pytest.mark.parametrize("name", errors.__all__)
def test_each_class_is_an_error_of_td_with_a_docstring(name: str) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, TensorDictError)
    assert cls.__doc__.endswith(".")


def test_tree_in_docstring_shows_every_class_and_its_bases() -> None:
    parents: list[str] = []
    shown: dict[str, set[str]] = {}
    for line in (errors.__doc__ or "").splitlines():
        if not (found := LINE.match(line)):
            continue
        depth = 0 if found["name"] == "TensorDictError" else len(found["indent"]) // 4 + 1
        parents[depth:] = [found["name"]]
        bases = {parents[depth - 1]} if depth else {"Exception"}
        shown[found["name"]] = bases | set(filter(None, (found["builtin"] or "").split(", ")))
    assert shown == {
        name: {base.__name__ for base in getattr(errors, name).__bases__} for name in errors.__all__
    }


@pytest.mark.parametrize("cls", [KeyPathError, KeyTakenError, KeyMismatchError])
def test_text_of_key_error_is_its_message(cls: type[Exception]) -> None:
    assert str(cls("key 'a' not found")) == "key 'a' not found"
    assert str(cls()) == ""


@pytest.mark.parametrize("name", errors.__all__)
def test_copy_and_pickle_keep_message(name: str) -> None:
    error = getattr(errors, name)("message")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(again), str(again)) == (type(error), "message")


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the reasons for missing packages by an empty dict."""
    reasons: dict[str, str] = {}
    monkeypatch.setattr(MissingPluginError, "unavailable", reasons)
    return reasons


@pytest.mark.parametrize("package", FIRST_PARTY)
def test_describe_package_of_project_names_its_folder(package: str, unavailable: dict[str, str]) -> None:
    folders = " ".join(f"./packages/{name}" for name in (*FIRST_PARTY[package], package))
    assert MissingPluginError.describe(package) == (
        f"the package '{package}', which is not installed: pip install {folders} in a checkout of td"
    )


def test_describe_gives_the_reason_of_the_manager(unavailable: dict[str, str]) -> None:
    unavailable["td-zip"] = "installed but not active"
    assert MissingPluginError.describe("td-zip") == "the package 'td-zip', which is installed but not active"


@pytest.mark.parametrize(
    "provider",
    [None, 3, "", "td-zip", "td-zip==1 2", "==1.0", "-td==1.0", "td-==1.0", "td; rm==1", "td-zip==1.0\n"],
)
def test_of_writer_other_text_returns_none(provider: object) -> None:
    assert MissingPluginError.of_writer("the value", provider) is None


def test_of_writer_names_package_and_version(unavailable: dict[str, str]) -> None:
    error = MissingPluginError.of_writer("the node 'n'", "td-nn==1.2rc1")
    assert str(error) == (
        "the node 'n' was written by 'td-nn' 1.2rc1, which is not installed: pip install ./packages/td-nn in a "
        "checkout of td"
    )
