"""One step of generation: blocks of new tokens in, logits at the wanted ones out; keys and values stay in slots.

``LlamaDecoder`` is a plain forward pass for decoders shaped like Llama (Llama, Mistral, Qwen2, Qwen3), and
``GenericDecoder`` runs the model's own forward for all others with standard keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Cache

from policy.lm.compiled import linear, linear_onto, native_layers
from policy.lm.engine import UnsupportedModel
from policy.lm.engines.inprocess.graphs import StepGraphs, affordable_widths
from policy.lm.engines.inprocess.single_query import single_query_attention
from policy.lm.engines.inprocess.slots import Blocks, Feed, SlotCache, attention, attention_mask, sizes
from policy.lm.forward import attention_window, decoder, evaluating, token_logits


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

    def take(self, other: _Layer) -> None:
        """Its weights, into the same memory."""
        for field in fields(self):
            weight = getattr(self, field.name)
            if weight is not None:
                weight.copy_(getattr(other, field.name))


class LlamaDecoder:
    """Holds a copy of the weights in its own dtype with query, key and value (and gate and up) joined.

    Rotary pairs ``(i, i + dim / 2)`` are moved next to each other in the rows of the query and key projections, so that
    a rotation is one complex product; scores of queries and keys do not notice a common permutation.

    Args:
        graphs: steps of few tokens a slot are CUDA graphs on a card. They read the weights where they first were, so
            ``refresh`` writes into the same tensors.
    """

    def __init__(self, model: Any, cache: SlotCache, graphs: bool) -> None:
        self.model, self.cache = model, cache
        config = model.config
        _, _, _, self.kv_heads, _, self.dim = cache.kv.shape
        self.heads = config.num_attention_heads
        self.eps = config.rms_norm_eps
        half = torch.arange(self.dim // 2)
        self._pairs = torch.stack([half, half + self.dim // 2], 1).flatten()
        self._layers: list[_Layer] = []
        self._native = native_layers(cache.kv.dtype, cache.kv.device)
        self.widths: tuple[int, ...] = ()
        if graphs:
            layers = decoder(model).layers
            self.widths = affordable_widths(cache.kv.shape[2], len(layers), sum(p.numel() for p in layers.parameters()))
        self._graphs = StepGraphs(self._padded, cache, self.widths, cache.kv.is_cuda) if graphs else None
        self._rotation = self._embedding = self._final_norm = self._head = torch.empty(0)
        self._head_bias: torch.Tensor | None = None

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
        rotation = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())  # [position, dim / 2]
        self._rotation = _into(self._rotation, rotation)
        self._embedding = _into(self._embedding, self._copy(body.embed_tokens.weight))
        self._final_norm = _into(self._final_norm, self._copy(body.norm.weight))
        head = self.model.get_output_embeddings()
        tied = head.weight is body.embed_tokens.weight
        self._head = self._embedding if tied else _into(self._head, self._copy(head.weight))
        self._head_bias = None if head.bias is None else self._copy(head.bias)
        for index, layer in enumerate(body.layers):
            if index == len(self._layers):
                self._layers.append(self._layer(layer))
            else:
                self._layers[index].take(self._layer(layer))

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
        if self._graphs is not None and self._graphs.fits(feed):
            return self._graphs.hidden(feed)
        device = self.cache.kv.device
        positions, of_token = feed.positions(), feed.slot_of_token()
        if self._native is None:
            where = torch.from_numpy(positions).to(device)
            rotation = self._rotation[where][:, None]
            rows = self.cache.rows(torch.from_numpy(of_token).to(device), where)
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
                self._native.rope_and_store(joined, self._rotation, of_token, positions, keys, values)
            if not len(feed.wanted) and index == last:
                return x[:0]  # a piece of a long prompt
            if index == last and len(feed.wanted) < len(feed.tokens) and not feed.canvas:
                wanted = torch.from_numpy(feed.wanted).to(device)
                x, q = x[wanted], q[wanted]
                blocks = _only(feed, positions, self.heads // self.kv_heads, self.cache)
            seen = blocks.attend(q, keys, values)
            x = linear_onto(x, seen.flatten(1), layer.out)
            x = linear_onto(x, self._swiglu(linear(self._norm(x, layer.mlp_norm), layer.gate_up)), layer.down)
        if len(feed.wanted) < len(x):
            x = x[torch.from_numpy(feed.wanted).to(device)]
        return self._norm(x, self._final_norm)

    def _padded(self, tokens: torch.Tensor, positions: torch.Tensor, visible: int) -> torch.Tensor:
        """See ``StepGraphs``: without compiled steps, and of a shape that width and ``visible`` alone decide."""
        (slots, width), waste = tokens.shape, self.cache.waste_position
        rotation = self._rotation[positions.flatten().clamp(max=waste - 1)][:, None]
        of_token = torch.arange(slots, device=tokens.device).repeat_interleave(width)
        rows = self.cache.rows(of_token, positions.flatten())
        last = torch.where(positions == waste, 0, positions)  # padding sees one position
        mask = attention_mask(last, visible, self.heads // self.kv_heads, self.dtype) if width > 1 else None
        x = F.embedding(tokens.flatten(), self._embedding)
        for index, layer in enumerate(self._layers):
            joined = self._qkv(layer, x)
            self._rotate(joined[:, : self.heads + self.kv_heads], rotation)
            self.cache.write(index, rows, joined[:, self.heads :])
            keys, values = self.cache.kv[index, :, :, :, :visible]
            q = joined[:, : self.heads]
            if mask is None:
                seen = single_query_attention(q, keys, values, last[:, 0])
            else:
                seen = attention(q.unflatten(0, (slots, width)), keys, values, mask).flatten(0, 1)
            x = linear_onto(x, seen.flatten(1), layer.out)
            x = linear_onto(x, self._swiglu(linear(self._norm(x, layer.mlp_norm), layer.gate_up)), layer.down)
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
            return self._native.rms_norm(x, weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return self._native.swiglu(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> ``[n, vocab]`` in fp32. None of these models scales or caps them."""
        return linear(hidden, self._head, self._head_bias).float()


def _into(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """``new``, in the memory of ``old`` where that has its shape."""
    return old.copy_(new) if old.shape == new.shape else new


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


_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_BIASED = ("q_proj", "k_proj", "v_proj")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class Decoder(Protocol):
    """Runs steps on the weights as they were at the last ``refresh``.

    Attributes:
        widths: ascending; a step in which no row reads more tokens than one of these costs far less than others, and
            as much as if all slots read that many. Empty where no step is like that.
    """

    cache: SlotCache
    widths: tuple[int, ...]

    def refresh(self) -> None: ...

    def hidden(self, feed: Feed) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def make_decoder(model: Any, context: int, slots: int, dtype: torch.dtype, graphs: bool = False) -> Decoder:
    """The fastest decoder that computes what ``model`` computes.

    Args:
        graphs: see ``LlamaDecoder``.

    Raises:
        UnsupportedModel: other attention than full attention within ``context``; another ``dtype`` than the model's
            where its own forward pass is run; or that pass gives other logits in pieces than at once.
    """
    config = model.config
    check_attention(config, context)
    llama_like = config.model_type in _LLAMA_LIKE and _rope_type(config) in _STATIC_ROPE and _plain(model)
    if not llama_like and dtype != model.dtype:
        raise UnsupportedModel(
            f"this {config.model_type} can only be run in the dtype that it has, {model.dtype}, not in {dtype}: set "
            "engine.dtype=auto, and the dtype of the model to the one to compute in"
        )
    cache = SlotCache(*kv_shape(config), slots, context, dtype, model.device)
    if llama_like:
        return LlamaDecoder(model, cache, graphs)
    generic = GenericDecoder(model, cache)
    if not _is_faithful(generic):
        raise UnsupportedModel(
            f"{config.model_type} is not played faithfully: fed in pieces, it gives other probabilities than in one "
            "pass; choose a model with standard attention and output"
        )
    return generic


def check_attention(config: Any, context: int) -> None:
    """Raises ``UnsupportedModel``: other attention than full attention within ``context``."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = attention_window(config)
    if kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"{config.model_type} mixes {', '.join(sorted(kinds))}: only full attention can be played"
        )
    if window is not None and window < context:
        raise UnsupportedModel(
            f"{config.model_type} attends to {window} tokens: lower the context to that (worldmodel., policy.context)"
        )
    kv_shape(config)


def kv_shape(config: Any) -> tuple[int, int, int]:
    """Layers, heads of keys and values, and their width.

    Raises:
        UnsupportedModel: it has no such heads.
    """
    if not hasattr(config, "num_key_value_heads") or getattr(config, "kv_lora_rank", None):  # latent attention
        raise UnsupportedModel(
            f"{config.model_type}: only decoders with standard attention can be played, such as Llama and Qwen"
        )
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, dim


def _rope_type(config: Any) -> str:
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def _plain(model: Any) -> bool:
    """All projections are plain linear layers, or such with plain LoRA on top; no quantisation, no other adapters, none
    on embeddings and output, and no biases but those of query, key and value."""
    if (type(model.get_input_embeddings()), type(model.get_output_embeddings())) != (nn.Embedding, nn.Linear):
        return False
    modules = decoder(model).layers.named_modules()
    for name, module in ((name, module) for name, module in modules if name.endswith("_proj")):
        base = getattr(module, "base_layer", module)
        if type(base) is not nn.Linear or (base.bias is not None and name[-6:] not in _BIASED):
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

    widths: tuple[int, ...] = ()

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
