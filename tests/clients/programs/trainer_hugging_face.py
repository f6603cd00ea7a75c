"""The Trainer of transformers with batches that are collections."""

from __future__ import annotations

import sys
import tempfile
import warnings
from typing import Any

import torch
from report import report
from torch import nn
from transformers import Trainer, TrainingArguments

import td_core
from td_core import TensorDict, collate

warnings.simplefilter("ignore")


class Model(nn.Module):
    """A linear model that returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute predictions and loss."""
        self.seen.append(list(x.shape))
        out = self.layer(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def train() -> Any:
    """Train and evaluate; return what the model received."""
    torch.manual_seed(0)
    x = torch.arange(20.0).view(10, 2) / 20
    data = TensorDict({"x": x, "labels": x.sum(1, keepdim=True)}, batch_size=[10])
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=1, per_device_train_batch_size=4, per_device_eval_batch_size=4, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False, seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collate)
        try:
            trainer.train()
            found = trainer.evaluate()
            model.eval()
            loss = model(x, data["labels"])["loss"].item()
            predicted = trainer.predict(data).predictions.shape
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:60]}"
    return [model.seen[:3], abs(found["eval_loss"] - loss) < 1e-5, list(predicted)]


if __name__ == "__main__":
    report("train", train())
    td_core.count_as_mapping()
    report("train as mapping", train())
    sys.exit(0)
