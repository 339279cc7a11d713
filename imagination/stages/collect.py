"""Stage ``collect``: generate the games and log scripted agents of many skills in them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from imagination.dreaming.rollout import Episode, Provenance, play_all
from imagination.runs.lifecycle import finish, open_run
from imagination.runs.progress_bar import bar
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from real_envs.behaviours import deal, mixture
from real_envs.isolation import real_steps_taken
from real_envs.store import TrajectoryStore
from real_envs.textworld import GameSettings, TextWorldTasks
from real_envs.trajectory import Source, Trajectory

GAME_SEEDS = 10_000  # games of different run seeds never share a game seed


def collect(config: Config, folder: Path) -> None:
    """Writes ``games/`` and ``log/``. Episodes that are logged already are kept."""
    run = open_run(config, folder, "collect")
    refuse_foreign_log(run)
    with run.timed("collect"):
        splits = generate_games(config, run)
        store = _open_store(run, splits)
        asyncio.run(_collect(config, run, store))
    finish(run, "collect")


def refuse_foreign_log(run: RunFolder) -> None:
    """
    Raises:
        UserError: the run's log is the user's own, of a world that this program cannot play.
    """
    if (run.log / "manifest.json").exists():
        environment = TrajectoryStore.open(run.log).meta.get("environment")
        if environment != "textworld":
            raise UserError(
                f"{run.log} was not collected in TextWorld, the only world that can be played for real so far; "
                "use another run= for TextWorld, or `imagine report` for what this run has"
            )


def generate_games(config: Config, run: RunFolder) -> dict[str, list[str]]:
    """Games of both splits; task ids by split."""
    games = config.games
    base = 1 + config.seed * GAME_SEEDS
    seeds = {
        "train": list(range(base, base + games.train)),
        "heldout": list(range(base + games.train, base + games.train + games.heldout)),
    }
    with bar("generate games", games.train + games.heldout) as advance:
        tasks = TextWorldTasks.generate(
            run.games,
            seeds,
            GameSettings(games.rooms, games.objects, games.quest_length),
            progress=lambda done, total: advance(done),
            workers=config.collect.workers,
        )
    return {split: [task.id for task in tasks.tasks(split)] for split in seeds}


def _open_store(run: RunFolder, splits: dict[str, list[str]]) -> TrajectoryStore:
    if (run.log / "manifest.json").exists():
        return TrajectoryStore.open(run.log)
    return TrajectoryStore.create(run.log, splits, meta={"environment": "textworld"})


async def _collect(config: Config, run: RunFolder, store: TrajectoryStore) -> None:
    tasks = TextWorldTasks.load(run.games, privileged=True, workers=config.collect.workers)
    known = store.ids()
    plan = {"train": config.collect.episodes, "heldout": config.collect.heldout_episodes}
    episodes: list[Episode] = []
    agents = {}
    commands = await _commands(tasks)
    for split, per_task in plan.items():
        for number, task in enumerate(tasks.tasks(split)):
            for k, agent in enumerate(deal(mixture(commands), per_task, seed=config.seed * 1000 + number)):
                name = f"{task.id}/{agent.name}/{k}"
                if name not in known:
                    seed = config.seed * 1_000_000 + number * 10_000 + k
                    episodes.append(Episode(name, task, group_id=f"{task.id}/{agent.name}", seed=seed))
                    agents[name] = agent
    before = real_steps_taken()
    earlier = run.summary.get("real_steps", {}).get("collect", 0)
    try:
        with bar("collect episodes", len(episodes)) as advance, store.writer() as writer:
            done = 0

            def keep(trajectory: Trajectory) -> None:
                nonlocal done
                done += 1
                advance(done)
                writer.add(trajectory)

            await play_all(
                episodes,
                tasks.make_env,
                lambda episode: agents[episode.id],
                lambda episode: Provenance(Source.EXPERT if agents[episode.id].name == "expert" else Source.REAL),
                config.collect.max_turns,
                concurrency=config.collect.workers,
                on_done=keep,
            )
    finally:  # also after Ctrl-C: what was played was played
        run.update({"real_steps": {"collect": earlier + real_steps_taken() - before}})
    await tasks.close()


async def _commands(tasks: TextWorldTasks) -> list[str]:
    """What solves the training games: commands that agents in other games confuse with theirs."""
    found: dict[str, None] = {}
    env = tasks.make_env()
    for task in tasks.tasks("train"):
        plan = (await env.reset(task, 0)).privileged["policy_commands"]
        assert isinstance(plan, list)
        found |= dict.fromkeys(str(command) for command in plan)
    await env.close()
    return list(found)
