"""When __post_init__ of a tensorclass runs, and what it may change."""

from __future__ import annotations

from dataclasses import InitVar
from typing import Any

import pytest
import torch
from torch import Tensor

from td_core import TensorDict, assert_close, lazy_stack
from td_tensorclass import TensorClass, UnknownFieldError

both = pytest.mark.parametrize("decorated", [True, False], ids=["decorator", "base class"])


@both
class TestPostInit:
    def test_post_init_runs_for_instances_and_results(self, declare: Any, decorated: bool) -> None:
        seen: list[Any] = []
        cls = declare(
            {"x": Tensor}, decorated, {"__post_init__": lambda self: seen.append(tuple(self.x.shape))}
        )
        point = cls(torch.zeros(3), batch_size=[3])
        assert seen == [(3,)]
        _ = point[:2]
        assert seen == [(3,), (2,)]
        cls.from_tensordict(TensorDict({"x": torch.zeros(1)}))
        assert seen == [(3,), (2,), (1,)]

    def test_post_init_skip_on_rebuild_runs_only_on_init(self, declare: Any, decorated: bool) -> None:
        seen: list[Any] = []
        body = {"__post_init__": lambda self: seen.append(1)}
        cls = declare({"x": Tensor}, decorated, body, skip_post_init_on_rebuild=True)
        _ = cls(torch.zeros(3), batch_size=[3])[0] + 1
        assert seen == [1]

    def test_post_init_receives_init_vars_and_sets_fields(self, declare: Any, decorated: bool) -> None:
        def post_init(self: Any, scale: float) -> None:
            self.y = self.x * scale

        body = {"y": None, "__post_init__": post_init, "scale": 2.0}
        cls = declare({"x": Tensor, "y": Tensor, "scale": InitVar[float]}, decorated, body)
        assert cls(torch.ones(1)).y.item() == 2
        assert cls(torch.ones(1), scale=3.0).y.item() == 3
        assert list(cls(torch.ones(1)).keys()) == ["x", "y"]

    def test_replace_runs_post_init_on_new_values(self, declare: Any, decorated: bool) -> None:
        seen: list[Any] = []

        def post_init(self: Any) -> None:
            seen.append(self.x.tolist())
            self.x = self.x.clamp(0, 1)

        point = declare({"x": Tensor}, decorated, {"__post_init__": post_init})(torch.ones(1), batch_size=[1])
        assert point.replace(x=torch.tensor([5.0])).x.tolist() == [1]
        assert point.replace({"x": torch.tensor([-5.0])}).x.tolist() == [0]
        assert seen == [[1], [5], [-5]]
        assert point.x.tolist() == [1]
        assert point.replace() is point

    def test_post_init_of_lazy_stack_runs_per_member(self, declare: Any, decorated: bool) -> None:
        seen: list[Any] = []
        cls = declare(
            {"x": Tensor}, decorated, {"__post_init__": lambda self: seen.append(tuple(self.x.shape))}
        )
        stack = lazy_stack([cls(torch.zeros(2)), cls(torch.zeros(3))])
        # Stacking and reading members create no instances, so __post_init__ does not run again.
        assert [member.x.shape for member in stack.tensordicts] == [(2,), (3,)]
        assert seen == [(2,), (3,)]
        assert (stack + 1)[1].x.tolist() == [1, 1, 1]
        assert seen == [(2,), (3,)] * 2 + [(3,)]
        seen.clear()
        nested = lazy_stack([stack, stack]).apply(lambda x: x + 1)
        assert nested.batch_size == (2, 2)
        assert seen == [(2,), (3,)] * 2
        seen.clear()
        cls.from_tensordict(lazy_stack([TensorDict(x=torch.zeros(n)) for n in (2, 3)]))
        assert seen == [(2,), (3,)]
        seen.clear()
        even = lazy_stack([cls(torch.zeros(2)), cls(torch.zeros(2))])
        assert torch.stack([*even]).x.shape == even.contiguous().x.shape == (2, 2)
        assert seen == [(2,)] * 4 + [(2, 2)] * 2

    def test_post_init_of_lazy_stack_runs_once_per_member(self, declare: Any, decorated: bool) -> None:
        cls = declare(
            {"x": Tensor}, decorated, {"__post_init__": lambda self: setattr(self, "x", self.x + 1)}
        )
        stack = lazy_stack([cls(torch.zeros(2)), cls(torch.zeros(3))])
        for _ in range(2):
            assert [member.x.tolist() for member in stack.tensordicts] == [[1, 1], [1, 1, 1]]
        assert [member.x.tolist() for member in (stack * 2).tensordicts] == [[3, 3], [3, 3, 3]]

    def test_post_init_of_empty_result_is_not_run(self, declare: Any, decorated: bool) -> None:
        seen: list[Any] = []

        def post_init(self: Any) -> None:
            seen.append(None if self.x is None else tuple(self.x.shape))

        cls = declare({"x": Tensor}, decorated, {"__post_init__": post_init})
        point = cls(torch.zeros(3), batch_size=[3])
        for empty in (
            point.empty(),
            point.exclude("x"),
            point.empty()[:2],
            lazy_stack([point, point]).empty(),
        ):
            assert type(empty) is cls
            assert empty.x is None
        assert seen == [(3,)]
        # Constructing an instance without entries is not an operation on one.
        cls.from_tensordict(TensorDict())
        assert seen == [(3,), None]

    def test_lazy_stack_of_frozen_class_is_locked(self, declare: Any, decorated: bool) -> None:
        cls = declare({"x": Tensor}, decorated, {"__post_init__": lambda self: None}, frozen=True)
        stack = lazy_stack([cls(torch.zeros(2)), cls(torch.zeros(3))])
        for each in (stack, stack.clone(), stack.empty(), *stack.tensordicts, *(stack + 1).tensordicts):
            assert each.is_locked

    def test_post_init_setting_unknown_name_raises(self, declare: Any, decorated: bool) -> None:
        cls = declare({"x": Tensor}, decorated, {"__post_init__": lambda self: setattr(self, "xx", 1)})
        with pytest.raises(UnknownFieldError, match="X has no field 'xx': did you mean 'x'"):
            cls(torch.zeros(1))


@pytest.mark.parametrize("operation", ["assert_close", "where", "apply"])
def test_post_init_is_not_run_on_parts_of_another_stack(operation: str) -> None:
    seen: list[Any] = []

    class Counted(TensorClass):
        x: Tensor

        def __post_init__(self) -> None:
            seen.append(self)

    first, second = [
        lazy_stack([Counted(torch.full((3,), i), batch_size=[3]) for i in range(2)]) for _ in range(2)
    ]
    seen.clear()
    if operation == "assert_close":
        assert_close(first, second)
    elif operation == "where":
        assert torch.equal(first.where(torch.ones(2, 3, dtype=torch.bool), second).x, first.x)
    else:
        assert torch.equal(first.apply(torch.add, second).x, first.x * 2)
    assert len(seen) == (0 if operation == "assert_close" else 2)
