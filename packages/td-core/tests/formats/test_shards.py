"""Sharded leaves: which leaves lie on several ranks, and how they are saved and refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from td_core import CodecError, TensorDict
from td_core._formats.saving import check_whole, list_shards, save_together
from td_core._kinds.checkpoint import load_into, make_checkpoint

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),  # of torch 2.4
]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Any]:
    """Return a DTensor of the only rank."""
    tensors = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(tensors, "distribute_tensor"):  # before torch 2.5
        tensors = pytest.importorskip("torch.distributed._tensor")
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        yield tensors.distribute_tensor(torch.ones(2), mesh, [tensors.Shard(0)])
    finally:
        torch.distributed.destroy_process_group()


def test_list_shards_returns_sharded_leaves(shard: Any) -> None:
    assert list_shards([torch.ones(1), shard]) == [shard]
    check_whole(torch.ones(1))
    with pytest.raises(CodecError, match="a DTensor lies on several ranks"):
        check_whole(shard)


def test_save_together_gathers_shards(shard: Any) -> None:
    written: list[Any] = []
    save_together(TensorDict({"a": shard}), written.append, lambda: None)
    assert type(written[0]["a"]) is torch.Tensor
    with pytest.raises(ValueError, match="return_early=True"):
        save_together(TensorDict({"a": shard}), written.append, None, early=True)


def test_save_together_gathers_shards_of_checkpoint(shard: Any) -> None:
    written: list[Any] = []
    save_together(make_checkpoint({"a": [shard, 3]}), written.append, lambda: None)
    assert written[0].to_tree()["a"][1] == 3
    assert type(written[0].to_tree()["a"][0]) is torch.Tensor


def test_load_into_sharded_parameters_raises(shard: Any) -> None:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(shard))
    for target in (module, torch.optim.Adam(module.parameters())):
        saved = (
            make_checkpoint({"m": target})
            if target is not module
            else make_checkpoint({"m": {"weight": torch.ones(2)}})
        )
        with pytest.raises(CodecError, match=r"\['m'\] cannot be loaded into sharded parameters"):
            load_into(saved.to_tree(), {"m": target}, "'x'")
