"""Writes into a mapped collection: leaves and values reach the files, or an error is raised before any write."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, lazy_stack
from td_core.errors import CodecError, StructureError

td_memmap = pytest.importorskip("td_memmap")
td_tensorclass = pytest.importorskip("td_tensorclass")

NonTensorData, NonTensorStack = td_tensorclass.NonTensorData, td_tensorclass.NonTensorStack


@td_tensorclass.tensorclass
class Labelled:
    image: Tensor
    label: str
    one: str


def make_rows() -> TensorDict:
    return TensorDict({"image": torch.zeros(3, 2), "label": NonTensorStack(*"abc"), "one": "x"}, [3])


KINDS: dict[str, Callable[[], Any]] = {
    "plain": make_rows,
    "class": lambda: Labelled(torch.zeros(3, 2), NonTensorStack(*"abc"), "x", batch_size=[3]),
    "stack": lambda: lazy_stack([each.clone() for each in make_rows().unbind(0)]),
}


def save_and_load(data: Any, path: str) -> Any:
    data.memmap(path)
    return TensorDict.load_memmap(path)


#: Ways to get a collection that is mapped to files.
SAVES: dict[str, Callable[[Any, str], Any]] = {
    "loaded": save_and_load,
    "loaded r+": lambda data, path: (data.memmap(path), TensorDict.load_memmap(path, mode="r+"))[1],
    "loaded and mapped": lambda data, path: save_and_load(data, path).memmap_(),
    "memmap": lambda data, path: data.memmap(path),
    "memmap_": lambda data, path: data.memmap_(path),
    "unlocked": lambda data, path: data.memmap(path).unlock_(),
    "shared": lambda data, path: data.memmap(path, share_non_tensor=True),
}


def make_record(*, one: str = "y") -> TensorDict:
    return TensorDict({"image": torch.ones(2), "label": "new", "one": one})


def make_records(labels: str = "pq") -> TensorDict:
    count = len(labels)
    return TensorDict({"image": torch.ones(count, 2), "label": NonTensorStack(*labels), "one": "z"}, [count])


#: A write, and the images, the labels and the third column after it.
Result = tuple[list[int], str, str]
WRITES: dict[str, tuple[Callable[[Any], Any], Result]] = {
    "td[i] = record": (lambda td: td.__setitem__(1, make_record()), ([0, 1, 0], "aNc", "xyx")),
    "td[i] = dict": (lambda td: td.__setitem__(1, dict(make_record().items())), ([0, 1, 0], "aNc", "xyx")),
    "td[a:b] = records": (lambda td: td.__setitem__(slice(1, 3), make_records()), ([0, 1, 1], "apq", "xzz")),
    "td[[i, j]] = records": (lambda td: td.__setitem__([0, 2], make_records()), ([1, 0, 1], "pbq", "zxz")),
    "td[mask] = records": (
        lambda td: td.__setitem__(torch.tensor([True, False, True]), make_records()),
        ([1, 0, 1], "pbq", "zxz"),
    ),
    "td[...] = records": (lambda td: td.__setitem__(..., make_records("pqr")), ([1, 1, 1], "pqr", "zzz")),
    "td[i][...] = dict": (
        lambda td: td[1].__setitem__(..., {"image": torch.ones(2), "label": "new"}),
        ([0, 1, 0], "aNc", "xxx"),
    ),
    "update_at_": (lambda td: td.update_at_(make_record(), 1), ([0, 1, 0], "aNc", "xyx")),
    "copy_at_": (lambda td: td.copy_at_(make_record(), 1), ([0, 1, 0], "aNc", "xyx")),
    "update_": (lambda td: td.update_(make_records("pqr")), ([1, 1, 1], "pqr", "zzz")),
    "copy_": (lambda td: td.copy_(make_records("pqr")), ([1, 1, 1], "pqr", "zzz")),
    "update(inplace=True)": (
        lambda td: td.update(make_records("pqr"), inplace=True),
        ([1, 1, 1], "pqr", "zzz"),
    ),
    "update_ of one": (lambda td: td.update_({"label": NonTensorStack(*"pqr")}), ([0, 0, 0], "pqr", "xxx")),
    "set_": (lambda td: td.set_("label", NonTensorStack(*"pqr")), ([0, 0, 0], "pqr", "xxx")),
    "set(inplace=True)": (lambda td: td.set("one", "w", inplace=True), ([0, 0, 0], "abc", "www")),
    "set_at_": (lambda td: td.set_at_("label", "new", 1), ([0, 0, 0], "aNc", "xxx")),
    "set_at_ of one for all": (lambda td: td.set_at_("one", "y", 1), ([0, 0, 0], "abc", "xyx")),
    "get()[i]": (lambda td: td.get("label").__setitem__(1, "new"), ([0, 0, 0], "aNc", "xxx")),
    "td[key][i]": (lambda td: get_label_column(td).__setitem__(1, "new"), ([0, 0, 0], "aNc", "xxx")),
    "through a slice": (
        lambda td: td[1:].__setitem__(0, {"image": torch.ones(2), "label": "new"}),
        ([0, 1, 0], "aNc", "xxx"),
    ),
    "through a row": (
        lambda td: td[1].update_({"image": torch.ones(2), "label": "new"}),
        ([0, 1, 0], "aNc", "xxx"),
    ),
    "through unbind": (
        lambda td: td.unbind(0)[1].update_({"image": torch.ones(2), "label": "new"}),
        ([0, 1, 0], "aNc", "xxx"),
    ),
    "through split": (
        lambda td: td.split(1)[1].update_({"image": torch.ones(1, 2), "label": NonTensorStack("new")}),
        ([0, 1, 0], "aNc", "xxx"),
    ),
    "load_state_dict": (
        lambda td: td.load_state_dict(make_records("pqr").state_dict()),
        ([1, 1, 1], "pqr", "zzz"),
    ),
    "after a lock": (lambda td: td.lock_().__setitem__(1, make_record()), ([0, 1, 0], "aNc", "xyx")),
}


def get_label_column(td: Any) -> Any:
    return td.label if isinstance(td, Labelled) else td["label"]


def read_columns(td: Any) -> Result:
    """Return the images, labels and third column of a collection, with one character per value."""
    parts = td.unbind(0)
    shown = [
        [str(getattr(part.get(key), "data", part.get(key))) for part in parts] for key in ("label", "one")
    ]
    labels, ones = ("".join("N" if value == "new" else value for value in column) for column in shown)
    return [int(part.get("image")[0]) for part in parts], labels, ones


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("kind", KINDS)
def test_write_collection_reaches_leaves_and_values(kind: str, save: str, name: str, tmp_path: Path) -> None:
    td = SAVES[save](KINDS[kind](), str(tmp_path / "save"))
    write, wanted = WRITES[name]
    write(td)
    assert read_columns(td) == wanted
    assert read_columns(TensorDict.load_memmap(tmp_path / "save")) == wanted


@pytest.mark.parametrize("name", ["td[i] = record", "update_", "through a row"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["below", "subpath", "above"])
def test_write_nested_node_reaches_files(method: str, kind: str, name: str, tmp_path: Path) -> None:
    TensorDict({"n": KINDS[kind]()}, [3]).memmap(tmp_path / "save")
    write, wanted = WRITES[name]
    whole = TensorDict.load_memmap(tmp_path / "save")
    if method == "above" and name == "td[i] = record":
        whole[1] = TensorDict({"n": make_record()})
    else:
        write(TensorDict.load_memmap(tmp_path / "save", subpath="n") if method == "subpath" else whole["n"])
    assert read_columns(TensorDict.load_memmap(tmp_path / "save")["n"]) == wanted


def write_in_process(path: str, td: Any) -> None:
    td = TensorDict.load_memmap(path) if td is None else td
    td[2] = make_record(one="x")


@pytest.mark.parametrize("pickled", [False, True])
def test_write_from_other_process_keeps_all_writes(pickled: bool, tmp_path: Path) -> None:
    td = save_and_load(make_rows(), str(tmp_path / "save"))
    td[0] = make_record(one="x")
    process = multiprocessing.get_context("spawn").Process(
        target=write_in_process, args=(str(tmp_path / "save"), td if pickled else None)
    )
    process.start()
    process.join()
    td[1] = make_record(one="x")
    assert (
        read_columns(td)
        == read_columns(TensorDict.load_memmap(tmp_path / "save"))
        == ([1, 1, 1], "NNN", "xxx")
    )


@pytest.mark.parametrize("part", [slice(None), slice(1, None), 1])
def test_write_to_unpickled_save_reaches_files(part: Any, tmp_path: Path) -> None:
    td = save_and_load(make_rows(), str(tmp_path / "save"))
    again = pickle.loads(pickle.dumps(td[part] if part != slice(None) else td))
    if part == slice(None):
        again[1] = make_record()
        assert read_columns(TensorDict.load_memmap(tmp_path / "save")) == ([0, 1, 0], "aNc", "xyx")
        return
    with pytest.raises(StructureError, match="cannot write the value"):
        again.update_({"image": torch.ones_like(again["image"]), "label": again.get("label"), "one": "y"})
    assert read_columns(TensorDict.load_memmap(tmp_path / "save")) == ([0, 0, 0], "abc", "xxx")


#: A write that raises, and the message of the error.
FAILING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "label": (lambda td: td.__setitem__(1, {**make_record(), "label": object()}), "cannot store the value"),
    "last": (lambda td: td.__setitem__(1, {**make_record(), "one": object()}), "cannot store the value"),
    "update_": (lambda td: td.update_({**make_records("pqr"), "one": object()}), "cannot store the value"),
    "one of many": (
        lambda td: td.update_(
            {"one": "y", "image": torch.ones(3, 2), "label": NonTensorStack("p", "q", object())}
        ),
        "cannot store the value",
    ),
}
#: Writes through a view of a part of the batch: a value for the whole batch is one file, which has no part.
THROUGH_VIEWS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "slice": (
        lambda td: td[1:].__setitem__(0, make_record()),
        "through this view: it is one for the whole batch",
    ),
    "row": (lambda td: td[1].update_(make_record()), "through this view: it is one for the whole batch"),
    "unbind": (lambda td: td.unbind(0)[1].update_(make_record()), "through this view"),
    "split": (lambda td: td.split(1)[1].__setitem__(0, make_record()), "through this view"),
    "copy": (lambda td: td.copy().__setitem__(1, make_record()), "through this view"),
}


@pytest.mark.parametrize("name", [*FAILING, *THROUGH_VIEWS])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("kind", ["plain", "class"])
def test_failed_write_leaves_files_unchanged(kind: str, save: str, name: str, tmp_path: Path) -> None:
    td = SAVES[save](KINDS[kind](), str(tmp_path / "save"))
    write, message = {**FAILING, **THROUGH_VIEWS}[name]
    with pytest.raises((CodecError, StructureError), match=message):
        write(td)
    wanted = ([0, 0, 0], "abc", "xxx")
    assert read_columns(td) == read_columns(TensorDict.load_memmap(tmp_path / "save")) == wanted


def test_failed_write_to_stack_leaves_members_unchanged(tmp_path: Path) -> None:
    td = save_and_load(KINDS["stack"](), str(tmp_path / "save"))
    for name in FAILING:
        with pytest.raises(CodecError, match="cannot store the value"):
            FAILING[name][0](td)
    assert (
        read_columns(td)
        == read_columns(TensorDict.load_memmap(tmp_path / "save"))
        == ([0, 0, 0], "abc", "xxx")
    )


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_write_pickled_value_needs_allow_pickle(allow_pickle: bool, tmp_path: Path) -> None:
    make_rows().memmap(tmp_path / "save")
    td = TensorDict.load_memmap(tmp_path / "save", allow_pickle=allow_pickle)
    if not allow_pickle:
        with pytest.raises(CodecError, match=r"cannot write what is saved at .*label"):
            td.set_at_("label", complex, 1)
        return
    td.set_at_("label", complex, 1)
    found = TensorDict.load_memmap(tmp_path / "save", allow_pickle=True)
    assert found.get("label").tolist() == ["a", complex, "c"]


@pytest.mark.parametrize("archive", [False, True])
def test_write_with_mode_r_does_not_reach_files(archive: bool, tmp_path: Path) -> None:
    path = tmp_path / ("save.tdz" if archive else "save")
    make_rows().memmap(path)
    td = TensorDict.load_memmap(path, mode="r")
    td[1] = make_record()
    assert read_columns(td) == ([0, 1, 0], "aNc", "xyx")
    assert read_columns(TensorDict.load_memmap(path)) == ([0, 0, 0], "abc", "xxx")


@pytest.mark.parametrize(
    "name", ["td[i] = record", "update_", "set_", "get()[i]", "through a row", "load_state_dict"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_write_values_to_archive_raises_before_any_write(kind: str, name: str, tmp_path: Path) -> None:
    KINDS[kind]().memmap(tmp_path / "save.tdz")
    td = TensorDict.load_memmap(tmp_path / "save.tdz", mode="r+")
    with pytest.raises(
        StructureError, match=r"cannot write the values of .*save.tdz/.*: an archive is written in place"
    ):
        WRITES[name][0](td)
    wanted = ([0, 0, 0], "abc", "xxx")
    assert read_columns(td) == read_columns(TensorDict.load_memmap(tmp_path / "save.tdz")) == wanted
    td.update_({"image": torch.ones(3, 2)})
    assert read_columns(TensorDict.load_memmap(tmp_path / "save.tdz")) == ([1, 1, 1], "abc", "xxx")


def test_write_value_of_replaced_save_raises(tmp_path: Path) -> None:
    td = save_and_load(make_rows(), str(tmp_path / "save"))
    make_rows().memmap(tmp_path / "save")
    with pytest.raises(
        StructureError, match=r"cannot write a NonTensorStack: .*label holds something else by now"
    ):
        td[1] = make_record(one="x")
    assert (
        read_columns(td)
        == read_columns(TensorDict.load_memmap(tmp_path / "save"))
        == ([0, 0, 0], "abc", "xxx")
    )
    shutil.rmtree(tmp_path / "save")
    with pytest.raises(StructureError, match="holds something else by now"):
        td[1] = make_record(one="x")
    assert read_columns(td) == ([0, 0, 0], "abc", "xxx")


def test_write_value_that_became_stack_raises(tmp_path: Path) -> None:
    first, second = (
        save_and_load(make_rows(), str(tmp_path / "save")),
        TensorDict.load_memmap(tmp_path / "save"),
    )
    second.set_at_("one", "y", 1)
    with pytest.raises(
        StructureError, match="was replaced where it is saved, by a NonTensorStack: call memmap_refresh_"
    ):
        first[0] = make_record()
    assert read_columns(TensorDict.load_memmap(tmp_path / "save")) == ([0, 0, 0], "abc", "xyx")


def test_write_to_copy_does_not_reach_files(tmp_path: Path) -> None:
    td = save_and_load(make_rows(), str(tmp_path / "save"))
    for copy in (td.clone(), td[torch.tensor([0, 1, 2])], torch.stack([*td.unbind(0)]), td.to_tensordict()):
        copy[1] = make_record()
        assert read_columns(copy) == ([0, 1, 0], "aNc", "xyx")
    assert read_columns(TensorDict.load_memmap(tmp_path / "save")) == ([0, 0, 0], "abc", "xxx")


def test_set_inplace_value_keeps_batch_size(tmp_path: Path) -> None:
    data = TensorDict({"v": NonTensorData("a", batch_size=[3, 2]), "w": (1, {2: "b"})}, [3])
    td = save_and_load(data, str(tmp_path / "save"))
    td.set_("v", NonTensorData("c", batch_size=[3, 2]))
    td.set_("w", (3, {4: "d"}))
    found = TensorDict.load_memmap(tmp_path / "save")
    assert found.get("v").batch_size == (3, 2)
    assert [found.get("v").data, found["w"]] == ["c", (3, {4: "d"})]
    assert json.loads((tmp_path / "save" / "v" / "meta.json").read_text())["data"] == "c"
    assert sorted(os.listdir(tmp_path / "save")) == sorted(
        os.listdir(shutil.copytree(tmp_path / "save", tmp_path / "b"))
    )


#: Calls that map a loaded save again without moving it.
MAPPED_AGAIN: dict[str, Callable[[Any, str], Any]] = {
    "memmap_": lambda td, path: td.memmap_(),
    "memmap": lambda td, path: td.memmap(),
    "memmap at its prefix": lambda td, path: td.memmap(path),
    "memmap_ at its prefix": lambda td, path: td.memmap_(path),
}


@pytest.mark.parametrize("robust_key", [True, False])
@pytest.mark.parametrize("method", MAPPED_AGAIN)
@pytest.mark.parametrize("kind", KINDS)
def test_memmap_of_loaded_save_keeps_its_path(
    kind: str, method: str, robust_key: bool, tmp_path: Path
) -> None:
    KINDS[kind]().memmap(tmp_path / "save", robust_key=robust_key)
    td = MAPPED_AGAIN[method](TensorDict.load_memmap(tmp_path / "save"), str(tmp_path / "save"))
    assert td.is_memmap()
    assert td.saved_path == tmp_path / "save"
    td[1] = make_record()
    assert read_columns(TensorDict.load_memmap(tmp_path / "save")) == ([0, 1, 0], "aNc", "xyx")
    if kind == "plain":
        td.make_memmap("more", (3,)).fill_(2)
        assert TensorDict.load_memmap(tmp_path / "save")["more"].tolist() == [2, 2, 2]
        TensorDict.load_memmap(tmp_path / "save")[0] = {"label": "other"}
        assert list(td.memmap_refresh_()["label"]) == ["other", "new", "c"]


#: Changes after which a collection differs from its save.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "an entry more": lambda td: td.set("more", torch.ones(3)),
    "an entry less": lambda td: td.del_("image"),
    "another leaf": lambda td: td.set("image", torch.ones(3, 2)),
    "another value": lambda td: td.set("one", "other"),
    "a name": lambda td: setattr(td, "names", ["t"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_memmap_inplace_of_changed_save_has_no_path(change: str, tmp_path: Path) -> None:
    td = save_and_load(make_rows(), str(tmp_path / "save"))
    CHANGES[change](td)
    td.memmap_()
    assert td.is_memmap()
    assert td.saved_path is None
    assert read_columns(TensorDict.load_memmap(tmp_path / "save")) == ([0, 0, 0], "abc", "xxx")


def test_memmap_inplace_of_writable_archive_raises(tmp_path: Path) -> None:
    make_rows().memmap(tmp_path / "save.tdz")
    td = TensorDict.load_memmap(tmp_path / "save.tdz", mode="r+")
    for prefix in (None, tmp_path / "other"):
        with pytest.raises(
            td_memmap.FileTakenError, match=r"cannot map key 'image' to another file in place: .*save.tdz"
        ):
            td.memmap_(prefix)
    assert td.memmap(tmp_path / "copy").saved_path == tmp_path / "copy"
    assert td.memmap_(copy_existing=True).is_memmap()


def fill(td: Any) -> None:
    td["image"].fill_(3)


def test_write_to_archive_from_other_process_is_seen(tmp_path: Path) -> None:
    TensorDict({"image": torch.zeros(3), "b": torch.zeros(3)}).memmap(tmp_path / "save.tdz")
    td = TensorDict.load_memmap(tmp_path / "save.tdz", mode="r+")
    process = multiprocessing.get_context("spawn").Process(target=fill, args=(td,))
    process.start()
    process.join()
    assert (
        td["image"].tolist() == TensorDict.load_memmap(tmp_path / "save.tdz")["image"].tolist() == [3, 3, 3]
    )
    assert td["b"].tolist() == [0, 0, 0]


def test_load_archive_r_plus_unsupported_raises(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(100)}).memmap(tmp_path / "save.tdz", compression="deflate")
    with pytest.raises(
        PermissionError, match=r"cannot write into the entry 'a.memmap' of an archive: it is compressed"
    ):
        TensorDict.load_memmap(tmp_path / "save.tdz", mode="r+")
    assert TensorDict.load_memmap(tmp_path / "save.tdz", mode="r+", device="meta")["a"].is_meta
    with pytest.raises(ValueError, match=r"mode='r\+' maps the files, so that writes reach them"):
        TensorDict.load_memmap(tmp_path / "save.tdz", mode="r+", device="cuda")
