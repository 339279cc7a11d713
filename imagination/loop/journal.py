"""What was done in the real world, written down before and after each step, so that no kill can lose or double it.

One file a round, a line an event; only whole lines are read. An episode that a kill interrupted::

    {"process": 0}
    {"begin": {"id": "loop/3/tw-7/0", "task_id": "tw-7", ...}}
    {"id": "loop/3/tw-7/0", "start": "You are in the attic.", "spent": {"resets": 1, "seconds": 0.1, ...}}
    {"id": "loop/3/tw-7/0", "ask": "go east"}
    {"id": "loop/3/tw-7/0", "turn": {"action": "go east", "observation": "A hall.", "reward": 0.0, ...}}
    {"id": "loop/3/tw-7/0", "ask": "take lamp"}

A step is charged where the world answered it. One that was asked for and has neither an answer nor a failure may have
been taken when the process died, and is charged as well. An interrupted episode ends where it was: what it has shown is
real, and to play it again would take its steps twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from imagination.rollout.play import Episode, Provenance
from real_envs.env import Agent, Env, StepResult, Task
from real_envs.errors import UserError
from real_envs.files import read_text
from real_envs.trajectory import Observation, Owner, Source, StopReason, Trace, Trajectory, Turn
from real_envs.worker_pool import PoolStats, real_interaction


@dataclass(slots=True)
class _Record:
    """What the journal says of an episode."""

    begin: dict[str, Any]
    start: str = ""
    turns: list[Turn] = field(default_factory=list)
    waits: bool = False  # for the answer to a step
    stop: StopReason | None = None
    failure: str | None = None
    trace: Trace | None = None

    def trajectory(self) -> Trajectory:
        return Trajectory(
            **{**self.begin, "source": Source(self.begin["source"]), "world_facts": tuple(self.begin["world_facts"])},
            start=self.start,
            turns=tuple(self.turns),
            stop=self.stop or StopReason.TURN_LIMIT,
            trace=self.trace,
            failure=self.failure,
        )


class Journal:
    """The real episodes of a round, those of earlier processes included.

    ``asked`` counts the steps that were asked for, ``charged`` those that were answered, or may have been.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = self.charged = 0
        self._records: dict[str, _Record] = {}
        self._earlier, self._now = PoolStats(), PoolStats()  # of processes before the last one, and of the last one
        path.parent.mkdir(parents=True, exist_ok=True)
        text = read_text(path) if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a torn last line says nothing
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        try:
            for line in whole.splitlines():
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged: {error!r}") from error
        self._before = real_interaction()
        self._write({"process": 0})

    @property
    def spent(self) -> PoolStats:
        """As ``PoolStats``; what a process spent after its last whole episode or reset is in its steps alone."""
        total = self._earlier + self._now
        total.steps = self.asked
        return total

    @property
    def played(self) -> frozenset[str]:
        """Ids of episodes that are not to be played: ended ones, and those with a turn that were interrupted or broke.

        One that broke before the world's first answer was not played.
        """
        return frozenset(
            name
            for name, record in self._records.items()
            if record.turns or (record.stop is not None and not record.stop.is_outage)
        )

    @property
    def failed(self) -> list[str]:
        """What broke in episodes that were not played."""
        return [r.failure for r in self._records.values() if r.failure is not None and not r.turns]

    def episodes(self) -> list[Trajectory]:
        """Those, in the order in which they began."""
        return [record.trajectory() for name, record in self._records.items() if name in self.played]

    def begin(self, episode: Episode, agent: str, stamp: Provenance) -> None:
        about: dict[str, Any] = {"id": episode.id, "task_id": episode.task.id, "group_id": episode.group_id}
        about |= {"seed": episode.seed, "agent": agent, "source": stamp.source.value}
        about |= {"policy_version": stamp.policy_version, "world_facts": list(episode.task.world_facts)}
        self._write({"begin": about})

    def reset(self, name: str, observation: Observation) -> None:
        self._write({"id": name, "start": observation.text, "spent": self._spent()})

    def ask(self, name: str, action: str) -> None:
        self._write({"id": name, "ask": action})

    def answer(self, name: str, action: str, result: StepResult) -> None:
        turn = Turn(action, result.observation.text, result.reward, result.terminated, dict(result.info))
        self._write({"id": name, "turn": asdict(turn)})

    def end(self, trajectory: Trajectory) -> None:
        line = {"id": trajectory.id, "stop": trajectory.stop.value, "failure": trajectory.failure}
        trace = None if trajectory.trace is None else asdict(trajectory.trace)
        self._write({**line, "trace": trace, "spent": self._spent()})

    def _spent(self) -> dict[str, Any]:
        return asdict(real_interaction() - self._before)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "process" in line:
            self._earlier, self._now = self._earlier + self._now, PoolStats()
            for record in self._records.values():  # whoever asked is dead: what has no answer may have been taken
                self.charged += record.waits
                record.waits = False
            return
        if "begin" in line:
            self._records[line["begin"]["id"]] = _Record(dict(line["begin"]))
            return
        record = self._records[line["id"]]
        if "spent" in line:
            self._now = PoolStats(**line["spent"])
        if "start" in line:
            record.start = line["start"]
        elif "ask" in line:
            record.waits = True
            self.asked += 1
        elif "turn" in line:
            record.waits = False
            record.turns.append(Turn(**line["turn"]))
            self.charged += 1
        else:
            record.waits = False  # answered or failed, and a failure has no answer
            record.stop, record.failure = StopReason(line["stop"]), line["failure"]
            record.trace = _trace(line.get("trace"))


def _trace(written: Mapping[str, Any] | None) -> Trace | None:
    if written is None:
        return None
    lists = {key: tuple(written.get(key, ())) for key in ("ids", "logprobs", "turns", "versions", "segments")}
    return Trace(**{**written, **lists, "owners": tuple(map(Owner, written["owners"]))})


class JournalEnv:
    """A real environment whose every step is in a journal; ``episodes`` are by seed, of which no two have the same."""

    def __init__(
        self,
        env: Env,
        journal: Journal,
        episodes: Mapping[int, Episode],
        player_of: Callable[[Episode], tuple[Agent, Provenance]],
    ) -> None:
        self._env, self._journal, self._episodes, self._player_of = env, journal, episodes, player_of
        self._name = ""

    async def reset(self, task: Task, seed: int) -> Observation:
        episode = self._episodes[seed]
        self._name = episode.id
        agent, stamp = self._player_of(episode)
        self._journal.begin(episode, agent.name, stamp)
        observation = await self._env.reset(task, seed)
        self._journal.reset(self._name, observation)
        return observation

    async def step(self, action: str) -> StepResult:
        self._journal.ask(self._name, action)
        result = await self._env.step(action)
        self._journal.answer(self._name, action, result)
        return result

    async def close(self) -> None:
        await self._env.close()
