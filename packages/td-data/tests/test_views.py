"""Views: rules V1 to V5, and what all of them have."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from order_samples import make_data, take_rows
from torch.utils.data import DataLoader, Subset

from td_core import StructureError, TensorDict, collate, lazy_stack
from td_data import BlockSampler, Concat, Loader, MixtureSampler, Packed, RandomSampler, Slices
from td_data._reading import read_in_runs
from td_data._views import as_view


def make_episodes(sizes: list[int]) -> TensorDict:
    """Return rows of episodes, with keys that say where these begin and end."""
    traj = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    step = torch.cat([torch.arange(size) for size in sizes])
    end = torch.cat([torch.arange(size) == size - 1 for size in sizes])
    return TensorDict(
        {"traj": traj, "step": step, "end": end[:, None], "row": torch.arange(len(traj))}, [len(traj)]
    )


def make_tokens(sizes: list[int]) -> tuple[TensorDict, torch.Tensor]:
    tokens = torch.arange(sum(sizes)) * 3
    return TensorDict({"token": tokens}, [len(tokens)]), torch.tensor(sizes).cumsum(0)


VIEWS: dict[str, Any] = {
    "concat": lambda: Concat([make_data(10), make_data(20)]),
    "slices": lambda: Slices(make_episodes([5, 9, 3]), 3, traj_key="traj"),
    "packed": lambda: Packed(make_tokens([5, 9, 30])[0], 6, ends=[5, 14, 44]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_is_indexed_as_a_list(name: str) -> None:
    view = VIEWS[name]()
    count = len(view)
    batch = view[torch.arange(count)]
    key = "token" if name == "packed" else "row"
    assert view[-1][key].equal(batch[key][-1])
    assert view[1:4][key].equal(batch[key][1:4])
    assert view[[2, 0]][key].equal(batch[key][[2, 0]])
    assert view[torch.tensor([-1, 0])][key].equal(batch[key][[-1, 0]])
    with pytest.raises(IndexError, match=f"position {count} is out of range: the view has {count} rows"):
        view[count]
    with pytest.raises(TypeError, match="a vector of positions of int64"):
        view[torch.zeros(2)]
    assert len(view[torch.zeros(0, dtype=torch.int64)]) == 0


@pytest.mark.parametrize("name", [*VIEWS, "subset"])
def test_iteration_over_a_view_gives_each_row(name: str) -> None:
    view = VIEWS[name]() if name in VIEWS else as_view(Subset(make_data(10), [7, 2, 5]))
    whole = view[:]
    for found, rows in ((list(view), whole), (list(reversed(view)), whole.flip(0))):
        assert len(found) == len(view) > 0
        assert all(bool((one == row).all()) for one, row in zip(found, rows))


@pytest.mark.parametrize("name", VIEWS)
def test_view_is_pickled_and_read_by_torch(name: str) -> None:
    view = pickle.loads(pickle.dumps(VIEWS[name]()))
    key = "token" if name == "packed" else "row"
    batches = list(DataLoader(view, batch_size=4, collate_fn=collate))
    assert torch.cat([batch[key] for batch in batches]).equal(view[torch.arange(len(view))][key])


def test_v1_concat_reads_parts_in_order_of_positions() -> None:
    one, two = make_data(10), make_data(20)
    both = Concat([one, two])
    positions = torch.tensor([29, 0, 9, 10, 3, 10])
    assert both[positions]["row"].tolist() == [19, 0, 9, 0, 3, 0]
    assert both[positions]["n", "x"].equal(torch.cat([one["n", "x"], two["n", "x"]])[positions])
    assert len(both) == 30
    assert Concat({"a": one, "b": two})[positions]["source"].tolist() == [1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.exclude("row"), "part 1 differs from the first part: .*missing keys"),
        (lambda data: data.set("more", data["row"]), "part 1 differs .*more"),
        (
            lambda data: data.float(),
            "part 1 differs from the first part: key 'row' has dtype torch.int64 .* torch.float32",
        ),
        (
            lambda data: data.set(("n", "x"), torch.zeros(20, 3)),
            r"key \('n', 'x'\) .* rows of shape \[2\].* \[3\]",
        ),
        (lambda data: [1, 2], "part 1 is a list, the first is a TensorDict"),
    ],
)
def test_v1_parts_that_differ_are_refused(change: Any, text: str) -> None:
    with pytest.raises(StructureError, match=text):
        Concat([make_data(10), change(make_data(20))])


RUNS: dict[str, Any] = {
    "dense": lambda: make_data(60),
    "lazy": lambda: lazy_stack(list(make_data(60).unbind(0))),
    "tensor": lambda: torch.arange(60),
    "concat": lambda: Concat({"a": make_data(25), "b": make_data(35)}),
}


@pytest.mark.parametrize("name", RUNS)
@given(st.sets(st.integers(0, 59)))
def test_rows_in_runs_are_those_at_the_positions(name: str, rows: set[int]) -> None:
    for positions in (
        torch.tensor(sorted(rows), dtype=torch.int64),
        torch.tensor([*range(3, 40), *range(41, 60)]),
    ):
        found, wanted = read_in_runs(RUNS[name](), positions), RUNS[name]()[positions]
        assert type(found) is type(wanted)
        assert bool((found == wanted).all())
        assert len(found) == len(positions)


class Sliced:
    """A view that counts how it is read."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.found.append(index if isinstance(index, slice) else len(index))
        return torch.arange(100)[index]


def test_long_runs_are_read_by_slices() -> None:
    view = Sliced()
    read_in_runs(view, torch.tensor([*range(20), *range(40, 70)]))
    read_in_runs(view, torch.arange(5, 30))
    read_in_runs(view, torch.arange(0, 100, 2))
    assert view.found == [slice(0, 20), slice(40, 70), 25, 50]


def test_v1_names_that_replace_an_entry_are_refused() -> None:
    with pytest.raises(StructureError, match="part 'a' has an entry 'source'"):
        Concat({"a": make_data(3).rename_key_("row", "source")})
    with pytest.raises(ValueError, match="one part or more"):
        Concat([])


def test_v1_blocks_are_those_of_parts() -> None:
    first, second = (Slices(make_episodes([4, count]), 2, end_key="end") for count in (8, 3))
    assert Concat([first, second]).row_blocks() == [range(10), range(10, 15)]
    with pytest.raises(
        StructureError, match="part 1 is a Slices, the first is a Slices, or rows of another length"
    ):
        Concat([first, Slices(make_episodes([4]), 3, end_key="end")])


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 4), st.booleans()
)
def test_v2_slices_are_runs_within_episodes(sizes: list[int], length: int, stride: int, pad: bool) -> None:
    data = make_episodes(sizes)
    wanted = []
    for first, size in zip(torch.tensor([0, *sizes]).cumsum(0).tolist(), sizes):
        last = size if pad else size - length + 1
        for start in range(0, last, stride):
            wanted.append([first + min(start + i, size - 1) for i in range(length)])
    if not wanted:
        with pytest.raises(
            ValueError, match=f"no episode has {length} rows; the longest one has {max(sizes)}"
        ):
            Slices(data, length, traj_key="traj", stride=stride)
        return
    for key in ({"traj_key": "traj"}, {"end_key": "end"}, {"ends": torch.tensor(sizes).cumsum(0)}):
        view = Slices(data, length, stride=stride, pad=pad, **key)
        batch = view[torch.arange(len(view))]
        assert batch.batch_size == (len(wanted), length)
        assert batch["row"].tolist() == wanted
        if pad:
            steps = batch["step"][:, :1] + torch.arange(length)
            assert batch["is_pad"].equal(steps >= torch.tensor(sizes)[batch["traj"][:, 0], None])
        items = [item for block in view.row_blocks() for item in block]
        assert items == list(range(len(view)))


def test_v2_slices_in_windows_read_each_row_once() -> None:
    data = make_episodes([30, 5, 65])

    class Blocks:
        reads: list[int]

        def __init__(self) -> None:
            self.reads = []

        def __len__(self) -> int:
            return 100

        def __getitem__(self, positions: torch.Tensor) -> TensorDict:
            self.reads += positions.tolist()
            return data[positions]

        def row_blocks(self) -> list[range]:
            return [range(i, i + 10) for i in range(0, 100, 10)]

    blocks = Blocks()
    view = Slices(blocks, 4, ends=[30, 35, 100], pad=True)
    loader = Loader(view, 8, sampler=BlockSampler(view, window=2))
    batches = list(loader)
    assert sorted(row for batch in batches for row in batch["row"][:, 0].tolist()) == list(range(100))
    assert len(blocks.reads) < 100 + 10 * 4
    first = batches[0]["row"]
    assert batches[0]["step"].equal(data["step"][first])


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({}, ValueError, "exactly one of traj_key, end_key and ends"),
        ({"traj_key": "traj", "ends": [17]}, ValueError, "exactly one of"),
        ({"ends": [3, 3, 17]}, ValueError, "ends must increase"),
        ({"ends": [3, 12]}, ValueError, r"the last of ends is the number of rows, 17; got \[12\]"),
        ({"ends": [1.0]}, TypeError, "ends is a vector of int64"),
        ({"traj_key": "traj", "stride": 0}, ValueError, "stride is an integer of 1 or more"),
        ({"traj_key": "traj", "slice_len": 0}, ValueError, "slice_len is an integer of 1 or more"),
    ],
)
def test_v2_wrong_argument_of_slices_is_refused(options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Slices(make_episodes([5, 9, 3]), options.pop("slice_len", 3), **options)


def test_v2_empty_episodes_have_no_blocks() -> None:
    empty = Slices(make_data(0), 2, ends=[])
    assert (len(empty), empty.row_blocks()) == (0, [])
    assert list(Loader(empty, 3, sampler=BlockSampler(empty))) == []
    assert len(Slices(make_data(0), 2, traj_key="row")) == 0


def test_v1_nested_parts_that_differ_are_refused() -> None:
    nested = Concat([make_data(3), make_data(4)])
    with pytest.raises(StructureError, match="part 1 differs from the first part: key 'row' has dtype"):
        Concat([nested, make_data(5).float()])
    assert Concat([nested, make_data(5)])[[11, 3]]["row"].tolist() == [4, 0]
    data = make_episodes([5, 9])
    with pytest.raises(StructureError, match="or rows of another length"):
        Concat([Slices(data, 2, ends=[14], pad=True), Slices(data, 2, ends=[14])])


def test_v2_slices_of_rows_with_dims_have_a_mark_for_each_element() -> None:
    data = TensorDict({"a": torch.zeros(10, 3)}, [10, 3])
    batch = Slices(data, 2, ends=[10], pad=True)[[0, 9]]
    assert batch.batch_size == (2, 2, 3)
    assert batch["is_pad"][..., 0].tolist() == [[False, False], [False, True]]
    assert len(Slices(data[:0], 2, ends=[])) == 0
    with pytest.raises(KeyError, match="step"):
        Slices(data, 2, traj_key="step")


def test_v2_episodes_of_parts_are_found_by_key() -> None:
    data = make_episodes([5, 9, 3])
    both = Concat([data[:7], data[7:]])
    assert Slices(both, 3, traj_key="traj")._ends.tolist() == [5, 14, 17]


def pack_by_hand(sizes: list[int], documents: list[int]) -> tuple[list[int], list[int], list[int]]:
    tokens, starts = torch.arange(sum(sizes)) * 3, torch.tensor([0, *sizes]).cumsum(0).tolist()
    stream, document, position = [], [], []
    for number in documents:
        stream += tokens[starts[number] : starts[number] + sizes[number]].tolist()
        document += [number] * sizes[number]
        position += range(sizes[number])
    return stream, document, position


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(1, 7),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_v4_packed_blocks_are_those_of_the_concatenation(
    sizes: list[int], length: int, extra: int, epoch: int
) -> None:
    tokens, ends = make_tokens(sizes)
    packed = Packed(tokens, length, ends=ends, extra=extra, seed=3).at_epoch(epoch)
    stream, document, position = pack_by_hand(sizes, packed._documents.tolist())
    count = max(sum(sizes) - extra, 0) // length
    assert len(packed) == count
    batch = packed[torch.arange(count)]
    for item in range(count):
        part = slice(item * length, (item + 1) * length + extra)
        assert batch["token"][item].tolist() == stream[part]
        assert batch["document"][item].tolist() == document[part]
        assert batch["position"][item].tolist() == position[part]


def test_v4_documents_have_another_order_in_each_epoch() -> None:
    tokens, ends = make_tokens([3] * 50)
    packed = Packed(tokens, 3, ends=ends)
    loader = Loader(packed, 50)
    first, second = (torch.cat([batch["token"] for batch in loader]) for _ in range(2))
    assert not first.equal(second)
    assert first.flatten().sort().values.equal(second.flatten().sort().values)
    unshuffled = Packed(tokens, 3, ends=ends, shuffle=False)
    assert unshuffled.at_epoch(3) is unshuffled
    assert unshuffled[torch.arange(50)]["token"].flatten().equal(tokens["token"])


def test_v4_boundaries_give_the_mask_within_documents() -> None:
    tokens, ends = make_tokens([5, 1, 1, 7, 2, 20])
    packed = Packed(tokens, 6, ends=ends, seed=2)
    batch = packed[torch.arange(len(packed))]
    bounds, longest = Packed.boundaries(batch)
    assert bounds.dtype == torch.int32
    document = (batch["document"] + torch.arange(len(packed))[:, None] * 100).flatten()
    wanted = document[:, None] == document
    part = torch.bucketize(torch.arange(batch["token"].numel()), bounds[1:], right=True)
    assert wanted.equal(part[:, None] == part)
    assert longest == int(bounds.diff().max())


def test_v4_wrong_argument_of_packed_is_refused() -> None:
    tokens, ends = make_tokens([5, 6])
    with pytest.raises(ValueError, match=r"the last of ends is the number of tokens, 11; got \[5\]"):
        Packed(tokens, 3, ends=[5])
    with pytest.raises(ValueError, match=r"tokens has the keys \['position'\]"):
        Packed(tokens.set("position", tokens["token"]), 3, ends=ends)
    with pytest.raises(TypeError, match="tokens is a collection with a row for each token; got Tensor"):
        Packed(torch.arange(11), 3, ends=ends)


def test_v5_mixed_sources_have_shares_of_tokens() -> None:
    def pack(count: int) -> Packed:
        tokens, ends = make_tokens([7] * count)
        return Packed(tokens, 7, ends=ends, seed=count)

    parts = Concat({"small": pack(20), "large": pack(400)})
    loader = Loader(parts, 10, sampler=MixtureSampler(parts, [3, 1], num_samples=4000, seed=1))
    sources = torch.cat([batch["source"] for batch in loader])
    assert sources.shape == (4000, 7)
    assert abs(int((sources[:, 0] == 0).sum()) - 3000) < 3 * 750**0.5
    state = loader.state_dict()
    again = Loader(
        parts, 5, sampler=MixtureSampler(parts, [3, 1], num_samples=4000, seed=1), rank=1, world_size=2
    )
    again.load_state_dict(state)
    assert again.epoch == 1


def test_random_slices_with_replacement_are_a_sampler() -> None:
    view = Slices(make_episodes([50, 20]), 5, traj_key="traj")
    loader = Loader(view, 16, sampler=RandomSampler(view, replacement=True, num_samples=64))
    assert [len(batch) for batch in take_rows(loader)] == [16] * 4
