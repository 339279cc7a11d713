"""Sampling by inversion: one uniform number decides one token, so a seed decides a text, whatever else is computed.

In fp32, that is; in bf16 other batches round their logits in another way, by enough to turn a token now and then.
"""

from __future__ import annotations

import numpy as np
import torch


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, at the place where the cumulative distribution passes the row's uniform number.

    Args:
        logits: ``[row, vocab]``, fp32.
        temperature: ``[row]``; 0 means greedy.
        uniforms: ``[row]`` in [0, 1), fp64.
        top_k: ``[row]``, 0 keeps all; ``None`` where no row asks for it.
        top_p: ``[row]`` in (0, 1]; ``None`` where no row asks for it.

    Returns:
        ids ``[row]`` and their log-probs ``[row]`` under the distribution sampled from (at temperature 1 where greedy).
    """
    greedy = temperature == 0
    any_greedy = bool(greedy.any())
    scaled = logits
    if not bool((temperature == 1).all()):  # a pass over all logits, most often for nothing
        scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if top_k is not None or top_p is not None:
        scaled = torch.where(greedy[:, None], scaled, truncated(scaled, top_k, top_p))
    probabilities = scaled.softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # scaled by the total, so that rounding never leaves the number above the last step
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    ids = torch.where(greedy, logits.argmax(-1), drawn) if any_greedy else drawn
    return ids, probabilities.gather(-1, ids[:, None])[:, 0].log()


def truncated(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """-inf for all but the ``top_k`` most likely tokens, then all but the nucleus of ``top_p`` of those that remain.

    The nucleus is the smallest set of most likely tokens whose probability reaches ``top_p`` (Holtzman et al. 2020,
    arXiv 1904.09751, section 3.1); the most likely token always stays. Arguments as in ``sample``.
    """
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(logits.shape[-1], device=logits.device)
        ranked = ranked.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), float("-inf"))
    if top_p is not None:
        probability = ranked.softmax(-1)
        before = probability.cumsum(-1, dtype=torch.float64) - probability
        outside = (before >= top_p[:, None]) & (top_p[:, None] < 1)
        outside[:, 0] = False
        ranked = ranked.masked_fill(outside, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ranked)


def logprobs_of(logits: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    """Of given ``ids`` ``[n]`` under ``logits`` ``[n, vocab]``: ``[n]``."""
    wanted = torch.from_numpy(ids).to(logits.device)[:, None]
    told: np.ndarray = logits.log_softmax(-1).gather(-1, wanted)[:, 0].cpu().numpy()
    return told
