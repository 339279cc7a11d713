"""A pretrained model cut down to what a log needs: the tokens that are written there, and its first layers.

Half of a small model are embeddings of words that no log has, and every token costs the product with all of them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from policy.lm.backbone import CheckpointError
from policy.lm.forward import decoder
from policy.lm.render import ChatFormat

_FILE = "tokenizer.json"


def keep_layers(model: Any, count: int) -> None:
    """Drops all layers but the first ``count``.

    Raises:
        CheckpointError: it has fewer, or layers that are not in a list.
    """
    layers, config = getattr(decoder(model), "layers", ()), model.config
    if not 1 <= count <= len(layers):
        raise CheckpointError(f"keep_layers={count}, but {config.model_type} has {len(layers)} layers here")
    decoder(model).layers = layers[:count]
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]


@torch.no_grad()
def trim_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Drops the embeddings of tokens that ``texts`` and the chat template do not need, in place.

    Kept are also single bytes, special tokens, and tokens that others are merged from: these texts are written by the
    same tokens as before, others by shorter ones.

    Returns:
        The tokenizer of what is left.

    Raises:
        CheckpointError: the tokenizer is no byte-pair encoding, or would write the texts in another way.
    """
    chat = ChatFormat(tokenizer)
    written = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    used = {*chat.opening, *chat.to_assistant, chat.stop, *chat.to_user}.union(*written)
    trimmed, kept = _trimmed(tokenizer, used)
    place = {old: new for new, old in enumerate(kept)}
    for text, old in zip(texts, written, strict=True):
        if trimmed.encode(text, add_special_tokens=False) != [place[i] for i in old]:
            raise _refused(tokenizer, f"it would write {text[:60]!r} in another way")
    rows = torch.tensor(kept, device=model.device)
    kept_rows = [table[rows] for table in _tables(model)]
    model.resize_token_embeddings(len(kept), mean_resizing=False)
    for table, values in zip(_tables(model), kept_rows, strict=True):
        table.copy_(values)
    for config in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = getattr(config, name, None)
            one = isinstance(ids, int)
            left = [place[i] for i in ([ids] if one else ids or ()) if i in place]
            setattr(config, name, (left[0] if one else left) if left else None)
    return trimmed


def _tables(model: Any) -> list[torch.Tensor]:
    """All that has a row for each token: embeddings, and weight and bias of the head, tied or not."""
    return [model.get_input_embeddings().weight, *model.get_output_embeddings().parameters()]


def _trimmed(tokenizer: PreTrainedTokenizerBase, used: Iterable[int]) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """A tokenizer of these tokens and all that they need, and their former ids in the order of the new ones."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if isinstance(backend, Tokenizer) else {}
    if state.get("model", {}).get("type") != "BPE":
        raise _refused(tokenizer, "it is no byte-pair encoding")
    vocab, added = state["model"]["vocab"], state["added_tokens"]
    merges = [tuple(m if isinstance(m, list) else m.split(" ", 1)) for m in state["model"]["merges"]]
    parts: dict[str, list[str]] = {}
    for a, b in merges:
        parts.setdefault(a + b, []).extend((a, b))
    token_of = {i: token for token, i in vocab.items()}
    needed = {token for token in vocab if token not in parts}  # bytes, and tokens that no merge makes
    waiting = [token_of[i] for i in used if i in token_of]
    while waiting:
        if (token := waiting.pop()) not in needed:
            needed.add(token)
            waiting += parts[token]
    kept = sorted({*(vocab[token] for token in needed), *(token["id"] for token in added)})
    place = {old: new for new, old in enumerate(kept)}
    state["model"]["vocab"] = {token: place[vocab[token]] for token in vocab if vocab[token] in place}
    state["model"]["merges"] = [[a, b] for a, b in merges if {a, b, a + b} <= needed]
    state["added_tokens"] = [{**token, "id": place[token["id"]]} for token in added]
    _renumber(state.get("post_processor"), place)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for name in ("vocab.json", "merges.txt", "tokenizer.model"):  # of the whole vocabulary
            (Path(folder) / name).unlink(missing_ok=True)
        (Path(folder) / _FILE).write_text(json.dumps(state), encoding="utf-8")
        trimmed: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    trimmed.name_or_path = tokenizer.name_or_path
    if len(trimmed) != len(kept):
        raise _refused(tokenizer, f"{type(trimmed).__name__} has a vocabulary of its own")
    return trimmed, kept


def _renumber(processor: Any, place: dict[int, int]) -> None:
    """The ids of special tokens that a post-processor writes around texts."""
    for part in (processor or {}).get("processors", [processor] if processor else []):
        for token in part.get("special_tokens", {}).values():
            token["ids"] = [place[i] for i in token["ids"]]


def _refused(tokenizer: PreTrainedTokenizerBase, reason: str) -> CheckpointError:
    return CheckpointError(f"{tokenizer.name_or_path}: {reason}: leave trim_vocabulary out")
