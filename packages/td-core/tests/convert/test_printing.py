"""Printing: the compact form, the long form, the notebook tree, and options."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorDict,
    get_defaults_to_none,
    get_printoptions,
    lazy_stack,
    set_get_defaults_to_none,
    set_printoptions,
)


def make_dense_td() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3), "d": torch.zeros(3, 4)}}, [3]
    )


def make_lazy() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(
        *[TensorDict({"a": torch.ones(2, 2), "n": {"m": torch.ones(2)}}, [2]) for _ in range(3)]
    )


def make_ragged() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(
        TensorDict({"a": torch.ones(2, 3), "k": torch.ones(2)}, [2]),
        TensorDict({"a": torch.ones(2, 4), "j": torch.ones(2)}, [2]),
    )


DTYPES = {
    "bf16": torch.bfloat16,
    "bool": torch.bool,
    "c128": torch.complex128,
    "c64": torch.complex64,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "f8_e4m3fn": torch.float8_e4m3fn,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "i8": torch.int8,
    "u8": torch.uint8,
}

# tensordict prints these texts for the same collections.
COMPACT: list[tuple[Any, str]] = [
    (lambda: TensorDict(), "TensorDict(batch_size=[], fields={})"),
    (lambda: TensorDict(batch_size=[3], device="cpu"), "TensorDict(batch_size=[3], device=cpu, fields={})"),
    (make_dense_td, "TensorDict(batch_size=[3], fields={a: i64[2], b: {c: f32[], d: f32[4]}})"),
    (
        lambda: TensorDict(make_dense_td(), []),
        "TensorDict(batch_size=[], fields={a: i64[3,2], b: [3]{c: f32[], d: f32[4]}})",
    ),
    (lambda: TensorDict({"e": {}}, [2]), "TensorDict(batch_size=[2], fields={e: {}})"),
    (lambda: TensorDict({"b": 1, "a": 1}), "TensorDict(batch_size=[], fields={b: i64[], a: i64[]})"),
    (
        lambda: TensorDict({"a": torch.zeros(3, device="meta")}, [3]),
        "TensorDict(batch_size=[3], fields={a: f32[]@meta})",
    ),
    (
        lambda: TensorDict({"a": torch.zeros(3)}, [3], device="meta"),
        "TensorDict(batch_size=[3], device=meta, fields={a: f32[]})",
    ),
    (
        lambda: TensorDict(make_dense_td(), [3], device="cpu"),
        "TensorDict(batch_size=[3], device=cpu, fields={\n    a: i64[2],\n    b: {c: f32[], d: f32[4]}})",
    ),
    (
        make_lazy,
        "LazyStackedTensorDict(batch_size=[3,2], stack_dim=0, fields={\n    a: f32[2],\n    n: {m: f32[]}})",
    ),
    (
        make_ragged,
        (
            "LazyStackedTensorDict(batch_size=[2,2], stack_dim=0, fields={\n    a: f32[-1]}, "
            "exclusive_fields={0: {k: f32[]}, 1: {j: f32[]}})"
        ),
    ),
    (
        lambda: LazyStackedTensorDict(
            TensorDict({"n": {"x": torch.ones(2)}}), TensorDict({"n": {"z": torch.ones(2)}})
        )["n"],
        (
            "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={}, exclusive_fields={\n"
            "    0: {x: f32[2]},\n    1: {z: f32[2]}})"
        ),
    ),
    (
        lambda: LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(1, 1)})),
        "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={a: f32[-1]})",
    ),
    (
        lambda: lazy_stack([TensorDict({"n": make_ragged()}), TensorDict({"n": make_ragged()})]),
        (
            "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={\n"
            "    n: LazyStackedTensorDict[2,2]{a: f32[-1]}})"
        ),
    ),
    (
        lambda: lazy_stack([lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(1, 2))])] * 2),
        "LazyStackedTensorDict(batch_size=[2,2], stack_dim=0, fields={a: f32[-1]})",
    ),
    (
        lambda: TensorDict({"l": make_lazy()}, [3]),
        "TensorDict(batch_size=[3], fields={\n    l: LazyStackedTensorDict[2]{a: f32[2], n: {m: f32[]}}})",
    ),
    (
        lambda: TensorDict({"a": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}),
        "TensorDict(batch_size=[], fields={a: f32[2,-1]})",
    ),
    (
        lambda: TensorDict(
            {"outer": {"inner": {f"k{i}": torch.zeros(1) for i in range(7)}}, "a b": {"é": torch.zeros(1)}},
            [1],
        ),
        "TensorDict(batch_size=[1], fields={\n    outer: {\n        inner: {\n"
        + ",\n".join(f"            k{i}: f32[]" for i in range(7))
        + "}},\n    a b: {é: f32[]}})",
    ),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "printed"), COMPACT)
def test_repr_compact_equals_expected_text(make: Any, printed: str) -> None:
    assert repr(make()) == str(make()) == printed


@pytest.mark.parametrize(("short", "dtype"), DTYPES.items())
def test_repr_dtype_abbreviation(short: str, dtype: torch.dtype) -> None:
    assert (
        repr(TensorDict({"a": torch.empty(1, dtype=dtype)}))
        == f"TensorDict(batch_size=[], fields={{a: {short}[1]}})"
    )


@pytest.mark.parametrize("length", range(20, 58))
def test_repr_lines_have_at_most_80_characters(length: int) -> None:
    for td in (
        TensorDict({"k" * length: 1}),
        TensorDict({"n": {"k" * length: 1}, "m": {"x": {"k" * length: 1}}}),
    ):
        lines = repr(td).splitlines()
        assert all(len(line) <= 80 for line in lines)
        one_line = " ".join(line.strip() for line in lines).replace("{ ", "{")
        assert len(lines) == 1 or len(one_line) > 80


LONG = """\
TensorDict(
    fields={
        a: Tensor(shape=torch.Size([3, 2]), device=cpu, dtype=torch.int64, is_shared=False),
        b: TensorDict(
            fields={
                c: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False),
                d: Tensor(shape=torch.Size([3, 4]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([3]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([3]),
    device=None,
    is_shared=False)"""

LONG_RAGGED = """\
LazyStackedTensorDict(
    fields={
        a: Tensor(shape=torch.Size([2, 2, -1]), device=cpu, dtype=torch.float32, is_shared=False)},
    exclusive_fields={
        0 ->
            k: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False),
        1 ->
            j: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False)},
    batch_size=torch.Size([2, 2]),
    device=None,
    is_shared=False,
    stack_dim=0)"""

LONG_EMPTY = """\
TensorDict(
    fields={
        e: TensorDict(
            fields={
            },
            batch_size=torch.Size([2]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)"""


@pytest.mark.parametrize(
    ("make", "printed"),
    [(make_dense_td, LONG), (make_ragged, LONG_RAGGED), (lambda: TensorDict({"e": {}}, [2]), LONG_EMPTY)],
)
def test_repr_long_equals_expected_text(make: Any, printed: str) -> None:
    with set_printoptions(compact=False):
        assert repr(make()) == printed


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "printed"),
        [
            ({"show_dtype": False}, "TensorDict(batch_size=[3], fields={a: [2], b: {c: [], d: [4]}})"),
            ({"show_batch_size": False}, "TensorDict(fields={a: i64[2], b: {c: f32[], d: f32[4]}})"),
            ({"verbose": False}, "TensorDict(batch_size=[3], fields={a: [2], b: {c: [], d: [4]}})"),
            ({"verbose": True}, "TensorDict(batch_size=[3], fields={a: i64[2], b: {c: f32[], d: f32[4]}})"),
        ],
    )
    def test_repr_compact_form_follows_options(self, options: dict[str, Any], printed: str) -> None:
        with set_printoptions(**options):
            assert repr(make_dense_td()) == printed

    def test_repr_sort_keys_alphabetical_sorts_each_level(self) -> None:
        td = TensorDict({"b": {"d": 1, "c": 1}, "a": 1})
        with set_printoptions(sort_keys="alphabetical"):
            assert repr(td) == "TensorDict(batch_size=[], fields={a: i64[], b: {c: i64[], d: i64[]}})"

    @pytest.mark.parametrize(
        ("limit", "keys"),
        [
            (4, ["k0", "k1", "...: 3 more entries", "k5", "k6"]),
            (3, ["k0", "k1", "...: 4 more entries", "k6"]),
            (1, ["k0", "...: 6 more entries"]),
            (7, [f"k{i}" for i in range(7)]),
            (None, [f"k{i}" for i in range(7)]),
        ],
    )
    @pytest.mark.parametrize("form", ["compact", "long", "html"])
    def test_repr_max_entries_cuts_the_middle_of_a_level(
        self, limit: int | None, keys: list[str], form: str
    ) -> None:
        td = TensorDict({"n": {f"k{i}": torch.zeros(()) for i in range(7)}})
        with set_printoptions(compact=form != "long", max_entries=limit):
            printed = td._repr_html_() if form == "html" else repr(td)
        found = re.findall(r"k\d|\.\.\.: (?:<span[^>]*>)?\d+ more entries", printed)
        assert [re.sub("<.*?>", "", text) for text in found] == keys

    def test_repr_of_many_entries_is_short_by_default(self) -> None:
        td = TensorDict({f"k{i}": torch.zeros(()) for i in range(1000)})
        assert len(repr(td).splitlines()) == 52
        assert get_printoptions()["max_entries"] == 50

    @pytest.mark.parametrize("options", [{}, {"sort_keys": "insertion"}, {"sort_keys": None}])
    def test_repr_sort_keys_none_keeps_insertion_order(self, options: dict[str, Any]) -> None:
        with set_printoptions(**options):
            assert (
                repr(TensorDict({"b": 1, "a": 1})) == "TensorDict(batch_size=[], fields={b: i64[], a: i64[]})"
            )

    @pytest.mark.parametrize(
        ("options", "leaf"),
        [
            ({"show_shape": False}, "Tensor(device=cpu, dtype=torch.float32, is_shared=False)"),
            (
                {"show_field_device": False},
                "Tensor(shape=torch.Size([1]), dtype=torch.float32, is_shared=False)",
            ),
            (
                {"show_field_is_shared": False},
                "Tensor(shape=torch.Size([1]), device=cpu, dtype=torch.float32)",
            ),
            (
                {"compact": False, "show_dtype": False},
                "Tensor(shape=torch.Size([1]), device=cpu, is_shared=False)",
            ),
            ({"show_grad": True}, "is_shared=False, requires_grad=True)"),
            ({"show_is_contiguous": True}, "is_shared=False, is_contiguous=True)"),
            ({"show_is_view": True}, "is_shared=False, is_view=False)"),
            ({"show_storage_size": True}, "is_shared=False, storage_size=4)"),
            ({"plain": True}, "is_shared=False, mean=0, std=nan)"),
        ],
    )
    def test_repr_detail_options_select_long_form(self, options: dict[str, Any], leaf: str) -> None:
        with set_printoptions(**options):
            assert leaf in repr(TensorDict({"a": torch.zeros(1, requires_grad=True)}))

    def test_repr_compact_option_overrides_detail_options(self) -> None:
        with set_printoptions(compact=True, show_grad=True):
            assert repr(TensorDict()) == "TensorDict(batch_size=[], fields={})"

    def test_repr_long_form_without_node_details_prints_fields(self) -> None:
        with set_printoptions(compact=False, show_device=False, show_is_shared=False, show_batch_size=False):
            assert repr(TensorDict()) == "TensorDict(\n    fields={\n    },\n    )"

    def test_printoptions_unknown_option_raises(self) -> None:
        with pytest.raises(TypeError, match=r"no option \['nosuch'\]; there are \['compact', 'html'"):
            set_printoptions(nosuch=1)

    def test_printoptions_nested_contexts_restore_options(self) -> None:
        printed = set_printoptions(sort_keys=None)(lambda: repr(TensorDict({"b": 1, "a": 1})))
        assert printed() == printed() == "TensorDict(batch_size=[], fields={b: i64[], a: i64[]})"
        with set_printoptions(sort_keys=None), set_printoptions(compact=False):
            assert get_printoptions()["sort_keys"] is None
            assert not get_printoptions()["compact"]
        assert get_printoptions()["sort_keys"] == "insertion"

    def test_printoptions_are_thread_local(self) -> None:
        seen: list[bool] = []
        with set_printoptions(compact=False):
            thread = threading.Thread(target=lambda: seen.append(get_printoptions()["compact"]))
            thread.start()
            thread.join()
        assert seen == [True]

    def test_printoptions_decorator_in_two_threads_restores_options(self) -> None:
        inside, both, left = threading.Event(), threading.Event(), threading.Event()
        after: list[Any] = []

        @set_printoptions(compact=False)
        def meet(mine: threading.Event, others: threading.Event) -> None:
            mine.set()
            assert others.wait(60)

        def enter_first_and_leave_first() -> None:
            set_printoptions(sort_keys=None).set()
            meet(inside, both)
            after.append(get_printoptions()["sort_keys"])
            left.set()

        thread = threading.Thread(target=enter_first_and_leave_first)
        thread.start()
        assert inside.wait(60)
        meet(both, left)
        thread.join()
        assert [*after, get_printoptions()["sort_keys"]] == [None, "insertion"]

    def test_printoptions_context_in_two_threads_restores_options(self) -> None:
        inside, both, left = threading.Event(), threading.Event(), threading.Event()
        switches = set_printoptions(sort_keys="mine"), set_get_defaults_to_none(False)
        after: list[Any] = []

        def state() -> list[Any]:
            return [get_printoptions()["sort_keys"], get_defaults_to_none()]

        def enter_first_and_leave_first() -> None:
            set_printoptions(sort_keys=None).set()
            with switches[0], switches[1]:
                inside.set()
                assert both.wait(60)
                after.extend(state())
            after.extend(state())
            left.set()

        thread = threading.Thread(target=enter_first_and_leave_first)
        thread.start()
        assert inside.wait(60)
        with switches[0], switches[1], switches[0]:
            both.set()
            assert left.wait(60)
            assert state() == ["mine", False]
        thread.join()
        assert after == ["mine", False, None, True]
        assert state() == ["insertion", True]

    def test_printoptions_exit_out_of_order_restores_options(self) -> None:
        outer, inner = set_printoptions(sort_keys=None), set_get_defaults_to_none(False)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        assert get_printoptions()["sort_keys"] == "insertion" and not get_defaults_to_none()
        inner.__exit__(None, None, None)
        assert get_defaults_to_none()

    def test_printoptions_decorated_generator_uses_options(self) -> None:
        seen: list[Any] = []

        def look(*names: Any) -> None:
            seen.append((get_printoptions()["sort_keys"], get_defaults_to_none(), *names))

        @set_get_defaults_to_none(False)
        @set_printoptions(sort_keys=None)
        def steps(first: Any) -> Any:
            look(first)
            try:
                sent = yield first
                look(sent)
                yield sent
            except KeyError as error:
                look(error)
                yield "caught"
            finally:
                look("end")
            return "result"

        running = steps(1)
        assert [next(running), running.send(2), running.throw(KeyError(3))] == [1, 2, "caught"]
        look("outside")
        with pytest.raises(StopIteration) as end:
            next(running)
        assert end.value.value == "result"
        assert [row[:2] for row in seen] == [
            (None, False),
            (None, False),
            (None, False),
            ("insertion", True),
            (None, False),
        ]
        seen.clear()
        running = steps(1)
        next(running)
        running.close()
        assert seen[1:] == [(None, False, "end")]
        assert get_defaults_to_none()

    def test_printoptions_decorated_coroutine_uses_options(self) -> None:
        seen: list[Any] = []

        async def look(name: str) -> None:
            for _ in range(2):
                seen.append((name, get_printoptions()["sort_keys"]))
                await asyncio.sleep(0)

        async def both() -> list[Any]:
            decorated = set_printoptions(sort_keys=None)(look)
            return await asyncio.gather(decorated("inside"), look("outside"))

        assert asyncio.run(both()) == [None, None]
        assert sorted(seen) == sorted([("inside", None), ("outside", "insertion")] * 2)

    def test_printoptions_decorate_async_generator_raises(self) -> None:
        async def steps() -> Any:
            yield

        with pytest.raises(
            TypeError, match=r"set_printoptions cannot decorate .*steps\(\), which makes async"
        ):
            set_printoptions(sort_keys=None)(steps)

    def test_printoptions_set_persists(self) -> None:
        set_printoptions(compact=False).set()
        try:
            assert not get_printoptions()["compact"]
        finally:
            set_printoptions(compact=True).set()


class TestHtml:
    def test_html_shows_shapes_dtypes_devices_and_bytes(self) -> None:
        shown = make_dense_td()._repr_html_()
        assert shown is not None
        for part in (
            "<details open>",
            "<b>TensorDict</b>",
            "batch_size=[3]",
            "a: <span",
            "i64[2] cpu, 48 bytes",
            "2 entries",
        ):
            assert part in shown
        assert shown.count("<details") == shown.count("</details>") == 2
        assert "<script" not in shown
        assert "2.00 KB</span>" in TensorDict({"a": torch.zeros(512)})._repr_html_()  # type: ignore[operator]

    def test_html_escapes_keys(self) -> None:
        shown = TensorDict({"<script>alert(1)</script>": {"<b>": 1}})._repr_html_()
        assert shown is not None
        assert "<script" not in shown
        assert "&lt;script&gt;" in shown
        assert "<b>:" not in shown

    def test_html_lazy_stack_shows_stack_dim(self) -> None:
        shown = make_ragged()._repr_html_()
        assert shown is not None
        assert "f32[-1] cpu" in shown
        assert "stack_dim=0" in shown

    @pytest.mark.parametrize("wrap", [lambda stack: stack, lambda stack: TensorDict({"n": stack})])
    def test_html_shows_exclusive_fields(self, wrap: Any) -> None:
        rows = [{"a": 1, "<x>": 1.5}, {"a": 1}, {"a": 1, "y": {"z": True}}]
        shown = wrap(lazy_stack([TensorDict(row) for row in rows]))._repr_html_()
        assert "a: <span" in shown
        assert shown.count("only in member") == 2
        first, second = shown.split("only in member 0:")[1].split("only in member 2:")
        assert "&lt;x&gt;: <span" in first and "f32[] cpu" in first
        assert "y: <span" in second and "z: <span" in second and "bool[] cpu" in second
        assert shown.count("<details") == shown.count("</details>")
        assert shown.count("<li") == shown.count("</li>")
        assert shown.count("<ul") == shown.count("</ul>")

    def test_html_option_false_returns_none(self) -> None:
        with set_printoptions(html=False):
            assert make_dense_td()._repr_html_() is None


def test_repr_deep_tree_does_not_recurse() -> None:
    td = TensorDict({"x": torch.zeros(1)})
    for _ in range(2000):
        td = TensorDict({"k": td})
    assert repr(td).count("\n") == 2001
    with set_printoptions(compact=False):
        assert repr(td).count("k: TensorDict(") == 2000
    assert td._repr_html_().count("<details") == 2001  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "value", [3, "text", None, (1, 2), object(), torch.Size([2])], ids=lambda value: type(value).__name__
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorDict({"a": torch.zeros(2)}),
        lambda: lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(3)})]),
        lambda: lazy_stack([TensorDict({"b": torch.zeros(2)}), TensorDict({"b": torch.zeros(2), "a": 0})]),
        lambda: TensorDict(
            {"n": lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(3)})])}
        ),
    ],
)
def test_repr_mapped_object_prints_its_class(make: Any, value: Any) -> None:
    mapped = torch.utils._pytree.tree_map(lambda leaf: value, make())
    name = f"a: {type(value).__name__}}}"
    assert name in repr(mapped)
    with set_printoptions(compact=False):
        assert name in repr(mapped)
    assert type(value).__name__ in mapped._repr_html_()


def test_repr_different_mapped_objects_prints_both_classes() -> None:
    members = [TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(3)})]
    values = iter([1, "text"])
    mapped = torch.utils._pytree.tree_map(lambda leaf: next(values), lazy_stack(members))
    assert repr(mapped) == "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={a: [int, str]})"


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*TypedStorage", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "leaf",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=["sparse", "quantized", "strided", "jagged"],
)
def test_repr_odd_leaf_prints_moments(leaf: Any) -> None:
    td = TensorDict({"a": leaf()})
    assert td.is_shared() is False
    with set_printoptions(plain=True, show_is_shared=False, show_field_is_shared=False):
        assert "std=" in repr(td)
