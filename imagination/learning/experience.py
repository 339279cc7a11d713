"""Trajectories -> rows for the optimiser: who may train what, and what the update needs to judge it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from imagination.data.examples import imitation_row
from imagination.learning.advantages import differ, place_turn_rewards
from imagination.learning.reward_shaping import RewardShaping
from policy.lm.batch import Row
from policy.lm.render import ChatFormat
from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory

_AS_EARNED = RewardShaping()


def policy_rows(
    episodes: Sequence[Trajectory], min_weight: float | None = None, pay: RewardShaping = _AS_EARNED
) -> list[Row]:
    """The rows of all episodes of an update that are to be judged, with a number for each group.

    Outages have none: they count for nothing, neither in the loss nor in the mean of their group. Nor have episodes
    without a sampled token (a context full at once). A dream whose world model wrote nonsense has one: the action that
    it could not answer earns what the worst of the log would, see ``RewardShaping``.

    Args:
        min_weight, pay: as in ``policy_row``.

    Raises:
        ValueError: as ``policy_row``.
    """
    groups = group_numbers(episodes)
    rows = [policy_row(e, 0.0, min_weight, groups[e.group_id], pay) for e in episodes]
    return [row for row in rows if row is not None]


def group_numbers(episodes: Sequence[Trajectory]) -> dict[str, int]:
    """By the name of a group, in order of first appearance."""
    return {name: number for number, name in enumerate(dict.fromkeys(e.group_id for e in episodes))}


def telling_groups(episodes: Sequence[Trajectory], pay: RewardShaping = _AS_EARNED) -> int:
    """How many groups have episodes that earned different sums; only these teach an algorithm that compares."""
    earned: dict[str, list[float]] = {}
    for row, episode in ((policy_row(episode, pay=pay), episode) for episode in episodes):
        if row is not None:
            earned.setdefault(episode.group_id, []).append(sum(row.rewards))
    return sum(differ(sums) for sums in earned.values())


def turn_weights(episode: Trajectory, min_weight: float) -> list[float]:
    """How likely each turn was chosen in a state of the real world: a weight per turn.

    The state before a dreamed turn is right if all dreamed turns before it were; with calibrated probabilities ``p`` of
    the turns, that of turn k is the product of ``p_j`` over the own turns ``j < k``, at least ``min_weight``. Turns
    copied from a log are right. What the last turn's own answer is worth is no part of its weight.

    Returns:
        One number for each turn of the episode and one for an action that was not answered.

    Raises:
        ValueError: a dreamed turn has no ``probability``: its world model was not calibrated.

    Example::

        three dreamed turns with p = 0.9, 0.5, 0.1 and min_weight = 0.05: [1.0, 0.9, 0.45, 0.05]
    """
    weights, likely = [1.0] * episode.prefix_turns, 1.0
    for turn in episode.own_turns:
        weights.append(max(likely, min_weight))
        p = turn.info.get("probability")
        if not isinstance(p, float) and episode.source is Source.DREAM:
            raise ValueError(f"episode {episode.id}: a dreamed turn without a calibrated probability")
        likely *= p if isinstance(p, float) else 1.0
    return [*weights, max(likely, min_weight)]


def policy_row(
    episode: Trajectory,
    advantage: float = 0.0,
    min_weight: float | None = None,
    group: int = 0,
    pay: RewardShaping = _AS_EARNED,
) -> Row | None:
    """The row of a played episode, or ``None`` where the infrastructure failed or the policy made no token.

    A malformed prediction ends the episode at the action that provoked it, unpaid and without a value after it.

    What follows the last agent token is read by no loss. Only an episode that a limit of ours cut keeps it, for the
    value of the state it was cut in. Where the world's own context was full, that is the state before the action that
    it could not answer: the action is left out, as nothing is known of what it did. A dream that the guard ended, or
    that broke, has no such state: what the world model was unsure of must not be paid for through a critic either. Nor
    is the state before the doubted action one to bootstrap from: its value would be that of itself, doubtful actions
    would cost nothing, and PPO learns to say little else (docs/log/).

    Args:
        advantage: of all its tokens, where that is known before the update is judged.
        min_weight: ``rl_weight`` of a token is that of its turn by ``turn_weights``; ``None`` counts all alike.
        group: the number of its group.
        pay: what its turns earn.

    Raises:
        UserError: a turn was not judged, see ``RewardShaping.judgements``.
        ValueError: it was sampled with top-p or top-k: its log-probs are not those of the policy that is trained, and
            the ratios would be biased.
    """
    trace = episode.trace
    if episode.stop.is_outage or trace is None or Owner.AGENT not in trace.owners:
        return None
    if trace.top_p < 1 or trace.top_k > 0:
        raise ValueError(f"episode {episode.id} was sampled with top_p={trace.top_p} and top_k={trace.top_k}")
    last = _last_agent_token(trace)
    bootstrapped = episode.stop.is_truncation and episode.stop is not StopReason.UNSURE
    n = len(trace.ids) if bootstrapped else last + 1
    if bootstrapped and trace.turns[last] >= len(episode.turns):  # the world's own context was full
        n = trace.turns.index(trace.turns[last])
        if Owner.AGENT not in trace.owners[:n]:
            return None
    made = [owner == Owner.AGENT for owner in trace.owners[:n]]
    # an action that the world could not answer has no turn
    earned = torch.tensor([[*pay.rewards(episode), 0.0]])
    earned[0, trace.turns[last]] += pay.cost_of_doubt(episode)
    judgements, carried_out = pay.judgements(episode), pay.carried_out(episode)
    index = torch.tensor([trace.turns[:n]])
    weights = [1.0] * (len(episode.turns) + 1) if min_weight is None else turn_weights(episode, min_weight)
    return Row(
        ids=trace.ids[:n],
        action_mask=made,
        source=episode.source,
        behavior_logprobs=[float("nan") if logprob is None else logprob for logprob in trace.logprobs[:n]],
        advantages=[advantage if mine else 0.0 for mine in made],
        rl_weight=[weights[turn] if mine else 0.0 for turn, mine in zip(trace.turns[:n], made, strict=True)],
        rewards=place_turn_rewards(earned, index)[0].tolist(),
        truncated=bootstrapped,
        turns=trace.turns[:n],
        anchors=anchors(episode),
        group=group,
        process=[*judgements, 0.0] if pay.process else (),
        carried_out=[*carried_out, False] if carried_out else (),
        given_up=pay.given_up(episode),
        temperature=trace.temperature,
    )


def anchors(episode: Trajectory) -> list[int]:
    """For each turn, and for an action that was not answered, a number for the observation before it.

    Equal texts have equal numbers, in every process: what gigpo compares.
    """
    seen = [episode.start, *(turn.observation for turn in episode.turns)]
    return [int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) for text in seen]


def _last_agent_token(trace: Trace) -> int:
    return max(i for i, owner in enumerate(trace.owners) if owner == Owner.AGENT)


def compared_expert_row(chat: ChatFormat, episode: Trajectory, group: int, pay: RewardShaping = _AS_EARNED) -> Row:
    """The row of an expert's episode that is judged within a group of the policy's, as a member of it (LUFFY)."""
    row = imitation_row(chat, episode, Source.EXPERT)
    last = max((i for i, mine in enumerate(row.action_mask) if mine), default=0)
    total = sum(pay.rewards(episode))
    return replace(
        row,
        group=group,
        turns=[0 if mine else -1 for mine in row.action_mask],
        rewards=[total if i == last else 0.0 for i in range(len(row.ids))],
    )
