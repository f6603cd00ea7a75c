"""Futures of collections that are made in the background."""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import pytest

from td_core import TensorDictFuture
from td_core.spi import run_in_background


def make_futures(*results: Any) -> list[Future[Any]]:
    futures: list[Future[Any]] = [Future() for _ in results]
    for future, result in zip(futures, results):
        (future.set_exception if isinstance(result, Exception) else future.set_result)(result)
    return futures


@pytest.mark.parametrize(
    ("futures", "provided", "expected"),
    [((1, 2), None, 2), ((1, 2), "all", "all"), ((), "all", "all"), ((), None, None)],
)
def test_future_result_is_provided_or_last(futures: Any, provided: Any, expected: Any) -> None:
    future = TensorDictFuture(make_futures(*futures), provided)
    assert future.done()
    assert future.result(timeout=0) == expected


def test_future_is_done_after_all_futures() -> None:
    first, second = Future[int](), Future[int]()
    future = TensorDictFuture([first, second], "all")
    called: list[Any] = []
    future.add_done_callback(called.append)
    second.set_result(1)
    assert not future.done() and not called
    with pytest.raises(futures.TimeoutError):  # in Python 3.10 not the builtin one
        future.result(timeout=0)
    first.set_result(2)
    assert future.result() == "all" and called == [future]


def test_future_raises_first_exception() -> None:
    future = TensorDictFuture(make_futures(1, KeyError("a"), ValueError("b")), "all")
    with pytest.raises(KeyError, match="a"):
        future.result()


def test_run_in_background_names_thread_and_keeps_error() -> None:
    future = run_in_background(lambda: threading.current_thread().name, "td-test")
    assert type(future) is TensorDictFuture
    assert future.result(timeout=10) == "td-test"
    assert run_in_background(lambda: None, "td-test", "result").result(timeout=10) == "result"
    failed = run_in_background(lambda: 1 / 0, "td-test")
    assert isinstance(failed.exception(timeout=10), ZeroDivisionError)
