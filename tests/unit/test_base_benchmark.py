"""The table of `make base-table`, from numbers worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.benchmarks import base_table
from worldmodel.evaluation.transitions import Judged


def write_part(out: Path, world: str, model: str, tokens: int, seed: int, value: float, ends: list[float]) -> None:
    folder = out / world / "seed-0" / f"{model}-{tokens}-{seed}"
    folder.mkdir(parents=True)
    found = {"value": value, "n": 10, "ci95": ends}
    none = {"value": None, "n": 0, "ci95": None}
    exact = {"all": found, "refused": found, "seen": none, "new": found}
    part = {
        "world": world,
        "model": model,
        "tokens": tokens,
        "seed": seed,
        "seconds": 10.0 * (seed + 1),
        "exact": exact,
    }
    (folder / base_table.PART).write_text(json.dumps(part))


def test_a_row_is_the_mean_over_seeds_and_the_widest_interval(tmp_path: Path) -> None:
    write_part(tmp_path, "coin", "base", 10_000, 0, 0.5, [0.4, 0.6])
    write_part(tmp_path, "coin", "base", 10_000, 1, 0.7, [0.55, 0.8])
    write_part(tmp_path, "coin", "scratch", 100_000, 0, 0.1, [0.0, 0.2])
    head, _, base, scratch = base_table.write_table(tmp_path).splitlines()
    assert head == "| world | model | tokens | all | refused | seen | new | seeds | seconds |"
    assert base == "| coin | base | 10,000 | 0.60 [0.40, 0.80] | 0.60 [0.40, 0.80] | – | 0.60 [0.40, 0.80] | 2 | 15 |"
    assert scratch.startswith("| coin | scratch | 100,000 | 0.10 [0.00, 0.20] |")
    assert (tmp_path / "table.md").read_text().splitlines()[2] == base


def test_turns_are_told_apart_by_what_was_right_to_answer() -> None:
    texts = [
        "A hall. To the east you see a den.",
        "A den.",
        "Unknown action: no.",
        "A hall. To the east you see a den.",
    ]
    turns = tuple(Turn("go", text, 0.0, False) for text in texts)
    episode = Trajectory(
        "e", "t", "g", Source.REAL, "a", 0, "Find it.\nA den.", turns, StopReason.TURN_LIMIT, prefix_turns=0
    )
    refusal = re.compile("Unknown action: ")
    found = [base_table._kind(Judged("e", k, turn, None), episode, refusal) for k, turn in enumerate(turns)]
    assert found == ["new", "seen", "refused", "seen"]
