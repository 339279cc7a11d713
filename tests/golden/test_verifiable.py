"""Rewards of predictions, worked out by hand, and by a plain loop over lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real_envs.trajectory import Turn
from worldmodel.objective import Metric, diff_f1, verifiable_reward

TEXTS = st.lists(st.sampled_from(["a", "b", "c", " c ", ""]), max_size=6).map("\n".join)


@pytest.mark.parametrize(
    ("before", "predicted", "true", "expected"),
    [
        ("a\nb", "a\nd", "a\nd", 1.0),
        ("a\nb", "a\nc", "a\nd", 0.5),  # two changes each: -b, which both have, and +c against +d
        ("a\nb", "a\nb", "a\nd", 0.0),  # nothing was predicted to change
        ("a\nb", "a\nb", "a\nb", 1.0),
        ("a\nb", "a", "a\nb", 0.0),  # nothing does
        ("a", "a\na\nb", "a\na", 2 / 3),  # predicted +a +b, true +a: precision 1/2, recall 1
        ("a\n\n b", "b\na ", "a\nb", 1.0),  # order, empty lines and white space do not count
    ],
)
def test_diff_f1_by_hand(before: str, predicted: str, true: str, expected: float) -> None:
    assert diff_f1(before, predicted, true) == pytest.approx(expected)


def changes(before: str, after: str) -> list[tuple[str, str]]:
    """Added and removed lines, found one by one."""
    old = [line.strip() for line in before.splitlines() if line.strip()]
    found = []
    for line in (line.strip() for line in after.splitlines() if line.strip()):
        if line in old:
            old.remove(line)
        else:
            found.append(("+", line))
    return found + [("-", line) for line in old]


@given(TEXTS, TEXTS, TEXTS)
def test_diff_f1_is_that_of_a_plain_loop(before: str, predicted: str, true: str) -> None:
    mine, real = changes(before, predicted), changes(before, true)
    left, matched = list(real), 0
    for change in mine:
        if change in left:
            left.remove(change)
            matched += 1
    if not mine and not real:
        expected = 1.0
    elif not matched:
        expected = 0.0
    else:
        precision, recall = matched / len(mine), matched / len(real)
        expected = 2 * precision * recall / (precision + recall)
    assert diff_f1(before, predicted, true) == pytest.approx(expected)


def test_a_wrong_reward_or_end_earns_nothing_however_right_the_text() -> None:
    turn = Turn("take lamp", "You take the lamp.", 1.0, True)
    for metric in ("exact", "diff_f1"):
        assert verifiable_reward(metric, "A lamp.", ("You take the lamp.", 1.0, True), turn) == 1
        assert verifiable_reward(metric, "A lamp.", ("You take the lamp.", 0.0, True), turn) == 0
        assert verifiable_reward(metric, "A lamp.", ("You take the lamp.", 1.0, False), turn) == 0
        assert verifiable_reward(metric, "A lamp.", None, turn) == 0
    assert verifiable_reward("exact", "A lamp.", ("You take a lamp.", 1.0, True), turn) == 0
    assert verifiable_reward("diff_f1", "A lamp.", ("You take a lamp.", 1.0, True), turn) == 0.5


@pytest.mark.parametrize("metric", ["behr", "embedding"])
def test_what_a_model_finds_similar_pays_where_reward_and_end_are_right(metric: Metric) -> None:
    turn = Turn("take lamp", "You take the lamp.", 1.0, True)
    assert verifiable_reward(metric, "", ("You take the lamp. ", 1.0, True), turn, similar=0.0) == 1
    assert verifiable_reward(metric, "", ("You take a lamp.", 1.0, True), turn, similar=0.75) == 0.75
    assert verifiable_reward(metric, "", ("You take a lamp.", 0.0, True), turn, similar=1.0) == 0
    assert verifiable_reward(metric, "", ("You take a lamp.", 1.0, False), turn, similar=1.0) == 0


def test_an_unmeasured_reward_verifies_nothing() -> None:
    with pytest.raises(ValueError, match="nobody measured"):
        verifiable_reward("exact", "", ("x", 0.0, False), Turn("look", "x", None, False))
