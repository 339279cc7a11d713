from __future__ import annotations

import asyncio
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from imagination.runs.lifecycle import need
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import open_tasks, world_settings
from imagination.settings import Config, UserError
from imagination.settings.compose import config_folder, remembered_overrides
from real_envs.files import read_json, write_atomically
from real_envs.panels import Panel, digest, installed
from real_envs.world import FILE, find_world
from real_envs.worlds.generated import GeneratedWorld

# options of a world that make no held-out task
_BESIDE = {"data", "delay", "screenshots", "train", "train_fold", "variations"}


def panel(config: Config, folder: Path) -> None:
    """Write down the held-out tasks of a run, for other runs to be judged on.

    Tasks drawn by a seed differ from seed to seed, and environments change them from version to version. A
    panel names each task, its first text by a digest, and the version of the package that plays it.
    `imagine collect run=other seed=1 games.panel=outputs/mine/panel.json` judges another run on it, and
    refuses what differs.

    Reads: games/
    Writes: panel.json

    Examples:
        imagine panel run=mine
        imagine panel run=mine output=runs
    """
    splits = read_json(need(folder / "games" / FILE, "collect"))["splits"]
    run = RunFolder(folder, config.seed)
    aside = ("run=", "output=", "seed=", "collect.")
    words = [word for word in remembered_overrides(folder) if not word.startswith(aside)]
    chosen = shlex.join(words or [f"env={config.env.name}"])
    first: dict[str, Any] = {}  # of tasks that begin alike one is enough
    for text, task in zip(asyncio.run(first_texts(config, run)), splits["heldout"], strict=True):
        first.setdefault(digest(text), task)
    made = Panel(
        world=config.env.name,
        options={key: value for key, value in _options(config).items() if key not in _BESIDE},
        package=installed(world_of_panel(config.env.name).package),
        rule=f"the {len(first)} held-out tasks, no two of which begin alike, that `imagine collect {chosen}` drew with "
        f"seed {config.seed}",
        tasks=list(first.values()),
        starts=list(first),
    )
    print(write_atomically(folder / "panel.json", made.text()))


def chosen_panel(config: Config) -> Panel:
    """``games.panel``. Raises ``UserError``: there is none of that name, or it is of another world, version, option."""
    named = config.games.panel
    known = {path.stem: path for path in (config_folder() / "panels").glob("*.json")}
    if not named.endswith(".json") and named not in known:
        raise UserError(f"games.panel={named}: there is none of that name; known are {', '.join(sorted(known))}")
    chosen = Panel.load(known.get(named, Path(named)))
    chosen.check(config.env.name, world_of_panel(config.env.name).package, _options(config))
    return chosen


def world_of_panel(name: str) -> GeneratedWorld:
    """The world of that name; ``UserError``: it has no panels."""
    world = find_world(name)
    if not isinstance(world, GeneratedWorld) or not hasattr(world, "package"):
        raise UserError(f"games.panel: env={name} has no panels, as nobody knows which version it is")
    return world


def _options(config: Config) -> dict[str, Any]:
    return asdict(world_settings(config.env, config.games))


async def first_texts(config: Config, run: RunFolder) -> list[str]:
    """Of the held-out tasks, each of which is reset; as sorted words where the order of things is not the task's."""
    tasks, in_order = open_tasks(run, config.env, 1), world_of_panel(config.env.name).in_order
    env = tasks.make_env()
    try:
        texts = [(await env.reset(task, 0)).text for task in tasks.tasks("heldout")]
        return texts if in_order else [" ".join(sorted(text.split())) for text in texts]
    finally:
        await env.close()
        await tasks.close()
