"""The same policy free in both worlds: success, length, reward, what it does, and what the worlds say.

Counts in, numbers out. Outages (a crash, a hang) are left out of all of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from imagination.evaluation.monitors.word_drift import jensen_shannon
from imagination.evaluation.world_model_eval import mean
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.proportions import difference_ci95, summarise

ACTIONS = 12  # rows of the table of actions
SHUFFLES = 200  # of the labels dream and real
Encode = Callable[[str], Sequence[int]]


def free_play(
    dreams: Sequence[Trajectory], reals: Sequence[Trajectory] | None, encode: Encode, seed: int = 0
) -> dict[str, Any]:
    """How the policy fared in its dreams and for real, on the same tasks; ``None`` where nothing is played for real.

    Args:
        encode: text to token ids, to count tokens with.
        seed: of the shuffles against which a divergence is judged.

    Returns:
        ``dream`` and ``real`` (see ``_side``; null without reality), ``optimism_gap`` (dreamed minus real success, with
        Newcombe's 95 % interval), ``actions`` (the most frequent ones with both counts) and ``tokens``.
    """
    dreamed, played = ([t for t in side if not t.stop.is_outage] for side in (dreams, reals or ()))
    dream, real = summarise(dreams).success, summarise(reals or ()).success
    gap = None if dream.rate is None or real.rate is None else dream.rate - real.rate
    interval = difference_ci95(dream, real)
    return {
        "dream": _side(dreams, encode),
        "real": None if reals is None else _side(reals, encode),
        "optimism_gap": {"value": gap, "ci95": None if interval is None else list(interval)},
        "actions": action_table(dreamed, played),
        "tokens": {
            name: token_divergence(_tokens(dreamed, texts, encode), _tokens(played, texts, encode), seed)
            for name, texts in (("observations", _observations), ("actions", _actions))
        },
    }


def _observations(episode: Trajectory) -> list[str]:
    return [turn.observation for turn in episode.own_turns]


def _actions(episode: Trajectory) -> list[str]:
    return [turn.action for turn in episode.own_turns]


def _tokens(
    episodes: Sequence[Trajectory], texts: Callable[[Trajectory], list[str]], encode: Encode
) -> list[Counter[int]]:
    return [Counter(token for text in texts(episode) for token in encode(text)) for episode in episodes]


def _side(episodes: Sequence[Trajectory], encode: Encode) -> dict[str, Any]:
    """One world: ``success``, ``stops`` and ``mean_turns`` as ``evaluation.Summary`` has them, quartiles of the turns,
    the mean reward of an episode, and the mean tokens of an observation and of an action."""
    counted = [t for t in episodes if not t.stop.is_outage]
    turns = [len(t.own_turns) for t in counted]
    rewards = [sum(turn.reward or 0.0 for turn in t.own_turns) for t in counted]
    return {
        **summarise(episodes).to_json(),
        "turns_quartiles": [float(q) for q in np.percentile(turns, (25, 50, 75))] if turns else None,
        "mean_reward": mean(rewards),
        "tokens_per_observation": mean([len(encode(text)) for t in counted for text in _observations(t)]),
        "tokens_per_action": mean([len(encode(text)) for t in counted for text in _actions(t)]),
    }


def action_table(dreams: Sequence[Trajectory], reals: Sequence[Trajectory], limit: int = ACTIONS) -> dict[str, Any]:
    """How often each action was taken: ``{"dream": 812, "real": 790, "distinct_dream": 61, "distinct_real": 58,
    "top": [{"action": "go east", "dream": 120, "real": 131}, ...]}``, by share in either world."""
    counts = [Counter(" ".join(a.split()) for e in side for a in _actions(e)) for side in (dreams, reals)]
    totals = [sum(count.values()) for count in counts]

    def share(action: str) -> float:
        return max(count[action] / total if total else 0.0 for count, total in zip(counts, totals, strict=True))

    ranked = sorted(counts[0].keys() | counts[1].keys(), key=lambda action: (-share(action), action))
    return {
        "dream": totals[0],
        "real": totals[1],
        "distinct_dream": len(counts[0]),
        "distinct_real": len(counts[1]),
        "top": [{"action": action, "dream": counts[0][action], "real": counts[1][action]} for action in ranked[:limit]],
    }


def token_divergence(
    dreams: Sequence[Mapping[int, int]], reals: Sequence[Mapping[int, int]], seed: int = 0
) -> dict[str, Any]:
    """The Jensen-Shannon divergence of the tokens in dreams from those in reality, and what chance alone would give.

    Two samples of one distribution diverge too, the more the smaller they are. So the labels dream and real are
    shuffled over the episodes (a permutation test): a divergence below ``by_chance_p95`` tells nothing.

    Args:
        dreams, reals: token counts of each episode; where a side has none, the divergences are null.
    """
    rows = [*dreams, *reals]
    vocabulary = {token: i for i, token in enumerate(sorted({token for row in rows for token in row}))}
    table = np.zeros((len(rows), len(vocabulary)))
    for i, row in enumerate(rows):
        for token, count in row.items():
            table[i, vocabulary[token]] = count
    dreamed, total = table[: len(dreams)].sum(0), table.sum(0)
    result: dict[str, Any] = {"jsd_bits": None, "by_chance": None, "by_chance_p95": None}
    if dreamed.sum() and (total - dreamed).sum():
        rng, order, shuffled = random.Random(derive_seed("shuffles", seed)), list(range(len(rows))), []
        for _ in range(SHUFFLES):
            rng.shuffle(order)
            part = table[order[: len(dreams)]].sum(0)
            if part.sum() and (total - part).sum():
                shuffled.append(jensen_shannon(part, total - part))
        result = {
            "jsd_bits": jensen_shannon(dreamed, total - dreamed),
            "by_chance": float(np.mean(shuffled)),
            "by_chance_p95": float(np.percentile(shuffled, 95)),
        }
    return {**result, "dream_tokens": int(dreamed.sum()), "real_tokens": int((total - dreamed).sum())}
