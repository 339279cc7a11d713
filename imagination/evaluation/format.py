"""Numbers as words: rates, intervals and counts, the same in terminals, pages and verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def number(value: float | None, digits: int = 2) -> str:
    """``0.31``; a dash where there is nothing, which is not zero."""
    return "–" if value is None else f"{value:.{digits}f}"


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")


def interval(ci95: Sequence[float] | None, *, with_sign: bool = False) -> str:
    """``[0.20, 0.44]``; empty where there is none."""
    return "" if ci95 is None else "[{}, {}]".format(*(signed(x) if with_sign else number(x) for x in ci95))


def count(n: int | None, noun: str) -> str:
    """``0 real steps``, ``1 real step``, ``12,400 real steps``."""
    return f"an unknown number of {noun}s" if n is None else f"{n:,} {noun}{'' if n == 1 else 's'}"


def proportion(data: Mapping[str, Any] | None) -> str:
    """``0.31 [0.21, 0.43]``."""
    if data is None or data["success"] is None:
        return "–"
    return f"{number(data['success'])} {interval(data['ci95'])}".rstrip()
