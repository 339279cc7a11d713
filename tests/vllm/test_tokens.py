"""If these fail, policies are trained on log-probs that are not those of the tokens, or dream what no model wrote."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from policy.lm.engine import ContextFull, EngineFailure, Sampling
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler
from policy.lm.engines.vllm import VllmEngine
from tests.support.asking import TOKENIZER, VOCAB, prompt, together
from tests.support.vllm_oracle import CONTEXT, NEVER, assert_scored, generate, processed


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_greedy_turns_equal_generate(which: str, both: dict[str, tuple[PreTrainedModel, VllmEngine]]) -> None:
    """Three turns of five episodes of different lengths: a prefix cache that is one token off would show here."""
    model, engine = both[which]
    histories = [prompt(length, seed=length) for length in (3, 17, 1, 60, 40)]
    for turn in range(3):
        limits = [4, 9, 6, 1, 7]
        got = together(
            *(engine.complete(h, Sampling(n, NEVER, 0.0), turn) for h, n in zip(histories, limits, strict=True))
        )
        for history, limit, completion in zip(histories, limits, got, strict=True):
            assert completion.ids == generate(model, history, limit)
            assert_scored(model, history, completion)  # greedy log-probs are those at temperature 1
            history += [*completion.ids, *prompt(5 + 20 * turn, seed=turn)]


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
    ],
    ids=str,
)
def test_log_probs_are_those_of_the_distribution_sampled_from(
    model: PreTrainedModel, engine: VllmEngine, how: dict[str, Any]
) -> None:
    """The trainer's ratio of an unchanged policy is 1 only if both sides mean the same distribution."""
    prompts = [prompt(4 + 3 * k, seed=k) for k in range(12)]
    got = together(*(engine.complete(ids, Sampling(10, NEVER, **how), k) for k, ids in enumerate(prompts)))
    for ids, completion in zip(prompts, got, strict=True):
        assert_scored(model, ids, completion, **how)


def test_ways_of_sampling_do_not_mix_in_a_batch(model: PreTrainedModel, engine: VllmEngine) -> None:
    """Greedy audits, sampled dreams and policies at other temperatures may run at the same time."""
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0}] * 4
    prompts = [prompt(6, seed=k) for k in range(len(ways))]
    got = together(
        *(
            engine.complete(ids, Sampling(8, NEVER, **way), k)
            for k, (ids, way) in enumerate(zip(prompts, ways, strict=True))
        )
    )
    for ids, way, completion in zip(prompts, ways, got, strict=True):
        assert_scored(model, ids, completion, **{**way, "temperature": way["temperature"] or 1.0})
        if not way["temperature"]:
            assert completion.ids == generate(model, ids, 8)


def test_frequencies_are_those_of_the_model(model: PreTrainedModel, engine: VllmEngine) -> None:
    """600 first tokens from 600 seeds: a biased sampler teaches a policy that nobody plays."""
    ids, n = prompt(9, seed=1), 600
    got = together(*(engine.complete(ids, Sampling(1, NEVER, 1.5), k) for k in range(n)))
    with torch.no_grad():
        probs = processed(model(torch.tensor([ids])).logits[0, -1].double(), 1.5).exp()
    counts = torch.bincount(torch.tensor([c.ids[0] for c in got]), minlength=len(probs)).double()
    likely = probs * n >= 5
    expected = torch.cat([probs[likely], probs[~likely].sum()[None]]) * n
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    chi2 = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_the_seed_is_the_only_chance(engine: VllmEngine) -> None:
    """A run with the same seed must dream the same, alone or in company; other seeds must differ in every bit."""
    ids, sampling = prompt(12, seed=3), Sampling(16, NEVER, 1.3)
    (alone,) = together(engine.complete(ids, sampling, 7))
    crowd = together(
        *(engine.complete(prompt(5 + k, seed=k), sampling, k) for k in range(20)), engine.complete(ids, sampling, 7)
    )
    assert crowd[-1].ids == alone.ids
    others = together(*(engine.complete(ids, sampling, seed) for seed in (8, 7 + (1 << 32), 7 + (1 << 62), 0)))
    assert len({alone.ids, *(one.ids for one in others)}) == 5


def test_a_stop_token_ends_and_is_kept(untied: tuple[PreTrainedModel, VllmEngine]) -> None:
    """The end belongs to the action: it has a log-prob and is trained. The tokenizer's own end token ends nothing."""
    model, engine = untied
    ids = prompt(8, seed=5)
    free = generate(model, ids, 12)
    stop = next(token for token in free[3:] if token != free[0])
    (ended,) = together(engine.complete(ids, Sampling(12, stop, 0.0), 0))
    assert ended.ids == free[: free.index(stop) + 1]
    assert ended.stopped
    assert len(ended.logprobs) == len(ended.ids)
    (cut,) = together(engine.complete(ids, Sampling(free.index(stop), stop, 0.0), 0))
    assert (cut.ids, cut.stopped) == (free[: free.index(stop)], False)
    (last,) = together(engine.complete(ids, Sampling(free.index(stop) + 1, stop, 0.0), 0))
    assert last.stopped
    sampled = together(*(engine.complete(prompt(5, k), Sampling(40, NEVER, 2.0), k) for k in range(30)))
    assert all(len(one.ids) == 40 for one in sampled)
    assert any(TOKENIZER.eos_token_id in one.ids for one in sampled)


def test_a_full_context_ends_its_own_episode(model: PreTrainedModel, engine: VllmEngine) -> None:
    """The longest prompt that fits is served whole; one token more is typed, and its neighbours go on."""
    sampling = Sampling(10, NEVER, 0.8)
    fits, too_long, short = prompt(CONTEXT - 10, seed=1), prompt(CONTEXT - 9, seed=1), prompt(4, seed=2)
    got = together(*(engine.complete(ids, sampling, 3) for ids in (short, too_long, fits)))
    assert isinstance(got[1], ContextFull)
    for ids, completion in ((short, got[0]), (fits, got[2])):
        assert len(completion.ids) == 10
        assert_scored(model, ids, completion, 0.8)


def test_nan_is_a_typed_failure_and_leaves_nothing_behind(untied: tuple[PreTrainedModel, VllmEngine]) -> None:
    """One token's embedding is NaN: who has it in the prompt fails, typed; sampled from, NaN would look like text. It
    stays in the blocks of the cache, where it may break neighbours too, but nobody who comes later."""
    model, engine = untied
    bad, one = 5, Sampling(1, NEVER, 0.0)  # one token each: nobody can write the bad one and read it
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = math.nan
    engine.update_weights()
    for _ in range(2):
        broken = together(*(engine.complete([7, bad, 11, k], one, k) for k in range(20, 40)))
        assert [type(outcome) for outcome in broken] == [EngineFailure] * 20
        for k, completion in enumerate(together(*(engine.complete([7, 9, k], one, k) for k in range(20, 40)))):
            assert_scored(model, [7, 9, 20 + k], completion)
    together(engine.complete([7, bad], one, 0))
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = 0.1
    engine.update_weights()
    for completion in together(*(engine.complete([7, bad, 11], Sampling(4, NEVER), k) for k in range(20))):
        assert_scored(model, [7, bad, 11], completion)


def test_what_vllm_refuses_is_raised_to_its_caller(model: PreTrainedModel, engine: VllmEngine) -> None:
    """A token that does not exist, or a temperature that vLLM would silently change, is the caller's mistake."""
    good = prompt(3, seed=0)
    got = together(
        engine.complete([VOCAB + 999], Sampling(2, NEVER), 0),
        engine.complete(good, Sampling(2, NEVER, 0.001), 0),
        engine.complete(good, Sampling(2, NEVER, 3.0), 0),
        engine.complete(good, Sampling(2, NEVER), 0),
    )
    assert all(isinstance(one, ValueError) for one in got[:3])
    assert_scored(model, good, got[3])


def test_many_requests_at_once(model: PreTrainedModel, engine: VllmEngine) -> None:
    """More than there are slots, of all lengths: each gets its own answer."""
    prompts = [prompt(1 + k % 90, seed=k) for k in range(300)]
    got = together(*(engine.complete(ids, Sampling(1 + k % 7, NEVER, 0.9), k) for k, ids in enumerate(prompts)))
    for k, (ids, completion) in enumerate(zip(prompts, got, strict=True)):
        assert len(completion.ids) == 1 + k % 7
        if k % 10 == 0:
            assert_scored(model, ids, completion, 0.9)


def test_two_engines_take_turns(
    both: dict[str, tuple[PreTrainedModel, VllmEngine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a dream: the world's long request is stopped for the policy's three, whose next ones join it in the middle.
    What vLLM had begun it ends as if nothing had been; and nobody waits for ever."""
    (_, policy), (_, world) = both["tied"], both["untied"]
    shared, order = DeviceScheduler(), list[str]()
    for name, engine in (("policy", policy), ("world", world)):
        shared.join(engine)
        monkeypatch.setattr(engine, "_scheduler", shared)

        def noted(name: str = name, step: Any = engine._llm.step) -> Any:
            order.append(name)
            return step()

        monkeypatch.setattr(engine._llm, "step", noted)
    written: list[tuple[str, list[int], Any]] = []

    async def ask(name: str, ids: list[int], tokens: int) -> None:
        completion = await both[name][1].complete(ids, Sampling(tokens, NEVER), len(ids))
        written.append((name, ids, completion))

    async def later(k: int) -> None:
        while "world" not in order:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await ask("tied", prompt(5 + k, k), 2)
        await ask("untied", prompt(9 + k, k), 2)

    async def run() -> None:
        long = ask("untied", prompt(30, seed=3), 8)
        await asyncio.wait_for(asyncio.gather(long, *(later(k) for k in range(3))), timeout=60)

    asyncio.run(run())
    assert len(written) == 7
    for name, ids, completion in written:
        assert_scored(both[name][0], ids, completion)
    first = order.index("policy")
    assert order == ["world"] * first + ["policy"] * 2 + ["world"] * (8 - first)
    assert 1 <= first <= 3


def test_a_caller_that_is_cancelled_leaves_nothing_behind(model: PreTrainedModel, engine: VllmEngine) -> None:
    """An update that was interrupted must not hold the engine's memory or block the next weights."""

    async def interrupted() -> None:
        task = asyncio.ensure_future(engine.complete(prompt(5, 0), Sampling(100, NEVER), 0))
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="under way"):
            engine.update_weights()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(interrupted())
    engine.update_weights()
    (after,) = together(engine.complete(prompt(5, 0), Sampling(4, NEVER), 0))
    assert_scored(model, prompt(5, 0), after)
