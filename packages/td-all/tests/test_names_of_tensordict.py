"""Names for programs of tensordict: printed collections are parsed into zeros, and stacks are lazy on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import td_core
from td import lazy_legacy, parse_tensor_dict_string, set_lazy_legacy
from td_core import LazyStackedTensorDict, TensorDict, set_printoptions


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3]
    )


def make_lazy() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(
        *[TensorDict({"a": torch.ones(2, 2), "n": {"m": torch.ones(2)}}, [2]) for _ in range(3)]
    )


class TestParse:
    @pytest.mark.parametrize("compact", [True, False])
    @pytest.mark.parametrize(
        "make",
        [
            make_dense_td,
            lambda: TensorDict(),
            lambda: TensorDict({"e": {}, "x": {"y": {"z": torch.zeros(2, dtype=torch.bool)}}}, [2]),
            lambda: TensorDict(make_dense_td(), []),
            lambda: TensorDict(make_dense_td(), [3], device="meta"),
            lambda: TensorDict({"a b": 1, "k.x": 1, "q'": {"": 1}}),
            lambda: TensorDict(
                {f"key number {i}": {f"{j}": torch.zeros(3, j) for j in range(9)} for i in range(4)}
            ),
        ],
    )
    def test_parse_inverts_repr(self, make: Any, compact: bool) -> None:
        td = make()
        with set_printoptions(compact=compact):
            parsed = parse_tensor_dict_string(repr(td))
        assert repr(parsed) == repr(td)
        assert all(
            level.device == parsed.device
            for level in parsed.values(True)
            if not isinstance(level, torch.Tensor)
        )
        assert all(
            (not leaf.is_meta and not leaf.any()) or leaf.is_meta for leaf in parsed.values(True, True)
        )

    def test_parse_lazy_stack_returns_dense(self) -> None:
        parsed = parse_tensor_dict_string(repr(make_lazy()))
        assert parsed.batch_size == torch.Size([3, 2])
        assert parsed["n", "m"].shape == torch.Size([3, 2])

    @pytest.mark.parametrize(
        "text",
        [
            "x",
            "",
            "TensorDict(batch_size=[], fields={s: str})",
            "TensorDict(batch_size=[], fields={a: f32[]",
            "TensorDict(batch_size=[], fields={a: f32[]}) and more",
            "TensorDict(batch_size=[], fields={a: f33[]})",
            "TensorDict(batch_size=[], fields={a f32[]})",
            "TensorDict(\n    fields={\n        a: Tensor(shape=3)},\n    batch_size=torch.Size([]))",
            "TensorDict(\n    fields={\n        a: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.float32)},\n    size=3)",
            (
                "TensorDict(\n    fields={\n        a: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.float33)},\n"
                "    batch_size=torch.Size([]),\n    device=None)"
            ),
        ],
    )
    def test_parse_other_text_raises(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"cannot read|not a printed collection"):
            parse_tensor_dict_string(text)

    def test_parse_deep_tree_does_not_recurse(self) -> None:
        td = TensorDict({"x": torch.zeros(1)})
        for _ in range(2000):
            td = TensorDict({"k": td})
        assert parse_tensor_dict_string(repr(td)).depth == 2000


class TestLazyLegacy:
    def test_stack_under_lazy_legacy_returns_lazy_stack_of_same_contents(self) -> None:
        rows = [TensorDict(a=torch.full((2,), i), batch_size=[2]) for i in range(3)]
        expected = torch.stack([row["a"] for row in rows], 1)
        for stack in (torch.stack, TensorDict.stack, td_core.stack, TensorDict.maybe_dense_stack):
            with set_lazy_legacy(True):
                lazy = stack(rows, dim=1)
            assert (type(lazy), lazy.stack_dim) == (LazyStackedTensorDict, 1)
            assert torch.equal(lazy["a"], expected)
            assert type(stack(rows, dim=1)) is TensorDict

    def test_other_joins_under_lazy_legacy_stay_dense(self) -> None:
        rows = [TensorDict(a=torch.full((2,), i), batch_size=[2]) for i in range(3)]
        out = TensorDict(a=torch.zeros(3, 2, dtype=torch.long), batch_size=[3, 2])
        with set_lazy_legacy(True):
            assert torch.stack(rows, out=out) is out
            assert type(torch.cat(rows)) is TensorDict
            assert type(td_core.pad_sequence(rows)) is TensorDict
            assert type(td_core.dense_stack_tds(rows, 0)) is TensorDict
            assert type(td_core.dense_stack_tds(torch.stack(rows))) is TensorDict
        assert out["a"].tolist() == [[0, 0], [1, 1], [2, 2]]

    def test_lazy_legacy_returns_what_was_set(self) -> None:
        assert (lazy_legacy(), lazy_legacy(allow_none=True)) == (False, None)
        with set_lazy_legacy(True):
            assert lazy_legacy() is lazy_legacy(allow_none=True) is True
            with set_lazy_legacy(False):
                assert lazy_legacy(allow_none=True) is False
        assert set_lazy_legacy(True)(lazy_legacy)() is True
        assert lazy_legacy(allow_none=True) is None
