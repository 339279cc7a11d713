from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from imagination.commands.check_train import check, check_experts
from imagination.data.augmentation import HINDSIGHT
from imagination.evaluation.costs import real_costs, spent_before
from imagination.evaluation.monitors.monitor import Probe, TripwireMonitor
from imagination.evaluation.monitors.rollout_stats import LogReference
from imagination.evaluation.world_model_eval import few_episodes, heldout_tasks
from imagination.learning.algorithms import Algorithm
from imagination.learning.collector import (
    OVERLAP,
    OVERLAP_SECONDS,
    CollectionPlan,
    ExperienceCollector,
    RolloutEnvironment,
)
from imagination.learning.critic import NAME as CRITIC
from imagination.learning.critic import load_critic, made_for
from imagination.learning.experience import RecordedGroups
from imagination.learning.groups import FailedTasks, ReachedGoals
from imagination.learning.metrics import guard_note
from imagination.learning.policy_module import PolicyModule
from imagination.learning.reward_shaping import RewardShaping, worst_returns
from imagination.learning.self_imitation import Replays
from imagination.learning.sharding import Gathering, gather, shard
from imagination.learning.trainer import BestPolicy, KeepCheckpoints, TimeLimit, make_trainer, split_starts, step_loader
from imagination.rollout.dream_env import Start, dream_starts
from imagination.rollout.schedules import max_value
from imagination.rollout.world_models import rules_of
from imagination.runs.lifecycle import resume_from, run_stage
from imagination.runs.models import adapted
from imagination.runs.processes import from_first, leave, rank
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.scale.player import PlayerData
from imagination.scale.ray_players import RayPlayers
from imagination.session import Policy, Session
from imagination.settings import Config, TrainSettings
from policy.lm.backbone import save_checkpoint
from policy.lm.forward import ValueHead
from real_envs.env import Env
from real_envs.trajectory import Source, Trajectory
from real_envs.worker_pool import PoolStats, real_interaction
from worldmodel.rewards import Goal


def train(
    config: Config, folder: Path, recorded: RecordedGroups | None = None, starts: Mapping[str, Start] | None = None
) -> None:
    """Train the policy in dreamed rollouts, without a real step.

    Each update samples groups of episodes from policy and world model, estimates advantages and updates the
    policy; expert episodes of the log are mixed in. The same command resumes a stopped training from its last
    checkpoint. train.world=real samples the rollouts in the real environment, as a control.

    Reads: log/, models/worldmodel/, models/policy-clone/
    Writes: models/policy/, checkpoints/, metrics.jsonl, rollouts.jsonl

    Examples:
        imagine train run=mine
        imagine train run=mine algorithm=ppo algorithm.gamma=0.99
        imagine train run=mine train.updates=5 dream.min_confidence=0.9 engine=vllm

    Args:
        recorded: real episodes that were played before; the share ``train.real_share`` is then of these, and the
            training itself takes no real step.
        starts: where dreams begin; by default every state of the log.

    Raises:
        UserError: settings contradict each other, or an earlier stage is missing.
    """
    algorithm = check(config)
    with run_stage(config, folder, "train") as run:
        session = Session(config, run)
        data = _Data.of(session, starts)
        if recorded is not None:
            recorded = recorded.without({data.starts[name].task_id for name in data.validation})
        with _players(session, data, recorded) as players:
            _train(session, algorithm, data, recorded, players)


def _train(
    session: Session,
    algorithm: Algorithm,
    data: _Data,
    recorded: RecordedGroups | None,
    players: RayPlayers | None,
) -> None:
    config, run = session.config, session.run
    settings, seed = config.train, session.training_seed
    state, done = resume_from(run, "train")
    for written, step in (("train", done), ("last_look", 0), (OVERLAP, done)):
        run.forget(written, step)

    # build: the policy, the worlds that it plays in, and what watches it
    policy, reference, value = _policy(session, algorithm)
    probe = Probe(session, seed)
    real_steps = _RealSteps(session, probe, fresh=not done, dreamed=data.dreamed)
    if players is not None:
        players.counted_before(real_steps.earlier if done else None)
    worlds = _worlds(session, data, recorded, played_here=players is None)
    # vLLM is not exact anyway and claims its memory for itself, so that one engine plays in both worlds
    own_engine = len(worlds) > 1 and config.engine.name != "vllm"
    watch = _watch(session, policy, data, probe, state)
    best = None
    if data.validation:
        tasks = [data.starts[name].task_id for name in data.validation]
        best = BestPolicy(policy.model, data.validation, tasks, settings.validate_every, seed)
    shaping = RewardShaping(settings.reward_tiers)
    replays = Replays(settings.self_imitation, seed) if settings.self_imitation.share else None
    failures = FailedTasks(seed) if max_value(settings.failure_share) else None
    bar = Bar("train", settings.updates, "turns")
    collector = ExperienceCollector(
        run=run,
        plan=CollectionPlan(seed, settings, config.dream, config.algorithm.progress, config.worldmodel.refusals),
        worlds=worlds,
        model=policy.model,
        agent=session.agent(policy),
        agent_beside=session.agent(policy, slots=config.collect.workers) if own_engine else None,
        chat=policy.chat,
        starts=data.learned_from,
        experts=data.experts,
        recorded=recorded,
        count_real_steps=real_steps.write,
        watch=watch,
        replays=replays,
        failures=failures,
        goals=data.goals,
        on_turn=bar.count,
        worst=worst_returns([shaping.rewards(t)[t.prefix_turns :] for t in data.log], config.dream.max_turns),
        best=best,
        players=players,
    )

    # learn: each update is played by the collector, judged and learned from by the module
    clock = TimeLimit(settings.minutes)
    if algorithm.critic is not None and value is None:
        value = ValueHead(policy.model.config.hidden_size)
    trained, compute = shard(run, policy.model, value)
    module = PolicyModule(trained, algorithm, settings, partial(run.record, "train"), seed, reference, value=value)
    module.passed, module.compute = clock.passed, compute
    save, last = partial(save_checkpoint, policy.model, policy.chat.tokenizer), settings.updates
    keep = KeepCheckpoints(run.model("kept"), "train", settings.keep_every, last, module.done, save)
    callbacks = [Gathering(trained, policy.model), clock, watch, replays, failures, best, keep]
    trainer = make_trainer(
        run, "train", bar, module.done, settings.checkpoint_every, callbacks=[c for c in callbacks if c]
    )
    device = policy.model.device

    def stopped() -> bool:
        return watch is not None and watch.tripped is not None

    if not stopped():
        updates = step_loader(last, module.done, from_first(collector.update), clock.over)
        trainer.fit(module, updates, ckpt_path=state, weights_only=True)
        gather(trained, policy.model)
    leave()

    # look at the last policy, and save the one to keep
    if not stopped():
        policy.model.to(device)  # Lightning leaves it on the CPU
        collector.last_look()
    if best is not None and not stopped():
        best.restore()
        run.update({"best_policy": best.best})
    if watch is not None:
        watch.roll_back()
    for world in worlds:
        if world.close is not None:
            asyncio.run(world.close())
    if data.dreamed and len(worlds) == 1 and (used := real_steps.used.steps):
        raise RuntimeError(f"training in dreams took {used} real step{'s' * (used != 1)}")
    if players is not None:
        players.finish()
    save(run.model("policy"))
    run.update({"trained_tasks": settings.tasks})
    real_steps.write()
    _summarise(run, collector, watch, data.dreamed)


@dataclass(frozen=True, slots=True)
class _Data:
    """What a training reads."""

    dreamed: bool  # whether updates are played in dreams
    log: Sequence[Trajectory]  # episodes of the tasks that are trained in, with the rewards that dreams pay
    known: Sequence[Trajectory]  # what the world model may look up
    experts: Sequence[Trajectory]  # solved episodes of experts
    starts: Mapping[str, Start]  # where dreams begin, by name
    learned_from: Mapping[str, Start]  # those that updates begin in
    validation: Sequence[str]  # names of those that validation dreams begin in
    goals: ReachedGoals | None  # further tasks to dream

    @classmethod
    def of(cls, session: Session, starts: Mapping[str, Start] | None) -> _Data:
        """Raises ``UserError``: experts are to be mixed in and there are none, or no held-out task is logged."""
        config, settings = session.config, session.config.train
        dreamed, known = settings.world == "dream", session.known
        log: Sequence[Trajectory] = session.log.train
        if settings.tasks != "train":
            log = few_episodes(heldout_tasks(session.run), settings.task_episodes)
            known = [*known, *log]
        goal = config.worldmodel.goal if dreamed else Goal()
        log = goal.relabel_log(log)
        if starts is None:
            begun = [*log, *session.unplayed] if settings.tasks == "train" else log
            starts = dream_starts(begun, config.dream.max_turns)
        learned_from, validation = dict(starts), list[str]()
        if dreamed and settings.validation_tasks:
            learned_from, validation = split_starts(starts, settings.validation_tasks, session.training_seed)
        judged = {starts[name].task_id for name in validation}
        solved = [t for t in log if (t.earned(goal.reward) if goal.declared else t.solved)]
        experts = [t for t in solved if t.source is Source.EXPERT and t.task_id not in judged]
        check_experts(config, len(experts))
        goals = None
        apart = {f"{HINDSIGHT}/{t.id}" for t in log if t.task_id in judged}
        if reached := [t for t in session.reached_goals() if t.id not in apart]:
            goals, log = ReachedGoals(reached, log), [*log, *reached]
            known = [*known, *(t for t in reached if t.world_facts)]  # of composed questions; other goals have none
            starts = {**starts, **goals.starts}
        return cls(dreamed, log, known, experts, starts, learned_from, validation, goals)

    def plays_real(self, settings: TrainSettings, recorded: RecordedGroups | None) -> bool:
        """Whether updates play in the real world."""
        return not self.dreamed or (max_value(settings.real_share) > 0 and recorded is None)


@contextmanager
def _players(session: Session, data: _Data, recorded: RecordedGroups | None) -> Iterator[RayPlayers | None]:
    """Players in other processes, where there are to be any. Of processes that train together, the first has them."""
    config = session.config
    if config.scale.name == "none" or rank():
        yield None
        return
    real = data.plays_real(config.train, recorded)
    with closing(RayPlayers(session, PlayerData(data.known, data.starts), real)) as players:
        yield players


def _policy(session: Session, algorithm: Algorithm) -> tuple[Policy, Any, ValueHead | None]:
    """The clone as it is trained, a frozen copy where the algorithm holds it to one, and the critic of `fit-critic`
    where there is one and the algorithm has any."""
    config, policy = session.config, session.policy("policy-clone")
    value = None
    reference = copy.deepcopy(policy.model).requires_grad_(False) if algorithm.kl.kl_coef > 0 else None
    critic = session.run.model(CRITIC)
    if algorithm.critic is not None and critic.exists():
        value = load_critic(critic, made_for(policy.version, algorithm, config.train, config.worldmodel.goal))
    return Policy(adapted(policy.model, config.policy), policy.chat), reference, value


def _worlds(
    session: Session, data: _Data, recorded: RecordedGroups | None, played_here: bool
) -> list[RolloutEnvironment]:
    """The world that is trained in, and after it the real one where a share of the episodes is played there beside."""
    settings, worlds = session.config.train, list[RolloutEnvironment]()
    if data.plays_real(settings, recorded):
        tasks = session.tasks()
        known = {task.id: task for task in tasks.tasks(settings.tasks)}
        workers = session.config.collect.workers
        worlds = [RolloutEnvironment(tasks.make_env, Source.REAL, None, workers, close=tasks.close, tasks=known)]
    if not data.dreamed:
        return worlds
    needs = [f"train.process={settings.process}"] * settings.process.endswith("probability")
    needs += ["dream.on_doubt=downweight"] * (session.config.dream.on_doubt == "downweight")
    if needs:
        session.calibration(" and ".join(needs))
    if not played_here:
        return [RolloutEnvironment(_nowhere, Source.DREAM, None, 0), *worlds]
    model = session.world_model(data.known)
    make_env = session.dreams(model, data.starts, data.known)
    at_once = max(64, session.config.engine.slots)
    return [
        RolloutEnvironment(make_env, Source.DREAM, model.version, at_once, model.engines, session.solved_at),
        *worlds,
    ]


def _nowhere() -> Env:
    raise RuntimeError("players dream, and this process does not")


def _watch(session: Session, policy: Policy, data: _Data, probe: Probe, state: str | None) -> TripwireMonitor | None:
    config = session.config
    if not data.dreamed or not config.tripwires.enabled:
        return None
    log = LogReference(data.log, 1.0 if session.solved_at is None else session.solved_at)
    rules = rules_of(session.run)
    watch = TripwireMonitor(config.tripwires, config.train.updates, policy.model, log, probe, rules)
    if state is not None:
        watch.resume(state)
    return watch


class _RealSteps:
    """Counts what this training did in the real world in the run's summary; what probes did stands apart."""

    def __init__(self, session: Session, probe: Probe, fresh: bool, dreamed: bool) -> None:
        run, price = session.run, session.config.env.price
        if fresh:
            for stage in ("train", "probe") if dreamed else ("train",):
                run.update(real_costs(stage, PoolStats(), price))
        self._run, self._probe, self._price, self._before = run, probe, price, real_interaction()
        self.earlier = spent_before(run, "train")

    @property
    def used(self) -> PoolStats:
        """By this process."""
        return real_interaction() - self._before - self._probe.spent

    def write(self) -> None:
        self._run.update(real_costs("train", self.earlier + self.used, self._price))


def _summarise(run: RunFolder, collector: ExperienceCollector, watch: TripwireMonitor | None, dreamed: bool) -> None:
    lines = [*run.metrics("train"), *run.metrics("last_look")]
    turns = sum(line.get("played_turns", line.get("turns", 0)) for line in lines) if dreamed else 0
    both = run.metrics(OVERLAP)  # of updates that played in both worlds: seconds in each, and in both at once
    overlap = {key: round(sum(line[key] for line in both), 2) for key in OVERLAP_SECONDS} if both else None
    off = {"enabled": False, "updates": 0, "last_look": False, "blind": [], "stopped_by": None}
    wires = (watch.summary() if watch is not None else off) if dreamed else None  # or those of dreams before it stay
    run.update({"dreamed_turns": int(turns), "speed": collector.speed(), "overlap": overlap, "tripwires": wires})
    if dreamed and (note := guard_note(run.metrics("train"))):
        print(f"note: {note}", file=sys.stderr)
