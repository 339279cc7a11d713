"""Stages ``fit-world-model`` and ``clone``: both models learn from the log."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from imagination.dreaming.reasoning_checks import check_room, check_thoughts, note_unended, thoughts_of
from imagination.dreaming.world_models import UNFINISHED, form_of, member_folder, trained_as
from imagination.learning.initial_model import check_texts, initial_model
from imagination.learning.renaming import with_renamed
from imagination.learning.supervise import fitting, supervise
from imagination.runs.lifecycle import finish, open_run
from imagination.runs.log import read_log
from imagination.runs.models import context_of
from imagination.settings import Config, UserError, WorldModelSettings
from imagination.trust.held_out import heldout_tasks, measure
from imagination.trust.language import language_metrics
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import Row
from policy.lm.render import ChatFormat
from real_envs.streams import stream_seed
from real_envs.trajectory import Trajectory
from worldmodel.form import Form
from worldmodel.objective import balanced, transition_weights, unchanging, unchanging_share, world_model_rows


def fit_world_model(config: Config, folder: Path) -> None:
    """Trains the world model on the log and measures it on held-out episodes. Writes ``models/worldmodel``."""
    run = open_run(config, folder, "fit_world_model")
    with run.timed("fit_world_model"):
        check_room(config.worldmodel, config.dream)
        train, held = read_log(run, config.collect.validation)
        settings = config.worldmodel
        form, thoughts = form_of(settings, train), thoughts_of(config.worldmodel, train)
        if all(turn.reward is None for t in train for turn in t.turns):
            raise UserError(f"{run.log}: no turn has a reward; a dream could pay for nothing. Add rewards to the log")
        weights, share = _weights(settings, train)
        run.update({"world_model_form": UNFINISHED})
        told = with_renamed(train, config.fit.renamed, config.seed)
        rows: list[Row] = []
        for member in range(settings.members):  # one after the other: on one device they would only share it
            seed = stream_seed("world model weights", config.seed, member)
            model, tokenizer = initial_model(run, config.worldmodel, config.vocab_size, settings, told, seed)
            if not rows:  # members share the tokenizer
                chat = ChatFormat(tokenizer)
                answers = [answer for t in told for answer in form.answers(t.start, t.turns)]
                check_texts("answers", answers, chat, "dream", config.dream.max_tokens)
                context = context_of(model, settings)
                check_thoughts(config.dream.max_tokens, thoughts, told, chat, form, context)
                forms = _forms(settings, form, told, config.seed)
                weights *= 1 + config.fit.renamed  # a copy weighs what its episode does
                rows = [
                    row
                    for t, w, shown in zip(told, weights, forms, strict=True)
                    for row in world_model_rows(chat, t, w, shown)
                ]
                rows = fitting(rows, context, "worldmodel.context")
            name = f"fit_world_model-{member}" if member else "fit_world_model"
            random = not settings.model
            order = stream_seed("fit", config.seed)  # of all members
            supervise(run, config.logger, name, model, tokenizer, rows, config.fit, order, seed, from_scratch=random)
            save_checkpoint(model, tokenizer, member_folder(run, member))
        best = max([1.0, *(t.total_reward for t in train)])  # a solved task has 1, and no dream can have more
        run.update({"world_model_form": trained_as(settings), "best_return": best})
        measured = {
            **measure(run, config.worldmodel, config.dream, config.engine, train, held),
            "unchanged_share": share,
        }
        run.update({"real_steps": {"fit_world_model": 0}, "world_model": measured})
        run.update({"language": language_metrics(chat, train, heldout_tasks(run), form)})
        note_unended(measured, config.worldmodel.reasoning_tokens)
    finish(run, "fit_world_model")


def _forms(settings: WorldModelSettings, form: Form, log: Sequence[Trajectory], seed: int) -> list[Form]:
    """The form of each episode: some without facts, so that the model also dreams in tasks that nothing is known of."""
    if not settings.facts:
        return [form] * len(log)
    bare = form_of(replace(settings, facts=0), log)
    rng = random.Random(stream_seed("facts", seed))
    return [form if rng.random() < settings.facts_share else bare for _ in log]


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
