"""Our side of ``trl_update`` and ``gpu``: ``PolicyModule`` learns from prepared rows under Lightning."""

from __future__ import annotations

import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from transformers import AutoModelForCausalLM

from imagination.learning.advantages import group_relative
from imagination.learning.losses import token_logprobs
from imagination.learning.policy_module import PolicyModule, Update
from imagination.learning.trainer import StepStream
from imagination.settings import AlgorithmSettings, TrainSettings
from policy.lm.batch import Row
from real_envs.trajectory import Source
from tests.benchmarks.machine import synchronize
from tests.benchmarks.measure import worker_files


class Clock(Callback):
    """Seconds of each update, and the gradient of each optimiser step as the optimiser gets it."""

    def __init__(self, keep_gradients: bool) -> None:
        self.seconds: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._keep, self._start = keep_gradients, 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        synchronize()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self._start)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._keep:
            found = module.model.named_parameters()
            self.gradients.append({name: p.grad.float().clone() for name, p in found if p.grad is not None})


@torch.inference_mode()
def add_own_logprobs(model: Any, data: list[dict[str, Any]]) -> None:
    """Gives each row ``old``: the model's own log-probs of its tokens, as on-policy rollouts bring them."""
    for row in data:
        ids = torch.tensor([row["ids"]], device=model.device)
        row["old"] = [0.0, *token_logprobs(model(input_ids=ids).logits[:, :-1], ids[:, 1:])[0].tolist()]


def rows_to_learn_from(data: list[dict[str, Any]]) -> list[Row]:
    """The rows as our experience has them, advantages included."""
    advantages, _ = group_relative(
        torch.tensor([row["reward"] for row in data]),
        torch.tensor([row["group"] for row in data]),
        torch.ones(len(data), dtype=torch.bool),
    )
    return [
        Row(
            ids=row["ids"],
            action_mask=[bool(mine) for mine in row["made"]],
            source=Source.DREAM,
            behavior_logprobs=[x if mine else float("nan") for x, mine in zip(row["old"], row["made"], strict=True)],
            advantages=[advantage * mine for mine in row["made"]],
            rl_weight=[float(mine) for mine in row["made"]],
            rewards=[0.0] * len(row["ids"]),
        )
        for row, advantage in zip(data, advantages.tolist(), strict=True)
    ]


def learn(
    model: Any, rows: list[Row], settings: TrainSettings, updates: int, keep_gradients: bool = False
) -> tuple[Clock, list[dict[str, float]]]:
    """Learns ``updates`` times from the same rows, on the model's device; returns times and metrics of the updates."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock(keep_gradients)
    records: list[dict[str, float]] = []
    module = PolicyModule(model, AlgorithmSettings(), settings, lambda _, metrics: records.append(dict(metrics)))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="gpu" if model.device.type == "cuda" else "cpu",
        devices=1,
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    # the rows' log-probs are the model's own
    stream = StepStream(updates, lambda: module.updates_done, lambda i: Update(i, rows, has_credit=True, exact=True))
    trainer.fit(module, stream)
    return clock, records


def main() -> None:
    spec, out = worker_files()
    model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]))
    rows = rows_to_learn_from(json.loads(Path(spec["rows"]).read_text()))
    settings = TrainSettings(epochs=spec["epochs"], minibatches=spec["minibatches"], lr=spec["lr"])
    clock, records = learn(model, rows, settings, spec["updates"], bool(spec.get("gradients")))
    if spec.get("gradients"):
        torch.save(clock.gradients, spec["gradients"])
    losses = [record["policy_loss"] for record in records]
    advantages = [max(row.advantages, key=abs) for row in rows]
    out.write_text(json.dumps({"seconds": clock.seconds, "losses": losses, "advantages": advantages}))


if __name__ == "__main__":
    main()
