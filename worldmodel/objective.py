"""What the world model is trained on: the tokens the environment owns, each turn with a weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policy.lm.batch import Row
from policy.lm.render import ChatFormat, render_for_world_model
from real_envs.trajectory import Owner, Trajectory

_Transition = tuple[str, str, str, str, float | None, bool]


def _transitions(trajectory: Trajectory) -> list[_Transition]:
    seen = trajectory.start
    found: list[_Transition] = []
    for turn in trajectory.turns:
        found.append((trajectory.task_id, seen, turn.action, turn.observation, turn.reward, turn.terminated))
        seen = turn.observation
    return found


def transition_weights(log: Sequence[Trajectory], power: float = 0.5) -> list[list[float]]:
    """A weight per turn that falls with how often the log repeats it: ``count ** -power``, scaled to a mean of 1.

    A transition is (task, last observation, action, next observation, reward, end). Logs repeat the harmless ones
    (looking around, failing in the same way) thousands of times, while what changes the world or pays is rare;
    unweighted, the model spends its capacity on the former.

    Args:
        log: the training episodes.
        power: 0 weighs all turns alike; 1 gives every distinct transition the same total.

    Returns:
        One list per episode with one weight per turn; 0 where the reward was not measured.
    """
    keys = [_transitions(trajectory) for trajectory in log]
    counts = Counter(key for episode in keys for key in episode)
    # a turn whose reward nobody measured is no example: its status line would teach "no reward"
    raw = [
        [0.0 if turn.reward is None else counts[key] ** -power for key, turn in zip(episode, t.turns, strict=True)]
        for episode, t in zip(keys, log, strict=True)
    ]
    total, n = sum(map(sum, raw)), sum(weight > 0 for episode in raw for weight in episode)
    return [[weight * n / total if total else 0.0 for weight in episode] for episode in raw]


def world_model_row(chat: ChatFormat, trajectory: Trajectory, weights: Sequence[float]) -> Row:
    """One training row: cross-entropy on env-owned tokens with the weight of their turn, nothing elsewhere."""
    tokens = render_for_world_model(chat, trajectory)
    made = [owner == Owner.ENV for owner in tokens.owners]
    return Row(
        ids=tokens.ids,
        action_mask=made,
        source=trajectory.source,
        ce_weight=[weights[turn] if mine else 0.0 for turn, mine in zip(tokens.turns, made, strict=True)],
    )
