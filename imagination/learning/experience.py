"""Trajectories -> rows -> credit: who may train what, what the update needs to judge it, and the advantages."""

from __future__ import annotations

import hashlib
import math
import operator
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean

import torch
from torch import Tensor

from imagination.data.batches import truncate
from imagination.data.examples import imitation_row
from imagination.learning.advantages.group import differ, shared_before_branches
from imagination.learning.advantages.shaping import with_process_rewards
from imagination.learning.advantages.turns import turn_bounds
from imagination.learning.algorithms import Algorithm, Episodes
from imagination.learning.groups import by_group
from imagination.learning.reward_shaping import RewardShaping
from policy.lm.batch import NAN, SOURCES, Row, RowBatch
from policy.lm.render import ChatFormat
from real_envs.trajectory import Owner, Source, StopReason, Trajectory

_AS_EARNED = RewardShaping()
_EXPERT = SOURCES.index(Source.EXPERT)
_TIMES = 2  # that a recorded group is learned from

# --- rows ---


def policy_rows(
    episodes: Sequence[Trajectory], min_weight: float | None = None, shaping: RewardShaping = _AS_EARNED
) -> list[Row]:
    """The rows of all episodes of an update that are to be judged, with a number for each group; see ``policy_row``.

    Outages have none: they count for nothing, neither in the loss nor in the mean of their group. Nor have episodes
    without a sampled token (a context full at once). A dream whose world model wrote nonsense has one: the action that
    it could not answer earns what the worst of the log would, see ``RewardShaping``.

    An episode with summaries has a row for each of its contexts, see ``contexts``.
    """
    groups = group_numbers(episodes)
    rows = [policy_row(e, min_weight, groups[e.group_id], shaping) for e in episodes]
    judged = [(e, row) for e, row in zip(episodes, rows, strict=True) if row is not None]
    for (_, row), parent in zip(judged, _parents(judged), strict=True):
        row.parent = torch.tensor(parent)
    parts = (contexts(row, e.trace.segments, k) for k, (e, row) in enumerate(judged) if e.trace is not None)
    return [part for cut in parts for part in cut]


def _parents(judged: Sequence[tuple[Trajectory, Row]]) -> list[int]:
    """For each row the first of its group whose episode sampled the turns that its own began with; -1 for none."""
    begun = [int(row.turns[row.turns >= 0].min()) for _, row in judged]
    sampled_all = [episode.prefix_turns == first for (episode, _), first in zip(judged, begun, strict=True)]
    parents = [-1] * len(judged)
    for k in (k for k, whole in enumerate(sampled_all) if not whole):
        episode, first = judged[k][0], begun[k]
        for n, (other, _) in enumerate(judged):
            same = other.group_id == episode.group_id and sampled_all[n]
            if same and [t.said for t in other.turns[:first]] == [t.said for t in episode.turns[:first]]:
                parents[k] = n
                break
    return parents


def contexts(row: Row, segments: Sequence[int], number: int) -> list[Row]:
    """The rows that an episode is learned from, one a context: its ``row`` cut where the policy had summarised.

    Lu et al. 2025 (SUPO, arXiv 2510.06727) and Zhang et al. 2025 (Memory as Action, arXiv 2510.12635): the gradient of
    an episode is the sum of those of its contexts, each with the advantage of the episode, and summaries are actions.
    Unlike in SUPO, an episode that a limit cut is not left out; it is treated as any other that was cut.

    Args:
        row: of the whole episode, as ``policy_row`` makes it.
        segments: as ``Trace.segments``; those beyond the row are left out.
        number: of the episode in the update, 0 or more; ``assign_credit`` judges rows of one number as one episode.

    Example::

        a row of 10 tokens, segments (4, 8): rows of 4, 4 and 2 tokens, the last one truncated where the row is
    """
    bounds = pairwise([0, *(begin for begin in segments if begin < len(row)), len(row)])
    cut = bool(row.truncated)
    return [row.part(a, b, episode=number, truncated=cut and b == len(row)) for a, b in bounds]


def one_an_episode(rows: Sequence[Row]) -> list[Row]:
    """A row of each episode that was played: enough for what is of turns."""
    return list({int(row.episode): row for row in rows}.values())


def group_numbers(episodes: Sequence[Trajectory]) -> dict[str, int]:
    """By the name of a group, in order of first appearance."""
    return {name: number for number, name in enumerate(dict.fromkeys(e.group_id for e in episodes))}


def informative_groups(episodes: Sequence[Trajectory], shaping: RewardShaping = _AS_EARNED) -> int:
    """How many groups have episodes that earned different sums; only these teach an algorithm that compares."""
    earned: dict[str, list[float]] = {}
    for episode in episodes:
        row = policy_row(episode, shaping=shaping)
        if row is not None:
            earned.setdefault(episode.group_id, []).append(total_reward(row))
    return sum(differ(sums) for sums in earned.values())


def total_reward(row: Row) -> float:
    """What the turns of a row earned, added up in double precision."""
    return float(sum(row.rewards.tolist()))


def mean_rewards(rows: Sequence[Row], tiered: bool) -> dict[str, float]:
    """Means of what outcomes earned, an episode, and of the judgements, a turn; where they are in use."""
    metrics: dict[str, float] = {}
    rows = one_an_episode(rows)
    if tiered and rows:
        metrics["tiered_return"] = fmean(map(total_reward, rows))
    judgements = torch.cat([row.process[:-1] for row in rows]) if rows else torch.empty(0)
    if not judgements.isnan().all():
        metrics["process_mean"] = fmean(judgements[~judgements.isnan()].tolist())
    return metrics


def turn_weights(episode: Trajectory, min_weight: float) -> list[float]:
    """How likely each turn, and an action that was not answered, was chosen in a state of the real world: a weight.

    The state before a dreamed turn is right if all dreamed turns before it were; with calibrated probabilities ``p`` of
    the turns, that of turn k is the product of ``p_j`` over the own turns ``j < k``, at least ``min_weight``. Turns
    copied from a log are right. What the last turn's own answer is worth is no part of its weight.

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
    min_weight: float | None = None,
    group: int = 0,
    shaping: RewardShaping = _AS_EARNED,
) -> Row | None:
    """The row of a played episode, or ``None`` where the infrastructure failed or the policy made no token.

    A malformed prediction ends the episode at the action that provoked it, unpaid and without a value after it.

    What follows the last agent token is read by no loss. Only an episode that a limit of ours cut keeps it, for the
    value of the state it was cut in. Where the world's own context was full, that is the state before the action that
    it could not answer: the action is left out, as nothing is known of what it did. A dream that the guard ended, or
    that broke, has no such state: what the world model was unsure of must not be paid for through a critic either.
    Bootstrapping at the state before the uncertain action would make uncertain actions free (docs/log/).

    Args:
        min_weight: ``rl_weight`` of a token is that of its turn by ``turn_weights``; ``None`` counts all alike.

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
    last = max(i for i, owner in enumerate(trace.owners) if owner == Owner.AGENT)
    bootstrapped = episode.stop.is_truncation and episode.stop is not StopReason.UNSURE
    n = len(trace.ids) if bootstrapped else last + 1
    if bootstrapped and trace.turns[last] >= len(episode.turns):  # the world's own context was full
        n = trace.turns.index(trace.turns[last])
        if Owner.AGENT not in trace.owners[:n]:
            return None
    owners = trace.owners[:n]
    made = torch.tensor([owner == Owner.AGENT for owner in owners])
    observed: list[bool] = []
    if episode.source is Source.REAL:
        for begin, end in trace.spans:  # what a context begins with answers none of its actions
            acted = accumulate((owner == Owner.AGENT for owner in owners[begin:end]), operator.or_)
            observed += [a and owner == Owner.ENV for a, owner in zip(acted, owners[begin:end], strict=True)]
    turns = torch.tensor(trace.turns[:n])
    # an action that the world could not answer has no turn
    rewards = torch.tensor([*shaping.rewards(episode), 0.0])
    rewards[trace.turns[last]] += shaping.uncertainty_penalty(episode)
    first = trace.turns[trace.owners.index(Owner.AGENT)]
    rewards[first] += rewards[:first].sum()  # of a dream that it goes on from; what the log earned is 0 already
    rewards[:first] = 0.0
    weights = [1.0] * (len(episode.turns) + 1) if min_weight is None else turn_weights(episode, min_weight)
    judgements, carried_out = shaping.judgements(episode), shaping.carried_out(episode)
    return Row(
        trace.ids[:n],
        made,
        episode.source,
        observed=torch.tensor(observed, dtype=torch.bool),
        behavior_logprobs=[NAN if logprob is None else logprob for logprob in trace.logprobs[:n]],
        rl_weight=torch.where(made, torch.tensor(weights)[turns.clamp(min=0)], 0.0),
        turns=turns,
        rewards=rewards,
        anchors=anchors(episode),
        process=torch.tensor([*judgements, 0.0], dtype=torch.float64) if shaping.process else (),
        carried_out=[*carried_out, False] if carried_out else (),
        group=group,
        truncated=bootstrapped,
        turns_lost=shaping.turns_lost(episode),
        temperature=trace.temperature,
    )


def anchors(episode: Trajectory) -> list[int]:
    """For each turn, and for an action that was not answered, a number for the observation before it.

    Equal texts have equal numbers, in every process: what gigpo compares.
    """
    seen = [episode.start, *(turn.observation for turn in episode.turns)]
    return [int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) for text in seen]


def compared_expert_row(chat: ChatFormat, episode: Trajectory, group: int, shaping: RewardShaping = _AS_EARNED) -> Row:
    """The row of an expert's episode that is judged within a group of the policy's, as a member of it (LUFFY)."""
    row = imitation_row(chat, episode, Source.EXPERT)
    turns = torch.where(row.action_mask, 0, -1)
    total = torch.tensor([sum(shaping.rewards(episode))])
    return replace(row, group=torch.tensor(group), turns=turns, rewards=total)


def expert_rows(
    chat: ChatFormat,
    experts: Sequence[Trajectory],
    wanted: int,
    rng: random.Random,
    compared: Sequence[Trajectory] | None,
    shaping: RewardShaping,
    context: int,
) -> list[Row]:
    """At most ``wanted`` episodes of experts; where they are ``compared`` with the policy's, only of tasks that it
    began now as well. Rows are cut to ``context`` tokens; one to be compared is left out: it would be judged by an end
    that it has not.
    """
    groups = dict[str, int]()
    if compared is not None:
        numbers = group_numbers(compared)
        groups = {t.task_id: numbers[t.group_id] for t in compared if not t.prefix_turns}
        experts = [t for t in experts if t.task_id in groups]
    rows: list[Row] = []
    for episode in rng.sample(experts, min(wanted, len(experts))):
        if groups:
            row = compared_expert_row(chat, episode, groups[episode.task_id], shaping)
            if len(row) > context:
                continue
        else:
            row = truncate(imitation_row(chat, episode, Source.EXPERT), context)
        if row.ce_weight.any():
            rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class RecordedGroups:
    """Groups of the policy's own real episodes that were played before, with the tokens that it sampled.

    They are of an earlier policy: staleness in updates is what the caller bounds. The update judges them by their
    ratios, as it does whatever an engine sampled that is not the trainer itself (decoupled PPO: Hilton et al. 2021,
    arXiv 2110.00641, eq. 4).
    """

    groups: tuple[tuple[Trajectory, ...], ...]

    @classmethod
    def of(cls, episodes: Sequence[Trajectory]) -> RecordedGroups:
        """Groups in order of first appearance. Those without sampled tokens, and outages, teach nothing."""
        groups = by_group(e for e in episodes if e.trace is not None and not e.stop.is_failure)
        return cls(tuple(map(tuple, groups.values())))

    def without(self, tasks: Collection[str]) -> RecordedGroups:
        """Those that were played in other tasks."""
        return RecordedGroups(tuple(group for group in self.groups if group[0].task_id not in tasks))

    def deal(self, before: int, count: int) -> list[Trajectory]:
        """``count`` groups, or all if there are not so many, after ``before`` of them were dealt; then from the front.

        Each is dealt twice at most: a few episodes that are learned from again and again are overfitted.

        Example::

            of three groups a, b, c: deal(0, 2) is a, b; deal(2, 2) is c, a; deal(4, 5) is b, c; deal(6, 2) is none
        """
        n = len(self.groups)
        dealt = [self.groups[k % n] for k in range(before, min(before + min(count, n), _TIMES * n))]
        return [replace(episode, group_id=f"recorded/{episode.group_id}") for group in dealt for episode in group]


# --- credit ---


def sampled_rows(batch: RowBatch) -> list[int]:
    """Which rows are to be judged: those with tokens that the policy sampled and may learn from."""
    return _where((batch.rl_weight != 0).any(1))


def trained_rows(batch: RowBatch, observations: bool = False) -> list[int]:
    """Which rows anything is learned from; ``observations``: also by predicting what the real world said."""
    trained = batch.trained_mask
    return _where((trained | batch.observed if observations else trained).any(1))


def after_unsure_actions(batch: RowBatch, share: float) -> Tensor:
    """``batch.observed`` after the ``share`` of the actions of which the policy was least sure, ``[batch, time]``.

    PaW predicts what follows actions of high entropy (Lu et al. 2026, arXiv 2606.02388, selection of data).
    An action's entropy is estimated by what was sampled: the mean of ``-behavior_logprobs`` over its tokens.
    """
    if share == 1:
        return batch.observed
    acts_in = torch.where(batch.action_mask, batch.turns, -1)
    follows = torch.where(batch.observed, acts_in.cummax(1).values, -1)  # the turn that an observation answers
    unsure: list[tuple[float, int, int]] = []
    for row in _where(batch.observed.any(1)):
        for turn in follows[row][batch.observed[row]].unique().tolist():
            unsure.append((float(-batch.behavior_logprobs[row][acts_in[row] == turn].mean()), row, turn))
    unsure.sort(reverse=True)
    chosen = torch.zeros_like(batch.observed)
    for _, row, turn in unsure[: math.ceil(share * len(unsure))]:
        chosen[row] |= follows[row] == turn
    return chosen


@torch.no_grad()
def assign_credit(
    batch: RowBatch,
    algorithm: Algorithm,
    shaped: Tensor | None = None,
    process_coef: float = 0.0,
    step_rewards: Tensor | None = None,
) -> None:
    """Fills in ``advantages``, ``returns`` and ``learned`` of the rows that the policy sampled, by the algorithm.

    All episodes at once, before rows are packed or split. ``rl_weight`` becomes 0 where the algorithm trains nothing;
    where it trains, it stays what it was. Episodes of experts that are members of a group (LUFFY) move its mean and
    deviation, and get their advantages, too. Contexts of one episode are judged as one, by all its tokens in order, so
    it counts once in every mean.

    Args:
        batch: with ``values`` and ``bootstrap`` for an algorithm with a critic, and ``kl`` where that is a reward.
        shaped: ``[sampled episodes, turns]``, what each turn is judged by in place of what it earned.
        process_coef: of ``process``, in units of reward.
        step_rewards: ``[sampled rows, turns]``, of a process reward model, for istar.

    Raises:
        ValueError: as ``Algorithm.judge``, a row has no turns, a reward stands on a turn without tokens, or a turn has
            no ``process`` where that is asked for.
    """
    own = sampled_rows(batch)
    if not own:
        return
    judged = [*own, *_where((batch.ce_weight != 0).any(1) & (batch.turns >= 0).any(1))]
    rows = batch[judged]
    whole, index = rows.joined()
    episodes = episodes_of(whole, index[:, 0], algorithm, shaped, process_coef)
    if step_rewards is not None:  # experts have none
        more = episodes.turn_rewards.shape[1] - step_rewards.shape[1], len(whole) - len(step_rewards)
        padded = torch.nn.functional.pad(step_rewards, (0, more[0], 0, more[1]), value=NAN)
        episodes = replace(episodes, step_rewards=padded)
    advantages = algorithm.judge(episodes)
    n, width = len(own), rows.ids.shape[1]

    def by_row(column: Tensor) -> Tensor:
        return column.flatten()[index].masked_fill(index < 0, 0)

    batch.advantages[judged, :width] = by_row(advantages.advantages)
    if (batch.parent >= 0).any():
        batch.advantages = shared_before_branches(batch.advantages, batch.turns, batch.parent)
    weight = rows.rl_weight[:n]
    if not algorithm.loss_mask:  # what the world said has no weight of its own, and counts fully where it is trained on
        weight = torch.where(weight != 0, weight, 1.0)
    batch.rl_weight[own, :width] = torch.where(by_row(advantages.trained)[:n], weight, 0.0)
    if advantages.returns is not None:
        batch.returns[own, :width] = by_row(advantages.returns)[:n]
    if advantages.learned is not None:
        batch.learned[own, :width] = by_row(advantages.learned)[:n]


def episodes_of(
    rows: RowBatch, begins: Tensor, algorithm: Algorithm, shaped: Tensor | None, process_coef: float
) -> Episodes:
    """The columns of the rows that an algorithm judges by; ``begins``: of contexts, in a flattened column."""
    index, n = rows.turns, len(rows)
    acts = (index >= 0).any(1)
    if not acts.all():
        raise ValueError(f"played row {int((~acts).nonzero()[0])} has no turns")
    turns = max(int(index.max()) + 1, 1)
    if rows.rewards[:, turns:].any():
        raise ValueError(f"a turn beyond the {turns} with tokens has a reward, which would be lost")
    rewards = rows.per_turn("rewards", turns)
    if shaped is not None:  # of experts, which no model was asked about, zero
        shaped = torch.nn.functional.pad(shaped, (0, turns - shaped.shape[1], 0, n - len(shaped)))
    if process_coef:
        process = rows.per_turn("process", turns)
        exists = turn_bounds(index, turns)[0] >= 0
        shaped = with_process_rewards(rewards if shaped is None else shaped, process, exists, process_coef)
        # judgements that cost something cost it for the turns lost to uncertainty as well: the worst of the update
        worst = torch.where(exists & process.isfinite(), process_coef * process, 0.0).amin().clamp(max=0.0)
        shaped[torch.arange(n), index.amax(1).clamp(min=0)] += worst * rows.turns_lost
    everything = rows.attention_mask.clone()
    everything.view(-1)[begins] = False  # nothing predicts them
    # an expert belongs to the world of the group that it is compared with
    worlds = {g: s for g, s in zip(rows.group.tolist(), rows.source.tolist(), strict=True) if s != _EXPERT}
    world = [worlds.get(g, s) for g, s in zip(rows.group.tolist(), rows.source.tolist(), strict=True)]
    critic = algorithm.critic is not None
    return Episodes(
        turn_rewards=rewards,
        action_turn_index=index,
        group_ids=rows.group,
        valid=torch.ones(n, dtype=torch.bool),
        loss_mask=None if algorithm.loss_mask else everything,
        advantage_mask=None if algorithm.advantage_mask else everything,
        anchors=rows.per_turn("anchors", turns),
        values=rows.values if critic else None,
        bootstrap_value=rows.bootstrap if critic else None,
        kl=rows.kl,
        shaped=shaped,
        sources=torch.tensor(world),
    )


def _where(chosen: Tensor) -> list[int]:
    rows: list[int] = chosen.nonzero()[:, 0].tolist()
    return rows
