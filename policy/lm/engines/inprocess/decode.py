"""One step of generation: blocks of new tokens in, logits at the wanted ones out; keys and values stay in slots.

``LeanDecoder`` is a plain forward pass for decoders shaped like Llama (Llama, Mistral, Qwen2, Qwen3), and
``GenericDecoder`` runs the model's own forward for all others with standard keys and values.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from policy.lm.engine import UnsupportedModel
from policy.lm.engines.inprocess.decode_generic import GenericDecoder, is_faithful
from policy.lm.engines.inprocess.decode_lean import LeanDecoder
from policy.lm.engines.inprocess.feed import Feed
from policy.lm.engines.inprocess.slots import SlotCache
from policy.lm.forward import attention_window, decoder

_LEAN = ("llama", "mistral", "qwen2", "qwen3")
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
    lean = config.model_type in _LEAN and _rope_type(config) in _STATIC_ROPE and _plain(model)
    if not lean and dtype != model.dtype:
        raise UnsupportedModel(
            f"this {config.model_type} can only be run in the dtype that it has, {model.dtype}, not in {dtype}: set "
            "engine.dtype=auto, and the dtype of the model to the one to compute in"
        )
    cache = SlotCache(*kv_shape(config), slots, context, dtype, model.device)
    if lean:
        return LeanDecoder(model, cache)
    generic = GenericDecoder(model, cache)
    if not is_faithful(generic):
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


__all__ = ["Decoder", "kv_shape", "make_decoder"]
