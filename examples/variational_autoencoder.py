"""A variational autoencoder whose encoder and decoder are one probabilistic sequence.

    python examples/variational_autoencoder.py [FIGURE]

The sequence reads an image, samples a latent code and computes the distribution of the image. The loss needs this
distribution, which ``get_dist`` builds, and the distribution of the code, whose parameters ``get_dist`` writes to the batch.
The program ends with a non-zero status unless reconstructions are better than the mean image and the codes separate the
shapes. FIGURE is an optional path for a picture of images, reconstructions, and images from codes of the prior.
The picture needs matplotlib.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch import distributions as dist

from td_core import TensorDict
from td_nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)

SIZE = 10
CODE = 4
STEPS = 400


def draw_shapes(count: int) -> TensorDict:
    """Build binary images of squares and crosses, with labels."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(2, (count,), generator=generator)
    corner = torch.randint(0, SIZE - 5, (count, 2), generator=generator)
    image = torch.zeros(count, SIZE, SIZE)
    for picture, kind, (row, column) in zip(image, label, corner):
        if kind:
            picture[row + 2, column : column + 5] = 1
            picture[row : row + 5, column + 2] = 1
        else:
            picture[row : row + 5, column : column + 5] = 1
    return TensorDict({"image": image, "label": label}, batch_size=[count])


class ImageDistribution(dist.Independent):
    """Independent binary pixels; ``log_prob`` returns one value per image."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(dist.Bernoulli(logits=logits), 2)

    @property
    def deterministic_sample(self) -> Tensor:
        """Probabilities of the pixels, without rounding."""
        return self.base_dist.probs  # type: ignore[no-any-return]


def make_model() -> ProbabilisticTensorDictSequential:
    """Build the sequence image -> loc, scale -> code -> logits -> reconstruction."""
    encoder = nn.Sequential(
        nn.Flatten(-2), nn.Linear(SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, 2 * CODE), NormalParamExtractor()
    )
    decoder = nn.Sequential(
        nn.Linear(CODE, 64), nn.ReLU(), nn.Linear(64, SIZE * SIZE), nn.Unflatten(-1, (SIZE, SIZE))
    )
    return ProbabilisticTensorDictSequential(
        {
            "encode": TensorDictModule(encoder, ["image"], ["loc", "scale"]),
            "code": ProbabilisticTensorDictModule(
                ["loc", "scale"], ["code"], distribution_class=dist.Normal, default_interaction_type="random"
            ),
            "decode": TensorDictModule(decoder, ["code"], ["logits"]),
            "draw": ProbabilisticTensorDictModule(
                ["logits"], ["reconstruction"], distribution_class=ImageDistribution
            ),
        },
        return_composite=False,
    )


def negative_elbo(model: ProbabilisticTensorDictSequential, batch: TensorDict) -> Tensor:
    """Return reconstruction error plus divergence from the prior, in nats per image."""
    with set_interaction_type("random"):
        pixels = model.get_dist(
            batch
        )  # runs all modules before the last distribution, and writes their results to the batch
    code = dist.Normal(batch["loc"], batch["scale"])
    prior = dist.Normal(0.0, 1.0)
    divergence = dist.kl_divergence(code, prior).sum(-1)
    loss: Tensor = (divergence - pixels.log_prob(batch["image"])).mean()
    return loss


def train(model: ProbabilisticTensorDictSequential, data: TensorDict) -> list[float]:
    """Train on random batches and return the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        batch = data[torch.randint(len(data), (128,))]
        loss = negative_elbo(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def reconstruct(model: ProbabilisticTensorDictSequential, data: TensorDict) -> TensorDict:
    """Return the data with the mean code and the reconstruction of each image."""
    with torch.no_grad(), set_interaction_type("deterministic"):
        return model(data.copy())  # type: ignore[no-any-return]


def imagine(model: ProbabilisticTensorDictSequential, count: int) -> Tensor:
    """Return images of codes that are sampled from the prior, with the last two modules of the sequence."""
    with torch.no_grad():
        drawn = model[2:](TensorDict({"code": torch.randn(count, CODE)}, batch_size=[count]))
    images: Tensor = drawn["reconstruction"]
    return images


def accuracy_of_nearest(train_set: TensorDict, test_set: TensorDict) -> float:
    """Return the share of test images whose nearest training code has the same label."""
    nearest = torch.cdist(test_set["code"], train_set["code"]).argmin(1)
    return (train_set["label"][nearest] == test_set["label"]).float().mean().item()


def draw_figure(path: str, rows: list[Tensor]) -> None:
    """Draw rows of images into one picture file."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(rows), len(rows[0]), figsize=(len(rows[0]), len(rows)))
    for line, images in zip(axes, rows):
        for axis, image in zip(line, images):
            axis.imshow(image, cmap="gray", vmin=0, vmax=1)
            axis.axis("off")
    figure.savefig(path)


def main() -> None:
    """Train and check the model, and draw the figure if a path is given."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = draw_shapes(1200)
    train_set, test_set = data[:1000], data[1000:]
    model = make_model()
    print(model)
    losses = train(model, train_set)
    first, last = losses[0], sum(losses[-20:]) / 20
    test_set = reconstruct(model, test_set)
    error = (test_set["reconstruction"] - test_set["image"]).square().mean().item()
    guess = (test_set["image"] - train_set["image"].mean(0)).square().mean().item()
    accuracy = accuracy_of_nearest(reconstruct(model, train_set), test_set)
    print(f"negative ELBO: {first:.1f} nats at first, {last:.1f} at last")
    print(f"squared error of a pixel: {error:.4f}, of the mean image {guess:.4f}")
    print(f"label of the nearest code: {accuracy:.0%} right")
    if len(sys.argv) > 1:
        draw_figure(sys.argv[1], [test_set["image"][:8], test_set["reconstruction"][:8], imagine(model, 8)])
    if last > first / 2 or error > guess / 3 or accuracy < 0.9:
        raise SystemExit("the autoencoder has not learned")


if __name__ == "__main__":
    main()
