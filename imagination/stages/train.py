"""Stage ``train``: the policy plays in the world model and learns from it. Real steps: none, unless asked."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

from imagination.dreaming.dream_env import DreamEnv, Start, starts_from_log
from imagination.dreaming.engines import Engines, make_agent
from imagination.dreaming.mixture import most
from imagination.dreaming.world_models import calibration_of, guard_of, load_world_model
from imagination.learning.algorithms.build import build_algorithm
from imagination.learning.collector import Player, World
from imagination.learning.policy_module import PolicyModule
from imagination.learning.self_imitation_buffer import Replays
from imagination.learning.stream import StepStream
from imagination.learning.trainer import KeepCheckpoints, make_trainer
from imagination.runs.lifecycle import finish, open_run, resume_from
from imagination.runs.log import read_log
from imagination.runs.models import adapted, load_model
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.runs.worlds import open_tasks
from imagination.settings import Config
from imagination.stages.check_train import check, check_experts, longest_episode
from imagination.trust.tripwires.monitor import Probe, Watch
from policy.lm.backbone import save_checkpoint
from real_envs.isolation import real_steps_taken
from real_envs.trajectory import Source, Trajectory
from worldmodel.calibration import Calibration


def train(config: Config, folder: Path) -> None:
    """Updates the policy in dreams, in real games beside them, or as a control there alone. Writes ``models/policy``.

    Raises:
        UserError: settings contradict each other, or an earlier stage is missing.
    """
    check(config)
    run = open_run(config, folder, "train")
    with run.timed("train"):
        _train(run, config)
    finish(run, "train")


def _train(run: RunFolder, config: Config) -> None:
    log, _ = read_log(run, config)
    experts = [t for t in log if t.source is Source.EXPERT and t.solved]
    check_experts(config, len(experts))
    model, chat = load_model(run.model("policy-clone"), "clone", config.policy)
    wanted = build_algorithm(config.algorithm, longest_episode(config)).kl.kl_coef > 0
    reference = copy.deepcopy(model).requires_grad_(False) if wanted else None
    model = adapted(model, config.policy)
    state, done = resume_from(run, "train")
    run.forget("train", done)
    run.forget("last_look")
    dreamed, goal = config.train.world == "dream", config.worldmodel.goal
    # what pays and ends these dreams: by the log's own rewards and ends, some would begin where they are over
    paid = [goal.paid(t) for t in log] if dreamed and goal.declared else log
    starts = {
        name: start
        for name, start in starts_from_log(paid, branch=True).items()
        if len(start.history) < config.dream.max_turns  # deeper ones cost their whole history and teach no more
    }
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
        watch = Watch(run, config, model, paid, probe)
        if state is not None:
            watch.resume(state)
    replays = Replays(config.train.self_imitation, config.seed) if config.train.self_imitation.share else None
    mixed = dreamed and most(config.train.real_share) > 0
    real = _real(run, config) if mixed else None
    bar = Bar("train", config.train.updates, "turns")
    player = Player(run, config, world, model, agent, chat, starts, experts, count, watch, replays, real, bar.count)
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
    trainer = make_trainer(
        run,
        "train",
        config.train.checkpoint_every,
        "fp32",
        lambda: module.updates_done,
        more,
        bar=bar,
        logger=config.logger,
    )
    device = model.device
    if watch is None or watch.tripped is None:
        trainer.fit(module, stream, ckpt_path=state, weights_only=True)
    if watch is not None:
        if watch.tripped is None:
            model.to(device)  # Lightning leaves it on the CPU
            player.last_look()
        watch.roll_back()
    for opened in (world, real):
        if opened is not None and opened.close is not None:
            asyncio.run(opened.close())
    if dreamed and not mixed and (steps := used()):
        raise RuntimeError(f"training in dreams took {steps} real step{'s' * (steps != 1)}")
    save_checkpoint(model, chat.tokenizer, run.model("policy"))
    count()
    lines = [*run.metrics("train"), *run.metrics("last_look")]
    turns = sum(line.get("turns", 0) for line in lines) if dreamed else 0
    run.update({"dreamed_turns": int(turns), "speed": player.speed()})
    if dreamed:
        off = {"enabled": False, "updates": 0, "last_look": False, "blind": [], "stopped_by": None}
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
    if asks:
        calibration = calibration_of(run, config, " and ".join(asks))
    guard = guard_of(run, config, ends=dream.on_doubt != "downweight")
    return World(lambda: DreamEnv(model, starts, guard, calibration), Source.DREAM, model.version, 64, model.engines)


def _real(run: RunFolder, config: Config) -> World:
    tasks = open_tasks(run, config.env, config.collect.workers)
    known = {task.id: task for task in tasks.tasks("train")}
    return World(tasks.make_env, Source.REAL, None, config.collect.workers, close=tasks.close, tasks=known)
