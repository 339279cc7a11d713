"""If these fail, both models learn with other weights than those of their rows, or in a slow or changing precision."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from imagination.learning import supervised
from imagination.learning.supervised import SupervisedModule, chosen_precision, schedule
from imagination.runs.run_folder import RunFolder
from imagination.settings import FitSettings
from policy.lm.batch import collate
from tests.support.plain import EXPERTS, Notes, assert_same, fit, gradients_of, make_model, scored


class NotedSupervised(SupervisedModule):
    def configure_optimizers(self) -> Any:
        self.notes = Notes(self)
        constant = torch.optim.lr_scheduler.LambdaLR(self.notes, lambda step: 1.0)
        return {"optimizer": self.notes, "lr_scheduler": constant}


def test_supervised_training_is_a_weighted_mean_over_the_tokens_of_the_batch() -> None:
    """Weights of turns scale their tokens and not the step: doubled throughout, they change nothing."""
    model = make_model()
    rows = [replace(row, ce_weight=[(1 + i) * w for w in row.ce_weight]) for i, row in enumerate(EXPERTS)]
    scores = [scored(model, row.ids, 1.0) for row in rows]
    nll = -sum(w * s for row, ss in zip(rows, scores, strict=True) for w, s in zip(row.ce_weight, ss, strict=True))
    total = sum(sum(row.ce_weight) for row in rows)
    expected = gradients_of(nll / total, model)
    for factor, micro_tokens in ((1.0, 8192), (2.0, 8192), (1.0, 1)):  # one pass; one pass a row
        scaled = [replace(row, ce_weight=[factor * w for w in row.ce_weight]) for row in rows]
        told = Mock()
        settings = FitSettings(precision="fp32", micro_tokens=micro_tokens)
        module = NotedSupervised(model, settings, lambda i, m: None, on_tokens=told)
        fit(module, collate(scaled, pad=0))
        passes = [call.args for call in told.call_args_list]
        (got,) = module.notes.seen
        assert_same({name.removeprefix("model."): g for name, g in got.items()}, expected)
        assert len(passes) == (1 if micro_tokens > 1 else len(rows))
        assert sum(tokens for tokens, _ in passes) == sum(len(row.ids) for row in rows)
        assert passes[-1][1] == 1.0


def test_the_learning_rate_rises_along_a_line_and_falls_along_a_cosine_to_a_tenth() -> None:
    """By hand: two steps up, the highest, halfway down, and a tenth at the end and behind it."""
    got = [schedule(step, 10, 2) for step in (0, 1, 2, 6, 10, 12)]
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])
    timed = [schedule(step, 10, 2, passed) for step, passed in ((0, 0.5), (2, 0.5), (6, 0.2), (6, 1.0))]
    assert timed == pytest.approx([0.5, 0.55, 0.55, 0.1])


# --- precision=auto on a CPU ---

BATCH = collate(EXPERTS, pad=0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return RunFolder(tmp_path, 0)


def test_a_small_model_is_not_measured(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen_precision("auto", make_model(), BATCH, run, "fit") == "fp32"
    assert chosen_precision("bf16", make_model(), BATCH, run, "fit") == "bf16"
    assert not capsys.readouterr().out
    assert "precision" not in run.summary


@pytest.mark.parametrize(("slow", "expected"), [(False, "bf16"), (True, "fp32")])
def test_the_faster_of_both_is_told_and_kept(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow: bool, expected: str
) -> None:
    """Real passes, whose times are then replaced: ``slow`` is that of half precision."""
    monkeypatch.setattr(supervised, "LARGE", 0)
    measured = supervised._passes
    passes: list[bool] = []

    def times(*args):  # type: ignore[no-untyped-def]
        work = measured(*args)

        def timed(half: bool) -> float:
            assert work(half) > 0
            passes.append(half)
            return 1.0 + (half if slow else -0.5 * half)

        return timed

    monkeypatch.setattr(supervised, "_passes", times)
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    assert chosen_precision("auto", model, BATCH, run, "fit") == expected
    assert passes == [False, True, False, True]
    assert f"precision {expected}" in capsys.readouterr().out
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert chosen_precision("auto", model, BATCH, RunFolder(run.path, 0), "fit") == expected
    assert len(passes) == 4, "a stage that goes on must not change its precision"
    assert not capsys.readouterr().out
