from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

from imagination.data.experiences import FILE, TASK, changed, contrast, prefaced, question, read_experiences
from imagination.evaluation.costs import real_costs
from imagination.learning.advantages.group import differ
from imagination.rollout.dream_env import starts_from_log
from imagination.rollout.play import Episode, Provenance, plan, play_with_bar
from imagination.runs.lifecycle import run_stage
from imagination.scale.ray_envs import real_tasks
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.chat_server import ChatServer
from real_envs.env import Task
from real_envs.files import write_json
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory
from real_envs.worker_pool import real_interaction
from worldmodel.evaluation.proportions import summarise

STAGE = "learn_experience"
_TOKENS = 2000  # of an answer


def learn_experience(config: Config, folder: Path) -> None:
    """Optional: learn experiences for the policy's prompt from groups of its episodes, no weights.

    Plays a group of episodes of each task, in dreams or in the real environment. Where their returns differ, a
    language model compares them and changes a list of experiences, with which the next round is played
    (Training-free GRPO). Without learn_experience.url, the action that most sets the best apart is added.
    experience=experience.json puts the list into the policy's prompt in later stages.

    Reads: log/, models/worldmodel/, models/policy-clone/
    Writes: models/experience.json, metrics.jsonl

    Examples:
        imagine learn-experience run=mine learn_experience.url=http://localhost:8000/v1 learn_experience.model=qwen
        imagine learn-experience run=mine learn_experience.world=real learn_experience.rounds=1

    Raises:
        UserError: an earlier stage or the server's model is missing, or no question was answered.
    """
    settings = config.learn_experience
    server = settings.open(STAGE) if settings.url else None
    with closing(server) if server else nullcontext(), run_stage(config, folder, STAGE) as run:
        run.forget(STAGE)
        before = read_experiences(run.model(FILE)) if config.experience == FILE and run.model(FILE).exists() else None
        experiences = asyncio.run(_learn(Session(replace(config, experience=""), run), server))
        if before not in (None, experiences):  # these had read the list before, and their settings name no more than it
            done = run.summary.get("done", {}).keys() & {"digi_q", "train", "evaluate"}
            run.update({"done": dict.fromkeys(done, "of other experiences")})
    print("\n".join(experiences))
    print(f"{len(experiences)} experiences in {run.model(FILE)}; experience={FILE} reads them", file=sys.stderr)


async def _learn(session: Session, server: ChatServer | None) -> list[str]:
    config, run, settings = session.config, session.run, session.config.learn_experience
    policy, before = session.policy(settings.policy), real_interaction()
    agent, real = session.agent(policy), real_tasks(session) if settings.world == "real" else None
    if real is None:
        model = session.world_model()
        starts = starts_from_log(session.known, branch=False)
        tasks = [Task(start.task_id, {"start": name}) for name, start in starts.items()]
        make_env = session.dreams(model, starts)
        stamp = Provenance(Source.DREAM, policy.version, model.version, session.solved_at)
    else:
        tasks, make_env = list(real.tasks("train")), real.make_env  # type: ignore[assignment]
        stamp = Provenance(Source.REAL, policy.version)
    experiences, counts = list[str](), Counter[str]()
    for number in range(settings.rounds):
        agent.chat = prefaced(policy.chat, experiences)
        seed = derive_seed(STAGE, config.seed, number)
        episodes = plan(tasks[: settings.tasks or None], settings.group_size, f"{STAGE}/{number}", seed)
        what, longest = f"round {number + 1}", config.dream.max_turns
        played = await play_with_bar(what, episodes, make_env, agent, stamp, longest, config.engine.slots)
        for group in _groups(episodes, played):
            counts["groups"] += 1
            answer = contrast(group) if server is None else None
            if server is not None:
                reply = server.ask(server.question(TASK, question(group, experiences), _TOKENS))
                answer, reason = reply.text, reply.reason
                counts["failed"] += answer is None
            if answer is not None:
                experiences, invalid = changed(experiences, answer, settings.entries)
                counts["invalid"] += invalid
        success = summarise(played).success
        outcome = {"success": success.rate or 0.0, "failures": success.failures, "experiences": len(experiences)}
        run.record(STAGE, number, {**outcome, **counts})
    if real is not None:
        await real.close()
    run.update(real_costs(STAGE, real_interaction() - before, config.env.price))
    if counts["failed"] and counts["failed"] == counts["groups"]:
        raise UserError(f"learn_experience.url: no question was answered: {reason}")
    write_json(run.model(FILE), {"experiences": experiences})
    return experiences


def _groups(episodes: Sequence[Episode], played: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Those whose episodes earned different sums, without what failed; others teach nothing."""
    groups: dict[str, list[Trajectory]] = {episode.group_id: [] for episode in episodes}
    for one in played:
        if not one.stop.is_failure and one.own_turns:
            groups[one.group_id].append(one)
    return [group for group in groups.values() if differ([one.total_reward for one in group])]
