"""What the parts of ``make logs-table`` have found, as Markdown: an audit a log, and the forecast beside what came.

A part is what its run folder holds; what it does not hold yet is a dash. Pure functions but for ``read_parts``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from imagination.evaluation.verdict import told
from tests.benchmarks.fidelity_table import correlated, correlation
from worldmodel.evaluation.proportions import number

REASON = "reason.txt"  # why a part could not be made
WHOLE = 100  # per cent of the training tasks
TURNS = ("1", "4", "8")  # of an open-loop dream
DASH = "–"


@dataclass(frozen=True, slots=True)
class Part:
    """One log, one share of its training tasks, one seed.

    Attributes:
        share: per cent of the training tasks.
        coverage: ``coverage.json`` of the share; ``None`` where it is not there.
        measured: ``world_model.heldout_tasks`` of ``summary.json``, likewise.
        audit: ``audit.json``, likewise; only of all training tasks.
        reason: why the part could not be made; empty where it could.
    """

    log: str
    share: int
    seed: int
    coverage: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    audit: Mapping[str, Any] | None = None
    reason: str = ""

    @property
    def foretold(self) -> float | None:
        """Share of turns that looking up another task answers rightly; ``None`` where nothing could be asked."""
        return self.shared["exact"]["value"] if self.shared else None

    @property
    def right(self) -> float | None:
        """Exact match of the world model on held-out tasks."""
        return None if self.measured is None else self.measured["exact_match"]

    @property
    def shared(self) -> Mapping[str, Any]:
        """What the import says of looking up; empty where it says nothing."""
        return (self.coverage or {}).get("looked_up") or {}

    def to_json(self) -> dict[str, Any]:
        """All of it in plain values, of the audit what the table shows."""
        verdict = None if self.audit is None else self.audit["verdict"]
        return {**asdict(self), "audit": verdict, "foretold": self.foretold, "right": self.right}


def read_parts(out: Path, order: Sequence[str]) -> list[Part]:
    """All parts that are there, in order of logs, shares and seeds."""
    parts = []
    for folder in out.glob("*/share-*/seed-*"):
        share, seed = (int(name.rpartition("-")[2]) for name in (folder.parent.name, folder.name))
        summary = _json(folder / "summary.json") or {}
        reason = (folder / REASON).read_text(encoding="utf-8").strip() if (folder / REASON).exists() else ""
        parts.append(
            Part(
                folder.parent.parent.name,
                share,
                seed,
                _json(folder / "coverage.json"),
                summary.get("world_model", {}).get("heldout_tasks"),
                _json(folder / "audit.json"),
                reason,
            )
        )
    return sorted(parts, key=lambda part: (order.index(part.log), -part.share, part.seed))


def _json(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def table(parts: Sequence[Part]) -> str:
    """The audits, what they say, the forecasts, and how well these rank."""
    return "\n".join([*_audits(parts), "", *_verdicts(parts), "", *_forecasts(parts), "", *_ranks(parts)]) + "\n"


def _audits(parts: Sequence[Part]) -> list[str]:
    head = ["log", "seed", "held-out tasks", "exact", "text", "token F1", "reward precision", "reward recall"]
    head += [f"open loop, turn {k}" for k in TURNS] + ["verdict"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for part in (part for part in parts if part.share == WHOLE):
        lines.append(f"| {part.log} | {part.seed} | {' | '.join(_audit_cells(part))} |")
    return lines


def _audit_cells(part: Part) -> list[str]:
    if part.audit is None:
        return [DASH] * (6 + len(TURNS)) + [part.reason or DASH]
    held = part.audit["sets"]["held_out"]
    found = [held["exact"], held["text"], held["token_f1"], held["reward"]["precision"], held["reward"]["recall"]]
    found += [held["drift"]["exact_at"].get(k) for k in TURNS]
    return [str(held["tasks"]), *(DASH if one is None else told(one) for one in found), part.audit["verdict"]["trust"]]


def _verdicts(parts: Sequence[Part]) -> list[str]:
    return [
        f"- {part.log}, seed {part.seed}: {' '.join(part.audit['verdict']['sentences'])}"
        for part in parts
        if part.audit is not None
    ]


def _forecasts(parts: Sequence[Part]) -> list[str]:
    head = ["log", "share", "seed", "training tasks", "training turns", "looked up", "exact on held-out tasks"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for part in parts:
        shared, held = part.shared, part.measured
        sizes = [f"{shared[key]:,}" for key in ("tasks", "turns")] if shared else [DASH, DASH]
        cells = [part.log, f"{part.share} %", str(part.seed), *sizes, told(shared["exact"]) if shared else DASH]
        cells.append(f"{number(part.right)}, n={held['n']:,}" if held else part.reason or DASH)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ranks(parts: Sequence[Part]) -> list[str]:
    """How well the forecast, and the number of training turns alone, rank the parts by what was measured."""
    by: dict[str, Callable[[Part], float | None]] = {
        "looked up": lambda part: part.foretold,
        "number of training turns": lambda part: part.shared.get("turns"),
    }
    head = ["ranked by", "Spearman with exact match, over parts", "the same, interval over logs", "mean distance"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for title, value in by.items():
        known = [(part.log, value(part), part.right) for part in parts]
        there = [(log, said, right) for log, said, right in known if said is not None and right is not None]
        pairs = [(said, right) for _, said, right in there]
        over_logs = correlation(pairs, cluster=[log for log, _, _ in there])
        apart = sum(abs(said - right) for said, right in pairs) / len(pairs) if pairs else None
        distance = DASH if apart is None or title != "looked up" else f"{apart:.2f}"
        cells = [correlated(correlation(pairs)), correlated(over_logs), distance]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines
