"""Roles and ties of parameters in a save: tied leaves are one parameter again, also where a format stores each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from td_core import Buffer, TensorDict, TensorDictParams
from td_core.errors import FormatError
from td_core.spi import decode, encode


def make_params() -> TensorDictParams:
    weight, mean = nn.Parameter(torch.ones(2)), Buffer(torch.zeros(3))
    return TensorDictParams(
        TensorDict({"a": weight, "n": {"a": weight, "m": mean}, "m": mean, "b": torch.ones(2)})
    )


def test_decode_leaves_of_their_own_ties_them_again() -> None:
    encoded = encode(make_params())
    loaded = decode(replace(encoded, leaves=[leaf.detach().clone() for leaf in encoded.leaves]))
    assert loaded["a"] is loaded["n", "a"] and loaded["m"] is loaded["n", "m"]
    assert [name for name, _ in loaded.named_parameters()] == ["a", "b"]
    assert len(list(loaded.buffers())) == 1


def test_encode_untied_parameters_has_no_ties() -> None:
    assert all(
        "tied" not in row["meta"] for row in encode(TensorDictParams(TensorDict({"a": torch.ones(2)}))).nodes
    )


def test_decode_tied_leaves_of_other_shape_raises_format_error() -> None:
    encoded = encode(make_params())
    leaves = [leaf.detach().clone() for leaf in encoded.leaves]
    leaves[0] = torch.ones(3)
    with pytest.raises(FormatError, match="tied"):
        decode(replace(encoded, leaves=leaves))
