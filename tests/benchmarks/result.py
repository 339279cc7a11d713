"""The one form of all results: a JSON file per benchmark, whose rows ``table.py`` makes a table of.

A row says ``what`` was measured and its ``target``; ``ours`` and ``theirs`` are the rates of all rounds in ``unit``,
``ratio`` is the median over rounds and ``ratio_range`` its extremes. ``limit`` is what physics would allow in the same
unit (``limit_is`` in words) and ``of_limit`` the fraction of it that our median reaches; rows of dreams state the same
of a second, nearer limit: ``decode_limit``, ``decode_limit_is``, ``of_decode_limit``. A row without an opponent has no
ratio, and ``not_measured`` says why. ``stolen`` is the share of the machine's time that its host gave to others.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from policy.lm.compiled import native_attention
from tests.benchmarks.machine import StolenTime, hardware

_STOLEN = StolenTime()  # since the benchmark began


@dataclass(frozen=True, slots=True)
class Limit:
    """A rate that nothing on this machine can exceed, in the unit of its row, and what it assumes."""

    rate: float
    what: str


def table_row(
    what: str,
    target: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float] = (),
    *,
    limit: Limit | None = None,
    decode_limit: Limit | None = None,
    not_measured: str = "",
    **more: Any,
) -> dict[str, Any]:
    """One line of the table.

    Args:
        ours, theirs: rates of rounds, in pairs that followed each other; both may be missing.
        not_measured: why, where they are.
        more: further findings, kept beside the row.

    Raises:
        ValueError: a pair is incomplete.
    """
    found: dict[str, Any] = {"what": what, "target": target, "unit": unit, "ours": list(ours), "theirs": list(theirs)}
    found |= {"ratio": None, "ratio_range": None, **(ratios(ours, theirs) if theirs else {})}
    for name, given in (("limit", limit), ("decode_limit", decode_limit)):
        if given is not None:
            reached = statistics.median(ours) / given.rate if ours else None
            found |= {name: given.rate, f"{name}_is": given.what, f"of_{name}": reached}
    if not_measured:
        found["not_measured"] = not_measured
    return found | more


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The median over pairs of ours to theirs, and its range.

    Raises:
        ValueError: a pair is incomplete.
    """
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(each), "ratio_range": [min(each), max(each)]}


def write(
    name: str, rows: Sequence[Mapping[str, Any]], options: Any, *, device: str = "cpu", **more: Any
) -> dict[str, Any]:
    """Writes ``<options.out>/<name>.json`` and prints a line a row.

    Args:
        name: of the module that measured, from which its command follows.
        options: of ``measure.arguments``: ``out``, ``threads`` and ``quick``.
        more: settings and findings that belong to no row.
    """
    result = {
        "name": name,
        "rows": list(rows),
        "hardware": hardware(device),
        "threads": options.threads,
        "torch": torch.__version__,
        "compiled_attention": native_attention(torch.float32, 64, torch.device(device)) is not None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join([f"python -m tests.benchmarks.{name}", *sys.argv[1:]]),
        "quick": options.quick,
        "stolen": round(_STOLEN.share(), 3),
        **more,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for one in rows:
        ratio = "no ratio" if one["ratio"] is None else f"{one['ratio']:.2f}"
        print(f"{one['what']}: {ratio} (target {one['target']})", flush=True)
    return result
