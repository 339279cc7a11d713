"""What a model is before it is trained: a checkpoint, or random weights with a tokenizer trained on the log."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from imagination.rollout.world_models import form_of, thoughts_of
from imagination.runs.models import adapted
from imagination.runs.run_folder import RunFolder
from imagination.settings import UserError, WorldModelSettings
from policy.lm.backbone import BASE_FOLDER, build_model, has_base, load_checkpoint, load_tokenizer
from policy.lm.render import ChatFormat
from policy.lm.settings import AUTO, BASE, ModelSettings
from policy.lm.tokenizer import train_tokenizer
from policy.lm.trim import keep_layers, trim_vocabulary
from real_envs.files import write_checksums
from real_envs.trajectory import Trajectory
from worldmodel.diffusion.engine import with_mask
from worldmodel.formats.full import prediction_text, status_line

_SIZES = ("hidden", "layers", "heads", "kv_heads", "mlp")
_MOST_TOKENS = 1.5  # that the base's tokenizer may need where one of the log's own needs 1
_SAMPLE = 2000  # texts of the log that are counted


def check_texts(what: str, texts: Sequence[str], chat: ChatFormat, section: str, limit: int) -> None:
    """Refuses texts of which the tokenizer changes more than one in a hundred, or more are longer than ``limit``. A
    template may end answers with what they may hold, such as a line feed; then it changes what follows that.
    """

    def written(text: str) -> str:
        ids = chat.encode(text)
        return chat.decode(ids[: ids.index(chat.stop)] if chat.stop in ids else ids)

    changed = [text for text in texts if written(text) != text]
    if len(changed) > 0.01 * len(texts):
        raise UserError(
            f"the tokenizer of {chat.tokenizer.name_or_path!r} cannot write {len(changed)} of {len(texts)} logged "
            f"{what}: {changed[0]!r} comes back as {written(changed[0])!r}; take another model or chat_template"
        )
    key = f"{section}.max_tokens" if section else "max_action_tokens"
    sizes = [len(chat.encode(text)) + 1 for text in texts]  # with the token that ends it
    if sum(size > limit for size in sizes) > 0.01 * len(sizes):
        long, enough = sum(size > limit for size in sizes), sorted(sizes)[math.ceil(0.99 * len(sizes)) - 1]
        raise UserError(
            f"{long} of {len(sizes)} logged {what} are longer than {key}={limit}; the longest is {max(sizes)}, and "
            f"{key}={enough} would do"
        )


def initial_model(
    run: RunFolder,
    worldmodel: WorldModelSettings,
    vocab_size: int,
    settings: ModelSettings,
    log: Sequence[Trajectory],
    seed: int,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model before training: a checkpoint, or random weights with a tokenizer trained on the log. Raises
    ``UserError``: there is a chat template for no checkpoint.
    """
    if settings.model:
        model, tokenizer = load_checkpoint(settings.model, settings.dtype, settings.chat_template)
        if settings.model == BASE:  # what stands further on than it has read, it learns from the log
            model.config.max_position_embeddings = max(settings.context, model.config.max_position_embeddings)
        if settings.keep_layers:
            keep_layers(model, settings.keep_layers)
        if settings.trim_vocabulary:
            whole = len(tokenizer)
            tokenizer = trim_vocabulary(model, tokenizer, sorted(_texts(worldmodel, log)))
            print(f"{settings.model}: {len(tokenizer):,} of {whole:,} tokens are needed", file=sys.stderr)
        if isinstance(settings, WorldModelSettings) and settings.kind == "diffusion":
            with_mask(model, tokenizer)
        torch.manual_seed(seed)  # adapters start at random
        return adapted(model, settings), tokenizer
    if settings.chat_template:
        raise UserError(f"chat_template={settings.chat_template} is for a checkpoint: set model= beside it")
    tokenizer = run_tokenizer(run, worldmodel, vocab_size, log)
    return build_model(settings, tokenizer, seed), tokenizer


def chosen_model(run: RunFolder, settings: WorldModelSettings, vocab_size: int, log: Sequence[Trajectory]) -> str:
    """The model that ``worldmodel.model`` asks for; what ``auto`` stands for is printed."""
    if settings.model != AUTO:
        return settings.model
    sized = any(getattr(settings, size) != getattr(ModelSettings(), size) for size in _SIZES)
    if sized or settings.members > 1 or settings.kind == "diffusion" or not has_base():
        return ""
    texts = [t.start for t in log] + [text for t in log for turn in t.turns for text in (turn.action, turn.observation)]
    texts = texts[:: max(1, len(texts) // _SAMPLE)]
    own = run_tokenizer(run, settings, vocab_size, log)
    times = _tokens(load_tokenizer(BASE_FOLDER), texts) / _tokens(own, texts)
    chosen = BASE if times <= _MOST_TOKENS else ""
    start = "from the base model" if chosen else "from nothing, not from the base model"
    print(
        f"the world model starts {start}, whose tokenizer writes the log in {times:.2f} times the tokens of its own "
        f"(worldmodel.model=auto takes it up to {_MOST_TOKENS})",
        file=sys.stderr,
    )
    return chosen


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> int:
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts) or 1


def _texts(worldmodel: WorldModelSettings, log: Sequence[Trajectory]) -> set[str]:
    """What models read and write of a log; distinct, as what repeats needs no more tokens."""
    texts = {t.start for t in log} | {turn.action for t in log for turn in t.turns}
    texts |= {prediction_text(turn) for t in log for turn in t.turns}
    return texts | set(thoughts_of(worldmodel, log))


def run_tokenizer(
    run: RunFolder, worldmodel: WorldModelSettings, vocab_size: int, log: Sequence[Trajectory]
) -> PreTrainedTokenizerBase:
    """The tokenizer of models that start from scratch: trained once a run, shared by both."""
    folder = run.path / "tokenizer"
    form = form_of(worldmodel, log)
    mask = worldmodel.kind == "diffusion"
    kind: str = "text" if worldmodel.kind == "code" else worldmodel.kind
    kind += ("+facts" if worldmodel.facts else "") + ("+reasoning" if form.reasoning_tokens else "")
    made = {"vocab_size": vocab_size, "tokenizer_kind": kind}
    known = {key: run.summary.get(key, "text" if key == "tokenizer_kind" else None) for key in made}
    if known != made or not (folder / "tokenizer.json").exists():
        outcomes = {(turn.reward or 0.0, turn.terminated) for t in log for turn in t.turns}
        phrases = [*sorted(status_line(*outcome) for outcome in outcomes), *form.phrases(log)]
        train_tokenizer(sorted(_texts(worldmodel, log)), vocab_size, phrases, mask).save_pretrained(folder)
        write_checksums(folder)
        run.update(made)
    return load_tokenizer(folder)
