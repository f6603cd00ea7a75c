"""td-data with stored data: a training that is killed and resumed, data larger than memory, rings in files."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from td_core import TensorDict

pytest.importorskip("td_data")
pytest.importorskip("td_memmap")
pytestmark = [
    pytest.mark.once,  # starts processes
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked"),
]

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_forked(work: Callable[[], None]) -> int:
    """Run a function in a forked process, and return its exit code, or the negative number of the signal that ended it."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_result(folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    return state["losses"], list(state["model"].values())


@pytest.fixture(scope="module")
def training() -> Any:
    """Return the class of the example."""
    # The first optimizer of a process imports for seconds: do this before the processes are forked.
    torch.optim.Adam(torch.nn.Linear(1, 1).parameters()).step()
    return runpy.run_path(str(EXAMPLES / "exact_resume.py"))["Training"]


def train_until(training: Any, folder: Path, kill: int) -> None:
    training(folder, num_threads=4, prefetch=4).run(kill)


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"num_threads": 1}, {"num_workers": 2}])
def test_training_that_was_killed_ends_as_one_that_was_not(
    training: Any, tmp_path: Path, options: dict[str, int]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    assert run_forked(lambda: training(whole, num_threads=4, prefetch=4).run()) == 0
    for kill in (5, 1, 11, 3, 8):
        assert run_forked(partial(train_until, training, broken, kill)) == -9
    assert run_forked(lambda: training(broken, **options).run()) == 0
    losses, weights = read_result(whole)
    found_losses, found_weights = read_result(broken)
    assert len(losses) == 36
    assert found_losses == losses
    assert all(map(torch.equal, found_weights, weights))


def run_ranks(training: Any, folder: Path, kill: int) -> list[int]:
    """Train on two ranks, and return their exit codes."""

    def work(rank: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        training(folder, num_threads=2).run(kill)

    store = f"file://{folder}/store-{os.urandom(4).hex()}"
    pids = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            try:
                work(rank)
                os._exit(0)
            except BaseException:
                os._exit(1)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_training_on_two_ranks_that_was_killed_ends_as_one_that_was_not(
    training: Any, tmp_path: Path
) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no ranks")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        run_forked(lambda folder=folder: training(folder))  # make the data before two ranks do
    assert run_ranks(training, whole, 0) == [0, 0]
    assert -9 in run_ranks(training, broken, 7)
    assert run_ranks(training, broken, 0) == [0, 0]
    losses, weights = read_result(whole)
    found_losses, found_weights = read_result(broken)
    assert found_losses == losses
    assert all(map(torch.equal, found_weights, weights))


def test_m1_data_larger_than_memory_are_read_through_a_limit(tmp_path: Path) -> None:
    one = TensorDict({"x": torch.zeros(256 * 1024, dtype=torch.uint8), "row": torch.tensor(0)})
    data = one.expand(4000).memmap_like(tmp_path / "data")
    data["row"][:] = torch.arange(4000)
    program = f"""
import resource, torch
from td_core import TensorDict
from td_data import Loader
import td_data._loader
torch.set_num_threads(1)
data = TensorDict.load_memmap({str(tmp_path / "data")!r})
loader = Loader(data, 32, shuffle=True)
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
limit = used + (300 << 20)  # the allocator keeps some twelve freed batches of 8 MiB for its threads
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print(sum(int(batch["row"].sum()) for batch in loader))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == str(4000 * 3999 // 2), done.stderr


@pytest.mark.parametrize("format", ["memmap", "safetensors", "hdf5", "zarr"])
def test_ring_in_a_store_gives_what_a_ring_in_memory_gives(format: str, tmp_path: Path) -> None:
    from td_core import create
    from td_data import PrioritizedSampler, ReplayBuffer

    pytest.importorskip(f"td_{format}")
    row = {"number": torch.tensor(0), "x": torch.zeros(3)}
    like = TensorDict(row).expand(20)
    if format == "memmap":
        storage = like.memmap_like(tmp_path / "ring")
    else:
        suffix = {"safetensors": "safetensors", "hdf5": "h5", "zarr": "zarr"}[format]
        storage = create(like, tmp_path / f"ring.{suffix}", format=format)
    buffers = [ReplayBuffer(each, sampler=PrioritizedSampler(), batch_size=5) for each in (storage, 20)]
    for count in (7, 9, 11):
        for buffer in buffers:
            first = buffer.write_count
            rows = {"number": torch.arange(first, first + count), "x": torch.rand(count, 3).zero_() + first}
            buffer.extend(TensorDict(rows, [count]))
            buffer.update_priority(torch.arange(first, first + count), torch.arange(count) + 1.0)
        one, two = (buffer.sample() for buffer in buffers)
        assert bool((one == two).all())
        assert one["number"].equal(one["index"])


def test_saved_ring_continues_with_the_same_draws(tmp_path: Path) -> None:
    from td_data import PrioritizedSampler, ReplayBuffer

    def make_rows(first: int, count: int) -> TensorDict:
        return TensorDict({"number": torch.arange(first, first + count)}, [count])

    like = TensorDict({"number": torch.tensor(0)}).expand(10)
    for name, storage, path in (
        ("memory", 10, None),
        ("mapped", like.memmap_like(tmp_path / "ring"), "counters"),
    ):
        buffer = ReplayBuffer(storage, sampler=PrioritizedSampler(), path=path and tmp_path / path)
        buffer.extend(make_rows(0, 14))
        buffer.update_priority(torch.arange(4, 14), torch.arange(10.0))
        buffer.sample(3)
        buffer.save(tmp_path / name)
        wanted = buffer.sample(50)
        buffer._counters.close()
        again = ReplayBuffer.load(tmp_path / name, sampler=PrioritizedSampler())
        found = again.sample(50)
        assert bool((found == wanted).all())
        again.extend(make_rows(14, 3))
        assert again.write_count == 17


def test_ring_of_a_class_needs_a_field_for_numbers() -> None:
    tensorclass = pytest.importorskip("td_tensorclass").tensorclass
    from td_data import ReplayBuffer

    plain = tensorclass(type("Plain", (), {"__annotations__": {"x": torch.Tensor}}))
    optional = {"__annotations__": {"x": torch.Tensor, "index": torch.Tensor}, "index": None}
    with_index = tensorclass(type("WithIndex", (), optional))
    buffer = ReplayBuffer(5)
    with pytest.raises(ValueError, match="an entry 'index', for which Plain has no field: declare one"):
        buffer.extend(plain(x=torch.arange(3), batch_size=[3]))
    buffer.extend(with_index(x=torch.arange(3), batch_size=[3]))
    batch = buffer.sample(4)
    assert type(batch) is with_index
    assert batch.index.equal(batch.x)


def test_td_has_the_package_as_a_module() -> None:
    td, td_data = pytest.importorskip("td"), pytest.importorskip("td_data")
    assert td.data is td_data


def test_windows_of_slices_read_each_chunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("td_zarr")
    from td_core import open as open_collection
    from td_core import save
    from td_data import BlockSampler, Loader, Slices

    sizes = torch.randint(5, 300, (12,), generator=torch.Generator().manual_seed(1))
    count = int(sizes.sum())
    rows = {"row": torch.arange(count), "episode": torch.repeat_interleave(torch.arange(12), sizes)}
    save(TensorDict(rows, [count]), tmp_path / "episodes.zarr", format="zarr", chunks=50)
    data = open_collection(tmp_path / "episodes.zarr", mode="r+")
    kind, read = type(data["row"].source), []
    read_many = kind.read_many
    view = Slices(data, 16, traj_key="episode", pad=True)
    monkeypatch.setattr(
        kind, "read_many", lambda self, requests: read.append(len(requests)) or read_many(self, requests)
    )
    sampler = BlockSampler(view, window=3)
    batches = list(Loader(view, 32, sampler=sampler, num_threads=2))
    windows = -(-len(view.row_blocks()) // 3)
    assert len(read) <= windows
    assert sorted(row for batch in batches for row in batch["row"][:, 0].tolist()) == list(range(count))
    whole = Slices(TensorDict(rows, [count]), 16, traj_key="episode", pad=True)
    positions = sampler.order(0)(0, count)
    together = torch.cat([batch["row"] for batch in batches])
    assert together.equal(whole[positions]["row"])
