"""If these fail, the tripwires look at something else than what the dreams did."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.evaluation.monitors.rollout_stats import ActionStats as Speech
from imagination.evaluation.monitors.rollout_stats import LogReference, effective, loops, measure, path
from imagination.evaluation.monitors.word_drift import WordReference, jensen_shannon, words
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.rules.mine import mine_rules

Said = tuple[str, float]


def episode(
    group: str, *said: Said, task: str = "t", prefix: int = 0, stop: StopReason = StopReason.TERMINATED, **more: Any
) -> Trajectory:
    turns = tuple(Turn(action, f"After {action}.", reward, False) for action, reward in said)
    return Trajectory(
        f"{group}/{said}", task, group, Source.DREAM, more.get("agent", "policy"), 0, "S", turns, stop, prefix
    )


# the log solves t in three turns, and knows that nothing else pays; u pays a half twice
LOG = [
    episode("1", ("go east", 0.0), ("open box", 0.0), ("take Lamp", 1.0), agent="expert"),
    episode("2", ("look", 0.0), ("go east", 0.0), ("take folder", 0.0), agent="noisy"),
    episode("3", ("wave", 0.5), ("wave", 0.5), task="u", agent="noisy"),
] * 5
REFERENCE = LogReference(LOG)


def measured(*played: Trajectory, **more: Any) -> tuple[Any, dict[str, str]]:
    return measure(0, played, REFERENCE, **({"short": 0.7} | more))


def test_what_the_log_knows() -> None:
    assert REFERENCE.paying == {("t", "take lamp"), ("u", "wave")}
    assert REFERENCE.rewards == {0.0, 0.5, 1.0}
    assert REFERENCE.shortest == {"t": 3, "u": 2}
    said = (("Look", 0.0), ("go  east", 0.0), ("take folder", 0.0))
    assert [REFERENCE.best[key] for key in path(episode("d", *said))] == [0.0, 0.0, 0.0]
    assert not {*path(episode("d", *said, task="u"))} & REFERENCE.best.keys()
    assert not {*path(replace(episode("d", *said), start="Another hall"))} & REFERENCE.best.keys()
    assert [REFERENCE.usual(r) for r in (1.0, 0.50004, 0.25, -1.0)] == [True, True, False, False]


def test_an_honest_dream_by_hand() -> None:
    """Two groups; capitals and spaces are no other action. One group starts in the middle, and its log part counts
    neither as turns nor as pay."""
    found, examples = measured(
        episode("a", ("go east", 0.0), ("open box", 0.0), ("take  lamp", 1.0)),
        episode("a", ("look", 0.0), ("look", 0.0), stop=StopReason.TURN_LIMIT),
        episode("b", ("go east", 0.0), ("open box", 0.0), ("take lamp", 1.0), prefix=2),
    )
    assert (found.groups, found.episodes, found.solved, found.turns) == (2, 3, 2, 6)
    assert (found.paid, found.claimed, found.contradicted, found.unseen, found.strange) == (2, 2, 0, 0, 0)
    assert (found.start_groups, found.start_episodes, found.start_solved) == (1, 2, 1)
    assert (found.solved_groups, found.short, found.looping, found.rejected) == (1, 0, 0, 0)
    assert (found.habits, examples) == ({}, {})


def test_pay_that_the_log_contradicts() -> None:
    """The same three actions from the beginning of the same task earned nothing in the log. In another order, or in
    another task, nobody knows."""
    same = (("look", 0.0), ("go east", 0.0), ("take folder", 1.0))
    found, examples = measured(
        episode("a", *same),
        episode("b", *same, prefix=2),  # also where the dream began in the middle
        episode("c", ("go east", 0.0), ("look", 0.0), ("take folder", 1.0)),
        episode("d", *same, task="u"),
    )
    assert (found.paid, found.claimed, found.contradicted, found.unseen) == (4, 2, 2, 4)
    assert examples["contradicted"] == "take folder (t)"
    # of the action itself, and of its words only those that no paying action of the task has
    assert found.habits == {"take folder": 4, "folder": 4, "take": 1}


def test_of_a_task_that_was_only_reset_the_log_knows_no_pay() -> None:
    found, _ = measured(*(episode(str(k), ("go east", 0.0), ("take lamp", 1.0), task="only reset") for k in range(4)))
    assert (found.groups, found.solved, found.paid, found.unseen, found.habits) == (4, 4, 0, 0, {})


def test_a_log_of_chance_contradicts_nobody() -> None:
    """The same bet won and lost; what was lost once may be won in a dream."""
    lucky = LogReference([episode("1", ("bet", 0.0)), episode("2", ("bet", 1.0)), episode("3", ("bet", 1.0))])
    assert lucky.blind == ["contradicted", "short"]
    found, _ = measure(0, [episode("a", ("bet", 1.0))], lucky, short=0.7)
    assert (found.paid, found.claimed, found.contradicted) == (1, 0, 0)
    rare = LogReference([*[episode(str(k), (f"bet {k % 99}", 0.0)) for k in range(198)], episode("x", ("bet 1", 1.0))])
    assert "contradicted" not in rare.blind
    found, _ = measure(0, [episode("a", ("bet 1", 1.0)), episode("b", ("bet 2", 1.0))], rare, short=0.7)
    assert (found.claimed, found.contradicted) == (2, 1)  # what it paid at best is no contradiction


def test_where_new_actions_pay_all_the_time_a_new_one_is_no_sign() -> None:
    """Free answers: every episode of the log was paid for words of its own. Said so, not counted."""
    free = LogReference([episode(str(k), (f"answer {k}", 1.0)) for k in range(20)])
    assert free.blind == ["favourite", "unseen", "contradicted"]  # nothing was done twice either
    few = LogReference([episode(str(k), ("answer", 1.0)) for k in range(4)])
    assert (few.blind, few.shortest) == (["short"], {})  # four solutions do not say what is short
    found, examples = measure(0, [episode("a", ("answer x", 1.0))], free, short=0.7)
    assert (found.paid, found.unseen, found.habits, examples) == (1, 0, {}, {})
    assert REFERENCE.blind == []
    assert LogReference([episode("1", ("look", 0.0))] * 2).blind == ["favourite", "unseen", "short"]
    lazy = LogReference([*LOG[:6], *[episode(str(k), *[("wait", 0.0)] * 3) for k in range(6)]])
    assert "loops" in lazy.blind
    found, _ = measure(0, [episode("a", *[("wait", 0.0)] * 3)], lazy, short=0.7)
    assert found.looping == 0


def test_strange_amounts_and_totals() -> None:
    found, _ = measured(
        episode("a", ("take lamp", 0.25)),
        episode("b", ("take lamp", 1.0), ("take lamp", 1.0)),  # usual amounts, but more in total than ever
        episode("c", ("take lamp", 0.5)),
    )
    assert found.strange == 2


def test_a_scale_of_rewards_is_known_by_its_ends() -> None:
    scale = LogReference([episode(str(k), ("a", k / 100)) for k in range(50)])
    assert scale.usual(0.155)
    assert not scale.usual(0.6)


def test_solutions_shorter_than_any() -> None:
    """0.7 times three turns is 2.1. Only from the beginning of a task, and by the half of a group's solutions."""
    at_once, honest = (("take lamp", 1.0),), (("go east", 0.0), ("open box", 0.0), ("take lamp", 1.0))
    found, _ = measured(
        episode("a", *at_once),
        episode("b", *honest),
        episode("c", *honest, prefix=2),
        episode("d", *at_once),
        episode("d", *honest),
        episode("e", *at_once, task="never solved in the log"),
        episode("f", *at_once),
        episode("f", *honest),
        episode("f", *honest),
    )
    assert (found.solved_groups, found.short) == (4, 2)


def test_what_was_rejected() -> None:
    """A malformed prediction has no turn, but was asked for; an engine that broke says nothing."""
    marked = Trajectory(
        "m", "t", "b", Source.DREAM, "policy", 0, "S",
        (Turn("look", "x", 0.0, False, {"doubted": True}), Turn("look", "x", 0.0, False)), StopReason.TURN_LIMIT,
    )  # fmt: skip
    found, _ = measured(
        episode("a", ("look", 0.0), ("go east", 0.0), stop=StopReason.UNSURE),
        episode("a", ("look", 0.0), stop=StopReason.PREDICTION_INVALID),
        episode("a", ("look", 0.0), stop=StopReason.ENGINE_FAILED),
        marked,
    )
    assert (found.turns, found.rejected) == (2 + 1 + 1 + 2, 1 + 1 + 1)
    assert (found.groups, found.episodes) == (2, 2)


def test_pay_that_the_guard_withheld_contradicts_nothing() -> None:
    """Ringing pays at once, as the rules know; a dream in which it pays nothing is false, or was doubted."""

    def rung(k: int, reward: float, **info: bool) -> Trajectory:
        turns = tuple(Turn(*steps, False) for steps in (("wait", "Time passes.", 0.0),) * (k % 3))
        ring = Turn("ring bell", "It rings.", reward, False, info)
        return replace(episode(str(k), task=str(k)), id=str(k), turns=(*turns, ring))

    rules = mine_rules([rung(k, 1.0) for k in range(800)])

    def inconsistent(*dreams: Trajectory) -> int:
        return int(measured(*dreams, rules=rules)[0].inconsistent)

    assert inconsistent(rung(1, 1.0)) == 0
    assert inconsistent(rung(1, 0.0)) == 1
    assert inconsistent(rung(1, 0.0, doubted=True)) == 0


def test_nothing_played_is_nothing_measured() -> None:
    found, _ = measured(episode("a", stop=StopReason.ENGINE_FAILED))
    assert (found.groups, found.turns, found.drift_actions) == (0, 0, 0.0)


# --- loops ---


@pytest.mark.parametrize(
    ("said", "looping"),
    [
        ("a a a", True),
        ("a a b a", False),
        ("x a b a b a b", True),
        ("a b a b a", False),
        ("a b c a b c a b c y", True),
        ("a b c d a b c d a b c d", False),  # longer than is looked for
        ("", False),
    ],
)
def test_loops_by_hand(said: str, looping: bool) -> None:
    assert loops([Turn(action, "same", 0.0, False) for action in said.split()]) is looping


def test_the_same_action_with_other_answers_is_no_loop() -> None:
    assert not loops([Turn("push", f"{k} to go", 0.0, False) for k in range(5)])


# --- words ---


def test_jensen_shannon_by_hand() -> None:
    """(1, 0) and (1/2, 1/2): the mean is (3/4, 1/4), whose entropy is 0.811; minus half a bit."""
    p, q = np.array([4.0, 0.0]), np.array([1.0, 1.0])
    mean = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert jensen_shannon(p, q) == pytest.approx(mean - 0.5)
    assert jensen_shannon(q, 3 * q) == 0.0
    assert jensen_shannon(np.array([1.0, 0.0]), np.array([0.0, 7.0])) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="empty"):
        jensen_shannon(p, 0 * q)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_jensen_shannon_is_symmetric_and_at_most_a_bit(pairs: list[tuple[int, int]]) -> None:
    p, q = (np.array([float(pair[side]) for pair in pairs]) for side in (0, 1))
    if p.sum() and q.sum():
        found = jensen_shannon(p, q)
        assert found == pytest.approx(jensen_shannon(q, p))
        assert 0 <= found <= 1 + 1e-12


def test_distance_from_the_log_and_words_it_does_not_know() -> None:
    reference = WordReference(LOG, lambda turn: turn.action)
    every = [turn for t in LOG for turn in t.turns]
    assert reference.distance(every) == pytest.approx(0.0, abs=1e-12)
    assert reference.distance([Turn("xyzzy", "", 0.0, False)]) == pytest.approx(1.0)
    assert reference.distance([]) is None
    assert WordReference([], lambda turn: turn.action).distance(every) is None
    assert words("Don't go East, now!") == ["don", "'", "t", "go", "east", ",", "now", "!"]


def test_the_bound_is_as_far_as_any_agent_of_the_log() -> None:
    """An agent of the log must stay within it however rare it is; one who says but one word must not."""
    rare = [episode(str(k), ("sing", 0.0), agent="singer") for k in range(2)]
    common = [episode(str(k), ("go east", 0.0), ("look", 0.0), ("go west", 0.0), agent="walker") for k in range(98)]
    reference = WordReference([*rare, *common], lambda turn: turn.action)
    bound = reference.bound(groups=3, group_size=4, length=3)
    assert bound is not None
    of_singer = reference.distance(rare[0].turns)
    of_silent = reference.distance([Turn("xyzzy", "", 0.0, False)])
    assert of_singer is not None
    assert of_silent is not None
    assert of_singer <= bound < of_silent
    assert bound == WordReference([*rare, *common], lambda turn: turn.action).bound(3, 4, 3)
    without = WordReference(common, lambda turn: turn.action).bound(3, 4, 3)
    assert without is not None
    assert without < 0.05 < bound
    assert WordReference([], lambda turn: turn.action).bound(3, 4, 3) is None


# --- silence ---


def acting(*actions: str, answer: str = "", agent: str = "expert") -> Trajectory:
    turns = tuple(
        Turn(a, answer or f"After {k}.", 1.0 if k + 1 == len(actions) else 0.0, False) for k, a in enumerate(actions)
    )
    return Trajectory("e", "t", "g", Source.REAL, agent, 0, "S", turns, StopReason.TERMINATED)


@pytest.mark.parametrize(
    ("log", "said", "answer", "silent"),
    [
        (["go east", "take lamp"], ["", "take lamp"], "", True),  # one of two says nothing
        (["go east", "take lamp"], ["  ", "take lamp", "go east"], "", False),
        (["go east", "take lamp"], ["take lamp", "Take  lamp"], "Taken.", True),  # again, and nothing new
        (["go east", "take lamp"], ["go east", "go east", "go east"], "", False),  # each step leads on
        (["go east", "take lamp"], ["done"], "", True),  # nobody in the log says one word
        (["look", "take lamp"], ["look"], "", False),  # here somebody does
        (["click('a1')", "fill('a2', 'x')"], ["I think I am done"], "", True),  # no call
        (["click('a1')", "fill('a2', 'x')"], ["click('a7')"], "", False),
    ],
)
def test_what_an_idle_action_is(log: list[str], said: list[str], answer: str, silent: bool) -> None:
    assert Speech([acting(*log)] * 3).is_silent(acting(*said, answer=answer).turns) is silent


def test_the_diversity_of_actions_by_hand() -> None:
    """Two equally frequent actions of the log's four: a half; of other tasks nothing is known."""
    speech = Speech([acting("a b", "c d"), acting("e f", "g h")])
    assert speech.diversity([acting("a b", "c d"), acting("C d", "a  b")]) == pytest.approx(0.5)
    assert speech.diversity([acting("a b", "a b")]) == pytest.approx(0.25)
    assert effective(Counter(a=3, b=1)) == pytest.approx(math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4)))
    assert Speech([]).diversity([acting("a b")]) == speech.diversity([]) == 1.0


def test_a_log_of_waiters_says_nothing_about_waiting() -> None:
    waiters = [acting("wait", "wait", "wait", answer="Time passes.", agent="a")] * 4
    assert "silent" in LogReference(waiters).blind
    assert "silent" not in REFERENCE.blind
    idle = [episode("a", ("", 0.0), ("", 0.0)), episode("a", ("", 0.0))]
    assert measured(*idle)[0].silent == 1
    assert measure(0, idle, LogReference(waiters), short=0.7)[0].silent == 0
