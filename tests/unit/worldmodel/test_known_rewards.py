"""If these fail, a dream pays for what the log of its task never paid, or withholds what it did pay."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.dreamed import steps
from tests.support.scripted import Answering
from worldmodel.rewards import KnownRewardsWorldModel, rewarded_actions
from worldmodel.world_model import Prediction, PredictionInvalid

PAYS = Prediction("In the box.", 0.5, True, confidence=0.4, outcome_confidence=0.5)
NOT = Prediction("Wrong.", 0.0, True, confidence=0.3, outcome_confidence=0.9)


def episode(start: str, *turns: tuple[str, float | None]) -> Trajectory:
    played = tuple(Turn(action, "text", reward, False) for action, reward in turns)
    return Trajectory("e", "t", "g", Source.EXPERT, "a", 0, start, played, StopReason.TERMINATED)


LOG = [
    episode("3 + 4", ("take 7", 0.0), ("put 7", 1.0)),
    episode("3 + 4", ("put 5", 0.0), ("look", None), ("read", 0.5), ("lose", -1.0)),
    episode("2 + 2", ("put 3", 0.0)),
]


def test_rewarded_actions_are_those_that_earned_something_in_a_task() -> None:
    assert rewarded_actions(LOG) == {"3 + 4": frozenset({"put 7", "read"})}


def model(*answers: Prediction | Exception, **settings: int) -> tuple[KnownRewardsWorldModel, Answering]:
    numbers = count()
    inner = Answering(lambda seen, action: answers[min(next(numbers), len(answers) - 1)])
    return KnownRewardsWorldModel(inner, rewarded_actions(LOG), **settings), inner  # type: ignore[arg-type]


def test_what_the_log_never_paid_is_sampled_again() -> None:
    ruled, inner = model(PAYS, PredictionInvalid("no answer"), PAYS, NOT)
    (step,) = steps(ruled, ["put 5"], "3 + 4")
    assert (step.observation.text, step.reward, step.terminated) == ("Wrong.", 0.0, True)
    assert step.info["resampled"] == 3
    assert len(inner.asked) == 4


def test_a_world_model_that_pays_each_time_pays_nothing() -> None:
    ruled, inner = model(PAYS, resamples=2)
    (step,) = steps(ruled, ["put 5"], "3 + 4")
    assert (step.observation.text, step.reward, step.terminated) == ("In the box.", 0.0, True)
    assert step.info["outcome_by"] == "log"
    assert len(inner.asked) == 3


def test_what_was_paid_and_tasks_without_rewards_are_as_before() -> None:
    for action, start in (("put 7", "3 + 4"), ("put 3", "2 + 2"), ("put 5", "a new task")):
        ruled, inner = model(PAYS)
        (step,) = steps(ruled, [action], start)
        assert (step.reward, len(inner.asked)) == (0.5, 1)
    declared = replace(PAYS, outcome_by="predicate")
    ruled, inner = model(declared)
    assert steps(ruled, ["put 5"], "3 + 4")[0].reward == 0.5, "what the world itself says is no guess"
    ruled, inner = model(NOT)
    (step,) = steps(ruled, ["put 5"], "3 + 4")
    assert (step.reward, len(inner.asked)) == (0.0, 1)
    assert step.info["outcome_by"] == "model"
