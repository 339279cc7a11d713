"""A world that is away for a while is waited for; what it never answered is asked again and never charged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from imagination.loop.acting import Budget, Limits, act, wave
from imagination.loop.journal import Journal
from imagination.rollout.play import Episode, Provenance, Replay
from imagination.settings import Config, LoopSettings
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, Owner, Source, StopReason, Trace, Trajectory


class Away:
    """A world whose first ``down`` resets fail, and every reset of the task ``broken``."""

    def __init__(self, down: int) -> None:
        self.down, self.resets = down, 0

    def make_env(self) -> Any:
        return self

    def tasks(self, split: str) -> Sequence[Task]:
        return []

    async def reset(self, task: Task, seed: int) -> Observation:
        self.resets += 1
        if self.resets <= self.down or task.id == "broken":
            raise EnvFailure(StopReason.ENV_CRASHED, "nobody is at home")
        return Observation("A room.")

    async def step(self, action: str) -> StepResult:
        return StepResult(Observation("Nothing new."), 0.0, False, False)

    async def close(self) -> None: ...


def played(
    tmp_path: Path, world: Away, names: Sequence[str], patience: float, turns: int = 2
) -> tuple[Journal, list[float]]:
    """So many turns an episode, one episode at a time; and the waits, which take no time here."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    journal = Journal(tmp_path / "round.jsonl")
    episodes = [Episode(name, Task(name), name, k) for k, name in enumerate(names)]
    asyncio.run(
        act(
            "act",
            journal,
            episodes,
            world,
            lambda _: (Replay(("look",) * turns), Provenance(Source.REAL)),
            Limits(Budget(100), 0, 0.0, max_turns=turns, workers=1, patience=patience),
            sleep,
        )
    )
    return journal, waits


def test_a_world_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    journal, waits = played(tmp_path, Away(down=5), ["a", "b"], patience=100)
    assert waits == [1, 2], "waves of two failed at 0, 1 and, by one of them, 3 seconds"
    assert journal.charged == journal.asked == 4
    assert {t.id: t.stop for t in journal.episodes()} == {"a": StopReason.TURN_LIMIT, "b": StopReason.TURN_LIMIT}


def test_patience_ends(tmp_path: Path) -> None:
    journal, waits = played(tmp_path, Away(down=10**6), ["a"], patience=10)
    assert waits == [1, 2, 4, 3], "ten seconds in all"
    assert journal.charged == 0
    assert journal.episodes() == []
    assert "nobody is at home" in journal.failed[0]


def test_an_episode_that_breaks_while_others_are_answered_is_given_up(tmp_path: Path) -> None:
    journal, waits = played(tmp_path, Away(down=0), ["a", "broken"], patience=0)
    assert not waits
    assert [t.id for t in journal.episodes()] == ["a"]
    assert journal.charged == 2


def test_an_episode_that_broke_while_others_were_answered_is_tried_again(tmp_path: Path) -> None:
    """However many turns it may have."""
    journal, waits = played(tmp_path, Away(down=1), ["a", "b"], patience=0, turns=10)
    assert not waits
    assert {t.id for t in journal.episodes()} == {"a", "b"}


def test_tokens_come_back_from_the_journal(tmp_path: Path) -> None:
    trace = Trace((5, 6), (Owner.SCAFFOLD, Owner.AGENT), (None, -0.25), (-1, 0), temperature=0.7)
    journal = Journal(tmp_path / "round.jsonl")
    journal.begin(Episode("a", Task("a"), "a", 0), "policy", Provenance(Source.REAL))
    journal.reset("a", Observation("A room."))
    journal.ask("a", "look")
    journal.answer("a", "look", StepResult(Observation("Nothing new."), 0.0, False, False))
    episode = Trajectory("a", "a", "a", Source.REAL, "policy", 0, "A room.", (), StopReason.TURN_LIMIT, trace=trace)
    journal.end(episode)
    (found,) = Journal(tmp_path / "round.jsonl").episodes()
    assert found.trace == trace


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_own_episodes_make_up_their_share(share: float) -> None:
    from imagination.loop.refit import shares

    own = [k >= 90 for k in range(94)]
    order = shares(own, share, read=16, rng=Random(0))
    mine = sum(own[i] for i in order)
    assert {0.25: (4, 12), 0.5: (8, 8)}[share] == (mine, len(order) - mine)
    assert order == shares(own, share, read=16, rng=Random(0))
    assert shares([True, False], 0.5, 100, Random(0)) == [1, 0]
    assert shares([False, False], 0.5, 1, Random(0)) == [0, 1], "nothing of its own yet: all there is"


def test_what_is_left_is_the_least_that_any_limit_leaves() -> None:
    assert Budget(100).left(30) == 70
    assert Budget(100).left(130) == 0
    assert Budget(100, price=0.3, step_price=0.1).left(1) == 2, "0.3 / 0.1 is 3, rounding aside"
    assert Budget(5, price=100.0, step_price=0.1).left(1) == 4
    assert Budget(100, seconds=2.0).left(30, 1.9) == 70
    assert Budget(100, seconds=2.0).left(30, 2.0) == 0


def test_a_wave_begins_episodes_only_with_what_is_left_as_their_limit() -> None:
    assert wave(["a", "b", "c"], left=20, longest=12) == {"a": 12, "b": 8}
    assert wave(["a", "b", "c"], left=100, longest=12, most=2) == {"a": 12, "b": 12}
    assert wave(["a"], left=0, longest=12) == {}
    assert wave([], left=10, longest=12) == {}


@pytest.mark.parametrize("seed", range(20))
def test_waves_spend_the_budget_to_its_last_step_and_never_more(seed: int) -> None:
    """Whatever the episodes come to, as long as there are enough of them."""
    rng = random.Random(seed)
    budget, spent, waiting = Budget(50), 0, [str(n) for n in range(100)]
    while limits := wave(waiting, budget.left(spent), 12):
        assert sum(limits.values()) <= budget.left(spent)
        spent += sum(rng.randint(1, limit) for limit in limits.values())
        waiting = [name for name in waiting if name not in limits]
    assert spent == 50


@pytest.mark.parametrize(
    "wrong", [{"budget": -1}, {"epsilon": 1.5}, {"tasks": 0}, {"own_share": 1.0}, {"tolerance": -0.1}, {"looks": 0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(loop=LoopSettings(**wrong))  # type: ignore[arg-type]
