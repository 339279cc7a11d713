"""The form of all results of speed, and the table of them.

``python -m tests.benchmarks.table [folder]`` reads every JSON of ``outputs/bench``, writes ``table.md`` beside them and
prints it.

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
from tests.benchmarks.machine import MUCH_STOLEN, StolenTime, hardware

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


def write(name: str, rows: Sequence[Mapping[str, Any]], options: Any, **more: Any) -> dict[str, Any]:
    """Writes ``<options.out>/<name>.json`` and prints a line a row.

    Args:
        name: of the module that measured, from which its command follows.
        options: of ``measure.arguments``: ``out``, ``threads`` and ``quick``.
        more: settings and findings that belong to no row.
    """
    result = {
        "name": name,
        "rows": list(rows),
        "hardware": hardware(),
        "threads": options.threads,
        "torch": torch.__version__,
        "compiled_attention": native_attention(torch.float32, 64, torch.device("cpu")) is not None,
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


_HEAD = "| what | target | ratio [range] | ours | theirs | unit | limit | of limit |\n|---|---|---|---|---|---|---|---|"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a table for each machine, with hardware and dates on top and below what the limits assume."""
    machines: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for result in results:
        machines.setdefault((result["hardware"], result["threads"], result["torch"]), []).append(result)
    parts = ["# Speed"]
    for (machine, threads, version), found in machines.items():
        dates = sorted({result["date"] for result in found})
        parts.append(f"{machine}; {threads} threads; torch {version}; {' to '.join(dates[:1] + dates[1:][-1:])}")
        if any(result["quick"] for result in found):
            parts.append("**Some of it was run with --quick, to see that it runs: its numbers mean nothing.**")
        stolen = max(result.get("stolen", 0.0) for result in found)
        if stolen > MUCH_STOLEN:
            parts.append(f"**Other virtual machines took up to {stolen:.0%} of this one's time: measure again.**")
        rows = [row for result in found for row in result["rows"]]
        parts.append("\n".join([_HEAD, *map(_line, rows)]))
        limits = [row[name] for row in rows for name in ("limit_is", "decode_limit_is") if name in row]
        parts += ["\n".join(f"- {row['what']}: {row['note']}" for row in rows if "note" in row)]
        parts.append("Limits:\n\n" + "\n".join(f"- {one}" for one in dict.fromkeys(limits)))
    return "\n\n".join(parts) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    ratio = "-"
    if row["ratio"] is not None:
        ratio = f"{row['ratio']:.2f} [{row['ratio_range'][0]:.2f}, {row['ratio_range'][1]:.2f}]"
    if "not_measured" in row:
        ratio = f"not measured: {row['not_measured']}"
    names = [name for name in ("limit", "decode_limit") if name in row]
    limits = " / ".join(_number(row[name]) for name in names)
    reached = " / ".join(f"{row[f'of_{name}']:.1%}" for name in names if row[f"of_{name}"] is not None)
    rates = (_number(statistics.median(row[side])) if row[side] else "-" for side in ("ours", "theirs"))
    cells = (row["what"], row["target"], ratio, *rates, row["unit"], limits or "-", reached or "-")
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/bench")
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not results:
        sys.exit(f"{folder} holds no results yet; `make bench` measures some")
    text = table(results)
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
