"""All results as one table: reads every JSON of ``outputs/bench``, writes ``table.md`` beside them and prints it.

python -m tests.benchmarks.table [folder]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import MUCH_STOLEN

_HEAD = "| what | target | ratio [range] | ours | theirs | unit | limit | of limit |\n|---|---|---|---|---|---|---|---|"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a table for each machine, with hardware and dates on top and below what the limits assume."""
    machines: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for result in results:
        machines.setdefault((result["hardware"], result["threads"], result["torch"]), []).append(result)
    parts = ["# Speed"]
    for (hardware, threads, torch), found in machines.items():
        dates = sorted({result["date"] for result in found})
        parts.append(f"{hardware}; {threads} threads; torch {torch}; {' to '.join(dates[:1] + dates[1:][-1:])}")
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
        sys.exit(f"{folder} holds no results yet; `make bench` or `make bench-gpu` measures some")
    text = table(results)
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
