"""If these fail, a setting is silently ignored, or a run starts that its settings cannot work for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from imagination.cli import STAGES, stage_help
from imagination.commands.check_train import check, check_experts
from imagination.commands.refine_world_model import grpo
from imagination.learning.algorithms import ALGORITHMS, build_algorithm
from imagination.learning.algorithms.registry import TRAINERS, changed
from imagination.settings import (
    AlgorithmName,
    AlgorithmSettings,
    Config,
    ProgressSettings,
    SelfImitationSettings,
    UserError,
)
from imagination.settings.compose import load_config

# --- names and keys ---


def test_the_settings_know_every_algorithm_and_every_setting_of_the_registry() -> None:
    """Names and parts are declared where torch is not loaded, as a command line must answer before that."""
    assert set(get_args(AlgorithmName)) == set(ALGORITHMS)
    of_algorithms = {key for member in ALGORITHMS.values() for key in member.settings}
    assert {f.name for f in fields(AlgorithmSettings)} == of_algorithms | set(TRAINERS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_left_alone_it_is_the_algorithm_of_the_registry(name: Any) -> None:
    assert build_algorithm(AlgorithmSettings(name=name)) == ALGORITHMS[name]
    assert load_config([f"algorithm={name}"], Config).algorithm == AlgorithmSettings(name=name)


def test_what_is_set_arrives() -> None:
    found = build_algorithm(
        AlgorithmSettings("ppo", gamma=0.9, value_clip=0.5, kl_coef=0.1, dual_clip=4.0), max_tokens=60
    )
    assert (found.settings["gamma"], found.settings["value_clip"]) == (0.9, 0.5)
    assert (found.settings["kl_coef"], found.settings["dual_clip"]) == (0.1, 4.0)
    assert found.settings["max_tokens"] == 60
    assert build_algorithm(AlgorithmSettings("dr_grpo", max_tokens=7), max_tokens=60).settings["max_tokens"] == 7


def test_zero_is_none_where_nothing_else_can_be_typed() -> None:
    assert changed(AlgorithmSettings("ppo", dual_clip=0.0, value_clip=0.0)) == {"dual_clip": None, "value_clip": None}
    found = build_algorithm(AlgorithmSettings("ppo", dual_clip=0.0, value_clip=0.0))
    assert found.settings["dual_clip"] is found.settings["value_clip"] is None
    assert build_algorithm(AlgorithmSettings("grpo", clip_low=0.0)).settings["clip_low"] == 0.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "grpo", "value_coef": 1.0}, r"algorithm: value_coef .* grpo: .* ppo, st_ppo, turn_ppo"),
        ({"name": "ppo", "normalise_std": False}, r"normalise_std .* ppo: .* grpo, dr_grpo"),
        ({"name": "grpo", "clip_low": 1.5}, r"algorithm: clip_low must lie in \[0, 1\]"),
        ({"name": "grpo", "tis_cap": 0.5}, r"tis_cap must be 1 or more, or 0"),
        ({"name": "gigpo", "advantage_mask": False}, r"gigpo judges turns"),
        ({"name": "turn_ppo", "advantage_mask": False}, r"turn_ppo judges turns"),
        ({"name": "dr_grpo", "loss_mask": False}, r"set algorithm\.aggregation=token_mean"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_way_out(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_algorithm(AlgorithmSettings(**settings))


def test_the_help_teaches_the_choice() -> None:
    words = stage_help(STAGES["train"])
    for name in ALGORITHMS:
        assert name in words
    assert "algorithm.gamma=null" in words
    assert "for ablation only" in words
    for line in (
        "train.self_imitation.share=0.0       a number; of replayed episodes among those of an update",
        "train.reward_tiers=[]                a list such as [1,2]; outcome to reward",
        "train.process=                       text; value in a turn's record that serves as process reward",
        "algorithm.progress.enabled=false     true or false; turns are judged by what the estimator says",
        "dream.horizon_growth=2.0             a number; ",
    ):
        assert line in words


# --- whole runs ---

PROGRESS = ProgressSettings(enabled=True)


def changed_config(**sections: dict[str, Any]) -> Config:
    config = Config()
    for section, values in sections.items():
        setattr(config, section, replace(getattr(config, section), **values))
    return config


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"lam": 0.9}}, r"lam .* grpo"),
        ({"algorithm": {"name": "dr_grpo", "max_tokens": 191}}, r"max_tokens=191 is less than the 192 tokens"),
        ({"train": {"group_size": 1}}, r"set train\.group_size .* ppo"),
        ({"algorithm": {"name": "reinforce"}}, r"set train\.epochs=1 and train\.minibatches=1"),
        ({"train": {"extra_groups": 1.0}, "algorithm": {"name": "ppo"}}, r"ppo .*: set it to 0"),
        ({"train": {"expert_share": 1.0}}, r"expert_share must lie in \[0, 1\)"),
        ({"dream": {"max_turns": 128}}, r"128 actions of max_action_tokens=16 .* policy\.context=2048"),
        ({"policy": {"context": 128}}, r"raise the last"),
        ({"train": {"self_imitation": SelfImitationSettings(coef=1.0)}}, r"set train\.self_imitation\.share"),
        ({"train": {"self_imitation": SelfImitationSettings(share=0.9)}}, r"together below 1: lower one"),
        ({"train": {"reward_tiers": [[0.5, 0.3], [0.4, 1.0]]}}, r"must both rise"),
        (
            {"train": {"reward_tiers": [[1.0, 0.5]]}, "algorithm": {"name": "filtered_bc"}},
            r"keep_min_return=0\.99: lower the latter",
        ),
        ({"train": {"process": "confidence"}}, r"need each other"),
        ({"train": {"process_coef": 0.1}}, r"need each other"),
        ({"train": {"process": "score", "process_coef": 0.1}}, r"one of confidence, outcome_confidence"),
        ({"train": {"process": "disagreement", "process_coef": -1.0}}, r"set worldmodel\.members to 2"),
        ({"train": {"process": "confidence", "process_coef": 1.0, "world": "real"}}, r"set train\.world=dream"),
        ({"algorithm": {"progress": ProgressSettings(steps=3)}}, r"set algorithm\.progress\.enabled=true"),
        ({"algorithm": {"progress": PROGRESS}}, r"grpo .*: .* ppo, reinforce, reinforce_pp, gigpo"),
        ({"algorithm": {"name": "ppo", "progress": replace(PROGRESS, carried_out=0.5)}}, r"set worldmodel\.refusals"),
        ({"dream": {"horizon_shape": "multiply"}}, r"set dream\.horizon .* \[\[0,4\]\]"),
        ({"train": {"failure_share": 1.0}}, r"failure_share must lie in \[0, 1\)"),
        ({"dream": {"branch_share": 0.5}, "algorithm": {"name": "ppo"}}, r"ppo has others: .* one of grpo"),
        ({"dream": {"branch_share": 0.5}, "algorithm": {"name": "istar"}}, r"istar has others: (?!.*istar)"),
        ({"dream": {"branch_share": 0.5}, "train": {"world": "real"}}, r"set it to 0, or train\.world=dream"),
        ({"dream": {"branch_share": 0.5}, "train": {"oversample": 2.0}}, r"train\.oversample=1"),
        # settings that would change nothing
        ({"dream": {"branch_share": 0.04}}, r"branch_share=0\.04 of train\.group_size=12 is no episode"),
        ({"train": {"oversample": 1.04}}, r"oversample=1\.04 of train\.group_size=12 is no episode more"),
        # a dream that goes on from another would be fined for its own tokens alone, and look better than that one
        ({"dream": {"branch_share": 0.5}, "algorithm": {"overlong_buffer": 4}}, r"algorithm\.overlong_buffer=0"),
        ({"dream": {"branch_share": 0.5}, "algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}, r"algorithm\.kl_in=loss"),
        (
            {"train": {"failure_share": 0.5, "max_staleness": 1}, "scale": {"name": "ray"}},
            r"set dream\.branch_share=0 and train\.failure_share=0",
        ),
    ],
)
def test_a_run_that_cannot_work_does_not_start(sections: dict[str, dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(changed_config(**sections))


@pytest.mark.parametrize("word", ["grad_clip=0", "lr_end=2"])
def test_what_would_learn_nothing_or_change_nothing_is_refused(word: str) -> None:
    """A gradient of length 0 is none, and a rate that rises would stay as it is."""
    with pytest.raises(UserError, match=f"{word.partition('=')[0]} must be"):
        load_config([f"train.{word}"], Config)


def test_a_copy_of_a_sharded_policy_is_refused() -> None:
    config = changed_config(algorithm={"name": "istar"})
    config.strategy = "fsdp2"
    with pytest.raises(UserError, match=r"istar copies the policy.*: set strategy=ddp"):
        check(config)


def test_summaries_need_room_and_what_reads_several_contexts() -> None:
    config = replace(changed_config(dream={"max_turns": 128}), summary_tokens=64)
    check(config)  # more turns than fit one context
    with pytest.raises(UserError, match=r"summary_tokens=2020 .* no room .* policy\.context=2048"):
        check(replace(config, summary_tokens=2020))
    config.train.self_imitation = SelfImitationSettings(share=0.1)
    with pytest.raises(UserError, match=r"set summary_tokens=0"):
        check(config)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_can_be_run(name: str) -> None:
    steps = {"minibatches": 1} if name == "reinforce" else {}
    check(changed_config(algorithm={"name": name}, train=steps))


def test_experts_that_are_not_there_are_missed_at_once() -> None:
    with pytest.raises(UserError, match=r"set train\.expert_share=0"):
        check_experts(Config(), 0)
    check_experts(Config(), 1)
    check_experts(changed_config(train={"expert_share": 0.0}), 0)


def test_a_world_model_is_refined_by_grpo_whatever_the_policy_learns_by() -> None:
    mine = grpo(changed_config(algorithm={"clip_high": 0.3, "kl_coef": 0.1, "overlong_buffer": 9}))
    assert mine == AlgorithmSettings(clip_high=0.3)
    assert grpo(changed_config(algorithm={"name": "ppo", "lam": 0.9, "tis_cap": 3.0})) == AlgorithmSettings(tis_cap=3.0)
