"""Files of tensordict 0.15.3, and the header for it in ours. The interoperation session runs tensordict itself."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import FormatError, LazyStackedTensorDict, MissingPluginError, TensorDict, TensorDictParams, load
from td_safetensors import save

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name.removesuffix(".expected.json") for path in FIXTURES.glob("*.expected.json"))
HAS_TENSORCLASS = importlib.util.find_spec("td_tensorclass") is not None


@pytest.fixture
def fixture_classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Define the tensorclass that the files refer to."""
    if "fixture_classes" in sys.modules:
        yield sys.modules["fixture_classes"]
        return
    tensorclass = pytest.importorskip("td_tensorclass").tensorclass
    module: Any = types.ModuleType("fixture_classes")
    sys.modules["fixture_classes"] = module  # for later tests, too: the class stays registered
    point = {"__module__": "fixture_classes", "__annotations__": {"x": Tensor, "y": Any, "tag": str}}
    module.Point = tensorclass(type("Point", (), {**point, "y": None, "tag": "none"}))
    yield module


def assert_matches(found: Any, tree: dict[str, Any], where: str = "root") -> None:
    """Compare a loaded collection with the expected content of a fixture."""
    kind = tree["kind"]
    if kind == "tensor":
        leaf = found.data if tree.get("unbatched") else found
        assert (list(leaf.shape), str(leaf.dtype)) == (tree["shape"], f"torch.{tree['dtype']}"), where
        content = leaf.contiguous().view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(content).hexdigest() == tree["sha256"], where
        return
    if kind == "none":
        assert found is None, where
        return
    if kind == "non_tensor":
        assert getattr(found, "data", found) == tree["value"]["json"], where
        return
    assert list(found.batch_size) == tree["batch_size"], where
    assert list(found.names) == (tree["names"] or [None] * len(tree["batch_size"])), where
    if kind == "lazy_stack":
        assert type(found) is LazyStackedTensorDict, where
        assert found.stack_dim == tree["stack_dim"], where
        for i, (member, below) in enumerate(zip(found.tensordicts, tree["members"], strict=True)):
            assert_matches(member, below, f"{where}[{i}]")
        return
    name = f"{type(found).__module__}.{type(found).__qualname__}"
    assert name == (tree["class"] if kind == "tensorclass" else "td_core.TensorDict") or (
        kind == "tensordict" and type(found) is TensorDict
    ), where
    assert list(found.keys()) == [key for key, below in tree["entries"].items() if below["kind"] != "none"], (
        where
    )
    for key, below in tree["entries"].items():
        assert_matches(found.get(key, None), below, f"{where}/{key}")


@pytest.mark.parametrize("strategy", ["mmap", "read"])
@pytest.mark.parametrize("name", NAMES)
def test_load_tensordict_file_returns_content(
    name: str, strategy: str, request: pytest.FixtureRequest
) -> None:
    tree = json.loads((FIXTURES / f"{name}.expected.json").read_text())["tree"]
    if name not in ("foreign", "lazy"):
        request.getfixturevalue("fixture_classes")
    assert_matches(load(FIXTURES / f"{name}.safetensors", strategy=strategy), tree)


def test_load_values_without_td_tensorclass_names_package() -> None:
    if HAS_TENSORCLASS:
        pytest.skip("td-tensorclass is installed")
    with pytest.raises(MissingPluginError, match="pip install ./packages/td-tensorclass"):
        load(FIXTURES / "nested.safetensors")


def test_load_keys_of_tensordict_file_selects(fixture_classes: Any) -> None:
    result = load(FIXTURES / "nested.safetensors", keys=["s", ("n", "b")])
    assert list(result.keys(True)) == ["s", "n", ("n", "b")]
    result = load(FIXTURES / "unbatched.safetensors", keys="u")
    assert list(result.keys()) == ["u"]


def read_reference(path: Path, read_header: Any) -> Any:
    return json.loads(read_header(path)["__metadata__"]["tensordict"])["root"]


def test_save_writes_header_of_tensordict(path: Path, td: TensorDict, read_header: Any) -> None:
    td = TensorDict({**td.to_dict(), "t": td["a"]}, [4], names=["x"])
    save(td, path)
    assert read_reference(path, read_header) == {
        "batch_size": [4],
        "names": ["x"],
        "keys": {
            "a": {"tensor": "a"},
            "n": {
                "td": {
                    "batch_size": [4],
                    "names": ["x"],
                    "keys": {"b": {"tensor": "n.b"}, "c": {"tensor": "n.c"}},
                }
            },
            "t": {"tensor": "a"},
        },
    }


def test_save_lazy_stack_has_header_of_tensordict(path: Path, read_header: Any) -> None:
    members = [
        TensorDict({"x": torch.ones(2, 3), "n": {"y": torch.ones(2)}}, [2], names=["b"]) for _ in range(3)
    ]
    save(LazyStackedTensorDict(*members, stack_dim=1), path)
    level = {"batch_size": [2, 3], "names": ["b", None], "stack_dim": 1}
    assert read_reference(path, read_header) == {
        **level,
        "keys": {"x": {"tensor": "x"}, "n": {"td": {**level, "keys": {"y": {"tensor": "n.y"}}}}},
    }


def test_save_parameters_have_header_of_their_collection(path: Path, read_header: Any) -> None:
    save(TensorDictParams(TensorDict({"w": torch.ones(2)})), path)
    assert read_reference(path, read_header) == {
        "batch_size": [],
        "names": None,
        "keys": {"w": {"tensor": "w"}},
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"x": torch.ones(2, dtype=torch.complex128)},
        lambda: {"x": torch.ones(1).expand(1000)},
        lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)},
        lambda: {
            "x": LazyStackedTensorDict(TensorDict({"a": torch.ones(1)}), TensorDict({"a": torch.ones(2)}))
        },
    ],
    ids=["complex", "expanded", "jagged", "uneven"],
)
def test_save_other_content_omits_header_of_tensordict(
    make: Any, path: Path, read_header: Any, same: Any
) -> None:
    td = TensorDict(make())
    save(td, path)
    assert set(read_header(path)["__metadata__"]) == {"format", "td"}
    same(load(path), td)


#: Values that the format stores, with whether JSON alone is exact, so that tensordict reads them.
VALUES = {
    "str": ("text", True),
    "number": (2.5, True),
    "none": (None, True),
    "dict": ({"a": [1, None]}, True),
    "tuple": ((1, [2.5]), False),
    "bytes": (b"\x00\xff", False),
    "set": ({1, 2}, False),
    "dict with ints": ({1: "a"}, False),
    "dtype": (torch.float16, False),
}


@pytest.mark.parametrize(("value", "is_json"), VALUES.values(), ids=VALUES)
def test_save_value_returns_same_value(value: Any, is_json: bool, path: Path, read_header: Any) -> None:
    data = pytest.importorskip("td_tensorclass").NonTensorData
    save(TensorDict({"v": data(value, batch_size=[2]), "n": {"a": torch.ones(2)}}, [2]), path)
    result = load(path).get("v")
    assert (type(result), repr(result.data), result.batch_size) == (data, repr(value), torch.Size([2]))
    assert ("tensordict" in read_header(path)["__metadata__"]) is is_json
    if is_json:
        assert read_reference(path, read_header)["keys"]["v"] == {"non_tensor": value}


def test_save_value_without_serializer_raises_with_key(path: Path, td: TensorDict) -> None:
    data = pytest.importorskip("td_tensorclass").NonTensorData
    td["n", "v"] = data(object(), batch_size=[4])
    with pytest.raises(TypeError, match=r"'n', 'v', 'data'.*no serializer is registered for its type"):
        save(td, path)
    assert not path.exists()


def test_save_kinds_of_values_return_same_kinds(path: Path, same: Any, fixture_classes: Any) -> None:
    values = pytest.importorskip("td_tensorclass")
    td = TensorDict(
        {
            "stack": values.NonTensorStack("a", "b"),
            "point": fixture_classes.Point(x=torch.ones(2), y=None, tag="t", batch_size=[2]),
            "points": LazyStackedTensorDict(
                *(fixture_classes.Point(x=torch.full((i,), i), y=(1,), tag=str(i)) for i in range(2))
            ),
            "u": values.UnbatchedTensor(torch.arange(3)),
        },
        [2],
    )
    save(td, path)
    result = load(path)
    assert result.get("stack").tolist() == ["a", "b"]
    assert type(result["point"]) is fixture_classes.Point
    assert (result["point"].x.tolist(), result["point"].y, result["point"].tag) == ([1, 1], None, "t")
    assert [type(member) for member in result.get("points").tensordicts] == [fixture_classes.Point] * 2
    assert [member.tag for member in result.get("points").tensordicts] == ["0", "1"]
    assert type(result.get("u")) is type(td.get("u"))
    assert result[0]["u"].tolist() == [0, 1, 2]
    part = load(path, keys=["u", ("point", "x"), ("points", "tag")], rows=[1])
    assert sorted(part.keys()) == ["point", "points", "u"]
    assert part["point"].x.tolist() == [1]
    opened = TensorDict.open(path)
    assert opened[1]["point"].tag == "t"


def test_load_as_tensorclass_returns_instance(path: Path, fixture_classes: Any) -> None:
    save(TensorDict({"x": torch.ones(2), "tag": "k"}), path)
    result = fixture_classes.Point.from_safetensors(path)
    assert type(result) is fixture_classes.Point
    assert (result.x.tolist(), result.tag) == ([1, 1], "k")


def test_load_undefined_tensorclass_names_what_to_do(
    path: Path, fixture_classes: Any, edit_header: Any
) -> None:
    save(TensorDict({"p": fixture_classes.Point(x=torch.ones(2), y=None, tag="t")}), path)

    def rename(header: Any) -> None:
        metadata = header["__metadata__"]
        del metadata["tensordict"]
        metadata["td"] = metadata["td"].replace("fixture_classes:Point", "nowhere:Point")

    edit_header(path, rename)
    with pytest.raises(FormatError, match=r"'p'.*nowhere:Point.*import the module.*strict=False"):
        load(path)
    result = load(path, strict=False)
    assert type(result["p"]) is TensorDict
    assert result["p", "x"].tolist() == [1, 1]


def write_reference(path: Path, level: Any, **shapes: list[int]) -> None:
    """Write a file of zeros with the header of tensordict."""
    header: dict[str, Any] = {"__metadata__": {"tensordict": json.dumps({"version": 1, "root": level})}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


MANY = {"batch_size": [10**9], "names": None, "stack_dim": 0}
FEW = {"batch_size": [2], "names": None, "stack_dim": 0}


@pytest.mark.parametrize(
    ("level", "shapes", "message"),
    [
        ({**MANY, "keys": {"a": {"tensor": "a"}}}, {"a": [3]}, "a stack of 1000000000 along dim 0 has 'a' of the shape"),
        ({**MANY, "keys": {"a": {"tensor": "a"}}}, {"a": [10**9, 0]}, "describes more than 10000 nodes and leaves"),
        ({**MANY, "keys": {}}, {}, "describes more than 10000 nodes and leaves"),
        ({**MANY, "stack_dim": 2, "keys": {}}, {}, "IndexError"),
        ({**MANY, "batch_size": [2**70], "keys": {}}, {}, "describes more than 10000 nodes and leaves"),
        ({**FEW, "keys": {"n": {"td": {**FEW, "keys": {"a": {"tensor": "a"}}}}}}, {"a": [1]}, "its place in the header"),
    ],
)  # fmt: skip
def test_load_stack_of_impossible_size_raises(level: Any, shapes: Any, message: str, path: Path) -> None:
    write_reference(path, level, **shapes)
    with pytest.raises(FormatError, match=f"{path.name}: .*{message}"):
        load(path)


def test_load_stack_without_elements_needs_a_larger_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reference(path, {**FEW, "batch_size": [6000], "keys": {"a": {"tensor": "a"}}}, a=[6000, 0])
    with pytest.raises(FormatError, match="set the environment variable TD_MAX_NODES to a larger number"):
        load(path)
    monkeypatch.setenv("TD_MAX_NODES", "20000")
    assert load(path).batch_size == (6000,)
    monkeypatch.delenv("TD_MAX_NODES")
    write_reference(path, {**FEW, "batch_size": [6000], "keys": {"a": {"tensor": "a"}}}, a=[6000, 1])
    assert load(path)["a"].shape == (6000, 1)  # 24,000 bytes can hold as many members


def test_load_empty_stack_has_its_batch_size(path: Path) -> None:
    write_reference(path, {"batch_size": [3, 0], "names": None, "stack_dim": 1, "keys": {}})
    assert load(path).batch_size == (3, 0)
