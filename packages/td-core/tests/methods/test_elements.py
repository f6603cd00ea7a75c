"""Methods that repeat, shift and rotate elements: results equal torch, blocks write back, bad arguments change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_core.errors import BatchSizeError, DimError, LockedError, StructureError

SIZE = (2, 3)


def make_td() -> TensorDict:
    x = torch.arange(6).view(2, 3)
    return TensorDict({"x": x, "n": {"y": torch.stack([x * 10, x * 100], -1)}}, SIZE, names=["a", "b"])


KINDS: dict[str, Callable[[], Any]] = {
    "dense": make_td,
    "lazy": lambda: lazy_stack(list(make_td().unbind(0))),
    "lazy along 1": lambda: lazy_stack(list(make_td().unbind(1)), 1),
    "params": lambda: TensorDictParams(make_td(), no_convert=True),
}
#: Operations on a collection and on a tensor, and the same by functions of torch.
OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "repeat": (lambda td: td.repeat(2, 1), lambda x: torch.cat([x, x])),
    "repeat no rows": (lambda td: td.repeat(0, 2), lambda x: torch.cat([x, x], 1)[:0]),
    "repeat_interleave": (lambda td: td.repeat_interleave(2, -1), lambda x: x[:, [0, 0, 1, 1, 2, 2]]),
    "repeat_interleave flat": (
        lambda td: td.repeat_interleave(2), lambda x: torch.stack([x.flatten(0, 1)] * 2, 1).flatten(0, 1),
    ),
    "repeat_interleave each": (
        lambda td: td.repeat_interleave(torch.tensor([2, 0, 1]), 1), lambda x: x[:, [0, 0, 2]],
    ),
    "tile": (lambda td: td.tile(2), lambda x: torch.cat([x, x], 1)),
    "tile more": (lambda td: td.tile([2, 1, 1]), lambda x: torch.stack([x, x])),
    "roll": (lambda td: td.roll(-1, 1), lambda x: x[:, [1, 2, 0]]),
    "roll flat": (lambda td: td.roll(1), lambda x: x.flatten(0, 1)[[5, 0, 1, 2, 3, 4]].unflatten(0, SIZE)),
    "roll both": (lambda td: td.roll((1, 1), (0, -1)), lambda x: x[[1, 0]][:, [2, 0, 1]]),
    "flip": (lambda td: td.flip((0, -1)), lambda x: x[[1, 0]][:, [2, 1, 0]]),
    "fliplr": (lambda td: td.fliplr(), lambda x: x[:, [2, 1, 0]]),
    "flipud": (lambda td: td.flipud(), lambda x: x[[1, 0]]),
    "rot90": (lambda td: td.rot90(), lambda x: x[:, [2, 1, 0]].transpose(0, 1)),
    "rot90 back": (lambda td: td.rot90(-1, (0, -1)), lambda x: x[[1, 0]].transpose(0, 1)),
    "rot90 twice": (lambda td: td.rot90(2), lambda x: x[[1, 0]][:, [2, 1, 0]]),
    "rot90 full": (lambda td: td.rot90(4), lambda x: x),
    "narrow": (lambda td: td.narrow(-1, 1, 2), lambda x: x[:, 1:]),
    "narrow from end": (lambda td: td.narrow(1, -1, 1), lambda x: x[:, 2:]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_element_method_each_kind_equals_indexing(name: str, kind: str) -> None:
    operation, of_leaf = OPERATIONS[name]
    td = KINDS[kind]()
    result = operation(td)
    for key, leaf in make_td().items(True, True):
        assert torch.equal(result[key], of_leaf(leaf))
        assert torch.equal(td[key], leaf), "the source is unchanged"
    assert result.batch_size == result["n"].batch_size == of_leaf(make_td()["x"]).shape


INVERTIBLE = [name for name in OPERATIONS if name.startswith(("roll", "flip", "rot90"))]


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("name", INVERTIBLE)
def test_block_writes_elements_back_to_their_places(name: str, locked: bool) -> None:
    operation, _ = OPERATIONS[name]
    td = make_td()
    td = td.lock_() if locked else td
    with operation(td) as result:
        result["x"] = result["x"] * 2
        result["n", "y"] += 1
    for key, leaf in make_td().items(True, True):
        assert torch.equal(td[key], leaf * 2 if key == "x" else leaf + 1)
    assert td.batch_size == SIZE and td.names == ["a", "b"]


INPLACE = {
    "repeat": (lambda td: td.repeat(2, 1, inplace=True), "repeat"),
    "repeat_interleave": (lambda td: td.repeat_interleave(2, -1, inplace=True), "repeat_interleave"),
    "roll": (lambda td: td.roll(-1, 1, inplace=True), "roll"),
}


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_returns_same_collection_with_new_batch_size(name: str) -> None:
    change, _ = INPLACE[name]
    td = make_td()
    expected = OPERATIONS[name][0](make_td())
    assert change(td) is td
    assert td.batch_size == td["n"].batch_size == expected.batch_size
    assert (td == expected).all()


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_refused_changes_nothing(name: str) -> None:
    change, word = INPLACE[name]
    for td, error in ((make_td().lock_(), LockedError), (KINDS["lazy"](), StructureError)):
        with pytest.raises(error, match=f"cannot {word} in place"):
            change(td)
        assert td.batch_size == SIZE and (td == make_td()).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda td: td.repeat(2),
            ValueError,
            r"one number for each batch dim; got \[2\] for the batch size \[2, 3\]",
        ),
        (lambda td: td.repeat(2, -1), BatchSizeError, "-1"),
        (lambda td: td.repeat_interleave(-1, 0), BatchSizeError, "-1"),
        (lambda td: td.repeat_interleave(torch.tensor([1, 2, 3]), 0), BatchSizeError, "3"),
        (lambda td: td.repeat_interleave(2, 2), DimError, r"range of \[-2, 1\], but got 2"),
        (lambda td: td.tile((-1,)), BatchSizeError, "-1"),
        (lambda td: td.roll(1, 2), DimError, r"range of \[-2, 1\], but got 2"),
        (lambda td: td.roll((1, 2), 0), BatchSizeError, r"\[1, 2\]"),
        (lambda td: td.flip(2), DimError, r"range of \[-2, 1\], but got 2"),
        (lambda td: td.flip((0, 0)), DimError, "0"),
        (lambda td: td[0].fliplr(), DimError, r"range of \[-1, 0\], but got 1"),
        (lambda td: td.rot90(1, (0, -2)), DimError, r"two different dims; got \(0, -2\)"),
        (lambda td: td.rot90(1, (0, 1, 1)), DimError, "two different dims"),
        (lambda td: td.narrow(2, 0, 1), DimError, r"range of \[-2, 1\], but got 2"),
        (lambda td: td.narrow(1, 4, 1), DimError, "4"),
        (lambda td: td.narrow(1, 2, 2), BatchSizeError, "2"),
    ],
)
def test_element_method_bad_argument_raises(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(make_td())


def test_repeat_interleave_output_size_is_checked() -> None:
    counts = torch.tensor([1, 2])
    assert make_td().repeat_interleave(counts, 0, output_size=3).batch_size == (3, 3)
    with pytest.raises(RuntimeError):
        make_td().repeat_interleave(counts, 0, output_size=4)


def test_narrow_result_shares_memory() -> None:
    td = make_td()
    td.narrow(1, 1, 1)["x"].fill_(-1)
    assert td["x"].tolist() == [[0, -1, 2], [3, -1, 5]]
