"""Random programs on any arrangement of dense collections and lazy stacks, element by element.

The model is a tensor of positions and a list of elements: an element holds the tensors under all keys at one position of
the batch. A shape operation is applied to the tensor of positions with torch, a pointwise one to each element separately.
So the members of a stack may differ in keys and shapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from td_core import LazyStackedTensorDict, TensorDict
from td_core.errors import TensorDictError

DEVICE = os.environ.get("TD_TEST_DEVICE", "cpu")
Draw = Callable[..., Any]
Element = dict[tuple[str, ...], Tensor]


class Model(NamedTuple):
    """The elements of a collection, and a tensor with the number of the element at each position."""

    places: Tensor
    elements: list[Element]

    def move(self, move: Callable[[Tensor], Tensor]) -> Model:
        return Model(move(self.places), self.elements)

    def map(self, function: Callable[[Tensor], Tensor]) -> Model:
        return Model(
            self.places, [{key: function(leaf) for key, leaf in each.items()} for each in self.elements]
        )


@st.composite
def draw_spec(draw: Draw, depth: int = 2) -> dict[str, Any]:
    """Draw the keys and shapes of an element."""
    keys = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True))
    shapes = st.lists(st.integers(0, 2), max_size=2)
    return {key: draw(draw_spec(depth - 1) if depth and draw(st.booleans()) else shapes) for key in keys}


def vary_spec(draw: Draw, spec: dict[str, Any]) -> dict[str, Any]:
    """Draw a variant of an element, in which some shapes or keys differ."""
    out: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict):
            out[key] = vary_spec(draw, value)
        else:
            out[key] = [size + (draw(st.integers(0, 3)) == 0) for size in value]
    if draw(st.integers(0, 3)) == 0:
        out["e"] = []
    return out


def make_element(spec: dict[str, Any], numbers: Any) -> TensorDict:
    entries = {
        key: make_element(value, numbers)
        if isinstance(value, dict)
        else torch.full(value, next(numbers), device=DEVICE)
        for key, value in spec.items()
    }
    return TensorDict(entries)


def flatten(td: Any) -> Element:
    return {key if isinstance(key, tuple) else (key,): leaf for key, leaf in td.items(True, True)}


def draw_collection(
    draw: Draw, batch: tuple[int, ...], spec: dict[str, Any], numbers: Any
) -> tuple[Any, Model]:
    """Draw a collection, dense or a lazy stack of drawn collections, and its model."""
    alike = draw(st.booleans())
    if not batch or 0 in batch or draw(st.integers(0, 3)) == 0:
        spec = spec if alike else vary_spec(draw, spec)
        count = torch.Size(batch).numel()
        elements = [make_element(spec, numbers) for _ in range(max(count, 1))]
        td = torch.stack(elements).reshape(batch) if count else torch.stack(elements)[:0].reshape(batch)
        return td, Model(torch.arange(count).view(batch), [flatten(each) for each in elements[:count]])
    dim = draw(st.integers(0, len(batch) - 1))
    members = [
        draw_collection(draw, batch[:dim] + batch[dim + 1 :], spec, numbers) for _ in range(batch[dim])
    ]
    models = [model for _, model in members]
    size = len(models[0].elements)
    places = torch.stack([model.places + size * i for i, model in enumerate(models)], dim)
    stack = LazyStackedTensorDict(*[td for td, _ in members], stack_dim=dim)
    return stack, Model(places, [each for model in models for each in model.elements])


def assert_matches_model(td: Any, model: Model) -> None:
    assert td.batch_size == model.places.shape
    for place in product(*map(range, td.batch_size)):
        found, expected = flatten(td[place]), model.elements[model.places[place]]
        assert found.keys() == expected.keys()
        for key, leaf in expected.items():
            torch.testing.assert_close(found[key], leaf, rtol=0, atol=0)


def writing(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(td: Any) -> Any:
        td = td.clone()
        value(td)
        return td

    return run


MOVES: dict[str, Callable[[Any, int], Any]] = {
    "int": lambda x, dim: x.movedim(dim, 0)[-1],
    "slice": lambda x, dim: x.movedim(dim, 0)[::2],
    "list": lambda x, dim: x[[0, -1, 0]],
    "mask": lambda x, dim: x[torch.arange(x.shape[0]) % 2 == 0],
    "full mask": lambda x, dim: x[torch.arange(x.numel()).view(x.shape) % 3 == 0],
    "None": lambda x, dim: x[..., None],
    "reshape": lambda x, dim: x.reshape(-1),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "squeeze": lambda x, dim: x.squeeze(),
    "permute": lambda x, dim: x.permute(*reversed(range(x.ndim))),
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "expand": lambda x, dim: x.expand(2, *x.shape),
    "repeat": lambda x, dim: x.repeat(*[2] * x.ndim),
    "repeat_interleave": lambda x, dim: x.repeat_interleave(2, dim),
    "split": lambda x, dim: x.split(2, dim)[-1],
    "unbind": lambda x, dim: x.unbind(dim)[0],
    "unflatten": lambda x, dim: x.unflatten(dim, (-1, 1)),
    "unflatten in two": lambda x, dim: x.unflatten(dim, (2, -1)),
    "flatten": lambda x, dim: x.flatten(0, dim),
    "stack": lambda x, dim: torch.stack([x, x], dim),
    "cat": lambda x, dim: torch.cat([x, x], dim),
}
MAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "add": (lambda td: td + 1, lambda leaf: leaf + 1),
    "twice": (lambda td: td + td, lambda leaf: leaf + leaf),
    "neg": (lambda td: td.neg(), torch.neg),
    "mul_": (lambda td: td.clone().mul_(2), lambda leaf: leaf * 2),
    "apply": (lambda td: td.apply(lambda leaf: leaf * 3), lambda leaf: leaf * 3),
    "double": (lambda td: td.double(), torch.Tensor.double),
    "update": (lambda td: td.clone().update(td * 2), lambda leaf: leaf * 2),
    "update_": (lambda td: td.clone().update_(td * 2), lambda leaf: leaf * 2),
    "assign": (lambda td: writing(lambda to: to.__setitem__(..., td * 2))(td), lambda leaf: leaf * 2),
    "fill": (lambda td: writing(lambda to: to.__setitem__(..., 7))(td), lambda leaf: torch.full_like(leaf, 7)),
    "pytree": (lambda td: torch.utils._pytree.tree_map(torch.neg, td), torch.neg),
    "keys": (lambda td: td.flatten_keys("/").unflatten_keys("/"), lambda leaf: leaf),
    "keys in place": (lambda td: td.clone().flatten_keys("/", inplace=True).unflatten_keys("/"), lambda leaf: leaf),
    "state": (lambda td: td.clone().zero_().load_state_dict(td.state_dict()), lambda leaf: leaf),
    "where": (lambda td: td.where(torch.zeros(td.batch_size, dtype=torch.bool, device=DEVICE), td * 2), lambda leaf: leaf * 2),
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_program_moves_elements_as_torch(data: st.DataObject) -> None:
    draw = data.draw
    batch = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    td, model = draw_collection(draw, batch, draw(draw_spec()), iter(range(10_000)))
    if draw(st.booleans()):
        # Nest the collection in a dense node.
        td = TensorDict({"below": td}, batch)
        model = Model(
            model.places, [{("below", *key): leaf for key, leaf in e.items()} for e in model.elements]
        )
    for name in draw(st.lists(st.sampled_from([*MOVES, *MAPS]), min_size=1, max_size=4)):
        try:
            if name in MOVES:
                dim = draw(st.integers(0, max(model.places.ndim - 1, 0)))
                expected = model.move(lambda places, name=name, dim=dim: MOVES[name](places, dim))
            else:
                expected = model.map(MAPS[name][1])
        except (RuntimeError, IndexError, TypeError):
            return
        try:
            result = MOVES[name](td, dim) if name in MOVES else MAPS[name][0](td)
        except TensorDictError as error:
            # Uneven elements may raise an error of td; elements with equal keys and shapes may not.
            shapes = [{key: leaf.shape for key, leaf in each.items()} for each in model.elements]
            # Some functions of torch treat a tensor without dims like one with a single dim.
            assert any(each != shapes[0] for each in shapes) or not td.ndim, f"{name}: {error}"
            return
        assert_matches_model(result, expected)
        assert_matches_model(td, model)
        td, model = result, expected


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_program_keeps_dim_names_as_dense(data: st.DataObject) -> None:
    draw = data.draw
    batch = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    names = [name if draw(st.booleans()) else None for name in "xyz"[: len(batch)]]
    td, _ = draw_collection(draw, batch, draw(draw_spec()), iter(range(10_000)))
    if below := draw(st.booleans()):
        td = TensorDict({"below": td}, batch)
    td.names = names
    dense = TensorDict({"a": torch.zeros(batch, device=DEVICE)}, batch, names=names)
    for name in draw(st.lists(st.sampled_from([*MOVES, *MAPS]), min_size=1, max_size=4)):
        dim = draw(st.integers(0, max(dense.ndim - 1, 0)))
        try:
            dense, td = [MOVES[name](x, dim) if name in MOVES else MAPS[name][0](x) for x in (dense, td)]
        except (TensorDictError, RuntimeError, IndexError, TypeError):
            return
        assert td.names == dense.names, name
        assert not below or td["below"].names == dense.names, name
