"""A world model by diffusion goes through the stages: fitted, judged, dreamed in, served; what it cannot is said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from imagination.commands.audit import run_audit
from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.loop import check as check_loop
from imagination.commands.refine_world_model import check as check_refine
from imagination.commands.serve import open_world
from imagination.commands.train import train
from imagination.runs.run_folder import RunFolder
from imagination.serving.sessions import Refused, Sessions
from imagination.session import Session
from imagination.settings import Config, UserError, WorldModelSettings
from imagination.settings.dreams import ServeSettings
from policy.lm.backbone import build_model, save_checkpoint
from policy.lm.engine import EngineUnavailable
from policy.lm.settings import EngineSettings, LoraSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.files import CHECKSUMS
from tests.support.tiny import TASKS, start, tiny_settings, write_log
from worldmodel.diffusion.engine import CanvasEngine, DiffusionWorldModel
from worldmodel.world_model import PredictionInvalid


def diffusion_settings() -> Config:
    config = tiny_settings()
    model = config.worldmodel
    model.kind, model.context, model.hidden, model.heads, model.kv_heads = "diffusion", 512, 48, 4, 4
    model.diffusion = replace(model.diffusion, block=16)
    config.fit.steps, config.fit.optimizer, config.fit.lr = 150, "muon", 0.02
    return config


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    write_log(folder)
    fit_world_model(diffusion_settings(), folder)
    return folder


def load(config: Config, folder: Path, temperature: float = 0.0) -> Any:
    return Session(config, RunFolder(folder, 0)).world_model((), temperature)


def test_it_is_fitted_judged_and_dreamed_in(fitted: Path, tmp_path: Path) -> None:
    config, run = diffusion_settings(), tmp_path / "run"
    shutil.copytree(fitted, run)
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [row["loss"] for row in losses if row["stage"] == "fit_world_model"]
    assert told[-1] < told[0] / 4
    config.clone.steps, config.clone.lr = 120, 1e-2  # a policy that says commands, and not what no log has
    clone(config, run)
    config.train.updates = 1
    train(config, run)
    version = load(config, run).version
    audited = run_audit(config, run)
    assert audited["world_model"] == {"name": "worldmodel", "version": version, "kind": "diffusion"}
    card = json.loads((run / "summary.json").read_text())["world_model"]
    assert audited["sets"]["held_out"]["exact"]["value"] == pytest.approx(card["exact_match"])
    assert (run / "models/worldmodel/calibration.json").exists()
    dreamed = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert {row["world_model_version"] for row in dreamed} == {version}
    turns = [turn for row in dreamed for turn in row["turns"][row["prefix_turns"] :]]
    assert turns
    assert all(0 < turn["info"]["outcome_confidence"] <= 1 for turn in turns)
    assert all(turn["info"]["confidence"] <= turn["info"]["outcome_confidence"] + 1e-9 for turn in turns)
    assert asyncio.run(served(config, run)) == start("corridor-a")


async def served(config: Config, run: Path) -> str:
    """What a session of ``imagine serve`` begins with, after it was asked for a step."""
    session = await Sessions(open_world(config, run), ServeSettings()).open()
    begun = await session.reset(None, 0)
    with contextlib.suppress(Refused):  # whether the prediction can be read is not asked here
        await session.step("go east")
    return begun.text


def test_it_is_a_checkpoint_like_any_other_with_a_mask(fitted: Path) -> None:
    folder = fitted / "models" / "worldmodel"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.diffusion_block == 16
    assert tokenizer.mask_token_id < model.get_input_embeddings().weight.shape[0]


def test_many_ask_at_once_and_share_passes(fitted: Path) -> None:
    """Predictions depend on their own seed alone, and are metered."""
    config = diffusion_settings()
    session = Session(config, RunFolder(fitted, 0))
    world = session.world_model((), 1.0)
    assert isinstance(world, DiffusionWorldModel)
    config.engine = EngineSettings(slots=8)
    plain = load(config, fitted, 1.0)
    (engine,) = plain.engines
    assert isinstance(engine, CanvasEngine)

    async def ask(model: Any, seeds: range) -> list[Any]:
        asked = (model.predict(start("corridor-a"), [], "go east", seed, ("s", seed)) for seed in seeds)
        return list(await asyncio.gather(*asked, return_exceptions=True))

    crowd = asyncio.run(ask(plain, range(12)))
    assert engine.counts.steps < engine.passes, "canvases share passes"
    alone = [asyncio.run(ask(world, range(k, k + 1)))[0] for k in range(12)]
    for one, other in zip(crowd, alone, strict=True):
        assert type(one) is type(other)
        if not isinstance(one, PredictionInvalid):
            assert (one.observation, one.reward, one.terminated) == (other.observation, other.reward, other.terminated)
            assert one.confidence == pytest.approx(other.confidence, rel=1e-3)
    assert session.engines.tokens == engine.counts.generated


def test_what_diffusion_cannot_is_said_in_a_line(fitted: Path, tmp_path: Path) -> None:
    config = diffusion_settings()
    for name in ("vllm", "openai"):
        config.engine = EngineSettings(name=name, url="http://127.0.0.1:1/v1", served_model="w")  # type: ignore[arg-type]
        with pytest.raises(EngineUnavailable, match=f"engine={name}.*engine=inprocess"):
            load(config, fitted)
    config.engine = EngineSettings()
    with pytest.raises(UserError, match="cannot be refined"):
        check_refine(config)
    with pytest.raises(UserError, match=r"loop.*worldmodel\.kind=text"):
        check_loop(config)
    config.worldmodel.kind = "text"
    with pytest.raises(UserError, match="trained as diffusion-16, not as text"):
        load(config, fitted)
    config = diffusion_settings()
    config.worldmodel.diffusion = replace(config.worldmodel.diffusion, block=8)
    with pytest.raises(UserError, match=r"trained as diffusion-16, not as diffusion-8.*worldmodel\.diffusion\.block"):
        load(config, fitted)
    for wrong in ({"members": 2}, {"reasoning_tokens": 8}):
        with pytest.raises(ValueError, match=r"kind=diffusion.*worldmodel\.members=1"):
            WorldModelSettings(kind="diffusion", **wrong)

    shutil.copytree(fitted, tmp_path / "run")  # a next-token model in the place of the world model
    config = diffusion_settings()
    folder = tmp_path / "run" / "models" / "worldmodel" / "config.json"
    folder.write_text(folder.read_text().replace('"diffusion_block": 16,', ""))
    (folder.parent / CHECKSUMS).unlink()
    with pytest.raises(UserError, match=r"models/worldmodel: .* next token"):
        load(config, tmp_path / "run")


def test_canvases_that_cannot_hold_the_log_are_refused(run: Path) -> None:
    config = diffusion_settings()
    config.dream.max_tokens = 4
    with pytest.raises(UserError, match=r"longer than dream\.max_tokens=4"):
        fit_world_model(config, run)
    config.dream.max_tokens, config.worldmodel.context = 96, 64
    config.worldmodel.diffusion = replace(config.worldmodel.diffusion, block=64)
    with pytest.raises(UserError, match=r"block=64 .*worldmodel\.context=64"):
        fit_world_model(config, run)


def test_it_starts_from_a_causal_checkpoint_with_adapters(run: Path) -> None:
    """A model of next tokens has no mask: it gets one, and its canvases see themselves."""
    config = diffusion_settings()
    config.worldmodel.model, config.worldmodel.lora = str(run / "causal"), LoraSettings(rank=4)
    config.worldmodel.diffusion = replace(config.worldmodel.diffusion, entropy_bound=100.0)
    config.fit.steps, config.fit.optimizer, config.dream.max_tokens = 2, "auto", 32
    causal = train_tokenizer([start(task) for task in TASKS] * 9, 400, ["\n[reward=0]", "\n[reward=1 done]"])
    save_checkpoint(build_model(config.worldmodel, causal, 0), causal, run / "causal")
    fit_world_model(config, run)
    tokenizer = AutoTokenizer.from_pretrained(run / "models" / "worldmodel")
    assert tokenizer.mask_token_id == len(causal)
    assert len(tokenizer) == len(causal) + 1
    load(config, run)
