"""Stage ``train``: the policy plays in the world model and learns from it. It takes no real step, and counts them."""

from __future__ import annotations

import asyncio
import copy
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from imagination.choice import chosen
from imagination.curriculum import turns_at
from imagination.dream_env import DreamEnv, Guard, Start, starts_from_log
from imagination.evaluation import summarise
from imagination.experience import imitation_row, policy_rows, telling_groups
from imagination.mixture import added_episodes
from imagination.module import PolicyModule, Update
from imagination.pay import Pay
from imagination.rollout import Episode, Provenance, play_all
from imagination.run_folder import RunFolder
from imagination.settings import Config, DreamSettings, UserError
from imagination.stages.check_train import check, check_experts, longest_episode
from imagination.stages.common import (
    KeepCheckpoints,
    adapted,
    finish,
    load_model,
    make_agent,
    make_trainer,
    need,
    open_run,
    resume_from,
    weights_version,
)
from imagination.stages.engines import Engines
from imagination.stages.fit import cut, read_log
from imagination.stages.replays import Replays
from imagination.stages.watch import Probe, Watch
from imagination.stages.worlds import load_world_model
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
from worldmodel.calibration import FILE, Calibration

_CUT = (StopReason.UNSURE, StopReason.CONTEXT_LIMIT)


@dataclass(slots=True)
class World:
    """Where rollouts of this run happen: dreams by default, the real games for the control."""

    make_env: Callable[[], Env]
    source: Source
    version: str | None
    concurrency: int
    engines: tuple[Engine, ...] = ()
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


def _train(run: RunFolder, config: Config) -> None:
    log, _ = read_log(run, config)
    experts = [t for t in log if t.source is Source.EXPERT and t.solved]
    check_experts(config, len(experts))
    model, chat = load_model(run.model("policy-clone"), "clone", config.policy)
    wanted = chosen(config.algorithm, longest_episode(config)).kl.kl_coef > 0
    reference = copy.deepcopy(model).requires_grad_(False) if wanted else None
    model = adapted(model, config.policy)
    state, done = resume_from(run, "train")
    run.forget("train", done)
    starts = {
        name: start
        for name, start in starts_from_log(log, branch=True).items()
        if len(start.history) < config.dream.max_turns  # deeper ones cost their whole history and teach no more
    }
    dreamed = config.train.world == "dream"
    if not done:
        run.update({"real_steps": {"train": 0, "probe": 0} if dreamed else {"train": 0}})
    before = real_steps_taken()
    earlier = run.summary["real_steps"].get("train", 0)
    probe = Probe(run, config, run.summary["real_steps"].get("probe", 0))

    def used() -> int:
        return real_steps_taken() - before - probe.steps

    def count() -> None:
        run.update({"real_steps": {"train": earlier + used()}})

    engines = Engines(config.engine)
    world = _dream(engines, run, config, log, starts) if dreamed else _real(run, config)
    agent = make_agent(engines, model, chat, config, temperature=1.0, name="policy")
    module = PolicyModule(
        model,
        config.algorithm,
        config.train,
        lambda step, metrics: run.record("train", step, metrics),
        seed=config.seed,
        reference=reference,
        max_tokens=longest_episode(config),
    )
    watch = None
    if dreamed and config.tripwires.enabled:
        goal = config.worldmodel.goal  # what pays in these dreams: the log's own rewards would contradict it
        watch = Watch(run, config, model, [goal.paid(t) for t in log] if goal.declared else log, probe)
        if state is not None:
            watch.resume(state)
    replays = Replays(config.train.self_imitation, config.seed) if config.train.self_imitation.share else None
    player = Player(run, config, world, model, agent, chat, starts, experts, count, watch, replays)
    stream = StepStream(config.train.updates, lambda: module.updates_done, player.update)
    keep = KeepCheckpoints(
        run.model("kept"),
        "train",
        config.train.keep_every,
        config.train.updates,
        lambda: module.updates_done,
        lambda folder: save_checkpoint(model, chat.tokenizer, folder),
    )
    more = [callback for callback in (watch, replays, keep) if callback is not None]
    trainer = make_trainer(run, "train", config.train.checkpoint_every, "fp32", lambda: module.updates_done, more)
    if watch is None or watch.tripped is None:
        trainer.fit(module, stream, ckpt_path=state, weights_only=True)
    if watch is not None:
        watch.roll_back()
    if world.close is not None:
        asyncio.run(world.close())
    if dreamed and (steps := used()):
        raise RuntimeError(f"training in dreams took {steps} real step{'s' * (steps != 1)}")
    save_checkpoint(model, chat.tokenizer, run.model("policy"))
    count()
    turns = sum(line.get("turns", 0) for line in run.metrics("train")) if dreamed else 0
    run.update({"dreamed_turns": int(turns), "speed": player.speed()})
    if dreamed:
        off = {"enabled": False, "updates": 0, "blind": [], "stopped_by": None}
        run.update({"tripwires": watch.summary() if watch is not None else off})


def _dream(
    engines: Engines, run: RunFolder, config: Config, log: Sequence[Trajectory], starts: Mapping[str, Start]
) -> World:
    model = load_world_model(engines, run, config, config.dream.temperature, log)
    dream = config.dream
    calibration = Calibration.load(run.model("worldmodel"))
    process = config.train.process
    asks = [f"train.process={process}"] * process.endswith("probability")
    asks += ["dream.on_doubt=downweight"] * (dream.on_doubt == "downweight")
    if asks and calibration is None:
        path = run.model("worldmodel") / FILE
        raise UserError(f"{' and '.join(asks)} needs {path}; run `imagine fit-world-model` with this version")
    guard = Guard(dream.min_confidence, dream.min_outcome_confidence, ends=dream.on_doubt != "downweight")
    return World(lambda: DreamEnv(model, starts, guard, calibration), Source.DREAM, model.version, 64, model.engines)


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
    watch: Watch | None = None
    replays: Replays | None = None
    seconds: float = 0.0
    turns: int = 0

    def update(self, index: int) -> Update:
        """A pure function of the update's index, the seed and the policy's weights."""
        settings = self.config.train
        self.agent.engine.update_weights()
        for engine in self.world.engines:
            if isinstance(engine, InProcessEngine):
                engine.reset()
        chance = random.Random(f"{self.config.seed}/{index}")
        stamp = Provenance(self.world.source, weights_version(self.model), self.world.version)
        longest = longest_turns(self.config.dream, index)
        played = self._play(self._episodes(index, chance, 0, settings.groups, self.config.dream.branch), stamp, longest)
        if self.config.dream.on_doubt == "branch" and self.world.source is Source.DREAM:
            played += self._branches(index, chance, stamp, longest, played)
        played += self._in_place_of_equal_groups(index, chance, stamp, longest, played)
        self.count_real_steps()
        if index == 0 and all(t.stop.is_failure or t.stop in _CUT for t in played):
            stops = dict(Counter(t.stop.value for t in played))
            raise UserError(
                f"nothing can be learned from these dreams, which ended as {stops}: if unsure, train the world model "
                "longer or lower dream.min_confidence; if prediction_invalid, raise dream.max_tokens; else the contexts"
            )
        first = [played[g * settings.group_size] for g in range(settings.groups)]
        self.run.add_rollouts("train", first, which="update", step=index, split="train")
        seen = self.watch.look(index, played, self.agent) if self.watch is not None else {}
        if self.watch is not None and self.watch.tripped is not None:
            return Update(index, [], {**self._measure(played), **seen})
        weigh = self.config.dream.on_doubt == "downweight" and self.world.source is Source.DREAM
        min_weight = self.config.dream.min_weight if weigh else None
        rows = policy_rows(played, min_weight, self.pay)
        measured = {**self._measure(played), **seen, **self._paid(rows)}
        if self.config.dream.horizon:
            measured["horizon"] = longest
        replayed = settings.self_imitation.share
        wanted = added_episodes(len(played), settings.expert_share, replayed)
        again: list[Row] = []
        if self.replays is not None:
            again = self.replays.draw(index, added_episodes(len(played), replayed, settings.expert_share))
            measured |= self.replays.add(index, rows) | {"replayed": len(again)}
        for expert in chance.sample(list(self.experts), min(wanted, len(self.experts))):
            row = cut(imitation_row(self.chat, expert, Source.EXPERT), self.agent.engine.context)
            if any(row.ce_weight):
                rows.append(row)
        return Update(index, [*rows, *again], measured)

    @property
    def pay(self) -> Pay:
        """What turns earn under the settings."""
        train, progress = self.config.train, self.config.algorithm.progress
        tiers = tuple((threshold, reward) for threshold, reward in train.reward_tiers)
        asked = progress.enabled and progress.carried_out
        return Pay(tiers, train.process, self.config.worldmodel.refusals if asked else "")

    def _paid(self, rows: Sequence[Row]) -> dict[str, float]:
        """Mean of what was paid for outcomes, an episode, and of the judgements, a turn; where they are in use."""
        found: dict[str, float] = {}
        if self.config.train.reward_tiers and rows:
            found["tiered_return"] = fmean(sum(row.rewards) for row in rows)
        judgements = [p for row in rows for p in row.process[:-1] if not math.isnan(p)]
        if judgements:
            found["process_mean"] = fmean(judgements)
        return found

    def speed(self) -> dict[str, float]:
        """How fast this process played, and how well its drafts guessed; no metric of an update, as chance is in it."""
        found = {"turns_per_second": self.turns / self.seconds if self.seconds else 0.0}
        counts = [engine.counts for engine in self.world.engines if isinstance(engine, InProcessEngine)]
        if counts:
            found["tokens_per_step"] = sum(c.generated for c in counts) / max(1, sum(c.steps for c in counts))
            if drafted := sum(c.drafted for c in counts):
                found["draft_acceptance"] = sum(c.accepted for c in counts) / drafted
        return found

    def _play(self, episodes: Sequence[Episode], stamp: Provenance, longest: int) -> list[Trajectory]:
        begin = time.perf_counter()
        played = asyncio.run(
            play_all(episodes, self.world.make_env, self.agent, stamp, longest, self.world.concurrency)
        )
        self.seconds += time.perf_counter() - begin
        self.turns += sum(len(t.own_turns) for t in played)
        return played

    def _branches(
        self, index: int, chance: random.Random, stamp: Provenance, longest: int, played: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """Further groups from the middle of logged episodes, for the turns that doubt has cut off.

        A dream that ended unsure after k turns it could use gave up ``longest - k``. As many turns are dreamed in whole
        groups (GRPO compares within them), round after round, since these may be cut as well: until nothing is missing
        that a further group could give, or the groups allowed by ``dream.extra_groups`` are used up.
        """
        settings = self.config.train
        missing = lost_to_doubt(played, longest)
        first, last = settings.groups, settings.groups + int(self.config.dream.extra_groups * settings.groups)
        found: list[Trajectory] = []
        while first < last and missing >= settings.group_size * longest:
            groups = min(missing // (settings.group_size * longest), last - first)
            more = self._play(self._episodes(index, chance, first, groups, 1.0), stamp, longest)
            missing -= sum(useful_turns(t) for t in more)
            first += groups
            found += more
        return found

    def _in_place_of_equal_groups(
        self, index: int, chance: random.Random, stamp: Provenance, longest: int, played: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """DAPO's dynamic sampling: as many further groups as were all alike, round after round, within the limit."""
        settings = self.config.train
        first = len({t.group_id for t in played})
        last = first + int(settings.extra_groups * settings.groups)
        found: list[Trajectory] = []
        while first < last and (missing := settings.groups - telling_groups([*played, *found], self.pay)) > 0:
            groups = min(missing, last - first)
            episodes = self._episodes(index, chance, first, groups, self.config.dream.branch)
            found += self._play(episodes, stamp, longest)
            first += groups
        return found

    def _episodes(self, index: int, chance: random.Random, first: int, groups: int, branch: float) -> list[Episode]:
        """Groups ``first``, ``first + 1``, ..., a share ``branch`` of them from the middle of logged episodes."""
        settings = self.config.train
        by_task: dict[str, list[str]] = {}
        for name, start in self.starts.items():
            by_task.setdefault(start.task_id, []).append(name)
        tasks = sorted(by_task)
        chance.shuffle(tasks)
        episodes: list[Episode] = []
        for g in range(first, first + groups):
            task_id = tasks[g % len(tasks)]
            branched = [n for n in by_task[task_id] if self.starts[n].history]
            whole = [n for n in by_task[task_id] if not self.starts[n].history]
            use_branch = self.world.source is Source.DREAM and chance.random() < branch
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


def longest_turns(dream: DreamSettings, update: int) -> int:
    """Of an update's episodes, dreamed or real: the control plays what the dreams play."""
    return turns_at(
        update, dream.horizon, dream.horizon_shape, dream.max_turns, dream.horizon_every, dream.horizon_growth
    )


def useful_turns(episode: Trajectory) -> int:
    """Own turns without the one that the guard rejected."""
    return len(episode.own_turns) - (episode.stop is StopReason.UNSURE)


def lost_to_doubt(played: Sequence[Trajectory], longest: int) -> int:
    """How many turns the dreams that ended unsure could still have had."""
    return sum(longest - useful_turns(t) for t in played if t.stop is StopReason.UNSURE)
