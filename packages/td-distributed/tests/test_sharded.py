"""Leaves that are sharded over ranks: DTensor, and the parameters of modules under fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from td_core import TensorDict, TensorDictParams, append, load, save

pytest.importorskip("torch.distributed.tensor", reason="this torch has no public DTensor")


def make_mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def make_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))


def gather_leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf for leaf in tree._leaves()]


def list_leaf_classes(tree: Any) -> set[str]:
    return {type(leaf).__name__ for leaf in tree._leaves()}


def assert_all_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def apply_operations(rank: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    full = torch.arange(24.0).view(8, 3)
    plain = TensorDict({"w": full, "n": {"b": torch.ones(8)}}, batch_size=[8])
    tree = plain.replace({"w": distribute_tensor(full, make_mesh(), [Shard(0)])})
    for change in (
        lambda td: td.clone(),
        lambda td: td * 2 + 1,
        lambda td: td.apply(torch.sqrt),
        lambda td: td.to(torch.float64),
        lambda td: td.reshape(2, 4),
        lambda td: torch.stack([td, td]),
        lambda td: td.clone().zero_(),
        lambda td: td.clone().zero_().update_(td),
        lambda td: td.clone().zero_().load_state_dict(td.state_dict()),
        lambda td: td.clone().zero_().load_state_dict(td.state_dict(flatten=False)),
    ):
        result = change(tree)
        assert list_leaf_classes(result) == {"DTensor", "Tensor"}
        assert_all_close(gather_leaves(result), gather_leaves(change(plain)))


def test_every_operation_on_dtensor_leaf_keeps_dtensor(two: Any) -> None:
    assert two.run(apply_operations) == [None, None]


def save_shards(rank: int, folder: str) -> list[str]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    full, messages = torch.arange(24.0).view(8, 3), []
    mesh = make_mesh()
    tree = TensorDict({"w": distribute_tensor(full, mesh, [Shard(0)]), "n": {"b": torch.ones(2)}})
    tree["n", "r"] = distribute_tensor(full + 1, mesh, [Replicate()])
    saves: list[Any] = [
        tree.memmap(f"{folder}/directory"),
        TensorDict.load_memmap(f"{folder}/directory"),
        tree.memmap(),
        [tree.memmap(f"{folder}/archive.tdz"), TensorDict.load_memmap(f"{folder}/archive.tdz")][1],
        [save(tree, f"{folder}/saved"), TensorDict.load_memmap(f"{folder}/saved")][1],
        TensorDictParams(tree).memmap(f"{folder}/params"),
    ]
    for saved in saves:
        assert_all_close(saved._leaves(), [leaf.detach() for leaf in gather_leaves(tree)])
    assert list_leaf_classes(tree) == {"DTensor", "Tensor"}
    for call in (
        lambda: tree.memmap(f"{folder}/early", return_early=True),
        lambda: tree.memmap("/dev/null/nowhere"),
        lambda: tree.clone().memmap_(f"{folder}/in_place"),
    ):
        try:
            call()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}"[:60])
    return messages


def test_memmap_dtensor_saves_whole_tensor(two: Any, tmp_path: Path) -> None:
    pytest.importorskip("td_memmap")
    first, second = two.run(save_shards, str(tmp_path))
    assert first[0] == second[0] and first[0].startswith("ValueError: return_early=True: the ranks write")
    assert first[1].startswith("NotADirectoryError")
    assert second[1].startswith("WorkerError: rank 0 could not save the sharded leaves")
    assert first[2] == second[2] and first[2].startswith("CodecError: cannot store the elements of a DTensor")


#: Format, name of the save, and a call that writes on each rank by itself, or into an opened save.
FORMATS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "safetensors": ("data.safetensors", lambda data, path: import_module("td_safetensors").save(data, path)),
    "zarr": ("data.zarr", lambda data, path: data.to_zarr(path)),
    "hdf5": ("data.h5", lambda data, path: data.to_h5(path)),
}


def save_in_format(rank: int, name: str, folder: str) -> list[str]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    file, write_alone = FORMATS[name]
    full, mesh, messages = torch.arange(24.0).view(8, 3), make_mesh(), []
    data = TensorDict({"w": distribute_tensor(full, mesh, [Shard(0)]), "n": {"b": torch.ones(8)}}, [8])
    data["n", "r"] = distribute_tensor(full + 1, mesh, [Replicate()])
    wanted = {"w": full, ("n", "b"): torch.ones(8), ("n", "r"): full + 1}
    saves = [lambda path: save(data, path, format=name), lambda path: data.save(path, format=name)]
    if name == "safetensors":
        saves.append(data.to_safetensors)
    for i, call in enumerate(saves):
        path = f"{folder}/{i}{file}"
        assert call(path) is data
        found = load(path, format=name)
        for key, leaf in wanted.items():
            torch.testing.assert_close(found[key], leaf)
    if name != "safetensors":
        append(data, path, format=name)
        assert load(path, format=name).batch_size == (16,)
        assert torch.equal(load(path, format=name)["w"], torch.cat([full, full]))
    for attempt in (
        lambda: save(data, f"{folder}/early{file}", format=name, return_early=True),
        lambda: write_alone(data, f"{folder}/rank{rank}{file}"),
        lambda: save(data, "/dev/null/nowhere/" + file, format=name),
    ):
        try:
            attempt()
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    assert not list(Path(folder).glob("early*")) and not list(Path(folder).glob("rank*"))
    return messages


@pytest.mark.parametrize("name", FORMATS)
def test_save_of_dtensor_in_format_saves_whole_tensor(name, two, tmp_path):
    pytest.importorskip("td_" + name)
    first, second = two.run(save_in_format, name, str(tmp_path))
    for messages in (first, second):
        assert messages[0].startswith(
            "ValueError: return_early=True: the ranks write sharded leaves together"
        )
        assert messages[1].startswith(
            "CodecError: cannot save key 'w': a DTensor lies on several ranks: td_core.save("
        )
    assert first[2].startswith("NotADirectoryError")
    assert second[2].startswith("WorkerError: rank 0 could not save the sharded leaves")


def set_in_opened_save(rank: int, name: str, folder: str) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    opened = getattr(TensorDict({"b": torch.zeros(8)}, [8]), f"to_{name}")(f"{folder}/{rank}.{name}")
    try:
        opened["w"] = distribute_tensor(torch.ones(8, 3), make_mesh(), [Shard(0)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", ["zarr", "h5"])
def test_set_dtensor_in_opened_save_raises(name, two, tmp_path):
    pytest.importorskip({"zarr": "td_zarr", "h5": "td_hdf5"}[name])
    for message in two.run(set_in_opened_save, name, str(tmp_path)):
        assert "a DTensor lies on several ranks" in message


def swap_parameters(rank: int) -> None:
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

    module = distribute_module(make_model(), make_mesh())
    inputs = distribute_tensor(torch.ones(3, 8), make_mesh(), [Replicate()])
    held = list(module.parameters())
    params = TensorDict.from_module(module)
    assert list_leaf_classes(params) == {"DTensor"}
    wanted = make_model()(torch.ones(3, 8))
    zeros = params.data.clone().zero_()
    for options in ({}, {"inplace": True}, {"use_state_dict": True}):
        with zeros.to_module(module, **options):
            assert not module(inputs).full_tensor().any()
        torch.testing.assert_close(module(inputs).full_tensor(), wanted)
    assert all(one is other for one, other in zip(module.parameters(), held, strict=True))


def test_module_with_dtensor_parameters_round_trips(two: Any) -> None:
    assert two.run(swap_parameters) == [None, None]


def train_module(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    module, plain = make_model(), make_model()
    fully_shard(module[0], mesh=make_mesh())
    fully_shard(module, mesh=make_mesh())
    params, other = TensorDict.from_module(module), TensorDict.from_module(plain)
    assert list_leaf_classes(params) == {"DTensor"}
    inputs = torch.arange(24.0).view(3, 8)
    for _ in range(2):
        for network, leaves in ((module, params), (plain, other)):
            network.zero_grad()
            network(inputs).square().mean().backward()
            leaves.data.sub_(leaves.grad * 1e-3)
    assert_all_close(gather_leaves(params.data), gather_leaves(other.data))

    # After a forward pass the outermost module holds unsharded parameters; saving needs the sharded ones.
    module(inputs)
    assert list_leaf_classes(TensorDict.from_module(module)) == {"DTensor"}
    assert list_leaf_classes(TensorDict.from_module(module, use_state_dict=True)) == {"DTensor"}
    module(inputs)
    with params.data.clone().zero_().to_module(module, use_state_dict=True):
        assert not module(inputs).any()
    torch.testing.assert_close(module(inputs), plain(inputs))
    kept = list(TensorDict.from_module(module).values(True, True))
    try:
        params.data.clone().to_module(module)
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    assert all(one is other for one, other in zip(kept, module.parameters(), strict=True))
    return message


def test_from_module_fully_shard_keeps_dtensors(two: Any) -> None:
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("needs torch 2.6")
    message = (
        "StructureError: FSDPSequential is under fully_shard, which keeps its parameters elsewhere too: call "
        "to_module() with use_state_dict=True"
    )
    assert two.run(train_module) == [message] * 2


class Scaled(nn.Module):
    """A module that holds some of its parameters in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = make_model()
        self.p = TensorDictParams(TensorDict({"w": torch.ones(2), "n": {"b": torch.zeros(2)}}))

    def forward(self, inputs: Any) -> Any:
        return TensorDict({"y": self.linear(inputs["x"]) * self.p["w"] + self.p["n", "b"]})


def train_collection(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    module, plain = Scaled(), Scaled()
    fully_shard(module.linear, mesh=make_mesh())
    fully_shard(module, mesh=make_mesh())
    assert list_leaf_classes(module.p) == {"DTensor"}
    inputs = TensorDict({"x": torch.arange(24.0).view(3, 8)})
    for network in (module, plain):
        optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            network(inputs)["y"].square().mean().backward()
            optimizer.step()
    state = module.state_dict()
    assert list(state) == list(plain.state_dict()) and type(state["p.n.b"]).__name__ == "DTensor"
    assert_all_close(
        gather_leaves(TensorDict.from_module(module)), gather_leaves(TensorDict.from_module(plain))
    )


def test_tensordict_params_fully_shard_keeps_dtensors(two: Any) -> None:
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("needs torch 2.6")
    assert two.run(train_collection) == [None, None]


def catch_errors(rank: int) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    tree = TensorDict(
        {"a": torch.ones(2), "n": {"w": distribute_tensor(torch.ones(4), make_mesh(), [Shard(0)])}}
    )
    messages = []
    for call in (
        lambda: tree.consolidate(),
        lambda: tree.send(1 - rank),
        lambda: tree.all_reduce(),
        lambda: tree.all_gather(),
        lambda: tree.broadcast(0),
        lambda: tree.clone().recv(1 - rank) if rank else TensorDict({"a": torch.ones(2)}).send(1),
    ):
        try:
            call()
            messages.append("")
        except RuntimeError as error:
            messages.append(f"{type(error).__name__}: {error}")
    tree.apply(lambda leaf: getattr(leaf, "to_local", leaf.clone)()).all_reduce()
    return messages


def test_consolidate_or_send_dtensor_raises_naming_key(two: Any) -> None:
    for messages, received in zip(two.run(catch_errors), ("", "key ('n', 'w')"), strict=True):
        *messages, last = messages
        for message in messages:
            assert (
                message.startswith("StructureError") and "key ('n', 'w'): a DTensor has no bytes" in message
            )
        assert received in last
