"""Saves that td or tensordict writes and the other one reads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import td_core

tensordict = pytest.importorskip("tensordict")

pytestmark = pytest.mark.filterwarnings("ignore")

KEYS = ["a", "b", "x/y", "a b", "%", "é中", "", "..", "c.d", "_names", "_class", "Case", "case"]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.uint16]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


class Make:
    """Build a tree from a specification with td or with tensordict."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.ours = module is td_core

    def __call__(self, spec: Any) -> Any:
        kind, *rest = spec
        if kind == "leaf":
            return rest[0].clone()
        if kind == "value":
            return self.non_tensor("NonTensorData")(rest[0], batch_size=rest[1])
        if kind == "values":
            return self.non_tensor("NonTensorStack")(
                *(self.non_tensor("NonTensorData")(value, batch_size=rest[1]) for value in rest[0]),
                stack_dim=0,
            )
        if kind == "stack":
            stack = (
                td_core._kinds.lazy_stack.LazyStackedTensorDict
                if self.ours
                else self.module.LazyStackedTensorDict
            )
            return stack(*(self(member) for member in rest[0]), stack_dim=rest[1])
        entries, batch_size, names = rest
        td = self.module.TensorDict({}, batch_size=batch_size, names=names)
        for key, child in entries.items():
            td.set(key, self(child))
        return td

    def non_tensor(self, name: str) -> Any:
        if not self.ours:
            return getattr(self.module, name)
        import td_tensorclass

        return getattr(td_tensorclass, name)


@st.composite
def leaves(draw: st.DrawFn, batch: tuple[int, ...]) -> Any:
    shape = (*batch, *draw(st.lists(st.integers(0, 3), max_size=2)))
    return "leaf", torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))


@st.composite
def trees(draw: st.DrawFn, batch: tuple[int, ...] = (), depth: int = 0, named: bool = False) -> Any:
    entries: dict[str, Any] = {}
    names = [f"d{i}" for i in range(len(batch))] if named else None
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=4, unique=True)):
        if named and key == "_names":
            continue  # the format stores the dim names under this key
        kind = draw(st.sampled_from(["leaf", "dict", "stack", "value", "values"])) if depth < 2 else "leaf"
        if kind == "dict":
            more = tuple(draw(st.lists(st.integers(1, 2), max_size=1)))
            entries[key] = draw(trees((*batch, *more), depth + 1, named))
        elif kind == "stack" and batch and not named:
            members = [draw(trees(batch[1:], depth + 1)) for _ in range(batch[0])]
            entries[key] = ("stack", members, 0)
        elif kind == "value":
            entries[key] = ("value", draw(VALUES), batch)
        elif kind == "values" and batch:
            values = draw(st.lists(VALUES, min_size=batch[0], max_size=batch[0]))
            # In the format, a list as a value looks like a batch dim.
            entries[key] = (
                "values",
                [f"{value}" if isinstance(value, list) else value for value in values],
                batch[1:],
            )
        else:
            entries[key] = draw(leaves(batch))
    if "" in entries and "%" in entries and entries["%"][0] == "leaf" and not entries["%"][1].numel():
        # An empty leaf has no file. tensordict would read %.memmap for the key "%", which is the file of the key "".
        del entries["%"]
    return "dict", entries, batch, names


SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
TREES = st.booleans().flatmap(lambda named: trees((2,), named=named))


def describe(node: Any) -> Any:
    """Convert a collection of td or of tensordict to plain Python values."""
    if isinstance(node, torch.Tensor):
        return str(node.dtype), tuple(node.shape), node.detach().contiguous().clone().view(-1).tolist()
    name = type(node).__name__
    if name == "NonTensorData":
        return name, node.data
    if name == "NonTensorStack":
        return name, tuple(node.batch_size), node.tolist()
    if name == "LazyStackedTensorDict":
        return name, node.stack_dim, [describe(member) for member in node.tensordicts]
    entries = {key: describe(node.get(key)) for key in node.keys()}
    return name, tuple(node.batch_size), [each or None for each in node.names], entries


@given(spec=TREES)
@SETTINGS
def test_tensordict_reads_random_save_of_td(spec: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ours")
    tree = Make(td_core)(spec)
    for name in ("directory", "archive.tdz"):
        tree.memmap(folder / name, compatible=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = tensordict.TensorDict.load_memmap(folder / name)
        assert describe(loaded) == describe(tree)


@given(spec=TREES)
@SETTINGS
def test_td_reads_random_save_of_tensordict(spec: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("theirs")
    tree = Make(tensordict)(spec)
    for name in ("directory", "archive.tdz"):
        try:
            tree.memmap(folder / name)
        except RuntimeError:  # archives of tensordict do not support some trees with empty leaves
            assert name == "archive.tdz"
            continue
        assert describe(td_core.TensorDict.load_memmap(folder / name)) == describe(tree)


UNSUPPORTED = {
    "a key that the metadata needs": lambda: td_core.TensorDict({"shape": torch.ones(1)}),
    "a long key": lambda: td_core.TensorDict({"k" * 1000: torch.ones(1)}),
    "bytes": lambda: td_core.TensorDict({"a": b"bytes"}),
    "one value for each row": lambda: td_core.TensorDict({"a": ["x", "y"]}, [2]),
    "equally long lists": lambda: Make(td_core)(
        ("dict", {"v": ("values", [[1, 2], [3, 4]], ())}, (2,), None)
    ),
    "a jagged tensor": lambda: td_core.TensorDict(
        {"j": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}
    ),
}


@pytest.mark.parametrize("make", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_save_raises_in_tensordict_and_loads_in_td(make: Any, tmp_path: Path) -> None:
    tree = make()
    tree.memmap(tmp_path / "save")
    with pytest.raises(RuntimeError, match="version"):
        tensordict.TensorDict.load_memmap(tmp_path / "save")
    loaded = td_core.TensorDict.load_memmap(tmp_path / "save")
    assert list(loaded.keys()) == list(tree.keys())


@pytest.mark.parametrize("convert", [False, True])
def test_tensordict_reads_saves_of_one_value_until_a_part_is_written(convert: bool, tmp_path: Path) -> None:
    row = td_core.TensorDict({"x": torch.zeros(2), "name": "a"})
    data = row.expand(3).memmap_like(tmp_path / "save", compatible=convert)
    assert describe(tensordict.TensorDict.load_memmap(tmp_path / "save")) == describe(data)
    data[1] = td_core.TensorDict({"x": torch.ones(2), "name": "b"})
    if not convert:
        with pytest.raises(RuntimeError, match="version"):
            tensordict.TensorDict.load_memmap(tmp_path / "save")
        data = data.clone().memmap(tmp_path / "save", compatible=True)
    assert describe(tensordict.TensorDict.load_memmap(tmp_path / "save")) == describe(data)


def test_save_to_prefix_of_other_library_replaces_it(tmp_path: Path) -> None:
    ours = td_core.TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(2)}})
    theirs = tensordict.TensorDict({"a": torch.zeros(2), "m": {"c": torch.ones(2)}})
    prefix = tmp_path / "save"
    theirs.memmap(prefix)
    ours.memmap(prefix)
    assert describe(tensordict.TensorDict.load_memmap(prefix)) == describe(ours)
    assert not (prefix / "m").exists()
    theirs.memmap(prefix)
    assert describe(td_core.TensorDict.load_memmap(prefix)) == describe(theirs)
    live = tensordict.TensorDict.load_memmap(prefix).memmap_()
    live.memmap_(prefix)
    live.make_memmap("new", (2,))
    assert td_core.TensorDict.load_memmap(prefix)["new"].tolist() == [0, 0]


def test_tensordict_reads_parameters_as_collection(tmp_path: Path) -> None:
    params = td_core.TensorDictParams(td_core.TensorDict({"w": torch.ones(2), "n": {"b": torch.zeros(1)}}))
    td_core.TensorDict({"p": params, "x": torch.arange(2)}).memmap(tmp_path)
    found = tensordict.TensorDict.load_memmap(tmp_path)
    assert type(found["p"]) is tensordict.TensorDict
    assert (found["p", "w"].tolist(), found["p", "n", "b"].tolist()) == ([1, 1], [0])
    assert type(td_core.load(tmp_path)["p"]) is td_core.TensorDictParams
