"""One step of generation: blocks of new tokens in, logits at the wanted ones out; keys and values stay in slots.

``LlamaDecoder`` is a plain forward pass for decoders shaped like Llama (Llama, Mistral, Qwen2, Qwen3), and
``GenericDecoder`` runs the model's own forward for all others with standard keys and values.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from transformers import Cache

from policy.lm.engine import UnsupportedModel
from policy.lm.engines.inprocess.decode_llama import LlamaDecoder
from policy.lm.engines.inprocess.slots import Feed, SlotCache, sizes
from policy.lm.forward import attention_window, decoder, evaluating, token_logits

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_BIASED = ("q_proj", "k_proj", "v_proj")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class Decoder(Protocol):
    """Runs steps on the weights as they were at the last ``refresh``."""

    cache: SlotCache

    def refresh(self) -> None: ...

    def hidden(self, feed: Feed) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def make_decoder(model: Any, context: int, slots: int, dtype: torch.dtype) -> Decoder:
    """The fastest decoder that computes what ``model`` computes.

    Raises:
        UnsupportedModel: other attention than full attention within ``context``; another ``dtype`` than the model's
            where its own forward pass is run; or that pass gives other logits in pieces than at once.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = attention_window(config)
    if kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"{config.model_type} mixes {', '.join(sorted(kinds))}: only full attention can be played"
        )
    if window is not None and window < context:
        raise UnsupportedModel(f"{config.model_type} attends to {window} tokens: lower the context to that")
    llama_like = config.model_type in _LLAMA_LIKE and _rope_type(config) in _STATIC_ROPE and _plain(model)
    if not llama_like and dtype != model.dtype:
        raise UnsupportedModel(
            f"this {config.model_type} can only be run in the dtype that it has, {model.dtype}, not in {dtype}: set "
            "engine.dtype=auto, and the dtype of the model to the one to compute in"
        )
    cache = SlotCache(*kv_shape(config), slots, context, dtype, model.device)
    if llama_like:
        return LlamaDecoder(model, cache)
    generic = GenericDecoder(model, cache)
    if not _is_faithful(generic):
        raise UnsupportedModel(
            f"{config.model_type} is not played faithfully: fed in pieces, it gives other probabilities than in one "
            "pass; choose a model with standard attention and output"
        )
    return generic


def kv_shape(config: Any) -> tuple[int, int, int]:
    """Layers, heads of keys and values, and their width.

    Raises:
        UnsupportedModel: it has no such heads.
    """
    if not hasattr(config, "num_key_value_heads") or getattr(config, "kv_lora_rank", None):  # latent attention
        raise UnsupportedModel(f"{config.model_type}: only decoders with standard attention can be played")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, dim


def _rope_type(config: Any) -> str:
    rope = getattr(config, "rope_parameters", None) or {}
    return str(rope.get("rope_type", "default"))


def _plain(model: Any) -> bool:
    """All projections are plain linear layers, or such with plain LoRA on top; no quantisation, no other adapters, and
    no biases but those of query, key and value."""
    for name, module in decoder(model).layers.named_modules():
        if not name.endswith("_proj"):
            continue
        base = getattr(module, "base_layer", module)
        if type(base) is not torch.nn.Linear or (base.bias is not None and name[-6:] not in _BIASED):
            return False
        if base is not module and (not hasattr(module, "lora_A") or any(getattr(module, "use_dora", {}).values())):
            return False
    return bool(model.config.hidden_act == "silu")


class _RowCache(Cache):
    """What a transformers model reads and writes of the slots, for rows padded to one width."""

    def __init__(self, cache: SlotCache, slots: torch.Tensor, positions: torch.Tensor, visible: int) -> None:
        self.cache, self.slots, self.positions, self.visible = cache, slots, positions, visible

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.cache.kv[layer_idx]
        keys[self.slots[:, None], :, self.positions] = key_states.transpose(1, 2)
        values[self.slots[:, None], :, self.positions] = value_states.transpose(1, 2)
        return keys[self.slots, :, : self.visible], values[self.slots, :, : self.visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.visible


class GenericDecoder:
    """The model's own forward pass on padded rows: right for any standard decoder, at the speed of transformers.

    Rows of similar block length go together, so that one long prompt does not pad a batch of decoding rows.
    """

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self.model, self.cache = model, cache

    def refresh(self) -> None:
        """The model itself is run; there is nothing to copy."""

    def hidden(self, feed: Feed) -> torch.Tensor:
        """Final hidden states ``[wanted, hidden]``; writes keys and values of all fed tokens."""
        kinds = sizes(feed.counts)
        of_token = np.repeat(kinds, feed.counts)
        places, states = [], []
        with evaluating(self.model):
            for kind in np.unique(kinds):
                rows, of_kind = kinds == kind, of_token == kind
                place = np.flatnonzero(of_kind[feed.wanted])
                wanted = np.cumsum(of_kind)[feed.wanted[place]] - 1  # among the tokens of this kind
                part = Feed(
                    feed.slots[rows], feed.starts[rows], feed.counts[rows], feed.tokens[of_kind], wanted, feed.canvas
                )
                places.append(place)
                states.append(self._padded(part))
        order = np.argsort(np.concatenate(places))
        return torch.cat(states)[torch.from_numpy(order).to(self.cache.kv.device)]

    def _padded(self, feed: Feed) -> torch.Tensor:
        """``hidden``, all rows in one rectangle."""
        device = self.cache.kv.device
        width = int(feed.counts.max())
        columns = np.arange(width)
        inside = columns < feed.counts[:, None]
        tokens = np.zeros(inside.shape, dtype=np.int64)
        tokens[inside] = feed.tokens
        at = feed.starts[:, None] + columns
        waste = self.cache.waste_position
        written = torch.from_numpy(np.where(inside, at, waste)).to(device)
        positions = torch.from_numpy(np.minimum(at, waste - 1)).to(device)
        visible = int((feed.starts + feed.counts).max())
        horizons = positions
        if feed.canvas:
            horizons = torch.from_numpy(feed.starts + feed.counts - 1).to(device)[:, None].expand_as(positions)
        mask = torch.arange(visible, device=device) <= horizons[:, :, None]
        if self.model.config._attn_implementation == "eager":  # it adds the mask to the scores
            mask = torch.where(mask, 0.0, torch.finfo(self.cache.kv.dtype).min).to(self.cache.kv.dtype)
        cache = _RowCache(self.cache, torch.from_numpy(feed.slots).to(device), written, visible)
        hidden = decoder(self.model)(
            input_ids=torch.from_numpy(tokens).to(device),
            attention_mask=mask[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        wanted: torch.Tensor = hidden.flatten(0, 1)[torch.from_numpy(np.flatnonzero(inside)[feed.wanted]).to(device)]
        return wanted

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> ``[n, vocab]`` in fp32."""
        return token_logits(self.model, hidden).float()


@torch.no_grad()
def _is_faithful(generic: GenericDecoder) -> bool:
    """Whether a short text, read in two pieces, gets the logits that the model gives it; NaN is left to requests."""
    model, cache = generic.model, generic.cache
    ids = np.arange(1, 1 + min(4, cache.waste_position))
    got = []
    for piece in np.array_split(ids, 2)[: len(ids)]:
        start, count = np.array([piece[0] - 1]), np.array([len(piece)])
        feed = Feed(np.array([0]), start, count, piece, np.arange(len(piece)))
        got.append(generic.logits(generic.hidden(feed)))
    cache.clear(0)
    with evaluating(model):
        expected = model(input_ids=torch.from_numpy(ids[None]).to(model.device), use_cache=False).logits[0].float()
    # far above rounding, TF32 and experts that change with it included, and far below what a forgotten factor does
    tolerance = 1e-2 if model.dtype in (torch.float32, torch.float64) else 0.2
    return not bool((torch.cat(got) - expected).norm() > tolerance * expected.norm())
