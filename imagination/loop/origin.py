"""A loop that begins from another run: its world model and policy meet tasks that they have never seen.

What comes along are models and the log of the *training* tasks of that run: to be refitted to beside new transitions,
and for its experts. Dreams begin in the new tasks alone, at first in what a reset shows of each.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from imagination.data.augmentation import HINDSIGHT
from imagination.learning.critic import NAME as CRITIC
from imagination.rollout.play import Provenance, Replay, play_all, reset_only
from imagination.runs.lifecycle import find_run, need
from imagination.runs.log import ORIGIN, open_store
from imagination.runs.run_folder import RunFolder
from imagination.scale.ray_envs import real_tasks
from imagination.session import Session
from imagination.settings import UserError
from real_envs.env import EnvFailure, TaskSet
from real_envs.store import StoreError, TrajectoryStore
from real_envs.trajectory import Source, Trajectory
from worldmodel.rules.rule_set import FILE


def begin(session: Session) -> None:
    """Takes over another run's models and log, and makes a log of what resets of this one's training tasks show.

    Raises ``UserError``: see ``take_over``, or a task is not new; ``EnvFailure``: the world does not answer.
    """
    config, run = session.config, session.run

    async def reset_new_tasks() -> None:
        tasks = real_tasks(session)
        try:
            _check_new(run, tasks)
            store = open_store(run, config.env.name, tasks)
            known, resets = store.ids(), map(reset_only, tasks.tasks("train"))
            new = [episode for episode in resets if episode.id not in known]
            shown = await play_all(new, tasks.make_env, Replay(()), Provenance(Source.REAL), max_turns=0)
            for start in shown:
                if start.stop.is_failure:
                    raise EnvFailure(start.stop, f"{start.task_id}: {start.failure}")
            store.append(shown)
        finally:
            await tasks.close()

    take_over(session)
    asyncio.run(reset_new_tasks())


def take_over(session: Session) -> None:
    """Copies the models and the log of ``loop.origin``, its ``loop.policy`` as ``policy-clone``; can be done again.

    Raises ``UserError``: there is no such run, it lacks a model, or its log is of another world.
    """
    run, world, name = session.run, session.config.env.name, session.config.loop.origin
    policy = session.config.loop.policy
    source = find_run(name, session.config.output, "loop.origin")
    need(source.model("worldmodel"), "fit-world-model")
    need(source.model(policy), "clone")
    try:
        logged = TrajectoryStore.open(source.log).meta.get("environment")
    except StoreError as error:
        raise UserError(f"loop.origin={name}: {error}") from None
    if logged != world:
        raise UserError(f"loop.origin={name} is a run of {logged}, and env={world} is played")
    for folder in (*source.model("worldmodel").parent.glob("worldmodel*"), source.model(policy)):
        copy_folder(folder, run.model("policy-clone" if folder.name == policy else folder.name))
    for name in read_beside(source, session.config.experience):
        shutil.copy(source.path / name, run.path / name)
    copy_folder(source.log, run.origin)
    run.update({key: source.summary[key] for key in ("world_model_form", "best_return") if key in source.summary})


def read_beside(run: RunFolder, experience: str, hindsight: bool = False, critic: bool = False) -> list[str]:
    """What of a run's folder, where it is there, a training reads beside games, log, world models and policy.

    ``hindsight``: it dreams of goals of this run's tasks; ``critic``: its policy is that of `fit-critic`.
    """
    names = [f"models/{FILE}", *[f"models/{experience}"] * bool(experience)]
    names += [f"supplements/{HINDSIGHT}"] * hindsight + [f"models/{CRITIC}"] * critic
    return [name for name in names if (run.path / name).exists()]


def _check_new(run: RunFolder, tasks: TaskSet) -> None:
    """Raises ``UserError``: a task, perhaps a held-out one, is a training task of the origin."""
    known = set(TrajectoryStore.open(run.origin).tasks("train"))
    for kind, split in (("tasks", "train"), ("held-out tasks", "heldout")):
        some = tasks.tasks(split)
        if both := [task.id for task in some if task.id in known]:
            raise UserError(
                f"{len(both)} of {len(some)} {kind}, such as {both[0]}, are tasks of loop.origin as well: set another "
                "seed, or the env.options that tell the new ones apart"
            )


def of_new_tasks(log: Sequence[Trajectory]) -> list[Trajectory]:
    """Without the episodes of the origin."""
    return [episode for episode in log if not episode.id.startswith(ORIGIN)]


def copy_folder(source: Path, target: Path) -> None:
    """A copy that is whole; cut off, it can be made again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
