"""Supervised training of a model on rows, as a stage runs it: cut to the context, resumed, measured."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from imagination.learning.copying import copying_rows, one_after_the_other
from imagination.learning.objectives import Objective
from imagination.learning.precision import chosen_precision
from imagination.learning.stream import StepStream, SupervisedBatches
from imagination.learning.supervised_module import SupervisedModule
from imagination.learning.trainer import KeepCheckpoints, make_trainer
from imagination.runs.lifecycle import resume_from
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.settings import FitSettings, LoggerName, UserError
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import Row, TokenBatch
from policy.lm.induction import plant_induction
from policy.lm.tokenizer import plain_tokens
from real_envs.streams import stream_seed


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
    logger: LoggerName,
    stage: str,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    settings: FitSettings,
    seed: int,
    noise_seed: int | None = None,
    keep_every: int = 0,
    from_scratch: bool = False,
    objective: Objective | None = None,
    copying: Callable[[Sequence[int], int, random.Random], list[Row]] = copying_rows,
    first: Sequence[Row] = (),
    first_steps: int = 0,
) -> None:
    """Trains ``model`` in place; goes on from a saved training state if the stage was stopped.

    ``seed`` decides the order of the rows, ``noise_seed`` (by default the same) what else is random. Every
    ``keep_every`` steps the model as it then is goes into ``models/kept/``; 0 keeps none. ``from_scratch``: its weights
    are random; it then learns to copy first (``settings.copying_steps``), from rows that ``copying`` makes.
    Then, before ``rows``, come ``first_steps`` more steps on the rows ``first``.
    """
    words = plain_tokens(tokenizer)
    repeats: list[Row] = []
    if from_scratch and settings.copying_steps:
        plant_induction(model, seed)
        share = settings.copying_share * sum(len(row.ids) for row in rows)
        repeats = copying(words, max(1, int(share)), random.Random(stream_seed("copying", seed)))
        settings = replace(settings, steps=settings.steps + settings.copying_steps)
    settings = replace(settings, steps=settings.steps + first_steps)
    pad = pad_of(tokenizer)
    batches: Callable[[int], TokenBatch] = SupervisedBatches([*rows, *repeats], settings.batch_tokens, seed, pad)
    if first_steps:
        before = SupervisedBatches([*first, *repeats], settings.batch_tokens, stream_seed("first", seed), pad)
        batches = one_after_the_other(before, first_steps, batches)
    if repeats:
        rng = random.Random(stream_seed("copying", seed, 1))
        nonsense = copying(words, settings.copying_steps * settings.batch_tokens, rng)
        alone = SupervisedBatches(nonsense, settings.batch_tokens, seed, pad)
        batches = one_after_the_other(alone, settings.copying_steps, batches)
    module_seed = seed if noise_seed is None else noise_seed
    train_on(run, logger, stage, model, tokenizer, batches, settings, module_seed, keep_every, from_scratch, objective)


def train_on(
    run: RunFolder,
    logger: LoggerName,
    stage: str,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    batches: Callable[[int], TokenBatch],
    settings: FitSettings,
    seed: int,
    keep_every: int = 0,
    from_scratch: bool = False,
    objective: Objective | None = None,
    save_every: int = 0,
    seconds: float = 0.0,
) -> int:
    """Trains ``model`` in place on the batch of each step; goes on from a saved training state if there is one.

    Args:
        seed: of what is random beside the batches.
        save_every: steps between two training states; 0 saves five.
        seconds: from its first step, after which it ends, with the rate falling towards that end; 0 ends it after its
            steps alone.

    Returns:
        How many steps are done, those before a stop included.
    """

    def passed() -> float:
        return min(1.0, (time.monotonic() - begin) / seconds) if seconds else 0.0

    state, done = resume_from(run, stage)
    run.forget(stage, done)
    bar = Bar(stage.replace("_", " "), settings.steps, "tokens")

    def move(tokens: int, share: float) -> None:
        bar.count(tokens)
        bar.within(share)

    record = partial(run.record, stage)
    module = SupervisedModule(
        model,
        settings,
        record,
        seed,
        from_scratch=from_scratch,
        objective=objective,
        on_tokens=move,
        passed=passed,
    )
    stream = StepStream(settings.steps, lambda: module.global_step, batches, lambda: passed() >= 1)
    keep = KeepCheckpoints(
        run.model("kept"),
        stage,
        keep_every,
        settings.steps,
        lambda: module.global_step,
        lambda folder: save_checkpoint(model, tokenizer, folder),
    )
    precision = chosen_precision(settings.precision, model, batches(min(done, settings.steps - 1)), run, stage)
    every = save_every or max(1, settings.steps // 5)
    trainer = make_trainer(run, stage, every, precision, lambda: module.global_step, [keep], bar=bar, logger=logger)
    begin = time.monotonic()
    trainer.fit(module, stream, ckpt_path=state, weights_only=True)
    return module.global_step


def pad_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills up a batch."""
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) else 0
