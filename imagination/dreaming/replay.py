"""The same actions again: an agent that repeats what another episode did, in whatever world it is put."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from imagination.dreaming.rollout import Episode, Provenance, play_all
from real_envs.env import Env
from real_envs.trajectory import Observation, Source, Trajectory


@dataclass(frozen=True, slots=True)
class Replay:
    """An ``Agent`` that plays ``actions`` and must not be asked for more: limit its turns to their number."""

    actions: tuple[str, ...]
    name: str = "replay"

    def start(self, observation: Observation, seed: int) -> ReplayActor:
        return ReplayActor(list(self.actions))


@dataclass(slots=True)
class ReplayActor:
    """One episode of a ``Replay``."""

    actions: list[str]

    async def act(self) -> str:
        return self.actions.pop(0)

    def observe(self, observation: Observation) -> None:
        pass

    def trace(self) -> None:
        return None

    def close(self) -> None:
        pass


async def replay_all(
    dreams: Mapping[str, Trajectory], episodes: Sequence[Episode], make_env: Callable[[], Env], concurrency: int = 64
) -> list[Trajectory]:
    """Does in the real world what dreams did, turn for turn, in the order of ``episodes``.

    Args:
        dreams: by the id of the episode that repeats it; each has at least one turn.
    """
    return await play_all(
        episodes,
        make_env,
        lambda e: Replay(tuple(turn.action for turn in dreams[e.id].turns)),
        Provenance(Source.REAL),
        lambda e: len(dreams[e.id].turns),
        concurrency,
    )
