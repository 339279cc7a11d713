"""Useless answers in dreams: of searches that find nothing of use, a share that may grow over training.

As in ZeroSearch (Sun et al. 2025, arXiv 2505.04588), where a model that plays the search engine writes useless
documents more and more often. Here they are answers that the log has to such actions in other tasks: real texts, at no
cost.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from real_envs.errors import UserError
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory

NOISE = "noise"  # the key of ``Task.spec`` with the share, which only training sets: what judges dreams has none


class UselessAnswers:
    """Answers of a log to the actions that match a pattern, none of which paid or ended anything.

    Raises:
        UserError: the log has none.
    """

    def __init__(self, log: Sequence[Trajectory], pattern: str) -> None:
        self._matches = re.compile(pattern).search
        turns = ((t.start, u) for t in log for u in t.turns if u.known and not u.terminated and not u.reward)
        self._answers = list(dict.fromkeys((s, turn.observation) for s, turn in turns if self._matches(turn.action)))
        if not self._answers:
            raise UserError(f"dream.noise_actions={pattern} matches no action of the log: write it as its actions are")

    def instead(self, start: str, action: str, share: float, seed: int) -> str | None:
        """The answer of another task, at a probability of ``share``; ``None`` leaves the answer as it is.

        Args:
            start: the text that the episode begins with.
            seed: of the episode: whoever repeats an action in it gets the same useless answer, as from a real engine.
        """
        if not share or not self._matches(action):
            return None
        rng = random.Random(derive_seed(f"noise/{action}", seed))
        if rng.random() >= share:
            return None
        first = rng.randrange(len(self._answers))
        around = (self._answers[(first + k) % len(self._answers)] for k in range(len(self._answers)))
        return next((text for other, text in around if other != start), None)
