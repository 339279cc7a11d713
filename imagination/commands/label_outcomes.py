"""Success that no record states: by a declared goal, or by a judge that is first measured on known outcomes."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from imagination.settings import UserError
from imagination.settings.data import ImportSettings
from real_envs.chat_server import UNREACHABLE
from real_envs.importers.drafts import LOG
from real_envs.importers.outcomes import LogJudge, Verdict
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.proportions import Proportion
from worldmodel.rewards import Goal

VERDICTS = "judge.jsonl"
BY = f"{LOG}judged_by"  # note of the last turn


@dataclass(slots=True)
class Agreement:
    """Verdicts beside outcomes that are known; failures are no verdicts and count in none of the shares."""

    counts: Counter[tuple[bool, bool]] = field(default_factory=Counter)  # by (verdict, outcome)
    failures: int = 0  # episodes without a verdict

    def add(self, verdict: bool | None, outcome: bool) -> None:
        if verdict is None:
            self.failures += 1
        else:
            self.counts[verdict, outcome] += 1

    def shares(self) -> dict[str, Proportion]:
        """Accuracy of all verdicts; precision and recall of "solved"."""
        true = self.counts[True, True]
        return {
            "accuracy": Proportion(true + self.counts[False, False], self.counts.total(), self.failures),
            "precision": Proportion(true, true + self.counts[True, False]),
            "recall": Proportion(true, true + self.counts[False, True]),
        }


class OutcomeLabels:
    """Labels episodes of unknown success. Without a goal and a judge nothing is labelled.

    Attributes:
        by: who labels, as the log keeps it; ``None``: nobody.
        held_back: episodes without an answer; they are not kept, so the next import asks again. ``reason`` is why.

    Raises:
        UserError: goal and judge are both there, or the judge lacks its model or key.
    """

    def __init__(self, settings: ImportSettings, folder: Path) -> None:
        self._goal: Goal | None = settings.goal if settings.goal.declared else None
        self._judge: LogJudge | None = None
        self._drawn: list[tuple[bytes, str]] = []  # a heap of the greatest hashes, with the episodes' ids
        self._known: dict[str, Trajectory] = {}  # by id
        self._most = settings.judge.checked
        self._agreement = Agreement()
        self._labels = [0, 0]  # not solved, solved
        self._unknown = 0  # without a verdict, kept as unknown
        self.held_back, self.reason = 0, ""
        if settings.judge.url:
            if self._goal is not None:
                raise UserError("imports.goal and imports.judge.url both decide success: declare one of them")
            server, asking = settings.judge.open("imports.judge"), settings.judge
            self._judge = LogJudge(server, folder / VERDICTS, at_once=asking.at_once, characters=asking.characters)
        self.by: str | None = f"judge {self._judge.model}" if self._judge is not None else None
        if self._goal is not None:
            self.by = f"goal {self._goal.observation}"

    def close(self) -> None:
        if self._judge is not None:
            self._judge.close()

    def offer(self, episode: Trajectory) -> None:
        """An episode of the files. Of those of known success ``checked`` are drawn, always the same ones."""
        if episode.success is None or episode.stop.is_failure or not episode.turns:
            return
        if episode.id in self._known or not self._most:
            return
        digest = hashlib.sha256(f"checked/{episode.id}".encode("utf-8", "replace")).digest()
        self._known[episode.id] = episode
        heapq.heappush(self._drawn, (digest, episode.id))
        if len(self._drawn) > self._most:
            del self._known[heapq.heappop(self._drawn)[1]]

    def check(self) -> None:
        """Measures the agreement on the drawn episodes. Raises ``UserError``: none of them got an answer."""
        known = [self._known[name] for _, name in sorted(self._drawn)]
        verdicts = self._verdicts([replace(episode, success=None) for episode in known])
        for episode, verdict in zip(known, verdicts, strict=True):
            self._agreement.add(verdict.success, bool(episode.success))
        if verdicts and all(verdict.failure == UNREACHABLE for verdict in verdicts):
            raise UserError(f"imports.judge: {verdicts[0].reason}")

    def label(self, episodes: Sequence[Trajectory]) -> Iterator[Trajectory]:
        """The episodes, those of unknown success with a label; those without an answer are left out."""
        unknown = []
        if self.by is not None:  # episodes that state neither success nor a reward
            whole = [e for e in episodes if e.turns and not e.stop.is_failure and e.success is None]
            unknown = [e for e in whole if all(turn.reward is None for turn in e.turns)]
        verdicts = {episode.id: verdict for episode, verdict in zip(unknown, self._verdicts(unknown), strict=True)}
        for episode in episodes:
            verdict = verdicts.get(episode.id)
            if verdict is None:
                yield episode
            elif verdict.success is not None:
                self._labels[verdict.success] += 1
                *before, last = episode.turns
                noted = replace(last, info={**last.info, BY: str(self.by)})
                yield replace(episode, success=verdict.success, turns=(*before, noted))
            elif verdict.failure == UNREACHABLE:
                self.held_back += 1
                self.reason = verdict.reason
            else:
                self._unknown += 1
                yield episode

    def to_json(self) -> dict[str, Any] | None:
        """Its part of ``coverage.json``."""
        if self.by is None:
            return None
        shares = {name: share.to_json() for name, share in self._agreement.shares().items()}
        counts = dict(self._judge.counts) if self._judge is not None else {}
        labels = {"solved": self._labels[True], "unsolved": self._labels[False], "unknown": self._unknown}
        return {"by": self.by, **labels, "held_back": self.held_back, **counts, **shares}

    def lines(self) -> list[str]:
        """Its lines of the report."""
        if self.by is None:
            return []
        lines = [f"success by {self.by}: {self._labels[True]} solved, {self._labels[False]} not"]
        if self._judge is not None:
            counts = self._judge.counts
            failed = ", ".join(f"{counts[kind]} {kind}" for kind in ("malformed", "refused", UNREACHABLE))
            lines.append(
                f"  asked {counts['asked']} times, {counts['known']} verdicts known from before; failures: {failed}"
            )
        if self._unknown:
            lines.append(f"  {self._unknown} episodes got no verdict: their success stays unknown")
        if self.held_back:
            lines.append(f"  {self.held_back} episodes got no answer and are not added: import again to ask again")
        shares = self._agreement.shares()
        if labelled := shares["accuracy"].n:
            cells = ", ".join(f"{name} {share.cell}" for name, share in shares.items())
            return [*lines, f"  against {labelled} episodes of known success: {cells}"]
        return [*lines, "  accuracy unknown: no episode of known success to check it against"]

    def _verdicts(self, episodes: Sequence[Trajectory]) -> list[Verdict]:
        if self._goal is not None:
            goal = self._goal
            return [Verdict(any(goal.met(e.start, e.turns[: k + 1]) for k in range(len(e.turns)))) for e in episodes]
        return self._judge.judge(episodes) if self._judge is not None and episodes else []
