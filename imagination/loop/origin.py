"""A loop that begins from another run: its world model and policy meet tasks that they have never seen.

What comes along are models and the log of the *training* tasks of that run: to be refitted to beside new transitions,
and for its experts. Dreams begin in the new tasks alone, at first in what a reset shows of each.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from imagination.data.augmentation import HINDSIGHT
from imagination.learning.critic import NAME as CRITIC
from imagination.rollout.dream_env import Start, starts_from_log
from imagination.runs.lifecycle import find_run, need
from imagination.runs.log import ORIGIN, open_store
from imagination.runs.run_folder import RunFolder
from imagination.scale.ray_envs import real_tasks
from imagination.session import Session
from imagination.settings import UserError
from real_envs.env import TaskSet
from real_envs.files import read_json, write_atomically
from real_envs.store import StoreError, TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory
from worldmodel.rules.rule_set import FILE

STARTS = "starts.json"


def begin(session: Session) -> None:
    """Takes over another run's models and log, looks at each task of this one, and makes an empty log for it."""
    config, run = session.config, session.run

    async def look() -> None:
        tasks = real_tasks(session)
        try:
            await first_looks(run, tasks)
            open_store(run, config.env.name, tasks)
        finally:
            await tasks.close()

    take_over(session)
    asyncio.run(look())


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


async def first_looks(run: RunFolder, tasks: TaskSet) -> None:
    """Writes what a reset of each training task shows; no step is taken. Raises ``UserError``: a task, perhaps a
    held-out one, is a training task of the origin; ``EnvFailure``: the world does not answer.
    """
    known = set(TrajectoryStore.open(run.origin).tasks("train"))
    played = tasks.tasks("train")
    for kind, some in (("tasks", played), ("held-out tasks", tasks.tasks("heldout"))):
        if both := [task.id for task in some if task.id in known]:
            raise UserError(
                f"{len(both)} of {len(some)} {kind}, such as {both[0]}, are tasks of loop.origin as well: set another "
                "seed, or the env.options that tell the new ones apart"
            )
    env = tasks.make_env()
    try:
        shown = {task.id: (await env.reset(task, 0)).text for task in played}
    finally:
        await env.close()
    write_atomically(run.path / "loop" / STARTS, json.dumps(shown, indent=1))


def roots(run: RunFolder) -> dict[str, Start]:
    """Where dreams of new tasks begin, by the names that ``starts_from_log`` gives; none without ``first_looks``."""
    path = run.path / "loop" / STARTS
    shown: Mapping[str, str] = read_json(path) if path.exists() else {}
    seen = [
        Trajectory(task, task, task, Source.REAL, "", 0, text, (), StopReason.TURN_LIMIT)
        for task, text in shown.items()
    ]
    return starts_from_log(seen, branch=False)


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
