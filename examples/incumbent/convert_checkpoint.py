"""Convert a checkpoint of a module: rename keys, split fused weights, lower the precision, save it in other formats."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import tensordict
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import nn


def make_checkpoint(path: Path) -> None:
    """Save a checkpoint such as a training program saves."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    torch.save({"model": model.state_dict(), "step": 1200, "note": "before renaming"}, path)


def convert(flat: dict[str, torch.Tensor]) -> TensorDict:
    """Rename and split the weights of a state dict for the new program."""
    params = TensorDict(flat, batch_size=[]).unflatten_keys(".")
    params.rename_key_("layers", "blocks")
    for block in params["blocks"].values():
        fused = block.pop("self_attn")
        query, key, value = fused["in_proj_weight"].chunk(3)
        block["attention"] = {"query": query, "key": key, "value": value, "out": fused["out_proj", "weight"]}
        block["attention", "bias"] = torch.stack(fused["in_proj_bias"].chunk(3))
        block["attention", "out_bias"] = fused["out_proj"].get("bias")
    return params


def matching(params: TensorDictBase, pattern: str) -> list[NestedKey]:
    """Return the keys of leaves whose dotted name matches a pattern."""
    names = params.keys(include_nested=True, leaves_only=True)
    return [name for name in map(unravel_key, names) if re.search(pattern, ".".join(name))]


def show(title: str, params: TensorDictBase) -> None:
    """Print dtype, shape and sum of each leaf."""
    print(f"{title}: {len(list(params.keys(True, True)))} leaves, {params.bytes()} bytes")
    for name, leaf in sorted(params.flatten_keys(".").items()):
        print(f"  {name:<36} {leaf.dtype!s:<15} {tuple(leaf.shape)!s:<10} {leaf.double().sum().item():.5f}")


def main(folder: Path) -> None:
    """Convert a checkpoint, save it in each format, load it again, and compare."""
    make_checkpoint(folder / "old.pt")
    checkpoint = torch.load(folder / "old.pt", weights_only=True)
    params = convert(checkpoint["model"])
    params["step"] = checkpoint["step"]
    params["note"] = checkpoint["note"].replace("before", "after")
    print("norms:", matching(params, r"norm\d\.weight"))

    weights = params.exclude("step", "note")
    half = weights.named_apply(
        lambda name, leaf: leaf if "norm" in str(name) else leaf.bfloat16(), nested_keys=True
    )
    half.lock_()
    show("converted", half)
    try:
        half["new"] = torch.zeros(1)
    except RuntimeError:
        print("locked")

    params.memmap(folder / "mapped", num_threads=2)
    mapped = TensorDict.load_memmap(folder / "mapped")
    same = (mapped.exclude("note") == params.exclude("note")).all()
    print("mapped:", bool(same), mapped["note"], mapped["step"].item())
    block = tensordict.load_memmap(folder / "mapped" / "blocks" / "1")
    print("one block alone:", sorted(block.keys()), block["linear1", "weight"].shape)

    torch.save(params, folder / "new.pt")
    loaded = torch.load(folder / "new.pt", weights_only=False)
    tensordict.assert_close(loaded.exclude("note"), params.exclude("note"))
    print("pickled:", type(loaded).__name__, loaded["note"])

    one = half.consolidate(folder / "half.bin")
    again = tensordict.from_consolidated(folder / "half.bin")
    print("consolidated:", one.is_consolidated(), bool((again == half).all()))

    state = half.state_dict()
    target = half.apply(torch.zeros_like)
    target.load_state_dict(state)
    print("state dict:", len(state), next(iter(state)), bool((target == half).all()))

    rebuilt = TensorDict.from_dict(half.to_dict(), batch_size=[])
    difference = (rebuilt.float() - weights).abs().flatten_keys(".")
    print("error of the rounding:", round(max(leaf.max().item() for leaf in difference.values()), 6))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
