"""Policy gradient with a replay buffer on disk, in a small environment.

    python examples/policy_gradient.py [FOLDER]

The actor pushes a cart on a line to the origin and holds it there, against friction and random pushes. It is a
probabilistic sequence with a bounded distribution of actions. Transitions are written to a memory-mapped buffer below
FOLDER (default: a temporary folder), which other processes can read. Updates weight old actions by the ratio of their
probabilities under the new and the old actor, clipped as in PPO (Schulman et al., 2017). The program ends with a non-zero
status unless the reward improves and the reopened buffer equals the written one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from td import TensorDict
from td_nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    TruncatedNormal,
    set_interaction_type,
)

CARTS = 32
LENGTH = 40
ROUNDS = 25
KEPT_ROUNDS = 2
DISCOUNT = 0.95
CLIP = 0.2


class CartEnvironment:
    """Carts with a position and a speed, each pushed by a force in [-1, 1].

    Args:
        count: number of independent carts.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def reset(self) -> TensorDict:
        """Return the observation of carts at random positions with speed 0."""
        state = torch.stack([torch.rand(self.count) * 4 - 2, torch.zeros(self.count)], -1)
        return TensorDict({"observation": state}, batch_size=[self.count])

    def step(self, data: TensorDict) -> TensorDict:
        """Apply the actions; return the next observation and the reward."""
        position, speed = data["observation"].unbind(-1)
        force = data["action"].squeeze(-1)
        speed = 0.9 * speed + 0.3 * force + 0.02 * torch.randn_like(speed)
        position = (position + 0.5 * speed).clamp(-3, 3)
        reward = -position.abs() - 0.05 * force.square()
        state = torch.stack([position, speed], -1)
        return TensorDict({"observation": state, "reward": reward}, batch_size=data.batch_size)


class ReplayBuffer:
    """The newest transitions, in files that other processes can map.

    Args:
        folder: the folder of the files.
        example: one transition; all transitions have its keys, shapes and dtypes.
        size: maximum number of transitions.
    """

    def __init__(self, folder: Path, example: TensorDict, size: int) -> None:
        self.storage = example.expand(size).memmap_like(folder)
        self.size = size
        self.written = 0

    def extend(self, transitions: TensorDict) -> None:
        """Write transitions over the oldest ones."""
        place = (self.written + torch.arange(len(transitions))) % self.size
        self.storage[place] = transitions
        self.written += len(transitions)

    def __len__(self) -> int:
        return min(self.written, self.size)

    def sample(self, count: int) -> TensorDict:
        """Read random transitions into memory."""
        drawn: TensorDict = self.storage[torch.randint(len(self), (count,))]
        return drawn


def make_actor() -> ProbabilisticTensorDictSequential:
    """Build the sequence observation -> loc, scale -> action, action_log_prob."""
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=TruncatedNormal,
            distribution_kwargs={"a": -1.0, "b": 1.0},
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )


def make_critic() -> TensorDictSequential:
    """Build the sequence observation -> value."""
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    return TensorDictSequential(TensorDictModule(net, ["observation"], ["value"]))


def roll_out(actor: ProbabilisticTensorDictSequential, environment: CartEnvironment) -> TensorDict:
    """Run one episode of each cart; return a collection of batch size (carts, steps)."""
    now, steps = environment.reset(), []
    with torch.no_grad():
        for _ in range(LENGTH):
            now = actor(now)
            after = environment.step(now)
            steps.append(now.set("reward", after["reward"]))
            now = after.select("observation")
    episodes: TensorDict = torch.stack(steps, 1)
    return episodes.set("return", discounted_sums(episodes["reward"]))


def discounted_sums(reward: Tensor) -> Tensor:
    """Return, for each step, the discounted sum of rewards from this step to the end."""
    total, sums = torch.zeros(reward.shape[0]), []
    for now in reward.flip(1).unbind(1):
        total = now + DISCOUNT * total
        sums.append(total)
    return torch.stack(sums[::-1], 1)


def losses(
    actor: ProbabilisticTensorDictSequential, critic: TensorDictSequential, batch: TensorDict
) -> TensorDict:
    """Return the losses: the negative clipped objective of the actor, and the squared error of the critic."""
    value = critic(batch)["value"].squeeze(-1)
    advantage = (batch["return"] - value).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    log_ratio = actor.log_prob(batch) - batch["action_log_prob"]
    ratio = log_ratio.squeeze(-1).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    error = (batch["return"] - value).square()
    return TensorDict({"actor": -gain.mean(), "critic": error.mean()})


def mean_return(actor: ProbabilisticTensorDictSequential, environment: CartEnvironment) -> float:
    """Return the mean reward per step of the deterministic actor."""
    with set_interaction_type("deterministic"):
        return roll_out(actor, environment)["reward"].mean().item()


def train(folder: Path) -> tuple[float, float, ReplayBuffer]:
    """Train an actor; return its mean reward before and after the training, and the buffer."""
    environment = CartEnvironment(CARTS)
    actor, critic = make_actor(), make_critic()
    print(actor)
    before = mean_return(actor, environment)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
    buffer: ReplayBuffer | None = None
    for _ in range(ROUNDS):
        transitions = roll_out(actor, environment).reshape(-1).exclude("loc", "scale")
        if buffer is None:
            buffer = ReplayBuffer(folder, transitions[0], KEPT_ROUNDS * CARTS * LENGTH)
        buffer.extend(transitions)
        for _ in range(12):
            loss = losses(actor, critic, buffer.sample(512)).sum(reduce=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert buffer is not None
    return before, mean_return(actor, environment), buffer


def main() -> None:
    """Train, and check the rewards and the buffer."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary) / "replay"
        before, after, buffer = train(folder)
        reopened = TensorDict.load_memmap(folder)
        print(f"reward of a step: {before:.2f} before, {after:.2f} after {ROUNDS} rounds")
        print(f"buffer: {len(buffer)} transitions in {folder.name}/, keys {sorted(reopened.keys())}")
        if not (reopened == buffer.storage).all():
            raise SystemExit("the reopened buffer differs from the one that was written")
        if after < before / 2:
            raise SystemExit("the actor has not learned")


if __name__ == "__main__":
    main()
