"""A fact stands in one place: in a copy of the tree, one row is enough to add an operation, a dtype or an option."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="the typecheck session runs these tests")

ROOT = Path(__file__).parents[1]
SOURCES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src"))
Run = Callable[..., str]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources, the reference and the tools."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in (*SOURCES, "docs/reference", "tools"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def run(tree: Path) -> Run:
    """Return a function that runs Python over the copy and returns what it prints."""
    sources = os.pathsep.join(str(tree / source) for source in SOURCES)

    def call(*arguments: object, code: int = 0) -> str:
        command = [sys.executable, *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": sources, "MYPYPATH": sources, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return call


def insert_after(path: Path, line: str, rows: str) -> None:
    """Insert rows behind the only line of a file that has this text."""
    before, found, after = path.read_text(encoding="utf-8").partition(line)
    assert found and line not in after
    path.write_text(before + line + rows + after, encoding="utf-8")


OPERATIONS = """\
    Operation("rsqrt", "unary", "the reciprocal square root of each element", loop_in="autocast"),
    Operation("floor_divide", "binary", "the floor of ``self / other``", dunder="floordiv", symbol="//",
              reflected="rfloor_divide"),
"""


@pytest.fixture(scope="module")
def operations(tree: Path, run: Run) -> None:
    """Remove two operations from the copy, and add them again."""
    table = tree / "packages/td-core/src/td_core/_torch/operators.py"
    rows = table.read_text(encoding="utf-8")
    for row in OPERATIONS.split("    Operation(")[1:]:
        assert f"    Operation({row}" in rows
        rows = rows.replace(f"    Operation({row}", "")
    table.write_text(rows, encoding="utf-8")
    run("tools/generate_methods.py")
    assert "rsqrt" not in (tree / "packages/td-core/src/td_core/_methods/pointwise.py").read_text(
        encoding="utf-8"
    )
    assert run("tools/generate_methods.py", "--check") == ""
    insert_after(tree / "packages/td-core/src/td_core/_torch/operators.py", "OPERATIONS = (\n", OPERATIONS)
    found = run("tools/generate_methods.py", "--check", code=1)
    for name in ("packages/td-core/src/td_core/_methods/pointwise.py", "docs/reference/collections.md"):
        assert f"{name} differs from its table: run python tools/generate_methods.py" in found
    run("tools/generate_methods.py")
    assert run("tools/generate_methods.py", "--check") == ""


PROGRAM = """
import doctest, inspect, torch, td_core
from td_core import TensorDict, TensorCollection
from td_core._functions import pointwise

print(td_core.__file__)
leaf = torch.tensor([4.0, 7.0])
td = TensorDict({"a": leaf, "n": {"b": leaf}}, [2])
for one in (td, TensorDict.lazy_stack([td[0], td[1]])):
    for result, expected in [
        (one.rsqrt(), leaf.rsqrt()), (torch.rsqrt(one), leaf.rsqrt()), (one.clone().rsqrt_(), leaf.rsqrt()),
        (torch.rsqrt_(one.clone()), leaf.rsqrt()), (one // 2, leaf // 2), (9.0 // one, 9.0 // leaf),
        (one.floor_divide(one * 2), leaf // (leaf * 2)), (torch.floor_divide(one, 2), leaf // 2), (leaf // one, leaf // leaf),
        (one.clone().floor_divide_(2), leaf // 2), (one.clone().__ifloordiv__(2), leaf // 2),
    ]:
        assert torch.equal(result["a"], expected) and torch.equal(result["n", "b"], expected), (result, expected)
assert pointwise.OPS["rsqrt"].alike is pointwise.OPS["exp"].alike is not None
for name in ("rsqrt", "floor_divide"):
    method = getattr(TensorCollection, name)
    assert method.__module__ == "td_core._methods.collection" and ">>> " in method.__doc__
    print(method.__doc__.splitlines()[0], inspect.signature(method))
    names = {"torch": torch, "TensorDict": TensorDict}
    for example in doctest.DocTestFinder().find(method, name, module=pointwise, globs=names):
        assert doctest.DocTestRunner().run(example) == (0, 1)
"""


@pytest.mark.usefixtures("operations")
def test_added_operation_has_methods_functions_and_docs(tree: Path, run: Run) -> None:
    path, *heads = run("-c", PROGRAM).splitlines()
    assert Path(path).is_relative_to(tree)
    binary = "(self: 'CoreT', other: 'Operand', *, default: 'object' = None) -> 'CoreT'"
    assert heads == [
        "Return the reciprocal square root of each element. (self: 'CoreT') -> 'CoreT'",
        f"Return the floor of ``self / other``; arguments are those of :meth:`add`. {binary}",
    ]
    page = (tree / "docs/reference/collections.md").read_text(encoding="utf-8")
    assert "| `rsqrt` | the reciprocal square root of each element | `rsqrt_` |  | `rsqrt` |" in page
    assert "| `floor_divide_` | `//` | `floor_divide` |" in page


TYPED = """
from td_core import TensorDict
from typing_extensions import assert_type

def check(td: TensorDict) -> None:
    assert_type(td.rsqrt(), TensorDict)
    assert_type(td.floor_divide_(2), TensorDict)
    assert_type(td // 2, TensorDict)
    td.rsqrt(1)
    td.no_such_operation()
"""


@pytest.mark.usefixtures("operations")
def test_added_operation_is_seen_by_type_checker(tree: Path, run: Run) -> None:
    (tree / "typed.py").write_text(TYPED, encoding="utf-8")
    found = run("-m", "mypy", "--strict", "typed.py", code=1).splitlines()
    assert [line.partition("error: ")[2] for line in found[:-1]] == [
        "Too many arguments  [call-arg]",
        '"TensorDict" has no attribute "no_such_operation"  [attr-defined]',
    ]


DTYPES = """\
    Dtype("float8_e4m3fn", ("float8_e4m3fn", "e4m3")),
    Dtype("float8_e5m2", (), cannot=("store",)),
    Dtype("float99", ("float99",)),
"""


@pytest.fixture(scope="module")
def dtypes(tree: Path, run: Run) -> None:
    """Add three dtypes to the copy, of which torch does not have the last one."""
    insert_after(tree / "packages/td-core/src/td_core/_torch/dtypes.py", "\nDTYPES = (\n", DTYPES)
    found = run("tools/generate_methods.py", "--check", code=1)
    for name in ("packages/td-core/src/td_core/_methods/casting.py", "docs/reference/collections.md"):
        assert f"{name} differs from its table: run python tools/generate_methods.py" in found
    run("tools/generate_methods.py")
    assert run("tools/generate_methods.py", "--check") == ""


CASTS = """
import doctest, inspect, torch, td_core
from td_core import CodecError, TensorDict, plugins, spi
from td_core.spi import join_value, split_value

print(td_core.__file__)
dtype = torch.float8_e4m3fn
td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
for result in (td.float8_e4m3fn(), td.e4m3(), td.to(dtype), td.type(dtype), TensorDict.lazy_stack([*td.unbind(0)]).e4m3()):
    assert {leaf.dtype for leaf in result.values(True, True)} == {dtype}
print(result := td.e4m3())
assert repr(result).count(f": {spi.SHORT_NAMES[dtype]}[") == 2
assert join_value(*split_value(dtype)) is dtype
example = doctest.DocTestFinder().find(TensorDict.e4m3, "e4m3", globs={"torch": torch, "TensorDict": TensorDict})[0]
assert doctest.DocTestRunner().run(example) == (0, 1)
print(inspect.signature(TensorDict.float8_e4m3fn))
try:
    td.float99()
except NotImplementedError as error:
    print(error)
active = {plugin.id for plugin in plugins() if plugin.state == "active"}
if "memmap" in active:
    result.memmap("saved")
    assert TensorDict.load_memmap("saved")["n", "b"].dtype is dtype
    try:
        td.to(torch.float8_e5m2).memmap("refused")
    except CodecError as error:
        assert str(error).startswith("cannot store the dtype torch.float8_e5m2 at key 'a': "), error
    else:
        raise AssertionError("saved a dtype that a file cannot hold")
if "distributed" in active:
    from td_distributed import from_consolidated
    result.consolidate("saved.bin")
    assert from_consolidated("saved.bin")["n", "b"].dtype is dtype
"""


@pytest.mark.usefixtures("dtypes")
def test_added_dtype_is_cast_printed_and_stored(tree: Path, run: Run) -> None:
    path, *lines = run("-c", CASTS).splitlines()
    assert Path(path).is_relative_to(tree)
    assert lines[:2] == [
        "TensorDict(batch_size=[2], fields={a: f8_e4m3fn[], n: {b: f8_e4m3fn[]}})",
        "(self: 'SelfT', *, cast_filter: 'CastFilter | None' = None) -> 'SelfT'",
    ]
    assert "key 'a': torch 2." in lines[2]
    assert " has no dtype torch.float99: a newer release may have it" in lines[2]
    page = (tree / "docs/reference/collections.md").read_text(encoding="utf-8")
    assert "| `float8_e4m3fn`, `e4m3` | `torch.float8_e4m3fn` |" in page


TYPED_CASTS = """
from td_core import TensorDict
from typing_extensions import assert_type

def check(td: TensorDict) -> None:
    assert_type(td.e4m3(cast_filter=lambda key, leaf: True), TensorDict)
    td.float8_e4m3fn(filter=None)
    td.no_such_cast()
"""


@pytest.mark.usefixtures("dtypes")
def test_added_dtype_is_seen_by_type_checker(tree: Path, run: Run) -> None:
    (tree / "typed_casts.py").write_text(TYPED_CASTS, encoding="utf-8")
    found = run("-m", "mypy", "--strict", "typed_casts.py", code=1).splitlines()
    assert [line.partition("error: ")[2] for line in found if "error: " in line] == [
        'Unexpected keyword argument "filter" for "__call__" of "BoundCast"  [call-arg]',
        '"TensorDict" has no attribute "no_such_cast"  [attr-defined]',
    ]


@pytest.fixture(scope="module")
def option(tree: Path, run: Run) -> None:
    """Add an option to the methods that save, in the copy."""
    packages = tree / "packages"
    options = packages / "td-memmap/src/td_memmap/_options.py"
    insert_after(options, "    durable: bool = False\n", '    colour: str = "blue"\n')
    for path in (options.with_name("_methods.py"), packages / "td-core/src/td_core/_methods/saving.py"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"( +)durable: bool = False,\n", r'\g<0>\1colour: str = "blue",\n', text)
        text = re.sub(r"( +)durable=durable,\n", r"\g<0>\1colour=colour,\n", text)
        path.write_text(text, encoding="utf-8")
    run("tools/generate_stub.py")


SAVES = """
import inspect, td_core
from td_core import MissingPluginError, TensorDict, plugins
from td_memmap import _methods

print(td_core.__file__)
td, names = TensorDict({"a": 1}), ("memmap", "memmap_", "memmap_like")
for method in (TensorDict.save, TensorDict.dumps, *(getattr(_methods, name) for name in names)):
    print(inspect.signature(method).parameters["colour"])
if "memmap" in {plugin.id for plugin in plugins() if plugin.state == "active"}:
    import td_memmap
    from td_memmap import _archive, _save

    found = []

    def plan(tree, options):
        found.append((options.colour, options.like, options.inplace))
        return plan_save(tree, options)

    plan_save, _save.plan_save, _archive.plan_save = _save.plan_save, plan, plan
    for name in (*names, "save", "dumps"):
        method = getattr(td.clone(), name)
        assert "colour" in inspect.signature(method).parameters
        method(name, colour="red")
    td.memmap("a.tdz", colour="green")
    td_core.save(td, "b.tdz", colour="grey")
    td_memmap.save(td, "c")
    assert found == [
        ("red", False, False), ("red", False, True), ("red", True, False), ("red", False, False), ("red", False, False),
        ("green", False, False), ("grey", False, False), ("blue", False, False),
    ], found
    try:
        td.memmap(color="red")
    except TypeError as error:
        assert str(error) == "memmap() got an unexpected keyword argument 'color'", error
"""


@pytest.mark.usefixtures("option")
def test_added_option_is_in_signatures_and_reaches_planner(tree: Path, run: Run) -> None:
    path, *parameters = run("-c", SAVES).splitlines()
    assert Path(path).is_relative_to(tree)
    assert parameters == ["colour: 'str' = 'blue'"] * 5


TYPED_SAVES = """
from td_core import TensorDict
from typing_extensions import assert_type

def check(td: TensorDict) -> None:
    assert_type(td.memmap("a", True, colour="red"), TensorDict)
    assert_type(td.memmap_(colour="red"), TensorDict)
    assert_type(td.save("a", colour="red"), TensorDict)
    td.memmap(colour=1)
    td.memmap_like(level=3)
"""


@pytest.mark.usefixtures("option")
def test_added_option_is_seen_by_type_checker(tree: Path, run: Run) -> None:
    (tree / "typed_saves.py").write_text(TYPED_SAVES, encoding="utf-8")
    found = run("-m", "mypy", "--strict", "typed_saves.py", code=1).splitlines()
    assert [line.partition("error: ")[2] for line in found if "error: " in line] == [
        'Argument "colour" to "memmap" of "DeclaredMethods" has incompatible type "int"; expected "str"  [arg-type]',
        'Unexpected keyword argument "level" for "memmap_like" of "DeclaredMethods"  [call-arg]',
    ]
