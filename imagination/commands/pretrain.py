from __future__ import annotations

import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from imagination.data import corpus
from imagination.data.batches import SupervisedBatches, copying_first, copying_rows, pad_of
from imagination.learning.supervised import SupervisedTrainer
from imagination.runs.lifecycle import need, run_stage
from imagination.runs.machine import cores
from imagination.runs.models import weights_version
from imagination.runs.processes import from_first, leave
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.settings.models import CorpusWorld
from policy.lm.backbone import build_model, load_tokenizer, save_checkpoint
from policy.lm.induction import plant_induction
from policy.lm.tokenizer import plain_tokens, train_tokenizer
from real_envs.files import write_atomically
from real_envs.process_guard import end_with_parent
from real_envs.seeding import derive_seed
from worldmodel.formats.full import prediction_text, status_line
from worldmodel.formats.memory import KNOWN, NOW

_SAMPLE = 4  # shards of each world that the tokenizer is trained on
_COMMON = 0.02  # of the turns of the sample: reward lines that are one token


def pretrain(config: Config, folder: Path) -> None:
    """Pre-train a base model on episodes of many environments, for runs to start from.

    Scripted agents of all skills play training tasks whose options are sampled anew. A model from scratch is
    trained on the episodes, as world model and as policy. A stopped run resumes. pretrain.corpus=<run> reads
    the corpus of another run, such as on a GPU machine without environments. Other runs start from the model
    by worldmodel.model=<run>/models/base.

    Reads: nothing
    Writes: models/base, tokenizer/, corpus/

    Examples:
        imagine pretrain
        imagine pretrain run=deep pretrain.corpus=outputs/base pretrain.model.layers=8

    Raises:
        UserError: no world of the corpus can be played, one gives no episodes, or ``pretrain.corpus`` has no shards.
    """
    settings = config.pretrain
    if not settings.worlds:
        raise UserError("pretrain.worlds is empty: take preset=base, or declare pretrain.worlds.<name>.env=...")
    with run_stage(config, folder, "pretrain") as run:
        worlds, home = from_first(_corpus)(config, run)
        tokenizer = load_tokenizer(need(home / "tokenizer", "pretrain"))
        made_by = corpus.declared(home / "corpus")
        rows, counts = corpus.load_corpus(home / "corpus", worlds)
        if lost := {name: count for name, count in counts["broken"].items() if count}:
            print(f"note: episodes that a world broke, which nobody reads: {lost}", file=sys.stderr)
        if not settings.corpus:
            spent = run.summary.get("sample_steps", 0) + sum(counts["real_steps"].values())
            run.update({"real_steps": {"pretrain": spent}})
        model = build_model(settings.model, tokenizer, derive_seed("base weights", config.seed))
        plant_induction(model, config.seed)
        order = derive_seed("pretrain", config.seed)
        rng = random.Random(derive_seed("copying", config.seed))
        copying_tokens = int(settings.copying_share * sum(counts["tokens"].values()))
        rows += copying_rows(plain_tokens(tokenizer), copying_tokens, rng)
        supervised = SupervisedBatches(rows, settings.batch_tokens, order, pad_of(tokenizer))
        batches = copying_first(supervised, tokenizer, settings, order, rng)
        fit = replace(settings.decided(from_scratch=True), steps=settings.copying_steps + settings.steps)
        trainer = SupervisedTrainer(run, "pretrain", fit, order, save_every=settings.save_every)
        done = trainer.train(model, tokenizer, batches)
        leave()
        model.to(getattr(torch, settings.model.dtype))
        save_checkpoint(model, tokenizer, run.model("base"))
        epochs = supervised.epochs(max(0, done - settings.copying_steps))
        card = _card(config, worlds, made_by, counts, epochs, model)
        write_atomically(run.model("base") / "README.md", card)
        run.update({"base": {"parameters": model.num_parameters(), "epochs": epochs, **counts}})


def _corpus(config: Config, run: RunFolder) -> tuple[Mapping[str, CorpusWorld], Path]:
    """The worlds of the corpus and the folder where it lies, with its tokenizer; it is made as far as it is missing."""
    settings = config.pretrain
    if settings.corpus:  # of another run, or from another machine
        return {name: world for name, world in settings.worlds.items() if world.share}, Path(settings.corpus)
    made = corpus.Corpus(
        settings,
        corpus.known_worlds(settings.worlds),
        run.path / "corpus",
        config.seed,
        corpus.held_out_starts(settings.leave_out),
    )
    made.declare(config.vocab_size)
    makers = settings.makers or cores()
    with ProcessPoolExecutor(makers, multiprocessing.get_context("spawn"), end_with_parent) as executor:
        _make_tokenizer(config, run, made, executor)
        made.make(executor)
    return made.worlds, run.path


_CARD = """---
license: apache-2.0
---
# A base model of text worlds

A causal language model in the shape of Llama with {parameters:,} parameters. It is a world model (it answers an action
with the next observation, the reward and the end) and a policy (it answers an observation with an action), in the chat
format of its tokenizer, and is meant to be tuned on your log. It knows nothing beside the worlds below.

It has read {tokens:,} tokens of these worlds, each {epochs:.1f} times, as world model and as policy (agents {agents}):
episodes by scripted agents of all skills in training tasks alone, {renamed:.0%} of them with made-up names. {left_out}

| world | options | episodes | tokens | real steps |
|---|---|---|---|---|
{rows}

Made by `imagine pretrain` of this package, seed {seed}; weights {version}.
"""


def _card(
    config: Config,
    worlds: Mapping[str, CorpusWorld],
    made_by: Mapping[str, Any],
    counts: corpus.Counts,
    epochs: float,
    model: Any,
) -> str:
    """The model card: which worlds, how much of each, made how; ``made_by`` is what the corpus was generated by."""
    rows = []
    for name, world in worlds.items():
        options = ", ".join(f"{key}={value}" for key, value in made_by["worlds"][name]["options"].items())
        numbers = " | ".join(f"{counts[what].get(name, 0):,}" for what in ("episodes", "tokens", "real_steps"))
        rows.append(f"| {name} (`env={world.env}`) | {options} | {numbers} |")
    return _CARD.format(
        parameters=model.num_parameters(),
        tokens=sum(counts["tokens"].values()),
        epochs=epochs,
        agents=", ".join(made_by["agents"]),
        renamed=made_by["renamed_share"],
        left_out=f"Episodes that begin as a held-out task of {len(made_by['leave_out'])} runs\n"
        f"were left out: {sum(counts['left_out'].values()):,}.",
        rows="\n".join(rows),
        seed=config.seed,
        version=weights_version(model),
    )


def _make_tokenizer(config: Config, run: RunFolder, made: corpus.Corpus, executor: Executor) -> None:
    """Trained on a sample of the corpus, from which nothing is left out; made once."""
    place = run.path / "tokenizer"
    if not (place / "tokenizer.json").exists():
        larger = replace(config.pretrain, shard_characters=_SAMPLE * config.pretrain.shard_characters)
        play = replace(made, settings=larger, left_out=()).play
        sample = [future.result() for future in [executor.submit(play, name, -1) for name in made.worlds]]
        run.update({"sample_steps": sum(played.real_steps for played in sample)})
        episodes = [episode for played in sample for episode in played.episodes]
        turns = [turn for episode in episodes for turn in episode.turns]
        lines = Counter(status_line(turn.reward, turn.terminated) for turn in turns)
        phrases = [line for line, count in sorted(lines.items()) if count >= _COMMON * len(turns)]
        texts = {episode.start for episode in episodes} | {turn.action for turn in turns}
        texts |= {prediction_text(turn) for turn in turns}
        texts |= {fact for episode in episodes for fact in episode.world_facts}
        train_tokenizer(sorted(texts), config.vocab_size, [*phrases, KNOWN, NOW]).save_pretrained(place)
