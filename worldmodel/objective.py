"""What the world model is trained on: the tokens the environment owns, each turn with a weight; or how right it is.

The second as RLVR-World (arXiv 2505.13934, section 4), on the metric itself: exact match where there is one right
answer, the F1 of what changes where pages are long. What was logged is the answer, so no judge is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from policy.lm.batch import Row
from policy.lm.render import ChatFormat, Tokens
from real_envs.trajectory import Owner, Trajectory, Turn, same_reward
from worldmodel.formats.full import DELIMITER, FullObservation, TransitionFormat, episode_tokens, prompt_tokens
from worldmodel.formats.reasoning import reasoning_of
from worldmodel.world_model import lines

_Transition = tuple[str, str, str, str, float | None, bool]


def _transitions(trajectory: Trajectory) -> list[_Transition]:
    seen = [trajectory.start, *(turn.observation for turn in trajectory.turns)]
    return [
        (trajectory.task_id, before, turn.action, turn.observation, turn.reward, turn.terminated)
        for before, turn in zip(seen, trajectory.turns, strict=False)
    ]


def unchanging(trajectory: Trajectory, refusals: str = "") -> list[bool]:
    """For each turn, whether the log says that nothing changed.

    That is so where the observation is the last one again, as of a page on which a click did nothing, or where a
    refusal matches it. A turn with reward or end always changes something.

    Args:
        refusals: a regular expression that is searched in the observation; empty finds none.
    """
    seen = [trajectory.start, *(turn.observation for turn in trajectory.turns)]
    return [
        not turn.reward
        and not turn.terminated
        and (turn.observation == before or bool(refusals and re.search(refusals, turn.observation)))
        for before, turn in zip(seen, trajectory.turns, strict=False)
    ]


def unchanging_share(weights: Sequence[Sequence[float]], same: Sequence[Sequence[bool]]) -> float | None:
    """The share of all weight that lies on unchanging turns; ``None`` where there is no weight."""
    pairs = [(w, s) for ws, ss in zip(weights, same, strict=True) for w, s in zip(ws, ss, strict=True)]
    total = sum(w for w, _ in pairs)
    return sum(w for w, s in pairs if s) / total if total else None


def balanced(
    weights: Sequence[Sequence[float]], same: Sequence[Sequence[bool]], share: float | None
) -> list[list[float]]:
    """The weights with ``share`` of their total on unchanging turns; within either kind their ratios stay.

    Raises:
        ValueError: a kind that should get a share has no turn, or ``share`` is not in [0, 1).
    """
    if share is None:
        return [list(ws) for ws in weights]
    if not 0 <= share < 1:
        raise ValueError(f"the share of unchanging turns must lie in [0, 1), got {share}")
    current = unchanging_share(weights, same)
    if current is None or current == 1 or (current == 0 and share > 0):
        kind = "unchanging" if current == 0 else "changing"
        raise ValueError(f"the log has no {kind} turn to give a share of the weight to")
    scale = {True: share / current if current else 0.0, False: (1 - share) / (1 - current)}
    return [[w * scale[s] for w, s in zip(ws, ss, strict=True)] for ws, ss in zip(weights, same, strict=True)]


def transition_weights(log: Sequence[Trajectory], power: float = 0.5) -> list[list[float]]:
    """A weight per turn that falls with how often the log repeats it: ``count ** -power``, scaled to a mean of 1.

    A transition is (task, last observation, action, next observation, reward, end). Logs repeat the harmless ones
    (looking around, failing in the same way) thousands of times, while what changes the world or pays is rare;
    unweighted, the model spends its capacity on the former.

    Args:
        power: 0 weighs all turns alike; 1 gives every distinct transition the same total.

    Returns:
        One list per episode with one weight per turn; 0 where answer or reward were not logged.
    """
    keys = [_transitions(trajectory) for trajectory in log]
    counts = Counter(key for episode in keys for key in episode)
    # a turn whose reward nobody measured is no example: its status line would teach "no reward"
    raw = [
        [counts[key] ** -power if turn.known else 0.0 for key, turn in zip(episode, t.turns, strict=True)]
        for episode, t in zip(keys, log, strict=True)
    ]
    total, n = sum(map(sum, raw)), sum(weight > 0 for episode in raw for weight in episode)
    return [[weight * n / total if total else 0.0 for weight in episode] for episode in raw]


def world_model_row(
    chat: ChatFormat, trajectory: Trajectory, weights: Sequence[float], form: TransitionFormat | None = None
) -> Row:
    """One training row: cross-entropy on env-owned tokens with the weight of their turn, nothing elsewhere."""
    return _row(
        episode_tokens(chat, trajectory, (form or FullObservation()).excluding([trajectory])), trajectory, weights
    )


def world_model_rows(
    chat: ChatFormat, trajectory: Trajectory, weights: Sequence[float], form: TransitionFormat | None = None
) -> list[Row]:
    """All rows of an episode: ``world_model_row``, and one more for each turn whose reasoning was logged.

    Such a turn trains its reasoning and its answer with its weight, after a history without any reasoning, as it will
    be read in dreams; so it needs a row of its own, and the row of the episode leaves it out. Where the log has no
    reasoning, the line before an answer stands in the row and trains nothing.

    Raises:
        ValueError: a logged reasoning cannot be one.
    """
    if form is None or not form.reasoning_tokens:
        return [world_model_row(chat, trajectory, weights, form)]
    form = form.excluding([trajectory])
    thoughts = [reasoning_of(turn) for turn in trajectory.turns]
    others = [0.0 if thought is not None else w for thought, w in zip(thoughts, weights, strict=True)]
    rows = [world_model_row(chat, trajectory, others, form)] if None in thoughts else []
    answers = form.answers(trajectory.start, trajectory.turns)
    for k, (turn, thought) in enumerate(zip(trajectory.turns, thoughts, strict=True)):
        if thought is not None and weights[k]:
            tokens = prompt_tokens(chat, form, trajectory.start, trajectory.turns[:k], turn.action)
            answer = (*chat.encode(thought), *chat.encode(DELIMITER), *chat.encode(answers[k]), chat.stop)
            tokens.append(answer, Owner.ENV, k)
            rows.append(_row(tokens, trajectory, [0.0] * k + [weights[k]]))
    return rows


def _row(tokens: Tokens, trajectory: Trajectory, weights: Sequence[float]) -> Row:
    predicted = [owner == Owner.ENV for owner in tokens.owners]
    return Row(
        tokens.ids,
        predicted,
        trajectory.source,
        ce_weight=[weights[turn] if own else 0.0 for turn, own in zip(tokens.turns, predicted, strict=True)],
    )


Metric = Literal["exact", "diff_f1", "behr", "embedding"]
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
    old, new, real = lines(before), lines(predicted), lines(true)
    pairs = [(new - old, real - old), (old - new, old - real)]  # added, removed
    matched = sum(sum((a & b).values()) for a, b in pairs)
    changes = sum(sum(a.values()) + sum(b.values()) for a, b in pairs)
    return 2 * matched / changes if changes else 1.0


def verifiable_reward(metric: Metric, before: str, predicted: Parsed | None, turn: Turn, similar: float = 0.0) -> float:
    """What a prediction earns, in [0, 1].

    Args:
        metric: ``exact`` pays 1 for the right observation, reward and end together. ``diff_f1`` pays ``diff_f1`` of the
            observation where reward and end are right, and nothing where they are not: a dream lives on them. ``behr``
            and ``embedding`` pay ``similar`` there.
        predicted: ``None`` for text that is no prediction, which earns nothing.
        similar: how like the true observation the predicted one is, in [0, 1], as a model judges it.

    Raises:
        ValueError: the turn's reward was not measured.
    """
    if turn.reward is None:
        raise ValueError("a turn whose reward nobody measured cannot verify a prediction")
    if predicted is None or not same_reward(predicted[1], turn.reward) or predicted[2] != turn.terminated:
        return 0.0
    right = predicted[0].strip() == turn.observation.strip()
    if metric != "diff_f1":
        return float(right) if metric == "exact" or right else similar
    return diff_f1(before, predicted[0], turn.observation)
