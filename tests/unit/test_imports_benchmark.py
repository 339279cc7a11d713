"""Damaged records of every format. If this fails, one bad line ends an import, or takes good ones with it."""

from __future__ import annotations

import random

import pytest

from tests.benchmarks.imports import VALID, broken, damaged, episode


@pytest.mark.parametrize("seed", [0, 1])
def test_good_records_are_kept_and_the_others_are_counted(seed: int) -> None:
    for name, found in broken(1200, seed).items():
        assert found["lost"] == 0, name
        assert found["kept"] >= found["good"], name
        assert found["kept"] + found["refused"] == found["written"], name
        assert found["refused"] > 0.3 * found["written"], name  # or nothing was damaged


def test_damage_is_the_same_again_and_of_many_kinds() -> None:
    lines = {damaged(VALID["jsonl"](0), random.Random(seed)) for seed in range(60)}
    assert lines == {damaged(VALID["jsonl"](0), random.Random(seed)) for seed in range(60)}
    assert len(lines) > 30


def test_an_episode_of_the_log_is_a_few_kilobytes_with_secrets_in_some() -> None:
    texts = [repr(episode(random.Random(k), k)) for k in range(20)]
    assert all(4_000 < len(text) < 20_000 for text in texts)
    assert any("@example.org" in text for text in texts)
