"""If these fail, policies are trained on log-probs that are not those of the tokens, or dream in mixed-up histories.

The oracle is transformers itself: ``generate`` for greedy text, one full forward pass for log-probs. Weights are drawn
large, so that every earlier token matters for what comes next: a cache with one wrong entry shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch

from policy.lm.engine import Completion, ContextFull, EngineFailure, Sampling
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.settings import EngineSettings
from tests.support.asking import VOCAB, prompt, together
from tests.support.engines import CONTEXT, MODEL, NEVER, assert_scored, generate, make_model, teacher_forced

# --- tokens and their log-probs ---


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_greedy_turns_equal_generate(kv_heads: int) -> None:
    """Three turns of five sessions whose prompts, answers and observations differ in length, some ended by a stop
    token, with fewer heads of keys and values than of queries (GQA) and without."""
    model = make_model(kv_heads)
    engine = InProcessEngine(model, CONTEXT)
    histories = [prompt(length, seed=length) for length in (3, 17, 1, 30, 9)]
    stopped = 0
    for turn in range(3):
        limits = [4, 9, 6, 1, 7]
        stops = [NEVER] * 5
        for row in (1, 4):  # stop at what would be their third token
            stops[row] = generate(model, histories[row], 3, NEVER)[-1]
        expected = [generate(model, h, n, stop) for h, n, stop in zip(histories, limits, stops, strict=True)]
        got = together(
            *(
                engine.complete(h, Sampling(n, stop, temperature=0.0), seed=7, session=row)
                for row, (h, n, stop) in enumerate(zip(histories, limits, stops, strict=True))
            )
        )
        for row, completion in enumerate(got):
            assert completion.ids == expected[row]
            assert completion.stopped == (expected[row][-1] == stops[row])
            assert_scored(model, histories[row], completion, 1.0)  # greedy: log-probs are those at temperature 1
            stopped += completion.stopped
            histories[row] += [*completion.ids, *prompt(2 + 5 * row, seed=100 * turn + row)]
    assert stopped >= 6  # both ways to end were met


def test_rows_leave_the_batch_without_disturbing_the_others() -> None:
    """Very different lengths: the batch is compacted several times while it decodes. Each row keeps its own keys and
    values, also for its next turn, in which the rows come in another order."""
    engine = InProcessEngine(MODEL, CONTEXT)
    limits = [1, 40, 1, 2, 1, 11, 3, 1, 1]
    histories = [prompt(length, seed=length) for length in (5, 40, 1, 22, 3, 60, 2, 9, 33)]

    async def ask(row: int) -> Completion:
        return await engine.complete(histories[row], Sampling(limits[row], NEVER, 0.9), seed=row, session=row)

    for order in (range(9), reversed(range(9))):
        rows = list(order)
        for row, completion in zip(rows, together(*map(ask, rows)), strict=True):
            assert len(completion.ids) == limits[row]
            assert_scored(MODEL, histories[row], completion, 0.9)
            alone = together(
                InProcessEngine(MODEL, CONTEXT).complete(histories[row], Sampling(limits[row], NEVER, 0.9), row)
            )
            assert alone[0].ids == completion.ids
            histories[row] += [*completion.ids, *prompt(4, seed=row)]


def test_a_seed_gives_the_same_completion_alone_and_in_any_batch() -> None:
    """Else an episode would depend on who happened to play beside it, and no run could be repeated."""
    sampling = Sampling(15, NEVER)
    asks = [(prompt(4 + 3 * k, seed=k), 1000 + k) for k in range(7)]

    def complete(engine: InProcessEngine) -> list[Completion]:
        return together(*(engine.complete(ids, sampling, seed) for ids, seed in asks))

    alone = [together(InProcessEngine(MODEL, CONTEXT).complete(ids, sampling, seed))[0] for ids, seed in asks]
    for slots in (64, 3):  # all at once; three at a time, the rest waiting
        found = complete(InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=slots)))
        assert [c.ids for c in found] == [c.ids for c in alone]
        for c, a in zip(found, alone, strict=True):
            assert c.logprobs == pytest.approx(a.logprobs, abs=1e-5)
    other_seed = together(InProcessEngine(MODEL, CONTEXT).complete(asks[0][0], sampling, 999))[0]
    assert other_seed.ids != alone[0].ids


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    """A sampler that is a little off trains a policy that is not the one that acts. Pearson's chi-square over 4000
    seeds; tokens expected less than eight times are one class. Seeds are fixed: the test has no chance of its own."""
    model, ids, n = make_model(std=0.06), prompt(6, seed=1), 4000
    engine = InProcessEngine(model, CONTEXT, EngineSettings(slots=1000, memory_gib=4.0))
    drawn = together(*(engine.complete(ids, Sampling(1, NEVER, temperature), seed) for seed in range(n)))
    counts = Counter(c.ids[0] for c in drawn)
    with torch.no_grad():
        p = (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1).tolist()
    common = [token for token in range(VOCAB) if n * p[token] >= 8]
    observed = [counts[token] for token in common]
    expected = [n * p[token] for token in common]
    observed.append(n - sum(observed))
    expected.append(n - sum(expected))
    chi_square = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    degrees = len(common)
    assert degrees >= 20
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)  # mean and deviation of the distribution


def test_the_stop_token_is_the_last_id_and_has_a_logprob() -> None:
    """It is what the policy decided, so it is trained like any other token."""
    ids = prompt(5, seed=5)
    free = generate(MODEL, ids, 6, NEVER)
    engine = InProcessEngine(MODEL, CONTEXT)
    (completion,) = together(engine.complete(ids, Sampling(6, free[2], 0.0), seed=0))
    assert completion.ids == free[: free.index(free[2]) + 1]
    assert completion.stopped
    assert len(completion.logprobs) == len(completion.ids)
    (cut,) = together(engine.complete(ids, Sampling(2, free[2], 0.0), seed=0))
    assert (cut.ids, cut.stopped) == (free[:2], False)


# --- what goes wrong ---


def test_a_request_beyond_the_context_is_refused_and_its_neighbours_finish() -> None:
    """The longest prompt that fits is served: one token more and the episode is truncated, alone."""
    engine = InProcessEngine(MODEL, CONTEXT)
    sampling = Sampling(10, NEVER, 0.8)
    fits, too_long = prompt(CONTEXT - 10, seed=1), prompt(CONTEXT - 9, seed=1)
    short = prompt(4, seed=2)
    got = together(*(engine.complete(ids, sampling, seed=3) for ids in (short, too_long, fits)))
    assert isinstance(got[1], ContextFull)
    for ids, completion in ((short, got[0]), (fits, got[2])):
        assert len(completion.ids) == 10
        assert_scored(MODEL, ids, completion, 0.8)


def test_weights_that_are_nan_are_an_engine_failure() -> None:
    """Typed, so that the episode is counted as failed; sampled from, NaN logits would look like text."""
    model = make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    engine = InProcessEngine(model, CONTEXT)
    got = together(*(engine.complete(prompt(4, seed=k), Sampling(3, NEVER), k, session=k) for k in range(3)))
    assert [type(one) for one in got] == [EngineFailure] * 3
    assert got[0].reason.is_failure


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_broken_row_does_not_break_its_neighbours(temperature: float) -> None:
    """One token's embedding is NaN: who has it in the prompt fails, and fails again, while the others play on."""
    model = make_model()
    bad = 5
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = math.nan
    engine = InProcessEngine(model, CONTEXT)
    good = [7, 9, 11]
    sampling = Sampling(4, NEVER, temperature)
    for _ in range(2):
        got = together(
            engine.complete(good, sampling, 0, session="a"), engine.complete([7, bad, 11, 12], sampling, 0, session="b")
        )
        assert isinstance(got[1], EngineFailure)
        assert_scored(model, good, got[0], temperature or 1.0)


def test_a_step_that_raises_does_not_strand_those_who_wait() -> None:
    """Out of memory, say: raised to those it ran for; who still waits is served, and the next rollout works."""
    engine = InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=1))
    good, hidden = prompt(3, seed=0), engine._decoder.hidden
    broken = iter([True])

    def breaks_once(feed: Any) -> torch.Tensor:
        if next(broken, False):
            raise MemoryError("no memory")
        return hidden(feed)

    engine._decoder.hidden = breaks_once  # type: ignore[method-assign]
    got = together(*(engine.complete(good, Sampling(2, NEVER), 0) for _ in range(2)))
    assert isinstance(got[0], MemoryError)
    assert_scored(MODEL, good, got[1], 1.0)


@pytest.mark.parametrize("ids", [[], [VOCAB + 5], [3, -1]])
def test_ids_that_do_not_exist_are_the_callers_mistake(ids: list[int]) -> None:
    """Refused before they reach the batch, where an embedding that is out of range would break everyone's step."""
    engine = InProcessEngine(MODEL, CONTEXT)
    good = prompt(3, seed=0)
    got = together(engine.complete(ids, Sampling(2, NEVER), 0), engine.complete(good, Sampling(2, NEVER), 0))
    assert isinstance(got[0], ValueError)
    assert_scored(MODEL, good, got[1], 1.0)


# --- the cache ---


def play(engine: InProcessEngine, sessions: Sequence[Hashable], turns: int = 3) -> list[list[tuple[int, ...]]]:
    """Turns of several sessions at once; what each wrote at each turn."""
    histories = [prompt(5 + 6 * k, seed=k) for k in range(len(sessions))]
    written: list[list[tuple[int, ...]]] = []
    for turn in range(turns):
        got = together(
            *(
                engine.complete(h, Sampling(5, NEVER, 0.9), seed=10 * turn + k, session=sessions[k])
                for k, h in enumerate(histories)
            )
        )
        for k, completion in enumerate(got):
            assert_scored(engine.model, histories[k], completion, 0.9)
            histories[k] += [*completion.ids, *prompt(4, seed=turn)]
        written.append([completion.ids for completion in got])
    return written


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_dropping_sessions_from_the_cache_changes_nothing(slots: int) -> None:
    """Fewer slots than episodes: who comes back to a slot that was given away is computed anew."""
    roomy = InProcessEngine(MODEL, CONTEXT)
    tight = InProcessEngine(MODEL, CONTEXT, EngineSettings(slots=slots))
    assert play(tight, ["a", "b", "c", "d"]) == play(roomy, ["a", "b", "c", "d"])
    assert play(InProcessEngine(MODEL, CONTEXT), [None] * 4) == play(roomy, ["e", "f", "g", "h"])


def test_a_turn_costs_its_new_tokens_and_not_its_history() -> None:
    """What the cache is for; without it an episode of n turns costs n squared. A released session costs all again."""
    engine = InProcessEngine(MODEL, CONTEXT)
    fed: list[int] = []

    def ask(history: list[int], seed: int) -> Completion:
        (completion,) = together(engine.complete(history, Sampling(3, NEVER), seed, session="s"))
        fed.append(engine.counts.fed - sum(fed))
        return completion

    history = prompt(50, seed=0)
    history += [*ask(history, 0).ids, *prompt(6, seed=1)]
    second = ask(history, 1)
    engine.update_weights()
    again = ask(history, 1)
    # a prompt and two of the three new tokens; the last one was never fed, so it counts as new in the next turn
    assert fed == [50 + 2, 1 + 6 + 2, 59 + 2]
    assert again.ids == second.ids


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: [*ids[:10], *prompt(12, seed=99)],  # another observation in the middle
        lambda ids: ids[:10],  # cut back
        lambda ids: list(ids),  # asked once more
        lambda ids: prompt(7, seed=98),  # nothing in common
        lambda ids: [ids[0]],
    ],
    ids=["diverges", "prefix", "same", "other", "one token"],
)
def test_a_prompt_that_leaves_the_cached_one_is_recomputed_from_there(change: Any) -> None:
    """A session's next prompt need not continue the last: an environment is reset, a history is edited."""
    engine = InProcessEngine(MODEL, CONTEXT)
    ids = prompt(20, seed=3)
    (first,) = together(engine.complete(ids, Sampling(8, NEVER), 0, session="s"))
    changed = change([*ids, *first.ids])
    bystander = prompt(31, seed=4)
    got = together(
        engine.complete(changed, Sampling(6, NEVER, 0.7), 1, session="s"),
        engine.complete(bystander, Sampling(6, NEVER, 0.7), 2, session="t"),
    )
    for prompt_, completion in ((changed, got[0]), (bystander, got[1])):
        assert_scored(MODEL, prompt_, completion, 0.7)
    # and what is cached now belongs to the changed prompt
    longer = [*changed, *got[0].ids, 8, 9]
    (third,) = together(engine.complete(longer, Sampling(4, NEVER), 3, session="s"))
    assert_scored(MODEL, longer, third, 1.0)


def test_after_an_update_and_a_reset_the_new_weights_are_used() -> None:
    """Keys and values of the old weights under the new ones would be a policy that never existed. That they do differ
    is checked too: without the reset the log-probs are off."""
    model = make_model()
    engine = InProcessEngine(model, CONTEXT)
    history = prompt(20, seed=6)
    (first,) = together(engine.complete(history, Sampling(4, NEVER), 0, session="s"))
    history += [*first.ids, 12]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    (stale,) = together(engine.complete(history, Sampling(4, NEVER), 1, session="s"))
    assert stale.logprobs != pytest.approx(teacher_forced(model, history, stale, 1.0), abs=1e-2)
    engine.update_weights()
    (fresh,) = together(engine.complete(history, Sampling(4, NEVER), 1, session="s"))
    assert_scored(model, history, fresh, 1.0)


def test_sampling_leaves_the_model_as_it_was() -> None:
    """The module trains the same object: left in eval mode, it would have no dropout for the rest of the run; with
    inference tensors or gradients left behind, the next backward pass would fail or be wrong."""
    model = make_model().train()
    together(InProcessEngine(model, CONTEXT).complete(prompt(4, seed=0), Sampling(3, NEVER), 0, session="s"))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    model(torch.tensor([prompt(4, seed=0)])).logits.sum().backward()
