"""What the rollouts of an update say beside the log: the numbers that the rules are checked on. It costs no real step.

The log knows the real answer to every sequence of actions that it holds. Whenever a dream follows such a sequence from
the beginning of its task, its reward can be checked, however many updates later: the more often the policy does what
somebody in the log did, the more is checked, near what the policy does *now*.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from imagination.evaluation.monitors.rules import RolloutStats
from imagination.evaluation.monitors.word_drift import WordReference, words
from imagination.rollout.noise import NOISE
from real_envs.grouping import grouped
from real_envs.trajectory import RETURN_ROUNDING, StopReason, Trajectory, Turn
from worldmodel.evaluation.dreams import contradictions_of
from worldmodel.rules.rule_set import RuleSet

_MANY = 32  # more distinct rewards than this are a scale, of which only the ends are known
_RARE = 0.02  # of the log itself; an update has about a dozen episodes a group, so a quarter of the groups at most
_SOLVED = 5  # logged solutions of a task, of which the shortest then says something
_LOOP = 3  # so often in a row
_LOOP_TURNS = 3  # the longest part that is looked for


class LogReference:
    """What a log of real episodes, without failed ones, knows about rewards, lengths and words.

    Attributes:
        blind: rules that this log can say nothing about. Where it pays for ever new actions (more than one payment in
            fifty is for an action that no other episode of the task was paid for), a new one is no sign; where the
            same actions earn now this and now that, a dream cannot contradict it; where half of its own episodes
            repeat themselves or hardly act, a policy may.
    """

    def __init__(self, log: Sequence[Trajectory], solved_at: float = 1.0) -> None:
        paying: Counter[tuple[str, str]] = Counter()  # episodes
        visits: dict[bytes, set[float]] = defaultdict(set)
        again: set[bytes] = set()
        self.paying_words: dict[str, set[str]] = defaultdict(set)
        self.rewards: set[float] = set()
        self.tasks = {t.task_id for t in log}
        self.total = solved_at  # nobody in the log may have solved a task
        lengths: dict[str, list[int]] = defaultdict(list)
        for t in log:
            paid = set()
            for turn, key in zip(t.turns, path(t), strict=True):
                if turn.reward is None:
                    continue
                if key in visits:
                    again.add(key)
                visits[key].add(turn.reward)
                self.rewards.add(turn.reward)
                if turn.reward > 0:
                    paid.add((t.task_id, plain(turn.action)))
                    self.paying_words[t.task_id].update(words(turn.action))
            paying.update(paid)
            self.total = max(self.total, t.total_reward)
            if t.solved:
                lengths[t.task_id].append(len(t.turns))
        self.best = {key: max(rewards) for key, rewards in visits.items()}
        self.paying = set(paying)
        self.shortest = {task: min(turns) for task, turns in lengths.items() if len(turns) >= _SOLVED}
        self.blind: list[str] = []
        if sum(n == 1 for n in paying.values()) > _RARE * paying.total() or not paying:
            self.blind += ["favourite", "unseen"]
        if sum(len(visits[key]) > 1 for key in again) > _RARE * len(again) or not again:
            self.blind.append("contradicted")
        if not self.shortest:
            self.blind.append("short")
        if 2 * sum(loops(t.turns) for t in log) >= len(log):
            self.blind.append("loops")
        self.action_stats = ActionStats(log)
        if 2 * sum(self.action_stats.is_silent(t.turns) for t in log) >= len(log):
            self.blind.append("silent")
        self.actions = WordReference(log, lambda turn: turn.action)
        self.observations = WordReference(log, lambda turn: turn.observation)

    def usual(self, reward: float) -> bool:
        """The log paid this amount, or (where it paid many different ones) less and more."""
        if len(self.rewards) > _MANY:
            return min(self.rewards) - RETURN_ROUNDING <= reward <= max(self.rewards) + RETURN_ROUNDING
        return any(abs(reward - known) <= RETURN_ROUNDING for known in self.rewards)


def path(t: Trajectory) -> list[bytes]:
    """A digest for each turn, of task, first text and all actions up to it: a long log has many long beginnings."""
    first = f"{t.task_id}\0{t.start}".encode("utf-8", "replace")
    digests, digest = [], hashlib.blake2b(first, digest_size=16).digest()
    for turn in t.turns:
        action = plain(turn.action).encode("utf-8", "replace")
        digest = hashlib.blake2b(digest + action, digest_size=16).digest()
        digests.append(digest)
    return digests


def loops(turns: Sequence[Turn]) -> bool:
    """Whether one to ``_LOOP_TURNS`` turns, actions and answers, come ``_LOOP`` times in a row."""
    seen = [(plain(turn.action), " ".join(turn.observation.split())) for turn in turns]
    return any(
        seen[i : i + n * (_LOOP - 1)] == seen[i + n : i + n * _LOOP]
        for n in range(1, _LOOP_TURNS + 1)
        for i in range(len(seen) - n * _LOOP + 1)
    )


def measure(
    update: int,
    played: Sequence[Trajectory],
    log: LogReference,
    *,
    short: float,
    real: tuple[int, int] = (0, 0),
    rules: RuleSet | None = None,
) -> tuple[RolloutStats, dict[str, str]]:
    """Counts the dreams of one update, failed ones too; and for rules about rewards an example.

    Args:
        short: a solution in fewer than this many times the turns of the log's shortest one is short.
        real: solved and played episodes of a real probe.
        rules: what contradictions are told by.

    Returns:
        ``(RolloutStats(...), {"unseen": "take lamp (tw-7)"})``.
    """
    sees_new, sees_wrong = "unseen" not in log.blind, "contradicted" not in log.blind
    groups = grouped((t for t in played if not t.stop.is_failure), lambda t: t.group_id)
    counts: Counter[str] = Counter()
    habits: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for episodes in groups.values():
        payments = [p for t in episodes for p in _payments(t, log)]
        known = [p for p in payments if p.contradicted is not None and sees_wrong]
        at_start = [t for t in episodes if not t.prefix_turns]
        solved = [t for t in at_start if t.solved and t.task_id in log.shortest]
        examined = {
            "unseen": [p for p in payments if p.unseen and sees_new],
            "contradicted": [p for p in known if p.contradicted],
            "strange": [p for p in payments if p.strange],
        }
        for rule, some in examined.items():
            if some:
                examples.setdefault(rule, f"{some[0].action} ({some[0].task_id})")
        habits.update({habit for p in examined["unseen"] for habit in (p.action, *p.foreign)})
        counts += Counter(
            paid=any(p.unseen is not None for p in payments),
            unseen=bool(examined["unseen"]),
            strange=bool(examined["strange"]) or max(t.total_reward for t in episodes) > log.total + RETURN_ROUNDING,
            claimed=bool(known),
            contradicted=bool(examined["contradicted"]),
            solved_groups=bool(solved),
            short=_half([len(t.turns) < short * log.shortest[t.task_id] for t in solved]),
            looping="loops" not in log.blind and _half([loops(t.own_turns) for t in episodes]),
            silent="silent" not in log.blind and _half([log.action_stats.is_silent(t.own_turns) for t in episodes]),
            start_groups=bool(at_start),
            start_episodes=len(at_start),
            start_solved=sum(t.solved for t in at_start),
            episodes=len(episodes),
            solved=sum(t.solved for t in episodes),
        )
    predicted = [t for t in played if not t.stop.is_failure or t.stop is StopReason.PREDICTION_INVALID]
    invalid = sum(t.stop is StopReason.PREDICTION_INVALID for t in predicted)
    unsure = sum(t.stop is StopReason.UNSURE for t in predicted) + sum(
        turn.info.get("doubted") is True for t in predicted for turn in t.own_turns
    )
    every = [t for episodes in groups.values() for t in episodes]
    measured = RolloutStats(
        update,
        turns=sum(len(t.own_turns) for t in predicted) + invalid,
        rejected=invalid + unsure,
        inconsistent=sum(_inconsistent(t, rules) for t in predicted) if rules is not None else 0,
        groups=len(groups),
        drift_actions=_drift(log.actions, every, groups, [t.own_turns for t in every]),
        drift_observations=_drift(log.observations, every, groups, [_believed(t) for t in every]),
        real_solved=real[0],
        real_episodes=real[1],
        habits=dict(habits),
        diversity=log.action_stats.diversity(every),
        **dict(counts),
    )
    return measured, examples


def _inconsistent(t: Trajectory, rules: RuleSet) -> int:
    """Turns that contradict their dream, but for those whose answers were made useless on purpose, and rejected ones,
    whose pay the guard withheld."""
    kinds = contradictions_of(t, rules)  # none of a last turn that the guard rejected
    pairs = zip(kinds, t.own_turns, strict=False)
    return sum(kind is not None and not (turn.info.get(NOISE) or turn.info.get("doubted")) for kind, turn in pairs)


@dataclass(frozen=True, slots=True)
class _Payment:
    """A turn that a dream paid for."""

    task_id: str
    action: str
    unseen: bool | None  # ``None`` where the log has no episode of the task: dreams also begin in tasks only reset
    foreign: frozenset[str]  # words that no paying action of the task has
    contradicted: bool | None  # ``None`` where the log does not know the answer
    strange: bool


def _payments(t: Trajectory, log: LogReference) -> list[_Payment]:
    payments = []
    for k, key in enumerate(path(t)):
        action, reward, real = plain(t.turns[k].action), t.turns[k].reward or 0.0, log.best.get(key)
        if k >= t.prefix_turns and reward > RETURN_ROUNDING:
            paying = log.paying_words.get(t.task_id, set())
            payments.append(
                _Payment(
                    t.task_id,
                    action,
                    unseen=(t.task_id, action) not in log.paying if t.task_id in log.tasks else None,
                    foreign=frozenset(words(action)) - paying,
                    contradicted=None if real is None else reward > real + RETURN_ROUNDING,
                    strange=not log.usual(reward),
                )
            )
    return payments


def _half(checks: Sequence[bool]) -> bool:
    return bool(checks) and 2 * sum(checks) >= len(checks)


def _believed(t: Trajectory) -> Sequence[Turn]:
    """Turns without the one that the guard rejected: its words are no part of the dream."""
    return t.own_turns[:-1] if t.stop is StopReason.UNSURE else t.own_turns


def _drift(
    reference: WordReference,
    episodes: Sequence[Trajectory],
    groups: Mapping[str, Sequence[Trajectory]],
    turns: Sequence[Sequence[Turn]],
) -> float:
    if not episodes:
        return 0.0
    distance = reference.distance(turn for own in turns for turn in own)
    bound = reference.bound(len(groups), round(len(episodes) / len(groups)), round(mean(len(own) for own in turns)))
    return distance / bound if distance is not None and bound else 0.0


_NEARLY_ALL = 0.95
_CALL = re.compile(r"[A-Za-z_][\w.]*\s*\(.*\)", re.DOTALL)


class ActionStats:
    """How the agents of a log, without its failed episodes, act."""

    def __init__(self, log: Sequence[Trajectory]) -> None:
        actions = [turn.action for t in log for turn in t.turns]
        most = _NEARLY_ALL * len(actions)
        self.calls = bool(actions) and sum(bool(_CALL.search(action)) for action in actions) >= most
        self.phrases = bool(actions) and sum(len(words(action)) > 1 for action in actions) >= most
        self._solutions: dict[str, Counter[str]] = defaultdict(Counter)
        for t in log:
            if t.solved:
                self._solutions[t.task_id].update(plain(turn.action) for turn in t.turns)

    def is_silent(self, turns: Sequence[Turn]) -> bool:
        """Whether half or more of the actions are idle; of an episode without a turn nothing is known."""
        before, idle = None, 0
        for turn in turns:
            now = plain(turn.action), plain(turn.observation)
            few = len(words(turn.action)) < (2 if self.phrases else 1)
            idle += few or now == before or (self.calls and not _CALL.search(turn.action))
            before = now
        return bool(turns) and 2 * idle >= len(turns)

    def diversity(self, played: Sequence[Trajectory]) -> float:
        """Effective number of the episodes' actions over that of the log's solutions of the same tasks.

        1 where the log has no solution of these tasks, or nothing was played.
        """
        known: Counter[str] = Counter()
        for task in {t.task_id for t in played}:
            known.update(self._solutions.get(task, ()))
        counts = Counter(plain(turn.action) for t in played for turn in t.own_turns)
        return effective(counts) / effective(known) if known and counts else 1.0


def plain(action: str) -> str:
    """Spaces and capitals make no other action."""
    return " ".join(action.lower().split())


def effective(counts: Counter[str]) -> float:
    """``exp`` of Shannon's entropy (Hill, Ecology 54, 1973, 427-432, order 1): 3 for three equally frequent ones."""
    total = counts.total()
    return math.exp(-sum(n / total * math.log(n / total) for n in counts.values() if n))
