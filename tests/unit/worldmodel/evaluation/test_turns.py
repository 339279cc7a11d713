"""What the audit says of single turns, from hand-made predictions. If these fail, the page shows wrong numbers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.lm.engine import ContextFull, EngineFailure
from real_envs.trajectory import NO_ANSWER, Source, StopReason, Trajectory, Turn
from tests.support.scripted import Answering
from worldmodel.evaluation.calibration import reliability
from worldmodel.evaluation.dreams import drift_metrics, horizon, roll
from worldmodel.evaluation.failures import failure_groups, group, known_answers, refusal_metrics
from worldmodel.evaluation.sensitivity import action_pairs, judge_pairs, sensitivity_metrics
from worldmodel.evaluation.transitions import (
    Judged,
    change_size,
    changed_lines,
    in_new_situations,
    judge,
    outcome_metrics,
    transition_metrics,
)
from worldmodel.rules.refusals import Refusals, learn_refusals, pattern
from worldmodel.world_model import Prediction, PredictionInvalid


def says(text: str, reward: float = 0.0, end: bool = False, sure: float = 1.0, outcome: float = 1.0) -> Prediction:
    return Prediction(text, reward, end, confidence=sure, outcome_confidence=outcome)


def episode(name: str, *turns: tuple[str, str] | Turn, task: str = "t") -> Trajectory:
    made = tuple(t if isinstance(t, Turn) else Turn(*t, 0.0, False) for t in turns)
    return Trajectory(name, task, task, Source.REAL, "a", 0, "START", made, StopReason.TURN_LIMIT)


# --- size of the change ---


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("a\nb", "a\nb", 0),
        ("a\nb", " a \n\nb", 0),  # white space is no change
        ("a\nb", "b\na", 0),  # nor is the order
        ("a\nb", "a\nc", 2),  # one gone, one new
        ("a", "a\na", 1),  # as bags: said twice is said once more
        ("", "a\nb\nc", 3),
    ],
)
def test_changed_lines(before: str, after: str, lines: int) -> None:
    assert changed_lines(before, after) == lines


@given(st.text("ab\n", max_size=12), st.text("ab\n", max_size=12))
def test_a_change_and_its_way_back_are_as_large(a: str, b: str) -> None:
    assert changed_lines(a, b) == changed_lines(b, a)
    assert changed_lines(a, a) == 0


def test_exact_match_by_turn_and_by_size_of_the_change() -> None:
    def one(k: int, before: str, after: str, right: bool) -> Judged:
        guess = says(after if right else "?")
        return Judged(f"e{k}", k % 2, Turn("x", after, 0.0, False), guess, "t", before)

    judged = [
        one(0, "a", "a", True),
        one(1, "a", "a", True),
        one(2, "a", "b", False),
        one(3, "a", "b", True),
        one(4, "", "\n".join(map(str, range(9))), False),
    ]
    assert [change_size(j) for j in judged] == ["0", "0", "2", "2", "8+"]
    found = transition_metrics(judged, seed=0)
    assert found["exact"]["value"] == found["text"]["value"] == pytest.approx(3 / 5)
    assert {k: (e["value"], e["n"]) for k, e in found["by_changes"].items()} == {
        "0": (1.0, 2),
        "2": (0.5, 2),
        "8+": (0.0, 1),
    }
    assert {k: (e["value"], e["n"]) for k, e in found["by_step"].items()} == {
        "0": (pytest.approx(1 / 3), 3),
        "1": (1.0, 2),
    }
    assert (found["malformed"]["value"], found["n"], found["episodes"]) == (0.0, 5, 5)


def test_judging_knows_what_was_seen_before() -> None:
    """The size of the change is that against the last observation, or against the start for the first turn."""
    found = asyncio.run(judge(Answering(lambda seen, action: says("?")), [episode("e", ("a", "A"), ("b", "B"))]))
    assert [(j.before, j.task_id) for j in found] == [("START", "t"), ("A", "t")]


def test_what_the_log_has_is_not_new() -> None:
    """A turn is known by its task and all actions up to its own, whoever played it; another task's are others."""
    log = [episode("log", ("a", "A"), ("b", "B")), episode("far", ("c", "C"), task="u")]
    held = [episode("again", ("a", "A"), ("b", "B"), ("b", "-")), episode("other", ("c", "-"), ("b", "B"))]
    judged = asyncio.run(judge(Answering(lambda seen, action: says("?")), held))
    new = in_new_situations(judged, held, log)
    assert [(j.trajectory_id, j.index) for j in new] == [("again", 2), ("other", 0), ("other", 1)]
    assert in_new_situations(judged, held, held) == []
    assert in_new_situations(judged, held, []) == judged


# --- rewards, ends, calibration ---


def test_outcomes_by_hand() -> None:
    """Pays twice, once rightly; two were paid, one of them missed by a malformed answer; one end of two is told."""
    judged = [
        Judged("e0", 0, Turn("a", "x", 1.0, True), says("x", 1.0, True, 0.9, 0.8), "t"),
        Judged("e1", 0, Turn("b", "x", 0.0, False), says("x", 1.0, False, 0.9, 0.6), "t"),
        Judged("e2", 0, Turn("c", "x", 1.0, True), None, "u"),
        Judged("e3", 0, Turn("d", "x", 0.0, False), says("y", 0.0, False, 0.3, 1.0), "u"),
    ]
    found = outcome_metrics(judged, seed=0)
    reward, end = found["reward"], found["end"]
    assert [(reward[k]["value"], reward[k]["n"]) for k in ("precision", "recall", "accuracy")] == [
        (0.5, 2),
        (0.5, 2),
        (0.5, 4),
    ]
    assert [(end[k]["value"], end[k]["n"]) for k in ("precision", "recall", "accuracy")] == [
        (1.0, 1),
        (0.5, 2),
        (0.75, 4),
    ]
    assert reward["by_task"]["t"]["precision"]["value"] == 0.5
    assert reward["by_task"]["u"]["precision"] == {"value": None, "n": 0, "ci95": None}
    assert reward["by_task"]["u"]["recall"]["value"] == 0.0
    calibration = found["calibration"]
    # two at .9 of which one is right, one at .3 that is wrong: (|1.8 - 1| + |.3 - 0|) / 3
    assert calibration["whole"]["ece"]["value"] == pytest.approx((0.8 + 0.3) / 3)
    assert (calibration["whole"]["confidence"], calibration["whole"]["right"]) == (pytest.approx(0.7), 1 / 3)
    # .8 right, .6 wrong, 1.0 right (its outcome is, whatever its words)
    assert calibration["outcome"]["ece"]["value"] == pytest.approx((0.2 + 0.6 + 0.0) / 3)
    assert calibration["deciding"]["ece"]["value"] == pytest.approx((0.2 + 0.6) / 2)
    assert calibration["deciding"]["ece"]["n"] == 2


def test_reliability_bins() -> None:
    assert reliability([(0.72, True), (0.78, False), (1.0, True)]) == [
        {"low": 0.7, "high": 0.8, "n": 2, "confidence": 0.75, "right": 0.5},
        {"low": 0.9, "high": 1.0, "n": 1, "confidence": 1.0, "right": 1.0},
    ]


# --- refusals ---


def attic(actions: Sequence[str]) -> list[tuple[str, str]]:
    """A small world: a door that must be opened before one can leave, and a lamp."""
    opened, inside, lamp, found = False, True, False, []
    for action in actions:
        verb = action.split()[0]
        if verb not in ("open", "go", "take", "look"):
            said = "No such verb."
        elif action == "open door":
            said = ("You open the door." if not opened else "That's already open.") if inside else "You see no door."
            opened = opened or inside
        elif action == "go east":
            said = "You can't go that way."
            if opened and inside:
                inside, said = False, "-= Hall =-"
        elif action == "take lamp":
            said = "You already have that." if lamp else "You take the lamp."
            lamp = True
        else:
            said = f"{'Attic' if inside else 'Hall'}, the door {'open' if opened else 'closed'}, lamp {lamp}."
        found.append((action, said))
    return found


WORDS = ("open door", "go east", "take lamp", "look", "jump up", "xyzzy", "plugh now")
ATTIC = [episode(" ".join(way), *attic(way)) for way in itertools.product(WORDS, repeat=4)]


def test_refusals_are_learned_from_what_follows() -> None:
    """What changed nothing although it wanted to, and nothing else: looking around is no refusal."""
    refusals = learn_refusals(ATTIC)
    said = {(turn.action, turn.observation) for t in ATTIC for turn in t.turns}
    refused = {observation for action, observation in said if refusals.refuses(action, observation)}
    assert refused == {
        "No such verb.",
        "That's already open.",
        "You can't go that way.",
        "You already have that.",
        "You see no door.",
    }
    assert not refusals.refuses("open chest", "You open the chest.")
    assert refusals.refuses("open chest", "That's already open.")  # of anything


def test_a_call_with_other_arguments_is_the_same_verb() -> None:
    """That nothing is found is said to three searches, which only look."""
    searches = [(f"find(name='{name}')", '{"matches": []}') for name in ("oak", "elm", "ash", "fir")]
    log = [episode(str(turns), *turns) for turns in itertools.permutations(searches)]
    assert learn_refusals(log).patterns == frozenset()


def test_one_task_may_begin_in_several_ways() -> None:
    """Else what follows from an action would be read off another beginning; a last action may have no answer."""
    cut = Turn("take lamp", "", 0.0, False, {NO_ANSWER: 1.0})
    open_ = [episode(" ".join(way), *attic(("open door", *way))[1:]) for way in itertools.product(WORDS, repeat=3)]
    open_ = [replace(t, start="OPEN") for t in open_]
    cuts = [replace(t, turns=(*t.turns[:k], cut)) for t in ATTIC for k in range(4)]
    refusals = learn_refusals([*cuts, *(t for pair in zip(ATTIC, open_, strict=False) for t in pair), *ATTIC])
    assert refusals == learn_refusals(ATTIC)


def test_a_log_without_shared_beginnings_teaches_no_refusal() -> None:
    assert learn_refusals([episode("a", ("go east", "You can't go that way."))]).patterns == frozenset()


def test_what_the_environment_calls_refused_is_believed() -> None:
    turn = Turn("quit", "No.", 0.0, False, {"refused": "meta-command"})
    assert learn_refusals([episode("a", turn)]).refuses("restart", "No.")


def test_patterns_mask_the_words_of_the_action() -> None:
    assert pattern("open red chest", "The red chest is locked.") == "The _ is locked."
    assert pattern("go", "You can't go that way.") == "You can't _ that way."


def test_words_of_a_garbled_action_do_not_hide_a_refusal() -> None:
    refusals = Refusals(frozenset({"You can't see any such thing.", "The _ is locked."}))
    assert refusals.refuses("go you can see a locker", "You can't see any such thing.")
    assert refusals.refuses("open safe", "The safe is locked.")
    assert not refusals.refuses("open safe", "The gate is locked.")


NO = Refusals(frozenset({"No."}))


def test_refusal_metrics() -> None:
    refused, done = Turn("a", "No.", 0.0, False), Turn("b", "Done.", 0.0, False)
    judged = [
        Judged("e0", 0, refused, says("No."), "t"),
        Judged("e1", 0, refused, says("Done."), "t"),
        Judged("e2", 0, refused, None, "t"),
        Judged("e3", 0, done, says("No."), "t"),
        Judged("e4", 0, done, says("Something else."), "t"),
    ]
    found = refusal_metrics(judged, NO)
    assert (found["refused_too"]["value"], found["refused_too"]["n"]) == (pytest.approx(1 / 3), 3)
    assert found["refused_in_its_words"]["value"] == pytest.approx(1 / 3)
    assert (found["accepted_too"]["value"], found["accepted_too"]["n"]) == (0.5, 2)


# --- action sensitivity ---

LOG = [episode("l0", ("a", "X"), ("z", "Z")), episode("l1", ("b", "Y"))]
FRESH = [episode("f0", ("c", "X"))]


def test_pairs_have_one_state_and_one_fresh_side() -> None:
    """(a, c) answers alike, (b, c) differently; (a, b) was fitted to on both sides; z has no other beside it."""
    found = {(one.action, other.action, same) for _, _, one, other, same in action_pairs(LOG, FRESH, 0, 10)}
    assert found == {("a", "c", True), ("b", "c", False)}
    assert action_pairs(LOG, [], 0, 10) == []
    assert action_pairs(LOG, [replace(FRESH[0], start="ELSEWHERE")], 0, 10) == [], "another state"
    cut = episode("cut", Turn("c", "", 0.0, False, {NO_ANSWER: 1.0}))
    assert action_pairs(LOG, [cut], 0, 10) == [], "nobody answered"


@pytest.mark.parametrize(
    ("answer", "sensitivity", "specificity"),
    [
        (lambda seen, action: says("X"), 0.0, 1.0),  # does not listen
        (lambda seen, action: says(action), 1.0, 0.0),  # listens to what does not matter
        (lambda seen, action: says({"a": "X", "b": "Y", "c": "X"}[action]), 1.0, 1.0),
        (lambda seen, action: PredictionInvalid("") if action == "c" else says(action), 0.0, 0.0),
        (lambda seen, action: says("X", reward=float(action == "b")), 1.0, 1.0),  # a reward is an answer, too
    ],
)
def test_sensitivity(
    answer: Callable[[tuple[str, ...], str], Prediction | Exception], sensitivity: float, specificity: float
) -> None:
    model = Answering(answer)
    pairs = asyncio.run(judge_pairs(model, action_pairs(LOG, FRESH, 0, 10)))
    found = sensitivity_metrics(pairs)
    assert (found["sensitivity"]["value"], found["sensitivity"]["n"]) == (sensitivity, 1)
    assert (found["specificity"]["value"], found["specificity"]["n"]) == (specificity, 1)
    assert len(model.asked) == 3  # c is in two pairs and is asked once


# --- drift ---


def test_the_models_own_words_are_fed_back() -> None:
    """One wrong word at turn 2 is in the history of turns 3 and 4, whose right words no longer follow from it."""
    real = episode("e", ("a", "A"), ("b", "B"), ("c", "C"), ("d", "D"))

    def answer(seen: tuple[str, ...], action: str) -> Prediction:
        if action == "b":
            return says("wrong")
        return says(action.upper() if "wrong" not in seen else "lost")

    model = Answering(answer)
    (rolled,) = asyncio.run(roll(model, [real], turns=9))
    assert rolled.right == (True, False, False, False)
    assert rolled.parts_at == 1
    assert model.asked[2] == ("START", ("A", "wrong"), "c")


def test_a_dream_that_ends_or_breaks_stays_wrong() -> None:
    real = episode("e", ("a", "A"), ("b", "B"), ("c", "C"))
    model = Answering(lambda seen, action: says(action.upper(), end=action == "b"))
    (ended,) = asyncio.run(roll(model, [real], turns=9))
    assert (ended.right, len(model.asked)) == ((True, False, False), 2)
    broken = Answering(lambda seen, action: PredictionInvalid("") if action == "b" else says(action.upper()))
    assert asyncio.run(roll(broken, [real], turns=9))[0].right == (True, False, False)
    for ours in (ContextFull(""), EngineFailure("")):  # not the model's fault
        cut = Answering(lambda seen, action, error=ours: error if action == "b" else says(action.upper()))
        assert asyncio.run(roll(cut, [real], turns=9))[0].right == (True,)


def test_drift_by_hand() -> None:
    """Three dreams of 3, 3 and 1 turns: one true to the end, one wrong at turn 2 only, one wrong at once."""
    episodes = [
        episode("a", ("1", "A"), ("2", "B"), ("3", "C")),
        episode("b", ("1", "A"), ("2x", "B"), ("3", "C")),
        episode("c", ("1x", "A")),
    ]
    right = {"1": "A", "2": "B", "3": "C"}
    rolled = asyncio.run(roll(Answering(lambda seen, action: says(right.get(action, "?"))), episodes, turns=9))
    found = drift_metrics(rolled)
    assert {k: (e["value"], e["n"]) for k, e in found["exact_at"].items()} == {
        "1": (pytest.approx(2 / 3), 3),
        "2": (0.5, 2),
        "3": (1.0, 2),  # right again by chance, or because the world forgives
    }
    assert {k: e["value"] for k, e in found["true_until"].items()} == {"1": pytest.approx(2 / 3), "2": 0.5, "3": 0.5}
    assert (found["first_divergence"], found["never"], found["n"]) == ({"0": 1, "1": 1}, 1, 3)
    assert horizon(found, 0.6, 1) == 1
    assert horizon(found, 0.5, 1) == 3
    assert horizon(found, 0.5, 3) == 1  # two episodes decide nothing
    assert horizon(found, 0.9, 1) == 0


# --- failures ---


def test_every_wrong_prediction_has_one_group() -> None:
    log = [episode("l", ("look", "Attic."), ("go east", "Hall."), ("a", "No."))]
    known = known_answers(log)
    real, refused = Turn("x", "Attic.", 0.0, False), Turn("x", "No.", 0.0, False)
    cases = [
        (real, says("Attic."), None),
        (real, None, "malformed"),
        (real, says("Attic.", reward=1.0), "reward"),
        (real, says("Attic.", end=True), "end"),
        (real, says("No."), "invented_refusal"),
        (refused, says("Hall."), "missed_refusal"),
        (real, says("Hall."), "other_state"),
        (real, says("A hall of."), "unseen_words"),
    ]
    judged = [Judged("e", k, turn, guess, "t") for k, (turn, guess, _) in enumerate(cases)]
    assert [group(j, NO, known) for j in judged] == [name for _, _, name in cases]
    two = Refusals(frozenset({"No.", "Never."}))
    assert group(Judged("e", 0, refused, says("Never."), "t"), two, known) == "other_refusal"
    played = episode("e", *[("x", "Attic.")] * len(cases))
    found = failure_groups(judged, [played], NO, known)
    assert (found["n"], found["wrong"], found["wrong_reward"]) == (8, 7, 2)  # the malformed one paid nothing right
    assert sum(g["n"] for g in found["groups"]) == 7
    example = next(g for g in found["groups"] if g["group"] == "other_state")["examples"][0]
    assert example["actions_before"] == ["x"] * 6
    assert (example["predicted"]["observation"], example["real"]["observation"]) == ("Hall.", "Attic.")


def test_the_surest_mistakes_come_first() -> None:
    judged = [
        Judged("e", k, Turn(f"a{k}", "Attic.", 0.0, False), says("?", sure=sure), "t")
        for k, sure in enumerate((0.2, 0.99, 0.5, 0.7))
    ]
    found = failure_groups(judged, [episode("e", *[("x", "Attic.")] * 4)], NO, set(), examples=2)
    assert [e["action"] for e in found["groups"][0]["examples"]] == ["a1", "a3"]
