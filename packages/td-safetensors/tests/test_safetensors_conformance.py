"""The format passes the conformance suite of td-core."""

from __future__ import annotations

from typing import Any

import torch

from td_core import LazyStackedTensorDict, TensorDict, TensorDictParams
from td_core.spi import Serializer
from td_core.testing import SerializerTests
from td_safetensors.plugin import SafetensorsFormat


class TestSafetensors(SerializerTests):
    suffix = ".safetensors"

    def serializer(self) -> Serializer:
        return SafetensorsFormat()

    def collections(self) -> dict[str, Any]:
        def member(i: int) -> TensorDict:
            return TensorDict({"a": torch.full((2, 3), i), "n": {"b": torch.full((2,), float(i))}}, [2])

        return {
            **super().collections(),
            "stack": LazyStackedTensorDict(*(member(i) for i in range(3)), stack_dim=1),
            "params": TensorDictParams(TensorDict({"w": torch.zeros(2, 2)})),
        }
