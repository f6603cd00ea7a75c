"""Leaves with few supported operations: others raise with the key before anything is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from td_core import TensorDict, TensorDictParams, lazy_stack, set_printoptions
from td_core.errors import StructureError

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested", "ignore:Sparse", "ignore:torch.quantize", "ignore:Lazy modules"
)

MASK = torch.tensor([True, False, True, False])


def make_nested_tensor(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(float(n)) for n in (2, 3, 1, 2)], layout=layout)


def make_inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 3)


LEAVES = {
    "jagged": lambda: make_nested_tensor(torch.jagged),
    "nested": lambda: make_nested_tensor(torch.strided),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "conj": lambda: torch.ones(4, 3, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(4, 3), 0.1, 0, torch.quint8),
    "uint16": lambda: torch.zeros(4, 3, dtype=torch.uint16),
    "uint64": lambda: torch.zeros(4, 3, dtype=torch.uint64),
    "bfloat16": lambda: torch.zeros(4, 3, dtype=torch.bfloat16),
    "meta": lambda: torch.empty(4, 3, device="meta"),
    "view": lambda: torch.zeros(4, 1).expand(4, 3),
    "inference": make_inference_tensor,
    "grad": lambda: torch.zeros(4, 3, requires_grad=True),
}

REFUSED = [
    ("jagged", lambda td: td[None]),
    ("jagged", lambda td: td.view(2, 2)),
    ("jagged", lambda td: td.expand(3, 4)),
    ("jagged", lambda td: td.detach_()),
    ("nested", lambda td: torch.stack([td, td])),
    ("nested", lambda td: lazy_stack([td, td]).to_dict()),
    ("nested", lambda td: lazy_stack([td, td]).densify()),
    ("nested", lambda td: td.exp_()),
    ("nested", lambda td: td.all()),
    ("nested", lambda td: td.to("meta")),
    ("sparse", lambda td: td.all()),
    ("sparse", lambda td: td.share_memory_()),
    ("csr", lambda td: td.numpy()),
    ("conj", lambda td: td.numpy()),
    ("quantized", lambda td: td.double()),
    ("quantized", lambda td: td.to(torch.int32)),
    ("quantized", lambda td: td.type(torch.float16)),
    ("uint16", lambda td: td.__setitem__(MASK, 1)),
    ("uint64", lambda td: td.__setitem__(MASK, td[MASK].clone())),
    ("uint16", lambda td: td.__setitem__([0, 2], {"x": torch.ones(2, 3), "n": {"y": 5}})),
    ("bfloat16", lambda td: td.numpy()),
    ("meta", lambda td: td.to("cpu")),
    ("meta", lambda td: td.numpy()),
    ("view", lambda td: td.detach_()),
    ("inference", lambda td: td.set_at_(("n", "y"), 1, 0)),
    ("grad", lambda td: td.set_at_(("n", "y"), 1, 0)),
    ("grad", lambda td: td.numpy()),
]


@pytest.mark.parametrize(("leaf", "do"), REFUSED)
def test_unsupported_operation_names_key_and_changes_nothing(leaf, do):
    x, y = torch.rand(4, 3, requires_grad=True) * 2, LEAVES[leaf]()
    td = TensorDict({"x": x.detach(), "n": {"y": y}}, [4])
    before = x.tolist(), td["n", "y"]._version if leaf != "inference" else 0, repr(y)
    with pytest.raises((RuntimeError, TypeError), match="'y'"):
        do(td)
    assert (td["x"].tolist(), y._version if leaf != "inference" else 0, repr(td["n", "y"])) == before


@pytest.mark.parametrize("leaf", LEAVES)
def test_tree_map_calls_function_with_every_leaf(leaf):
    td = TensorDict({"n": {"y": LEAVES[leaf]()}}, [4])
    seen = []
    result = tree_map(lambda value: seen.append(value) or value, td)
    assert result.batch_size == result["n"].batch_size == (4,)
    assert len(seen) == 1 and seen[0] is td["n", "y"] is result["n", "y"]


@pytest.mark.parametrize("leaf", LEAVES)
def test_iterate_yields_elements_of_every_leaf(leaf):
    y = LEAVES[leaf]()
    td = TensorDict({"n": {"y": y}}, [4])
    assert [row["n", "y"].shape for row in td] == [row["n", "y"].shape for row in reversed(td)][::-1]
    assert [row["n", "y"].shape for row in td] == [part.shape for part in y.unbind(0)]


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_iterate_sparse_leaf_yields_every_element(sparse):
    td = TensorDict({"y": sparse(torch.eye(3) * torch.arange(1.0, 201)[:, None, None])}, [200])
    assert [row["y"].to_dense()[0, 0].item() for row in td] == list(range(1, 201))


def test_detach_inplace_with_view_detaches_nothing():
    td = TensorDict({"a": torch.ones(2, requires_grad=True) * 2, "b": torch.ones(3)[1:]})
    with pytest.raises(RuntimeError, match="key 'b' in place: it is a view"):
        td.detach_()
    assert td["a"].requires_grad


def test_unsqueeze_nested_leaf_raises_structure_error():
    with pytest.raises(StructureError, match=r"key 'y': a nested tensor has one batch dim"):
        TensorDict({"y": make_nested_tensor(torch.jagged)}, [4]).unsqueeze(0)


def test_uninitialized_leaves_are_kept_and_printed():
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    params = TensorDictParams(TensorDict.from_module(net))
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [name for name, _ in params.named_buffers()] == buffers
    level = params["0"]
    assert repr(level) == "TensorDict(batch_size=[], fields={weight: f32[-1], bias: f32[-1]})"
    with set_printoptions(compact=False):
        assert "weight: UninitializedParameter(shape=torch.Size([-1]), device=cpu" in repr(level)
    assert "weight: <span" in level._repr_html_()
    with pytest.raises(ValueError, match=r"cannot compute exp: key '\w+': Attempted to use an uninitialized"):
        level.exp()
    net(torch.ones(2, 4))
    assert params["0", "weight"] is net[0].weight and net[0].weight.shape == (3, 4)
    assert repr(level) == "TensorDict(batch_size=[], fields={weight: f32[3,4], bias: f32[3]})"
    assert [name for name, _ in params.named_buffers()] == buffers
