"""Shared settings and fixtures of the tests of td-tensorclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from td_tensorclass import TensorClass, tensorclass


@pytest.fixture
def declare(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function that defines a tensorclass ``X``, by decorator or by inheritance."""

    def define(
        fields: dict[str, Any], decorated: bool, body: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        # Annotations that are strings are resolved in the module of the test.
        module = request.module.__name__
        namespace = {"__annotations__": fields, "__module__": module, "__qualname__": "X", **(body or {})}
        if decorated:
            cls = type("X", (), namespace)
            return tensorclass(**options)(cls) if options else tensorclass(cls)
        return type(TensorClass)("X", (TensorClass,), namespace, **options)

    return define
