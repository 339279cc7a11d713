"""Our side of ``trl_update`` and ``gpu``: ``PolicyModule`` learns from prepared rows under Lightning."""

from __future__ import annotations

import json
import logging
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from transformers import AutoModelForCausalLM

from imagination.learning.advantages import group_relative
from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.losses import token_logprobs
from imagination.learning.policy_module import PolicyModule, Update
from imagination.learning.trainer import StepStream
from imagination.settings import TrainSettings
from policy.lm.batch import Row, RowBatch
from real_envs.trajectory import Source
from tests.benchmarks.machine import synchronize
from tests.benchmarks.measure import worker_files

FIRST_ID = 5  # below are the special tokens


@dataclass(frozen=True)
class Shape:
    """What a batch looks like.

    Attributes:
        groups, size: how many groups of how many rows.
        turns: shortest and longest episode.
        action, observation: fewest and most tokens; an action's last one ends it.
        start: tokens of the first observation.
        spread: 0 repeats one episode; near 1, no two rows agree in more than their start.
    """

    groups: int = 4
    size: int = 12
    turns: tuple[int, int] = (8, 12)
    action: tuple[int, int] = (6, 10)
    observation: tuple[int, int] = (36, 60)
    start: int = 48
    spread: float = 0.3
    vocabulary: int = 2048


def make_rows(shape: Shape, seed: int = 0) -> list[dict[str, object]]:
    """Rows with ``ids``, ``made`` (1 on action tokens), ``prompt`` (length of the start), ``group`` and ``reward``."""
    rows: list[dict[str, object]] = []
    for group in range(shape.groups):
        for k in range(shape.size):
            chance = random.Random(f"{seed}/{group}/{k}")
            ids = list(_tokens(f"{seed}/{group}", (shape.start, shape.start), shape.vocabulary))
            made = [0] * len(ids)
            state = f"{seed}/{group}"
            turns = chance.randint(*shape.turns)
            for turn in range(turns):
                favourite = 0
                while chance.random() < shape.spread:
                    favourite += 1
                state = f"{state}/{favourite}"  # the whole history, so the world never comes back to a state
                action = list(_tokens(f"{state}/action", shape.action, shape.vocabulary))
                ids += action
                made += [1] * len(action)
                if turn < turns - 1:  # what follows the last action trains nothing, so neither side gets it
                    observation = list(_tokens(f"{state}/observation", shape.observation, shape.vocabulary))
                    ids += observation
                    made += [0] * len(observation)
            rows.append(
                {"ids": ids, "made": made, "prompt": shape.start, "group": group, "reward": round(chance.random(), 6)}
            )
    return rows


def _tokens(name: str, length: tuple[int, int], vocabulary: int) -> Iterator[int]:
    chance = random.Random(name)
    return (chance.randrange(FIRST_ID, vocabulary) for _ in range(chance.randint(*length)))


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
        )
        for row, advantage in zip(data, advantages.tolist(), strict=True)
    ]


class GivenAdvantages(PolicyModule):
    """Rows keep the advantages that they came with."""

    def _assign_credit(self, batch: RowBatch) -> dict[str, float]:
        return {}


def learn(
    model: Any, rows: list[Row], settings: TrainSettings, updates: int, keep_gradients: bool = False
) -> tuple[Clock, list[dict[str, float]]]:
    """Learns ``updates`` times from the same rows, on the model's device; returns times and metrics of the updates."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock(keep_gradients)
    records: list[dict[str, float]] = []
    module = GivenAdvantages(model, ALGORITHMS["grpo"], settings, lambda _, metrics: records.append(dict(metrics)))
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
    stream = StepStream(updates, lambda: module.updates_done, lambda i: Update(i, rows, exact=True))
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
    advantages = [max(row.advantages.tolist(), key=abs) for row in rows]
    out.write_text(json.dumps({"seconds": clock.seconds, "losses": losses, "advantages": advantages}))


if __name__ == "__main__":
    main()
