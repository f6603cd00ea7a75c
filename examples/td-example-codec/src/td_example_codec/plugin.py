"""The hooks of the plugin; the entry point in ``pyproject.toml`` names this module."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from td_core.spi import Coercer, NodeKind, Serializer, hookimpl
from td_example_codec._masked import Masked, coerce, flatten, unflatten
from td_example_codec._npz import NpzSerializer


@hookimpl
def td_node_kinds() -> Iterable[NodeKind]:
    """Return the kind of masked tensors, with its functions to flatten and unflatten nodes."""
    return [NodeKind("td_example_codec.Masked", Masked, flatten, unflatten)]


@hookimpl
def td_coercers() -> Iterable[Coercer]:
    """Return the coercer that converts numpy masked arrays when they are set as entries."""
    return [Coercer((np.ma.MaskedArray,), coerce)]


@hookimpl
def td_serializers() -> Iterable[Serializer]:
    """Return the format ``"npz"``."""
    return [NpzSerializer()]
