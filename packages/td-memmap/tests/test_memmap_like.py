"""memmap_like creates the files of a tree without writing its elements."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_memmap import FileTakenError

HAS_VALUES = find_spec("td_tensorclass") is not None


needs_values = pytest.mark.skipif(not HAS_VALUES, reason="values are provided by td-tensorclass")


def test_memmap_like_creates_sparse_files(tmp_path: Path) -> None:
    datum = TensorDict({"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "label": 0})
    data = datum.expand(1_000_000).memmap_like(tmp_path / "data")
    assert data["image"].shape == (1_000_000, 3, 64, 64)
    stat = os.stat(tmp_path / "data" / "image.memmap")
    assert stat.st_size == 12_288_000_000
    assert stat.st_blocks * 512 < 1_000_000
    data[500_000] = TensorDict({"image": torch.ones(3, 64, 64, dtype=torch.uint8), "label": 7})
    loaded = TensorDict.load_memmap(tmp_path / "data")
    assert loaded[500_000]["label"] == 7
    assert loaded["image"][500_000].sum() == 12_288


def test_memmap_like_over_save_keeps_elements_or_raises(nest: Any, prefix: Path, same: Any) -> None:
    nest.memmap(prefix)
    again = nest.memmap_like(prefix)
    same(again, nest)
    assert again.is_memmap()
    again["a"].fill_(3)
    assert (TensorDict.load_memmap(prefix)["a"] == 3).all()
    with pytest.raises(
        FileTakenError, match=r"key 'a' is shape \[3, 2\] of torch.float32 in the save that is there"
    ):
        TensorDict({"a": torch.zeros(4)}).memmap_like(prefix)
    with pytest.raises(FileTakenError, match="has other leaves too"):
        TensorDict({"a": torch.zeros(3, 2)}).memmap_like(prefix)
    assert (TensorDict.load_memmap(prefix)["a"] == 3).all()
    with pytest.raises(FileTakenError, match="key 'b' is nothing in the save"):
        TensorDict({"b": torch.zeros(3, 2)}).memmap_like(prefix)


@pytest.mark.parametrize("changes", [
    {}, {"batch_size": [3, 2]}, {"names": ["t"]},
    *[pytest.param({"value": value}, marks=needs_values) for value in ("b", ["a"])],
], ids=str)  # fmt: skip
def test_memmap_like_over_save_updates_names_and_keeps_values(
    changes: dict[str, Any], prefix: Path, same: Any
) -> None:
    def make(number: int, value: Any = ("a",), batch_size: Any = (3,), **options: Any) -> Any:
        td = TensorDict({"a": torch.full((3, 2), number)}, batch_size, **options)
        return td.set_non_tensor("value", value) if HAS_VALUES else td

    make(7).memmap(prefix)
    metadata = os.stat(prefix / "meta.json").st_ino
    like, loaded = make(0, **changes).memmap_like(prefix), TensorDict.load_memmap(prefix)
    is_same = changes.keys() <= {"value"}
    changes.pop("value", None)
    same(like, make(7, **changes))
    same(loaded, make(7, **changes))
    like["a"].fill_(1)
    assert (loaded["a"] == 1).all()
    # The metadata is rewritten only if it differs.
    assert (os.stat(prefix / "meta.json").st_ino == metadata) == is_same


def make_values(words: Any) -> Any:
    return TensorDict({"x": torch.zeros(3), "word": words, "n": {"word": words}}, [3])


def wrap(words: Any) -> Any:
    tensorclass = pytest.importorskip("td_tensorclass").tensorclass
    made = tensorclass(type("Words", (), {"__annotations__": {"x": torch.Tensor, "n": Any, "word": Any}}))
    return made(x=torch.zeros(3), n=make_values(words), word=words, batch_size=[3])


KINDS: dict[str, Any] = {
    "TensorDict": make_values,
    "TensorDictParams": lambda words: TensorDictParams(make_values(words), no_convert=True),
    "lazy stack": lambda words: lazy_stack(list(make_values(words).unbind(0))),
    "tensorclass": wrap,
    "value": lambda words: make_values([words] * 3 if isinstance(words, str) else words).get("word"),
}


@needs_values
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("words", ["one", ["one", "one", "one"]], ids=["value", "column"])
def test_memmap_like_over_save_keeps_values_as_elements(
    kind: str, compatible: bool, words: Any, prefix: Path
) -> None:
    def read(data: Any) -> list[Any]:
        return [data.tolist()] if kind == "value" else [data[key].tolist() for key in ("word", ("n", "word"))]

    def write(data: Any, word: str) -> None:
        data[1] = {"word": word, "n": {"word": word}} if kind != "value" else word

    make, count = KINDS[kind], 1 if kind == "value" else 2
    write(make(words).memmap_like(prefix, compatible=compatible), "two")
    for word in ("three", "four"):
        again = make("example").memmap_like(prefix, compatible=compatible)
        before = {"three": "two", "four": "three"}[word]
        assert read(again) == [["one", before, "one"]] * count
        write(again, word)
        assert read(again) == read(TensorDict.load_memmap(prefix)) == [["one", word, "one"]] * count


@needs_values
@pytest.mark.parametrize("name", ["save", "save.tdz"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda td: td.exclude("word"), "the save that is there also has key 'word'"),
        (lambda td: td.exclude(("n", "word")), r"the save that is there also has key \('n', 'word'\)"),
        (lambda td: td.exclude("n"), r"the save that is there also has key 'n'"),
        (lambda td: td.set("more", "a"), "key 'more' is a value here, and not in the save that is there"),
        (lambda td: td.set("more", TensorDict(batch_size=[3])), "the save that is there has no key 'more'"),
        (lambda td: td.set("n", ["a"] * 3), "key 'n' is a value here, and not"),
        (lambda td: td.set("word", TensorDict(batch_size=[3])), "key 'word' is a value in the save that is there"),
        (lambda td: td.set("word", torch.zeros(3)), "key 'word' is nothing in the save that is there"),
        (lambda td: td.exclude("x")[:2], r"batch size \[3\] in the save that is there, and \[2\] here"),
    ],
)  # fmt: skip
def test_memmap_like_over_save_of_other_values_raises(
    change: Any, text: str, name: str, tmp_path: Path
) -> None:
    made = make_values(["a", "b", "c"])
    if r"\[2\]" in text:  # leaves of other sizes are refused before
        made = made.exclude("x")
    made.memmap(tmp_path / name)
    with pytest.raises(FileTakenError, match=text):
        change(made.clone()).memmap_like(tmp_path / name)
    assert TensorDict.load_memmap(tmp_path / name)["word"] == ["a", "b", "c"]


@needs_values
def test_memmap_like_over_archive_keeps_values(tmp_path: Path) -> None:
    make_values(["a", "b", "c"]).memmap(tmp_path / "save.tdz")
    like = make_values("example").expand(3).memmap_like(tmp_path / "save.tdz")
    like["x"].fill_(2)
    assert like["n", "word"] == like["word"] == ["a", "b", "c"]
    assert TensorDict.load_memmap(tmp_path / "save.tdz")["x"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("where", ["save", "save.tdz", None])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memmap_like_keeps_nested_tensor_shapes(
    where: str | None, layout: torch.layout, tmp_path: Path
) -> None:
    td = TensorDict({"x": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)})
    place = None if where is None else tmp_path / where
    found = [td.memmap_like(place)]
    if place is not None:
        found.append(TensorDict.load_memmap(place))
    for like in found:
        assert like["x"].layout == layout
        assert [part.tolist() for part in like["x"].unbind()] == [[[0, 0, 0]] * 2, [[0, 0, 0]]]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memmap_like_other_nested_shapes_raises(layout: torch.layout, prefix: Path) -> None:
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    td = TensorDict({"x": torch.nested.nested_tensor(parts, layout=layout)})
    td.memmap(prefix)
    like = td.memmap_like(prefix)["x"].unbind()
    assert all(torch.equal(one, other) for one, other in zip(like, parts, strict=True))
    other = TensorDict({"x": torch.nested.nested_tensor(parts[::-1], layout=layout)})
    with pytest.raises(FileTakenError, match=r"is shape \[\[2, 3\], \[1, 3\]\] of torch.float32 in the save"):
        other.memmap_like(prefix)
    (prefix / "meta.json").write_text("no metadata")
    with pytest.raises(FileTakenError, match="what is there is damaged: .* is not valid metadata"):
        td.memmap_like(prefix)


def test_memmap_like_tied_leaf_saved_as_two_files_raises(prefix: Path) -> None:
    leaf = torch.ones(2)
    TensorDict({"a": torch.ones(2), "b": torch.ones(2)}).memmap(prefix)
    with pytest.raises(FileTakenError, match="key 'b' is the same tensor as another leaf here"):
        TensorDict({"a": leaf, "b": leaf}).memmap_like(prefix)


def test_memmap_like_accepts_meta_tensors(prefix: Path) -> None:
    like = TensorDict({"a": torch.zeros(3, device="meta")}).memmap_like(prefix)
    assert like["a"].tolist() == [0, 0, 0]
    assert TensorDict({"a": torch.ones(3)}).memmap_like()["a"].tolist() == [0, 0, 0]
