"""The same actions again: an agent that repeats what another episode did, in whatever world it is put."""

from __future__ import annotations

from dataclasses import dataclass

from real_envs.trajectory import Observation


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
