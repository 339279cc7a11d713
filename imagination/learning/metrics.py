"""What is logged of an update: of the episodes that it played, and of the tokens that it learned from.

Means over tokens are of all together and apart for dreamed, real, expert and replayed ones. "All together" are the
tokens of this update's own episodes: ``rl_tokens``, ``policy_loss``, ``ratio`` and so on leave out what is replayed,
which has the same metrics under its own name (``ratio_replay``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from imagination.learning.algorithms import Algorithm
from imagination.learning.losses.policy import policy_loss
from imagination.learning.losses.terms import LossInputs, LossTerms
from policy.lm.batch import SOURCES, RowBatch
from real_envs.trajectory import Source, StopReason, Trajectory
from worldmodel.evaluation.proportions import summarise

# What the sum of a metric is divided by; the RL tokens where nothing is said.
_COUNTS = {
    "ce_tokens": "ce_tokens",
    "expert_loss": "ce_tokens",
    "expert_entropy": "ce_tokens",
    "observed_tokens": "observed_tokens",
    "observation_loss": "observed_tokens",
    "real_tokens": "real_tokens",
    "packing": "real_tokens",
    "value_loss": "value_tokens",
    "value_tokens": "value_tokens",
}


_OF_THE_SURROGATE = ("ratio", "clip_fraction", "kl_k3", "kl_k1")


# --- episodes ---


def measure_played(played: Sequence[Trajectory], prefix: str = "") -> dict[str, float]:
    """Metrics of episodes of one world, ``{"dream_success": 0.5, "turns": 310, ...}``; nothing for none.

    ``prefix``: of the names that do not say which world they are of, where an update plays in both.
    """
    if not played:
        return {}
    from_start = summarise([t for t in played if not t.prefix_turns])
    branched = summarise([t for t in played if t.prefix_turns])
    everything = summarise(played)
    name = "dream" if played[0].source is Source.DREAM else "real"
    metrics: dict[str, float] = {
        f"{prefix}turns": sum(len(t.own_turns) for t in played),
        f"{prefix}failures": everything.success.failures,
    }
    for key, summary in ((f"{name}_success", from_start), (f"{name}_success_branched", branched)):
        if summary.success.rate is not None:
            metrics[key] = summary.success.rate
    for stop, count in everything.stops.items():
        metrics[f"{prefix}stop_{stop.value}"] = count / len(played)
        if stop.is_outage:
            metrics[f"{prefix}failures_{stop.value}"] = count
    own = [turn for t in played for turn in t.own_turns]
    if any("rule" in turn.info for turn in own):
        metrics[f"{prefix}answered_by_rule"] = sum("rule" in turn.info for turn in own) / len(own)
        metrics[f"{prefix}resampled"] = sum(float(turn.info.get("resampled", 0)) for turn in own) / len(own)
        metrics[f"{prefix}kept_inconsistent"] = sum("broken" in turn.info for turn in own) / len(own)
    if everything.mean_turns is not None:
        metrics[f"{prefix}mean_turns"] = everything.mean_turns
    return metrics


def useful_turns(episode: Trajectory) -> int:
    """Own turns without the one that the guard rejected."""
    return len(episode.own_turns) - (episode.stop is StopReason.UNSURE)


# below which the guard ends a dream
_LIMITS = "dream.min_confidence (of a whole answer) or dream.min_outcome_confidence (of its reward and end)"


def why_nothing(played: Sequence[Trajectory]) -> str:
    """Why none of them teaches anything, and what to do about it."""
    stops = dict(Counter(t.stop.value for t in played))
    broken = next((t.failure for t in played if t.failure), None)
    if played[0].source is not Source.DREAM and broken is not None:
        return (
            f"every real episode of the first update failed, {stops}; the first one: {broken.strip().splitlines()[-1]}"
        )
    return (
        f"nothing can be learned from these dreams, which ended as {stops}: if unsure, train the world model "
        f"longer or lower {_LIMITS}; if prediction_invalid, train it longer or raise dream.max_tokens; else raise the "
        "contexts"
    )


def guard_note(updates: Sequence[Mapping[str, float]]) -> str:
    """What it means that the guard ended most dreams of these updates, and what to do; empty where it did not."""
    shares = [line.get("stop_unsure", 0.0) for line in updates]
    share = sum(shares) / max(1, len(shares))
    if share <= 0.5:
        return ""
    return (
        f"the guard ended {share:.0%} of the dreams unpaid, as the world model was unsure: the policy learned from the "
        "others alone, and to stay where it is sure. Train the world model longer or on more tasks, or lower "
        f"{_LIMITS} and compare dreamed with real success (`imagine evaluate`)"
    )


def turns_lost(played: Sequence[Trajectory], longest: int) -> int:
    """How many turns the dreams that ended unsure could still have had."""
    return sum(longest - useful_turns(t) for t in played if t.stop is StopReason.UNSURE)


def realised_shares(batch: RowBatch) -> dict[str, float]:
    """Share of each source in the trained tokens: ``{"tokens_dream": 0.9, "tokens_expert": 0.1}``."""
    counts: Counter[str] = Counter()
    for number, acts in zip(batch.source.tolist(), batch.action_mask & batch.trained_mask, strict=True):
        counts[SOURCES[number].value] += int(acts.sum())
    total = sum(counts.values()) or 1
    return {f"tokens_{source}": count / total for source, count in sorted(counts.items())}


# --- tokens ---


@torch.no_grad()
def by_source(
    source: Tensor, algorithm: Algorithm, inputs: LossInputs, terms: LossTerms, denominator: float, scale: int
) -> dict[str, Tensor]:
    """Sums over the RL tokens of each source: ``{"rl_tokens_dream": ..., "policy_loss_dream": ..., ...}``.

    Ratios, clips and KL are the algorithm's own, loss included, computed again on the tokens of a source where there
    are several; rows have one source, so no turn or sequence is cut.

    Args:
        source: ``[n]``, numbers in ``SOURCES``.
        terms: those of the policy.
        denominator: as in ``Algorithm.losses``.
        scale: trained tokens of the whole optimiser step, by which the loss is multiplied to be averaged over tokens.
    """
    sums: dict[str, Tensor] = {}
    active, entropy = inputs.active, inputs.given("entropy", "other metrics")
    present = source[active].unique().tolist()
    for number in present:
        chosen = source == number
        own = terms if len(present) == 1 else policy_loss(inputs.where(chosen), algorithm.surrogate, denominator)
        sums |= of_source(number, own, inputs.advantages[chosen & active], entropy[chosen & active], scale)
    return sums


@torch.no_grad()
def of_source(number: int, terms: LossTerms, advantages: Tensor, entropy: Tensor, scale: int) -> dict[str, Tensor]:
    """The same sums of one source, by the terms of its loss, the advantages and the entropy of its tokens."""
    name = SOURCES[number].value
    return {
        f"rl_tokens_{name}": terms.tokens,
        f"policy_loss_{name}": terms.loss.detach() * scale,
        f"entropy_{name}": entropy.sum(),
        f"advantage_{name}": advantages.abs().sum(),
        **{f"{key}_{name}": terms.sums[key] for key in _OF_THE_SURROGATE if key in terms.sums},
    }


def logprob_grad_by_source(source: Tensor, logprobs: Sequence[Tensor]) -> dict[str, Tensor]:
    """How hard the loss pulls at each source's tokens: sums of ``|d loss / d logprob|``, after the backward pass.

    It costs nothing, where gradients of the weights for each source would cost a backward pass each. The pull of
    entropy bonus and critic is not in it.

    Args:
        logprobs: ``[n]`` each, with retained gradients; a tensor that no loss reads has none.
    """
    total = torch.zeros_like(source, dtype=torch.float32)
    for x in logprobs:
        total = total if x.grad is None else total + x.grad.abs()
    return {f"pull_{SOURCES[number].value}": total[source == number].sum() for number in source.unique().tolist()}


def means(terms: Sequence[LossTerms]) -> dict[str, float]:
    """Means over the tokens each metric is about, over all micro-batches of an update in which it was measured.

    ``logprob_grad_by_source`` becomes ``gradient_share``, which adds up to 1 over the sources.
    """
    merged: dict[str, float] = {}
    pulls: dict[str, float] = {}
    for key in sorted({key for t in terms for key in t.sums}):
        name, source = _split(key)
        if name == "pull":
            pulls[source] = sum(float(t.sums[key]) for t in terms if key in t.sums)
            continue
        count = _COUNTS.get(name, "rl_tokens") + (f"_{source}" if source else "")
        measured = [t for t in terms if key in t.sums]
        total = sum(float(t.sums[key]) for t in measured)
        merged[key] = total if key == count else total / max(sum(float(t.sums[count]) for t in measured), 1.0)
    for source, pull in pulls.items():
        merged[f"gradient_share_{source}"] = pull / (sum(pulls.values()) or 1.0)
    for key in sorted({key for t in terms for key in t.maxima}):
        merged[key] = max(float(t.maxima[key]) for t in terms if key in t.maxima)
    return merged


def _split(key: str) -> tuple[str, str]:
    """``("entropy", "dream")`` of entropy_dream, and ``("entropy", "")`` of entropy."""
    for source in Source:
        if key.endswith(f"_{source.value}"):
            return key.removesuffix(f"_{source.value}"), source.value
    return key, ""
