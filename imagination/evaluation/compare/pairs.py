"""Pairs of a dream and a real episode with the same actions: what they are, and what many of them say.

``compare.json`` holds them with everything that the page and the terminal show. Its keys::

    format, version        "imagination-comparison", 1
    run, seed, temperature, guard, max_turns, policy, policy_version, world_model_version, hardware
    notes                  sentences on what could not be compared
    aligned                [{"source", "split", and the keys of ``statistics``}, ...], one a source and split
    free                   [{"split", and the keys of ``free_play``, "replayed", "consistency"}, ...], one a split
    signals                see ``compare.signals.signal_table``; empty where nobody asked
    cost                   see ``commands.compare``
    pairs                  [pair, ...]; a pair is

    id, source, split, task_id, agent, seed, start, screenshot
                           source: "dream" (the policy's, replayed for real) or "log" (real, dreamed again);
                           screenshot: the name of the real start's picture (``real_envs.screens``), or null
    comparable             false where a world broke or began otherwise; such a pair is in no statistic
    first, first_in_substance   index of the first turn that differs (at all; in more than wording), or null
    dream, real            {"outcome", "stop", "reward", "failure", "turns"}; outcome: see ``outcome``; reward: the sum,
                           null where nobody measured any; turns: their number
    turns                  [turn, ...]; a turn is

    action, kind, differs, unsure      see ``alignment.AlignedTurn``
    dream, real            null, or {"observation", "reward", "terminated", "confidence", "reasoning", "screenshot",
                           "marks"}; confidence is null where nobody stated any, reasoning where nobody thought before,
                           screenshot where there is no picture; marks: [start, end) characters that differ from the
                           other side
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from imagination.evaluation.compare.alignment import AlignedTurn, Alignment, Span, TurnClass, align, line_diff, survival
from real_envs.screens import BEFORE, screen_of
from real_envs.trajectory import StopReason, Trajectory, Turn
from worldmodel.evaluation.agreement import consistency_ratio, pairwise_ratio
from worldmodel.evaluation.intervals import proportion
from worldmodel.evaluation.proportions import summarise

NEVER = "never"  # the class of the first divergence of a pair that has none


@dataclass(frozen=True, slots=True)
class Pair:
    """One dream and its real counterpart; made by ``pair_up``.

    ``source`` is "dream" where the policy dreamed it and it was replayed, "log" where it was logged and dreamed again.
    """

    id: str
    source: str
    split: str
    dream: Trajectory
    real: Trajectory
    alignment: Alignment

    @property
    def comparable(self) -> bool:
        """A world that broke, or began otherwise, says nothing. A dream that wrote nonsense does."""
        broken = self.dream.stop.is_failure and self.dream.stop is not StopReason.PREDICTION_INVALID
        return not (broken or self.real.stop.is_failure) and self.alignment.same_start

    @property
    def first_kind(self) -> str:
        """The class of the first divergence, or ``NEVER``."""
        k = self.alignment.first
        return NEVER if k is None else self.alignment.turns[k].kind.value


def pair_up(id: str, source: str, split: str, dream: Trajectory, real: Trajectory, attempted: str = "") -> Pair:
    """See ``Pair`` and ``align``."""
    return Pair(id, source, split, dream, real, align(dream, real, attempted))


def outcome(episode: Trajectory) -> str:
    """``solved``, ``unsolved``, ``unjudged`` (nobody measured a reward), ``unsure`` (the guard cut a dream),
    ``invalid`` (it wrote nothing readable) or ``failed`` (something broke)."""
    if episode.stop.is_failure:
        return "invalid" if episode.stop is StopReason.PREDICTION_INVALID else "failed"
    if episode.solved:
        return "solved"
    if episode.stop is StopReason.UNSURE:
        return "unsure"
    judged = not episode.turns or any(turn.reward is not None for turn in episode.turns)
    return "unsolved" if judged else "unjudged"


def statistics(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What pairs of one kind say.

    Returns:
        ``pairs``: those that count, and ``left_out`` those that do not; ``first``: pairs by class of their first
        divergence; ``turns``: compared turns up to the first divergence, it included, by class; ``false_success``
        (solved in the dream only) and ``missed_success`` (in reality only); ``still_true``: see ``survival``;
        ``guard``: dreams it cut, and how many of the answers it did not trust were right in substance (in words).
    """
    counted = [pair for pair in pairs if pair.comparable]
    alignments = [pair.alignment for pair in counted]
    until_parted = [turn for a in alignments for turn in a.turns[: a.compared if a.first is None else a.first + 1]]
    cut = [turn for pair in counted for turn in pair.alignment.turns if turn.unsure]
    solved = [(pair.dream.solved, pair.real.solved) for pair in counted]
    lives = [(_life(a.first, a), _life(a.first_in_substance, a)) for a in alignments]
    return {
        "pairs": len(counted),
        "left_out": len(pairs) - len(counted),
        "first": dict(Counter(pair.first_kind for pair in counted).most_common()),
        "turns": dict(Counter(turn.kind.value for turn in until_parted).most_common()),
        "never_parted": _share([a.first is None for a in alignments], counted),
        "never_in_substance": _share([a.first_in_substance is None for a in alignments], counted),
        "false_success": sum(dream and not real for dream, real in solved),
        "missed_success": sum(real and not dream for dream, real in solved),
        "still_true": [list(point) for point in survival([strict for strict, _ in lives])],
        "still_true_in_substance": [list(point) for point in survival([loose for _, loose in lives])],
        "guard": {"cut": len(cut), "right": sum(t.kind in (TurnClass.SAME, TurnClass.WORDING) for t in cut)},
    }


def _life(first: int | None, alignment: Alignment) -> tuple[int, bool]:
    return (alignment.compared, False) if first is None else (first + 1, True)


def _share(hits: Sequence[bool], pairs: Sequence[Pair]) -> dict[str, Any]:
    """As ``Proportion.to_json``, with ``share`` in place of ``success``; each task is one trial."""
    data = proportion(hits, [pair.real.task_id for pair in pairs]).to_json()
    return {"share": data["value"], "n": data["n"], "ci95": data["ci95"]}


def consistency(pairs: Sequence[Pair], reals: Sequence[Trajectory]) -> dict[str, Any]:
    """Does what works in the dream work for real? The consistency ratios of Word2World (arXiv 2512.18832).

    Args:
        pairs: the policy's dreams and their replays, ``reals[i]`` being free play of the task and seed of ``pairs[i]``.

    Returns:
        ``replayed``: success of the dreamed actions in reality; ``ratio``: that over the success of free play;
        ``pairwise``: of what was solved in free play, the share that the replayed dream solved too. Null where nothing
        was solved for real.
    """
    counted = [(p, real) for p, real in zip(pairs, reals, strict=True) if p.comparable and not real.stop.is_failure]
    replayed = summarise(p.real for p, _ in counted).success
    both, solved = sum(p.real.solved and r.solved for p, r in counted), sum(r.solved for _, r in counted)
    sums = np.array([sum(p.dream.solved for p, _ in counted), replayed.successes, solved, both, len(counted)])
    return {"replayed": replayed.to_json(), "ratio": consistency_ratio(sums), "pairwise": pairwise_ratio(sums)}


def pair_json(pair: Pair) -> dict[str, Any]:
    """See the module."""
    return {
        "id": pair.id,
        "source": pair.source,
        "split": pair.split,
        "task_id": pair.real.task_id,
        "agent": pair.dream.agent if pair.source == "dream" else pair.real.agent,
        "seed": pair.dream.seed,
        "start": pair.dream.start,
        "screenshot": screen_of(pair.real.turns[0], BEFORE) if pair.real.turns else None,
        "comparable": pair.comparable,
        "first": pair.alignment.first,
        "first_in_substance": pair.alignment.first_in_substance,
        "dream": _episode_json(pair.dream),
        "real": _episode_json(pair.real),
        "turns": [_turn_json(turn) for turn in pair.alignment.turns],
    }


def _episode_json(episode: Trajectory) -> dict[str, Any]:
    rewards = [turn.reward for turn in episode.turns if turn.reward is not None]
    return {
        "outcome": outcome(episode),
        "stop": episode.stop.value,
        "reward": sum(rewards) if rewards else None,
        "failure": episode.failure,
        "turns": len(episode.turns),
    }


def _turn_json(turn: AlignedTurn) -> dict[str, Any]:
    marks: tuple[list[Span], list[Span]] = ([], [])
    if turn.dream and turn.real and {TurnClass.STATE, TurnClass.WORDING} & set(turn.differs):
        marks = line_diff(turn.dream.observation, turn.real.observation)
    return {
        "action": turn.action,
        "kind": turn.kind.value,
        "differs": [kind.value for kind in turn.differs],
        "unsure": turn.unsure,
        "dream": _answer_json(turn.dream, marks[0]),
        "real": _answer_json(turn.real, marks[1]),
    }


def _answer_json(turn: Turn | None, marks: Sequence[Span]) -> dict[str, Any] | None:
    if turn is None:
        return None
    confidence: Any = turn.info.get("confidence")
    reasoning: Any = turn.info.get("reasoning")
    return {
        "observation": turn.observation,
        "reward": turn.reward,
        "terminated": turn.terminated,
        "confidence": confidence if isinstance(confidence, float) else None,
        "reasoning": reasoning if isinstance(reasoning, str) else None,
        "rule": turn.info.get("rule"),
        "screenshot": screen_of(turn),
        "marks": [list(span) for span in marks],
    }


def first_kind(pair: Mapping[str, Any]) -> str:
    """``Pair.first_kind`` of a pair of ``compare.json``."""
    return NEVER if pair["first"] is None else str(pair["turns"][pair["first"]]["kind"])
