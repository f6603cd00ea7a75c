"""Show and remove the collections of a server: ``python -m td_redis list`` and ``python -m td_redis drop ID``."""

from __future__ import annotations

import argparse
from typing import Any

import redis

from ._redis_source import Connection
from ._stores import drop


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m td_redis", description="Show and remove the collections of a server."
    )
    parser.add_argument("command", choices=["list", "drop"])
    parser.add_argument("ids", nargs="*", help="ids of collections to drop")
    parser.add_argument("--url", default="redis://localhost:6379/0", help="the server, such as %(default)s")
    parser.add_argument(
        "--prefix", default="tensordict", help="what all keys begin with, by default %(default)s"
    )
    parsed = parser.parse_args(arguments)
    if bool(parsed.ids) != (parsed.command == "drop"):
        parser.error("drop takes the ids of collections, list takes none")
    client = redis.Redis.from_url(parsed.url, socket_timeout=30)
    if parsed.command == "list":
        print_collections(client, parsed.prefix)
    for td_id in parsed.ids:
        drop(Connection({"client": client}, parsed.prefix, td_id))


def print_collections(client: Any, prefix: str) -> None:
    """Print a line for each collection: its id, the number of its entries, and the seconds that it lives without use."""
    ends = (":__batch_size__", ":__type__")
    keys = {key.decode() for key in client.scan_iter(f"{prefix}:{{*}}:__*__", count=1000)}
    for place in sorted({key[: -len(end)] for end in ends for key in keys if key.endswith(end)}):
        seconds = client.ttl(f"{place}:__device__")
        life = "until it is dropped" if seconds < 0 else f"{seconds} s"
        print(f"{place[len(prefix) + 2 : -1]}  {client.scard(f'{place}:__keys__')} entries  {life}")


if __name__ == "__main__":
    main()
