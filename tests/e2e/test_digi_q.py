"""From a log to a policy without a dream. If this fails, `imagine digi-q` imitates something else than good actions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from imagination.commands import digi_q as stage
from imagination.commands.digi_q import digi_q
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from policy.lm.batch import Row
from policy.lm.engine import Completion, EngineFailure
from policy.lm.engines.inprocess.engine import InProcessEngine
from real_envs.trajectory import StopReason
from tests.support.killing import moved
from tests.support.tiny import tiny_settings, write_log


@pytest.fixture
def run(cloned: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(cloned, tmp_path / "run")
    return RunFolder(tmp_path / "run", 0)


def settings() -> Config:
    config = tiny_settings()
    config.digi_q.td_steps, config.digi_q.steps, config.digi_q.states, config.digi_q.candidates = 50, 10, 40, 4
    return config


def test_the_policy_imitates_sampled_actions_and_can_be_played(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    imitated: list[Row] = []
    whole = stage.fit_batches
    monkeypatch.setattr(stage, "fit_batches", lambda rows, *rest: imitated.extend(rows) or whole(rows, *rest))
    config = settings()
    digi_q(config, run.path)
    told = run.summary["digi_q"]
    assert told["turns"] > told["states"] == 40
    assert 0 < told["imitated"] == len(imitated) <= 40
    assert run.summary["real_steps"]["digi_q"] == 0
    assert moved(run.path) > 1e-6
    session = Session(config, run)
    chat = session.policy("policy").chat
    for row in imitated:
        mine = row.ce_weight != 0
        first = int(mine.nonzero()[0])
        assert mine[first:].all(), "an action is the end of its row"
        assert not mine[:first].any()
        assert row.ids[-1] == chat.stop
    assert session.policy("policy").version != session.policy("policy-clone").version


def test_failed_episodes_are_left_out(tmp_path: Path, cloned: Path) -> None:
    """Those of `write_log`, every second of which broke."""
    run = RunFolder(Path(shutil.copytree(cloned, tmp_path / "run")), 0)
    shutil.rmtree(run.path / "log")
    write_log(run.path, lambda t: replace(t, stop=StopReason.ENV_CRASHED) if t.seed % 2 else t)
    digi_q(settings(), run.path)
    log = Session(settings(), run).log.train
    kept = [t for t in log if not t.stop.is_failure]
    assert len(log) >= len(kept) > 0
    assert run.summary["digi_q"]["turns"] == sum(len(t.turns) for t in kept)


def test_generation_that_breaks_leaves_an_action_out_and_is_counted(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NaN in log-probs does: every fifth action that is sampled."""
    complete, asked = InProcessEngine.complete, count()

    async def breaking(self: InProcessEngine, *args: Any, **more: Any) -> Completion:
        if next(asked) % 5 == 0:
            raise EngineFailure("log-probs are NaN")
        return await complete(self, *args, **more)

    monkeypatch.setattr(InProcessEngine, "complete", breaking)
    digi_q(settings(), run.path)
    assert run.summary["digi_q"]["failed"] == 40 * 4 // 5


def test_what_is_missing_is_said_in_a_line(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings()
    monkeypatch.setattr(stage, "best_actions", lambda q, values: torch.tensor([-1]))
    with pytest.raises(UserError, match=r"raise digi_q\.candidates or digi_q\.td_steps"):
        digi_q(config, run.path)
    config.digi_q.agents = ["nobody"]
    with pytest.raises(UserError, match=r"none of 0 .* digi_q\.agents=\['nobody'\]"):
        digi_q(config, run.path)
