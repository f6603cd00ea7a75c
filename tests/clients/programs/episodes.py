"""Rows that the programs of replay buffers write."""

from __future__ import annotations

import torch
from tensordict import TensorDict


def rows(start: int, number: int) -> TensorDict:
    """Build rows with numbered content, in episodes of ten steps."""
    step = torch.arange(start, start + number)
    return TensorDict(
        {
            "image": (step % 256).to(torch.uint8).view(-1, 1, 1).expand(-1, 4, 4).clone(),
            "episode": step // 10,
            "next": {"reward": step.float().unsqueeze(-1), "done": (step % 10 == 9).unsqueeze(-1)},
        },
        batch_size=[number],
    )
