"""What is told of episodes that an update has played: their metrics, what doubt cost, and why they teach nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from real_envs.trajectory import Source, StopReason, Trajectory
from worldmodel.evaluation.proportions import summarise


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
        "longer or lower dream.min_confidence; if prediction_invalid, train it longer or raise dream.max_tokens; else "
        "raise the contexts"
    )


def lost_to_doubt(played: Sequence[Trajectory], longest: int) -> int:
    """How many turns the dreams that ended unsure could still have had."""
    return sum(longest - useful_turns(t) for t in played if t.stop is StopReason.UNSURE)
