"""Collections through torch.distributed.checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

from td_core import TensorDict, TensorDictParams
from td_core.errors import CodecError, StructureError
from td_distributed import DistributedStateful

HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

DTYPES = (
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.float8_e5m2,
)
#: Builders that take a number, so that loaded elements differ from the existing ones.
TREES: dict[str, Callable[[int], Any]] = {
    "nested": lambda n: TensorDict({"a": torch.full((3,), n), "n": {"b": torch.full((2, 2), n), "e": {}}}),
    "dtypes": lambda n: TensorDict({str(dtype): torch.full((3,), n).to(dtype) for dtype in DTYPES}),
    "lazy": lambda n: TensorDict.lazy_stack([TensorDict({"a": torch.full((3,), n + i)}) for i in range(2)]),
    "params": lambda n: TensorDictParams(
        TensorDict({"w": torch.full((3,), float(n)), "n": {"b": torch.ones(2)}})
    ),
    "consolidated": lambda n: TensorDict({"a": torch.full((3,), n), "b": torch.ones(2)}).consolidate(),
    "scalar": lambda n: TensorDict({"a": torch.tensor(n), "z": torch.zeros(0, 3)}),
}
if HAS_TENSORCLASS:
    from td_tensorclass import MetaData, NonTensorStack, tensorclass

    @tensorclass
    class Sample:
        x: torch.Tensor
        y: str = "none"

    TREES |= {
        "values": lambda n: TensorDict(
            {
                "s": f"text {n}",
                "l": NonTensorStack((n, 2.5), {"k": n}),
                "m": MetaData({n, 2}),
                "a": torch.ones(2),
            },
            [2],
        ),
        "tensorclass": lambda n: TensorDict(
            {"c": Sample(x=torch.full((2,), n), y=str(n), batch_size=[2])}, [2]
        ),
        "root tensorclass": lambda n: Sample(x=torch.full((2,), n), y=str(n), batch_size=[2]),
    }


@pytest.mark.parametrize("name", TREES)
def test_checkpoint_load_every_kind_writes_leaves_in_place(name: str, tmp_path: Path) -> None:
    source, target = TREES[name](1), TREES[name](0)
    before = target._leaves()
    checkpoint.save({"td": DistributedStateful(source)}, checkpoint_id=tmp_path)
    checkpoint.load({"td": DistributedStateful(target)}, checkpoint_id=tmp_path)
    for one, other, old in zip(target._leaves(), source._leaves(), before, strict=True):
        assert one is old and one.dtype == other.dtype and one.tolist() == other.tolist()
    assert repr(target.to_dict()) == repr(source.to_dict())


def test_checkpoint_load_other_dtype_converts_elements(tmp_path: Path) -> None:
    target = TensorDict({"a": torch.zeros(2, dtype=torch.int64)})
    checkpoint.save(
        {"td": DistributedStateful(TensorDict({"a": torch.tensor([1.5, 3])}))}, checkpoint_id=tmp_path
    )
    checkpoint.load({"td": DistributedStateful(target)}, checkpoint_id=tmp_path)
    assert target["a"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (
            lambda: TensorDict({"a": torch.zeros(3)}),
            {"b": torch.ones(3)},
            r"unexpected keys: \['b'\]; missing keys: \['a'\]",
        ),
        (
            lambda: TensorDict({"a": torch.zeros(3)}),
            {"a": torch.ones(2)},
            r"'a' has shape \(3,\), given \(2,\)",
        ),
        (
            lambda: TensorDict({"a": torch.zeros(3)}),
            {"a": torch.ones(3), "<values>s": '[{"data": 1}, null]'},
            r"non-tensor data is at \[\], in the checkpoint at \['s'\]",
        ),
    ],
)
def test_load_state_dict_other_structure_changes_nothing(make: Any, state: Any, message: str) -> None:
    target = make()
    with pytest.raises(StructureError, match=message):
        DistributedStateful(target).load_state_dict(state)
    assert target["a"].sum() == 0


#: Targets that do not match a checkpoint of {"a": ones of [3], "s": "text"}, and the expected error of the planner.
OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a leaf more": (lambda: {"x": torch.zeros(3)}, "Missing key in checkpoint state_dict: td.x"),
    "a level for a leaf": (
        lambda: {"a": {"b": torch.zeros(3)}},
        "Missing key in checkpoint state_dict: td.a.b",
    ),
}
if HAS_TENSORCLASS:
    OTHERS |= {
        "a value more": (lambda: {"t": "x"}, "Missing key in checkpoint state_dict: td.<values>t"),
        "a value below": (lambda: {"n": {"s": "x"}}, "Missing key in checkpoint state_dict: td.<values>n.s"),
        "a value for a leaf": (lambda: {"a": "x"}, "Missing key in checkpoint state_dict: td.<values>a"),
    }


@pytest.mark.parametrize("name", OTHERS)
def test_checkpoint_load_other_structure_changes_nothing(name: str, tmp_path: Path) -> None:
    text = {"s": "text"} if HAS_TENSORCLASS else {}
    source = TensorDict({"a": torch.ones(3), "b": torch.ones(2), **text})
    checkpoint.save({"td": DistributedStateful(source)}, checkpoint_id=tmp_path)
    make, message = OTHERS[name]
    target = TensorDict({"a": torch.zeros(3), "b": torch.zeros(2), **make()})
    with pytest.raises(checkpoint.api.CheckpointException, match=message):
        checkpoint.load({"td": DistributedStateful(target)}, checkpoint_id=tmp_path)
    assert target["b"].tolist() == [0.0, 0.0]


def test_state_dict_unsupported_leaf_raises_naming_key() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(StructureError, match="key 'j' is a nested tensor"):
        DistributedStateful(TensorDict({"j": jagged})).state_dict()
    with pytest.raises(StructureError, match="key '<values>s' begins as those of the values"):
        DistributedStateful(TensorDict({"<values>s": torch.ones(1)})).state_dict()
    if HAS_TENSORCLASS:
        with pytest.raises(CodecError, match=r"key \('n', 'o'\): cannot store"):
            DistributedStateful(TensorDict({"n": {"o": object()}})).state_dict()


def make_sharded(value: float) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(21.0).view(7, 3) * value  # 7 rows are not divisible by the number of ranks
    leaves = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "n": {"columns": distribute_tensor(rows.clone(), mesh, [Shard(1)])},
        "whole": distribute_tensor(rows.clone(), mesh, [Replicate()]),
        "plain": torch.full((2,), value),
    }
    return TensorDict({**leaves, "s": f"value {value:g}"} if HAS_TENSORCLASS else leaves)


def save_on_rank(rank: int, folder: str) -> None:
    checkpoint.save({"td": DistributedStateful(make_sharded(1))}, checkpoint_id=folder)


def load_on_rank(rank: int, folder: str) -> None:
    target, wanted = make_sharded(0), make_sharded(1)
    before = target["rows"]
    checkpoint.load({"td": DistributedStateful(target)}, checkpoint_id=folder)
    assert target["rows"] is before
    for key in ("rows", ("n", "columns"), "whole"):
        assert target[key].placements == wanted[key].placements
        assert torch.equal(target[key].full_tensor(), wanted[key].full_tensor()), key
    assert target["plain"].tolist() == [1, 1]
    assert not HAS_TENSORCLASS or target["s"] == "value 1"


def test_checkpoint_of_two_ranks_loads_on_any_number(two: Any, four: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor", reason="this torch has no public DTensor")
    folder = str(tmp_path)
    assert two.run(save_on_rank, folder) == [None, None]
    assert two.run(load_on_rank, folder) == [None, None]
    assert four.run(load_on_rank, folder) == [None] * 4
    rows = torch.arange(21.0).view(7, 3)
    leaves = {"rows": torch.zeros(7, 3), "n": {"columns": torch.zeros(7, 3)}, "plain": torch.zeros(2)}
    alone = TensorDict({**leaves, "s": "nothing"} if HAS_TENSORCLASS else leaves)
    checkpoint.load({"td": DistributedStateful(alone)}, checkpoint_id=folder)
    assert torch.equal(alone["rows"], rows) and torch.equal(alone["n", "columns"], rows)
    assert alone["plain"].tolist() == [1, 1]
    assert not HAS_TENSORCLASS or alone["s"] == "value 1"
