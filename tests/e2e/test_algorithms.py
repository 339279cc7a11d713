"""Every algorithm through the real stage ``train``: two updates from one clone, in dreams that a lottery pays.

What so small a world model learns may be a world in which all dreams are won: then there is nothing to compare.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.train import train
from imagination.learning import collector
from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.experience import policy_rows
from imagination.learning.policy_module import PolicyModule
from imagination.settings import Config, UserError
from policy.lm.batch import Row, RowBatch
from tests.support.killing import metrics_of, moved
from tests.support.tiny import tiny_settings
from tests.support.worlds import Lottery, plant

NO_EXPERTS = {"expert_share": 0.0}


@pytest.fixture(autouse=True)
def lottery(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Lottery)


def trained(cloned: Path, to: Path, train_settings: dict[str, Any], **algorithm: Any) -> list[dict[str, Any]]:
    """The lines of two updates in a copy of the run; ``to`` then holds the policy."""
    shutil.copytree(cloned, to, dirs_exist_ok=True)
    train(settings(train_settings, **algorithm), to)
    return metrics_of(to, "train")


def settings(train_settings: dict[str, Any], **algorithm: Any) -> Config:
    config = tiny_settings()
    config.train.updates, config.train.groups, config.train.group_size, config.train.lr = 2, 3, 6, 1e-3
    for name, value in train_settings.items():
        setattr(config.train, name, value)
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    return config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_updates_change_the_policy(name: str, cloned: Path, tmp_path: Path) -> None:
    """By what it did alone: no expert takes part."""
    steps = {"minibatches": 1} if name == "reinforce" else {}
    lines = trained(cloned, tmp_path, NO_EXPERTS | steps, name=name)
    assert [line["step"] for line in lines] == [0, 1]
    assert any(line.get("rl_tokens", 0) > 0 for line in lines)
    assert 1e-6 < moved(tmp_path) < 0.1
    for line in lines:
        assert all(isinstance(v, str) or abs(v) < 1e6 for v in line.values() if v is not None), line
        if "rl_tokens" in line:
            assert line["rl_tokens_dream"] == line["rl_tokens"]
            assert line["gradient_share_dream"] == pytest.approx(1.0)
            assert line["policy_loss_dream"] == pytest.approx(line["policy_loss"], abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "ppo", "dr_grpo"])
def test_episodes_in_several_contexts_are_learned_from(
    name: str, cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dreams of an update are as many as ever, and their rows more; no row is longer than the policy's context."""
    rows: list[Row] = []
    monkeypatch.setattr(collector, "policy_rows", lambda *args: rows.extend(policy_rows(*args)) or rows[:])
    shutil.copytree(cloned, tmp_path, dirs_exist_ok=True)
    config = settings(NO_EXPERTS, name=name)
    config.summary_tokens, config.policy.context, config.train.updates = 8, 160, 1
    train(config, tmp_path)
    (line,) = metrics_of(tmp_path, "train")
    assert line["rl_tokens"] > 0
    assert 1e-6 < moved(tmp_path) < 0.1
    episodes = [int(row.episode) for row in rows]
    assert len(set(episodes)) <= 18 < len(episodes)
    assert all(len(row) <= 160 for row, after in zip(rows, [*episodes[1:], -1], strict=True) if after == row.episode)


@pytest.mark.parametrize(
    ("train_settings", "algorithm"),
    [
        ({}, {"kl_coef": 0.1}),
        ({"epochs": 2}, {"name": "reinforce_pp", "kl_coef": 0.1}),
        ({"expert_form": "luffy"}, {}),
        ({"expert_form": "luffy_constant"}, {}),
        ({"epochs": 2}, {"loss_mask": False}),
        (NO_EXPERTS, {"name": "ppo", "advantage_mask": False, "loss_mask": False}),
        (NO_EXPERTS, {"name": "dapo", "overlong_buffer": 40, "entropy_coef": 0.01}),
    ],
    ids=str,
)
def test_what_can_be_added_works_too(
    train_settings: dict[str, Any], algorithm: dict[str, Any], cloned: Path, tmp_path: Path
) -> None:
    lines = trained(cloned, tmp_path, train_settings, **algorithm)
    assert len(lines) == 2
    assert 1e-6 < moved(tmp_path) < 0.1
    if algorithm.get("kl_coef") and "kl_in" not in algorithm and algorithm.get("name") is None:
        assert lines[0]["kl_reference"] >= 0.0
    if not train_settings.get("expert_share", 1):
        return
    assert lines[0]["ce_tokens"] > 0
    assert lines[0]["gradient_share_dream"] + lines[0]["gradient_share_expert"] == pytest.approx(1.0)
    assert lines[0]["tokens_dream"] + lines[0]["tokens_expert"] == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_whose_log_probs_are_checked_before_the_first_step(
    dtype: Any, cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the engine in process need no pass of the trainer's; rounded to bfloat16 they do, once an update."""
    compared, whole = [], PolicyModule._remember_logprobs

    def noted(module: PolicyModule, batch: RowBatch, rows: Sequence[int]) -> None:
        compared.append((len(rows), len(batch)))
        whole(module, batch, rows)

    monkeypatch.setattr(PolicyModule, "_remember_logprobs", noted)
    config = settings(NO_EXPERTS)
    config.engine.dtype = dtype
    shutil.copytree(cloned, tmp_path, dirs_exist_ok=True)
    train(config, tmp_path)
    assert [wanted == rows > 0 for wanted, rows in compared] == ([] if dtype == "auto" else [True, True])


def test_training_on_what_the_world_said_trains_more_tokens(cloned: Path, tmp_path: Path) -> None:
    """The ablation of Agent-R1: without the mask the observations are in loss and denominator."""
    masked = trained(cloned, tmp_path / "masked", NO_EXPERTS)[0]
    unmasked = trained(cloned, tmp_path / "unmasked", NO_EXPERTS, loss_mask=False)[0]
    assert unmasked["rl_tokens"] > 2 * masked["rl_tokens"]
    assert unmasked["mismatch_ratio_max"] == pytest.approx(1.0, abs=1e-3)


def test_groups_that_are_all_alike_are_played_again_elsewhere(cloned: Path, tmp_path: Path) -> None:
    """DAPO's dynamic sampling: more turns are dreamed, within the limit, and more is learned from."""
    once = trained(cloned, tmp_path / "once", NO_EXPERTS | {"group_size": 2}, name="dapo")[0]
    again = trained(cloned, tmp_path / "again", NO_EXPERTS | {"group_size": 2, "extra_groups": 4.0}, name="dapo")[0]
    assert once["turns"] < again["turns"] <= 2 * 3 * 5 * 5
    assert once.get("rl_tokens", 0) < again["rl_tokens"]


def test_contradictions_are_told_before_anything_is_played(cloned: Path, tmp_path: Path) -> None:
    shutil.copytree(cloned, tmp_path, dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"value_coef .* grpo"):
        train(settings({}, value_coef=0.5), tmp_path)
    assert not (tmp_path / "rollouts.jsonl").exists()
    assert not (tmp_path / "models" / "policy").exists()
