"""Results of public methods are freed by reference counting, including their open files and memory mappings."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from td_core import TensorDict, TensorDictParams, lazy_stack
from td_core._tree.node import Core
from td_core.errors import CodecError

pytest.importorskip("td_memmap")
td_tensorclass = pytest.importorskip("td_tensorclass")
pytest.importorskip("td_distributed")

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore")]

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Plain:
    a: Tensor
    b: Tensor


@td_tensorclass.tensorclass
class Record:
    a: Tensor
    b: Tensor
    n: TensorDict
    v: str
    w: Any = None


def make_with_values() -> TensorDict:
    values = {"v": "one", "w": td_tensorclass.NonTensorStack(*"abcd")}
    return TensorDict({**make_without_values(), **values}, [4])


def make_without_values() -> TensorDict:
    return TensorDict(
        {"a": torch.rand(4, 3) + 0.5, "b": torch.rand(4, 3) + 0.5, "n": {"c": torch.rand(4, 2)}}, [4]
    )


def make_record() -> Record:
    return Record(**dict(make_with_values().items()), batch_size=[4])


def save_and_load(data: Any, where: str) -> Any:
    data.memmap(where)
    return TensorDict.load_memmap(where)


#: Collections on which the methods are called: first with non-tensor values, which some methods reject, then without.
KINDS: dict[str, Callable[[str, Any], Any]] = {
    "mapped": lambda where, data: data().memmap(where),
    "loaded": lambda where, data: save_and_load(data(), where),
    "archive": lambda where, data: save_and_load(data(), where + "x.tdz"),
    "anonymous": lambda where, data: data().memmap(),
    "unlocked": lambda where, data: data().memmap().unlock_(),
    "consolidated": lambda where, data: data().consolidate(),
    "lazy stack": lambda where, data: lazy_stack([data(), data()]).memmap(where),
    "unlocked stack": lambda where, data: lazy_stack([data(), data()]),
    "no batch": lambda where, data: TensorDict({"a": torch.rand(3), "b": torch.rand(3)}),
    "params": lambda where, data: TensorDictParams(make_without_values()),
    "mapped params": lambda where, data: TensorDictParams(make_without_values(), no_convert=True).memmap(
        where
    ),
    "class": lambda where, data: (
        make_record() if data is make_with_values else Record.from_tensordict(make_without_values())
    ).memmap(where),
}

#: Methods that need another process, a server, an accelerator or pandas; other files test them.
EXCLUDED = {
    "all_gather", "all_reduce", "broadcast", "complex32", "cuda", "from_pandas", "from_remote_init", "gather_and_stack",
    "init_remote", "irecv", "isend", "map", "map_iter", "pin_memory", "pin_memory_", "qint32", "qint8",
    "quint4x2", "quint8", "record_stream", "recv", "reduce", "scatter", "send", "to_pandas",
    "to_store",
}  # fmt: skip

#: Names that a TensorDictParams inherits from nn.Module.
MODULE_NAMES = set(dir(nn.Module)) - set(dir(TensorDict))


def call(*args: Any, **options: Any) -> Callable[[Any, Any, str], Any]:
    return lambda data, method, where: method(*args, **options)


def call_with_clone(data: Any, method: Any, where: str) -> Any:
    return method(data.clone())


def full_mask(data: Any, value: Any = True) -> Tensor:
    return torch.full(data.batch_size, value)


#: Calls of the methods that need arguments.
CALLS: dict[str, Callable[[Any, Any, str], Any]] = {
    "to_safetensors": lambda data, method, where: method(where + "x.safetensors"),
    "from_safetensors": lambda data, method, where: (
        data.to_safetensors(where + "x.safetensors"),
        method(where + "x.safetensors"),
    )[1],
    "to_h5": lambda data, method, where: method(where + "x.h5"),
    "from_h5": lambda data, method, where: (data.to_h5(where + "x.h5"), method(where + "x.h5"))[1],
    "to_zarr": lambda data, method, where: method(where + "x.zarr"),
    "from_zarr": lambda data, method, where: (data.to_zarr(where + "x.zarr"), method(where + "x.zarr"))[1],
    "from_arrow": lambda data, method, where: method(data.to_arrow()),
    **{
        name: lambda data, method, where, name=name: method(where + name)
        for name in ("to_csv", "to_json", "to_parquet")
    },
    **{
        name: lambda data, method, where, name=name: (
            getattr(data, f"to_{name[5:]}")(where + name),
            method(where + name),
        )[1]
        for name in ("from_csv", "from_json", "from_parquet")
    },
    "to_mds": lambda data, method, where: method(out=where + "mds"),
    "from_mds": lambda data, method, where: (data.to_mds(out=where + "mds"), method(where + "mds"))[1],
    **dict.fromkeys(
        [
            "add",
            "add_",
            "sub",
            "sub_",
            "mul",
            "mul_",
            "div",
            "div_",
            "pow",
            "pow_",
            "mod",
            "rsub",
            "floor_divide",
            "floor_divide_",
            "fmod",
            "fmod_",
            "atan2",
            "fmax",
            "fmin",
            "logaddexp",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
        ],
        call(2),
    ),
    **dict.fromkeys(["clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "unbind"], call(0)),
    **dict.fromkeys(
        [
            "maximum",
            "maximum_",
            "minimum",
            "minimum_",
            "logical_and",
            "logical_or",
            "logical_xor",
            "copy_",
            "update",
            "update_",
            "equal",
            "allclose",
        ],
        call_with_clone,
    ),
    **dict.fromkeys(["lerp", "lerp_"], lambda data, method, where: method(data.clone(), 0.5)),
    **dict.fromkeys(
        ["addcmul", "addcmul_", "addcdiv", "addcdiv_"],
        lambda data, method, where: method(data.clone(), data.clone()),
    ),
    **dict.fromkeys(
        ["cat", "stack", "lazy_stack", "maybe_dense_stack"], lambda data, method, where: method([data, data])
    ),
    **dict.fromkeys(["cat_tensors", "stack_tensors"], call("a", "b", out_key="a")),
    **dict.fromkeys(["copy_at_", "update_at_"], lambda data, method, where: method(data[0].clone(), 0)),
    **dict.fromkeys(["chunk", "tensor_split"], call(2)),
    **dict.fromkeys(
        [
            "cummax",
            "cummin",
            "softmax",
            "log_softmax",
            "cumsum",
            "cumprod",
            "logcumsumexp",
            "unsqueeze",
            "size",
            "narrow",
        ],
        call(0),
    ),
    **dict.fromkeys(
        ["dumps", "save", "memmap", "memmap_", "memmap_like"],
        lambda data, method, where: method(where + "again", copy_existing=True),
    ),
    **dict.fromkeys(
        ["load", "load_", "load_memmap", "load_memmap_", "open"],
        lambda data, method, where: (data.clone().memmap(where + "again"), method(where + "again"))[1],
    ),
    **dict.fromkeys(
        ["entry_class", "get", "get_item_shape", "del_", "pop", "select", "exclude", "separates"], call("a")
    ),
    **dict.fromkeys(["is_non_tensor", "get_nestedtensor"], call("a")),
    **dict.fromkeys(["expand", "broadcast_to"], lambda data, method, where: method((2, *data.batch_size))),
    **dict.fromkeys(
        ["set", "set_", "setdefault"], lambda data, method, where: method("a", data.get("a").clone())
    ),
    **dict.fromkeys(["movedim", "moveaxis", "swapdims", "swapaxes", "transpose"], call(0, 0)),
    **dict.fromkeys(["reshape", "view"], call(-1)),
    **dict.fromkeys(
        ["rename", "rename_", "refine_names"], lambda data, method, where: method(*"tu"[: data.ndim])
    ),
    **dict.fromkeys(["repeat", "tile"], lambda data, method, where: method(*[2] * data.ndim)),
    **dict.fromkeys(["new_empty", "new_ones", "new_zeros"], call(4)),
    **dict.fromkeys(
        ["masked_fill", "masked_fill_"], lambda data, method, where: method(full_mask(data), 1.0)
    ),
    **dict.fromkeys(["topk", "kthvalue"], call(1, 0)),
    **dict.fromkeys(
        ["index_add", "index_copy"],
        lambda data, method, where: method(0, torch.tensor([0]), data[:1].clone()),
    ),
    **dict.fromkeys(
        ["bitwise_or", "bitwise_xor"],
        lambda data, method, where: getattr(data.apply(lambda leaf: leaf > 1), method.__name__)(True),
    ),
    "scatter_reduce": lambda data, method, where: method(0, full_mask(data, 0), data.clone(), "sum"),
    "take_along_dim": lambda data, method, where: method(full_mask(data, 0), 0),
    "isin": call([1.0]),
    "nanquantile": call(0.5),
    "matmul": lambda data, method, where: data.apply(lambda leaf: leaf[..., None]).matmul(torch.ones(1, 2)),
    "append": lambda data, method, where: method(data[0]),
    "extend": lambda data, method, where: method(data.clone()),
    **dict.fromkeys(
        ["fliplr", "rot90"], lambda data, method, where: getattr(data.unsqueeze(0), method.__name__)()
    ),
    "apply": call(lambda leaf: leaf + 1),
    "apply_": call(lambda leaf: leaf.add_(1)),
    "bitwise_and": lambda data, method, where: data.apply(lambda leaf: leaf > 1).bitwise_and(True),
    "clamp": call(0, 1),
    "create_nested": call("q"),
    "expand_as": lambda data, method, where: method(torch.zeros(2, *data.batch_size)),
    "fill_": call("a", 1),
    "flatten": call(0, -1),
    "flatten_keys": call("."),
    "flip": call(0),
    "from_any": call({"a": torch.ones(3), "b": [torch.ones(3)]}),
    "from_consolidated": lambda data, method, where: (
        make_without_values().consolidate(where + ".td"),
        method(where + ".td"),
    )[1],
    "from_dataclass": lambda data, method, where: TensorDict.from_dataclass(
        Plain(torch.ones(3), torch.ones(3))
    ),
    "from_dict": call({"a": torch.ones(4), "n": {"b": torch.ones(4)}}),
    "from_dict_instance": lambda data, method, where: method(data.to_dict()),
    "from_list": lambda data, method, where: TensorDict.from_list(
        [{"a": torch.ones(3)}, {"a": torch.ones(3)}]
    ),
    "from_module": lambda data, method, where: TensorDict.from_module(nn.Linear(2, 2)),
    "from_modules": lambda data, method, where: TensorDict.from_modules(nn.Linear(2, 2), nn.Linear(2, 2)),
    "from_namedtuple": call(Pair(torch.ones(3), torch.ones(3))),
    "from_pytree": call({"a": [torch.ones(2), torch.ones(3)]}),
    "from_schema": call({"a": ([3], torch.float32)}),
    "from_struct_array": call(np.zeros(3, dtype=[("a", "f4"), ("b", "f4")])),
    "from_tensordict": lambda data, method, where: method(data.to_tensordict()),
    "from_tuple": lambda data, method, where: TensorDict.from_tuple((torch.ones(3), torch.ones(3))),
    "fromkeys": call(["a"], 1),
    "gather": lambda data, method, where: method(0, full_mask(data, 0)),
    "get_at": call("a", 0),
    "get_non_tensor": lambda data, method, where: (
        make_with_values().memmap(where + "again").get_non_tensor("v")
    ),
    "insert": lambda data, method, where: method(0, data[0]),
    "load_state_dict": lambda data, method, where: method(data.state_dict()),
    "make_memmap": lambda data, method, where: method("zz", (4, 2)),
    "make_memmap_from_storage": lambda data, method, where: method(
        "zz", torch.ones(8).untyped_storage(), (4, 2)
    ),
    "make_memmap_from_tensor": lambda data, method, where: method("zz", torch.ones(4, 2)),
    "masked_select": lambda data, method, where: method(full_mask(data)),
    "named_apply": call(lambda name, leaf: leaf + 1, nested_keys=True),
    "new_full": call(4, 1),
    "new_tensor": call([1.0, 2.0, 3.0, 4.0]),
    "narrow": call(0, 0, 1),
    "pad": call([0, 1]),
    "permute": lambda data, method, where: method(*range(data.ndim)),
    "quantile": call(0.5, 0),
    "register_get_post_hook": call(lambda *given: None),
    "rename_key_": call("a", "aa"),
    "rename_keys": call({"a": "aa"}),
    "repeat_interleave": call(2, dim=0),
    "replace": lambda data, method, where: method({"a": data.get("a").detach().clone()}),
    "requires_grad_": lambda data, method, where: data.clone().requires_grad_(),
    "roll": call(1, 0),
    "set_at_": call("a", 0.0, 0),
    "set_non_tensor": call("v", "two"),
    "split": call(2),
    "split_keys": call(["a"]),
    "to": call(torch.float64),
    "to_module": lambda data, method, where: TensorDict.from_module(linear := nn.Linear(2, 2)).to_module(
        linear
    ),
    "type": call(torch.float64),
    "unflatten": call(0, (2, -1)),
    "unflatten_keys": lambda data, method, where: data.flatten_keys(".").unflatten_keys("."),
    "where": lambda data, method, where: method(full_mask(data), data.clone()),
    "backward": lambda data, method, where: (make_without_values().requires_grad_() * 2).sum().backward(),
}

#: Types of which no object may be in a reference cycle. Files and mappings are counted instead.
HELD = (Tensor, torch.UntypedStorage, Core)


@contextlib.contextmanager
def collect_cycles() -> Iterator[list[Any]]:
    """Disable the garbage collector, and yield a list of the objects that only it would free."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [each for each in gc.garbage if isinstance(each, HELD)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture(autouse=True)
def freeze_existing_objects() -> Iterator[None]:
    """Freeze the existing objects, so that a garbage collection is fast."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def count_mappings(folder: str) -> int:
    return sum(folder in line for line in Path("/proc/self/maps").read_text().splitlines())


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def call_method(make: Callable[[], Any], name: str, where: str) -> bool:
    """Call a method and consume its result. Return False if the call raises."""
    try:
        data = make()
        found = getattr(data, name)
        if name in CALLS:
            found = CALLS[name](data, found, where)
        elif callable(found):
            found = found()
        if hasattr(found, "__next__") or type(found).__name__.endswith("View"):
            list(found)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False
    return True


def public_names(data: Any) -> list[str]:
    cls = type(data)
    # A method of a package that is not installed is listed, but not an attribute.
    names = [name for name in dir(cls) if name[0] != "_" and name not in EXCLUDED and hasattr(cls, name)]
    return [name for name in names if not (isinstance(data, nn.Module) and name in MODULE_NAMES)]


#: Per kind, the names of the methods that were called without an error.
CALLED: dict[str, set[str]] = {}


@pytest.mark.parametrize("kind", KINDS)
def test_method_results_are_freed_by_reference_counting(kind: str, tmp_path: Path) -> None:
    places = (str(tmp_path / str(i)) for i in itertools.count())
    make = KINDS[kind]
    called = CALLED[kind] = set()
    left = []
    for name in public_names(make(next(places), make_with_values)):
        for data in (make_with_values, make_without_values):
            for _ in range(2):  # at the first call a library may start threads, which keep files
                where, files = next(places), count_open_files()
                with collect_cycles() as garbage:
                    done = call_method(lambda where=where, data=data: make(where, data), name, where)
                    kept = count_mappings(where), count_open_files() - files
                if not garbage and kept == (0, 0):
                    break
            if done:
                called.add(name)
            if garbage or kept != (0, 0):
                left.append((name, [type(each).__name__ for each in garbage], kept))
            if done:
                break
    assert left == []


def test_every_public_method_was_called() -> None:
    if len(CALLED) < len(KINDS):
        pytest.skip("only some kinds were tested")
    names = (
        set(public_names(make_with_values()))
        | set(public_names(lazy_stack([make_with_values()])))
        | set(public_names(make_record()))
    )
    assert sorted(names.difference(*CALLED.values())) == []


def save_and_fail(where: str, data: Any) -> None:
    with pytest.raises(CodecError, match="cannot store"):
        TensorDict({"x": data["a"].clone(), "v": td_tensorclass.NonTensorData(object())}).memmap(where)


FORMS: dict[str, Callable[[str, Any], Any]] = {
    "memmap": lambda where, data: data.memmap(where),
    "memmap over itself": lambda where, data: data.memmap(where).memmap(where),
    "memmap_": lambda where, data: data.clone().memmap_(where),
    "threads": lambda where, data: data.memmap(where, num_threads=2),
    "early": lambda where, data: data.memmap(where, num_threads=1, return_early=True).result(),
    "like": lambda where, data: data.memmap_like(where),
    "anonymous": lambda where, data: data.memmap(),
    "load": lambda where, data: save_and_load(data, where),
    "refresh": lambda where, data: data.memmap(where).memmap_refresh_(),
    "archive": lambda where, data: data.memmap(where + ".tdz"),
    "archive r+": lambda where, data: (
        data.memmap(where + ".tdz"), TensorDict.load_memmap(where + ".tdz", mode="r+")
    ),
    "consolidate": lambda where, data: (data.consolidate(where), TensorDict.from_consolidated(where)),
    "refused": save_and_fail,
}  # fmt: skip


def get_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("form", FORMS)
def test_repeated_saves_keep_files_and_memory_constant(form: str) -> None:
    data = TensorDict({"a": torch.zeros(1 << 18), "n": {"c": torch.zeros(10)}, "v": "word"}, []).lock_()
    with tempfile.TemporaryDirectory() as folder, collect_cycles():
        where = os.path.join(folder, "save")
        for _ in range(3):
            FORMS[form](where, data)
        before = count_open_files(), count_mappings(folder), get_resident_bytes()
        for _ in range(40):
            FORMS[form](where, data)
        after = count_open_files(), count_mappings(folder), get_resident_bytes()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 20 << 20  # bytes; the loop saves 40 times 1 MB
