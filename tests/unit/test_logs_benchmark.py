"""`make logs-table`: what its tables say, from numbers worked out by hand, and which tasks a share has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.benchmarks import logs_table
from tests.benchmarks.logs_parts import DASH, Part, read_parts, table
from tests.benchmarks.logs_table import LOGS, SETTINGS, cut
from tests.support.audits import e, finished, good


def part(log: str, share: int, foretold: float, right: float, **more: Any) -> Part:
    shared = {"exact": {"value": foretold, "n": 400, "ci95": [0.1, 0.6]}, "tasks": share, "turns": 10 * share}
    return Part(log, share, 0, {"looked_up": shared}, {"exact_match": right, "n": 50}, **more)


def rows(text: str, block: int) -> list[dict[str, str]]:
    head, _, *lines = text.split("\n\n")[block].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def test_the_forecast_is_ranked_over_all_parts_and_so_is_the_size() -> None:
    """The forecast ranks 1, 2, 3, 4 what came as 1, 3, 2, 4: 1 - 6 * 2 / (4 * 15) = 0.8. The size ranks it 1.5, 1.5,
    3.5 and 3.5: products of what lies beside the means, 2, over sqrt(4 * 5) are 0.447."""
    parts = [part("x", 10, 0.1, 0.2), part("y", 10, 0.3, 0.4), part("x", 30, 0.4, 0.3), part("y", 30, 0.5, 0.8)]
    text = table([*parts, Part("z", 100, 0, reason="too long")])
    foretold = rows(text, -2)
    assert [row["exact on held-out tasks"] for row in foretold] == ["0.20, n=50", "0.40, n=50", "0.30, n=50",
                                                                    "0.80, n=50", "too long"]  # fmt: skip
    assert (foretold[0]["training tasks"], foretold[3]["training turns"]) == ("10", "300")
    assert foretold[0]["looked up"] == "0.10 [0.10, 0.60], n=400"
    looked_up, size = rows(text, -1)
    over, clustered = "Spearman with exact match, over parts", "the same, interval over logs"
    assert looked_up[over].startswith("+0.80")
    assert looked_up[over].endswith("(4)")
    assert size[over].startswith("+0.45")
    assert looked_up[clustered].startswith("+0.80 [")
    assert looked_up["mean distance"] == "0.15"  # 0.1, 0.1, 0.1 and 0.3, over four
    assert size["mean distance"] == DASH
    assert looked_up[over] != looked_up[clustered]  # two logs say less than four parts


def test_an_audit_has_a_line_and_its_words_and_a_part_without_one_a_reason() -> None:
    found = finished(good())
    found["sets"]["held_out"]["drift"]["exact_at"] = {"1": e(0.8, 12, 0.5, 0.9)}
    text = table([part("x", 100, 0.3, 0.4, audit=found), Part("z", 100, 0, reason="no episode fits")])
    audited, none = rows(text, 0)
    assert audited["exact"] == "0.93 [0.92, 0.94], n=100"
    assert audited["reward recall"] == "0.97 [0.96, 0.98], n=100"
    assert (audited["open loop, turn 1"], audited["open loop, turn 8"]) == ("0.80 [0.50, 0.90], n=12", DASH)
    assert audited["verdict"] == found["verdict"]["trust"]
    assert (none["exact"], none["verdict"]) == (DASH, "no episode fits")
    assert f"- x, seed 0: {found['verdict']['sentences'][0]}" in text


def test_nothing_yet_is_a_table_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "webshop_react" / "share-30" / "seed-1").mkdir(parents=True)
    (only,) = read_parts(tmp_path, [log.name for log in LOGS])
    assert (only.log, only.share, only.seed, only.foretold, only.right) == ("webshop_react", 30, 1, None, None)
    assert f"| webshop_react | 30 % | 1 | {DASH} | {DASH} | {DASH} | {DASH} |" in table([only])
    assert json.loads(json.dumps(only.to_json()))["audit"] is None


def test_smaller_shares_lie_within_larger_ones_and_held_out_tasks_stay(tmp_path: Path) -> None:
    def episode(task: str) -> Trajectory:
        turn = Turn("go", f"room {task}", 1.0, True)
        return Trajectory(f"{task}/0", task, task, Source.REAL, "log", 0, task, (turn,), StopReason.TERMINATED)

    names = [f"t{k}" for k in range(20)]
    whole = TrajectoryStore.create(tmp_path / "whole", {"train": names, "heldout": ["h"]}, {"imported": True})
    whole.append([episode(task) for task in (*names, "h")])
    cuts = {share: cut(whole, tmp_path / f"{share}", share / 100, seed=0) for share in (10, 30, 100)}
    trained = {share: set(store.tasks("train")) for share, store in cuts.items()}
    assert {share: len(tasks) for share, tasks in trained.items()} == {10: 2, 30: 6, 100: 20}
    assert trained[10] < trained[30] < trained[100]
    assert all({t.task_id for t in store.read("heldout")} == {"h"} for store in cuts.values())
    assert {t.task_id for t in cuts[30].read("train")} == trained[30]
    again = cut(whole, tmp_path / "30", 0.3, seed=0)  # what is there stays, and nothing comes twice
    assert len(list(again.read())) == 7
    assert set(cut(whole, tmp_path / "other", 0.3, seed=1).tasks("train")) != trained[30]


def test_a_log_that_is_not_there_is_a_line_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["logs", "--data", str(tmp_path / "no"), "--out", str(tmp_path), "--logs", "intercode", "--shares", "100"]
    monkeypatch.setattr("sys.argv", words)
    assert logs_table.main() == 1
    assert "name the folder of all logs: --data" in capsys.readouterr().err
    assert "--data" in rows((tmp_path / "table.md").read_text(), 0)[0]["verdict"]


def test_every_log_has_settings_that_exist_and_is_held_out_whole() -> None:
    for log in LOGS:
        config = load_config([*SETTINGS, *log.settings, f"run={log.name}"], Config)
        assert config.collect.validation == 0  # what the audit judges are held-out tasks alone
        assert config.imports.heldout > 0
