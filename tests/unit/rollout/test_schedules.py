"""If these fail, a batch holds other shares of dreamed, real and expert episodes than its settings say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from imagination.commands.check_train import check
from imagination.learning.metrics import measure_played, realised_shares
from imagination.rollout.schedules import (
    added_episodes,
    check_horizon,
    check_share,
    longest_turns,
    max_value,
    real_groups,
    share_at,
    turns_at,
)
from imagination.settings import Config, TrainSettings
from imagination.settings.compose import load_config
from policy.lm.batch import Row, collate
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.refusal import in_a_line, refused

POINTS = [[2, 0.5], [6, 0.1], [8, 0.1], [9, 0.9]]


def test_a_share_goes_in_straight_lines_from_point_to_point() -> None:
    by_hand = [0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.9, 0.9]
    assert [share_at(u, POINTS) for u in range(11)] == pytest.approx(by_hand)
    assert share_at(3, 0.25) == share_at(3, [[0, 0.25]]) == 0.25
    assert (max_value(POINTS), max_value(0.25)) == (0.9, 0.25)


def test_a_share_may_go_as_noise_does_in_zerosearch() -> None:
    """The formula of its curriculum, with p_s = 0.1, p_e = 0.5, b = 4 and m = 8 steps."""
    by_formula = [0.1 + (4 ** (i / 8) - 1) / (4 - 1) * (0.5 - 0.1) for i in range(9)]
    assert [share_at(i, [[0, 0.1], [8, 0.5]], 4.0) for i in range(10)] == pytest.approx([*by_formula, 0.5])
    assert share_at(4, [[0, 0.0], [8, 0.6]], 4.0) == pytest.approx(0.2)  # (2 - 1) / 3 of the way
    assert share_at(3, [[0, 0.1], [8, 0.5]], 1 + 1e-9) == pytest.approx(share_at(3, [[0, 0.1], [8, 0.5]]), abs=1e-6)
    assert share_at(3, 0.25, 4.0) == 0.25


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 2), (0.5, 3), (0.99, 5), ([[0, 0.5], [12, 0.0]], 3)])
def test_groups_are_dealt_to_both_worlds_and_one_stays_in_the_dream(share: Any, expected: int) -> None:
    assert real_groups(0, TrainSettings(groups=6, real_share=share)) == expected
    assert real_groups(12, TrainSettings(groups=6, real_share=[[0, 0.5], [12, 0.0]])) == 0


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, "lie in"),
        (-0.1, "lie in"),
        ([[0, 0.5], [4, 1.0]], "lie in"),
        ([], "a list"),
        ([[0, 0.5, 1]], "a list"),
        ([[4, 0.5], [4, 0.2]], "must rise"),
    ],
)
def test_a_share_that_cannot_be_is_told(share: Any, said: str) -> None:
    in_a_line(check_share("train.real_share", share) or "", "train.real_share", said)
    assert check_share("train.real_share", POINTS) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.real_share=0.5", "train.world=real"], "train.real_share=0"),
        (["train.real_share=0.5", "train.groups=1"], "train.groups above 1"),
        (["train.real_share=0.5", "train.process=confidence", "train.process_coef=1"], "train.process=''"),
        (["train.expert_share=[[0,0.5],[0,0.1]]"], "train.expert_share must rise"),
        (["train.expert_share=[[0,0.5],[9,0.1]]", "train.self_imitation.share=0.5"], "together below 1"),
    ],
)
def test_settings_that_contradict_each_other(overrides: list[str], said: str) -> None:
    refused(lambda: check(load_config(overrides, Config)), said)


def test_shares_from_the_command_line() -> None:
    config = load_config(["train.real_share=0.25", "train.expert_share=[[0,0.5],[12,0]]"], Config)
    assert (config.train.real_share, config.train.expert_share) == (0.25, [[0, 0.5], [12, 0]])
    check(config)


def test_each_world_has_metrics_of_its_own() -> None:
    def played(source: Source, turns: int, stop: StopReason) -> Trajectory:
        said = tuple(Turn("look", "A hall.", float(k == 1), False) for k in range(turns))
        return Trajectory("e", "t", "g", source, "policy", 0, "S", said, stop)

    dreams = [played(Source.DREAM, 3, StopReason.UNSURE), played(Source.DREAM, 1, StopReason.TURN_LIMIT)]
    real = [played(Source.REAL, 4, StopReason.TERMINATED)]
    found = {**measure_played(dreams), **measure_played(real, "real_")}
    assert (found["turns"], found["real_turns"]) == (4, 4)
    assert (found["stop_unsure"], found["real_stop_terminated"]) == (0.5, 1.0)
    assert "stop_terminated" not in found
    assert {"dream_success", "real_success"} <= set(found)
    assert measure_played([]) == {}


HORIZON = [[0, 4], [8, 12], [10, 6]]


def test_the_horizon_of_every_update_by_hand() -> None:
    steps = [turns_at(u, HORIZON, "steps", 20) for u in range(12)]
    assert steps == [4, 4, 4, 4, 4, 4, 4, 4, 12, 12, 6, 6]
    linear = [turns_at(u, HORIZON, "linear", 20) for u in range(12)]
    assert linear == [4, 5, 6, 7, 8, 9, 10, 11, 12, 9, 6, 6]
    assert turns_at(3, [[0, 2], [4, 3]], "linear", 20) == 3  # 2.75
    # without a schedule, the settings' own
    assert [turns_at(u, [], shape, 9) for u in (0, 50) for shape in ("steps", "linear")] == [9] * 4


def test_growing_horizons_equal_a_plain_loop() -> None:
    """TTI: every so many updates by a factor, or by turns, and never beyond the limit; whole turns, rounded down."""
    doubled = [turns_at(u, [[0, 10]], "multiply", 30) for u in range(5)]
    assert doubled == [10, 20, 30, 30, 30]
    for shape, every, growth in (("multiply", 3, 1.5), ("multiply", 1, 2.0), ("add", 2, 1.0), ("add", 1, 0.5)):
        turns = 4.0
        for update in range(40):
            if update and update % every == 0:
                turns = min(turns * growth if shape == "multiply" else turns + growth, 17.0)
            assert turns_at(update, [[0, 4]], shape, 17, every, growth) == math.floor(turns), (shape, update)
    assert turns_at(10**6, [[0, 1]], "multiply", 12) == 12  # no overflow


@pytest.mark.parametrize("source", ["dream", "real"])
def test_the_horizon_is_that_of_dreams_and_of_the_control(source: str) -> None:
    config = load_config([f"train.world={source}", "dream.horizon=[[0,3]]", "dream.horizon_shape=multiply"], Config)
    check(config)
    assert [longest_turns(config.dream, u) for u in range(4)] == [3, 6, 12, 12]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": "multiply", "growth": 1.0}, "a factor above 1"),
        ({"shape": "add", "growth": 0.0}, "turns above 0"),
        ({"shape": "add", "every": 0}, "horizon_every must be 1 or more"),
    ],
)
def test_growth_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    assert said in (check_horizon([[0, 4]], 12, **changes) or "")
    assert check_horizon([[0, 4]], 12, "multiply", 2, 1.5) is check_horizon([[0, 4]], 12, "add", 1, 1.0) is None
    for horizon in ([], HORIZON):
        assert "one point" in (check_horizon(horizon, 12, **{**changes, "every": 1, "growth": 2.0}) or "")


@pytest.mark.parametrize(
    ("horizon", "said"),
    [
        ([[0, 4], [3]], "a list of"),
        ([[1, 4]], "from 0"),
        ([[0, 4], [5, 6], [5, 8]], "must rise"),
        ([[0, 0]], "between 1 and dream.max_turns=12"),
        ([[0, 4], [9, 13]], "between 1 and dream.max_turns=12"),
    ],
)
def test_a_schedule_that_cannot_be(horizon: list[list[int]], said: str) -> None:
    assert said in (check_horizon(horizon, 12) or "")
    assert check_horizon(HORIZON, 12) is check_horizon([], 12) is None


def test_added_episodes_make_up_their_share() -> None:
    assert added_episodes(72, 0.1) == added_episodes(72, share_at(6, [[0, 0.2], [12, 0.0]])) == 8
    assert added_episodes(60, 0.4) == 40
    assert added_episodes(10, 0.0) == 0
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="shares"):
            added_episodes(10, share)


def test_realised_shares_count_trained_tokens() -> None:
    """A real episode without an advantage is there for what the world said, and none of its own tokens is trained."""
    made = [True, False, True, True, False]
    mixed = [
        Row([1] * 5, made, Source.DREAM, rl_weight=[0.5 * m for m in made]),
        Row([1] * 2, [False, True], Source.EXPERT, ce_weight=[0.0, 1.0]),
        Row([1] * 5, made, Source.REAL, observed=[False, True, False, False, False]),
    ]
    assert realised_shares(collate(mixed, pad=0)) == {"tokens_dream": 0.75, "tokens_expert": 0.25, "tokens_real": 0.0}
