"""Consolidated files and messages that td or tensordict writes and the other one reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore")


def make_jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), 2.0)], layout=torch.jagged)


#: Functions that build a tree with td or with tensordict (``lib``).
TREES: dict[str, Callable[[Any], Any]] = {
    "flat": lambda lib: lib.TensorDict({"b": torch.arange(6).view(2, 3), "a": torch.ones(2)}, batch_size=[2]),
    "named": lambda lib: lib.TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.ones(2)}}, [2], names=["t"]),
    "device": lambda lib: lib.TensorDict({"a": torch.ones(2)}, device="cpu"),
    "level first": lambda lib: lib.TensorDict({"n": {"b": torch.ones(1)}, "a": torch.ones(2), "e": {}}),
    "lazy": lambda lib: lib.lazy_stack([lib.TensorDict({"a": torch.full((i + 1,), i)}) for i in range(3)]),
    "lazy below": lambda lib: lib.TensorDict({"l": TREES["lazy"](lib), "a": torch.ones(3)}, [3]),
    "jagged": lambda lib: lib.TensorDict({"n": make_jagged(), "a": torch.ones(2)}, [2]),
    "dtypes": lambda lib: lib.TensorDict(
        {
            str(dtype): torch.ones(3).to(dtype)
            for dtype in (
                torch.float64,
                torch.bfloat16,
                torch.complex64,
                torch.int8,
                torch.uint16,
                torch.bool,
            )
        }
    ),
    "sixteen bytes": lambda lib: lib.TensorDict(
        {"a": torch.ones(1), "c": torch.ones(2, dtype=torch.complex128)}
    ),
    "empty": lambda lib: lib.TensorDict({"e": {"f": {}}, "z": torch.zeros(0, 3)}),
    "tied": lambda lib: (lambda w: lib.TensorDict({"a": w, "n": {"b": w}}))(torch.arange(4.0)),
    "locked": lambda lib: lib.TensorDict({"a": torch.ones(1)}).lock_(),
    "values": lambda lib: lib.TensorDict(
        {"s": "text", "j": lib.NonTensorData({"k": [1, None, 2.5]}), "a": torch.ones(2)}, [2]
    ),
    "stack": lambda lib: lib.TensorDict({"l": lib.NonTensorStack("x", "y"), "a": torch.ones(2)}, [2]),
    "keys": lambda lib: lib.TensorDict(
        {"": torch.ones(1), "é/~.": {"x": torch.ones(1)}, "leaves": torch.ones(1)}
    ),
}
#: Values that tensordict reads with another type, because JSON has no tuples and no sets.
LOSSY = {
    "tuple": (lambda lib: lib.TensorDict({"t": lib.NonTensorData((1, "a"))}), [1, "a"]),
    "metadata": (lambda lib: lib.TensorDict({"t": lib.MetaData("x")}), "x"),
}


@pytest.mark.parametrize("name", TREES)
def test_tensordict_reads_consolidated_file_of_td(
    name: str, libraries: Any, same: Any, tmp_path: Path
) -> None:
    ours, theirs = libraries
    TREES[name](ours).consolidate(tmp_path / "td")
    read = theirs.TensorDict.from_consolidated(tmp_path / "td")
    # The format lists values, then tensors, then nodes; only td restores the order of the keys.
    same(TREES[name](ours), read, exact=list(read.keys()) == list(TREES[name](ours).keys()))
    same(ours.TensorDict.from_consolidated(tmp_path / "td"), TREES[name](theirs))


@pytest.mark.parametrize("name", TREES)
def test_td_reads_consolidated_file_of_tensordict(
    name: str, libraries: Any, same: Any, tmp_path: Path
) -> None:
    ours, theirs = libraries
    if name == "sixteen bytes":
        pytest.skip("it pads to 8 bytes, and then cannot view complex128 at an odd multiple of them")
    TREES[name](theirs).consolidate(tmp_path / "td")
    same(
        ours.TensorDict.from_consolidated(tmp_path / "td"),
        theirs.TensorDict.from_consolidated(tmp_path / "td"),
    )


@pytest.mark.parametrize("name", LOSSY)
def test_tensordict_reads_tuples_of_td_as_lists(name: str, libraries: Any, tmp_path: Path) -> None:
    ours, theirs = libraries
    make, simplified = LOSSY[name]
    make(ours).consolidate(tmp_path / "td")
    assert theirs.TensorDict.from_consolidated(tmp_path / "td")["t"] == simplified
    back = ours.TensorDict.from_consolidated(tmp_path / "td").get("t")
    assert type(back) is type(make(ours).get("t")) and back.data == make(ours).get("t").data


@pytest.mark.parametrize(
    "make",
    [
        lambda lib: lib.TensorDict({"size": {"a": torch.ones(1)}}),
        lambda lib: lib.TensorDict({"leaves": {"a": torch.ones(1)}}),
        lambda lib: lib.TensorDict({"a": torch.ones(2).to(torch.float8_e5m2)}),
        lambda lib: lib.TensorDict({"<NJT>a": torch.ones(2)}),
        lambda lib: lib.TensorDict({"t": lib.NonTensorData({1: 2})}),
        lambda lib: lib.TensorDictParams(lib.TensorDict({"a": torch.ones(2)})),
    ],
    ids=["level size", "level leaves", "float8", "jagged name", "number key", "params"],
)
def test_tensordict_rejects_unsupported_consolidated_file(make: Any, libraries: Any, tmp_path: Path) -> None:
    ours, theirs = libraries
    make(ours).consolidate(tmp_path / "td")
    with pytest.raises(Exception):  # noqa: B017  any error is fine, but it must not return a part of the data
        theirs.TensorDict.from_consolidated(tmp_path / "td")


EXCHANGE = """
import sys, torch
import torch.distributed as dist
from datetime import timedelta

library, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if library == "td":
    import td as lib
    extra = {"wire": "reference"}
else:
    import tensordict as lib
    extra = {}
dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=40), 2, rank)

def nested(start):
    inner = {"z": torch.ones(2), "c": torch.ones(2, 5) * start}
    return lib.TensorDict({"b": torch.arange(6).view(2, 3) + start, "n": inner, "a": torch.ones(2) > 0}, [2])

def lazy(start):
    members = [lib.TensorDict({"z": torch.arange(3.0) + start + i, "y": torch.ones(1) * start}) for i in (0, 10)]
    return lib.lazy_stack(members)

def exchange(tree, early, options):
    if options.pop("in_group", False):
        group = dist.group.WORLD
        if rank == 0:
            tree.send(group=group, group_dst=1, **options)
        else:
            tree.recv(group=group, group_src=0, **options)
        return
    if rank == 0:
        works = tree.isend(1, return_early=True, **options) if early else tree.send(1, **options)
    else:
        works = tree.irecv(0, return_premature=True, **options) if early else tree.recv(0, **options)
    for work in works if early else ():
        work.wait()

tags = {"init_tag": 7}, {"init_tag": 5, "pseudo_rand": True}
for options in {}, *tags, {"early": True}, {"in_group": True}, {"consolidated": True}:
    for make in nested, lazy:
        tree = make(7 * (rank == 0))
        if options.get("consolidated"):
            tree = tree.consolidate()
        exchange(tree, "early" in options, {key: options[key] for key in options if key != "early"} | extra)
        if make is lazy:
            assert [m["z"].tolist() for m in tree.unbind(0)] == [[7, 8, 9], [17, 18, 19]], (options, tree)
            assert [m["y"].tolist() for m in tree.unbind(0)] == [[7], [7]], options
        else:
            assert tree["b"].tolist() == [[7, 8, 9], [10, 11, 12]], (options, tree["b"])
            assert tree["n", "c"].sum() == 70, options
        dist.barrier()
"""


@pytest.mark.parametrize("sender", ["td", "tensordict"])
def test_send_and_recv_between_td_and_tensordict(sender: str, tmp_path: Path) -> None:
    receiver = "tensordict" if sender == "td" else "td"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-c", EXCHANGE]
    processes = [
        subprocess.Popen(
            [*command, library, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE
        )
        for rank, library in enumerate((sender, receiver))
    ]
    errors = [process.communicate(timeout=100)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
