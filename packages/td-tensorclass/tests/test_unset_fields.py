"""Fields that are None equal the value None of other collections, and conversions and writes keep them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, TensorDictParams, assert_close, from_any, lazy_stack
from td_core.errors import BatchSizeError, KeyMismatchError, KeyPathError
from td_tensorclass import TensorClass


class Turn(TensorClass):
    x: Tensor
    reply: Turn | None = None
    speaker: str = None
    extra: Tensor = None


def make_turn(**fields: Any) -> Turn:
    return Turn(torch.arange(4.0), batch_size=[4], **fields)


TURNS: dict[str, Callable[[], Turn]] = {
    "none": make_turn,
    "speaker": lambda: make_turn(speaker="a"),
    "nested": lambda: make_turn(reply=make_turn(speaker="b"), extra=torch.ones(4, 2)),
}

#: Collections of batch size [4] or [2, 4] with turns in them.
PLACES: dict[str, Callable[[Callable[[], Turn]], Any]] = {
    "root": lambda make: make(),
    "entry": lambda make: TensorDict({"turn": make(), "y": torch.ones(4)}, [4]),
    "stack": lambda make: torch.stack([make(), make()]),
    "lazy stack": lambda make: lazy_stack([make(), make()]),
}

#: Collections that equal their argument.
EQUALS: dict[str, Callable[[Any], Any]] = {
    "to_dict": lambda td: td.to_dict(),
    "to_tensordict": lambda td: td.to_tensordict(retain_none=True),
    "from_dict": lambda td: TensorDict.from_dict(td.to_dict(), batch_size=td.batch_size),
    "from_dict of the class": lambda td: type(td).from_dict(td.to_dict(), batch_size=td.batch_size),
    "from_any": lambda td: from_any(td.to_dict(), batch_size=td.batch_size),
    "from_namedtuple": lambda td: TensorDict.from_namedtuple(td.to_namedtuple(), batch_size=td.batch_size),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "deepcopy": copy.deepcopy,
    "update": lambda td: td.clone().zero_().update(td.to_dict()),
    "update_": lambda td: td.clone().zero_().update_(td.to_dict()),
    "update_ of a collection": lambda td: td.clone().zero_().update_(td.to_tensordict(retain_none=True)),
    "copy_": lambda td: td.clone().zero_().copy_(td.to_tensordict(retain_none=True)),
    "index": lambda td: write_all(td.clone().zero_(), td.to_tensordict(retain_none=True)),
    "state_dict": lambda td: td.clone().zero_().load_state_dict(td.state_dict()),
    "where": lambda td: td.where(torch.ones(td.batch_size).bool(), td.to_tensordict(retain_none=True) + 1),
    "cat": lambda td: torch.cat([td, td])[: len(td)],
    "add": lambda td: td.to_tensordict(retain_none=True) + td - td,
    "add reversed": lambda td: td + td.to_tensordict(retain_none=True) - td,
}


def write_all(td: Any, source: Any) -> Any:
    td[:] = source
    return td


@pytest.mark.parametrize("equal", EQUALS)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("place", PLACES)
def test_unset_fields_equal_none(place: str, turn: str, equal: str) -> None:
    td = PLACES[place](TURNS[turn])
    other = EQUALS[equal](td)
    for first, second in ((td, other), (other, td)):
        if not isinstance(first, dict):
            assert (first == second).all() and not (first != second).any()
        if not isinstance(other, dict):
            assert assert_close(first, second)


@pytest.mark.parametrize("place", PLACES)
def test_unset_field_differs_from_value(place: str) -> None:
    td = PLACES[place](make_turn)
    other = PLACES[place](TURNS["speaker"]).to_tensordict()
    for first, second in ((td, other), (other, td)):
        assert not (first == second).all() and (first != second).any()
        with pytest.raises(AssertionError, match="speaker"):
            assert_close(first, second)


def test_unset_field_beside_tensor_or_unknown_key_raises() -> None:
    for other in (make_turn(extra=torch.ones(4)), TensorDict({"x": torch.arange(4.0), "q": None}, [4])):
        with pytest.raises(KeyMismatchError, match="the structures differ"):
            _ = make_turn() == other
        with pytest.raises(KeyPathError, match="the structures differ"):
            assert_close(other, make_turn())
    with pytest.raises(KeyMismatchError, match=r"extra keys \['q'\]"):
        _ = TensorDict({"x": 1}) == TensorDict({"x": 1, "q": None})


def make_mixed() -> Any:
    """Return a lazy stack whose second member alone has a speaker."""
    return lazy_stack([make_turn(), make_turn(speaker="a")])


@pytest.mark.parametrize(
    "equal", [key for key in EQUALS if "update" not in key and key not in ("copy_", "state_dict")]
)
def test_field_of_some_members_is_none_in_the_others(equal: str) -> None:
    for td in (make_mixed(), TensorDict({"turn": make_mixed()}, [2, 4])):
        other = EQUALS[equal](td)
        assert (td == other).all()
        if not isinstance(other, dict):
            assert (other == td).all() and assert_close(td, other)
        turn = other if td.batch_size == (2, 4) and "turn" not in other else other["turn"]
        speaker = turn["speaker"] if isinstance(turn, dict) else turn.get("speaker")
        speakers = speaker if isinstance(speaker, list) else speaker.tolist()
        assert speakers in ([[None] * 4, ["a"] * 4], [None, "a"])


@pytest.mark.parametrize(
    "convert",
    [lambda td: td.to_dict(), lambda td: td.to_namedtuple(), lambda td: td.to_tensordict(retain_none=True)],
)
def test_convert_tensor_of_some_members_raises(convert: Callable[[Any], Any]) -> None:
    for fields in ({"extra": torch.ones(4)}, {"reply": make_turn()}):
        with pytest.raises(
            KeyMismatchError, match=rf"\['{next(iter(fields))}'\], which some lack, would be lost"
        ):
            convert(lazy_stack([make_turn(), make_turn(**fields)]))


def test_state_dict_of_field_of_some_members_raises() -> None:
    for fields in ({"extra": torch.ones(4)}, {"reply": make_turn()}, {"speaker": "a"}):
        with pytest.raises(
            KeyMismatchError, match=rf"\['{next(iter(fields))}'\], which some lack, would be lost"
        ):
            lazy_stack([make_turn(), make_turn(**fields)]).state_dict()


def test_join_with_field_of_some_members_keeps_values() -> None:
    joined = torch.cat([make_mixed(), torch.stack([make_turn(speaker="b")])])
    assert [turn.speaker for turn in joined] == [None, "a", "b"]
    chosen = TensorDict({"turn": make_mixed()}, [2]).where(
        torch.tensor([False, True]), TensorDict({"turn": make_mixed().to_tensordict(retain_none=True)}, [2])
    )
    assert chosen["turn"].tensordicts[1].speaker in ("a", ["a"] * 4)


def test_update_in_place_of_unset_field_with_value_raises() -> None:
    with pytest.raises(KeyPathError, match="key 'speaker' not found"):
        make_turn().update_({"speaker": "a"})


SETS_NONE: dict[str, Callable[[Any], object]] = {
    "set": lambda turn: turn.set("extra", None),
    "attribute": lambda turn: setattr(turn, "extra", None),
    "update": lambda turn: turn.update({"extra": None}),
    "update with keywords": lambda turn: turn.update(extra=None),
    "update of one key": lambda turn: turn.update({"extra": None, "x": None}, keys_to_update=["extra"]),
    "update twice": lambda turn: turn.update({"extra": None}).update({"extra": None}, clone=True),
}


@pytest.mark.parametrize("write", SETS_NONE)
@pytest.mark.parametrize("place", ["root", "below", "stack", "parameters"])
def test_setting_none_removes_the_entry(place: str, write: str) -> None:
    turn = TURNS["nested"]()
    held: Any = turn
    if place == "below":
        held = make_turn(reply=turn).reply
    elif place == "stack":
        held = lazy_stack([turn, TURNS["nested"]()])
    elif place == "parameters":
        held = TensorDictParams(TensorDict({"turn": turn}, [4])).get("turn")
    SETS_NONE[write](held)
    assert "extra" not in held.keys() and held.extra is None and "x" in held.keys()


def test_update_with_paths_and_none_removes_nested_entries() -> None:
    data = TensorDict({"turn": TURNS["nested"]()}, [4])
    data.update({("turn", "extra"): None, "turn": {"reply": {"speaker": None}}})
    assert {"turn", ("turn", "x"), ("turn", "reply"), ("turn", "reply", "x")} == {*data.keys(True)}


def test_update_with_none_and_an_error_changes_nothing() -> None:
    turn = TURNS["nested"]()
    with pytest.raises(BatchSizeError, match="'x'"):
        turn.update({"extra": None, "x": torch.ones(5)})
    assert turn.extra is not None
