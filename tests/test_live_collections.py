"""Collections in a file whose structure, entries and metadata change: the file gets what a collection in memory gets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict, lazy_stack
from td_core.errors import LockedError, TensorDictError
from td_core.testing import assert_same

#: The formats with their options.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "hdf5": ("h5", {}),
    "hdf5_chunks": ("h5", {"chunks": 1, "compression": "gzip"}),
    "zarr": ("zarr", {}),
    "zarr_chunks": ("zarr", {"chunks": 1}),
}


def make_data() -> TensorDict:
    rows = lazy_stack([TensorDict({"p": torch.full((2,), float(i))}) for i in range(3)])
    return TensorDict(
        {
            "a": torch.arange(3.0),
            "b": torch.tensor([5.0, 6.0, 7.0]),
            "n": {"q": torch.arange(3), "s": {"t": torch.arange(6).view(3, 2)}},
            "m.x": torch.ones(3, dtype=torch.bool),
            "rows": rows,
        },
        batch_size=[3],
    )


class Pair:
    """A collection in memory, and the same one in a file."""

    def __init__(self, data: Any, folder: Path, name: str) -> None:
        suffix, options = FORMATS[name]
        self.path = str(folder / f"x.{suffix}")
        self.memory = data.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.stored = getattr(data, f"to_{suffix}")(self.path, **options)

    def change(self, function: Callable[[Any], object]) -> None:
        function(self.memory)
        function(self.stored)
        self.check()

    def check(self) -> None:
        """Compare both with what another program would load."""
        loaded = td_core.load(self.path)
        assert_same(loaded.clone(), self.memory)
        assert_same(self.stored.to_tensordict(retain_none=True), self.memory.to_tensordict(retain_none=True))
        assert list(loaded.keys(True)) == list(self.memory.keys(True)) == list(self.stored.keys(True))


@pytest.fixture(params=FORMATS)
def make_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Pair]:
    pytest.importorskip("td_hdf5" if request.param.startswith("hdf5") else "td_zarr")
    return lambda data: Pair(data, tmp_path, request.param)


def set_popped(td: Any) -> None:
    td["c"] = td.pop("a")
    td["k", "n"] = td.pop("n")


def swap_leaves(td: Any) -> None:
    td.update({"a": td["n", "q"], "n": {"q": td["a"]}})


def swap_leaves_of_one_form(td: Any) -> None:
    td.update({"a": td["b"], "b": td["a"]})


def rotate_levels(td: Any) -> None:
    td.update({"n": {"s": {"t": td["a"].clone()}}, "a": td["n", "s"].clone()})


def without_stacks(td: Any) -> Any:
    return td.exclude("rows", inplace=True)


def rename_in_turn(td: Any) -> None:
    td.rename_key_("a", "z").rename_key_("b", "a").rename_key_("z", "b").rename_key_(("n", "q"), "q")


def separate(td: Any) -> None:
    part = td.separates("a", ("n", "q"))
    td["again"] = part["n", "q"]
    td["more"] = part["a"] + 1


def split_in_place(td: Any) -> None:
    part, _ = td.split_keys(["a", ("n", "s", "t")], inplace=True)
    td["copy"] = part["n", "s", "t"]


def change_moved_level(td: Any) -> None:
    level, leaf = td["n"], td["a"]
    td.rename_key_("n", "k").rename_key_("a", ("k", "a"))
    level["new"] = torch.zeros(3)
    level["s", "new"] = torch.ones(3)
    leaf.fill_(8)


def rename_smaller_level(td: Any) -> None:
    td["n"].batch_size = []
    td.rename_key_("n", "k").batch_size = td.batch_size


def flatten_and_undo(td: Any) -> None:
    with td.select("a", "b", ("n", "q"), "n", inplace=True).flatten_keys("/", inplace=True) as flat:
        flat["n/q"].add_(1)


CHANGES: dict[str, Callable[[Any], object]] = {
    "flatten": lambda td: td.flatten_keys(".", inplace=True),
    "unflatten": lambda td: td.unflatten_keys(".", inplace=True),
    "flatten_with_undo": flatten_and_undo,
    "set_popped": set_popped,
    "popitem": lambda td: td.popitem(),
    "rename_below_itself": lambda td: td.rename_key_("a", ("a", "b")).rename_key_("n", ("n", "m")),
    "rename_above_itself": lambda td: td.rename_key_(("n", "s", "t"), "n"),
    "rename_to_taken_key": lambda td: td.rename_key_("a", "b").rename_key_(("n", "s"), "rows"),
    "rename_in_turn": rename_in_turn,
    "rename_smaller_level": rename_smaller_level,
    "rename_stack": lambda td: td.rename_key_("rows", ("n", "rows")),
    "swap_leaves": swap_leaves,
    "swap_leaves_of_one_form": swap_leaves_of_one_form,
    "rotate_levels": rotate_levels,
    "separate": separate,
    "split_in_place": split_in_place,
    "select": lambda td: td.select("b", ("n", "s"), inplace=True),
    "exclude": lambda td: td.exclude("b", ("n", "s", "t"), inplace=True),
    "filter_empty": lambda td: td.exclude(("n", "s", "t"), inplace=True).filter_empty_(),
    "clear": lambda td: td.clear(),
    "clear_level": lambda td: td["n"].clear(),
    "change_moved_level": change_moved_level,
    "update_mixed": lambda td: td.update(
        {"a": torch.ones(3), "b": torch.ones(3, 2), "n": {"q": torch.zeros(3), "new": td["a"] + 1}}
    ),
    "update_new_level": lambda td: td.update({("k", "a"): torch.ones(3), ("k", "b"): torch.zeros(3)}),
    "update_in_place": lambda td: td.update({"a": torch.ones(3), "new": torch.ones(3, 1)}, inplace=True),
    "update_at_index": lambda td: td.__setitem__(1, TensorDict({"a": 9.0, "fresh": torch.ones(2)})),
    "setdefault": lambda td: td.setdefault(("k", "l"), torch.ones(3)),
    "create_nested": lambda td: td.create_nested(("k", "l")),
    "names": lambda td: setattr(td, "names", ["time"]),
    "rename_dims": lambda td: td.refine_names("a").rename_("b"),
    "batch_size": lambda td: setattr(td, "batch_size", []),
    "auto_batch_size": lambda td: td.exclude("rows", inplace=True).auto_batch_size_(),
    "masked_fill": lambda td: td.masked_fill_(torch.tensor([True, False, True]), 7),
    "masked_fill_level": lambda td: td["n"].masked_fill_(torch.tensor([True, False, True]), 7),
    "pad": lambda td: without_stacks(td).pad([1, 2], value=4, inplace=True),
    "pad_one_by_one": lambda td: without_stacks(td).pad([1, 2], value=4, inplace=True, safe=False),
    "pad_nothing": lambda td: without_stacks(td).pad([0, 0], inplace=True),
    "gather": lambda td: td["n"].exclude("s", inplace=True).gather(0, torch.tensor([2, 0, 1]), inplace=True),
    "masked_select": lambda td: without_stacks(td).masked_select(
        torch.tensor([True, False, True]), inplace=True
    ),
    "reshape": lambda td: without_stacks(td).reshape(3, 1, inplace=True).flatten(inplace=True),
    "unflatten_dim": lambda td: without_stacks(td).unflatten(0, (1, 3), inplace=True),
    "repeat": lambda td: without_stacks(td).repeat(2, inplace=True),
    "repeat_interleave": lambda td: without_stacks(td).repeat_interleave(2, dim=0, inplace=True),
    "roll": lambda td: without_stacks(td).roll(1, inplace=True),
    "leaf_twice": lambda td: td.update({"k": {"x": td["a"].clone()}, "a": td["b"].clone()}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_stored_collection_gives_what_memory_gives(name: str, make_pair: Any) -> None:
    pair = make_pair(make_data())
    pair.change(CHANGES[name])
    pair.change(lambda td: td.set("last", torch.zeros(*td.batch_size, 3)))


def make_longer(td: Any) -> Any:
    """Return other elements, and a longer batch size of the members of the stack."""
    longer = td.apply(torch.zeros_like).to_tensordict()
    longer["rows"] = lazy_stack([TensorDict({"p": torch.zeros(2)}, [2]) for _ in range(3)])
    return longer


#: Changes of which the last part fails: a value that no file can hold, or a key that is missing.
FAILURES: dict[str, Callable[[Any], object]] = {
    "update": lambda td: td.update({"a": torch.ones(3, 2), "k": 1, "bad": torch.ones(3).to_sparse()}),
    "update_level": lambda td: td.update(
        {"n": {"q": torch.ones(3)}, "k": {"bad": torch.ones(3).to_sparse()}}
    ),
    "in_place": lambda td: td.update({"a": torch.ones(3), "bad": torch.ones(3).to_sparse()}, inplace=True),
    "index": lambda td: td.__setitem__(0, {"a": torch.ones(()), "n": {"q": torch.ones(9)}}),
    "sparse_leaf": lambda td: td.set("a", torch.ones(3).to_sparse()),
    "meta_leaf": lambda td: td.set("a", torch.ones(3, device="meta")),
    "rename": lambda td: td.rename_key_("a", "b", safe=True),
    "flatten": lambda td: td.set("n.q", torch.ones(3)).flatten_keys(".", inplace=True),
    "separate": lambda td: td.separates("a", "missing"),
    "names": lambda td: setattr(td, "names", ["x", "y"]),
    "batch_size": lambda td: setattr(td, "batch_size", [3, 2]),
    "batch_size_of_entry": lambda td: td.update(make_longer(td), inplace=True, update_batch_size=True),
    "load_batch_size_of_entry": lambda td: td.load_state_dict(make_longer(td).state_dict()),
    "load_assigned": lambda td: td.load_state_dict(make_longer(td).state_dict(), assign=True),
    "load_assigned_to_entry": lambda td: td.load_state_dict(
        td.apply(torch.zeros_like).state_dict(), assign=True
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failed_change_of_stored_collection_changes_nothing(name: str, make_pair: Any) -> None:
    pair = make_pair(make_data())
    if name == "flatten":
        pair.change(lambda td: td.set("n.q", torch.ones(3)))
    with pytest.raises((TensorDictError, RuntimeError, ValueError)):
        FAILURES[name](pair.stored)
    pair.check()


#: Entries that are set in a level with a name for its dim.
ENTRIES: dict[str, Callable[[Any], object]] = {
    "tensor": lambda td: td.set(("n", "k"), torch.ones(3)),
    "tensor_below": lambda td: td.set(("n", "s", "k"), torch.ones(3)),
    "tensor_in_new_level": lambda td: td.set(("n", "k", "l"), torch.ones(3)),
    "update": lambda td: td.update({"n": {"k": torch.ones(3)}}),
    "update_in_place": lambda td: td.update({"n": {"q": torch.ones(3, dtype=torch.int64)}}, inplace=True),
    "update_path": lambda td: td.update({("n", "k"): torch.ones(3)}),
    "setdefault": lambda td: td.setdefault(("n", "k"), torch.ones(3)),
    "rename": lambda td: td.rename_key_("a", ("n", "a")),
    "unflatten": lambda td: td.set("n.k", torch.ones(3)).unflatten_keys(".", inplace=True),
    "level": lambda td: td.set(("n", "k"), {"l": torch.ones(3)}),
    "new_level": lambda td: td.create_nested(("n", "k")),
    "stack": lambda td: td.set(("n", "k"), td["rows"].clone()),
    "value": lambda td: td.set_non_tensor(("n", "k"), "text"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_set_in_named_level_names_what_memory_names(name: str, make_pair: Any) -> None:
    if name == "value":
        pytest.importorskip("td_tensorclass")
    pair = make_pair(make_data())
    pair.change(lambda td: setattr(td["n"], "names", ["z"]))
    pair.change(ENTRIES[name])
    names = [[td.names, td["n"].names] for td in (pair.memory, pair.stored, td_core.load(pair.path))]
    assert names[0] == names[1] == names[2]
    if name.startswith(("tensor", "update")) and name != "tensor_in_new_level":
        assert names[0] == [[None], ["z"]]


def list_devices(td: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], str]:
    """Return the device label of each node, also of members of stacks and of values."""
    members = td._members_and_dim()
    children = dict(enumerate(members[0])) if members else {} if td._is_value else td._children()
    found = {path: str(td.device)}
    for key, child in children.items():
        if not isinstance(child, torch.Tensor):
            found |= list_devices(child, (*path, key))
    return found


def make_valued(tensorclass: Any) -> TensorDict:
    """Return a collection with values, and with collections and stacks that have some."""
    fields = {"x": torch.Tensor, "s": str}
    point = type(tensorclass.TensorClass)(
        "Point", (tensorclass.TensorClass,), {"__annotations__": fields, "__module__": __name__}
    )
    data = make_data()
    data["v"], data["vs"] = "text", tensorclass.NonTensorStack("a", "b", "c")
    data["n", "v"], data["n", "m"] = "text", tensorclass.MetaData("m")
    data["point"] = point(x=torch.ones(3), s="text", batch_size=[3])
    data["points"] = lazy_stack([point(x=torch.ones(2), s=str(i)) for i in range(3)])
    return data


#: Changes of device labels.
LABELS: dict[str, Callable[[Any], object]] = {
    "auto": lambda td: td.auto_device_(),
    "auto_load_state": lambda td: td.auto_device_().load_state_dict(td.clone().state_dict()),
    "auto_set": lambda td: td.auto_device_().set("k", "x").set(("n", "k"), "x").set(("l", "k"), "x"),
    "auto_write_value": lambda td: td.auto_device_().set_at_("v", "x", 1),
    "auto_clear": lambda td: td.auto_device_().clear_device_(),
    "auto_of_level": lambda td: td["n"].auto_device_(),
    "clear_of_level": lambda td: td.auto_device_()["n"].clear_device_(),
}


@pytest.mark.parametrize("plain", [True, False], ids=["labeled_root", "unlabeled_root"])
@pytest.mark.parametrize("name", LABELS)
def test_device_labels_are_those_of_memory(name: str, plain: bool, make_pair: Any) -> None:
    tensorclass = pytest.importorskip("td_tensorclass")
    data = make_valued(tensorclass)
    if not plain:
        data["values"] = {"v": "text"}
    pair = make_pair(data)
    pair.change(LABELS[name])
    expected = list_devices(pair.memory)
    assert list_devices(pair.stored) == list_devices(td_core.load(pair.path)) == expected
    if name == "auto":
        assert expected["v",] == expected[()] == ("cpu" if plain else "None")
        assert expected["n", "v"] == expected["points", 1, "s"] == "cpu"


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("key", ["point", "points"])
def test_load_state_that_an_entry_refuses_changes_nothing(key: str, assign: bool, make_pair: Any) -> None:
    tensorclass = pytest.importorskip("td_tensorclass")
    pair = make_pair(make_valued(tensorclass).select("a", "v", "vs", ("n", "v"), key))
    other = pair.memory.flip(0).set("v", "other")
    if key == "point":
        other["point", "s"] = "other"
    with pytest.raises((td_core.StructureError, LockedError), match="larger entry|is locked"):
        pair.stored.load_state_dict(other.state_dict(), assign=assign)
    pair.check()
    assert pair.stored["vs"] == pair.memory["vs"] == td_core.load(pair.path)["vs"] == ["a", "b", "c"]
    assert pair.stored["v"] == "text"


def test_popped_entries_are_in_memory(make_pair: Any) -> None:
    pair = make_pair(make_data())
    leaf, level, stack = (pair.stored.pop(key) for key in ("a", "n", "rows"))
    assert leaf.tolist() == [0, 1, 2]
    assert type(leaf) is torch.Tensor
    assert type(level) is TensorDict
    level["new"] = torch.ones(3)
    assert level["s", "t"].sum() == 15
    assert stack["p"].sum() == 6
    assert not stack.is_locked
    assert list(td_core.load(pair.path).keys()) == ["b", "m.x"]


def test_leaf_and_level_of_removed_entry_keep_their_elements(make_pair: Any) -> None:
    pair = make_pair(make_data())
    leaf, row, level = pair.stored["a"], pair.stored["b"][1:], pair.stored["n"]
    pair.stored.exclude("a", "b", "n", inplace=True)
    pair.stored["a"], pair.stored["n"] = torch.zeros(3), TensorDict({"q": torch.zeros(3)}, [3])
    assert (leaf.tolist(), row.tolist(), level["q"].tolist()) == ([0, 1, 2], [6, 7], [0, 1, 2])
    with pytest.raises(td_core.KeyPathError, match="key 'n' was removed since"):
        level["x"] = torch.ones(3)
    assert list(td_core.load(pair.path)["n"].keys()) == ["q"]


def test_set_of_tied_leaf_keeps_the_other_one(make_pair: Any) -> None:
    tied = torch.arange(3.0)
    pair = make_pair(TensorDict({"a": tied, "n": {"b": tied}}, [3]))
    pair.change(lambda td: td.set("a", torch.ones(3)))
    pair.change(lambda td: td.update({"a": torch.zeros(3), "n": {"b": torch.full((3,), 4.0)}}))


def test_metadata_and_lock_of_entry_in_a_file_are_refused(make_pair: Any) -> None:
    pair = make_pair(make_data())
    rows = pair.stored["rows"]
    for change in (
        lambda: setattr(rows, "names", ["x"]),
        lambda: setattr(rows, "batch_size", [3, 2]),
        lambda: setattr(rows[0], "batch_size", [2]),
        rows.unlock_,
        rows[0].unlock_,
        lambda: rows.set("x", torch.ones(3)),
        rows.auto_batch_size_,
        rows.clear_device_,
    ):
        with pytest.raises(LockedError, match="entry of a collection in a store|is locked"):
            change()
    pair.check()


@pytest.mark.parametrize(
    "value", [torch.tensor(1.0), TensorDict({"c": torch.zeros(2)})], ids=["leaf", "level"]
)
def test_value_that_does_not_fit_a_level_above_is_refused(value: Any, make_pair: Any) -> None:
    pair = make_pair(make_data())
    pair.change(lambda td: setattr(td["n"], "batch_size", []))
    with pytest.raises(
        td_core.StructureError, match=r"key \('n', 'k'\) in a file: the root has the batch size \[3\]"
    ):
        pair.stored["n"]["k"] = value
    pair.check()


def test_refused_entry_leaves_the_leaves_written_in_place(make_pair: Any) -> None:
    pair = make_pair(make_data())
    pair.change(lambda td: setattr(td["n"], "batch_size", []))
    with pytest.raises(td_core.StructureError, match=r"the root has the batch size \[3\]"):
        pair.stored["n"].update({"q": torch.zeros(3), "k": torch.tensor(1.0)}, inplace=True)
    pair.check()


@pytest.mark.parametrize("method", ["memmap_", "share_memory_", "consolidate", "pin_memory_"])
@pytest.mark.parametrize("wrap", [lambda td: td, lambda td: TensorDict({"k": td})], ids=["root", "nested"])
def test_replacing_leaves_in_place_is_refused(method: str, wrap: Any, make_pair: Any, tmp_path: Path) -> None:
    pytest.importorskip("td_memmap")
    pytest.importorskip("td_distributed")
    pair = make_pair(make_data())
    arguments: dict[str, Any] = {"memmap_": {"prefix": tmp_path / "new"}, "consolidate": {"inplace": True}}
    with pytest.raises(td_core.UnsupportedOperationError, match="in place: its leaves stay in its store"):
        getattr(wrap(pair.stored), method)(**arguments.get(method, {}))
    assert not (tmp_path / "new").exists()
    assert not pair.stored.is_locked
    pair.check()


#: Writes to a view of a declared class.
VIEW_WRITES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda view: setattr(view, "a", torch.full((3,), 3.0)),
    "attribute_of_other_dtype": lambda view: setattr(view, "a", torch.ones(3, 2, dtype=torch.int64)),
    "set": lambda view: view.set("a", torch.full((3,), 3.0)),
    "set_new": lambda view: view.set(("k", "l"), torch.ones(3)),
    "update": lambda view: view.update(
        {"a": torch.ones(3), "b": torch.ones(3, 4), "k": {"l": torch.ones(3)}}
    ),
    "swap": lambda view: view.update({"a": view["b"], "b": view["a"]}),
    "update_new_level": lambda view: view.update({("k", "a"): torch.ones(3), ("k", "b"): torch.zeros(3)}),
    "update_in_place": lambda view: view.update_({"a": torch.ones(3)}),
    "delete": lambda view: view.del_("n"),
    "pop": lambda view: view.set("z", view.pop("n")),
    "rename": lambda view: view.rename_key_("a", ("n", "a")),
    "index": lambda view: view.__setitem__(1, view[0].clone()),
    "add": lambda view: view.select("a", "b").add_(1),
    "clear": lambda view: view.clear(),
}


@pytest.mark.parametrize("kind", ["typed", "tensorclass"])
@pytest.mark.parametrize("name", VIEW_WRITES)
def test_write_to_declared_view_reaches_the_file(name: str, kind: str, make_pair: Any) -> None:
    tensorclass = pytest.importorskip("td_tensorclass")
    base = tensorclass.TypedTensorDict if kind == "typed" else tensorclass.TensorClass
    fields = {"a": torch.Tensor, "b": torch.Tensor, **dict.fromkeys("nkz", TensorDict)}
    defaults = dict.fromkeys(("n", "k", "z"))
    view_class = type(base)("View", (base,), {"__annotations__": fields, "__module__": __name__, **defaults})
    pair = make_pair(make_data().select("a", "b", "n"))

    def write(td: Any) -> None:
        VIEW_WRITES[name](view_class.from_tensordict(td))

    pair.change(write)


def test_replace_entry_whose_old_dataset_another_collection_replaced_raises(tmp_path: Path) -> None:
    pytest.importorskip("td_hdf5")
    path = str(tmp_path / "x.h5")
    TensorDict({"k": torch.ones(3, 5)}, [3]).to_h5(path, chunks=2).close()
    first, second = TensorDict.from_h5(path, mode="r+"), TensorDict.from_h5(path, mode="r+")
    leaf = first["k"]
    second["k"] = torch.ones(3, 2)
    with pytest.raises(TensorDictError, match=r"x.h5, dataset 'k'"):
        first["k"] = torch.ones(3, 7)
    assert leaf.shape == (3, 5)
    td_core.load(path)
