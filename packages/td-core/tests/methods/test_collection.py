"""The public base classes: their methods, and collections as mappings for libraries that search a batch for tensors."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest
import torch

from td_core import (
    LazyStackedTensorDict,
    TensorCollection,
    TensorDict,
    TensorDictParams,
    is_tensor_collection,
)
from td_core.spi import Wrapper

PROGRAM = """
from collections.abc import Mapping, MutableMapping
import torch
from torch import nn
import td_core
from td_core import TensorDict, TensorDictParams, lazy_stack

class Mine(TensorDict):
    pass

td = TensorDict({"a": torch.arange(4), "n": {"b": torch.zeros(4, 2)}}, [4])
kinds = [td, lazy_stack(list(td)), TensorDictParams(TensorDict(w=torch.ones(2))), Mine()]
print([isinstance(x, Mapping) for x in kinds])
td_core.count_as_mapping()
td_core.count_as_mapping()
print([isinstance(x, MutableMapping) for x in kinds])
other = Mine(a=torch.ones(4), batch_size=[4])
print(td.replace(other)["a"].sum().item(), td.update(other)["a"].sum().item(), TensorDict({"x": td})["x", "n"].batch_size)
print(TensorDict({"x": kinds[1]}, [4]).get("x").batch_size, type(TensorDict({"x": kinds[1]}, [4]).get("x")).__name__)
td[1:3] = kinds[1][:2]
td["n"] = Mine(b=torch.ones(4, 2), batch_size=[4])
print(td["a"].tolist(), type(td["n"]).__name__, td["n"].batch_size, (td == td).all(), dict(**td).keys())
print(nn.Linear(1, 1).load_state_dict(TensorDict(weight=torch.ones(1, 1), bias=torch.ones(1))))
"""


@pytest.mark.once
def test_count_as_mapping_registers_kinds_and_keeps_behaviour():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[False, False, False, False]",
        "[True, True, True, True]",
        "4.0 4.0 torch.Size([4])",
        "torch.Size([4]) LazyStackedTensorDict",
        "[1.0, 0.0, 1.0, 1.0] Mine torch.Size([4]) True dict_keys(['a', 'n'])",
        "<All keys matched successfully>",
    ]


class TestPredicates:
    def test_is_tensor_collection_accepts_class_and_instance(self) -> None:
        assert is_tensor_collection(TensorDict())
        assert is_tensor_collection(TensorCollection)
        assert not is_tensor_collection(torch.zeros(1))


@pytest.mark.parametrize(
    "cls", [TensorCollection, TensorDict, LazyStackedTensorDict, TensorDictParams, Wrapper]
)
def test_pickle_public_method_returns_same_method(cls):
    methods = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    functions = {name: method for name, method in methods.items() if inspect.isfunction(method)}
    assert len(functions) > 200
    assert [name for name, each in functions.items() if pickle.loads(pickle.dumps(each)) is not each] == []


def test_to_unknown_option_error_names_public_class():
    for call in (TensorDict().cpu, TensorDict().cuda, TensorDict().to):
        with pytest.raises(
            TypeError, match=r"^TensorCollection.to\(\) got an unexpected keyword argument 'bogus'"
        ):
            call(bogus=1)
