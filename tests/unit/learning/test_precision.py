"""`precision=auto` on a CPU: fp32 for small models; for large ones what is faster, told, and kept over a restart."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from imagination.learning import supervised
from imagination.learning.supervised import chosen_precision
from imagination.runs.run_folder import RunFolder
from policy.lm.batch import collate
from tests.support.plain import EXPERTS, make_model

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
