"""A second world from its log to a trained policy, by its name alone. If this fails, the seam of worlds leaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagination.cli import main

pytest.importorskip("textworld_express", reason="pip install 'imagination[textworld-express]'")
SIZE = "env.options.params=numLocations=3,includeDoors=0,numDistractorItems=0"


def test_textworld_express_goes_through_every_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["games.train=2", "games.heldout=2", "collect.episodes=20", "collect.workers=1", "fit.steps=150"]
    few += ["clone.steps=20", "train.updates=1", "train.real_share=0.5", "dream.min_confidence=0"]
    few += ["worldmodel.facts=4", "collect.heldout_episodes=6", "worldmodel.context=1024", "policy.context=1024"]
    few += ["evaluate.episodes=4", "evaluate.tasks=1", "evaluate.heldout_episodes=2", "tripwires.enabled=false"]
    few += ["dream.min_outcome_confidence=0", "dream.max_tokens=192"]
    assert main(["demo", "preset=tiny", "env=textworld_express", SIZE, *few, f"output={tmp_path}"]) == 0
    folder = tmp_path / "tiny"
    report = json.loads((folder / "report.json").read_text())
    assert {which["train_tasks"]["n"] for which in report["policy"].values()} == {4}  # one of two games, four times
    assert report["real_steps"]["collect"] > 20
    assert report["real_steps"]["train"] > 0  # the groups that were played for real, at their share
    manifest = json.loads((folder / "log" / "manifest.json").read_text())
    assert manifest["meta"]["environment"] == "textworld_express"
    assert all("-train-" in task for task in manifest["splits"]["train"])
    assert all("-test-" in task for task in manifest["splits"]["heldout"])
    assert report["language"]["tokens_per_action"] > 1.5  # words, not commands by heart
    assert {"heldout_tasks", "heldout_tasks_known"} <= report["world_model"].keys()

    # tasks that nothing was fitted to, by two logged episodes each
    fitted = (folder / "models" / "worldmodel" / "model.safetensors").read_bytes()
    arms = ["few_shot.episodes=2", "few_shot.updates=1", "train.groups=2", "train.group_size=8"]
    # dreams of one turn: not one of sixteen would be readable only if the model had learned no ends of answers at all
    arms += ["train.real_share=0", "train.expert_share=0", "dream.max_turns=1"]
    assert main(["few-shot", "run=tiny", *arms, f"output={tmp_path}"]) == 0
    result = json.loads((folder / "few-shot.json").read_text())
    assert (result["tasks"], result["episodes"]) == (2, 4)
    assert result["dreams"]["real_steps"]["train"] == 0 < result["control"]["real_steps"]["train"]
    rows = [json.loads(line) for line in (folder / "few-shot" / "dreams" / "rollouts.jsonl").read_text().splitlines()]
    dreamed = {row["task_id"] for row in rows if row["stage"] == "train"}
    assert dreamed
    assert dreamed <= set(manifest["splits"]["heldout"])
    assert (folder / "few-shot/dreams/models/worldmodel/model.safetensors").read_bytes() == fitted
    assert "the new tasks" in capsys.readouterr().out

    assert main(["evaluate", "run=tiny", "env=textworld", f"output={tmp_path}"]) == 2
    assert "of textworld_express, but env=textworld " in capsys.readouterr().err


def test_a_gymnasium_environment_goes_through_every_stage(tmp_path: Path) -> None:
    pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")
    few = ["games.train=3", "games.heldout=2", "collect.episodes=12", "collect.workers=1", "fit.steps=150"]
    few += ["train.real_share=0.5", "train.updates=1", "train.groups=2", "train.group_size=4", "dream.min_confidence=0"]
    few += ["clone.steps=20", "train.expert_share=0"]  # an expert need not have solved one of so few tasks
    few += ["dream.min_outcome_confidence=0", "worldmodel.context=1024", "policy.context=1024"]
    few += ["tripwires.enabled=false", "evaluate.episodes=2", "evaluate.heldout_episodes=2", "evaluate.tasks=2"]
    where = ["run=grid", f"output={tmp_path}"]
    assert main(["demo", "preset=tiny", "env=gymnasium", *few, *where]) == 0
    report = json.loads((tmp_path / "grid" / "report.json").read_text())
    assert report["policy"]["after"]["heldout_tasks"]["n"] == 4
    assert min(report["real_steps"]["train"], report["real_steps"]["collect"]) > 0
    assert main(["audit", *where, "audit.episodes=1", "audit.judged=4", "audit.pairs=4", "audit.min_policies=2"]) == 0
    assert main(["compare", *where, "compare.episodes=1", "compare.logged=1"]) == 0
    audit = json.loads((tmp_path / "grid" / "audit.json").read_text())
    assert audit["world_model"]
    pairs = json.loads((tmp_path / "grid" / "compare.json").read_text())["pairs"]
    assert "log" in {pair["source"] for pair in pairs}
    # two tasks a split at most, though three were logged: evaluate.tasks holds for all that plays
    assert len({pair["task_id"] for pair in pairs}) <= 4


def test_questions_go_through_every_stage(tmp_path: Path) -> None:
    few = ["games.train=3", "games.heldout=2", "collect.episodes=12", "collect.workers=1", "fit.steps=150"]
    few += ["env.options.entities=100", "env.options.max_hops=1", "env.options.k=2", "max_action_tokens=40"]
    few += ["train.real_share=0.5", "train.updates=1", "train.groups=2", "train.group_size=4", "dream.min_confidence=0"]
    few += ["clone.steps=20", "dream.min_outcome_confidence=0", "dream.known_rewards=true", "worldmodel.facts=2"]
    few += ["worldmodel.context=1024", "policy.context=1024", "tripwires.enabled=false", "evaluate.episodes=2"]
    few += ["evaluate.heldout_episodes=2", "evaluate.tasks=2"]
    where = ["run=asked", f"output={tmp_path}"]
    assert main(["demo", "preset=tiny", "env=search", *few, *where]) == 0
    report = json.loads((tmp_path / "asked" / "report.json").read_text())
    assert report["policy"]["after"]["heldout_tasks"]["n"] == 4
    assert min(report["real_steps"]["train"], report["real_steps"]["collect"]) > 0
    summary = json.loads((tmp_path / "asked" / "summary.json").read_text())
    assert summary["real_cost"]["collect"] == pytest.approx(0.001 * summary["real_steps"]["collect"])
    assert main(["audit", *where, "audit.episodes=1", "audit.judged=4", "audit.pairs=4", "audit.min_policies=2"]) == 0
    assert main(["compare", *where, "compare.episodes=1", "compare.logged=1"]) == 0
