"""Dreams beside reality: a dreamed episode and its twin, the same actions replayed in the real game.

Both start alike and are given the same actions, so the first turn at which they answer differently is the world
model's first mistake. What comes after it is not comparable: the two worlds are then in different states. The report's
few examples need no more than that; ``alignment`` also grades later turns and tells wording from content, and
``worldmodel.evaluation.drift`` asks for the exact text along real episodes. All three call rewards the same alike.

Example, rows of ``rollouts.jsonl``::

    {"id": "d7", "source": "dream", "turns": [...], ...}
    {"id": "r7", "source": "real", "which": "replay", "twin_of": "d7", "turns": [...], ...}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from imagination.evaluation.compare.alignment import same_reward, same_words
from real_envs.trajectory import StopReason

Row = Mapping[str, Any]  # one line of rollouts.jsonl


class Difference(StrEnum):
    """In what the two answers to the same action differ first; words before reward before end."""

    WORDS = "words"
    REWARD = "reward"
    END = "end"


@dataclass(frozen=True, slots=True)
class Twin:
    """A dream, its replay, and where they part.

    Attributes:
        dream, real: the two rows of ``rollouts.jsonl``.
        parts_at: index of the first turn answered differently; ``None`` if there is none.
        difference: in what it differs; ``None`` if nothing does.
    """

    dream: Row
    real: Row
    parts_at: int | None
    difference: Difference | None

    @property
    def length(self) -> int:
        """Turns that were played in both."""
        return min(len(self.dream["turns"]), len(self.real["turns"]))

    @property
    def false_success(self) -> bool:
        """The dream was solved, the game was not: what a policy must not learn from."""
        return bool(self.dream.get("solved")) and not self.real.get("solved")


def find_twins(rollouts: Iterable[Row]) -> list[Twin]:
    """Pairs every replay with its dream. A replay that crashed says nothing and is left out."""
    rows = list(rollouts)
    dreams = {row["id"]: row for row in rows if row.get("source") == "dream"}
    twins = []
    for real in rows:
        dream = dreams.get(real.get("twin_of"))
        if dream is None or StopReason(real["stop"]).is_failure:
            continue
        twins.append(Twin(dream, real, *first_difference(dream["turns"], real["turns"])))
    return twins


def first_difference(dream: Sequence[Row], real: Sequence[Row]) -> tuple[int | None, Difference | None]:
    """Index and kind of the first turn answered differently, ``(None, None)`` if all that both played agree.

    White space is no difference; a reward that nobody measured agrees with any.
    """
    for k, (a, b) in enumerate(zip(dream, real, strict=False)):  # the dream may have been cut where the game went on
        if not same_words(a["observation"], b["observation"]):
            return k, Difference.WORDS
        if not same_reward(a["reward"], b["reward"]):
            return k, Difference.REWARD
        if a["terminated"] != b["terminated"]:
            return k, Difference.END
    return None, None


def still_true(twins: Sequence[Twin]) -> list[tuple[int, float, int]]:
    """``(k, share of dreams still true to reality after k turns, dreams at risk)``, starting with ``(0, 1.0, n)``.

    Turns copied from a log (``prefix_turns``) were not dreamed; k counts dreamed turns. See ``survival``.
    """
    lives = []  # (dreamed turns until it parted or ended, whether it parted)
    for twin in twins:
        prefix = int(twin.dream.get("prefix_turns") or 0)
        if twin.parts_at is None:
            lives.append((max(twin.length - prefix, 0), False))
        else:
            lives.append((max(twin.parts_at - prefix, 0) + 1, True))
    return survival(lives)


def survival(lives: Sequence[tuple[int, bool]]) -> list[tuple[int, float, int]]:
    """``(k, share of dreams still true to reality after k turns, dreams at risk)``, starting with ``(0, 1.0, n)``.

    Kaplan and Meier's product, JASA 53 (1958) 457-481: a dream that ended without parting leaves the count at its end
    instead of pulling the curve up or down.

    Args:
        lives: of each dream, the turns until it parted (that one included) or ended, and whether it parted.
    """
    curve, share = [(0, 1.0, len(lives))], 1.0
    for k in range(1, max((turns for turns, _ in lives), default=0) + 1):
        at_risk = sum(turns >= k for turns, _ in lives)
        share *= 1 - sum(parted and turns == k for turns, parted in lives) / at_risk
        curve.append((k, share, at_risk))
    return curve if lives else []
