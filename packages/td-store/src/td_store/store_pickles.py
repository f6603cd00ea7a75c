"""Names in pickles of stored tensors, importable from here in every release.

>>> import pickle, td_store.testing
>>> from td_store import StoredTensor, store_pickles
>>> b"td_store.store_pickles" in pickle.dumps(StoredTensor(td_store.testing.MemorySource(torch.ones(2))))
True
"""

from collections.abc import Mapping, Sequence
from typing import Any

from td_core.errors import FormatError
from td_core.spi import Serializer, set_module

from ._modes import PrivateSource, ReadOnlySource
from ._stored_tensor import rebuild_stored_tensor

__all__ = ["FsspecStore", "PrivateSource", "ReadOnlySource", "rebuild_stored_tensor"]


@set_module("td_store.store_pickles")
def FsspecStore(url: str, options: Mapping[str, object], missing: Sequence[str] = ()) -> Any:  # noqa: N802  in pickles
    """Open the store of a URL in a pickle of an earlier version; FormatError if the pickle left its options out."""
    place = Serializer.find_objects(url, options)
    assert place is not None
    if missing:
        raise FormatError(
            f"{place.where}: the pickle is of an earlier version, and does not contain the storage options "
            f"{', '.join(map(repr, missing))}: open the save again"
        )
    return place.store
