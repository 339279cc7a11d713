"""An agent that plays given actions: what a dream did, done again in the real environment."""

from __future__ import annotations

from dataclasses import dataclass

from real_envs.trajectory import Observation


@dataclass(slots=True)
class ReplayActor:
    """One episode of it."""

    actions: list[str]

    async def act(self) -> str:
        return self.actions.pop(0)

    def observe(self, observation: Observation) -> None:
        pass

    def trace(self) -> None:
        return None

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Replay:
    """Plays ``actions`` whatever it sees; the rollout must not ask for more of them."""

    actions: tuple[str, ...]
    name: str = "replay"

    def start(self, observation: Observation, seed: int) -> ReplayActor:
        return ReplayActor(list(self.actions))
