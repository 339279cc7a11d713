"""What `imagine list` and `--dry-run` say of a run; neither writes anything."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagination.cli import main
from imagination.commands.list_runs import find_runs, info
from imagination.commands.loop import STEPS
from imagination.commands.rules import rules
from imagination.report.run_data import build_report, load_run
from imagination.report.run_text import verdict
from imagination.runs.fingerprint import fingerprint, state
from imagination.runs.lifecycle import run_stage
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import load_config, resolve
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn


def begun(tmp_path: Path, done: list[str], *overrides: str) -> Path:
    """A run with ``overrides`` that has finished the stages ``done``."""
    words = ["run=mine", f"output={tmp_path}", *overrides]
    config = load_config(words, Config)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "overrides.json").write_text(json.dumps(words))
    (folder / "summary.json").write_text(json.dumps({"done": {stage: fingerprint(config, stage) for stage in done}}))
    return folder


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """What is said that would happen to each stage, without the reason."""
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.partition("\nin ")[2].splitlines()[1:]]
    said = {stage: state.partition(",")[0] for stage, _, state in (line.partition(": ") for line in lines)}
    assert all(state.startswith("would be ") for state in said.values())
    return {stage: state.removeprefix("would be ") for stage, state in said.items()}


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_demo_says_what_it_would_skip_and_do_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(tmp_path, ["collect", "fit_world_model", "clone"])
    before, where = files(tmp_path), ("demo", "run=mine", f"output={tmp_path}")
    rest = {"train": "done", "evaluate": "done", "report": "done"}
    assert dry(capsys, *where) == {"collect": "skipped", "fit world model": "skipped", "clone": "skipped", **rest}
    # the world model depends on fit.steps, and the clone on the world model; the log does not
    again = {"fit world model": "done again", "clone": "done again", **rest}
    assert dry(capsys, *where, "fit.steps=7") == {"collect": "skipped", **again}
    assert files(tmp_path) == before, "a dry run writes nothing"


def test_what_was_dreamed_by_other_rules_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begun(tmp_path, ["collect", "fit_world_model", "clone", "train", "evaluate"])
    turns = (Turn("look", "A hall.", 0.0, False),)
    episodes = [
        Trajectory(f"t/{k}", "t", "t", Source.REAL, "noisy", k, "Start.", turns, StopReason.TURN_LIMIT) for k in (0, 1)
    ]
    TrajectoryStore.create(folder / "log", {"train": ["t"]}).append(episodes)
    words = ["run=mine", f"output={tmp_path}"]
    rules(load_config([*words, "worldmodel.rules=off"], Config), folder)
    assert dry(capsys, "demo", *words)["train"] == "skipped", "rules that nobody dreams by"
    (folder / "models" / "rules.json").unlink()
    rules(load_config(words, Config), folder)
    assert [dry(capsys, "demo", *words)[stage] for stage in ("clone", "train", "evaluate")] == [
        *("skipped", "done again", "done again")
    ]
    (folder / "summary.json").unlink()
    begun_again = {stage: fingerprint(load_config(words, Config), stage) for stage in ("train", "evaluate")}
    (folder / "summary.json").write_text(json.dumps({"done": begun_again}))
    rules(load_config(words, Config), folder)
    assert json.loads((folder / "summary.json").read_text())["done"].items() >= begun_again.items(), "the same rules"


def test_an_evaluation_of_the_policy_before_a_loop_is_outdated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(tmp_path, ["train", "evaluate"])
    config, run = load_config(["run=mine", f"output={tmp_path}"], Config), RunFolder(folder, 0)
    versions = [{"version": 0, "round": 0, "promoted": True}]
    lists: dict[str, object] = {"chosen": [], "scores": [], "rounds": [], "versions": versions}
    run.update({"loop": {"round": 0, "charged": 0, "learned": {"dreamed_success": None}, **lists}})
    (folder / "loop" / "policies" / "1").mkdir(parents=True)
    monkeypatch.setattr("imagination.commands.loop._real_success", lambda *_: None)
    STEPS["close"](SimpleNamespace(run=run, config=config))
    assert [state(config, folder, stage) for stage in ("train", "evaluate")] == ["done", "other settings"]
    run.update({"done": {"loop": "x", "evaluate": fingerprint(config, "evaluate")}})
    with run_stage(config, folder, "train", models=False):
        pass
    assert state(config, folder, "evaluate") == "other settings", "nor is it one of a policy trained after the loop"


def test_a_stage_after_one_that_is_missing_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(tmp_path, ["collect", "clone"])
    found = dry(capsys, "demo", "run=mine", f"output={tmp_path}")
    assert (found["fit world model"], found["clone"]) == ("done", "done again")


def test_a_stage_shows_its_settings_and_what_it_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run=new", f"output={tmp_path}", "train.updates=5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "  updates: 5\n" in out
    assert "train: would be done\n" in out
    assert "missing: models/policy-clone/" in out
    assert list(tmp_path.iterdir()) == []


def test_runs_are_listed_with_choices_stages_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begun(tmp_path, ["collect", "fit_world_model"], "seed=3")
    (folder / "config.yaml").write_text("run: mine\nseed: 3\nfit: {steps: 9}\n")
    success = {which: {"train_tasks": {"success": rate}} for which, rate in (("before", 0.25), ("after", 0.75))}
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "policy": success}))
    (folder / "audit.json").write_text(json.dumps({"verdict": {"trust": "partly"}}))
    (folder / "models" / "policy").mkdir(parents=True)
    (folder / "models" / "policy" / "config.yaml").write_text("")  # no run
    before = files(tmp_path)
    capsys.readouterr()
    assert main(["list", f"output={tmp_path}", "listing.format=json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run == {
        "run": "mine", "chosen": ["seed=3"], "settings": {"seed": 3, "fit.steps": 9}, "before": 0.25, "after": 0.75,
        "stages": {"collect": "done", "fit_world_model": "other settings"}, "verdict": "partly",
    }  # fmt: skip
    assert main(["list", f"output={tmp_path}"]) == 0
    out = capsys.readouterr().out
    for word in ("mine", "seed=3", "0.25 -> 0.75", "partly"):
        assert word in out
    assert files(tmp_path) == before


def test_stages_outside_the_demo_are_listed(tmp_path: Path) -> None:
    folder = begun(tmp_path, ["import", "loop"])
    resolve(["run=mine", f"output={tmp_path}"], Config).remember()
    assert info(folder, tmp_path).stages == {"import": "done", "loop": "done"}


def test_runs_within_runs_are_found_and_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", f"output={tmp_path}"]) == 0
    assert "no runs" in capsys.readouterr().out
    for name in ("seeds/seed-0", "seeds/seed-1/control"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "summary.json").write_text("{}")
    found = [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)]
    assert found == ["seeds/seed-0", "seeds/seed-1/control"]


def test_a_report_says_which_numbers_are_of_other_settings(tmp_path: Path) -> None:
    folder = begun(tmp_path, ["train", "evaluate"], "train.updates=3")
    config = resolve(["run=mine", f"output={tmp_path}", "train.updates=3"], Config)
    config.remember()
    assert build_report(load_run(folder), partial=True)["outdated"] == []
    with run_stage(config.config, folder, "digi_q", models=False):
        pass
    assert build_report(load_run(folder), partial=True)["outdated"] == ["evaluate"], "another policy takes its place"
    config.config.evaluate.episodes += 1
    config.remember()
    report = build_report(load_run(folder), partial=True)
    assert [sentence[:18] for sentence in verdict(report)[-1:]] == ["`imagine evaluate`"]
