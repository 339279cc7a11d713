"""If these fail, the audit card says that it is good to dream in a world model that is wrong, or the reverse.

Every number is worked out by hand from a handful of turns.
"""

from __future__ import annotations

import asyncio

import pytest

from policy.lm.engine import ContextFull, EngineFailure
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.scripted import Answering
from worldmodel.evaluation.calibration import expected_calibration_error
from worldmodel.evaluation.transitions import Judged, audit_metrics, judge, token_f1
from worldmodel.world_model import Prediction, PredictionInvalid


def predicted(text: str, reward: float = 0.0, end: bool = False, confidence: float = 1.0) -> Prediction:
    return Prediction(text, reward, end, confidence, outcome_confidence=1.0)


def judged(true: Turn, guess: Prediction | None) -> Judged:
    return Judged("e", 0, true, guess)


@pytest.mark.parametrize(
    ("guess", "true", "f1"),
    [
        ("you see a lamp", "you see a lamp", 1.0),
        ("lamp a see you", "you see a lamp", 1.0),  # a bag of words
        ("a a b", "a b c", 2 * 2 / 6),  # shared: one a, one b
        ("a a a a", "a", 2 * 1 / 5),  # repeating a right word does not pay
        ("taken", "opened", 0.0),
        ("", "opened", 0.0),
        ("opened", "", 0.0),
        ("", " \n", 1.0),
    ],
)
def test_token_f1(guess: str, true: str, f1: float) -> None:
    assert token_f1(guess, true) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("guess", "exact"),
    [
        (predicted(" Got it.\n", 1.0, True), True),  # white space around is no mistake
        (predicted("Got  it.", 1.0, True), False),  # within it is
        (predicted("Got it.", 0.0, True), False),
        (predicted("Got it.", 1.0, False), False),
        (None, False),
    ],
)
def test_exact_means_words_reward_and_end(guess: Prediction | None, exact: bool) -> None:
    assert judged(Turn("take it", "Got it.", 1.0, True), guess).exact is exact


def test_a_reward_is_right_to_six_decimals() -> None:
    """A third is written as 0.333333: judged by ==, a perfect model of a three-point game would never be right."""
    card = audit_metrics([judged(Turn("a", "b", 1 / 3, False), predicted("b", 0.333333))])
    assert (card["exact_match"], card["reward_precision"], card["reward_recall"]) == (1.0, 1.0, 1.0)
    card = audit_metrics([judged(Turn("a", "b", 1 / 3, False), predicted("b", 0.3334))])
    assert (card["exact_match"], card["reward_precision"], card["reward_recall"]) == (0.0, 0.0, 0.0)


def test_the_audit_card_by_hand() -> None:
    """Six turns. Three paid: one rightly told, one missed, one malformed; one predicted to pay that did not."""
    card = audit_metrics(
        [
            judged(Turn("a", "x y", 1.0, True), predicted("x y", 1.0, True, 0.9)),  # all right
            judged(Turn("b", "x y", 1.0, True), predicted("x z", 0.0, False, 0.8)),  # words half, reward, end wrong
            judged(Turn("c", "x y", 1.0, False), None),  # malformed
            judged(Turn("d", "x y", 0.0, False), predicted("x y", 1.0, False, 0.6)),  # invents a reward
            judged(Turn("e", "x y", None, False), predicted("x y", 0.0, False, 0.2)),  # no reward counts as none
            judged(Turn("f", "x y", 0.0, False), predicted("", 0.0, True, 0.1)),  # invents an end
        ]
    )
    assert card == {
        "exact_match": pytest.approx(2 / 6),
        "token_f1": pytest.approx((1 + 0.5 + 0 + 1 + 1 + 0) / 6),
        "reward_precision": pytest.approx(1 / 2),
        "reward_recall": pytest.approx(1 / 3),
        "end_accuracy": pytest.approx(3 / 6),  # a, d, e; the malformed one told no end
        # each in a bin of its own: |.9 - 1|, |.8 - 0|, |.6 - 0|, |.2 - 1|, |.1 - 0|, over five predictions
        "ece": pytest.approx((0.1 + 0.8 + 0.6 + 0.8 + 0.1) / 5),
        "invalid": 1,
        "invalid_edit": 0,
        "invalid_reasoning": 0,
        "n": 6,
    }


def test_what_was_not_measured_is_none() -> None:
    """No turn at all, or no reward anywhere: a 0 or a 1 in its place would be read as a result."""
    card = audit_metrics([])
    assert [card.pop(name) for name in ("n", "invalid", "invalid_edit", "invalid_reasoning")] == [0] * 4
    assert set(card.values()) == {None}
    card = audit_metrics([judged(Turn("a", "x", None, False), predicted("x"))])
    assert (card["exact_match"], card["reward_precision"], card["reward_recall"]) == (1.0, None, None)
    card = audit_metrics([judged(Turn("a", "x", 1.0, False), None)])
    assert (card["reward_precision"], card["reward_recall"], card["ece"]) == (None, 0.0, None)


@pytest.mark.parametrize(
    ("pairs", "bins", "ece"),
    [
        ([], 10, None),
        ([(1.0, True)], 10, 0.0),
        ([(0.0, True)], 10, 1.0),
        # one bin: mean confidence .75 against 2 of 4 right. The gaps of single pairs would give .5
        ([(0.72, True), (0.74, True), (0.76, False), (0.78, False)], 10, 0.25),
        # two bins of unequal size, weighted: 3/4 * |.1 - 1/3| + 1/4 * |.9 - 0|
        ([(0.1, True), (0.1, False), (0.1, False), (0.9, False)], 2, 0.75 * (1 / 3 - 0.1) + 0.25 * 0.9),
        # bounds: .5 belongs to the upper of two bins, so it is not averaged with .4
        ([(0.4, False), (0.5, True)], 2, (0.4 + 0.5) / 2),
    ],
)
def test_expected_calibration_error(pairs: list[tuple[float, bool]], bins: int, ece: float | None) -> None:
    assert expected_calibration_error(pairs, bins) == pytest.approx(ece)


def test_every_own_turn_is_judged_from_the_real_history() -> None:
    """From its own earlier predictions the model would be judged on a world that never was; turns copied from a log
    would be counted twice; a turn beyond the context is no prediction, a malformed one is a wrong one, and one at which
    generation broke says nothing of the model."""
    actions = ["copied", "look", "mumble", "break", "look", "overflow", "look"]
    turns = tuple(Turn(action, f"real {k}", 0.0, False) for k, action in enumerate(actions))
    episode = Trajectory("e", "t", "g", Source.REAL, "a", 0, "START", turns, StopReason.TURN_LIMIT, prefix_turns=1)
    failures = {
        "mumble": PredictionInvalid(""), "break": EngineFailure("nan"), "overflow": ContextFull("too long")
    }  # fmt: skip
    model = Answering(lambda seen, action: failures.get(action) or predicted(f"after {action}"))
    failed: list[tuple[str, int]] = []
    found = asyncio.run(judge(model, [episode], failed=failed))
    assert failed == [("e", 3)]
    assert [(j.index, j.predicted.observation if j.predicted else None) for j in found] == [
        (1, "after look"),
        (2, None),
        (4, "after look"),
    ]
    assert [j.turn for j in found] == [turns[1], turns[2], turns[4]]
    expected = [("START", tuple(f"real {i}" for i in range(k)), actions[k]) for k in range(1, 6)]
    assert model.asked == expected  # up to the one that overflowed
    assert model.released == [("audit", "e")]
