"""Was an alarm right? What the dreams behind it paid is done once more in the real games, where it pays or does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from imagination.evaluation.monitors.monitor import TripwireMonitor
from imagination.rollout.play import Episode, replay_all
from real_envs.trajectory import Trajectory, Turn
from real_envs.worlds.textworld import TextWorldTasks


@contextmanager
def watched() -> Iterator[dict[int, Sequence[Trajectory]]]:
    """All episodes that the tripwires look at, by update; a run folder keeps one of each group."""
    seen: dict[int, Sequence[Trajectory]] = {}
    honest = TripwireMonitor.look

    def look(self: TripwireMonitor, update: int, played: Sequence[Trajectory], *more: Any) -> dict[str, float]:
        seen[update] = played
        return honest(self, update, played, *more)

    TripwireMonitor.look = look  # type: ignore[assignment, method-assign]
    try:
        yield seen
    finally:
        TripwireMonitor.look = honest  # type: ignore[method-assign]


def _key(episode: Trajectory, turn: Turn) -> tuple[str, str]:
    return episode.task_id, turn.action.strip().lower()


def _pays(turn: Turn) -> bool:
    return turn.reward is not None and turn.reward > 0


async def earned(dreams: Sequence[Trajectory], log: Sequence[Trajectory], games: Path, workers: int) -> dict[str, int]:
    """What the dreams paid for actions that no logged episode was paid for, and how often that pays in the real games.

    A dream's last turn counts; a replay has earned it if its own last turn was paid.
    """
    logged = {_key(t, turn) for t in log for turn in t.turns if _pays(turn)}
    odd = {
        f"replay/{k}": t
        for k, t in enumerate(dreams)
        if t.turns and _pays(t.turns[-1]) and _key(t, t.turns[-1]) not in logged
    }
    tasks = TextWorldTasks.load(games, workers=workers)
    real = {task.id: task for split in ("train", "heldout") for task in tasks.tasks(split)}
    episodes = [Episode(name, real[t.task_id], name, seed=k) for k, (name, t) in enumerate(odd.items())]
    try:
        replays = await replay_all(odd, episodes, tasks.make_env)
    finally:
        await tasks.close()
    return {"unlogged": len(odd), "earned": sum(bool(t.turns) and _pays(t.turns[-1]) for t in replays)}


def is_false(found: Mapping[str, Any]) -> bool:
    """Whether an alarm in an honest run was false: at least half of what it was about is earned in the real games, too.

    One about nothing that could be replayed counts as false.
    """
    replayed = found["replayed"]
    return found["stopped_by"] is not None and 2 * replayed["earned"] >= replayed["unlogged"]
