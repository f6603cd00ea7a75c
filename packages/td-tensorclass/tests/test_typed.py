"""TypedTensorDict, TensorAttrs and dataclasses as collections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typing_extensions import NotRequired

from td_core import TensorDict
from td_core.testing import CollectionTests
from td_tensorclass import TensorAttrs, TypedTensorDict, from_dataclass, is_tensorclass


class Data(TypedTensorDict):
    obs: Tensor
    act: Tensor
    limit: ClassVar[int] = 3


class More(Data):
    reward: Tensor = None
    name: str = "a"


class Partial(TypedTensorDict):
    obs: Tensor
    act: NotRequired[Tensor]


class TestTyped(CollectionTests):
    def make(self) -> Data:
        generator = torch.Generator().manual_seed(0)
        return Data(
            obs=torch.rand(3, 2, generator=generator),
            act=torch.rand(3, 2, 4, generator=generator),
            batch_size=[3, 2],
        )


def test_getattr_declared_key_returns_entry() -> None:
    data = Data(obs=torch.zeros(3), act=torch.ones(3), batch_size=[3])
    assert data.obs is data["obs"]
    data.obs = torch.ones(3)
    assert data["obs"].tolist() == [1, 1, 1]
    assert isinstance(data, TensorDict)
    assert type(data + 1) is type(data[0]) is type(data.clone()) is Data
    data["extra"] = torch.zeros(3)
    with pytest.raises(AttributeError):
        data.obz = torch.zeros(3)  # type: ignore[attr-defined]
    del data["obs"]
    with pytest.raises(AttributeError, match="the Data has no entry 'obs'"):
        _ = data.obs


def test_init_missing_required_key_raises() -> None:
    with pytest.raises(TypeError, match=r"Data misses the required keys \['act'\]"):
        Data(obs=torch.zeros(3))
    with pytest.raises(
        TypeError, match=r"Data\(\) got the undeclared keys \['zz'\]; declared: \['act', 'obs'\]"
    ):
        Data(obs=torch.zeros(3), act=torch.zeros(3), zz=1)
    more = More(obs=torch.zeros(3), act=torch.zeros(3))
    assert (more.reward, more.name) == (None, "a")
    assert list(more.keys()) == ["obs", "act"]
    assert More.__required_keys__ == {"obs", "act"}
    assert More.__optional_keys__ == {"reward", "name"}


def test_init_not_required_key_may_be_missing() -> None:
    assert Partial.__required_keys__ == {"obs"} and Partial.__optional_keys__ == {"act"}
    assert Partial(obs=torch.zeros(3), act=torch.ones(3)).act.tolist() == [1, 1, 1]
    with pytest.raises(AttributeError, match="the Partial has no entry 'act'"):
        _ = Partial(obs=torch.zeros(3)).act
    words = type(
        "Words", (TypedTensorDict,), {"__annotations__": {"a": "te.NotRequired[Tensor]", "b": "Tensor"}}
    )
    assert words.__required_keys__ == {"b"}


@pytest.mark.parametrize(
    "make",
    [
        lambda entries: Partial(entries, batch_size=[3]),
        lambda entries: Partial(TensorDict(entries, [3]), batch_size=[3]),
        lambda entries: Partial({}, **entries, batch_size=[3]),
        lambda entries: Partial.from_dict(entries, batch_size=[3]),
    ],
)
def test_init_from_mapping_sets_entries(make: Any) -> None:
    made = make({"obs": torch.zeros(3)})
    assert type(made) is Partial and made.batch_size == (3,) and made.obs.tolist() == [0, 0, 0]
    with pytest.raises(TypeError, match=r"Partial misses the required keys \['obs'\]"):
        make({"act": torch.zeros(3)})


def test_from_tensordict_returns_typed() -> None:
    td = TensorDict({"obs": torch.zeros(3), "act": torch.zeros(3), "zz": torch.ones(3)}, batch_size=[3])
    data = Data.from_tensordict(td)
    assert data.obs is td["obs"]
    assert data["zz"].sum() == 3
    with pytest.raises(TypeError, match=r"Data misses the required keys \['act', 'obs'\]"):
        Data.from_tensordict(TensorDict())


def test_declare_key_hiding_method_raises() -> None:
    with pytest.raises(AttributeError, match="the key 'keys' would hide the 'keys' of a TensorDict"):

        class Bad(TypedTensorDict):
            keys: Tensor


def test_attrs_returns_tensor_attrs_per_leaf() -> None:
    td = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.ones(3).int(), "s": "x"}}, batch_size=[3])
    for attrs in (td.attrs(), td.attrs(num_threads=2)):
        assert attrs.batch_size == ()
        assert attrs["a"].tgt_shape == (3, 2)
        assert attrs["b", "c"].tgt_dtype is torch.int32
        assert attrs["a"].tgt_device == torch.device("cpu")
        assert attrs["b", "s"] == "x"
    assert td.attrs(fields=["shape"])["a"].tgt_dtype is None
    for target in (td.to(torch.float64), TensorDict.lazy_stack(list(td.to(torch.float64).unbind(0)))):
        cast = target.to(td.attrs(fields=["dtype"]).exclude("a"))
        assert (cast["a"].dtype, cast["b", "c"].dtype) == (torch.float64, torch.int32)
        assert cast["b", "s"] == target["b", "s"]
        assert (cast.batch_size, type(cast)) == (target.batch_size, type(target))
    first = TensorDict({"n": {"m": {"c": torch.ones(1)}, "b": torch.ones(2)}, "a": torch.ones(3)}).attrs()
    assert [first[key].tgt_shape for key in (("n", "m", "c"), ("n", "b"), "a")] == [(1,), (2,), (3,)]
    with pytest.raises(
        ValueError, match=r"attributes of a tensor are \['device', 'dtype', 'shape'\]; got \['nope'\]"
    ):
        td.attrs(fields=["nope"])
    given = TensorAttrs(tgt_device="cpu", tgt_dtype=torch.float32, tgt_shape=(3,))
    assert given.tgt_device == torch.device("cpu")
    assert type(given.tgt_shape) is torch.Size


@dataclass
class Inner:
    a: Tensor
    b: str
    c: int = 3


@dataclass
class Outer:
    x: Inner
    y: Tensor


def outer() -> Any:
    return Outer(Inner(torch.zeros(3, 5), "s"), torch.zeros(3, 4))


def test_from_dataclass_class_returns_tensorclass() -> None:
    cls = from_dataclass(Inner)
    assert cls is from_dataclass(Inner)
    assert (cls.__name__, is_tensorclass(cls), issubclass(cls, Inner)) == ("Inner_tc", True, True)
    assert cls(torch.zeros(3), "a").c.item() == 3
    assert from_dataclass(Inner, nocast=True)(torch.zeros(3), "a").c == 3
    with pytest.raises(ValueError, match="cannot become a tensorclass in place"):
        from_dataclass(Inner, inplace=True)
    with pytest.raises(TypeError, match="takes a dataclass or an instance of one; got 3"):
        from_dataclass(3)


def test_from_dataclass_instance_returns_tensorclass_instance() -> None:
    result = from_dataclass(outer(), device="cpu")
    assert type(result.x) is from_dataclass(Inner)
    assert (result.x.b, result.x.c.item()) == ("s", 3)
    assert result.device == torch.device("cpu")
    assert from_dataclass(Inner(torch.zeros(3), "s"), dest_cls=from_dataclass(Inner)).b == "s"
    assert from_dataclass(Inner(torch.zeros(3), "s", 1), nocast=True, batch_size=[3]).c == 1
    sized = from_dataclass(
        Outer(Inner(torch.zeros(3), "s", torch.zeros(3)), torch.zeros(3)), auto_batch_size=True
    )
    assert sized.batch_size == sized.x.batch_size == (3,)
    with pytest.raises(TypeError, match="give a batch size or auto_batch_size=True, not both"):
        from_dataclass(outer(), auto_batch_size=True, batch_size=[3])


def test_from_dataclass_of_tensordict_returns_tensordict() -> None:
    td = TensorDict.from_dataclass(outer())
    assert type(td["x"]) is TensorDict
    assert (td["x", "b"], td["x", "c"].item()) == ("s", 3)
    assert type(TensorDict.from_dataclass(outer(), as_tensorclass=True).x).__name__ == "Inner_tc"
    with pytest.raises(TypeError, match="takes an instance of a dataclass; got"):
        TensorDict.from_dataclass(Outer)
