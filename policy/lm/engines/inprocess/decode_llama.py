"""Steps of generation for decoders shaped like Llama: a plain forward pass on flat tokens without padding.

Projections are joined, and what the last layer computes for tokens whose logits nobody asked for is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from policy.lm.compiled import linear, linear_onto, native_layers
from policy.lm.engines.inprocess.slots import Blocks, Feed, SlotCache
from policy.lm.forward import decoder


@dataclass(slots=True)
class _Layer:
    norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class LlamaDecoder:
    """Holds a copy of the weights in its own dtype with query, key and value (and gate and up) joined.

    Rotary pairs ``(i, i + dim / 2)`` are moved next to each other in the rows of the query and key projections, so that
    a rotation is one complex product; scores of queries and keys do not notice a common permutation.
    """

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self.model, self.cache = model, cache
        config = model.config
        _, _, _, self.kv_heads, _, self.dim = cache.kv.shape
        self.heads = config.num_attention_heads
        self.eps = config.rms_norm_eps
        half = torch.arange(self.dim // 2)
        self._pairs = torch.stack([half, half + self.dim // 2], 1).flatten()
        self._layers: list[_Layer] = []
        self._native = native_layers(cache.kv.dtype, cache.kv.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.cache.kv.dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the model's weights as they are now."""
        body = decoder(self.model)
        positions = torch.arange(self.cache.waste_position, device=self.model.device)
        cos, sin = body.rotary_emb(torch.zeros(1, device=self.model.device), positions[None])
        half = self.dim // 2
        self._rotation = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())  # [position, dim / 2]
        self._embedding = self._copy(body.embed_tokens.weight)
        self._final_norm = self._copy(body.norm.weight)
        head = self.model.get_output_embeddings()
        tied = head.weight is body.embed_tokens.weight
        self._head = self._embedding if tied else self._copy(head.weight)
        self._head_bias = None if head.bias is None else self._copy(head.bias)
        self._layers = [self._layer(layer) for layer in body.layers]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.dtype, copy=True)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = (self.heads, self.kv_heads, None)
        weights = [self._paired(_weight(p), n) for p, n in zip(projections, heads, strict=True)]
        biases = [_bias(p) for p in projections]
        joined = None
        if biases[0] is not None:
            joined = torch.cat([self._paired(b, n) for b, n in zip(biases, heads, strict=True) if b is not None])
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        q_norm, k_norm = (None if n is None else self._copy(n.weight[self._pairs]) for n in norms)
        return _Layer(
            norm=self._copy(layer.input_layernorm.weight),
            qkv=self._copy(torch.cat(weights)),
            qkv_bias=None if joined is None else self._copy(joined),
            q_norm=q_norm,
            k_norm=k_norm,
            out=self._copy(_weight(attention.o_proj)),
            mlp_norm=self._copy(layer.post_attention_layernorm.weight),
            gate_up=self._copy(torch.cat([_weight(mlp.gate_proj), _weight(mlp.up_proj)])),
            down=self._copy(_weight(mlp.down_proj)),
        )

    def _paired(self, rows: torch.Tensor, heads: int | None) -> torch.Tensor:
        if heads is None:
            return rows
        return rows.view(heads, self.dim, -1)[:, self._pairs.to(rows.device)].reshape(rows.shape)

    def hidden(self, feed: Feed) -> torch.Tensor:
        """Final hidden states ``[wanted, hidden]``; writes keys and values of all fed tokens."""
        device = self.cache.kv.device
        positions, of_token = feed.positions(), feed.slot_of_token()
        if self._native is None:
            rotation = self._rotation[torch.from_numpy(positions).to(device)][:, None]
            rows = self.cache.rows(of_token, positions)
        blocks = Blocks(feed.slots, feed.starts, feed.counts, self.heads // self.kv_heads, self.cache, feed.canvas)
        x = F.embedding(torch.from_numpy(feed.tokens).to(device), self._embedding)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            joined = self._qkv(layer, x)
            q = joined[:, : self.heads]
            keys, values = self.cache.kv[index]
            if self._native is None:
                self._rotate(joined[:, : self.heads + self.kv_heads], rotation)
                self.cache.write(index, rows, joined[:, self.heads :])
            else:
                self._native.keep(joined, self._rotation, of_token, positions, keys, values)
            if not len(feed.wanted) and index == last:
                return x[:0]  # a piece of a long prompt
            if index == last and len(feed.wanted) < len(feed.tokens) and not feed.canvas:
                wanted = torch.from_numpy(feed.wanted).to(device)
                x, q = x[wanted], q[wanted]
                blocks = _only(feed, positions, self.heads // self.kv_heads, self.cache)
            seen = blocks.attend(q, keys, values)
            x = linear_onto(x, seen.flatten(1), layer.out)
            x = linear_onto(x, self._gated(linear(self._norm(x, layer.mlp_norm), layer.gate_up)), layer.down)
        if len(feed.wanted) < len(x):
            x = x[torch.from_numpy(feed.wanted).to(device)]
        return self._norm(x, self._final_norm)

    def _qkv(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values as heads, one after the other: ``[n, head, dim]``."""
        joined = linear(self._norm(x, layer.norm), layer.qkv, layer.qkv_bias).view(len(x), -1, self.dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = joined[:, : self.heads], joined[:, self.heads : self.heads + self.kv_heads]
            q.copy_(F.rms_norm(q, (self.dim,), layer.q_norm, self.eps))
            k.copy_(F.rms_norm(k, (self.dim,), layer.k_norm, self.eps))
        return joined

    def _rotate(self, heads: torch.Tensor, rotation: torch.Tensor) -> None:
        """``heads[n, head, dim]`` by ``rotation[n, 1, dim / 2]``, in place."""
        fp32 = heads.float()  # itself, if it is that already
        torch.view_as_complex(fp32.unflatten(-1, (-1, 2))).mul_(rotation)
        if fp32 is not heads:
            heads.copy_(fp32)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return self._native.norm(x, weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return self._native.gated(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> ``[n, vocab]`` in fp32. None of these models scales or caps them."""
        return linear(hidden, self._head, self._head_bias).float()


def _only(feed: Feed, positions: np.ndarray, group: int, cache: SlotCache) -> Blocks:
    """The plan for the wanted tokens alone; those of a row are neighbours, as they are its last ones."""
    row = np.repeat(np.arange(len(feed.slots)), feed.counts)[feed.wanted]
    rows, first, counts = np.unique(row, return_index=True, return_counts=True)
    return Blocks(feed.slots[rows], positions[feed.wanted][first], counts, group, cache)


def _weight(projection: Any) -> torch.Tensor:
    """The weight of a linear layer with its LoRA updates added."""
    base = getattr(projection, "base_layer", projection)
    weight: torch.Tensor = base.weight
    if base is not projection and not projection.merged and not projection.disable_adapters:
        for adapter in projection.active_adapters:
            weight = weight + projection.get_delta_weight(adapter).to(weight.dtype)
    return weight


def _bias(projection: Any) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(projection, "base_layer", projection).bias
    return bias
