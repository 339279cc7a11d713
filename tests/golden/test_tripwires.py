"""If these fail, a policy that exploits its world model is trained on, or an honest one is stopped.

Wilson's lower limits are worked out here by the plain formula: 3 of 3: 0.438, 3 of 12: 0.089, 3 of 15: 0.070.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.evaluation.monitors.rules import PREFIX, Alert, check, first_trip
from imagination.evaluation.monitors.rules import RULES as WIRES
from imagination.evaluation.monitors.rules import RolloutStats as Measured
from imagination.settings import TripwireSettings

S = TripwireSettings(window=2, memory=4, min_groups=3)


def lower(k: int, n: int, z: float = 1.959964) -> float:
    """Wilson's lower limit, as in the papers."""
    p = k / n
    return (p + z * z / (2 * n) - z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n)


def quiet(update: int, **more: Any) -> Measured:
    """An ordinary update: half of 72 dreams solved, a tenth of the predictions doubted, nothing wrong."""
    base: dict[str, Any] = {
        "episodes": 72, "solved": 36, "turns": 200, "rejected": 20, "groups": 6, "paid": 5, "claimed": 4,
        "solved_groups": 3, "drift_actions": 0.5, "drift_observations": 0.5,
        "start_solved": 18, "start_episodes": 36, "start_groups": 3,
    }  # fmt: skip
    return Measured(update, **(base | more))


def history(*updates: dict[str, Any]) -> list[Measured]:
    return [quiet(i, **more) for i, more in enumerate(updates)]


def tripped(*updates: dict[str, Any], settings: TripwireSettings = S) -> Alert:
    found = first_trip(history(*updates), settings)
    assert found is not None
    return found


def test_quiet_updates_trip_nothing() -> None:
    assert first_trip(history(*[{}] * 30), S) is None
    assert check([], S) is None


def test_bounds_are_wilsons() -> None:
    assert lower(3, 3) == pytest.approx(0.438, abs=1e-3)
    assert lower(3, 12) == pytest.approx(0.089, abs=1e-3)
    assert lower(3, 15) == pytest.approx(0.070, abs=1e-3)


def test_contradictions_are_remembered_for_longer_than_the_window() -> None:
    """One group of four an update: after three updates 3 of 12, whose limit 0.089 is above 0.05. In a window of two
    there would never be three groups."""
    one = {"contradicted": 1}
    found = tripped(one, {}, one, one)
    assert (found.update, found.wire) == (3, "contradicted")
    assert "3 of 16 groups" in found.sentence
    assert lower(3, 16) > 0.05
    assert first_trip(history(one, one, {}, {}, {}, one), S) is None  # the first has left the memory of four
    assert first_trip(history(one, one, {}), replace(S, min_groups=2)) == first_trip(
        history(one, one), replace(S, min_groups=2)
    )


@pytest.mark.parametrize("part", ["contradicted", "strange", "unseen", "looping", "short"])
def test_evidence_counts_since_the_first_update_that_adds_to_it(part: str) -> None:
    """In a window of four: what was seen before it is not part of the sum, and quiet updates do not begin it."""
    wide = replace(S, window=4, loops=0.2)
    none: dict[str, Any] = {"solved": 5, "solved_groups": 1}
    one, many = {**none, part: 1}, {"solved": 60, "solved_groups": 6, "claimed": 6, "paid": 6, part: 6}
    for updates, since in (
        ([one, none, none, none, many, many], 4),
        ([none, one, one, none, none, many, many], 5),
        ([none, none, one, none, many, many], 2),
    ):
        found = check(history(*updates), wide)
        assert found is not None
        assert (found.update, found.since) == (len(updates) - 1, since)


def test_evidence_of_a_habit_counts_since_that_habit() -> None:
    """Another word was paid for before, and is no part of it: 3 of 10 trips. Of two habits that trip at once (4 of 15
    each) the policy must have learned neither."""
    assert lower(3, 10) > S.favourite
    found = tripped({"habits": {"spoon": 1}}, {"habits": {"folder": 3}})
    assert (found.wire, found.update, found.since) == ("favourite", 1, 1)
    updates = [{"habits": {"folder": 2}}, {"habits": {"spoon": 1}}, {"habits": {"folder": 2, "spoon": 3}}]
    found = tripped(*updates, settings=replace(S, min_groups=4))
    assert "'folder'" in found.sentence  # of equals the longer one
    assert (found.update, found.since) == (2, 0)


def test_what_compares_windows_counts_since_the_window_began() -> None:
    far = {"drift_actions": 1.3}
    found = tripped({}, {}, {}, far, far)
    assert (found.wire, found.update, found.since) == ("drift_actions", 4, 3)
    found = tripped({}, {}, {"rejected": 90}, {"rejected": 100})
    assert (found.wire, found.update, found.since) == ("rejected", 3, 2)
    believes = {"start_solved": 33, "start_episodes": 36, "start_groups": 3}
    found = tripped(believes, believes, {**believes, "real_episodes": 12})
    assert (found.wire, found.update, found.since) == ("gap", 2, 1)


def test_wires_that_trip_together_count_since_the_first_evidence_of_any() -> None:
    """What is shown is the surest wire; the policy must have learned from none of what tripped."""
    found = tripped({}, {"looping": 5}, {"looping": 6, "contradicted": 4}, settings=replace(S, min_groups=4, loops=0.6))
    assert (found.wire, found.update, found.since) == ("contradicted", 2, 1)


def test_old_evidence_does_not_trip_later() -> None:
    """Three groups at once, under a bound that they miss; later updates say less, and nothing new."""
    strict = replace(S, contradicted=0.3, memory=2)
    assert first_trip(history({"contradicted": 3, "claimed": 6}, {"claimed": 0}), strict) is None


def test_one_habit_in_ever_new_words() -> None:
    """The action is another each time; the word is the same. 3 of 15 are below the bound of 0.08, 4 of 20 above."""
    assert lower(3, 15) < S.favourite < lower(4, 20)
    updates = [{"habits": {f"take folder {i}": 1, "folder": 1, f"{i}": 1}} for i in range(4)]
    assert first_trip(history(*updates[:3]), S) is None
    found = tripped(*updates)
    assert (found.update, found.wire) == (3, "favourite")
    assert "'folder'" in found.sentence
    assert "4 of 20" in found.sentence
    assert first_trip(history(*updates[:3], {}), replace(S, favourite=0.0)) == first_trip(
        history(*updates[:3]), replace(S, favourite=0.0)
    )
    scattered = [{"habits": {f"word {i}": 1}} for i in range(12)]
    assert first_trip(history(*scattered), S) is None


def test_many_unseen_payments_in_a_window() -> None:
    """4 of 10 groups: 0.168, 5 of 10: 0.237; the bound is 0.2."""
    assert lower(4, 10) < 0.2 < lower(5, 10)
    assert first_trip(history({"unseen": 2}, {"unseen": 2}), S) is None
    found = tripped({"unseen": 2}, {"unseen": 3})
    assert (found.update, found.wire) == (1, "unseen")
    assert "5 of 10" in found.sentence


def test_amounts_that_the_log_never_paid() -> None:
    found = tripped({}, {"strange": 2}, {"strange": 1})
    assert (found.update, found.wire) == (2, "strange")
    assert first_trip(history({}, {"strange": 2}, {}), S) is None


def test_reward_up_while_episodes_collapse() -> None:
    """Both must be: better policies are shorter, and short ones may be as bad as before."""
    short: dict[str, Any] = {"solved_groups": 4, "short": 4}
    rising = [{"solved": 10}, {"solved": 12}, {"solved": 50} | short, {"solved": 60} | short]
    found = tripped(*rising)
    assert (found.update, found.wire) == (3, "short")  # not yet at 2, where four of seven groups are
    assert "(0.15 to 0.76)" in found.sentence  # 22 of 144 and 110 of 144
    assert first_trip(history(*({**m, "solved": 20} for m in rising)), S) is None
    assert first_trip(history(*({**m, "short": 0} for m in rising)), S) is None


def test_the_dream_believes_more_than_a_probe_shows() -> None:
    """Nine of ten solved in three groups an update, so 5 of 6 as evidence; none of 12 real episodes. By Newcombe:
    5/6 - 0 - sqrt((5/6 - 0.4365)^2 + 0.2425^2) = 0.368."""
    believes = {"start_solved": 33, "start_episodes": 36, "start_groups": 3}
    low = 5 / 6 - math.hypot(5 / 6 - lower(5, 6), 1 - lower(12, 12))
    assert low == pytest.approx(0.368, abs=2e-3)
    found = tripped(believes, {**believes, "start_solved": 27, "real_episodes": 12})
    assert (found.update, found.wire) == (1, "gap")
    assert "12 real episodes show 0.00" in found.sentence
    honest = {**believes, "real_solved": 11, "real_episodes": 12}
    assert first_trip(history(believes, honest), S) is None
    assert first_trip(history(believes, believes), S) is None  # without a probe nobody knows


def test_loops_rejections_and_drift() -> None:
    found = tripped({"looping": 6})
    assert found.wire == "loops"
    assert first_trip(history({"looping": 4}, {"looping": 4}), S) is None  # 8 of 12: 0.39
    doubted = [{}, {}, {"rejected": 90}, {"rejected": 100}]
    found = tripped(*doubted)
    assert (found.update, found.wire) == (3, "rejected")
    assert "from 0.10 to 0.47" in found.sentence  # 190 of 400
    assert first_trip(history(*doubted[:3]), S) is None  # not before there is a window after the first two
    for name in ("drift_actions", "drift_observations"):
        far = {name: 1.3}
        found = tripped(far, {}, far, far)
        assert (found.update, found.wire) == (3, name)
        assert first_trip(history(far, {}, far), S) is None


def test_a_policy_that_hardly_acts_any_more() -> None:
    """Most groups idle at once; or few different actions for a window, after the first two, while the dream pays."""
    found = tripped({"silent": 6})
    assert (found.wire, found.since) == ("silent", 0)
    assert "hardly acts" in found.sentence
    assert first_trip(history({"silent": 4}, {"silent": 4}), S) is None  # 8 of 12: 0.39
    few = {"diversity": 0.05}
    found = tripped({}, {}, few, few)
    assert (found.update, found.since, found.wire) == (3, 2, "silent")
    assert "dreamed success holds (0.50 to 0.50)" in found.sentence
    assert first_trip(history({}, {}, few), S) is None
    assert first_trip(history({}, {}, few, {"diversity": 0.2}), S) is None
    assert first_trip(history({}, {}, *[few | {"solved": 10}] * 4), S) is None  # it earns less: that is only bad


def test_dreams_that_contradict_themselves_ever_more() -> None:
    """The share of turns must surely have risen by a fifth since the first two updates: 0.05 -> 0.45."""
    few, many = {"inconsistent": 10}, {"inconsistent": 90}
    found = tripped(few, few, many, many, many)
    assert (found.wire, found.since) == ("inconsistent", 2)
    assert "rose from 0.05 to 0.45" in found.sentence
    assert first_trip(history(*[many] * 5), S) is None  # much, but it did not rise


def test_every_wire_is_tested_here() -> None:
    assert list(WIRES) == [
        "gap", "contradicted", "strange", "favourite", "unseen", "short", "loops", "silent", "rejected",
        "inconsistent", "drift_actions", "drift_observations",
    ]  # fmt: skip


def test_switched_off_nothing_trips() -> None:
    worst = quiet(0, looping=6, contradicted=4, unseen=5, strange=6)
    assert check([worst], S) is not None
    assert check([worst], replace(S, enabled=False)) is None


counts = st.integers(0, 6)


@settings(max_examples=60)
@given(st.lists(st.builds(dict, contradicted=st.integers(0, 4), unseen=st.integers(0, 5), looping=counts), max_size=8))
def test_a_history_is_judged_the_same_from_its_numbers_on_disk(updates: list[dict[str, Any]]) -> None:
    """A resumed run reads them back; its first trip is that of the run that was never stopped."""
    seen = history(*updates)
    back = [Measured(**asdict(m)) for m in seen]
    assert back == seen
    found = first_trip(back, S)
    assert found == first_trip(seen, S)
    if found is not None:
        assert first_trip(seen[: found.update + 1], S) == check(seen[: found.update + 1], S) == found
        assert first_trip(seen[: found.update], S) is None


def test_numbers_for_the_curves_are_numbers() -> None:
    metrics = quiet(3, habits={"folder": 1}).to_metrics()
    assert metrics[PREFIX + "paid"] == 5
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert not {PREFIX + "update", PREFIX + "habits"} & metrics.keys()
