"""Playing many episodes of a stage, or judging them, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from imagination.dreaming.rollout import Episode, Provenance, play_all
from imagination.runs.progress_bar import Bar
from policy.agent import Agent
from real_envs.env import Env
from real_envs.trajectory import Trajectory
from worldmodel.evaluation import Judged, judge
from worldmodel.world_model import WorldModel


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
    with Bar(what, len(episodes), "turns") as bar:

        def count(_: Trajectory) -> None:
            nonlocal done
            done += 1
            bar.advance(done)

        return await play_all(
            episodes, make_env, agent, stamp, max_turns, concurrency, on_done=count, on_turn=bar.count
        )


async def judge_with_bar(
    what: str, model: WorldModel, episodes: Sequence[Trajectory], failed: list[tuple[str, int]] | None = None
) -> list[Judged]:
    """``judge`` with a progress bar on standard error: a large model takes minutes."""
    done = 0
    with Bar(what, len(episodes), "turns") as bar:

        def count(episode: Trajectory) -> None:
            nonlocal done
            done += 1
            bar.count(len(episode.turns))
            bar.advance(done)

        return await judge(model, episodes, failed=failed, on_episode=count)
