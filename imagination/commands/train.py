"""Stage ``train``: the policy plays in the world model and learns from it. Real steps: none, unless asked."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from imagination.commands.check_train import check, check_experts, longest_episode
from imagination.evaluation.costs import real_costs, spent_before
from imagination.evaluation.monitors.monitor import Probe, TripwireMonitor
from imagination.evaluation.world_model_eval import few_episodes, heldout_tasks
from imagination.learning.algorithms import build_algorithm
from imagination.learning.best_policy import BestPolicy, split_starts
from imagination.learning.collector import OVERLAP, OVERLAP_SECONDS, CollectionPlan, ExperienceCollector, World
from imagination.learning.critic_start import NAME as CRITIC
from imagination.learning.critic_start import load_critic, made_for
from imagination.learning.policy_module import PolicyModule
from imagination.learning.recorded import Recorded
from imagination.learning.reward_shaping import RewardShaping, worst_returns
from imagination.learning.self_imitation import Replays
from imagination.learning.stream import StepStream
from imagination.learning.trainer import KeepCheckpoints, make_trainer
from imagination.rollout.dream_env import DreamEnv, Start, dream_starts
from imagination.rollout.engines import Engines, make_agent
from imagination.rollout.schedules import most
from imagination.rollout.world_models import calibration_of, guard_of, load_world_model, rules_of
from imagination.runs.lifecycle import finish, open_run, resume_from
from imagination.runs.log import read_log, solved_at
from imagination.runs.models import adapted, load_model, weights_version
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import open_tasks
from imagination.settings import Config, DreamSettings, TripwireSettings, WorldModelSettings
from policy.agent import LanguageModelAgent
from policy.lm.backbone import save_checkpoint
from policy.lm.render import ChatFormat
from policy.value import ValueHead
from real_envs.env import TaskSet
from real_envs.interaction import PoolStats, real_interaction
from real_envs.trajectory import Source, Trajectory
from worldmodel.calibration import Calibration


def train(
    config: Config, folder: Path, recorded: Recorded | None = None, starts: Mapping[str, Start] | None = None
) -> None:
    """Updates the policy in dreams, in real games beside them, or as a control there alone. Writes ``models/policy``.

    Args:
        recorded: real episodes that were played before; the share ``train.real_share`` is then of these, and the
            training itself takes no real step.
        starts: where dreams begin; by default every state of the log.

    Raises:
        UserError: settings contradict each other, or an earlier stage is missing.
    """
    check(config)
    run = open_run(config, folder, "train")
    with run.timed("train"):
        _train(run, config, recorded, starts)
    finish(run, "train")


def _train(run: RunFolder, config: Config, recorded: Recorded | None, given: Mapping[str, Start] | None) -> None:
    settings, dreamed, longest = config.train, config.train.world == "dream", longest_episode(config)
    seed = config.seed if settings.seed is None else settings.seed
    state, done = resume_from(run, "train")
    run.forget("train", done)
    run.forget("last_look")
    run.forget(OVERLAP, done)

    # build: what the policy learns from, the policy, and the worlds that it plays in
    fitted, _ = read_log(run, config.collect.validation)
    log = fitted if settings.tasks == "train" else few_episodes(heldout_tasks(run), settings.task_episodes)
    experts = [t for t in log if t.source is Source.EXPERT and t.solved]
    check_experts(config, len(experts))
    paid = config.worldmodel.goal.relabel_log(log) if dreamed else log
    starts = dream_starts(paid, config.dream.max_turns) if given is None else given
    learned_from, validation = dict(starts), list[str]()
    if dreamed and settings.validation_tasks:
        learned_from, validation = split_starts(starts, settings.validation_tasks, seed)
    model, chat, reference, value = _policy(run, config, longest)
    open_world = partial(open_tasks, run, config.env, config.collect.workers)
    probe = Probe(run, config.tripwires, open_world, seed, config.dream.max_turns, config.env.price)
    steps = _RealSteps(run, probe, config.env.price, fresh=not done, dreamed=dreamed)
    engines, mixed = Engines(config.engine), dreamed and most(settings.real_share) > 0 and recorded is None
    real = _real(open_world(), settings.tasks, config.collect.workers) if mixed or not dreamed else None
    play = partial(_agent, model, chat, config)
    known = fitted if settings.tasks == "train" else [*fitted, *log]
    dream = _dream(engines, run, config.worldmodel, config.dream, settings.process, known, starts) if dreamed else None

    # play and watch: what an update is made of, and what stops it
    threshold = solved_at(run, config.worldmodel.goal)
    watch = _watch(run, config.tripwires, settings.updates, model, paid, probe, state, threshold) if dreamed else None
    replays = Replays(settings.self_imitation, seed) if settings.self_imitation.share else None
    best = None
    if validation:
        best = BestPolicy(
            model, validation, [starts[name].task_id for name in validation], settings.validate_every, seed
        )
    bar = Bar("train", settings.updates, "turns")
    collector = ExperienceCollector(
        run=run,
        plan=CollectionPlan(seed, settings, config.dream, config.algorithm.progress, config.worldmodel.refusals),
        worlds=[world for world in (dream, real) if world is not None],
        model=model,
        agent=play(engines),
        agent_beside=play(_engines_beside(config)) if mixed and config.engine.name != "vllm" else None,
        chat=chat,
        starts=learned_from,
        experts=experts,
        recorded=recorded,
        count_real_steps=steps.write,
        watch=watch,
        replays=replays,
        on_turn=bar.count,
        worst=_worst(paid, settings.reward_tiers, config.dream.max_turns),
        best=best,
    )

    # learn
    module = PolicyModule(
        model, config.algorithm, settings, partial(run.record, "train"), seed, reference, longest, value=value
    )
    save, last = partial(save_checkpoint, model, chat.tokenizer), settings.updates
    keep = KeepCheckpoints(run.model("kept"), "train", settings.keep_every, last, module.done, save)
    parts = [callback for callback in (watch, replays, best, keep) if callback is not None]
    trainer = make_trainer(
        run, "train", settings.checkpoint_every, "fp32", module.done, parts, bar=bar, logger=config.logger
    )
    device = model.device
    if watch is None or watch.tripped is None:
        trainer.fit(module, StepStream(last, module.done, collector.update), ckpt_path=state, weights_only=True)

    # look once more, and save
    if watch is None or watch.tripped is None:
        model.to(device)  # Lightning leaves it on the CPU
        collector.last_look()
        if best is not None and (watch is None or watch.tripped is None):
            best.restore()
            run.update({"best_policy": best.best})
    if watch is not None:
        watch.roll_back()
    _close(dream, real)
    if dreamed and not mixed:
        steps.expect_none()
    save(run.model("policy"))
    steps.write()
    _summarise(run, collector, watch, dreamed)


class _RealSteps:
    """Counts what this training did in the real world in the run's summary; what probes did stands apart."""

    def __init__(self, run: RunFolder, probe: Probe, price: float, fresh: bool, dreamed: bool) -> None:
        if fresh:
            for stage in ("train", "probe") if dreamed else ("train",):
                run.update(real_costs(stage, PoolStats(), price))
        self._run, self._probe, self._price, self._before = run, probe, price, real_interaction()
        self._earlier = spent_before(run, "train")

    @property
    def used(self) -> PoolStats:
        """By this process."""
        return real_interaction() - self._before - self._probe.spent

    def write(self) -> None:
        self._run.update(real_costs("train", self._earlier + self.used, self._price))

    def expect_none(self) -> None:
        """
        Raises:
            RuntimeError: training in dreams took a real step.
        """
        if used := self.used.steps:
            raise RuntimeError(f"training in dreams took {used} real step{'s' * (used != 1)}")


def _agent(model: Any, chat: ChatFormat, config: Config, engines: Engines) -> LanguageModelAgent:
    return make_agent(engines, model, chat, config.policy, config.max_action_tokens, 1.0, "policy")


def _engines_beside(config: Config) -> Engines:
    """For episodes in the real games beside dreams: no step is shared with these, and no turn is taken from them.

    vLLM is not exact anyway and claims its memory for itself, so that both play in one.
    """
    return Engines(replace(config.engine, slots=min(config.engine.slots, config.collect.workers)))


def _policy(run: RunFolder, config: Config, longest: int) -> tuple[Any, ChatFormat, Any, ValueHead | None]:
    """The clone as it is trained, its chat format, a frozen copy where the algorithm holds it to one, and the critic of
    `fit-critic` where there is one and the algorithm has any."""
    model, chat = load_model(run.model("policy-clone"), "clone", config.policy)
    algorithm, value = build_algorithm(config.algorithm, longest), None
    reference = copy.deepcopy(model).requires_grad_(False) if algorithm.kl.kl_coef > 0 else None
    if algorithm.critic is not None and run.model(CRITIC).exists():
        value = load_critic(run.model(CRITIC), made_for(weights_version(model), algorithm, config.train))
    return adapted(model, config.policy), chat, reference, value


def _worst(log: Sequence[Trajectory], tiers: Sequence[Sequence[float]], longest: int) -> tuple[float, ...]:
    """What doubt costs in dreams of ``longest`` turns, by the log as it is paid."""
    pay = RewardShaping(tuple((threshold, reward) for threshold, reward in tiers))
    return worst_returns([pay.rewards(t)[t.prefix_turns :] for t in log], longest)


def _watch(
    run: RunFolder,
    settings: TripwireSettings,
    updates: int,
    model: Any,
    log: Sequence[Trajectory],
    probe: Probe,
    state: str | None,
    threshold: float | None,
) -> TripwireMonitor | None:
    if not settings.enabled:
        return None
    watch = TripwireMonitor(run, settings, updates, model, log, probe, threshold, rules_of(run))
    if state is not None:
        watch.resume(state)
    return watch


def _close(*worlds: World | None) -> None:
    for world in worlds:
        if world is not None and world.close is not None:
            asyncio.run(world.close())


def _summarise(run: RunFolder, collector: ExperienceCollector, watch: TripwireMonitor | None, dreamed: bool) -> None:
    lines = [*run.metrics("train"), *run.metrics("last_look")]
    turns = sum(line.get("turns", 0) for line in lines) if dreamed else 0
    run.update({"dreamed_turns": int(turns), "speed": collector.speed(), "overlap": _overlap(run)})
    if dreamed:
        off = {"enabled": False, "updates": 0, "last_look": False, "blind": [], "stopped_by": None}
        run.update({"tripwires": watch.summary() if watch is not None else off})


def _overlap(run: RunFolder) -> dict[str, float] | None:
    """Seconds of all updates that played in both worlds: in the dreams, in the real one, and in both at once."""
    lines = run.metrics(OVERLAP)
    return {key: round(sum(line[key] for line in lines), 2) for key in OVERLAP_SECONDS} if lines else None


def _dream(
    engines: Engines,
    run: RunFolder,
    settings: WorldModelSettings,
    dream: DreamSettings,
    process: str,
    log: Sequence[Trajectory],
    starts: Mapping[str, Start],
) -> World:
    model = load_world_model(engines, run, settings, dream, dream.temperature, log)
    calibration = Calibration.load(run.model("worldmodel"))
    asks = [f"train.process={process}"] * process.endswith("probability")
    asks += ["dream.on_doubt=downweight"] * (dream.on_doubt == "downweight")
    if asks:
        calibration = calibration_of(run, settings, dream, " and ".join(asks))
    guard = guard_of(run, settings, dream, ends=dream.on_doubt != "downweight")
    threshold = solved_at(run, settings.goal)
    return World(
        lambda: DreamEnv(model, starts, guard, calibration), Source.DREAM, model.version, 64, model.engines, threshold
    )


def _real(tasks: TaskSet, split: str, workers: int) -> World:
    known = {task.id: task for task in tasks.tasks(split)}
    return World(tasks.make_env, Source.REAL, None, workers, close=tasks.close, tasks=known)
