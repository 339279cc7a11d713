"""What is served: the dreams of one world model, and where they begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from imagination.rollout.dream_env import Start
from real_envs.env import Env, Task
from real_envs.streams import stream_seed
from real_envs.trajectory import Observation
from worldmodel.formats.retrieval import LoggedTransition, TransitionIndex


@dataclass(frozen=True)
class DreamWorld:
    """The dreams of a run's world model.

    Attributes:
        name: of the run.
        version: of the world model's weights.
        make_env: an environment for one session, such as a ``DreamEnv`` over ``starts``.
        starts: start states by name; a task may have several, which a seed chooses among.
        max_turns: of an episode, its logged beginning aside; the dream is then truncated.
        index: the logged transitions, for ``nearest``; ``None`` where the log has none with a reward.

    Raises:
        ValueError: there is no start state.
    """

    name: str
    version: str
    make_env: Callable[[], Env]
    starts: Mapping[str, Start]
    max_turns: int
    index: TransitionIndex | None = None
    _by_task: dict[str, list[str]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, start in sorted(self.starts.items()):
            self._by_task.setdefault(start.task_id, []).append(name)
        if not self._by_task:
            raise ValueError("there is no state to dream from")

    @property
    def tasks(self) -> list[str]:
        """Ids of the tasks, sorted by their start states' names; their places are AgentGym's ``data_idx``."""
        return list(self._by_task)

    def task(self, task_id: str | None, seed: int) -> Task:
        """Where the episode of this task and seed begins; without a task, the seed's remainder is the task's place.

        Raises:
            KeyError: there is no such task.
        """
        chosen = self.tasks[seed % len(self.tasks)] if task_id is None else task_id
        names = self._by_task[chosen]
        return Task(chosen, {"start": names[stream_seed("served start", seed) % len(names)]})

    def nearest(self, start: str, seen: str, action: str, count: int) -> list[LoggedTransition]:
        """The logged transitions most like this one, the most similar first."""
        if self.index is None:
            return []
        return self.index.similar(start, seen, action, count, frozenset())


def opening(observation: Observation) -> str:
    """What a client reads first: the log's first observation and, in the middle of an episode, what has happened."""
    turns = "".join(f"\n> {turn.action}\n{turn.observation}" for turn in observation.history)
    return observation.text + turns
