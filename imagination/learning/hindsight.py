"""Failed episodes, retold with a goal that they did reach (hindsight: Andrychowicz et al. 2017, arXiv 1707.01495; for
agents that speak: NNetNav, Murty et al. 2024, arXiv 2410.02907).

What a goal says is declared (``HindsightSettings.goals``), so it is true by construction and no model judges it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from imagination.settings.models import HindsightSettings
from real_envs.trajectory import StopReason, Trajectory
from worldmodel.objective import unchanging

NAME = "hindsight"


def failed(episode: Trajectory) -> bool:
    """Whether it is known not to have solved its task; an outage, or an unmeasured success, is not known."""
    known = episode.success is not None or any(turn.reward is not None for turn in episode.turns)
    return known and not episode.solved and not episode.stop.is_failure


def relabelled(episode: Trajectory, settings: HindsightSettings, refusals: str = "") -> Trajectory | None:
    """The episode up to the last goal that it reached for the first time, with that goal in its start.

    Turns that changed nothing (``worldmodel.objective.unchanging``) are left out, so that nobody imitates them. The
    last turn earns 1 and ends the episode, the others earn 0, and it counts as solved. What the world said stays: it
    did not end there.

    Args:
        refusals: as ``worldmodel.refusals``.

    Returns:
        ``None`` where no declared goal was reached within ``settings.max_turns``, or the start has no place for one.

    Example::

        "Eat the bear. -= Hall =- ...", open chest: "You open the chest.", close chest: "You close the chest." with the
        goal ["You open the (\\w+)", "Open the \\1."] is "Open the chest. -= Hall =- ...", open chest
    """
    if not re.search(settings.place, episode.start):
        return None
    changed = [not same for same in unchanging(episode, refusals)]
    told = set(_goals(episode.start, settings))
    last: tuple[int, str] | None = None
    for k, turn in enumerate(episode.turns):
        new = [goal for goal in _goals(turn.observation, settings) if goal not in told]
        told.update(new)
        if new and changed[k] and (not settings.max_turns or sum(changed[: k + 1]) <= settings.max_turns):
            last = k, new[-1]
    if last is None:
        return None
    end, goal = last
    turns = [
        replace(t, reward=0.0, terminated=False) for t, c in zip(episode.turns[: end + 1], changed, strict=False) if c
    ]
    turns[-1] = replace(turns[-1], reward=1.0, terminated=True)
    return replace(
        episode,
        id=f"{NAME}/{episode.id}",
        group_id=f"{NAME}/{episode.group_id}",
        agent=f"{NAME}/{episode.agent}",
        start=re.sub(settings.place, lambda _: goal, episode.start, count=1),
        turns=tuple(turns),
        stop=StopReason.TERMINATED,
        prefix_turns=0,
        trace=None,
        world_facts=(),
        success=True,
    )


def _goals(text: str, settings: HindsightSettings) -> Iterator[str]:
    """The goals that this text says are reached, in the order of the declarations."""
    for pattern, goal in settings.goals:
        for match in re.finditer(pattern, text):
            yield match.expand(goal)
