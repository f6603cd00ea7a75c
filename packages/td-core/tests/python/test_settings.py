"""Switches of a thread: permanent, in a block, as decorators of functions, generators and coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from td_core import (
    TensorDict,
    get_defaults_to_none,
    get_printoptions,
    set_get_defaults_to_none,
    set_printoptions,
)
from td_core._python.settings import RULES, Switch
from td_core.errors import KeyPathError


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3]
    )


class TestSettings:
    def test_get_defaults_to_none_false_get_raises(self) -> None:
        td = make_dense_td()
        assert td.get("zz") is None
        with set_get_defaults_to_none(False):
            assert not get_defaults_to_none()
            with pytest.raises(KeyPathError, match="key 'zz' not found"):
                td.get("zz")
            with pytest.raises(KeyPathError, match="key 'zz' not found"):
                td.get_at("zz", 0)
            assert td.get("zz", None) is None
        assert get_defaults_to_none()
        assert td.get("zz") is None

    def test_set_get_defaults_to_none_acts_on_call(self) -> None:
        set_get_defaults_to_none(False)
        try:
            with pytest.raises(KeyPathError):
                TensorDict().get("a")
        finally:
            set_get_defaults_to_none(True)

    def test_set_get_defaults_to_none_decorates_function(self) -> None:
        @set_get_defaults_to_none(False)
        def read() -> Any:
            return TensorDict().get("a")

        assert get_defaults_to_none()
        for _ in range(2):
            with pytest.raises(KeyPathError):
                read()
        assert get_defaults_to_none()


class Own(Switch):
    """A switch with settings of its own, as a package may define one."""

    class _Store(threading.local):
        def __init__(self) -> None:
            self.entered: list[Any] = []
            self.level = 0

    _settings = _Store()
    _name = "level"


def level() -> int:
    return Own._settings.level


def test_switch_ends_in_any_order() -> None:
    first, second = Own(1), Own(2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert level() == 0
    second.__exit__(None, None, None)
    assert level() == 1, "each restores what it replaced"
    Own(0).set()
    with pytest.raises(ZeroDivisionError), first, second:
        raise ZeroDivisionError
    assert level() == 0 and not Own._settings.entered


def test_switch_decorates_generator_for_its_steps_only() -> None:
    @Own(5)
    def generate() -> Iterator[int]:
        received = yield level()
        try:
            yield received + level()
        except KeyError:
            yield -level()
        finally:
            Own._settings.cleaned = level()

    running = generate()
    assert (next(running), level(), running.send(10), level()) == (5, 0, 15, 0)
    assert (running.throw(KeyError()), level()) == (-5, 0)
    running.close()
    assert (Own._settings.cleaned, level()) == (5, 0)


def test_switch_decorates_coroutine_for_its_steps_only() -> None:
    @Own(5)
    async def read() -> tuple[int, int]:
        before = level()
        await asyncio.sleep(0)
        return before, level()

    async def read_beside() -> list[Any]:
        async def other() -> int:
            return level()

        return await asyncio.gather(read(), other())

    assert asyncio.run(read_beside()) == [(5, 5), 0]


def test_switch_of_asynchronous_generator_raises() -> None:
    async def generate() -> Any:
        yield 1

    with pytest.raises(
        TypeError, match=r"Own cannot decorate .*generate\(\), which makes asynchronous generators"
    ):
        Own(1)(generate)


def test_switch_changes_its_thread_only() -> None:
    found = []
    with Own(3):
        thread = threading.Thread(target=lambda: found.append(level()))
        thread.start()
        thread.join()
    assert found == [0]


def test_switch_decorated_function_that_raises_restores_setting() -> None:
    with pytest.raises(ZeroDivisionError):
        Own(4)(lambda: 1 / 0)()
    assert level() == 0


def test_set_get_defaults_to_none_in_another_thread_restores_that_thread() -> None:
    switch, found = set_get_defaults_to_none(False), []

    def read() -> None:
        with switch:
            found.append(get_defaults_to_none())
        found.append(get_defaults_to_none())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert found == [False, True] and not get_defaults_to_none()
    with switch:
        pass
    assert get_defaults_to_none(), "the block undoes the call"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"show_dtype": False}, {"compact": True, "show_dtype": False, "show_device": True}),
        ({"show_shape": False}, {"compact": False, "show_shape": False}),
        ({"show_shape": False, "compact": True}, {"compact": True, "show_shape": False}),
        ({"verbose": False}, {"compact": True, "show_device": False, "show_dtype": False, "show_shape": True}),
        ({"verbose": False, "show_dtype": True}, {"show_device": False, "show_dtype": True}),
    ],
)  # fmt: skip
def test_set_printoptions_changes_given_options(options: dict[str, Any], expected: dict[str, Any]) -> None:
    before = get_printoptions()
    with set_printoptions(**options):
        assert get_printoptions() == {**get_printoptions(), **expected}
        get_printoptions()["compact"] = "a copy"
        assert get_printoptions()["compact"] != "a copy"
    assert get_printoptions() == before


def test_set_printoptions_unknown_option_raises() -> None:
    with pytest.raises(TypeError, match=r"has no option \['color'\]; there are \['compact', "):
        set_printoptions(color=True)


def test_switch_that_reaches_threads_does_so_in_program_of_tensordict(monkeypatch):
    class Settings(Switch.Settings):
        def __init__(self):
            self.level = 0
            super().__init__()

    class set_level(Switch):
        _settings = Settings()
        _name = "level"
        _reaches_threads = True

    def read():
        return set_level._settings.level

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result() == 0
        with set_level(1):
            assert (read(), pool.submit(read).result()) == (1, 0)
        monkeypatch.setattr(RULES, "follows_tensordict", True)
        with set_level(2), ThreadPoolExecutor(1) as later:
            assert (read(), pool.submit(read).result(), later.submit(read).result()) == (2, 2, 2)
        assert (read(), pool.submit(read).result()) == (0, 0)
        pool.submit(set_level(3).set).result()
        assert read() == 3
