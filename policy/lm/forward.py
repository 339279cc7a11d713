"""Teacher-forced hidden states and logits: a prefix that several rows share is computed once, padding not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from policy.lm.batch import RowBatch, by_length
from policy.lm.compiled import linear
from policy.lm.fused_llama import fused_states, is_fusable, is_hooked
from policy.lm.pack import IMPLEMENTATION, Pack, by_prefix, pack

# torch's attention on CPUs computes what a causal mask hides, up to 512 keys; blocks leave most of it out. Smaller ones
# leave out more, but gather the same keys more often.
_BLOCK = 64


def decoder(model: Any) -> Any:
    """The part of a causal LM below its output head; adapters of peft stay in place inside it."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model.base_model


@dataclass(frozen=True, slots=True)
class Hidden:
    """Final hidden states of a decoder.

    Attributes:
        states: ``[m, hidden]``, each once although it may stand for several tokens.
        which: the state of each token: ``[batch, time]``, anything on padding, or ``[n]`` of those that were asked for.
        computed: how many tokens went through the model for them.
    """

    states: Tensor
    which: Tensor
    computed: int


def encode(model: Any, input_ids: Tensor, attention_mask: Tensor, packed: bool = True) -> Hidden:
    """The states after all tokens of rows ``[batch, time]`` that are padded on the right.

    Args:
        packed: a prefix that rows share is computed once, where the model allows it.
    """
    packing = _packed(model, input_ids, attention_mask) if packed else None
    if packing is not None:
        return Hidden(_packed_states(model, packing), packing.index, len(packing.ids))
    # Causal attention: right padding is never seen by real tokens, so no attention mask is needed.
    hidden = decoder(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    everything = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
    return Hidden(hidden.flatten(0, 1), everything, input_ids.numel())


def hidden_before(model: Any, input_ids: Tensor, attention_mask: Tensor, mask: Tensor, packed: bool = True) -> Hidden:
    """The states that predict the masked tokens; what stands behind a row's last one is not computed.

    Args:
        mask: ``[batch, time]``; true on tokens to be predicted, at their own position. Position 0 has no past.

    Returns:
        One entry of ``which`` for each true entry of the mask, in row-major order.

    Raises:
        ValueError: the mask asks for position 0, or for padding.
    """
    if mask[:, 0].any():
        raise ValueError("the first token of a sequence has no past to be predicted from")
    if (mask & ~attention_mask.bool()).any():
        raise ValueError("the mask asks for tokens that are padding")
    position = torch.arange(mask.shape[1], device=mask.device)
    # the last masked token itself is predicted, not read; a row that asks for nothing keeps one token and its place
    read = (position * mask).amax(1, keepdim=True).clamp(min=1)
    packing = _packed(model, input_ids, position < read) if packed else None
    if packing is None:
        states = encode(model, input_ids, position < read, packed=False).states
        row, place = mask[:, 1:].nonzero(as_tuple=True)
        which = torch.arange(len(row), device=mask.device)
        return Hidden(states.index_select(0, row * mask.shape[1] + place), which, len(states))
    wanted, which = packing.index[:, :-1][mask[:, 1:]].unique(return_inverse=True)
    return Hidden(_packed_states(model, packing, wanted), which, len(packing.ids))


def token_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits ``[n, vocab]``, in fp32 at least, of hidden states ``[n, hidden]``.

    Some models scale or cap what their output head says: Cohere multiplies it, Granite divides it, Gemma 2 caps it
    softly (Gemma Team 2024, arXiv 2408.00118, section 2).
    """
    config = model.config
    head = model.get_output_embeddings()
    plain = type(head) is torch.nn.Linear and not is_hooked(head)
    logits: Tensor = linear(hidden, head.weight, head.bias) if plain else head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if factor := _declared(config, "logit_scale"):
        logits = logits * factor
    if factor := _declared(config, "logits_scaling"):
        logits = logits * factor if config.model_type == "hyperclovax" else logits / factor  # one name, two senses
    if cap := _declared(config, "final_logit_softcapping"):
        logits = torch.tanh(logits / cap) * cap
    return logits


def _declared(config: Any, name: str) -> Any:
    """A setting that this kind of model has. transformers also keeps keys that a model's code does not know of."""
    return getattr(config, name, None) if hasattr(type(config), name) else None


def attention_window(config: Any) -> int | None:
    """To how many tokens, itself included, a token attends in some layer; ``None`` for all of its past.

    Kinds of layers say who has a window. Models without kinds have it in all layers, as Mistral, Mixtral and Phi-3.
    """
    if set(_declared(config, "layer_types") or ()) == {"full_attention"}:
        return None
    return getattr(config, "sliding_window", None) or None  # Qwen2-MoE writes 0 for none


def micro_batches(model: Any, rows: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Indices of rows that go through the model together: at most ``max_tokens`` that it computes, one row at least.

    Rows with a common beginning stay together where the model computes it once; where it cannot, rows of one length do.
    """
    lengths = [len(row) for row in rows]
    return by_prefix(rows, max_tokens) if packs(model, max(lengths, default=0)) else by_length(lengths, max_tokens)


def split(
    model: Any, batch: RowBatch, max_tokens: int, rows: Sequence[int] | None = None
) -> Iterator[tuple[list[int], RowBatch]]:
    """The rows of a batch, or some of them, by micro-batches: their indices, and themselves on the model's device."""
    ids = batch.token_ids()
    chosen = range(len(batch)) if rows is None else rows
    device = next(model.parameters()).device
    for micro in micro_batches(model, [ids[i] for i in chosen], max_tokens):
        picked = [chosen[i] for i in micro]
        yield picked, batch[picked].to(device)


def packs(model: Any, longest: int) -> bool:
    """Whether the model gives rows of up to ``longest`` tokens the same hidden states when they are packed.

    Asked of the model itself: once, two short rows with a common beginning go through it packed and one by one. What
    two short rows cannot show is asked of its configuration: windows of attention that are shorter than the rows.
    """
    core = decoder(model)
    if not getattr(core, "_supports_attention_backend", False) or core.is_gradient_checkpointing:
        return False  # checkpointing would compute the attention again when the implementation is set back
    limits = (attention_window(core.config), getattr(core.config, "attention_chunk_size", None))
    if any(limit is not None and longest > limit for limit in limits):
        return False
    known, fused = _FAITHFUL.setdefault(core, {}), is_fusable(core)
    if fused not in known:  # the other way too, which a hook or adapters may bring about later
        known.update({way: _packing_is_faithful(model, way) for way in {fused, False} - known.keys()})
    return known[fused]


_FAITHFUL: WeakKeyDictionary[Any, dict[bool, bool]] = WeakKeyDictionary()  # by whether the fused forward pass is used


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without dropout; afterwards every part is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def _packing_is_faithful(model: Any, fused: bool) -> bool:
    core = decoder(model)
    device = next(core.parameters()).device
    rows = [[1, 2, 3, 4], [1, 2, 4], [0, 3]]
    with evaluating(core), torch.autocast(device.type, enabled=False):
        packing = pack(rows).to(device)
        packed = fused_states(core, packing) if fused else _own_states(core, packing)
        alone = [
            core(input_ids=torch.tensor([row], device=device), use_cache=False).last_hidden_state[0] for row in rows
        ]
    expected = torch.cat(alone).float()
    got = torch.cat([packed[packing.index[r, : len(row)]] for r, row in enumerate(rows)]).float()
    tolerance = 1e-4 if core.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((got - expected).norm() <= tolerance * expected.norm())


def _packed(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Pack | None:
    """The rows as one sequence, if the model takes them so."""
    rows = [row[:n] for row, n in zip(input_ids.tolist(), attention_mask.sum(1).tolist(), strict=True)]
    if not packs(model, max(map(len, rows))):
        return None
    return pack(rows, input_ids.shape[1], _BLOCK if input_ids.device.type == "cpu" else None).to(input_ids.device)


def _packed_states(model: Any, packing: Pack, wanted: Tensor | None = None) -> Tensor:
    """``[wanted, hidden]``, of all packed tokens by default."""
    core = decoder(model)
    if is_fusable(core):
        return fused_states(core, packing, wanted)
    states = _own_states(core, packing)
    return states if wanted is None else states.index_select(0, wanted)


def _own_states(core: Any, packing: Pack) -> Tensor:
    """``[n, hidden]`` by the decoder's own forward pass."""
    before = core.config._attn_implementation
    # transformers makes no mask for an implementation for which no kind of mask is registered
    core.config._attn_implementation = IMPLEMENTATION
    try:
        states: Tensor = core(
            input_ids=packing.ids[None], position_ids=packing.positions[None], use_cache=False, packing=packing
        ).last_hidden_state
    finally:
        core.config._attn_implementation = before
    return states[0]


class ValueHead(nn.Module):
    """A linear map from the hidden state that predicts a token to the value of the state before it.

    Starts at zero, so that the first advantages are plain returns.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> values ``[n]`` in fp32."""
        value: torch.Tensor = self.linear(hidden.float())[:, 0]
        return value
