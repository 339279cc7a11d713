"""If these fail, tokens are drawn from another distribution than the one their log-probs are of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from policy.lm.engine import Sampling
from policy.lm.engines.inprocess.engine import InProcessEngine, sample, truncated
from tests.support.asking import TOKENIZER, prompt, together
from tests.support.engines import CONTEXT, MODEL, NEVER, generate

# Probabilities .5 .25 .15 .1, in another order than that of the ids.
LOGITS = torch.tensor([0.15, 0.5, 0.1, 0.25]).log()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (2, 1.0, {1, 3}),
        (9, 1.0, {0, 1, 2, 3}),
        (0, 0.5, {1}),  # .5 reaches .5
        (0, 0.51, {1, 3}),
        (0, 0.75, {1, 3}),
        (0, 0.8, {0, 1, 3}),
        (0, 1e-9, {1}),  # the most likely token always stays
        (3, 0.85, {0, 1, 3}),  # of the three that stay, .5 / .9 and .25 / .9 are not yet .85
        (3, 0.8, {1, 3}),
    ],
)
def test_what_top_k_and_top_p_keep(top_k: int, top_p: float, kept: set[int]) -> None:
    """By hand. Log-probs are those of the renormalised rest, and every uniform number gives a kept token."""
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    rows = len(u)
    ids, logprobs = sample(
        LOGITS.expand(rows, 4), torch.ones(rows), u, torch.full((rows,), top_k), torch.full((rows,), top_p).double()
    )
    total = sum(LOGITS[k].exp() for k in kept)
    assert set(ids.tolist()) == kept
    for k in kept:
        p = float(LOGITS[k].exp() / total)
        assert (ids == k).float().mean() == pytest.approx(p, abs=2e-3)
        assert logprobs[ids == k].tolist() == pytest.approx([math.log(p)] * int((ids == k).sum()), abs=1e-5)


def test_truncation_is_per_row_and_leaves_greedy_rows_alone() -> None:
    """Rows of one step come from different requests. A greedy row's log-prob stays that at temperature 1."""
    rows = LOGITS.expand(3, 4)
    out = truncated(rows, torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, 0.6]))
    assert torch.isfinite(out).tolist() == [[True] * 4, [False, True, False, False], [False, True, False, True]]
    ids, logprobs = sample(
        rows[:1], torch.zeros(1), torch.zeros(1).double(), torch.tensor([1]), torch.tensor([0.1]).double()
    )
    assert ids.tolist() == [1]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)])


def test_an_engine_samples_within_the_nucleus_and_says_so() -> None:
    """Requests with and without truncation in one batch; top_k=1 is greedy with certainty."""
    engine = InProcessEngine(MODEL, CONTEXT)
    ids = prompt(9, seed=0)
    greedy = generate(MODEL, ids, 5, NEVER)
    top1, tiny, free = together(
        engine.complete(ids, Sampling(5, NEVER, top_k=1), 3),
        engine.complete(ids, Sampling(5, NEVER, top_p=1e-6), 4),
        engine.complete(ids, Sampling(5, NEVER), 5),
    )
    assert top1.ids == tiny.ids == greedy
    assert top1.logprobs == tiny.logprobs == (0.0,) * 5
    assert free.ids != greedy
    assert max(free.logprobs) < 0


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    """Wherever token borders lie. Later tokens are not part of the completion, and the next turn goes on from there."""
    engine = InProcessEngine(MODEL, CONTEXT, decode=lambda ids: TOKENIZER.decode(list(ids)))
    ids = prompt(7, seed=1)
    free = generate(MODEL, ids, 12, NEVER)
    text = TOKENIZER.decode(list(free[3:6]))
    (cut,) = together(engine.complete(ids, Sampling(12, NEVER, 0.0, stop_strings=("never in it", text)), 0, "s"))
    assert cut.stopped
    assert cut.ids == free[: len(cut.ids)]
    assert text in TOKENIZER.decode(list(cut.ids))
    assert text not in TOKENIZER.decode(list(cut.ids[:-1]))
    (rest,) = together(engine.complete([*ids, *cut.ids], Sampling(3, NEVER, 0.0), 0, "s"))
    assert rest.ids == free[len(cut.ids) : len(cut.ids) + 3]
    (none,) = together(engine.complete(ids, Sampling(4, NEVER, 0.0, stop_strings=("never in it",)), 0))
    assert (none.ids, none.stopped) == (free[:4], False)


def test_stop_strings_need_a_decoder() -> None:
    """Or they would silently never stop anything."""
    (refused,) = together(
        InProcessEngine(MODEL, CONTEXT).complete(prompt(3, seed=0), Sampling(2, NEVER, stop_strings=("x",)), 0)
    )
    assert isinstance(refused, ValueError)
    assert "decode" in str(refused)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_strings": ("",)}, "stop string"),
    ],
)
def test_numbers_out_of_range_are_named(wrong: dict[str, object], message: str) -> None:
    """They come from users' settings; sampled with, they would be NaN or no tokens at all."""
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_tokens": 3, "stop": 0, **wrong})  # type: ignore[arg-type]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


@pytest.mark.parametrize("vocab", [1, 4, 65, 3000])
def test_tokens_are_drawn_where_the_sum_passes_the_number(vocab: int) -> None:
    """A plain loop in fp64 over the cumulative sum: the first token that lifts it above the number is the one."""
    temperatures = [0.0, 0.3, 1.0, 2.5]
    uniforms = [0.0, 1 - 2**-53, *np.random.default_rng(vocab).random(30).tolist()]
    logits = noise(len(temperatures) * len(uniforms), vocab) * 4
    if vocab > 3:
        logits[:, [0, vocab // 2, vocab - 1]] = -torch.inf  # never drawn, not even by the first and the last number
    asked = torch.tensor([(t, u) for t in temperatures for u in uniforms], dtype=torch.float64)
    ids, logprobs = sample(logits, *asked.T.contiguous())
    for row, (temperature, uniform) in enumerate(asked.tolist()):
        weights = (logits[row].double() / (temperature or 1.0)).softmax(0).tolist()
        got = int(ids[row])
        if temperature == 0:
            assert got == weights.index(max(weights))
        else:
            below = sum(weights[:got])
            assert below - 1e-6 <= uniform <= below + weights[got] + 1e-6
        assert weights[got] > 0
        assert float(logprobs[row]) == pytest.approx(math.log(weights[got]), abs=1e-5)


def test_rows_are_drawn_as_often_as_they_are_likely_whatever_is_beside_them() -> None:
    """Of 20,000 numbers spread evenly, each token gets its share of them; alone, a row gets the same."""
    row = noise(1, 33) * 2
    numbers = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    ids, logprobs = sample(row.expand(20_000, 33), torch.ones(20_000), numbers)
    shares = torch.bincount(ids, minlength=33) / 20_000
    torch.testing.assert_close(shares, row[0].softmax(0), atol=1.1e-4, rtol=0)
    for at in (0, 777, 19_999):
        alone = sample(row, torch.ones(1), numbers[at : at + 1])
        assert (alone[0][0], alone[1][0]) == (ids[at], logprobs[at])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_has_no_log_prob_and_harms_no_other(bad: float, temperature: float) -> None:
    logits = noise(3, 70)
    asked = torch.full((3,), temperature), torch.full((3,), 0.4, dtype=torch.float64)
    expected = sample(logits, *asked)
    logits[1, 5] = bad
    ids, logprobs = sample(logits, *asked)
    assert (logprobs.isfinite() == torch.tensor([True, False, True])).all()
    assert 0 <= int(ids[1]) < 70
    for kept in (0, 2):
        assert (ids[kept], logprobs[kept]) == (expected[0][kept], expected[1][kept])
