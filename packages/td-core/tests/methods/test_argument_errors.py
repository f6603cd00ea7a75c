"""Arguments of another type raise an error that names the operation and the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from td_core import TensorDict, lazy_stack, stack
from td_core.errors import DimNamesError

MASK = torch.zeros(6, 2, dtype=torch.bool)
Call = Callable[[Any, Any], Any]
#: For each operation and argument: a call, and whether the argument is one int ("int"), several ("ints") or either of them.
CALLS: dict[str, tuple[Call, str]] = {
    "split: split_size": (lambda td, x: td.split(x, 0), "either"),
    "split: dim": (lambda td, x: td.split(2, x), "int"),
    "chunk: chunks": (lambda td, x: td.chunk(x), "int"),
    "chunk: dim": (lambda td, x: td.chunk(2, x), "int"),
    "tensor_split: indices_or_sections": (lambda td, x: td.tensor_split(x), "either"),
    "tensor_split: dim": (lambda td, x: td.tensor_split(2, x), "int"),
    "unbind: dim": (lambda td, x: td.unbind(x), "int"),
    "view: shape": (lambda td, x: td.view(6, x), "int"),
    "reshape: shape": (lambda td, x: td.reshape(6, x), "int"),
    "permute: dims": (lambda td, x: td.permute(1, x), "int"),
    "expand: shape": (lambda td, x: td.expand(2, x, 2), "int"),
    "broadcast_to: shape": (lambda td, x: td.broadcast_to(x), "ints"),
    "unflatten: dim": (lambda td, x: td.unflatten(x, (2, 3)), "int"),
    "unflatten: sizes": (lambda td, x: td.unflatten(0, x), "ints"),
    "flatten: start_dim": (lambda td, x: td.flatten(x, 1), "optional"),
    "flatten: end_dim": (lambda td, x: td.flatten(0, x), "optional"),
    "squeeze: dim": (lambda td, x: td.squeeze(x), "optional"),
    "unsqueeze: dim": (lambda td, x: td.unsqueeze(x), "int"),
    "transpose: dim0": (lambda td, x: td.transpose(x, 0), "int"),
    "transpose: dim1": (lambda td, x: td.swapaxes(0, x), "int"),
    "movedim: source": (lambda td, x: td.movedim(x, 0), "either"),
    "movedim: destination": (lambda td, x: td.movedim(0, x), "either"),
    "gather: dim": (lambda td, x: td.gather(x, MASK.long()), "int"),
    "gather: index": (lambda td, x: td.gather(0, x), "int"),
    "repeat: repeats": (lambda td, x: td.repeat(2, x), "int"),
    "repeat_interleave: repeats": (lambda td, x: td.repeat_interleave(x, 0), "int"),
    "repeat_interleave: dim": (lambda td, x: td.repeat_interleave(2, x), "optional"),
    "tile: dims": (lambda td, x: td.tile(x), "either"),
    "roll: shifts": (lambda td, x: td.roll(x, 0), "either"),
    "roll: dims": (lambda td, x: td.roll(1, x), "optional"),
    "flip: dims": (lambda td, x: td.flip(x), "either"),
    "rot90: k": (lambda td, x: td.rot90(x), "int"),
    "rot90: dims": (lambda td, x: td.rot90(1, x), "ints"),
    "narrow: dim": (lambda td, x: td.narrow(x, 0, 1), "int"),
    "narrow: start": (lambda td, x: td.narrow(0, x, 1), "int"),
    "narrow: length": (lambda td, x: td.narrow(0, 0, x), "int"),
    "pad: pad_size": (lambda td, x: td.pad(x), "ints"),
    "stack: dim": (lambda td, x: stack([td, td], x), "int"),
    "cat: dim": (lambda td, x: td.cat([td, td], x), "int"),
    "lazy_stack: dim": (lambda td, x: lazy_stack([td, td], x), "int"),
    "to_lazystack: dim": (lambda td, x: td.to_lazystack(x), "int"),
    "size: a dim": (lambda td, x: td.size(x), "optional"),
    "sum: dim": (lambda td, x: td.sum(x), "optional"),
    "masked_select: a mask": (lambda td, x: td.masked_select(x), "mask"),
    "masked_fill: a mask": (lambda td, x: td.masked_fill(x, 0), "mask"),
    "masked_fill_: a mask": (lambda td, x: td.masked_fill_(x, 0), "mask"),
    "where: a mask": (lambda td, x: td.where(x, 0), "mask"),
    "masked_fill: value": (lambda td, x: td.masked_fill(MASK, x), "list"),
    "masked_fill_: value": (lambda td, x: td.masked_fill_(MASK, x), "list"),
}
_SCALARS: list[object] = ["2", 2.5, None, {}]
WRONG: dict[str, list[object]] = {
    "int": [*_SCALARS, [2, 4], [[1, 2]]],
    "ints": ["23", 2.5, None, ["2", "4"], [2, 4.5], [[1, 2]]],
    "either": ["2", 2.5, None, ["2", "4"], [2, 4.5], [[1, 2]], {}],
    "optional": [2.5, [[1, 2]], {}],
    "mask": [None, "2", ["a", "b"], object()],
    "list": [["2", "4"], [2, 4.5]],
}


#: The arguments that may be names of dims, so that a wrong string is an unknown name.
TAKE_NAMES = {
    "split: dim", "chunk: dim", "tensor_split: dim", "unbind: dim", "permute: dims", "unflatten: dim", "transpose: dim0",
    "transpose: dim1", "movedim: source", "gather: dim", "flip: dims", "rot90: dims", "narrow: dim", "cat: dim",
    "to_lazystack: dim",
}  # fmt: skip


@pytest.mark.parametrize("kind", [lambda td: td, lambda td: lazy_stack(td.unbind(0))], ids=["dense", "lazy"])
@pytest.mark.parametrize("argument", CALLS)
def test_call_shape_operation_wrong_type_names_operation_and_argument(
    argument: str, kind: Callable[[TensorDict], Any]
) -> None:
    call, accepted = CALLS[argument]
    data = kind(TensorDict({"x": torch.zeros(6, 2, 3)}, batch_size=[6, 2]))
    for wrong in WRONG[accepted]:
        first = wrong[0] if isinstance(wrong, list) else wrong
        if argument in TAKE_NAMES and isinstance(first, str):
            with pytest.raises(
                DimNamesError, match=rf"^{argument.partition(':')[0]}: no batch dim is named '{first}'"
            ):
                call(data, wrong)
            continue
        with pytest.raises(TypeError, match=rf"^{argument} .*; got ") as error:
            call(data, wrong)
        assert "operand" not in str(error.value)


@pytest.mark.parametrize("name", ["view", "reshape", "permute", "expand", "repeat"])
@pytest.mark.parametrize("wrong", [2.5, None, object()], ids=["float", "none", "object"])
def test_call_shape_operation_with_one_value_names_operation(name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) takes ints, or one sequence of ints; got "):
        getattr(TensorDict(batch_size=[6, 2]), name)(wrong)


@pytest.mark.parametrize(
    "sizes", [[2, 4], (2, 4), torch.tensor([2, 4]), torch.tensor([2, 4]).numpy()], ids=type
)
def test_split_by_ints_of_any_sequence_equals_torch(sizes: Any) -> None:
    parts = TensorDict({"x": torch.arange(6)}, batch_size=[6]).split(sizes)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3, 4, 5]]
