"""A demo of most features of td, on a data set of handwritten digits.

The program preallocates a data set on disk, fills it, and reads random batches from it to train models. It saves the
parameters of a model, loads a part of them, stacks the models into an ensemble, consolidates the parameters, and sends them
to a second process, which must report exactly the same accuracy. Each step checks its result; if one is wrong, the program
ends with a non-zero status.

    pip install scikit-learn matplotlib tqdm
    python examples/digits_demo.py [FOLDER]

The data set, the parameters and ``digits.png`` are written to FOLDER (default: a new temporary folder).
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.func import vmap

from td import MemoryMappedTensor, TensorDict, from_modules, tensorclass

try:
    import matplotlib
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install scikit-learn matplotlib tqdm")

TEST_SIZE = 360
EPOCHS = 20
MEMBERS = 5


@tensorclass
class Digits:
    """Images of 8 x 8 grey levels (0 to 16, uint8), with the digits that they show as labels (int64)."""

    image: Tensor
    label: Tensor

    def pixels(self) -> Tensor:
        """Return the images as rows of 64 floats in [0, 1]."""
        return self.image.flatten(-2).float() / 16


def say(text: str) -> None:
    """Print a text without buffering, so that it appears in order with the progress bar."""
    print(text, flush=True)


def check(holds: bool, what: str) -> None:
    """End the program with a non-zero status if ``holds`` is False."""
    if not holds:
        raise SystemExit(f"wrong result: {what}")


def size_of(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def make_model() -> nn.Sequential:
    """Build an untrained classifier of 64 pixels into 10 digits."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def build_data_set(folder: Path) -> Digits:
    """Preallocate the data set on disk and fill it in chunks."""
    source = load_digits()
    count = len(source.target)
    one = Digits(
        image=torch.zeros(8, 8, dtype=torch.uint8), label=torch.zeros((), dtype=torch.int64), batch_size=[]
    )
    data = one.expand(count).memmap_like(folder)
    say(f"Preallocated {count} digits on disk: {size_of(folder):,} bytes, all zeros so far.")
    images = torch.from_numpy(source.images).to(torch.uint8)
    labels = torch.from_numpy(source.target)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    for rows in tqdm(torch.arange(count).split(64), desc="filling the data set", unit="chunk"):
        chosen = order[rows]
        data[rows] = Digits(image=images[chosen], label=labels[chosen], batch_size=[len(rows)])
    loaded = Digits.load_memmap(folder)
    check(isinstance(loaded, Digits), "the data set loads as the class that was saved")
    check(isinstance(loaded.image, MemoryMappedTensor), "the images stay on disk")
    check(bool((loaded.image == images[order]).all()), "the images on disk are those of scikit-learn")
    check(bool((loaded.label == labels[order]).all()), "the labels on disk are those of scikit-learn")
    return loaded


def train(data: Digits, seed: int) -> tuple[nn.Sequential, list[float]]:
    """Train one model on random batches read from disk, and return it with its loss after each epoch."""
    torch.manual_seed(seed)
    # One thread is faster for such small matrices, and makes the result independent of the number of cores.
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(EPOCHS):
        total = 0.0
        for rows in torch.randperm(len(data)).split(64):
            batch = data[rows]
            loss = nn.functional.cross_entropy(model(batch.pixels()), batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        losses.append(total / len(data))
    return model, losses


def accuracy(predictions: Tensor, data: Digits) -> float:
    """Return the share of correct predictions."""
    return (predictions == data.label).double().mean().item()


def call(model: nn.Module, params: TensorDict, pixels: Tensor) -> Tensor:
    """Run a model with the given parameters instead of its own ones."""
    with params.to_module(model):
        return model(pixels)


def second_process(port: int, folder: str) -> None:
    """Receive parameters, compute their accuracy on the data set on disk, and send the accuracy back."""
    connect(port, rank=1)
    data = Digits.load_memmap(folder)[-TEST_SIZE:]
    model = make_model()
    params = TensorDict.from_module(model).data.clone().zero_().consolidate()
    params.recv(src=0, consolidated=True)
    with torch.no_grad():
        result = accuracy(call(model, params, data.pixels()).argmax(-1), data)
    TensorDict({"accuracy": torch.tensor(result, dtype=torch.float64)}).send(dst=0)
    dist.destroy_process_group()


def connect(port: int, rank: int) -> None:
    """Join the process group of the two processes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def draw(path: Path, losses: list[float], data: Digits, predictions: Tensor, folders: list[Path]) -> None:
    """Draw the loss curve, some digits with their predictions, and the saved files with their sizes."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(13, 4.5), layout="constrained")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1, 1.1, 0.9))
    axes = left.subplots()
    axes.plot(range(1, len(losses) + 1), losses, marker="o")
    axes.set(title="training loss of the first model", xlabel="epoch", ylabel="cross entropy")
    middle.suptitle("predictions of the ensemble")
    cells = middle.subplots(3, 5).flat
    for axes, image, guess, label in zip(
        cells, data.image, predictions.tolist(), data.label.tolist(), strict=False
    ):
        axes.imshow(image, cmap="gray_r")
        axes.set_title(str(guess), color="green" if guess == label else "red", fontsize=10)
        axes.axis("off")
    right.suptitle("on disk, in bytes")
    lines = [line for folder in folders for line in tree(folder)]
    right.text(0.04, 0.9, "\n".join(lines), family="monospace", fontsize=9, va="top", linespacing=1.5)
    figure.savefig(path, dpi=110)


def tree(folder: Path) -> list[str]:
    """Format a folder as lines of text, one per file, with sizes in bytes."""
    lines = [f"{folder.name}/"]
    for entry in sorted(folder.rglob("*")):
        depth = len(entry.relative_to(folder).parts)
        name = f"{'  ' * depth}{entry.name}"
        lines.append(f"{name}/" if entry.is_dir() else f"{name:<22}{entry.stat().st_size:>9,}")
    return lines


def main(folder: Path) -> None:
    """Run all steps."""
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    data = build_data_set(folder / "digits")
    training, test = data[:-TEST_SIZE], data[-TEST_SIZE:]

    begun = time.perf_counter()
    trained = [train(training, seed) for seed in range(MEMBERS)]
    model, losses = trained[0]
    check(losses[-1] < losses[0] / 4, "the training loss falls to less than a quarter")
    with torch.no_grad():
        single = accuracy(model(test.pixels()).argmax(-1), test)
    check(single > 0.9, "one model is right on more than 90 % of digits it has not seen")
    say(
        f"Trained {MEMBERS} models of {sum(p.numel() for p in model.parameters()):,} parameters on {len(training)} "
        f"digits from disk in {time.perf_counter() - begun:.1f} s; the first is right on {single:.1%} of the other "
        f"{len(test)}."
    )

    saved = folder / "params"
    params = TensorDict.from_module(model)
    params.memmap(saved)
    layer = TensorDict.load_memmap(saved / "0")
    check(torch.equal(layer["weight"], model[0].weight), "one layer alone loads from its sub-folder")
    rest = TensorDict.load_memmap(saved)
    check(isinstance(rest["2", "weight"], MemoryMappedTensor), "the rest is mapped, not read")
    other = make_model()
    rest.to_module(other)
    check(
        torch.equal(other(test.pixels()), model(test.pixels())),
        "a model with the loaded parameters is the same",
    )
    say(
        f"Saved the parameters ({size_of(saved):,} bytes), loaded the first layer alone, then mapped the rest."
    )

    begun = time.perf_counter()
    ensemble = from_modules(*[member for member, _ in trained])
    with torch.no_grad():
        logits = vmap(call, (None, 0, None))(model, ensemble, test.pixels())
        one_by_one = torch.stack([member(test.pixels()) for member, _ in trained])
    check(
        torch.allclose(logits, one_by_one, atol=1e-5), "the ensemble under vmap equals its members one by one"
    )
    predictions = logits.softmax(-1).mean(0).argmax(-1)
    together = accuracy(predictions, test)
    alone = sum(accuracy(each, test) for each in logits.argmax(-1)) / MEMBERS
    say(
        f"The ensemble of {MEMBERS}, run under vmap in {(time.perf_counter() - begun) * 1000:.0f} ms, is right on "
        f"{together:.1%}; its members by themselves on {alone:.1%} on average."
    )

    port = free_port()
    process = mp.get_context("spawn").Process(target=second_process, args=(port, str(folder / "digits")))
    process.start()
    connect(port, rank=0)
    begun = time.perf_counter()
    whole = params.data.consolidate()
    check(whole.is_consolidated(), "the consolidated parameters lie in one storage")
    whole.send(dst=1, consolidated=True)
    answer = TensorDict({"accuracy": torch.zeros((), dtype=torch.float64)})
    answer.recv(src=1)
    process.join()
    dist.destroy_process_group()
    check(process.exitcode == 0, "the second process ends well")
    check(answer["accuracy"].item() == single, "the second process reports the same accuracy, bit for bit")
    say(
        f"Consolidated the parameters into {whole.bytes():,} bytes and sent them to a second process, which reports "
        f"{answer['accuracy'].item():.1%} too ({time.perf_counter() - begun:.1f} s)."
    )

    picture = folder / "digits.png"
    draw(picture, losses, test, predictions, [folder / "digits", saved])
    check(picture.stat().st_size > 10_000, "the picture is drawn")
    say(f"Drew {picture}. Everything is right; it took {time.perf_counter() - started:.1f} s.")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="td-demo-")))
