"""What a kill leaves of real episodes. If these fail, real steps are lost, counted twice, or learned from as they were
not."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from imagination.loop.acting import Budget, Limits, act
from imagination.loop.journal import Journal
from imagination.rollout.play import Episode, Provenance
from real_envs.env import Env, EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, Owner, Source, StopReason, Trace

EPISODES = [Episode(f"loop/1/t/{n}", Task("t", world_facts=("a lamp",)), "loop/1/t", seed=n) for n in range(6)]


def test_the_contexts_of_an_episode_are_kept(tmp_path: Path) -> None:
    """Read back as one context, its tokens would be trained after others than those they were sampled after."""
    owners = (Owner.ENV, Owner.AGENT, Owner.ENV, Owner.AGENT)
    trace = Trace((1, 2, 3, 4), owners, (None, -0.5, None, -0.25), (-1, 0, -1, 1), versions=(0, 0), segments=(2,))
    journal = Journal(tmp_path / "journal")
    journal.begin(EPISODES[0], "policy", Provenance(Source.REAL))
    journal.reset(EPISODES[0].id, Observation("start"))
    journal.ask(EPISODES[0].id, "go")
    journal.answer(EPISODES[0].id, "go", StepResult(Observation("hall"), 0.0, False, False))
    (played,) = journal.episodes()
    journal.end(replace(played, trace=trace))
    assert [episode.trace for episode in Journal(tmp_path / "journal").episodes()] == [trace]


class Killed(BaseException):
    """No stage catches it, as none catches a SIGKILL."""


class World:
    """Episodes of three steps; kills the process at one of them, before or after it is taken, or breaks there."""

    def __init__(self, kill_at: int = 0, before: bool = False, break_at: int = 0) -> None:
        self.kill_at, self.before, self.break_at, self.taken = kill_at, before, break_at, 0

    def tasks(self, split: str) -> list[Task]:
        return [EPISODES[0].task]

    def make_env(self) -> Env:
        return _Env(self)

    async def close(self) -> None: ...


class _Env:
    def __init__(self, world: World) -> None:
        self.world, self.k = world, 0

    async def reset(self, task: Task, seed: int) -> Observation:
        self.k = 0
        return Observation("start")

    async def step(self, action: str) -> StepResult:
        world = self.world
        if world.before and world.taken + 1 == world.kill_at:
            raise Killed
        world.taken += 1
        if world.taken == world.kill_at:
            raise Killed
        if world.taken == world.break_at:
            raise EnvFailure(StopReason.ENV_TIMEOUT, "it hangs")
        self.k += 1
        return StepResult(Observation(f"{action}!"), 0.5, self.k == 3, False, {"k": float(self.k)})

    async def close(self) -> None: ...


class Player:
    name = "policy"

    def start(self, observation: Observation, seed: int) -> _Actor:
        return _Actor(random.Random(seed))


class _Actor:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    async def act(self) -> str:
        return self.chance.choice("abc")

    def observe(self, observation: Observation) -> None: ...

    def trace(self) -> None: ...

    def close(self) -> None: ...


def play(path: Path, world: World, budget: int = 100) -> Journal:
    journal = Journal(path)
    stamp = Provenance(Source.REAL, "v1")
    asyncio.run(act("act", journal, EPISODES, world, lambda _: (Player(), stamp), Limits(Budget(budget), 0, 0.0, 5, 1)))
    return journal


def test_episodes_come_back_from_the_journal_as_they_were_played(tmp_path: Path) -> None:
    journal = play(tmp_path / "j", World())
    again = Journal(tmp_path / "j")
    assert again.episodes() == journal.episodes()
    first = again.episodes()[0]
    assert (first.id, first.start, first.stop, first.policy_version) == (
        "loop/1/t/0", "start", StopReason.TERMINATED, "v1",
    )  # fmt: skip
    assert [t.observation for t in first.turns] == [f"{t.action}!" for t in first.turns]
    assert first.turns[2].info == {"k": 3.0}
    assert first.world_facts == ("a lamp",)
    assert (again.charged, again.asked, len(again.episodes())) == (18, 18, 6)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kill_at", [1, 2, 3, 8])
def test_a_kill_at_a_step_loses_none_and_takes_none_twice(tmp_path: Path, kill_at: int, before: bool) -> None:
    dying, after = World(kill_at, before), World()
    with pytest.raises(BaseExceptionGroup):
        play(tmp_path / "j", dying, budget=14)
    journal = play(tmp_path / "j", after, budget=14)
    assert journal.charged == journal.asked == 14
    assert dying.taken + after.taken == 14 - before, "a step that may have been taken is charged"
    episodes = journal.episodes()
    assert sum(len(t.turns) for t in episodes) == 13, "what it answered died with the process"
    assert len({t.id for t in episodes}) == len(episodes)


def test_a_broken_step_is_asked_for_and_not_charged(tmp_path: Path) -> None:
    journal = play(tmp_path / "j", World(break_at=2), budget=10)
    assert (journal.charged, journal.asked) == (10, 11)
    assert journal.episodes()[0].stop is StopReason.ENV_TIMEOUT
    assert journal.episodes()[0].failure == "it hangs"


def test_a_torn_last_line_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = play(path, World(), budget=6)
    with path.open("a") as file:
        file.write('{"id": "loop/1/t/0", "as')
    again = play(path, World(), budget=6)
    assert again.episodes() == whole.episodes()
    assert all(json.loads(line) for line in path.read_text().splitlines())
