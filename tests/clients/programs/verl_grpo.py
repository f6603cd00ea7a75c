"""GRPO with verl on a tiny language model: batches as DataProto, advantages of groups, minibatches, the clipped loss."""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from report import report
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss
from verl.utils import tensordict_utils as tu

PROMPTS, ANSWERS, LENGTH, WORDS = 4, 3, 6, 11


def score(model: torch.nn.Module, batch: object) -> torch.Tensor:
    """Return the log-probability of each token of the answers."""
    logits = model(batch["input_ids"])[:, -LENGTH - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS))
optim = torch.optim.Adam(model.parameters(), 1e-2)
for step in range(3):
    prompts = torch.randint(WORDS, (PROMPTS, 5))
    names = np.array([f"p{number}" for number in range(PROMPTS)], dtype=object)
    data = DataProto.from_dict({"prompts": prompts}, {"uid": names}, {"step": step})
    data = data.repeat(ANSWERS, interleave=True)
    answers = torch.randint(WORDS, (len(data), LENGTH))
    drawn = DataProto.from_dict(
        {"responses": answers, "input_ids": torch.cat([data.batch["prompts"], answers], -1)}
    )
    data = data.union(drawn)
    data.batch["response_mask"] = (torch.arange(LENGTH) <= torch.arange(len(data))[:, None] % LENGTH).long()
    data.reorder(torch.randperm(len(data)))
    padded, count = pad_dataproto_to_divisor(data, 5)
    with torch.no_grad():
        parts = [DataProto.from_dict({"old": score(model, part.batch)}) for part in padded.chunk(5)]
    data = data.union(unpad_dataproto(DataProto.concat(parts), count))
    rewards = (answers.float().mean(-1, keepdim=True) * data.batch["response_mask"]).float()
    data.batch["advantages"], _ = compute_grpo_outcome_advantage(
        rewards, data.batch["response_mask"], data.non_tensor_batch["uid"]
    )
    for part in data.make_iterator(4, epochs=2, seed=step, dataloader_kwargs={"shuffle": True}):
        loss, *rest = compute_policy_loss(
            part.batch["old"],
            score(model, part.batch),
            part.batch["advantages"],
            part.batch["response_mask"],
            cliprange=0.2,
        )
        optim.zero_grad()
        loss.backward()
        optim.step()
    report(f"step {step}", loss, *rest, data.batch["advantages"].sum(), list(data.non_tensor_batch["uid"]))
report("parameters", *(parameter.norm() for parameter in model.parameters()))
with tempfile.NamedTemporaryFile() as file:
    data.save_to_disk(file.name)
    again = DataProto.load_from_disk(file.name)
report("saved", again.batch["advantages"], list(again.non_tensor_batch["uid"]), again.meta_info)

ragged = tu.get_tensordict(
    {
        "ids": torch.nested.as_nested_tensor(
            [torch.arange(3), torch.arange(5), torch.arange(2)], layout=torch.jagged
        ),
        "name": ["a", "b", "c"],
        "turns": [[1], [2, 3], []],
    },
    {"mode": "train"},
)
report(
    "parts",
    [
        [tu.get(part, "name"), tu.get(part, "mode"), part["ids"].values()]
        for part in tu.chunk_tensordict(ragged, 3)
    ],
)
joined = tu.concat_tensordict(tu.chunk_tensordict(ragged, 3))
report("joined", joined["ids"].offsets(), tu.get(joined, "turns"), len(joined))
report(
    "rows",
    tu.get(tu.index_select_tensor_dict(ragged, [2, 0]), "name"),
    tu.pop(ragged, "mode"),
    sorted(ragged.keys()),
)
