"""Saves of classes that were later renamed, moved or extended: they load by calling the class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import td_core
from td_core import StructureError, TensorDict, lazy_stack
from td_core._encode.node_kinds import KINDS
from td_core.errors import FormatError

td_tensorclass: Any = pytest.importorskip("td_tensorclass")
pytest.importorskip("td_memmap")
_collectives: Any = pytest.importorskip("td_distributed._collectives")
Payload, unpack = _collectives.Payload, _collectives.unpack
NonTensorData = td_tensorclass.NonTensorData
NonTensorStack = td_tensorclass.NonTensorStack
TensorClass = td_tensorclass.TensorClass
TypedTensorDict = td_tensorclass.TypedTensorDict

X = torch.arange(3.0)


def forget(cls: Any) -> None:
    """Unregister a class and rename it, so that its stored name is unknown to this process."""
    if cls in [kind.type for kind in KINDS]:
        KINDS.remove(KINDS.of(cls).tag)
    cls.__qualname__ = cls.__name__ = "Gone"


def define_classes(suffix: str = "") -> dict[str, Any]:
    class Inner(TensorClass):
        y: Tensor
        note: str = "note"

    class Outer(TensorClass):
        x: Tensor
        inner: Inner = None
        other: TensorDict = None

    class Frozen(TensorClass["frozen"]):  # type: ignore[misc]
        x: Tensor

    class Typed(TypedTensorDict):
        x: Tensor
        inner: Inner

    class Sub(TensorDict):
        pass

    made = {cls.__name__: cls for cls in (Inner, Outer, Frozen, Typed, Sub)}
    Typed.__annotations__ = {"x": Tensor, "inner": Inner}
    for cls in made.values():
        cls.__module__ = f"moved{suffix}"
    return made


def make_outer(old: dict[str, Any], count: int = 3) -> Any:
    inner = old["Inner"](y=torch.ones(count), batch_size=[count])
    other = TensorDict({"z": torch.ones(count)}, batch_size=[count])
    return old["Outer"](x=torch.arange(float(count)), inner=inner, other=other, batch_size=[count])


PLAIN = {"x": X, "inner": TensorDict({"y": torch.ones(3)}, batch_size=[3])}
OUTER_CLASSES = {"x": "", "inner": "Inner", "other": "TensorDict"}
#: What is saved, built from the old classes; the name of the class that loads it; the expected classes of its entries.
SAVED: dict[str, tuple[Callable[[dict[str, Any]], Any], str, dict[str, str]]] = {
    "tensorclass": (make_outer, "Outer", OUTER_CLASSES),
    "frozen": (lambda old: old["Frozen"](x=X, batch_size=[3]), "Frozen", {"x": ""}),
    "typed": (
        lambda old: old["Typed"](x=X, inner=old["Inner"](y=torch.ones(3), batch_size=[3]), batch_size=[3]),
        "Typed",
        {"x": "", "inner": "Inner"},
    ),
    "subclass": (lambda old: old["Sub"]({"x": X}, batch_size=[3]), "Sub", {"x": ""}),
    "stack": (lambda old: lazy_stack([make_outer(old), make_outer(old)]), "Outer", OUTER_CLASSES),
    "uneven stack": (lambda old: lazy_stack([make_outer(old), make_outer(old, 2)]), "Outer", OUTER_CLASSES),
    "general form": (
        lambda old: old["Inner"](y=X, note=NonTensorData({1: 2}), batch_size=[3]),
        "Inner",
        {"y": "", "note": "NonTensorData"},
    ),
    "plain": (lambda old: TensorDict(PLAIN, batch_size=[3]), "Outer", {"x": "", "inner": "Inner"}),
    "plain for typed": (lambda old: TensorDict(PLAIN, batch_size=[3]), "Typed", {"x": "", "inner": "Inner"}),
    "plain for subclass": (lambda old: TensorDict({"x": X}), "Sub", {"x": ""}),
    "plain stack": (
        lambda old: lazy_stack([TensorDict(PLAIN, batch_size=[3])] * 2),
        "Outer",
        {"x": "", "inner": "Inner"},
    ),
    "locked": (
        lambda old: TensorDict(PLAIN, batch_size=[3], lock=True),
        "Outer",
        {"x": "", "inner": "Inner"},
    ),
}

TRANSPORTS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "directory": lambda data, cls, path: (data.memmap(path), cls.load_memmap(path))[1],
    "load": lambda data, cls, path: (data.save(path), cls.load(path))[1],
    "archive": lambda data, cls, path: (data.memmap(path, archive=True), cls.load_memmap(path))[1],
    "meta": lambda data, cls, path: (data.memmap(path), cls.load_memmap(path, device="meta"))[1],
    "subpath": lambda data, cls, path: (
        TensorDict({"a": {"b": data}}).memmap(path),
        cls.load_memmap(path, subpath=("a", "b")),
    )[1],
    "consolidated": lambda data, cls, path: (data.consolidate(path), cls.from_consolidated(path))[1],
}


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS.keys())
@pytest.mark.parametrize(("make", "name", "expected"), SAVED.values(), ids=SAVED.keys())
def test_load_by_moved_class_returns_it(
    make: Any, name: str, expected: dict[str, str], transport: Any, tmp_path: Path
) -> None:
    old, new = define_classes(), define_classes("_away")

    class Between:
        """Forget the old classes before the first method call on the new class."""

        def __getattr__(self, attribute: str) -> Any:
            for cls in old.values():
                forget(cls)
            return getattr(new[name], attribute)

    data = make(old)
    loaded = transport(data, Between(), tmp_path / "save")
    assert type(loaded) is new[name] and loaded.batch_size == data.batch_size
    members = loaded.unbind(0) if loaded._members_and_dim() is not None else [loaded]
    for member, count in zip(members, (3, 2 if data.batch_size == (2, -1) else 3), strict=False):
        for key, child_class in expected.items():
            child = member._get_child(key)
            assert isinstance(child, Tensor) if not child_class else type(child).__name__ == child_class, key
            assert child_class not in new or type(child) is new[child_class]
        leaf = member._get_child(next(iter(expected)))
        assert leaf.shape == (count,) and (leaf.is_meta or leaf.tolist() == X[:count].tolist())
    if transport is TRANSPORTS["directory"]:
        assert loaded.is_locked == data.is_locked


@pytest.mark.parametrize("transport", ["directory", "load", "archive", "consolidated"])
@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (
            lambda: TensorDict({"x": X, "q": X}),
            "Outer",
            "a TensorDict, is not a Outer: Outer has no field 'q'",
        ),
        (
            lambda: TensorDict({"x": X}),
            "Typed",
            r"is not a Typed: Typed misses the required keys \['inner'\]",
        ),
        (lambda: NonTensorData("a"), "Outer", "a NonTensorData, is not a Outer: it has no entries"),
        (lambda: NonTensorStack("a", "b"), "Typed", "is not a Typed: it has no entries"),
        (
            lambda: TensorDict({"x": X, "inner": {"q": X}}),
            "Outer",
            "is not a Outer: Inner has no field 'q'",
        ),
    ],
)
def test_load_by_class_with_other_fields_raises(
    make: Any, name: str, message: str, transport: str, tmp_path: Path
) -> None:
    with pytest.raises(StructureError, match=f"what is saved at .*save.*{message}"):
        TRANSPORTS[transport](make(), define_classes()[name], tmp_path / "save")


def test_load_unknown_class_error_names_remedy(tmp_path: Path) -> None:
    old = define_classes()
    make_outer(old).memmap(tmp_path / "save")
    make_outer(old).consolidate(tmp_path / "file")
    for cls in old.values():
        forget(cls)
    with pytest.raises(
        FormatError, match=r"load it by the class that it is now, as in Record.load_memmap\(path\)"
    ):
        TensorDict.load_memmap(tmp_path / "save")
    with pytest.raises(FormatError, match="import the module that defines it first, or load it by the class"):
        TensorDict.from_consolidated(tmp_path / "file")


def test_load_nested_node_uses_declared_field_class(tmp_path: Path) -> None:
    old = define_classes()
    holder = TensorDict({"o": make_outer(old)}, batch_size=[3])
    holder.memmap(tmp_path / "save")
    holder.consolidate(tmp_path / "file")

    class Inner(TensorClass):
        y: Tensor
        note: str = "note"

    old["Outer"]._schema._hints["inner"] = Inner  # as if the field annotation now refers to the new class
    forget(old["Inner"])
    for loaded in (
        TensorDict.load_memmap(tmp_path / "save"),
        TensorDict.from_consolidated(tmp_path / "file"),
    ):
        assert isinstance(loaded["o"], old["Outer"]) and isinstance(loaded["o"].inner, Inner)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", ["tensorclass", "typed", "uneven stack", "plain"])
def test_receive_by_moved_class_returns_it(name: str, separate: bool) -> None:
    old, new = define_classes(), define_classes("_away")
    make, cls, expected = SAVED[name]
    data = make(old)
    parcel = Payload(lambda: data, torch.device("cpu"), apart=separate)
    for each in old.values():
        forget(each)
    received = unpack([*parcel.front], parcel.data, 0, None, new[cls])
    assert type(received) is new[cls]
    member = received if received._members_and_dim() is None else received[0]
    assert type(member._get_child("inner")) is new["Inner"] and expected["inner"] == "Inner"
    parcel = Payload(lambda: TensorDict({"q": X}), torch.device("cpu"))
    with pytest.raises(StructureError, match="what was sent, a TensorDict, is not a"):
        unpack([*parcel.front], parcel.data, 0, None, new[cls])


def test_load_by_class_prefers_it_over_same_name(tmp_path: Path) -> None:
    class Record(TensorClass):
        x: Tensor

    Record(x=X, batch_size=[3]).memmap(tmp_path / "save")

    def other() -> Any:
        class Record(TensorClass):
            q: Tensor

        Record.__qualname__ = Record.__qualname__.replace("other.<locals>.", "")
        return Record

    other()
    loaded = Record.load_memmap(tmp_path / "save")
    assert type(loaded) is Record and loaded.x.tolist() == X.tolist()


def test_load_by_base_class_returns_stored_subclass(tmp_path: Path) -> None:
    class Base(TensorClass):
        x: Tensor

    class Below(Base):
        k: Tensor = None

    Below(x=X, batch_size=[3]).memmap(tmp_path / "save")
    assert type(Base.load_memmap(tmp_path / "save")) is Below


class Grown(TensorClass):
    """A class to which fields with defaults were added."""

    x: Tensor
    weight: float = 1.5
    subset: str = "train"
    info: dict = field(default_factory=dict)
    tags: list = field(default_factory=list)
    scale: Tensor = field(default_factory=lambda: torch.zeros(5))
    late: int = field(default=3, init=False)
    nothing: Any = None


DEFAULTS = {"weight": 1.5, "subset": "train", "info": {}, "tags": [], "late": 3, "nothing": None}


def assert_defaults(made: Any, **more: Any) -> None:
    assert type(made) is Grown
    assert {name: getattr(made, name) for name in DEFAULTS} == {**DEFAULTS, **more}
    assert made.scale.tolist() == [0] * 5


def make_entries(**more: Any) -> dict[str, Any]:
    return {"x": X, **more}


MAKERS: dict[str, Callable[..., Any]] = {
    "from_dict": lambda **more: Grown.from_dict(make_entries(**more), batch_size=[3]),
    "from_tensordict": lambda **more: Grown.from_tensordict(TensorDict({"x": X}, batch_size=[3]), more),
    "from_dict_instance": lambda **more: Grown(x=X).from_dict_instance(make_entries(**more), batch_size=[3]),
    "nested": lambda **more: Holder.from_dict({"grown": make_entries(**more)}, batch_size=[3]).grown,
    "from_any": lambda **more: Grown.from_any(make_entries(**more), batch_dims=1) if not more else None,
}


class Holder(TensorClass):
    """A class with a field of another tensorclass."""

    grown: Grown


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_construct_without_field_uses_default(make: Any) -> None:
    one, two = make(), make()
    assert_defaults(one)
    assert one.info is not two.info and one.scale.data_ptr() != two.scale.data_ptr()
    one.info["a"] = 1
    assert_defaults(make())


@pytest.mark.parametrize("make", ["from_dict", "from_tensordict", "from_dict_instance", "nested"])
def test_construct_field_none_stays_none(make: str) -> None:
    assert_defaults(MAKERS[make](subset=None), subset=None)


def test_from_tensordict_keeps_source_unchanged() -> None:
    source = TensorDict({"x": X}, batch_size=[3], lock=True)
    made = Grown.from_tensordict(source)
    assert list(source.keys()) == ["x"] and made.is_locked and made.x is source["x"]


def test_from_tensordict_stack_uses_defaults_in_members() -> None:
    made = Grown.from_tensordict(lazy_stack([TensorDict({"x": X}), TensorDict({"x": X[:2]})]))
    for member in made.tensordicts:
        assert (member.weight, member.subset) == (1.5, "train")


def make_earlier() -> Any:
    """Return an instance with the fields of the earlier version of the class."""
    return Grown._wrap_unchecked(TensorDict({"x": X}, batch_size=[3]))


def remove_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the defaults of the class, as in its earlier version."""
    monkeypatch.setattr(Grown._schema, "defaulted", ())


ROUND_TRIPS: dict[str, tuple[Callable[[Any, Path], Any], Callable[[Path], Any]]] = {
    "directory": (lambda data, path: data.memmap(path), Grown.load_memmap),
    "generic": (lambda data, path: data.memmap(path), TensorDict.load_memmap),
    "archive": (lambda data, path: data.memmap(path, archive=True), td_core.load),
    "consolidated": (lambda data, path: data.consolidate(path), TensorDict.from_consolidated),
    "pickle": (
        lambda data, path: path.write_bytes(pickle.dumps(data)),
        lambda path: pickle.loads(path.read_bytes()),
    ),
    "consolidated pickle": (
        lambda data, path: path.write_bytes(pickle.dumps(data.consolidate())),
        lambda path: pickle.loads(path.read_bytes()),
    ),
    "torch.save": (torch.save, lambda path: torch.load(path, weights_only=False)),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("write", "read"), ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_load_save_without_new_field_uses_default(
    write: Any, read: Any, nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        remove_defaults(context)
        data = make_earlier()
        write(Holder(grown=data, batch_size=[3]) if nested else data, tmp_path / "save")
    if nested and read == Grown.load_memmap:
        read = Holder.load_memmap
    loaded = read(tmp_path / "save")
    assert_defaults(loaded.grown if nested else loaded)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("write", "read"), ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_load_field_none_stays_none(write: Any, read: Any, stacked: bool, tmp_path: Path) -> None:
    data = Grown.from_dict(make_entries(subset=None, info=None), batch_size=[3])
    write(lazy_stack([data, data]) if stacked else data, tmp_path / "save")
    loaded = read(tmp_path / "save")
    assert_defaults(loaded[0] if stacked else loaded, subset=None, info=None)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "clone": lambda data: data.clone(),
    "consolidate": lambda data: data.consolidate(),
    "exclude": lambda data: data.exclude("weight"),
    "to": lambda data: data.to("cpu"),
    "index": lambda data: data[:],
    "lock": lambda data: data.lock_(),
}


@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES.keys())
def test_copy_field_none_gets_no_default(how: Any) -> None:
    data = Grown.from_dict(make_entries(subset=None, weight=None), batch_size=[3])
    assert_defaults(how(data), subset=None, weight=None)


LOADS: dict[str, Callable[[Any, Path], Any]] = {
    "load_memmap_": lambda data, path: data.load_memmap_(path),
    "load_": lambda data, path: data.load_(path),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_load_inplace_keeps_fields_missing_in_save(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        remove_defaults(context)
        make_earlier().memmap(tmp_path / "save")
    data = Grown.from_dict({**make_entries(subset="test"), "x": torch.zeros(3)}, batch_size=[3])
    load(data, tmp_path / "save")
    assert_defaults(data, subset="test")
    assert data.x.tolist() == X.tolist()


def test_load_inplace_into_moved_class_works(tmp_path: Path) -> None:
    old_classes, new = define_classes(), define_classes("_away")
    make_outer(old_classes).memmap(tmp_path / "save")
    for cls in old_classes.values():
        forget(cls)
    for load in (*LOADS.values(), lambda data, path: TensorDict.load_memmap(path, out=data)):
        data = new["Outer"](x=torch.zeros(3), batch_size=[3])
        load(data, tmp_path / "save")
        assert data.x.tolist() == X.tolist() and isinstance(data.inner, new["Inner"])


def test_load_typed_collection_uses_defaults_of_keys(tmp_path: Path) -> None:
    class Typed(TypedTensorDict):
        x: Tensor
        weight: float = 1.5
        count: int = field(default=2)
        info: dict = field(default_factory=dict)

    assert Typed.__required_keys__ == {"x"}
    TensorDict({"x": X}, batch_size=[3]).memmap(tmp_path / "save")
    loaded = Typed.load_memmap(tmp_path / "save")
    assert (type(loaded), loaded.weight, loaded.count, loaded.info) == (Typed, 1.5, 2, {})
    assert loaded.info is not loaded.info
