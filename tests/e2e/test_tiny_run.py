"""The whole story on one real game, small: it must learn, without a real step, and say so."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain, repeat
from pathlib import Path

import pytest

from imagination.cli import main
from imagination.commands import train as train_stage
from real_envs.worker_pool import PoolStats
from worldmodel.evaluation.intervals import wilson


def test_the_tiny_demo_learns_in_dreams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probes = ["tripwires.real_episodes=2", "tripwires.every=5"]
    # A longer quest leaves something to learn to a policy that was cloned until it says commands. Nonsense would find
    # what a world model this small pays for by mistake, and a tripwire stops that.
    longer = ["games.quest_length=3", "collect.episodes=240", "fit.steps=600", "clone.steps=160", "train.updates=12"]
    longer += ["evaluate.heldout_episodes=4", "collect.workers=1"]  # every stage that plays starts them anew
    command = ["demo", "preset=tiny", "seed=7", *longer, f"output={tmp_path}", *probes]
    assert main(command) == 0
    folder = tmp_path / "tiny"
    report = json.loads((folder / "report.json").read_text())
    before, after = (report["policy"][which]["train_tasks"] for which in ("before", "after"))
    wires = report["tripwires"]
    assert after["n"] >= 50
    assert wires["enabled"]
    if wires["stopped_by"] is None:  # where kernels round in another way, a wire may stop it and go back
        assert wires["updates"] == 12
        assert after["success"] >= before["success"] + 0.2, "dreams taught nothing"
        assert wilson(after["success"], after["n"])[0] > before["success"], "in this one game, beyond chance"
    assert report["real_steps"]["train"] == 0 < report["real_steps"]["collect"]
    assert 2 <= report["real_steps"]["probe"] <= 2 * 2 * 6  # one or two probes of two episodes of at most six turns
    assert report["dreamed_turns"] > 0
    calibration = report["world_model"]["calibration"]
    assert calibration["n"] > 0
    assert (folder / "models" / "worldmodel" / "calibration.json").exists()
    assert report["world_model"]["exact_match"] > 0.6
    assert set(report["wall_seconds"]) >= {"collect", "fit_world_model", "clone", "train", "evaluate"}
    for name in ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "report.md", "tensorboard"):
        assert (folder / name).exists(), name
    assert not re.search(r"(src|href)=[\"']https?:", (folder / "report.html").read_text())
    printed = capsys.readouterr().out
    assert "report.html" in printed

    trained = (folder / "models" / "policy" / "model.safetensors").stat().st_mtime_ns
    few = "evaluate.episodes=12 evaluate.heldout_episodes=2"
    arms = [f"ablation.arms.mixed=train.updates=2 train.real_share=[[0,0.5],[1,0]] {few}", f"ablation.runs=[{folder}]"]
    ablation = ["ablate", "run=ablation", f"output={tmp_path}", *arms]
    assert main(ablation) == 0
    (found,) = json.loads((tmp_path / "ablation" / "ablation.json").read_text())
    arm = found["arms"]["mixed"]
    assert (found["seed"], arm["train_tasks"]["n"]) == (7, 12)
    lines = map(json.loads, (tmp_path / "ablation/arms/mixed/seed-7/metrics.jsonl").read_text().splitlines())
    overlap, mixed, alone, last = lines
    assert overlap["stage"] == "overlap"
    assert (last["stage"], last.get("real_turns")) == ("last_look", None), "the last look takes no real step"
    assert min(mixed["rl_tokens_dream"], mixed["rl_tokens_real"]) > 0 == alone.get("rl_tokens_real", 0)
    assert {"dream_success", "real_success", "clip_fraction_real", "tokens_expert"} <= set(mixed)
    assert arm["real_steps"]["train"] == mixed["real_turns"] > 0, "declared, and counted"
    capsys.readouterr()
    assert main(ablation) == 0, "finished arms are not trained again"
    assert json.loads((tmp_path / "ablation" / "ablation.json").read_text())[0]["arms"]["mixed"] == arm

    words = ["run=tiny", f"output={tmp_path}"]
    assert main(["compare", *words, "compare.episodes=4", "compare.logged=2", "compare.signals=true"]) == 0
    compared = json.loads((folder / "compare.json").read_text())
    told = {row["name"] for row in compared["signals"]}
    assert told >= {"likelihood", "n-gram support", "nearest transition"}
    kinds = {(row["source"], row["split"]): row for row in compared["aligned"]}
    assert set(kinds) == {(source, split) for source in ("dream", "log") for split in ("train", "heldout")}
    for row in kinds.values():
        assert row["pairs"] > 0 == row["left_out"], "the log and the game start and answer alike"
    replayed = sum(pair["real"]["turns"] for pair in compared["pairs"] if pair["source"] == "dream")
    assert compared["cost"]["real_steps"]["replay"] == replayed > 0
    shown = compared["pairs"][0]["id"]
    capsys.readouterr()
    assert main(["compare", *words, f"compare.show={shown}"]) == 0
    assert shown in capsys.readouterr().out
    assert main(command) == 0
    assert "train: done before" in capsys.readouterr().out, "looking at a run must not make it start again"
    assert (folder / "models" / "policy" / "model.safetensors").stat().st_mtime_ns == trained


def test_a_real_step_taken_by_a_dream_is_an_error(
    cloned: Path, tmp_path: Path, tiny: train_stage.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = chain([0], repeat(1))
    monkeypatch.setattr(train_stage, "real_interaction", lambda: PoolStats(steps=next(counter)))
    with pytest.raises(RuntimeError, match="took 1 real step"):
        train_stage.train(tiny, Path(shutil.copytree(cloned, tmp_path / "run")))


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_leaves_a_run_that_goes_on(run: Path) -> None:
    words = ["fit-world-model", "preset=tiny", "fit.steps=100", f"run={run.name}", f"output={run.parent}"]
    # a shell's background job starts with Ctrl-C ignored, and so would this process if the tests run in one
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from imagination.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, *words]
    state = run / "checkpoints" / "fit_world_model.ckpt"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not state.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors[-2000:]
    assert f"imagine fit-world-model run={run.name}" in errors
    assert state.exists()
    assert main(words) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["stage"] == "fit_world_model"]
    assert steps == sorted(set(steps)), "no step may be written twice"
    assert not state.exists()
