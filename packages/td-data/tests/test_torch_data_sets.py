"""A Subset or ConcatDataset of torch is a view of the rows that it selects, and data sets of single rows are refused."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, random_split

from td_core import TensorDict
from td_data import Concat, Loader, Packed, ReplayBuffer, SliceSampler


def list_rows(view: Any, batch_size: int = 2, **options: Any) -> list[list[int]]:
    return [batch["a"].tolist() for batch in Loader(view, batch_size, **options)]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "indices", [[], [7], [5, 1, 7], torch.tensor([3, 0])], ids=["none", "one", "list", "tensor"]
)
def test_loader_of_subset_gives_its_rows(indices: Any, num_threads: int) -> None:
    rows = list_rows(Subset(TensorDict({"a": torch.arange(10)}, [10]), indices), num_threads=num_threads)
    assert [*chain(*rows)] == list(indices)
    assert [len(row) for row in rows] == [2] * (len(indices) // 2) + [1] * (len(indices) % 2)


def test_loader_of_nested_and_joined_data_sets_of_torch_gives_their_rows() -> None:
    data = TensorDict({"a": torch.arange(10)}, [10])
    inner = Subset(Subset(data, [5, 1, 7]), [2, 0])
    assert list_rows(inner) == [[7, 5]]
    assert list_rows(ConcatDataset([data[:3], inner])) == [[0, 1], [2, 7], [5]]
    assert Concat([data[:1], inner])[torch.tensor([2, 0])]["a"].tolist() == [5, 0]
    first, second = random_split(data, [7, 3])
    shuffled = [*list_rows(first, shuffle=True), *list_rows(second, shuffle=True)]
    assert sorted(chain(*shuffled)) == list(range(10))


def test_loader_of_subset_of_packed_documents_changes_with_the_epoch() -> None:
    documents = TensorDict({"a": torch.arange(40)}, [40])
    packed = Packed(documents, 4, ends=torch.arange(4, 41, 4))
    loader = Loader(Subset(packed, [0, 3]), 2)
    for epoch in range(2):
        expected = packed.at_epoch(epoch)[torch.tensor([0, 3])]["a"]
        assert next(iter(loader))["a"].tolist() == expected.tolist()
        loader.set_epoch(epoch + 1)


class OneRow:
    """A data set that knows numbers only, as most of those for a ``DataLoader``."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return TensorDict({"a": torch.arange(3)}, [3])[int(index)]


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (Subset([1, 2], [0]), "a view is indexed by positions; a list is not"),
        (OneRow(), "OneRow returned one row: give the Loader the collection"),
    ],
)
def test_loader_of_single_rows_raises(view: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        list(Loader(view, 1))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (
            Loader(TensorDict(batch_size=[5]), 2),
            "Loader(5 rows of TensorDict, batch_size=2, sampler=SequentialSampler)",
        ),
        (
            Loader(Subset(TensorDict(batch_size=[5]), [3]), 2, shuffle=True),
            "Loader(1 rows of TensorDict, batch_size=2, sampler=RandomSampler)",
        ),
        (ReplayBuffer(3, batch_size=2), "ReplayBuffer(0 of 3 rows, batch_size=2)"),
        (
            ReplayBuffer(TensorDict({"a": torch.zeros(4)}, [4]), sampler=SliceSampler(2, traj_key="a")),
            "ReplayBuffer(0 of 4 rows of TensorDict, batch_size=None, sampler=SliceSampler)",
        ),
    ],
)
def test_repr_shows_rows_and_sampler(shown: object, expected: str) -> None:
    assert repr(shown) == expected
