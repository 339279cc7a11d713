"""Does an environment, real or dreamed, keep the protocol of ``real_envs.env``?"""

from __future__ import annotations

from collections.abc import Sequence

from real_envs.answers import wrong_with_reset, wrong_with_step
from real_envs.env import Env, EnvFailure, Task

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
        deterministic: the same seed and actions have to give the same results.
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
