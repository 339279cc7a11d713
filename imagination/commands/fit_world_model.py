"""Stages ``fit-world-model`` and ``clone``: both models learn from the log."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from imagination.commands.fit_screens import fit_screens
from imagination.commands.rules import find_rules, rules_sentence
from imagination.evaluation.world_model_eval import heldout_tasks, language_metrics, measure
from imagination.learning.copying import copying_answers, copying_rows
from imagination.learning.initial_model import check_texts, chosen_model, initial_model
from imagination.learning.renaming import with_renamed
from imagination.learning.supervise import fitting, supervise
from imagination.learning.world_model_data import forms_of, objective_of, weights_of
from imagination.rollout.world_models import (
    UNFINISHED,
    check_room,
    check_thoughts,
    form_of,
    member_folder,
    note_unended,
    thoughts_of,
    trained_as,
)
from imagination.runs.lifecycle import finish, open_run
from imagination.runs.log import read_log, solved_at
from imagination.runs.models import context_of
from imagination.session import Session
from imagination.settings import Config, UserError
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import Row
from policy.lm.render import ChatFormat
from real_envs.streams import stream_seed
from worldmodel.diffusion.checkpoint import mark
from worldmodel.objective import world_model_rows


def fit_world_model(config: Config, folder: Path) -> None:
    """Trains the world model on the log and measures it on held-out episodes. Writes ``models/worldmodel``."""
    if config.worldmodel.kind == "screen":
        fit_screens(config, folder)
        return
    run = open_run(config, folder, "fit_world_model")
    with run.timed("fit_world_model"):
        check_room(config.worldmodel, config.dream)
        train, held = read_log(run, config.collect.validation)
        chosen = chosen_model(run, config.worldmodel, config.vocab_size, train)
        settings = replace(config.worldmodel, model=chosen)
        form, thoughts = form_of(settings, train), thoughts_of(config.worldmodel, train)
        if all(turn.reward is None for t in train for turn in t.turns):
            raise UserError(f"{run.log}: no turn has a reward; a dream could pay for nothing. Add rewards to the log")
        weights, share = weights_of(settings, train)
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
                forms = forms_of(settings, form, told, config.seed)
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
            objective, copying = objective_of(settings, model, chat, context), copying_rows
            if diffusion := settings.kind == "diffusion":
                copying = partial(copying_answers, stop=chat.stop, most=settings.diffusion.block)
            supervise(
                run,
                config.logger,
                name,
                model,
                tokenizer,
                rows,
                config.fit,
                order,
                seed,
                from_scratch=random,
                objective=objective,
                copying=copying,
            )
            if diffusion:
                mark(model, settings.diffusion)
            save_checkpoint(model, tokenizer, member_folder(run, member))
        if settings.rules != "off":
            print(rules_sentence(find_rules(run, settings.goal, train, held)[1]), file=sys.stderr, flush=True)
        threshold = solved_at(run, config.worldmodel.goal)
        worth = 1.0 if threshold is None else threshold
        best = max([worth, *(t.total_reward for t in train)])  # a solved task has that much, and no dream can have more
        run.update({"world_model_form": trained_as(settings), "best_return": best})
        measured = {
            **measure(Session(config, run), train, held),
            "unchanged_share": share,
        }
        run.update({"real_steps": {"fit_world_model": 0}, "world_model": measured})
        run.update({"language": language_metrics(chat, train, heldout_tasks(run), form)})
        note_unended(measured, config.worldmodel.reasoning_tokens)
    finish(run, "fit_world_model")
