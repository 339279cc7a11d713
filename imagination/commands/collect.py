from __future__ import annotations

import asyncio
from pathlib import Path

from imagination.commands.panel import chosen_panel, first_texts, world_of_panel
from imagination.evaluation.costs import real_costs, spent_before
from imagination.rollout.play import Episode, Provenance, Watch, note_broken, play_all
from imagination.runs.lifecycle import run_stage
from imagination.runs.log import open_store
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import check_world, commands_of, open_tasks, world_settings
from imagination.settings import Config, UserError
from real_envs.env import TaskSet
from real_envs.files import CHECKSUMS, check_checksums, write_checksums
from real_envs.screens import FOLDER
from real_envs.scripted_agents import deal
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory
from real_envs.worker_pool import real_interaction
from real_envs.world import find_world


def collect(config: Config, folder: Path) -> None:
    """Generate tasks and log scripted agents in the real environment.

    Makes a training and a held-out set of tasks, and plays them with expert, noisy, careless and random
    agents. Every episode goes into the log, from which all later training starts.

    Reads: nothing
    Writes: games/, log/

    Examples:
        imagine collect run=mine
        imagine collect run=mine env=textworld_express env.options.game=twc
    """
    with run_stage(config, folder, "collect", models=False) as run:
        check_world(run, config.env)
        generate_tasks(config, run)
        asyncio.run(_collect(config, run))


def generate_tasks(config: Config, run: RunFolder) -> None:
    """Tasks of both splits, in ``games/``. Raises ``UserError``: the world has not so many different ones, or one that
    is there is damaged.
    """
    check_checksums(run.games)
    (run.games / CHECKSUMS).unlink(missing_ok=True)  # a stop before new ones are written leaves none
    counts = {"train": config.games.train, "heldout": config.games.heldout}
    settings = world_settings(config.env, config.games)
    panel = chosen_panel(config) if config.games.panel else None
    if panel is not None:
        counts["heldout"] = len(panel.tasks)
    with Bar("generate games", sum(counts.values())) as bar:
        asked = run.games, counts, config.seed, settings, lambda done, total: bar.advance(done), config.collect.workers
        try:
            if panel is None:
                find_world(config.env.name).generate(*asked)
            else:
                world_of_panel(config.env.name).generate(*asked, panel)
        except ValueError as error:
            raise UserError(f"env={config.env.name}: {error}") from error
    write_checksums(run.games)
    if panel is not None:
        panel.check_starts(asyncio.run(first_texts(config, run)))
    run.update({"panel": panel and {"name": config.games.panel, "digest": panel.digest}})


def _open_tasks(config: Config, run: RunFolder) -> TaskSet:
    if config.scale.name == "none":
        return open_tasks(run, config.env, config.collect.workers, privileged=True)
    from imagination.scale.ray_envs import real_tasks  # it loads torch
    from imagination.session import Session

    return real_tasks(Session(config, run), privileged=True)


async def _collect(config: Config, run: RunFolder) -> None:
    tasks = _open_tasks(config, run)
    store = open_store(run, config.env.name, tasks)
    world = find_world(config.env.name)
    known = store.ids()
    plan = {"train": config.collect.episodes, "heldout": config.collect.heldout_episodes}
    episodes: list[Episode] = []
    agents = {}
    before, earlier = real_interaction(), spent_before(run, "collect")
    commands = await commands_of(world, tasks)
    for split, per_task in plan.items():
        played = tasks.tasks(split)
        # over all tasks of the split: with few episodes a task, an agent of a small share would play in none of them
        dealt = deal(world.behaviours(commands), per_task * len(played), derive_seed(f"agents/{split}", config.seed))
        for place, agent in enumerate(dealt):
            number, k = divmod(place, per_task)
            task = played[number]
            name = f"{task.id}/{agent.name}/{k}"
            if name not in known:
                seed = derive_seed(f"collect/{split}", config.seed, number, k)
                episodes.append(Episode(name, task, group_id=f"{task.id}/{agent.name}", seed=seed))
                agents[name] = agent
    try:
        with (
            Bar("collect episodes", len(episodes), "turns") as bar,
            store.writer(pictures=run.games / FOLDER) as writer,
        ):

            def keep(trajectory: Trajectory) -> None:
                bar.step()
                bar.count(len(trajectory.turns))
                writer.add(trajectory)

            finished = await play_all(
                episodes,
                tasks.make_env,
                lambda episode: agents[episode.id],
                lambda episode: Provenance(Source.EXPERT if agents[episode.id].name == "expert" else Source.REAL),
                config.collect.max_turns,
                concurrency=config.scale.real_processes(config.collect.workers),
                watch=Watch(keep),
            )
    finally:  # also after Ctrl-C: what was played was played
        run.update(real_costs("collect", earlier + (real_interaction() - before), config.env.price))
    note_broken(
        finished, "; nothing is learned from these, and this run plays none again: mend that, with another run="
    )
    await tasks.close()
