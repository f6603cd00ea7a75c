"""The alias: programs and pickles of tensordict use td. Each test runs in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
SUBMODULES = (
    "nn", "tensorclass", "memmap", "utils", "base", "functional", "prototype", "persistent", "_td", "_lazy",
    "_reductions", "tensordict", "nn.params", "nn.common",
    "nn.functional_modules", "nn.probabilistic", "nn.sequence", "nn.utils", "typedtensordict",
)  # fmt: skip
ALIAS = "import td; td.install_as_tensordict()\n"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def output(code: str, cwd: Path) -> list[str]:
    """Run a program with the alias installed, and return the lines that it prints."""
    done = run("-c", ALIAS + code, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def error(code: str, cwd: Path) -> str:
    """Run a program that raises, and return the last line of its traceback."""
    done = run("-c", code, cwd=cwd)
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]


def test_alias_every_name_is_object_of_td(tmp_path):
    code = f"""
from importlib import import_module
import tensordict
assert tensordict.__version__ == "0.15.3"
from td._alias import ELSEWHERE
other = {{"__version__", *(name for _, name in ELSEWHERE)}}
for name in tensordict.__all__:
    assert name in other or getattr(tensordict, name) is getattr(td, name), name
for home in {SUBMODULES!r}:
    module = import_module("tensordict." + home)
    assert module.__name__ == "tensordict." + home
    for name in module.__all__:
        assert getattr(module, name, None) is not None, (home, name)
        assert name in other or getattr(module, name) is getattr(td, name, getattr(module, name)), (home, name)
print("done")
"""
    assert output(code, tmp_path) == ["done"]


def test_unravel_key_of_tuple_not_a_key_returns_empty(tmp_path):
    code = """
from tensordict import unravel_key
import tensordict.utils
assert tensordict.utils.unravel_key is tensordict.utils.unravel_keys is unravel_key
print([unravel_key(key) for key in ("a", ("a",), ("a", ("b",)), (0,), (slice(None), "a"), ())])
unravel_key(3)
"""
    done = run("-c", ALIAS + code, cwd=tmp_path)
    assert done.stdout == "['a', 'a', ('a', 'b'), (), (), ()]\n"
    assert done.stderr.splitlines()[-1].startswith("td_core.errors.KeyPathError: a key is a string")


def test_star_import_excludes_common_names(tmp_path):
    code = """
import inspect
from functools import reduce
from tensordict import *
print(reduce(lambda a, b: a + b, [1, 2, 3]), inspect.__name__, TensorDict.__name__, __version__)
print([x.__name__ for x in (PersistentTensorDict, TensorDictStore, from_csv, from_h5, from_zarr)])
"""
    assert output(code, tmp_path) == [
        "6 inspect TensorDict 0.15.3",
        "['PersistentTensorDict', 'TensorDictStore', 'from_csv', 'from_h5', 'from_zarr']",
    ]


def test_isinstance_mapping_after_install_is_true(tmp_path):
    code = """
from collections.abc import Mapping, MutableMapping
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorClass, TensorDict, TensorDictParams, lazy_stack
td = TensorDict({"a": torch.arange(4), "n": {"b": torch.zeros(4, 2)}}, [4])
class Mine(TensorDict): pass
print([isinstance(x, Mapping) for x in (td, lazy_stack([td, td]), Mine(), TensorDictParams(TensorDict(w=torch.ones(2))))])
print(issubclass(TensorDict, MutableMapping), issubclass(TensorClass, Mapping), issubclass(NonTensorData, Mapping))
def sizes(batch):  # Lightning infers the batch size like this
    if isinstance(batch, torch.Tensor):
        yield len(batch)
    else:
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from sizes(value)
print(list(sizes(td)), list(sizes([lazy_stack(list(td))])))
linear = torch.nn.Linear(1, 1)
print(linear.load_state_dict(TensorDict(weight=torch.ones(1, 1), bias=torch.ones(1))), linear.bias.item())
other = Mine(a=torch.ones(4), batch_size=[4])
print(td.replace(other)["a"].sum().item(), td.update(other)["a"].sum().item(), TensorDict({"x": td})["x", "n"].batch_size)
try:
    NonTensorData("a").update(td)
except RuntimeError as error:
    print(error)
"""
    assert output(code, tmp_path) == [
        "[True, True, True, True]",
        "True False False",
        "[4, 4] [4, 4]",
        "<All keys matched successfully> 1.0",
        "4.0 4.0 torch.Size([4])",
        "a NonTensorData takes the value of another one, not of a TensorDict",
    ]


def test_import_function_named_like_module_keeps_both(tmp_path):
    code = """
import tensordict.memmap, tensordict.tensorclass
from tensordict.memmap import MemoryMappedTensor
from tensordict.tensorclass import NonTensorData
assert tensordict.memmap is td.memmap and tensordict.tensorclass is td.tensorclass
import tensordict.utils as utils
from tensordict import *
from tensordict.functional import *
from tensordict._td import MemoryMappedTensor as Again
assert Again is MemoryMappedTensor
print(utils.is_tensorclass is td.is_tensorclass, pad is td.pad, TensorDict is td.TensorDict)
print(utils.unravel_keys(("a", ("b",))), utils.unravel_keys(("a",)))
"""
    assert output(code, tmp_path) == ["True True True", "('a', 'b') a"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from tensordict.nn import SafeModule", "tensordict.nn.SafeModule"),
        ("from tensordict.store import StoreServer", "tensordict.store.StoreServer"),
        ("import tensordict.nn.planners", "tensordict.nn.planners"),
    ],
)
def test_import_missing_name_raises_naming_td(line, name, tmp_path):
    assert error(ALIAS + line, tmp_path) == (
        f"ImportError: {name} is not provided by td, which stands in for tensordict here "
        f"(td.install_as_tensordict()); it has the names in dir({name.rpartition('.')[0]}), and programs that need "
        "this one run with tensordict itself"
    )


def test_import_persistent_collection_changes_a_file(tmp_path):
    pytest.importorskip("td_hdf5")
    pytest.importorskip("h5py")
    code = """
from tensordict import PersistentTensorDict, TensorDict, from_h5
from tensordict.persistent import PersistentTensorDict as same
data = PersistentTensorDict.from_dict(TensorDict(a=[1, 2]), "x.h5")
data["b"] = data["a"] + 1
print(from_h5("x.h5")["b"].tolist(), same is PersistentTensorDict)
"""
    assert output(code, tmp_path) == ["[2, 3] True"]


def test_import_functions_of_safetensors_exchange_a_file(tmp_path):
    pytest.importorskip("td_safetensors")
    code = """
from tensordict import TensorDict, from_safetensors, to_safetensors
to_safetensors(TensorDict(a=[1, 2]), "x.safetensors")
print(from_safetensors("x.safetensors", device="cpu")["a"].tolist())
"""
    assert output(code, tmp_path) == ["[1, 2]"]


def test_getattr_missing_name_raises_attribute_error(tmp_path):
    assert output("import tensordict; print(hasattr(tensordict, 'nope'))", tmp_path) == ["False"]


def test_install_after_import_of_tensordict_raises(tmp_path):
    (tmp_path / "tensordict.py").write_text("")
    assert error("import tensordict\n" + ALIAS, tmp_path) == (
        "ImportError: td cannot stand in for tensordict: the module tensordict is imported already, from "
        f"{tmp_path / 'tensordict.py'}; call td.install_as_tensordict() before anything imports it"
    )


def test_install_twice_is_noop(tmp_path):
    code = "import tensordict; td.install_as_tensordict(); import tensordict as t; print(t is tensordict)"
    assert output(code, tmp_path) == ["True"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tensordict", ["['a', 's', 'n'] [3] ['t'] cpu", "[0.0, 1.0, 2.0]", "abc", "[3, 2]"]),
        ("consolidated", ["['s', 'a', 'n'] [3] [None] None", "[0.0, 1.0, 2.0]", "abc", "[3]", "True"]),
    ],
)
def test_torch_load_weights_only_loads_tensordict_file(name, shown, tmp_path):
    code = f"""
import torch
x = torch.load({str(FIXTURES / name)!r} + ".pt", weights_only=True)
print(list(x.keys()), list(x.batch_size), x.names, x.device)
print(x["a"].tolist())
print(x["s"])
print(list(x["n", "b"].shape))
if {name == "consolidated"}: print(x["a"].untyped_storage().data_ptr() == x["n", "b"].untyped_storage().data_ptr())
"""
    assert output(code, tmp_path) == shown


def test_torch_load_other_kinds_returns_them(tmp_path):
    (tmp_path / "fixture_classes.py").write_text(
        "import torch\nfrom typing import Any\nfrom tensordict import tensorclass\n\n"
        "@tensorclass\nclass Point:\n    x: torch.Tensor\n    y: Any = None\n    tag: str = 'none'\n"
    )
    code = f"""
import sys, torch
from io import BytesIO
sys.path.insert(0, "")
torch.save(td.TensorDict(a=torch.ones(2)), file := BytesIO())
file.seek(0)
assert torch.load(file, weights_only=True)["a"].tolist() == [1.0, 1.0]
values, point, unbatched = (
    torch.load({str(FIXTURES)!r} + "/" + name + ".pt", weights_only=False)
    for name in ("non_tensor_stack", "tensorclass", "unbatched")
)
print(values["s"], type(values.get("s")).__name__, list(values.batch_size))
print(point.x.tolist(), point.y, point.tag, list(point.batch_size), type(point).__module__)
print(unbatched["u"].shape, unbatched[0]["u"].shape, unbatched[0]["a"].shape)
"""
    lines = output(code, tmp_path)
    assert lines[1] == "[0.0, 1.0, 2.0] None w [3] fixture_classes"
    assert lines[2] == "torch.Size([2]) torch.Size([2]) torch.Size([])"
    assert "'a', 'b'" in lines[0]
    assert lines[0].endswith("[2]")


def test_pickle_load_tensordict_pickle_works(tmp_path):
    code = f"""
import pickle
from pathlib import Path
x = {{k: pickle.loads(v) for k, v in pickle.loads(Path({str(FIXTURES / "plain.pickle")!r}).read_bytes()).items()}}
d = x["dense"]
print(d["a"].tolist(), d["n", "b"].shape, d["s"], d.names, d.is_locked)
print(x["stack"].stack_dim, [t["a"].numel() for t in x["stack"].tensordicts])
print(x["values"].tolist(), x["value"].data, x["value"].batch_size)
print(x["metadata"].data, isinstance(x["metadata"], td.MetaData[str]))
print([name for name, _ in x["params"].named_parameters()], x["params"]["a"].tolist())
"""
    assert output(code, tmp_path) == [
        "[0, 1, 2] torch.Size([3, 2]) abc ['t'] True",
        "0 [2, 3]",
        "['a', 'b'] abc torch.Size([3])",
        "abc True",
        "['a'] [1.0, 1.0]",
    ]


PROGRAM = """
import multiprocessing
import sys
import torch
from tensordict import TensorDict

def child(queue):
    queue.put(TensorDict({"a": torch.ones(2)}, [2])["a"].tolist())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(sys.argv[1:], TensorDict.__module__.partition(".")[0], queue.get())
    process.join()
"""


@pytest.mark.parametrize("words", [["program.py"], ["-m", "program"]], ids=["script", "module"])
def test_run_program_and_its_child_processes_use_td(words, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run("-m", "td", "run", *words, "--flag", "x", cwd=tmp_path)
    assert done.stdout == "['--flag', 'x'] td_core [1.0, 1.0]\n", done.stderr


@pytest.mark.parametrize("words", [[], ["-m"], ["--help"]], ids=str)
def test_run_without_program_raises(words, tmp_path):
    done = run("-m", "td", "run", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "python -m td run: needs a script or -m and a module, then their arguments\n"


def test_run_missing_script_raises_naming_it(tmp_path):
    done = run("-m", "td", "run", "absent.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "python -m td run: cannot find the file absent.py\n")


def test_report_contains_versions_plugins_and_devices(tmp_path):
    import torch

    done = run("-m", "td", cwd=tmp_path)
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["torch"] == torch.__version__
    assert rows["td-core"] == rows["td-all"]
    assert {
        "Python",
        "CUDA",
        "system",
        "plugin memmap",
        "plugin tensorclass",
        "plugin distributed",
    } <= rows.keys()
    assert rows["plugin memmap"].endswith("active")


@pytest.mark.parametrize("name", ["tensordict", "tensordict.nn", "tensordict.nn.params"])
def test_alias_modules_have_a_file(name, tmp_path):
    code = f"""
import os, importlib, inspect
module = importlib.import_module({name!r})
print(os.path.isfile(module.__file__), os.path.isdir(os.path.dirname(module.__file__)))
print("install_as_tensordict" in inspect.getsource(importlib.import_module("tensordict")))
"""
    assert output(code, tmp_path) == ["True True", "True"]
    (tmp_path / "program.py").write_text(code)
    assert run("-m", "td", "run", "program.py", cwd=tmp_path).stdout.splitlines() == ["True True", "True"]


def test_alias_compares_columns_as_tensordict(tmp_path):
    code = """
from tensordict import TensorDict
names = TensorDict({"name": ["a", "b"]}, [2]).get("name")
print(names == "b", names != "b", (names == names).tolist())
"""
    assert output(code, tmp_path) == ["False True [True, True]"]


def test_alias_keeps_lists_as_tensordict(tmp_path):
    code = """
import torch
from tensordict import NonTensorStack, TensorDict
data = TensorDict({"a": [torch.ones(2), torch.ones(3)], "b": [{"x": torch.ones(2)}, {"x": torch.ones(2)}]}, [2])
print([type(data.get(key)) is NonTensorStack for key in "ab"])
"""
    assert output(code, tmp_path) == ["[True, True]"]
