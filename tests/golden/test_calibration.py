"""If these fail, a dream is said to be surer, or less sure, than it is: weights and reports would rest on that."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_envs.trajectory import Turn
from worldmodel.calibration import Calibration, Isotonic, Score, fit_isotonic, fit_score
from worldmodel.evaluation.calibration import calibration_metrics, expected_calibration_error, fit_calibration
from worldmodel.evaluation.transitions import Judged
from worldmodel.world_model import Prediction

quick = settings(max_examples=100)
pairs = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0]), st.booleans()), min_size=1)


def test_pool_adjacent_violators_by_hand() -> None:
    """Means 0, 1, 1/2 (two at 0.6), 0 and 1: 1 at 0.4 is above 1/2, and both above 0, so three scores pool to 2/4."""
    seen = [(0.2, False), (0.4, True), (0.6, True), (0.6, False), (0.8, False), (0.9, True)]
    fit = fit_isotonic(seen)
    assert fit == Isotonic((0.2, 0.4, 0.8, 0.9), (0.0, 0.5, 0.5, 1.0))
    assert [fit(x) for x in (0.0, 0.2, 0.3, 0.5, 0.85, 1.0)] == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1])


def plain_isotonic(seen: list[tuple[float, bool]]) -> dict[float, float]:
    """The min-max formula of Ayer et al., eq. 2.2, by brute force: max over a <= x of min over b >= x of the mean."""
    scores = sorted({score for score, _ in seen})

    def mean(low: float, high: float) -> float:
        inside = [right for score, right in seen if low <= score <= high]
        return sum(inside) / len(inside)

    return {x: max(min(mean(a, b) for b in scores if b >= x) for a in scores if a <= x) for x in scores}


@quick
@given(pairs)
def test_the_fit_is_that_of_the_min_max_formula(seen: list[tuple[float, bool]]) -> None:
    fit = fit_isotonic(seen)
    for score, expected in plain_isotonic(seen).items():
        assert fit(score) == pytest.approx(expected)


@quick
@given(pairs, st.randoms(use_true_random=False), st.lists(st.floats(-0.5, 1.5), min_size=2))
def test_it_never_falls_and_order_does_not_matter(
    seen: list[tuple[float, bool]], chance: random.Random, xs: list[float]
) -> None:
    fit = fit_isotonic(seen)
    values = [fit(x) for x in sorted(xs)]
    assert values == sorted(values)
    assert all(0 <= value <= 1 for value in values)
    shuffled = list(seen)
    chance.shuffle(shuffled)
    assert fit_isotonic(shuffled) == fit


def test_knots_out_of_order_are_refused() -> None:
    for x, y in (((), ()), ((0.1, 0.2), (0.5,)), ((0.2, 0.1), (0.1, 0.2)), ((0.1, 0.2), (0.2, 0.1))):
        with pytest.raises(ValueError, match="rising"):
            Isotonic(x, y)


def plain_ece(seen: list[tuple[float, bool]]) -> float:
    """Ten bins by plain loops: |mean confidence - accuracy| in each, weighted by its share."""
    total = 0.0
    for k in range(10):
        inside = [(c, r) for c, r in seen if k / 10 <= c < (k + 1) / 10 or (k == 9 and c == 1.0)]
        if inside:
            accuracy = sum(r for _, r in inside) / len(inside)
            total += len(inside) / len(seen) * abs(sum(c for c, _ in inside) / len(inside) - accuracy)
    return total


# --- on turns ---


def judged(n: int, confidence: float, right: int, episode: str = "e", outcome: float = 0.9) -> list[Judged]:
    """``n`` turns of one confidence, the first ``right`` of which are right in all."""
    turn = Turn("look", "A hall.", 0.0, False)
    return [
        Judged(episode, k, turn, Prediction("A hall." if k < right else "A sea.", 0.0, False, confidence, outcome))
        for k in range(n)
    ]


def test_the_maps_are_of_the_whole_turn_and_of_its_outcome() -> None:
    """Words are wrong in half of the turns at 0.8; reward and end are right throughout."""
    fit = fit_calibration([*judged(10, 0.8, 5), *judged(10, 0.4, 1)], temperature=0.7)
    assert fit is not None
    assert (fit.n, fit.temperature, fit.score) == (20, 0.7, Score())
    sure, unsure = (Prediction("x", 0.0, False, c, 0.9) for c in (0.8, 0.4))
    assert (fit.probability(sure), fit.probability(unsure)) == pytest.approx((0.5, 0.1))
    assert fit.outcome_probability(sure) == 1.0
    assert fit_calibration([Judged("e", 0, Turn("a", "b", 0.0, False), None)], 1.0) is None


def test_a_wrong_reward_is_a_wrong_outcome() -> None:
    turn = Turn("take lamp", "Taken.", 1.0, True)
    right, unpaid, endless = (
        Judged("e", 0, turn, Prediction("Other words.", reward, ended, 0.9, 0.9))
        for reward, ended in ((1.0, True), (0.0, True), (1.0, False))
    )
    assert [j.outcome_right for j in (right, unpaid, endless)] == [True, False, False]
    assert not Judged("e", 0, turn, None).outcome_right


def test_errors_before_and_after_are_of_other_episodes() -> None:
    """Ten episodes, always at 0.9 and right in six of ten: each fold is told 0.6 by the others. Were a turn mapped by a
    fit on itself, memorising confidences of its own would look perfect: see the last assertion."""
    seen = [j for e in range(10) for j in judged(10, 0.9, 6, f"e{e}")]
    found = calibration_metrics(seen)
    assert found["ece_before"] == pytest.approx(0.3) == pytest.approx(plain_ece([(0.9, j.exact) for j in seen]))
    assert found["ece_after"] == pytest.approx(0.0)
    assert (found["outcome_ece_before"], found["outcome_ece_after"]) == pytest.approx((0.1, 0.0))
    assert (found["right"], found["n"]) == (pytest.approx(0.6), 100)
    chance = random.Random(0)
    noise = [j for e in range(60) for j in judged(1, chance.random(), chance.randrange(2), f"e{e}")]
    fit = fit_calibration(noise, 1.0)
    assert fit is not None
    on_itself = expected_calibration_error([(fit.probability(j.predicted), j.exact) for j in noise if j.predicted])
    across = calibration_metrics(noise)["ece_after"]
    assert on_itself is not None
    assert across is not None
    assert on_itself < 0.02 < 0.05 < across
    assert calibration_metrics([])["ece_after"] is None


@quick
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1))
def test_the_calibration_error_is_that_of_a_plain_loop(seen: list[tuple[float, bool]]) -> None:
    safe = [(c, r) for c, r in seen if all(abs(c - k / 10) > 1e-9 for k in range(1, 10))]  # a bin's edge rounds
    if safe:
        assert expected_calibration_error(safe) == pytest.approx(plain_ece(safe))


# --- disagreement ---


def test_disagreement_counts_where_it_tells_more() -> None:
    """Equal probabilities; turns on which the members disagree are wrong."""
    seen = [(0.9, d, d < 0.5) for d in (0.1, 0.2, 0.3, 0.6, 0.8)] * 8
    score = fit_score(seen)
    assert score.unsure > 0
    assert score(0.9, 0.1) > score(0.9, 0.4) > score(0.9, 0.8)
    assert score(0.5, 0.3) <= score(0.95, 0.3)
    assert 0 <= score(1e-300, 50.0) <= score(1.0, 0.0) <= 1


@pytest.mark.parametrize(
    "seen",
    [
        [(0.9, None, True), (0.2, 0.4, False)],  # not known throughout
        [(0.9, 0.3, True), (0.2, 0.3, False)],  # the same everywhere
        [(0.5, 0.9, True), (0.5, 0.1, False)] * 5,  # it goes with being right
    ],
)
def test_otherwise_the_probability_alone_orders(seen: list[tuple[float, float | None, bool]]) -> None:
    score = fit_score(seen)
    assert score == Score()
    assert score(0.37, 0.9) == 0.37


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    assert Calibration.load(tmp_path) is None
    fit = Calibration(Score(0.5, 1.5), Isotonic((0.1, 1 / 3), (0.0, 2 / 3)), Isotonic((0.5,), (0.25,)), 1.0, 7)
    fit.save(tmp_path)
    assert Calibration.load(tmp_path) == fit
