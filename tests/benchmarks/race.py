"""Who dreams how fast: competitors play the same dreams in processes of their own, in turns."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from policy.lm.engine import EngineUnavailable
from tests.benchmarks import rollouts_worker
from tests.benchmarks.dreaming import Shape, decode_turns, turn_operations
from tests.benchmarks.measure import run_worker
from tests.benchmarks.table import table_row


@dataclass(frozen=True)
class Side:
    """A competitor: an engine in the Python that has it; ``eager`` is for vLLM."""

    engine: str
    dtype: str = "float32"
    python: Path | str = sys.executable
    eager: bool = True


class Race:
    """Turns per second of several sides.

    Args:
        shape: of models and dreams.
        folder: for what processes exchange.
        threads: of torch, for all sides.
        device: cpu or cuda.
        isolated: false plays in this process, which is quicker and less fair.

    Attributes:
        rates: turns per second of each side, dream by dream.
        missing: why a side has none.
        tried: turns per second of a side's ways to run, or why one does not.
    """

    def __init__(self, shape: Shape, folder: Path, threads: int, device: str = "cpu", isolated: bool = True) -> None:
        self.shape, self.folder, self.threads, self.device, self.isolated = shape, folder, threads, device, isolated
        self.sides: dict[str, Side] = {}
        self.rates: dict[str, list[float]] = {}
        self.missing: dict[str, str] = {}
        self.tried: dict[str, dict[str, float | str]] = {}

    def enter(self, name: str, *ways: Side) -> None:
        """A side takes part; where it can run in several ways, in the one that a first dream shows to be fastest."""
        if not Path(ways[0].python).exists():
            self.missing[name] = f"{ways[0].python} is not there; the Makefile makes it"
            return
        found: dict[str, float | str] = {}
        speed: dict[Side, float] = {ways[0]: 0.0} if len(ways) == 1 else {}
        for way in ways if len(ways) > 1 else ():
            label = "eager" if way.eager else "compiled"
            try:
                speed[way] = found[label] = self._play(way)["turns/s"][0]
            except (RuntimeError, EngineUnavailable) as error:  # compiling asks for more than running
                found[label] = self.missing[name] = _reason(error)
        if speed:
            self.missing.pop(name, None)
            self.sides[name], self.tried[name] = max(speed, key=lambda way: speed[way]), found

    def run(self, rounds: int, dreams: int = 1) -> None:
        """Plays ``dreams`` in a row with each side, ``rounds`` times; who goes first changes.

        A side that vLLM cannot play is left out, and the reason kept.
        """
        for k in range(rounds):
            for name, side in list(self.sides.items())[:: 1 if k % 2 == 0 else -1]:
                try:
                    rates = self._play(side, dreams)["turns/s"]
                except (RuntimeError, EngineUnavailable) as error:
                    if side.engine != "vllm":
                        raise
                    self.missing[name] = _reason(error)
                    del self.sides[name]
                    self.rates.pop(name, None)
                    continue
                self.rates.setdefault(name, []).extend(rates)
                print(f"{name}: {', '.join(f'{rate:.1f}' for rate in rates)} turns/s", flush=True)

    def row(self, what: str, target: str, ours: str, theirs: str, limits: dict[str, Any]) -> dict[str, Any]:
        """One side against another, by their names; ``limits`` come from ``dream_limits``."""
        mine, others = (self.rates.get(name, []) for name in (ours, theirs))
        return table_row(what, target, "turns/s", mine, others, not_measured=self.missing.get(theirs, ""), **limits)

    def long_row(
        self, name: str, target: str, episodes: int | None = None, seconds: float = 1.0, plays: int = 3
    ) -> dict[str, Any]:
        """Whether later turns of a side cost more, and in the note whether they must; another number of episodes than
        in the race shows how much of it is the reading of their keys and values. One play says little: a turn takes
        less than a second."""
        side = self.sides[name]
        shape = replace(self.shape, turns=31, episodes=episodes or self.shape.episodes)
        late, early = zip(*(self._play(side, shape=shape, long=True)["seconds"] for _ in range(plays)), strict=True)
        dtype = getattr(torch, side.dtype)
        least_late, least_early = (1 / decode_turns(shape, dtype, n, self.device, seconds) for n in (30, 3))
        operations = turn_operations(shape, 30) / turn_operations(shape, 3)
        return table_row(
            f"time of turn 30 over time of turn 3, {shape.episodes} episodes, {name}",
            target,
            "s a turn of all",
            late,
            early,
            note=f"turns that cost only what the second limit allows would have {least_late / least_early:.2f}, "
            f"by number of operations {operations:.2f}",
        )

    def _play(self, side: Side, dreams: int = 1, shape: Shape | None = None, long: bool = False) -> dict[str, Any]:
        spec = {"engine": side.engine, "dtype": side.dtype, "eager": side.eager, "shape": asdict(shape or self.shape)}
        spec |= {"seeds": (0, dreams), "device": self.device, "long": long}
        if not self.isolated:
            return rollouts_worker.work(spec)
        return run_worker(side.python, "rollouts_worker", spec, self.folder, self.threads, self.device)


def _reason(error: Exception) -> str:
    """The line of a worker's last words that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error:" in line or "Unavailable:" in line]
    return (telling or lines)[-1][:300]
