"""Pickles name only public modules, and those of earlier releases still load."""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import Buffer, LinkedList, TensorDict, TensorDictParams, errors, lazy_stack
from td_core.spi import Record, encode

pytest.importorskip("td_store")

from td_store import StoredTensor
from td_store.testing import RawFile

td_memmap = pytest.importorskip("td_memmap")
td_tensorclass = pytest.importorskip("td_tensorclass")
td_distributed = pytest.importorskip("td_distributed")

#: Pickles written by ``write_golden`` below at an earlier commit; those of files by one that named private modules.
GOLDEN = Path(__file__).parent / "golden"
#: Placeholder for the folder of mapped files in golden pickles. Protocol 0 is text, so it can be replaced.
FOLDER = "/golden/folder"
CLASSES = "golden_classes"
PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def define_classes() -> types.ModuleType:
    """Return a module of classes with the module name that the golden files contain."""
    namespace = {"__module__": CLASSES}
    point = {**namespace, "__annotations__": {"xy": torch.Tensor, "label": str}, "label": "none"}
    typed = {**namespace, "__annotations__": {"a": torch.Tensor}}
    module = types.ModuleType(CLASSES)
    sys.modules[CLASSES] = module
    module.Point = type("Point", (td_tensorclass.TensorClass,), point)
    module.Typed = type("Typed", (td_tensorclass.TypedTensorDict,), typed)
    return module


golden = define_classes()


def make_tensordict() -> TensorDict:
    data = {"a": torch.arange(3.0), "n": {"b": torch.ones(3, 2, dtype=torch.int16)}}
    return TensorDict(data, batch_size=[3], names=["time"])


def make_point() -> Any:
    return golden.Point(torch.ones(3, 2), "here", batch_size=[3])


def make_params() -> TensorDictParams:
    return TensorDictParams(TensorDict(w=torch.ones(2), b=Buffer(torch.zeros(2))))


def make_values() -> TensorDict:
    return TensorDict({"s": "text", "l": [1, 2], "x": torch.ones(2)}, batch_size=[])


def open_store(folder: Path, mode: str) -> Any:
    """Open the leaves of a save that other processes read and write."""
    td_safetensors = pytest.importorskip("td_safetensors")
    td_safetensors.save(make_tensordict(), folder / "opened.safetensors")
    return td_safetensors.open(folder / "opened.safetensors", mode=mode)


def store_raw(folder: Path, mode: str) -> TensorDict:
    """Return a collection with a stored tensor."""
    source = RawFile.create(folder / "raw.bin", torch.ones(3))
    return TensorDict({"a": StoredTensor(source, mode=mode)})


COLLECTIONS: dict[str, Callable[[], Any]] = {
    "tensordict": make_tensordict,
    "lazy_stack": lambda: lazy_stack([make_tensordict(), make_tensordict()], 1),
    "uneven_stack": lambda: lazy_stack([TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))]),
    "params": make_params,
    "tensorclass": make_point,
    "typed": lambda: golden.Typed(a=torch.ones(3)),
    "non_tensor_data": lambda: td_tensorclass.NonTensorData("text", batch_size=[2]),
    "non_tensor_stack": lambda: td_tensorclass.NonTensorStack("a", "b"),
    "values": make_values,
    "metadata": lambda: td_tensorclass.MetaData("text"),
    "typed_metadata": lambda: td_tensorclass.MetaData[str]("text"),
    "unbatched": lambda: TensorDict(u=td_tensorclass.UnbatchedTensor(torch.ones(4)), batch_size=[2]),
    "shared_leaf": lambda: TensorDict(dict.fromkeys("ab", torch.ones(3))),
    "views": lambda: TensorDict(a=torch.arange(4.0)[1:], b=torch.arange(6).view(2, 3).t()),
    "consolidated": lambda: make_tensordict().consolidate(),
    "consolidated_tensorclass": lambda: make_point().consolidate(),
    "consolidated_stack": lambda: lazy_stack([make_tensordict(), make_tensordict()]).consolidate(),
    "anonymous_files": lambda: make_tensordict().memmap_(),
    "jagged": lambda: TensorDict(
        j=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), batch_size=[2]
    ),
}
LEAVES: dict[str, Callable[[], Any]] = {
    "buffer": lambda: Buffer(torch.ones(2), persistent=False),
    "unbatched_leaf": lambda: td_tensorclass.UnbatchedTensor(torch.ones(4), batch_size=[2]),
    "anonymous_file": lambda: td_memmap.MemoryMappedTensor.from_tensor(torch.ones(3)),
}
MAPPED: dict[str, Callable[[Path], Any]] = {
    "mapped": lambda folder: make_tensordict().memmap(folder / "mapped"),
    "mapped_tensorclass": lambda folder: make_point().memmap(folder / "mapped_tensorclass"),
    "mapped_leaf": lambda folder: td_memmap.MemoryMappedTensor.from_tensor(
        torch.ones(3), filename=folder / "mapped_leaf"
    ),
    "mapped_view": lambda folder: td_memmap.MemoryMappedTensor.from_tensor(
        torch.arange(4.0), filename=folder / "mapped_view"
    )[1::2],
}
MADE = {**COLLECTIONS, **LEAVES}


SAFE = {
    "consolidated", "consolidated_stack", "lazy_stack", "metadata", "non_tensor_data", "non_tensor_stack", "shared_leaf",
    "tensordict", "unbatched", "unbatched_leaf", "uneven_stack", "values", "views",
}  # fmt: skip
RECORDS: dict[str, Callable[[Path], Any]] = {
    "encoded": lambda folder: encode(make_tensordict()),
    "record": lambda folder: Record({}),
    "linked_list": lambda folder: LinkedList([1, 2]),
    "pack_layout": lambda folder: TensorDict(a=torch.ones(2)).pack()[1],
    "report": lambda folder: td_memmap.verify(folder / "saved"),
    "tree": lambda folder: td_memmap.inspect(folder / "saved"),
    "metadata_class": lambda folder: td_tensorclass.MetaData[str],
    "stateful": lambda folder: td_distributed.DistributedStateful(make_tensordict()),
    "core_error": lambda folder: errors.StructureError("x"),
    "memmap_error": lambda folder: td_memmap.AppendError("x"),
    "tensorclass_error": lambda folder: td_tensorclass.UnknownFieldError("x"),
    "state_dict": lambda folder: make_values().state_dict(),
    "module": lambda folder: torch.nn.ModuleDict({"td": make_params()}),
    "file_consolidated": lambda folder: make_tensordict().consolidate(folder / "consolidated"),
}
PICKLED: dict[str, Callable[[Path], Any]] = {
    **{name: lambda folder, make=make: make() for name, make in MADE.items()},
    **MAPPED,
    **RECORDS,
    **{f"opened {mode}": partial(open_store, mode=mode) for mode in ("r", "r+", "c")},
    **{f"stored {mode}": partial(store_raw, mode=mode) for mode in ("r", "r+", "c")},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a saved collection."""
    make_tensordict().memmap(tmp_path / "saved")
    return tmp_path


def names_in(data: bytes) -> set[str]:
    """Return the names of the project's classes and functions that a pickle imports."""
    found, texts, memo = set(), [], []
    for op, arg, _ in pickletools.genops(data):
        if op.name == "GLOBAL":
            found.add(arg.replace(" ", "."))
        elif op.name == "STACK_GLOBAL":
            found.add(f"{texts[-2]}.{texts[-1]}")
        if op.name == "MEMOIZE":
            memo.append(texts[-1] if texts else "")
        elif op.name in ("BINGET", "LONG_BINGET") and arg < len(memo):
            texts.append(memo[arg])
        elif isinstance(arg, str):
            texts.append(arg)
    return {name for name in found if name.startswith(("td_", "td."))}


def assert_public(data: bytes) -> None:
    private = {name for name in names_in(data) if any(part.startswith("_") for part in name.split("."))}
    assert private == set()


def assert_same(loaded: Any, expected: Any) -> None:
    assert type(loaded) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(torch.Tensor(loaded), torch.Tensor(expected))
        return
    assert loaded.batch_size == expected.batch_size
    assert loaded.is_memmap() == expected.is_memmap()
    assert loaded.is_consolidated() == expected.is_consolidated()
    leaves, others = loaded._leaves(), expected._leaves()
    assert len(leaves) == len(others)
    for leaf, other in zip(leaves, others):
        assert type(leaf) is type(other)
        assert leaf.dtype == other.dtype
        pairs = zip(leaf.unbind(), other.unbind()) if other.is_nested else [(leaf, other)]
        assert all(torch.equal(one, two) for one, two in pairs)
    if isinstance(expected, td_tensorclass.NonTensorDataBase | td_tensorclass.NonTensorStack):
        assert loaded.tolist() == expected.tolist()


@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_pickle_names_only_public_modules(name: str, protocol: int, folder: Path) -> None:
    try:
        data = pickle.dumps(PICKLED[name](folder), protocol)
    except TypeError as error:  # protocols 0 and 1 do not support __slots__
        assert protocol < 2
        assert "__slots__" in str(error)
    else:
        assert_public(data)


@pytest.mark.parametrize("name", PICKLED)
def test_forking_pickle_names_only_public_modules(name: str, folder: Path) -> None:
    assert_public(bytes(ForkingPickler.dumps(PICKLED[name](folder))))


@pytest.mark.parametrize("anonymous", [True, False])
def test_forking_pickle_of_storage_names_only_public_modules(anonymous: bool, folder: Path) -> None:
    mapped = td_memmap.MemoryMappedTensor.from_tensor(
        torch.ones(3), filename=None if anonymous else folder / "file"
    )
    data = bytes(ForkingPickler.dumps(mapped.as_subclass(torch.Tensor)))
    assert names_in(data)
    assert_public(data)


@pytest.mark.parametrize("name", PICKLED)
def test_torch_save_names_only_public_modules(name: str, folder: Path) -> None:
    file = io.BytesIO()
    torch.save(PICKLED[name](folder), file)
    with zipfile.ZipFile(file) as archive:
        (inner,) = [entry for entry in archive.namelist() if entry.endswith("data.pkl")]
        assert_public(archive.read(inner))


def test_pickle_tensordict_names_functions_of_td_core_pickles() -> None:
    names = names_in(pickle.dumps(make_tensordict()))
    assert names == {"td_core.pickles.rebuild_collection", "td_core.pickles.unpack_leaves"}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("file", ["2.pkl", "4.pkl", "pt"])
def test_load_pickle_of_earlier_release_equals_source(name: str, file: str) -> None:
    path = GOLDEN / f"{name}.{file}"
    if file == "pt":
        loaded = torch.load(path, weights_only=False)
    else:
        loaded = pickle.loads(path.read_bytes())
    assert_same(loaded, MADE[name]())


@pytest.mark.parametrize("name", sorted(SAFE))
def test_load_weights_only_of_earlier_release_equals_source(name: str) -> None:
    if name == "unbatched_leaf" and torch.__version__ < "2.6":
        pytest.skip("this torch cannot allow a second name of a class")
    assert_same(torch.load(GOLDEN / f"{name}.pt", weights_only=True), MADE[name]())


@pytest.mark.parametrize("name", sorted(SAFE))
def test_load_weights_only_new_file_equals_source(name: str) -> None:
    file = io.BytesIO()
    torch.save(MADE[name](), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), MADE[name]())


@pytest.mark.parametrize("name", MAPPED)
def test_load_mapped_pickle_of_earlier_release_maps_file(name: str, folder: Path) -> None:
    expected = MAPPED[name](folder)
    text = (GOLDEN / f"{name}.0.pkl").read_bytes()
    loaded = pickle.loads(text.replace(FOLDER.encode(), str(folder).encode()))
    assert_same(loaded, expected)
    leaves = [loaded] if isinstance(loaded, torch.Tensor) else loaded._leaves()
    assert all(str(leaf.filename).startswith(str(folder)) for leaf in leaves)


def write_golden() -> None:
    """Write the golden files. Those in the repository were written by an earlier release."""
    GOLDEN.mkdir(exist_ok=True)
    for name, make in MADE.items():
        for protocol in (2, 4):
            (GOLDEN / f"{name}.{protocol}.pkl").write_bytes(pickle.dumps(make(), protocol))
        torch.save(make(), GOLDEN / f"{name}.pt")
    with tempfile.TemporaryDirectory() as folder:
        for name, make_in in MAPPED.items():
            text = pickle.dumps(make_in(Path(folder)), 0)
            (GOLDEN / f"{name}.0.pkl").write_bytes(text.replace(folder.encode(), FOLDER.encode()))


if __name__ == "__main__":
    write_golden()
