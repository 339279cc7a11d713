"""Weights to start from in which a model already copies: what followed this word before follows again.

New tasks need in-context copying. From random weights the two attention heads that copy are found after millions of
tokens (induction heads: Olsson et al. 2022, arXiv 2209.11895). So the first head of the first layer starts as one that
looks at the previous token, and the first head of the second layer as one that looks at what followed the same token
before (mimetic initialisation; Trockman and Kolter 2023, arXiv 2305.09828). Without texts that reward copying from the
first step on, training wipes them out.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_SHARP = 12.0  # logits by which the planted heads prefer what they look for
# radians a token: pairs of the rotary embedding that turn faster say where, slower ones what
_FAST, _SLOW = 0.25, 0.005


@torch.no_grad()
def plant_induction(model: Any, seed: int) -> None:
    """Writes the two heads into a Llama-shaped model with random weights and tied embeddings.

    A model of one layer, or whose heads are too narrow for a pair of both kinds, is left as it is.
    """
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    half = width // 2
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)  # of each pair, in radians a token
    fast, slow = angles > _FAST, angles < _SLOW
    if config.num_hidden_layers < 2 or not slow.any():
        return
    rng = torch.Generator().manual_seed(seed)
    hidden = config.hidden_size
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    embeddings = model.model.embed_tokens.weight
    scale = float(embeddings.std())
    # every embedding gets the same part, which a head can read as "a token, whichever"; to the output it says nothing
    embeddings[:, 0] = scale * math.sqrt(hidden)
    read = float((embeddings[:, 0] / embeddings.square().mean(1).sqrt()).mean())  # of it, in a normalised embedding

    # layer 0: the sum over fast pairs of cos(angle (distance - 1)) is largest for the previous token
    size = math.sqrt(_SHARP * math.sqrt(width) / float((1 - angles[fast].cos()).sum())) / read
    query, key = torch.zeros(width, hidden), torch.zeros(width, hidden)
    query[:half, 0] = size * fast
    key[:half, 0], key[half:, 0] = size * fast * angles.cos(), size * fast * angles.sin()
    carried, place, copied = (_orthonormal(width, hidden, rng) for _ in range(3))
    first.q_proj.weight[:width], first.k_proj.weight[:width] = query, key
    first.v_proj.weight[:width] = carried
    first.o_proj.weight[:, :width] = 2 * scale * place.T

    # layer 1: the word of this token against the word that the first head has carried to another one
    content = torch.cat([slow, slow])[:, None]
    second.q_proj.weight[:width], second.k_proj.weight[:width] = content * carried, content * place
    second.v_proj.weight[:width] = copied
    second.o_proj.weight[:, :width] = 4 * scale * copied.T
    size = math.sqrt(_SHARP / _match(model, width, rng))
    second.q_proj.weight[:width] *= size
    second.k_proj.weight[:width] *= size


def _match(model: Any, width: int, rng: torch.Generator) -> float:
    """The logit of the second head for what it looks for, rotation aside: the mean over a text of random tokens."""
    ids = torch.randint(len(model.model.embed_tokens.weight), (1, 64), generator=rng)
    layer = model.model.layers[1]
    normed = layer.input_layernorm(model.model(ids, output_hidden_states=True).hidden_states[1])
    query = layer.self_attn.q_proj(normed)[0, :-1, :width]
    key = layer.self_attn.k_proj(normed)[0, 1:, :width]
    return max(1e-6, float((query * key).sum(-1).mean()) / math.sqrt(width))


def _orthonormal(rows: int, columns: int, rng: torch.Generator) -> torch.Tensor:
    """``[rows, columns]``; orthonormal rows, if there are fewer than columns, that ignore the first column."""
    made, _ = torch.linalg.qr(torch.randn(columns - 1, min(rows, columns - 1), generator=rng))
    full = torch.zeros(rows, columns)
    full[: made.shape[1], 1:] = made.T
    return full
