"""Stages ``fit-world-model`` and ``clone``: both models learn from the log."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from imagination.experience import imitation_row
from imagination.run_folder import RunFolder
from imagination.settings import Config, FitSettings, UserError, WorldModelSettings
from imagination.stages.common import (
    KeepCheckpoints,
    adapted,
    context_of,
    finish,
    make_trainer,
    need,
    open_run,
    resume_from,
)
from imagination.stages.engines import Engines
from imagination.stages.reasoning import check_room, check_thoughts, note_unended, thoughts_of
from imagination.stages.worlds import UNFINISHED, form_of, load_world_model, member_folder, trained_as
from imagination.stream import StepStream, SupervisedBatches
from imagination.supervised import SupervisedModule
from policy.lm.backbone import build_model, load_checkpoint, save_checkpoint
from policy.lm.batch import Row
from policy.lm.render import ChatFormat, prediction_text, status_line
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.store import TrajectoryStore, is_validation
from real_envs.trajectory import Trajectory
from worldmodel.audit import audit_metrics, in_new_situations, judge
from worldmodel.calibration import calibration_metrics, fit_calibration
from worldmodel.objective import balanced, transition_weights, unchanging, unchanging_share, world_model_rows

MEMBER_SEEDS = 100_003  # between the random starts of two members of an ensemble


def read_log(run: RunFolder, config: Config) -> tuple[list[Trajectory], list[Trajectory]]:
    """Episodes of the training games: those to train on and those held out for validation; failures are left out.

    Raises:
        StoreError: the log is missing or broken.
        UserError: nothing is left to train on.
    """
    store = TrajectoryStore.open(need(run.log, "collect"))
    # sorted: episodes were appended as they ended, and that order is chance
    usable = sorted((t for t in store.read("train") if t.turns and not t.stop.is_failure), key=lambda t: t.id)
    held = [t for t in usable if is_validation(t.id, config.collect.validation)]
    kept = {t.id for t in held}
    train = [t for t in usable if t.id not in kept]
    if not train:
        raise UserError(f"{run.log}: no usable episode in split 'train'; collect more, or lower collect.validation")
    return train, held


def fit_world_model(config: Config, folder: Path) -> None:
    """Trains the world model on the log and measures it on held-out episodes. Writes ``models/worldmodel``."""
    run = open_run(config, folder, "fit_world_model")
    with run.timed("fit_world_model"):
        check_room(config)
        train, held = read_log(run, config)
        settings = config.worldmodel
        form, thoughts = form_of(settings, train), thoughts_of(config, train)
        if all(turn.reward is None for t in train for turn in t.turns):
            raise UserError(f"{run.log}: no turn has a reward; a dream could pay for nothing. Add rewards to the log")
        weights, share = _weights(settings, train)
        run.update({"world_model_form": UNFINISHED})
        rows: list[Row] = []
        for member in range(settings.members):  # one after the other: on one device they would only share it
            seed = config.seed + 1 + member * MEMBER_SEEDS
            model, tokenizer = _start(run, config, settings, train, seed)
            if not rows:  # members share the tokenizer
                chat = ChatFormat(tokenizer)
                answers = [answer for t in train for answer in form.answers(t.start, t.turns)]
                _check_lengths("answers", answers, chat, "dream", config.dream.max_tokens)
                context = context_of(model, settings)
                check_thoughts(config, thoughts, train, chat, form, context)
                rows = [row for t, w in zip(train, weights, strict=True) for row in world_model_rows(chat, t, w, form)]
                rows = fitting(rows, context, "worldmodel.context")
            name = f"fit_world_model-{member}" if member else "fit_world_model"
            random = not settings.model
            supervise(run, name, model, tokenizer, rows, config.fit, config.seed, seed - 1, from_scratch=random)
            save_checkpoint(model, tokenizer, member_folder(run, member))
        run.update({"world_model_form": trained_as(settings)})
        measured = {**measure(run, config, train, held), "unchanged_share": share}
        run.update({"real_steps": {"fit_world_model": 0}, "world_model": measured})
        note_unended(measured, config.worldmodel.reasoning_tokens)
    finish(run, "fit_world_model")


def _weights(settings: WorldModelSettings, log: Sequence[Trajectory]) -> tuple[list[list[float]], float | None]:
    """A training weight for each turn of each episode, and the share of it on turns that change nothing.

    Raises:
        UserError: the log has no turn of a kind that should get a share.
    """
    same = [unchanging(trajectory, settings.refusals) for trajectory in log]
    try:
        weights = balanced(transition_weights(log, settings.rarity), same, settings.unchanged_share)
    except ValueError as error:
        raise UserError(
            f"worldmodel.unchanged_share={settings.unchanged_share}: {error}; declare them in worldmodel.refusals, or "
            "set the share to null"
        ) from error
    return weights, unchanging_share(weights, same)


def measure(
    run: RunFolder,
    config: Config,
    train: Sequence[Trajectory],
    held: Sequence[Trajectory],
    name: str = "worldmodel",
) -> dict[str, Any]:
    """The audit on episodes of the training games that the model has not seen, and on the held-out games.

    ``new`` of it are the turns that no training episode has. A declared goal is what pays in predictions, so it also
    says what they should have paid. Writes the calibration beside the model. ``name``: of the folder under ``models/``.
    """
    goal = config.worldmodel.goal
    held = [goal.paid(t) for t in held] if goal.declared else held
    world_model = load_world_model(Engines(config.engine), run, config, 0.0, train, served=False, name=name)
    apart = world_model.apart_from(held)
    failed: list[tuple[str, int]] = []
    judged = asyncio.run(judge(apart, held, failed=failed))
    metrics: dict[str, Any] = audit_metrics(judged)
    metrics |= {"new": audit_metrics(in_new_situations(judged, held, train)), "failed": len(failed)}
    # what dreams are made of is sampled, and sampled answers are right less often than the most likely ones
    temperature = config.dream.temperature
    sampled = asyncio.run(judge(apart.at_temperature(temperature), held))
    calibration = fit_calibration(sampled, temperature, goal.observation)
    if calibration is not None:
        calibration.save(run.model(name))
    metrics["calibration"] = calibration_metrics(sampled)
    store = TrajectoryStore.open(run.log)
    try:
        elsewhere = [t for t in store.read("heldout") if t.turns and not t.stop.is_failure]
    except ValueError:  # a log of one's own may have no held-out tasks
        return metrics
    elsewhere = [goal.paid(t) for t in elsewhere] if goal.declared else elsewhere
    apart = world_model.apart_from(elsewhere)
    failed = []
    there = asyncio.run(judge(apart, elsewhere, failed=failed))
    metrics["heldout_tasks"] = {**audit_metrics(there), "failed": len(failed)}
    return metrics


def clone(config: Config, folder: Path) -> None:
    """Behaviour cloning on the mediocre part of the log. Writes ``models/policy-clone``."""
    run = open_run(config, folder, "clone")
    with run.timed("clone"):
        train, _ = read_log(run, config)
        chosen = [t for t in train if t.agent.startswith(tuple(config.clone.agents))]
        if not chosen:
            agents = sorted({t.agent for t in train})
            raise UserError(f"no episode of the log is by clone.agents={config.clone.agents}; it has {agents}")
        learned = config.clone.from_world_model and not config.policy.model
        if learned:
            model, tokenizer = load_checkpoint(str(need(run.model("worldmodel"), "fit-world-model")))
        else:
            model, tokenizer = _start(run, config, config.policy, train, config.seed + 2)
        chat = ChatFormat(tokenizer)
        _check_lengths("actions", [u.action for t in chosen for u in t.turns], chat, "", config.max_action_tokens)
        rows = fitting([imitation_row(chat, t) for t in chosen], context_of(model, config.policy), "policy.context")
        supervise(
            run,
            "clone",
            model,
            tokenizer,
            rows,
            config.clone,
            config.seed,
            keep_every=config.clone.keep_every,
            from_scratch=not (learned or config.policy.model),
        )
        save_checkpoint(model, tokenizer, run.model("policy-clone"))
        run.update({"real_steps": {"clone": 0}})
    finish(run, "clone")


def _check_lengths(what: str, texts: Sequence[str], chat: ChatFormat, section: str, limit: int) -> None:
    """
    Raises:
        UserError: more than one in a hundred is longer than the model will be allowed to write.
    """
    key = f"{section}.max_tokens" if section else "max_action_tokens"
    sizes = [len(chat.encode(text)) + 1 for text in texts]  # with the token that ends it
    if sum(size > limit for size in sizes) > 0.01 * len(sizes):
        long = sum(size > limit for size in sizes)
        raise UserError(
            f"{long} of {len(sizes)} logged {what} are longer than {key}={limit}; the longest is {max(sizes)}"
        )


def fitting(rows: Sequence[Row], limit: int, key: str) -> list[Row]:
    """The rows without what lies beyond the context; those with nothing left to learn are dropped.

    Raises:
        UserError: nothing is left at all.
    """
    kept = [cut(row, limit) for row in rows]
    kept = [row for row in kept if any(row.ce_weight)]
    long = sum(len(row.ids) > limit for row in rows)
    if long:
        print(f"note: {long} of {len(rows)} rows are longer than {key}={limit} tokens and were cut", file=sys.stderr)
    if not kept:
        raise UserError(f"no episode has anything to learn within {key}={limit} tokens; raise it")
    return kept


def cut(row: Row, limit: int) -> Row:
    """The row without what lies beyond the context."""
    if len(row.ids) <= limit:
        return row
    return Row(row.ids[:limit], row.action_mask[:limit], row.source, ce_weight=row.ce_weight[:limit])


def supervise(
    run: RunFolder,
    stage: str,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    settings: FitSettings,
    seed: int,
    chance: int | None = None,
    keep_every: int = 0,
    from_scratch: bool = False,
) -> None:
    """Trains ``model`` in place; goes on from a saved training state if the stage was stopped.

    ``seed`` decides the order of the rows, ``chance`` (by default the same) what else is random. Every ``keep_every``
    steps the model as it then is goes into ``models/kept/``; 0 keeps none. ``from_scratch``: its weights are random.
    """
    state, done = resume_from(run, stage)
    run.forget(stage, done)
    chance = seed if chance is None else chance
    module = SupervisedModule(
        model, settings, lambda step, metrics: run.record(stage, step, metrics), chance, from_scratch=from_scratch
    )
    pad = tokenizer.pad_token_id
    batches = SupervisedBatches(rows, settings.batch_tokens, seed, pad if isinstance(pad, int) else 0)
    stream = StepStream(settings.steps, lambda: module.global_step, batches)
    every = max(1, settings.steps // 5)
    keep = KeepCheckpoints(
        run.model("kept"),
        stage,
        keep_every,
        settings.steps,
        lambda: module.global_step,
        lambda folder: save_checkpoint(model, tokenizer, folder),
    )
    trainer = make_trainer(run, stage, every, settings.precision, lambda: module.global_step, [keep])
    trainer.fit(module, stream, ckpt_path=state, weights_only=True)


def _start(
    run: RunFolder, config: Config, settings: ModelSettings, log: Sequence[Trajectory], seed: int
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model before training: a checkpoint, or random weights with a tokenizer trained on the log."""
    if settings.model:
        model, tokenizer = load_checkpoint(settings.model, settings.dtype)
        torch.manual_seed(seed)  # adapters start at random
        return adapted(model, settings), tokenizer
    tokenizer = run_tokenizer(run, config, log)
    return build_model(settings, tokenizer, seed), tokenizer


def run_tokenizer(run: RunFolder, config: Config, log: Sequence[Trajectory]) -> PreTrainedTokenizerBase:
    """The tokenizer of models that start from scratch: trained once a run, shared by both."""
    folder = run.path / "tokenizer"
    form = form_of(config.worldmodel, log)
    kind = config.worldmodel.kind + ("+reasoning" if form.reasoning else "")
    made = {"vocab_size": config.vocab_size, "tokenizer_kind": kind}
    known = {key: run.summary.get(key, "text" if key == "tokenizer_kind" else None) for key in made}
    if known != made or not (folder / "tokenizer.json").exists():
        outcomes = {(turn.reward or 0.0, turn.terminated) for t in log for turn in t.turns}
        texts = {t.start for t in log} | {turn.action for t in log for turn in t.turns}
        texts |= {prediction_text(turn) for t in log for turn in t.turns}  # distinct: what repeats needs no more tokens
        texts |= set(thoughts_of(config, log))
        phrases = [*sorted(status_line(*outcome) for outcome in outcomes), *form.phrases(log)]
        train_tokenizer(sorted(texts), config.vocab_size, phrases).save_pretrained(folder)
        run.update(made)
    return _load_tokenizer(folder)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer
