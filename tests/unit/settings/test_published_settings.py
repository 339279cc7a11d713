"""If these fail, a preset that is named after a published recipe trains by another one, or not at all."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from imagination import cli
from imagination.commands.check_train import check
from imagination.learning.algorithms import Algorithm
from imagination.rollout.schedules import longest_turns
from imagination.settings import Config
from imagination.settings.compose import load_config

# Copied by hand from the files that docs/published-settings.md names: what is to agree, and the world.
_VERL: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token_mean"}
_GRPO: dict[str, Any] = {"normalise_std": True, "drop_equal_groups": False, "kl_coef": 1e-3, "kl_estimator": "k3"}
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "agent_r1": (
        "search",
        {
            "gamma": 1.0,
            "lam": 1.0,
            "value_clip": 0.5,
            "kl_coef": 1e-3,
            "kl_estimator": "k1",
            "kl_in": "reward",
            **_VERL,
        },
        {"groups": 128, "group_size": 1, "minibatches": 2, "weight_decay": 0.01, "grad_clip": 1.0},
    ),
    "mua_rl": (
        "bfcl",
        {"std_eps": 1e-6, "kl_in": "loss", **_GRPO, **_VERL},
        {"group_size": 8, "minibatches": 1, "weight_decay": 0.01, "grad_clip": 1.0, "reward_tiers": [[1, 1]]},
    ),
    "tti": (
        "miniwob",
        {"keep_fraction": 1.0, "kl_coef": 0.0},
        {"updates": 15, "group_size": 1, "weight_decay": 0.01, "grad_clip": 0.01},
    ),
    "webagent_r1": (
        "miniwob",
        {"std_eps": 1e-4, "kl_in": "loss", "dual_clip": None, "aggregation": "sequence_mean", **_GRPO},
        {"updates": 40, "groups": 16, "group_size": 4, "minibatches": 1, "grad_clip": 0.01},
    ),
}
ALL = {"epochs": 1, "expert_share": 0.0, "max_kl": 0.0, "lr_end": 1.0}


def _loaded(preset: str) -> tuple[Config, Algorithm]:
    config = load_config([f"preset={preset}"], Config)
    return config, check(config)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_recipe_is_accepted_and_has_the_numbers_of_its_source(preset: str) -> None:
    world, of_algorithm, of_train = PUBLISHED[preset]
    config, algorithm = _loaded(preset)
    assert (config.run, config.env.name, config.dream.branch) == (preset, world, 0.0)
    assert algorithm.settings == algorithm.settings | of_algorithm | {"entropy_coef": 0.0}
    assert asdict(config.train) == asdict(config.train) | of_train | ALL
    assert (algorithm.loss_mask, algorithm.advantage_mask, algorithm.tis_cap) == (True, True, 0.0)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_rest_is_that_of_the_world_s_own_preset(preset: str) -> None:
    mine, of_world = (asdict(load_config([f"preset={name}"], Config)) for name in (preset, PUBLISHED[preset][0]))
    changed = {section for section, settings in mine.items() if settings != of_world[section]}
    assert changed <= {"run", "env", "clone", "algorithm", "dream", "train", "evaluate"}
    assert mine["train"]["lr"] == of_world["train"]["lr"]


def test_tti_has_its_script_s_horizon_in_thirds() -> None:
    config, _ = _loaded("tti")
    assert [longest_turns(config.dream, update) for update in range(6)] == [4, 7, 7, 10, 10, 10]  # 10 20 20 30 30 30


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_dry_run_tells_its_settings(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", f"preset={preset}", f"output={tmp_path}", "--dry-run"]) == 0
    assert f"run: {preset}\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
