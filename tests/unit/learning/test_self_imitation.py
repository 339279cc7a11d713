"""If these fail, the policy imitates what it used to do, or its failures."""

from __future__ import annotations

import random
from statistics import median

import pytest

from imagination.learning.advantages import SelfImitationBuffer


def drawn(buffer, step, count=100):
    return dict(buffer.draw(count, step, random.Random(0)))


def test_only_what_is_above_the_median_is_kept():
    buffer: SelfImitationBuffer[str] = SelfImitationBuffer()
    assert buffer.baseline is None
    assert drawn(buffer, 0) == {}
    buffer.add(["a", "b", "c", "d", "e"], [0.0, 0.2, 0.4, 0.6, 1.0], step=0)
    assert buffer.baseline == 0.4
    assert drawn(buffer, 0) == {"d": pytest.approx(0.2), "e": pytest.approx(0.6)}


def test_advantages_are_re_estimated_when_the_policy_improves():
    """0.6 was good; once everything earns 0.8 or more, it is no example any more, and 1.0 is worth less."""
    buffer: SelfImitationBuffer[str] = SelfImitationBuffer()
    buffer.add(["a", "b", "c"], [0.0, 0.6, 1.0], step=0)
    buffer.add(["d"] * 5, [0.8] * 5, step=1)
    assert drawn(buffer, 1)["c"] == pytest.approx(0.2)
    assert "b" not in drawn(buffer, 1)


def test_episodes_older_than_five_steps_are_forgotten():
    buffer: SelfImitationBuffer[str] = SelfImitationBuffer(max_age=5)
    buffer.add(["old", "x"], [1.0, 0.0], step=10)
    assert set(drawn(buffer, 15)) == {"old"}
    assert drawn(buffer, 16) == {}
    assert len(buffer) == 0


def test_capacity_bounds_episodes_and_the_median():
    buffer: SelfImitationBuffer[int] = SelfImitationBuffer(capacity=4, max_age=100)
    totals = [random.Random(1).random() for _ in range(50)]
    for step, total in enumerate(totals):
        buffer.add([step], [total], step)
        assert buffer.baseline == median(totals[max(0, step - 3) : step + 1])
        assert len(buffer) <= 4
    assert all(advantage > 0 for advantage in drawn(buffer, 50).values())


def test_a_draw_repeats_nothing_and_is_reproducible():
    buffer: SelfImitationBuffer[int] = SelfImitationBuffer()
    buffer.add(list(range(40)), [float(i >= 20) for i in range(40)], step=0)
    one, two = (buffer.draw(8, 1, random.Random(3)) for _ in range(2))
    assert one == two
    assert len({episode for episode, _ in one}) == 8


def test_nothing_is_imitated_where_all_is_equal():
    buffer: SelfImitationBuffer[int] = SelfImitationBuffer()
    buffer.add([1, 2, 3], [0.5, 0.5, 0.5], step=0)
    assert drawn(buffer, 0) == {}


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        SelfImitationBuffer(capacity=0)
