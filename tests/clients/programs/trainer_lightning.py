"""Lightning with batches that are collections: fit, validate, log with and without a batch size."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from report import report
from torch import nn
from torch.utils.data import DataLoader

import td_core
from td_core import TensorDict, collate

warnings.simplefilter("ignore")


class Model(pl.LightningModule):
    """A linear model of batches with inputs and targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[Any] = []

    def compute_loss(self, batch: TensorDict) -> torch.Tensor:
        """Compute the loss of a batch."""
        return nn.functional.mse_loss(self.layer(batch["x"]), batch["n", "y"])

    def training_step(self, batch: TensorDict, _: int) -> torch.Tensor:
        """Log the loss of a batch, for the step only."""
        loss = self.compute_loss(batch)
        self.seen.append((type(batch).__name__, list(batch.batch_size)))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: TensorDict, _: int) -> None:
        """Log the loss, averaged over the epoch, which needs the size of each batch."""
        self.log("val", self.compute_loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    """Train with each way to log."""
    pl.seed_everything(0, verbose=False)
    x = torch.arange(20.0).view(10, 2) / 20
    data = TensorDict({"x": x, "n": {"y": x.sum(1, keepdim=True)}}, batch_size=[10])
    loader = DataLoader(data, batch_size=4, collate_fn=collate)

    def train(model: Model, *, validates: bool, precision: Any = None) -> str:
        trainer = pl.Trainer(
            precision=precision,
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        try:
            trainer.fit(model, loader)
            if validates:
                [found] = trainer.validate(model, loader, verbose=False)
                expected = model.compute_loss(data).item()
                return f"mean over rows: {abs(found['val'] - expected) < 1e-6}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "trained"

    model = Model()
    report("fit", train(model, validates=False), model.seen)
    report("validate", train(Model(), validates=True))

    class Sized(Model):
        def validation_step(self, batch: TensorDict, _: int) -> None:
            self.log("val", self.compute_loss(batch), batch_size=len(batch))

    report("validate with batch_size=", train(Sized(), validates=True))

    class Converted(Model):
        def on_before_batch_transfer(self, batch: TensorDict, _: int) -> TensorDict:
            return batch.apply(lambda x: x.to(self.dtype) if x.is_floating_point() else x)

    class Resized(Model):
        def on_before_batch_transfer(self, batch: TensorDict, _: int) -> TensorDict:
            return batch.auto_batch_size_(1)

    def report_precision(name: str, kind: type[Model]) -> None:
        for precision in ("64-true", "bf16-true"):
            model = kind()
            report(
                f"{name} {precision}",
                train(model, validates=False, precision=precision).split(":")[0],
                model.seen,
            )

    report_precision("as it comes", Model)
    report_precision("converted", Converted)
    td_core.count_as_mapping()
    report_precision("as mapping", Model)
    report_precision("as mapping, resized", Resized)
    model = Model()
    report("validate as mapping", train(model, validates=True), model.seen)


if __name__ == "__main__":
    sys.exit(main())
