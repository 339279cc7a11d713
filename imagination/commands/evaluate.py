from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from imagination.evaluation.costs import real_costs
from imagination.rollout.dream_env import DreamEnv, Start
from imagination.rollout.play import Episode, Provenance, judge_with_bar, plan, play_with_bar, replay_all
from imagination.runs.lifecycle import need, run_stage
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import check_world
from imagination.scale.ray_envs import real_tasks
from imagination.session import Session
from imagination.settings import Config
from policy.agent import LanguageModelAgent
from real_envs.env import TaskSet
from real_envs.trajectory import Source, Trajectory
from real_envs.worker_pool import real_interaction
from worldmodel.evaluation.proportions import noted, summarise
from worldmodel.evaluation.transitions import audit_metrics

REPLAYS = 24  # dreams of the trained policy that are replayed in the real game
SAMPLES = 6  # episodes of each kind that go into rollouts.jsonl per task


def evaluate(config: Config, folder: Path) -> None:
    """Evaluate the policy before and after training, in the real environment and in dreams.

    Plays training and held-out tasks for real and training tasks in dreams, replays dreams in the real
    environment, and evaluates the world model on the policy's own actions.

    Reads: games/, models/
    Writes: rollouts.jsonl, summary.json

    Examples:
        imagine evaluate run=mine
        imagine evaluate run=mine evaluate.episodes=100
    """
    with run_stage(config, folder, "evaluate") as run:
        check_world(run, config.env)
        need(run.model("policy"), "train")  # before the clone plays for real
        run.forget("evaluate")
        asyncio.run(_evaluate(config, run))


async def _evaluate(config: Config, run: RunFolder) -> None:
    session = Session(config, run)
    tasks = real_tasks(session)
    before = real_interaction()
    played: dict[str, list[Trajectory]] = {}
    dreams: list[Trajectory] = []
    policies: dict[str, Any] = {}
    world, guard = session.world_model(), session.guard()
    for which, folder in (("before", "policy-clone"), ("after", "policy")):
        policy = session.policy(folder)
        agent, version = session.agent(policy, config.evaluate.temperature), policy.version
        results: dict[str, Any] = {}
        for split in ("train", "heldout"):
            episodes = await play_real(config, tasks, agent, version, which, split)
            run.add_rollouts("evaluate", _samples(episodes), which=which, split=split)
            results[f"{split}_tasks"] = summarise(episodes).success.to_json()
            if notes := {name: share.to_json() for name, share in noted(episodes).items()}:
                results[f"{split}_notes"] = notes
            played[f"{which}/{split}"] = episodes
        beginnings = [e for e in played[f"{which}/train"] if not e.stop.is_failure]  # as they were really seen
        starts = {e.task_id: Start(e.task_id, e.start) for e in beginnings}
        known = [replace(task, spec={"start": task.id}) for task in tasks.tasks("train") if task.id in starts]
        planned = plan(known, config.evaluate.episodes, f"dream/{which}", config.seed)
        stamp = Provenance(Source.DREAM, version, world.version, session.solved_at)
        dream = partial(DreamEnv, session.paying(world), starts, guard)
        limit = config.evaluate.max_turns
        at_once = max(128, config.engine.slots)
        dreams = await play_with_bar(f"dream {which}", planned, dream, agent, stamp, limit, concurrency=at_once)
        run.add_rollouts("evaluate", _samples(dreams), which=which, split="train")
        results["dream_success"] = summarise(dreams).success.to_json()
        policies[which] = results
    await _replay(run, tasks, dreams)
    await tasks.close()
    on_policy: dict[str, dict[str, float | int | None]] = {}
    for which in ("before", "after"):
        judged = played[f"{which}/train"][::2]
        failed: list[tuple[str, int]] = []
        apart = world.at_temperature(0.0).excluding(judged)
        predicted = await judge_with_bar(f"judge {which}", apart, judged, failed)
        on_policy[which] = {**audit_metrics(predicted), "failed": len(failed)}
    costs = real_costs("evaluate", real_interaction() - before, config.env.price)
    judgements = {"on_policy": on_policy["before"], "on_policy_after": on_policy["after"]}
    run.update({"policy": policies, **costs, "world_model": judgements})


async def play_real(
    config: Config, tasks: TaskSet, agent: LanguageModelAgent, version: str, which: str, split: str
) -> list[Trajectory]:
    """The policy's episodes in the real games of a split, the same tasks and seeds for every policy."""
    known, count = tasks.tasks(split), config.evaluate.heldout_episodes
    if split == "train":
        known, count = known[: config.evaluate.tasks or None], config.evaluate.episodes
    episodes = plan(known, count, f"real/{which}/{split}", config.seed)
    stamp = Provenance(Source.REAL, version)
    what = f"play {which}, {split} games"
    return await play_with_bar(what, episodes, tasks.make_env, agent, stamp, config.evaluate.max_turns, concurrency=64)


def _samples(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    """The first few of each task: enough to read, whatever the number of episodes."""
    seen: dict[str, int] = {}
    kept = []
    for episode in episodes:
        seen[episode.task_id] = seen.get(episode.task_id, 0) + 1
        if seen[episode.task_id] <= SAMPLES:
            kept.append(episode)
    return kept


async def _replay(run: RunFolder, tasks: TaskSet, dreams: Sequence[Trajectory]) -> None:
    """The dreamed actions of the trained policy in the real game: where do dream and reality part?"""
    by_id = {task.id: task for task in tasks.tasks("train")}
    step = max(1, len(dreams) // REPLAYS)
    chosen = [d for d in dreams[::step] if d.turns and not d.stop.is_failure]
    episodes = [Episode(f"replay/{d.id}", by_id[d.task_id], d.group_id, d.seed) for d in chosen]
    replays = await replay_all({f"replay/{d.id}": d for d in chosen}, episodes, tasks.make_env)
    sampled = {d.id for d in _samples(dreams)}
    run.add_rollouts("evaluate", [d for d in chosen if d.id not in sampled], which="after", split="train")
    pairs = {replay.id: dream.id for replay, dream in zip(replays, chosen, strict=True)}
    run.add_rollouts("evaluate", replays, pairs, which="replay", split="train")
