"""Train several models together with vmap over their stacked parameters."""

from __future__ import annotations

import torch
from tensordict import TensorDict, from_modules
from tensordict.nn import TensorDictParams
from torch import nn
from torch.func import grad, vmap

MEMBERS = 4
STEPS = 150


def make_model() -> nn.Module:
    """Build an untrained model."""
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()


class Ensemble(nn.Module):
    """Models of one architecture with separate, stacked parameters."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.params = TensorDictParams(from_modules(*members, as_module=False, lock=False))
        self.__dict__["skeleton"] = make_model().to("meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results of all models, of shape (members, batch, 1)."""

        def one(params: TensorDict, x: torch.Tensor) -> torch.Tensor:
            with params.to_module(self.skeleton):
                return self.skeleton(x)

        return vmap(one, (0, None))(self.params, x)


def main() -> None:
    """Train the ensemble and print the spread of its members."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 64, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(2 * x)
    members = [make_model() for _ in range(MEMBERS)]
    ensemble = Ensemble(members)
    print("parameters:", sorted(name for name, _ in ensemble.named_parameters()))
    print("members:", ensemble.params.batch_size, "numel:", ensemble.params.param_count())

    with torch.no_grad():
        apart = torch.stack([member(x) for member in members])
        print("as one by one:", torch.allclose(ensemble(x), apart))

    optimizer = torch.optim.Adam(ensemble.parameters(), lr=3e-2)
    for step in range(STEPS):
        loss = (ensemble(x) - y).square().mean((1, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.6f}")

    with torch.no_grad():
        answers = ensemble(x)
    print("spread:", [round(value, 5) for value in answers.std(0).squeeze(-1)[::16].tolist()])

    # Gradients per member, in a collection with the structure of the parameters.
    model = make_model()

    def error(params: TensorDict) -> torch.Tensor:
        with params.to_module(model):
            return (model(x) - y).square().mean()

    gradients = vmap(grad(error))(ensemble.params.data)
    norms = {key: round(value.norm().item(), 6) for key, value in gradients.flatten_keys(".").items()}
    print("gradients:", dict(sorted(norms.items())))

    best = (answers - y).square().mean((1, 2)).argmin()
    winner = ensemble.params.data[best].clone()
    winner.to_module(model)
    print("the best alone:", torch.allclose(model(x), answers[best]), list(model.state_dict()))
    mean = ensemble.params.data.mean(dim=0)
    print("averaged:", mean.batch_size, round(mean["2", "bias"].item(), 6))


if __name__ == "__main__":
    main()
