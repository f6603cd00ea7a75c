"""Random modules and sequences give equal results, inputs, keys and types of error with td and tensordict.

Excluded, because td differs on purpose:

- a key and a key below it (``"n"`` and ``("n", "a")``): in td, a module that writes a node provides its entries;
- modules without out keys or without selected keys under ``set_skip_existing``: td runs them;
- dicts with only some of the out keys: td raises, tensordict stores one value;
- nested out keys of a sequence with an output collection: in tensordict the output node also receives the other entries
  and the batch size of the input node;
- a selection of ``"_"``: calls of tensordict raise;
- a list as a value: td and tensordict store it in different forms.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("TD_INTEROP_EXAMPLES", "300"))
Draw = Callable[..., Any]
KEYS: list[Any] = ["a", "b", "c", ("n", "a"), ("n", "b"), ("m", "k", "a")]


def compute(count: int, kind: str, *values: Any, **named: Any) -> Any:
    """Compute ``count`` results from the inputs of a module."""
    total: Any = 1
    for place, value in enumerate([*values, *named.values()]):
        total = total + (place + 2) * value
    results = [total * (place + 1) for place in range(count)]
    if kind == "one more":
        results.append(total)
    if kind == "none":
        return None
    if kind == "fails":
        raise ZeroDivisionError("so it is")
    return results[0] if len(results) == 1 else tuple(results)


class Module(NamedTuple):
    """A specification of a module."""

    in_keys: Any
    out_keys: list[Any]
    kind: str
    options: dict[str, Any]
    selected: list[Any] | None

    def build(self, nn: Any) -> Any:
        fn = partial(compute, len(self.out_keys), self.kind)
        made = nn.TensorDictModule(fn, self.in_keys, self.out_keys, **self.options)
        return made if self.selected is None else made.select_out_keys(*self.selected)


class Sequence(NamedTuple):
    """A specification of a sequence."""

    members: list[Any]
    options: dict[str, Any]
    selects: int
    edit: str

    def build(self, nn: Any) -> Any:
        made = nn.TensorDictSequential(*[member.build(nn) for member in self.members], **self.options)
        keys = [key for key in made.out_keys if key != "_"][: self.selects]
        if keys:
            made.select_out_keys(*keys)
        if self.edit == "slice":
            return made[:2]
        if self.edit == "delete":
            del made[-1]
        if self.edit == "subsequence":
            return made.select_subsequence(out_keys=made.out_keys[:1])
        return made


class Call(NamedTuple):
    """A specification of a call of a module."""

    form: str
    present: list[Any]
    batch: tuple[int, ...]
    lazy: bool
    out: bool
    skip: Any


@st.composite
def modules(draw: Draw) -> Module:
    """Draw a module, sometimes one that raises."""
    in_keys: Any = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
    options: dict[str, Any] = {}
    if draw(st.integers(0, 3)) == 0:
        in_keys = dict(zip("xyz", in_keys))
    out_keys = draw(st.lists(st.sampled_from([*KEYS, "_"]), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["plain"] * 12 + ["one more", "none", "fails"]))
    options["inplace"] = draw(st.sampled_from([True, True, True, False, "empty", None]))
    if draw(st.integers(0, 5)) == 0:
        options["strict"] = True
    selected = None
    if draw(st.integers(0, 4)) == 0:
        selected = [
            key for key in draw(st.lists(st.sampled_from(out_keys), max_size=2, unique=True)) if key != "_"
        ] or None
    return Module(in_keys, out_keys, kind, options, selected)


@st.composite
def sequences(draw: Draw, depth: int = 1) -> Sequence:
    """Draw a sequence, sometimes with a nested sequence."""
    inside = st.one_of(modules(), modules(), sequences(depth - 1)) if depth else modules()
    members = draw(st.lists(inside, min_size=1, max_size=3))
    options: dict[str, Any] = {"inplace": draw(st.sampled_from([None, None, True, False, "empty"]))}
    if draw(st.integers(0, 3)) == 0:
        options["partial_tolerant"] = True
    selects = draw(st.sampled_from([0, 0, 1, 2]))
    edit = draw(st.sampled_from(["", "", "", "slice", "delete", "subsequence"]))
    return Sequence(members, options, selects, edit)


@st.composite
def calls(draw: Draw) -> Call:
    """Draw a call of a module."""
    form = draw(st.sampled_from(["collection", "collection", "keyword", "position", "tensordict="]))
    present = draw(st.lists(st.sampled_from(KEYS), min_size=2, max_size=6, unique=True))
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    lazy = bool(batch) and draw(st.integers(0, 4)) == 0
    skip = draw(st.sampled_from([False, False, False, True, ["a", ("n", "a")]]))
    return Call(form, present, batch, lazy, draw(st.integers(0, 4)) == 0, skip)


def tensor(key: Any, batch: tuple[int, ...]) -> torch.Tensor:
    return torch.full((*batch, 2), float(KEYS.index(key) + 1))


def collection(lib: Any, call: Call) -> Any:
    if not call.lazy:
        return lib.TensorDict({key: tensor(key, call.batch) for key in call.present}, call.batch)
    members = [
        lib.TensorDict({key: tensor(key, call.batch[1:]) for key in call.present}, call.batch[1:])
        for _ in range(call.batch[0])
    ]
    return lib.lazy_stack(members)


def run(lib: Any, nn: Any, recipe: Any, call: Call) -> Any:
    """Run a module with one library and return its keys, result and input."""
    module = recipe.build(nn)
    keys = [list(module.in_keys), list(module.out_keys), list(module.out_keys_source)]
    data = collection(lib, call)
    options: dict[str, Any] = {"tensordict_out": lib.TensorDict({}, call.batch)} if call.out else {}
    with nn.set_skip_existing(call.skip):
        if call.form == "collection":
            result = module(data, **options)
        elif call.form == "tensordict=":
            result = module(tensordict=data, **options)
        else:
            values = {key: tensor(key, call.batch) for key in module.in_keys if key in call.present}
            if call.form == "position":
                result = module(*values.values(), **options)
            else:
                named = {
                    key if isinstance(key, str) else "_".join(key): value for key, value in values.items()
                }
                result = module(**named, **options)
    return [keys, result, data, result is data]


def sequences_of(recipe: Any) -> list[Sequence]:
    """Return a sequence and all sequences nested in it."""
    if isinstance(recipe, Module):
        return []
    return [recipe, *[found for member in recipe.members for found in sequences_of(member)]]


def differs_on_purpose(recipe: Any, call: Call, nn: Any, attempt: Callable[..., Any]) -> bool:
    """Return True if a program is one of the excluded cases."""
    module = attempt(lambda: recipe.build(nn))
    if call.skip and not getattr(module, "out_keys", True):
        return True
    if isinstance(recipe, Module):
        return False
    written = set(getattr(module, "out_keys", ()))
    nodes = {key[0] for key in written if isinstance(key, tuple)}
    if nodes and call.batch and any(each.options["inplace"] is False for each in sequences_of(recipe)):
        return True
    every = {*call.present, *getattr(module, "out_keys_source", ())}
    return any(isinstance(key, tuple) and key[0] in nodes and key not in written for key in every)


@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    deadline=None,
)
@given(recipe=st.one_of(modules(), sequences()), call=calls())
def test_random_module_equals_tensordict(
    recipe: Any,
    call: Call,
    both: list[tuple[Any, Any]],
    same: Callable[..., None],
    attempt: Callable[..., Any],
) -> None:
    assume(not differs_on_purpose(recipe, call, both[0][1], attempt))
    ours, theirs = (attempt(lambda lib=lib, nn=nn: run(lib, nn, recipe, call)) for lib, nn in both)
    same(ours, theirs, exact=False)
