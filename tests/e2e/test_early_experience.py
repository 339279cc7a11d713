"""Reflections and relabelled failures go from a log into a clone. If this fails, they reach nobody, or dreams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagination.commands import reflect as stage
from imagination.commands.clone import clone
from imagination.commands.relabel import relabel
from imagination.data.augmentation import read_supplements, supplement_folder
from imagination.rollout.dream_env import Guard
from imagination.runs.log import read_log
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from tests.support.scripted import Table
from tests.support.tiny import write_log


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    write_log(tmp_path)
    return RunFolder(tmp_path, 0)


def test_the_stages_write_beside_the_log_and_only_the_clone_reads_it(
    run: RunFolder, tiny: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_log(run, 0.05)
    world = Table({}, other="Zounds!")
    monkeypatch.setattr(Session, "world_model", lambda *_, **__: world)
    monkeypatch.setattr(Session, "guard", lambda *_: Guard(0.0, 0.0))
    stage.reflect(tiny, run.path)
    tiny.hindsight.goals = [[r"You walk (\w+)", r"Go \1."]]
    relabel(tiny, run.path)
    told, failures = (read_supplements(run, [name]) for name in ("reflections", "hindsight"))
    assert {t.agent for t in told} == {"reflections/expert"}
    assert {t.agent for t in failures} == {"hindsight/noisy"}
    for episode in told:  # of an expert that is never told what it does itself
        for turn in episode.turns:
            *others, mine, end = str(turn.info["reasoning"]).splitlines()
            assert all(line.endswith(": Zounds!") for line in others)
            assert not any(line.startswith(turn.action) for line in others)
            assert (mine.startswith(f"{turn.action}: You"), end) == (True, f"So {turn.action}.")
    assert {t.start.split()[0] for t in failures} == {"Go"}
    assert read_log(run, 0.05) == before
    assert f"{len(failures)} of " in capsys.readouterr().err

    tiny.clone.from_world_model, tiny.clone.agents = False, []
    tiny.clone.steps, tiny.clone.world_steps, tiny.max_action_tokens = 2, 1, 128
    with pytest.raises(UserError, match=r"clone\.agents=\[\]"):
        clone(tiny, run.path)
    tiny.clone.supplements = ["reflections", "hindsight"]
    clone(tiny, run.path)
    assert (run.model("policy-clone") / "config.json").exists()
    assert len(run.metrics("clone")) == 1


def test_what_is_missing_is_said_in_a_line(run: RunFolder, tiny: Config) -> None:
    with pytest.raises(UserError, match=r"hindsight\.goals"):
        relabel(tiny, run.path)
    tiny.hindsight.goals = [["You fly", "Fly."]]
    with pytest.raises(UserError, match=r"0 of .* failed episodes"):
        relabel(tiny, run.path)
    assert not supplement_folder(run, "hindsight").exists()
    tiny.clone = replace(tiny.clone, supplements=["hindsight"])
    with pytest.raises(UserError, match="`imagine relabel`"):
        clone(tiny, run.path)
    tiny.reflect.agents = ["nobody"]
    with pytest.raises(UserError, match="by an expert"):
        stage.reflect(tiny, run.path)
