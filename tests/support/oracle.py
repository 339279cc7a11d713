"""A deterministic real environment behind the ``WorldModel`` protocol: for tests and upper bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from real_envs.env import Env, Task
from real_envs.trajectory import Trajectory, Turn
from worldmodel.world_model import Prediction


class OracleWorldModel:
    """Answers by replaying the history in the real environment, which must be deterministic.

    It costs real steps, so nothing that claims to train without them may use it.

    Args:
        make_env: makes a real environment.
        tasks: the task for each start observation.
    """

    version = "oracle"

    def __init__(self, make_env: Callable[[], Env], tasks: dict[str, Task]) -> None:
        self._make_env = make_env
        self._tasks = tasks
        self._open: dict[object, tuple[Env, list[str]]] = {}

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        """
        Raises:
            KeyError: no task starts with this observation.
            EnvFailure: the real environment broke.
        """
        done = [turn.action for turn in history]
        env, played = self._open.pop(session, (None, []))  # what breaks below is not gone on with
        if env is None or played != done:
            env = env or self._make_env()
            await env.reset(self._tasks[start], seed=0)
            for past in done:
                await env.step(past)
        result = await env.step(action)
        if session is None:
            await env.close()
        else:
            self._open[session] = (env, [*done, action])
        return Prediction(result.observation.text, result.reward or 0.0, result.terminated, 1.0, 1.0)

    def excluding(self, episodes: Sequence[Trajectory]) -> OracleWorldModel:
        """Itself: it looks up nothing."""
        return self

    def release(self, session: object) -> None:
        self._open.pop(session, None)

    async def close(self) -> None:
        """Closes what is still open."""
        for env, _ in self._open.values():
            await env.close()
        self._open.clear()
