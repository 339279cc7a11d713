"""Which tasks of a log are held out: a share of them, always the same ones, and near-duplicates never on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

TRAIN, HELDOUT = "train", "heldout"


def heldout_tasks(
    tasks: Collection[str],
    share: float,
    groups: Sequence[frozenset[str]] = (),
    before: Mapping[str, str] | None = None,
) -> frozenset[str]:
    """About ``share`` of the tasks, always the same ones: those with the least hashes.

    At least one of two or more, and never all; none where the share is 0. Tasks of a group stay together, so there may
    be more or fewer than the share says. Earlier splits stand: a new task goes where its group is, and into training
    where its group is on both sides already. A group that is so large that the others could not make up the share is
    none: its tasks are split one by one.

    Args:
        tasks: new ones, to be split.
        groups: tasks that begin nearly alike (``similar``), earlier ones among them.
        before: the split of earlier tasks.
    """
    before = before or {}
    new = frozenset(tasks)
    held: set[str] = set()
    alone = set(new)
    free: list[frozenset[str]] = []
    for group in groups:
        ours, sides = group & new, {before[task] for task in group if task in before}
        alone -= ours
        if sides == {HELDOUT} and share > 0:
            held |= ours
        elif not sides and ours:
            free.append(frozenset(ours))
    free += [frozenset((task,)) for task in alone]
    count = sum(map(len, free))
    wanted = min(max(1, round(share * count)), count - 1) if share > 0 and count > 1 else 0
    units: list[frozenset[str]] = []
    for group in free:
        units += [frozenset((task,)) for task in group] if len(group) > max(wanted, count - wanted) else [group]
    taken: set[str] = set()
    for unit in sorted(units, key=_rank):
        if len(taken) + len(unit) <= wanted:
            taken |= unit
    if wanted and not taken:  # every group is larger than the share
        taken |= min(units, key=lambda unit: (len(unit), _rank(unit)))
    return frozenset(held | taken)


def leaks(held: Collection[str], groups: Sequence[frozenset[str]]) -> list[str]:
    """The held-out tasks that have a near-duplicate among the others."""
    out = frozenset(held)
    return sorted(task for group in groups if len(group - out) for task in group & out)


def _rank(unit: Collection[str]) -> bytes:
    return hashlib.sha256(f"heldout/{min(unit)}".encode("utf-8", "replace")).digest()
