"""Parameters come back as parameters from every format, however deep they are, with the roles of their leaves."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import td_core
from td_core import Buffer, TensorDict, TensorDictParams, lazy_stack, load, save
from td_core.spi import RULES, encode

PARTS = {
    ".": "td_memmap",
    ".tdz": "td_memmap",
    ".safetensors": "td_safetensors",
    ".h5": "td_hdf5",
    ".zarr": "td_zarr",
}


def make_leaves() -> TensorDict:
    linear = nn.Linear(3, 2)
    leaves = {
        "weight": linear.weight.detach(),
        "count": torch.arange(3),
        "buffer": Buffer(torch.ones(2)),
        "kept": Buffer(torch.ones(2), persistent=False),
        "n": {"bias": linear.bias.detach(), "frozen": nn.Parameter(torch.ones(2), requires_grad=False)},
    }
    return TensorDict(leaves, device="cpu")


def tie(leaves: TensorDict) -> TensorDict:
    leaves["n", "again"] = leaves["weight"] = nn.Parameter(leaves["weight"])
    leaves["n", "mean"] = leaves["buffer"]
    return leaves


class OwnParams(TensorDictParams):
    """Parameters of a subclass."""


#: Parameters by what is unusual about them.
PARAMS: dict[str, Callable[[], TensorDictParams]] = {
    "mixed": lambda: TensorDictParams(make_leaves()),
    "all trained": lambda: TensorDictParams(TensorDict({"w": torch.ones(2), "b": torch.zeros(1)}, device="cpu")),
    "all frozen": lambda: TensorDictParams(make_leaves()).requires_grad_(False),
    "no_convert": lambda: TensorDictParams(make_leaves(), no_convert=True),
    "locked": lambda: TensorDictParams(make_leaves(), lock=True),
    "eval": lambda: TensorDictParams(make_leaves()).eval(),
    "subclass": lambda: OwnParams(make_leaves()),
    "empty": lambda: TensorDictParams(TensorDict({}, device="cpu")),
    "tied": lambda: TensorDictParams(tie(make_leaves())),
    "key of a field": lambda: TensorDictParams(TensorDict({"_outer": torch.ones(2), "shape": torch.ones(1)}, device="cpu")),
}  # fmt: skip

#: Collections around parameters.
NESTS: dict[str, Callable[[Any], Any]] = {
    "root": lambda params: params,
    "entry": lambda params: TensorDict({"p": params, "x": torch.zeros(2)}, device="cpu"),
    "deep": lambda params: TensorDict({"a": {"b": {"p": params}}, "q": params.clone()}, device="cpu"),
    "members": lambda params: lazy_stack([TensorDict({"p": params.clone()}, device="cpu") for _ in range(2)]),
    "twice": lambda params: TensorDictParams(TensorDict({"p": params, "y": torch.ones(1)}, device="cpu")),
}


def describe(tree: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the kinds, headers (which have the roles and locks) and keys of all nodes, and the elements of all leaves."""
    encoded = encode(tree)
    rows = [
        (row["kind"], row.get("class"), row["meta"], row["entries"], row["members"]) for row in encoded.nodes
    ]
    return rows, [leaf.detach() for leaf in encoded.leaves]  # fmt: skip


def assert_same(found: Any, wanted: Any) -> None:
    rows, leaves = describe(found)
    wanted_rows, wanted_leaves = describe(wanted)
    assert rows == wanted_rows
    for leaf, other in zip(leaves, wanted_leaves, strict=True):
        assert torch.equal(leaf[...], other)


@pytest.fixture(params=PARTS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    pytest.importorskip(PARTS[request.param])
    return tmp_path / ("save" if request.param == "." else f"save{request.param}")


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("params", PARAMS)
def test_save_params_loads_and_opens_params(params: str, nest: str, path: Path) -> None:
    tree = NESTS[nest](PARAMS[params]())
    save(tree, path)
    assert_same(load(path), tree)
    opened = td_core.open(path)
    assert_same(opened, tree.lock_() if opened.is_locked else tree)


def test_loaded_params_train(path: Path) -> None:
    save(TensorDict({"p": PARAMS["mixed"]()}), path)
    model = nn.Module()
    model.p = load(path)["p"].clone()
    assert [name for name, _ in model.named_parameters()] == ["p.weight", "p.n.bias", "p.n.frozen"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    before = model.p["weight"].detach().clone()
    (model.p["weight"].sum() + model.p["n", "frozen"].sum()).backward()
    optimizer.step()
    assert torch.equal(model.p["weight"], before - 1)
    assert model.p["n", "frozen"].tolist() == [1, 1]


@pytest.mark.parametrize("nest", ["root", "deep"])
@pytest.mark.parametrize("params", ["mixed", "no_convert", "subclass"])
@pytest.mark.parametrize("way", ["pickle", "torch", "consolidated"])
def test_send_params_gives_params(way: str, params: str, nest: str, tmp_path: Path) -> None:
    tree = NESTS[nest](PARAMS[params]())
    if way == "pickle":
        found = pickle.loads(pickle.dumps(tree))
    elif way == "torch":
        file = io.BytesIO()
        torch.save(tree, file)
        file.seek(0)
        found = torch.load(file, weights_only=False)
    else:
        pytest.importorskip("td_distributed")
        assert_same(tree.consolidate(tmp_path / "file"), tree)
        found = TensorDict.from_consolidated(tmp_path / "file")
    assert_same(found, tree)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    pytest.importorskip("td_memmap")
    return tmp_path / "save"


@pytest.mark.parametrize("nest", NESTS)
def test_memmap_returns_params_on_the_files(nest: str, place: Path) -> None:
    tree = NESTS[nest](PARAMS["mixed"]())
    saved = tree.memmap(place)
    assert_same(saved, tree)
    assert saved.is_memmap() and saved.is_shared()
    for leaf in saved._leaves():
        leaf.data.add_(1)
    for leaf, old in zip(load(place)._leaves(), tree._leaves(), strict=True):
        assert torch.equal(leaf, old + 1)


def test_memmap_params_without_path_and_like_return_params(place: Path) -> None:
    tree = NESTS["entry"](PARAMS["mixed"]())
    assert_same(tree.memmap(), tree)
    like = tree.memmap_like(place)
    assert describe(like)[0] == describe(tree)[0]
    assert not any(leaf.any() for leaf in like._leaves())


def test_step_of_loaded_params_writes_the_save_in_mode_r_plus(place: Path) -> None:
    save(TensorDictParams(TensorDict({"w": torch.ones(2)})), place)
    for mode, wanted in (("r", 1), ("c", 1), ("r+", 0)):
        params = td_core.open(place, mode=mode)
        params["w"].sum().backward()
        torch.optim.SGD(params.parameters(), lr=1).step()
        assert params["w"].tolist() == [0, 0]
        assert load(place)["w"].tolist() == [wanted, wanted]


def test_tied_params_stay_one_parameter(path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    save(TensorDictParams(TensorDict({"a": weight, "n": {"b": weight}})), path)
    for params in (load(path), td_core.open(path)):
        assert params["a"] is params["n", "b"]
        assert [name for name, _ in params.named_parameters()] == ["a"]


def test_open_keys_of_tied_params_ties_what_is_opened(path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    save(TensorDictParams(TensorDict({"a": weight, "b": weight, "c": weight})), path)
    opened = td_core.open(path, keys=["b", "c"])
    assert {*opened.keys()} == {"b", "c"} and opened["b"] is opened["c"]


def test_open_keys_of_params_gives_params(path: Path) -> None:
    save(PARAMS["mixed"](), path)
    opened = td_core.open(path, keys=["count", ("n", "frozen")])
    assert type(opened) is TensorDictParams
    assert sorted(map(str, opened.keys(True, True))) == sorted(["count", str(("n", "frozen"))])
    assert not opened["n", "frozen"].requires_grad


def test_make_memmap_in_params_adds_a_parameter(place: Path) -> None:
    params = PARAMS["mixed"]().memmap(place)
    for key in ("new", ("n", "new"), ("fresh", "new")):
        made = params.make_memmap(key, (2,))
        made.fill_(3)
        assert isinstance(params[key], nn.Parameter) and params[key].tolist() == [3, 3]
    assert_same(load(place), params)


def test_refresh_params_keeps_parameter_objects(place: Path) -> None:
    params = PARAMS["mixed"]().memmap_(place)
    held = dict(params.named_parameters())
    changed = PARAMS["mixed"]()
    changed.data.zero_()
    changed["n", "frozen"].requires_grad_(True)
    changed.memmap(place)
    params.memmap_refresh_()
    assert_same(params, changed)
    assert all(held[name] is leaf for name, leaf in params.named_parameters())


def test_append_to_params_keeps_params(place: Path) -> None:
    save(TensorDictParams(TensorDict({"w": torch.ones(2, 3)}, [2], "cpu")), place)
    for rows in (
        TensorDict({"w": torch.zeros(1, 3)}, [1]),
        TensorDictParams(TensorDict({"w": torch.zeros(1, 3)}, [1])),
    ):
        td_core.append(rows, place)
    wanted = torch.cat([torch.ones(2, 3), torch.zeros(2, 3)])
    assert_same(load(place), TensorDictParams(TensorDict({"w": wanted}, [4], "cpu")))


def test_load_older_save_of_params_gives_dict(place: Path) -> None:
    PARAMS["mixed"]().memmap(place)
    meta = json.loads((place / "meta.json").read_text())
    del meta["_outer"]
    (place / "meta.json").write_text(json.dumps(meta))
    loaded = load(place)
    assert type(loaded) is TensorDict and not any(leaf.requires_grad for leaf in loaded._leaves())


@pytest.mark.parametrize("nest", ["root", "deep"])
def test_tensordict_programs_save_and_load_dicts(
    nest: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = NESTS[nest](PARAMS["mixed"]())
    new = place.with_name("new")
    tree.memmap(new)
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    for found in (tree.memmap(place), TensorDict.load_memmap(place), TensorDict.load_memmap(new)):
        assert {row["kind"] for row in encode(found).nodes} == {"TensorDict"}
    assert all("_outer" not in file.read_text() for file in place.rglob("meta.json"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "nobody"},
        {"kind": "TensorDictParams", "meta": 3, "members": ["params"]},
        {"kind": "TensorDictParams", "meta": {}, "members": []},
        {"kind": "TensorDictParams", "meta": {}, "members": ["other"]},
        {"kind": "TensorDictParams", "meta": {"roles": {"z": [["w"]]}}, "members": ["params"]},
        {"kind": "TensorDictParams", "meta": {"roles": {"b": [3]}}, "members": ["params"]},
        {"kind": "TensorDictParams", "meta": {"training": 3}, "members": ["params"]},
        {"kind": "TensorDictParams", "meta": {"tied": 3}, "members": ["params"]},
        {"kind": "TensorDictParams", "meta": {"tied": [3]}, "members": ["params"]},
        {"kind": "TensorDictParams", "meta": {"tied": [[["weight"], ["n", "bias"]]]}, "members": ["params"]},
        {"kind": "TensorDictParams", "class": "gone:Params", "meta": {}, "members": ["params"]},
    ],
)
def test_load_damaged_params_raises_format_error(wrong: Any, place: Path) -> None:
    save(PARAMS["mixed"](), place)
    file = place / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_outer": [wrong]}))
    with pytest.raises(td_core.FormatError, match="meta.json"):
        load(place)


def test_inspect_params_names_their_kind(path: Path) -> None:
    save(TensorDict({"p": PARAMS["mixed"]()}), path)
    assert td_core.inspect(path).children["p"].kind == "TensorDictParams"
