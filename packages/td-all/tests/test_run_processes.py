"""``python -m td run``: the program is the main module, so child processes can send it objects of its classes."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROGRAM = """
import concurrent.futures
import dataclasses
import enum
import multiprocessing
import sys
from typing import NamedTuple

import torch
import torch.multiprocessing
from tensordict import NonTensorData, TensorClass, TensorDict

class Report:
    class Part:
        size = 3
    def __init__(self, step):
        self.step = step

@dataclasses.dataclass
class Row:
    step: int

class Pair(NamedTuple):
    step: int

class Color(enum.Enum):
    RED = 1

class Failure(Exception):
    pass

class Record(TensorClass):
    x: torch.Tensor
    row: Row

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return Report(i)

def keep(items):
    return items

def work(step):
    if step < 0:
        raise Failure(step)
    record = Record(x=torch.ones(2), row=Row(step), batch_size=[2])
    data = TensorDict({"value": NonTensorData(Row(step))})
    return [Report(step), Row(step), Pair(step), Color.RED, Report.Part(), record, data, Failure(step), work]

def put(queue, done, step):
    queue.put(work(step))
    done.wait(100)  # torch fetches the memory of a tensor from the process that sent it

def show(found):
    report, row, pair, color, part, record, data, failure, function = found
    print(report.step, row, pair, color, part.size, record.x.tolist(), record.row, data["value"], repr(failure))
    assert type(report) is Report and type(record) is Record and type(part) is Report.Part and function is work

def pool(context):
    with context.Pool(2) as pool:
        show(pool.map_async(work, [7]).get(timeout=100)[0])
        try:
            pool.apply_async(work, [-1]).get(timeout=100)
        except Failure as error:
            print("raised", repr(error))

def queue(context):
    queue, done = context.Queue(), context.Event()
    process = context.Process(target=put, args=(queue, done, 7))
    process.start()
    show(queue.get(timeout=100))
    done.set()
    process.join()

def executor(context):
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        show(executor.submit(work, 7).result(timeout=100))
        print("raised", repr(executor.submit(work, -1).exception(timeout=100)))

def loader(context):
    made = torch.utils.data.DataLoader(
        Rows(), batch_size=2, collate_fn=keep, num_workers=1, multiprocessing_context=context, timeout=100
    )
    print([[type(item) is Report and item.step for item in batch] for batch in made])

def at_exit(context):
    import atexit
    import pickle
    atexit.register(lambda: print(pickle.loads(pickle.dumps(Row(7)))))

if __name__ == "__main__":
    how, method, kind = sys.argv[1:]
    module = torch.multiprocessing if kind == "torch" else multiprocessing
    globals()[how](module.get_context(method))
"""
SHOWN = "7 Row(step=7) Pair(step=7) Color.RED 3 [1.0, 1.0] Row(step=7) Row(step=7) Failure(7)\n"
WAYS = [
    ("pool spawn plain", SHOWN + "raised Failure(-1)\n"),
    ("pool forkserver plain", SHOWN + "raised Failure(-1)\n"),
    ("pool spawn torch", SHOWN + "raised Failure(-1)\n"),
    ("queue spawn plain", SHOWN),
    ("queue spawn torch", SHOWN),
    ("queue fork plain", SHOWN),
    ("executor spawn plain", SHOWN + "raised Failure(-1)\n"),
    ("loader spawn plain", "[[0, 1], [2, 3]]\n"),
    ("at_exit spawn plain", "Row(step=7)\n"),
]


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "td", "run", *words], cwd=cwd, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.once
@pytest.mark.parametrize(("way", "shown"), WAYS, ids=[way for way, _ in WAYS])
def test_run_script_receives_its_classes_from_children(way: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run("program.py", *way.split(), cwd=tmp_path) == shown


@pytest.mark.once
@pytest.mark.parametrize("way", ["queue spawn plain", "executor spawn plain"])
def test_run_module_receives_its_classes_from_children(way: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(PROGRAM)
    assert run("-m", "package.program", *way.split(), cwd=tmp_path).startswith(SHOWN)


MAIN = """
import sys
print(__name__, __spec__ and __spec__.name, __package__, sys.argv[1:], sys.modules["__main__"].__dict__ is globals())
import beside
"""
BESIDE = "print('beside')\n"


def written(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__main__.py").write_text(MAIN)
    (folder / "beside.py").write_text(BESIDE)
    return folder


@pytest.mark.parametrize("way", ["script", "folder", "zip", "package"])
def test_run_main_module_has_same_attributes_as_in_python(way: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "program")
    words = {
        "script": ["program/__main__.py"],
        "folder": ["program"],
        "zip": ["program.pyz"],
        "package": ["-m", "program"],
    }[way]
    if way == "zip":
        with zipfile.ZipFile(tmp_path / "program.pyz", "w") as archive:
            for path in folder.iterdir():
                archive.write(path, path.name)
    if way == "package":
        (tmp_path / "beside.py").write_text(BESIDE)
    plain = subprocess.run(
        [sys.executable, *words, "x"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run(*words, "x", cwd=tmp_path) == plain.stdout


def test_run_script_writes_no_bytecode(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print(__file__)")
    assert run("program.py", cwd=tmp_path) == f"{tmp_path / 'program.py'}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "absent"], "cannot find the module absent"),
        (["-m", "absent.module"], "cannot find the module absent.module: No module named 'absent'"),
        (["folder"], "there is no __main__.py in folder"),
    ],
)
def test_run_missing_program_raises_naming_it(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "td", "run", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, f"python -m td run: {message}\n")
