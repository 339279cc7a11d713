"""If these fail, a batch holds other shares of dreamed, real and expert episodes than its settings say."""

from __future__ import annotations

from typing import Any

import pytest

from imagination.dreaming.mixture import added_episodes, check_share, most, share_at
from imagination.learning.collector import real_groups
from imagination.learning.played import measure_played
from imagination.settings import Config, TrainSettings, UserError
from imagination.settings.compose import load_config
from imagination.stages.check_train import check
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

POINTS = [[2, 0.5], [6, 0.1], [8, 0.1], [9, 0.9]]


def test_a_share_goes_in_straight_lines_from_point_to_point() -> None:
    by_hand = [0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.9, 0.9]
    assert [share_at(u, POINTS) for u in range(11)] == pytest.approx(by_hand)
    assert share_at(3, 0.25) == share_at(3, [[0, 0.25]]) == 0.25
    assert (most(POINTS), most(0.25)) == (0.9, 0.25)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 2), (0.5, 3), (0.99, 5), ([[0, 0.5], [12, 0.0]], 3)])
def test_groups_are_dealt_to_both_worlds_and_one_stays_in_the_dream(share: Any, expected: int) -> None:
    assert real_groups(0, TrainSettings(groups=6, real_share=share)) == expected
    assert real_groups(12, TrainSettings(groups=6, real_share=[[0, 0.5], [12, 0.0]])) == 0


def test_experts_come_on_top_of_what_both_worlds_played() -> None:
    assert added_episodes(72, 0.1) == 8
    assert added_episodes(72, share_at(6, [[0, 0.2], [12, 0.0]])) == 8


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, "lie in"),
        (-0.1, "lie in"),
        ([[0, 0.5], [4, 1.0]], "lie in"),
        ([], "a number or a list"),
        ([[0, 0.5, 1]], "a number or a list"),
        ([[4, 0.5], [4, 0.2]], "must rise"),
    ],
)
def test_a_share_that_cannot_be_is_told(share: Any, said: str) -> None:
    wrong = check_share("train.real_share", share)
    assert wrong is not None
    assert wrong.startswith(("train.real_share", "the updates of train.real_share"))
    assert said in wrong
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
    with pytest.raises(UserError, match=said):
        check(load_config(overrides, Config))


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
