"""Does the policy still act? In faithful worlds a policy may learn to do nothing: no action, no mistake.

An action is *idle* where it says nothing, or the same as the one before it with the same answer. Where nearly all of a
log's actions are calls, such as ``click('a12')``, one that is no call is idle; where nearly all have several words, so
is a single word.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from imagination.evaluation.monitors.word_drift import words
from real_envs.trajectory import Trajectory, Turn

_NEARLY_ALL = 0.95
_CALL = re.compile(r"[A-Za-z_][\w.]*\s*\(.*\)", re.DOTALL)


class Speech:
    """How the agents of a log act.

    Args:
        log: real episodes, without failed ones.
    """

    def __init__(self, log: Sequence[Trajectory]) -> None:
        said = [turn.action for t in log for turn in t.turns]
        most = _NEARLY_ALL * len(said)
        self.calls = bool(said) and sum(bool(_CALL.search(action)) for action in said) >= most
        self.phrases = bool(said) and sum(len(words(action)) > 1 for action in said) >= most
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

        The effective number is ``exp(H)`` with Shannon's entropy H of the actions as they were said: 5 for five that
        are equally frequent. 1 where the log has no solution of these tasks, or nothing was played.
        """
        known: Counter[str] = Counter()
        for task in {t.task_id for t in played}:
            known.update(self._solutions.get(task, ()))
        said = Counter(plain(turn.action) for t in played for turn in t.own_turns)
        return effective(said) / effective(known) if known and said else 1.0


def plain(action: str) -> str:
    """Spaces and capitals make no other action."""
    return " ".join(action.lower().split())


def effective(counts: Counter[str]) -> float:
    """``exp`` of Shannon's entropy in nats (Hill, Ecology 54, 1973, 427-432, order 1).

    Example::

        effective(Counter(a=2, b=2, c=2))  # 3
    """
    total = counts.total()
    return math.exp(-sum(n / total * math.log(n / total) for n in counts.values() if n))
