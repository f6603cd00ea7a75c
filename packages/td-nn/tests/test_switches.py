"""The switches set_skip_existing and set_interaction_type, as blocks and decorators."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from td_core import TensorDict
from td_core.spi import RULES
from td_nn import (
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    composite_lp_aggregate,
    dispatch,
    interaction_type,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
    skip_existing,
)

ONE = torch.ones(1)


class Counting:
    """A callable that counts its calls and returns ``count`` values."""

    def __init__(self, count=1):
        self.calls = 0
        self.count = count

    def __call__(self, *values):
        self.calls += 1
        return tuple([values[0] + 1] * self.count)


def runs(td, in_keys=("x",), out_keys=("y",), select=None, mode=True, **call):
    """Call a module on a collection under a mode of set_skip_existing, and return how often it ran."""
    fn = Counting(len(out_keys))
    made = TensorDictModule(fn, list(in_keys), list(out_keys))
    if select is not None:
        made.select_out_keys(*select)
    with set_skip_existing(mode):
        made(td, **call)
    return fn.calls


@pytest.mark.parametrize(
    ("present", "options", "expected"),
    [
        (["x"], {}, 1),
        (["x", "y"], {}, 0),
        (["y"], {}, 0),
        (["x", "y"], {"mode": False}, 1),
        (["x", "y"], {"out_keys": ["y", "z"]}, 1),
        (["x", "y"], {"out_keys": ["y", "z"], "select": ["y"]}, 0),
        (["x", "y"], {"out_keys": ["y", "z"], "select": []}, 1),
        (["x", "y"], {"out_keys": ["y", "_"]}, 1),
        (["x", "y"], {"out_keys": []}, 1),
        (["x"], {"out_keys": ["x"]}, 1),
        (["x", ("n", "y")], {"out_keys": [("n", "y")]}, 0),
        (["x", "y"], {"mode": ["y"]}, 0),
        (["x", "y"], {"mode": "y"}, 0),
        (["x", "y"], {"mode": ["z"]}, 1),
        (["x", "y", "z"], {"mode": ["y"], "out_keys": ["y", "z"]}, 1),
        (["x", ("n", "y")], {"mode": [("n", ("y",))], "out_keys": [("n", "y")]}, 0),
    ],
)
def test_skip_existing_all_outputs_exist_skips_module(present, options, expected):
    assert runs(TensorDict(dict.fromkeys(present, ONE)), **options) == expected


def test_skip_existing_skipped_module_returns_same_input():
    td = TensorDict(x=ONE, y=ONE)
    with set_skip_existing(True):
        for inplace in (True, False, "empty"):
            assert TensorDictModule(abs, ["x"], ["y"], inplace=inplace)(td, tensordict_out=TensorDict()) is td
        assert TensorDictModule(lambda x: x + 1, ["x"], ["y"])(ONE) == 2


@pytest.mark.parametrize(
    ("present", "expected"), [("xy", (0, 1)), ("xz", (1, 0)), ("xyz", (0, 0)), ("x", (1, 1))]
)
def test_skip_existing_skips_sequence_or_single_members(present, expected):
    first, second = Counting(), Counting()
    seq = TensorDictSequential(TensorDictModule(first, ["x"], ["y"]), TensorDictModule(second, ["y"], ["z"]))
    with set_skip_existing(True):
        seq(TensorDict(dict.fromkeys(present, ONE)))
    assert (first.calls, second.calls) == expected


def test_skip_existing_function_without_keys_runs():
    with set_skip_existing(True):
        seq = TensorDictSequential(lambda td: td.set("x", td["x"] + 1))
        assert seq(TensorDict(x=ONE))["x"] == 2


def decorated(mode, stacked=False):
    class Reader(TensorDictModuleBase):
        in_keys = ["x"]  # noqa: RUF012
        out_keys = ["y"]  # noqa: RUF012

        @set_skip_existing(mode)
        def forward(self, tensordict):
            return tensordict.set("y", tensordict["x"] + 1).set("mode", int(skip_existing() is True))

    if stacked:
        Reader.forward = dispatch(auto_batch_size=False)(Reader.forward)
    return Reader()


@pytest.mark.parametrize("stacked", [False, True])
def test_skip_existing_decorator_skips_by_its_argument(stacked):
    td = TensorDict(x=ONE, y=ONE)
    assert decorated(True, stacked)(td)["y"] == 1
    assert decorated(True, stacked)(TensorDict(x=ONE))["mode"] == 1
    with set_skip_existing(True):
        assert decorated(False, stacked)(td.copy())["y"] == 2
        assert decorated(None, stacked)(td.copy())["y"] == 1
    assert decorated(None, stacked)(td.copy())["y"] == 2
    assert decorated(True, stacked)(tensordict=td.copy())["y"] == 1


def test_skip_existing_wrong_argument_raises():
    with pytest.raises(RuntimeError, match="a block needs True, False or keys"), set_skip_existing(None):
        pass
    with pytest.raises(TypeError, match="whose first argument is named tensordict"):
        set_skip_existing(True)(lambda self, x: x)
    with pytest.raises(TypeError, match="takes True, False, keys or None; got 1"):
        set_skip_existing(1)
    with pytest.raises(ValueError, match="a key is a string"):
        set_skip_existing([1])


def test_skip_existing_decorator_reads_named_key_attributes():
    class Named:
        reads, writes = ("x",), ("y",)

        @set_skip_existing(True, in_key_attr="reads", out_key_attr="writes")
        def forward(self, tensordict):
            raise AssertionError("it runs")

    td = TensorDict(x=ONE, y=ONE)
    assert Named().forward(td) is td


@pytest.mark.parametrize("given", ["mean", "MEAN", "Mean", InteractionType.MEAN])
def test_interaction_type_accepts_any_case(given):
    assert interaction_type() is None
    with set_interaction_type(given):
        assert interaction_type() is InteractionType.MEAN
        with set_interaction_type(None):
            assert interaction_type() is None
        with set_interaction_type():
            assert interaction_type() is InteractionType.DETERMINISTIC
    assert interaction_type() is None
    assert (str(InteractionType.MEAN), InteractionType.from_str(given)) == ("mean", "mean")


def test_interaction_type_unknown_name_raises():
    for make in (set_interaction_type, InteractionType, InteractionType.from_str):
        with pytest.raises(ValueError, match=r"an interaction type is one of \['mode', .*\]; got 'often'"):
            make("often")


def test_set_interaction_type_decorates_generator_function():
    @set_interaction_type("random")
    def steps():
        yield interaction_type()
        yield interaction_type()

    running = steps()
    assert (next(running), interaction_type(), next(running)) == ("random", None, "random")


@pytest.mark.parametrize(
    ("switch", "read"),
    [
        (lambda: set_skip_existing(True), skip_existing),
        (lambda: set_interaction_type("mode"), interaction_type),
    ],
)
def test_switch_block_changes_one_thread_and_is_reentrant(switch, read):
    before, seen = read(), []
    same = switch()
    with same, same:
        worker = threading.Thread(target=lambda: seen.append(read()))
        worker.start()
        worker.join()
        assert read() != before
    assert (read(), seen) == (before, [before])
    first, second = switch(), switch().clone()
    first.__enter__()
    second.__enter__()
    second.__exit__(None, None, None)
    assert read() != before
    first.__exit__(None, None, None)
    assert read() == before


def test_switch_accepts_thread_local_argument():
    with set_skip_existing(True, thread_local=True), set_interaction_type("mode", thread_local=True):
        assert (skip_existing(), interaction_type()) == (True, "mode")


def test_switch_block_that_raises_restores_mode():
    with pytest.raises(ZeroDivisionError, match="from"), set_skip_existing(["y"]):
        raise ZeroDivisionError(f"from {skip_existing()}")
    assert skip_existing() is False


@pytest.mark.parametrize(
    ("switch", "read"),
    [
        (lambda **options: set_skip_existing(True, **options), skip_existing),
        (lambda **options: set_interaction_type("mode", **options), interaction_type),
        (lambda **options: set_composite_lp_aggregate(True, **options), composite_lp_aggregate),
    ],
)
@pytest.mark.parametrize("decorates", [False, True])
def test_switch_in_program_of_tensordict_changes_all_threads(switch, read, decorates, monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    before = read()
    with ThreadPoolExecutor(1) as early:
        assert early.submit(read).result() == before

        def look():
            with ThreadPoolExecutor(1) as late:
                return read(), early.submit(read).result(), late.submit(read).result()

        def look_in_block(chosen):
            if decorates:
                return chosen(lambda self, tensordict: look())(None, None)
            with chosen.clone():
                return look()

        set_to = look_in_block(switch())
        assert set_to[0] != before
        assert set_to == (set_to[0],) * 3
        assert look() == (before, before, before)
        with switch(thread_local=True):
            assert look() == (set_to[0], before, before)
            assert look_in_block(switch()) == (set_to[0], before, before)
        assert look() == (before, before, before)


def test_module_without_outputs_in_program_of_tensordict_is_skipped(monkeypatch):
    monkeypatch.setattr(RULES, "follows_tensordict", True)
    assert runs(TensorDict(x=ONE), out_keys=()) == 0
    assert runs(TensorDict(x=ONE), out_keys=(), mode=False) == 1
