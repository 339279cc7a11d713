"""Where real episodes are spent, by hand-worked numbers. If these fail, reality is asked where it teaches nothing."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from imagination.loop.choice import PARTS, TaskStats, choose, doubt, gap, score, thinness, variance
from imagination.settings import ChoiceWeights


def test_every_part_has_a_weight() -> None:
    assert list(PARTS) == [name for name in ChoiceWeights.__dataclass_fields__]


def test_doubt_of_one_model_is_one_minus_the_geometric_mean_of_its_confidences() -> None:
    assert doubt(TaskStats(confidences=[0.8, 0.2])) == pytest.approx(1 - 0.4)
    assert doubt(TaskStats(confidences=[1.0, 1.0])) == 0.0
    assert doubt(TaskStats(confidences=[0.0, 1.0])) == pytest.approx(1 - 1e-6), "a confidence of 0 is no infinity"
    assert doubt(TaskStats()) is None, "nothing was dreamed, which is not certainty"


def test_doubt_of_an_ensemble_is_the_share_of_the_most_that_members_can_disagree() -> None:
    known = TaskStats(confidences=[0.1, 0.1], disagreements=[math.log(4), 0.0], members=4)
    assert doubt(known) == pytest.approx(0.5), "their confidences, low by the world's own chance, say nothing"


def test_gap_is_the_distance_of_dreamed_and_real_success_in_either_direction() -> None:
    assert gap(TaskStats(dreamed=(4, 4), real=(1, 4))) == 0.75
    assert gap(TaskStats(dreamed=(0, 4), real=(1, 4))) == 0.25
    assert gap(TaskStats(dreamed=(4, 4))) is None
    assert gap(TaskStats(real=(1, 4))) is None


def test_what_is_always_or_never_solved_teaches_nothing() -> None:
    assert variance(TaskStats(dreamed=(4, 4), real=(2, 2))) == 0.0
    assert variance(TaskStats(dreamed=(0, 4))) == 0.0
    assert variance(TaskStats(dreamed=(1, 2), real=(0, 2))) == 0.75, "4 * 1/4 * 3/4"
    assert variance(TaskStats(dreamed=(2, 4))) == 1.0
    assert variance(TaskStats()) is None


def test_thinness_falls_with_the_root_of_the_logged_episodes() -> None:
    assert [thinness(TaskStats(logged=n)) for n in (0, 3, 24)] == [1.0, 0.5, 0.2]


def test_the_score_is_the_weighted_mean_of_what_is_known() -> None:
    known = TaskStats(logged=3, dreamed=(2, 4), real=(1, 4), confidences=[0.25])
    # doubt 0.75, gap 0.25, variance of 3 in 8: 4 * 3/8 * 5/8 = 0.9375, thinness 0.5
    assert score(known, ChoiceWeights(1, 1, 1, 1)) == pytest.approx((0.75 + 0.25 + 0.9375 + 0.5) / 4)
    assert score(known, ChoiceWeights(doubt=2, gap=0, variance=0, thinness=1)) == pytest.approx((1.5 + 0.5) / 3)
    new = TaskStats()
    assert score(new, ChoiceWeights(1, 1, 1, 1)) == 1.0, "of a new task only its thinness is known"
    assert score(new, ChoiceWeights(thinness=0)) == 0.0


def test_a_choice_is_a_function_of_its_seed_and_takes_no_task_twice_before_all() -> None:
    scores = {"a": 0.9, "b": 0.1, "c": 0.5}
    assert choose(scores, 5, 0.1, seed=7) == choose(scores, 5, 0.1, seed=7)
    for seed in range(20):
        chosen = choose(scores, 5, 0.1, seed)
        assert set(chosen[:3]) == set(scores)
        assert len(set(chosen[3:])) == 2


def test_tasks_are_drawn_in_proportion_to_their_scores_epsilon_aside() -> None:
    scores = {"a": 3.0, "b": 1.0, "never": 0.0}
    n = 4000
    greedy = Counter(choose(scores, 1, 0.0, seed)[0] for seed in range(n))
    assert greedy["never"] == 0
    assert greedy["a"] / n == pytest.approx(0.75, abs=0.03)
    mixed = Counter(choose(scores, 1, 0.3, seed)[0] for seed in range(n))
    assert mixed["never"] / n == pytest.approx(0.1, abs=0.02), "epsilon over three tasks"
    assert mixed["a"] / n == pytest.approx(0.7 * 0.75 + 0.1, abs=0.03)


def test_without_any_score_any_task_is_as_good() -> None:
    found = Counter(choose({"a": 0.0, "b": 0.0}, 1, 0.0, seed)[0] for seed in range(2000))
    assert found["a"] / 2000 == pytest.approx(0.5, abs=0.04)
    with pytest.raises(ValueError, match="no task"):
        choose({}, 1, 0.1, 0)
