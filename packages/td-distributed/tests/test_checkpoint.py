"""Collections through torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from td_core import TensorDict
from td_core.errors import StructureError
from td_distributed import DistributedStateful

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


def test_a_checkpoint_loads_into_the_leaves_of_another_collection(tmp_path):
    source = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(2, 2)}})
    target = source.clone().zero_()
    leaf = target["n", "b"]
    checkpoint.save({"td": DistributedStateful(source)}, checkpoint_id=tmp_path)
    checkpoint.load({"td": DistributedStateful(target)}, checkpoint_id=tmp_path)
    assert target["n", "b"] is leaf and torch.equal(leaf, source["n", "b"])
    assert torch.equal(target["a"], source["a"])


def test_a_state_of_another_structure_is_refused_and_nothing_changes():
    target = TensorDict({"a": torch.zeros(3)})
    with pytest.raises(StructureError, match=r"unexpected keys: \['b'\]; missing keys: \['a'\]"):
        DistributedStateful(target).load_state_dict({"b": torch.ones(3)})
    assert target["a"].sum() == 0
