"""What an engine knows of the text in its slots, as arrays with one entry per slot: no work per token in Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class SlotTable:
    """What each slot holds: text and draft, how much of it is cached, where the answer begins. One entry per slot."""

    ids: np.ndarray  # [slot, context]
    logprobs: np.ndarray  # [slot, context], of sampled tokens
    uniforms: np.ndarray  # [slot, context], for the token at this position
    prompt: np.ndarray  # length of the prompt
    length: np.ndarray  # length of prompt and sampled tokens
    end: np.ndarray  # length with the draft
    fed: np.ndarray  # keys and values exist up to here
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    stop: np.ndarray
    limit: np.ndarray  # length of the prompt and the longest answer
    by_hand: np.ndarray  # whether each token needs a look of its own
    scored: np.ndarray  # the tokens are given and only scored

    @classmethod
    def empty(cls, slots: int, context: int) -> SlotTable:
        return cls(
            ids=np.zeros((slots, context), dtype=np.int64),
            logprobs=np.zeros((slots, context)),
            uniforms=np.zeros((slots, context)),
            prompt=np.zeros(slots, dtype=np.int64),
            length=np.zeros(slots, dtype=np.int64),
            end=np.zeros(slots, dtype=np.int64),
            fed=np.zeros(slots, dtype=np.int64),
            temperature=np.ones(slots, dtype=np.float32),
            top_k=np.zeros(slots, dtype=np.int64),
            top_p=np.ones(slots),
            stop=np.zeros(slots, dtype=np.int64),
            limit=np.zeros(slots, dtype=np.int64),
            by_hand=np.zeros(slots, dtype=bool),
            scored=np.zeros(slots, dtype=bool),
        )


def common_prefix(known: np.ndarray, limits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """How many leading ids each row of ``known`` shares with ``ids``, at most ``limits``: ``[row]``."""
    n = min(len(ids), int(np.max(limits)))
    if n == 0:
        return np.zeros(len(known), dtype=np.int64)
    same = known[:, :n] == ids[:n]
    return np.minimum(np.where(same.all(1), n, same.argmin(1)), limits)


def within(counts: np.ndarray, budget: int) -> np.ndarray:
    """As much of each block as fits, the short ones first."""
    if counts.sum() <= budget:
        return counts
    order = np.argsort(counts, kind="stable")
    ranked = counts[order]
    out = np.empty_like(counts)
    out[order] = np.clip(budget - (np.cumsum(ranked) - ranked), 0, ranked)
    return out


__all__ = ["SlotTable", "common_prefix", "within"]
