"""If these fail, doubt costs an update its turns, or further groups are played without end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from imagination.commands.check_train import check
from imagination.learning.collector import CollectionPlan, ExperienceCollector, RolloutEnvironment
from imagination.learning.groups import chosen_starts
from imagination.learning.metrics import guard_note, turns_lost, useful_turns
from imagination.rollout.dream_env import Start
from imagination.rollout.play import Episode
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.refusal import refused

UNSURE, LIMIT = StopReason.UNSURE, StopReason.TURN_LIMIT


def dream(turns: int, stop: StopReason, prefix: int = 0) -> Trajectory:
    said = tuple(Turn("look", "A hall.", 0.0, False) for _ in range(turns + prefix))
    return Trajectory("e", "t", "g", Source.DREAM, "policy", 0, "S", said, stop, prefix_turns=prefix)


def test_turns_lost_by_hand() -> None:
    """Of ten turns: three of which the last is doubted, so eight are missing; the others end as they should."""
    played = [dream(3, UNSURE), dream(3, LIMIT), dream(1, UNSURE, prefix=4), dream(2, StopReason.TERMINATED)]
    assert [useful_turns(t) for t in played] == [2, 3, 0, 2]
    assert turns_lost(played, 10) == 8 + 10


class Scripted(ExperienceCollector):
    """Plays nothing: every episode is cut after ``useful`` turns."""

    __slots__ = ("asked", "useful")

    def __init__(self, useful: int, **settings: Any) -> None:
        config = Config()
        self.plan = CollectionPlan(config.seed, config.train, config.dream, config.algorithm.progress)
        self.plan.train.groups, self.plan.train.group_size = 4, 2
        for name, value in settings.items():
            setattr(self.plan.dream, name, value)
        self.useful, self.worst, self.recorded = useful, (), None
        self.asked: list[tuple[int, int, float]] = []

    def _episodes(
        self,
        index: int,
        chance: random.Random,
        first: int,
        groups: int,
        branch: float,
        world: RolloutEnvironment | None = None,
    ) -> list[Episode]:
        self.asked.append((first, groups, branch))
        return [None] * (groups * 2)  # type: ignore[list-item]

    async def _play(
        self, episodes: Sequence[Episode], longest: int, world: RolloutEnvironment | None = None
    ) -> list[Trajectory]:
        return [dream(self.useful + 1, UNSURE) for _ in episodes]

    def rounds(self, missing: int) -> list[tuple[int, int, float]]:
        played = [dream(11 - min(missing - 10 * k, 10), UNSURE) for k in range(-(-missing // 10))]
        assert turns_lost(played, 10) == missing
        asyncio.run(self._branches(0, random.Random(0), 10, played))
        return self.asked


@pytest.mark.parametrize(
    ("useful", "extra", "missing", "expected"),
    [
        (10, 1.0, 60, [(4, 3, 1.0)]),  # three groups of two times ten turns
        (10, 1.0, 19, []),  # less than a group can give
        (10, 1.0, 200, [(4, 4, 1.0)]),  # as many again as there were, not more
        (5, 2.0, 60, [(4, 3, 1.0), (7, 1, 1.0), (8, 1, 1.0)]),  # half is cut again: 30 are missing, 20, and then 10
        (5, 0.5, 60, [(4, 2, 1.0)]),
        (5, 0.0, 60, []),
    ],
)
def test_further_groups(useful: int, extra: float, missing: int, expected: list[tuple[int, int, float]]) -> None:
    assert Scripted(useful, extra_groups=extra).rounds(missing) == expected


def test_settings_from_the_command_line() -> None:
    config = load_config(["dream.horizon=[[0,4],[8,12]]", "dream.on_doubt=branch", "tripwires.drift=2"], Config)
    assert (config.dream.horizon, config.dream.on_doubt, config.tripwires.drift) == ([[0, 4], [8, 12]], "branch", 2.0)
    check(config)


@pytest.mark.parametrize(
    ("override", "token"),
    [
        ("dream.horizon=[[0,40]]", "dream.max_turns=12"),
        ("dream.min_weight=0", "dream: min_weight"),
        ("dream.extra_groups=-1", "dream.extra_groups"),
        ("tripwires.window=0", "tripwires: window"),
        ("tripwires.memory=0", "memory"),
        ("tripwires.real_episodes=-1", "real_episodes"),
    ],
)
def test_settings_that_cannot_be(override: str, token: str) -> None:
    refused(lambda: check(load_config([override], Config)), token)


@pytest.mark.parametrize(("share", "expected"), [(0.0, [(4, 4, 1.0)]), (0.5, [(4, 2, 1.0)]), (0.75, [(4, 1, 1.0)])])
def test_what_is_played_in_the_real_games_asks_for_no_further_dreams(
    share: float, expected: list[tuple[int, int, float]]
) -> None:
    """Of four groups, 4, 2 and 1 are dreamed: as many again at most, numbered after those of both worlds."""
    player = Scripted(10, extra_groups=1.0)
    player.plan.train.real_share = share
    assert player.rounds(200) == expected


@pytest.mark.parametrize(
    ("share", "branches", "expected"),
    [
        (0.0, 0, [(4, 4, 0.5), (8, 4, 0.5)]),  # all four were alike, and so are the further ones: twice four
        (0.0, 3, [(7, 4, 0.5), (11, 4, 0.5)]),
        (0.5, 0, [(4, 2, 0.5), (6, 2, 0.5)]),  # two are dreamed, so two are missing
        (0.5, 3, [(7, 2, 0.5), (9, 2, 0.5)]),
    ],
)
def test_equal_groups_are_replaced_only_where_they_were_dreamed(
    share: float, branches: int, expected: list[tuple[int, int, float]]
) -> None:
    player = Scripted(10, branch=0.5)
    player.plan.train.real_share, player.plan.train.extra_groups = share, 2.0
    dreamed = 4 - round(share * 4)
    numbers = [*range(dreamed), *range(4, 4 + branches)]
    played = [replace(dream(3, LIMIT), group_id=f"0/{g}") for g in numbers for _ in range(2)]
    asyncio.run(player._in_place_of_equal_groups(0, random.Random(0), 10, played))
    assert player.asked == expected


def test_failed_tasks_come_first_and_begin_at_their_beginning() -> None:
    """Two of four groups; the others take tasks in turn, and half of them states in the middle, as without."""
    logged = (Turn("look", "A hall.", 0.0, False),)
    starts = {f"{task}{k}": Start(task, "S", logged[:k]) for task in "abc" for k in range(2)}
    assert chosen_starts(starts, range(4), random.Random(0), 1.0, Source.DREAM, ["c", "b"])[:2] == ["c0", "b0"]
    for seed in range(20):
        rest = chosen_starts(starts, range(4), random.Random(seed), 1.0, Source.DREAM, ["c", "b"])[2:]
        assert all(name.endswith("1") for name in rest)
        assert len({name[0] for name in rest}) == 2
    assert all(name.endswith("0") for name in chosen_starts(starts, range(9), random.Random(0), 1.0, Source.REAL, []))


def test_groups_of_both_worlds_have_numbers_of_their_own() -> None:
    """Two of four groups are real: number 2 and 3, after the dreamed 0 and 1."""
    player = Scripted(10)
    player.plan.train.real_share = 0.5
    player.worlds = [object(), object()]  # type: ignore[list-item]
    player.model = torch.nn.Linear(1, 1)
    asyncio.run(player._real_groups(0, 10))
    assert player.asked == [(2, 2, 0.0)]


def test_a_guard_that_ends_most_dreams_is_told() -> None:
    said = guard_note([{"stop_unsure": 0.8}, {"stop_unsure": 0.6}])
    assert "the guard ended 70% of the dreams" in said
    assert all(f"dream.{limit}" in said for limit in ("min_confidence", "min_outcome_confidence")), "either may be it"
    assert guard_note([{"stop_unsure": 0.8}, {"dream_success": 1.0}]) == ""
    assert guard_note([]) == ""
