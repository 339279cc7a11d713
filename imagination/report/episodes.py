"""Which episodes the report shows: dreams beside reality, and what the policy did before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from imagination.evaluation.compare.alignment import AlignedTurn, ReplayedPair, Row, TurnClass, word_diff
from worldmodel.evaluation.proportions import count

TASKS = 3  # of which real episodes are shown, before and after
EARLIER = 3  # agreeing turns shown before the first difference; twice as many and more fold
LATER = 2  # turns shown after it; more than these fold
PARTING = {
    TurnClass.STATE: "here they part, the words differ",
    TurnClass.WORDING: "here they part, the words differ",
    TurnClass.REWARD: "here they part, with the same words and a different reward",
    TurnClass.END: "here they part, with the same words, but only one of them ends",
}


def pair_view(kind: str, pair: ReplayedPair) -> dict[str, Any]:
    """A dream and its replay as the page shows them; long stretches away from the first difference fold."""
    alignment, prefix = pair.alignment, int(pair.dream.get("prefix_turns") or 0)
    first, turns = alignment.first, [_turn(k, turn, alignment.first, prefix) for k, turn in enumerate(alignment.turns)]
    agreed = len(turns) if first is None else first
    start = agreed - EARLIER if agreed > 2 * EARLIER else 0
    end = agreed + 1 if len(turns) - agreed - 1 > LATER else len(turns)
    return {
        "kind": kind,
        "dream": pair.dream,
        "real": pair.real,
        "where": "never parts" if first is None else f"parts at turn {first + 1} of {alignment.compared}",
        "parts": [
            (f"{count(start, 'turn')} on which they agree", turns[:start]),
            ("", turns[start:end]),
            (f"{count(len(turns) - end, 'later turn')}, in different states", turns[end:]),
        ],
    }


def _turn(k: int, turn: AlignedTurn, first: int | None, prefix: int) -> dict[str, Any]:
    alone = turn.kind is TurnClass.ALONE
    agree = not alone and (first is None or k < first)
    texts = [side.observation if side else "" for side in (turn.dream, turn.real)]
    # where one world is over, there is nothing to compare the words with
    pieces = ([(texts[0], False)], [(texts[1], False)]) if alone or agree else word_diff(*texts)
    info: Mapping[str, object] = turn.dream.info if turn.dream else {}
    confidence, thought = info.get("confidence"), info.get("reasoning")
    logged = k < prefix
    return {
        "number": k + 1,
        "state": "agree" if agree else "first" if k == first else "after",
        "parting": PARTING[TurnClass.WORDING if TurnClass.WORDING in turn.differs else turn.kind] if k == first else "",
        "action": turn.action,
        "dream": turn.dream,
        "real": turn.real,
        "pieces": pieces,
        "logged": logged,
        "confidence": 100 * min(max(float(confidence), 0.0), 1.0) if isinstance(confidence, int | float) else None,
        "thought": thought if isinstance(thought, str) and not logged else "",
    }


def chosen_episodes(rollouts: Sequence[Row]) -> list[Row]:
    """A few tasks as the policy played them for real before and after: one gained, one lost, one unsolved, if any."""
    played: dict[tuple[str, str], Row] = {}
    for row in rollouts:
        if row.get("source") == "real" and row.get("which") in ("before", "after"):
            played.setdefault((str(row.get("task_id")), row["which"]), row)
    by_change: dict[tuple[bool, bool], list[Row]] = {}
    for (task, which), row in played.items():
        if which == "after" and (before := played.get((task, "before"))):
            by_change.setdefault((bool(before.get("solved")), bool(row.get("solved"))), [before, row])
    order = [(False, True), (True, False), (False, False), (True, True)]
    pairs = [by_change[change] for change in order if change in by_change][:TASKS]
    return [row for pair in pairs for row in pair] or list(played.values())[:TASKS]  # a partial run: what there is


def choose(pairs: Sequence[ReplayedPair], limit: int = 4) -> list[tuple[str, ReplayedPair]]:
    """A few pairs, one for each kind that there is, with the kind in words. Order and choice are deterministic."""
    earliest = sorted(
        (p for p in pairs if p.alignment.first is not None), key=lambda p: (p.alignment.first or 0, str(p.dream["id"]))
    )
    latest = sorted(earliest, key=lambda p: -(p.alignment.first or 0))
    true = [p for p in pairs if p.alignment.first is None]
    kinds: list[tuple[str, list[ReplayedPair]]] = [
        ("The dream was solved and the game was not", [p for p in pairs if p.false_success]),
        ("Never parted, and solved in both", [p for p in true if p.dream.get("solved") and p.real.get("solved")]),
        ("Parted earliest", earliest),
        ("Parted latest", latest),
        ("Never parted", sorted(true, key=lambda p: (-p.alignment.compared, str(p.dream["id"])))),
    ]
    chosen: dict[str, tuple[str, ReplayedPair]] = {}
    for kind, candidates in kinds:
        fresh = [p for p in candidates if p.dream["id"] not in chosen]
        if fresh and len(chosen) < limit:
            chosen[fresh[0].dream["id"]] = (kind, fresh[0])
    return list(chosen.values())
