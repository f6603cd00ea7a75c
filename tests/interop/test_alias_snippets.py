"""Short programs that public clients of tensordict contain print the same with tensordict and with td in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SNIPPETS = {
    # TorchRL: a replay buffer on disk whose rows are stacks of members with other shapes and keys.
    "uneven_stack_on_disk": """
stack = lazy_stack([TensorDict(a=torch.ones(4, 2), b=torch.ones(1)), TensorDict(a=torch.ones(3, 2), c={"d": torch.ones(2)})])
def show(data):
    members = (data["x"] if "x" in data.keys() else data).tensordicts
    return [list(data.batch_size), [(sorted(m.keys()), list(m["a"].shape), m["a"].sum().item()) for m in members]]
for make in (lambda: stack, lambda: TensorDict(x=stack, batch_size=[2]), lambda: stack.expand(3, 2)):
    print([show(save(make())) for save in (
        lambda data: data.memmap(folder()), lambda data: data.clone().zero_().memmap_like(folder()),
        lambda data: data.clone().memmap_(folder()), lambda data: TensorDict.load_memmap(save_in(data)),
        lambda data: data.clone().share_memory_(), lambda data: data.memmap())])
""",
    "tensorclass_in_uneven_stack_on_disk": """
@tensorclass
class Step:
    a: torch.Tensor
    name: str
stack = lazy_stack([Step(a=torch.ones(n), name="x") for n in (2, 3)])
saved = stack.memmap(folder())
print(type(saved[0]).__name__, [m.a.tolist() for m in saved.unbind(0)], saved[1].name)
""",
    # tdhook: it writes outputs into the storage of a consolidated collection.
    "structure_of_consolidated": """
data = TensorDict({"x": torch.ones(2), "r": {"y": torch.zeros(4)}, "s": "text"}, batch_size=[]).consolidate()
held = data._consolidated
dtype, shape, start, stop, pad = held["metadata"]["r"]["leaves"]["y"]
print(sorted(held), dtype, list(shape), held["metadata"]["cls"], list(held["metadata"]["leaves"]))
held["storage"][start:stop].view(torch.float32).fill_(3)
print(data["r", "y"].tolist(), hasattr(data.clone(), "_consolidated"), hasattr(TensorDict(), "_consolidated"))
held["metadata"]["r"] = None
print(data._consolidated["metadata"]["r"], data.is_consolidated())
data._consolidated = None
print(data._consolidated)
""",
    "loader_of_members": """
rows = [TensorDict(a=torch.full((2,), i), b={"c": torch.tensor(i)}) for i in range(4)]
batch = LazyStackedTensorDict.maybe_dense_stack(rows)
print(type(batch).__name__, batch["a"].tolist(), batch["b", "c"].tolist(), len(list(batch)))
""",
}

PROGRAM = """
import contextlib, io, json, sys, tempfile, torch, warnings
warnings.simplefilter("ignore")
from tensordict import *
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack, tensorclass
def folder():
    return tempfile.mkdtemp(dir=sys.argv[1])
def save_in(data):
    place = folder()
    data.memmap(place)
    return place
results = {}
for name, code in json.load(sys.stdin).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, dict(globals()))
    results[name] = out.getvalue()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[dict[str, str], dict[str, str]]:
    """Return what each snippet prints with tensordict, and with td."""
    folder: Path = tmp_path_factory.mktemp("snippets")
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")

    def run(*command: str) -> dict[str, str]:
        done = subprocess.run(
            [sys.executable, *command, str(program), str(folder)],
            input=json.dumps(SNIPPETS),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run(), run("-m", "td", "run")


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet_prints_same_output(name, printed):
    expected, result = printed
    assert expected[name]
    assert result[name] == expected[name]
