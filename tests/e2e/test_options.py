"""What may be added to any run of ``train``: replays, tiers, judgements of turns, progress, growing horizons.

Each through the real stage, from one clone, in dreams of one world model; and stopped and gone on from, bit for bit.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.train import train
from imagination.data.augmentation import write_supplement
from imagination.learning.collector import ExperienceCollector
from imagination.runs.log import read_log
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, ProgressSettings, SelfImitationSettings
from imagination.settings.compose import load_config
from tests.support.killing import Killed, assert_same_model, kill_at, metrics_of, moved
from tests.support.refusal import refused
from tests.support.tiny import tiny_settings
from tests.support.worlds import Lottery, plant


def played(cloned: Path, to: Path, config: Config) -> list[dict[str, Any]]:
    """The metrics of a run of ``train`` in a copy of the clone's folder."""
    shutil.copytree(cloned, to, dirs_exist_ok=True)
    train(config, to)
    return metrics_of(to, "train")


def settings(updates: int = 2, **train_settings: Any) -> Config:
    config = tiny_settings()
    config.train.updates, config.train.groups, config.train.group_size, config.train.lr = updates, 3, 6, 1e-3
    config.train.expert_share = 0.0
    for name, value in train_settings.items():
        setattr(config.train, name, value)
    return config


def test_good_episodes_are_replayed_from_the_second_update_on(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Lottery)
    replaying, plain = settings(3, self_imitation=SelfImitationSettings(share=0.25, coef=1.0)), settings(3)
    lines = played(cloned, tmp_path / "with", replaying)
    without = played(cloned, tmp_path / "without", plain)
    assert lines[0]["replayed"] == 0
    assert lines[0]["replays_kept"] > 0
    assert lines[0]["replay_baseline"] < 1
    assert "rl_tokens_replay" not in lines[0]
    first = {k: v for k, v in lines[0].items() if "repla" not in k}
    assert first == without[0], "nothing could be replayed yet"
    second = lines[1]
    assert 0 < second["replayed"] <= 6
    assert second["rl_tokens_replay"] > 0
    assert second["rl_tokens_dream"] == second["rl_tokens"] == without[1]["rl_tokens"]
    assert second["gradient_share_dream"] + second["gradient_share_replay"] == pytest.approx(1.0)
    assert second["ratio_replay"] != pytest.approx(1.0, abs=1e-6)
    assert second["advantage_replay"] > 0
    assert lines[2] != without[2]
    rollouts = [json.loads(line) for line in (tmp_path / "with" / "rollouts.jsonl").read_text().splitlines()]
    assert {rollout["source"] for rollout in rollouts} == {"dream"}


def test_tiers_pay_for_outcomes(cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solved task is worth a half, so RLOO's first advantages are halved; what was dreamed is the same."""
    plant(monkeypatch, Lottery)
    tiers, plain = settings(1, reward_tiers=[[1.0, 0.5]]), settings(1)
    for config in (tiers, plain):
        config.algorithm.name = "rloo"
    (half,), (whole,) = played(cloned, tmp_path / "half", tiers), played(cloned, tmp_path / "whole", plain)
    assert half["turns"] == whole["turns"]
    assert half["advantage_dream"] == pytest.approx(whole["advantage_dream"] / 2) != 0
    assert 0 < half["tiered_return"] <= 0.5


def test_turns_are_paid_for_how_sure_the_dream_is(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Lottery)
    judged, plain = settings(1, process="confidence", process_coef=0.5), settings(1)
    for config in (judged, plain):
        config.algorithm.name = "reinforce"
        config.train.minibatches = 1
    (paid,), (unpaid,) = played(cloned, tmp_path / "paid", judged), played(cloned, tmp_path / "unpaid", plain)
    assert 0 < paid["process_mean"] <= 1
    assert paid["advantage_dream"] > unpaid["advantage_dream"] + 0.5 * 0.5 * paid["process_mean"]
    assert moved(tmp_path / "paid") > 0


def test_dreams_grow_longer(cloned: Path, tmp_path: Path) -> None:
    config = settings(3)
    config.dream.horizon, config.dream.horizon_shape = [[0, 1]], "multiply"
    lines = played(cloned, tmp_path, config)
    assert [line["horizon"] for line in lines] == [1, 2, 4]
    assert [line["mean_turns"] <= line["horizon"] for line in lines] == [True] * 3
    answered = 18 * (1 - lines[0].get("stop_prediction_invalid", 0.0) - lines[0].get("stop_context_limit", 0.0))
    assert lines[0]["turns"] == pytest.approx(answered), "of 18 dreams, each a turn, but for those that got no answer"


def equal_after_a_kill(cloned: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, config: Config) -> Any:
    """The metrics of a training that was not stopped, which one that was killed after two updates has as well."""
    straight = played(cloned, folder / "straight", config)
    stopped = shutil.copytree(cloned, folder / "stopped")
    with monkeypatch.context() as patch:
        kill_at(patch, "train", 3)
        with pytest.raises(Killed):
            train(config, stopped)
    train(config, stopped)
    assert metrics_of(stopped, "train") == straight
    assert_same_model(folder / "straight" / "models" / "policy", stopped / "models" / "policy")
    return straight


@pytest.mark.parametrize("name", ["turn_ppo", "gigpo"])
def test_four_updates_with_everything_equal_two_then_a_kill_then_two_more(
    name: Any, cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer, the estimator and its optimiser are in the training state."""
    plant(monkeypatch, Lottery)
    config = settings(4, self_imitation=SelfImitationSettings(share=0.2, max_age=2), reward_tiers=[[0.5, 0.3], [1, 1]])
    config.train.process, config.train.process_coef = "outcome_confidence", 0.05
    config.train.expert_share = 0.1
    config.dream.branch, config.train.lr = 0.0, 1e-4
    config.algorithm.name, config.algorithm.progress = name, ProgressSettings(enabled=True)
    straight = equal_after_a_kill(cloned, tmp_path, monkeypatch, config)
    assert [line["step"] for line in straight] == [0, 1, 2, 3]
    assert min(straight[k]["replayed"] for k in (1, 2, 3)) > 0
    assert straight[0]["progress_error_fitted"] < straight[0]["progress_error"]
    assert straight[3]["tokens_expert"] > 0
    assert straight[3]["tokens_replay"] > 0


def test_more_is_played_than_learned_from(cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the dreams cost twice the turns, and that is counted; the kept ones are groups of six as ever."""
    plant(monkeypatch, Lottery)
    lines = played(cloned, tmp_path, settings(2, oversample=2.0))
    for line in lines:
        assert line["turns"] < line["played_turns"] <= 36 * 5
        assert line["played_turns"] == pytest.approx(2 * line["turns"], rel=0.35)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["dreamed_turns"] == sum(line["played_turns"] for line in lines)


def test_branches_and_failed_tasks_equal_two_updates_then_a_kill_then_two_more(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is in the training state; where dreams branch is not, as it is a function of what was dreamed."""
    plant(monkeypatch, Lottery)
    config = settings(4, failure_share=0.7, groups=4, group_size=4)
    config.dream.branch_share, config.dream.branch, config.train.lr = 0.5, 0.0, 1e-4
    dreamed: list[int] = []

    def speed(self: ExperienceCollector) -> dict[str, float]:
        dreamed.append(self.turns)
        return {}

    monkeypatch.setattr(ExperienceCollector, "speed", speed)
    straight = equal_after_a_kill(cloned, tmp_path, monkeypatch, config)
    assert all(line["played_turns"] < line["turns"] for line in straight), (
        "turns that two dreams share are dreamed once"
    )
    assert dreamed[0] == sum(line["played_turns"] for line in straight), "nor do they make the training look faster"
    assert any(line["failed_tasks"] for line in straight)
    assert all(0 <= line["failed_tasks"] <= 2 for line in straight)


def test_a_share_of_the_groups_dreams_of_goals_that_failures_reached(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Lottery)
    config = settings(2, groups=4)
    config.dream.hindsight = 0.5
    refused(lambda: played(cloned, tmp_path / "none", config), "imagine relabel")
    folder = shutil.copytree(cloned, tmp_path / "some")
    logged, _ = read_log(RunFolder(folder, config.seed), config.collect.validation)
    new = [replace(e, id=f"hindsight/{e.id}", start=f"Another goal.\n{e.start}", turns=e.turns[:1]) for e in logged[:3]]
    write_supplement(RunFolder(folder, config.seed), "hindsight", new)
    train(config, folder)
    assert len(metrics_of(folder, "train")) == 2
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    starts = [r["start"] for r in rollouts if r["which"] == "update"]
    assert [sum(s.startswith("Another goal.") for s in starts), len(starts)] == [4, 8]


def test_settings_from_the_command_line() -> None:
    words = ["train.self_imitation.share=0.2", "train.reward_tiers=[[0.5,0.3],[1,1]]", "algorithm=turn_ppo"]
    config = load_config([*words, "algorithm.progress.enabled=true", "dream.horizon_shape=add"], Config)
    assert (config.train.self_imitation.share, config.train.reward_tiers) == (0.2, [[0.5, 0.3], [1.0, 1.0]])
    assert config.algorithm.progress.enabled
    assert config.dream.horizon_shape == "add"
