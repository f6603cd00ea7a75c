"""td-core with all of its siblings under one import.

Every public name of ``td_core``, ``td_memmap``, ``td_tensorclass`` and ``td_distributed`` is here; each is loaded when
it is first used.

>>> import torch, td
>>> data = td.TensorDict({"obs": torch.zeros(3, 4), "task": "reach"}, batch_size=[3])
>>> data[0]["task"]
'reach'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import td_core as _td_core
import td_distributed as _td_distributed
import td_memmap as _td_memmap
import td_tensorclass as _td_tensorclass

if TYPE_CHECKING:
    from td._alias import install_as_tensordict as install_as_tensordict
    from td_core import *  # noqa: F403
    from td_distributed import *  # noqa: F403
    from td_memmap import *  # type: ignore[assignment]  # noqa: F403
    from td_tensorclass import *  # noqa: F403

__version__ = _td_core.__version__

# Where two packages have one name (save, load), the more general one of core counts, so it comes last.
_HOMES = {
    name: package.__name__
    for package in (_td_distributed, _td_memmap, _td_tensorclass, _td_core)
    for name in package.__all__
}
_HOMES["install_as_tensordict"] = "td._alias"

if not TYPE_CHECKING:  # a checker knows the names from the imports above, and could not read this list
    __all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
