"""Operations of torch on views and on opened stores: results are those in memory, and writes reach the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import td_core
from td_core import TensorDict, lazy_stack
from td_core.errors import LockedError

pytestmark = pytest.mark.once  # with all packages, every source is there

INDEX = torch.tensor([2, 0])
FULL = torch.tensor([[0, 1, 0], [1, 1, 0]])

#: Calls on ``x``, a collection of batch size (2, 3) with elements between 0 and 1.
CALLS = [
    "x.exp()", "torch.sqrt(x)", "x.nan_to_num(nan=1.0)", "x.round(decimals=1)", "x.logit(0.1)", "x.clamp(0.2, 0.6)", "x + 1",
    "1 - x", "x * x", "x.div(0.3, rounding_mode='floor')", "torch.maximum(x, x.flip(1))", "x == x", "x.isnan()", "x.sum(0)",
    "x.mean()", "x.std(1)", "x.amax((0, 1))", "x.max(1).indices", "x.median(0).values", "x.logsumexp(0)", "x.norm()",
    "x.quantile(0.5, 1)", "(x > 0.5).all(0, True)", "(x > 0.5).any()", "x.cumsum(1)", "x.cummax(0).values", "x.diff(dim=1)",
    "x.softmax(1)", "x.sort(1).values", "x.argsort(0)", "x.topk(2, 1).values", "x.kthvalue(2, 1).indices", "x.unique(dim=0)",
    "x.flip(0, 1)", "x.roll(1, 0)", "x.rot90()", "x.repeat(2, 1)", "x.repeat_interleave(2, 1)", "x.tile(2)",
    "x.narrow(1, 1, 2)", "x.reshape(3, 2)", "x.flatten()", "x.permute(1, 0)", "x.unsqueeze(0)", "x.expand(2, 2, 3)",
    "x.split(2, 1)[0]", "x.unbind(1)[2]", "x[[1, 0]]", "x[FULL > 0]", "x.gather(1, FULL)", "x.take_along_dim(FULL, 0)",
    "x.index_add(1, INDEX, x[:, 1:])", "x.index_copy(1, INDEX, x[:, 1:])", "x.scatter_reduce(0, FULL, x, 'sum')",
    "x.where(FULL > 0, x + 1)", "x.masked_fill(FULL > 0, 0.0)", "torch.isin(x, torch.tensor([0.0]))", "torch.stack([x, x])",
    "torch.cat([x, x], 1)", "torch.hstack([x, x])", "x.equal(x)", "x.allclose(x)",
    "torch.exp(x, out=TensorDict(batch_size=[2, 3]))",
]  # fmt: skip

#: Operations in place on ``x``.
WRITES = [
    "x.add_(1)", "x.mul_(x.clone())", "x.zero_()", "x.exp_()", "x.clamp_max_(0.5)", "x.round_()", "x.lerp_(x.clone() + 1, 0.5)",
    "x.masked_fill_(FULL > 0, 0.0)", "x.copy_(x.sort(1).values)", "x.update_(x.flip(0).clone())", "x.fill_('a', 2.0)",
    "x.apply_(lambda leaf: leaf * 3)", "x.set_('a', x['a'] + 1)", "x.set_at_('a', 7.0, (0, 1))", "x.__setitem__(0, x[1].clone())",
]  # fmt: skip


def make_data(*shape: int) -> TensorDict:
    generator = torch.Generator().manual_seed(3)

    def leaf(*tail: int) -> torch.Tensor:
        return torch.rand(*shape, *tail, generator=generator)

    return TensorDict({"a": leaf(), "n": {"b": leaf(4), "m": {"c": leaf(1, 2)}}}, shape)


def run(call: str, x: Any) -> Any:
    return eval(call, {"x": x, "torch": torch, "TensorDict": TensorDict, "INDEX": INDEX, "FULL": FULL})


#: Views, each as the shape of its base, and a function from the base to the view.
VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "slice": ((4, 3), lambda base: base[1:3]),
    "step": ((4, 3), lambda base: base[::2]),
    "row": ((3, 2, 3), lambda base: base[1]),
    "transposed": ((3, 2), lambda base: base.transpose(0, 1)),
    "narrowed": ((2, 5), lambda base: base.narrow(1, 1, 3)),
    "unbound": ((2, 4, 3), lambda base: base.unbind(1)[2]),
    "reshaped": ((6,), lambda base: base.view(2, 3)),
    "locked": ((3, 3), lambda base: base.lock_()[:2]),
    "members": ((2, 3), lambda base: lazy_stack(list(base.unbind(1)), 1)),
}


def make_view(name: str) -> tuple[TensorDict, Any]:
    shape, take = VIEWS[name]
    base = make_data(*shape)
    return base, take(base)


def assert_equal(found: Any, wanted: Any) -> None:
    """Compare two results; torch may round the elements of leaves with other strides in another way."""
    if isinstance(wanted, bool):
        assert found is wanted
        return
    leaves = dict(wanted.items(True, True))
    assert found.batch_size == wanted.batch_size
    assert list(found.keys(True, True)) == list(leaves)
    for key, leaf in leaves.items():
        torch.testing.assert_close(found[key].clone(), leaf, equal_nan=True)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("call", CALLS)
def test_call_on_view_equals_call_on_copy(call: str, name: str) -> None:
    base, view = make_view(name)
    before = base.clone()
    assert_equal(run(call, view), run(call, TensorDict(view.to_dict(), [2, 3]).clone()))
    assert_equal(base, before)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("call", WRITES)
def test_write_to_view_changes_its_base_alone(call: str, name: str) -> None:
    base, view = make_view(name)
    copy = TensorDict(view.to_dict(), [2, 3]).clone()
    run(call, copy)
    run(call, view)
    assert_equal(view, copy)
    outside = make_data(*VIEWS[name][0])
    VIEWS[name][1](outside).update_(copy)
    assert_equal(base, outside)


@pytest.mark.parametrize("call", WRITES)
def test_write_to_nested_collection_changes_its_parent(call: str) -> None:
    parent = TensorDict({"p": make_data(2, 3), "q": torch.zeros(2, 3)}, [2, 3])
    copy = parent["p"].clone()
    run(call, copy)
    run(call, parent["p"])
    assert_equal(parent["p"], copy)
    assert not parent["q"].any()


#: File name and package of each format that opens saves.
FORMATS = {
    "memmap": ("folder", "td_memmap"),
    "hdf5": ("x.h5", "td_hdf5"),
    "zarr": ("x.zarr", "td_zarr"),
    "safetensors": ("x.safetensors", "td_safetensors"),
}


def save(name: str, folder: Path) -> Path:
    file, package = FORMATS[name]
    pytest.importorskip(package)
    path = folder / file
    td_core.save(make_data(2, 3), path)
    return path


@pytest.fixture(scope="module", params=FORMATS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("call", CALLS)
def test_call_on_opened_store_equals_call_in_memory(call: str, saved: Path) -> None:
    assert_equal(run(call, td_core.open(saved)), run(call, make_data(2, 3)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("call", WRITES)
def test_write_reaches_opened_store(call: str, name: str, tmp_path: Path) -> None:
    path, wanted = save(name, tmp_path), make_data(2, 3)
    run(call, wanted)
    run(call, td_core.open(path, mode="r+"))
    assert_equal(td_core.load(path), wanted)


#: Suffix of the file of each kind that is a file, and its package.
LIVE = {"h5": "td_hdf5", "zarr": "td_zarr"}


def make_live(suffix: str, folder: Path) -> Any:
    pytest.importorskip(LIVE[suffix])
    return getattr(make_data(2, 3), f"to_{suffix}")(folder / f"live.{suffix}")


@pytest.fixture(scope="module", params=LIVE)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_live(request.param, tmp_path_factory.mktemp("live"))


@pytest.mark.parametrize("call", CALLS)
def test_call_on_live_file_equals_call_in_memory(call: str, live: Any) -> None:
    assert_equal(run(call, live), run(call, make_data(2, 3)))


@pytest.mark.parametrize("suffix", LIVE)
@pytest.mark.parametrize("call", WRITES)
def test_write_to_live_file_reaches_it(call: str, suffix: str, tmp_path: Path) -> None:
    wanted = make_data(2, 3)
    run(call, wanted)
    run(call, make_live(suffix, tmp_path))
    assert_equal(td_core.load(tmp_path / f"live.{suffix}"), wanted)


@pytest.mark.parametrize("call", WRITES)
def test_write_to_store_opened_for_reading_changes_no_file(call: str, saved: Path) -> None:
    opened, wanted = td_core.open(saved), make_data(2, 3)
    if saved.suffix == ".h5":
        with pytest.raises(LockedError, match="it is opened with mode='r'; open it with mode='r[+]'"):
            run(call, opened)
    else:  # mapped memory, in which a write stays in this process
        run(call, wanted)
        run(call, opened)
    assert_equal(opened, wanted)
    assert_equal(td_core.load(saved), make_data(2, 3))
