"""Measure whole programs: one step of each with td, with tensordict, and with dicts of tensors by hand.

The three alternate in one process, on one thread; each figure is the median of the steps in milliseconds of CPU time, and the
percentage is what the step takes more than that by hand. The last program runs in two processes that exchange gradients with
gloo; its time is that until the step ends.
No result makes the script fail.

    python benchmarks/programs.py [--steps 40] [--only REGEX] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional

Step = Callable[[], Any]
ROWS, BATCH = 4096, 128


def make_network(inputs: int, outputs: int, width: int = 128, layers: int = 3) -> nn.Sequential:
    """Build a network of linear layers."""
    torch.manual_seed(0)
    sizes = [inputs, *[width] * (layers - 1), outputs]
    parts: list[nn.Module] = []
    for first, second in pairwise(sizes):
        parts += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def make_optimizer(module: nn.Module) -> Callable[[Tensor], None]:
    """Return a function that makes an optimizer step from a loss."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def train_from_disk(lib: Any, folder: Path) -> Step:
    """Train on random rows of a data set on disk."""
    generator = torch.Generator().manual_seed(0)
    rows = {
        "image": torch.randint(0, 255, (ROWS, 3, 16, 16), dtype=torch.uint8, generator=generator),
        "label": torch.randint(0, 10, (ROWS,), generator=generator),
    }
    network = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
    step = make_optimizer(network)
    if lib is None:
        data: Any = {}
        for key, value in rows.items():
            path = str(folder / key)
            value.numpy().tofile(path)
            data[key] = torch.from_file(path, dtype=value.dtype, size=value.numel()).view(value.shape)
    else:
        data = lib.TensorDict(rows, batch_size=[ROWS]).memmap(folder / lib.__name__)

    def run() -> None:
        index = torch.randint(0, ROWS, (BATCH,))
        batch = {k: v[index] for k, v in data.items()} if lib is None else data[index]
        step(functional.cross_entropy(network(batch["image"].float() / 255), batch["label"]))

    return run


def update_ppo(lib: Any, folder: Path) -> Step:
    """Update a policy with four parts of a batch, by the clipped loss of PPO."""
    generator = torch.Generator().manual_seed(0)
    count = 512
    rollout = {
        "obs": torch.rand(count, 16, generator=generator),
        "action": torch.randint(0, 4, (count,), generator=generator),
        "log_prob": -torch.rand(count, generator=generator),
        "advantage": torch.randn(count, generator=generator),
        "next": {
            "value": torch.rand(count, generator=generator),
            "done": torch.zeros(count, dtype=torch.bool),
        },
    }
    actor, critic = make_network(16, 4), make_network(16, 1)
    step = make_optimizer(nn.ModuleList([actor, critic]))
    data = rollout if lib is None else lib.TensorDict(rollout, batch_size=[count])

    def select(tree: dict[str, Any], index: Tensor) -> dict[str, Any]:
        return {k: select(v, index) if isinstance(v, dict) else v[index] for k, v in tree.items()}

    def run() -> None:
        for index in torch.randperm(count).split(BATCH):
            part: Any = select(data, index) if lib is None else data[index]
            value = part["next"]["value"] if lib is None else part["next", "value"]
            log_prob = actor(part["obs"]).log_softmax(-1).gather(-1, part["action"][:, None])[:, 0]
            ratio = (log_prob - part["log_prob"]).exp()
            gain = torch.minimum(ratio * part["advantage"], ratio.clamp(0.8, 1.2) * part["advantage"])
            step(functional.mse_loss(critic(part["obs"])[:, 0], value) - gain.mean())

    return run


def learn_q(lib: Any, folder: Path) -> Step:
    """Write transitions to a replay buffer, learn from a sample, and move the target network."""
    shapes = {"obs": (32,), "action": (), "reward": (), "next_obs": (32,)}
    dtypes = {"action": torch.int64}
    buffer: Any = {k: torch.zeros(ROWS, *shape, dtype=dtypes.get(k)) for k, shape in shapes.items()}
    network = make_network(32, 4, layers=6)
    target = copy.deepcopy(network).requires_grad_(False)
    step, turn = make_optimizer(network), 0
    if lib is not None:
        buffer = lib.TensorDict(buffer, batch_size=[ROWS])
        weights, average = lib.TensorDict.from_module(network), lib.TensorDict.from_module(target)
        if lib.__name__ == "td_core":
            weights.consolidate(inplace=True)
            average.consolidate(inplace=True)

    def run() -> None:
        nonlocal turn
        new: Any = {k: torch.ones(32, *shape, dtype=dtypes.get(k)) for k, shape in shapes.items()}
        at = torch.arange(turn, turn + 32) % ROWS
        turn = (turn + 32) % ROWS
        index = torch.randint(0, ROWS, (BATCH,))
        if lib is None:
            for k, v in buffer.items():
                v[at] = new[k]
            sample: Any = {k: v[index] for k, v in buffer.items()}
        else:
            buffer[at] = lib.TensorDict(new, batch_size=[32])
            sample = buffer[index]
        with torch.no_grad():
            wanted = sample["reward"] + 0.99 * target(sample["next_obs"]).amax(-1)
        found = network(sample["obs"]).gather(-1, sample["action"][:, None])[:, 0]
        step(functional.mse_loss(found, wanted))
        with torch.no_grad():
            if lib is None:
                for mean, parameter in zip(target.parameters(), network.parameters()):
                    mean.lerp_(parameter, 0.01)
            else:
                average.lerp_(weights, 0.01)

    return run


def train_ensemble(lib: Any, folder: Path) -> Step:
    """Train copies of one network under vmap."""
    networks = [make_network(8, 1, 64) for _ in range(8)]
    base = copy.deepcopy(networks[0]).to("meta")
    x, y = torch.rand(8, 64, 8), torch.rand(8, 64, 1)
    if lib is None:
        params: Any = {k: v.detach().requires_grad_() for k, v in stack_module_state(networks)[0].items()}
        leaves = list(params.values())

        def call(values: Any, rows: Tensor) -> Any:
            return functional_call(base, values, (rows,))
    else:
        params = lib.TensorDict.from_modules(*networks, as_module=True)
        leaves = list(params.parameters())

        def call(values: Any, rows: Tensor) -> Any:
            with values.to_module(base):
                return base(rows)

    optimizer = torch.optim.SGD(leaves, lr=1e-3)

    def run() -> None:
        optimizer.zero_grad()
        functional.mse_loss(vmap(call)(params, x), y).backward()
        optimizer.step()

    return run


class Tagger(nn.Module):
    """Class scores of the mean of embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.out = make_network(64, 5)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the scores of padded sequences."""
        mean = (self.embed(tokens) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        scores: Tensor = self.out(mean)
        return scores


def train_ragged(lib: Any, folder: Path) -> Step:
    """Train on sequences of different lengths with their names, in two ranks."""
    torch.manual_seed(torch.distributed.get_rank())
    sequences = [
        {"tokens": torch.randint(1, 1000, (8 + i % 24,)), "label": torch.tensor(i % 5), "name": f"doc {i}"}
        for i in range(64)
    ]
    model = nn.parallel.DistributedDataParallel(Tagger())
    step = make_optimizer(model)

    def run() -> list[str]:
        if lib is None:
            tokens = nn.utils.rnn.pad_sequence([item["tokens"] for item in sequences], batch_first=True)
            labels = torch.stack([item["label"] for item in sequences])
            names = [item["name"] for item in sequences]
        else:
            batch = lib.lazy_stack([lib.TensorDict(item) for item in sequences])
            tokens, labels = batch.get("tokens", as_padded_tensor=True), batch["label"]
            names = list(batch["name"])
        step(functional.cross_entropy(model(tokens, (tokens != 0).float()), labels))
        return names

    return run


PROGRAMS: dict[str, Callable[[Any, Path], Step]] = {
    "training from disk": train_from_disk,
    "PPO update": update_ppo,
    "DQN with target network": learn_q,
    "ensemble under vmap": train_ensemble,
    "ragged text, two ranks": train_ragged,
}
NAMES = ("td", "tensordict", "plain")


def find_libraries() -> list[Any]:
    """Return td, tensordict if it is installed, and None for dicts by hand."""
    try:
        import_module("td")  # adds the methods of all packages
        reference = [import_module("tensordict")]
    except ModuleNotFoundError:
        reference = []
    return [import_module("td_core"), *reference, None]


def measure(
    make: Callable[[Any, Path], Step],
    libraries: list[Any],
    steps: int,
    folder: Path,
    clock: Callable[[], float],
) -> list[float]:
    """Return the median time of a step of each library in milliseconds."""
    calls = [make(lib, folder) for lib in libraries]
    samples: list[list[float]] = [[] for _ in calls]
    for number in range(steps + 3):
        for position in range(len(calls)):
            i = (position + number) % len(calls)
            start = clock()
            calls[i]()
            if number >= 3:
                samples[i].append(clock() - start)
    return [statistics.median(of_one) * 1e3 for of_one in samples]


def run_rank(rank: int, folder: str, steps: int) -> None:
    """Measure the program of two ranks in one of them; the first writes the times."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    times = measure(train_ragged, find_libraries(), steps, Path(folder), time.perf_counter)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    torch.distributed.destroy_process_group()


def measure_program(name: str, libraries: list[Any], steps: int) -> list[float]:
    """Measure one program."""
    with tempfile.TemporaryDirectory() as folder:
        if PROGRAMS[name] is not train_ragged:
            return measure(PROGRAMS[name], libraries, steps, Path(folder), time.process_time)
        torch.multiprocessing.spawn(run_rank, (folder, steps), nprocs=2)
        times: list[float] = json.loads(Path(folder, "times.json").read_text())
        return times


def main() -> None:
    """Measure and print the table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="", help="regular expression of the programs")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = find_libraries()
    names = NAMES if len(libraries) == len(NAMES) else ("td", "plain")
    results = []
    print(f"{'ms of a step':28}{'plain':>10}{'td':>10}{'tensordict':>12}{'td':>10}{'tensordict':>12}")
    for program in PROGRAMS:
        if not re.search(options.only, program):
            continue
        times = dict(zip(names, measure_program(program, libraries, options.steps), strict=True))
        above = {name: times[name] / times["plain"] * 100 - 100 for name in names if name != "plain"}
        print(
            f"{program:28}{times['plain']:10.3f}{times['td']:10.3f}{times.get('tensordict', math.nan):12.3f}"
            f"{above['td']:+9.1f}%{above.get('tensordict', math.nan):+11.1f}%",
            flush=True,
        )
        results.append({"program": program, "ms": times, "above": above})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
