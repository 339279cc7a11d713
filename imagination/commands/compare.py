"""Dreams beside reality, pair by pair and policy by policy, in any world of the protocols ``Env`` and ``TaskSet``.

Where it does not answer the same actions in the same way, given task and seed, a replay parts from its dream by chance.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from imagination.commands.screens import compare_screens
from imagination.evaluation.compare.free_play import free_play
from imagination.evaluation.compare.pairs import Pair, consistency, pair_json, statistics
from imagination.evaluation.compare.play import ComparisonPlayer, Ledger
from imagination.evaluation.compare.signals import signal_table
from imagination.evaluation.costs import real_costs
from imagination.evaluation.world_model_eval import heldout_tasks
from imagination.report.compare_page import render_page
from imagination.report.compare_text import diverging, pair_view, summary_table
from imagination.rollout.dream_env import NO_GUARD, starts_from_log
from imagination.runs.lifecycle import open_run
from imagination.runs.worlds import can_play
from imagination.scale.ray_envs import real_tasks
from imagination.session import Session
from imagination.settings import Config, UserError
from policy.agent import LanguageModelAgent
from real_envs.env import Task, TaskSet
from real_envs.files import read_json, write_atomically
from real_envs.grouping import grouped
from real_envs.screens import FOLDER
from real_envs.store import TrajectoryStore
from real_envs.store.codec import nearest
from real_envs.trajectory import Trajectory
from real_envs.worker_pool import real_interaction


def compare(config: Config, folder: Path, reality: TaskSet | None = None) -> None:
    """Compare dreams with the real environment, turn by turn.

    Replays the actions of dreamed episodes in the real environment, dreams logged episodes again with their
    own actions, and aligns each pair: where do they differ first, and in what? Then compares the policy in
    both worlds: success, length, actions, tokens and cost. Without a real environment only the log is used.
    compare.html is one file to search, filter and share; compare.show=<id> prints one pair and plays nothing.

    Reads: models/, and games/ or log/ (compare.show: compare.json)
    Writes: compare.html, compare.json (worldmodel.kind=screen: compare-screens.html and .json)

    Examples:
        imagine compare run=mine
        imagine compare run=mine compare.policy=policy-clone compare.episodes=50
        imagine compare run=mine compare.show=dream/train/tw-r3-o5-q5-s1/0

    Args:
        reality: the real world by split; ``None`` takes the run's own tasks, or nothing if it has none.

    Raises:
        UserError: settings contradict each other, an earlier stage is missing, or there is no such pair.
    """
    if config.worldmodel.kind == "screen":
        compare_screens(config, folder)
        return
    console = Console()
    if config.compare.show:
        console.print(pair_view(_find(folder, config.compare.show), console.width))
        return
    run = open_run(config, folder)
    run.forget("compare")
    before = real_interaction()
    with run.timed("compare"):
        comparison = asyncio.run(_compare(Session(config, run), reality))
    spent = real_interaction() - before
    spent.steps = int(sum(comparison["cost"]["real_steps"].values()))  # also of worlds without worker processes
    run.update(real_costs("compare", spent, config.env.price))
    write_atomically(folder / "compare.json", json.dumps(comparison, allow_nan=False))
    write_atomically(folder / "compare.html", render_page(comparison, [run.games / FOLDER, run.log / FOLDER]))
    console.print(summary_table(comparison))
    for pair in diverging(comparison["pairs"], config.compare.pairs):
        console.print(pair_view(pair, console.width, brief=True))
    console.print(f"all pairs: {folder / 'compare.html'}", soft_wrap=True)


def _find(folder: Path, wanted: str) -> dict[str, Any]:
    path = folder / "compare.json"
    if not path.exists():
        raise UserError(f"{path} is not there yet; run `imagine compare` with the same run= and no compare.show first")
    pairs = {pair["id"]: pair for pair in read_json(path)["pairs"]}
    if wanted not in pairs:
        raise UserError(f"{path} has no pair '{wanted}'; {nearest(wanted, pairs)}")
    return dict(pairs[wanted])


async def _compare(session: Session, reality: TaskSet | None) -> dict[str, Any]:
    own = real_tasks(session) if reality is None and can_play(session.run, session.config.env) else None
    try:
        return await _play(session, own if reality is None else reality)
    finally:
        if own is not None:
            await own.close()


async def _play(session: Session, reality: TaskSet | None) -> dict[str, Any]:
    config, run = session.config, session.run
    store = TrajectoryStore.open(run.log) if (run.log / "manifest.json").exists() else None
    notes: list[str] = []
    splits = _splits(config, store, reality)
    ledger = Ledger(session.engines)
    known = session.known if store else []
    world = session.world_model(known)
    guard = session.guard() if config.compare.guard else NO_GUARD
    player = ComparisonPlayer(session, session.paying(world, known), guard, reality, *_policy(session), ledger)
    if reality is None:
        notes.append("This world cannot be played for real: only logged episodes are paired.")
    if config.engine.name == "openai":
        notes.append("What the server sampled for the world model is not among the generated tokens.")
    pairs: list[Pair] = []
    free: list[dict[str, Any]] = []
    aligned: list[dict[str, Any]] = []
    for split in splits:
        log = _unseen(session, store, split)
        of_split: list[Pair] = []
        if player.agent is not None and config.compare.episodes:
            starts = {start.task_id: start for start in starts_from_log(log, branch=False).values()}
            tasks = [Task(task_id) for task_id in sorted(starts)] if reality is None else reality.tasks(split)
            tasks = tasks[: config.evaluate.tasks or None]
            dreams, reals, of_split = await player.policy(split, tasks, starts)
            played = free_play(dreams, reals, player.agent.chat.encode, config.seed)
            if reals is not None:
                free_of = {(real.task_id, real.seed): real for real in reals}
                played |= consistency(of_split, [free_of[pair.real.task_id, pair.real.seed] for pair in of_split])
            free.append({"split": split, **played})
        if config.compare.logged:
            chosen = _choose(log, config.compare.logged, config.evaluate.tasks or None)
            if not chosen:
                notes.append(f"Split '{split}' has no logged episode that no model was trained on.")
            of_split = of_split + await player.logged(split, chosen, world.excluding(chosen))
        for source in ("dream", "log"):
            if found := [pair for pair in of_split if pair.source == source]:
                aligned.append({"source": source, "split": split, **statistics(found)})
        pairs += of_split
    signals: list[dict[str, Any]] = []
    if config.compare.signals and store:
        unseen = heldout_tasks(run)
        signals = await signal_table(session, pairs, unseen, world.excluding(unseen))
    return {
        "format": "imagination-comparison",
        "version": 1,
        "run": config.run,
        "seed": config.seed,
        "temperature": config.compare.temperature,
        "guard": config.dream.min_confidence if config.compare.guard else None,
        "max_turns": config.evaluate.max_turns,
        "policy": config.compare.policy,
        "policy_version": player.policy_version,
        "world_model_version": world.version,
        "hardware": run.summary.get("hardware"),
        "notes": notes,
        "aligned": aligned,
        "free": free,
        "signals": signals,
        "cost": ledger.cost,
        "pairs": [pair_json(pair) for pair in pairs],
    }


def _policy(session: Session) -> tuple[LanguageModelAgent | None, str | None]:
    config = session.config
    name = config.compare.policy
    if not name or not config.compare.episodes:
        return None, None
    own = session.run.model(name)
    elsewhere = not own.exists() and (Path(name) / "config.json").exists()  # a folder policy/ of sources is no model
    policy = session.policy(Path(name) if elsewhere else own)
    return session.agent(policy, config.compare.temperature), policy.version


def _splits(config: Config, store: TrajectoryStore | None, reality: TaskSet | None) -> list[str]:
    """The splits to compare: those that were asked for, or all of the log and the games. Raises ``UserError``: there is
    no such split, or nothing to compare.
    """
    known = list(store.splits) if store else []
    if not known and reality is not None:
        known = config.compare.splits or ["train", "heldout"]
    if not known:
        raise UserError(
            f"{config.run} has neither log/ nor games/: there is nothing to compare; collect episodes first"
        )
    for split in config.compare.splits:
        if split not in known:
            raise UserError(f"compare.splits names '{split}'; {nearest(split, known)}")
    return config.compare.splits or known


def _unseen(session: Session, store: TrajectoryStore | None, split: str) -> list[Trajectory]:
    """Logged episodes of a split that no model was trained on."""
    if store is None:
        return []
    if split == "train":
        return session.log.held
    tasks = frozenset(store.tasks(split))
    logged = (t for t in store.read(require_actions=False) if t.task_id in tasks)
    return sorted((t for t in logged if t.turns and not t.stop.is_failure), key=lambda t: t.id)


def _choose(log: Sequence[Trajectory], per_task: int, tasks: int | None) -> list[Trajectory]:
    """The same few of each task every time, whoever played them."""
    shuffled = sorted(log, key=lambda t: hashlib.sha256(t.id.encode()).digest())
    chosen = grouped(shuffled, lambda t: t.task_id)
    return [episode for task in sorted(chosen)[:tasks] for episode in chosen[task][:per_task]]
