"""What trainers and loaders of other libraries do with a ``Loader``: run the one whose name is the argument."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import report

from td_core import TensorDict
from td_data import Loader, RandomSampler

DATA = TensorDict({"x": torch.arange(22.0).view(22, 1), "y": torch.arange(22)}, batch_size=[22])


def make_loader(**options: Any) -> Loader:
    """Return a loader whose two ranks are always one process."""
    return Loader(DATA, 4, shuffle=True, seed=3, **options)


def list_rows(epochs: int) -> list[list[int]]:
    """Return the rows of the batches of some epochs, from the sampler alone."""
    orders = (RandomSampler(22, seed=3).order(epoch)(0, 22) for epoch in range(epochs))
    return [batch.tolist() for order in orders for batch in order.split(4)]


def run_lightning() -> None:
    """Train two epochs; resume in the middle of the second, and from a checkpoint of each way to save."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows = torch.nn.Linear(1, 1), []

        def training_step(self, batch: Any, number: int) -> Any:
            self.rows.append(batch["y"].tolist())
            return self.layer(batch["x"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def train(steps: int, path: str | None = None, saves: Any = None) -> tuple[Any, Any]:
        options = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": saves is not None}
        options["callbacks"] = saves
        trainer = lightning.Trainer(max_epochs=3, max_steps=steps, accelerator="cpu", **options)
        model = Model()
        trainer.fit(model, make_loader(), ckpt_path=path)
        return trainer, model

    _, whole = train(12)
    report("epochs", whole.rows == list_rows(2))
    trainer, model = train(9)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(f"{folder}/state.ckpt")
        _, resumed = train(12, f"{folder}/state.ckpt")
    report("resume", model.rows + resumed.rows == list_rows(2))
    for name, when in {
        "default": {},
        "every_n_epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        "every_n_train_steps": {"every_n_train_steps": 3},
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            saves = ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when)
            train(-1, saves=saves)
            starts = {int(path.stem.removeprefix("step=")): path for path in Path(folder).iterdir()}
            rests = [train(-1, str(path))[1].rows == list_rows(3)[step:] for step, path in starts.items()]
        report(name, sorted(starts), all(rests))


def run_stateful() -> None:
    """Save and load the state in the middle, with and without workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from td_core import collate

    for workers in (0, 2):

        def make(workers: int = workers) -> Any:
            batches = RandomSampler(22, seed=3).batches(4)
            return StatefulDataLoader(DATA, batch_sampler=batches, collate_fn=collate, num_workers=workers)

        loader = make()
        batches = iter(loader)
        first = [next(batches)["y"].tolist() for _ in range(2)]
        state = loader.state_dict()
        again = make()
        again.load_state_dict(state)
        rest = [batch["y"].tolist() for batch in again]
        following = [batch["y"].tolist() for batch in again]
        report(f"{workers} workers", first + rest == list_rows(1), following == list_rows(2)[6:])


def run_accelerate() -> None:
    """Prepare a loader, and skip batches of its ``DataLoader``."""
    from accelerate import Accelerator
    from accelerate.data_loader import skip_first_batches

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(make_loader())
    report("prepare", [batch["y"].tolist() for batch in prepared] == list_rows(1))
    loader = accelerator.prepare(make_loader(rank=0, world_size=1).as_dataloader())
    skipped = skip_first_batches(loader, 2)
    report("skip", [batch["y"].tolist() for batch in skipped] == list_rows(1)[2:])


def run_transformers() -> None:
    """Train with the ``DataLoader`` of a loader, and resume by skipping."""
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows = torch.nn.Linear(1, 1), []

        def forward(self, x: Any, y: Any) -> dict[str, Any]:
            self.rows.append(y.tolist())
            return {"loss": self.layer(x).square().mean()}

    class OwnTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(make_loader(rank=0, world_size=1).as_dataloader())

    with tempfile.TemporaryDirectory() as folder:

        def train(steps: int, path: str | None = None) -> list[list[int]]:
            options = {
                "report_to": [],
                "save_strategy": "steps",
                "save_steps": 4,
                "use_cpu": True,
                "disable_tqdm": True,
            }
            arguments = TrainingArguments(folder, max_steps=steps, remove_unused_columns=False, **options)
            model = Model()
            OwnTrainer(model, arguments, train_dataset=DATA).train(resume_from_checkpoint=path)
            return model.rows

        first = train(4)
        rest = train(6, f"{folder}/checkpoint-4")
        report("resume", first + rest == list_rows(1))


def run_checkpoint() -> None:
    """Save the state as a part of a distributed checkpoint."""
    import torch.distributed.checkpoint as checkpoint

    loader = make_loader()
    next(iter(loader))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({"loader": loader.state_dict()}, checkpoint_id=folder, no_dist=True)
        other = make_loader()
        state = {"loader": other.state_dict()}
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    other.load_state_dict(state["loader"])
    report("rest", [batch["y"].tolist() for batch in other] == list_rows(1)[1:])


{
    "lightning": run_lightning,
    "torchdata": run_stateful,
    "accelerate": run_accelerate,
    "transformers": run_transformers,
    "torch": run_checkpoint,
}[sys.argv[1]]()
