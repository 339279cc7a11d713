"""Stage ``pretrain``: a base model reads endless episodes of many worlds, as world model and as policy."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from imagination.data.batches import copying_first, pad_of
from imagination.data.corpus import (
    INDEX,
    CorpusBatches,
    count_read,
    delete_shards,
    known_worlds,
    make_shard,
    play_shard,
)
from imagination.learning.supervised import SupervisedTrainer
from imagination.runs.lifecycle import finish, open_run
from imagination.runs.models import weights_version
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.settings.models import CorpusWorld, PretrainSettings
from policy.lm.backbone import build_model, load_tokenizer, save_checkpoint
from policy.lm.induction import plant_induction
from policy.lm.tokenizer import train_tokenizer
from real_envs.files import write_atomically
from real_envs.seeding import derive_seed
from worldmodel.formats.full import prediction_text, status_line
from worldmodel.formats.memory import KNOWN, NOW

_SAMPLE = 4  # shards' worth of text that the tokenizer is trained on
_COMMON = 0.02  # of the turns of the sample: reward lines that are one token


def pretrain(config: Config, folder: Path) -> None:
    """Trains the base model from nothing; stopped, it goes on. Writes ``models/base``, with a model card.

    Raises:
        UserError: no world of the corpus can be played, or one gives no episodes.
    """
    run = open_run(config, folder, "pretrain")
    settings = config.pretrain
    if not settings.worlds:
        raise UserError("pretrain.worlds is empty: take preset=base, or declare pretrain.worlds.<name>.env=...")
    with run.timed("pretrain"):
        worlds, missing = known_worlds(settings.worlds)
        for line in missing:
            print(line, file=sys.stderr, flush=True)
        place, path = run.path / "tokenizer", run.path / INDEX
        if run.summary.get("pretrain_settings") != run.settings:  # what is there is of other settings
            shutil.rmtree(place, ignore_errors=True)
            path.unlink(missing_ok=True)
            delete_shards(path)
            run.update({"pretrain_settings": run.settings})
        tokenizer = _tokenizer(config, run, place, worlds)
        model = build_model(settings.model, tokenizer, derive_seed("base weights", config.seed))
        plant_induction(model, config.seed)
        with ProcessPoolExecutor(settings.makers, mp_context=multiprocessing.get_context("spawn")) as makers:
            make = partial(make_shard, settings, worlds, place, config.seed)
            order, pad = derive_seed("pretrain", config.seed), pad_of(tokenizer)
            corpus = CorpusBatches(make, makers, settings, path, order, pad)
            rng = random.Random(derive_seed("copying", config.seed))
            batches = copying_first(corpus, tokenizer, settings, order, rng)
            fit = replace(settings.decided(from_scratch=True), steps=settings.copying_steps + settings.steps)
            trainer = SupervisedTrainer(
                run, "pretrain", fit, order, save_every=settings.save_every, seconds=60 * settings.minutes
            )
            try:
                done = trainer.train(model, tokenizer, batches)
            finally:
                makers.shutdown(wait=False, cancel_futures=True)  # shards that nobody reads any more
        read = count_read(path, done - settings.copying_steps)
        model.to(getattr(torch, settings.model.dtype))
        save_checkpoint(model, tokenizer, run.model("base"))
        card = _card(settings, worlds, read, model, config.seed)
        write_atomically(run.model("base") / "README.md", card)
        delete_shards(path)
        run.update({"base": {"parameters": model.num_parameters(), **read}})
        spent = run.summary.get("sample_steps", 0) + sum(count_read(path)["real_steps"].values())
        run.update({"real_steps": {"pretrain": spent}})
        if lost := {name: count for name, count in read["broken"].items() if count}:
            print(f"note: episodes that a world broke, which nobody read: {lost}", file=sys.stderr)
    finish(run, "pretrain")


_CARD = """---
license: apache-2.0
---
# A base model of text worlds

A causal language model in the shape of Llama with {parameters:,} parameters. It is a world model (it answers an action
with the next observation, the reward and the end) and a policy (it answers an observation with an action), in the chat
format of its tokenizer, and is meant to be tuned on your log. It knows nothing beside the worlds below.

It has read {tokens:,} tokens of these worlds, each {passes} times, as world model and as policy (agents {agents}):
episodes by scripted agents of all skills in training tasks alone, {renamed:.0%} of them with made-up names.

| world | options | episodes | tokens | real steps |
|---|---|---|---|---|
{rows}

Made by `imagine pretrain` of this package, seed {seed}; weights {version}.
"""


def _card(
    settings: PretrainSettings,
    worlds: Mapping[str, CorpusWorld],
    read: Mapping[str, Mapping[str, int]],
    model: Any,
    seed: int,
) -> str:
    """The model card: which worlds and folds, how much of each, made how."""
    rows = []
    for name, world in worlds.items():
        options = ", ".join(f"{key}={value}" for key, value in world.options.items())
        counts = " | ".join(f"{read[what].get(name, 0):,}" for what in ("episodes", "tokens", "real_steps"))
        rows.append(f"| {name} (`env={world.env}`) | {options} | {counts} |")
    return _CARD.format(
        parameters=model.num_parameters(),
        tokens=sum(read["tokens"].values()),
        passes=settings.passes,
        agents=", ".join(settings.agents),
        renamed=settings.renamed_share,
        rows="\n".join(rows),
        seed=seed,
        version=weights_version(model),
    )


def _tokenizer(
    config: Config, run: RunFolder, place: Path, worlds: Mapping[str, CorpusWorld]
) -> PreTrainedTokenizerBase:
    """Trained on a sample of the corpus; made once."""
    if not (place / "tokenizer.json").exists():
        settings = config.pretrain
        larger = replace(settings, shard_characters=_SAMPLE * settings.shard_characters)
        sample = play_shard(larger, worlds, config.seed, -1)
        run.update({"sample_steps": sum(played.real_steps for played in sample.values())})
        episodes = [episode for played in sample.values() for episode in played.episodes]
        turns = [turn for episode in episodes for turn in episode.turns]
        lines = Counter(status_line(turn.reward, turn.terminated) for turn in turns)
        phrases = [line for line, count in sorted(lines.items()) if count >= _COMMON * len(turns)]
        texts = {episode.start for episode in episodes} | {turn.action for turn in turns}
        texts |= {prediction_text(turn) for turn in turns}
        texts |= {fact for episode in episodes for fact in episode.world_facts}
        train_tokenizer(sorted(texts), config.vocab_size, [*phrases, KNOWN, NOW]).save_pretrained(place)
    return load_tokenizer(place)
