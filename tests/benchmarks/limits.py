"""How fast dreams could be at most, from rates that this machine reaches in the same run.

Two limits, of which the second is nearer to what decoding can do:

*products*: every token passes each model once and every sampled token the output head once, as matrix products at the
best of several batch sizes. Nothing else costs time, not even that one token follows another.

*decoding*: sampled tokens come one after the other, so their products run at as many rows as there are episodes, and
each such step reads the keys and values of all episodes once, at the speed of copying memory. What the other model
wrote is read at the best batch size.
"""

from __future__ import annotations

from typing import Any

import torch

from policy.lm.engines.inprocess.decode import kv_shape
from tests.benchmarks.dreaming import Shape, model_config
from tests.benchmarks.machine import copy_rate, products_seconds
from tests.benchmarks.measure import forward_operations
from tests.benchmarks.result import Limit

_BATCHES = (64, 256, 1024, 4096)


def linear_shapes(config: Any) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """``(out, in)`` of the products of all layers, joined where they share their input, and of the output head."""
    _, kv_heads, dim = kv_shape(config)
    hidden, mlp, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    layer = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * mlp, hidden), (hidden, mlp)]
    return config.num_hidden_layers * layer, (config.vocab_size, hidden)


def token_seconds(config: Any, dtype: torch.dtype, device: str = "cpu", seconds: float = 1.0) -> tuple[float, float]:
    """Seconds per token of all layers, and per logit row of the head, each at its best batch size."""
    body, head = linear_shapes(config)
    per_token = min(products_seconds(body, n, dtype, device, seconds) / n for n in _BATCHES)
    return per_token, min(products_seconds([head], n, dtype, device, seconds) / n for n in _BATCHES)


def dream_limits(shape: Shape, dtype: torch.dtype, device: str = "cpu", seconds: float = 1.0) -> dict[str, Limit]:
    """Turns per second of the dreams of ``shape``: ``limit`` and ``decode_limit`` of a row. See the module."""
    per_token, per_logit = token_seconds(model_config(shape), dtype, device, seconds)
    turn = (shape.action + shape.observation) * (2 * per_token + per_logit)
    return {
        "limit": Limit(1 / turn, "tokens cost only their matrix products, at the best batch size of this machine"),
        "decode_limit": Limit(
            decode_turns(shape, dtype, (shape.turns + 1) / 2, device, seconds),
            f"sampled tokens come one by one: products at {shape.episodes} rows, and keys and values of all "
            "episodes read once a token at the speed of copying memory",
        ),
    }


def decode_turns(shape: Shape, dtype: torch.dtype, turn: float, device: str = "cpu", seconds: float = 1.0) -> float:
    """Turns per second at the ``turn``-th turn, counted from 1, if only the second limit held."""
    config = model_config(shape)
    body, head = linear_shapes(config)
    per_token, per_logit = token_seconds(config, dtype, device, seconds)
    made = shape.action + shape.observation
    layers, heads, dim = kv_shape(config)
    length = shape.start + (turn - 0.5) * made
    cached = layers * 2 * heads * dim * dtype.itemsize * shape.episodes * length  # bytes, of one model
    step = products_seconds([*body, head], shape.episodes, dtype, device, seconds)
    step += cached / copy_rate(device, seconds)
    # the first token of a completion comes out of reading its prompt, the last one is read with the next prompt
    read_first = (made + 2) * per_token + 2 * per_logit
    return shape.episodes / ((made - 2) * step + shape.episodes * read_first)


def turn_operations(shape: Shape, turn: int) -> float:
    """Of the matrix products of both models for the ``turn``-th turn of an episode, counted from 1."""
    config = model_config(shape)
    made = shape.action + shape.observation
    before = range(shape.start + (turn - 1) * made)
    after = range(len(before) + made)
    return sum(
        forward_operations(config, [after], sampled) - forward_operations(config, [before], 0)
        for sampled in (shape.action, shape.observation)
    )
