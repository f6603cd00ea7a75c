"""Each package can be imported first, and the packages import no slow modules in addition to those of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # starts interpreters, which take seconds

HEAVY = ("torch._dynamo", "torch.distributed", "torch.export", "numpy.testing")

# torch itself imports some of these modules, so count only those that td_core adds.
REPORT = f"""
import sys
import torch
before = set(sys.modules)
import td_core
added = set(sys.modules) - before
print(*sorted(name for name in added if name.startswith({HEAVY})))
"""


def python(code: str) -> str:
    """Run a program in a new interpreter with warnings as errors, and return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_format(plugin: Path) -> bool:
    """Return True if a plugin registers a format."""
    return "td_serializers" in plugin.read_text(encoding="utf-8")


#: A name of each package from a module that its plugin also imports.
NAMES = {
    "td_core": "TensorDict",
    "td_store": "StoredTensor",
    "td_memmap": "load_memmap",
    "td_tensorclass": "NonTensorData",
    "td_distributed": "consolidate",
    "td_nn": "TensorDictModule",
    "td_data": "Loader",
    "td_safetensors": "load",
    "td_zarr": "__version__",
    "td_hdf5": "load",
    "td_arrow": "__version__",
    "td_remote": "__version__",
    "td_redis": "__version__",
    "td": "TensorDict",
}


def test_import_package_first_activates_plugins(present: str) -> None:
    code = f"from {present} import {NAMES[present]}; import td_core; print(*(plugin.state for plugin in td_core.plugins()))"
    assert set(python(code).split()) <= {"active"}


def test_import_package_under_fake_tensor_mode_works(present: str) -> None:
    code = f"""
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    import {present}
import torch
from td_core import TensorDict, TensorDictParams
print(TensorDictParams(TensorDict(a=torch.ones(2)))["a"].tolist())
"""
    assert python(code) == "[1.0, 1.0]"


def test_import_td_core_adds_no_heavy_modules() -> None:
    assert python(REPORT) == ""


def test_import_td_core_loads_no_library_of_a_format() -> None:
    """Plugins of formats import td_core alone; their libraries, and the tools of formats, are imported at first use."""
    code = """
import sys
import torch
before = set(sys.modules)
import td_core
added = set(sys.modules) - before
roots = {name.partition(".")[0] for name in added} - sys.stdlib_module_names
tools = ("_checksums", "_stored_tensor", "_temporary_files", "arrays", "testing")
print(*sorted(name for name in roots if not name.startswith(("td_", "__editable__"))))
print(*sorted(added.intersection(f"td_store.{name}" for name in tools)))
print("argparse" in added)
"""
    lines = python(code).split("\n")
    assert set(lines[0].split()) <= {"pluggy"}
    assert lines[1:] == ["", "False"]


PLUGINS = sorted(
    path for path in Path(__file__).parents[1].glob("packages/*/src/*/plugin.py") if is_format(path)
)


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_plugin_of_a_format_imports_td_core_alone(path: Path) -> None:
    found = {
        name.partition(".")[0]
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
        if getattr(node, "level", 0) == 0
    }
    assert found - sys.stdlib_module_names <= {"td_core"}


def test_import_td_nn_adds_no_heavy_modules() -> None:
    pytest.importorskip("td_nn")
    report = REPORT.replace(
        "import td_core", "import td_nn; [getattr(td_nn, name) for name in td_nn.__all__]"
    )
    assert python(report) == ""


def test_call_td_nn_module_imports_no_heavy_modules() -> None:
    pytest.importorskip("td_nn")
    code = """
import copy, pickle, sys, torch
from td_core import TensorDict
from td_nn import TensorDictModule, TensorDictSequential, set_skip_existing
seq = TensorDictSequential(TensorDictModule(torch.nn.Linear(1, 1), ["x"], ["y"]), lambda td: td)
with set_skip_existing(True):
    seq(TensorDict(x=torch.ones(1))), seq(x=torch.ones(1))
copy.deepcopy(seq.select_out_keys("y")), print(seq, file=sys.stderr), seq.check(), seq.graph()
print(*[name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    assert python(code) == ""


def test_operations_import_no_heavy_modules() -> None:
    # Some functions of torch import sympy or the compiler at their first call, which takes up to a second.
    code = """
import copy, sys, torch
from td_core import TensorDict, lazy_stack
td = TensorDict({"a": torch.zeros(2, 3), "b": {"c": torch.zeros(2, 3)}}, [2, 3])
rows, mask = torch.tensor([0, 1]), torch.tensor([True, False])
td + torch.zeros(3), td * torch.ones(2, 1), td[rows, rows], td[mask, rows], td.masked_fill_(mask, 1)
td.masked_select(mask), td.where(mask, 0), td.sum(0), td.gather(0, rows[:, None]), td.expand(2, 2, 3)
td[0], td[rows, rows] = td[1], 1
torch.stack([td, td]), lazy_stack([td, td])["a"], td.reshape(-1).split(2), td.to(torch.float64), td.apply(abs)
td.load_state_dict(td.state_dict()), td.update_(td + 1), copy.deepcopy(td), repr(td)
lazy_stack([td, td])[torch.ones(2, 2, dtype=torch.bool)] = 0
lazy_stack([TensorDict({"a": torch.zeros(2, i)}, [2]) for i in (1, 2)]).reshape(4)
TensorDict.from_module(torch.nn.Linear(1, 1)).to_module(torch.nn.Linear(1, 1))
print(*[name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    assert python(code) == ""
