"""A world model that is a table, so that what it says can be planted."""

from __future__ import annotations

from collections.abc import Sequence

from real_envs.trajectory import Turn
from worldmodel.world_model import Prediction


def says(observation: str, confidence: float = 0.9, reward: float = 0.0, sure: float = 1.0) -> Prediction:
    return Prediction(observation, reward, False, confidence, sure)


class Table:
    """A world model that knows what some actions do, and of all others the same; notes what it is asked."""

    version = "table"

    def __init__(self, answers: dict[str, Prediction | Exception], other: str = "Nothing.") -> None:
        self.answers, self.asked, self.released = answers, list[tuple[int, str]](), list[object]()
        self.other = says(other)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        self.asked.append((len(history), action))
        found = self.answers.get(action, self.other)
        if isinstance(found, Exception):
            raise found
        return found

    def release(self, session: object) -> None:
        self.released.append(session)
