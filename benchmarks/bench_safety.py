"""Run failure cases of saved collections (damage, full disk, killed process) with td and with tensordict; print the outcomes.

Each case is a program that runs once per library, in a new process and folder. No case is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

COMMON = """
import contextlib, io, sys, warnings
warnings.simplefilter("ignore")
if sys.argv[1] == "td":
    import td
    td.install_as_tensordict()
import json, os, pickle, time
from pathlib import Path
import torch
import tensordict
from tensordict import NonTensorStack, TensorDict, lazy_stack

def load():
    return TensorDict.load_memmap("save")

def attempt(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(code, dict(globals()))
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return out.getvalue().splitlines()[0].replace(os.getcwd() + os.sep, "")
"""

CASES = {
    "Loading a save into which an attacker put a pickle": """
        class Attack:
            def __reduce__(self):
                return Path.touch, (Path("attacked"),)
        Path("save/x").mkdir(parents=True)
        Path("save/meta.json").write_text(json.dumps({
            "x": {"type": "NonTensorData"}, "shape": [], "device": "cpu",
            "_type": "<class 'tensordict._td.TensorDict'>"}))
        Path("save/x/meta.json").write_text(json.dumps({"_type": "<class 'tensordict.tensorclass.NonTensorData'>"}))
        Path("save/x/other.pickle").write_bytes(pickle.dumps({"data": Attack()}))
        try:
            load()
        finally:
            if Path("attacked").exists():
                print("the pickle runs")
        """,
    "Loading a leaf whose file is too short": """
        TensorDict(a=torch.ones(1000)).memmap("save")
        os.truncate("save/a.memmap", 400)
        found = load()["a"]
        print(f"loads with {int((found == 0).sum())} zeros; the file now has {os.stat('save/a.memmap').st_size} bytes")
        """,
    "Loading a leaf whose file is a link to another file": """
        TensorDict(a=torch.ones(4)).memmap("save")
        Path("elsewhere").write_bytes(bytes(16))
        os.remove("save/a.memmap")
        os.symlink("../elsewhere", "save/a.memmap")
        found = load()
        found["a"].fill_(7)
        changed = Path("elsewhere").read_bytes() != bytes(16)
        print("loads" + (", and writing to the leaf changes the file elsewhere" if changed else ""))
        """,
    "Loading a save whose batch size contradicts its leaves": """
        TensorDict(a=torch.ones(3), batch_size=[3]).memmap("save")
        meta = json.loads(Path("save/meta.json").read_text())
        Path("save/meta.json").write_text(json.dumps(meta | {"shape": [5]}))
        found = load()
        print(f"loads: batch size {list(found.batch_size)}, leaf {list(found['a'].shape)}")
        """,
    "One flipped bit": """
        verify = getattr(tensordict, "verify", None)
        TensorDict(a=torch.ones(4)).memmap("save", **({"checksums": True} if verify else {}))
        damaged = bytearray(Path("save/a.memmap").read_bytes())
        damaged[3] ^= 64
        before = os.stat("save/a.memmap").st_mtime_ns
        Path("save/a.memmap").write_bytes(damaged)
        os.utime("save/a.memmap", ns=(before, before))
        if verify:
            print("verify():", "; ".join(str(problem) for problem in verify("save").problems))
        else:
            print("loads with a wrong value:", load()["a"].tolist())
        """,
    "Saving 3 members of a lazy stack over 5": """
        def members(count):
            return lazy_stack([TensorDict(a=torch.full((i + 1,), count)) for i in range(count)])
        members(5).memmap("save")
        members(3).memmap("save")
        print("loads", len(load()), "members")
        """,
    "Saving a key named shape": """
        TensorDict(shape=torch.ones(2), a=torch.ones(2)).memmap("save")
        print("loads the keys", sorted(load().keys()))
        """,
    "Saving float8": """
        TensorDict(a=torch.ones(2).to(torch.float8_e4m3fn)).memmap("save")
        print("loads", load()["a"].dtype)
        """,
    "Saving a transposed nested tensor": """
        nested = torch.nested.nested_tensor([torch.arange(6).view(2, 3), torch.arange(4).view(2, 2)])
        TensorDict(a=nested.transpose(1, 2)).memmap("save")
        right = all(map(torch.equal, load()["a"].unbind(0), nested.transpose(1, 2).unbind(0)))
        print("loads the right values" if right else "loads wrong values")
        """,
    "Values that are not tensors, through state_dict": """
        state = TensorDict(s=NonTensorStack("a", "b"), batch_size=[2]).state_dict()
        target = TensorDict(s=NonTensorStack("x", "y"), batch_size=[2])
        target.load_state_dict(state)
        print("gives", list(target["s"]))
        """,
}

EACH = """
for name, code in json.loads(sys.argv[2]).items():
    os.mkdir(name)
    os.chdir(name)
    print(json.dumps([name, attempt(code)]), flush=True)
    os.chdir("..")
"""
FULL_DISK = """
print(attempt("TensorDict(a=torch.ones(4 << 20)).memmap('disk/save'); print('saves')"))
"""
OVERWRITE = """
old, new = (TensorDict({f"k{i}": torch.full((4096,), number) for i in range(1500)}) for number in (1, 2))
old.memmap("save")
start = time.monotonic()
old.memmap("save")
took = time.monotonic() - start
Path("started.part").write_text(str(took))
os.rename("started.part", "started")
new.memmap("save")
"""
LOOK = """
found = tuple(sorted({int(value) for leaf in load().values() for value in leaf.unique()}))
print({(1,): "the old save, complete", (2,): "the new save, complete"}.get(found, "a mixture of both saves"))
"""


def command(library: str, code: str, *arguments: str) -> list[str]:
    """Return the command that runs a program with a library."""
    return [sys.executable, "-c", COMMON + code, library, *arguments]


def output(words: list[str], folder: Path) -> list[str]:
    """Run a program and return the lines that it prints, or the signal that killed it."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return [f"the process dies of {signal.Signals(-done.returncode).name}"]
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def full_disk(library: str, folder: Path) -> str:
    """Save 16 MB to a file system of 4 MB, and return the outcome."""
    (folder / "disk").mkdir()
    mount = 'mount -t tmpfs -o size=4m tmpfs disk && exec "$@"'
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*private, "true"], cwd=folder, check=False).returncode
    ):
        return "not measured: this machine mounts no file system"
    return output([*private, *command(library, FULL_DISK)], folder)[0]


def killed(library: str, folder: Path) -> str:
    """Kill a process at three moments while it overwrites an old save, and return the outcomes."""
    found = set()
    for share in (0.25, 0.5, 0.75):
        place = folder / str(share)
        place.mkdir()
        with subprocess.Popen(command(library, OVERWRITE), cwd=place) as process:
            while not (place / "started").exists():
                time.sleep(1e-3)
            time.sleep(float((place / "started").read_text()) * share)
            process.kill()
        found.add(output(command(library, LOOK), place)[0])
    return " or ".join(sorted(found))


def measure(library: str) -> dict[str, str]:
    """Run all cases with a library, and return the outcome of each."""
    cases = {name: dedent(code) for name, code in CASES.items()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        found = {
            "The process is killed while it overwrites a save": killed(library, folder),
            "The disk is full": full_disk(library, folder),
            **dict(map(json.loads, output(command(library, EACH, json.dumps(cases)), folder))),
        }
    for name, what in found.items():
        print(f"{library:10}  {name}: {what}", flush=True)
    return found


def main() -> None:
    """Run all cases with each installed library."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1")
    results = {library: measure(library) for library in ("td", "tensordict") if find_spec(library)}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
