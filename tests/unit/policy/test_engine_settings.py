"""If these fail, a run is sampled by another engine than the user asked for, or breaks where nothing is installed."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from imagination.runs.run_folder import RunFolder
from imagination.session import Policy, Session
from imagination.settings import Config
from imagination.settings.compose import load_config
from imagination.settings.schema import ConfigError
from policy.lm.backbone import build_model, plain_weights, save_checkpoint, with_lora
from policy.lm.engine import EngineUnavailable
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.vllm import VllmEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import EngineSettings, LoraSettings, ModelSettings
from policy.lm.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["some text"], 290)
SMALL = ModelSettings(hidden=32, layers=2, heads=2, kv_heads=1, mlp=48, context=64)


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[[ImportError], None]:
    """Importing vllm fails, as on a machine that has none or a broken one."""

    def forbid(failure: ImportError) -> None:
        honest = builtins.__import__

        def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.split(".")[0] == "vllm":
                raise failure
            return honest(name, *args, **kwargs)

        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(builtins, "__import__", guarded)

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return forbid


def test_a_group_chooses_the_engine() -> None:
    """One word on the command line, and everything that goes with it."""
    assert load_config([], Config).engine == EngineSettings(name="inprocess")
    assert load_config(["engine=vllm"], Config).engine == EngineSettings(name="vllm")
    served = load_config(["engine=openai", "engine.url=http://elsewhere/v1"], Config).engine
    assert (served.name, served.url, served.served_model) == ("openai", "http://elsewhere/v1", "worldmodel")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.name=openai", "engine.url="),
        ("engine.slots=0", "slots"),
        ("engine.memory_gib=0", "memory_gib"),
        ("engine.gpu_memory_utilization=1.5", "gpu_memory_utilization"),
        ("engine.retries=-1", "retries"),
        ("engine=vlm", "vllm"),
    ],
)
def test_settings_that_cannot_work_are_refused(override: str, words: str) -> None:
    """Before anything is loaded, in one sentence that names the key."""
    with pytest.raises(ConfigError, match=words):
        load_config([override], Config)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ModuleNotFoundError("No module named 'vllm'", name="vllm"), "is not installed"),
        (ImportError("libcudart.so.12: cannot open shared object file"), "imported: libcudart"),
    ],
)
def test_a_missing_vllm_says_what_to_do(
    without_vllm: Callable[[ImportError], None], failure: ImportError, words: str
) -> None:
    """The one error that most users of this engine will see first."""
    without_vllm(failure)
    with pytest.raises(EngineUnavailable, match=words) as error:
        VllmEngine(build_model(SMALL, TOKENIZER, 0), TOKENIZER, 64)
    assert "make vllm-cpu" in str(error.value)
    assert "engine=inprocess" in str(error.value)


def test_each_model_gets_the_engine_that_was_chosen(
    tmp_path: Path, without_vllm: Callable[[ImportError], None]
) -> None:
    """``vllm`` is for both models; ``openai`` is for the world model, and the policy, which learns, stays here."""
    without_vllm(ModuleNotFoundError("No module named 'vllm'", name="vllm"))
    run, config = RunFolder(tmp_path, 0), Config()
    model = build_model(SMALL, TOKENIZER, 0)
    policy = Policy(model, ChatFormat(TOKENIZER))
    save_checkpoint(model, TOKENIZER, run.model("worldmodel"))
    for name in ("inprocess", "openai"):
        config.engine = EngineSettings(name=name, url="http://127.0.0.1:1/v1", served_model="w")  # type: ignore[arg-type]
        assert isinstance(Session(config, run).agent(policy).engine, InProcessEngine)
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1"):
        Session(config, run).world_model((), 0.0)
    # what was just trained is not what the server has
    assert isinstance(Session(config, run).world_model((), 0.0, served=False).engine, InProcessEngine)
    config.engine = EngineSettings(name="vllm")
    for attempt in (lambda: Session(config, run).agent(policy), lambda: Session(config, run).world_model((), 0.0)):
        with pytest.raises(EngineUnavailable, match="not installed"):
            attempt()


def test_another_temperature_shares_the_engine(tmp_path: Path) -> None:
    """An engine is started once per model; a second one would take its memory and its seconds again."""
    run = RunFolder(tmp_path, 0)
    save_checkpoint(build_model(SMALL, TOKENIZER, 0), TOKENIZER, run.model("worldmodel"))
    dreaming = Session(Config(), run).world_model((), 1.0)
    judging = dreaming.at_temperature(0.0)
    assert judging.engine is dreaming.engine
    assert (dreaming.sampling.temperature, judging.sampling.temperature) == (1.0, 0.0)
    assert (judging.version, judging.sampling.max_tokens) == (dreaming.version, dreaming.sampling.max_tokens)


def test_adapters_are_merged_without_touching_the_model(tmp_path: Path) -> None:
    """Another engine gets the weights that a checkpoint of the same model has, while the trainer's adapters stay apart:
    merged in place, they would be trained on top of themselves."""
    model = with_lora(build_model(SMALL, TOKENIZER, 0), LoraSettings(rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = dict(plain_weights(model))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    save_checkpoint(model, TOKENIZER, tmp_path)
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert merged.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.allclose(merged[name], tensor), name
    assert "lm_head.weight" in merged  # tied: under both names, since an engine may keep them apart
    plain = build_model(SMALL, TOKENIZER, 0)
    assert dict(plain_weights(plain)).keys() == merged.keys()
