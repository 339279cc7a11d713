"""How right a prediction is, as a reward that needs no judge: what was logged is the answer.

RLVR-World (arXiv 2505.13934, section 4) trains language world models on the metric itself instead of on the likelihood
of the logged tokens: exact match where there is one right answer, the F1 of what changes where pages are long.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from real_envs.trajectory import Turn, same_reward

Metric = Literal["exact", "diff_f1"]
Parsed = tuple[str, float, bool]  # observation, reward, end


def diff_f1(before: str, predicted: str, true: str) -> float:
    """F1 of the changed lines: those added to or removed from the last observation, compared as bags.

    Precision is matched / predicted changes, recall matched / true changes. Lines lose white space at their ends;
    empty ones do not count.

    Returns:
        In [0, 1]; 1 where nothing changes and nothing was predicted to, 0 where only one of the two is so.

    Example::

        diff_f1("a\\nb", "a\\nc", "a\\nd")     # true: -b +d; predicted: -b +c; one of two each: 0.5
    """
    old, new, real = _lines(before), _lines(predicted), _lines(true)
    pairs = [(new - old, real - old), (old - new, old - real)]  # added, removed
    matched = sum(sum((a & b).values()) for a, b in pairs)
    changes = sum(sum(a.values()) + sum(b.values()) for a, b in pairs)
    return 2 * matched / changes if changes else 1.0


def verifiable_reward(metric: Metric, before: str, predicted: Parsed | None, turn: Turn) -> float:
    """What a prediction earns, in [0, 1].

    Args:
        metric: ``exact`` pays 1 for the right observation, reward and end together. ``diff_f1`` pays ``diff_f1`` of the
            observation where reward and end are right, and nothing where they are not: a dream lives on them.
        predicted: ``None`` for text that is no prediction, which earns nothing.

    Raises:
        ValueError: the turn's reward was not measured.
    """
    if turn.reward is None:
        raise ValueError("a turn whose reward nobody measured cannot verify a prediction")
    if predicted is None or not same_reward(predicted[1], turn.reward) or predicted[2] != turn.terminated:
        return 0.0
    if metric == "exact":
        return float(predicted[0].strip() == turn.observation.strip())
    return diff_f1(before, predicted[0], turn.observation)


def _lines(text: str) -> Counter[str]:
    return Counter(line.strip() for line in text.splitlines() if line.strip())
