"""One training epoch of RL4CO, with Lightning: a travelling salesman with eight cities."""

from __future__ import annotations

import tempfile

from lightning import seed_everything
from report import report
from rl4co.envs import TSPEnv
from rl4co.models import REINFORCE, AttentionModelPolicy
from rl4co.utils.trainer import RL4COTrainer

seed_everything(0, verbose=False)
env = TSPEnv(generator_params={"num_loc": 8})
policy = AttentionModelPolicy(env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2)
model = REINFORCE(
    env,
    policy,
    baseline="rollout",
    batch_size=16,
    val_batch_size=16,
    test_batch_size=16,
    train_data_size=64,
    val_data_size=32,
    test_data_size=32,
    optimizer_kwargs={"lr": 1e-3},
)
with tempfile.TemporaryDirectory() as folder:
    trainer = RL4COTrainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model)
    report("fit", sorted((name, float(value)) for name, value in trainer.callback_metrics.items()))
    report(
        "test",
        [
            sorted((name, float(value)) for name, value in row.items())
            for row in trainer.test(model, verbose=False)
        ],
    )
td = env.reset(batch_size=[4])
out = model.policy(td, env, phase="test", decode_type="greedy", return_actions=True)
report("tours", out["actions"], out["reward"], sorted(map(str, td.keys(True, True))))
