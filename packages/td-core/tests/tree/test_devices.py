"""Device arguments, and device labels that follow the devices of the leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack
from td_core._tree.devices import (
    as_device,
    fix_decoded_devices,
    fix_device_metadata,
    set_device_labels,
    wait_for,
)

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("given", "expected"), [("cpu", CPU), (META, META), ("cuda:1", torch.device("cuda", 1))]
)
def test_as_device_returns_device(given: Any, expected: torch.device) -> None:
    assert as_device(given) == expected


def test_as_device_cuda_without_index_gets_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert as_device("cuda") == torch.device("cuda", 3)


def test_wait_for_synchronizes_streams_of_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    wait_for([CPU, torch.device("cuda", 1), META])
    assert waited == [torch.device("cuda", 1)]


def make_tree(**devices: str) -> TensorDict:
    """Return a tree whose leaves ``a`` and ``b`` are on the given devices, with the label of the CPU at every node."""
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, device="cpu")
    for path, node in (("a", td), ("b", td["n"])):
        node._set_child(path, torch.zeros(2, device=devices.get(path, "cpu")))
    return td


def test_set_device_labels_reaches_every_node() -> None:
    td = TensorDict({"n": {"m": {}}, "s": lazy_stack([TensorDict(), TensorDict()])})
    set_device_labels(td, META)
    assert [node.device for node in (td, td["n"], td["n", "m"], td["s"], td["s"][1])] == [META] * 5


@pytest.mark.parametrize(
    ("devices", "labels"),
    [
        ({}, [CPU, CPU]),
        ({"a": "meta", "b": "meta"}, [META, META]),
        ({"a": "meta"}, [None, None]),
    ],
)
def test_fix_device_metadata_follows_leaves(devices: dict[str, str], labels: list[Any]) -> None:
    td = make_tree(**devices)
    fix_device_metadata(td)
    assert [td.device, td["n"].device] == labels


def test_fix_device_metadata_reaches_below_nodes_without_label() -> None:
    td = TensorDict({"n": make_tree(a="meta", b="meta"), "e": TensorDict(device="cpu")})
    fix_device_metadata(td)
    assert [td.device, td["n"].device, td["n", "n"].device, td["e"].device] == [None, META, META, CPU]


@pytest.mark.parametrize("label", [None, "cpu", "meta"])
def test_fix_decoded_devices_corrects_labels_that_differ(label: str | None) -> None:
    td = make_tree(a="meta", b="meta")
    nodes: list[dict[str, Any]] = [{"meta": {} if label is None else {"device": label}}]
    assert fix_decoded_devices(td, nodes, td._leaves()) is td
    assert td.device == (CPU if label is None else META)
