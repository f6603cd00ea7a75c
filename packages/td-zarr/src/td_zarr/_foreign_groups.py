"""Groups without our header: those of tensordict, and of every other program."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from td_core.errors import CodecError, FormatError
from td_core.spi import Encoded, parse_json, split_value
from td_store.arrays import TableBuilder, find_batch_sizes, read_shape

from ._array_documents import STACK, ArrayInfo, Document, get_attributes
from ._array_engines import read_now
from ._dim_labels import LEVEL, VALUE
from ._zarr_objects import Objects


@dataclass
class ForeignGroup(TableBuilder):
    """Builds the table of a group without our header, from the attributes of tensordict where it has them.

    Attributes:
        objects: the objects of the group.
        documents: the metadata of groups and arrays, by name.
        arrays: the arrays by name.
        allow_pickle: whether pickled values are read.
        stack_values: whether an array of strings is a stack of values.
    """

    objects: Objects
    documents: Mapping[str, Document]
    arrays: Mapping[str, ArrayInfo]
    allow_pickle: bool
    stack_values: bool

    def __post_init__(self) -> None:
        super().__init__()
        #: The shapes of the arrays of each row, and the rows whose batch size is in the group.
        self.shapes: dict[int, list[tuple[int, ...]]] = {}
        self.sized: set[int] = set()

    def build(self, attributes: Mapping[str, Any]) -> Encoded:
        """Return the table; FormatError if the attributes of tensordict are malformed, or a value is a pickle."""
        known = {"": self.add_level(attributes)}
        for name in sorted(self.documents, key=lambda name: name.split("/")):
            document = self.documents[name]
            parent = self.find_parent(name, known)
            key = name.rpartition("/")[2]
            if document.get("node_type") == "group":
                known[name] = ref = self.add_level(
                    get_attributes(document, f"{self.objects.where}: {name!r}")
                )
            else:
                ref = self.add_array(name, document, parent)
            self.rows[parent]["entries"].append([key, ref])
        self.set_sizes()
        return self.table

    def set_sizes(self) -> None:
        """Set the batch sizes that the group does not have: the dims that all arrays below a row share."""
        above = [-1] * len(self.rows)
        for position, row in enumerate(self.rows):
            for _, ref in row["entries"]:
                if isinstance(ref, int):
                    above[ref] = position
        sizes = find_batch_sizes([self.shapes.get(position, []) for position in range(len(above))], above)
        for position, row in enumerate(self.rows):
            if row["kind"] == "TensorDict" and position not in self.sized:
                row["meta"]["batch_size"] = list(sizes[position])
            elif row["kind"] == "NonTensorData":
                row["meta"]["batch_size"] = self.rows[above[position]]["meta"]["batch_size"]

    def find_parent(self, name: str, known: dict[str, int]) -> int:
        """Return the row of the group of a node; groups without metadata of their own are added."""
        missing = []
        above = name.rpartition("/")[0]
        while above not in known:
            missing.append(above)
            above = above.rpartition("/")[0]
        parent = known[above]
        for group in reversed(missing):
            known[group] = self.add_level({})
            self.rows[parent]["entries"].append([group.rpartition("/")[2], known[group]])
            parent = known[group]
        return parent

    def add_level(self, attributes: Mapping[str, Any]) -> int:
        level = attributes.get(LEVEL)
        meta: dict[str, object] = {"batch_size": []}
        if level is not None:
            try:
                if level["version"] != 1:
                    raise ValueError(f"its version is {level['version']!r}; expected 1")
                meta["batch_size"] = [int(size) for size in level["batch_size"]]
                if any(name is not None for name in level.get("names") or ()):
                    meta["names"] = list(level["names"])
            except (LookupError, TypeError, ValueError) as error:
                raise FormatError(
                    f"{self.objects.where}: the attribute {LEVEL} is damaged: {error!r}"
                ) from error
        position = self.add_row("TensorDict", meta)
        if level is not None:
            self.sized.add(position)
        return position

    def add_array(self, name: str, document: Document, parent: int) -> Any:
        info, attributes = self.arrays[name], get_attributes(document, f"{self.objects.where}: {name!r}")
        size = self.rows[parent]["meta"]["batch_size"]
        if STACK in attributes:
            about = attributes.get(VALUE)
            value = self.read_elements(info) if about is None else self.read_value(info, about)
            return self.add_value(
                "NonTensorStack", self.read_stack_size(name, attributes[STACK]), split_value(value)
            )
        if VALUE in attributes:
            return self.add_value(
                "NonTensorData", size, split_value(self.read_value(info, attributes[VALUE]))
            )
        if info.dtype is None:
            value = self.read_elements(info)
            if self.stack_values and info.shape:
                self.shapes.setdefault(parent, []).append(tuple(info.shape))
                return self.add_value("NonTensorStack", info.shape, split_value(value))
            return self.add_value("NonTensorData", size, split_value(value))
        self.shapes.setdefault(parent, []).append(tuple(info.shape))
        place: Any = name
        if info.logical is not None:
            place = {"tensor": name, "dtype": f"torch.{info.logical}"}
        return self.add_leaf(place)

    def read_stack_size(self, name: str, sizes: Any) -> tuple[int, ...]:
        try:
            return read_shape(sizes)
        except (TypeError, ValueError) as error:
            raise FormatError(
                f"{self.objects.where}: the attribute {STACK} of {name!r} is damaged: {error}"
            ) from error

    def read_value(self, info: ArrayInfo, about: object) -> object:
        encoding = about.get("encoding") if isinstance(about, dict) else about
        payload = read_now(self.objects, info).tobytes()
        where = f"{self.objects.where}: the value {info.name!r}"
        if encoding == "json":
            try:
                return parse_json(payload.decode())
            except (ValueError, RecursionError) as error:
                raise FormatError(f"{where} is not valid JSON: {error}") from error
        if encoding != "pickle":
            raise FormatError(f"{where} has the encoding {encoding!r:.100}; expected 'json' or 'pickle'")
        if not self.allow_pickle:
            raise FormatError(
                f"{where} is a pickle, which can run any code: pass allow_pickle=True if you trust who wrote it"
            )
        try:
            return pickle.loads(payload)
        except Exception as error:  # a pickle raises errors of all kinds
            raise FormatError(f"{where} cannot be unpickled: {error!r}") from error

    def read_elements(self, info: ArrayInfo) -> object:
        array = read_now(self.objects, info)
        try:
            value = array.tolist()
            split_value(value)
        except (CodecError, TypeError, ValueError) as error:
            raise FormatError(
                f"{self.objects.where}: the array {info.name!r} has the dtype {array.dtype}, which is not one of torch"
            ) from error
        return value
