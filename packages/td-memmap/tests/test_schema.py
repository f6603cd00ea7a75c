"""Every written ``meta.json`` is valid under the JSON schema in the package."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams
from td_core._kinds.lazy_stack import LazyStackedTensorDict
from td_core._torch.dtypes import POSITIONS, STORABLE

SCHEMA = json.loads(resources.files("td_memmap").joinpath("meta.schema.json").read_text())
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


def find_errors(value: Any, schema: Any, where: str = "$") -> list[str]:
    """Return the errors of a value under a JSON schema; supports only the keywords of the schema in the package."""
    if isinstance(schema, bool):
        return [] if schema else [f"{where} must not be there"]
    unknown = set(schema) - KEYWORDS
    assert not unknown, unknown
    if "$ref" in schema:
        return find_errors(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "anyOf" in schema:
        choices = [find_errors(value, choice, where) for choice in schema["anyOf"]]
        return [] if [] in choices else [f"{where} fits none: {choices}"]
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        return [f"{where} is {value!r}, not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where} is {value!r}, not one of {schema['enum']}"]
    kind = schema.get("type")
    if kind == "integer" and type(value) is not int:
        return [f"{where} is {value!r}, not an integer"]
    if kind in TYPES and type(value) is not TYPES[kind]:
        return [f"{where} is {value!r}, not a {kind}"]
    found = []
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{where} is {value}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where} is {value!r}, not {schema['pattern']}")
    if isinstance(value, dict):
        found += check_object(value, schema, where)
    if isinstance(value, list):
        found += check_array(value, schema, where)
    return found


KEYWORDS = {
    "$schema", "$defs", "$ref", "title", "description", "anyOf", "const", "enum", "type", "minimum", "pattern", "required",
    "properties", "additionalProperties", "items", "prefixItems", "minItems", "maxItems",
}  # fmt: skip


def check_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    found = [f"{where} lacks {name!r}" for name in schema.get("required", ()) if name not in value]
    declared = schema.get("properties", {})
    for name, item in value.items():
        rule = declared.get(name, schema.get("additionalProperties", True))
        found += find_errors(item, rule, f"{where}.{name}")
    return found


def check_array(value: list[Any], schema: dict[str, Any], where: str) -> list[str]:
    found = []
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        found.append(f"{where} has {len(value)} items")
    first = schema.get("prefixItems", [])
    for i, item in enumerate(value):
        found += find_errors(item, first[i] if i < len(first) else schema.get("items", True), f"{where}[{i}]")
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memmap_metadata_matches_schema(nest: Any, prefix: Path) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    nest["named"] = TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3, 2], names=["x", None])
    nest["odd"] = TensorDict({"shape": torch.ones(3), "k" * 300: {"b": torch.ones(3)}}, batch_size=[3])
    nest["like metadata"] = TensorDict(
        {"_class": torch.ones(3), "_names": {"b": torch.ones(3)}}, batch_size=[3]
    )
    nest["params"] = TensorDictParams(TensorDict({"a": torch.ones(3)}, [3]))
    nest["empty"] = LazyStackedTensorDict(batch_size=[3, 0], stack_dim=1)
    ragged = TensorDict(
        {
            "strided": torch.nested.nested_tensor(parts),
            "jagged": torch.nested.nested_tensor(parts, layout=torch.jagged),
        }
    )
    for name, tree in (("one", nest), ("two", ragged), ("three", nest.lock_())):
        tree.memmap(prefix / name)
    saved = ragged.memmap(prefix / "two")
    saved.make_memmap(("new", "entry"), (2,))
    files = list(prefix.rglob("meta.json"))
    assert len(files) > 25
    for file in files:
        assert find_errors(json.loads(file.read_text()), SCHEMA) == [], file


def test_schema_check_rejects_wrong_metadata() -> None:
    good = {
        "shape": [2],
        "device": "cpu",
        "_type": "<class 'x.TensorDict'>",
        "_format_version": 1,
        "_class": "x:y",
    }
    assert find_errors(good, SCHEMA) == []
    for wrong in (
        {"shape": [-1]},
        {"device": None},
        {"a": {"shape": [1]}},
        {"_type": 3},
        {"_format_version": 2},
        {"_outer": [{"kind": "TensorDictParams"}]},
    ):
        assert find_errors({**good, **wrong}, SCHEMA), wrong
    assert find_errors([], SCHEMA)


def test_schema_has_dtypes_of_the_table() -> None:
    leaf = SCHEMA["$defs"]["leaf"]["properties"]
    assert leaf["offsets_dtype"]["enum"] == sorted(map(str, POSITIONS))
    assert [name for name in STORABLE if not re.search(leaf["dtype"]["pattern"], name)] == []
