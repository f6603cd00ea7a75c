"""What a look at a save returns: trees of nodes and leaves, problems and reports, printed in lines of safe characters."""

from __future__ import annotations

import pytest

from td_core import Problem, Report, Tree
from td_core._encode.inspection import make_printable, show_size


def make_tree() -> Tree:
    leaf = Tree("a", "leaf", [3], "torch.float32", 12, place="bytes 0 to 12")
    return Tree("x", "TensorDict", [3], nbytes=12, children={"a": leaf})


def test_tree_walk_yields_key_paths_of_leaves() -> None:
    tree = make_tree()
    assert [(path, node.kind, node.place) for path, node in tree.walk()] == [
        ((), "TensorDict", None),
        (("a",), "leaf", "bytes 0 to 12"),
    ]
    assert str(tree) == "x: TensorDict [3], 12 bytes\n    a: leaf [3] torch.float32, 12 bytes"
    assert tree.as_dict()["children"]["a"]["place"] == "bytes 0 to 12"


def test_tree_prints_provider_and_pickled_values() -> None:
    tree = Tree("x", "units.Quantity", provider="units==1.0", pickled=["other.pickle"])
    assert str(tree) == "x: units.Quantity, 0 bytes, by units==1.0, PICKLED: other.pickle"


def test_tree_prints_names_without_control_characters() -> None:
    assert str(Tree("a\n\x1b[31mb", "leaf", [])) == "a\\n\\x1b[31mb: leaf [], 0 bytes"


def test_deep_tree_is_walked_and_converted() -> None:
    root = make_tree()
    for _ in range(3000):
        root = Tree("x", "TensorDict", children={"k": root})
    *_, (path, leaf) = root.walk()
    assert (path, leaf.name) == (("k",) * 3000 + ("a",), "a")
    row = root.as_dict()
    for _ in range(3000):
        row = row["children"]["k"]
    assert row["children"]["a"]["nbytes"] == 12


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KB"),
        (1_709_178, "1.63 MB"),
        (1 << 50, "1.00 PB"),
        (1 << 61, "2048.00 PB"),
    ],
)
def test_show_size_uses_largest_unit(nbytes: int, shown: str) -> None:
    assert show_size(nbytes) == shown


@pytest.mark.parametrize(
    ("text", "shown"), [("a b", "a b"), ("\u00e9", "\u00e9"), ("a\tb", "a\\tb"), ("", "")]
)
def test_make_printable_escapes_control_characters(text: str, shown: str) -> None:
    assert make_printable(text) == shown


@pytest.mark.parametrize(
    ("kinds", "ok"),
    [([], True), (["modified"], True), (["modified", "damaged"], False), (["missing"], False)],
)
def test_report_is_ok_without_damage(kinds: list[str], ok: bool) -> None:
    report = Report("x", 3, 1, [Problem(f"{i}", kind, "detail") for i, kind in enumerate(kinds)])
    assert report.ok is ok
    assert str(report).split("\n") == [
        f"x: 3 files, 1 hashes, {len(kinds)} problems",
        *[f"{i} is {kind}: detail" for i, kind in enumerate(kinds)],
    ]
