"""A step in several passes is the same step as in one; what it tells on the way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from imagination.learning.stream import StepStream
from imagination.learning.supervised_module import SupervisedModule
from imagination.settings import FitSettings
from policy.lm.batch import Row, TokenBatch, collate
from real_envs.trajectory import Source
from tests.support.plain import make_model

STEPS = 3


def batch(step: int) -> TokenBatch:
    """Five rows of different lengths and weights."""
    rng = torch.Generator().manual_seed(step)
    rows = []
    for length in (9, 12, 5, 7, 12):
        ids = torch.randint(1, 30, (length,), generator=rng).tolist()
        weights = [0.0, *torch.rand(length - 1, generator=rng).round(decimals=1).tolist()]
        rows.append(Row(ids, [w > 0 for w in weights], Source.EXPERT, ce_weight=weights))
    return collate(rows, 0)


def fit(model: Any, micro_tokens: int, folder: Path) -> tuple[list[tuple[int, float]], list[dict[str, Any]]]:
    told: list[tuple[int, float]] = []
    recorded: list[dict[str, Any]] = []
    settings = FitSettings(steps=STEPS, micro_tokens=micro_tokens, lr=1e-2, warmup=1, average=0.5)
    module = SupervisedModule(
        model,
        settings,
        lambda step, metrics: recorded.append(dict(metrics)),
        on_tokens=lambda tokens, share: told.append((tokens, share)),
    )
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, StepStream(STEPS, lambda: module.global_step, batch))
    assert module.global_step == STEPS
    return told, recorded


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_in_several_passes_is_the_same_step(tmp_path: Path) -> None:
    whole = make_model()
    parts = copy.deepcopy(whole)
    at_once, first = fit(whole, 1000, tmp_path)
    told, second = fit(parts, 25, tmp_path)  # two rows of twelve at a time
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert first[0]["loss"] == pytest.approx(second[0]["loss"], rel=1e-5)
    assert first[0]["token_accuracy"] == second[0]["token_accuracy"]
    assert at_once == [(45, 1.0)] * STEPS
    assert told == [(21, 0.4), (12, 0.8), (12, 1.0)] * STEPS


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_loss_is_the_weighted_mean_over_the_whole_step(tmp_path: Path) -> None:
    model = make_model()
    found = batch(0)
    with torch.no_grad():
        logits = model(found.input_ids).logits[:, :-1].double().log_softmax(-1)
    total = weight = 0.0
    for r, row in enumerate(found.ce_weight.tolist()):
        for t, w in enumerate(row):
            if w:
                total -= w * float(logits[r, t - 1, found.input_ids[r, t]])
                weight += w
    _, recorded = fit(model, 25, tmp_path)
    assert recorded[0]["loss"] == pytest.approx(total / weight, rel=1e-4)
