"""A collection takes the dim names of its entries, and no way of naming gives two dims one name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictParams,
    from_any,
    lazy_stack,
    maybe_dense_stack,
)
from td_core.errors import DimNamesError, StructureError


def make_named(*names: str | None) -> TensorDict:
    size = [5, 3, 2][: len(names)]
    return TensorDict({"y": torch.zeros(size)}, size, names=names)


def apply(td: Any, change: Callable[[Any], Any]) -> Any:
    change(td)
    return td


def check_prefixes(td: Any) -> None:
    """Assert that each node has the names of its parent for its first dims, and no name twice."""
    for key in ["", *td.keys(True)]:
        node = td.get(key) if key else td
        if isinstance(node, torch.Tensor):
            continue
        given = [name for name in node.names if name is not None]
        assert node.names[: len(td.names)] == td.names and len({*given}) == len(given), key


LEAF = torch.ones(5)
N = ("time", "space")

#: Ways to give a collection of batch size [5] an entry of the dims "time" and "space", and other nodes.
WAYS: dict[str, Callable[[], Any]] = {
    "set": lambda: apply(TensorDict({"m": {}}, [5]), lambda td: td.set("n", make_named(*N))),
    "setdefault": lambda: apply(TensorDict({"m": {}}, [5]), lambda td: td.setdefault("n", make_named(*N))),
    "new path": lambda: apply(TensorDict({"m": {}}, [5]), lambda td: td.set(("a", "b", "n"), make_named(*N))),
    "old path": lambda: apply(
        TensorDict({"a": {"b": {}}}, [5]), lambda td: td.set(("a", "b", "n"), make_named(*N))
    ),
    "constructor": lambda: TensorDict({"m": {"x": LEAF}, "n": make_named(*N), "o": {"x": LEAF}}, [5]),
    "nested dict": lambda: TensorDict({"m": {"x": LEAF}, "a": {"n": make_named(*N)}, "o": {}}, [5]),
    "nested key": lambda: TensorDict({"m": {}, ("a", "n"): make_named(*N), ("o", "x"): LEAF}, [5]),
    "device": lambda: TensorDict({"m": {}, "n": make_named(*N), "o": {}}, [5], device="cpu"),
    "keywords": lambda: TensorDict(n=make_named(*N), batch_size=[5]),
    "from_dict": lambda: TensorDict.from_dict({"m": {}, "a": {"n": make_named(*N)}}, batch_size=[5]),
    "from_dict, inferred": lambda: TensorDict.from_dict(
        {"x": LEAF, "a": {"n": make_named(*N)}}, auto_batch_size=True
    ),
    "from_any": lambda: from_any({"m": {}, "n": make_named(*N)}, batch_size=[5]),
    "update": lambda: TensorDict({"m": {}}, [5]).update({"n": make_named(*N), "o": {"x": LEAF}}),
    "update, nested": lambda: TensorDict({"m": {}}, [5]).update({"m": {"n": make_named(*N)}}),
    "update, key": lambda: TensorDict({"m": {}}, [5]).update({("a", "n"): make_named(*N)}),
    "update, collection": lambda: TensorDict({"m": {}}, [5]).update(TensorDict({"n": make_named(*N)}, [5])),
    "replace": lambda: TensorDict({"m": {}}, [5]).replace(n=make_named(*N)),
    "batch size": lambda: apply(
        TensorDict({"n": make_named(*N), "m": {"x": LEAF}}), lambda td: setattr(td, "batch_size", [5])
    ),
    "auto_batch_size_": lambda: TensorDict({"n": make_named(*N), "x": LEAF}).auto_batch_size_(),
    "parameters": lambda: apply(
        TensorDictParams(TensorDict({"x": LEAF}, [5])), lambda td: td.set("n", make_named(*N))
    ),
    "lazy stack": lambda: apply(
        lazy_stack([TensorDict({"m": {}}) for _ in range(5)]), lambda td: td.set("n", make_named(*N))
    ),
    "lazy entry": lambda: apply(
        TensorDict({"m": {}}, [5]),
        lambda td: td.set(
            "n", LazyStackedTensorDict(*[make_named(*N)[0] for _ in range(5)], stack_dim_name="time")
        ),
    ),
    "stack": lambda: torch.stack([TensorDict({"n": make_named(*N)}, [5])] * 2)[0],
    "maybe_dense_stack": lambda: maybe_dense_stack([TensorDict({"n": make_named(*N)}, [5])] * 2)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_collection_takes_names_of_entry(way: str) -> None:
    td = WAYS[way]()
    assert td.names == ["time"] and td.batch_size == (5,)
    check_prefixes(td)


def make_level() -> TensorDict:
    return TensorDict({"x": torch.zeros(5), "n": {"m": {"y": torch.ones(5)}}}, [5])


#: Collections of a root and a level "n"; the second function gives the dim of the level a name.
LEVELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dense": (make_level, lambda td: setattr(td["n"], "names", ["time"])),
    "device": (lambda: make_level().to("cpu"), lambda td: setattr(td["n"], "names", ["time"])),
    "parameters": (lambda: TensorDictParams(make_level()), lambda td: setattr(td["n"], "names", ["time"])),
    "stack of levels": (
        lambda: LazyStackedTensorDict(make_level(), make_level(), stack_dim=1),
        lambda td: [setattr(member["n"], "names", ["time"]) for member in td.tensordicts],
    ),
    "level that is a stack": (
        lambda: TensorDict({"x": torch.zeros(5), "n": lazy_stack([make_level()[0]["n"]] * 5)}, [5]),
        lambda td: setattr(td["n"], "names", ["time"]),
    ),
}

#: Ways to give a level a tensor, or to change one.
TENSORS: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda td, new: td.set(("n", "x"), new),
    "set below": lambda td, new: td.set(("n", "m", "x"), new),
    "set in place": lambda td, new: td.set(("n", "m", "y"), new, inplace=True),
    "setdefault": lambda td, new: td.setdefault(("n", "x"), new),
    "item": lambda td, new: td.__setitem__(("n", "x"), new),
    "update": lambda td, new: td.update({"n": {"x": new}}),
    "update, key": lambda td, new: td.update({("n", "x"): new}),
    "update, collection": lambda td, new: td.update(TensorDict({"n": {"x": new}}, td.batch_size)),
    "index": lambda td, new: td.__setitem__(..., TensorDict({"n": {"x": new}}, td.batch_size)),
    "rename": lambda td, new: td.rename_key_("x", ("n", "x")),
    "unflatten": lambda td, new: td.set("n.x", new).unflatten_keys(".", inplace=True),
    "delete": lambda td, new: td.set(("n", "x"), new).del_(("n", "x")),
}


@pytest.mark.parametrize("way", TENSORS)
@pytest.mark.parametrize("kind", LEVELS)
def test_tensor_in_named_level_names_no_level_above(kind: str, way: str) -> None:
    make, name_level = LEVELS[kind]
    td = make()
    name_level(td)
    names = [td.names, td["n"].names]
    TENSORS[way](td, torch.full(td.batch_size, 2.0))
    assert [td.names, td["n"].names] == names
    assert names[0][0] is None and names[1][0] == "time"


def test_collection_takes_names_of_its_unnamed_dims_only() -> None:
    td = TensorDict({"m": {}}, [5, 3], names=["time", None])
    td["n"] = make_named(None, "space", "z")
    assert (td.names, td["m"].names, td["n"].names) == (
        ["time", "space"],
        ["time", "space"],
        ["time", "space", "z"],
    )
    assert TensorDict({"n": make_named(None, "space")}, [5]).names == [None]
    short = TensorDict({"n": make_named("time", "space")}, [5])
    short.batch_size = [5, 3]
    assert short.names == ["time", "space"]


def make_tail() -> TensorDict:
    """Return a collection of the dims [5, 3] below one of the dim [5]; the name "space" is that of the second."""
    return TensorDict({"n": make_named(None, "space")}, [5])


def make_stack(**how: Any) -> Any:
    return LazyStackedTensorDict(make_tail(), make_tail(), **how)


#: Ways to give a second dim the name "space".
REPEATS: dict[str, Callable[[], Any]] = {
    "names": lambda: setattr(make_tail(), "names", ["space"]),
    "rename": lambda: make_tail().rename("space"),
    "rename_": lambda: apply(make_tail(), lambda td: setattr(td, "names", ["t"])).rename_(t="space"),
    "refine_names": lambda: make_tail().refine_names("space"),
    "empty": lambda: make_tail().empty(recurse=True, names=["space"]),
    "constructor": lambda: TensorDict(
        make_tail().to_dict() | {"n": make_named(None, "space")}, [5], names=["space"]
    ),
    "from_dict": lambda: TensorDict.from_dict(
        {"n": make_named(None, "space")}, batch_size=[5], names=["space"]
    ),
    "stack dim": lambda: setattr(make_stack(), "names", ["space", "time"]),
    "dim of members": lambda: setattr(make_stack(), "names", ["time", "space"]),
    "last stack dim": lambda: setattr(make_stack(stack_dim=1), "names", [None, "space"]),
    "names of a stack": lambda: make_stack(names=["space", None]),
    "stack_dim_name": lambda: make_stack(stack_dim_name="space"),
    "lazy_stack": lambda: lazy_stack([make_tail()], stack_dim_name="space"),
    "maybe_dense_stack": lambda: maybe_dense_stack([make_tail()], stack_dim_name="space"),
    "rename_ of a stack": lambda: make_stack(stack_dim_name="s").rename_(s="space"),
    "nested stack": lambda: setattr(TensorDict({"s": make_stack()}, [2]), "names", ["space"]),
    "stack of stacks": lambda: setattr(lazy_stack([make_stack()]), "names", ["space", None, None]),
    "set": lambda: make_tail().set("m", make_named("space", "time")),
    "set path": lambda: TensorDict({"m": make_tail()}, [5]).set(("m", "o"), make_named("space", "time")),
    "update": lambda: make_tail().update({"m": make_named("space", "time")}),
    "update of both": lambda: TensorDict({}, [5]).update(
        {"n": make_named(None, "space"), "m": make_named("space", "time")}
    ),
    "constructor of both": lambda: TensorDict(
        {"n": make_named(None, "space"), "m": make_named("space")}, [5]
    ),
    "nested constructor": lambda: TensorDict(
        {"n": make_named(None, "space"), "m": {"o": make_named("space")}}, [5]
    ),
    "one entry": lambda: TensorDict({}, [5, 3], names=["space", None]).set("n", make_named(None, "space")),
}


@pytest.mark.parametrize("case", REPEATS)
def test_name_of_another_dim_raises(case: str) -> None:
    with pytest.raises((DimNamesError, StructureError), match=r"unique|'space'.*(another dim|repeat)"):
        REPEATS[case]()


@pytest.mark.parametrize(
    "write", [lambda td, new: td.set("m", new), lambda td, new: td.update({"o": {}, "m": new})]
)
def test_refused_names_change_nothing(write: Callable[[Any, Any], Any]) -> None:
    td = make_tail()
    with pytest.raises(DimNamesError, match="key .'n',. has the dim names"):
        write(td, make_named("space", "time"))
    assert list(td.keys()) == ["n"] and td.names == [None] and td["n"].names == [None, "space"]


def test_contradicting_names_of_entries_raise() -> None:
    for write in (
        lambda: TensorDict({"a": make_named("x"), "b": make_named("y")}, [5]),
        lambda: TensorDict({}, [5]).update({"a": make_named("x"), "b": make_named("y")}),
    ):
        with pytest.raises(StructureError, match="contradict those of its parent"):
            write()


def test_parent_keeps_no_name_if_another_entry_has_it_elsewhere() -> None:
    td = TensorDict({"n": make_named(None, "space"), "m": {}}, [5])
    td["m", "o"] = make_named("space", "time")
    assert (td.names, td["m"].names, td["n"].names) == ([None], ["space"], [None, "space"])


def test_read_entry_of_member_with_name_of_stack_dim_raises() -> None:
    stack = LazyStackedTensorDict(TensorDict({}, [5]), stack_dim_name="s")
    stack.tensordicts[0]["n"] = make_named("time", "s")
    with pytest.raises(DimNamesError, match="two dims of key 'n' would have one name"):
        stack["n"]


def test_swap_names_of_stack_succeeds() -> None:
    stack = LazyStackedTensorDict(TensorDict({"n": make_named("time", "z")}, [5]), stack_dim_name="s")
    stack.names = ["time", "s"]
    assert stack["n"].names == ["time", "s", "z"]
