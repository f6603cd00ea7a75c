"""Files of tensordict and of other programs: groups, datasets, text, fields and links as collections."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import td_core
from td_core import FormatError, TensorDict, inspect, load, verify
from td_hdf5 import from_h5
from td_hdf5 import open as open_h5

HAS_VALUES = importlib.util.find_spec("td_tensorclass") is not None
needs_values = pytest.mark.skipif(not HAS_VALUES, reason="needs td-tensorclass")
GOLDEN = Path(__file__).parent / "fixtures" / "mixed.h5"


@needs_values
def test_golden_file_of_tensordict_is_what_was_saved() -> None:
    expected = json.loads(GOLDEN.with_suffix(".expected.json").read_text())["tree"]["entries"]
    found = load(GOLDEN)
    assert found.batch_size == (3,)  # tensordict itself loses it
    assert list(found.keys()) == list(expected)
    check_leaves(found, expected)
    assert (found["num"], found["s"], list(found["st"])) == (3, "abc", ["a", "b", "c"])
    assert found["n"].batch_size == (3, 4)
    assert found[1]["st"] == "b"


def check_leaves(found: Any, entries: Any) -> None:
    for key, row in entries.items():
        if row["kind"] == "tensordict":
            check_leaves(found[key], row["entries"])
        if row["kind"] != "tensor":
            continue
        leaf = found[key].contiguous()
        data = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).numpy().tobytes()
        assert (list(leaf.shape), str(leaf.dtype)) == (row["shape"], f"torch.{row['dtype']}")
        assert hashlib.sha256(data).hexdigest() == row["sha256"], key


@needs_values
def test_golden_file_opens_and_verifies() -> None:
    assert open_h5(GOLDEN)[[2, 0]]["a"].shape == (2, 2)
    assert from_h5(GOLDEN)["s"] == "abc"
    assert verify(GOLDEN).ok
    assert "num: NonTensorData" in str(inspect(GOLDEN))


def write(path: Path, fill: Callable[[h5py.File], Any]) -> Path:
    with h5py.File(path, "w") as file:
        fill(file)
    return path


ENUM = h5py.enum_dtype({"A": 0, "B": 1}, basetype="i2")

#: Datasets of other programs: what h5py writes, and the leaf.
NUMBERS: dict[str, tuple[Any, torch.Tensor]] = {
    "big endian": (np.arange(6, dtype=">i4").reshape(3, 2), torch.arange(6, dtype=torch.int32).view(3, 2)),
    "big endian float": (np.arange(3, dtype=">f8"), torch.arange(3, dtype=torch.float64)),
    "half": (np.arange(3, dtype="<f2"), torch.arange(3, dtype=torch.float16)),
    "bool": (np.array([True, False, True]), torch.tensor([True, False, True])),
    "unsigned": (np.arange(3, dtype="u4"), torch.arange(3).to(torch.uint32)),
    "complex": (np.array([1j, 2, 3], dtype="c16"), torch.tensor([1j, 2, 3], dtype=torch.complex128)),
    "big endian complex": (np.array([1j, 2, 3], dtype=">c8"), torch.tensor([1j, 2, 3])),
    "scalar": (np.float32(2.5), torch.tensor(2.5)),
    "no elements": (np.zeros((0, 3), dtype="f4"), torch.zeros(0, 3)),
    "enum": (np.array([1, 0, 1], dtype=ENUM), torch.tensor([1, 0, 1], dtype=torch.int16)),
}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"chunks": True, "compression": "gzip"}], ids=["contiguous", "chunks"]
)
@pytest.mark.parametrize("name", NUMBERS)
def test_dataset_of_numbers_is_a_leaf(name: str, options: Any, path: Path) -> None:
    data, expected = NUMBERS[name]
    if options and 0 in (np.ndim(data), np.size(data)):
        pytest.skip("HDF5 has no chunks for it")
    write(path, lambda file: file.create_dataset("n/x", data=data, **options))
    for found in (
        load(path)["n", "x"],
        load(path, strategy="read")["n", "x"],
        open_h5(path)["n", "x"].clone(),
    ):
        assert found.dtype is expected.dtype
        assert torch.equal(found.to(torch.complex128), expected.to(torch.complex128))
    if expected.ndim and len(expected):
        assert torch.equal(
            open_h5(path)["n", "x"][[2, 0]].to(torch.complex128), expected[[2, 0]].to(torch.complex128)
        )


def test_groups_are_nested_and_share_batch_dims(path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file["obs"] = np.zeros((5, 4, 3), "f4")
        file["reward"] = np.zeros((5, 4))
        file["info/step"] = np.arange(20).reshape(5, 4)
        file["meta/version"] = np.int64(1)
        file.create_group("empty")

    write(path, fill)
    assert load(path).batch_size == ()
    with h5py.File(path, "r+") as file:
        del file["meta"]
    found = load(path)
    assert (found.batch_size, found["info"].batch_size, found["empty"].batch_size) == ((5, 4), (5, 4), (5, 4))
    assert list(found.keys()) == [
        "empty",
        "info",
        "obs",
        "reward",
    ]  # the order of a file without creation order


@needs_values
@pytest.mark.parametrize(
    ("data", "value"),
    [
        ("text", "text"),
        (np.bytes_(b"fixed"), "fixed"),
        (np.array(["a", "b"], dtype=h5py.string_dtype()), ["a", "b"]),
        (np.array([b"ab", b"c"]), ["ab", "c"]),
        (np.array([["é", "b"]], dtype=h5py.string_dtype()), [["é", "b"]]),
    ],
    ids=repr,
)
def test_text_is_a_value(data: Any, value: Any, path: Path) -> None:
    write(path, lambda file: file.__setitem__("s", data))
    found = load(path)
    assert (found["s"], found.batch_size) == (value, ())


@needs_values
@pytest.mark.parametrize(("stacks", "kind"), [(True, "NonTensorStack"), (False, "NonTensorData")])
def test_text_for_each_row_is_a_stack_if_wanted(stacks: bool, kind: str, path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file["x"] = np.zeros((3, 2))
        file["y"] = np.zeros(3)
        file["s"] = np.array(["a", "b", "c"], dtype=h5py.string_dtype())

    write(path, fill)
    found = from_h5(path, non_tensor_as_stack=stacks)
    assert type(found.get("s")).__name__ == kind
    assert list(found["s"]) == ["a", "b", "c"]
    assert load(path)[2]["s"] == "c"


#: Datasets beside the text ``s`` of two rows, and the batch size that a load finds.
BESIDE_TEXT: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "one column": ({"a": np.array([1.0, 2.0])}, (2,)),
    "a matrix": ({"a": np.zeros((2, 3))}, (2,)),
    "two columns": ({"a": np.zeros((2, 3)), "b": np.zeros(2)}, (2,)),
    "nothing": ({}, ()),
}


@needs_values
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
@pytest.mark.parametrize(("beside", "found"), BESIDE_TEXT.values(), ids=BESIDE_TEXT)
def test_text_has_one_value_per_row_however_it_is_opened(
    beside: dict[str, Any], found: tuple[int, ...], nested: bool, path: Path
) -> None:
    prefix, key = ("n/", ("n", "s")) if nested else ("", "s")

    def fill(file: h5py.File) -> None:
        for name, data in {**beside, "s": np.array(["x", "y"], dtype=h5py.string_dtype())}.items():
            file[f"{prefix}{name}"] = data

    write(path, fill)
    for call in (load, open_h5, from_h5):
        data = call(path)
        assert data.batch_size == found
        assert list(data[key]) == ["x", "y"]
        assert not found or [row[key] for row in data.unbind(0)] == ["x", "y"]
    chosen = from_h5(path, batch_size=[2])
    assert [row[key] for row in chosen.unbind(0)] == ["x", "y"]
    assert from_h5(path, batch_size=[2], non_tensor_as_stack=False)[0][key] == ["x", "y"]


def test_fields_of_a_dataset_are_a_collection(path: Path) -> None:
    fields = np.array([(1, 2.0), (3, 4.0)], dtype=[("i", ">i4"), ("f", "f8")])
    write(path, lambda file: file.__setitem__("table", fields))
    for found in (load(path), open_h5(path), from_h5(path)):
        assert found["table", "i"].tolist() == [1, 3]
        assert found["table", "f"].dtype is torch.float64
        assert found["table"].batch_size == (2,)


def make_virtual(name: str) -> h5py.VirtualLayout:
    """Return the layout of a dataset of one row whose elements are in another file."""
    layout = h5py.VirtualLayout((1,), "f4")
    layout[:] = h5py.VirtualSource(name, "s", (1,), "f4")
    return layout


#: What a collection cannot have: how it is written, and the message.
LEFT_OUT: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "empty": (lambda file: file.__setitem__("x", h5py.Empty("f4")), "it has no elements and no shape"),
    "dangling": (lambda file: file.__setitem__("x", h5py.SoftLink("/nope")), "it is a link to '/nope', which does not exist"),
    "other file": (lambda file: file.__setitem__("x", h5py.ExternalLink("o.h5", "/a")), "it is a link to another file, 'o.h5'"),
    "external": (
        lambda file: file.create_dataset("x", (2,), "f4", external=[("o.bin", 0, 8)]),
        "its elements are in another file, 'o.bin'",
    ),
    "virtual": (lambda file: file.create_virtual_dataset("x", make_virtual("o.h5")), "it is virtual, its elements are those of"),
    "cycle": (lambda file: file.__setitem__("x", file["/"]), "it is a group that contains itself"),
    "long double": (lambda file: file.__setitem__("x", np.zeros(2, np.longdouble)), "torch has no dtype for"),
    "reference": (
        lambda file: file.__setitem__("x", np.array([file.ref], dtype=h5py.ref_dtype)),
        "torch has no dtype for object",
    ),
    "lists in lists": (
        lambda file: file.create_dataset("x", (2, 2), h5py.vlen_dtype(np.int32)),
        "h5py does not convert its vectors",
    ),
    "other byte order": (
        lambda file: file.create_dataset("x", (2,), h5py.vlen_dtype(np.dtype(">i4"))),
        "h5py does not convert its vectors",
    ),
    "type": (lambda file: file.__setitem__("x", np.dtype("f4")), "it is a datatype"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_collection_cannot_have_is_left_out(name: str, path: Path) -> None:
    fill, message = LEFT_OUT[name]
    write(path, lambda file: (fill(file), file.__setitem__("a", np.zeros(2))))
    for read in (load, open_h5):
        with pytest.warns(UserWarning, match=message):
            assert list(read(path).keys()) == ["a"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list(read(path, strict=False).keys()) == ["a"]
        with pytest.raises(FormatError, match=f"data.h5: '/x' is not a part of the collection: {message}"):
            read(path, strict=True)


def test_link_in_the_file_is_a_leaf(path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file["a"] = np.arange(3)
        file["soft"] = h5py.SoftLink("/a")
        file["hard"] = file["a"]

    write(path, fill)
    found = load(path)
    assert [found[key].tolist() for key in ("a", "soft", "hard")] == [[0, 1, 2]] * 3


def test_foreign_file_is_changed_in_place(path: Path, same: Any) -> None:
    def fill(file: h5py.File) -> None:
        file["x"] = np.zeros((3, 2))
        file["n/y"] = np.arange(3)

    write(path, fill)
    stored = from_h5(path, mode="r+")
    stored["n", "y"] += 1
    assert h5py.File(path)["n/y"][()].tolist() == [1, 2, 3]
    stored["n", "new"] = torch.ones(3)
    del stored["x"]
    expected = TensorDict({"n": {"y": torch.arange(3) + 1, "new": torch.ones(3)}}, [3])
    same(load(path), expected)
    with h5py.File(path) as file:
        assert sorted(file["n"]) == ["new", "y"]
        assert list(file) == ["n"]


@needs_values
def test_text_of_foreign_file_stays_after_a_change(path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file["x"] = np.zeros(3)
        file["s"] = "text"
        file["gone"] = h5py.SoftLink("/nope")

    write(path, fill)
    assert td_core.open(path, strict=False)["s"] == "text"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = from_h5(path, mode="r+")
    stored["y"] = torch.ones(3)
    assert load(path)["s"] == "text"
    del stored["s"]
    with h5py.File(path) as file:
        assert sorted(file.keys()) == ["gone", "x", "y"]
    assert sorted(load(path).keys()) == ["x", "y"]


def test_file_with_a_block_before_is_recognised(path: Path) -> None:
    with h5py.File(path, "w", userblock_size=1024) as file:
        file["a"] = np.arange(3)
    assert load(path)["a"].tolist() == [0, 1, 2]
    assert load(path, strategy="read")["a"].tolist() == [0, 1, 2]
    assert open_h5(path)["a"][[2]].tolist() == [2]


def test_attribute_names_a_dtype_that_hdf5_lacks(path: Path) -> None:
    leaf = torch.tensor([1.0, 0.5]).bfloat16()

    def fill(file: h5py.File) -> None:
        file["x"] = leaf.view(torch.uint16).numpy()
        file["x"].attrs["td_dtype"] = "bfloat16"

    write(path, fill)
    assert load(path)["x"].dtype is torch.bfloat16
    assert open_h5(path)["x"][[1]].tolist() == [0.5]


def test_dataset_that_another_program_added_is_an_error(path: Path, td: TensorDict) -> None:
    td_core.save(td, path, format="hdf5")
    with h5py.File(path, "r+") as file:
        file["n/new"] = np.zeros(4)
    with pytest.raises(
        FormatError, match=r"the group '/n' has 3 entries, the header lists 2; another program changed it"
    ):
        load(path)
    assert list(load(path, strict=False)["n"].keys()) == ["b", "c", "new"]


def test_dataset_that_another_program_replaced_is_an_error(path: Path, td: TensorDict) -> None:
    td_core.save(td, path, format="hdf5")
    with h5py.File(path, "r+") as file:
        del file["a"]
        file["a"] = np.zeros(7)
    with pytest.raises(
        FormatError, match=r"the dataset 'a' has the dtype torch.float64 and the shape \[7\]; its header has"
    ):
        load(path)
    with pytest.raises(FormatError, match="open the file again"):
        open_h5(path)["a"].clone()
    assert not verify(path).ok


def test_elements_that_another_program_wrote_are_loaded(path: Path, td: TensorDict) -> None:
    td_core.save(td, path, format="hdf5")
    opened = open_h5(path)
    assert opened["a"].sum() == 66
    td_core.save(td, path, format="hdf5", chunks=1, compression="gzip")
    opened = open_h5(path)
    assert opened["a"].sum() == 66
    del opened
    with h5py.File(path, "r+") as file:
        file["a"][1] = 0
    assert load(path)["a"][1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.float64, torch.int16], ids=str)
def test_leaf_at_any_byte_of_a_file_is_aligned(dtype: torch.dtype, path: Path) -> None:
    elements = torch.arange(300).to(dtype)
    starts = set()
    for pad in range(1, 65):
        with h5py.File(path, "w") as file:
            file["pad"] = np.zeros(pad, np.uint8)
            starts.add(file.create_dataset("x", data=elements.numpy()).id.get_offset() % 16)
        for leaf in (load(path)["x"], td_core.open(path, mode="r+")["x"].clone()):
            assert leaf.data_ptr() % dtype.itemsize == 0
            assert torch.equal(leaf, elements)
    assert len(starts) > 8


def link_through(target: str) -> Callable[[h5py.File], None]:
    """Return a function that adds a link in the file, which leads through one to another file, instead of ``x``."""

    def fill(file: h5py.File) -> None:
        file["between"] = h5py.ExternalLink("secret.h5", "/")
        file["x"] = h5py.SoftLink(f"/between/{target}")

    return fill


#: How the entry ``x`` of a file gets elements that are in another one.
ELSEWHERE: dict[str, Callable[[h5py.File], Any]] = {
    "external": lambda file: file.create_dataset("x", (1,), "f4", external=[("secret.bin", 0, 4)]),
    "virtual": lambda file: file.create_virtual_dataset("x", make_virtual("secret.h5")),
    "external link": lambda file: file.__setitem__("x", h5py.ExternalLink("secret.h5", "/s")),
    "dataset": link_through("s"),
    "group": link_through("g"),
    "text": link_through("t"),
}


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    """Write elements that no save may read or change, in the working directory."""
    monkeypatch.chdir(tmp_path)
    elements = np.array([7777.25], "f4")
    elements.tofile("secret.bin")
    with h5py.File("secret.h5", "w") as file:
        file["s"], file["g/s"], file["t"] = elements, elements, "7777"
    return elements


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elements_of_another_file_are_left_out_of_every_reader(
    name: str, path: Path, secret: np.ndarray[Any, Any]
) -> None:
    write(path, lambda file: (ELSEWHERE[name](file), file.__setitem__("n/a", np.zeros(2))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in (load(path), open_h5(path), from_h5(path), TensorDict.from_any(h5py.File(path))):
            assert list(found.keys()) == ["n"]
        assert verify(path).ok
        assert "x" not in inspect(path).children
    with pytest.raises(FormatError, match="'/(x|between)' is not a part of the collection"):
        load(path, strict=True)


@pytest.mark.parametrize("name", ["external", "virtual", "external link"])
def test_elements_of_another_file_in_a_save_raise(
    name: str, path: Path, secret: np.ndarray[Any, Any]
) -> None:
    td_core.save(TensorDict({"x": torch.zeros(1)}, [1]), path, format="hdf5")
    with h5py.File(path, "r+") as file:
        del file["x"]
        ELSEWHERE[name](file)
    reads: dict[str, Callable[[], Any]] = {
        "load": lambda: load(path),
        "load without strict": lambda: load(path, strict=False),
        "read": lambda: open_h5(path)["x"].clone(),
        "write": lambda: open_h5(path, mode="r+")["x"].fill_(1),
        "append": lambda: td_core.append(TensorDict({"x": torch.zeros(1)}, [1]), path),
        "inspect": lambda: inspect(path),
    }
    for read in reads.values():
        with pytest.raises(FormatError, match="the dataset 'x' is not read: "):
            read()
    assert "is not read" in str(verify(path))
    assert np.fromfile("secret.bin", "f4") == h5py.File("secret.h5")["s"][()] == secret


#: What is converted of an open file, and the path of the leaf ``[[0, 1, 2], [3, 4, 5]]`` in the result.
CONVERTED: dict[str, tuple[Callable[[h5py.File], Any], Any]] = {
    "file": (lambda file: file, ("n", "a")),
    "group": (lambda file: file["n"], "a"),
    "file below a dict": (lambda file: {"log": file, "step": torch.tensor(4)}, ("log", "n", "a")),
    "dataset below a dict": (lambda file: {"x": {"y": file["n/a"]}}, ("x", "y")),
    "dataset of a tuple": (lambda file: (file["n/a"], 1), "0"),
    "group of a tuple": (lambda file: (1, file["n"]), ("1", "a")),
    "datasets of a list": (lambda file: {"x": [file["n/a"]]}, "x"),
    "groups of a list": (lambda file: {"x": [file["n"]]}, ("x", "a")),
    "chunks": (lambda file: {"x": file["chunks"]}, "x"),
    "fields": (lambda file: {"x": file["table"]}, ("x", "f")),
}


@pytest.mark.parametrize("where", ["file", "open for writing", "memory"])
@pytest.mark.parametrize("name", CONVERTED)
def test_from_any_reads_open_files_before_they_are_closed(name: str, where: str, path: Path) -> None:
    elements = np.arange(6, dtype="f4").reshape(2, 3)

    def fill(file: h5py.File) -> None:
        file["n/a"] = elements
        file.create_dataset("chunks", data=elements, chunks=(1, 3), compression="gzip")
        file["table"] = np.array(list(map(tuple, elements)), [("f", "f4"), ("g", "f4"), ("h", "f4")])

    options = {"driver": "core", "backing_store": False} if where == "memory" else {}
    if where == "file":
        write(path, fill)
    with h5py.File(path, "r" if where == "file" else "w", **options) as file:
        if where != "file":
            fill(file)
        choose, key = CONVERTED[name]
        found = TensorDict.from_any(choose(file))
    leaf = found[key]
    assert type(leaf) is torch.Tensor
    expected = torch.from_numpy(elements)
    assert torch.equal(leaf.reshape(-1), (expected[:, 0] if name == "fields" else expected).reshape(-1))
    with h5py.File(path, "w"):  # it is not open in this process any more
        pass
    assert leaf.sum() == (3 if name == "fields" else 15)


def test_from_any_of_a_dataset_is_its_tensor_or_value(path: Path) -> None:
    write(path, lambda file: (file.__setitem__("a", np.arange(3)), file.__setitem__("x", np.zeros(2, "g"))))
    with h5py.File(path) as file:
        assert td_core.from_any(file["a"]).tolist() == [0, 1, 2]
        assert TensorDict({"a": file["a"], "b": {"c": file["a"]}}, [3])["b", "c"].tolist() == [0, 1, 2]
        with pytest.raises(FormatError, match="'/x' is not a part of the collection: torch has no dtype"):
            td_core.from_any({"x": file["x"]})


@pytest.mark.parametrize("depth", [45, 4])
def test_groups_that_are_linked_twice_are_bounded(
    depth: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TD_MAX_NODES", "100")
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(depth):
            below = group.create_group("a")
            group["b"] = below
            group = below
        group["x"] = np.zeros(2)
    if depth == 4:
        assert len(list(load(path).keys(True, True))) == 2**depth
        return
    for read in (load, inspect, td_core.open):
        with pytest.raises(FormatError, match=r"describes more than \d+ nodes and leaves.*TD_MAX_NODES"):
            read(path)
