"""The conformance suite of formats: a correct format passes it, and each fault fails a test."""

from __future__ import annotations

import inspect as signatures
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import FormatError, Problem, Report, TensorDict, Tree
from td_core.errors import BatchSizeError, StructureError
from td_core.spi import Encoded, Serializer, decode, encode, hookimpl, join_value, split_value
from td_core.testing import SerializerTests, installed


class Good(Serializer):
    """A correct format: one file of ``torch.save``, which is complete when it is renamed."""

    name = "good"
    stores_kinds = True
    magic = b"GOOD"

    def save(self, data: Any, location: Path) -> Any:
        encoded = encode(data)
        values = [split_value(value) for value in encoded.values]
        leaves = TensorDict({str(place): leaf for place, leaf in enumerate(encoded.leaves)})
        self.publish((encoded.nodes, leaves, values), location)
        return data

    def publish(self, content: Any, location: Path) -> None:
        partial = location.with_name(location.name + ".partial")
        self.write(content, partial)
        partial.replace(location)

    def write(self, content: Any, path: Path) -> None:
        with path.open("wb") as file:
            file.write(self.magic)
            torch.save(content, file)

    def load(self, location: Path, *, device: Any = None, keys: Any = None, rows: Any = None) -> Any:
        with location.open("rb") as file:
            try:
                if file.read(4) != self.magic:
                    raise ValueError("wrong magic")
                nodes, leaves, values = torch.load(file, weights_only=True)
                loaded = decode(Encoded(nodes, [*leaves.values()], [join_value(*value) for value in values]))
            except Exception as error:
                raise FormatError(f"{location} is damaged: {error}") from error
        return self.choose(loaded, device, keys, rows)

    def choose(self, loaded: Any, device: Any, keys: Any, rows: Any) -> Any:
        loaded = loaded if keys is None else loaded.select(*keys)
        loaded = loaded if rows is None else loaded[rows]
        return loaded if device is None else loaded.to(device)

    def detect(self, location: Path, head: bytes) -> bool:
        return head[:4] == self.magic

    def append(self, rows: Any, location: Path) -> None:
        saved = self.load(location)
        if [leaf.dtype for leaf in saved.values(True, True)] != [
            leaf.dtype for leaf in rows.values(True, True)
        ]:
            raise StructureError("the rows have other dtypes")
        self.save(torch.cat([saved, rows]), location)

    def inspect(self, location: Path) -> Tree:
        loaded = self.load(location)
        root = Tree(location.name, "TensorDict", list(loaded.batch_size))
        todo = [(root, loaded)]
        while todo:
            tree, node = todo.pop()
            for key, child in node.items():
                is_leaf = isinstance(child, torch.Tensor)
                tree.children[key] = below = Tree(key, "leaf" if is_leaf else "TensorDict", list(child.shape))
                if is_leaf:
                    below.dtype, below.nbytes = str(child.dtype), child.nbytes
                else:
                    todo.append((below, child))
        return root

    def verify(self, location: Path) -> Report:
        try:
            self.load(location)
        except FormatError as error:
            return Report(str(location), 1, 0, [Problem(location.name, "damaged", str(error))])
        return Report(str(location), 1, 0)


def list_tests() -> list[str]:
    return [name for name in dir(SerializerTests) if name.startswith("test_")]


def run(serializer: Serializer, name: str, folder: Path) -> None:
    """Run one test of the suite on a format."""

    class Plugin:
        @hookimpl
        def td_serializers(self) -> list[Serializer]:
            return [serializer]

    class Suite(SerializerTests):
        def serializer(self) -> Serializer:
            return serializer

    test = getattr(Suite(), name)
    with installed(Plugin()):
        test(folder) if signatures.signature(test).parameters else test()


@pytest.mark.parametrize("name", list_tests())
def test_format_suite_correct_format_passes(name: str, tmp_path: Path) -> None:
    run(Good(), name, tmp_path)


def drop_names(self: Any, data: Any, location: Path) -> Any:
    Good.save(self, _without_names(data), location)
    return data


def _without_names(data: Any) -> Any:
    copy = data.copy()
    if isinstance(copy, TensorDict):
        copy.names = None
    return copy


#: By name of the fault: attributes of the faulty format, and the test that fails.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "names are lost": ({"save": drop_names}, "test_round_trip"),
    "writes in place": (
        {"publish": lambda self, content, path: self.write(content, path)},
        "test_killed_save_leaves_old_or_new",
    ),
    "reader sees partial file": (
        {"publish": lambda self, content, path: (path.write_bytes(b"GOOD"), self.write(content, path))},
        "test_load_during_saves_returns_old_or_new",
    ),
    "leaves litter": (
        {"publish": lambda self, content, path: _publish_with_litter(self, content, path)},
        "test_killed_save_leaves_old_or_new",
    ),
    "keys are ignored": (
        {"choose": lambda self, loaded, device, keys, rows: Good.choose(self, loaded, device, None, rows)},
        "test_load_keys_reads_only_those",
    ),
    "rows are ignored": (
        {"choose": lambda self, loaded, device, keys, rows: Good.choose(self, loaded, device, keys, None)},
        "test_load_rows_reads_only_those",
    ),
    "device is ignored": (
        {"choose": lambda self, loaded, device, keys, rows: Good.choose(self, loaded, None, keys, rows)},
        "test_load_to_device_meta_reads_shapes",
    ),
    "append replaces": (
        {"append": lambda self, rows, path: self.save(rows, path)},
        "test_append_adds_rows",
    ),
    "append adds any rows": (
        {"append": lambda self, rows, path: self.save(_cat_any(self.load(path), rows), path)},
        "test_append_adds_rows",
    ),
    "inspect lists no leaf": ({"inspect": lambda self, path: Tree("x", "TensorDict")}, "test_inspect_lists_leaves"),
    "verify accepts all": ({"verify": lambda self, path: Report("x", 1, 0)}, "test_verify_reports_damage"),
    "missing file is damage": (
        {"load": lambda self, path, **options: _load_or_fail(self, path)},
        "test_missing_path_is_an_error",
    ),
}  # fmt: skip


def _publish_with_litter(self: Any, content: Any, path: Path) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    self.write(content, partial)
    partial.replace(path)


def _cat_any(saved: Any, rows: Any) -> Any:
    keys = [key for key in rows.keys() if key in saved.keys()]
    return torch.cat([saved.select(*keys), rows.select(*keys)])


def _load_or_fail(self: Any, path: Path) -> Any:
    if not path.exists():
        raise FormatError("missing")
    return Good.load(self, path)


@pytest.mark.parametrize("fault", FAULTS)
def test_format_suite_faulty_format_fails(fault: str, tmp_path: Path) -> None:
    attributes, test = FAULTS[fault]
    faulty = type("Faulty", (Good,), attributes)()
    with pytest.raises((AssertionError, pytest.fail.Exception, FormatError, BatchSizeError)):
        run(faulty, test, tmp_path)
