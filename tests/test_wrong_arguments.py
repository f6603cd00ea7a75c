"""A value of a wrong type where a collection, a mapping, a tensor or a location is expected is a TypeError that names both."""

from __future__ import annotations

import gc
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import Buffer, TensorDict, TensorDictParams, lazy_stack


def make_data() -> Any:
    return TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.arange(2)}}, [2])


def call_sibling(name: str, *args: object, **options: object) -> Callable[[Any], object]:
    """Return a call of a function of a sibling with the wrong value in place of ``...``, or at the end."""

    def call(value: Any) -> object:
        package, _, function = name.partition(".")
        module = pytest.importorskip(package)
        given = [value if item is ... else item for item in args]
        return getattr(module, function)(
            *given, **{key: value if item is ... else item for key, item in options.items()}
        )

    return call


CALLS: dict[str, Callable[[Any], object]] = {
    "expand_as": lambda value: make_data().expand_as(value),
    "apply out": lambda value: make_data().apply(torch.abs, out=value),
    "to other": lambda value: make_data().to(other=value),
    "pack layout": lambda value: make_data().pack(layout=value),
    "index_add": lambda value: make_data().index_add(0, value, make_data()),
    "index_copy": lambda value: make_data().index_copy(0, value, make_data()),
    "take_along_dim": lambda value: make_data().take_along_dim(value, 0),
    "scatter_reduce": lambda value: make_data().scatter_reduce(0, value, make_data(), "sum"),
    "rename_keys": lambda value: make_data().rename_keys(value),
    "from_schema": lambda value: td_core.from_schema(value),
    "from_dict_instance": lambda value: make_data().from_dict_instance(value),
    "TensorDictParams": lambda value: TensorDictParams(value),
    "Buffer": lambda value: Buffer(value),
    "state_dict destination": lambda value: make_data().state_dict(destination=value),
    "state_dict of parameters": lambda value: TensorDictParams(make_data().float()).state_dict(
        destination=value
    ),
    "state_dict prefix": lambda value: make_data().state_dict(prefix=value),
    "load_state_dict": lambda value: make_data().load_state_dict(value),
    "memmap": call_sibling("td_memmap.memmap", ..., "save"),
    "memmap_like": call_sibling("td_memmap.memmap_like", ..., "save"),
    "StoredTensor": call_sibling("td_store.StoredTensor", ...),
    "rand_one_hot": call_sibling("td_nn.rand_one_hot", ...),
    "OneHotCategorical": call_sibling("td_nn.OneHotCategorical", logits=...),
    "TypedTensorDict": call_sibling("td_tensorclass.TypedTensorDict", ...),
    "to_h5": call_sibling("td_hdf5.to_h5", make_data(), ...),
    "hdf5 group": call_sibling("td_hdf5.PersistentTensorDict", group=...),
    "to_csv": call_sibling("td_arrow.to_csv", ..., "data.csv"),
    "from_csv": call_sibling("td_arrow.from_csv", ...),
    "from_json": call_sibling("td_arrow.from_json", ...),
}
#: Calls for which None means a default, or nothing.
TAKES_NONE = {"apply out", "to other", "pack layout", "TensorDictParams", "Buffer", "state_dict destination",
              "state_dict of parameters", "OneHotCategorical", "TypedTensorDict", "hdf5 group"}  # fmt: skip
TAKES_TEXT = {"hdf5 group", "state_dict prefix", "to_h5", "from_csv", "from_json"}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("value", [None, 3, "x", object()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", CALLS)
def test_wrong_type_is_an_error_that_names_it(name: str, value: object) -> None:
    if (value is None and name in TAKES_NONE) or (isinstance(value, str) and name in TAKES_TEXT):
        return
    with pytest.raises(TypeError, match=rf"got (a )?{type(value).__name__}\b") as caught:
        CALLS[name](value)
    assert not re.search(r"\b_\w|has no attribute", str(caught.value))


@pytest.mark.parametrize("value", [[1.0], (1.0, 2.0)], ids=["list", "tuple"])
@pytest.mark.parametrize("key", ["a", "n"])
def test_fill_with_several_numbers_is_an_error(key: str, value: Any) -> None:
    data = make_data()
    with pytest.raises(TypeError, match=rf"^fill_\(\) takes a key and a number; got {type(value).__name__}$"):
        data.fill_(key, value)
    assert data["a"].sum() == 0


@pytest.mark.parametrize(
    "make", [make_data, lambda: lazy_stack([make_data()]), lambda: TensorDictParams(make_data())]
)
def test_state_dict_into_plain_dict_has_the_leaves(make: Callable[[], Any]) -> None:
    data = make()
    found: Any = {}
    assert data.state_dict(destination=found) is found
    expected = data.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], leaf) for key, leaf in expected.items())
    assert isinstance(expected, OrderedDict)
    other = make()
    other.load_state_dict(found)
    assert (other == data).all()


def test_module_with_parameters_writes_into_plain_dict() -> None:
    module = torch.nn.Module()
    module.weights = TensorDictParams(TensorDict({"w": torch.ones(2)}))
    assert module.state_dict(destination={}).keys() == {"weights.w"}


def test_iter_batches_with_wrong_start_raises_one_error(tmp_path: Path) -> None:
    td_arrow = pytest.importorskip("td_arrow")
    pytest.importorskip("pyarrow")
    make_data().to_parquet("data.parquet")
    with pytest.raises((KeyError, ValueError, TypeError)):
        td_arrow.iter_batches("data.parquet", 1, start={"x": 1})
    gc.collect()  # warnings are errors: __del__ must not raise
