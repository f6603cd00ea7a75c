"""Collections in ``torch.distributed.checkpoint``.

That engine plans which rank writes and reads what, and keeps a pickled index beside the tensors: its files are to be
trusted as pickles are.
"""

from __future__ import annotations

from typing import Any


class DistributedStateful:
    """What ``torch.distributed.checkpoint`` saves and loads in the place of a collection.

    Args:
        collection: any collection; loading writes into its leaves.

    >>> import tempfile, torch, warnings
    >>> import torch.distributed.checkpoint as checkpoint
    >>> from td_core import TensorDict
    >>> source, target = TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.zeros(2)})
    >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # one process, no process group
    ...     _ = checkpoint.save({"td": DistributedStateful(source)}, checkpoint_id=folder)
    ...     checkpoint.load({"td": DistributedStateful(target)}, checkpoint_id=folder)
    >>> target["a"]
    tensor([1., 1.])
    """

    def __init__(self, collection: Any) -> None:
        self.collection = collection

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves under dotted keys."""
        return dict(self.collection.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy leaves under dotted keys into the collection.

        Raises:
            StructureError: keys are missing or unexpected, or a shape differs; nothing was changed.
        """
        self.collection.load_state_dict(state_dict, from_flatten=True)
