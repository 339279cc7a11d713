"""A base model is made, goes on after a kill, and runs start from it. If this fails, there is no base to start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagination.cli import main
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.pretrain import pretrain
from imagination.settings import Config
from imagination.settings.models import CorpusWorld
from policy.lm.backbone import load_checkpoint
from tests.support.killing import Killed, assert_same_model, kill_at, metrics_of
from tests.support.tiny import write_log

pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")


def shrink(tiny: Config) -> None:
    world = CorpusWorld("gymnasium", options={"id": ["BabyAI-GoToObj-v0"]}, tasks=8, episodes=2, max_turns=6)
    settings = tiny.pretrain
    settings.worlds, settings.model = {"baby": world}, tiny.policy
    settings.shard_characters, settings.batch_tokens, settings.micro_tokens = 4000, 512, 4096
    settings.steps, settings.copying_steps, settings.save_every, settings.warmup = 12, 2, 2, 2
    tiny.vocab_size = 512


def test_a_killed_base_is_the_same_as_an_uninterrupted_one_and_a_run_starts_from_it(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink(tiny)
    tiny.pretrain.worlds["none"] = CorpusWorld("nowhere")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    pretrain(tiny, whole)
    assert "pretrain.worlds.none is left out" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        kill_at(patch, "pretrain", 10)
        with pytest.raises(Killed):
            pretrain(tiny, stopped)
    pretrain(tiny, stopped)
    assert_same_model(whole / "models" / "base", stopped / "models" / "base")
    assert [row["step"] for row in metrics_of(whole, "pretrain")] == [0, 10]

    shards = json.loads((whole / "corpus.json").read_text())
    assert len(shards) > 1, "the test ends before a second shard"
    summary = json.loads((whole / "summary.json").read_text())
    base = summary["base"]
    all_but_last = sum(shard["tokens"]["baby"] for shard in shards[:-1])
    assert all_but_last < base["tokens"]["baby"] <= all_but_last + shards[-1]["tokens"]["baby"]
    assert summary["real_steps"]["pretrain"] > sum(shard["real_steps"]["baby"] for shard in shards) > 0
    card = (whole / "models" / "base" / "README.md").read_text()
    assert f"| {base['episodes']['baby']:,} | {base['tokens']['baby']:,} | {base['real_steps']['baby']:,} |" in card
    assert not list(whole.glob("corpus-*")), "shards stay"
    assert base["parameters"] == load_checkpoint(str(whole / "models" / "base"))[0].num_parameters()

    write_log(tmp_path / "run")
    tiny.worldmodel.model = str(whole / "models" / "base")
    tiny.fit.steps = 2
    fit_world_model(tiny, tmp_path / "run")
    assert (tmp_path / "run" / "models" / "worldmodel" / "model.safetensors").exists()


def test_time_ends_a_training_before_its_steps_do(tiny: Config, tmp_path: Path) -> None:
    shrink(tiny)
    tiny.pretrain.steps, tiny.pretrain.save_every, tiny.pretrain.copying_steps = 1, 1, 0  # the first step has a shard
    pretrain(tiny, tmp_path)
    before = json.loads((tmp_path / "corpus.json").read_text())
    tiny.pretrain.steps, tiny.pretrain.minutes, tiny.pretrain.shard_characters = 1_000_000, 0.05, 6000
    pretrain(tiny, tmp_path)
    assert json.loads((tmp_path / "corpus.json").read_text())[0] != before[0], (
        "what was read under other settings stayed"
    )
    assert 0 < len(metrics_of(tmp_path, "pretrain")) < 1000
    load_checkpoint(str(tmp_path / "models" / "base"))


def test_a_corpus_without_worlds_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "run=x", "preset=tiny", f"output={tmp_path}"]) == 2
    assert "pretrain.worlds is empty: take preset=base" in capsys.readouterr().err
