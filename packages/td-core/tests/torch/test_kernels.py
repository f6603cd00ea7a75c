"""Fused torch calls over lists of leaves: results and derivatives equal those of the single operation."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import chain, repeat

import pytest
import torch
from torch.autograd import forward_ad

from td_core._functions.pointwise import OPS
from td_core._torch.kernels import Op, foreach
from td_core._torch.private import foreach_kernel, functorch_level


def test_foreach_without_fused_kernel_runs_loop() -> None:
    assert foreach_kernel("no_such_kernel") is None
    assert foreach(Op(None, torch.exp), [torch.zeros(())]) == [torch.ones(())]


def test_functorch_level_inside_vmap_is_not_none() -> None:
    assert functorch_level() is None
    seen = []
    torch.func.vmap(lambda x: seen.append(functorch_level()) or x)(torch.zeros(2))
    assert seen[0] is not None


LISTS = {"none": 1, "number": 1, "one": 2, "two": 3}


def compute_derivatives(operation, operands: str, inplace: bool) -> tuple[list, list]:
    """Compute gradients and forward tangents of an operation on lists of four leaves."""
    generator = torch.Generator().manual_seed(0)
    lists = [
        [torch.rand(n, generator=generator) / 2 + 0.25 for n in (2, 1, 2, 1)] for _ in range(LISTS[operands])
    ]
    numbers = [0.4] if operands == "number" else []
    inputs = [[leaf.clone().requires_grad_() for leaf in leaves] for leaves in lists]
    computed = [[leaf * 1 for leaf in leaves] for leaves in inputs]
    result = operation(*computed, *numbers)
    total = sum((leaf**2).sum() for leaf in (computed[0] if inplace else result))
    gradients = torch.autograd.grad(total, [*chain(*inputs)], allow_unused=True)
    with forward_ad.dual_level():
        duals = [[forward_ad.make_dual(leaf.clone(), leaf + 1) for leaf in leaves] for leaves in lists]
        result = operation(*duals, *numbers)
        tangents = [forward_ad.unpack_dual(leaf).tangent for leaf in (duals[0] if inplace else result)]
    return [*gradients], tangents


def compute_single_derivatives(name: str, operands: str) -> tuple[list, list] | None:
    """Compute the derivatives with the single operation per leaf; return None if torch cannot."""

    def one_by_one(*given):
        *lists, last = given
        rest = [repeat(last)] if operands == "number" else [last]
        return list(map(OPS[name].single, *lists, *rest))

    try:
        return compute_derivatives(one_by_one, operands, name.endswith("_"))
    except (RuntimeError, TypeError):
        return None


with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # torch 2.14 warns about its own import at the first dual tensor
    DERIVATIVES = {
        f"{name}, {operands}": (name, operands, expected)
        for name in OPS
        for operands in LISTS
        if OPS[name].fused is not None
        and (expected := compute_single_derivatives(name, operands)) is not None
    }


@pytest.mark.parametrize(("name", "operands", "expected"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_foreach_gradients_equal_single_op_gradients(name, operands, expected):
    found = compute_derivatives(partial(foreach, OPS[name]), operands, name.endswith("_"))
    for kind, mine, theirs in zip(("gradient", "tangent"), found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None), kind
            assert a is None or torch.allclose(a, b, equal_nan=True), kind
