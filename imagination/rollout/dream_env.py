"""``DreamEnv``: a world model behind the ``Env`` protocol, with start states from a log and a guard."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from imagination.rollout.noise import NOISE, UselessAnswers
from policy.lm.engine import ContextFull, EngineFailure
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.seeding import derive_seed
from real_envs.trajectory import RETURN_ROUNDING, Observation, StopReason, Trajectory, Turn
from worldmodel.calibration import Calibration
from worldmodel.world_model import Prediction, PredictionInvalid, WorldModel

# Numbers in ``Turn.info`` of a dreamed turn; the last three only with an ensemble, or with a calibration.
JUDGEMENTS = ("confidence", "outcome_confidence", "disagreement", "probability", "outcome_probability")


@dataclass(frozen=True, slots=True)
class Start:
    """A real state to dream from: the log's first observation and the turns up to the branch."""

    task_id: str
    text: str
    history: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Guard:
    """When to stop believing a dream.

    Raises:
        ValueError: there is a least probability, and no calibration to have one from.
    """

    min_confidence: float  # a turn whose prediction is less likely than this ends the dream as ``UNSURE``, unpaid
    min_outcome_confidence: float  # the same for reward and end alone, where the prediction pays or ends the episode
    # a doubted turn ends the dream; otherwise it is marked (``info["doubted"]``) and goes on, unpaid as well
    ends: bool = True
    # the same for the calibrated probability that the prediction is exactly right, the ensemble's disagreement included
    min_probability: float = 0.0
    calibration: Calibration | None = None  # where that probability is from
    # upper bound on the return, logged turns included; a prediction beyond it is rejected
    max_return: float = math.inf

    def __post_init__(self) -> None:
        if self.min_probability > 0 and self.calibration is None:
            raise ValueError("min_probability needs a calibration")

    def trusts(self, prediction: Prediction, earned: float = 0.0) -> bool:
        """``earned``: the return of the episode before this turn."""
        if prediction.reward > 0 and earned + prediction.reward > self.max_return + RETURN_ROUNDING:
            return False
        if prediction.confidence < self.min_confidence:
            return False
        if self.calibration is not None and self.calibration.probability(prediction) < self.min_probability:
            return False
        decides = prediction.reward != 0 or prediction.terminated
        return not decides or prediction.outcome_confidence >= self.min_outcome_confidence


NO_GUARD = Guard(min_confidence=0.0, min_outcome_confidence=0.0)


class DreamEnv:
    """One dreamed episode at a time; to the rollout it looks like any other environment.

    ``Task.spec["start"]`` names the start state, ``Task.spec["noise"]`` the share of answers that ``noise`` makes
    useless. A broken prediction is an ``EnvFailure``, an unsure one a truncation. ``info`` of a turn holds
    the model's own confidence and, with a calibration, ``probability`` and ``outcome_probability``: how likely the
    turn, or its reward and end, are to be right.
    """

    _sessions = count()

    def __init__(
        self,
        world_model: WorldModel,
        starts: Mapping[str, Start],
        guard: Guard = NO_GUARD,
        calibration: Calibration | None = None,
        noise: UselessAnswers | None = None,
    ) -> None:
        self._model = world_model
        self._noise = noise
        self._noise_share = 0.0
        self._starts = starts
        self._guard = guard
        self._calibration = calibration
        self._start: Start | None = None
        self._history: list[Turn] = []
        self._session = next(DreamEnv._sessions)
        self._seed = 0
        self._ended = True

    async def reset(self, task: Task, seed: int) -> Observation:
        """Raises ``KeyError``: the task names a start state that is not there."""
        self._start = self._starts[task.spec["start"]]
        self._history = [*self._start.history, *task.dreamed]
        self._seed = seed
        self._noise_share = float(task.spec.get(NOISE, 0.0))
        self._ended = False
        return Observation(self._start.text, history=tuple(self._history))

    async def step(self, action: str) -> StepResult:
        """
        Raises:
            RuntimeError: before ``reset`` or after the end.
            EnvFailure: the prediction is malformed or generation broke.
        """
        if self._start is None or self._ended:
            raise RuntimeError("step needs a reset first, and the last episode has ended")
        seed = derive_seed("world model", self._seed, len(self._history))
        try:
            prediction = await self._model.predict(
                self._start.text, self._history, action, seed, ("dream", self._session)
            )
        except ContextFull:
            self._ended = True
            return StepResult(Observation(""), None, False, True, stop=StopReason.CONTEXT_LIMIT)
        except PredictionInvalid as error:
            self._ended = True
            raise EnvFailure(StopReason.PREDICTION_INVALID, str(error)) from error
        except EngineFailure as error:
            self._ended = True
            raise EnvFailure(StopReason.ENGINE_FAILED, str(error)) from error
        info = prediction.record()
        if self._calibration is not None:
            info["probability"] = self._calibration.probability(prediction)
            info["outcome_probability"] = self._calibration.outcome_probability(prediction)
        # only the words: reward and end stay the model's, and so does how sure it was of them
        if self._noise is not None and not prediction.reward and not prediction.terminated:
            useless = self._noise.instead(self._start.text, action, self._noise_share, self._seed)
            if useless is not None:
                prediction, info[NOISE] = replace(prediction, observation=useless), True
        observation = Observation(prediction.observation)
        reward = prediction.reward
        if not self._guard.trusts(prediction, sum(turn.reward or 0.0 for turn in self._history)):
            reward = 0.0  # what the model is unsure of pays nothing, whether the dream goes on or not
            if self._guard.ends:
                self._ended = True
                return StepResult(observation, reward, False, True, info, StopReason.UNSURE)
            info["doubted"] = True
        self._history.append(Turn(action, prediction.observation, reward, prediction.terminated))
        self._ended = prediction.terminated
        return StepResult(observation, reward, prediction.terminated, False, info)

    async def close(self) -> None:
        self._model.release(("dream", self._session))
        self._ended = True


def starts_from_log(log: Sequence[Trajectory], branch: bool) -> dict[str, Start]:
    """Start states by name: the beginning of each task once, and with ``branch`` every state of the log between turns.

    A state from which nothing more can happen (the last one of an episode) is no start. Names are stable across runs.
    """
    starts: dict[str, Start] = {}
    for trajectory in log:
        depth = max(1, len(trajectory.turns)) if branch else 1  # of a reset alone (play.reset_only), its beginning
        for k in range(depth):
            history = trajectory.turns[:k]
            digest = hashlib.sha256(repr([t.action for t in history]).encode()).hexdigest()[:12]
            starts.setdefault(f"{trajectory.task_id}@{digest}", Start(trajectory.task_id, trajectory.start, history))
    return starts


def dream_starts(log: Sequence[Trajectory], max_turns: int) -> dict[str, Start]:
    """Where dreams begin. Deeper states than ``max_turns`` cost their whole history and teach no more."""
    starts = starts_from_log(log, branch=True)
    return {name: start for name, start in starts.items() if len(start.history) < max_turns}
