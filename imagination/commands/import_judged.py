"""Success that no record states: by a declared goal, or by a judge that is first measured on known outcomes."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from imagination.settings import UserError
from imagination.settings.data import ImportSettings
from real_envs.chat_server import UNREACHABLE
from real_envs.importers.drafts import LOG
from real_envs.importers.judge import LogJudge, Verdict
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.proportions import Proportion
from worldmodel.goal import Goal

VERDICTS = "judge.jsonl"
BY = f"{LOG}judged_by"  # note of the last turn


def is_unknown(episode: Trajectory) -> bool:
    """Whether nothing says if the episode was solved: no success, no reward."""
    paid = any(turn.reward is not None for turn in episode.turns)
    return episode.success is None and not paid and not episode.stop.is_failure and bool(episode.turns)


@dataclass(slots=True)
class Agreement:
    """Verdicts beside outcomes that are known; failures are no verdicts and count in none of the shares.

    Attributes:
        counts: by (verdict, outcome).
        failures: episodes without a verdict.
    """

    counts: dict[tuple[bool, bool], int] = field(default_factory=dict)
    failures: int = 0

    def add(self, verdict: bool | None, outcome: bool) -> None:
        if verdict is None:
            self.failures += 1
        else:
            self.counts[verdict, outcome] = self.counts.get((verdict, outcome), 0) + 1

    def shares(self) -> dict[str, Proportion]:
        """``accuracy`` of all verdicts, ``precision`` of those that say solved, ``recall``: of the solved, found so."""
        right, false, missed = (self.counts.get(key, 0) for key in ((True, True), (True, False), (False, True)))
        rejected, n = self.counts.get((False, False), 0), sum(self.counts.values())
        return {
            "accuracy": Proportion(right + rejected, n, self.failures),
            "precision": Proportion(right, right + false),
            "recall": Proportion(right, right + missed),
        }


class Outcomes:
    """Decides what is unknown. Without goal and judge nothing is decided.

    Raises:
        UserError: goal and judge are both there, or the judge lacks its model or key.
    """

    def __init__(self, settings: ImportSettings, folder: Path) -> None:
        asked = settings.judge
        self._goal: Goal | None = settings.goal if settings.goal.declared else None
        self._judge: LogJudge | None = None
        self._drawn: list[tuple[bytes, str]] = []  # a heap of those with the greatest hashes, with their ids
        self._known: dict[str, Trajectory] = {}  # these episodes
        self._most = asked.checked
        self.agreement = Agreement()
        self.decided = [0, 0]  # not solved, solved
        self.left = 0  # without a verdict, kept as unknown
        self.reason = ""  # why, of the last of them
        self.held_back = 0  # without an answer, not kept: the next import asks again
        if asked.url:
            if self._goal is not None:
                raise UserError("imports.goal and imports.judge.url both decide success: declare one of them")
            server = asked.open("imports.judge")
            self._judge = LogJudge(server, folder / VERDICTS, at_once=asked.at_once, characters=asked.characters)

    @property
    def by(self) -> str | None:
        """Who decides, as the log keeps it."""
        if self._goal is not None:
            return f"goal {self._goal.observation}"
        return f"judge {self._judge.model}" if self._judge is not None else None

    @property
    def active(self) -> bool:
        return self.by is not None

    def offer(self, episode: Trajectory) -> None:
        """An episode of the files, perhaps of known success: ``checked`` of these are drawn, always the same ones."""
        if not self.active or episode.success is None or episode.stop.is_failure or not episode.turns:
            return
        if episode.id in self._known or not self._most:
            return
        digest = hashlib.sha256(f"checked/{episode.id}".encode("utf-8", "replace")).digest()
        self._known[episode.id] = episode
        heapq.heappush(self._drawn, (digest, episode.id))
        if len(self._drawn) > self._most:
            del self._known[heapq.heappop(self._drawn)[1]]

    def check(self) -> None:
        """Measures the agreement.

        Raises:
            UserError: none of the known episodes got an answer.
        """
        known = [self._known[name] for _, name in sorted(self._drawn)]
        verdicts = self._verdicts([replace(episode, success=None) for episode in known])
        for episode, verdict in zip(known, verdicts, strict=True):
            self.agreement.add(verdict.success, bool(episode.success))
        if verdicts and all(verdict.failure == UNREACHABLE for verdict in verdicts):
            raise UserError(f"imports.judge: {verdicts[0].reason}")

    def decide(self, episodes: Sequence[Trajectory]) -> Iterator[Trajectory]:
        """The episodes, those of unknown success with what was decided; those that nobody answered for are left out."""
        unknown = [episode for episode in episodes if self.active and is_unknown(episode)]
        found = {episode.id: verdict for episode, verdict in zip(unknown, self._verdicts(unknown), strict=True)}
        for episode in episodes:
            verdict = found.get(episode.id)
            if verdict is None:
                yield episode
            elif verdict.success is not None:
                self.decided[verdict.success] += 1
                *before, last = episode.turns
                noted = replace(last, info={**last.info, BY: str(self.by)})
                yield replace(episode, success=verdict.success, turns=(*before, noted))
            elif verdict.failure == UNREACHABLE:
                self.held_back += 1
                self.reason = verdict.reason
            else:
                self.left += 1
                yield episode

    def to_json(self) -> dict[str, Any] | None:
        """What ``coverage.json`` has of it; ``None`` where nobody decides."""
        if not self.active:
            return None
        shares = {name: share.to_json() for name, share in self.agreement.shares().items()}
        counts = dict(self._judge.counts) if self._judge is not None else {}
        decided = {"solved": self.decided[True], "unsolved": self.decided[False]}
        return {"by": self.by, **decided, "unknown": self.left, "held_back": self.held_back, **counts, **shares}

    def told(self) -> Iterator[str]:
        """Its lines of the report."""
        if not self.active:
            return
        yield f"success by {self.by}: {self.decided[True]} solved, {self.decided[False]} not"
        if self._judge is not None:
            counts = self._judge.counts
            failed = ", ".join(f"{counts[kind]} {kind}" for kind in ("malformed", "refused", UNREACHABLE))
            yield f"  asked {counts['asked']} times, {counts['known']} verdicts known from before; failures: {failed}"
        if self.left:
            yield f"  {self.left} episodes got no verdict: their success stays unknown"
        if self.held_back:
            yield f"  {self.held_back} episodes got no answer and are not added: import again to ask again"
        shares = self.agreement.shares()
        if shares["accuracy"].n:
            said = ", ".join(f"{name} {share.cell}" for name, share in shares.items())
            yield f"  against {shares['accuracy'].n} episodes of known success: {said}"
        else:
            yield "  no episode of known success to check it against: nobody knows how often it is right"

    def close(self) -> None:
        if self._judge is not None:
            self._judge.close()

    def _verdicts(self, episodes: Sequence[Trajectory]) -> list[Verdict]:
        if self._goal is not None:
            goal = self._goal
            return [Verdict(any(goal.met(e.start, e.turns[: k + 1]) for k in range(len(e.turns)))) for e in episodes]
        return self._judge.judge(episodes) if self._judge is not None and episodes else []
