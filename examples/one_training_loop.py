"""One training loop for two tasks, a classifier and a segmentation model, which read and write collections.

    python examples/one_training_loop.py

The loop does not depend on the models or the losses. Before the training, the program checks and prints which keys each
module reads and writes. It ends with a non-zero status if the loss of one model does not fall.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from td_core import TensorDict
from td_nn import TensorDictModule, TensorDictSequential

SIZE = 12
STEPS = 50


def draw_shapes(count: int) -> TensorDict:
    """Build noisy images of squares and crosses, with the label and the mask of the shape in each image."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(2, (count,), generator=generator)
    corner = torch.randint(1, SIZE - 6, (count, 2), generator=generator)
    mask = torch.zeros(count, SIZE, SIZE)
    for picture, kind, (row, column) in zip(mask, label, corner):
        if kind:
            picture[row + 2, column : column + 5] = 1
            picture[row : row + 5, column + 2] = 1
        else:
            picture[row : row + 4, column : column + 4] = 1
    image = mask[:, None] + 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    return TensorDict({"image": image, "label": label, "mask": mask}, batch_size=[count])


def batches(data: TensorDict, size: int, steps: int) -> Iterator[TensorDict]:
    """Yield ``steps`` random batches of ``size`` images."""
    for _ in range(steps):
        yield data[torch.randint(len(data), (size,))]


class PixelHead(nn.Module):
    """Module that computes one logit per pixel from two feature maps."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(16, 1, 1)

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        """Return the logits, of shape (batch, height, width)."""
        logits: Tensor = self.mix(torch.cat([fine, coarse], 1)).squeeze(1)
        return logits


def make_classifier() -> TensorDictSequential:
    """Build a model that writes the class logits of each image."""
    encoder = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten())
    return TensorDictSequential(
        {
            "encoder": TensorDictModule(encoder, in_keys=["image"], out_keys=["features"]),
            "head": TensorDictModule(nn.Linear(8 * 16, 2), in_keys=["features"], out_keys=["logits"]),
        }
    )


def make_segmentation() -> TensorDictSequential:
    """Build a model that writes one logit per pixel, and its intermediate feature maps."""
    encoder = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
    return TensorDictSequential(
        {
            "encoder": TensorDictModule(encoder, in_keys=["image"], out_keys=[("maps", "fine")]),
            "pool": TensorDictModule(
                nn.AvgPool2d(3, 1, 1), in_keys=[("maps", "fine")], out_keys=[("maps", "coarse")]
            ),
            "head": TensorDictModule(
                PixelHead(), in_keys=[("maps", "fine"), ("maps", "coarse")], out_keys=["logits"]
            ),
        }
    )


def make_loss(function: str, target: str) -> TensorDictModule:
    """Build a module that writes the loss of the logits, computed by a function of ``torch.nn.functional``."""
    return TensorDictModule(
        getattr(F, function), in_keys=["logits", target], out_keys=["loss"], inplace=False
    )


def train(
    model: TensorDictSequential, loss_module: TensorDictModule, dataset: Iterator[TensorDict]
) -> list[Tensor]:
    """Train a model of any task, and return the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    losses = []
    for data in dataset:
        data = model(data)
        loss = loss_module(data)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def main() -> int:
    """Train both models, and return the exit status: 0 if both have learned."""
    torch.manual_seed(0)
    data = draw_shapes(256)
    tasks = {
        "classifier": (make_classifier(), make_loss("cross_entropy", "label")),
        "segmentation": (make_segmentation(), make_loss("binary_cross_entropy_with_logits", "mask")),
    }
    worst = 0.0
    for name, (model, loss_module) in tasks.items():
        print(f"\n{name}\n{model}")
        report = TensorDictSequential(model, loss_module).check(data)
        if not report:
            print(report)
            return 1
        losses = train(model, loss_module, batches(data, 32, STEPS))
        first, last = losses[0].item(), torch.stack(losses[-5:]).mean().item()
        worst = max(worst, last / first)
        print(f"loss {first:.2f} -> {last:.2f}")
    print(f"\nboth learned: {worst < 0.5}")
    return 0 if worst < 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
