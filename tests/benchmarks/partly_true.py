"""Oracle substitution: dreams of which one part is made true, to find which part costs how much.

The real environment answers the same actions beside the world model. It costs real steps, so what is trained in such a
dream is no claim about dreams: it is an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from real_envs.env import StepResult, Task, TaskSet
from real_envs.trajectory import Turn
from worldmodel.rules.refusals import Refusals
from worldmodel.world_model import LanguageWorldModel, Prediction, WorldModelWrapper

# what comes from the real environment: reward and end; refusals; texts that the episode has shown before; new texts
PARTS = ("outcomes", "refusals", "seen", "new")


@dataclass
class Truth:
    """What the real environment answers to a list of actions, by replaying them; it must be deterministic.

    Args:
        tasks: the task of each start text.
    """

    environments: TaskSet
    tasks: Mapping[str, Task]

    def __post_init__(self) -> None:
        self._answers: dict[tuple[str, ...], StepResult] = {}

    async def answers(self, start: str, actions: Sequence[str]) -> list[StepResult]:
        """One for each action; those behind the end repeat the last.

        Raises:
            KeyError: no task starts with this text.
            EnvFailure: the real environment broke.
        """
        keys = [(start, *actions[: k + 1]) for k in range(len(actions))]
        if keys[-1] not in self._answers:
            env, result = self.environments.make_env(), None
            try:
                await env.reset(self.tasks[start], 0)
                for key, action in zip(keys, actions, strict=True):
                    if result is None or not (result.terminated or result.truncated):
                        result = await env.step(action)
                    self._answers[key] = result
            finally:
                await env.close()
        return [self._answers[key] for key in keys]


class PartlyTrue(WorldModelWrapper):
    """A world model of whose answers one part is the real environment's.

    Args:
        part: one of ``PARTS``. ``refusals``, ``seen`` and ``new`` replace the whole answer where either side's text is
            of that kind, ``outcomes`` only reward and end.
    """

    def __init__(self, model: LanguageWorldModel, part: str, truth: Truth, refusals: Refusals) -> None:
        super().__init__(model)
        self.part, self.truth, self.refusals = part, truth, refusals
        self.version = f"{model.version}+true-{part}"

    def around(self, model: LanguageWorldModel) -> PartlyTrue:
        return PartlyTrue(model, self.part, self.truth, self.refusals)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        prediction = await self.model.predict(start, history, action, seed, session)
        *earlier, real = await self.truth.answers(start, [*(turn.action for turn in history), action])
        shown = [start, *(turn.observation for turn in history)], [start, *(r.observation.text for r in earlier)]
        texts = prediction.observation, real.observation.text
        kinds = {self._kind(action, text, before) for text, before in zip(texts, shown, strict=True)}
        if self.part not in ("outcomes", *kinds):
            return prediction
        if self.part != "outcomes":
            prediction = replace(prediction, observation=texts[1], confidence=1.0)
        return replace(prediction, reward=real.reward or 0.0, terminated=real.terminated, outcome_confidence=1.0)

    def _kind(self, action: str, text: str, before: Sequence[str]) -> str:
        if self.refusals.refuses(action, text):
            return "refusals"
        return "seen" if any(text.strip() in earlier for earlier in before) else "new"
