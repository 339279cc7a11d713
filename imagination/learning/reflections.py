"""Reflections: what other actions would have brought, then what the expert's did, written before that action.

Self-reflection of Zhang et al. 2025 (arXiv 2510.08558, section 4.3) with two changes: other actions are tried in the
world model and not in the world, and a template writes what a chat model would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from real_envs.trajectory import Trajectory, Turn
from worldmodel.world_model import Prediction

NAME = "reflections"


def contrasts(turn: Turn, prediction: Prediction) -> bool:
    """Whether another action's outcome speaks for the logged one: something else happens, and it pays no more."""
    return prediction.observation != turn.observation and prediction.reward <= (turn.reward or 0.0)


def reflection(others: Sequence[tuple[str, str]], turn: Turn, words: int) -> str:
    """The thought before an action.

    Args:
        others: actions with what the world model says would be seen after them; at least one.
        words: of an observation that are told.

    Example::

        "drop key: The key falls. take lamp: You take the lamp. So take lamp."
    """
    told = [*others, (turn.action, turn.observation)]
    lines = [f"{action}: {' '.join(observation.split()[:words])}" for action, observation in told]
    return "\n".join([*lines, f"So {turn.action}."])


def reflected(episode: Trajectory, others: Sequence[Sequence[tuple[str, str]]], words: int) -> Trajectory | None:
    """The episode with a reflection in ``info["reasoning"]`` of each turn that has other actions to tell of.

    Args:
        others: for each turn, as in ``reflection``; may be empty.

    Returns:
        ``None`` where no turn has any.
    """
    if not any(others):
        return None
    turns = [
        replace(turn, info={"reasoning": reflection(found, turn, words)} if found else {})
        for turn, found in zip(episode.turns, others, strict=True)
    ]
    return replace(
        episode,
        id=f"{NAME}/{episode.id}",
        group_id=f"{NAME}/{episode.group_id}",
        agent=f"{NAME}/{episode.agent}",
        turns=tuple(turns),
        trace=None,
        world_facts=(),
    )
