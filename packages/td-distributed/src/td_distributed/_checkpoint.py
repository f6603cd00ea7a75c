"""Collections in ``torch.distributed.checkpoint``.

The checkpoint planner decides which rank writes and reads which part of each tensor, so any number of ranks can load
a save of any other number. It stores pickles next to the tensors: load its files only if you trust their source.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from typing import Any

from td_core.errors import StructureError
from td_core.spi import join_value, parse_json, set_module, show_path, split_value

#: Prefix of the keys that hold non-tensor values: one JSON text per node, in the encoding that files use.
VALUES = "<values>"


@set_module("td_distributed")
class DistributedStateful:
    """Adapter that lets ``torch.distributed.checkpoint`` save and load a collection.

    Leaves are saved under dotted keys, as in the checkpoint of a module. Each rank writes and reads its own shards of a
    ``DTensor``; mesh and placements may differ between saving and loading. Non-tensor data is saved too. Loading raises
    before it reads anything if the checkpoint lacks a leaf or, with a current torch, holds it with another shape.
    Other dtypes are converted, as for a module.

    Args:
        collection: any collection; loading writes into its leaves in place.

    >>> import warnings
    >>> import torch.distributed.checkpoint as checkpoint
    >>> source, target = TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.zeros(2)})
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # one process, no process group
    ...     _ = checkpoint.save({"td": DistributedStateful(source)}, checkpoint_id="saved")
    ...     checkpoint.load({"td": DistributedStateful(target)}, checkpoint_id="saved")
    >>> target["a"]
    tensor([1., 1.])
    """

    def __init__(self, collection: Any) -> None:
        self.collection = collection

    def state_dict(self) -> dict[str, object]:
        """Return the leaves under dotted keys, and non-tensor values as JSON texts.

        Raises:
            StructureError: a leaf is a nested tensor, which a checkpoint cannot split, or its key starts with the
                prefix of non-tensor values.
            CodecError: no registered serializer can store a value; the message names its key.
        """
        state = self.collection.state_dict()
        for key, leaf in state.items():
            if leaf.is_nested:
                raise StructureError(
                    f"key {key!r} is a nested tensor: a checkpoint holds its values() and offsets()"
                )
            if key.startswith(VALUES):
                raise StructureError(
                    f"key {key!r} begins as those of the values of non-tensor data in a checkpoint: rename it"
                )
        values = {
            VALUES + level: json.dumps(
                split_value(meta["_non_tensor"], partial(show_path, tuple(level.split("."))))
            )
            for level, meta in state._metadata.items()
            if "_non_tensor" in meta
        }
        return {**state, **values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the form that :meth:`state_dict` returns into the collection.

        ``torch.distributed.checkpoint`` reads leaves in place before it calls this, so only values change then.

        Raises:
            StructureError: keys are missing or unexpected, or a shape differs; this call changed nothing.
        """
        state: Any = OrderedDict(state_dict)
        provided = [key for key in state if key.startswith(VALUES)]
        values = {key.removeprefix(VALUES): parse_json(state.pop(key)) for key in provided}
        state._metadata = self.collection.state_dict()._metadata
        held = [level for level, meta in state._metadata.items() if "_non_tensor" in meta]
        if set(held) != set(values):
            raise StructureError(f"non-tensor data is at {held}, in the checkpoint at {list(values)}")
        for level in held:
            position = partial(show_path, tuple(level.split(".")))
            plain, types = values[level]
            state._metadata[level]["_non_tensor"] = join_value(plain, types, position)
        self.collection.load_state_dict(state, from_flatten=True)
