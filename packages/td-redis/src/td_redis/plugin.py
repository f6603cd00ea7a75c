"""Register the method ``to_store`` with td-core. The rest of the package is imported at first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from td_core.spi import hookimpl
from td_core.typing import DeviceType


def to_store(
    data: object,
    *,
    backend: str = "redis",
    host: str = "localhost",
    port: int = 6379,
    db: int = 0,
    unix_socket_path: str | None = None,
    prefix: str = "tensordict",
    device: DeviceType | None = None,
    **kwargs: Any,
) -> Any:
    """Store the collection on a Redis server, and return it opened.

    The options are those of :class:`td_redis.TensorDictStore`.

    Example:
        >>> import fakeredis
        >>> store = TensorDict({"a": torch.zeros(3)}, [3]).to_store(client=fakeredis.FakeRedis())
        >>> store[1] = TensorDict({"a": torch.tensor(5.0)})
        >>> store["a"].clone()
        tensor([0., 5., 0.])
    """
    from ._stores import store_collection

    place: dict[str, Any] = {"host": host, "port": port, "db": db, "unix_socket_path": unix_socket_path}
    return store_collection(data, device=device, backend=backend, prefix=prefix, **place, **kwargs)


@hookimpl
def td_methods() -> Mapping[str, Any]:
    """Return the method that stores a collection."""
    return {"to_store": to_store}
