"""Pickles and torch.save files written by tensordict load through the alias of td."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CLASSES = """
from typing import Any
from torch import Tensor
from tensordict import TensorClass, TensorDict, TypedTensorDict, tensorclass

@tensorclass
class Point:
    x: Tensor
    note: Any = None

class Pair(TensorClass):
    first: Point
    second: Point

class Typed(TypedTensorDict):
    a: Tensor

class Sub(TensorDict):
    pass
"""

WRITE = """
import pickle, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from tensordict import *
from tensordict.nn import TensorDictParams
from classes import Pair, Point, Sub, Typed

def dense(**entries):
    return TensorDict(a=torch.arange(3), n=TensorDict(b=torch.ones(3, 2), batch_size=[3]), batch_size=[3], **entries)

point = Point(x=torch.arange(3.0), note="north", batch_size=[3])
ragged = [TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))]
MADE = {
    "dense": TensorDict(s="abc", batch_size=[3], names=["t"]).update(dense()).lock_(),
    "lazy": lazy_stack(ragged, 0),
    "values": TensorDict(one=NonTensorData({1, 2}), each=NonTensorStack("a", "b"), batch_size=[2]),
    "metadata": MetaData("note"),
    "consolidated": dense().consolidate(),
    "consolidated lazy": lazy_stack(ragged).consolidate(),
    "consolidated tensorclass": point.consolidate(),
    "tensorclass": point,
    "tensorclasses": Pair(first=point, second=point[:], batch_size=[3]),
    "lazy tensorclass": lazy_stack([Point(x=torch.arange(2.0)), Point(x=torch.arange(3.0))]),
    "typed": Typed(a=torch.ones(3), batch_size=[3]),
    "subclass": Sub(a=torch.ones(3), batch_size=[3]),
    "params": TensorDictParams(TensorDict(a=torch.ones(2), n=TensorDict(b=torch.zeros(1)))),
    "unbatched": TensorDict(u=UnbatchedTensor(torch.ones(2)), batch_size=[4]),
    "extremes": TensorDict(a=torch.arange(3), batch_size=[3]).max(dim=0),
    "mapped": dense().memmap("mapped"),
    "mapped leaf": MemoryMappedTensor.from_tensor(torch.arange(4), filename="leaf.memmap"),
    "function": (TensorDict, lazy_stack, KEY_SEPARATOR),
}
for name, value in MADE.items():
    torch.save(value, name + ".pt")
    Path(name + ".pickle").write_bytes(pickle.dumps(value))
"""

READ = """
import pickle, sys, warnings
warnings.simplefilter("ignore")
if sys.argv[1] == "ours":
    import td
    td.install_as_tensordict()
from pathlib import Path
import torch
import tensordict

def show(how, read):
    try:
        value = read()
    except Exception as error:
        value = type(error).__name__
    text = " ".join(repr(value).split())
    if "function" not in how:
        print(how, text)

for path in sorted(Path().glob("*.p*")):
    if path.suffix == ".pickle":
        show(path.name, lambda: pickle.loads(path.read_bytes()))
    elif path.suffix == ".pt":
        show(path.name, lambda: torch.load(path, weights_only=False))
        show(path.name + " weights only", lambda: torch.load(path, weights_only=True))
"""

#: Files that td loads with weights_only=True, but tensordict does not.
MORE = {"metadata.pt weights only", "unbatched.pt weights only"}


def output(code: str, *arguments: str, cwd: Path) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(cwd)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_load_pickle_of_tensordict_through_alias_equals_source(tmp_path: Path) -> None:
    (tmp_path / "classes.py").write_text(CLASSES)
    output(WRITE, cwd=tmp_path)
    theirs, ours = output(READ, "theirs", cwd=tmp_path), output(READ, "ours", cwd=tmp_path)
    assert len(ours) == len(theirs) > 40
    differing = [(mine, other) for mine, other in zip(ours, theirs) if mine != other]
    assert [pair for pair in differing if not pair[0].startswith(tuple(MORE))] == []
    assert {mine.partition(" weights only ")[0] + " weights only" for mine, _ in differing} == MORE
    assert not any("Error" in mine for mine, _ in differing)
