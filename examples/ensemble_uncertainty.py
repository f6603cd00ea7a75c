"""An ensemble that estimates its uncertainty: copies of one network, trained together under vmap.

    python examples/ensemble_uncertainty.py [PICTURE]

The copies learn a noisy curve from points with a gap between them. The copies agree near the points, and disagree in the
gap and beyond the points, so the standard deviation over the copies measures the uncertainty. With matplotlib, the program
draws curve, mean and standard deviation to PICTURE (default: ``ensemble.png``). It ends with a non-zero status if the
uncertainty in the gap is not larger.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from td_core import TensorDict
from td_nn import EnsembleModule, TensorDictModule

COPIES = 16
STEPS = 400
GAP = (-0.5, 1.5)


def curve(x: Tensor) -> Tensor:
    """Return the values of the curve to learn."""
    return torch.sin(2 * x) + 0.3 * x


def draw_points(count: int) -> TensorDict:
    """Sample noisy points of the curve, outside of the gap."""
    x = torch.rand(4 * count, 1) * 6 - 3
    x = x[(x[:, 0] < GAP[0]) | (x[:, 0] > GAP[1])][:count]
    return TensorDict({"x": x, "target": curve(x) + 0.1 * torch.randn_like(x)}, batch_size=[len(x)])


def make_ensemble() -> EnsembleModule[Tensor]:
    """Build copies of one network with separate parameters."""
    network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return EnsembleModule(TensorDictModule(network, in_keys=["x"], out_keys=["y"]), num_copies=COPIES)


def train(ensemble: EnsembleModule[Tensor], data: TensorDict) -> Tensor:
    """Train all copies together, with different weights of the points per copy; return the last loss of each copy."""
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=5e-3)
    # Bootstrap: for each copy, the weight of a point is 0, 1, 2..., so the copies learn from different data.
    counts = torch.poisson(torch.ones(COPIES, len(data), 1))
    for _ in range(STEPS):
        result = ensemble(data)
        losses = (counts * (result["y"] - data["target"]).square()).mean((1, 2))
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    return losses.detach()


def draw(path: Path, data: TensorDict, grid: TensorDict) -> bool:
    """Draw points, curve, mean and spread; return False without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    x, mean, spread = (grid[key].squeeze(-1) for key in ("x", "mean", "spread"))
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.fill_between(
        x, mean - 2 * spread, mean + 2 * spread, alpha=0.3, label="mean ± 2 standard deviations"
    )
    axes.plot(x, mean, label=f"mean of {COPIES} copies")
    axes.plot(x, curve(x), "--", color="black", label="curve")
    axes.scatter(data["x"], data["target"], s=8, color="red", label="points")
    axes.set(title="an ensemble under vmap", xlabel="x", ylabel="y", ylim=(-3, 3))
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def main(picture: Path) -> int:
    """Train the ensemble, measure and draw its uncertainty, and return the exit status."""
    torch.manual_seed(0)
    data, ensemble = draw_points(120), make_ensemble()
    losses = train(ensemble, data)
    grid = TensorDict({"x": torch.linspace(-4, 4, 161)[:, None]}, batch_size=[161])
    with torch.no_grad():
        y = ensemble(grid)["y"]
    grid["mean"], grid["spread"] = y.mean(0), y.std(0)
    x = grid["x"].squeeze(-1)
    in_gap = grid[(x > GAP[0] + 0.5) & (x < GAP[1] - 0.5)]["spread"].mean().item()
    at_points = grid[(x.abs() < 3) & ((x < GAP[0]) | (x > GAP[1]))]["spread"].mean().item()
    print(
        f"{COPIES} copies of {sum(p[0].numel() for p in ensemble.parameters())} parameters, trained together:"
    )
    print(f"loss {losses.min():.3f} to {losses.max():.3f}")
    print(f"standard deviation where there are points {at_points:.3f}, in the gap {in_gap:.3f}")
    print(f"drew {picture}" if draw(picture, data, grid) else "drew nothing: matplotlib is not installed")
    sure = in_gap > 2 * at_points and losses.max().item() < 0.05
    print(f"less sure in the gap: {sure}")
    return 0 if sure else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("ensemble.png")))
