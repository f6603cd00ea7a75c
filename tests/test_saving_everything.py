"""Saves of values, tensorclasses and parameters, as a directory and as an archive."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import pickle
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core import TensorDict, TensorDictParams
from td_core.errors import CodecError, FormatError

td_tensorclass = pytest.importorskip("td_tensorclass")


td_memmap = pytest.importorskip("td_memmap")
td_tensorclass = pytest.importorskip("td_tensorclass")

NonTensorData = td_tensorclass.NonTensorData
NonTensorStack = td_tensorclass.NonTensorStack


@td_tensorclass.tensorclass
class Point:
    x: Tensor
    y: Any = None
    tag: str = "none"


@td_tensorclass.tensorclass
class Segment:
    start: Point
    end: Point
    weight: Tensor = None
    meta: Any = None


VALUES = {
    "string": "text",
    "empty": "",
    "int": 7,
    "large int": 10**30,
    "float": 2.5,
    "nan": math.nan,
    "infinity": -math.inf,
    "bool": True,
    "none": None,
    "list": [1, [2, "x"]],
    "tuple": (1, (2,)),
    "dict": {"a": 1, "b": [True]},
    "dict of ints": {1: "a", 2: "b"},
    "set": {1, 2},
    "bytes": b"\x00\xff",
    "complex": 1 + 2j,
    "date": datetime.date(2024, 2, 29),
    "slice": slice(1, None, 2),
    "path": Path("a/b"),
    "dtype": torch.bfloat16,
    "size": torch.Size([1, 2]),
    "numpy scalar": np.float32(0.1),
    "numpy array": np.arange(6).reshape(2, 3),
    "like an entry": {"dtype": "torch.int8", "shape": [3]},
    "like a node": {"type": "TensorDict"},
    "like a file": "pickle.pkl",
    "surrogate": "\ud800",
}


def is_same_value(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and math.isnan(wanted):
        return isinstance(found, float) and math.isnan(found)
    if isinstance(wanted, np.ndarray):
        return type(found) is np.ndarray and found.dtype == wanted.dtype and np.array_equal(found, wanted)
    return type(found) is type(wanted) and bool(found == wanted)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_memmap_value_loads_with_same_type(value: Any, place: Path) -> None:
    td = TensorDict({"a": torch.ones(2)}, batch_size=[2])
    td["n"] = TensorDict({"v": NonTensorData(value, batch_size=[2])}, batch_size=[2])
    td["column"] = NonTensorStack(NonTensorData(value), NonTensorData("other"))
    saved = td.memmap(place)
    for found in (saved, TensorDict.load_memmap(place)):
        entry = found.get(("n", "v"))
        assert type(entry) is NonTensorData
        assert entry.batch_size == (2,)
        assert is_same_value(entry.data, value)
        column = found.get("column")
        assert type(column) is NonTensorStack
        assert column.batch_size == (2,)
        assert is_same_value(column.tolist()[0], value)
        assert column.tolist()[1] == "other"
    if place.is_dir():
        TensorDict({"a": torch.ones(2)}, batch_size=[2]).memmap(place)
        assert sorted(path.name for path in place.rglob("*")) == ["%manifest.json", "a.memmap", "meta.json"]


@pytest.mark.parametrize("value", [b"\x00", {1: "a"}, {1, 2}, 1j, np.arange(2)], ids=repr)
def test_memmap_value_unsupported_by_tensordict_has_version_2(value: Any, tmp_path: Path) -> None:
    column = NonTensorStack(NonTensorData(value), NonTensorData("other"))
    data = TensorDict({"v": NonTensorData(value, [2]), "column": column}, batch_size=[2])
    data.memmap(tmp_path / "save", compatible=True)
    for key in ("v", "column"):
        assert json.loads((tmp_path / "save" / key / "meta.json").read_text())["_format_version"] == 2


def test_memmap_pickled_stack_has_layout_of_tensordict(tmp_path: Path) -> None:
    column = NonTensorStack(NonTensorData(object), NonTensorData(print))
    TensorDict({"s": column}, batch_size=[2]).memmap(tmp_path, allow_pickle=True)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["meta.json", "pickle.pkl"]
    assert json.loads((tmp_path / "s" / "meta.json").read_text())["data"] == "pickle.pkl"
    assert pickle.loads((tmp_path / "s" / "pickle.pkl").read_bytes()) == [object, print]


def test_memmap_value_as_root_loads_equal(place: Path) -> None:
    NonTensorData((1, 2), batch_size=[3]).memmap(place)
    loaded = TensorDict.load_memmap(place)
    assert type(loaded) is NonTensorData
    assert loaded.data == (1, 2)
    assert loaded.batch_size == (3,)
    for depth in (1, 2):
        stack = NonTensorStack.from_list([["a", "b"], ["c", "d"]], depth)
        stack.memmap(place)
        loaded = TensorDict.load_memmap(place)
        assert loaded.tolist() == [["a", "b"], ["c", "d"]]
        assert loaded.batch_size == stack.batch_size == (2, 2)[:depth]


@pytest.mark.parametrize("value", [NonTensorData("x", batch_size=[2]), NonTensorStack("x", (1, 2))])
@pytest.mark.parametrize(
    "key", ["a", "shape"]
)  # "shape" is reserved, so its node is written in the general form
@pytest.mark.parametrize("named", [False, True])
def test_memmap_value_keeps_dim_names(value: Any, key: str, named: bool, place: Path) -> None:
    alone = value.clone()
    alone.names = ["t"]
    alone.memmap(place)
    assert TensorDict.load_memmap(place).names == ["t"]
    td = TensorDict({key: torch.ones(2), "v": value if named else alone}, [2], names=["t"] if named else None)
    assert td.get("v").names == ["t"]
    saved = td.memmap(place)
    for found in (saved, TensorDict.load_memmap(place)):
        assert found.get("v").names == ["t"] and found.get("v").tolist() == value.tolist()
        assert found.names == td.names


@pytest.mark.parametrize("value", [NonTensorData("x", batch_size=[2]), NonTensorStack("x", (1, 2))])
def test_load_subpath_of_value_with_dim_names(value: Any, place: Path) -> None:
    value = value.clone()
    value.names = ["t"]
    TensorDict({"v": value}, [2]).memmap(place)
    loaded = TensorDict.load_memmap(place, subpath="v")
    assert loaded.tolist() == (value.tolist() if loaded.batch_size else value.data)


def test_memmap_shared_value_next_to_reserved_key_is_read(tmp_path: Path) -> None:
    td = TensorDict({"shape": torch.ones(2), "v": "x"}, [2], names=["t"])
    saved = td.memmap(tmp_path / "save", share_non_tensor=True)
    assert saved["v"] == "x"


@pytest.mark.parametrize("names", [3, "t", ["t", "u"], [3], [["t"]]])
def test_load_value_with_invalid_dim_names_raises(names: Any, tmp_path: Path) -> None:
    for value in (NonTensorData("x", batch_size=[2]), NonTensorStack("x", "y")):
        value.names = ["t"]
        value.memmap(tmp_path / "save", compatible=True)
        (tmp_path / "save" / "%values.json").write_text(json.dumps({"batch_size": [2], "names": names}))
        with pytest.raises(FormatError, match=r"meta.json: .*(dim name|names|dims)"):
            TensorDict.load_memmap(tmp_path / "save")
    value.memmap(tmp_path / "rows")
    meta = json.loads((tmp_path / "rows" / "meta.json").read_text())
    meta["meta"]["names"] = names
    (tmp_path / "rows" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(FormatError, match=r"meta.json: .*(dim name|names|dims)"):
        TensorDict.load_memmap(tmp_path / "rows")


def test_load_pytree_structure_does_not_unpickle(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": [torch.zeros(2), (torch.ones(1), OrderedDict(z=torch.ones(2)))]}
    TensorDict.from_pytree(tree).memmap(place)
    monkeypatch.setattr(pickle, "loads", None)
    found = TensorDict.load_memmap(place, mode="r").to_pytree()
    assert (type(found), type(found["a"]), type(found["a"][1])) == (dict, list, tuple)
    assert type(found["a"][1][1]) is OrderedDict
    assert found["a"][1][1]["z"].tolist() == [1.0, 1.0]


def test_memmap_container_class_writes_files_of_tensordict(tmp_path: Path) -> None:
    folder = tmp_path / "save"
    saved = TensorDict({"k": NonTensorData(OrderedDict)}).memmap(folder)
    content = (folder / "k" / "other.pickle").read_bytes()
    assert pickle.loads(content) == {"data": OrderedDict}
    note = json.loads((folder / "k" / "json_types.json").read_text())
    assert note == {"types": {"data": "OrderedDict"}, "pickle_sha256": hashlib.sha256(content).hexdigest()}
    saved.get("k").update(NonTensorData("word"), inplace=True)
    assert [file.name for file in (folder / "k").iterdir()] == ["meta.json"]
    assert TensorDict.load_memmap(folder)["k"] == "word"


@pytest.mark.parametrize("value", [int, type(None), type("dict", (), {}), type])
def test_memmap_class_as_value_raises(value: type, tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="of key 'k': .* only the classes .* can be stored; got <class"):
        TensorDict({"k": NonTensorData(value)}).memmap(tmp_path / "save")


@pytest.mark.parametrize("name", ["NonTensorData", "MetaData"])
@pytest.mark.parametrize(
    ("key", "changed"),
    [("n", {}), ("l", {}), ("p", {"foo": 1}), ("v", {"shape": [9]}), ("v", {"foo": 1})],
)
def test_load_metadata_with_wrong_value_class_raises(
    key: str, changed: Any, name: str, tmp_path: Path
) -> None:
    level = TensorDict({"a": torch.ones(2)}, [2])
    stack = TensorDict.lazy_stack([level[0], level[1]])
    TensorDict({"n": level, "l": stack, "p": Point(torch.ones(2), batch_size=[2]), "v": "x"}, [2]).memmap(
        tmp_path / "save"
    )
    file = tmp_path / "save" / key / "meta.json"
    meta = {**json.loads(file.read_text()), "_type": f"<class 'tensordict.tensorclass.{name}'>", **changed}
    file.write_text(json.dumps(meta))
    with pytest.raises(FormatError, match=f"{key}/meta.json: key '{key}' .*a {name} has no "):
        TensorDict.load_memmap(tmp_path / "save")


@pytest.mark.parametrize("size", [(2, 0), (2, 3, 0), (2, 0, 3), (1, 0, 0)])
def test_memmap_stack_without_elements_keeps_batch_size(size: tuple[int, ...], place: Path) -> None:
    stack = NonTensorStack(*(NonTensorData("x", batch_size=size[1:]) for _ in range(size[0])))
    TensorDict({"v": stack}, batch_size=size).memmap(place)
    assert TensorDict.load_memmap(place).get("v").batch_size == size


def test_memmap_stack_of_even_lists_keeps_one_batch_dim(place: Path) -> None:
    td = TensorDict({"v": NonTensorStack(NonTensorData([1, 2]), NonTensorData([3, 4]))}, batch_size=[2])
    td.memmap(place)
    column = TensorDict.load_memmap(place).get("v")
    assert column.batch_size == (2,)
    assert column.tolist() == [[1, 2], [3, 4]]


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise KeyError("no way")


@pytest.mark.parametrize(
    "value", [lambda: 0, threading.Lock(), Unpicklable()], ids=["local", "lock", "own error"]
)
@pytest.mark.parametrize("wrap", [NonTensorData, NonTensorStack])
@pytest.mark.parametrize("name", ["v", "shape"])
def test_memmap_unpicklable_value_raises_with_key(value: Any, wrap: Any, name: str, place: Path) -> None:
    # The key "shape" is reserved in the metadata, so its node is written in the general form.
    td = TensorDict({"n": TensorDict({name: wrap(value)}, batch_size=[1] if wrap is NonTensorStack else [])})
    with pytest.raises(CodecError, match=rf"cannot pickle a value of key \('n', '{name}'\): "):
        td.memmap(place, allow_pickle=True)
    assert not place.exists()


def test_memmap_and_load_pickled_value_need_allow_pickle(place: Path) -> None:
    td = TensorDict(
        {"n": TensorDict({"v": NonTensorData(Opaque(3))}), "s": NonTensorStack(NonTensorData(Opaque(4)))}
    )
    with pytest.raises(
        CodecError, match=r"cannot store the value 'data' of key \('n', 'v'\): .*allow_pickle=True pickles it"
    ):
        td.select("n").memmap(place)
    assert not place.exists()
    td.memmap(place, allow_pickle=True)
    with pytest.raises(RuntimeError, match="pass allow_pickle=True if you trust the save"):
        TensorDict.load_memmap(place)
    assert list(TensorDict.load_memmap(place, strict=False).keys()) == ["n"]
    loaded = TensorDict.load_memmap(place, allow_pickle=True)
    assert loaded["n", "v"] == Opaque(3)
    assert loaded.get("s").tolist() == [Opaque(4)]
    assert "PICKLED: other.pickle" in str(td_memmap.inspect(place))


def test_memmap_tensorclass_loads_equal(place: Path) -> None:
    point = Point(torch.ones(3, 2), tag="here", batch_size=[3])
    segment = Segment(
        point, Point(torch.zeros(3, 2), y={"a": (1,)}, batch_size=[3]), meta=b"bytes", batch_size=[3]
    )
    for tree in (point, segment, TensorDict({"p": point, "s": segment}, batch_size=[3])):
        saved = tree.memmap(place)
        loaded = TensorDict.load_memmap(place)
        assert type(saved) is type(loaded) is type(tree)
        for found in (saved, loaded):
            inner = found["s"] if isinstance(found, TensorDict) else found
            if isinstance(inner, Segment):
                assert inner.meta == b"bytes"
                assert inner.weight is None
                assert inner.end.y == {"a": (1,)}
                inner = inner.start
            assert type(inner) is Point
            assert inner.tag == "here"
            assert inner.y is None
            assert torch.equal(inner.x, point.x)
            assert inner.batch_size == (3,)


@td_tensorclass.tensorclass(frozen=True)
class Fixed:
    x: Tensor


def test_load_frozen_tensorclass_is_locked(place: Path) -> None:
    # A mapped collection is locked, but its save does not store this lock.
    TensorDict({"f": Fixed(torch.ones(3)).memmap()}).memmap(place, copy_existing=True)
    loaded = TensorDict.load_memmap(place)["f"]
    with pytest.raises(RuntimeError, match="is locked"):
        loaded.set("x", torch.zeros(3))
    assert (loaded.x == 1).all()


@pytest.mark.parametrize(
    "inner", [Point(torch.ones(3), tag="a", batch_size=[3]), TensorDict({"x": torch.ones(3)}, [3])]
)
def test_memmap_params_loads_class_of_inner_collection(inner: Any, place: Path) -> None:
    params = TensorDictParams(inner)
    for tree in (params, TensorDict({"p": params}, [3])):
        tree.memmap(place)
        loaded = TensorDict.load_memmap(place)
        found = loaded["p"] if tree is not params else loaded
        assert type(found) is TensorDictParams and type(found._tensordict) is type(inner)
        assert (found == inner).all()
    if place.suffix != ".tdz":
        params.memmap_(place)
        assert type(TensorDict.load_memmap(place)._tensordict) is type(inner)


@td_tensorclass.tensorclass
class Counting:
    x: Tensor

    def __post_init__(self) -> None:
        self.x = self.x + 1


def test_load_tensorclass_does_not_run_post_init(place: Path) -> None:
    counting = Counting(torch.zeros(3), batch_size=[3])
    for tree in (counting, TensorDict({"c": counting}, [3])):
        tree.memmap(place)
        loaded = TensorDict.load_memmap(place)
        assert (loaded["c"] if tree is not counting else loaded).x.tolist() == [1, 1, 1]


def test_load_copy_of_mapped_tensorclass_is_unlocked(tmp_path: Path) -> None:
    mapped = Point(x=torch.zeros(2), batch_size=[2]).memmap(tmp_path / "first")
    mapped.memmap(tmp_path / "second", copy_existing=True)
    assert mapped.is_locked
    assert not Point.load_memmap(tmp_path / "second").is_locked


def test_memmap_inplace_tensorclass_writes_and_refreshes(tmp_path: Path) -> None:
    point = Point(torch.ones(3, 2), tag="here", batch_size=[3])
    assert point.memmap_(tmp_path / "save") is point
    assert point.is_memmap()
    assert point.saved_path == tmp_path / "save"
    assert type(point.x) is td_memmap.MemoryMappedTensor
    point.set_("tag", "there")
    assert TensorDict.load_memmap(tmp_path / "save").tag == "there"
    Point(torch.zeros(2, 2), tag="new", batch_size=[2]).memmap(tmp_path / "save")
    point.memmap_refresh_()
    assert point.batch_size == (2,)
    assert point.tag == "new"
    assert point.saved_path == tmp_path / "save"
    assert point.memmap_refresh_().x.shape == (2, 2)
    assert type(Point.load_memmap(tmp_path / "save")) is Point
    stack = TensorDict.lazy_stack([TensorDict({"a": torch.ones(2)})]).memmap_(tmp_path / "stack")
    with pytest.raises(RuntimeError, match="cannot refresh a LazyStackedTensorDict as a whole"):
        stack.memmap_refresh_()
    points = Point.lazy_stack([Point(torch.ones(2)), Point(torch.ones(3))]).memmap_(tmp_path / "points")
    with pytest.raises(RuntimeError, match=r"cannot refresh a Point as a whole: load_memmap\('.*/points'\)"):
        points.memmap_refresh_()
    value = (
        TensorDict({"v": NonTensorData("x", batch_size=[2])}, batch_size=[2]).memmap_(tmp_path / "v").get("v")
    )
    with pytest.raises(
        RuntimeError, match="cannot refresh a NonTensorData as a whole: .*the collection that holds"
    ):
        value.memmap_refresh_()
    assert value.batch_size == (2,)


@pytest.mark.parametrize("key", ["colour", ("colour", "deep")], ids=str)
def test_tensorclass_make_memmap_unknown_field_raises(key: Any, tmp_path: Path) -> None:
    saved = TensorDict({"p": Point(x=torch.zeros(3), batch_size=[3])}, batch_size=[3]).memmap(
        tmp_path / "save"
    )
    files = set(tmp_path.rglob("*"))
    with pytest.raises(td_tensorclass.UnknownFieldError, match="Point has no field 'colour'"):
        saved["p"].make_memmap(key, (3,))
    assert set(tmp_path.rglob("*")) == files
    TensorDict({key: torch.zeros(3)}, batch_size=[3]).memmap(tmp_path / "save/p/_tensordict")
    with pytest.raises(FormatError, match="key 'p' cannot be put together: Point has no field 'colour'"):
        TensorDict.load_memmap(tmp_path / "save")


def test_memmap_lazy_stack_of_tensorclasses_loads_equal(place: Path) -> None:
    stack = TensorDict.lazy_stack([Point(torch.ones(2), tag="a"), Point(torch.ones(3), tag="b")])
    stack.memmap(place)
    loaded = TensorDict.load_memmap(place)
    assert type(loaded) is type(stack)
    assert [loaded[i].tag for i in range(2)] == ["a", "b"]
    assert [loaded[i].x.shape for i in range(2)] == [(2,), (3,)]


def test_load_unknown_class_is_not_imported(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "written"
    TensorDict({"p": Point(torch.ones(2)), "n": TensorDict({"shape": torch.ones(2)})}).memmap(folder)
    for file in folder.rglob("meta.json"):
        meta = json.loads(file.read_text())
        meta.update({"_type": "<class 'hostile.Point'>", "_class": "hostile:Point"})
        if "kind" in meta:
            meta.update({"class": "hostile:Point", "_type": "td:TensorDict"})
        file.write_text(json.dumps(meta))
    where = folder if place.suffix != ".tdz" else td_memmap.pack_memmap(folder, tmp_path / "hostile.tdz")
    with pytest.raises(FormatError, match="hostile"):
        TensorDict.load_memmap(where)
    assert set(TensorDict.load_memmap(where, strict=False).keys()) <= {"n"}
    assert "hostile" not in sys.modules


def test_load_value_changed_without_its_types_is_plain(tmp_path: Path) -> None:
    TensorDict({"v": NonTensorData((1, 2))}).memmap(tmp_path / "save")
    file = tmp_path / "save" / "v" / "meta.json"
    meta = json.loads(file.read_text())
    meta["data"] = [3]
    file.write_text(json.dumps(meta))
    assert TensorDict.load_memmap(tmp_path / "save")["v"] == [3]


@pytest.mark.parametrize(
    ("value", "others"), [((1, 2), [(1, 3), [1, 2], "x"]), (Opaque(3), [Opaque(4), "x"]), ("x", [Opaque(3)])]
)
def test_append_different_value_raises(value: Any, others: list[Any], tmp_path: Path) -> None:
    def rows(value: Any, count: int) -> TensorDict:
        return TensorDict(
            {
                "a": torch.ones(count),
                "v": NonTensorData(value, batch_size=[count]),
                "p": Point(torch.ones(count, 2), batch_size=[count]),
            },
            batch_size=[count],
        )

    rows(value, 2).memmap(tmp_path / "save", allow_pickle=True)
    td_memmap.append_memmap(tmp_path / "save", rows(value, 3), allow_pickle=True)
    for other in others:
        with pytest.raises(ValueError, match="the value of key 'v' must stay"):
            td_memmap.append_memmap(tmp_path / "save", rows(other, 3), allow_pickle=True, compatible=True)
    loaded = TensorDict.load_memmap(tmp_path / "save", allow_pickle=True)
    assert loaded.batch_size == (5,)
    assert loaded["v"] == value and type(loaded["v"]) is type(value)
    assert loaded["p"].x.shape == (5, 2)
    stack = TensorDict({"v": NonTensorStack(NonTensorData("a"))}, batch_size=[1])
    stack.memmap(tmp_path / "stack", compatible=True)
    with pytest.raises(ValueError, match="key 'v' is of a kind that cannot grow"):
        td_memmap.append_memmap(tmp_path / "stack", stack, compatible=True)


@pytest.mark.parametrize("value", [NonTensorData("x", batch_size=[2]), NonTensorStack("x", (1, 2))])
@pytest.mark.parametrize(
    "key", ["a", "shape"]
)  # "shape" is reserved, so its node is written in the general form
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_load_value_has_device_of_its_node(value: Any, key: str, device: Any, place: Path) -> None:
    level = TensorDict({key: torch.ones(2), "v": value}, [2], device="cpu")
    TensorDict(
        {"n": level, "v": value, "p": Point(torch.ones(2), y="x", batch_size=[2])}, [2], device="cpu"
    ).memmap(place)
    loaded = TensorDict.load_memmap(place, device=device)
    for node in (loaded, loaded["n"]):
        assert node.device == node.get("v").device == torch.device(device or "cpu")


@pytest.mark.parametrize("checksums", [False, True])
def test_append_value_with_more_batch_dims_grows(checksums: bool, tmp_path: Path) -> None:
    def rows(count: int, *dims: int) -> TensorDict:
        value = NonTensorData((1, 2), batch_size=[count, *dims])
        return TensorDict({"a": torch.ones(count), "v": value}, [count])

    rows(2, 4).memmap(tmp_path / "save", checksums=checksums)
    td_memmap.append_memmap(tmp_path / "save", rows(3, 4))
    loaded = TensorDict.load_memmap(tmp_path / "save")
    assert loaded.batch_size == (5,) and loaded.get("v").batch_size == (5, 4) and loaded["v"] == (1, 2)
    assert td_memmap.verify(tmp_path / "save").ok
    for other in (rows(3), rows(3, 5)):
        with pytest.raises(ValueError, match="the value of key 'v' has the batch size "):
            td_memmap.append_memmap(tmp_path / "save", other)
    value = NonTensorData("x", batch_size=[2])
    value.memmap(tmp_path / "alone")
    td_memmap.append_memmap(tmp_path / "alone", value)
    assert TensorDict.load_memmap(tmp_path / "alone").batch_size == (4,)


def test_pickle_mapped_collection_keeps_values(tmp_path: Path) -> None:
    saved = TensorDict({"a": torch.ones(3), "v": NonTensorData("x")}).memmap(tmp_path / "save")
    other = pickle.loads(pickle.dumps(saved))
    assert other["v"] == "x"
    assert type(other["a"]) is type(saved["a"])


ANY_VALUE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=4),
        st.binary(max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(-3, 3)), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(values=st.lists(ANY_VALUE, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_memmap_random_values_round_trip(values: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("values")
    column = NonTensorStack(*map(NonTensorData, values))
    td = TensorDict(
        {"column": column, "one": NonTensorData(values[0], batch_size=[len(values)])},
        batch_size=[len(values)],
    )
    for name in ("directory", "archive.tdz"):
        td.memmap(folder / name)
        loaded = TensorDict.load_memmap(folder / name)
        assert repr(loaded.get("column").tolist()) == repr(values)
        assert loaded.get("column").batch_size == (len(values),)
        assert repr(loaded.get("one").data) == repr(values[0])


@pytest.mark.parametrize("locked", [False, True])
def test_memmap_consolidated_keeps_only_explicit_locks(locked: bool, tmp_path: Path) -> None:
    pytest.importorskip("td_distributed")
    tree = TensorDict({"a": torch.ones(2), "n": TensorDict({"b": torch.ones(2)}, lock=locked)})
    held = tree.consolidate()
    assert held.is_locked and held["n"].is_locked
    held.memmap(tmp_path / "save")
    loaded = TensorDict.load_memmap(tmp_path / "save")
    assert [loaded.is_locked, loaded["n"].is_locked] == [False, locked]
    state = TensorDict(tree).load_state_dict(held.state_dict())
    assert [state.is_locked, state["n"].is_locked] == [False, locked]
