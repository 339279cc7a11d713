"""The verdict on memory after a soak. If these fail, a server that leaks is called flat."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")

from tests.benchmarks.serving_soak import slope, verdict

TIMES = [k / 100 for k in range(200)]


def test_a_line_has_its_slope_and_no_doubt() -> None:
    assert slope(TIMES, [3 + 7 * t for t in TIMES]) == pytest.approx((7, 7, 7))


def test_the_interval_covers_the_true_slope_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(400):
        noise = random.Random(seed)
        _, low, high = slope(TIMES, [5 * t + noise.gauss(0, 3) for t in TIMES])
        covered += low <= 5 <= high
    assert 0.92 < covered / 400 < 0.98  # 95 %, give or take three standard errors of 1.1 %


def test_too_few_readings_are_no_slope() -> None:
    with pytest.raises(ValueError, match="9 readings"):
        slope(TIMES[:9], TIMES[:9])


@pytest.mark.parametrize(
    ("low", "high", "told"), [(-1, 1, "flat"), (1, 4.9, "flat"), (-3, 6, "unclear"), (4, 6, "unclear"), (6, 7, "grows")]
)
def test_flat_and_growing_are_said_only_where_they_are_sure(low: float, high: float, told: str) -> None:
    assert verdict(low, high, most=5) == told
