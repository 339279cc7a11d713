"""The real world of a run: which one the settings name, and its tasks in the run folder."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from imagination.runs.lifecycle import need
from imagination.runs.run_folder import RunFolder
from imagination.settings import EnvSettings, GamesSettings, UserError
from imagination.settings.schema import build, field_types, typed
from real_envs.env import EnvFailure, TaskSet
from real_envs.files import check_checksums
from real_envs.store import MANIFEST, TrajectoryStore
from real_envs.world import FILE, World, find_world
from real_envs.worlds.textworld import TextWorld


def world_settings(settings: EnvSettings, games: GamesSettings) -> Any:
    """``env.options`` as the dataclass that the world declares; the size of TextWorld's games stands in ``games``.
    Raises ``UnknownWorld``: there is no such world here; ``ConfigError``: it has no such option, or not that value.
    """
    sizes = {"rooms": games.rooms, "objects": games.objects, "quest_length": games.quest_length}
    known = sizes if settings.name == TextWorld.name else {}
    schema = find_world(settings.name).settings
    texts = {name for name, kind in field_types(schema).items() if kind is str}  # env.options.train=0 is the text 0
    options = {name: typed(value) if name in texts else value for name, value in settings.options.items()}
    return build(schema, {**known, **options}, "env.options")


def logged_world(run: RunFolder) -> str | None:
    """The world that the run's log is of; ``None`` where there is no log yet."""
    if not (run.log / MANIFEST).exists():
        return None
    return str(TrajectoryStore.open(run.log).meta.get("environment", "a world without a name"))


def check_world(run: RunFolder, settings: EnvSettings) -> None:
    """Raises ``UserError``: the run's log is of another world than the one that would be played, or the price of a step
    is none.
    """
    if not 0 <= settings.price < float("inf"):
        raise UserError(f"env.price is what a real step costs, 0 or more, got {settings.price}")
    logged = logged_world(run)
    if logged not in (None, settings.name):
        raise UserError(
            f"{run.log} is of {logged}, but env={settings.name} would be played; set env= to the world of the log, "
            "use another run=, or `imagine report` for what this run has"
        )


def open_tasks(run: RunFolder, settings: EnvSettings, workers: int, privileged: bool = False) -> TaskSet:
    """The run's tasks and environments to play them in; the caller closes them. Raises ``UserError``: ``collect`` has
    not made them, one is damaged or held out and trained in, by games and log together, or the log is of another world;
    ``UnknownWorld``: the world is not installed here.
    """
    need(run.games / FILE, "collect")
    check_checksums(run.games)
    check_world(run, settings)
    tasks = find_world(settings.name).open(run.games, privileged, workers)
    if (run.log / MANIFEST).exists():
        logged = TrajectoryStore.open(run.log).splits
        for split, other, what in (("heldout", "train", "held-out tasks"), ("train", "heldout", "training tasks")):
            if both := {task.id for task in tasks.tasks(split)}.intersection(logged.get(other, ())):
                raise UserError(
                    f"{len(both)} {what}, such as {min(both)}, are of split '{other}' in {run.log}: set games.* as it "
                    "was when that log was begun, or use another run="
                )
    return tasks


def can_play(run: RunFolder, settings: EnvSettings) -> bool:
    """Whether the run has tasks of the world of its log: logs of one's own may be of a world that is not here."""
    return (run.games / FILE).exists() and logged_world(run) in (None, settings.name)


async def commands_of(world: World, tasks: TaskSet) -> list[str]:
    """What solves the training games: commands that agents in other games confuse with theirs; none if they cannot."""
    if not getattr(world, "elsewhere", True):
        return []
    commands: dict[str, None] = {}
    env = tasks.make_env()
    for task in tasks.tasks("train"):
        with suppress(EnvFailure):  # what breaks here says so when it is played
            plan = (await env.reset(task, 0)).privileged.get("policy_commands", [])
            assert isinstance(plan, list)
            commands |= dict.fromkeys(str(command) for command in plan)
    await env.close()
    return list(commands)
