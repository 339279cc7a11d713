"""The table of `make synther-table`, from numbers by hand. If this fails, it says what nobody measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import synther_table as benchmark
from tests.benchmarks.synther_table import ARMS, CHECKS, HEAD, error_of, summed, table

CHECKED = {"marginal": 0.9, "correlation": 0.8, "dynamics_error": 0.7}


def part(seed: int, share: float = 0.1, **errors: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """Errors of the arms by task; an arm that is not told of errs by 1 in the one state of one task."""
    by_task = {arm: errors.get(arm, {"a": (1.0, 1)}) for arm in ARMS}
    return {"seed": seed, "share": share, "errors": by_task, "checks": {"logged": CHECKED, "synthetic": CHECKED}}


def test_errors_are_means_over_states_and_tasks_of_different_seeds_are_different_tasks() -> None:
    """By hand: (0.3 + 0.1) / 4 and, with seed 1, (0.3 + 0.1 + 0.8) / 6; beside them 0.1 and 0.4 / 6 more."""
    found = summed(torch.tensor([0.1, 0.2, 0.1, 0.0]), ["a", "a", "b", "b"])
    assert found == {"a": (pytest.approx(0.3), 2), "b": (pytest.approx(0.1), 2)}
    one = part(0, logged=found, synther={"a": (0.5, 2), "b": (0.3, 2)})
    two = part(1, logged={"a": (0.8, 2)}, synther={"a": (0.8, 2)})
    assert error_of([one], "logged").value == pytest.approx(0.1)
    both = error_of([one, two], "logged")
    assert (both.value, both.n) == (pytest.approx(0.2), 3)
    assert error_of([one], "synther", "logged").value == pytest.approx(0.1)
    assert error_of([one, two], "synther", "logged").value == pytest.approx(0.4 / 6)


def test_a_line_a_share_and_arm() -> None:
    told = table([part(0, 1.0), part(0, 0.1, synther={"a": (1.5, 1)}), part(1, 0.1, synther={"a": (0.75, 1)})])
    first, second = told.split("\n\n")
    lines = first.splitlines()
    assert "\n".join(lines[:2]) == HEAD
    assert len(lines) == 2 + 2 * len(ARMS)
    synthetic = lines[2 + list(ARMS).index("synther")]
    assert synthetic.startswith(f"| 10% | {ARMS['synther']} | 1.1250 [")
    assert synthetic.endswith("| +0.5000, -0.2500 |")
    assert lines[3].endswith("| – | – |"), "nothing is compared with itself"
    assert second.startswith(CHECKS)
    assert "| 100% | synthetic | 0.900 | 0.800 | 0.700 |" in second


def test_a_part_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = benchmark.load_config([*benchmark.SETTINGS, "seed=3"], benchmark.Config)
    made_of = f"{benchmark.fingerprint(config, 'fit_critic')}/{benchmark.hash_of(tmp_path, ['base'])}"
    monkeypatch.setattr(benchmark, "hash_of", lambda *_: made_of.split("/")[1])
    monkeypatch.setattr(benchmark, "load_model", lambda *_: pytest.fail("it was made again"))
    (tmp_path / "30.json").write_text(json.dumps({"made_of": made_of}))
    benchmark.make_part(config, 0.3, tmp_path)
    (tmp_path / "30.json").write_text(json.dumps({"made_of": "something else"}))
    with pytest.raises(pytest.fail.Exception, match="it was made again"):
        benchmark.make_part(config, 0.3, tmp_path)
