"""Whether a new version of the world model takes the last one's place: what it finds likely of held-back real episodes.

Only real episodes that no version was fitted to are asked about, and both versions about the same. Those of before the
round decide as well as new ones do: a batch of broken transitions may make its own kind likelier, never the old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from imagination.data.batches import truncate
from imagination.learning.losses import token_logprobs
from policy.lm.batch import by_length, collate
from policy.lm.forward import hidden_before, token_logits
from policy.lm.render import ChatFormat
from real_envs.trajectory import Trajectory
from worldmodel.formats.full import TransitionFormat
from worldmodel.objective import world_model_rows

Scores = Mapping[str, float | None]


@torch.no_grad()
def log_likelihood(
    model: Any,
    chat: ChatFormat,
    form: TransitionFormat,
    episodes: Sequence[Trajectory],
    context: int,
    micro_tokens: int,
) -> float | None:
    """Mean log-probability of a real turn, in nats: of the next observation, reward and end, given what was before.

    Args:
        context: beyond it a turn is not asked about; it still counts, for every version alike.
        micro_tokens: of a forward pass.

    Returns:
        ``None`` where no turn has a measured reward.
    """
    turns, total = 0, 0.0
    rows = []
    for episode in episodes:
        weights = [0.0 if turn.reward is None else 1.0 for turn in episode.turns]
        turns += int(sum(weights))
        rows += [truncate(row, context) for row in world_model_rows(chat, episode, weights, form)]
    rows = [row for row in rows if any(row.ce_weight)]
    if not turns:
        return None
    model.eval()
    for batch in by_length([len(row.ids) for row in rows], micro_tokens):
        tokens = collate([rows[i] for i in batch], pad=0).to(model.device)
        mask = tokens.ce_weight != 0
        found = hidden_before(model, tokens.input_ids, tokens.attention_mask, mask)
        logits = token_logits(model, found.states)
        total += float(token_logprobs(logits, tokens.input_ids[mask], which=found.which).double().sum())
    return total / turns


def no_worse(before: Scores, after: Scores, tolerance: float) -> bool:
    """Whether each kind of held-back episodes is as likely as before, up to ``tolerance`` in nats a turn.

    Where nothing was held back, nothing is known of a version, and it is not trusted.

    Example::

        no_worse({"old": -0.50, "new": -2.0}, {"old": -0.505, "new": -0.9}, tolerance=0.01)  # True
        no_worse({"old": -0.50, "new": -2.0}, {"old": -0.60, "new": -0.9}, tolerance=0.01)  # False
    """
    judged = [(before[kind], after[kind]) for kind in before]
    pairs = [(b, a) for b, a in judged if b is not None and a is not None]
    return bool(pairs) and all(a >= b - tolerance for b, a in pairs)
