"""If these fail, a policy is sampled from other weights than those that train, and everything after it is noise."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from policy.lm.backbone import with_lora
from policy.lm.engine import Sampling
from policy.lm.engines import vllm as vllm_engine
from policy.lm.engines.vllm import VllmEngine
from policy.lm.settings import EngineSettings, LoraSettings
from tests.support.asking import TOKENIZER, prompt, together
from tests.support.vllm_oracle import (
    CONTEXT,
    NEVER,
    TOLERANCE,
    assert_scored,
    generate,
    make_model,
    randomise,
    teacher_forced,
)

HISTORY = prompt(150, seed=6)  # long enough to leave whole blocks in the prefix cache


def greedy(engine: VllmEngine) -> Any:
    (completion,) = together(engine.complete(HISTORY, Sampling(12, NEVER, 0.0), 0))
    return completion


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_new_weights_are_sampled_from_when_pushed_and_not_before(
    which: str, both: dict[str, tuple[PreTrainedModel, VllmEngine]]
) -> None:
    """Three times: nothing of the old weights may stay, neither in a packed copy nor in the prefix cache; and what the
    trainer does to its module between two updates must not reach an engine that would sample half an update."""
    model, engine = both[which]
    for seed in (11, 12, 13):
        before, version = greedy(engine), engine.version
        assert before.version == version
        randomise(model, seed)
        with pytest.raises(AssertionError):
            assert_scored(model, HISTORY, before)
        assert greedy(engine) == before
        engine.update_weights()
        after = greedy(engine)
        assert after.version == engine.version == version + 1
        assert after.ids == generate(model, HISTORY, 12)
        assert_scored(model, HISTORY, after)


def test_an_optimiser_step_is_enough_to_show(model: PreTrainedModel, engine: VllmEngine) -> None:
    """A real update is small: the log-probs must follow it to within the tolerance of the kernels."""
    old = greedy(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = model(torch.tensor([HISTORY]), labels=torch.tensor([HISTORY])).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    moved = teacher_forced(model, HISTORY, old, temperature=1.0)
    assert max(abs(a - b) for a, b in zip(moved, old.logprobs, strict=True)) > 5 * TOLERANCE
    engine.update_weights()
    assert_scored(model, HISTORY, greedy(engine))


def test_adapters_are_merged_on_the_way(settings: EngineSettings) -> None:
    """LoRA: the engine samples the policy with its adapters, and the trainer goes on with its adapters apart."""
    model = with_lora(make_model(2), LoraSettings(rank=4)).eval()
    engine = VllmEngine(model, TOKENIZER, CONTEXT, settings)
    for seed in (1, 2):
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.2)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        engine.update_weights()
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert_scored(model, HISTORY, greedy(engine))
    with model.disable_adapter(), pytest.raises(AssertionError):
        assert_scored(model, HISTORY, greedy(engine))


def test_a_weight_that_vllm_does_not_take_is_an_error(
    model: PreTrainedModel, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM only warns and keeps the old weight: the policy would train, and part of it would never be played."""
    whole = vllm_engine.plain_weights

    def lacking(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in whole(model) if "layers.1.mlp.down_proj" not in name)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "plain_weights", lacking)
        with pytest.raises(RuntimeError, match="every weight"):
            engine.update_weights()
    engine.update_weights()
    assert_scored(model, HISTORY, greedy(engine))


def test_the_process_stays_the_trainers(settings: EngineSettings) -> None:
    """vLLM seeds all generators, forbids torch its threads and tells child processes what to preload; a trainer that
    shares the process would draw the same weights in every run and train on one core."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)

    def state() -> list[Any]:
        numpy: Any = np.random.get_state()
        where = torch.get_num_threads(), torch.set_num_threads, os.environ.get("LD_PRELOAD"), os.sched_getaffinity(0)
        return [*where, random.getstate(), torch.get_rng_state().tolist(), numpy[1].tolist()]

    before = state()
    VllmEngine(make_model(3), TOKENIZER, CONTEXT, settings)
    assert state() == before


def test_an_engine_that_is_dropped_gives_back_its_memory_and_leaves_the_others(
    model: PreTrainedModel, engine: VllmEngine, settings: EngineSettings
) -> None:
    """An evaluation starts several engines, one after the other; vLLM would end the process groups of all of them with
    the first, and the world model's engine would be dead."""
    other = VllmEngine(make_model(4), TOKENIZER, CONTEXT, settings)
    caches = weakref.ref(other._llm.model_executor.driver_worker.worker.model_runner.kv_caches[0])
    del other
    gc.collect()
    assert caches() is None
    engine.update_weights()
    assert_scored(model, HISTORY, greedy(engine))
