from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from imagination.commands.panel import chosen_panel, first_texts, world_of_panel
from imagination.evaluation.costs import real_costs, spent_before
from imagination.rollout.play import Episode, Provenance, Replay, note_broken, play_all, reset_only
from imagination.runs.lifecycle import find_run, need, run_stage
from imagination.runs.log import open_store
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import check_world, commands_of, open_tasks, world_settings
from imagination.settings import Config, UserError
from real_envs.env import Agent, TaskSet
from real_envs.files import CHECKSUMS, check_checksums, read_json, write_atomically, write_checksums, write_json
from real_envs.screens import FOLDER
from real_envs.scripted_agents import deal
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory
from real_envs.worker_pool import real_interaction
from real_envs.world import FILE, find_world

_FOCUS = "focus.json"  # in games/: the run by whose policy the training tasks were chosen
_CANDIDATES = 4  # tasks drawn for each that ``games.focus`` keeps


def collect(config: Config, folder: Path) -> None:
    """Generate tasks and log scripted agents in the real environment.

    Makes a training and a held-out set of tasks, and plays them with expert, noisy, careless and random
    agents. Every episode goes into the log, from which all later training starts. With collect.tasks, the other
    training tasks are only reset: dreams begin there as well.

    Reads: nothing
    Writes: games/, log/

    Examples:
        imagine collect run=mine
        imagine collect run=mine env=textworld_express env.options.game=twc
        imagine collect run=mine games.train=2000 collect.tasks=200
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
    focus, note = config.games.focus, run.games / _FOCUS
    if note.exists() and read_json(note)["focus"] != focus:
        (run.games / FILE).unlink(missing_ok=True)
        note.unlink()
    if focus and not note.exists():
        _seen(config)  # what is wrong with that run is said before tasks are drawn
    candidates = _CANDIDATES if focus else 1
    counts = {"train": candidates * config.games.train, "heldout": config.games.heldout}
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
    if focus:
        _keep_focused(config, run)
    write_checksums(run.games)
    if panel is not None:
        panel.check_starts(asyncio.run(first_texts(config, run)))
    run.update({"panel": panel and {"name": config.games.panel, "digest": panel.digest}})


def _seen(config: Config) -> list[tuple[Mapping[str, str], bool]]:
    """The tasks in which the policy of ``games.focus`` was trained from their beginning, and whether it solved them.

    Raises ``UserError``: there is no such run, or it is of another world, or was not trained.
    """
    world, other = world_of_panel(config.env.name), find_run(config.games.focus, config.output, "games.focus")
    check_world(other, config.env)
    tasks = {task.id: task.spec for task in world.drawn(need(other.games / FILE, "collect").parent)[1]["train"]}
    lines = [line for line in other.rollouts("train") if line["task_id"] in tasks and not line["prefix_turns"]]
    if not lines:
        raise UserError(f"games.focus={config.games.focus}: no policy was trained from the beginning of its tasks")
    return [(tasks[line["task_id"]], bool(line["solved"])) for line in lines]


def _keep_focused(config: Config, run: RunFolder) -> None:
    """Of the candidates, those training tasks that are kept. Raises ``UserError``: they differ in no parameter."""
    candidates, path = world_of_panel(config.env.name).drawn(run.games)[1]["train"], run.games / FILE
    if len(candidates) == config.games.train:
        return  # chosen before
    weights = failure_weights([task.spec for task in candidates], _seen(config))
    if len(set(weights)) == 1:
        raise UserError(f"games.focus: tasks of env={config.env.name} with these env.options differ in no parameter")
    rng = random.Random(derive_seed("focus", config.seed))
    # weighted draws without replacement (Efraimidis and Spirakis 2006)
    order = sorted(range(len(weights)), key=lambda k: rng.random() ** (1 / weights[k]), reverse=True)
    data = read_json(path)
    data["splits"]["train"] = [data["splits"]["train"][k] for k in order[: config.games.train]]
    write_json(run.games / _FOCUS, {"focus": config.games.focus})
    write_atomically(path, json.dumps(data, indent=1))


def failure_weights(
    candidates: Sequence[Mapping[str, str]], seen: Sequence[tuple[Mapping[str, str], bool]]
) -> list[float]:
    """How likely a policy fails in tasks, by the parameters that they share with tasks in which it was seen.

    EnvGen (Zala et al. 2024, arXiv 2403.12014) lets a language model adapt environments to what an agent fails at; here
    the failure rate of each value of each parameter does, ``(failures + 1) / (episodes + 2)``, and a task has their
    product. What has another value in almost every task, as a seed has, is no parameter.

    Args:
        candidates: ``Task.spec`` of each; ``"a=1,b=2"`` are two parameters.
        seen: ``Task.spec``, and whether it was solved.

    Example::

        seen = [({"rooms": "2"}, True), ({"rooms": "2"}, True), ({"rooms": "9"}, False), ({"rooms": "9"}, False)]
        failure_weights([{"rooms": "2"}, {"rooms": "9"}], seen)  # [0.25, 0.75]
    """
    episodes: dict[str, dict[str, list[bool]]] = {}
    for spec, solved in seen:
        for key, value in _parameters(spec):
            episodes.setdefault(key, {}).setdefault(value, []).append(solved)
    rates = {
        key: {value: (some.count(False) + 1) / (len(some) + 2) for value, some in values.items()}
        for key, values in episodes.items()
        if 1 < len(values) <= len(seen) / 2
    }
    return [
        math.prod(rates[key].get(value, 0.5) for key, value in _parameters(spec) if key in rates) for spec in candidates
    ]


def _parameters(spec: Mapping[str, str]) -> list[tuple[str, str]]:
    parts = ((key, *part.rpartition("=")[::2]) for key, text in spec.items() for part in str(text).split(","))
    return [(f"{key} {name}".strip(), value) for key, name, value in parts]


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
    logged = Counter(name.rpartition("/")[0].rpartition("/")[0] for name in known)  # by task
    plan = {"train": config.collect.episodes, "heldout": config.collect.heldout_episodes}
    episodes: list[Episode] = []
    agents: dict[str, Agent] = {}
    before, earlier = real_interaction(), spent_before(run, "collect")
    commands = await commands_of(world, tasks)
    for split, per_task in plan.items():
        played = tasks.tasks(split)
        if split == "train" and config.collect.tasks:
            resets = map(reset_only, played[config.collect.tasks :])
            episodes += [episode for episode in resets if episode.id not in known]
            played = played[: config.collect.tasks]
        # over all tasks of the split: with few episodes a task, an agent of a small share would play in none of them
        dealt = deal(world.behaviours(commands), per_task * len(played), derive_seed(f"agents/{split}", config.seed))
        for place, agent in enumerate(dealt):
            number, k = divmod(place, per_task)
            task = played[number]
            name = f"{task.id}/{agent.name}/{k}"
            if name not in known and logged[task.id] < per_task:  # other counts deal others to tasks that have enough
                seed = derive_seed(f"collect/{split}", config.seed, number, k)
                episodes.append(Episode(name, task, group_id=f"{task.id}/{agent.name}", seed=seed))
                agents[name] = agent
    try:
        with (
            Bar("collect episodes", len(episodes), "turns") as bar,
            store.writer(pictures=run.games / FOLDER) as writer,
        ):

            def player(episode: Episode) -> Agent:
                return agents.get(episode.id, Replay(()))

            def keep(trajectory: Trajectory) -> None:
                bar.step()
                bar.count(len(trajectory.turns))
                writer.add(trajectory)

            finished = await play_all(
                episodes,
                tasks.make_env,
                player,
                lambda episode: Provenance(Source.EXPERT if player(episode).name == "expert" else Source.REAL),
                lambda episode: config.collect.max_turns * (episode.id in agents),
                concurrency=config.scale.real_processes(config.collect.workers),
                on_done=keep,
            )
    finally:  # also after Ctrl-C: what was played was played
        run.update(real_costs("collect", earlier + (real_interaction() - before), config.env.price))
    note_broken(
        finished, "; nothing is learned from these, and this run plays none again: mend that, with another run="
    )
    await tasks.close()
