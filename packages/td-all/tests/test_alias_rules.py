"""What the alias makes collections do as tensordict does, since programs rely on it. Each test runs in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ALIAS = """
import torch, td
td.install_as_tensordict()
from tensordict import *
from tensordict import PersistentTensorDict
"""


def run(code: str, cwd: Path) -> str:
    """Run a program with the alias, and return what it prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ALIAS + code]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_collections_without_batch_dims_have_length_zero(tmp_path):
    code = """
class Record(TensorClass):
    a: torch.Tensor
empty = TensorDict()
print([len(x) for x in (empty, TensorDict(a=torch.zeros(3), batch_size=[3])[0], Record(a=torch.ones(2)), NonTensorData("a"),
                        TensorDictParams(TensorDict(w=torch.ones(2))), TensorDict(batch_size=[4]), lazy_stack([empty, empty]))])
for x in (empty, Record(a=torch.ones(2))):
    try:
        list(x)
    except TypeError as error:
        print(str(error)[:14])
"""
    assert run(code, tmp_path) == "[0, 0, 0, 0, 0, 4, 2]\ncannot iterate\ncannot iterate\n"


def test_errors_begin_with_text_that_programs_read(tmp_path):
    code = """
uneven = [TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))]
nested = lazy_stack([TensorDict(n=x) for x in uneven])
for call in (
    lambda: lazy_stack(uneven)["a"],
    lambda: nested.get(("n", "a")),
    lambda: dict(lazy_stack(uneven).items()),
    lambda: torch.stack(uneven),
    lambda: torch.cat([TensorDict(a=torch.zeros(1, n), batch_size=[1]) for n in (1, 2)]),
    lambda: torch.stack([TensorDict(a=torch.zeros(2)), TensorDict(b=torch.zeros(2))]),
    lambda: torch.stack([TensorDict(batch_size=[1]), TensorDict(batch_size=[2])]),
):
    try:
        call()
    except RuntimeError as error:
        print(str(error).partition(":")[0])
"""
    assert run(code, tmp_path).splitlines() == [
        *["Failed to stack tensors within a tensordict"] * 3,
        "The shapes of the tensors to stack is incompatible",
        "Sizes of tensors must match",
        "The sets of keys in the tensordicts to stack are exclusive",
        "stacking tensordicts requires them to have congruent batch sizes",
    ]


def test_stacks_of_values_are_no_source_of_entries(tmp_path):
    code = """
class Message(TensorClass):
    role: str
    tokens: torch.Tensor
message = Message.from_dict({"role": NonTensorStack("user", "bot"), "tokens": torch.zeros(2, 5)}, batch_size=[2])
print(list(message.batch_size), list(message.role), message[1].role)
values, data = NonTensorStack("a", "b"), TensorDict(a=torch.zeros(2), batch_size=[2])
for call in (TensorDict, TensorDict.from_dict, make_tensordict, data.update, data.update_, lambda x: data.update_at_(x, 0)):
    try:
        print(call(values))
    except (TypeError, ValueError, RuntimeError) as error:
        print(str(error).partition("got ")[2][:14])
"""
    assert run(code, tmp_path).splitlines() == ["[2] ['user', 'bot'] bot", *["NonTensorStack"] * 6]


def test_ragged_batch_dim_ends_the_batch(tmp_path):
    code = """
steps = TensorDict(reward=torch.arange(5.0), obs=torch.arange(10.0).reshape(5, 2), batch_size=[5])
for layout in (torch.strided, torch.jagged):
    nest = lambda x: torch.nested.nested_tensor([x[:2], x[2:]], layout=layout)
    for games in (steps.apply(nest, batch_size=[2, -1]), steps._fast_apply(nest, batch_size=[2, -1]),
                  TensorDict({key: nest(steps[key]) for key in ("reward", "obs")}, batch_size=[2, -1])):
        padded = games.to_padded_tensor(mask_key="mask")
        print(list(games.batch_size), padded["mask"].tolist(), padded["reward"].tolist(), padded["obs"].sum().item())
"""
    row = "[2] [[True, True, False], [True, True, True]] [[0.0, 1.0, 0.0], [2.0, 3.0, 4.0]] 45.0"
    assert run(code, tmp_path).splitlines() == [row] * 6


def test_persistent_collection_opens_files_and_groups(tmp_path):
    pytest.importorskip("td_hdf5")
    pytest.importorskip("td_zarr")
    code = """
import zarr
source = TensorDict({"x": torch.arange(3.0), "n": {"y": torch.ones(3, 2)}}, batch_size=[3])
for save, load, backend, name in (("to_zarr", "from_zarr", "zarr", "a.zarr"), ("to_h5", "from_h5", "h5", "a.h5")):
    print(isinstance(getattr(source, save)(name), PersistentTensorDict),
          isinstance(getattr(TensorDict, load)(name), PersistentTensorDict))
    opened = PersistentTensorDict(filename=name, backend=backend, batch_size=[3], mode="r+")
    opened["z"] = opened["x"] + 1
    print(sorted(PersistentTensorDict(filename=name, backend=backend).keys()), opened["z"].tolist())
    made = PersistentTensorDict.from_dict({"a": torch.ones(3)}, name + "2", backend=backend, batch_size=[3])
    new = PersistentTensorDict(filename=name + "3", backend=backend, batch_size=[2], mode="w")
    new["a"] = torch.ones(2)
    print([(isinstance(x, PersistentTensorDict), list(x.batch_size), x["a"].sum().item()) for x in (made, new)])
    read = PersistentTensorDict(filename=name, backend=backend)
    print([(x.backend, x.mode, x.filename.rpartition("/")[2], x.kwargs, sorted(x.file.keys())) for x in (new, read, read["n"])])
    for mode, file in (("w-", name), ("r+", "absent"), ("r", "absent")):
        try:
            PersistentTensorDict(filename=file, backend=backend, mode=mode)
        except OSError as error:
            print(type(error).__name__, end=" ")
    print()
group = PersistentTensorDict(group=zarr.open_group("a.zarr", mode="r")["n"], backend="zarr", batch_size=[3])
print(group["y"].sum().item(), isinstance(source, PersistentTensorDict), issubclass(PersistentTensorDict, TensorDictBase))
for options in ({"backend": "csv"}, {"backend": "zarr"}, {"backend": "zarr", "filename": "a.zarr", "device": "meta"}):
    try:
        PersistentTensorDict(**options)
    except (NotImplementedError, TypeError, ValueError) as error:
        print(error)
"""
    each = [
        "True True",
        "['n', 'x', 'z'] [1.0, 2.0, 3.0]",
        "[(True, [3], 3.0), (True, [2], 2.0)]",
        "[({0!r}, 'r+', '{1}3', {{}}, ['a'])" + ", ({0!r}, 'r', '{1}', {{}}, ['n', 'x', 'z'])" * 2 + "]",
        "FileExistsError FileNotFoundError FileNotFoundError ",
    ]
    assert run(code, tmp_path).splitlines() == [
        *(line.format("zarr", "a.zarr") for line in each),
        *(line.format("h5", "a.h5") for line in each),
        "6.0 False True",
        "backend is one of 'h5', 'zarr'; got 'csv'",
        "a PersistentTensorDict takes a filename or a group, and not both",
        "the leaves of a Zarr group are read on the CPU; got the device 'meta': move what is read",
    ]


@pytest.mark.parametrize(("storage", "load"), [("h5", "from_h5"), ("zarr", "from_zarr")])
def test_from_schema_returns_file_opened_for_writing(storage, load, tmp_path):
    pytest.importorskip("td_hdf5")
    pytest.importorskip("td_zarr")
    code = f"""
schema = {{"obs": ([2, 3], torch.float32), "reward": ([], torch.float64)}}
data = TensorDict.from_schema(schema, batch_size=[6], storage={storage!r}, filename="rollout")
data[4] = TensorDict(obs=torch.ones(2, 3), reward=torch.tensor(2.5, dtype=torch.float64))
data["more"] = torch.ones(6)
again = TensorDict.{load}("rollout")
print(isinstance(data, PersistentTensorDict), list(again["obs"].shape), again["obs"].sum().item(), again["reward"].tolist())
print(sorted(again.keys()), TensorDict.from_schema(schema, batch_size=[1])["reward"].tolist())
try:
    TensorDict.from_schema(schema, storage={storage!r})
except TypeError as error:
    print(error)
"""
    assert run(code, tmp_path).splitlines() == [
        "True [6, 2, 3] 6.0 [0.0, 0.0, 0.0, 0.0, 2.5, 0.0]",
        "['more', 'obs', 'reward'] [0.0]",
        f"from_schema(storage={storage!r}) needs filename=, the file to create",
    ]


def test_uneven_stacks_are_mapped_member_by_member(tmp_path):
    code = """
members = [TensorDict(a=torch.ones(4, 2), b=torch.ones(1)), TensorDict(a=torch.ones(3, 2), c={"d": torch.ones(2)})]
stack = lazy_stack(members)
for i, data in enumerate((stack, stack.expand(3, 2), TensorDict(x=stack, batch_size=[2])["x"])):
    for saved in (data.memmap(f"one{i}"), data.memmap_like(f"two{i}"), data.memmap(), data.clone().memmap_()):
        print([(sorted(m.keys()), m["a"].shape[-2], type(m["a"]).__name__) for m in saved.tensordicts])
params = TensorDictParams(TensorDict(w=torch.ones(2)))
print(type(params.memmap()).__name__, type(TensorDict(p=params).memmap()["p"]).__name__)
"""
    row = "[(['a', 'b'], 4, 'MemoryMappedTensor'), (['a', 'c'], 3, 'MemoryMappedTensor')]"
    *rows, last = run(code, tmp_path).splitlines()
    assert rows == [row] * 12
    assert last.split()[0] == "TensorDict"


def test_structure_of_consolidated_collection_can_be_read_and_changed(tmp_path):
    code = """
data = TensorDict(a=torch.zeros(2), n={"b": torch.ones(3)}).consolidate()
held = data._consolidated
_, shape, start, stop, _ = held["metadata"]["n"]["leaves"]["b"]
held["storage"][start:stop].view(torch.float32)[: shape[0]] = 2
print(data["n", "b"].tolist(), data._consolidated["metadata"] is held["metadata"])
held["metadata"]["n"] = None
print(data._consolidated["metadata"]["n"], [hasattr(x, "_consolidated") for x in (data.clone(), TensorDict(), data[...])])
data._consolidated = {"metadata": {}}
print(data._consolidated, data.is_consolidated())
"""
    assert run(code, tmp_path).splitlines() == [
        "[2.0, 2.0, 2.0] True",
        "None [False, False, False]",
        "{'metadata': {}} True",
    ]


def test_program_that_replaces_is_writable_maps_no_file_shared(tmp_path):
    code = """
import importlib
from tensordict import MemoryMappedTensor, tensorclass
module = importlib.import_module("tensordict.memmap")
original = module._is_writable
assert original("data") is True

@tensorclass
class Record:
    x: torch.Tensor

def add_one(load):
    data = load()
    (data if isinstance(data, torch.Tensor) else data.get("x")).add_(1)
    return TensorDict.load_memmap("data").get("x").tolist()

loads = (
    lambda: TensorDict.load_memmap("data"),
    lambda: TensorDict.load("data"),
    lambda: Record.load("record"),
    lambda: MemoryMappedTensor.from_filename("data/x.memmap", torch.float32, [2]),
)
TensorDict(x=torch.zeros(2)).memmap("data")
Record(x=torch.zeros(2)).memmap("record")
module._is_writable = lambda path: False
print([add_one(load) for load in loads], Record.load("record").x.tolist())
try:
    TensorDict.load_memmap("data", mode="r+").get("x").add_(1)
finally:
    module._is_writable = original
print(add_one(loads[0]), module._is_writable is original)
"""
    kept = [[0.0, 0.0]] * 4
    assert run(code, tmp_path) == f"{kept} [0.0, 0.0]\n[2.0, 2.0] True\n"
