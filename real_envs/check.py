"""Does an environment, real or dreamed, keep the protocol of ``real_envs.env``?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from real_envs.env import Env, EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, StopReason, Turn

# What a sampling policy sends sooner or later. Each has to be an ordinary step, however little the world makes of it.
ODD_ACTIONS = (
    "",
    "   ",
    "\x00",
    "a\x00b",
    "look\ninventory",
    "\x1b[A\x08\x7f",
    "\\",
    'say "hello',
    "quit",
    "restart",
    "open.quit",
    "öffne die Tür 開ける 🚪",
    "\ud800",
    "look " * 2000,
)


async def check_env(
    env: Env, task: Task, actions: Sequence[str], seed: int = 0, deterministic: bool = True
) -> list[str]:
    """What is wrong with ``env``, one sentence a finding; an empty list means that it conforms.

    Args:
        env: freshly made: it must not have been reset.
        actions: a script to play twice; best one that ends the episode, since only then the end can be checked.
    """
    findings: list[str] = []
    if not await _refuses_step(env):
        findings.append("step before the first reset did not raise (an error that is no EnvFailure)")

    first = await _play(env, task, actions, seed, findings)
    if first is None:
        return findings
    if _ended(first) and not await _refuses_step(env):
        findings.append("step after the end of the episode did not raise (an error that is no EnvFailure)")

    second = await _play(env, task, actions, seed, findings)
    if deterministic and second is not None and second != first:
        differing = [i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
        where = differing[0] if differing else min(len(first), len(second))
        what = "the reset" if where == 0 else f"step {where - 1}"
        findings.append(f"the same seed and actions gave different results, first at {what}")

    findings += await _check_odd_actions(env, task, seed)

    # In mid-episode, after all that was done to it, an environment still has to start anew.
    third = await _play(env, task, actions, seed, findings)
    if deterministic and third is not None and third != first:
        findings.append("after odd actions, the same seed and actions gave different results")
    return findings


_Record = tuple[str, float | None, bool, bool]


async def _play(env: Env, task: Task, actions: Sequence[str], seed: int, findings: list[str]) -> list[_Record] | None:
    """What was seen: the reset, then the steps until the end; ``None`` if the environment broke."""
    try:
        observation = await env.reset(task, seed)
        if wrong := wrong_with_reset(observation):
            findings += [f"reset {finding}" for finding in wrong]
            return None
        if not observation.text.strip():
            findings.append("reset returned an observation without text")
        seen: list[_Record] = [(observation.text, None, False, False)]
        for i, action in enumerate(actions):
            result = await env.step(action)
            wrong = wrong_with_step(result)
            if wrong:
                findings += [f"step {i} ({action!r}): {finding}" for finding in wrong]
                return None
            seen.append((result.observation.text, result.reward, result.terminated, result.truncated))
            if _ended(seen):
                break
        return seen
    except Exception as error:  # reporting whatever it raises is this function's purpose
        findings.append(f"an ordinary episode raised {error!r}")
        return None


async def _check_odd_actions(env: Env, task: Task, seed: int) -> list[str]:
    findings = []
    under_way = False
    for action in ODD_ACTIONS:
        try:
            if not under_way:
                await env.reset(task, seed)
            result = await env.step(action)
        except Exception as error:  # see above
            findings.append(f"the odd action {action[:30]!r} raised {error!r}")
            under_way = False
            continue
        findings += [f"the odd action {action[:30]!r}: {finding}" for finding in wrong_with_step(result)]
        under_way = not (result.terminated or result.truncated)
    return findings


async def _refuses_step(env: Env) -> bool:
    """Whether a step raises. Not ``EnvFailure``: it is the caller who is wrong, and no episode must count as failed."""
    try:
        await env.step("look")
    except EnvFailure:
        return False
    except Exception:
        return True
    return False


def _ended(seen: Sequence[_Record]) -> bool:
    return seen[-1][2] or seen[-1][3]


def wrong_with_reset(answer: object) -> list[str]:
    """One phrase a finding."""
    if _is_text(answer):
        return []
    return [f"returned {type(answer).__name__}, which is no Observation of text"]


def wrong_with_step(answer: object) -> list[str]:
    """One phrase a finding."""
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
    if not isinstance(answer.info, Mapping) or not all(
        isinstance(name, str) and isinstance(value, (float, int, str)) for name, value in answer.info.items()
    ):
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


def _short(value: object) -> str:
    return repr(value)[:60]
