"""Is what an environment answered an answer at all? Asked of every real step, so it has to be cheap."""

from __future__ import annotations

import math
from collections.abc import Mapping

from real_envs.env import StepResult
from real_envs.trajectory import Observation, StopReason, Turn


def wrong_with_reset(answer: object) -> list[str]:
    """What is wrong with what ``reset`` returned, one phrase a finding; an empty list means nothing."""
    if _is_text(answer):
        return []
    return [f"returned {type(answer).__name__}, which is no Observation of text"]


def wrong_with_step(answer: object) -> list[str]:
    """What is wrong with what ``step`` returned, one phrase a finding; an empty list means nothing."""
    if not isinstance(answer, StepResult):
        return [f"returned {type(answer).__name__}, which is no StepResult"]
    wrong = []
    if not _is_text(answer.observation):
        wrong.append("the observation is no Observation of text")
    if type(answer.terminated) is not bool or type(answer.truncated) is not bool:
        wrong.append("terminated and truncated are no bools")
    elif answer.terminated and answer.truncated:
        wrong.append("terminated and truncated are both true")
    if answer.reward is not None and not _is_finite(answer.reward):
        wrong.append(f"the reward is {_short(answer.reward)}, neither a finite number nor None")
    if answer.stop is not None:
        wrong += _wrong_with_stop(answer.stop, answer.truncated)
    if not isinstance(answer.info, Mapping) or not all(_is_plain(*item) for item in answer.info.items()):
        wrong.append("info holds more than numbers, strings and bools")
    return wrong


def _wrong_with_stop(stop: object, truncated: object) -> list[str]:
    if not isinstance(stop, StopReason):
        return [f"stop is {_short(stop)}, which is no StopReason"]
    if stop.is_failure:
        return [f"stop is {stop!r}: a failure has to be raised as EnvFailure"]
    if stop.is_truncation and truncated is not True:
        return [f"stop is {stop!r} but truncated is false"]
    return []


def _is_text(observation: object) -> bool:
    return (
        isinstance(observation, Observation)
        and isinstance(observation.text, str)
        and isinstance(observation.history, tuple)
        and all(isinstance(turn, Turn) for turn in observation.history)
    )


def _is_finite(reward: object) -> bool:
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        return False
    try:
        return math.isfinite(reward)
    except OverflowError:  # an int beyond all floats
        return False


def _is_plain(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, (float, int, str))


def _short(value: object) -> str:
    return repr(value)[:60]
