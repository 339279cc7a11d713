from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from imagination.commands.rules import find_rules, rules_sentence
from imagination.commands.screens import fit_screens
from imagination.data.batches import Batches, copying_answers, fit_batches, fitting
from imagination.data.examples import WorldModelExamples
from imagination.data.initial_model import check_texts, chosen_model, initial_model
from imagination.evaluation.world_model_eval import heldout_tasks, language_metrics, measure
from imagination.learning.supervised import NextToken, Objective, SupervisedTrainer
from imagination.rollout import world_models
from imagination.runs import processes
from imagination.runs.lifecycle import run_stage
from imagination.runs.log import rewarded
from imagination.runs.models import context_of
from imagination.session import Session
from imagination.settings import Config, UserError, WorldModelSettings
from policy.lm.backbone import BASE_FOLDER, load_tokenizer, save_checkpoint
from policy.lm.batch import Row
from policy.lm.engines.inprocess.decode import check_attention
from policy.lm.induction import plant_induction
from policy.lm.render import ChatFormat
from policy.lm.settings import AUTO, BASE
from real_envs.seeding import derive_seed
from worldmodel.calibration import FILE as CALIBRATION
from worldmodel.code.world_model import save_world
from worldmodel.code.write import write_world
from worldmodel.diffusion.engine import check_canvases, mark, mask_of
from worldmodel.diffusion.objective import MaskedDiffusion

# Learning rate of the base model, as a share of fit.lr, by the share of the log's tokens that it
# knows before. Map reader, which it has read (0.99 known): 100,000 tokens at 3e-3 took its exact answers from 0.86 to
# 0.77, at 3e-4 they stayed. ALFWorld, which it has not read (0.70): 0.43, 0.53 and 0.56 after a million tokens at 3e-4,
# 1e-3 and 3e-3, and from nothing 0.26.
_KNOWN = 0.9
_OF_KNOWN, _OF_UNKNOWN = 0.1, 1.0
_ASKED = 4  # batches


def fit_world_model(config: Config, folder: Path) -> None:
    """Train the world model on the log: the next observation, reward and termination, given an action.

    It learns from real episodes alone, never from dreams, and is evaluated on held-out episodes.

    With worldmodel.kind=code nothing is trained: a language model on a server (worldmodel.code.url and .model) writes
    the world as a Python function.

    Reads: log/
    Writes: tokenizer/, models/worldmodel/ (worldmodel-1/, ... for further members), or models/screen/

    Examples:
        imagine fit-world-model run=mine
        imagine fit-world-model run=mine worldmodel.kind=delta worldmodel.members=3
        imagine fit-world-model run=mine worldmodel.model=Qwen/Qwen2.5-0.5B-Instruct worldmodel.lora.rank=16
    """
    if config.worldmodel.kind == "screen":
        if config.strategy == "fsdp2":
            raise UserError("worldmodel.kind=screen is trained by one process: leave strategy=fsdp2 out")
        fit_screens(config, folder)
        return
    with run_stage(config, folder, "fit_world_model") as run:
        if config.worldmodel.kind == "code":
            _fit_code(session := Session(config, run))
            _measured(session, {})
            return
        world_models.check_room(config.worldmodel, config.dream)
        session = Session(config, run)
        train = rewarded(run, session.log.train, config.worldmodel.goal)
        settings = replace(config.worldmodel, model=chosen_model(run, config.worldmodel, config.vocab_size, train))
        form, thoughts = world_models.form_of(settings, train), world_models.thoughts_of(config.worldmodel, train)
        known = load_tokenizer(BASE_FOLDER) if settings.model == BASE else None
        examples = WorldModelExamples.of(train, form, settings, config.fit, config.seed, known)
        run.update({"world_model_form": world_models.UNFINISHED})
        fit = config.fit.decided(from_scratch=not settings.model)
        order = derive_seed("fit", config.seed)  # of all members
        rows: list[Row] = []
        for member in range(settings.members):  # one after the other: on one device they would only share it
            seed = derive_seed("world model weights", config.seed, member)
            model, tokenizer = initial_model(
                run, config.worldmodel, config.vocab_size, settings, examples.episodes, seed
            )
            if not rows:  # members share the tokenizer
                chat = ChatFormat(tokenizer)
                answers = [answer for t in examples.episodes for answer in form.answers(t.start, t.turns)]
                check_texts("answers", answers, chat, "dream", config.dream.max_tokens)
                context = context_of(model, settings)
                if config.engine.name == "inprocess" and settings.kind != "diffusion":
                    check_attention(model.config, context)
                world_models.check_thoughts(config.dream.max_tokens, thoughts, examples.episodes, chat, form, context)
                rows = [row for of_episode in examples.rows(chat) for row in of_episode]
                rows = fitting(rows, context, "worldmodel.context")
            objective, copying = _objective(settings, model, chat, context), None
            if diffusion := settings.kind == "diffusion":
                copying = partial(copying_answers, stop=chat.stop, max_tokens=settings.diffusion.block)
            if fit.copying_steps:
                plant_induction(model, order)
            batches, fit_settings = fit_batches(rows, tokenizer, fit, order, copying=copying)
            if settings.model and config.worldmodel.model in (AUTO, BASE):
                fit_settings = replace(fit_settings, lr=fit.lr * share_of_rate(model, batches))
            name = f"fit_world_model-{member}" if member else "fit_world_model"
            SupervisedTrainer(run, name, fit_settings, seed, objective).train(model, tokenizer, batches)
            if diffusion:
                mark(model, settings.diffusion)
            save_checkpoint(model, tokenizer, world_models.member_folder(run, member))
        processes.leave()
        measured = _measured(session, {"unchanged_share": examples.unchanged_share})
        run.update({"language": language_metrics(chat, train, heldout_tasks(run), form)})
        world_models.note_unended(measured, config.worldmodel.reasoning_tokens)


def _fit_code(session: Session) -> None:
    """Has the function written, tested on logged turns and repaired; the best version is the run's world model.

    Raises:
        UserError: the server, its model or its key is missing, or it never answered; or no turn has a reward.
        EngineUnavailable: this system cannot confine the code.
    """
    run, settings = session.run, session.config.worldmodel
    if processes.count() > 1:
        raise UserError("worldmodel.kind=code trains nothing: leave devices, num_nodes and strategy out")
    if not settings.code.url:
        raise UserError(
            "worldmodel.kind=code is written by a language model: set worldmodel.code.url to the address of its "
            "server, such as http://localhost:8000/v1, and worldmodel.code.model to its name there"
        )
    train, held = (settings.goal.relabel_log(log) for log in session.log)
    rewarded(run, train, settings.goal)
    progress = partial(print, file=sys.stderr, flush=True)
    with closing(settings.code.open("worldmodel.code")) as server:
        written = write_world(train, held, server, settings.code, session.config.seed, progress)
    if not written.source:
        raise UserError("worldmodel.code.url: no question was answered; see the lines above")
    # until it is measured; an unanswered request leaves the model before, whose calibration ends here
    run.update({"world_model_form": world_models.UNFINISHED})
    (run.model("worldmodel") / CALIBRATION).unlink(missing_ok=True)
    score = {key: value for key, value in asdict(written).items() if key != "source"}
    save_world(written.source, {**score, "model": server.model}, run.model("worldmodel"))
    run.update({"code_world": {**score, "model": server.model}, "language": None})  # which is of a model of text


def _measured(session: Session, beside: Mapping[str, Any]) -> dict[str, Any]:
    """What held-out episodes say of the model that was just fitted, written down with what is known ``beside``."""
    run, settings, (train, held) = session.run, session.config.worldmodel, session.log
    # also with rules=off, which a later stage may set to something else
    print(rules_sentence(find_rules(run, settings.goal, train, held)[1]), file=sys.stderr, flush=True)
    worth = 1.0 if session.solved_at is None else session.solved_at
    best = max([worth, *(t.total_reward for t in train)])  # a solved task has that much, and no dream can have more
    run.update({"world_model_form": world_models.trained_as(settings), "best_return": best})
    measured = {**measure(session), **beside}
    run.update({"real_steps": {"fit_world_model": 0}, "world_model": measured})
    return measured


@torch.no_grad()
def share_of_rate(model: Any, batches: Batches) -> float:
    """The share of fit.lr at which a base model is tuned: little of what it knows already is to be unlearned."""
    steps = [NextToken().step(batches(k), 0) for k in range(_ASKED)]
    known = sum(int(step.part(model, slice(None))[1]) for step in steps) / sum(step.count for step in steps)
    share = _OF_KNOWN if known >= _KNOWN else _OF_UNKNOWN
    print(f"the base model knows {known:.0%} of the log's tokens: {share:g} of fit.lr", file=sys.stderr, flush=True)
    return share


def _objective(settings: WorldModelSettings, model: Any, chat: ChatFormat, context: int) -> Objective:
    """Raises ``UserError``: the model cannot be trained that way."""
    if settings.kind != "diffusion":
        return NextToken()
    block = settings.diffusion.block
    if block >= context:
        raise UserError(
            f"worldmodel.diffusion.block={block} leaves no room for a history in worldmodel.context={context}"
        )
    check_canvases(model, context)
    mask = mask_of(chat.tokenizer)
    return MaskedDiffusion(block, mask, chat.stop, context, settings.diffusion.causal_weight)
