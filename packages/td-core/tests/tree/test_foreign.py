"""Arrays and tables of other libraries: coercers in every way of writing, their errors, DLPack, buffers, and masks."""

from __future__ import annotations

import array
import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from td_core import (
    MissingPluginError,
    StructureError,
    TensorDict,
    TensorDictParams,
    cat,
    from_any,
    from_pytree,
    lazy_stack,
    make_tensordict,
    maybe_dense_stack,
    stack,
)
from td_core._python.type_names import NamedTypes
from td_core._tree.coerce import COERCERS
from td_core._tree.foreign import PACKAGES
from td_core.errors import BatchSizeError, FormatError
from td_core.spi import Coercer, hookimpl
from td_core.testing import installed


@dataclass
class Frame:
    """A table of another library, with a column ``x``."""

    values: list[int]


class Column:
    """A column of another library."""

    def __init__(self, *values: int) -> None:
        self.values = [*values]


class Plugin:
    """Converts tables to collections and columns to tensors."""

    @hookimpl
    def td_coercers(self) -> list[Coercer]:
        return [
            Coercer(
                (Frame,), lambda frame, size, device: TensorDict({"x": frame.values}, [len(frame.values)])
            ),
            Coercer((Column,), lambda column, size, device: torch.tensor(column.values)),
        ]


@pytest.fixture
def plugin() -> Iterator[None]:
    with installed(Plugin()):
        yield


def make_target() -> TensorDict:
    return TensorDict({"x": torch.zeros(3), "n": {"x": torch.zeros(3)}}, [3])


def apply(write: Callable[[Any], Any]) -> Any:
    target = make_target()
    result = write(target)
    return target if result is None else result


COLUMN = Column(1, 2, 3)
FRAME = Frame([1, 2, 3])
BEGIN = slice(0, 2)
#: A write of a table or column into a collection with the leaves ``x`` and ``n.x`` of three zeros, and the key that it changes.
WRITES: dict[str, tuple[Callable[[Any], Any], Any, list[int]]] = {
    "slice of frame": (lambda td: td.__setitem__(BEGIN, Frame([1, 2])), "x", [1, 2, 0]),
    "row of frame": (lambda td: td.__setitem__(slice(2, 3), Frame([7])), "x", [0, 0, 7]),
    "positions of frame": (lambda td: td.__setitem__(torch.tensor([2, 0]), Frame([1, 2])), "x", [2, 0, 1]),
    "mask of frame": (lambda td: td.__setitem__(torch.tensor([True, False, True]), Frame([1, 2])), "x", [1, 0, 2]),
    "slice of column": (lambda td: td.__setitem__(BEGIN, {"x": Column(1, 2)}), "x", [1, 2, 0]),
    "slice of nested frame": (lambda td: td.__setitem__(BEGIN, {"n": Frame([1, 2])}), ("n", "x"), [1, 2, 0]),
    "slice of new frame": (lambda td: td.__setitem__(BEGIN, {"new": Frame([1, 2])}), ("new", "x"), [1, 2, 0]),
    "slice of new column": (lambda td: td.__setitem__(BEGIN, {"new": Column(1, 2)}), "new", [1, 2, 0]),
    "key": (lambda td: td.__setitem__("x", COLUMN), "x", [1, 2, 3]),
    "new key": (lambda td: td.__setitem__(("m", "y"), COLUMN), ("m", "y"), [1, 2, 3]),
    "key of frame": (lambda td: td.__setitem__("n", FRAME), ("n", "x"), [1, 2, 3]),
    "set": (lambda td: td.set("f", FRAME), ("f", "x"), [1, 2, 3]),
    "set_ of column": (lambda td: td.set_("x", COLUMN), "x", [1, 2, 3]),
    "set_ of frame": (lambda td: td.set_("n", FRAME), ("n", "x"), [1, 2, 3]),
    "set_at_ of column": (lambda td: td.set_at_("x", Column(1, 2), BEGIN), "x", [1, 2, 0]),
    "set_at_ of frame": (lambda td: td.set_at_("n", Frame([1, 2]), BEGIN), ("n", "x"), [1, 2, 0]),
    "setdefault": (lambda td: td.set("y", td.setdefault("y", COLUMN)), "y", [1, 2, 3]),
    "update of frame": (lambda td: td.update(FRAME), "x", [1, 2, 3]),
    "update of nested frame": (lambda td: td.update({"n": FRAME}), ("n", "x"), [1, 2, 3]),
    "update of column": (lambda td: td.update({"x": COLUMN}), "x", [1, 2, 3]),
    "update by keyword": (lambda td: td.update(x=COLUMN), "x", [1, 2, 3]),
    "update in place": (lambda td: td.update(FRAME, inplace=True), "x", [1, 2, 3]),
    "update nested in place": (lambda td: td.update({"n": FRAME}, inplace=True), ("n", "x"), [1, 2, 3]),
    "update of some keys": (lambda td: td.update(FRAME, keys_to_update=["x"]), "x", [1, 2, 3]),
    "update_": (lambda td: td.update_(FRAME), "x", [1, 2, 3]),
    "update_ of nested": (lambda td: td.update_({"n": FRAME}), ("n", "x"), [1, 2, 3]),
    "update_ of column": (lambda td: td.update_({"x": COLUMN}), "x", [1, 2, 3]),
    "update_at_": (lambda td: td.update_at_(Frame([1, 2]), BEGIN), "x", [1, 2, 0]),
    "update_at_ of some keys": (lambda td: td.update_at_(Frame([1, 2]), BEGIN, keys_to_update=["x"]), "x", [1, 2, 0]),
    "update_at_ of nested": (lambda td: td.update_at_({"n": Frame([1, 2])}, BEGIN), ("n", "x"), [1, 2, 0]),
    "update_at_ of column": (lambda td: td.update_at_({"x": Column(1, 2)}, BEGIN), "x", [1, 2, 0]),
    "replace": (lambda td: td.replace(FRAME), "x", [1, 2, 3]),
    "replace by keyword": (lambda td: td.replace(x=COLUMN), "x", [1, 2, 3]),
}  # fmt: skip


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", WRITES)
def test_write_of_foreign_object_asks_its_coercer(name: str) -> None:
    write, key, expected = WRITES[name]
    result = apply(write)
    assert result[key].tolist() == expected
    others = [other for other in ("x", ("n", "x")) if other != key]
    assert all(result[other].tolist() == [0, 0, 0] for other in others)


@pytest.mark.usefixtures("plugin")
def test_update_merges_nested_frame_as_a_mapping() -> None:
    td = TensorDict({"n": {"y": torch.ones(3)}}, [3])
    assert {*td.update({"n": FRAME})["n"].keys()} == {"x", "y"}


@pytest.mark.usefixtures("plugin")
def test_update_at_with_new_key_of_frame_raises() -> None:
    with pytest.raises(KeyError, match="'x' not found"):
        TensorDict({"a": torch.zeros(3)}, [3]).update_at_(Frame([1, 2]), BEGIN)


#: A way to build a collection, a key, and the elements under it.
BUILDS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "constructor": (lambda: TensorDict({"a": FRAME, "b": COLUMN}, [3]), ("a", "x"), [1, 2, 3]),
    "constructor of a frame": (lambda: TensorDict(FRAME, [3]), "x", [1, 2, 3]),
    "constructor of a list": (lambda: TensorDict({"a": [FRAME, FRAME]}), ("a", "x"), [[1, 2, 3]] * 2),
    "list of columns": (lambda: TensorDict({"a": [COLUMN, COLUMN]}), "a", [[1, 2, 3]] * 2),
    "parameters": (lambda: TensorDictParams(TensorDict({"a": FRAME}), no_convert=True), ("a", "x"), [1, 2, 3]),
    "from_dict": (lambda: TensorDict.from_dict({"a": {"b": FRAME}}), ("a", "b", "x"), [1, 2, 3]),
    "from_dict of a frame": (lambda: TensorDict.from_dict(FRAME), "x", [1, 2, 3]),
    "from_any": (lambda: from_any(FRAME), "x", [1, 2, 3]),
    "from_any nested": (lambda: from_any({"a": (COLUMN, 2)}), ("a", "0"), [1, 2, 3]),
    "from_pytree": (lambda: from_any({"a": FRAME}), ("a", "x"), [1, 2, 3]),
    "from_list": (lambda: TensorDict.from_list([FRAME, Frame([4, 5, 6])]), "x", [[1, 2, 3], [4, 5, 6]]),
    "from_tuple": (lambda: TensorDict.from_tuple((FRAME, COLUMN)), ("0", "x"), [1, 2, 3]),
    "fromkeys": (lambda: TensorDict.fromkeys(["a"], COLUMN), "a", [1, 2, 3]),
    "make_tensordict": (lambda: make_tensordict(a=FRAME), ("a", "x"), [1, 2, 3]),
    "make_tensordict of a frame": (lambda: make_tensordict(FRAME), "x", [1, 2, 3]),
    "stack": (lambda: stack([FRAME, Frame([4, 5, 6])]), "x", [[1, 2, 3], [4, 5, 6]]),
    "stack beside a collection": (lambda: stack([TensorDict(FRAME, [3]), FRAME]), "x", [[1, 2, 3]] * 2),
    "lazy_stack": (lambda: lazy_stack([FRAME, FRAME]), "x", [[1, 2, 3]] * 2),
    "maybe_dense_stack": (lambda: maybe_dense_stack([FRAME, FRAME]), "x", [[1, 2, 3]] * 2),
    "cat": (lambda: cat([FRAME, Frame([4])]), "x", [1, 2, 3, 4]),
    "lazy stack": (lambda: lazy_stack([TensorDict({"a": n}) for n in (1, 2, 3)]).set("y", COLUMN), "y", [1, 2, 3]),
    "update of a lazy stack": (lambda: lazy_stack([TensorDict({"x": 1})] * 3).clone().update(FRAME), "x", [1, 2, 3]),
    "apply": (lambda: TensorDict({"a": torch.zeros(3)}, [3]).apply(lambda leaf: COLUMN), "a", [1, 2, 3]),
}  # fmt: skip


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", BUILDS)
def test_build_of_foreign_objects_asks_their_coercers(name: str) -> None:
    build, key, expected = BUILDS[name]
    assert build()[key].tolist() == expected


@pytest.mark.usefixtures("plugin")
def test_from_pytree_foreign_leaf_becomes_entry() -> None:
    pytest.importorskip("td_tensorclass")  # which stores the class of each container
    made = from_pytree({"a": FRAME, "b": [COLUMN]})
    assert (made["a", "x"].tolist(), made["b", "0"].tolist()) == ([1, 2, 3], [1, 2, 3])
    assert from_pytree(COLUMN).tolist() == [1, 2, 3]


@pytest.mark.usefixtures("plugin")
def test_write_into_lazy_stack_at_index_asks_coercer() -> None:
    td = lazy_stack([TensorDict({"x": 0, "n": {"x": 0}}) for _ in range(3)])
    td[BEGIN] = Frame([1, 2])
    td[1:] = {"n": Frame([3, 4])}
    assert (td["x"].tolist(), td["n", "x"].tolist()) == ([1, 2, 0], [0, 3, 4])


@pytest.mark.usefixtures("plugin")
def test_stack_of_columns_is_a_tensor() -> None:
    made: Any = stack([COLUMN, COLUMN])
    assert made.tolist() == [[1, 2, 3]] * 2


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("value", [Column(1, 2), Frame([1, 2])], ids=["column", "frame"])
def test_foreign_object_of_other_length_names_the_way_out(value: Any) -> None:
    name = type(value).__name__
    with pytest.raises(
        BatchSizeError,
        match=rf"^key 'a'.*; a {name} is stored as its elements: wrap it in NonTensorData to store the object$",
    ):
        TensorDict({"a": value}, [3])


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda td: td.__setitem__(0, COLUMN), StructureError, "a collection takes a collection of entries"),
        (lambda td: td.update(COLUMN), TypeError, "a collection is updated from a mapping or a collection"),
        (lambda td: TensorDict(COLUMN), ValueError, "the source of a TensorDict is a mapping or a collection"),
        (lambda td: td.set_at_("x", FRAME, BEGIN), StructureError, "key 'x'.*it is a tensor, the value a TensorDict"),
    ],
    ids=["index", "update", "constructor", "set_at_"],
)  # fmt: skip
def test_foreign_object_of_wrong_form_raises(write: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        write(make_target())


class Refused:
    """An object whose coercer raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class CodeError(Exception):
    """An error of another library that needs two arguments."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


def refuse(value: Any, size: torch.Size, device: object) -> Any:
    raise value.error


class Refusing:
    @hookimpl
    def td_coercers(self) -> list[Coercer]:
        return [Coercer((Refused,), refuse)]


@pytest.fixture
def refusing() -> Iterator[None]:
    with installed(Refusing()):
        yield


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(
    "error", [ValueError, TypeError, FormatError, ImportError], ids=lambda cls: cls.__name__
)
@pytest.mark.parametrize(
    "write",
    [
        lambda td, value: td.set(("n", "x"), value),
        lambda td, value: td.update({"n": {"x": value}}),
        lambda td, value: td.update_({"n": {"x": value}}),
        lambda td, value: td.__setitem__(0, {"n": {"x": value}}),
        lambda td, value: td.set_at_(("n", "x"), value, 0),
        lambda td, value: TensorDict({"n": {"x": value}}),
        lambda td, value: from_any({"n": {"x": [value]}}),
    ],
    ids=["set", "update", "update_", "index", "set_at_", "constructor", "list"],
)  # fmt: skip
def test_error_of_coercer_has_key_path(write: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^key \('n', 'x'\): the file is damaged$") as caught:
        write(make_target(), Refused(error("the file is damaged")))
    assert str(caught.value.__cause__) == "the file is damaged"


@pytest.mark.usefixtures("refusing")
def test_error_of_coercer_of_strange_class_gets_a_note() -> None:
    with pytest.raises(CodeError, match="5, 'strange'") as caught:
        TensorDict({"a": Refused(CodeError(5, "strange"))})
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["at key 'a'"]


@pytest.mark.usefixtures("refusing")
def test_error_of_coercer_that_names_the_key_stays() -> None:
    with pytest.raises(ValueError, match="^bad key 'a'$"):
        TensorDict({"a": Refused(ValueError("bad key 'a'"))})


@pytest.fixture
def no_coercers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the coercers of libraries, if their packages are installed."""
    monkeypatch.setattr(COERCERS, "_by_name", NamedTypes())
    for package in ("td-arrow", "td-hdf5", "td-zarr"):
        monkeypatch.delitem(MissingPluginError.unavailable, package, raising=False)


def make_instance(name: str, base: type = object) -> Any:
    """Return an instance of a class with the module and name of one of another library, which is not imported."""
    module, _, last = name.rpartition(".")
    return type(last, (base,), {"__module__": module})()


@pytest.mark.usefixtures("no_coercers")
@pytest.mark.parametrize("name", [*PACKAGES])
def test_foreign_object_without_its_package_raises(name: str) -> None:
    value = make_instance(name)
    was_imported = name.partition(".")[0] in sys.modules
    package = PACKAGES.get(name)
    library, last = name.partition(".")[0], name.rpartition(".")[2]
    told = rf"a {last} of {library} becomes an entry with the package '{package}', which is not installed: .*; wrap it in NonT"
    for path, write in {
        "key 'a'": lambda td: td.set("a", value),
        "key ('n', 'x')": lambda td: td.update({"n": {"x": value}}),
        "key ('n', 'y')": lambda td: td.__setitem__(0, {"n": {"y": value}}),
        "key ('c', 'd')": lambda td: TensorDict({"c": {"d": value}}),
        "key 'e'": lambda td: from_any({"e": value}),
        "key 'f'": lambda td: td.set("f", [value]),
        "the root": from_any,
    }.items():
        with pytest.raises(MissingPluginError, match=told) as caught:
            write(value if path == "the root" else make_target())
        assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(MissingPluginError, match=told):
        make_target()[0] = value
    with pytest.raises(MissingPluginError, match=told):
        make_target().update(value)
    assert (name.partition(".")[0] in sys.modules) == was_imported


@pytest.mark.usefixtures("no_coercers")
def test_mapping_of_another_library_without_its_package_raises() -> None:
    value = make_instance("h5py.Group", dict)
    with pytest.raises(
        MissingPluginError, match="key 'a': a Group of h5py becomes an entry with the package 'td-hdf5'"
    ):
        TensorDict({"a": value})


@pytest.mark.usefixtures("no_coercers")
def test_subclass_of_foreign_class_is_foreign() -> None:
    base = type(make_instance("pandas.DataFrame"))
    with pytest.raises(
        MissingPluginError, match="key 'a': a GeoFrame of .* becomes an entry with the package 'td-arrow'"
    ):
        TensorDict({"a": type("GeoFrame", (base,), {})()})


class Dlpack:
    """An array of another library with DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> object:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class Interface:
    """An array of another library with an array interface."""

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self.held = held
        self.__array_interface__ = held.__array_interface__


class InterfaceOfClass:
    held = np.arange(3.0)

    @property
    def __array_interface__(self) -> Any:
        return self.held.__array_interface__


def read_only(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values.flags.writeable = False
    return values


#: Objects with three numbers 0, 1 and 2, their dtype, and whether the leaf shares their memory.
ARRAYS: dict[str, tuple[Callable[[], Any], torch.dtype, bool]] = {
    "DLPack": (lambda: Dlpack(torch.arange(3.0)), torch.float32, False),
    "DLPack of bfloat16": (lambda: Dlpack(torch.arange(3).bfloat16()), torch.bfloat16, False),
    "strided DLPack": (lambda: Dlpack(torch.arange(6)[::2] // 2), torch.int64, False),
    "memoryview": (lambda: memoryview(np.arange(3, dtype="i2")), torch.int16, True),
    "strided memoryview": (lambda: memoryview(np.arange(6)[::2] // 2), torch.int64, True),
    "read-only memoryview": (lambda: memoryview(bytes([0, 1, 2])), torch.uint8, False),
    "read-only array of numpy": (lambda: read_only(np.arange(3)), torch.int64, False),
    "array.array": (lambda: array.array("d", [0, 1, 2]), torch.float64, True),
    "ctypes": (lambda: (ctypes.c_int32 * 3)(0, 1, 2), torch.int32, True),
    "array interface": (lambda: Interface(np.arange(3.0)), torch.float64, True),
    "array interface of the class": (InterfaceOfClass, torch.float64, True),
    "complex": (lambda: memoryview(np.arange(3, dtype="c8")), torch.complex64, True),
    "bool": (lambda: memoryview(np.array([False, True, True])), torch.bool, True),
    "half": (lambda: memoryview(np.arange(3, dtype="f2")), torch.float16, True),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_set_foreign_array_stores_leaf(name: str) -> None:
    make, dtype, _ = ARRAYS[name]
    expected = torch.tensor([0, 1, 2]).to(dtype)
    value = make()
    td = TensorDict({"a": value}, [3])
    assert td["a"].dtype is dtype and torch.equal(td["a"], expected)
    assert TensorDict({"a": torch.zeros(3, dtype=dtype)}, [3]).update({"a": value})["a"].equal(expected)
    if not isinstance(value, np.ndarray):
        assert torch.equal(from_any(value), expected)
    td = TensorDict({"b": torch.zeros(4, dtype=dtype)}, [4])
    td[1:] = {"b": value}
    assert torch.equal(td["b"][1:], expected)
    assert td.set_at_("b", value, slice(0, 3))["b"].tolist() == [*expected.tolist(), expected[2].item()]


@pytest.mark.parametrize("name", ARRAYS)
def test_zero_changes_only_arrays_that_can_be_written(name: str) -> None:
    make, _, is_shared = ARRAYS[name]
    value = make()
    td = TensorDict({"a": value}, [3])
    td["a"].zero_()
    again = TensorDict({"a": value}, [3])["a"]
    assert again.tolist() == ([0, 0, 0] if is_shared else torch.tensor([0, 1, 2]).to(again.dtype).tolist())


def test_dlpack_of_mutable_class_is_shared() -> None:
    cls: Any = type("ndarray", (Dlpack,), {"__module__": "cupy"})
    tensor = torch.arange(3.0)
    TensorDict({"a": cls(tensor)}, [3])["a"].zero_()
    assert tensor.tolist() == [0, 0, 0]


def test_dlpack_that_torch_refuses_names_key() -> None:
    class Broken(Dlpack):
        def __dlpack__(self, **options: Any) -> object:
            raise BufferError("no capsule")

    with pytest.raises(
        TypeError, match="^key 'a': torch cannot read a Broken by DLPack: no capsule; convert it"
    ):
        TensorDict({"a": Broken(torch.zeros(2))})


@pytest.mark.parametrize(
    "value",
    [Dlpack, np.ndarray, memoryview],
    ids=["class with DLPack", "class of arrays", "class with buffers"],
)
def test_from_any_class_with_protocol_is_unchanged(value: type) -> None:
    assert from_any(value) is value


@pytest.mark.parametrize(
    "value",
    [
        b"abc",
        bytearray(b"abc"),
        array.array("u" if sys.version_info < (3, 13) else "w", "abc"),
        memoryview(np.array([b"a"])),
        range(3),
        np.datetime64("2020"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_from_any_buffer_without_numbers_is_unchanged(value: object) -> None:
    assert from_any(value) is value


MASKED = np.ma.masked_array([1.0, 2.0, 3.0], [False, True, True])


@pytest.mark.parametrize(
    ("write", "path"),
    [
        (lambda: TensorDict({"a": MASKED}, [3]), "key 'a'"),
        (lambda: TensorDict({"n": {"a": MASKED}}), r"key \('n', 'a'\)"),
        (lambda: TensorDict({"a": [MASKED, MASKED]}), "key 'a'"),
        (lambda: TensorDict({"a": [[MASKED], [np.ones(3)]]}), "key 'a'"),
        (lambda: TensorDict({"a": [torch.zeros(3), MASKED]}), "key 'a'"),
        (lambda: make_target().update({"x": MASKED}), "key 'x'"),
        (lambda: make_target().set_at_("x", MASKED, slice(None)), "key 'x'"),
        (lambda: make_target().__setitem__(slice(None), {"x": MASKED}), "key 'x'"),
        (lambda: from_any(MASKED), "the root"),
        (lambda: TensorDict({"a": np.ma.masked_array(np.zeros(2, [("b", "f4")]), [(True,), (True,)])}), r"key \('a', 'b'\)"),
    ],
    ids=["leaf", "nested", "list", "nested list", "beside a tensor", "update", "set_at_", "index", "from_any", "fields"],
)  # fmt: skip
def test_masked_elements_raise(write: Callable[[], Any], path: str) -> None:
    with pytest.raises(ValueError, match=rf"^{path} has 2 masked elements: .filled\(value\) them first$"):
        write()


def test_masked_array_without_masked_elements_is_an_array() -> None:
    values = np.ma.masked_array([1.0, 2.0, 3.0])
    assert TensorDict({"a": values}, [3])["a"].tolist() == [1, 2, 3]
    assert from_any(values) is values
    with pytest.raises(ValueError, match="key 'a' has 1 masked element: "):
        TensorDict({"a": MASKED[1]})


@dataclass
class Private:
    """A dataclass with private fields only, such as an array of a store."""

    _handle: int = 3


@dataclass
class Empty:
    """A dataclass without fields."""


@dataclass
class Mixed:
    """A dataclass with a public field."""

    a: int = 1
    _b: int = 2


def test_from_any_dataclass_with_private_fields_only_is_unchanged() -> None:
    value = Private()
    assert from_any(value) is value
    assert {*from_any(Mixed()).keys()} == {"a", "_b"}
    assert isinstance(from_any(Empty()), TensorDict)
    with installed(Plugin()):
        assert from_any(FRAME)["x"].tolist() == [1, 2, 3]
