"""Playing many episodes of a stage: which ones, and with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from imagination.rollout import Episode, Provenance, play_all
from imagination.stages.progress import bar
from policy.agent import Agent
from real_envs.env import Env, Task
from real_envs.trajectory import Trajectory


def plan(tasks: Sequence[Task], count: int, prefix: str, seed: int) -> list[Episode]:
    """``count`` episodes of each task, ``<prefix>/<task>/<k>``; their seeds depend on run, task and k alone."""
    return [
        Episode(f"{prefix}/{task.id}/{k}", task, f"{prefix}/{task.id}", seed=seed * 1_000_000 + n * 1000 + k)
        for n, task in enumerate(tasks)
        for k in range(count)
    ]


async def play_with_bar(
    what: str,
    episodes: Sequence[Episode],
    make_env: Callable[[], Env],
    agent: Agent | Callable[[Episode], Agent],
    stamp: Provenance,
    max_turns: int | Callable[[Episode], int],
    concurrency: int,
) -> list[Trajectory]:
    """``play_all`` with a progress bar on standard error."""
    done = 0
    with bar(what, len(episodes)) as advance:

        def count(_: Trajectory) -> None:
            nonlocal done
            done += 1
            advance(done)

        return await play_all(episodes, make_env, agent, stamp, max_turns, concurrency, on_done=count)
