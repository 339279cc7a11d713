"""If this fails, a policy never reads the world before it imitates, or goes on reading it for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from imagination.learning import supervise as module
from imagination.runs.run_folder import RunFolder
from imagination.settings import FitSettings
from policy.lm.batch import Row
from real_envs.trajectory import Source
from tests.support.plain import TOKENIZER, make_model


class Trainer:
    """Fetches the batches of a stage and trains nothing."""

    batches: list[Any]

    def fit(self, supervised: Any, stream: Any, **_: Any) -> None:
        Trainer.batches = list(stream.train_dataloader())


def test_first_rows_come_for_so_many_steps_before_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_trainer", lambda *_, **__: Trainer())
    first, then = (Row([token] * 8, [False] * 8, Source.REAL, ce_weight=[1.0] * 8) for token in (7, 9))
    settings = FitSettings(steps=2, batch_tokens=8, copying_steps=1, precision="fp32")
    model = make_model()
    module.supervise(
        RunFolder(tmp_path, 0),
        "none",
        "clone",
        model,
        TOKENIZER,
        [then] * 3,
        settings,
        0,
        first=[first] * 3,
        first_steps=3,
    )
    read = [set(torch.unique(batch.input_ids[batch.ce_weight > 0]).tolist()) for batch in Trainer.batches]
    assert read == [{7}, {7}, {7}, {9}, {9}]  # what is trained already makes no detour over copying
