"""Collections in ``torch.distributed.checkpoint``.

That engine plans which rank writes and reads which part of each tensor, so what two ranks saved, any number of them can
load. It keeps pickles beside the tensors: its files are to be trusted as pickles are.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from typing import Any

from td_core._collection import show_path
from td_core._public_names import set_module
from td_core._value_codec import join_at, split_at
from td_core.errors import StructureError

#: How the keys begin under which the values of non-tensor data stand: a text for each level, as :mod:`td_core` writes
#: values into files.
VALUES = "<values>"


@set_module("td_distributed")
class DistributedStateful:
    """What ``torch.distributed.checkpoint`` saves and loads in the place of a collection.

    Leaves are entries under dotted keys, as in the checkpoint of a module; a ``DTensor`` is written and read by the ranks
    that hold its parts, whatever its mesh and placements were when it was saved. Non-tensor data are entries too. What the
    checkpoint lacks, and with a current torch what has another shape there, the engine refuses before it reads anything;
    elements of another dtype it converts, as for a module.

    Args:
        collection: any collection; loading writes into its leaves.

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

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves under dotted keys, and the values of non-tensor data as texts.

        Raises:
            StructureError: a leaf is a nested tensor, which the engine cannot take apart, or stands where a text does;
                names its key.
            CodecError: a value that no registered serializer stores; names its key.
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
                split_at(meta["_non_tensor"], partial(show_path, tuple(level.split("."))))
            )
            for level, meta in state._metadata.items()
            if "_non_tensor" in meta
        }
        return {**state, **values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy what :meth:`state_dict` gave into the collection.

        The engine has read into the leaves that it was given before it calls this, which then only writes the values.

        Raises:
            StructureError: keys are missing or unexpected, or a shape differs; nothing was changed here.
        """
        state: Any = OrderedDict(state_dict)
        provided = [key for key in state if key.startswith(VALUES)]
        values = {key.removeprefix(VALUES): json.loads(state.pop(key)) for key in provided}
        state._metadata = self.collection.state_dict()._metadata
        held = [level for level, meta in state._metadata.items() if "_non_tensor" in meta]
        if set(held) != set(values):
            raise StructureError(f"non-tensor data is at {held}, in the checkpoint at {list(values)}")
        for level in held:
            position = partial(show_path, tuple(level.split(".")))
            state._metadata[level]["_non_tensor"] = join_at(values[level], position)
        self.collection.load_state_dict(state, from_flatten=True)
