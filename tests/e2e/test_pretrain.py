"""A base model is made, goes on after a kill, and runs start from it. If this fails, there is no base to start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagination import cli
from imagination.cli import STAGES, main
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.pretrain import pretrain
from imagination.settings import Config, UserError, compose
from imagination.settings.models import CorpusWorld
from policy.lm.backbone import load_checkpoint
from tests.support.killing import Killed, assert_same_model, kill_at, metrics_of
from tests.support.tiny import tiny_settings, write_log

pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")


def small() -> Config:
    tiny = tiny_settings()
    world = CorpusWorld("gymnasium", options={"id": ["BabyAI-GoToObj-v0"]}, tasks=8, episodes=2, max_turns=6)
    settings = tiny.pretrain
    settings.worlds, settings.model = {"baby": world}, tiny.policy
    settings.shards, settings.shard_characters, settings.makers = 2, 4000, 1
    settings.batch_tokens, settings.micro_tokens = 512, 4096
    settings.steps, settings.copying_steps, settings.save_every, settings.warmup = 12, 2, 2, 2
    return tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a corpus and a base model."""
    folder = tmp_path_factory.mktemp("pretrained")
    pretrain(small(), folder)
    return folder


def test_a_killed_base_is_the_same_as_an_uninterrupted_one_and_a_run_starts_from_it(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, stopped = small(), tmp_path / "stopped"
    tiny.pretrain.corpus = str(whole)
    with monkeypatch.context() as patch:
        kill_at(patch, "pretrain", 10)
        with pytest.raises(Killed):
            pretrain(tiny, stopped)
    pretrain(tiny, stopped)
    assert_same_model(whole / "models" / "base", stopped / "models" / "base")
    assert [row["step"] for row in metrics_of(whole, "pretrain")] == [0, 10]

    summary = json.loads((whole / "summary.json").read_text())
    base = summary["base"]
    assert summary["real_steps"]["pretrain"] > base["real_steps"]["baby"] > 0  # with those of the tokenizer's sample
    card = (whole / "models" / "base" / "README.md").read_text()
    assert f"| {base['episodes']['baby']:,} | {base['tokens']['baby']:,} | {base['real_steps']['baby']:,} |" in card
    assert f"each {base['epochs']:.1f} times" in card
    assert 512 * 10 * 0.5 < base["epochs"] * base["tokens"]["baby"] < 512 * 10  # ten steps, some of it padding
    assert base["parameters"] == load_checkpoint(str(whole / "models" / "base"))[0].num_parameters()

    write_log(tmp_path / "run")
    tiny.worldmodel.model = str(whole / "models" / "base")
    tiny.fit.steps = 2
    fit_world_model(tiny, tmp_path / "run")
    assert (tmp_path / "run" / "models" / "worldmodel" / "model.safetensors").exists()


def test_time_ends_a_training_before_its_steps_do_and_a_corpus_serves_other_runs(whole: Path, tmp_path: Path) -> None:
    tiny = small()
    tiny.pretrain.copying_steps = 0
    tiny.pretrain.steps, tiny.pretrain.minutes, tiny.pretrain.corpus = 1_000_000, 0.02, str(whole)
    tiny.pretrain.worlds["baby"].env = "nowhere"  # a world need not be there to be read of
    pretrain(tiny, tmp_path / "second")
    assert 0 < len(metrics_of(tmp_path / "second", "pretrain")) < 1000
    load_checkpoint(str(tmp_path / "second" / "models" / "base"))
    assert not (tmp_path / "second" / "corpus").exists()
    tiny.pretrain.corpus = str(tmp_path / "third")
    with pytest.raises(UserError, match="third/tokenizer"):
        pretrain(tiny, tmp_path / "second")


def test_a_world_of_the_default_preset_is_left_out_by_its_share_alone(tmp_path: Path) -> None:
    words = cli._completed(STAGES["pretrain"], ["run=x", f"output={tmp_path}", "pretrain.worlds.coin.share=0"])
    config = compose.resolve(words, Config).config
    assert config.pretrain.worlds["coin"].share == 0
    assert config.pretrain.worlds["coin"].env == "textworld_express"
    assert config.pretrain.worlds["twc"].share > 0


def test_a_corpus_without_worlds_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "run=x", "preset=tiny", f"output={tmp_path}"]) == 2
    assert "pretrain.worlds is empty" in capsys.readouterr().err
