"""What a change of settings does again, and what it leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.digi_q import digi_q
from imagination.commands.fit_critic import fit_critic
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.train import train
from imagination.runs.fingerprint import READS, fingerprint
from imagination.settings import AlgorithmSettings, Config
from imagination.settings.compose import load_config
from imagination.settings.dreams import DreamSettings

STAGES = ("collect", "fit_world_model", "clone", "train", "evaluate")


@pytest.mark.parametrize(
    ("setting", "first"),
    [
        ("collect.episodes=7", "collect"),
        ("seed=7", "collect"),
        ("worldmodel.rarity=0.1", "fit_world_model"),
        ("dream.temperature=0.5", "fit_world_model"),  # its calibration is of answers at this temperature
        ("clone.keep_every=10", "clone"),
        ("policy.hidden=64", "clone"),
        ("train.updates=7", "train"),
        ("summary_tokens=64", "train"),
        ("experience=experience.json", "train"),
        ("learn_experience.rounds=2", ""),
        ("dream.min_confidence=0.5", "train"),
        ("evaluate.episodes=7", "evaluate"),
        ("audit.episodes=7", ""),
        ("run=another", ""),
    ],
)
def test_a_setting_does_again_what_depends_on_it(setting: str, first: str) -> None:
    before, after = Config(), load_config([setting], Config)
    again = [stage for stage in STAGES if fingerprint(before, stage) != fingerprint(after, stage)]
    assert again == (list(STAGES[STAGES.index(first) :]) if first else [])


def test_stages_read_no_settings_that_they_do_not_declare(
    run: Path, tiny: Config, tmp_path: Path, give_games: Callable[[Path], None]
) -> None:
    give_games(tmp_path / "games-run")
    small = load_config(
        ["preset=tiny", "collect.episodes=3", "collect.heldout_episodes=1", "collect.workers=1"], Config
    )
    tiny.digi_q.td_steps, tiny.digi_q.steps, tiny.digi_q.states, tiny.digi_q.candidates = 50, 10, 40, 4
    for name, stage, config, folder in (
        ("collect", collect, small, tmp_path / "games-run"),
        ("fit_world_model", fit_world_model, tiny, run),
        ("clone", clone, tiny, run),
        ("fit_critic", fit_critic, replace(tiny, algorithm=AlgorithmSettings("ppo")), run),
        ("digi_q", digi_q, tiny, run),
        ("train", train, tiny, run),
    ):
        watched, read = watch(config)
        stage(watched, folder)
        # of train it reads reward_tiers, and micro_tokens, which changes no result
        declared = {*READS[name], *(["train"] if name == "fit_critic" else [])}
        assert read, name
        assert {one for one in read if one not in declared and one.partition(".")[0] not in declared} == set(), name


def watch(config: Config) -> tuple[Config, set[str]]:
    """The same settings, and the names of those that have been read since: sections, and single ones of ``dream``."""
    read: set[str] = set()
    # where losses are logged, how processes share their work and which of them play decide nothing that is made
    aside = {"dream", "logger", "strategy", "activation_checkpointing", "scale"}
    sections = {f.name for f in fields(Config)} - aside
    dreams = {f.name for f in fields(DreamSettings)}

    class Dream(DreamSettings):
        def __getattribute__(self, name: str) -> Any:
            if name in dreams:
                read.add(f"dream.{name}")
            return super().__getattribute__(name)

    class Watched(Config):
        def __getattribute__(self, name: str) -> Any:
            if name in sections:
                read.add(name)
            return super().__getattribute__(name)

    dream = Dream(**vars(config.dream))
    watched = Watched(**{**vars(config), "dream": dream})
    read.clear()
    return watched, read
