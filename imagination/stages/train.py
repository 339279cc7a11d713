"""Stage ``train``: the policy plays in the world model and learns from it. It takes no real step, and counts them."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagination.dream_env import DreamEnv, Guard, Start, starts_from_log
from imagination.evaluation import summarise
from imagination.experience import group_advantages, imitation_row, policy_row
from imagination.mixture import expert_episodes, realised_shares
from imagination.module import PolicyModule, Update
from imagination.rollout import Episode, Provenance, play_all
from imagination.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.stages.common import (
    KeepCheckpoints,
    adapted,
    finish,
    load_model,
    load_world_model,
    make_agent,
    make_trainer,
    need,
    open_run,
    resume_from,
    weights_version,
)
from imagination.stages.engines import Engines
from imagination.stages.fit import cut, read_log
from imagination.stream import StepStream
from policy.agent import LanguageModelAgent
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import Row
from policy.lm.engine import Engine
from policy.lm.inprocess import InProcessEngine
from policy.lm.render import ChatFormat
from real_envs.env import Env, Task
from real_envs.isolation import real_steps_taken
from real_envs.textworld import TextWorldTasks
from real_envs.trajectory import Source, StopReason, Trajectory

_CUT = (StopReason.UNSURE, StopReason.CONTEXT_LIMIT)


@dataclass(slots=True)
class World:
    """Where rollouts of this run happen: dreams by default, the real games for the control."""

    make_env: Callable[[], Env]
    source: Source
    version: str | None
    concurrency: int
    engine: Engine | None = None
    close: Callable[[], Any] | None = None


def train(config: Config, folder: Path) -> None:
    """Updates the policy in dreams (or, as a control, in the real games). Writes ``models/policy``.

    Raises:
        UserError: settings contradict each other, or an earlier stage is missing.
    """
    check(config)
    run = open_run(config, folder)
    with run.timed("train"):
        _train(run, config)
    finish(run, "train")


def check(config: Config) -> None:
    """
    Raises:
        UserError: the settings cannot work together.
    """
    if config.algorithm.name == "grpo" and config.train.group_size < 2:
        raise UserError("grpo compares episodes within a group: set train.group_size to 2 or more")
    if config.algorithm.tis_cap and not config.algorithm.tis_cap >= 1:
        raise UserError(f"algorithm.tis_cap must be 1 or more, or 0 for no correction, got {config.algorithm.tis_cap}")
    if not 0 <= config.train.expert_share < 1:
        raise UserError(f"train.expert_share must lie in [0, 1), got {config.train.expert_share}")
    if not 0 <= config.dream.branch <= 1:
        raise UserError(f"dream.branch must lie in [0, 1], got {config.dream.branch}")


def _train(run: RunFolder, config: Config) -> None:
    log, _ = read_log(run, config)
    model, chat = load_model(run.model("policy-clone"), "clone", config.policy)
    reference = copy.deepcopy(model).requires_grad_(False) if config.algorithm.kl_coef > 0 else None
    model = adapted(model, config.policy)
    state, done = resume_from(run, "train")
    run.forget("train", done)
    starts = {
        name: start
        for name, start in starts_from_log(log, branch=True).items()
        if len(start.history) < config.dream.max_turns  # deeper ones cost their whole history and teach no more
    }
    if not done:
        run.update({"real_steps": {"train": 0}})
    before = real_steps_taken()
    earlier = run.summary["real_steps"].get("train", 0)

    def count() -> None:
        run.update({"real_steps": {"train": earlier + real_steps_taken() - before}})

    engines = Engines(config.engine)
    world = _dream(engines, run, config, log, starts) if config.train.world == "dream" else _real(run, config)
    agent = make_agent(engines, model, chat, config, temperature=1.0, name="policy")
    experts = [t for t in log if t.source is Source.EXPERT and t.solved]
    module = PolicyModule(
        model,
        config.algorithm,
        config.train,
        lambda step, metrics: run.record("train", step, metrics),
        seed=config.seed,
        reference=reference,
    )
    player = Player(run, config, world, model, agent, chat, starts, experts, count)
    stream = StepStream(config.train.updates, lambda: module.updates_done, player.update)
    keep = KeepCheckpoints(
        run.model("kept"),
        "train",
        config.train.keep_every,
        config.train.updates,
        lambda: module.updates_done,
        lambda folder: save_checkpoint(model, chat.tokenizer, folder),
    )
    trainer = make_trainer(run, "train", config.train.checkpoint_every, "fp32", lambda: module.updates_done, [keep])
    trainer.fit(module, stream, ckpt_path=state, weights_only=True)
    if world.close is not None:
        asyncio.run(world.close())
    used = real_steps_taken() - before
    if config.train.world == "dream" and used:
        raise RuntimeError(f"training in dreams took {used} real step{'s' * (used != 1)}")
    save_checkpoint(model, chat.tokenizer, run.model("policy"))
    count()
    dreamed = sum(line.get("turns", 0) for line in run.metrics("train")) if world.source is Source.DREAM else 0
    run.update({"dreamed_turns": int(dreamed), "speed": player.speed()})


def _dream(
    engines: Engines, run: RunFolder, config: Config, log: Sequence[Trajectory], starts: Mapping[str, Start]
) -> World:
    model = load_world_model(engines, run, config, config.dream.temperature, log)
    guard = Guard(config.dream.min_confidence, config.dream.min_outcome_confidence)
    return World(lambda: DreamEnv(model, starts, guard), Source.DREAM, model.version, 64, model.engine)


def _real(run: RunFolder, config: Config) -> World:
    tasks = TextWorldTasks.load(need(run.games / "games.json", "collect").parent, workers=config.collect.workers)
    return World(tasks.make_env, Source.REAL, None, concurrency=config.collect.workers, close=tasks.close)


@dataclass(slots=True)
class Player:
    """Plays the episodes of one update and makes rows of them."""

    run: RunFolder
    config: Config
    world: World
    model: Any
    agent: LanguageModelAgent
    chat: ChatFormat
    starts: Mapping[str, Start]
    experts: Sequence[Trajectory]
    count_real_steps: Callable[[], None]
    seconds: float = 0.0
    turns: int = 0

    def update(self, index: int) -> Update:
        """A pure function of the update's index, the seed and the policy's weights."""
        settings = self.config.train
        self.agent.engine.update_weights()
        if isinstance(self.world.engine, InProcessEngine):
            self.world.engine.reset()
        chance = random.Random(f"{self.config.seed}/{index}")
        episodes = self._episodes(index, chance)
        begin = time.perf_counter()
        stamp = Provenance(self.world.source, weights_version(self.model), self.world.version)
        played = asyncio.run(
            play_all(
                episodes,
                self.world.make_env,
                self.agent,
                stamp,
                self.config.dream.max_turns,
                self.world.concurrency,
            )
        )
        self.seconds += time.perf_counter() - begin
        self.turns += sum(len(t.own_turns) for t in played)
        self.count_real_steps()
        if index == 0 and all(t.stop.is_failure or t.stop in _CUT for t in played):
            stops = dict(Counter(t.stop.value for t in played))
            raise UserError(
                f"nothing can be learned from these dreams, which ended as {stops}: if unsure, train the world model "
                "longer or lower dream.min_confidence; if prediction_invalid, raise dream.max_tokens; else the contexts"
            )
        first = [played[g * settings.group_size] for g in range(settings.groups)]
        self.run.add_rollouts("train", first, which="update", step=index, split="train")
        advantages, counts = group_advantages(played, self.config.algorithm.normalise_std)
        rows: list[Row] = []
        for episode, advantage, count in zip(played, advantages, counts, strict=True):
            row = policy_row(episode, advantage)
            # GRPO: an episode like all others of its group has no gradient; leaving it out saves its forward pass
            useful = count and advantage != 0 if self.config.algorithm.name == "grpo" else True
            if row is not None and useful:
                rows.append(row)
        wanted = expert_episodes(len(played), settings.expert_share)
        for expert in chance.sample(list(self.experts), min(wanted, len(self.experts))):
            row = cut(imitation_row(self.chat, expert, Source.EXPERT), self.agent.engine.context)
            if any(row.ce_weight):
                rows.append(row)
        return Update(index, rows, {**self._measure(played), **realised_shares(rows)})

    def speed(self) -> dict[str, float]:
        """How fast this process played, and how well its drafts guessed; no metric of an update, as chance is in it."""
        found = {"turns_per_second": self.turns / self.seconds if self.seconds else 0.0}
        if isinstance(self.world.engine, InProcessEngine):
            counts = self.world.engine.counts
            found["tokens_per_step"] = counts.generated / max(1, counts.steps)
            if counts.drafted:
                found["draft_acceptance"] = counts.accepted / counts.drafted
        return found

    def _episodes(self, index: int, chance: random.Random) -> list[Episode]:
        settings = self.config.train
        by_task: dict[str, list[str]] = {}
        for name, start in self.starts.items():
            by_task.setdefault(start.task_id, []).append(name)
        tasks = sorted(by_task)
        chance.shuffle(tasks)
        episodes: list[Episode] = []
        for g in range(settings.groups):
            task_id = tasks[g % len(tasks)]
            branched = [n for n in by_task[task_id] if self.starts[n].history]
            whole = [n for n in by_task[task_id] if not self.starts[n].history]
            use_branch = self.world.source is Source.DREAM and chance.random() < self.config.dream.branch
            name = chance.choice(branched if use_branch and branched else whole)
            spec = {"start": name, "path": str((self.run.games / f"{task_id}.z8").resolve())}
            for k in range(settings.group_size):
                episode_id = f"{self.world.source.value}/{index}/{g}/{k}"
                seed = ((self.config.seed * 10_007 + index) * 1009 + g) * 101 + k
                episodes.append(Episode(episode_id, Task(task_id, spec), f"{index}/{g}", seed))
        return episodes

    def _measure(self, played: Sequence[Trajectory]) -> dict[str, float]:
        from_start = summarise([t for t in played if not t.prefix_turns])
        branched = summarise([t for t in played if t.prefix_turns])
        everything = summarise(played)
        turns = sum(len(t.own_turns) for t in played)
        name = "dream" if self.world.source is Source.DREAM else "real"
        metrics: dict[str, float] = {"turns": turns, "failures": everything.success.failures}
        for key, summary in ((f"{name}_success", from_start), (f"{name}_success_branched", branched)):
            if summary.success.rate is not None:
                metrics[key] = summary.success.rate
        for stop, count in everything.stops.items():
            metrics[f"stop_{stop.value}"] = count / len(played)
        if everything.mean_turns is not None:
            metrics["mean_turns"] = everything.mean_turns
        return metrics
