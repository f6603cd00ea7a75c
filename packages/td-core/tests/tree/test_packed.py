"""Packed collections give the results of ordinary ones and of a loop, and what ends them is noticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from td_core import TensorDict
from td_core._torch import private
from td_core._tree import packed
from td_core.spi import StorageBackend

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((), (1,), (3,), (2, 3), (0,), (5, 1), (4, 4))
Leaves = dict[tuple[str, ...], Tensor]


def pack(leaves: dict[Any, Tensor], gap: int = 8, batch_size: tuple[int, ...] = ()) -> TensorDict:
    """Put copies of leaves in one storage, aligned to ``gap`` bytes; a tensor under two keys stays one."""
    places: dict[int, int] = {}
    end = 0
    for leaf in leaves.values():
        if id(leaf) not in places:
            end += -end % max(gap, leaf.itemsize)
            places[id(leaf)] = end
            end += leaf.numel() * leaf.itemsize
    storage = torch.full((end + 16,), 255, dtype=torch.uint8)
    made = {
        id(leaf): storage[places[id(leaf)] :][: leaf.numel() * leaf.itemsize]
        .view(leaf.dtype)
        .view(leaf.shape)
        for leaf in leaves.values()
    }
    for leaf in leaves.values():
        made[id(leaf)].copy_(leaf)
    td = StorageBackend.pack(
        TensorDict({key: made[id(leaf)] for key, leaf in leaves.items()}, batch_size), storage
    )
    assert td.is_packed
    return td


def plain(leaves: dict[Any, Tensor], batch_size: tuple[int, ...] = ()) -> TensorDict:
    copies = {id(leaf): leaf.clone() for leaf in leaves.values()}
    return TensorDict({key: copies[id(leaf)] for key, leaf in leaves.items()}, batch_size)


def make(count: int = 4, dtype: torch.dtype = torch.float32) -> dict[Any, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {
        ("n", f"k{i}"): torch.rand(3, i + 1, generator=generator).add(0.5).to(dtype) for i in range(count)
    } | {"a": torch.ones(2, dtype=dtype)}


def assert_same_bits(first: Any, second: Any) -> None:
    assert first.keys(True, True) == second.keys(True, True)
    for key, leaf in first.items(True, True):
        assert_same_leaf(leaf, second[key])


def assert_same_leaf(leaf: Tensor, other: Tensor) -> None:
    # The kernels of float16 round the last elements of a tensor, which fill no vector register, in another way.
    error = 1e-3 if leaf.dtype is torch.float16 else 0
    assert leaf.dtype is other.dtype
    torch.testing.assert_close(leaf, other, rtol=error, atol=0, equal_nan=True)


@contextmanager
def count_kernels(monkeypatch: pytest.MonkeyPatch, is_used: bool) -> Iterator[None]:
    """Check that the storage is written, or that it is not."""
    written: list[object] = []
    original = packed.Packed.raise_versions
    monkeypatch.setattr(
        packed.Packed,
        "raise_versions",
        lambda self, before: (written.append(self), original(self, before))[1],
    )
    yield
    monkeypatch.undo()
    assert bool(written) is is_used


#: Operations in place by name: on a collection and two others, and the same on a leaf. The number is an operand of each dtype.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add_ number": (lambda a, b, c: a.add_(2), lambda a, b, c: a.add_(2)),
    "mul_ float": (lambda a, b, c: a.mul_(1.5), lambda a, b, c: a.mul_(1.5)),
    "sub_ alpha": (lambda a, b, c: a.sub_(b, alpha=2), lambda a, b, c: a.sub_(b, alpha=2)),
    "add_ alpha": (lambda a, b, c: a.add_(b, alpha=3), lambda a, b, c: a.add_(b, alpha=3)),
    "add_": (lambda a, b, c: a.add_(b), lambda a, b, c: a.add_(b)),
    "mul_": (lambda a, b, c: a.mul_(b), lambda a, b, c: a.mul_(b)),
    "div_": (lambda a, b, c: a.div_(b), lambda a, b, c: a.div_(b)),
    "pow_": (lambda a, b, c: a.pow_(2), lambda a, b, c: a.pow_(2)),
    "maximum_": (lambda a, b, c: a.maximum_(b), lambda a, b, c: a.copy_(torch.maximum(a, b))),
    "clamp_min_": (lambda a, b, c: a.clamp_min_(1), lambda a, b, c: a.clamp_min_(1)),
    "clamp_max_": (lambda a, b, c: a.clamp_max_(b), lambda a, b, c: a.clamp_max_(b)),
    "neg_": (lambda a, b, c: a.neg_(), lambda a, b, c: a.neg_()),
    "sqrt_": (lambda a, b, c: a.sqrt_(), lambda a, b, c: a.sqrt_()),
    "zero_": (lambda a, b, c: a.zero_(), lambda a, b, c: a.zero_()),
    "fill_": (lambda a, b, c: a.fill_(3), lambda a, b, c: a.fill_(3)),
    "update_": (lambda a, b, c: a.update_(b), lambda a, b, c: a.copy_(b)),
    "copy_": (lambda a, b, c: a.copy_(b), lambda a, b, c: a.copy_(b)),
    "lerp_": (lambda a, b, c: a.lerp_(b, 0.25), lambda a, b, c: a.lerp_(b, 0.25)),
    "lerp_ weights": (lambda a, b, c: a.lerp_(b, c), lambda a, b, c: a.lerp_(b, c)),
    "addcmul_": (lambda a, b, c: a.addcmul_(b, c, value=2), lambda a, b, c: a.addcmul_(b, c, value=2)),
    "addcdiv_": (lambda a, b, c: a.addcdiv_(b, c), lambda a, b, c: a.addcdiv_(b, c)),
    "self": (lambda a, b, c: a.add_(a), lambda a, b, c: a.add_(a)),
    "scalar": (lambda a, b, c: a.mul_(torch.tensor(2)), lambda a, b, c: a.mul_(torch.tensor(2))),
    "scalar float": (lambda a, b, c: a.mul_(torch.tensor(1.1)), lambda a, b, c: a.mul_(torch.tensor(1.1))),
}  # fmt: skip

#: Reductions: on a collection, and of a vector of all elements. A sum of n elements in another order differs by n roundings.
REDUCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Any]]] = {
    "sum": (lambda a: a.sum(reduce=True), torch.sum),
    "mean": (lambda a: a.mean(reduce=True), torch.mean),
    "amax": (lambda a: a.amax(reduce=True), torch.amax),
    "amin": (lambda a: a.amin(reduce=True), torch.amin),
    "std": (lambda a: a.std(reduce=True), torch.std),
    "norm": (lambda a: a.norm(reduce=True), torch.linalg.vector_norm),
    "any": (lambda a: a.any(), lambda v: bool(v.any())),
    "all": (lambda a: a.all(), lambda v: bool(v.all())),
    "isfinite": (lambda a: a.isfinite().all(), lambda v: bool(v.isfinite().all())),
}


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[dict[Any, Tensor]], int]:
    """Draw three trees of one structure, and the alignment of their leaves."""
    forms = draw(
        st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=8)
    )
    if draw(st.booleans()):
        forms = [(shape, forms[0][1]) for shape, _ in forms]
    alias = draw(st.booleans())
    seed = draw(st.integers(0, 99))
    made = []
    for i in range(3):
        generator = torch.Generator().manual_seed(seed + i)
        leaves: dict[Any, Tensor] = {
            ("n", f"k{j}") if j % 3 else f"k{j}": torch.randint(1, 5, shape, generator=generator).to(dtype)
            / (1 if not dtype.is_floating_point else 3)
            for j, (shape, dtype) in enumerate(forms)
        }
        if alias:
            leaves["twin"] = next(iter(leaves.values()))
        made.append(leaves)
    return made, draw(st.sampled_from([1, 8, 16]))


def run(call: Callable[[], object]) -> type[Exception] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=25, deadline=None, database=None)
@given(trees())
def test_operation_random_tree_equals_ordinary_and_loop(
    name: str, drawn: tuple[list[dict[Any, Tensor]], int]
) -> None:
    made, gap = drawn
    ours, single = OPERATIONS[name]
    boxes, others = [pack(leaves, gap) for leaves in made], [plain(leaves) for leaves in made]
    raised = run(lambda: ours(*others))
    assert run(lambda: ours(*boxes)) is raised
    for box, other in zip(boxes, others):
        assert_same_bits(box, other)
    if raised is None:
        seen: dict[int, Tensor] = {}
        for key, leaf in made[0].items():
            if id(leaf) not in seen:
                looped = [leaves[key].clone() for leaves in made]
                seen[id(leaf)] = single(
                    looped[0],
                    *(looped[:1] if name == "self" else []),
                    *looped[1:][: 1 if name == "self" else 2],
                )
            assert_same_leaf(boxes[0][key], seen[id(leaf)])


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=20, deadline=None, database=None)
@given(trees())
def test_reduction_random_tree_skips_gaps(name: str, drawn: tuple[list[dict[Any, Tensor]], int]) -> None:
    (leaves, *_), gap = drawn
    ours, single = REDUCTIONS[name]
    box, other = pack(leaves, gap), plain(leaves)
    raised = run(lambda: ours(other))
    assert run(lambda: ours(box)) is raised
    if raised is None and len({leaf.dtype for leaf in leaves.values()}) == 1:
        expected = single(torch.cat([leaf.flatten() for leaf in leaves.values()]))
        torch.testing.assert_close(ours(box), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("name", ["add_", "mul_ float", "zero_", "update_", "neg_"])
def test_operation_packed_runs_one_kernel(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "mul_ float" and dtype is torch.int64:
        pytest.skip("torch refuses it")
    boxes = [pack(make(dtype=dtype)) for _ in range(3)]
    assert boxes[0].is_packed
    with count_kernels(monkeypatch, True):
        OPERATIONS[name][0](*boxes)


def test_first_operation_does_not_read_the_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    same = pack(make()).data
    with count_kernels(monkeypatch, False):
        same.mul_(2)
    with count_kernels(monkeypatch, True):
        same.mul_(2)
    assert torch.equal(same["a"], torch.full((2,), 4.0))


def test_clone_packed_is_packed_and_apart() -> None:
    box = pack(make() | {"i": torch.arange(3)})
    copy = box.clone()
    assert copy.is_packed and not copy.is_locked
    assert_same_bits(copy, box)
    copy.zero_()
    assert box["a"].all() and not copy["a"].any()
    weight = torch.ones(2, requires_grad=True)
    copy["a"].add_(weight)
    assert copy["a"].requires_grad and not copy["n", "k0"].requires_grad


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.bool,
    ],
    ids=str,
)
@pytest.mark.parametrize("gap", [1, 16])
def test_isfinite_of_packed_equals_torch_on_each_leaf(dtype: torch.dtype, gap: int) -> None:
    odd = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 0.0, -2.0])
    leaf = odd.to(dtype) if dtype.is_floating_point or dtype.is_complex else torch.arange(6).to(dtype)
    box = pack(
        {"a": leaf, "s": leaf[1].clone(), ("n", "b"): leaf.flip(0).view(2, 3), "e": leaf[:0].clone()}, gap
    )
    box.add_(0) if dtype is not torch.bool else box.zero_()
    wanted = {key: leaf.isfinite() for key, leaf in box.items(True, True)}
    for _ in range(2):  # the first operation runs leaf by leaf
        found = box.isfinite()
        assert box.is_packed
        assert list(found.keys(True, True)) == list(wanted)
        for key, flags in wanted.items():
            assert found[key].dtype is torch.bool
            assert torch.equal(found[key], flags)
    found["a"].logical_not_()
    assert torch.equal(found["n", "b"], wanted["n", "b"])
    box["a"] = torch.full((6,), torch.nan)
    assert not box.isfinite()["a"].any()


def test_isfinite_of_packed_under_transform_and_autograd_equals_plain() -> None:
    leaves = {"a": torch.tensor([[1.0, torch.nan]]), "b": torch.tensor([torch.inf])}
    box = pack(leaves, batch_size=(1,)).add_(0)
    box.isfinite()
    assert torch.vmap(lambda td: td.isfinite())(box)["a"].tolist() == [[True, False]]
    box["a"].requires_grad_()
    assert box.isfinite()["b"].tolist() == [False]
    mixed = pack(leaves | {"i": torch.arange(3)}).add_(0)
    mixed.isfinite()
    assert {key: flags.tolist() for key, flags in mixed.isfinite().items()} == {
        "a": [[True, False]], "b": [False], "i": [True] * 3,
    }  # fmt: skip


def test_clone_of_leaves_that_only_their_memory_aligns_equals_them() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    leaf = memory[8:24].view(
        torch.float64
    )  # eight bytes into the memory, four into the storage of the collection
    box = packed.pack_root(TensorDict({"a": leaf}), memory[4:])
    assert torch.equal(box.clone()["a"], leaf)
    assert torch.equal(box.isfinite()["a"], leaf.isfinite())


def test_lock_and_unlock_packed_stays_packed() -> None:
    box = pack(make()).lock_()
    assert box.unlock_().is_packed


@pytest.mark.parametrize("take", ["data", "detach"])
def test_same_memory_of_packed_is_packed(take: str) -> None:
    box = pack(make())
    same = box.data if take == "data" else box.detach()
    assert same.is_packed
    versions = box["a"]._version
    same.mul_(2)
    assert torch.equal(box["a"], torch.full((2,), 2.0))
    assert (box["a"]._version == versions) is (take == "data")
    assert same["a"]._version > 0


def set_data(leaf: Tensor, value: Tensor) -> None:
    leaf.data = value


def swap(box: TensorDict) -> None:
    first, second = box["n", "k1"], box["twin"]
    first.data, second.data = second.data, first.data


#: What ends a packed collection, or changes what a leaf is.
CHANGES: dict[str, Callable[[TensorDict], object]] = {
    "data": lambda box: set_data(box["a"], torch.rand(2)),
    "data of the same memory": lambda box: set_data(box["n", "k1"], box["n", "k1"].data.t()),
    "shorter data": lambda box: set_data(box["a"], box["a"].data[:1]),
    "data of another dtype": lambda box: set_data(box["a"], box["a"].data.view(torch.int32)),
    "data of two leaves exchanged": swap,
    "replaced entry": lambda box: box.set("a", torch.rand(2)),
    "replaced by an equal one": lambda box: box.set("a", box["a"].clone()),
    "replaced by one in the same memory": lambda box: box.set("a", box["a"].data),
    "new entry": lambda box: box.set("z", torch.rand(2)),
    "new nested entry": lambda box: box.set(("n", "z"), torch.rand(2)),
    "removed entry": lambda box: box.del_("a"),
    "renamed entries": lambda box: (box.rename_key_("a", "x"), box.rename_key_("twin", "a"), box.rename_key_("x", "twin")),
    "replaced node": lambda box: box.set("n", box["n"].clone()),
    "resized": lambda box: box["a"].resize_(1),
    "transposed": lambda box: box["n", "k1"].t_(),
    "negative view": lambda box: set_data(box["c"], torch.complex(torch.ones(2), torch.ones(2)).conj()),
    "expanded": lambda box: set_data(box["a"], torch.ones(1).expand(2)),
}  # fmt: skip


def make_changing() -> dict[Any, Tensor]:
    return make() | {
        "twin": torch.arange(6.0).view(3, 2),
        "c": torch.complex(torch.ones(2), torch.arange(2.0)),
    }


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["mul_", "update_", "zero_", "lerp_", "add_ number"])
def test_write_after_change_equals_ordinary(change: str, name: str) -> None:
    boxes, others = [pack(make_changing()) for _ in range(3)], [plain(make_changing()) for _ in range(3)]
    torch.manual_seed(0)
    for group in (boxes, others):
        OPERATIONS["add_ number"][0](*group)
        torch.manual_seed(1)
        CHANGES[change](group[0])
    operands = [[group[0].clone() for _ in range(2)] for group in (boxes, others)]
    for value in operands[0] + operands[1]:
        value.add_(1)
    raised = run(lambda: OPERATIONS[name][0](others[0], *operands[1]))
    assert run(lambda: OPERATIONS[name][0](boxes[0], *operands[0])) is raised
    assert_same_bits(boxes[0], others[0])


@pytest.mark.parametrize("change", CHANGES)
def test_write_after_change_without_versions_of_dicts_equals_ordinary(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "find_state_reader", lambda: private._list_identities)
    test_write_after_change_equals_ordinary(change, "mul_")


@pytest.mark.parametrize("change", CHANGES)
def test_read_after_change_equals_ordinary(change: str) -> None:
    source, other = pack(make_changing()), plain(make_changing())
    target = pack(make_changing())
    target.update_(source)
    for td in (source, other):
        torch.manual_seed(1)
        CHANGES[change](td)
    assert run(lambda: target.update_(source)) is run(lambda: plain(make_changing()).update_(other))
    assert_same_bits(source.clone(), other.clone())


def test_half_module_ends_packed() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).requires_grad_(False)
    box = pack(dict(module.named_parameters()))
    for name, parameter in module.named_parameters():
        parameter.data = box[name].data
        box[name] = parameter
    assert box.is_packed
    module.half()
    assert not box.is_packed
    box.mul_(2)
    assert all(parameter.dtype is torch.float16 for parameter in module.parameters())


def test_shared_memory_stays_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    box = pack(make())
    box.mul_(1)
    box["a"].share_memory_()
    with count_kernels(monkeypatch, True):
        box.mul_(2)
    assert torch.equal(box["a"], torch.full((2,), 2.0)) and box.is_packed


def test_batch_size_changed_operand_is_paired_in_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    box, other = (
        pack({"a": torch.ones(2, 3)}, batch_size=(2,)),
        pack({"a": torch.ones(2, 3)}, batch_size=(2,)),
    )
    box.add_(other)
    other.batch_size = [2, 3]
    with count_kernels(monkeypatch, False):
        box.add_(other)
    assert torch.equal(box["a"], torch.full((2, 3), 3.0))


class Loud(Tensor):
    """A subclass, whose code must run."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclass_leaf_runs_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    box = pack(make())
    box["a"] = box["a"].as_subclass(Loud)
    before = Loud.calls
    with count_kernels(monkeypatch, False):
        box.mul_(2)
    assert Loud.calls > before and not box.is_packed


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("torch_has_guards", [True, False])
def test_write_in_mode_is_ordinary_and_stays_packed(
    mode: str, torch_has_guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch_has_guards:
        monkeypatch.setattr(private, "_find_tested", lambda path, call: None)
    box = pack(make())
    box.mul_(2)
    with MODES[mode](), pytest.MonkeyPatch.context() as patch, count_kernels(patch, False):
        box.mul_(2)
    assert torch.equal(box["a"], torch.full((2,), 4.0)) and box.is_packed


def test_vmap_and_grad_of_packed_equal_ordinary() -> None:
    def scale(factor: Tensor) -> Tensor:
        return box.clone().add_(1)["a"] * factor

    box = pack(make())
    box.mul_(1)
    assert torch.equal(torch.vmap(scale)(torch.tensor([1.0, 2.0])), torch.tensor([[2.0, 2.0], [4.0, 4.0]]))
    assert torch.equal(torch.func.jacrev(scale)(torch.tensor(3.0)), torch.full((2,), 2.0))
    mapped = torch.vmap(lambda td: td.mul_(2)["a"])(pack({"a": torch.ones(3, 2)}, batch_size=(3,)))
    assert torch.equal(mapped, torch.full((3, 2), 2.0)) and box.is_packed


def test_recorded_write_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.tensor(3.0, requires_grad=True)
    box = pack(make())
    with count_kernels(monkeypatch, False):
        box.mul_(scale)
    box["a"].sum().backward()
    assert scale.grad == 2


def test_operand_that_requires_grad_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    box, other = pack(make()), pack(make())
    other.requires_grad_()
    with count_kernels(monkeypatch, False):
        box.add_(other)
    assert box["a"].requires_grad
    box["a"].sum().backward()
    assert torch.equal(other["a"].grad, torch.ones(2))


def test_reduction_of_leaves_that_require_grad_has_gradients() -> None:
    box = pack(make())
    box.requires_grad_()
    (box.sum(reduce=True) + box.norm(reduce=True)).backward()
    other = plain(make())
    other.requires_grad_()
    (other.sum(reduce=True) + other.norm(reduce=True)).backward()
    for key, leaf in box.items(True, True):
        torch.testing.assert_close(leaf.grad, other[key].grad)


def test_write_leaf_that_requires_grad_raises_as_ordinary() -> None:
    box = pack(make())
    box.requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad; write under torch.no_grad"):
        box.mul_(2)
    with torch.no_grad():
        box.mul_(2)
    assert torch.equal(box["a"], torch.full((2,), 2.0))


@pytest.mark.parametrize("name", ["add_", "zero_", "update_", "lerp_"])
@pytest.mark.parametrize(
    "kind", ["view", "detached", "data", "split", "parameter", "moved parameter", "replaced"]
)
def test_write_raises_version_of_each_leaf(kind: str, name: str) -> None:
    storage = torch.zeros(32, dtype=torch.uint8)
    flat = storage.view(torch.float32)
    first, second = flat.unsafe_split(4) if kind == "split" else (flat[:4], flat[4:])
    if kind == "detached":
        first, second = first.detach(), second.detach()
    elif kind == "data":
        first, second = first.data, second.data
    elif kind == "parameter":
        first, second = nn.Parameter(first), nn.Parameter(second)
    elif kind == "moved parameter":
        pair = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        pair[0].data, pair[1].data = first, second
        first, second = pair
    box = StorageBackend.pack(TensorDict({"a": first, "b": second}), storage)
    others = [pack({"a": torch.rand(4), "b": torch.rand(4)}, 1) for _ in range(2)]
    if kind == "replaced":
        box.mul_(1)
        box["a"], box["b"] = first, second = first.data, second.data
    versions = [other["a"]._version for other in others]
    with torch.no_grad():
        for _ in range(2):
            before = first._version, second._version
            OPERATIONS[name][0](box, *others)
            assert first._version > before[0] and second._version > before[1]
    assert [other["a"]._version for other in others] == versions


@pytest.mark.parametrize("torch_has_it", [True, False])
def test_write_raises_version_of_each_leaf_of_clone(
    torch_has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch_has_it:
        monkeypatch.setattr(packed, "find_apart_view", lambda: private._detach_view)
    box = pack(make() | {"i": torch.arange(3), "none": torch.zeros(0)})
    copy = box.clone()
    leaves = [*copy.values(True, True)]
    assert copy.is_packed and all(leaf._base is None and leaf.is_leaf for leaf in leaves)
    for _ in range(3):
        before = [leaf._version for leaf in leaves]
        copy.add_(box)
        assert all(leaf._version > version for leaf, version in zip(leaves, before) if leaf.numel())
    assert_same_bits(copy, plain(dict(box.items(True, True))).mul_(4))


def test_backward_after_packed_write_notices_change() -> None:
    box = pack(make())
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * box["a"]).sum()
    box.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_write_refused_for_one_dtype_writes_nothing() -> None:
    box = pack({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(RuntimeError, match="key 'b'"):
        box.mul_(0.5)
    assert torch.equal(box["a"], torch.ones(2))


def test_operand_that_is_a_leaf_is_read_as_ordinary() -> None:
    leaves = {"a": torch.tensor(2.0), "b": torch.ones(3)}
    box, other = pack(leaves, 1), plain(leaves)
    box.mul_(box["a"])
    other.mul_(other["a"])
    assert_same_bits(box, other)


def test_views_of_user_see_packed_write() -> None:
    box = pack(make())
    view = box["n", "k1"][0]
    box.zero_()
    assert not view.any()


def test_overlapping_and_distant_leaves_are_not_packed() -> None:
    storage = torch.zeros(64, dtype=torch.uint8)
    flat = storage.view(torch.float32)
    assert not StorageBackend.pack(TensorDict({"a": flat[:4], "b": flat[3:6]}), storage).is_packed
    assert not StorageBackend.pack(TensorDict({"a": flat[:4], "b": torch.zeros(2)}), storage).is_packed
    assert not StorageBackend.pack(TensorDict({"a": flat[::2]}), storage).is_packed
    far = StorageBackend.pack(TensorDict({"a": flat[:2], "b": flat[10:12]}), storage)
    far.fill_(1)
    assert far.is_packed and flat.sum() == 4


def test_source_that_shares_the_storage_is_copied_as_ordinary() -> None:
    storage = torch.arange(8.0).view(torch.uint8)
    flat = storage.view(torch.float32)
    box = StorageBackend.pack(TensorDict({"a": flat[:4]}), storage[:16])
    other = StorageBackend.pack(TensorDict({"a": flat[2:6]}), storage[8:24])
    assert box.is_packed and other.is_packed
    box.update_(other)
    assert torch.equal(box["a"], torch.tensor([2.0, 3.0, 4.0, 5.0]))


def test_source_that_shares_the_storage_and_the_layout_of_others_is_copied_as_ordinary() -> None:
    flat = torch.arange(6.0)
    boxes = [
        StorageBackend.pack(TensorDict({"a": part}), part.view(torch.uint8))
        for part in (flat[:4], flat[2:], torch.zeros(4))
    ]
    assert all(box.is_packed for box in boxes)
    first, second, apart = boxes
    apart.update_(first).update_(second)
    first.update_(second)
    assert torch.equal(flat, torch.tensor([2.0, 3.0, 4.0, 5.0, 4.0, 5.0]))


def test_structures_with_equal_places_are_not_confused() -> None:
    storages = [torch.arange(4.0).view(torch.uint8), torch.zeros(16, dtype=torch.uint8)]
    leaves = [storage.view(torch.float32).split(2) for storage in storages]
    first = StorageBackend.pack(TensorDict({"a": leaves[0][0], "b": {"a": leaves[0][1]}}), storages[0])
    second = StorageBackend.pack(TensorDict({"b": leaves[1][0], "a": {"a": leaves[1][1]}}), storages[1])
    assert run(lambda: second.update_(first)) is not None


def test_compiled_write_equals_ordinary() -> None:
    box = pack(make())
    compiled = torch.compile(lambda td: td.mul_(2), backend="eager", fullgraph=True)
    compiled(box)
    assert torch.equal(box["a"], torch.full((2,), 2.0))
    assert math.isclose(
        float(box.sum(reduce=True)), float(plain(make()).mul_(2).sum(reduce=True)), rel_tol=1e-6
    )
