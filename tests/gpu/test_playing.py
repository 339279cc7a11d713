"""If these fail, a policy on a CUDA card plays by other probabilities than those that are trained, or too slowly.

The oracle is transformers, as in the tests on CPUs: ``generate`` for greedy text, a full forward pass for log-probs.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imagination.learning.losses.policy import engine_mismatch
from policy.lm.engine import Completion, Sampling
from policy.lm.engines.inprocess.drafts import Drafts
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.single_query import single_query_attention
from policy.lm.settings import EngineSettings
from tests.support.asking import together
from tests.support.device import DEVICE, batch_of, make_model, needs_card, needs_device, some_text, trainer_logprobs
from tests.support.engines import NEVER, generate

pytestmark = needs_device
CONTEXT = 64
MODELS = ["llama", "qwen3", "granite"]  # the last one is run by its own forward pass
SAMPLED = 16  # tokens of a completion


# --- tokens and their log-probs ---


@pytest.mark.parametrize("drafted", [False, True], ids=["token by token", "drafts"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_turns_equal_generate(name: str, drafted: bool) -> None:
    """Three turns of six episodes that differ in length; two begin alike, so that keys and values are copied. Drafts
    are the right texts with every fifth word wrong."""
    model = make_model(name)
    prompts = [some_text(n, seed=n) for n in (3, 17, 1, 22, 9)]
    prompts.append([*prompts[3][:18], *some_text(2, seed=0)])
    limits, histories = [4, 7, 6, 1, 7, 5], [list(ids) for ids in prompts]
    expected: list[list[tuple[int, ...]]] = []
    for turn in range(3):
        expected.append([generate(model, h, n, NEVER) for h, n in zip(histories, limits, strict=True)])
        for row, ids in enumerate(expected[-1]):
            assert len(ids) == limits[row]
            histories[row] += [*ids, *some_text(1 + row, seed=10 * turn + row)]
    logged = [[3 if at % 5 == 4 else token for at, token in enumerate(ids)] for ids in histories]
    engine = InProcessEngine(model, CONTEXT, drafts=Drafts(logged) if drafted else None)
    assert engine.exact
    histories = prompts
    for turn, answers in enumerate(expected):
        asked = [
            engine.complete(h, Sampling(n, NEVER, temperature=0.0), seed=7, session=row)
            for row, (h, n) in enumerate(zip(histories, limits, strict=True))
        ]
        assert [c.ids for c in together(*asked)] == answers
        histories = [
            [*h, *ids, *some_text(1 + row, seed=10 * turn + row)]
            for row, (h, ids) in enumerate(zip(histories, answers, strict=True))
        ]
    assert engine.counts.reused > 16
    assert (0 < engine.counts.accepted < engine.counts.drafted) == drafted


def a_group() -> list[list[int]]:
    """Prompts with a common beginning, and two without."""
    start = some_text(12, seed=100)
    return [*([*start, *some_text(n, seed=n)] for n in (1, 5, 9, 5)), some_text(2, seed=50), some_text(30, seed=51)]


def sampled(model: Any, prompts: Sequence[list[int]], temperature: float) -> tuple[InProcessEngine, list[Completion]]:
    """A completion of each prompt, and the engine."""
    engine = InProcessEngine(model, CONTEXT)
    sampling = Sampling(SAMPLED, NEVER, temperature)
    return engine, together(*(engine.complete(ids, sampling, seed) for seed, ids in enumerate(prompts)))


def rows_and_mask(prompts: Sequence[list[int]], completions: Sequence[Completion]) -> tuple[list[list[int]], Tensor]:
    """Whole texts, and where the sampled tokens are."""
    rows = [[*ids, *c.ids] for ids, c in zip(prompts, completions, strict=True)]
    mask = batch_of(rows)[1]
    for row, ids in enumerate(prompts):
        mask[row, : len(ids)] = False
    return rows, mask


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_sampled_tokens_are_those_of_the_seed_and_logprobs_those_of_the_trainer(name: str, temperature: float) -> None:
    """Tokens by a plain loop: where the cumulative distribution passes the seed's next uniform number."""
    model, prompts = make_model(name), a_group()
    engine, completions = sampled(model, prompts, temperature)
    rows, mask = rows_and_mask(prompts, completions)
    with torch.no_grad():
        trained = trainer_logprobs(model, rows, mask, temperature)
        at_one = trainer_logprobs(model, rows, mask)
    by_engine = torch.tensor([x for c in completions for x in c.logprobs], device=DEVICE)
    assert float(by_engine.std()) > 0.5, "log-probs that are all alike would show nothing"
    torch.testing.assert_close(by_engine, trained, rtol=0, atol=1e-4, check_dtype=False)
    scores = together(*(engine.score(row, len(ids)) for row, ids in zip(rows, prompts, strict=True)))
    scored = torch.tensor([x for row in scores for x in row], device=DEVICE)
    torch.testing.assert_close(scored, at_one, rtol=0, atol=1e-4, check_dtype=False)
    for seed, (row, ids) in enumerate(zip(rows, prompts, strict=True)):
        uniforms = np.random.Generator(np.random.Philox(key=seed)).random(SAMPLED)
        with torch.no_grad():
            logits = model(torch.tensor([row], device=DEVICE)).logits[0, len(ids) - 1 : -1]
        steps = (logits.double() / temperature).softmax(-1).cumsum(-1).cpu().numpy()
        assert [int(np.searchsorted(s, u, side="right")) for s, u in zip(steps, uniforms, strict=True)] == row[
            len(ids) :
        ]


@pytest.mark.parametrize("name", MODELS)
def test_bf16_engine_is_as_close_to_exact_logprobs_as_the_bf16_trainer(name: str, record_property: Any) -> None:
    """By the metric that updates log. The same weights in fp32 are exact; log-probs that belong to the token before
    show what a mistake would look like."""
    model, prompts = make_model(name, torch.bfloat16), a_group()
    engine, completions = sampled(model, prompts, 1.0)
    assert not engine.exact
    rows, mask = rows_and_mask(prompts, completions)
    with torch.no_grad():
        trained = trainer_logprobs(model, rows, mask)
        exact = trainer_logprobs(model.float(), rows, mask)
    by_engine = torch.tensor([x for c in completions for x in c.logprobs], device=DEVICE, dtype=torch.float32)
    ones = torch.ones_like(by_engine)
    (of_engine, _), (of_trainer, _) = engine_mismatch(exact, by_engine, ones), engine_mismatch(exact, trained, ones)
    between, largest = engine_mismatch(trained, by_engine, ones)
    wrong, _ = engine_mismatch(exact, by_engine.roll(1), ones)
    record_property("k3 a token", f"{float(between) / len(by_engine):.1e}, largest ratio {float(largest):.3f}")
    assert 0 < of_engine < 4 * of_trainer
    assert between < 4 * of_trainer
    assert largest < 2.0, "beyond the cap of the correction (algorithm.tis_cap)"
    assert wrong > 100 * of_engine


@needs_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "group", "dim"), [(3, 3, 64), (2, 1, 16), (1, 7, 128), (8, 4, 32)])
def test_attention_of_single_queries_is_that_of_a_plain_loop(
    dtype: torch.dtype, heads: int, group: int, dim: int
) -> None:
    """Over a part of the buffer, from its first position to beyond its last; of other dims torch's own is taken."""
    slots, time, part = 6, 300, 200
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, slots, heads, time, dim, generator=generator).to(DEVICE, dtype)
    q = torch.randn(slots, heads * group, dim, generator=generator).to(DEVICE, dtype)
    positions = torch.tensor([0, 63, 64, 150, part - 1, time], device=DEVICE)
    keys, values = kv[:, :, :, :part]
    got = single_query_attention(q, keys, values, positions)
    for slot, position in enumerate(positions.tolist()):
        for head in range(heads * group):
            k, v = (x[slot, head // group, : position + 1].double() for x in (keys, values))
            expected = (k @ q[slot, head].double() * dim**-0.5).softmax(0) @ v
            torch.testing.assert_close(
                got[slot, head].double(), expected, rtol=2e-2, atol=1e-4 if dtype is torch.float32 else 2e-2
            )


# --- what it costs ---


def requested() -> int:
    """Bytes of tensors on the card. ``memory_allocated`` also counts what its blocks are larger than their tensors."""
    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@needs_card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "granite"])
def test_keys_and_values_take_the_memory_that_is_stated(name: str, dtype: torch.dtype, record_property: Any) -> None:
    """As many slots as fit, and nothing grows when all of them are full."""
    stated = 4 * 2**20
    model = make_model(name, dtype)
    with torch.no_grad():
        model(torch.tensor([[5, 6]], device=DEVICE))  # the first matrix product reserves its own workspace
    before = requested()
    engine = InProcessEngine(model, CONTEXT, EngineSettings(slots=10**6, memory_gib=stated / 2**30))
    reserved = requested() - before
    reserved -= 2 * 8 * engine.slots * sum(engine._decoder.widths)  # tokens and positions that its graphs read
    record_property("slots", f"{engine.slots}, {reserved} of {stated} bytes")
    assert engine.slots > 64
    one_more = reserved / engine.slots
    assert stated - one_more <= reserved <= stated

    def held(tokens: int) -> int:
        """Bytes after every slot had a completion of so many tokens."""
        made = together(*(engine.complete([5], Sampling(tokens, NEVER), seed) for seed in range(engine.slots)))
        assert all(len(c.ids) == tokens for c in made)
        return requested()

    first = held(1)  # with the engine's copy of the weights, and the workspace of matrix products
    assert held(CONTEXT - 1) - first < 2**20


SYNCHRONISED = "called a synchronizing CUDA operation"


def synchronised(engine: InProcessEngine, slots: int, tokens: int) -> tuple[int, int]:
    """How often the host waited for the card, and steps, while each slot sampled so many tokens."""
    engine.reset()
    steps = engine.counts.steps
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            together(*(engine.complete([5, 6], Sampling(tokens, NEVER), seed) for seed in range(slots)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONISED in str(w.message) for w in seen), engine.counts.steps - steps


@needs_card
def test_the_host_waits_for_a_step_and_not_for_a_slot(record_property: Any) -> None:
    """Four times a step, whatever the number of slots and layers: copies to the card of tokens with their positions, of
    the slots that run, and of uniform numbers; tokens with their log-probs back. Two more are left to other versions of
    torch.

    Steps that read prompts are left out: of two lengths, what the longer one costs more.
    """
    model = make_model("llama")
    a_step = {}
    for slots in (4, 32):
        engine = InProcessEngine(model, CONTEXT, EngineSettings(slots=slots))
        together(engine.complete([5, 6], Sampling(2, NEVER), 0))  # what is done once
        (few, few_steps), (many, many_steps) = (synchronised(engine, slots, tokens) for tokens in (8, 40))
        assert many_steps - few_steps == 32
        a_step[slots] = (many - few) / 32
        record_property(f"host syncs, {slots} slots", f"{a_step[slots]:g} a step, {a_step[slots] / slots:.3f} a token")
    assert a_step[4] == a_step[32]
    assert 1 <= a_step[4] <= 6  # tokens have to come back
