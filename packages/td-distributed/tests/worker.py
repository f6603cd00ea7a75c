"""One rank of a process group: run functions by name as received from a connection, until it is closed."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def main(rank: int, world: int, store: str, backend: str, connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{store}", timedelta(seconds=40), world, rank)
    reply(connection, ("ready", None))
    modules: dict[str, Any] = {}
    while True:
        try:
            path, name, limit, args = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(limit)
        try:
            if path not in modules:
                spec: Any = importlib.util.spec_from_file_location(f"ranks_{len(modules)}", path)
                modules[path] = importlib.util.module_from_spec(spec)
                sys.modules[spec.name] = modules[path]
                spec.loader.exec_module(modules[path])
            result = ("result", getattr(modules[path], name)(*args))
        except Exception as error:
            result = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
        reply(connection, result)


def reply(connection: Connection, message: Any) -> None:
    try:
        data = pickle.dumps(message)
    except Exception as error:
        data = pickle.dumps(("error", (type(error).__name__, str(error), traceback.format_exc())))
    connection.send_bytes(data)
