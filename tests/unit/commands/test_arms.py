"""If these fail, an ablation shows results of models that are no longer there, or counts steps of another run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.experiments import arms, demo, few_shot
from imagination.runs.fingerprint import fingerprint
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.store import TrajectoryStore
from tests.support.refusal import refused
from tests.support.tiny import TASKS, logged_episode


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were trained; training and playing themselves are replaced."""
    folders: list[Path] = []

    def train(config: Config, there: Path) -> None:
        folders.append(there)
        RunFolder(there, config.seed).update({"real_steps": {"train": 7}, "wall_seconds": {"train": 1.0}})

    async def play(config: Config, run: RunFolder, name: str) -> dict[str, Any]:
        return {"train_tasks": {}, "heldout_tasks": {}, "real_steps": {"evaluate": 5}}

    monkeypatch.setattr(arms, "train", train)
    monkeypatch.setattr(arms, "_play", play)
    return folders


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name in (*arms.SHARED, "models/worldmodel", "models/worldmodel-1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_text(f"of {name}")
    RunFolder(folder, 0).update({"real_steps": {"train": 99}})
    return folder


@pytest.mark.parametrize("changed", ["models/policy-clone", "models/worldmodel", "models/worldmodel-1"])
def test_an_arm_is_trained_again_only_after_other_models(
    source: Path, tmp_path: Path, trained: list[Path], changed: str
) -> None:
    there = tmp_path / "arm"
    first = arms.train_arm(Config(), source, there)
    assert arms.train_arm(Config(), source, there) == first
    assert len(trained) == 1
    (source / changed / "weights").write_text("refitted")
    arms.train_arm(Config(), source, there)
    assert len(trained) == 2
    assert (there / changed / "weights").read_text() == "refitted"


def test_each_counts_its_own_real_steps(source: Path, tmp_path: Path, trained: list[Path]) -> None:
    assert arms.train_arm(Config(), source, tmp_path / "arm")["real_steps"] == {"train": 7, "evaluate": 5}
    assert arms.play_clone(Config(), source)["real_steps"] == {"evaluate": 5}


def test_an_arm_starts_from_the_critic_of_the_run_as_long_as_there_is_one(
    source: Path, tmp_path: Path, trained: list[Path]
) -> None:
    there, weights = tmp_path / "arm", source / "models/critic/weights"
    weights.parent.mkdir()
    weights.write_text("fitted")
    arms.train_arm(Config(), source, there)
    assert (there / "models/critic/weights").read_text() == "fitted"
    shutil.rmtree(weights.parent)
    arms.train_arm(Config(), source, there)
    assert not (there / "models/critic").exists()
    assert len(trained) == 2


def test_an_arm_of_a_checkpoint_has_no_tokenizer_of_the_run(source: Path, tmp_path: Path, trained: list[Path]) -> None:
    shutil.rmtree(source / "tokenizer")
    arms.train_arm(Config(), source, tmp_path / "arm")
    assert trained == [tmp_path / "arm"]


def test_an_arm_has_the_log_that_its_run_began_from(source: Path, tmp_path: Path, trained: list[Path]) -> None:
    (source / "origin").mkdir()
    (source / "origin/episodes").write_text("of another run")
    arms.train_arm(Config(), source, tmp_path / "arm")
    assert (tmp_path / "arm/origin/episodes").read_text() == "of another run"


def test_seeds_that_are_kept_with_other_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config()
    seeded = arms.seed_config(config, 1)
    RunFolder(tmp_path / "seed-1", 1).update(
        {"done": {name: fingerprint(seeded, name) for name in ("collect", "fit_world_model", "train")}}
    )
    arms.note_kept(config, tmp_path)
    assert capsys.readouterr().out == ""
    config.fit.steps += 1
    arms.note_kept(config, tmp_path, until="clone")
    printed = capsys.readouterr().out
    assert "seed-1 keeps what was done with other settings: fit world model;" in printed


@pytest.mark.parametrize(
    ("settings", "made"),
    [
        ([], []),
        (["preset=search"], ["relabel"]),
        (["dream.hindsight=0.5"], ["relabel"]),
        (["clone.supplements=[hindsight,reflections]"], ["reflect", "relabel"]),
    ],
)
def test_a_whole_run_makes_the_supplements_that_it_reads(settings: list[str], made: list[str]) -> None:
    config = load_config(settings, Config)
    assert arms.stages_of(config) == ["collect", "fit_world_model", *made, "clone", "train"]


def test_the_demo_makes_them_before_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in demo.STAGES:
        monkeypatch.setitem(demo.STAGES, name, lambda config, folder, name=name: ran.append(name))
    demo.run_stages(load_config(["preset=search"], Config), tmp_path)
    assert ran == ["collect", "fit_world_model", "relabel", "clone", "train", "evaluate"]


def test_the_control_of_few_shot_reads_no_more_of_the_log_and_is_checked_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("games", "models/worldmodel"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "games/games.json").touch()
    TrajectoryStore.create(tmp_path / "log", {"train": [], "heldout": list(TASKS)}).append(
        logged_episode(task, number) for task in TASKS for number in range(6)
    )
    configs: list[Config] = []
    monkeypatch.setattr(few_shot, "play_clone", lambda config, source: {})
    monkeypatch.setattr(few_shot, "train_arm", lambda config, source, there: configs.append(config))
    monkeypatch.setattr(few_shot, "write_results", lambda *given: None)
    monkeypatch.setattr(few_shot, "few_shot_table", lambda result: "")
    few_shot.few_shot(load_config(["few_shot.episodes=2"], Config), tmp_path)
    assert [(c.train.world, c.train.task_episodes) for c in configs] == [("dream", 2), ("real", 2)]
    share = load_config(["train.real_share=0.5"], Config)
    refused(lambda: few_shot.few_shot(share, tmp_path), "train.real_share=0")
    assert len(configs) == 2


def test_settings_that_the_control_of_the_demo_cannot_have_are_told_before_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "STAGES", {})
    refused(lambda: demo.demo_seed(load_config(["train.real_share=0.5"], Config), tmp_path, 0), "train.real_share=0")
